"""Servers that speak TDS, the alias ``mssql``: SQL Server, or a stand-in that speaks its protocol (Babelfish).

``SQLSEM_TEST_MSSQL_URL`` names the server (``mssql://sa:password@127.0.0.1:1433/master``; a query adds ``OPTIONS``:
``?extra_params=Encrypt%3Dno``). ``SQLSEM_TEST_MSSQL_DRIVER`` is one of ``DRIVERS``.

A stand-in lacks statements that Django's test databases and some migrations need, so there the database is made here.
"""

from __future__ import annotations

import atexit
import configparser
import contextlib
import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dj_database_url
from django.apps import apps
from django.db import DatabaseError, connections

from django_sqlsem.backends.applock import install

#: The drivers by the names that ``SQLSEM_TEST_MSSQL_DRIVER`` gives them, the default first: pyodbc with Microsoft's
#: ODBC driver, pyodbc with FreeTDS, and Microsoft's own Python driver.
DRIVERS = ("odbc", "freetds", "mssql-python")
_MICROSOFT = ("ODBC Driver 18 for SQL Server", "ODBC Driver 17 for SQL Server")
_EXTRA = {
    "odbc": "TrustServerCertificate=yes",
    "freetds": "TDS_Version=7.4;ClientCharset=UTF-8",
    "mssql-python": "TrustServerCertificate=yes",
}
#: A stand-in compiles each batch anew, and slowly: many processes at once keep it busy for long. In seconds.
PATIENCE = {"query_timeout": 12, "connection_timeout": 10}
_SLOT_LIKE = re.compile(r"[0-9]+-")
_PATIENCE = 20.0


def driver() -> str:
    """Return the driver that ``SQLSEM_TEST_MSSQL_DRIVER`` names. ``ValueError`` for any but ``DRIVERS``."""
    name = os.environ.get("SQLSEM_TEST_MSSQL_DRIVER", "").strip().lower() or DRIVERS[0]
    if name not in DRIVERS:
        raise ValueError(f"SQLSEM_TEST_MSSQL_DRIVER must be one of {', '.join(DRIVERS)}, not {name!r}.")
    return name


def settings_for(url: str) -> dict[str, Any]:
    """Return the entry of ``DATABASES`` for the server at ``url``, with the chosen driver; without ``TEST``."""
    settings = dict(dj_database_url.parse(url, engine="mssql"))
    name = driver()
    given = settings.get("OPTIONS", {})
    options: dict[str, Any] = {"extra_params": _EXTRA[name]}
    if name == "odbc":
        options["driver"] = given.get("driver") or _microsoft_driver()
    elif name == "freetds":
        options |= {"driver": "FreeTDS", "host_is_server": True}
    else:
        options["python_driver"] = "mssql_python"
    options |= PATIENCE
    settings["OPTIONS"] = options | given
    settings["PORT"] = str(settings["PORT"] or 1433)
    settings["NAME"] = settings["NAME"] or "master"
    return settings


def describe(settings: dict[str, Any]) -> str:
    """Connect, and return the product, its version and the driver in one line, without Django's settings."""
    importlib.metadata.version("mssql-django")  # says so if it is missing; imported, it would ask for the settings
    with contextlib.closing(_connect(settings)) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT @@VERSION, CAST(SERVERPROPERTY('ProductVersion') AS nvarchar(40))")
        version, number = cursor.fetchone()
    product = "Babelfish, a stand-in for SQL Server" if "babelfish" in version.lower() else "SQL Server"
    return f"{product} {number} ({_driver_version(settings)})"


def is_stand_in(alias: str) -> bool:
    """Whether the server of an alias is not SQL Server but something that speaks its protocol."""
    connection = connections[alias]
    return connection.vendor == "microsoft" and _is_stand_in(connection.settings_dict["HOST"], alias)


@functools.cache
def _is_stand_in(_host: str, alias: str) -> bool:
    with connections[alias].temporary_connection() as cursor:
        return "babelfish" in cursor.execute("SELECT @@VERSION").fetchone()[0].lower()


@functools.cache
def shows_locks(alias: str) -> bool:
    """Whether the server shows who has its locks, which some stand-ins do not."""
    with connections[alias].temporary_connection() as cursor:
        try:
            cursor.execute("SELECT COUNT(*) FROM sys.dm_tran_locks")
        except DatabaseError:
            return False
        return True


# --- The driver ---


def _microsoft_driver() -> str:
    """Return the name of Microsoft's ODBC driver; one that came with a wheel is made known to this process first."""
    _forbid_pooling()
    known = _odbcinst()
    for name in _MICROSOFT:
        if known.has_section(name):
            return name
    package = Path(importlib.import_module("mssql_python_odbc").__file__ or "").parent
    flavour = "debian_ubuntu" if Path("/etc/debian_version").exists() else "rhel"
    libraries = sorted(package.glob(f"libs/linux/{flavour}/{os.uname().machine}/lib/libmsodbcsql-18*.so*"))
    if not libraries:
        raise FileNotFoundError(f"no {_MICROSOFT[0]}: neither in odbcinst.ini nor below {package}")
    known[_MICROSOFT[0]] = {"Driver": str(libraries[0])}
    directory = tempfile.mkdtemp(prefix="sqlsem-odbc-")
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(directory, ignore_errors=True))
    with open(os.path.join(directory, "odbcinst.ini"), "w", encoding="utf-8") as file:
        known.write(file, space_around_delimiters=False)
    os.environ["ODBCSYSINI"] = directory  # the driver manager reads it at its first use; child processes inherit it
    os.environ.pop("ODBCINSTINI", None)
    return _MICROSOFT[0]


def _odbcinst() -> configparser.ConfigParser:
    """Return the installed drivers as the driver manager would see them, without waking it."""
    parser = configparser.ConfigParser(interpolation=None, strict=False, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(Path(os.environ.get("ODBCSYSINI") or "/etc") / (os.environ.get("ODBCINSTINI") or "odbcinst.ini"))
    return parser


def _forbid_pooling() -> None:
    """Keep the drivers from pooling: a pooled session would keep its locks. Before the first connection it counts."""
    importlib.import_module("pyodbc").pooling = False
    if driver() == "mssql-python":
        importlib.import_module("mssql_python").pooling(enabled=False)


def _connect(settings: dict[str, Any]) -> Any:
    _forbid_pooling()
    options = settings["OPTIONS"]
    host, port = settings["HOST"] or "127.0.0.1", settings["PORT"]
    parts = {"SERVER": f"{host},{port}"}
    if driver() == "freetds":
        parts = {"SERVER": host, "PORT": port}
    if "driver" in options:
        parts["DRIVER"] = options["driver"]
    parts |= {"UID": settings["USER"], "PWD": settings["PASSWORD"], "DATABASE": settings["NAME"]}
    text = ";".join(f"{key}={_braced(value)}" for key, value in parts.items())
    module = importlib.import_module("mssql_python" if "python_driver" in options else "pyodbc")
    return module.connect(f"{text};{options.get('extra_params', '')}", timeout=5, autocommit=True)


def _braced(value: str) -> str:
    return "{" + value.replace("}", "}}") + "}" if set(value) & set(";{}") else value


def _driver_version(settings: dict[str, Any]) -> str:
    if "python_driver" in settings["OPTIONS"]:
        return f"mssql-python {importlib.metadata.version('mssql-python')}"
    return f"pyodbc {importlib.metadata.version('pyodbc')} with {settings['OPTIONS']['driver']}"


# --- From outside the library ---


def raw_connection(alias: str, **changes: Any) -> Any:
    """Open a connection of the plain driver, in autocommit, from the alias's own settings with some ``changes``.

    A driver that reconnects by itself would hide that a session was killed, so it may not.
    """
    wrapper = connections[alias].copy()
    settings = wrapper.settings_dict = wrapper.settings_dict | changes
    options = settings["OPTIONS"]
    extra = options.get("extra_params", "")
    if options.get("driver") in (*_MICROSOFT, None) and "connectretrycount" not in extra.lower():
        settings["OPTIONS"] = options | {"extra_params": f"{extra};ConnectRetryCount=0"}
    raw = wrapper.get_new_connection(wrapper.get_connection_params())
    raw.autocommit = True
    return raw


def marks(sql: str) -> str:
    """Return SQL whose parameters are marked by ``%s`` with the marks of these drivers, ``?``."""
    return sql.replace("%s", "?").replace("%%", "%")


def rows(cursor: Any) -> list[tuple[Any, ...]]:
    """Return the rows of the first result that has any columns; the stand-in may send empty ones before it."""
    while cursor.description is None:
        if not cursor.nextset():
            return []
    found = [tuple(row) for row in cursor.fetchall()]
    while cursor.nextset():  # an error that comes after the rows is raised here
        pass
    return found


#: The sessions in the current database, this one left out.
SESSIONS = (
    "SELECT session_id FROM sys.dm_exec_sessions WHERE database_id = DB_ID() AND session_id <> @@SPID"
    " ORDER BY session_id"
)
#: Those of them that are of one process.
SESSIONS_OF = SESSIONS.replace(" ORDER BY", " AND host_process_id = {pid} ORDER BY")


def lock_base(name: str) -> str:
    """Return what the resources of a semaphore's slots end with, ``<slot>-<base>``: written down here once more."""
    text = name.encode("utf-16-le")
    if _SLOT_LIKE.match(name) or name.startswith("sqlsem:") or len(text) > 2 * 244:
        return f"sqlsem:{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    return name


def locked(alias: str, resources: list[str]) -> list[bool]:
    """Return of each resource whether some session has its application lock, or waits for it."""
    sql = "SELECT APPLOCK_TEST('public', ?, 'Exclusive', 'Session')"
    with contextlib.closing(raw_connection(alias)) as connection:
        cursor = connection.cursor()
        return [not cursor.execute(sql, (resource,)).fetchone()[0] for resource in resources]


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Keep other test processes from making a database: SQL Server copies ``model``, for which each wants it alone."""
    with open(os.path.join(tempfile.gettempdir(), "sqlsem-tests-create"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- The stand-in's test database ---


@contextlib.contextmanager
def database(alias: str) -> Iterator[None]:
    """Make the test database of an alias on a stand-in, with what all migrations make, and drop it in the end.

    Django's own way fails there at ``ALTER DATABASE`` and at migrations that alter columns.
    """
    connection = connections[alias]
    settings = connection.settings_dict
    server, name = settings["NAME"], settings["TEST"]["NAME"]
    _run(alias, f"CREATE DATABASE [{name}]")
    try:
        connection.close()
        settings["NAME"] = name
        _create_tables(alias)
        yield
    finally:
        connection.close()
        settings["NAME"] = name
        end_sessions(alias)
        settings["NAME"] = server
        _run(alias, f"DROP DATABASE [{name}]")


def _run(alias: str, sql: str) -> None:
    with contextlib.closing(raw_connection(alias)) as connection:
        connection.cursor().execute(sql)


def _create_tables(alias: str) -> None:
    with connections[alias].schema_editor() as editor:
        for model in apps.get_models():
            if model._meta.managed and not model._meta.proxy:
                editor.create_model(model)
    install.install(connections[alias])


def end_sessions(alias: str) -> None:
    """End all sessions in the database of an alias, and wait until they are gone."""
    deadline = time.monotonic() + _PATIENCE
    with contextlib.closing(raw_connection(alias)) as connection:
        cursor = connection.cursor()
        while ids := [int(row[0]) for row in cursor.execute(SESSIONS).fetchall()]:
            assert time.monotonic() < deadline, f"the sessions {ids} do not end"
            for one in ids:
                with contextlib.suppress(Exception):  # it may be gone already
                    cursor.execute(f"KILL {one}")
            time.sleep(0.1)
