"""System checks of the order of decorators in the URLconf. Every id has a heading in ``docs/checks.md``."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.urls import get_resolver

from django_sqlsem.core.templates import Template
from django_sqlsem.decorators import wrapper
from django_sqlsem.decorators.views import operations, view_class
from django_sqlsem.locks.semaphore import Semaphore

#: Patterns that are looked at; more would be generated ones.
MANY: Final = 20_000
#: Decorators upon one view.
DEEP: Final = 60
#: By the module and the function that makes them: what Django's decorators are made of.
_KNOWN: Final = {
    ("django.contrib.auth.decorators", "user_passes_test"): "a login or permission check",
    ("django.contrib.auth.decorators", "permission_required"): "a login or permission check",
    ("django.contrib.auth.decorators", "login_required"): "a login or permission check",
    ("django.contrib.admin.views.decorators", "staff_member_required"): "a login or permission check",
    ("django.views.decorators.http", "require_http_methods"): "a check of the method",
}
_MIDDLEWARE: Final = {
    "django.middleware.csrf.CsrfViewMiddleware": "csrf_protect",
    "django.middleware.cache.CacheMiddleware": "cache_page",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """One decorator of a view: ``semaphore``, one of Django's in words, or ``rest``, which is a class of DRF's."""

    what: str
    semaphore: Any = None
    found: Any = None


def check_views(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> Iterable[checks.CheckMessage]:
    """Report decorators that stand on the wrong side of a semaphore, as far as that can be seen."""
    seen: set[int] = set()
    for view in itertools.islice(_views(), MANY):
        if id(view) in seen:
            continue
        seen.add(id(view))
        try:
            yield from list(messages(view))
        except Exception:  # noqa: BLE001, S112 - a view that nobody understands is not for us to judge
            continue


def messages(view: Any) -> Iterable[checks.CheckMessage]:
    """Yield what is wrong with one view of the URLconf."""
    layers = list(_layers(view))
    first = next((number for number, layer in enumerate(layers) if layer.what == "semaphore"), None)
    name = _shown(view)
    if first is not None:
        semaphore = layers[first].semaphore
        shown = repr(semaphore.template or semaphore.name)
        below = [layer.what for layer in layers[first + 1 :] if layer.what not in ("semaphore", "rest")]
        refusing = [what for what in below if what != "cache_page"]
        if refusing:
            yield checks.Warning(
                f"The view {name} takes a slot of {shown} before {refusing[0]} may refuse the request.",
                hint=f"Put {refusing[0]} above the semaphore. See docs/checks.md#sqlsemw014.",
                id="sqlsem.W014",
            )
        if "cache_page" in below:
            yield checks.Warning(
                f"The view {name} takes a slot of {shown} also for a page that is in the cache.",
                hint="Put cache_page above the semaphore. See docs/checks.md#sqlsemw015.",
                id="sqlsem.W015",
            )
        for number, layer in enumerate(layers):
            above = next((each for each in layers[:number] if _asks_for_user(each.semaphore)), None)
            if layer.what == "rest" and above is not None and _authenticates(layer.found):
                yield _misplaced(
                    f"The name {above.semaphore.name!r} of the view {name} asks for the user before Django REST"
                    " framework has authenticated anybody.",
                    "Decorate the method, such as get() or an action, or put the semaphore below @api_view.",
                )
    for operation in operations(view):
        func = operation.view_func
        if (above := _above_the_route(func)) is not None:
            yield _misplaced(
                f"The semaphore {above.name!r} stands above the route of {_shown(func)}, so that requests do not"
                " pass it.",
                "Put the semaphore below the route's decorator.",
            )


def _misplaced(message: str, hint: str) -> checks.CheckMessage:
    return checks.Warning(message, hint=f"{hint} See docs/checks.md#sqlsemw016.", id="sqlsem.W016")


def _views() -> Iterator[Any]:
    if not getattr(settings, "ROOT_URLCONF", None):
        return
    try:
        pending: list[Any] = [get_resolver()]
    except Exception:  # noqa: BLE001 - a ROOT_URLCONF that is none
        return
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        try:
            children = getattr(each, "url_patterns", None)
            callback = None if children is not None else getattr(each, "callback", None)
        except Exception:  # noqa: BLE001, S112 - of the URLconf: Django's own checks say so
            continue
        if callback is not None:
            yield callback
        elif isinstance(children, (list, tuple)):
            pending.extend(reversed(children))


def _layers(view: Any) -> Iterator[Layer]:
    """Yield what is known of the decorators of a view, from the outermost on."""
    for _ in range(DEEP):
        if isinstance(view, functools.partial):
            view = view.func
            continue
        if (known := _layer(view)) is not None:
            yield known
        attributes = getattr(view, "__dict__", {})
        inner = attributes.get("__wrapped__")
        # What as_view() makes has the attributes of dispatch(), also its __wrapped__; what decorates it has view_class.
        if (found := view_class(view)) is not None and (inner is None or view_class(inner) is None):
            yield from _layers_of_class(found)
            return
        if inner is None:
            return
        view = inner


def _layer(func: Any) -> Layer | None:
    if not isinstance(func, types.FunctionType):
        return None
    if func.__code__.co_filename == wrapper.__file__ and func.__code__.co_name == "wrapper":
        return Layer("semaphore", _closure(func)["self"].semaphore)
    maker = (func.__code__.co_qualname.partition(".")[0], func.__globals__.get("__name__"))
    if (what := _KNOWN.get((str(maker[1]), maker[0]))) is not None:
        return Layer(what)
    if maker == ("make_middleware_decorator", "django.utils.decorators"):
        cells = _closure(func)
        middleware = cells.get("middleware_class")
        if middleware is None and "_pre_process_request" in cells:
            middleware = type(_closure(cells["_pre_process_request"])["middleware"])
        what = _MIDDLEWARE.get(f"{getattr(middleware, '__module__', '')}.{getattr(middleware, '__name__', '')}")
        return None if what is None else Layer(what)
    return None


def _layers_of_class(found: type) -> Iterator[Layer]:
    """Yield the decorators of ``dispatch()``, by ``method_decorator`` or at its definition, and mixins below them."""
    dispatch: Any = inspect.getattr_static(found, "dispatch", None)
    for _ in range(DEEP):
        if not isinstance(dispatch, types.FunctionType):
            break
        if (known := _layer(dispatch)) is not None:
            yield known
        cells = _closure(dispatch)
        if dispatch.__code__.co_qualname == "_multi_decorate.<locals>._wrapper":
            given = cells["decorators"]
            # It keeps them in the order of their application.
            for decorator in reversed(given) if isinstance(given, (list, tuple)) else [given]:
                if isinstance(decorator, Semaphore):
                    yield Layer("semaphore", decorator)
                elif (known := _layer(decorator)) is not None:
                    yield known
        if (inner := dispatch.__dict__.get("__wrapped__") or cells.get("method")) is None:
            break
        dispatch = inner
    if getattr(dispatch, "__module__", "") == "django.contrib.auth.mixins":
        yield Layer("a login or permission check")
    api: Any = getattr(sys.modules.get("rest_framework.views"), "APIView", None)  # never imported for its own sake
    if api is not None and issubclass(found, api):
        yield Layer("rest", found=found)


def _closure(func: types.FunctionType) -> dict[str, Any]:
    return {
        name: cell.cell_contents
        for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True)
        if cell != types.CellType()
    }


def _asks_for_user(semaphore: Any) -> bool:
    if semaphore is None:
        return False
    return any(
        field.path[:2] == ("request", "user")
        for source in semaphore.parts or (semaphore.name,)
        for field in Template.parse(source).fields
    )


def _authenticates(found: Any) -> bool:
    """Does a view of Django REST framework know users that Django's own session does not?"""
    own = ("SessionAuthentication", "RemoteUserAuthentication")
    return any(
        each.__module__ != "rest_framework.authentication" or each.__name__ not in own
        for each in found.authentication_classes
    )


def _above_the_route(func: Any) -> Any:
    """Return the semaphore of the function by whose name the module knows what a route was made of before."""
    known = getattr(sys.modules.get(getattr(func, "__module__", "")), getattr(func, "__name__", ""), None)
    for _ in range(DEEP):
        if known is func or known is None:
            return None
        layer = _layer(known)
        known = getattr(known, "__wrapped__", None)
        if layer is not None and layer.semaphore is not None and known is func:
            return layer.semaphore
    return None


def _shown(view: Any) -> str:
    found = view_class(view) or view
    return f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', repr(found))}"
