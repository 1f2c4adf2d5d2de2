"""Threads in which ``sync_to_async`` runs code in turn: who waits there may keep its own holder from going on."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from asgiref.sync import SyncToAsync
from django.db import connections

from django_sqlsem.backends.base import TOKENS
from django_sqlsem.exceptions import DeadlockError
from django_sqlsem.runtime.acquisition import Acquisition, AcquisitionKeeper, State
from django_sqlsem.runtime.chores import LOOK_AROUND, Chore

if TYPE_CHECKING:
    from django_sqlsem.snapshots import SemaphoreSnapshot


#: For how long an event loop may be busy until it is asked anew, in seconds.
ASK_AGAIN: Final = 10.0


@dataclass(frozen=True, slots=True)
class ThreadKnot:
    """A wait in a thread, and the local holders of the same name that need this very thread."""

    acquisition: Acquisition
    thread: threading.Thread
    stuck: tuple[tuple[Acquisition, asyncio.Task[object]], ...]


class LentThreads(Chore):
    """Breaks off waits that can get nothing, as all holders need the threads in which they wait.

    The keeper only suspects them, as it sees tasks from outside and its own process alone. First their event loops
    have a turn, to hear of what has been done; then the database is asked for the other holders, and the slots.
    """

    name = "lent threads"

    def __init__(self, keeper: AcquisitionKeeper) -> None:
        self._keeper = keeper
        self._asked_at = -math.inf
        self._look_at = 0.0

    def next_at(self) -> float:
        """Return when to look at the acquisitions again."""
        return self._look_at if self._keeper.acquisitions else math.inf

    def run(self, now: float) -> None:
        """Begin to find out about what looks stuck."""
        self._look_at = now + LOOK_AROUND
        found = _knots(list(self._keeper.acquisitions.values()))
        if not found or now - self._asked_at < ASK_AGAIN:
            return
        self._asked_at = now
        tasks = {task for knot in found for _, task in knot.stuck}
        names = {knot.acquisition.name for knot in found}
        self._hear(list({task.get_loop() for task in tasks}), tasks, names)

    def _hear(self, loops: list[asyncio.AbstractEventLoop], tasks: set[asyncio.Task[object]], names: set[str]) -> None:
        if not loops:  # not in the keeper's thread, which has no connection of Django's
            threading.Thread(target=self._ask, args=(tasks, names), name="sqlsem-look", daemon=True).start()
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended, and so have its tasks
            loops[0].call_soon_threadsafe(self._hear, loops[1:], tasks, names)

    def _ask(self, tasks: set[asyncio.Task[object]], names: set[str]) -> None:
        snapshots = None
        try:
            with contextlib.suppress(Exception):  # whoever can't tell leaves the wait alone
                snapshots = {each.name: each for each in self._keeper.backend.inspect(names)}
        finally:
            connections.close_all()
            self._keeper.post(lambda: self._judge(tasks, snapshots or {}))

    def _judge(self, tasks: set[asyncio.Task[object]], snapshots: dict[str, SemaphoreSnapshot]) -> None:
        self._asked_at = -math.inf
        for knot in _knots(list(self._keeper.acquisitions.values())):
            snapshot = snapshots.get(knot.acquisition.request.resource.name)
            heard = all(task in tasks for _, task in knot.stuck)
            if heard and snapshot is not None and _gets_nothing(knot, snapshot):
                self._keeper.break_off(knot.acquisition, _error(knot))


def _knots(acquisitions: Iterable[Acquisition]) -> list[ThreadKnot]:
    waiting: list[tuple[Acquisition, threading.Thread]] = []
    held: list[tuple[Acquisition, asyncio.Task[object]]] = []
    for acquisition in acquisitions:
        if acquisition.state is State.QUEUED and acquisition.request.resource.kind != TOKENS:  # anybody may add tokens
            thread = acquisition.caller.thread() if acquisition.caller and acquisition.caller.thread else None
            if thread is not None:
                waiting.append((acquisition, thread))
        # What has a time limit of its own is waited for.
        elif acquisition.state is State.HELD and acquisition.max_hold is None and acquisition.caller is not None:
            caller = acquisition.caller.itself
            if isinstance(caller, asyncio.Task):
                held.append((acquisition, caller))
    stuck: dict[tuple[str, threading.Thread], list[tuple[Acquisition, asyncio.Task[object]]]] = defaultdict(list)
    if waiting:
        for acquisition, task in held:
            if (thread := needed(task)) is not None:
                stuck[acquisition.request.resource.key, thread].append((acquisition, task))
    found = [
        (acquisition, thread, stuck.get((acquisition.request.resource.key, thread)))
        for acquisition, thread in waiting
        if stuck
    ]
    return [ThreadKnot(acquisition, thread, tuple(theirs)) for acquisition, thread, theirs in found if theirs]


def needed(task: asyncio.Task[object]) -> threading.Thread | None:
    """Return the thread in which the code must run that the task has given to ``sync_to_async``, and is not done."""
    awaited: object = task.get_coro()
    while inspect.iscoroutine(awaited):
        if awaited.cr_code is SyncToAsync.__call__.__code__:
            frame = awaited.cr_frame
            known = {} if frame is None else frame.f_locals
            executor, code = known.get("executor"), known.get("exec_coro")
            if code is None or code.done():
                return None
            lent = getattr(executor, "_work_thread", None)  # by async_to_sync
            threads = {lent} if lent is not None else set(getattr(executor, "_threads", ()))
            return threads.pop() if len(threads) == 1 else None
        awaited = awaited.cr_await
    return None


def _gets_nothing(knot: ThreadKnot, snapshot: SemaphoreSnapshot) -> bool:
    """Whether nobody but those who are stuck has what the wait could get."""
    request = knot.acquisition.request
    numbers = [number for holder in snapshot.holders if not holder.expired for number in holder.numbers]
    bound = snapshot.operator_slots
    if bound is None:
        bound = request.slots or snapshot.slots
        numbers = [number for number in numbers if number <= bound]
    theirs = {
        slot for acquisition, _ in knot.stuck if acquisition.grant is not None for slot in acquisition.grant.slots
    }
    return theirs.issuperset(numbers) and (bool(request.mode) or bound - len(numbers) < request.take)


def _error(knot: ThreadKnot) -> DeadlockError:
    return DeadlockError(
        f"Waiting for {knot.acquisition.request.resource.name!r} was broken off, as it could not have ended: its "
        f"holder, the task {knot.stuck[0][1].get_name()!r}, needs the thread {knot.thread.name!r} by sync_to_async, in "
        "which this code waits. Wait by `async with` in a coroutine, or do not wait (try_acquire)."
    )
