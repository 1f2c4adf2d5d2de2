"""Transaction locks on SQLite: a write to the key row, as there is one writer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Final

from django.db import Error as DjangoDatabaseError
from django.db.transaction import TransactionManagementError

from django_sqlsem.core import testmode
from django_sqlsem.core.clocks import chance
from django_sqlsem.locks.transaction import key_rows
from django_sqlsem.locks.transaction.base import LockMark, TransactionLocking, Wanted, milliseconds, number_of

_BUSY: Final = (5, 6)  # SQLITE_BUSY, SQLITE_LOCKED
_BUSY_SNAPSHOT: Final = 517
_WRITE: Final = (
    f"INSERT INTO {key_rows.KEY_ROWS} (name_key, name, grants) VALUES (%s, %s, 1)"
    " ON CONFLICT (name_key) DO UPDATE SET grants = grants + 1 RETURNING grants"
)


class SQLiteLocking(TransactionLocking):
    """One statement makes the row and locks the file. A writer with another name is waited for, but is no holder."""

    def mark(self, wanted: Wanted) -> LockMark:
        """Note how often the lock was had by now. Another connection reads it: a read here would age the snapshot."""
        alias = self.connection.alias
        at = time.monotonic()
        if self.connection.is_in_memory_db() or testmode.in_testcase(alias):  # type: ignore[attr-defined]
            return LockMark(at)
        return LockMark(at, key_rows.grants(alias, wanted.resource))

    @contextlib.contextmanager
    def patience(self, timeout: float | None) -> Iterator[None]:
        """Set how long ``BEGIN IMMEDIATE`` waits, and put it back."""
        with self.connection.cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout")
            (before,) = cursor.fetchone()
            cursor.execute(f"PRAGMA busy_timeout = {milliseconds(timeout)}")
        try:
            yield
        finally:
            if self.connection.connection is not None:
                # The driver's own cursor: a transaction that can only be rolled back takes no more of Django's.
                self.connection.connection.execute(f"PRAGMA busy_timeout = {int(before)}")

    def is_busy(self, error: Exception) -> bool:
        """Whether somebody else writes."""
        number = number_of(error)
        return isinstance(number, int) and (number & 0xFF) in _BUSY

    def lock(self, wanted: Wanted, timeout: float | None, *, mark: LockMark | None = None) -> float | None:
        """Write to the row, again and again while another transaction writes anything."""
        started = time.monotonic()
        # A mark of before the transaction: its begin may have waited already.
        refused = mark is not None
        before = mark or self.mark(wanted)
        with self.errors(wanted), self.patience(0):
            while (count := self._write(wanted)) is None:
                refused = True
                if timeout is not None and time.monotonic() >= started + timeout:
                    return None
                time.sleep(chance.uniform(0.001, 0.005))
        # Whoever was waited for has committed under this name, or did something else.
        if not refused or before.grants == count - 1 or (before.grants is None and mark is not None):
            return 0.0
        return max(time.monotonic() - before.at, 1e-6)

    def _write(self, wanted: Wanted) -> int | None:
        try:
            with self.connection.cursor() as cursor:
                cursor.execute(_WRITE, [wanted.resource.key, wanted.resource.name])
                return int(cursor.fetchone()[0])
        except DjangoDatabaseError as error:
            if number_of(error) == _BUSY_SNAPSHOT:
                raise TransactionManagementError(
                    f"The transaction on {self.connection.alias!r} has read the database before it asked for the lock,"
                    " and others have written since: on SQLite it can only see what was there before. Take the lock"
                    " before anything is read, or set transaction_mode to IMMEDIATE in the OPTIONS of DATABASES."
                ) from error
            if self.is_busy(error):
                return None
            raise
