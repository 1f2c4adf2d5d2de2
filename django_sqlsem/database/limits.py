"""What each database needs of a connection that keeps locks: limits, isolation, and how it tells of trouble."""

from __future__ import annotations

import re
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from django.db.backends.base.base import BaseDatabaseWrapper


#: A statement of ours that takes longer is given up, in milliseconds: below one heartbeat of the default lease.
STATEMENT_TIMEOUT_MS: Final = 4000
#: So long a statement of ours waits for a row on SQL Server, in milliseconds: it is repeated, one too slow is not.
LOCK_TIMEOUT_MS: Final = STATEMENT_TIMEOUT_MS - 1000
#: A transaction of ours in which nothing happens for so long, in seconds, is the server's to end: its process has
#: stopped, or its host has gone, and others wait for its rows. Less than they wait for a statement.
IDLE_TRANSACTION: Final = 3
#: MySQL knows only how long a session may be idle, in seconds: longer than the time after which ours are closed.
IDLE_SESSION: Final = 600
#: A server that has not answered for so long, in seconds, does not answer: it has stopped, or something in between has.
ANSWER_TIMEOUT: Final = STATEMENT_TIMEOUT_MS // 1000 + 2

_POSTGRESQL: Final = {
    "connect_timeout": 5,
    "application_name": "sqlsem",
    # A peer that vanished is noticed in seconds, not after the kernel's two hours.
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 1,
    "keepalives_count": 4,
    "tcp_user_timeout": 5000,
}
#: Packages whose engines take connections from a pool of their own, and the options of such.
_POOLS: Final = ("django_db_geventpool", "dj_db_conn_pool")
_POOL_OPTIONS: Final = ("pool", "MAX_CONNS", "REUSE_CONNS")
#: The drivers of SQL Server limit no login, and mssql-django tries one again for half a minute.
_SQL_SERVER: Final = {"connection_timeout": 5, "connection_retries": 0}
#: An alias may give its own statements more time, in seconds, but a silent server is to be found out.
LONGEST_ANSWER: Final = 30
_MYSQL: Final = {"connect_timeout": 5, "read_timeout": ANSWER_TIMEOUT, "write_timeout": ANSWER_TIMEOUT}


def without_pool(engine: type[BaseDatabaseWrapper]) -> type[BaseDatabaseWrapper]:
    """Return the engine below one that pools: it would keep those waiting who want ours, and hand on our limits."""
    bases = engine.__mro__
    pooled = [index for index, each in enumerate(bases) if each.__module__.partition(".")[0] in _POOLS]
    below = bases[pooled[-1] + 1 :] if pooled else bases
    return next((each for each in below if hasattr(each, "get_new_connection") and hasattr(each, "vendor")), engine)


def adapt(settings: dict[str, Any], vendor: str) -> None:
    """Change a copy of an alias's settings into those of a lock connection; what the user chose is kept."""
    options = settings["OPTIONS"] = dict(settings.get("OPTIONS") or {})
    settings["ATOMIC_REQUESTS"] = False
    settings["AUTOCOMMIT"] = True
    if vendor == "postgresql":
        for name in _POOL_OPTIONS:  # a connection of our own, or two, outside the pool's count
            options.pop(name, None)
        for name, value in _POSTGRESQL.items():
            options.setdefault(name, value)
        from django.db.backends.postgresql.psycopg_any import IsolationLevel

        options["isolation_level"] = IsolationLevel.READ_COMMITTED
    elif vendor == "mysql":
        for name, value in _MYSQL.items():
            options.setdefault(name, value)
        options["isolation_level"] = "read committed"
    elif vendor == "sqlite":
        options["transaction_mode"] = "IMMEDIATE"
        # SQLite's own busy handler sleeps up to 100 ms; we look again sooner.
        options["timeout"] = 0
    elif vendor == "microsoft":
        options["isolation_level"] = "READ COMMITTED"
        limit_logins(options)
        options["query_timeout"] = answer_limit(options, ANSWER_TIMEOUT)


def limit_logins(options: dict[str, Any]) -> None:
    """Have logins to SQL Server end, unless an alias's options say when they do."""
    for name, value in _SQL_SERVER.items():
        options[name] = options.get(name) or value


def answer_limit(options: Mapping[str, Any], least: int) -> int:
    """Return for how many seconds SQL Server may owe an answer: as ``query_timeout`` says, within reason."""
    return min(max(int(options.get("query_timeout") or 0), least), LONGEST_ANSWER)


def limit_waiting(raw: Any) -> None:
    """Have a fresh driver connection wait for ``ANSWER_TIMEOUT`` at the most; psycopg has no setting for it."""
    if not hasattr(raw, "pgconn"):
        return
    from psycopg import OperationalError

    def limited(steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        deadline = time.monotonic() + ANSWER_TIMEOUT
        try:
            wanted = next(steps)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:  # it says so several times a second
                    raise OperationalError(f"the server has not answered for {ANSWER_TIMEOUT} s")
                wanted = steps.send(ready)
        except StopIteration as stop:
            return stop.value

    wait, itself = type(raw).wait, weakref.ref(raw)  # a cycle would keep a lost connection open
    raw.wait = lambda steps, *args, **kwargs: wait(itself(), limited(steps), *args, **kwargs)


def prepare(connection: BaseDatabaseWrapper) -> None:
    """Set the limits of a fresh session."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            # Behind PgBouncer another client may get this session next, and would inherit the limit.
            if cursor.fetchone()[0] != connection.connection.info.backend_pid:
                connection.sqlsem_pooled = True  # type: ignore[attr-defined]
            else:
                cursor.execute(f"SET statement_timeout = {STATEMENT_TIMEOUT_MS}")
                cursor.execute(f"SET idle_in_transaction_session_timeout = {IDLE_TRANSACTION * 1000}")
                cursor.execute("SET default_transaction_isolation = 'read committed'")
                if hasattr(connection.connection, "pgconn"):  # psycopg 3, where Django turns prepared statements off
                    connection.connection.prepare_threshold = 5
                # Everything here is looked up by a key: planned once, by index, also while the tables are still empty.
                cursor.execute("SET plan_cache_mode = force_generic_plan")
                cursor.execute("SET enable_seqscan = off")
    elif connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA journal_mode")
            # A commit that a loss of power undoes was of processes that went with it; the log keeps the file sound.
            if cursor.fetchone()[0] == "wal":
                cursor.execute("PRAGMA synchronous = NORMAL")
    elif connection.vendor == "mysql":
        with connection.cursor() as cursor:
            seconds = STATEMENT_TIMEOUT_MS // 1000
            # Less than a statement may take: a lock wait that ends is repeated, a statement that takes too long is not.
            wait = max(1, seconds - 1)
            cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {wait}, SESSION lock_wait_timeout = {wait}")
            if getattr(connection, "mysql_is_mariadb", False):
                cursor.execute(
                    f"SET SESSION max_statement_time = {seconds}, idle_transaction_timeout = {IDLE_TRANSACTION}"
                )
            else:
                cursor.execute(f"SET SESSION wait_timeout = {IDLE_SESSION}")
    elif connection.vendor == "microsoft":
        with connection.cursor() as cursor:
            cursor.execute(f"SET LOCK_TIMEOUT {LOCK_TIMEOUT_MS}")


#: Lost a deadlock or a lock wait, or found the database locked: nothing was done, so it may be done again.
_TRANSIENT_SQLSTATES: Final = {"40001", "40P01", "55P03"}
_TRANSIENT_MYSQL: Final = {1205, 1213}
_TRANSIENT_SQLITE: Final = {5, 6}  # SQLITE_BUSY, SQLITE_LOCKED
_TRANSIENT_ORACLE: Final = {60, 8177}
#: Its drivers tell its numbers in the text alone, and mssql-python not even there: a deadlock's victim, a lock that was
#: not to be had in time, an update conflict under snapshot isolation.
_DEADLOCK_SQL_SERVER: Final = re.compile(r"\(1205\)|was deadlocked")
_TRANSIENT_SQL_SERVER: Final = re.compile(
    rf"{_DEADLOCK_SQL_SERVER.pattern}|Serialization failure|\((?:1222|3960)\)|Lock request time out"
    r"|due to lock timeout|Snapshot isolation transaction aborted"
)

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


def is_missing_table(error: Exception) -> bool:
    """Whether the error says that a lock table is not there."""
    cause: Any = error.__cause__ or error
    text = str(cause)
    known = sqlstate(cause) == "42P01" or _number(cause) in (1146, 942) or "no such table" in text
    return known and "sqlsem_" in text.lower()


def is_missing_column(error: Exception, name: str) -> bool:
    """Whether the error says that a table has no such column. ``name``: how that begins."""
    cause: Any = error.__cause__ or error
    text = str(cause)
    known = sqlstate(cause) == "42703" or _number(cause) in (1054, 904) or "no such column" in text
    return known and name in text.lower()


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


def socket_descriptors(raw: Any) -> list[int]:
    """Return the file descriptors of a driver connection's sockets; none for SQLite."""
    if hasattr(raw, "pgconn"):  # psycopg 3
        return [raw.pgconn.socket]
    sock = getattr(raw, "_sock", None)  # PyMySQL
    if sock is not None:
        return [sock.fileno()]
    fileno = getattr(raw, "fileno", None)  # psycopg2, mysqlclient, oracledb
    try:
        return [fileno()] if callable(fileno) else []
    except Exception:  # noqa: BLE001 - a closed connection has none
        return []
