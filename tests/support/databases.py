"""The test databases as seen from outside the library: raw connections, sessions, and an independent counter."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.apps import apps
from django.conf import settings
from django.db import OperationalError, connections, transaction

from tests.support import few_rights, servers, tds

ROOT = Path(__file__).resolve().parent.parent.parent
#: What people call each alias.
LABELS = {"default": "sqlite"}
#: A deadline for releases that the keeper is still busy with after a test, in seconds. Most have been made by then.
GRACE = 20.0
#: The tables that tests write besides the library's own, in the order in which they can be emptied.
WRITTEN = (
    "testapp_probe",
    "testapp_countedinventory",
    "testapp_inventory",
    "testapp_warehouse",
    "testapp_job",
    "django_admin_log",
    "django_session",
    "auth_user_user_permissions",
    "auth_user_groups",
    "auth_user",
    "auth_group_permissions",
    "auth_group",
)
_PASSED_ON = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT", "OPTIONS", "CONN_MAX_AGE", "TEST")


def covered() -> list[str]:
    """Return the aliases that the tests cover, ``default`` first."""
    return sorted(settings.DATABASES, key=lambda alias: (alias != "default", alias))


def label(alias: str) -> str:
    """Return what people call an alias: ``sqlite`` for ``default``."""
    return LABELS.get(alias, alias)


def version(name: str) -> str | None:
    """Return a covered server's product, version and driver in one line, or ``None`` if it is not covered."""
    found = settings.FOUND.get(label(name))
    return found.version if found else None


def child_environment(**extra: str) -> dict[str, str]:
    """Return the environment for a child process: it sees the very test databases and ``SQLSEM`` of the caller."""
    databases = {}
    for alias in covered():
        current = connections[alias].settings_dict
        databases[alias] = {key: current[key] for key in _PASSED_ON if key in current}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return environment | {
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "SQLSEM_TEST_DATABASES": json.dumps(databases, default=str),
        "SQLSEM_TEST_SETTINGS": json.dumps(settings.SQLSEM, default=str),
        **extra,
    }


def faketime_environment(offset: str) -> dict[str, str] | None:
    """Return variables that set a child's wall clock wrong by ``offset`` (``"+1d"``), or ``None`` without libfaketime.

    The monotonic and boot clocks stay right, as they do on a host whose clock is set wrong.
    """
    found = settings.FOUND.get("faketime")
    return None if found is None else servers.faketime(found.where) | {"FAKETIME": offset}


def raw_connection(alias: str) -> Any:
    """Open a connection of the plain driver, in autocommit. The caller closes it."""
    connection = connections[alias]
    if connection.vendor == "microsoft":
        return tds.raw_connection(alias)
    if connection.vendor == "sqlite":
        name = connection.settings_dict["NAME"]
        return sqlite3.connect(name, timeout=60, isolation_level=None, check_same_thread=False)
    parameters = few_rights.parameters_of_owner(alias)
    if connection.vendor == "postgresql":
        import psycopg

        parameters.pop("cursor_factory", None)
        return psycopg.connect(**parameters, autocommit=True)
    import MySQLdb

    raw = MySQLdb.connect(**parameters)
    raw.autocommit(True)
    return raw


def query(alias: str, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Run one statement on a raw connection of its own and return its rows. SQLite's placeholders are ``?``."""
    with contextlib.closing(raw_connection(alias)) as connection:
        cursor = connection.cursor()
        if connections[alias].vendor == "microsoft":
            cursor.execute(tds.marks(sql), parameters)
            return tds.rows(cursor)
        cursor.execute(sql, parameters)
        return list(cursor.fetchall()) if cursor.description else []


def session_ids(alias: str, pid: int | None = None) -> list[int]:
    """Return the server's sessions in the test database, this query's own left out. SQLite has none.

    ``pid``: on SQL Server, those of this process alone; the others do not know it.
    """
    vendor = connections[alias].vendor
    if vendor == "postgresql":
        where = "datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        where += " AND left(application_name, 14) <> 'citus_internal'"  # those that Citus opens to itself
        sql = f"SELECT pid FROM pg_stat_activity WHERE {where} ORDER BY pid"
    elif vendor == "mysql":
        sql = (
            "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID() ORDER BY id"
        )
    elif vendor == "microsoft":
        sql = tds.SESSIONS if pid is None else tds.SESSIONS_OF.format(pid=int(pid))
    else:
        return []
    return [int(row[0]) for row in query(alias, sql)]


def kill_sessions(alias: str, ids: list[int] | None = None) -> int:
    """End these sessions, or all that are in the test database, by the server. Return how many there were."""
    vendor = connections[alias].vendor
    ids = session_ids(alias) if ids is None else ids
    with contextlib.closing(raw_connection(alias)) as connection:
        cursor = connection.cursor()
        for one in ids:
            if vendor == "postgresql":
                cursor.execute("SELECT pg_terminate_backend(%s::int)", (one,))
            else:
                with contextlib.suppress(Exception):  # it may be gone already
                    cursor.execute(f"KILL {int(one)}")
    return len(ids)


def held_rows(alias: str) -> list[Any]:
    """Return the slot rows that a live permit holds, by the database's own clock or, on TDS servers, by their locks."""
    from django_sqlsem.database.dialects import dialect_for

    rows = apps.get_model("sqlsem.SlotRow").objects.using(alias).select_related("semaphore")
    rows = rows.order_by("semaphore", "slot")
    if connections[alias].vendor == "microsoft":
        marked = list(rows.filter(expires_us__isnull=False))
        locked = tds.locked(alias, [f"{row.slot}-{tds.lock_base(row.semaphore.name)}" for row in marked])
        return [row for row, held in zip(marked, locked, strict=True) if held]
    with connections[alias].cursor() as cursor:
        now = dialect_for(connections[alias]).now(cursor)
    return list(rows.filter(expires_us__gt=now))


def assert_nothing_held(alias: str, *, within: float = GRACE) -> None:
    """Assert that no live permit holds a slot, or no longer does after ``within`` seconds."""
    deadline = time.monotonic() + within
    while (held := held_rows(alias)) and time.monotonic() < deadline:
        time.sleep(0.05)
    shown = [f"{row.semaphore.name!r} slot {row.slot} by pid {row.pid} {row.thread} {row.label}" for row in held]
    assert not held, f"still held: {'; '.join(shown)}"


def delete_rows(alias: str) -> None:
    """Delete all that tests write to an alias."""
    connections[alias].close()  # whatever a test did to it
    models = [model for model in apps.get_app_config("sqlsem").get_models() if model.__name__ != "ServerRow"]
    tables = (*(model._meta.db_table for model in reversed(models)), *WRITTEN)
    statements = [f"DELETE FROM {table}" for table in tables]
    with contextlib.suppress(OperationalError):  # a deadlock with a killed child's
        if connections[alias].vendor == "postgresql":  # all in one round trip
            return _execute(alias, "; ".join(statements))
        if connections[alias].vendor == "mysql":  # which writes each of its commits to the disk
            with transaction.atomic(using=alias):
                return _execute(alias, *statements)
    _execute(alias, *statements)


def _execute(alias: str, *statements: str) -> None:
    with connections[alias].cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def commit_without_waiting(alias: str) -> None:
    """Let PostgreSQL answer a commit before the disk has it: only a crash of the server could tell the difference."""
    if connections[alias].vendor == "postgresql":
        with connections[alias].cursor() as cursor:
            name = connections[alias].ops.quote_name(connections[alias].settings_dict["NAME"])
            cursor.execute(f"ALTER DATABASE {name} SET synchronous_commit TO off")
        connections[alias].close()  # the next session has it


@contextlib.contextmanager
def without_tables(alias: str, *tables: str) -> Iterator[None]:
    """Inside the block these tables are not there."""
    there = connections[alias].vendor == "microsoft"
    rename = "EXEC sp_rename '{0}', '{1}', 'OBJECT'" if there else "ALTER TABLE {0} RENAME TO {1}"
    with contextlib.ExitStack() as renamed:
        for table in tables:
            query(alias, rename.format(table, f"{table}_away"))
            renamed.callback(query, alias, rename.format(f"{table}_away", table))
        yield


class OutsideCounter:
    """Counts how many are inside at once with plain SQL on connections of its own, one per thread.

    It never uses the library, so it can testify about it. Any number of threads and processes may share a name.
    """

    def __init__(self, alias: str, name: str = "probe") -> None:
        self.alias = alias
        self.name = name
        self._vendor = connections[alias].vendor
        self._mark = "?" if self._vendor in ("sqlite", "microsoft") else "%s"
        self._local = threading.local()
        self._opened: list[Any] = []
        columns = "INTO testapp_probe (name, inside, peak, entered)"
        values = f"VALUES ({self._mark}, 0, 0, 0)"
        if self._vendor == "mysql":
            self._execute(f"INSERT IGNORE {columns} {values}")
        elif self._vendor == "microsoft":
            self._insert_there(columns, values)
        else:
            self._execute(f"INSERT {columns} {values} ON CONFLICT DO NOTHING")

    def enter(self) -> None:
        """Count one in."""
        # MySQL assigns from left to right, so the column that the others read comes last.
        self._update(
            "entered = entered + 1, peak = CASE WHEN inside + 1 > peak THEN inside + 1 ELSE peak END,"
            " inside = inside + 1"
        )

    def leave(self) -> None:
        """Count one out."""
        self._update("inside = inside - 1")

    @contextlib.contextmanager
    def inside(self) -> Any:
        """Count the block in and out."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @property
    def current(self) -> int:
        """How many are in now."""
        return self._read("inside")

    @property
    def peak(self) -> int:
        """The most that were ever in at once."""
        return self._read("peak")

    @property
    def entered(self) -> int:
        """How many came in, in all."""
        return self._read("entered")

    def close(self) -> None:
        """Close the connections of all threads. The threads must have ended."""
        while self._opened:
            self._opened.pop().close()
        self._local = threading.local()

    def __enter__(self) -> OutsideCounter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _connection(self) -> Any:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = raw_connection(self.alias)
            self._opened.append(connection)
            if self._vendor == "postgresql":
                connection.execute("SET synchronous_commit = off")  # nobody counts on it after a crash
            elif self._vendor == "sqlite":
                connection.execute("PRAGMA synchronous = OFF")
        return connection

    def _execute(self, sql: str) -> int:
        cursor = self._connection().cursor()
        if self._vendor != "sqlite":
            cursor.execute(sql, (self.name,))
            return int(cursor.rowcount)
        # Locked for writing before it reads: an upgrade from reading could be refused at once.
        cursor.execute("BEGIN IMMEDIATE")
        try:
            return int(cursor.execute(sql, (self.name,)).rowcount)
        finally:
            cursor.execute("COMMIT")

    def _insert_there(self, columns: str, values: str) -> None:
        """Insert the row where no statement passes over one that is there."""
        try:
            self._execute(f"INSERT {columns} {values}")
        except Exception:
            self._read("inside")  # somebody else was first; else this fails as well

    def _update(self, assignments: str) -> None:
        count = self._execute(f"UPDATE testapp_probe SET {assignments} WHERE name = {self._mark}")
        assert count == 1, f"the row of the counter {self.name!r} is gone"

    def _read(self, column: str) -> int:
        cursor = self._connection().cursor()
        cursor.execute(f"SELECT {column} FROM testapp_probe WHERE name = {self._mark}", (self.name,))
        return int(cursor.fetchone()[0])


def required_but_missing() -> dict[str, str]:
    """Return what ``SQLSEM_TEST_REQUIRE`` names and is not there, with the reasons."""
    missing = {}
    for name in sorted(servers.required() - set(settings.FOUND)):
        known = settings.MISSING.get(name)
        missing[name] = known.reason if known else "there is no such server or program for the tests to look for"
    return missing
