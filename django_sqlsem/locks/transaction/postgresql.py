"""Transaction locks on PostgreSQL: ``FOR UPDATE`` and ``FOR SHARE`` of a key row, and ``LOCK TABLE``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Final

from django.db import Error as DjangoDatabaseError
from django.db import transaction
from django.db.backends.utils import CursorWrapper

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

_LEVELS: Final = ", ".join(f"'{level.lower()}'" for level in FRESH_LEVELS)
_ISOLATION: Final = "current_setting('transaction_isolation')"
_LOCK: Final = f"SELECT 1 FROM {KEY_ROWS} WHERE name_key = %(key)s"
#: One round trip: the level, whether the row is there, and the lock if it is free. A wrong level locks nothing.
_TRY: Final = (
    f"SELECT {_ISOLATION}, EXISTS ({_LOCK}), ({_LOCK} AND {_ISOLATION} IN ({_LEVELS}) {{strength}} SKIP LOCKED)"
)
_STRENGTH: Final = {True: "FOR SHARE", False: "FOR UPDATE"}
_NOT_AVAILABLE: Final = "55P03"
_CANCELED: Final = "57014"


class PostgreSQLLocking(TransactionLocking):
    """Waits under a ``statement_timeout`` of the transaction's own, inside a savepoint."""

    def lock(self, wanted: Wanted, timeout: float | None, *, mark: LockMark | None = None) -> float | None:
        """Lock the key row, or the table."""
        with self.errors(wanted):
            return key_rows.lock(self.connection, wanted, timeout, try_now=self.try_now, wait=self.wait)

    def try_now(self, wanted: Wanted) -> Attempt:
        """Pass over a row that is locked: no error, so no savepoint is needed."""
        if wanted.table:
            return self._try_table(wanted)
        with self.connection.cursor() as cursor:
            cursor.execute(_TRY.format(strength=_STRENGTH[wanted.shared]), {"key": wanted.resource.key})
            level, there, locked = cursor.fetchone()
        self._check(level)
        if locked:
            return Attempt.GRANTED
        return Attempt.TAKEN if there else Attempt.MISSING

    def _try_table(self, wanted: Wanted) -> Attempt:
        with self.connection.cursor() as cursor:
            cursor.execute(f"SELECT {_ISOLATION}")
            self._check(cursor.fetchone()[0])
        try:
            with self._savepoint() as cursor:
                cursor.execute(f"{_lock_table(wanted)} NOWAIT")
        except DjangoDatabaseError as error:
            if number_of(error) == _NOT_AVAILABLE:
                return Attempt.TAKEN
            raise
        return Attempt.GRANTED

    def wait(self, wanted: Wanted, seconds: float | None) -> Attempt:
        """Wait for all that stands in between, as ``lock_timeout`` would count each of those anew."""
        limit = milliseconds(seconds, least=1, no_limit=0)
        started = time.monotonic()
        try:
            with self._savepoint() as cursor, _limits(cursor, limit):
                started = time.monotonic()
                if wanted.table:
                    cursor.execute(_lock_table(wanted))
                    return Attempt.GRANTED
                cursor.execute(f"{_LOCK} {_STRENGTH[wanted.shared]}", {"key": wanted.resource.key})
                return Attempt.GRANTED if cursor.fetchone() else Attempt.MISSING
        except DjangoDatabaseError as error:
            # pg_cancel_backend() has the same number, but not this time.
            if number_of(error) == _CANCELED and limit and time.monotonic() - started >= 0.9 * limit / 1000:
                return Attempt.TAKEN
            raise

    def _check(self, level: str) -> None:
        if level.upper() not in FRESH_LEVELS:
            raise stale_reads(level.upper(), self.connection.alias)

    @contextlib.contextmanager
    def _savepoint(self) -> Iterator[CursorWrapper]:
        """Run statements that may fail: the caller's transaction goes on, its settings as they were."""
        with transaction.atomic(using=self.connection.alias), self.connection.cursor() as cursor:
            yield cursor


@contextlib.contextmanager
def _limits(cursor: CursorWrapper, limit: int) -> Iterator[None]:
    """Have one statement end after this many milliseconds; an error leaves the settings to the savepoint."""
    cursor.execute("SELECT current_setting('statement_timeout'), current_setting('lock_timeout')")
    before = cursor.fetchone()
    change = "SELECT set_config('statement_timeout', %s, true), set_config('lock_timeout', %s, true)"
    cursor.execute(change, [str(limit), "0"])
    yield
    cursor.execute(change, before)


def _lock_table(wanted: Wanted) -> str:
    return f"LOCK TABLE {wanted.table} IN {'SHARE' if wanted.shared else 'EXCLUSIVE'} MODE"
