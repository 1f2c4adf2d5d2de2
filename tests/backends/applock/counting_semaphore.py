"""The procedures of "Counting Semaphore", of the series "Locking and Blocking", as every DBA may have them.

They take part in our semaphores without a place in line. While nothing is free they look again every millisecond:
that is a ``WAITFOR`` where the server has it, else a lock request that is bound to be refused after as long.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

from tests.support import tds

_WAITFOR: Final = "WAITFOR DELAY '00:00:00.001'"
#: A lock that another session of the same program holds, named after the session that pauses.
_PAUSE: Final = (
    "SET @pause = CONCAT('bench-pause-', @@SPID);"
    " EXEC @ret = sp_getapplock @Resource = @pause, @LockMode = 'Exclusive', @LockOwner = 'Session', @LockTimeout = 1"
)
_ACQUIRE: Final = """
CREATE PROCEDURE AcquireSemaphore (@Resource nvarchar(200), @TotalCount int = 3)
AS
BEGIN
    DECLARE @ResourceInternal nvarchar(255), @pause nvarchar(255);
    DECLARE @i int = 1, @ret int = -1;
    IF (APPLOCK_MODE('public', @Resource, 'session') = 'IntentExclusive')
    BEGIN
        RAISERROR('You have acquired semaphore', 16, 1);
        RETURN -1;
    END
    EXEC sp_getapplock @Resource = @Resource, @LockMode = 'IntentExclusive', @LockOwner = 'Session', @LockTimeout = -1;
    WHILE 1 = 1
    BEGIN
        SELECT @i = 1;
        WHILE @i <= @TotalCount
        BEGIN
            SELECT @ResourceInternal = CAST(@i AS varchar(10)) + '-' + @Resource;
            EXEC @ret = sp_getapplock @Resource = @ResourceInternal, @LockMode = 'Exclusive', @LockOwner = 'Session',
                @LockTimeout = 0;
            IF @ret >= 0
                RETURN @i;
            SELECT @i = @i + 1;
        END
        {pause};
    END
END
"""
_RELEASE: Final = """
CREATE PROCEDURE ReleaseSemaphore (@Resource nvarchar(200), @Slot int)
AS
BEGIN
    DECLARE @ResourceInternal nvarchar(255) = CAST(@Slot AS varchar(10)) + '-' + @Resource;
    EXEC sp_releaseapplock @ResourceInternal, 'Session';
    EXEC sp_releaseapplock @Resource, 'Session';
END
"""
_CALL: Final = """
SET NOCOUNT ON;
DECLARE @name nvarchar(200) = ?, @slots int = ?, @slot int;
EXEC @slot = AcquireSemaphore @name, @slots;
SELECT @slot;
"""
_GIVE: Final = "SET NOCOUNT ON; DECLARE @name nvarchar(200) = ?, @slot int = ?; EXEC ReleaseSemaphore @name, @slot;"
_HOLD: Final = (
    "SET NOCOUNT ON; DECLARE @pause nvarchar(255) = ?; EXEC sp_getapplock @Resource = @pause, @LockMode = 'Exclusive',"
    " @LockOwner = 'Session', @LockTimeout = 0;"
)


def has_waitfor(raw: Any) -> bool:
    """Whether the server of a driver's connection knows ``WAITFOR``."""
    try:
        raw.cursor().execute(_WAITFOR)
    except Exception:  # of the driver, whatever it is
        return False
    return True


def create(alias: str) -> None:
    """Create the procedures in the database of an alias, unless they are there."""
    with contextlib.closing(tds.raw_connection(alias)) as raw:
        cursor = raw.cursor()
        for name, text in (
            ("AcquireSemaphore", _ACQUIRE.format(pause=_WAITFOR if has_waitfor(raw) else _PAUSE)),
            ("ReleaseSemaphore", _RELEASE),
        ):
            if cursor.execute("SELECT OBJECT_ID(?)", (name,)).fetchone()[0] is None:
                cursor.execute(text)


class Caller:
    """A plain session that calls the procedures, and a second one that holds what the first one pauses on."""

    def __init__(self, alias: str) -> None:
        self._raw = tds.raw_connection(alias)
        self._acquire, self._release = self._raw.cursor(), self._raw.cursor()
        #: Its id in the server.
        self.session_id = int(self._raw.cursor().execute("SELECT @@SPID").fetchone()[0])
        self._beside = None
        if not has_waitfor(self._raw):
            self._beside = tds.raw_connection(alias)
            self._beside.cursor().execute(_HOLD, (f"bench-pause-{self.session_id}",))

    def acquire(self, name: str, slots: int) -> int:
        """Wait for a slot, and return its number."""
        self._acquire.execute(_CALL, (name, slots))
        return int(tds.rows(self._acquire)[0][0])

    def release(self, name: str, slot: int) -> None:
        """Give it back."""
        self._release.execute(_GIVE, (name, slot))
        while self._release.nextset():
            pass

    def close(self) -> None:
        """End both sessions."""
        for raw in filter(None, (self._raw, self._beside)):
            raw.close()
