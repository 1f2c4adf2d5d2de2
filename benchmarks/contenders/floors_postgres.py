"""What the driver alone can do on PostgreSQL."""

from __future__ import annotations

import time
import uuid
import zlib
from typing import Any

from benchmarks.contenders.base import Contender, database_entry

POLL = 0.001  # seconds
TABLE = (
    "CREATE TABLE IF NOT EXISTS bench_slot (name varchar(100), slot integer, holder varchar(32),"
    " until timestamptz, PRIMARY KEY (name, slot))"
)
TAKE = (
    "UPDATE bench_slot SET holder = %s, until = clock_timestamp() + interval '30 s' WHERE name = %s AND slot = ("
    "SELECT slot FROM bench_slot WHERE name = %s AND (until IS NULL OR until < clock_timestamp())"
    " LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING slot"
)
FREE = "UPDATE bench_slot SET holder = NULL, until = NULL WHERE name = %s AND slot = %s AND holder = %s"


def connect(alias: str) -> Any:
    """Open a connection in autocommit."""
    import psycopg

    entry = database_entry(alias)
    names = {"HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password", "NAME": "dbname"}
    return psycopg.connect(**{to: entry[name] for name, to in names.items() if entry.get(name)}, autocommit=True)


class Rows(Contender):
    """One row per slot with a lease of 30 s, one prepared statement each way, looked at again after 1 ms."""

    key, database, kind, modules = "floor: rows (PostgreSQL)", "postgres", "rows", ("psycopg",)
    note = "polled at 1 ms"

    @classmethod
    def prepare(cls, name: str, slots: int, alias: str | None = None) -> None:
        with connect(alias or cls.database) as connection:
            connection.execute(TABLE)
            with connection.cursor() as cursor:
                rows = [(name, slot) for slot in range(1, slots + 1)]
                cursor.executemany("INSERT INTO bench_slot (name, slot) VALUES (%s, %s)", rows)

    def setup(self) -> None:
        self.connection = connect(self.alias)
        self.holder = uuid.uuid4().hex

    def acquire(self) -> None:
        while True:
            row = self.connection.execute(TAKE, (self.holder, self.name, self.name), prepare=True).fetchone()
            if row:
                self.slot = row[0]
                return
            time.sleep(POLL)

    def release(self) -> None:
        self.connection.execute(FREE, (self.name, self.slot, self.holder), prepare=True)

    def teardown(self) -> None:
        self.connection.close()


class Advisory(Contender):
    """An advisory lock of the session."""

    key, database, kind, modules = "floor: advisory lock (PostgreSQL)", "postgres", "lock", ("psycopg",)
    mutex_only = True

    def setup(self) -> None:
        self.connection = connect(self.alias)
        self.number = (zlib.crc32(self.name.encode()),)

    def acquire(self) -> None:
        self.connection.execute("SELECT pg_advisory_lock(%s)", self.number, prepare=True)

    def release(self) -> None:
        self.connection.execute("SELECT pg_advisory_unlock(%s)", self.number, prepare=True)

    def teardown(self) -> None:
        self.connection.close()


CONTENDERS = [Rows, Advisory]
