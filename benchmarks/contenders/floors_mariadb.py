"""What the driver alone can do on MariaDB and MySQL."""

from __future__ import annotations

import time
import uuid

from benchmarks.contenders.base import Contender, database_entry
from benchmarks.servers import mysql_connection

POLL = 0.001  # seconds
TABLE = (
    "CREATE TABLE IF NOT EXISTS bench_slot (name varchar(100), slot integer, holder varchar(32),"
    " until datetime(6), PRIMARY KEY (name, slot)) ENGINE=InnoDB"
)
# LAST_INSERT_ID() brings the number back with the answer: UPDATE has no RETURNING here.
TAKE = (
    "UPDATE bench_slot SET holder = %s, until = NOW(6) + INTERVAL 30 SECOND, slot = LAST_INSERT_ID(slot)"
    " WHERE name = %s AND (until IS NULL OR until < NOW(6)) ORDER BY slot LIMIT 1"
)
FREE = "UPDATE bench_slot SET holder = NULL, until = NULL WHERE name = %s AND slot = %s AND holder = %s"
DEADLOCK = 1213


class Rows(Contender):
    """One row per slot with a lease of 30 s, one statement each way, looked at again after 1 ms."""

    key, database, kind = "floor: rows (MariaDB)", "mariadb", "rows"
    note = "polled at 1 ms"

    @classmethod
    def prepare(cls, name: str, slots: int, alias: str | None = None) -> None:
        connection = mysql_connection(database_entry(alias or cls.database))
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION sql_notes = 0")
            cursor.execute(TABLE)
            rows = [(name, slot) for slot in range(1, slots + 1)]
            cursor.executemany("INSERT INTO bench_slot (name, slot) VALUES (%s, %s)", rows)
        connection.close()

    def setup(self) -> None:
        self.connection = mysql_connection(database_entry(self.alias))
        self.cursor = self.connection.cursor()
        self.cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        self.holder = uuid.uuid4().hex

    def acquire(self) -> None:
        while not self._execute(TAKE, (self.holder, self.name)):
            time.sleep(POLL)
        self.slot = self.cursor.lastrowid

    def release(self) -> None:
        self._execute(FREE, (self.name, self.slot, self.holder))

    def _execute(self, statement: str, parameters: tuple[object, ...]) -> int:
        import MySQLdb

        while True:
            try:
                return self.cursor.execute(statement, parameters)
            except MySQLdb.OperationalError as error:
                if error.args[0] != DEADLOCK:
                    raise

    def teardown(self) -> None:
        self.connection.close()


class NamedLock(Contender):
    """A lock of the session by GET_LOCK()."""

    key, database, kind = "floor: GET_LOCK (MariaDB)", "mariadb", "lock"
    mutex_only = True

    def setup(self) -> None:
        self.connection = mysql_connection(database_entry(self.alias))
        self.cursor = self.connection.cursor()

    def acquire(self) -> None:
        self.cursor.execute("SELECT GET_LOCK(%s, 3600)", (self.name,))
        self.cursor.fetchall()

    def release(self) -> None:
        self.cursor.execute("SELECT RELEASE_LOCK(%s)", (self.name,))
        self.cursor.fetchall()

    def teardown(self) -> None:
        self.connection.close()


CONTENDERS = [Rows, NamedLock]
