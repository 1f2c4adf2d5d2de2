"""An exception that strikes at any statement or await of an acquire or a release leaves nothing held."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from django.apps import apps
from django.db import connections

from django_sqlsem import AcquireTimeoutError, Semaphore, semaphore
from django_sqlsem.backends.dialects import dialect_for
from django_sqlsem.holds import Hold
from tests.databases import held_rows
from tests.interruptions import LIBRARY, SoftLimit, Striking, StrikingAwait, without_tracer
from tests.processes import Child
from tests.threads import run_in_threads, wait_until

#: The keeper looks around once a second; the rest is for a busy machine.
HEARTBEAT = 2.0
WALKERS = 6
#: How long the holder in the way keeps its slot, where it gives it back.
SHORT = 0.02

ERRORS = [KeyboardInterrupt, SoftLimit]


#: Modules that only look something up, and change nothing that could be left half done.
PURE = {
    "backends/__init__.py",
    "backends/dialects.py",
    "backends/rows_sql.py",
    "call_names.py",
    "calls.py",
    "clocks.py",
    "conf.py",
    "identity.py",
    "name_templates.py",
    "naming.py",
    "session_settings.py",
    "snapshots.py",
    "testmode.py",
    "timeouts.py",
}


def acts(frame: FrameType) -> bool:
    """Return whether a frame's statements may change something."""
    return str(Path(frame.f_code.co_filename).relative_to(LIBRARY)) not in PURE


def live_waiters(alias: str) -> list[Any]:
    """Return the waiters' rows that count, by the database's own clock."""
    with connections[alias].cursor() as cursor:
        now = dialect_for(connections[alias]).now(cursor)
    return list(apps.get_model("sqlsem.WaiterRow").objects.using(alias).filter(expires_us__gt=now))


@dataclass
class Walk:
    """Interrupts an action at its first statement, its second, and so on, each time under a name of its own.

    ``keep``: the exceptions are kept, as an error reporter may keep them, with their tracebacks, and thereby every
    local variable of the frames that they came through. ``all``: at every statement of the library, otherwise at
    those that change something. Every other exception is a ``KeyboardInterrupt``; ``turn`` says which.
    """

    alias: str
    action: Callable[[Semaphore, Callable[[], Striking]], None]
    slots: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    used: bool = True
    busy: float | None = 0.0
    keep: bool = False
    all: bool = False
    turn: int = 0
    errors: list[str] = field(default_factory=list)
    kept: list[BaseException] = field(default_factory=list)
    points: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Walk through all points, several threads side by side."""
        run_in_threads(WALKERS, self._some, timeout=200)
        assert not self.errors, "\n".join(self.errors)
        assert len(self.points) > 10
        wait_until(lambda: not held_rows(self.alias), timeout=HEARTBEAT, what="nothing held")
        wait_until(lambda: not live_waiters(self.alias), timeout=HEARTBEAT, what="no live waiter")

    def _some(self, first: int) -> None:
        for nth in itertools.count(1 + first, WALKERS):
            if not self._point(nth) or len(self.errors) > 9:
                return

    def _point(self, nth: int) -> bool:
        """Interrupt the action at its ``nth`` statement. Return whether it had so many."""
        kind = ERRORS[(nth // WALKERS + self.turn) % 2]
        lock = semaphore(f"walk-{nth}", self.slots, take=self.slots, timeout=10, using=self.alias, **self.options)
        if self.used:
            lock.acquire().release()
        strikes = Striking(nth, kind("struck"), wanted=lambda frame: self.all or acts(frame))
        raised = False
        with self._in_the_way(lock):
            try:
                self.action(lock, lambda: strikes)
            except kind as error:
                raised = True
                if self.keep:
                    self.kept.append(without_tracer(error))
        if strikes.struck is None:
            return False
        self.points.append(strikes.struck)
        if not raised:
            self.errors.append(f"{nth}: what struck at {strikes.struck} was swallowed")
        started = time.monotonic()
        try:
            again = lock.acquire()
        except Exception as error:
            self.errors.append(f"{nth}: after {strikes.struck}: {error!r}")
        else:
            took = time.monotonic() - started
            if took > HEARTBEAT:
                self.errors.append(f"{nth}: after {strikes.struck} it was held for {took:.1f} s")
            again.release()
        return True

    @contextmanager
    def _in_the_way(self, lock: Semaphore) -> Iterator[None]:
        """Have another holder in the way: never (0), for so many seconds, or for as long as the action runs (None)."""
        if self.busy == 0:
            yield
            return
        other = lock.acquire()
        other.detach()
        timer = threading.Timer(self.busy, other.release) if self.busy else None
        if timer:
            timer.start()
        try:
            yield
        finally:
            if timer:
                timer.join()
            other.release()


def acquire(lock: Semaphore, striking: Callable[[], Striking]) -> None:
    with striking():
        permit = lock.acquire()
    permit.release()


def acquire_in_vain(lock: Semaphore, striking: Callable[[], Striking]) -> None:
    with striking(), pytest.raises(AcquireTimeoutError):
        lock.acquire(timeout=0.03)


def try_in_vain(lock: Semaphore, striking: Callable[[], Striking]) -> None:
    with striking():
        assert lock.try_acquire() is None


def release(lock: Semaphore, striking: Callable[[], Striking]) -> None:
    permit = lock.acquire()
    with striking():
        permit.release()


def with_block(lock: Semaphore, striking: Callable[[], Striking]) -> None:
    with striking(), lock as permit:
        permit.check()


def with_permit(lock: Semaphore, striking: Callable[[], Striking]) -> None:
    with striking(), lock.acquire() as permit:
        permit.check()


def decorated(lock: Semaphore, striking: Callable[[], Striking]) -> None:
    @lock
    def body() -> None:
        pass

    with striking():
        body()


SCENARIOS = {
    "free": {"action": acquire, "keep": True, "all": True},
    "free-again": {"action": acquire, "keep": True, "all": True, "turn": 1},
    "new-name": {"action": acquire, "used": False, "keep": True},
    "granted-while-waiting": {"action": acquire, "busy": SHORT, "keep": True, "turn": 1},
    "timeout": {"action": acquire_in_vain, "busy": None, "keep": True, "turn": 1},
    "try": {"action": try_in_vain, "busy": None},
    "take-2": {"action": acquire, "slots": 2, "turn": 1},
    "take-2-new-name": {"action": acquire, "slots": 2, "used": False},
    "take-2-waiting": {"action": acquire, "slots": 2, "busy": SHORT, "turn": 1},
    "release": {"action": release},
    "with-block": {"action": with_block, "turn": 1},
    "with-permit": {"action": with_permit},
    "decorated": {"action": decorated},
    "unfair": {"action": acquire, "busy": SHORT, "options": {"fair": False}, "turn": 1},
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_struck_at_every_statement(database, scenario):
    Walk(database, **SCENARIOS[scenario]).run()
