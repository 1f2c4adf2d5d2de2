"""What the drivers alone can do on SQL Server, and how others wait there for one of several locks."""

from __future__ import annotations

import contextlib
from typing import Any

from benchmarks.contenders.base import Contender
from tests.backends.applock import counting_semaphore
from tests.support import tds

_HEAD = "SET NOCOUNT ON;\n"


def get(resource: str, mode: str, timeout: str) -> str:
    """Return the call that takes a lock, as this package's procedures make it."""
    return f"EXEC @rc = sys.sp_getapplock {resource}, '{mode}', 'Session', {timeout}, 'public';\n"


def give(resource: str) -> str:
    """Return the call that gives it back."""
    return f"EXEC @rc = sys.sp_releaseapplock {resource}, 'Session', 'public';\n"


class Raw(Contender):
    """A driver's connection with a cursor for each text, which the driver prepares once."""

    database = "mssql"
    batches = 0

    def setup(self) -> None:
        self.connection = tds.raw_connection(self.alias)
        self.cursors: dict[str, Any] = {}

    def run(self, text: str, *parameters: object) -> int:
        """Send one batch and return the number that it selects."""
        cursor = self.cursors.get(text)
        if cursor is None:
            cursor = self.cursors[text] = self.connection.cursor()
        self.batches += 1
        cursor.execute(text, parameters)
        return int(tds.rows(cursor)[0][0])

    def teardown(self) -> None:
        self.connection.close()


class AppLock(Raw):
    """One application lock of the session."""

    key, kind, mutex_only = "floor: applock (SQL Server)", "lock", True
    _DECLARE = f"{_HEAD}DECLARE @resource nvarchar(255) = ?, @rc int;\n"
    TAKE = f"{_DECLARE}{get('@resource', 'Exclusive', '-1')}SELECT @rc;"
    FREE = f"{_DECLARE}{give('@resource')}SELECT @rc;"

    def acquire(self) -> None:
        if self.run(self.TAKE, self.name) < 0:
            raise RuntimeError(f"{self.key} was refused {self.name!r}")

    def release(self) -> None:
        self.run(self.FREE, self.name)


class TwoLocks(Raw):
    """What a holder has under the procedures that every DBA knows, in two batches: the name, and the first slot."""

    key, kind, mutex_only = "floor: two applocks (SQL Server)", "alternative", True
    note = "IntentExclusive on the name, Exclusive on its slot"
    _DECLARE = f"{_HEAD}DECLARE @base nvarchar(255) = ?, @resource nvarchar(255) = ?, @rc int;\n"
    TAKE = f"{_DECLARE}{get('@base', 'IntentExclusive', '-1')}{get('@resource', 'Exclusive', '-1')}SELECT @rc;"
    FREE = f"{_DECLARE}{give('@resource')}{give('@base')}SELECT @rc;"

    def acquire(self) -> None:
        if self.run(self.TAKE, self.name, f"1-{self.name}") < 0:
            raise RuntimeError(f"{self.key} was refused {self.name!r}")

    def release(self) -> None:
        self.run(self.FREE, self.name, f"1-{self.name}")


class OnePoller(Raw):
    """How the .NET library DistributedLock 2.8 waits for a semaphore, in one batch.

    Whoever has to wait queues on a lock, and its holder alone looks: it waits 64 ms for one slot, chosen at random,
    and not at all for the others. Its marker tables in tempdb are left out, which tell a newcomer whether others
    wait: here it asks whether that lock is taken.
    """

    key, kind = "one poller, 64 ms (SQL Server)", "alternative"
    note = "the algorithm of DistributedLock 2.8 without its marker tables"
    TAKE = f"""{_HEAD}
DECLARE @name nvarchar(200) = ?, @n int = ?, @queue nvarchar(255), @resource nvarchar(255), @rc int, @slot int = 0,
    @first int = 0, @i int = 0, @ms int = 0, @queued int = 0;
SET @queue = CONCAT(N'poll:', @name);
IF APPLOCK_TEST(N'public', @queue, N'Exclusive', N'Session') = 0
BEGIN
    {get("@queue", "Exclusive", "-1")}
    SET @queued = 1;
END;
WHILE @slot = 0
BEGIN
    SELECT @i = 0, @first = CAST(RAND() * @n AS int);
    WHILE @i < @n AND @slot = 0
    BEGIN
        SET @resource = CONCAT(N'slot:', (@first + @i) % @n, N':', @name);
        SET @ms = CASE WHEN @queued = 1 AND @i = 0 THEN 64 ELSE 0 END;
        {get("@resource", "Exclusive", "@ms")}
        IF @rc >= 0 SET @slot = (@first + @i) % @n + 1;
        SET @i = @i + 1;
    END;
    IF @slot = 0 AND @queued = 0
    BEGIN
        {get("@queue", "Exclusive", "-1")}
        SET @queued = 1;
    END;
END;
IF @queued = 1
BEGIN
    {give("@queue")}
END;
SELECT @slot;"""
    FREE = f"{_HEAD}DECLARE @resource nvarchar(255) = ?, @rc int;\n{give('@resource')}SELECT @rc;"

    def acquire(self) -> None:
        self.slot = self.run(self.TAKE, self.name, self.slots)

    def release(self) -> None:
        self.run(self.FREE, f"slot:{self.slot - 1}:{self.name}")


class Spin(Contender):
    """The procedures of "Counting Semaphore": whoever waits looks at every slot, again and again."""

    key, database, kind = "procedures that spin, 1 ms (SQL Server)", "mssql", "alternative"
    note = "WAITFOR for 1 ms between looks, or a lock request that is refused after 1 ms where there is no WAITFOR"
    batches = 0

    @classmethod
    def prepare(cls, name: str, slots: int, alias: str | None = None) -> None:
        counting_semaphore.create(alias or cls.database)

    def setup(self) -> None:
        self.caller = counting_semaphore.Caller(self.alias)

    def acquire(self) -> None:
        self.batches += 1
        self.slot = self.caller.acquire(self.name, self.slots)

    def release(self) -> None:
        self.batches += 1
        self.caller.release(self.name, self.slot)

    def teardown(self) -> None:
        with contextlib.suppress(Exception):
            self.caller.close()


CONTENDERS = [AppLock, TwoLocks, OnePoller, Spin]
