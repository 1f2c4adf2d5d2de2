"""What the functions of a URLconf are made of: below decorators, classes, and the views of API frameworks."""

from __future__ import annotations

import functools
import inspect
import types
from typing import TYPE_CHECKING, Any, Final, cast

from django.views.generic import View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: So many steps suffice for any view, and end a walk through something strange.
MANY: Final = 400


def leads_to(view: Callable[..., Any], wrapper: Callable[..., Any]) -> bool:
    """Does a call of ``view`` come to ``wrapper`` as its own body, below whatever else decorates it?

    Helpers that a view calls by their global names are no such bodies.
    """
    try:
        return _leads_to(view, wrapper)
    except TypeError:  # a callable object that has no hash
        return any(found is wrapper for found in below(view))


@functools.lru_cache(maxsize=512)
def _leads_to(view: Callable[..., Any], wrapper: Callable[..., Any]) -> bool:
    return any(found is wrapper for found in below(view))


def below(view: object) -> Iterator[object]:
    """Yield ``view`` and the callables and classes that it is made of, from the outermost on. Raises nothing."""
    pending, seen, steps = [view], set(), 0
    while pending and steps < MANY:
        each = pending.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        steps += 1
        if callable(each):
            yield each
        pending.extend(part for part in _parts(each) if id(part) not in seen)


def view_class(view: object) -> type | None:
    """Return the class of a class-based view, also of Django REST framework's, as ``as_view()`` has noted it."""
    attributes = getattr(view, "__dict__", {})
    found = attributes.get("cls") or attributes.get("view_class")
    return found if inspect.isclass(found) else None


def handlers(found: type, view: object) -> dict[str, Any]:
    """Return the handlers of a view's class by the names that lead to them: of HTTP methods, and of actions."""
    actions = getattr(view, "__dict__", {}).get("actions") or {}
    names = {"dispatch", *View.http_method_names, *(actions.values() if isinstance(actions, dict) else ())}
    return {name: value for name in sorted(names) if (value := inspect.getattr_static(found, name, None)) is not None}


def of_ninja(view: object) -> bool:
    """Is it django-ninja's, which makes responses of what its operations return?"""
    return any(str(getattr(part, "__module__", "")).startswith("ninja.") for part in below(view))


def _parts(each: Any) -> list[object]:
    if isinstance(each, functools.partial):
        return [each.func]
    if isinstance(each, types.MethodType):
        return [each.__func__, each.__self__]
    if inspect.isclass(each):
        return []
    attributes = getattr(each, "__dict__", None) or {}
    parts: list[object] = [attributes["__wrapped__"]] if "__wrapped__" in attributes else []
    if (found := view_class(each)) is not None:
        parts += handlers(found, each).values()
    if isinstance(each, types.FunctionType):
        for cell in each.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not filled in yet
                continue
            if _operation(value) or (callable(value) and not _made_beside(each, value)):
                parts.append(value)
            elif isinstance(value, (list, tuple)):  # what method_decorator() was given
                parts += [part for part in value if isinstance(part, types.FunctionType)]
    elif _operation(each):
        parts += [*attributes.get("operations", ()), attributes.get("view_func")]
    elif not isinstance(each, types.ModuleType):
        parts += [value for value in attributes.values() if isinstance(value, (types.FunctionType, types.MethodType))]
    return parts


def _made_beside(func: types.FunctionType, value: Any) -> bool:
    """Was a function of a closure made in the same scope, as helpers are, rather than given to a decorator?"""
    try:
        code = cast("Any", inspect.unwrap(value)).__code__
    except (AttributeError, ValueError):
        return False
    own = func.__code__
    scope = own.co_qualname.rpartition(".")[0]
    return bool(code.co_filename == own.co_filename and code.co_qualname.rpartition(".")[0] == scope)


def _operation(value: object) -> bool:
    return type(value).__module__ == "ninja.operation"


def operations(view: object) -> list[Any]:
    """Return what django-ninja runs for a view of its own, one for each method; nothing for other views."""
    for part in _parts(view):
        if type(part).__module__ == "ninja.operation" and isinstance(found := vars(part).get("operations"), list):
            return found
    return []
