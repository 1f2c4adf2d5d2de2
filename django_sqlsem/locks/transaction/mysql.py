"""Transaction locks on MySQL and MariaDB: a key row of InnoDB, locked by a read.

In a cluster with several writers a row lock is known to its own node only. There the key row is written as well, so
that of two transactions on two nodes the cluster lets one commit, and rolls the other back with a deadlock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Final

from django.db import Error as DjangoDatabaseError
from django.db.backends.utils import CursorWrapper

from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.exceptions import BackendError
from django_sqlsem.locks.transaction import key_rows
from django_sqlsem.locks.transaction.base import (
    FRESH_LEVELS,
    LockMark,
    TransactionLocking,
    Wanted,
    milliseconds,
    number_of,
    stale_reads,
)
from django_sqlsem.locks.transaction.key_rows import KEY_ROWS, Attempt

_LEVELS: Final = ", ".join(f"'{level.replace(' ', '-')}'" for level in FRESH_LEVELS)
_LOCK: Final = f"SELECT {{hint}} 1 FROM {KEY_ROWS} WHERE name_key = %(key)s AND {{level}} IN ({_LEVELS}) {{strength}}"
#: Tells the other nodes of a cluster, at the commit.
_WRITE: Final = f"UPDATE {KEY_ROWS} SET grants = grants + 1 WHERE name_key = %(key)s"
_LOOK: Final = f"SELECT {{level}}, EXISTS (SELECT 1 FROM {KEY_ROWS} WHERE name_key = %(key)s)"

_LOCK_WAIT_TIMEOUT: Final = 1205
#: MariaDB's and MySQL's number for a statement that took longer than it was allowed to.
_STATEMENT_TIMEOUTS: Final = {1969, 3024}
#: About three years: MariaDB takes it for "without a limit". In seconds.
_MAX_WAIT: Final = 100_000_000


class MySQLLocking(TransactionLocking):
    """Waits under a limit of the whole statement, which knows fractions of a second.

    ``innodb_lock_wait_timeout`` knows none, and may roll the whole transaction back. The isolation level is part of
    the condition: the optimizer reads no row, and locks no gap, under a wrong one.
    """

    @property
    def _is_mariadb(self) -> bool:
        return bool(self.connection.mysql_is_mariadb)  # type: ignore[attr-defined]

    @property
    def _level(self) -> str:
        return "@@tx_isolation" if self._is_mariadb else "@@transaction_isolation"

    def _sql(self, wanted: Wanted, *, hint: str = "", skip: bool = False) -> str:
        shared = "LOCK IN SHARE MODE" if self._is_mariadb else "FOR SHARE"
        strength = (shared if wanted.shared else "FOR UPDATE") + (" SKIP LOCKED" if skip else "")
        return _LOCK.format(hint=hint, level=self._level, strength=strength)

    def lock(self, wanted: Wanted, timeout: float | None, *, mark: LockMark | None = None) -> float | None:
        """Lock the key row, also of a table; among several writers, write it: shared is as exclusive there."""
        with self.errors(wanted):
            among_writers = dialect_for(self.connection).among_writers(self.connection)
            if among_writers:
                wanted = dataclasses.replace(wanted, shared=False)
            waited = key_rows.lock(self.connection, wanted, timeout, try_now=self.try_now, wait=self.wait)
            if among_writers and waited is not None:
                with self.connection.cursor() as cursor:
                    cursor.execute(_WRITE, {"key": wanted.resource.key})
            return waited

    def try_now(self, wanted: Wanted) -> Attempt:
        """Pass over a row that is locked, or that is just being made: then look, and try once more."""
        with self.connection.cursor() as cursor:
            if self._read(cursor, self._sql(wanted, skip=True), wanted):
                return Attempt.GRANTED
            cursor.execute(_LOOK.format(level=self._level), {"key": wanted.resource.key})
            level, there = cursor.fetchone()
            if (level := level.replace("-", " ")) not in FRESH_LEVELS:
                raise stale_reads(level, self.connection.alias)
            if not there:
                return Attempt.MISSING
            # Its maker has committed by now, and no other can be at it.
            return Attempt.GRANTED if self._read(cursor, self._sql(wanted, skip=True), wanted) else Attempt.TAKEN

    def wait(self, wanted: Wanted, seconds: float | None) -> Attempt:
        """Wait for the row. After a timeout it is tried once more, as the grant may have come at that moment."""
        with self.connection.cursor() as cursor:
            try:
                wait = self._wait_on_mariadb if self._is_mariadb else self._wait_on_mysql
                there = wait(cursor, wanted, seconds)
                return Attempt.GRANTED if there else Attempt.MISSING
            except DjangoDatabaseError as error:
                number = number_of(error)
                if number == _LOCK_WAIT_TIMEOUT:
                    self._see_what_is_left(cursor, wanted, error)
                elif number not in _STATEMENT_TIMEOUTS:
                    raise
            return Attempt.GRANTED if self._read(cursor, self._sql(wanted, skip=True), wanted) else Attempt.TAKEN

    def _wait_on_mariadb(self, cursor: CursorWrapper, wanted: Wanted, seconds: float | None) -> bool:
        # Both are in force for this statement only, whatever becomes of it.
        limit = "0" if seconds is None else f"{max(seconds, 0.001):.6f}"
        settings = f"max_statement_time = {limit}, innodb_lock_wait_timeout = {_longer(seconds)}"
        return self._read(cursor, f"SET STATEMENT {settings} FOR {self._sql(wanted)}", wanted)

    def _wait_on_mysql(self, cursor: CursorWrapper, wanted: Wanted, seconds: float | None) -> bool:
        limit = milliseconds(seconds, least=1, no_limit=0)
        with _lock_wait_timeout(cursor, _longer(seconds)):
            return self._read(cursor, self._sql(wanted, hint=f"/*+ MAX_EXECUTION_TIME({limit}) */"), wanted)

    def _read(self, cursor: CursorWrapper, sql: str, wanted: Wanted) -> bool:
        cursor.execute(sql, {"key": wanted.resource.key})
        return cursor.fetchone() is not None

    def _see_what_is_left(self, cursor: CursorWrapper, wanted: Wanted, error: Exception) -> None:
        """Say it if the server was told to roll whole transactions back when a lock takes too long."""
        cursor.execute("SELECT @@innodb_rollback_on_timeout")
        if cursor.fetchone()[0]:
            self.doom()
            raise BackendError(
                f"Waiting for {wanted.resource.name!r} took too long, and the server has rolled the whole transaction"
                " back, as its innodb_rollback_on_timeout is on: let this exception leave the outermost atomic()."
            ) from error


@contextlib.contextmanager
def _lock_wait_timeout(cursor: CursorWrapper, seconds: int) -> Iterator[None]:
    cursor.execute("SELECT @@SESSION.innodb_lock_wait_timeout")
    (before,) = cursor.fetchone()
    cursor.execute("SET SESSION innodb_lock_wait_timeout = %s", [seconds])
    try:
        yield
    finally:
        cursor.execute("SET SESSION innodb_lock_wait_timeout = %s", [before])


def _longer(seconds: float | None) -> int:
    """Return a lock's limit that the statement's own comes before, in whole seconds."""
    return _MAX_WAIT if seconds is None else min(math.ceil(seconds) + 5, _MAX_WAIT)
