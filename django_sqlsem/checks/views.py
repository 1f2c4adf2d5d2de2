"""System checks of decorators: their order in the URLconf, and whether what they declare fits together."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.transaction import Atomic
from django.middleware.cache import CacheMiddleware
from django.middleware.csrf import CsrfViewMiddleware
from django.urls import get_resolver

from django_sqlsem.backends import database_for
from django_sqlsem.backends.base import COUNTER
from django_sqlsem.checks.messages import error, warning
from django_sqlsem.core.modes import MUTEX, SEMAPHORE
from django_sqlsem.core.templates import Template
from django_sqlsem.core.text import shown
from django_sqlsem.decorators import wrapper
from django_sqlsem.decorators.views import operations, view_class
from django_sqlsem.locks.counter import Counter
from django_sqlsem.locks.rwlock import RwLock
from django_sqlsem.locks.semaphore import Semaphore

#: Decorators upon one view that are looked at: an end for one that leads back to itself.
_DEEPEST: Final = 60
#: What Django's decorators are: by the module and the function that makes them, or by their middleware.
_LOGIN: Final = "a login or permission check"
_KNOWN: Final = {
    ("django.contrib.auth.decorators", "user_passes_test"): _LOGIN,
    ("django.contrib.auth.decorators", "permission_required"): _LOGIN,
    ("django.contrib.auth.decorators", "login_required"): _LOGIN,
    ("django.views.decorators.http", "require_http_methods"): "a check of the method",
}
_MIDDLEWARE: Final = {CsrfViewMiddleware: "csrf_protect", CacheMiddleware: "cache_page"}


class Layer(NamedTuple):
    """One decorator of a view: a semaphore, one of Django's in words, or the class of a view of DRF's."""

    semaphore: Any = None
    words: str = ""
    rest: Any = None
    #: Whether it is something of the project's, or of another package's: it may do anything.
    unknown: bool = False


def check_views(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> Iterable[CheckMessage]:
    """Report decorators that stand on the wrong side of a semaphore, as far as that can be seen."""
    try:
        views = {id(view): view for view in _views(get_resolver())}
    except Exception:  # noqa: BLE001 - of the URLconf: Django's own checks say so
        return
    for view in views.values():
        try:
            yield from list(messages(view))
        except Exception:  # noqa: BLE001, S112 - a view of an unknown kind
            continue


def _views(resolver: Any) -> Iterator[Any]:
    for each in resolver.url_patterns:
        if hasattr(each, "url_patterns"):
            yield from _views(each)
        else:
            yield each.callback


def messages(view: Any) -> Iterable[CheckMessage]:
    """Yield what is wrong with one view of the URLconf."""
    layers, name = list(_layers(view)), _shown(view)
    semaphores = [number for number, layer in enumerate(layers) if layer.semaphore]
    if semaphores:
        found = layers[semaphores[0]].semaphore
        takes = f"The view {name} takes a slot of {(found.template or found.name)!r}"
        below = [layer.words for layer in layers[semaphores[0] :] if layer.words]
        if refusing := [words for words in below if words != "cache_page"]:
            text = f"{takes} before {refusing[0]} may refuse the request."
            yield warning("W014", text, f"Put {refusing[0]} above the semaphore.")
        if "cache_page" in below:
            text = f"{takes} also for a page that is in the cache."
            yield warning("W015", text, "Put cache_page above the semaphore.")
        named = next((number for number in semaphores if _asks_for_user(layers[number].semaphore)), None)
        if named is not None and _lets_anonymous_in(view, layers, named):
            text = (
                f"The name {layers[named].semaphore.name!r} of the view {name} asks for the user, and nothing keeps"
                " visitors out who are not logged in: for them it is an error."
            )
            advice = "Put login_required above the semaphore, or use a field that every visitor has."
            yield warning("W024", text, advice)
    if layers and layers[-1].rest and _authenticates(layers[-1].rest):
        asking = [layer.semaphore for layer in layers if layer.semaphore and _asks_for_user(layer.semaphore)]
        if asking:
            text = (
                f"The name {asking[0].name!r} of the view {name} asks for the user before Django REST framework knows"
                " its user."
            )
            advice = "Decorate the method, such as get() or an action, or put the semaphore below @api_view."
            yield warning("W016", text, advice)
    for operation in operations(view):
        func = operation.view_func
        if (above := _above_the_route(func)) is not None:
            text = (
                f"The semaphore {above.name!r} stands above the route of {_shown(func)}, so that requests do not pass"
                " it."
            )
            yield warning("W016", text, "Put the semaphore below the route's decorator.")


def _layers(view: Any) -> Iterator[Layer]:
    """Yield what is known of the decorators of a view, of its class's ``dispatch()``, and of what these stand upon."""
    api: Any = getattr(sys.modules.get("rest_framework.views"), "APIView", ())  # never imported for its own sake
    rest = None
    for _ in range(_DEEPEST):
        if isinstance(view, functools.partial):
            view = view.func
        yield from _layer(view)
        inner = getattr(view, "__dict__", {}).get("__wrapped__")
        # What as_view() makes has the attributes of dispatch(), also its __wrapped__; what decorates it has view_class.
        if (found := view_class(view)) is not None and (inner is None or view_class(inner) is None):
            rest = found if issubclass(found, api) else None
            inner = inspect.getattr_static(found, "dispatch", None)
        elif _qualname(view) == "_multi_decorate.<locals>._wrapper":  # of method_decorator()
            cells = closure(view)
            inner, given = inner or cells["method"], cells["decorators"]
            # It keeps them in the order of their application.
            for decorator in reversed(given) if isinstance(given, (list, tuple)) else [given]:
                yield from [Layer(decorator)] if isinstance(decorator, Semaphore) else _layer(decorator)
        if inner is None:
            break
        view = inner
    if getattr(view, "__module__", "") == "django.contrib.auth.mixins":
        yield Layer(words=_LOGIN)
    if rest is not None:
        yield Layer(rest=rest)


def _layer(func: Any) -> Iterator[Layer]:
    """Yield what a function is, if it is known: a decorated view, or a decorator that is not applied yet."""
    if not isinstance(func, types.FunctionType):
        yield Layer(unknown=True)
        return
    cells, module = closure(func), str(func.__globals__["__name__"])
    if func.__code__.co_filename == wrapper.__file__ and func.__code__.co_name == "wrapper":
        yield Layer(cells["self"].semaphore)
    elif words := _KNOWN.get((module, _qualname(func).partition(".")[0])):
        yield Layer(words=words)
    elif module == "django.utils.decorators":
        made = cells.get("middleware_class") or type(closure(cells.get("_pre_process_request")).get("middleware"))
        if words := _MIDDLEWARE.get(made):
            yield Layer(words=words)
    elif module.partition(".")[0] not in ("django", "contextlib"):
        yield Layer(unknown=True)


def _qualname(func: Any) -> str:
    """Return where a function was written; its ``__qualname__`` is that of what it decorates."""
    return func.__code__.co_qualname if isinstance(func, types.FunctionType) else ""


def closure(func: Any) -> dict[str, Any]:
    """Return the variables of the scope in which a function was made, by name."""
    if not isinstance(func, types.FunctionType):
        return {}
    cells = zip(func.__code__.co_freevars, func.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}


def _lets_anonymous_in(view: Any, layers: list[Layer], semaphore: int) -> bool:
    """Does nothing above a semaphore see to a login, as far as that can be seen? One below is told of by W014."""
    if layers[-1].rest or any(layer.words == _LOGIN for layer in layers):
        return False
    if any(layer.unknown for layer in layers[:semaphore]):  # it may
        return False
    by_middleware = any(path.endswith("LoginRequiredMiddleware") for path in settings.MIDDLEWARE)
    return not (by_middleware and getattr(view, "login_required", True))


def _asks_for_user(semaphore: Any) -> bool:
    sources = semaphore.parts or (semaphore.name,)
    return any(field.path[:2] == ("request", "user") for each in sources for field in Template.parse(each).fields)


def _authenticates(found: Any) -> bool:
    """Does a view of Django REST framework know users that Django's own session does not?"""
    own = ("SessionAuthentication", "RemoteUserAuthentication")
    known = [f"rest_framework.authentication.{name}" for name in own]
    return any(f"{each.__module__}.{each.__name__}" not in known for each in found.authentication_classes)


def _above_the_route(func: Any) -> Any:
    """Return the semaphore of the function by whose name the module knows what a route was made of before."""
    above = [each for each in _above(func) if each.__wrapped__ is func]
    return next((layer.semaphore for each in above for layer in _layer(each)), None)


def _shown(view: Any) -> str:
    found = view_class(view) or view
    return f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', repr(found))}"


# What the code declares: all that is decorated, and the locks that modules keep in names of their own.


def check_declared(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> Iterable[CheckMessage]:
    """Report locks that contradict each other or the settings, and transactions that outlast their permits."""
    found = list(_declared())
    yield from _unknown_aliases(found)
    yield from _two_kinds_or_numbers(found)
    for function, lock in list(wrapper.declared.items()):
        made_of = [each for above in _above(function) for each in closure(above).values()]
        if lock.release_policy == "on_exit" and any(isinstance(each, Atomic) for each in made_of):
            text = (
                f"transaction.atomic stands above the semaphore {lock.name!r} of {_named(function)}: its slot is given"
                " back before the COMMIT, and the next one begins before that can be seen."
            )
            advice = 'Put transaction.atomic below the semaphore, or give the semaphore release="on_commit".'
            yield warning("W025", text, advice)


def _declared() -> Iterator[tuple[str, Semaphore | Counter]]:
    """Yield each lock with where it is."""
    for function, lock in list(wrapper.declared.items()):
        yield _named(function), lock
    for module, namespace in [(name, getattr(each, "__dict__", {})) for name, each in list(sys.modules.items())]:
        for name, value in list(namespace.items()):
            if issubclass(type(value), Semaphore | Counter):  # not isinstance(), which would evaluate lazy objects
                yield f"{module}.{name}", value
            elif issubclass(type(value), RwLock):
                yield f"{module}.{name}", value.read()


def _unknown_aliases(found: list[tuple[str, Semaphore | Counter]]) -> Iterator[CheckMessage]:
    for where, lock in sorted(found, key=lambda pair: pair[0]):
        if lock.using is not None and lock.using not in connections.settings:
            aliases = ", ".join(sorted(connections.settings))
            text = f"{where}: using is {shown(lock.using)}, which is not in DATABASES: {aliases}."
            yield error("E009", text, "Every acquire would fail: name an alias that there is, or leave it out.")


def _two_kinds_or_numbers(found: list[tuple[str, Semaphore | Counter]]) -> Iterator[CheckMessage]:
    by_name: dict[tuple[str, str, bool], list[tuple[str, str, int | None]]] = defaultdict(list)
    for where, lock in found:
        try:
            alias = database_for(lock.using)
        except ImproperlyConfigured:
            continue  # another check says it
        literal = getattr(lock, "parts", None) is not None
        by_name[alias, lock.name, literal].append((where, getattr(lock, "kind", COUNTER), getattr(lock, "slots", None)))
    for (_, name, _), uses in sorted(by_name.items()):
        kinds = _places((kind, where) for where, kind, _ in uses)
        numbers = _places((slots, where) for where, _, slots in uses if slots is not None)
        if len(kinds) > 1:
            end = "Whichever is used second is an error."
            if kinds.keys() <= {SEMAPHORE, MUTEX}:
                end = "One is let in at a time while anybody uses it as a mutex."
            text = f"The code declares {name!r} as several kinds of locks: {_told(kinds)}. {end}"
            yield warning("W029", text, "Let one object be the lock, or give the other one another name.")
        elif len(numbers) > 1:
            text = (
                f"The code declares several numbers of slots for {name!r}: {_told(numbers)}. The largest is the bound."
            )
            advice = (
                "Import one object where it is used. Two views that answer differently need two objects: give both the"
                " same number, from one constant."
            )
            yield warning("W023", text, advice)


def _places(found: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    """Return where each of some things is declared."""
    places: dict[Any, list[str]] = defaultdict(list)
    for what, where in found:
        places[what].append(where)
    return places


def _told(found: dict[Any, list[str]]) -> str:
    return ", ".join(f"{what} in {min(places)}" for what, places in sorted(found.items()))


def _above(function: Any) -> Iterator[Any]:
    """Yield what decorates a function further out, as far as its module's name for it leads there."""
    found: Any = sys.modules.get(getattr(function, "__module__", ""))
    for part in getattr(function, "__qualname__", "").split("."):
        found = getattr(found, "__dict__", {}).get(part)
    found = getattr(found, "__func__", found)  # of a static or a class method
    found = getattr(found, "_orig_run", None) or getattr(found, "run", None) or getattr(found, "func", None) or found
    for _ in range(_DEEPEST):
        if found is function or not hasattr(found, "__wrapped__"):
            return
        yield found
        found = found.__wrapped__


def _named(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
