"""What a driver's error means, what it becomes for callers, and how work is repeated that may pass the next time."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import re
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from django.db import connections
from django.db.utils import Error, InterfaceError, OperationalError

from django_sqlsem.core.clocks import boot_now, chance
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator


logger = logging.getLogger("django_sqlsem")

Parameters = ParamSpec("Parameters")
T = TypeVar("T")

#: How long a statement is repeated while the database answers "locked" or "deadlock", in seconds.
LOCKED_PATIENCE: Final = 10.0

#: Lost a deadlock or a lock wait, or found the database locked: nothing was done, so it may be done again.
_LOCKED_SQLSTATE: Final = "55P03"
_LOCKED_MYSQL: Final = 1205
_TRANSIENT_SQLSTATES: Final = {"40001", "40P01", _LOCKED_SQLSTATE}
_TRANSIENT_MYSQL: Final = {_LOCKED_MYSQL, 1213}
_TRANSIENT_SQLITE: Final = {5, 6}  # SQLITE_BUSY, SQLITE_LOCKED
_TRANSIENT_ORACLE: Final = {60, 8177}
#: Its drivers tell its numbers in the text alone, and mssql-python not even there: a deadlock's victim, a lock that was
#: not to be had in time, an update conflict under snapshot isolation.
_DEADLOCK_SQL_SERVER: Final = re.compile(r"\(1205\)|was deadlocked")
_TRANSIENT_SQL_SERVER: Final = re.compile(
    rf"{_DEADLOCK_SQL_SERVER.pattern}|Serialization failure|\((?:1222|3960)\)|Lock request time out"
    r"|due to lock timeout|Snapshot isolation transaction aborted"
)

#: A statement's limit.
_TIMEOUT_SQLSTATE: Final = "57014"
_TIMEOUT_MYSQL: Final = (1969, 3024)
#: A statement's limit; HYT01 is a connection's, where no answer came at all.
_TIMEOUT_SQL_SERVER: Final = re.compile(r"HYT00(?!.*Login timeout)|Driver Error: Timeout expired")

_READ_ONLY_SQLSTATE: Final = "25006"
_READ_ONLY_MYSQL: Final = {1290, 1792, 1836}
_READ_ONLY_SQLITE: Final = 8  # SQLITE_READONLY

_DISCONNECT_MYSQL: Final = {0, 1053, 1927, 2006, 2013, 2014, 2055, 4031}
_DISCONNECT_SQLSTATES: Final = ("08", "57P")
#: FreeTDS: reading or writing failed, the server has closed the connection, it is dead (sybdb.h).
FREETDS_GONE: Final = (20004, 20006, 20017, 20047)
#: The same in its text, and what it says without a number of a connection that was dead before.
_DISCONNECT_FREETDS: Final = (
    *(f"({number})" for number in FREETDS_GONE),
    "Could not change transaction status (0)",
    "Unknown error (0)",
)

#: A node of a cluster that takes no statements now, as it has lost the others or is about to join them.
_NOT_READY_MYSQL: Final = 1047
# The database starts, stops or recovers, too many are connected, or nobody answers.
_AWAY_SQLSTATES: Final = ("08", "57P01", "57P02", "57P03", "53300")
_AWAY_MYSQL: Final = {1040, 1203, 2002, 2003, _NOT_READY_MYSQL}
#: What PostgreSQL's library says, without a code, to a login that no waiting would help.
_SHUT_OUT: Final = re.compile(
    r"authentication failed|no password supplied|no pg_hba\.conf entry|does not exist|permission denied"
    r"|not permitted|could not translate host name|certificate"
)

#: How long is waited between two tries while the database is away: first, by how much more each time, and at the most.
_FIRST_PAUSE: Final = 0.1
_GROWTH: Final = 1.5
_LONGEST_PAUSE: Final = 1.5


def is_transient(error: Exception) -> bool:
    """Whether the database refused a statement, without doing it, for a reason that passes by itself."""
    cause: Any = error.__cause__ or error
    if sqlstate(cause) in _TRANSIENT_SQLSTATES:
        return True
    sqlite_code = getattr(cause, "sqlite_errorcode", None)
    if sqlite_code is not None:
        return (sqlite_code & 0xFF) in _TRANSIENT_SQLITE
    if is_of_sql_server(cause):
        return _TRANSIENT_SQL_SERVER.search(str(cause)) is not None
    code = _number(cause)
    return code in _TRANSIENT_ORACLE if "oracledb" in type(cause).__module__ else code in _TRANSIENT_MYSQL


def is_deadlock_of_sql_server(error: Exception) -> bool:
    """Whether SQL Server chose the transaction to break a deadlock, and has rolled it back."""
    cause = error.__cause__ or error
    return is_of_sql_server(cause) and _DEADLOCK_SQL_SERVER.search(str(cause)) is not None


def is_timeout_of_sql_server(error: Exception) -> bool:
    """Whether a statement took too long for one of SQL Server's drivers, which had it cancelled."""
    cause = error.__cause__ or error
    return is_of_sql_server(cause) and _TIMEOUT_SQL_SERVER.search(str(cause)) is not None


def is_timeout(error: Exception) -> bool:
    """Whether a statement was cancelled because it took longer than it may."""
    cause: Any = error.__cause__ or error
    late = sqlstate(cause) == _TIMEOUT_SQLSTATE or _number(cause) in _TIMEOUT_MYSQL
    return late or is_timeout_of_sql_server(error)


def is_of_sql_server(cause: Any) -> bool:
    """Whether an error was raised by one of SQL Server's drivers."""
    return type(cause).__module__.partition(".")[0] in ("pyodbc", "mssql_python")


def is_disconnect(error: Exception) -> bool:
    """Whether the error says that the connection is gone, so that a new one may do better."""
    cause: Any = error.__cause__ or error
    module = type(cause).__module__
    if "psycopg" in module:
        state = sqlstate(cause)
        return state is None or state.startswith(_DISCONNECT_SQLSTATES)
    if "sqlite3" in module:
        return False
    if "ysql" in module or "MySQLdb" in module:
        return _number(cause) in _DISCONNECT_MYSQL
    if is_transient(error) or is_timeout_of_sql_server(error):  # operational errors too, to its drivers
        return False
    if type(cause).__name__ in ("OperationalError", "InterfaceError"):
        return True
    return "pyodbc" in module and any(code in str(cause) for code in _DISCONNECT_FREETDS)


class WrongClockError(OperationalError):
    """A node of a cluster, each of which judges leases by its own clock, has another time than this host."""


def asks_elsewhere(error: Exception) -> bool:
    """Whether a server is there and no locks can be had from it: another one of its cluster may do better."""
    if isinstance(error, WrongClockError):
        return True
    return _number(error.__cause__ or error) == _NOT_READY_MYSQL or is_read_only(error)


def is_outage(error: Exception, *, known: bool) -> bool:
    """Whether the database is away, or cannot do its work, for a reason that is likely to pass.

    ``known``: it has done its work before, so that one that can only be read is about to change its part. SQL Server
    is left out: who waited there has lost its place in the server's own line.
    """
    cause: Any = error.__cause__ or error
    if is_of_sql_server(cause):
        return False
    if is_transient(error) or (known and is_read_only(error)):
        # Somebody's lock of some rows is no outage: to try again and again would keep the other names waiting.
        return sqlstate(cause) != _LOCKED_SQLSTATE and _number(cause) != _LOCKED_MYSQL
    if not isinstance(error, OperationalError | InterfaceError):
        return False
    if "psycopg" not in type(cause).__module__:
        return _number(cause) in _AWAY_MYSQL or is_disconnect(error)
    state = sqlstate(cause)
    return _SHUT_OUT.search(str(cause)) is None if state is None else state.startswith(_AWAY_SQLSTATES)


def is_missing_table(error: Exception) -> bool:
    """Whether the error says that a lock table is not there."""
    cause: Any = error.__cause__ or error
    text = str(cause)
    known = sqlstate(cause) == "42P01" or _number(cause) in (1146, 942) or "no such table" in text
    return known and "sqlsem_" in text.lower()


def is_read_only(error: Exception) -> bool:
    """Whether a statement failed because the server, the file or the session does not take writes."""
    cause: Any = error.__cause__ or error
    sqlite_code = getattr(cause, "sqlite_errorcode", None)
    if sqlite_code is not None:
        return bool((sqlite_code & 0xFF) == _READ_ONLY_SQLITE)
    return sqlstate(cause) == _READ_ONLY_SQLSTATE or _number(cause) in _READ_ONLY_MYSQL


def sqlstate(cause: Any) -> str | None:
    """Return PostgreSQL's code of a driver's error; ``None`` for one that did not come from the server."""
    found: str | None = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)  # of psycopg 3, of psycopg2
    return found


def _number(cause: Any) -> int | None:
    arguments = getattr(cause, "args", ())
    first = arguments[0] if arguments else None
    code = getattr(first, "code", first)
    return code if isinstance(code, int) else None


def backend_error(alias: str, error: Exception, *, stale: bool = False) -> BackendError:
    """Wrap a driver's error in one sentence that names the database; ``BackendError`` explains the flag."""
    message = f"The database {alias!r} failed: {str(error).strip() or type(error).__name__}"
    if is_missing_table(error):
        message = f"Run manage.py migrate --database {alias}: the lock tables are not there. {message}"
    elif is_read_only(error):
        message += " (it cannot be written to: locks must be kept by the primary, see SQLSEM['DATABASE'])"
    wrapped = BackendError(message)
    wrapped.stale_connection = stale
    return wrapped


def copy_of(error: BaseException) -> BaseException:
    """Return an error, and what caused it, for one more to raise: a traceback grows, and keeps the frames it passed."""
    copied = copy.copy(error)
    copied.__cause__ = None if error.__cause__ is None else copy_of(error.__cause__)
    return copied


class Outage:
    """Whether the database of an alias is away, and when to ask again. The log hears of its begin and its end."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        #: Whether the database has written something for this process.
        self.known = False
        #: What was met last; ``None`` while the database is not away.
        self.error: BaseException | None = None
        #: Whether another session of the process has written something since; the keeper's own is still to try.
        self.passing = False
        #: When to ask again, by the boot clock: later and later, and no two processes in step.
        self.again_at = 0.0
        self._since = 0.0
        self._pause = _FIRST_PAUSE
        self._lock = threading.Lock()

    def met(self, error: BackendError) -> bool:
        """Note what the database answered. Return whether that may pass, so that who has time tries again."""
        if error.stale_connection:
            return True
        cause = error.__cause__
        if not isinstance(cause, Error) or not is_outage(cause, known=self.known):
            return False
        error.outage = True
        with self._lock:
            begins, now = self.error is None, boot_now()
            if begins:
                self._since, self._pause = now, _FIRST_PAUSE
            self.error = copy_of(error)
            if now >= self.again_at:
                self.again_at = now + self._pause * chance.uniform(0.5, 1.0)
                self._pause = min(self._pause * _GROWTH, _LONGEST_PAUSE)
        if begins:
            logger.warning("The database %r is away: %s. Who may wait, and renewals, try on.", self.alias, _told(error))
        return True

    def over(self) -> None:
        """The database did what it was asked."""
        with self._lock:
            error, self.error, self.again_at, self.passing = self.error, None, 0.0, False
        if error is not None:
            took = boot_now() - self._since
            logger.warning("The database %r is back, %.1f s after it failed: %s.", self.alias, took, _told(error))


def _told(error: BaseException) -> str:
    """Return in one line what the driver said."""
    return " ".join(str(error.__cause__ or error).split()).rstrip(".")


@contextlib.contextmanager
def database_errors(alias: str) -> Iterator[None]:
    """Turn whatever the database raises into ``BackendError``, with the driver's error as its cause."""
    try:
        yield
    except Error as error:
        raise backend_error(alias, error) from error


def without_frames(error: BaseException | None) -> None:
    """Free a caught error, and what caused it, of the frames they came through: each is on a cycle with some of these.

    A frame may have a permit in it, which would live on until the garbage collector runs.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__


def patiently(attempt: Callable[[], T], passes: Callable[[Exception], bool], seconds: float | None = None) -> T:
    """Call ``attempt`` until it succeeds, fails for a reason that does not pass, or ``seconds`` are over.

    It must have done nothing when it raises an error of which ``passes`` says so. ``None``: ``LOCKED_PATIENCE``.
    """
    give_up = time.monotonic() + (LOCKED_PATIENCE if seconds is None else seconds)
    while True:
        try:
            return attempt()
        except Exception as error:
            if not passes(error) or time.monotonic() > give_up:
                raise
            without_frames(error)
        time.sleep(chance.uniform(0.001, 0.01))  # no two in step


def repeated(act: Callable[Parameters, T]) -> Callable[Parameters, T]:
    """Do an act on an alias, its first argument, again if it lost a deadlock or found SQLite locked."""

    @functools.wraps(act)
    def again(*args: Parameters.args, **kwargs: Parameters.kwargs) -> T:
        alias = str(args[0])

        def passes(error: Exception) -> bool:
            cause = error.__cause__ if isinstance(error, BackendError) else None
            # Inside a transaction of the caller's, that is over.
            return isinstance(cause, Error) and is_transient(cause) and not connections[alias].in_atomic_block

        return patiently(lambda: act(*args, **kwargs), passes)

    return again
