"""What kind of call a decorated function gets: a view's, a task's, or any other. And what can't be decorated."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest

from django_sqlsem import conf
from django_sqlsem.core import identity
from django_sqlsem.core.durations import Unset
from django_sqlsem.core.templates import django_request, resolved_user
from django_sqlsem.decorators.tasks import RunningTask, rank_of, systems
from django_sqlsem.locks.acquire import Bound
from django_sqlsem.locks.semaphore import Semaphore


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a decorated function: of a view if it has a request, of a task's body if it has a task."""

    #: A view's request: Django's own, also where Django REST framework has wrapped it.
    request: HttpRequest | None = None
    #: The request as the view got it.
    given: Any = None
    #: The running task.
    task: RunningTask | None = None

    @property
    def label(self) -> str:
        """The work in a few words: ``GET /path [trace-id]`` or ``task.name[task-id]``; empty for other calls."""
        if self.request is not None:
            return identity.request_label(str(self.request.method), self.request.path, _trace_id(self.request))
        return self.task.label if self.task is not None else ""

    @contextlib.contextmanager
    def activity(self) -> Iterator[None]:
        """Label the permits taken inside with this request or task."""
        with contextlib.ExitStack() as stack:
            if self is not PLAIN:
                stack.enter_context(identity.activity(self.label, _user_name(self.given, self.request)))
            if self.task is not None:
                stack.enter_context(self.task.entered())
            yield

    def timeout(self, semaphore: Semaphore) -> Unset | float | None:
        """Return how long this call waits: as the semaphore says, or else as the settings say for its kind."""
        given = semaphore.timeout
        if self.request is not None:
            return conf.config().view_timeout if isinstance(given, Unset) else given
        if self.task is not None:
            return conf.config().task_timeout if isinstance(given, Unset) else given
        if semaphore.on_busy == "retry" and isinstance(given, (int, float)):
            # No worker will call again: the call waits instead.
            default = conf.config(semaphore.using).timeout
            return None if default is None else max(given, default)
        return given

    def bound(self, semaphore: Semaphore, timeout: Unset | float | None, *, waits_in_thread: bool = True) -> Bound:
        """Return beyond what this call does not wait: as the semaphore says, or else, of a view, the settings.

        Who says how long a view waits wants it to wait. ``waits_in_thread``: whether it would occupy a thread.
        """
        most = semaphore.max_waiting
        if isinstance(most, Unset):
            most = None
            if self.request is not None and isinstance(semaphore.timeout, Unset):
                setting = conf.config().view_max_waiting
                most = _most_waiting(waits_in_thread) if isinstance(setting, str) else setting
        return Bound(most, refused_if_paused=timeout is not None)

    def policy(self, semaphore: Semaphore) -> Any:
        """Return what becomes of this call when it is busy: a status, ``"raise"``, ``"skip"``, ``"retry"``, a callable.

        A status is for views, a retry for tasks: elsewhere, what suits the call counts.
        """
        chosen = semaphore.on_busy
        if self.request is not None:  # a visitor retries when told to
            return conf.config().busy_status if chosen in (None, "retry") else chosen
        default = "raise" if self.task is None else "retry"
        return default if chosen is None or chosen == "retry" or isinstance(chosen, int) else chosen

    def rank(self, semaphore: Semaphore) -> str:
        """Return the rank by which a task asks that would be sent again when it is busy; empty for other calls."""
        return rank_of(self.task.id) if self.task is not None and self.policy(semaphore) == "retry" else ""


def _most_waiting(waits_in_thread: bool) -> int | None:
    """Return how many views may wait for a name, if nobody says: so few that a site goes on answering."""
    if not waits_in_thread:
        return None
    # A process that serves one request at a time serves it in its main thread; uWSGI has one of several there too.
    several = getattr(sys.modules.get("uwsgi"), "cores", 1) > 1
    return 1 if several or threading.current_thread() is not threading.main_thread() else 0


#: A call that is neither a view's nor a task's.
PLAIN = Call()


def classify(wrapper: Callable[..., Any], args: tuple[Any, ...]) -> Call:
    """Say what kind of call this is.

    It is a view's if the first or second positional argument is a request, and a task's if a worker of Celery or of
    ``django.tasks`` is running ``wrapper`` as the body of its current task.
    """
    for arg in args[:2]:
        if (request := django_request(arg)) is not None:
            return Call(request=request, given=arg)
    for module, system in systems.items():
        if module in sys.modules and (task := system.running(wrapper, args)) is not None:
            return Call(task=task)
    return PLAIN


#: The trace's id of a ``traceparent`` (W3C Trace Context), and what a request id may look like.
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-(?P<id>[0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*", re.ASCII)
_REQUEST_ID = re.compile(r"(?P<id>[\w.:/+=-]{1,64})", re.ASCII)


def _trace_id(request: HttpRequest) -> str:
    """Return the id by which traces and logs know a request: of the trace that runs, or what it came with."""
    if running := next(filter(None, (ask() for ask in identity.trace_ids.values())), ""):
        return running
    meta = request.META
    found = _TRACE_PARENT.fullmatch(meta.get("HTTP_TRACEPARENT", ""))
    found = found or _REQUEST_ID.fullmatch(meta.get("HTTP_X_REQUEST_ID", ""))
    return found["id"] if found else ""


def _user_name(given: object, request: HttpRequest | None) -> str:
    user = resolved_user(given)
    if user is None and given is not request:
        user = resolved_user(request)
    name = getattr(user, "get_username", None)
    return str(name()) if callable(name) else ""


# What can't be decorated.

_TASK_ORDER = """\
@{kind} decorates a task's body, not the task {shown}. Put it below the task's decorator:

    {decorator}
    @{kind}({name!r})
    def {function}(...):"""

_DJANGO_TASKS = (("django.tasks.base", "Task"), ("django_tasks.base", "Task"), ("django_tasks.task", "Task"))
#: Tasks of other systems: their module and class, the attribute with the body, and the decorator that made them.
_OTHER_TASKS = (
    ("huey.api", "TaskWrapper", "func", "@huey.task()"),
    ("dramatiq.actor", "Actor", "fn", "@dramatiq.actor"),
)


def refuse(semaphore: Semaphore, target: Any) -> None:
    """Raise ``TypeError`` if ``target`` can't be decorated; it shows the right way for views and tasks."""
    words = {"kind": semaphore.kind, "name": semaphore.name}
    if (task := _task(target)) is not None:
        shown, decorator, function = task
        raise TypeError(_TASK_ORDER.format(shown=shown, decorator=decorator, function=function, **words))
    if inspect.isclass(target):
        advice = _advice(target, **words)
        raise TypeError(f"@{semaphore.kind} decorates functions, not the class {target.__qualname__}. {advice}")
    if not callable(target):
        raise TypeError(
            f"@{semaphore.kind} decorates functions, not {target!r} of type {type(target).__name__}, "
            "which can't be called."
        )


def refuse_skipped_view(semaphore: Semaphore, func: Callable[..., Any]) -> None:
    """Raise ``ImproperlyConfigured`` if a view would be skipped when busy: it has to answer something."""
    if semaphore.on_busy == "skip":
        raise ImproperlyConfigured(
            f'on_busy="skip" is for functions and tasks; the view {getattr(func, "__qualname__", func)} must answer '
            "something. Use a status from 400 to 599, or a callable that returns a response."
        )


def is_async_dispatch(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Is ``func`` a plain method that returns a coroutine because its view's handlers are coroutine functions?"""
    if getattr(func, "__name__", "") not in ("dispatch", "options"):
        return False
    inner: Any = func
    while getattr(inner, "__self__", None) is None:
        if isinstance(inner, functools.partial):
            inner = inner.func
        elif (inner := getattr(inner, "__wrapped__", None)) is None:
            break
    view = args[0] if inner is None else inner.__self__
    return getattr(type(view), "view_is_async", False) is True


def _task(target: Any) -> tuple[str, str, str] | None:
    """Return the name of a task, the decorator that made it, and its function; ``None`` if it is no task."""
    kind = type(target)  # not isinstance(), which would evaluate a lazy task before its app is ready
    if issubclass(kind, _loaded(("celery.app.task", "Task"), ("celery.local", "Proxy"))):
        name = _celery_name(target)
        return name, "@app.task", name.rpartition(".")[2]
    if issubclass(kind, _loaded(*_DJANGO_TASKS)):
        return target.func.__name__, "@task", target.func.__name__
    for module, name, attribute, decorator in _OTHER_TASKS:
        if issubclass(kind, _loaded((module, name))):
            function = getattr(getattr(target, attribute, None), "__name__", "work")
            return function, decorator, function
    return None


def _advice(target: type, *, kind: str, name: str) -> str:
    if any(base.__module__ == "django.views.generic.base" for base in target.__mro__):
        return f'Write this above a view class:\n\n    @method_decorator({kind}({name!r}), name="dispatch")'
    if issubclass(target, _loaded(("celery.app.task", "Task"))):
        return f"Decorate the method that does the work:\n\n    @{kind}({name!r})\n    def run(self, ...):"
    return "Decorate the methods that do the work, or a function that makes the instance."


def _celery_name(task: Any) -> str:
    if issubclass(type(task), _loaded(("celery.app.task", "Task"))):
        return str(task.name)
    with contextlib.suppress(AttributeError):  # the task that a lazy one has become
        return str(object.__getattribute__(task, "__thing").name)
    with contextlib.suppress(AttributeError, IndexError):  # what it will be made from: to ask itself would make it
        return str(object.__getattribute__(task, "_Proxy__args")[0].__name__)
    with contextlib.suppress(AttributeError, KeyError, TypeError):  # of @shared_task
        return str(inspect.getclosurevars(object.__getattribute__(task, "_Proxy__local")).nonlocals["fun"].__name__)
    return "work"


def _loaded(*classes: tuple[str, str]) -> tuple[type, ...]:
    """Return those of the classes, given by module and name, whose modules were imported."""
    found = [getattr(sys.modules.get(module), name, None) for module, name in classes]
    return tuple(each for each in found if isinstance(each, type))
