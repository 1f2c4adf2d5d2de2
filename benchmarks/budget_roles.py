"""Roles of a measured process that say what a step of it costs: CPU, switches, calls, and the driver's part."""

from __future__ import annotations

import resource
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import django_sqlsem
from benchmarks.stats import median

#: Steps between two looks at the clock, and before the first one.
BATCH: Final = 10
#: How long a slot that goes to and fro is held, and how long after a release it is asked for again, in seconds. So
#: whoever gets it has waited for the difference.
HOLD, PAUSE = 0.01, 0.005
PACKAGE: Final = str(Path(django_sqlsem.__file__).parent)


class Way:
    """Follows what is entered in this package's own files, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.calls: list[tuple[str, str]] = []
        self.crossings = 0

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not self.on or not file.startswith(PACKAGE):
            return
        self.calls.append((file[len(PACKAGE) + 1 :], frame.f_code.co_qualname))
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != file:
            self.crossings += 1

    def figures(self) -> dict[str, Any]:
        """Return how much was entered."""
        return {
            "files": len({file for file, _ in self.calls}),
            "calls": len(self.calls),
            "crossings": self.crossings,
        }


class TimedCursor:
    """A driver's cursor whose CPU time is noted, on whatever thread it runs."""

    def __init__(self, raw: Any, spent: list[float]) -> None:
        self._raw, self._spent = raw, spent

    def _timed(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        began = time.thread_time()
        try:
            return method(*arguments, **options)
        finally:
            self._spent.append(time.thread_time() - began)

    def execute(self, *arguments: Any, **options: Any) -> Any:
        return self._timed(self._raw.execute, *arguments, **options)

    def fetchone(self) -> Any:
        return self._timed(self._raw.fetchone)

    def fetchall(self) -> Any:
        return self._timed(self._raw.fetchall)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


class SQLiteTrace:
    """Counts the statements of one connection to SQLite, and knows whether its commits are flushed."""

    def __init__(self) -> None:
        self.count = 0
        self.flushed = False

    def __call__(self, statement: str) -> None:
        self.count += 1
        if statement.startswith("PRAGMA synchronous ="):
            self.flushed = statement.endswith("FULL")


class Spent:
    """What this process has spent since this was made."""

    def __init__(self) -> None:
        self.switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        self.all, self.caller = time.process_time(), time.thread_time()

    def figures(self) -> dict[str, float]:
        """Return the CPU seconds of all threads and of the calling one, and the switches that were not forced."""
        caller, everything = time.thread_time() - self.caller, time.process_time() - self.all
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - self.switches
        return {"cpu": everything, "caller": caller, "switches": switches}


def clock_cost() -> float:
    """Return by how much a span of ``time.thread_time()`` is too long, in seconds."""
    return median([-(time.thread_time() - time.thread_time()) for _ in range(1000)])


class BudgetRoles:
    """To be mixed into the worker."""

    contender: Any
    _way: Way
    _driver: list[float]
    _traces: list[SQLiteTrace]

    def be_watched(self, what: str) -> None:
        """Note from now on what the driver does (``driver``), or which functions are entered (``calls``)."""
        if what == "calls":
            self._way = Way()
            threading.setprofile(self._way)
            sys.setprofile(self._way)
            return
        from django_sqlsem.database.cursors import Cursor

        self._driver, self._traces = [], []
        run_on, connect = Cursor._run_on, sqlite3.connect

        def run_timed(cursor: Any, raw: Any) -> None:
            run_on(cursor, TimedCursor(raw, self._driver))

        def connect_traced(*arguments: Any, **options: Any) -> sqlite3.Connection:
            connection = connect(*arguments, **options)
            self._traces.append(SQLiteTrace())
            connection.set_trace_callback(self._traces[-1])
            return connection

        Cursor._run_on = run_timed  # type: ignore[method-assign]
        sqlite3.connect = sqlite3.dbapi2.connect = connect_traced

    def driver(self) -> dict[str, float]:
        """Return the driver's CPU seconds so far, what it cost to measure them, and SQLite's statements."""
        clocks = clock_cost() * len(self._driver)
        return {
            "driver": sum(self._driver) - clocks,
            "measuring": 2 * clocks,
            "statements": sum(trace.count for trace in self._traces),
            "flushed": max(self._traces, key=lambda trace: trace.count).flushed if self._traces else True,
        }

    def step(self, what: str) -> Callable[[], object]:
        """Return a function that does a step once."""
        contender = self.contender
        if what == "decorated call":
            decorated: Callable[[], object] = contender.semaphore(lambda: None)
            return decorated

        def pair() -> None:
            contender.acquire()
            contender.release()

        return pair

    def repeat(self, what: str, seconds: float) -> dict[str, float]:
        """Do a step over and over for a while; return how often, how long each took, and what this process spent."""
        step = self.step(what)
        lasted: list[float] = []
        spent, clock = Spent(), time.perf_counter
        end = began = clock()
        while end - began < seconds:
            start = end
            for _ in range(BATCH):
                step()
            end = clock()
            lasted.append((end - start) / BATCH)
        return spent.figures() | {"steps": BATCH * len(lasted), "took": median(lasted)}

    def follow(self, what: str) -> dict[str, Any]:
        """Do a step once, and return what the calling thread has entered meanwhile."""
        step, way = self.step(what), Way()
        step()
        way.on = True
        sys.setprofile(way)
        try:
            step()
        finally:
            sys.setprofile(None)
        return {"way": way.figures(), "list": [f"{file}: {function}" for file, function in way.calls]}

    def take_turns(self, start: float, seconds: float) -> dict[str, Any]:
        """Acquire, hold and release from ``start`` on, in turn with another process; return what that cost.

        The sleeps between the calls are left out.
        """
        contender, clock, cpu, turns, caller = self.contender, time.monotonic, time.thread_time, [], 0.0
        too_long = 2 * clock_cost()
        time.sleep(max(0.0, start - clock()))
        if way := getattr(self, "_way", None):
            way.on, way.calls, way.crossings = True, [], 0
        spent, end = Spent(), start + seconds
        while (asked := clock()) < end:
            began = cpu()
            contender.acquire()
            caller += cpu() - began
            granted = clock()
            time.sleep(HOLD)
            released, began = clock(), cpu()
            contender.release()
            caller += cpu() - began - too_long
            turns.append((asked, granted, released))
            time.sleep(PAUSE)
        figures = spent.figures()
        if way:
            way.on = False
            return {"turns": turns, "way": way.figures(), "list": Counter(way.calls)}
        figures["cpu"] += caller - figures["caller"]
        return figures | {"caller": caller, "switches": figures["switches"] - 2 * len(turns), "turns": turns}
