"""Who is inside at this moment, told by PostgreSQL alone and by the kernel: nothing of the library has a part in it.

A body that is inside holds an advisory lock in a session of its process. A body that is killed is counted out by its
session's end; while the server has not seen that end yet, the kernel says that the process is gone, so it does not
count. Whoever comes in counts *after* its own lock is there: of bodies that are inside at once, the last one sees all.
This module imports neither Django nor the library.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, Final

import psycopg

#: How many may be inside at once.
SLOTS: Final = 3
#: The space of the advisory locks.
SPACE: Final = 7_760_031
TABLE: Final = """
CREATE TABLE soak_entry (
    id bigserial PRIMARY KEY, place text NOT NULL, pid int NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen int NOT NULL, crowd text[], excess text[], left_at timestamptz
)
"""
_ENTER: Final = f"""
INSERT INTO soak_entry (place, pid, seen, crowd)
SELECT %s, %s, count(*), CASE WHEN count(*) > {SLOTS} THEN array_agg(session.application_name) END
FROM pg_locks AS held JOIN pg_stat_activity AS session USING (pid)
WHERE held.locktype = 'advisory' AND held.classid = {SPACE} AND held.granted
  AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
RETURNING id, crowd
"""
#: How the sessions of bodies begin their names.
NAME: Final = "inside "

_idle: list[Any] = []
_idle_of = 0
_lock = threading.Lock()


def started(pid: int) -> str | None:
    """Return when a process began, in the kernel's ticks, or ``None`` if it has ended, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def lives(name: str) -> bool:
    """Return whether the process of a body's session, by the session's name, has not ended."""
    pid, start = name.removeprefix(NAME).split()
    return started(int(pid)) == start


@contextlib.contextmanager
def inside(place: str) -> Iterator[None]:
    """Be counted inside the block. What was seen is in the table."""
    session = _session()
    session.execute(f"SELECT pg_advisory_lock({SPACE}, pg_backend_pid())")
    try:
        number, crowd = session.execute(_ENTER, (place, os.getpid())).fetchone()
        living = [name for name in crowd or () if lives(name)]
        if len(living) > SLOTS:
            session.execute("UPDATE soak_entry SET excess = %s WHERE id = %s", (living, number))
        yield
        session.execute("UPDATE soak_entry SET left_at = clock_timestamp() WHERE id = %s", (number,))
    finally:
        session.execute(f"SELECT pg_advisory_unlock({SPACE}, pg_backend_pid())")
        with _lock:
            _idle.append(session)


def close() -> None:
    """Close the sessions of this process. Nobody may be inside."""
    with _lock:
        while _idle:
            _idle.pop().close()


def _session() -> Any:
    global _idle_of
    with _lock:
        if _idle_of != os.getpid():  # a child of a fork has none
            _idle.clear()
            _idle_of = os.getpid()
        if _idle:
            return _idle.pop()
    name = f"{NAME}{os.getpid()} {started(os.getpid())}"
    return psycopg.connect(os.environ["SQLSEM_SOAK_DSN"], autocommit=True, application_name=name)
