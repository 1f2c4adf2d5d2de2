"""What the driver alone can do on SQLite."""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Sequence
from typing import Any

from benchmarks.contenders.base import Contender, database_entry

POLL = 0.001  # seconds
TABLE = (
    "CREATE TABLE IF NOT EXISTS bench_slot (name text, slot integer, holder text, until real,"
    " PRIMARY KEY (name, slot)) WITHOUT ROWID"
)
TAKE = (
    "UPDATE bench_slot SET holder = ?, until = ? WHERE name = ? AND slot = ("
    "SELECT slot FROM bench_slot WHERE name = ? AND (until IS NULL OR until < ?) LIMIT 1) RETURNING slot"
)
FREE = "UPDATE bench_slot SET holder = NULL, until = NULL WHERE name = ? AND slot = ? AND holder = ? RETURNING slot"


class Rows(Contender):
    """One row per slot with a lease of 30 s, one statement each way, looked at again after 1 ms."""

    key, database, kind = "floor: rows (SQLite)", "sqlite", "rows"
    note = "polled at 1 ms"

    @classmethod
    def prepare(cls, name: str, slots: int, alias: str | None = None) -> None:
        contender = cls(name, slots, alias)
        contender.setup()
        contender.execute(TABLE)
        for slot in range(1, slots + 1):
            contender.execute("INSERT INTO bench_slot (name, slot) VALUES (?, ?)", (name, slot))
        contender.teardown()

    def setup(self) -> None:
        path = database_entry(self.alias)["NAME"]
        self.connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        self.execute("PRAGMA journal_mode = WAL")
        self.execute("PRAGMA synchronous = FULL")
        self.holder = uuid.uuid4().hex

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Run a statement in autocommit, again after 1 ms as long as somebody else writes."""
        while True:
            try:
                return self.connection.execute(statement, parameters).fetchall()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
            time.sleep(POLL)

    def acquire(self) -> None:
        while True:
            now = time.monotonic()
            rows = self.execute(TAKE, (self.holder, now + 30, self.name, self.name, now))
            if rows:
                self.slot = rows[0][0]
                return
            time.sleep(POLL)

    def release(self) -> None:
        self.execute(FREE, (self.name, self.slot, self.holder))

    def teardown(self) -> None:
        self.connection.close()


CONTENDERS = [Rows]
