"""Django's own tasks, and their backport: a busy task is enqueued again for later.

The result of the attempt that was refused is successful, and its value names the result of the next attempt.
``latest()`` follows that to the attempt that counts.
"""

from __future__ import annotations

import contextvars
import datetime
import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, cast

from django.utils import timezone

from django_sqlsem.contrib.celery import MAX_COUNTDOWN
from django_sqlsem.core.clocks import chance
from django_sqlsem.decorators.tasks import SentAgain, entered, is_below, is_entered

#: The only key of the value of an attempt that was refused; under it is the id of the next attempt's result.
SENT_AGAIN_AS: Final = "sqlsem_sent_again_as"
#: Django's own, and the backport for older versions of it.
LIBRARIES: Final = ("django.tasks", "django_tasks")
#: How many tasks may run one inside another. What is older than as many was never said to have ended.
DEEPEST: Final = 20
#: Those whose signals are heard.
_heard: set[str] = set()


class _Started:
    """A task that has been started here, and has perhaps ended."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.ended = False


#: What this flow of control is running, the innermost last: a backend may run a task at once, within another.
_started: contextvars.ContextVar[tuple[_Started, ...]] = contextvars.ContextVar("sqlsem_started_tasks", default=())


@dataclass(frozen=True, slots=True)
class DjangoTask:
    """A task that a worker of ``django.tasks`` is running."""

    result: Any
    body: Any
    #: A backend may keep its tasks in the database.
    makes_queries = True

    @property
    def label(self) -> str:
        """What operators are shown: the task's module path, and the id of its result."""
        return _label(self.result)

    @property
    def id(self) -> str:
        """The id of the task's result. The next attempt has another."""
        return str(self.result.id)

    def entered(self) -> AbstractContextManager[None]:
        return entered(self.id, self.body)

    def retry(self, retry_after: int, error: Exception) -> SentAgain:
        """Enqueue the task again with the same arguments and options, to run after about ``retry_after`` seconds.

        That is ``retry_after``, give or take a half, so that tasks refused together don't come back together. What
        the backend raises fails the task.
        """
        seconds = min(retry_after * chance.uniform(0.5, 1.5), MAX_COUNTDOWN)
        later = timezone.now() + datetime.timedelta(seconds=seconds)
        task = self.result.task.using(run_after=later, backend=self.result.backend)
        task_id = str(task.enqueue(*self.result.args, **self.result.kwargs).id)
        return SentAgain(value={SENT_AGAIN_AS: task_id}, task_id=task_id)


def running(wrapper: Callable[..., Any], args: tuple[Any, ...]) -> DjangoTask | None:
    """Return the task whose body is ``wrapper``, if a worker is running it right now and can put it off.

    Where the backend can't defer, as those that run tasks at once, a call is like any other.
    """
    result = _result_of(wrapper, args)
    return None if result is None or not _can_defer(result) else DjangoTask(result, wrapper)


def runs_at_once(wrapper: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether it is the body of a task whose backend can't defer: such backends run tasks where they are enqueued."""
    result = _result_of(wrapper, args)
    return result is not None and not _can_defer(result)


def _can_defer(result: Any) -> bool:
    return bool(getattr(result.task.get_backend(), "supports_defer", False))


def _result_of(wrapper: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the result of the running task whose body is ``wrapper``, unless that has called itself."""
    listen()  # who imports the library after all that is decorated is heard from the second task on
    result = (_given(args) or _current()) if _heard else None
    if result is None or not is_below(wrapper, result.task.func) or is_entered(str(result.id), wrapper):
        return None
    return result


def label() -> str:
    """Return what operators are shown about the running task, if there is one, else an empty string."""
    result = _current()
    return "" if result is None else _label(result)


def latest(result: Any) -> Any:
    """Return the result of a task's latest attempt, as it is now: the one that isn't put off, or was not yet run.

    ``result`` is that of any earlier attempt, or of the latest. Raises what the backend raises: ``NotImplementedError``
    if it can't retrieve results, ``TaskResultDoesNotExist`` if one of the attempts has been deleted.
    """
    backend, task_id = result.task.get_backend(), str(result.id)
    while True:
        found = backend.get_result(task_id)
        if not (following := sent_again_as(found)):
            return found
        task_id = following


async def alatest(result: Any) -> Any:
    """Return the result of a task's latest attempt; see ``latest()``."""
    backend, task_id = result.task.get_backend(), str(result.id)
    while True:
        found = await backend.aget_result(task_id)
        if not (following := sent_again_as(found)):
            return found
        task_id = following


def sent_again_as(result: Any) -> str:
    """Return the id of the next attempt's result, if this attempt was put off, else an empty string."""
    if result.status != "SUCCESSFUL":
        return ""
    value = result.return_value
    return str(value[SENT_AGAIN_AS]) if isinstance(value, dict) and set(value) == {SENT_AGAIN_AS} else ""


def listen() -> None:
    """Hear of the tasks that workers start and finish, of each library that is loaded. Idempotent."""
    for library in LIBRARIES:
        if library in sys.modules and library not in _heard:
            signals: Any = importlib.import_module(f"{library}.signals")
            signals.task_started.connect(_on_started, dispatch_uid="sqlsem")
            signals.task_finished.connect(_on_finished, dispatch_uid="sqlsem")
            _heard.add(library)


def _on_started(*, task_result: Any, **_: Any) -> None:
    # In the worker's own thread and context, which the body inherits.
    _started.set((*_without(task_result), _Started(task_result)))


def _on_finished(*, task_result: Any, **_: Any) -> None:
    for started in _started.get():
        if started.result.id == task_result.id:
            started.ended = True  # also for what the task has left running, with a copy of the context
    _started.set(_without(task_result))


def _without(result: Any) -> tuple[_Started, ...]:
    """What has been started, up to this task: of what was in it, not every backend says that it ended.

    Of what has ended, the end may have been told in another context, such as a task's of the worker's event loop.
    """
    before: list[_Started] = []
    for started in _started.get():
        if started.result.id == result.id:
            break
        if not started.ended:
            before.append(started)
    return tuple(before[-DEEPEST:])


def _current() -> Any:
    started = _started.get()
    return started[-1].result if started and not started[-1].ended else None


def _given(args: tuple[Any, ...]) -> Any:
    """The result in the context that a worker gives to a task which asks for it, if the task is running."""
    for library in LIBRARIES:
        kind = getattr(sys.modules.get(f"{library}.base"), "TaskContext", None)
        if kind is not None and args and isinstance(args[0], kind):
            result = cast("Any", args[0]).task_result
            return result if result.status == "RUNNING" else None
    return None


def _label(result: Any) -> str:
    return f"{result.task.module_path}[{result.id}]"
