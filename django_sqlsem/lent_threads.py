"""Threads in which ``sync_to_async`` runs code in turn: who waits there may keep its own holder from going on."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import TYPE_CHECKING

from asgiref.sync import SyncToAsync

from django_sqlsem.exceptions import DeadlockError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django_sqlsem.holds import Hold


def blocked(waiting: Iterable[Hold], held: Iterable[Hold]) -> list[tuple[Hold, DeadlockError]]:
    """Return which of ``waiting`` can get nothing, as all holders need the very thread in which each of them waits."""
    found = []
    tasks = [(hold, hold.owner() if hold.owner is not None else None) for hold in held]
    for hold in waiting:
        thread = hold.thread() if hold.thread is not None else None
        if thread is None:
            continue
        known = [each for each in tasks if each[0].claim.resource == hold.claim.resource]
        stuck = [(each, task) for each, task in known if isinstance(task, asyncio.Task) and needs(task, thread)]
        slots = max((each.claim.slots or 1 for each in (hold, *(each for each, _ in known))), default=1)
        if stuck and sum(len(each.grant.slots) for each, _ in stuck if each.grant is not None) >= slots:
            found.append((hold, _error(hold, stuck[0][1], thread)))
    return found


def needs(task: asyncio.Task[object], thread: threading.Thread) -> bool:
    """Whether the task is in ``sync_to_async``, whose code runs in this thread when its turn comes."""
    awaited: object = task.get_coro()
    while inspect.iscoroutine(awaited):
        if awaited.cr_code is SyncToAsync.__call__.__code__:
            frame = awaited.cr_frame
            executor = None if frame is None else frame.f_locals.get("executor")
            lent = getattr(executor, "_work_thread", None)  # by async_to_sync
            return thread is lent or {thread} == getattr(executor, "_threads", None)
        awaited = awaited.cr_await
    return False


def _error(hold: Hold, task: asyncio.Task[object], thread: threading.Thread) -> DeadlockError:
    return DeadlockError(
        f"Waiting for {hold.claim.resource.name!r} was broken off, as it could not have ended: its holder, the task "
        f"{task.get_name()!r}, needs the thread {thread.name!r} by sync_to_async, in which this code waits. Wait by "
        "`async with` in a coroutine, or do not wait (try_acquire)."
    )
