"""Which servers and programs the tests can use, found before Django's settings exist.

Each server is looked for at the address in its variable (``SQLSEM_TEST_POSTGRES_URL``, ``SQLSEM_TEST_MARIADB_URL``,
``SQLSEM_TEST_REDIS_URL``, ``SQLSEM_TEST_RABBITMQ_URL``), else at its default address. One that is missing is left out,
unless ``SQLSEM_TEST_REQUIRE`` (names separated by commas) asks for it. With ``SQLSEM_TEST_SERVERS=none`` no server is
looked for.

A server that speaks TDS (``mssql``) and the coordinator of a Citus cluster (``citus``) have no default address: they
are looked for if ``SQLSEM_TEST_MSSQL_URL`` and ``SQLSEM_TEST_CITUS_URL`` name them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import secrets
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import dj_database_url

from tests.support import programs, tds

DEFAULT_URLS = {
    "postgres": "postgres://postgres@127.0.0.1:5432/postgres",
    "mariadb": "mysql://root@127.0.0.1:3306/test",
    "redis": "redis://127.0.0.1:6379/0",
    "rabbitmq": "amqp://guest:guest@127.0.0.1:5672//",
}
#: Those that become aliases of ``DATABASES``, beside SQLite.
DATABASES = ("postgres", "mariadb", "mssql", "citus")
#: What the tests start by themselves; ``initdb`` and ``mariadbd`` are those of servers that they kill.
PROGRAMS = ("chromium", "faketime", "initdb", "mariadbd", "pgbouncer")
#: Part of the names of all test databases of this run, so that several runs can go on side by side.
RUN = f"{os.getpid()}_{secrets.token_hex(2)}"


@dataclass(frozen=True)
class Found:
    """A server or program that can be used: its address or path, and what it is in one line."""

    where: str
    version: str


@dataclass(frozen=True)
class Missing:
    """A server or program that cannot be used, and why."""

    reason: str


def url_of(name: str) -> str:
    """Return the address at which to look for a server. ``LookupError`` if it has no default and none is given."""
    variable = f"SQLSEM_TEST_{name.upper()}_URL"
    if url := os.environ.get(variable) or DEFAULT_URLS.get(name):
        return url
    raise LookupError(f"{variable} names no server, and there is no default")


def required() -> set[str]:
    """Return the names in ``SQLSEM_TEST_REQUIRE``."""
    return {name.strip() for name in os.environ.get("SQLSEM_TEST_REQUIRE", "").split(",") if name.strip()}


def install_mysql_driver() -> str:
    """Make ``import MySQLdb`` work and return the driver's name: mysqlclient if it is there, else PyMySQL.

    ``SQLSEM_TEST_MYSQL_DRIVER`` (``mysqlclient`` or ``pymysql``) forces one.
    """
    forced = os.environ.get("SQLSEM_TEST_MYSQL_DRIVER", "").lower()
    if forced not in ("", "mysqlclient", "pymysql"):
        raise ValueError(f"SQLSEM_TEST_MYSQL_DRIVER must be mysqlclient or pymysql, not {forced!r}.")
    if forced != "pymysql":
        try:
            found = importlib.import_module("MySQLdb")
        except ImportError:
            if forced:
                raise
        else:
            if found.__name__ == "MySQLdb":  # not PyMySQL under its name, from an earlier call
                return f"mysqlclient {importlib.metadata.version('mysqlclient')}"
    import pymysql

    pymysql.version_info = max(pymysql.version_info, (2, 2, 7, "final", 0))  # Django 6 asks for mysqlclient 2.2.1
    pymysql.install_as_MySQLdb()
    return f"PyMySQL {importlib.metadata.version('PyMySQL')}"


def without_tls(host: str) -> dict[str, Any]:
    """Return options for a MySQL server on this machine: PyMySQL reads all certificates for each new connection."""
    local = host in ("", "localhost", "127.0.0.1", "::1")
    return {"ssl_disabled": True} if local and install_mysql_driver().startswith("PyMySQL") else {}


def database_settings(name: str) -> dict[str, Any]:
    """Return the entry of ``DATABASES`` for a server, with a test database of this run."""
    settings = tds.settings_for(url_of(name)) if name == "mssql" else dict(dj_database_url.parse(url_of(name)))
    settings["TEST"] = {"NAME": f"test_sqlsem_{RUN}"}
    if name == "mariadb":
        settings["OPTIONS"] = {"charset": "utf8mb4"} | without_tls(settings["HOST"]) | settings.get("OPTIONS", {})
        settings["TEST"]["CHARSET"] = "utf8mb4"
    return settings


def given_databases() -> dict[str, Any]:
    """Return ``DATABASES`` as a test has given them to its child."""
    databases: dict[str, Any] = json.loads(os.environ["SQLSEM_TEST_DATABASES"])
    return databases


def given_settings() -> dict[str, Any]:
    """Return ``SQLSEM`` as a test has given it to its child, else nothing."""
    given: dict[str, Any] = json.loads(os.environ.get("SQLSEM_TEST_SETTINGS", "{}"))
    return given


def directory_in_memory() -> str | None:
    """Return a directory in which files do not wait for a disk, or ``None`` if there is none with room enough."""
    path = "/dev/shm"
    with contextlib.suppress(OSError):
        if os.access(path, os.W_OK | os.X_OK) and shutil.disk_usage(path).free > 1 << 30:
            return path
    return None


def sqlite_settings(directory: str) -> dict[str, Any]:
    """Return the entry of ``DATABASES`` for SQLite files in ``directory``: never in memory, as processes share them."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.path.join(directory, "main.sqlite3"),
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
        },
        "TEST": {"NAME": os.path.join(directory, f"test_sqlsem_{RUN}.sqlite3")},
    }


def find(name: str) -> Found | Missing:
    """Look for one server or program."""
    try:
        return globals()[f"_find_{name}"]()
    except Exception as error:
        return Missing(f"{_without_password(name)}{type(error).__name__}: {error}".strip())


def _without_password(name: str) -> str:
    try:
        parts = urlsplit(url_of(name))
    except LookupError:
        return ""
    return f"{parts.scheme}://{parts.hostname}:{parts.port or ''}{parts.path}: "


def _find_sqlite() -> Found:
    return Found("", f"SQLite {sqlite3.sqlite_version}")


def _find_postgres() -> Found:
    import psycopg

    with psycopg.connect(url_of("postgres"), connect_timeout=5, autocommit=True) as connection:
        version = connection.execute("SHOW server_version").fetchone()[0]
    return Found(url_of("postgres"), f"PostgreSQL {version.split()[0]} (psycopg {psycopg.__version__})")


def _find_citus() -> Found:
    import psycopg

    with psycopg.connect(url_of("citus"), connect_timeout=5, autocommit=True) as connection:
        version = connection.execute("SHOW citus.version").fetchone()[0]
        nodes = connection.execute("SELECT COUNT(*) FROM pg_dist_node WHERE groupid <> 0").fetchone()[0]
    if not nodes:
        raise LookupError("the database knows no workers")
    return Found(url_of("citus"), f"Citus {version} ({nodes} workers)")


def _find_mariadb() -> Found:
    driver = install_mysql_driver()
    import MySQLdb

    settings = database_settings("mariadb")
    connection = MySQLdb.connect(
        host=settings["HOST"],
        port=int(settings["PORT"] or 3306),
        user=settings["USER"],
        password=settings["PASSWORD"],
        connect_timeout=5,
        **without_tls(settings["HOST"]),
    )
    try:
        cursor = connection.cursor()
        cursor.execute("SELECT VERSION()")
        version = cursor.fetchone()[0]
    finally:
        connection.close()
    product = "MariaDB" if "mariadb" in version.lower() else "MySQL"
    return Found(url_of("mariadb"), f"{product} {version.split('-')[0]} ({driver})")


def _find_mssql() -> Found:
    return Found(url_of("mssql"), tds.describe(database_settings("mssql")))


def _find_redis() -> Found:
    import redis

    with redis.Redis.from_url(url_of("redis"), socket_connect_timeout=5, socket_timeout=5) as client:
        return Found(url_of("redis"), f"Redis {client.info('server')['redis_version']}")


def _find_rabbitmq() -> Found:
    import amqp

    parts = urlsplit(url_of("rabbitmq"))
    with amqp.Connection(
        f"{parts.hostname}:{parts.port or 5672}",
        userid=unquote(parts.username or "guest"),
        password=unquote(parts.password or "guest"),
        virtual_host=unquote(parts.path[1:]) or "/",
        connect_timeout=5,
    ) as connection:
        return Found(url_of("rabbitmq"), f"RabbitMQ {connection.server_properties['version']}")


def _find_chromium() -> Found:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    forced = os.environ.get("SQLSEM_TEST_CHROMIUM")
    path = forced or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise FileNotFoundError(f"none of {', '.join(names)} is on the PATH; SQLSEM_TEST_CHROMIUM may name one")
    return Found(path, path)


def _find_faketime() -> Found:
    libraries = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if not libraries:
        raise FileNotFoundError("libfaketime is not installed")
    return Found(str(libraries[0]), "libfaketime")


def faketime(library: str) -> dict[str, str]:
    """Return variables for a process whose wall clock alone libfaketime sets; the monotonic clock stays right.

    libfaketime's mend for the timed waits of glibc 2.24 to 2.29 is off: with it, a thread that computes keeps the
    others of its process from running for a second.
    """
    fixed = {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_FORCE_MONOTONIC_FIX": "0"}
    return {"LD_PRELOAD": library} | fixed


def _find_initdb() -> Found:
    return _find_program("initdb")


def _find_mariadbd() -> Found:
    return _find_program("mariadbd")


def _find_pgbouncer() -> Found:
    return _find_program("pgbouncer")


def _find_program(name: str) -> Found:
    path = programs.find(name)
    return Found(path, programs.describe(path))


def is_wanted(name: str) -> bool:
    """Whether this run is to use a server or program: all of them, unless ``SQLSEM_TEST_SERVERS`` is ``none``."""
    chosen = os.environ.get("SQLSEM_TEST_SERVERS") or "all"
    if chosen not in ("all", "none"):
        raise ValueError(f"SQLSEM_TEST_SERVERS must be all or none, not {chosen!r}.")
    return chosen == "all" or name in ("sqlite", "faketime") or name in required()


def survey() -> tuple[dict[str, Found], dict[str, Missing]]:
    """Look for everything. Return what was found and what was not, by name."""
    names = ["sqlite", *DEFAULT_URLS, *PROGRAMS]
    for name in ("mssql", "citus"):
        if name in required() or os.environ.get(f"SQLSEM_TEST_{name.upper()}_URL"):
            names.insert(1, name)
    left_out = Missing("left to make test-all")
    results = {name: find(name) if is_wanted(name) else left_out for name in names}
    found = {name: result for name, result in results.items() if isinstance(result, Found)}
    return found, {name: result for name, result in results.items() if isinstance(result, Missing)}
