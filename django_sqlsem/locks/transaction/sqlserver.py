"""Transaction locks on SQL Server: application locks of the transaction, and ``TABLOCKX, HOLDLOCK`` for tables.

``sp_getapplock`` says by itself whether it had to wait: it returns 1. It makes no row, and takes its own timeout.
"""

from __future__ import annotations

import time
from typing import Final

from django.db.backends.utils import CursorWrapper

from django_sqlsem.database.dialects import LEVELS
from django_sqlsem.database.sqlserver import failure, lock_names
from django_sqlsem.exceptions import DeadlockError
from django_sqlsem.locks.transaction.base import (
    FRESH_LEVELS,
    LockMark,
    TransactionLocking,
    Wanted,
    deadlock,
    milliseconds,
    stale_reads,
)

#: Locks keep these from reading what is old: only snapshots do.
_ALSO_FRESH: Final = (*FRESH_LEVELS, "REPEATABLE READ", "SERIALIZABLE")

# All of it runs on the caller's connection, whose own statements are to be counted afterwards.

#: The level, in a batch that begins the transaction if the session has none yet: implicit transactions begin with a
#: statement on a table, and an application lock of the transaction needs one.
_BEGIN: Final = (
    "SET NOCOUNT ON; DECLARE @row char(32); SELECT TOP (1) @row = name_key FROM sqlsem_transaction_lock;"
    " SELECT transaction_isolation_level FROM sys.dm_exec_sessions WHERE session_id = @@SPID; SET NOCOUNT OFF;"
)
#: The resource, the mode, and the timeout in milliseconds (-1: for ever, 0: not at all).
GET: Final = (
    "SET NOCOUNT ON; DECLARE @rc int; EXEC @rc = sys.sp_getapplock @Resource = %s, @LockMode = %s,"
    " @LockOwner = 'Transaction', @LockTimeout = %s, @DbPrincipal = 'public'; SELECT @rc; SET NOCOUNT OFF;"
)
#: The table's name and hints, and the lock timeout in milliseconds: 0 is a grant, 1222 that it was refused. What is set
#: by a text of its own ends with that; the last statements are for a server on which it does not.
_TABLE: Final = (
    "SET NOCOUNT ON; DECLARE @before int = @@LOCK_TIMEOUT, @rc int = 0;"
    " EXEC sys.sp_executesql N'SET LOCK_TIMEOUT {timeout}; SET XACT_ABORT OFF; DECLARE @any int;"
    " BEGIN TRY SELECT TOP (1) @any = 1 FROM {table} WITH ({hints}); END TRY"
    " BEGIN CATCH SET @rc = ERROR_NUMBER(); END CATCH;', N'@rc int OUTPUT', @rc = @rc OUTPUT;"
    " DECLARE @restore nvarchar(60) = CONCAT(N'SET LOCK_TIMEOUT ', @before);"
    " IF @@LOCK_TIMEOUT <> @before EXEC (@restore); SELECT @rc; SET NOCOUNT OFF;"
)
_GRANTED: Final = (0, 1)
_TIMEOUT: Final = -1
_LOCK_TIMEOUT: Final = 1222
_DEADLOCK: Final = 1205


class ApplockLocking(TransactionLocking):
    """Application locks of the owner Transaction: the resource is the name itself, as in other programs."""

    keeps_rows = False

    def lock(self, wanted: Wanted, timeout: float | None, *, mark: LockMark | None = None) -> float | None:
        """Ask for the lock; the return code says the rest."""
        started = time.monotonic()
        with self.errors(wanted), self.connection.cursor() as cursor:
            cursor.execute(_BEGIN)
            level = LEVELS.get((cursor.fetchone() or (0,))[0], "READ COMMITTED")
            if level not in _ALSO_FRESH:
                raise stale_reads(level, self.connection.alias)
            if wanted.table:
                return self._lock_table(cursor, wanted, timeout, started)
            mode = "Shared" if wanted.shared else "Exclusive"
            cursor.execute(GET, [lock_names(wanted.resource.name).base, mode, milliseconds(timeout, no_limit=-1)])
            status = int(cursor.fetchone()[0])
        if status in _GRANTED:
            return max(time.monotonic() - started, 1e-6) if status else 0.0
        if status == _TIMEOUT:
            return None
        error = failure(self.connection.alias, status)
        if isinstance(error, DeadlockError):
            self.doom()
            raise deadlock(wanted)
        raise error

    def _lock_table(self, cursor: CursorWrapper, wanted: Wanted, timeout: float | None, started: float) -> float | None:
        """Try with no wait first: that is how waiting is known here.

        On the same cursor, as the rest of its last result keeps the connection from serving another.
        """
        hints = "TABLOCK, HOLDLOCK" if wanted.shared else "TABLOCKX, HOLDLOCK"
        table = wanted.table.replace("'", "''")
        for limit in dict.fromkeys((0, milliseconds(timeout, no_limit=-1))):
            cursor.execute(_TABLE.format(timeout=limit, table=table, hints=hints))
            status = int(cursor.fetchone()[0])
            if status == 0:
                return max(time.monotonic() - started, 1e-6) if limit else 0.0
            if status == _DEADLOCK:
                self.doom()
                raise deadlock(wanted)
            if status != _LOCK_TIMEOUT:
                raise failure(self.connection.alias, status)
        return None
