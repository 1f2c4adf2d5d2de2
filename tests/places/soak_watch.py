"""What the soak test looks at from outside: rows, sessions, memory; and its summary."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import psutil
import psycopg

from tests.places.presence import NAME
from tests.places.soak_load import Kill

#: The sessions of servers and workers: those of the library and of Django.
_SESSIONS: Final = f"""
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'
AND pid <> pg_backend_pid() AND application_name NOT LIKE '{NAME}%%' AND application_name <> 'soak watch'
"""
_HELD: Final = """
SELECT slot, pid, token FROM sqlsem_slot JOIN sqlsem_semaphore ON name_key = semaphore_key
WHERE name = 'soak' AND permit_id IS NOT NULL AND expires_us > extract(epoch FROM clock_timestamp()) * 1000000
"""
_BY_PLACE: Final = """
SELECT place, count(*), extract(epoch FROM percentile_cont(0.5) WITHIN GROUP (ORDER BY left_at - at)),
  count(*) FILTER (WHERE left_at IS NULL)
FROM soak_entry GROUP BY place ORDER BY place
"""


class Watch:
    """Looks at one PostgreSQL database through a connection of its own, from several threads."""

    def __init__(self, dsn: str) -> None:
        self._connection: Any = psycopg.connect(dsn, autocommit=True, application_name="soak watch")
        self._lock = threading.Lock()

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows."""
        with self._lock:
            cursor = self._connection.execute(sql)
            return list(cursor.fetchall()) if cursor.description else []

    def held(self) -> list[tuple[int, int, int]]:
        """Return slot, pid and token of each slot that a live permit has."""
        return [(int(slot), int(pid), int(token)) for slot, pid, token in self.rows(_HELD)]

    def sessions(self) -> int:
        """Return how many sessions servers and workers have, those of the counter left out."""
        return int(self.rows(_SESSIONS)[0][0])

    def ran(self, place: str) -> int:
        """Return how many bodies have been inside at a place."""
        return int(self.rows(f"SELECT count(*) FROM soak_entry WHERE place = '{place}'")[0][0])

    def close(self) -> None:
        """Close its connection."""
        self._connection.close()


@dataclass
class Life:
    """The memory of one process that lives long, in bytes: when it had warmed up, and at last."""

    what: str
    since: float
    first: int
    last: int
    until: float

    @property
    def grown(self) -> float:
        """By which part it has grown."""
        return self.last / self.first - 1


@dataclass
class Samples:
    """Notes memory and sessions every ``every`` seconds, in a thread; memory once a process is ``warm`` seconds old.

    ``most`` is how many sessions there may be: two for each process.
    """

    watch: Watch
    processes: Callable[[], dict[str, list[int]]]
    every: float
    warm: float
    sessions: list[int] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    lives: dict[tuple[int, float], Life] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samples")
        self.take()
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self.every):
            self.take()

    def take(self) -> None:
        """Take one sample."""
        before = self.processes()
        self.sessions.append(self.watch.sessions())
        after = self.processes()
        self.most.append(2 * len({pid for each in (before, after) for pids in each.values() for pid in pids}))
        for what, pids in after.items():
            for pid in pids:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    born, size, now = process.create_time(), process.memory_info().rss, time.time()
                    if now - born < self.warm or not size:  # a process that has ended has none
                        continue
                    life = self.lives.setdefault((pid, born), Life(what, now, size, size, now))
                    life.last, life.until = size, now

    def end(self) -> None:
        """Take no more."""
        self._stop.set()
        self._thread.join(60)

    def of(self, seconds: float) -> list[Life]:
        """Return the lives that were seen for so long."""
        return [life for life in self.lives.values() if life.until - life.since >= seconds]


def summary(watch: Watch, seconds: float, lines: dict[str, object], kills: list[Kill], samples: Samples) -> str:
    """Return the table that the test prints."""
    table = [f"{'place':16}{'entered':>9}{'per second':>12}{'median s':>10}{'cut short':>11}"]
    for place, count, median, cut in watch.rows(_BY_PLACE):
        table.append(f"{place:16}{count:>9}{count / seconds:>12.2f}{float(median or 0):>10.3f}{cut:>11}")
    table += ["", f"{'holders killed':16}{'slots':>9}{'median s':>12}{'longest s':>10}"]
    for what in sorted({kill.what for kill in kills}):
        took = sorted(kill.took if kill.took is not None else float("inf") for kill in kills if kill.what == what)
        table.append(f"{what:16}{len(took):>9}{took[len(took) // 2]:>12.2f}{took[-1]:>10.2f}")
    table += ["", f"{'memory':20}{'seen s':>8}{'MB':>8}{'at last':>8}{'grown':>8}"]
    for life in sorted(samples.lives.values(), key=lambda life: life.since - life.until)[:12]:
        table.append(
            f"{life.what:20}{life.until - life.since:>8.0f}{life.first / 1e6:>8.1f}{life.last / 1e6:>8.1f}"
            f"{life.grown:>8.1%}"
        )
    table += ["", f"sessions, one sample after the other: {samples.sessions}"]
    return "\n".join([*table, "", *(f"{name}: {value}" for name, value in lines.items())])
