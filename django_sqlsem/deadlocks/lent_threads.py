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

from asgiref.sync import SyncToAsync

from django_sqlsem.backends.base import COUNTER
from django_sqlsem.core.modes import MUTEX
from django_sqlsem.exceptions import BackendError, DeadlockError
from django_sqlsem.runtime.acquisition import Acquisition, AcquisitionKeeper, State
from django_sqlsem.runtime.chores import LOOK_AROUND, Chore


@dataclass(frozen=True, slots=True)
class ThreadKnot:
    """A wait in a thread, and the local holders of the same name that need this very thread."""

    acquisition: Acquisition
    thread: threading.Thread
    stuck: tuple[tuple[Acquisition, asyncio.Task[object]], ...]


class LentThreads(Chore):
    """Breaks off waits that can get nothing, as all holders need the threads in which they wait.

    Tasks are seen from outside here, so a wait must look stuck at two looks, between which their event loops have had a
    turn to hear of what has been done. Then the database is asked whether anyone else has what is waited for.
    """

    name = "lent threads"

    def __init__(self, keeper: AcquisitionKeeper) -> None:
        self._keeper = keeper
        self._look_at = 0.0
        #: What looked stuck at the last look, and the event loops that have had no turn since the first one.
        self._seen: dict[ThreadKnot, set[asyncio.AbstractEventLoop]] = {}

    def next_at(self) -> float:
        """Return when to look at the acquisitions again."""
        return self._look_at if self._keeper.acquisitions else math.inf

    def run(self, now: float) -> None:
        """Break off what is stuck."""
        self._look_at = now + LOOK_AROUND
        seen, self._seen = self._seen, {}
        for knot in _knots(list(self._keeper.acquisitions.values())):
            unheard = seen.get(knot)
            if unheard is None:
                unheard = {task.get_loop() for _, task in knot.stuck}
                for loop in list(unheard):
                    with contextlib.suppress(RuntimeError):  # the loop has ended, and so have its tasks
                        loop.call_soon_threadsafe(unheard.discard, loop)
            elif not unheard and self._gets_nothing(knot):
                self._keeper.break_off(knot.acquisition, _error(knot))
                continue
            self._seen[knot] = unheard

    def _gets_nothing(self, knot: ThreadKnot) -> bool:
        """Whether nobody but those who are stuck has what the wait could get."""
        request = knot.acquisition.request
        try:
            snapshot = self._keeper.backend.snapshot(self._keeper.own, request.resource)
        except BackendError:
            return False
        if snapshot is None:
            return False
        numbers = [number for holder in snapshot.holders if not holder.expired for number in holder.numbers]
        bound = 1 if MUTEX in (snapshot.kind, request.resource.kind) else snapshot.operator_slots
        if bound is None:
            bound = request.slots or snapshot.slots
            numbers = [number for number in numbers if number <= bound]
        theirs = {slot for other, _ in knot.stuck if other.grant is not None for slot in other.grant.slots}
        return theirs.issuperset(numbers) and (bool(request.mode) or bound - len(numbers) < request.take)


def _knots(acquisitions: Iterable[Acquisition]) -> list[ThreadKnot]:
    waiting: list[tuple[Acquisition, threading.Thread]] = []
    held: list[tuple[Acquisition, asyncio.Task[object]]] = []
    for acquisition in acquisitions:
        caller = acquisition.caller
        if caller is None:
            continue
        thread, task = caller.thread() if caller.thread else None, caller.itself
        if acquisition.state is State.QUEUED and thread is not None:
            if acquisition.request.resource.kind != COUNTER:  # anybody may add units
                waiting.append((acquisition, thread))
        # What has a time limit of its own is waited for.
        elif acquisition.state is State.HELD and isinstance(task, asyncio.Task) and acquisition.max_hold is None:
            held.append((acquisition, task))
    stuck: dict[tuple[str, threading.Thread], list[tuple[Acquisition, asyncio.Task[object]]]] = defaultdict(list)
    for acquisition, task in held if waiting else ():
        if (its := needed(task)) is not None:
            stuck[acquisition.request.resource.key, its].append((acquisition, task))
    return [
        ThreadKnot(acquisition, thread, tuple(theirs))
        for acquisition, thread in waiting
        if (theirs := stuck.get((acquisition.request.resource.key, thread)))
    ]


def needed(task: asyncio.Task[object]) -> threading.Thread | None:
    """Return the thread in which the code must run that the task has given to ``sync_to_async``, and is not done.

    The names are of local variables in asgiref. If they change, no such wait is found any more: it ends by timeout.
    """
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


def _error(knot: ThreadKnot) -> DeadlockError:
    return DeadlockError(
        f"Waiting for {knot.acquisition.request.resource.name!r} was broken off, as it could not have ended: its "
        f"holder, the task {knot.stuck[0][1].get_name()!r}, needs the thread {knot.thread.name!r} by sync_to_async, in "
        "which this code waits. Wait by `async with` in a coroutine, or do not wait (try_acquire)."
    )
