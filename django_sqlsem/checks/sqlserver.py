"""System checks of databases that keep application locks: SQL Server, its drivers, and the rights of the login."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from django.apps import AppConfig
from django.conf import settings as django_settings
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_sqlsem.backends import database_for, get_backend
from django_sqlsem.backends.applock.calls import SCHEMA
from django_sqlsem.backends.applock.install import VERSION, version
from django_sqlsem.checks.messages import error, note, warning
from django_sqlsem.conf import config
from django_sqlsem.database.raw import split
from django_sqlsem.database.sqlserver import Meaning, meaning, no_such_table
from django_sqlsem.models import (
    ClaimRow,
    EventRow,
    MinuteRow,
    RefreshRow,
    SemaphoreRow,
    SlotRow,
    TransactionLockRow,
    WaiterRow,
    WaitRow,
)

_ALL: Final = ("SELECT", "INSERT", "UPDATE", "DELETE")
#: What goes on beside it: without these rights the locks work, and less is known of them.
HISTORY_RIGHTS: Final = {EventRow._meta.db_table: ("SELECT", "INSERT", "DELETE"), MinuteRow._meta.db_table: _ALL}
DEADLOCK_RIGHTS: Final = {
    WaitRow._meta.db_table: _ALL,
    **{model._meta.db_table: ("SELECT",) for model in (SemaphoreRow, SlotRow, WaiterRow)},
}
#: What only some kinds of locks use, and the pages and commands of operators.
KIND_RIGHTS: Final = {
    SemaphoreRow._meta.db_table: ("SELECT", "UPDATE"),
    SlotRow._meta.db_table: ("SELECT", "UPDATE"),
    WaiterRow._meta.db_table: ("SELECT",),
    TransactionLockRow._meta.db_table: ("SELECT",),
    ClaimRow._meta.db_table: ("SELECT", "INSERT", "DELETE"),
    RefreshRow._meta.db_table: ("SELECT", "INSERT", "UPDATE"),
}

#: What mssql-django tries if ``OPTIONS`` names no driver.
DEFAULT_DRIVERS: Final = ("ODBC Driver 18 for SQL Server", "ODBC Driver 17 for SQL Server")
#: A waiter behind a network that is gone learns of it by the first probe: after this many seconds at the most.
LONGEST_KEEP_ALIVE: Final = 60

#: How many workers the small tiers of Azure SQL Database have. Source: "Resource limits for single databases using the
#: DTU purchasing model", Microsoft's documentation.
WORKERS: Final = {"Basic": 30, "S0": 60, "S1": 90, "S2": 120, "S3": 200}
#: How many processes should be able to wait for each name at once.
WAITING_AT_ONCE: Final = 8

#: Whether the database can be written, whether the login may see other sessions' locks, and who it is.
FACTS: Final = """SET NOCOUNT ON;
SELECT CAST(DATABASEPROPERTYEX(DB_NAME(), 'Updateability') AS nvarchar(60)) AS updateability,
    HAS_PERMS_BY_NAME(NULL, NULL, 'VIEW SERVER STATE') AS server_state,
    HAS_PERMS_BY_NAME(NULL, NULL, 'VIEW SERVER PERFORMANCE STATE') AS performance_state,
    SUSER_SNAME() AS login_name;
SET NOCOUNT OFF;
"""
#: Which tier of Azure SQL Database it is; NULL elsewhere.
TIER: Final = "SELECT CAST(DATABASEPROPERTYEX(DB_NAME(), 'ServiceObjective') AS nvarchar(60)) AS tier;\n"
#: For how many names somebody may wait.
COUNT_NAMES: Final = "SELECT COUNT(*) AS names FROM sqlsem_semaphore;\n"
#: Take a lock that nobody else wants, give it back, and read the own session, as every lock session does at first.
PROBE: Final = """SET NOCOUNT ON;
DECLARE @rc int = 0, @done int = 0,
    @resource nvarchar(255) = CONCAT(N'sqlsem:check:', CAST(NEWID() AS nvarchar(36)));
EXEC @rc = sys.sp_getapplock @Resource = @resource, @LockMode = 'Exclusive', @LockOwner = 'Session',
    @LockTimeout = 0, @DbPrincipal = 'public';
IF @rc >= 0
    EXEC @done = sys.sp_releaseapplock @Resource = @resource, @LockOwner = 'Session', @DbPrincipal = 'public';
SELECT @rc AS rc, (SELECT login_time FROM sys.dm_exec_sessions WHERE session_id = @@SPID) AS login_time;
SET NOCOUNT OFF;
"""
#: Azure SQL Database has other names for the right, and tiers without it: there only trying tells.
SEE_LOCKS: Final = "SELECT TOP (1) request_mode FROM sys.dm_tran_locks WHERE request_session_id = @@SPID;\n"
#: Runs one query and returns its first row.
Row = Callable[[str], tuple[Any, ...]]


def named(among: Iterable[str] | None = None) -> list[str]:
    """Return the aliases that ``SQLSEM`` names for locks, or the router chooses; none while ``SQLSEM`` is wrong."""
    try:
        config()
        found = dict.fromkeys([database_for(None), *getattr(django_settings, "SQLSEM", {}).get("DATABASES", {})])
    except ImproperlyConfigured:  # E001 says it
        return []
    return [alias for alias in found if among is None or alias in among]


def check_sqlserver(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> Iterable[CheckMessage]:
    """Report a missing driver, and settings of SQL Server aliases under which application locks are not safe."""
    for alias in named():
        settings = connections.settings[alias]
        yield from driver_messages(alias, settings)
        if keeps_applocks(alias):
            yield from settings_messages(alias, settings)


def check_rights(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> Iterable[CheckMessage]:
    """Ask the servers of SQL Server aliases for the rights that application locks need."""
    for alias in filter(keeps_applocks, named(databases or ())):
        yield from database_messages(alias)


def keeps_applocks(alias: str) -> bool:
    """Whether an alias's locks are application locks, or would be once its server answers."""
    try:
        if connections[alias].vendor != "microsoft":
            return False
        backend = None if config(alias).backend is None else type(get_backend(alias))
    except ImproperlyConfigured:
        return False
    return backend is None or any(
        base.__module__.startswith("django_sqlsem.backends.applock") for base in backend.__mro__
    )


# The driver and its settings.


def driver_messages(alias: str, settings: Mapping[str, Any]) -> Iterator[CheckMessage]:
    """Yield the error that says what of the driver is missing."""
    reason, advice = _missing(settings) if settings.get("ENGINE") == "mssql" else ("", "")
    if reason:
        text = f"The driver of the SQL Server database {alias!r} is missing: {reason}"
        yield error("E003", text, advice)


def _missing(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return what is missing and what to do about it; two empty texts if nothing is."""
    options = settings.get("OPTIONS") or {}
    try:
        importlib.import_module("mssql.base")
        if _python_driver(options):
            importlib.import_module("mssql_python")
            return "", ""
    except (ImportError, ImproperlyConfigured) as missing:
        return f"{missing}.", "Install django-sqlsem with its extra mssql."
    pyodbc: Any = importlib.import_module("pyodbc")
    if options.get("dsn"):
        return "", ""
    try:
        known = pyodbc.drivers()  # this makes the pooling final; mssql-django has read the setting by now
    except Exception:  # noqa: BLE001 - of the driver manager: then connecting will tell
        return "", ""
    wanted = (str(options["driver"]),) if options.get("driver") else DEFAULT_DRIVERS
    if any(os.path.exists(name) if "/" in name else name.lower() in map(str.lower, known) for name in wanted):
        return "", ""
    advice = (
        'Install Microsoft\'s driver 18 or 17 (not by pip), or set "python_driver": "mssql_python", which brings its'
        " own."
    )
    return f"the ODBC driver manager knows {', '.join(map(repr, known)) or 'no driver'}, but not {wanted[0]!r}.", advice


def settings_messages(alias: str, settings: Mapping[str, Any]) -> Iterator[CheckMessage]:
    """Yield what is wrong with the settings of an alias that keeps application locks."""
    options = settings.get("OPTIONS") or {}
    parameters = _parameters(options)
    where = f"The SQL Server database {alias!r}"
    if _is_pooled(options):
        advice = (
            "Set DATABASE_CONNECTION_POOLING = False in the settings: a pooled session goes on after it was closed,"
            " with its locks."
        )
        yield warning("W002", f"{where} is reached through the driver's connection pool.", advice)
    if _has_mars(options, parameters):
        yield warning("W003", f"{where} has MARS on.", 'Set MARS_Connection=no in OPTIONS["extra_params"].')
    if parameters.get("applicationintent", "").lower() == "readonly":
        advice = "Keep the locks under an alias that writes to the primary."
        yield error("E002", f"{where} has ApplicationIntent=ReadOnly.", advice)
    for limit in _limits(options, parameters):
        yield warning("W004", f"{where} has {limit} in its extra_params.", "Waiting in line is one long statement.")
    if parameters.get("retryexec"):
        yield warning("W005", f"{where} has a RetryExec rule.", "The driver may run an operator's KILL twice.")


def _parameters(options: Mapping[str, Any]) -> dict[str, str]:
    """Return ``extra_params`` by lower-case keyword; the first one of a kind counts, as for the drivers."""
    found: dict[str, str] = {}
    for part in split(str(options.get("extra_params") or "")):
        key, equals, value = part.partition("=")
        if equals:
            found.setdefault(key.strip().lower(), value.strip().removeprefix("{").removesuffix("}"))
    return found


def _python_driver(options: Mapping[str, Any]) -> bool:
    return str(options.get("python_driver") or "").strip().lower() in ("mssql_python", "mssql-python", "python")


def _is_pooled(options: Mapping[str, Any]) -> bool:
    """Whether the driver will pool: what it says itself goes before the setting, which may have come too late."""
    if not _python_driver(options):
        return bool(getattr(importlib.import_module("pyodbc"), "pooling", True))
    try:
        manager: Any = importlib.import_module("mssql_python").PoolingManager
    except ImportError:  # E003 says it
        return False
    asked_for = bool(getattr(django_settings, "DATABASE_CONNECTION_POOLING", True))
    return bool(manager.is_enabled() or (asked_for and not manager.is_initialized()))


def _has_mars(options: Mapping[str, Any], parameters: Mapping[str, str]) -> bool:
    if "mars_connection" in parameters:
        return parameters["mars_connection"].lower() == "yes"
    # There mssql-django turns it on by itself.
    ours = str(options.get("driver", DEFAULT_DRIVERS[0])).startswith(("ODBC Driver ", "SQL Server Native Client"))
    return os.name == "nt" and ours and not options.get("dsn") and not _python_driver(options)


def _limits(options: Mapping[str, Any], parameters: Mapping[str, str]) -> Iterator[str]:
    freetds = any(name in str(options.get("driver", "")).lower() for name in ("freetds", "tdsodbc"))
    if freetds and _seconds(parameters.get("timeout")) > 0:
        yield f"Timeout={parameters['timeout']}"
    if _seconds(parameters.get("keepalive")) > LONGEST_KEEP_ALIVE:
        yield f"KeepAlive={parameters['keepalive']}"


def _seconds(value: str | None) -> int:
    return int(value) if value and value.isdecimal() else 0


# The server and the login's rights.


def database_messages(alias: str) -> Iterator[CheckMessage]:
    """Connect, and yield what the server refuses. Never raises: a server that does not answer is a message too."""
    where = f"The SQL Server database {alias!r}"
    try:
        # Not within the caller's transaction, which a refusal could end.
        connection = connections[alias].copy()
        with contextlib.closing(connection), connection.cursor() as cursor:
            yield from _asked(alias, where, lambda sql: _row(cursor, sql))
    except Exception as failed:  # noqa: BLE001 - of the driver, whatever it is
        yield _unanswered(where, failed)


def _unanswered(where: str, failed: Exception) -> CheckMessage:
    advice = "No lock can be had until it answers."
    if "certificate" in str(failed).lower():
        advice = (
            "Install the certificate of its authority here, or trust any: TrustServerCertificate=yes in extra_params."
        )
    return error("E010", f"{where} could not be asked: {failed}", advice)


def _asked(alias: str, where: str, row: Row) -> Iterator[CheckMessage]:
    updateability, server_state, performance_state, login = row(FACTS)
    if str(updateability).upper() == "READ_ONLY":
        text = f"{where} is read-only: a secondary, or set to READ_ONLY."
        yield error("E004", text, "Keep the locks in a database that can be written.")
    if refused := _refusal(row):
        text = f"{where} gives the login {login!r} no application lock: {refused}"
        yield error("E005", text, "GRANT EXECUTE ON sys.sp_getapplock, and the like.")
    if not _is_absent(row, SlotRow._meta.db_table):  # else the first ``migrate`` installs them, with the tables
        yield from _procedures(alias, where, login, row)
    yield from _lacking(alias, f"{where} does not let the login {login!r}", row)
    yield from _workers(where, row)
    if 1 not in (server_state, performance_state):
        try:
            row(SEE_LOCKS)
        except Exception as failed:  # noqa: BLE001 - of the driver, whatever it is
            text = f"{where} does not show the login {login!r} who else waits or holds application locks: {failed}"
            yield note("I001", text, "GRANT VIEW SERVER STATE, if you want to see that.")


def _procedures(alias: str, where: str, login: str, row: Row) -> Iterator[CheckMessage]:
    """Yield what is wrong with the stored procedures by which locks are taken."""
    try:
        found = str(row(f"EXEC {SCHEMA}.{VERSION};\n")[0])
    except Exception as failed:  # noqa: BLE001 - of the driver, whatever it is
        if _says_forbidden(failed):
            text = f"{where} does not let the login {login!r} call the stored procedures that take locks: {failed}"
            yield error("E006", text, f"GRANT EXECUTE ON SCHEMA::{SCHEMA} to the login.")
            return
        found = ""
    if found != version():
        which = "those of another version" if found else "none"
        text = f"{where} should have the stored procedures of this version of django-sqlsem, and has {which}."
        advice = (
            f"Run manage.py locks sql --apply --database {alias}. (migrate installs them only together with a new"
            " migration.)"
        )
        yield warning("W027", text, advice)


def _workers(where: str, row: Row) -> Iterator[CheckMessage]:
    """Yield a warning where a few waiting processes would take all of a small tier's workers."""
    with contextlib.suppress(Exception):  # no tiers, or not for this login to know
        tier = str(row(TIER)[0])
        names = int(row(COUNT_NAMES)[0])
        if tier in WORKERS and names * WAITING_AT_ONCE > WORKERS[tier]:
            text = (
                f"{where} has {WORKERS[tier]} workers (tier {tier}). Each process that waits takes one for each name,"
                f" and there are {names} names: when all are taken, nobody can give a lock back."
            )
            yield warning("W028", text, "Choose a larger tier, or wait less: timeout=0, max_waiting, Celery's retry.")


def _lacking(alias: str, refuses: str, row: Row) -> Iterator[CheckMessage]:
    """Yield what rights the login lacks. Tables that are not there count as granted."""
    settings = config(alias)
    beside = (HISTORY_RIGHTS if settings.history else {}) | (DEADLOCK_RIGHTS if settings.deadlocks != "ignore" else {})
    if missing := _missing_rights(row, beside):
        advice = 'Grant these rights, or turn it off: SQLSEM["HISTORY"], SQLSEM["DEADLOCKS"].'
        yield warning("W013", f"{refuses} record what happens, or who waits for whom: {missing}.", advice)
    if missing := _missing_rights(row, KIND_RIGHTS):
        advice = "Grant these rights if you use claims, refresh_every(), transaction_lock(), the admin or the command."
        yield note("I002", f"{refuses} use all kinds of locks and pages: {missing}.", advice)


def _missing_rights(row: Row, wanted: Mapping[str, tuple[str, ...]]) -> str:
    asked = {
        (table, right): f"HAS_PERMS_BY_NAME(N'{table}', N'OBJECT', N'{right}')"
        for table, rights in wanted.items()
        for right in rights
    }
    if not asked:
        return ""
    granted = zip(asked, row(f"SELECT {', '.join(asked.values())};\n"), strict=True)
    # Without any right on a table the answer is NULL, as of one that is not there.
    lacking = [each for each, answer in granted if answer != 1]
    absent = {table for table in dict(lacking) if _is_absent(row, table)}
    return ", ".join(f"{right} on {table}" for table, right in lacking if table not in absent)


def absent_tables(connection: BaseDatabaseWrapper, tables: Iterable[str]) -> list[str]:
    """Return those of the tables that are not there. The server's views also hide those that one has no right on."""
    with connection.cursor() as cursor:
        return [table for table in tables if _is_absent(lambda sql: _row(cursor, sql), table)]


def _is_absent(row: Row, table: str) -> bool:
    try:
        row(f"SELECT TOP (0) 1 FROM {table};\n")  # noqa: S608
    except Exception as failed:  # noqa: BLE001 - of the driver, whatever it is
        return no_such_table(failed)
    return False


def _says_forbidden(failed: Exception) -> bool:
    return meaning(failed) is Meaning.FORBIDDEN or "permission" in str(failed).lower()


def _refusal(row: Row) -> str:
    try:
        code = row(PROBE)[0]
    except Exception as failed:  # noqa: BLE001 - of the driver, whatever it is
        return str(failed)
    return "" if code >= 0 else f"sp_getapplock returns {code}"


def _row(cursor: Any, sql: str) -> tuple[Any, ...]:
    cursor.execute(sql)
    while cursor.description is None:
        if not cursor.nextset():
            return ()
    return tuple(cursor.fetchone() or ())
