"""What kind of call a decorated function gets: a view's, a Celery task's, or any other."""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django_sqlsem import conf, identity
from django_sqlsem.name_templates import django_request, resolved_user
from django_sqlsem.timeouts import Unset

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from django.http import HttpRequest

    from django_sqlsem.semaphores import Semaphore


class Kind(enum.Enum):
    """What answers a busy call: a response, a retry, or an exception."""

    VIEW = "view"
    TASK = "task"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a decorated function."""

    kind: Kind
    #: A view's request: Django's own, also where Django REST framework has wrapped it.
    request: HttpRequest | None = None
    #: The request as the view got it.
    given: Any = None
    #: The running Celery task.
    task: Any = None

    @property
    def label(self) -> str:
        """The work in a few words: ``GET /path`` or ``task.name[task-id]``; empty for other calls."""
        if self.request is not None:
            return f"{self.request.method} {self.request.path}"
        return f"{self.task.name}[{self.task.request.id}]" if self.task is not None else ""

    def activity(self) -> AbstractContextManager[None]:
        """Label the permits taken inside with this request or task."""
        if self.kind is Kind.PLAIN:
            return contextlib.nullcontext()
        return identity.activity(self.label, _user_name(self.given, self.request))


def classify(wrapper: Callable[..., Any], args: tuple[Any, ...]) -> Call:
    """Say what kind of call this is.

    It is a view's if the first or second positional argument is a request, and a task's if a Celery worker is
    running ``wrapper`` as the body of its current task.
    """
    for arg in args[:2]:
        if (request := django_request(arg)) is not None:
            return Call(Kind.VIEW, request=request, given=arg)
    if (task := running_task(wrapper)) is not None:
        return Call(Kind.TASK, task=task)
    return Call(Kind.PLAIN)


def running_task(wrapper: Callable[..., Any]) -> Any:
    """Return the Celery task whose body is ``wrapper``, if a worker is running it right now, else ``None``."""
    celery = sys.modules.get("celery")  # never imported for its own sake
    task = getattr(celery, "current_task", None)
    if not task or not is_body(task, wrapper) or task.request.called_directly or task.request.is_eager:
        return None
    return task._get_current_object()


def is_body(task: Any, wrapper: Callable[..., Any]) -> bool:
    """Is ``wrapper`` what the task runs, below whatever else decorates its ``run``?"""
    pending = [getattr(task, "_orig_run", None), task.run]
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


def retry_task(task: Any, retry_after: int, error: Exception) -> Exception:
    """Send the task again for later; return the exception that tells the worker so."""
    # By name, because everything that knows Celery lives in contrib, which is a higher layer.
    celery_support: Any = importlib.import_module("django_sqlsem.contrib.celery")
    retry: Exception = celery_support.retry(task, retry_after, error)
    return retry


def _user_name(given: object, request: HttpRequest | None) -> str:
    user = resolved_user(given)
    if user is None and given is not request:
        user = resolved_user(request)
    name = getattr(user, "get_username", None)
    return str(name()) if callable(name) else ""
