"""What can be decorated, and what can't."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_sqlsem.semaphores import Semaphore

_TASK_ORDER = """\
@{kind} decorates a task's body, not the task {shown}. Put it below the task's decorator:

    {decorator}
    @{kind}({name!r})
    def {function}(...):"""

#: Tasks of other systems: their module and class, the attribute with the body, and the decorator that made them.
_OTHER_TASKS = (
    ("huey.api", "TaskWrapper", "func", "@huey.task()"),
    ("dramatiq.actor", "Actor", "fn", "@dramatiq.actor"),
)

_CLASS_ORDER = """\
@{kind} decorates functions, not the class {shown}. {advice}"""


def refuse(semaphore: Semaphore, target: Any) -> None:
    """Raise ``TypeError`` if ``target`` can't be decorated; it shows the right way for views and tasks."""
    words = {"kind": semaphore.kind, "name": semaphore.name}
    # By type(), since isinstance() would evaluate a lazy task before its app is ready.
    if _is_celery_task(type(target)):
        name = _task_name(target)
        function = name.rpartition(".")[2]
        raise TypeError(_TASK_ORDER.format(shown=name, decorator="@app.task", function=function, **words))
    if _is_django_task(type(target)):
        name = target.func.__name__
        raise TypeError(_TASK_ORDER.format(shown=name, decorator="@task", function=name, **words))
    for module, kind, attribute, decorator in _OTHER_TASKS:
        if issubclass(type(target), _class_if_loaded(module, kind)):
            name = getattr(getattr(target, attribute, None), "__name__", "work")
            raise TypeError(_TASK_ORDER.format(shown=name, decorator=decorator, function=name, **words))
    if inspect.isclass(target):
        raise TypeError(_CLASS_ORDER.format(shown=target.__qualname__, advice=_advice(target, **words), **words))
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


def is_coroutine_function(func: Callable[..., Any]) -> bool:
    """Does a call of ``func`` return a coroutine: by its code, by its mark, or by its ``__call__``?"""
    return iscoroutinefunction(func) or (
        not inspect.isroutine(func) and iscoroutinefunction(getattr(type(func), "__call__", None))  # noqa: B004
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


def _advice(target: type, *, kind: str, name: str) -> str:
    if any(base.__module__ == "django.views.generic.base" for base in target.__mro__):
        return f'Write this above a view class:\n\n    @method_decorator({kind}({name!r}), name="dispatch")'
    if issubclass(target, _class_if_loaded("celery.app.task", "Task")):
        return f"Decorate the method that does the work:\n\n    @{kind}({name!r})\n    def run(self, ...):"
    return "Decorate the methods that do the work, or a function that makes the instance."


def _is_celery_task(kind: type) -> bool:
    return issubclass(kind, (_class_if_loaded("celery.app.task", "Task"), _class_if_loaded("celery.local", "Proxy")))


def _task_name(task: Any) -> str:
    if issubclass(type(task), _class_if_loaded("celery.app.task", "Task")):
        return str(task.name)
    with contextlib.suppress(AttributeError):  # the task that a lazy one has become
        return str(object.__getattribute__(task, "__thing").name)
    with contextlib.suppress(AttributeError, IndexError):  # what it will be made from: to ask itself would make it
        return str(object.__getattribute__(task, "_Proxy__args")[0].__name__)
    return "work"


def _is_django_task(kind: type) -> bool:
    modules = ("django.tasks.base", "django_tasks.base", "django_tasks.task")
    return issubclass(kind, tuple(_class_if_loaded(module, "Task") for module in modules))


class _Absent:
    """Stands for a class whose module was never imported, so that nothing can be an instance of it."""


def _class_if_loaded(module: str, name: str) -> type:
    found = getattr(sys.modules.get(module), name, _Absent)
    return found if isinstance(found, type) else _Absent
