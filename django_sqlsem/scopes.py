"""In whose name a permit is held: an async task, or else a thread (under gevent, a greenlet)."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from typing import TYPE_CHECKING, Any

from django_sqlsem.exceptions import AlreadyHeldError

if TYPE_CHECKING:
    from django_sqlsem.holds import Hold

#: The task that last took a permit in this context: ``sync_to_async`` carries it into its worker thread.
_task: contextvars.ContextVar[weakref.ref[asyncio.Task[Any]] | None] = contextvars.ContextVar(
    "sqlsem_task", default=None
)
_held: dict[tuple[int, str, str], Hold] = {}


def after_fork() -> None:
    """A forked child holds nothing."""
    _held.clear()


def current_owner() -> Any:
    """Return the running task, or the task that called into this thread, or else the thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if task is not None:
        _task.set(weakref.ref(task))
        return task
    carried = _task.get()
    caller = carried() if carried else None
    if caller is not None and not caller.done():
        return caller
    return threading.current_thread()


def enter(owner: Any, alias: str, hold: Hold) -> None:
    """Note that ``owner`` asks for a semaphore.

    Raises ``AlreadyHeldError`` if it has a live permit of the same one: waiting for itself would never end.
    """
    scope = (id(owner), alias, hold.claim.resource.key)
    other = _held.get(scope)
    if other is not None and other.owner is not None and other.owner() is owner and is_held(other):
        slots = other.grant.slots if other.grant else ()
        raise AlreadyHeldError(
            f"You have acquired {hold.claim.resource.name!r} already, in this very "
            f"{'task' if isinstance(owner, asyncio.Task) else 'thread'} (slot {', '.join(map(str, slots))})."
        )
    hold.owner = weakref.ref(owner)
    hold.scope = scope
    _held[scope] = hold


def is_held(hold: Hold) -> bool:
    """Whether the program still has the permit."""
    # One that was garbage-collected is on its way back, though the keeper may not have got to it.
    return hold.grant is not None and not hold.released and hold.permit() is not None and hold.current_loss() is None


def leave(hold: Hold) -> None:
    """The hold no longer belongs to anyone's thread or task."""
    scope, hold.scope, hold.owner = hold.scope, None, None
    if scope is not None and _held.get(scope) is hold:
        _held.pop(scope, None)


def owner_is_gone(hold: Hold) -> bool:
    """Whether the thread or task that holds the permit has ended."""
    if hold.owner is None:
        return False
    owner = hold.owner()
    if owner is None:
        return True
    if isinstance(owner, asyncio.Task):
        return owner.done()
    return isinstance(owner, threading.Thread) and not owner.is_alive()
