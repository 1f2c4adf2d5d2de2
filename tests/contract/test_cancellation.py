"""An exception that strikes at any statement or await of an acquire or a release leaves nothing held."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest
from django.apps import apps
from django.db import connections

from django_sqlsem import AcquireTimeoutError, Semaphore, semaphore
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.runtime.acquisition import Acquisition
from django_sqlsem.runtime.keeper import Keeper
from django_sqlsem.runtime.queue import LocalQueue
from tests.programs import signalled
from tests.support.databases import held_rows
from tests.support.interruptions import Place, SoftLimit, Striking, StrikingAwait, module_of, without_tracer
from tests.support.processes import Child
from tests.support.threads import run_beside, run_in_threads, wait_until

#: The keeper looks around once a second; the rest is for a busy machine.
HEARTBEAT = 20.0
WALKERS = 6
#: How long the holder in the way keeps its slot, where it gives it back.
SHORT = 0.02

ERRORS = [KeyboardInterrupt, SoftLimit]

# What strikes a driver's connect() on its way back costs a connection that nobody has yet.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning"),
    pytest.mark.process_side("postgres"),
]


#: In how many walks a place must have been struck on a database before further ones pass it over.
ENOUGH = 3
WALKED: dict[str, Counter[Place]] = {}

#: Modules that only look something up, and change nothing that could be left half done.
PURE = {
    "backends/__init__.py",
    "database/dialects.py",
    "decorators/calls.py",
    "core/clocks.py",
    "conf.py",
    "core/identity.py",
    "core/templates.py",
    "core/names.py",
    "database/errors.py",
    "snapshots.py",
    "core/testmode.py",
    "core/durations.py",
}

#: What makes statements and connections.
TALKING = ("backends/", "database/cursors", "runtime/keeper.py", "database/sessions")


def acts(frame: FrameType) -> bool:
    """Return whether a frame's statements may change something."""
    return module_of(frame.f_code) not in PURE


def talks(frame: FrameType) -> bool:
    """Return whether a frame's module differs from one database to the other; the rest is walked through on SQLite."""
    return module_of(frame.f_code).startswith(TALKING)


def live_waiters(alias: str) -> list[Any]:
    """Return the waiters' rows that count, by the database's own clock."""
    with connections[alias].cursor() as cursor:
        now = dialect_for(connections[alias]).now(cursor)
    return list(apps.get_model("sqlsem.WaiterRow").objects.using(alias).filter(expires_us__gt=now))


@dataclass
class Walk:
    """Interrupts an action at its first statement, its second, and so on, each time under a name of its own.

    ``keep``: the exceptions are kept, as an error reporter may keep them, with their tracebacks, and thereby every
    local variable of the frames that they came through. ``all``: at every statement of the library; else at those
    that may change something; and on servers at those that talk to it. Every other exception is a
    ``KeyboardInterrupt``; ``turn`` says which.
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
    points: list[Place] = field(default_factory=list)
    done: frozenset[Place] = frozenset()

    def run(self) -> None:
        """Walk through all points, several threads side by side."""
        walked = WALKED.setdefault(self.alias, Counter())
        if not self.all or self.alias != "default":
            self.done = frozenset(place for place, times in walked.items() if times >= ENOUGH)
        run_in_threads(WALKERS, self._some, timeout=280)
        assert not self.errors, "\n".join(self.errors)
        assert self.points or self.done
        walked.update(set(self.points))
        nothing_left(self.alias)

    def _some(self, first: int) -> None:
        for nth in itertools.count(1 + first, WALKERS):
            if not self._point(nth) or len(self.errors) > 9:
                return

    def _point(self, nth: int) -> bool:
        """Interrupt the action at its ``nth`` statement. Return whether it had so many."""
        kind = ERRORS[(nth // WALKERS + self.turn) % 2]
        lock = semaphore(f"walk-{nth}", self.slots, take=self.slots, timeout=40, using=self.alias, **self.options)
        if self.used:
            lock.acquire().release()
        strikes = Striking(nth, kind("struck"), self._wanted, self.done)
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

    def _wanted(self, frame: FrameType) -> bool:
        if self.alias != "default":
            return acts(frame) and talks(frame)
        return self.all or acts(frame)

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
        lock.acquire(timeout=0.01)


def try_in_vain(lock: Semaphore, striking: Callable[[], Striking]) -> None:
    with striking():
        assert lock.try_acquire() is None


def release(lock: Semaphore, striking: Callable[[], Striking]) -> None:
    permit = lock.acquire()
    with striking():
        permit.release()


def release_to_another(lock: Semaphore, striking: Callable[[], Striking]) -> None:
    """Give back what another thread of this process waits for, and see that it has that whole."""
    permit = lock.acquire()
    waits = run_beside(lambda: _hold_and_look(lock))
    wait_until(lambda: lock.status().waiting == 1)
    try:
        with striking():
            permit.release()
    finally:
        permit.release()  # it may have been struck before it had begun
        waits.result(HEARTBEAT)


def _hold_and_look(lock: Semaphore) -> None:
    with lock.acquire() as permit:
        keeper: Any = permit._acquisition.keeper
        for _ in range(3):  # whoever seems to wait is looked after
            time.sleep(SHORT)
            keeper.post(keeper.look_at_all)
        time.sleep(SHORT)
        permit.check()
        rows = [row for row in held_rows(lock.using or "default") if row.semaphore.name == lock.name]
        assert {row.permit_id for row in rows} == {permit._acquisition.permit_id}


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
    "release-to-another": {"action": release_to_another, "busy": SHORT, "turn": 1},
    "with-block": {"action": with_block, "turn": 1},
    "with-permit": {"action": with_permit},
    "decorated": {"action": decorated},
    "unfair": {"action": acquire, "busy": SHORT, "options": {"fair": False}, "turn": 1},
}


#: These differ from the others in Python code alone, so that one database does.
VARIANTS = (
    "free-again",
    "try",
    "release-to-another",
    "take-2",
    "with-block",
    "with-permit",
    "decorated",
    "unfair",
)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_struck_at_every_statement(database, scenario):
    if database != "default" and scenario in VARIANTS:
        pytest.skip("its statements are those of another scenario")
    Walk(database, **SCENARIOS[scenario]).run()


# Coroutines.


async def aacquire(lock: Semaphore) -> None:
    permit = await lock.aacquire()
    await permit.arelease()


async def awith(lock: Semaphore) -> None:
    async with lock as permit:
        permit.check()


async def aacquire_in_vain(lock: Semaphore) -> None:
    with pytest.raises(AcquireTimeoutError):
        await lock.aacquire(timeout=0.01)


async def atry_in_vain(lock: Semaphore) -> None:
    assert await lock.atry_acquire() is None


#: What a task does, how many slots there are, and how long another holder is in the way.
COROUTINES = {
    "free": (aacquire, 1, 0.0),
    "granted-while-waiting": (aacquire, 1, SHORT),
    "timeout": (aacquire_in_vain, 1, None),
    "try": (atry_in_vain, 1, None),
    "take-2": (aacquire, 2, SHORT),
    "async-with": (awith, 1, 0.0),
}


async def afterwards(lock: Semaphore, where: str) -> None:
    """Assert that the semaphore is free again within a heartbeat, for this very task too."""
    started = time.monotonic()
    permit = await lock.aacquire()
    took = time.monotonic() - started
    await permit.arelease()
    assert took < HEARTBEAT, f"after {where} it was held for {took:.1f} s"


class Obstacle:
    """Another holder, which gives back after some seconds (0: there is none; None: at the end of the block)."""

    def __init__(self, lock: Semaphore, seconds: float | None) -> None:
        self.lock = lock
        self.seconds = seconds

    async def __aenter__(self) -> None:
        if self.seconds != 0:
            self.permit = await self.lock.aacquire()
            self.permit.detach()
        if self.seconds:
            self.giving_back = asyncio.create_task(self._give_back(self.seconds))

    async def _give_back(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.permit.arelease()

    async def __aexit__(self, *exc_info: object) -> None:
        if self.seconds:
            await self.giving_back
        elif self.seconds is None:
            await self.permit.arelease()


def nothing_left(alias: str) -> None:
    wait_until(lambda: not held_rows(alias), timeout=HEARTBEAT, what="nothing held")
    wait_until(lambda: not live_waiters(alias), timeout=HEARTBEAT, what="no live waiter")


@pytest.mark.process_side
@pytest.mark.parametrize("scenario", COROUTINES)
def test_coroutine_struck_at_every_statement(database, scenario):
    action, slots, busy = COROUTINES[scenario]
    points: list[Place] = []
    walked = WALKED.setdefault(f"coroutines on {database}", Counter())
    # What the loop's thread does is the same on each database: on servers, once at each place.
    done = frozenset() if database == "default" else frozenset(walked)

    async def struck(lock: Semaphore, strikes: Striking) -> None:
        with strikes:
            await action(lock)

    async def point(nth: int) -> bool:
        lock = semaphore(f"walk-{nth}", slots, take=slots, timeout=10, using=database)
        running: list[asyncio.Task[None]] = []
        strikes = Striking(
            nth,
            asyncio.CancelledError("struck"),
            wanted=lambda frame: acts(frame) and asyncio.current_task() in running,
            but=done,
        )
        async with Obstacle(lock, busy):
            running.append(asyncio.create_task(struck(lock, strikes)))
            await asyncio.wait(running)
        if strikes.struck is None:
            running[0].result()
            return False
        points.append(strikes.struck)
        assert running[0].cancelled(), f"what struck at {strikes.struck} was swallowed"
        await afterwards(lock, strikes.struck)
        return True

    async def walk(first: int) -> None:
        for nth in itertools.count(1 + first, WALKERS):
            if not await point(nth):
                return

    run_in_threads(WALKERS, lambda first: asyncio.run(walk(first)), timeout=200)
    assert len(points) + len(done) > 10
    walked.update(set(points))
    nothing_left(database)


@pytest.mark.parametrize("scenario", COROUTINES)
def test_cancelled_at_every_await(database, scenario):
    action, slots, busy = COROUTINES[scenario]

    async def point(nth: int) -> bool:
        lock = semaphore(f"await-{nth}", slots, take=slots, timeout=10, using=database)
        async with Obstacle(lock, busy):
            struck = StrikingAwait(action(lock), nth, asyncio.CancelledError("struck"))

            async def run() -> None:
                await struck

            task = asyncio.create_task(run())
            await asyncio.wait({task})
        await afterwards(lock, f"await {nth}")
        return struck.struck

    async def main() -> None:
        for nth in itertools.count(1):
            if not await point(nth):
                assert nth > 1
                return

    asyncio.run(main())
    nothing_left(database)


@pytest.mark.parametrize("scenario", COROUTINES)
def test_task_cancelled_after_so_many_steps(database, scenario):
    action, slots, busy = COROUTINES[scenario]
    outcomes = set()

    async def cancel_after(index: int, pause: float, turns: int) -> None:
        lock = semaphore(f"cancel-{index}", slots, take=slots, timeout=10, using=database)
        async with Obstacle(lock, busy):
            task = asyncio.create_task(action(lock))
            for _ in range(turns):
                await asyncio.sleep(pause)
            task.cancel()
            await asyncio.wait({task})
            outcomes.add(task.cancelled())
        await afterwards(lock, f"{turns} turns of {pause} s")

    async def main() -> None:
        steps = [(0.0, turns) for turns in range(12)] + [(0.0007, turns) for turns in range(60)]
        for start in range(0, len(steps), 12):
            await asyncio.gather(
                *(cancel_after(start + nth, *step) for nth, step in enumerate(steps[start : start + 12]))
            )

    asyncio.run(main())
    assert True in outcomes
    nothing_left(database)


@pytest.mark.parametrize("first", ["cancel", "grant"])
@pytest.mark.parametrize("busy", [0.0, SHORT], ids=["free", "waiting"])
def test_task_cancelled_at_the_moment_of_the_grant(database, monkeypatch, first, busy):
    answered = []
    targets: dict[str, asyncio.Task[None]] = {}
    answer = Acquisition.tell

    def answer_and_cancel(hold: Acquisition, error: BaseException | None = None) -> None:
        task = targets.get(hold.request.resource.name)
        if task is not None and hold.grant is not None:
            answered.append(hold)
            if first == "cancel":
                task.get_loop().call_soon_threadsafe(task.cancel)
            answer(hold, error)
            if first == "grant":
                task.get_loop().call_soon_threadsafe(task.cancel)
        else:
            answer(hold, error)

    monkeypatch.setattr(Acquisition, "tell", answer_and_cancel)

    async def main() -> None:
        for index in range(20):
            lock = semaphore(f"moment-{index}", timeout=10, using=database)
            async with Obstacle(lock, busy):
                task = targets[lock.name] = asyncio.create_task(aacquire(lock))
                await asyncio.wait({task})
            del targets[lock.name]
            assert task.cancelled()
            await afterwards(lock, "the grant")

    asyncio.run(main())
    assert len(answered) == 20
    nothing_left(database)


# In the middle of taking a place.


@pytest.mark.rows_only("row queue")
def test_struck_as_it_steps_into_the_queue(database, monkeypatch):
    """The keeper comes to the queue before it hears of the strike; whoever stands in it must not pay for that."""
    lock = semaphore("stepping", timeout=40, using=database)
    first, results = [], []
    stepped = threading.Event()
    add, step, abandon = LocalQueue.add, LocalQueue.step, Keeper.abandon

    def queue_and_be_struck(local, hold):
        add(local, hold)
        if not first:
            first.append(hold)
            raise KeyboardInterrupt("struck")

    def wait_behind():
        with lock as permit:
            results.append(permit.waited > 0)

    behind = threading.Thread(target=wait_behind, daemon=True)

    def step_and_tell(local, session):
        done = len(local.waiting) == 2
        step(local, session)
        if done:
            stepped.set()

    def abandon_late(keeper, hold):
        behind.start()
        local = keeper.queues[hold.request.line]
        wait_until(lambda: len(local.waiting) == 2, timeout=60)
        keeper.poke(local)
        assert stepped.wait(60)
        abandon(keeper, hold)

    other = lock.acquire()
    other.detach()
    with monkeypatch.context() as patched:
        patched.setattr(LocalQueue, "add", queue_and_be_struck)
        patched.setattr(Keeper, "abandon", abandon_late)
        patched.setattr(LocalQueue, "step", step_and_tell)
        with pytest.raises(KeyboardInterrupt):
            run_in_threads(1, lambda _nth: lock.acquire(), timeout=120)
    other.release()
    behind.join(60)
    assert results == [True]
    nothing_left(database)


# Real signals.


def test_struck_by_signals_in_the_driver_and_elsewhere(database):
    with Child("tests.programs.signalled:run", database, 3.0, 1) as child:
        struck, rounds, longest = child.expect("struck", timeout=60 + signalled.PATIENCE).split()
        places = child.expect("places")
        assert int(struck) > signalled.ENOUGH, (struck, rounds)
        assert float(longest) < HEARTBEAT, (longest, places)
        # The process lives, and is idle: what is held now would stay.
        nothing_left(database)
        child.finish()
    if connections[database].vendor not in ("sqlite", "microsoft"):  # whose drivers may have no line of Python
        assert any(driver in places for driver in ("psycopg", "pymysql", "MySQLdb")), places
