"""In whose name a permit is held: an async task, or else a thread (under gevent, a greenlet)."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

from asgiref.sync import AsyncToSync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation

from django_sqlsem.core import forks
from django_sqlsem.core.text import numbers
from django_sqlsem.core.threads import runs
from django_sqlsem.database import transactions
from django_sqlsem.database.server import is_one_database
from django_sqlsem.exceptions import AlreadyHeldError
from django_sqlsem.runtime import events
from django_sqlsem.runtime.acquisition import Acquisition, Caller, Trail

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

#: Returns the event loop that this thread runs, and so must not block. Its public twin raises an exception if there is
#: none, which costs more than all the rest.
running_loop: Final = asyncio._get_running_loop
#: The task that last took a permit in this context: ``sync_to_async`` carries it into its worker thread.
_task: contextvars.ContextVar[weakref.ref[asyncio.Task[Any]] | None] = contextvars.ContextVar(
    "sqlsem_task", default=None
)
#: What this flow of control took: a task, and what it calls in threads. Of a parent task's, a child knows but the past.
_trail: contextvars.ContextVar[Trail | None] = contextvars.ContextVar("sqlsem_trail", default=None)
_PACKAGE: Final = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
#: Where the code is that works under locks of ours; but for what calls what users gave.
_UNDER_LOCKS: Final = tuple(os.path.join(_PACKAGE, room, "") for room in ("backends", "database", "runtime"))
_CALLS_USERS: Final = (events.__file__, transactions.__file__)
#: And which functions elsewhere do.
_under_locks: set[CodeType] = set()
#: A trail is not swept while it is as short as this.
_SHORT: Final = 8
#: What each task and thread has asked for and not left, by its ``id`` and the name's key: one that holds thousands of
#: others need not look through them.
_asked: dict[tuple[int, str], list[weakref.ref[Acquisition]]] = {}
_lock = threading.RLock()  # a finaliser may run in any line
_followed: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()


def _start_anew() -> None:
    global _lock
    _lock = threading.RLock()
    _asked.clear()


forks.register("callers", "an acquire would wait for ever for a lock of a thread of the parent", in_child=_start_anew)


@contextlib.contextmanager
def as_stranger() -> Iterator[None]:
    """For tests: take the permits inside as if nothing had been taken before. They must be detached at once."""
    reset = _trail.set(None)
    try:
        yield
    finally:
        _trail.reset(reset)


def current_caller() -> Any:
    """Return the running task, or the task that called into this thread, or else the thread.

    A task that ``async_to_sync`` made works for the thread that called it, and ends with that call.
    """
    carried = _task.get()
    if carried is None and running_loop() is None:
        return threading.current_thread()
    task, thread = _running()
    if task is not None:
        _task.set(weakref.ref(task))
        return task
    caller = carried() if carried else None
    return thread if caller is None or caller.done() else caller


def enter(alias: str, acquisition: Acquisition) -> None:
    """Note that the current caller asks for a lock.

    Raises ``AlreadyHeldError`` if it has a live permit of the same one: waiting for itself would never end.
    """
    caller = current_caller()
    key = acquisition.request.resource.key
    place = id(caller), key
    for other in taken_by(caller, alias, key) if place in _asked else ():
        if is_held(other):
            slots = other.grant.slots if other.grant else ()
            raise AlreadyHeldError(
                f"You have acquired {acquisition.name!r} already, in this very "
                f"{'task' if isinstance(caller, asyncio.Task) else 'thread'} (slot {numbers(slots)})."
                " Give it back first; or take several slots at once by take=; or let rlock() be the lock, which its"
                " holder may enter again."
            )
    found = acquisition.caller = Caller()
    found.ref = found.asker = weakref.ref(caller)
    found.scope, found.place, found.beside = (alias, key), place, _trail.get()
    if isinstance(caller, asyncio.Task):
        task, thread = _running()
        if task is not caller:
            found.worker = weakref.ref(thread)
        elif caller not in _followed:
            _followed.add(caller)
            caller.add_done_callback(_hand_over)
    if running_loop() is None:
        found.thread = weakref.ref(threading.current_thread())
    with _lock:
        _asked.setdefault(place, []).append(weakref.ref(acquisition))
    trail = found.beside
    if trail is not None and trail.length >= trail.swept_at:
        trail = _swept(trail)
    _trail.set(Trail(acquisition, trail, _SHORT if trail is None else trail.swept_at))


def ask_besides(acquisition: Acquisition, other: Acquisition) -> None:
    """Note that the current caller asks for something more that it has ``other`` for, whoever took that."""
    found = acquisition.caller = Caller()
    found.asker = weakref.ref(current_caller())
    found.beside = Trail(other, _trail.get(), _SHORT)


def _swept(trail: Trail) -> Trail | None:
    """Return a trail of which half may have gone without what has gone."""
    left = [*trail.back()][::-1]
    swept: Trail | None = None
    for each in left:
        swept = Trail(each, swept, 2 * len(left) + _SHORT)
    return swept


def taken_by(caller: Any, alias: str, key: str) -> list[Acquisition]:
    """Return what ``caller`` has taken of one name, and this flow of control knows of, oldest first."""
    known = [ref() for ref in tuple(_asked.get((id(caller), key), ()))]
    some = {id(each) for each in known if each is not None and _is_taken_by(each, caller, alias)}
    found: list[Acquisition] = []
    # Threads that work for one task side by side share its name, but are not inside one another; nor are the tasks
    # for which one thread works in turn, if one of them still has what the thread took for it.
    for each in taken_here() if some else ():
        if id(each) in some:
            found.insert(0, each)
            if len(found) == len(some):
                break
    return found


def _is_taken_by(acquisition: Acquisition, caller: Any, alias: str) -> bool:
    theirs = acquisition.caller
    if theirs is None or (scope := theirs.scope) is None:
        return False
    return theirs.itself is caller and is_one_database(scope[0], alias)


def taken_here() -> Iterator[Acquisition]:
    """Yield what this flow of control has taken and not given back, newest first."""
    trail = _trail.get()
    return iter(()) if trail is None else trail.back()


def held_beside(acquisition: Acquisition) -> Iterator[Acquisition]:
    """Yield what the one that asked for this had by then, and has not given back or handed over, newest first."""
    asked = acquisition.caller
    asker = None if asked is None or asked.asker is None else asked.asker()
    if asked is None or asked.beside is None or asker is None:
        return
    for each in asked.beside.back():
        # Of its parent's, a child task gives nothing back.
        if each.caller is not None and each.caller.itself is asker:
            yield each


def is_held(acquisition: Acquisition) -> bool:
    """Whether the program still has the permit."""
    # One that was abandoned or garbage-collected is on its way back, though the keeper may not have got to it.
    return acquisition.has_slots and not acquisition.is_dropped and acquisition.current_loss() is None


def leave(acquisition: Acquisition) -> None:
    """The acquisition no longer belongs to anyone's thread or task."""
    caller = acquisition.caller
    if caller is None:
        return
    caller.scope = caller.ref = None
    if caller.place is not None:
        with _lock:
            _leave_place(caller.place, acquisition)
        caller.place = None


def _leave_place(place: tuple[int, str], acquisition: Acquisition) -> None:
    left = [ref for ref in _asked.get(place, ()) if ref() not in (None, acquisition)]
    if left:
        _asked[place] = left
    else:
        _asked.pop(place, None)


def under_lock(function: F) -> F:
    """Mark a function, of none of the rooms in ``_UNDER_LOCKS``, that takes a lock: see ``interrupts()``."""
    _under_locks.add(function.__code__)
    return function


def interrupts() -> bool:
    """Whether the caller runs in the middle of the library's own work, perhaps under one of its locks.

    A signal handler does so, a finaliser, or a generator that the garbage collector ends: at any line. Such code must
    not wait for what it has interrupted.
    """
    frame: FrameType | None = sys._getframe(1)
    called = True  # by the program, through no code but ours
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if not file.startswith(_PACKAGE):
            called = called and file == contextlib.__file__
        elif not called and (code in _under_locks or (file.startswith(_UNDER_LOCKS) and file not in _CALLS_USERS)):
            return True
        frame = frame.f_back
    return False


def stay_with_thread(acquisition: Acquisition) -> None:
    """The task that took the permit may end before this thread, whose transaction keeps it."""
    if acquisition.caller is not None:
        acquisition.caller.worker = weakref.ref(threading.current_thread())


def caller_is_gone(acquisition: Acquisition) -> bool:
    """Whether the thread or task that holds the permit has ended."""
    caller = acquisition.caller
    if caller is None or caller.ref is None:
        return False
    worker = caller.worker() if caller.worker is not None else None
    if worker is not None and runs(worker):
        return False  # the task may have ended without the thread that it called
    itself = caller.ref()
    if itself is None:
        return True
    if isinstance(itself, asyncio.Task):
        return itself.done() and _returned_acquisition(itself) is not acquisition
    return isinstance(itself, threading.Thread) and not runs(itself)


def refuse_event_loop(
    message: str = "A semaphore can't be acquired synchronously from an async context: use `async with` or `await "
    "semaphore.aacquire()`.",
) -> None:
    """A thread that runs an event loop must not block: all its tasks would stand still, the holder's too.

    Raises ``SynchronousOnlyOperation`` with this message.
    """
    if running_loop() is not None:
        raise SynchronousOnlyOperation(message)


def refuse_other_loops() -> None:
    """Asynchronous calls are answered through an event loop of asyncio. Raises ``RuntimeError`` where none runs."""
    if running_loop() is None:
        raise RuntimeError(
            "A semaphore's asynchronous calls need a running event loop of asyncio: asyncio.run(), uvloop, an ASGI "
            "server, async_to_sync(), or anyio with its asyncio backend. Under trio, call the synchronous ones in "
            "a thread, by `await trio.to_thread.run_sync(semaphore.acquire)`."
        )


def works_for_thread() -> bool:
    """Whether a thread waits for this coroutine, by ``async_to_sync``: its transaction may be open."""
    lent = getattr(AsyncToSync.executors, "current", None)
    return lent is not None and not getattr(lent, "_broken", False)  # nor has this task outlived the call


async def to_its_end(step: Callable[..., T], *args: object) -> T:
    """Run a step by ``sync_to_async``. No cancellation stops it: what cancels is raised when the step is over."""
    running = asyncio.ensure_future(sync_to_async(step)(*args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):  # it may be cancelled again meanwhile
                await asyncio.wait({running})
        raise


def _running() -> tuple[asyncio.Task[Any] | None, threading.Thread]:
    """Return the task that runs, if one does on its own account, and the thread that stands behind this code."""
    thread = threading.current_thread()
    task = None if running_loop() is None else asyncio.current_task()
    if task is None or not getattr(task.get_coro(), "__qualname__", "").startswith(AsyncToSync.__qualname__ + "."):
        return task, thread
    # The thread lends itself, while it waits, to what the coroutine has to run in it: that tells which one it is.
    waiting = getattr(getattr(AsyncToSync.executors, "current", None), "_work_thread", None)
    return (None, waiting) if isinstance(waiting, threading.Thread) else (task, thread)


def _hand_over(task: asyncio.Task[Any]) -> None:
    # What a task returns has not ended with it: wait_for() and gather() make tasks that only acquire.
    acquisition = _returned_acquisition(task)
    if acquisition is not None:
        leave(acquisition)


def _returned_acquisition(task: asyncio.Task[Any]) -> Acquisition | None:
    # Not by exception(), which would mark the exception as retrieved.
    if task.cancelled() or getattr(task, "_exception", None) is not None:
        return None
    acquisition: Acquisition | None = getattr(task.result(), "_acquisition", None)
    return acquisition
