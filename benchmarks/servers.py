"""The databases of a run: found as the tests find theirs, created, watched and dropped."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import ENVIRONMENT
from benchmarks.cli import say
from benchmarks.proc import family_cpu, parent_of, pids_of
from benchmarks.server_base import RUN, Server
from benchmarks.server_mssql import Mssql
from tests.support import servers as found_by_tests
from tests.support.servers import Missing, url_of

__all__ = ["PORTS", "RUN", "Server", "databases", "find", "mysql_connection", "one"]

PORTS = {"postgres": 5432, "mariadb": 3306, "mssql": 1433}


class Postgres(Server):
    """PostgreSQL, watched from a session in its maintenance database, whose own statements are not counted."""

    name = "postgres"

    def __init__(self, version: str) -> None:
        super().__init__(version)
        import psycopg

        self.watch = psycopg.connect(url_of(self.name), autocommit=True, connect_timeout=5)
        self.watch.execute("SET stats_fetch_consistency = none") if self.watch.info.server_version >= 150000 else None

    def create(self, database: str) -> dict[str, Any]:
        self.watch.execute(f'CREATE DATABASE "{database}"')
        return found_by_tests.database_settings(self.name) | {"NAME": database}

    def drop(self, database: str) -> None:
        self.watch.execute(f'DROP DATABASE IF EXISTS "{database}" WITH (FORCE)')

    def statements(self) -> float | None:
        return self._one(
            "SELECT sum(xact_commit + xact_rollback)::float FROM pg_stat_database WHERE datname LIKE %s", f"%{RUN}%"
        )

    def spare_connections(self) -> int | None:
        limit = int(self._one("SELECT setting FROM pg_settings WHERE name = 'max_connections'"))
        return limit - self._one("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")

    def cpu(self) -> float | None:
        backend = self._one("SELECT pg_backend_pid()")
        with contextlib.suppress(OSError, ValueError):
            if Path(f"/proc/{backend}/comm").read_text().strip() == "postgres":
                return family_cpu(parent_of(backend))
        return None

    def flushes(self) -> float | None:
        version = self.watch.info.server_version
        if version < 140000:
            return None
        if version < 180000:
            return float(self._one("SELECT wal_sync FROM pg_stat_wal"))
        return float(self._one("SELECT sum(fsyncs) FROM pg_stat_io WHERE object = 'wal'"))

    def waits_on(self) -> list[str]:
        query = (
            "SELECT coalesce(wait_event_type || ':' || wait_event, 'running') FROM pg_stat_activity"
            " WHERE datname LIKE %s AND state = 'active'"
        )
        return [row[0] for row in self.watch.execute(query, [f"%{RUN}%"]).fetchall()]

    def _one(self, query: str, *parameters: Any) -> Any:
        return self.watch.execute(query, parameters).fetchone()[0]


class Mariadb(Server):
    """MariaDB or MySQL. Its count of statements is the whole server's."""

    name = "mariadb"

    def __init__(self, version: str) -> None:
        super().__init__(version)
        self.watch = mysql_connection()
        self.asked = 0

    def create(self, database: str) -> dict[str, Any]:
        self._query(f"CREATE DATABASE `{database}` CHARACTER SET utf8mb4")
        return found_by_tests.database_settings(self.name) | {"NAME": database}

    def drop(self, database: str) -> None:
        self._query(f"DROP DATABASE IF EXISTS `{database}`")

    def statements(self) -> float | None:
        return float(self._query("SHOW GLOBAL STATUS LIKE 'Questions'")[0][1]) - self.asked

    def flushes(self) -> float | None:
        return float(self._query("SHOW GLOBAL STATUS LIKE 'Innodb_data_fsyncs'")[0][1])

    def spare_connections(self) -> int | None:
        limit = int(self._query("SELECT @@max_connections")[0][0])
        return limit - self._query("SELECT COUNT(*) FROM information_schema.processlist")[0][0]

    def cpu(self) -> float | None:
        with contextlib.suppress(OSError, ValueError):
            pid = int(Path(self._query("SELECT @@pid_file")[0][0]).read_text())
            if pid in pids_of("mariadbd", "mysqld"):
                return family_cpu(pid)
        return None

    def _query(self, query: str, *parameters: Any) -> Any:
        self.asked += 1
        with self.watch.cursor() as cursor:
            cursor.execute(query, parameters or None)
            return cursor.fetchall()


class Sqlite(Server):
    """SQLite files in a temporary directory, in WAL mode, flushed at every commit."""

    name = "sqlite"

    def __init__(self, version: str) -> None:
        super().__init__(version)
        self.directory = tempfile.mkdtemp(prefix="sqlsem-bench-")
        self.watch: sqlite3.Connection | None = None

    def create(self, database: str) -> dict[str, Any]:
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": os.path.join(self.directory, f"{database}.sqlite3"),
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "init_command": "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL",
            },
        }

    def drop(self, database: str) -> None:
        if self.watch is not None:
            self.watch.close()
            self.index.close()
            self.watch = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def flushes(self) -> float | None:
        """Return how many transactions have been committed: each is flushed, for who has ``synchronous = FULL``.

        The index of the write-ahead log counts them, in the third word of its file, which is there while somebody has
        the database open.
        """
        path = os.path.join(self.directory, f"sqlsem_bench_{RUN}.sqlite3")
        if self.watch is None:
            self.watch = sqlite3.connect(path)
            self.watch.execute("SELECT count(*) FROM sqlite_master").fetchall()
            # Kept open: to close it would give up the locks on it that SQLite has in this process.
            self.index = open(f"{path}-shm", "rb", buffering=0)  # noqa: SIM115
        return float(int.from_bytes(os.pread(self.index.fileno(), 4, 8), sys.byteorder))


class Redis(Server):
    """Redis, for its peers. It keeps nothing on the disk at a release or an acquire."""

    name = "redis"

    def __init__(self, version: str) -> None:
        super().__init__(version)
        import redis

        self.watch = redis.Redis.from_url(url_of(self.name))

    def create(self, database: str) -> dict[str, Any]:
        return {}

    def drop(self, database: str) -> None:
        for pattern in (f"*{RUN}*",):
            keys = list(self.watch.scan_iter(match=pattern, count=1000))
            if keys:
                self.watch.delete(*keys)

    def statements(self) -> float | None:
        return float(self.watch.info("stats")["total_commands_processed"])

    def cpu(self) -> float | None:
        used = self.watch.info("cpu")
        return float(used["used_cpu_user"] + used["used_cpu_sys"])


KINDS: dict[str, type[Server]] = {kind.name: kind for kind in (Sqlite, Postgres, Mariadb, Mssql, Redis)}


def find(names: list[str]) -> tuple[dict[str, Server], dict[str, str]]:
    """Return the servers of these names that answer, and why the others do not."""
    servers, missing = {}, {}
    for name in names:
        result = found_by_tests.find(name)
        if isinstance(result, Missing):
            missing[name] = result.reason.partition("\n")[0]
        else:
            servers[name] = KINDS[name](result.version)
    return servers, missing


@contextlib.contextmanager
def databases(servers: dict[str, Server]) -> Iterator[dict[str, Any]]:
    """Create two databases per server, one of them to be filled; yield ``DATABASES``, and drop them at the end."""
    entries: dict[str, Any] = {"default": {}}
    try:
        for name, server in servers.items():
            for alias in (name, f"{name}_full"):
                entry = server.create(f"sqlsem_bench_{RUN}{alias.removeprefix(name)}")
                if entry:
                    entries[alias] = entry
        yield entries
    finally:
        for name, server in servers.items():
            for alias in (name, f"{name}_full"):
                server.drop(f"sqlsem_bench_{RUN}{alias.removeprefix(name)}")


@contextlib.contextmanager
def one(database: str, settings: str) -> Iterator[dict[str, Any]]:
    """Create the databases of one server, for Django with these settings; yield nothing, and say so, if it is away."""
    servers, missing = find([database])
    if missing:
        say(f"{database} does not answer: {missing[database]}")
    with databases(servers) if servers else contextlib.nullcontext({}) as entries:
        os.environ[ENVIRONMENT] = json.dumps(entries)
        os.environ["DJANGO_SETTINGS_MODULE"] = settings
        yield entries


def mysql_connection(entry: dict[str, Any] | None = None) -> Any:
    """Open a connection to a database of ``DATABASES`` with the driver that Django uses, in autocommit.

    Without an entry, to the server alone.
    """
    found_by_tests.install_mysql_driver()
    import MySQLdb

    settings = entry or found_by_tests.database_settings("mariadb")
    connection = MySQLdb.connect(
        host=settings["HOST"],
        port=int(settings["PORT"] or PORTS["mariadb"]),
        user=settings["USER"],
        password=settings["PASSWORD"],
        connect_timeout=5,
        **({"database": entry["NAME"]} if entry else {}),
        **settings["OPTIONS"],
    )
    connection.autocommit(True)
    return connection
