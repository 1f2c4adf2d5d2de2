"""Plain sessions of a TDS server, without the library: application locks by the server's own procedures."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import pytest

from tests.support import databases, tds
from tests.support.children import listen, say
from tests.support.threads import wait_until

#: The alias whose server is tested.
ALIAS = "mssql"
#: How long a lock request waits that is bound to be granted, in milliseconds: a broken test ends.
LONG = 20_000

_GET = """
SET NOCOUNT ON;
DECLARE @resource nvarchar(400) = ?, @mode varchar(32) = ?, @owner varchar(32) = ?, @ms int = ?, @rc int;
EXEC @rc = sys.sp_getapplock @Resource = @resource, @LockMode = @mode, @LockOwner = @owner, @LockTimeout = @ms,
    @DbPrincipal = 'public';
SELECT @rc;
"""
_RELEASE = """
SET NOCOUNT ON;
DECLARE @resource nvarchar(400) = ?, @owner varchar(32) = ?, @rc int;
EXEC @rc = sys.sp_releaseapplock @Resource = @resource, @LockOwner = @owner, @DbPrincipal = 'public';
SELECT @rc;
"""
_CAUGHT = """
SET NOCOUNT ON;
BEGIN TRY
    {}
    SELECT 0, N'';
END TRY
BEGIN CATCH
    SELECT ERROR_NUMBER(), ERROR_MESSAGE();
END CATCH;
"""


class Session:
    """A session in the test database, or in another; ``settings`` change the alias's own (``USER``, ``NAME``)."""

    def __init__(self, **settings: Any) -> None:
        self.raw = tds.raw_connection(ALIAS, **settings)
        self.spid: int = self.value("SELECT @@SPID")

    def rows(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a batch and return the rows of its first result that has any columns."""
        with contextlib.closing(self.raw.cursor()) as self.cursor:
            self.cursor.execute(sql, *([parameters] if parameters else []))
            return tds.rows(self.cursor)

    def value(self, sql: str, *parameters: Any) -> Any:
        """Run a batch and return the first column of its first row."""
        return self.rows(sql, *parameters)[0][0]

    def do(self, sql: str, *parameters: Any) -> None:
        """Run a batch."""
        self.rows(sql, *parameters)

    def get(self, resource: str, mode: str = "Exclusive", *, ms: int = 0, owner: str = "Session") -> int:
        """Ask for an application lock, for so many milliseconds, and return the return code."""
        return int(self.value(_GET, resource, mode, owner, ms))

    def release(self, resource: str, *, owner: str = "Session") -> int:
        """Release it once, and return the return code."""
        return int(self.value(_RELEASE, resource, owner))

    def mode(self, resource: str, *, owner: str = "Session") -> str:
        """Return ``APPLOCK_MODE``: what this session has."""
        return str(self.value("SELECT APPLOCK_MODE(N'public', ?, ?)", resource, owner))

    def test(self, resource: str, mode: str = "Exclusive") -> int:
        """Return ``APPLOCK_TEST``: could this session get it at once?"""
        return int(self.value("SELECT APPLOCK_TEST(N'public', ?, ?, N'Session')", resource, mode))

    def caught(self, sql: str) -> int:
        """Run statements inside TRY, and return the number of the error that CATCH saw, or 0."""
        return int(self.rows(_CAUGHT.format(sql))[-1][0])

    @property
    def error_class(self) -> type[Exception]:
        """The base of the driver's errors."""
        error: type[Exception] = importlib.import_module(type(self.raw).__module__.split(".")[0]).Error
        return error

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(Exception):  # it may have been killed
            self.raw.close()


class Request:
    """A lock request that waits, in a thread. ``result`` waits for its return code."""

    def __init__(self, session: Session, resource: str, mode: str = "Exclusive", *, ms: int = LONG) -> None:
        self.session = session
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(resource, mode, ms), daemon=True)
        self._thread.start()

    def queued(self, observer: Session) -> Self:
        """Wait until the server works on it, as ``observer`` sees it; where it then is but a moment from the queue."""
        wait_until(lambda: works(self.session.spid, observer))
        self._thread.join(0.1)
        assert not self.done, f"it does not wait: {self._outcome}"
        return self

    @property
    def done(self) -> bool:
        """Whether it has been answered."""
        return not self._thread.is_alive()

    def result(self, timeout: float = LONG / 1000 + 5) -> int:
        """Return the return code, or raise the driver's error."""
        self._thread.join(timeout)
        assert self.done, f"no answer within {timeout} s"
        if isinstance(self._outcome[0], Exception):
            raise self._outcome[0]
        return int(self._outcome[0])

    def _run(self, resource: str, mode: str, ms: int) -> None:
        try:
            self._outcome.append(self.session.get(resource, mode, ms=ms))
        except Exception as error:
            self._outcome.append(error)


def hold(resource: str, ms: int = 0, idle: float = 0.0) -> None:
    """In a child process: say the session's id, ask for a lock, say the return code, and listen.

    ``idle``: for so many seconds the session does nothing before it asks.
    """
    session = Session()
    time.sleep(idle)
    say(f"session {session.spid}")
    say(f"got {session.get(resource, ms=ms)}")
    listen()


def works(spid: int, observer: Session) -> bool:
    """Whether a session has a request that is not done, as ``observer`` sees it. SQL Server calls that running."""
    status = observer.value("SELECT status FROM sys.dm_exec_sessions WHERE session_id = ?", spid)
    return str(status).strip().lower() in ("running", "active")


def is_there(spid: int, observer: Session) -> bool:
    """Whether a session has not ended, as ``observer`` sees it."""
    return bool(observer.value("SELECT COUNT(*) FROM sys.dm_exec_sessions WHERE session_id = ?", spid))


def free(resource: str, observer: Session) -> Callable[[], bool]:
    """Return a condition for ``wait_until``: that ``observer`` could get the lock."""
    return lambda: observer.test(resource) == 1


def skip_unless_covered() -> None:
    """Skip the module that calls it when there is no server to test."""
    if ALIAS not in databases.covered():
        pytest.skip("no mssql: SQLSEM_TEST_MSSQL_URL names no server that answers", allow_module_level=True)
