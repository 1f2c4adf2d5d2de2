"""SQL Server, or a stand-in that speaks TDS, as a benchmark sees it."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from benchmarks.proc import family_cpu, pids_of, process_cpu
from benchmarks.server_base import RUN, Server
from tests.support import servers, tds

PATIENCE = 20.0  # seconds
_SESSIONS = (
    "SELECT session_id FROM sys.dm_exec_sessions WHERE session_id <> @@SPID AND database_id IN"
    " (SELECT database_id FROM sys.databases WHERE CHARINDEX(?, name) > 0)"
)
_BATCHES = "SELECT cntr_value FROM sys.dm_os_performance_counters WHERE RTRIM(counter_name) = 'Batch Requests/sec'"
#: A stand-in on PostgreSQL runs every statement, and every lock request, as a transaction.
_TRANSACTIONS = "SELECT SUM(xact_commit + xact_rollback) FROM pg_catalog.pg_stat_database"


class Mssql(Server):
    """Watched from a session in the server's own database. Counts are the whole server's."""

    name = "mssql"

    def __init__(self, version: str) -> None:
        super().__init__(version)
        self.watch = tds._connect(servers.database_settings(self.name))
        self.is_stand_in = "stand-in" in version
        self.asked = 0
        #: The CPU seconds of each of our sessions' processes when it was last seen.
        self._seen: dict[int, float] = {}

    def create(self, database: str) -> dict[str, Any]:
        self._query(f"CREATE DATABASE [{database}]")
        return servers.database_settings(self.name) | {"NAME": database}

    def drop(self, database: str) -> None:
        if not self._query("SELECT name FROM sys.databases WHERE name = ?", database):
            return
        deadline = time.monotonic() + PATIENCE
        while True:
            for (session,) in self._query(_SESSIONS, database):
                with contextlib.suppress(Exception):  # it may be gone already
                    self._query(f"KILL {int(session)}")
            try:
                self._query(f"DROP DATABASE [{database}]")
            except Exception:  # a session takes a moment to end
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def statements(self) -> float | None:
        if self.is_stand_in:
            time.sleep(1.1)  # sessions report at most once a second
            return float(self._query(_TRANSACTIONS)[0][0]) - 2 * self.asked
        with contextlib.suppress(Exception):  # the login may not look
            return float(self._query(_BATCHES)[0][0]) - self.asked
        return None

    def cpu(self) -> float | None:
        if not self.is_stand_in:
            pids = pids_of("sqlservr")
            return sum(map(family_cpu, pids)) if pids else None
        for (session,) in self._query(_SESSIONS, RUN):  # there each session is a process
            used = process_cpu(int(session))
            if used is not None:
                self._seen[int(session)] = used
        return sum(self._seen.values()) if self._seen else None

    def _query(self, query: str, *parameters: Any) -> list[Any]:
        self.asked += 1
        cursor = self.watch.cursor()
        try:
            cursor.execute(query, *([parameters] if parameters else []))
            return list(cursor.fetchall()) if cursor.description else []
        finally:
            cursor.close()
