"""Tasks that a worker runs: what the library knows of them, and the rank that a refused task keeps.

A refused task keeps its place in the queue while it is away. It is never granted meanwhile, so that no slot is idle for
its sake. When it comes back it goes before all who came after its first try, and how soon it should come back follows
from how many are before it.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from django_sqlsem.decorators.views import leads_to
from django_sqlsem.exceptions import AcquireTimeoutError, BackendError
from django_sqlsem.locks.acquire import refused_by_tests
from django_sqlsem.locks.semaphore import Semaphore
from django_sqlsem.runtime import callers
from django_sqlsem.snapshots import retry_after

logger = logging.getLogger("django_sqlsem")


@dataclass(frozen=True, slots=True)
class SentAgain:
    """How a worker is told that its task was sent again: by an exception to raise, or else by a value to return."""

    exception: Exception | None = None
    value: Any = None
    #: The id under which the task comes back, if it is a new one.
    task_id: str = ""


class RunningTask(Protocol):
    """A task that a worker is running right now. ``contrib`` has one for each system of tasks."""

    @property
    def label(self) -> str:
        """What operators are shown: ``task.name[task-id]``."""

    @property
    def id(self) -> str:
        """The task's id, or an empty string if it has none."""

    @property
    def makes_queries(self) -> bool:
        """Whether ``retry()`` makes queries of the project, so that a coroutine must call it in a thread."""

    def entered(self) -> AbstractContextManager[object]:
        """A block in which the task's body runs: what calls the body again inside makes a plain call."""

    def retry(self, retry_after: int, error: Exception) -> SentAgain:
        """Send the task again, for about ``retry_after`` seconds later, as ``error`` refused it now."""


class System(Protocol):
    """A system of tasks, such as Celery."""

    def running(self, wrapper: Callable[..., Any], args: tuple[Any, ...]) -> RunningTask | None:
        """Return the task whose body is ``wrapper``, if a worker is running it right now, else ``None``."""

    def runs_at_once(self, wrapper: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether ``wrapper`` is the body of a task that runs inside its caller instead of a worker, as in tests."""


#: The bodies that have been entered: by the task's id, and the function.
_entered: Final[contextvars.ContextVar[frozenset[tuple[str, Any]]]] = contextvars.ContextVar(
    "sqlsem_entered_tasks", default=frozenset()
)


@contextlib.contextmanager
def entered(task_id: str, body: Any) -> Iterator[None]:
    """Remember inside the block that a task's body runs: if it calls itself, that is no call of the worker's."""
    reset = _entered.set(_entered.get() | {(task_id, body)})
    try:
        yield
    finally:
        _entered.reset(reset)


def is_entered(task_id: str, body: Any) -> bool:
    """Whether that body of the task runs already."""
    return (task_id, body) in _entered.get()


#: The systems that ``contrib`` has registered, by the module without which they run nothing.
systems: dict[str, System] = {}


def runs_at_once(wrapper: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a call is the body of a task that runs inside its caller: it then runs under its caller's permit.

    In a worker it would take one of its own, and wait for its caller to give that back. Here that would never end.
    """
    return any(module in sys.modules and system.runs_at_once(wrapper, args) for module, system in systems.items())


#: Called at each decoration, for systems that only tell of tasks as they start.
listeners: list[Callable[[], None]] = []


def is_below(wrapper: Callable[..., Any], *functions: Any) -> bool:
    """Is ``wrapper`` one of these functions, or what one of them runs below whatever else decorates it?"""
    return any(leads_to(getattr(each, "__func__", each), wrapper, helpers=False) for each in functions)


def rank_of(task_id: str) -> str:
    """Return the rank of a task: what stands in the queue for it, also while it is away."""
    return hashlib.sha256(task_id.encode()).hexdigest()[:32] if task_id else ""


def step_aside(lock: Semaphore, task: RunningTask, refusal: AcquireTimeoutError) -> float:
    """Keep the rank of a task that will be sent again. Returns in how many seconds that should be."""
    snapshot = refusal._snapshot
    if not _has_rank(lock, task):
        return refusal.retry_after
    holders = () if snapshot is None else snapshot.holders
    twin = next((holder for holder in holders if holder.label.endswith(f"[{task.id}]")), None)
    if twin is not None:
        # The broker took the first copy for lost (visibility timeout, or a connection that broke); or its body has
        # sent it again, and goes on.
        logger.warning(
            "%s was delivered twice: its other copy holds slot %d of %r, on %s pid %d; or that has sent itself again "
            "before its end.",
            twin.label,
            twin.slot,
            lock.name,
            twin.host,
            twin.pid,
            extra={"semaphore": lock.name, "what": "delivered_twice", "task_id": task.id},
        )
        return refusal.retry_after

    def estimate(before: int) -> float:
        return refusal.retry_after if snapshot is None else retry_after(snapshot, before)

    try:
        return lock._step_aside(rank_of(task.id), estimate)
    except BackendError as error:  # the rank is a courtesy; the task comes back without it
        _not_kept(lock, task, task.id, error)
        return refusal.retry_after


def hand_on(lock: Semaphore, task: RunningTask, task_id: str) -> None:
    """Let a task that comes back under another id have the rank that was kept for this one."""
    if not task_id or not _has_rank(lock, task):
        return
    try:
        lock._hand_rank_on(rank_of(task.id), rank_of(task_id))
    except BackendError as error:
        _not_kept(lock, task, task_id, error)


def _has_rank(lock: Semaphore, task: RunningTask) -> bool:
    """Whether a rank may be kept: not on an event loop, which must not be blocked, nor where a test only plays busy."""
    return bool(task.id) and callers.running_loop() is None and lock.name not in refused_by_tests


def _not_kept(lock: Semaphore, task: RunningTask, task_id: str, error: BackendError) -> None:
    extra = {"semaphore": lock.name, "what": "rank_not_kept", "task_id": task_id}
    logger.debug("The rank of %s could not be kept: %s", task.label, error, extra=extra)
