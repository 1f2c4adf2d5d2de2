"""What kind of call a decorated function gets: a view's, a task's, or any other."""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from django_sqlsem import conf, identity
from django_sqlsem.name_templates import django_request, resolved_user
from django_sqlsem.timeouts import Unset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from django.http import HttpRequest

    from django_sqlsem.semaphores import Semaphore


class Kind(enum.Enum):
    """What answers a busy call: a response, a retry, or an exception."""

    VIEW = "view"
    TASK = "task"
    PLAIN = "plain"


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


#: The systems of tasks: the module that is loaded where one is in use, and ours that knows it. By name, because ours
#: are in a higher layer, and theirs are never imported for their own sake.
_SYSTEMS: Final = (
    ("celery", "django_sqlsem.contrib.celery"),
    ("django.tasks", "django_sqlsem.contrib.tasks"),
    ("django_tasks", "django_sqlsem.contrib.tasks"),
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a decorated function."""

    kind: Kind
    #: A view's request: Django's own, also where Django REST framework has wrapped it.
    request: HttpRequest | None = None
    #: The request as the view got it.
    given: Any = None
    #: The running task.
    task: RunningTask | None = None

    @property
    def label(self) -> str:
        """The work in a few words: ``GET /path`` or ``task.name[task-id]``; empty for other calls."""
        if self.request is not None:
            return f"{self.request.method} {self.request.path}"
        return self.task.label if self.task is not None else ""

    def activity(self) -> AbstractContextManager[None]:
        """Label the permits taken inside with this request or task."""
        if self.kind is Kind.PLAIN:
            return contextlib.nullcontext()
        labelled = identity.activity(self.label, _user_name(self.given, self.request))
        return labelled if self.task is None else _both(labelled, self.task.entered())


def classify(wrapper: Callable[..., Any], args: tuple[Any, ...]) -> Call:
    """Say what kind of call this is.

    It is a view's if the first or second positional argument is a request, and a task's if a worker of Celery or of
    ``django.tasks`` is running ``wrapper`` as the body of its current task.
    """
    for arg in args[:2]:
        if (request := django_request(arg)) is not None:
            return Call(Kind.VIEW, request=request, given=arg)
    if (task := running_task(wrapper, args)) is not None:
        return Call(Kind.TASK, task=task)
    return Call(Kind.PLAIN)


def running_task(wrapper: Callable[..., Any], args: tuple[Any, ...]) -> RunningTask | None:
    """Return the task whose body is ``wrapper``, if a worker is running it right now, else ``None``."""
    for theirs, ours in _SYSTEMS:
        if theirs in sys.modules:
            task: RunningTask | None = importlib.import_module(ours).running(wrapper, args)
            if task is not None:
                return task
    return None


def listen() -> None:
    """Hear of the tasks that start, if Django's are in use: nothing else tells what a worker is running."""
    if "django.tasks" in sys.modules or "django_tasks" in sys.modules:
        importlib.import_module("django_sqlsem.contrib.tasks").listen()


def is_below(wrapper: Callable[..., Any], *functions: Any) -> bool:
    """Is ``wrapper`` one of these functions, or what one of them runs below whatever else decorates it?"""
    pending = list(functions)
    while pending:
        function = pending.pop()
        function = getattr(function, "__func__", function)
        if function is wrapper:
            return True
        if isinstance(function, functools.partial):
            pending.append(function.func)
        elif (inner := getattr(function, "__wrapped__", None)) is not None:
            pending.append(inner)
    return False


def timeout_for(semaphore: Semaphore, call: Call) -> Unset | float | None:
    """Return how long this call waits: as the semaphore says, or else as the settings say for its kind."""
    given = semaphore.timeout
    if call.kind is Kind.VIEW:
        return conf.config().view_timeout if isinstance(given, Unset) else given
    if call.kind is Kind.TASK:
        return conf.config().task_timeout if isinstance(given, Unset) else given
    if semaphore.on_busy == "retry" and isinstance(given, (int, float)):
        # Nobody would call again, as a worker would: waiting stands in for it.
        default = conf.config(semaphore.using).timeout
        return None if default is None else max(given, default)
    return given


def policy_for(semaphore: Semaphore, call: Call) -> Any:
    """Return what becomes of this call when it is busy: a status, ``"raise"``, ``"skip"``, ``"retry"``, a callable.

    A status is for views, a retry for tasks: elsewhere, what suits the call counts.
    """
    chosen = semaphore.on_busy
    if call.kind is Kind.VIEW:  # a visitor retries when told to
        return conf.config().busy_status if chosen in (None, "retry") else chosen
    default = "retry" if call.kind is Kind.TASK else "raise"
    return default if chosen is None or chosen == "retry" or isinstance(chosen, int) else chosen


@contextlib.contextmanager
def _both(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    with outer, inner:
        yield


def _user_name(given: object, request: HttpRequest | None) -> str:
    user = resolved_user(given)
    if user is None and given is not request:
        user = resolved_user(request)
    name = getattr(user, "get_username", None)
    return str(name()) if callable(name) else ""
