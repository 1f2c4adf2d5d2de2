"""Views: what they are made of, their transactions by ``ATOMIC_REQUESTS``, and their streams.

A decorated view's permit is taken before the BEGIN and given back after the COMMIT; streams, and templates that are
rendered after the view, give it back at their end.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import types
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, Self, cast

from django.core.signals import request_finished
from django.db import connections, transaction
from django.http import FileResponse, HttpRequest
from django.http.response import HttpResponseBase
from django.template.response import SimpleTemplateResponse
from django.views.generic import View

from django_sqlsem.database.transactions import at_transaction_end
from django_sqlsem.locks.permit import Permit

#: How many steps suffice for any view, and end a walk through something strange.
MOST_STEPS: Final = 400


def leads_to(view: Callable[..., Any], wrapper: Callable[..., Any], *, helpers: bool = True) -> bool:
    """Does a call of ``view`` come to ``wrapper`` as its own body, below whatever else decorates it?

    Helpers that a view calls by their global names are no such bodies. ``helpers``: whether the defaults of arguments
    are taken for bodies in every function, or only where it takes any arguments, as a decorator's function does.
    """
    try:
        return _leads_to(view, wrapper, helpers)
    except TypeError:  # a callable object that has no hash
        return any(found is wrapper for found in below(view, helpers=helpers))


@functools.lru_cache(maxsize=512)
def _leads_to(view: Callable[..., Any], wrapper: Callable[..., Any], helpers: bool) -> bool:
    return any(found is wrapper for found in below(view, helpers=helpers))


def below(view: object, *, helpers: bool = True) -> Iterator[object]:
    """Yield ``view`` and the callables and classes that it is made of, from the outermost on. Raises nothing."""
    pending, seen, steps = [view], set(), 0
    while pending and steps < MOST_STEPS:
        each = pending.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        steps += 1
        if callable(each):
            yield each
        pending.extend(part for part in _parts(each, helpers=helpers) if id(part) not in seen)


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


def _parts(each: Any, *, helpers: bool = True) -> list[object]:
    if isinstance(each, functools.partial):  # the view may be what the function calls, or what it is given
        return [each.func, *_callables([*each.args, *each.keywords.values()])]
    if isinstance(each, types.MethodType):
        return [each.__func__, each.__self__]
    if inspect.isclass(each):
        return []
    attributes = _attributes(each)
    parts: list[object] = [attributes["__wrapped__"]] if "__wrapped__" in attributes else []
    if (found := view_class(each)) is not None:
        parts += handlers(found, each).values()
    if isinstance(each, types.FunctionType):
        given = _defaults(each, helpers=helpers)
        for cell in each.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled in yet
                given.append(cell.cell_contents)
        for value in given:
            if not (callable(value) and _made_beside(each, value)):
                parts += _callables(value) or [value] * hasattr(value, "__dict__")
    elif _operation(each):
        parts += [*attributes.get("operations", ()), attributes.get("view_func")]
    elif not isinstance(each, types.ModuleType):
        for value in attributes.values():
            parts += _callables(value)
    return parts


def _defaults(func: types.FunctionType, *, helpers: bool) -> list[object]:
    if not (helpers or func.__code__.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)):
        return []
    return [*(func.__defaults__ or ()), *(func.__kwdefaults__ or {}).values()]


def _attributes(each: object) -> dict[str, Any]:
    slots = [getattr(base, "__slots__", ()) for base in type(each).__mro__]
    names = {name for some in slots for name in ((some,) if isinstance(some, str) else some) if hasattr(each, name)}
    return {name: getattr(each, name) for name in names} | (getattr(each, "__dict__", None) or {})


def _callables(value: Any) -> list[object]:
    """Return what can be called: a value itself, or some in a collection."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return [each for each in values if callable(each) or _operation(each)]


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


#: What a request has while a decorated view's transactions are open.
_OPEN: Final = "_sqlsem_atomic"


class EveryAlias(set[str]):
    """What tells Django's handler not to open a transaction around a decorated view, on any alias.

    Its members are the aliases that ``@non_atomic_requests`` named, above or below: the wrapper opens none there.
    """

    def __contains__(self, alias: object) -> bool:
        return True


def opt_out(wrapper: Callable[..., Any], func: Callable[..., Any]) -> None:
    """Let ``wrapper`` open the transaction itself, unless ``func`` is decorated already and does so."""
    aliases = getattr(func, "_non_atomic_requests", ())
    wrapper._non_atomic_requests = (  # type: ignore[attr-defined]
        aliases if isinstance(aliases, EveryAlias) else EveryAlias(aliases)
    )


def aliases_to_open(wrapper: Callable[..., Any], func: Callable[..., Any], request: HttpRequest) -> list[str]:
    """Return the aliases on which ``wrapper`` must open the transaction that the handler has left to it."""
    if isinstance(getattr(func, "_non_atomic_requests", None), EveryAlias):
        return []  # another semaphore's wrapper, further in, opens it: after that one's permit too
    if _OPEN in request.__dict__:
        return []  # another one, further out, has done so
    marked = _marks(request)
    if not isinstance(marked, EveryAlias):
        return []
    refused = set(marked).union(getattr(wrapper, "_non_atomic_requests", ()))
    return [alias for alias in _atomic_aliases() if alias not in refused]


def opened_around(wrapper: Callable[..., Any], func: Callable[..., Any], request: HttpRequest) -> bool:
    """Is ``func`` a view's body inside a transaction of ``ATOMIC_REQUESTS`` that was opened further out?

    Django looks for marks on what the URLconf has. It sees none on a class-based view's handler, such as ``get()``,
    below a decorator that does not copy them, or below an API framework. The permit of a mere helper that gets the
    request is no such case: it ends with the helper.
    """
    if isinstance(_marks(request), EveryAlias) and _OPEN not in request.__dict__:
        return False
    if not any(connections[alias].in_atomic_block for alias in _atomic_aliases()):
        return False
    actions = getattr(request.resolver_match and request.resolver_match.func, "actions", None) or {}  # a ViewSet's
    handlers = {"dispatch", *View.http_method_names, *actions.values()}
    if getattr(func, "__name__", "") in handlers:
        return True
    view = getattr(request.resolver_match, "func", None)
    return view is not None and (leads_to(view, wrapper) or leads_to(view, func))


@contextlib.contextmanager
def atomic(aliases: list[str], request: Any) -> Iterator[None]:
    """Open a transaction on each alias, nested as the handler nests them."""
    with contextlib.ExitStack() as stack:
        request.__dict__[_OPEN] = True
        stack.callback(request.__dict__.pop, _OPEN, None)
        for alias in reversed(aliases):
            stack.enter_context(transaction.atomic(using=alias))
        yield


def _marks(request: HttpRequest) -> object:
    match = request.resolver_match  # what the handler has looked at; None if no handler has called the view
    return EveryAlias(connections.settings) if match is None else getattr(match.func, "_non_atomic_requests", None)


def _atomic_aliases() -> list[str]:
    return [alias for alias, settings in connections.settings.items() if settings["ATOMIC_REQUESTS"]]


#: The task in which Django's handler for ASGI runs asynchronous views and sends their responses, before Django 6.1.
_HANDLER: Final = "ASGIHandler.handle.<locals>.process_request"
#: The streams that views of this task have returned: since Django 6.1 its handler runs them in the server's own task,
#: and of a client that leaves before the response is there it says no more than that the request is finished.
_returned: contextvars.ContextVar[tuple[weakref.ref[_End], ...]] = contextvars.ContextVar("sqlsem_streams", default=())


def is_made_later(response: Any) -> bool:
    """Whether what a view returns is not made yet: a stream, or a template that Django renders after the view."""
    if isinstance(response, SimpleTemplateResponse):
        return not response.is_rendered
    return isinstance(response, HttpResponseBase) and response.streaming


def leave_to(response: Any, permit: Permit, request: HttpRequest) -> None:
    """Have a response that is made later give the permit back when it is rendered or closed, fails, or is dropped.

    A middleware may drop it without closing it: Django's own does so for a 304. Whichever response is sent at last
    closes the request at its own end. Django's handler for ASGI closes neither a stream that has failed, nor one whose
    client has left before the first byte. Some of these are on cycles of references until the garbage is collected.
    """
    end = _End(permit)
    if response.streaming:
        if not isinstance(response, FileResponse):  # of which WSGI's servers may take the file itself
            # Not through the property, whose iterators refer to the response: it would be on a cycle.
            response._iterator = (_AsyncParts if response.is_async else _sync_parts)(response._iterator, permit)
            end.parts = response._iterator
        response._resource_closers.append(end)
    else:
        response.add_post_render_callback(end.rendered)
    _close_with(request, end)
    with contextlib.suppress(RuntimeError):  # no event loop runs here
        task = asyncio.current_task()
        if task is not None and getattr(task.get_coro(), "__qualname__", "") == _HANDLER:
            task.add_done_callback(functools.partial(_handled, weakref.ref(response), permit))
        elif task is not None:
            _returned.set((*(each for each in _returned.get() if each() is not None), weakref.ref(end)))
            request_finished.connect(_finished, dispatch_uid="sqlsem_streams")


def _finished(sender: Any, **_: Any) -> None:
    # A server's task is one request's; a test's, which other handlers serve, may have several responses open.
    if "ASGIHandler" not in [each.__name__ for each in getattr(sender, "__mro__", ())]:
        return
    # In the request's context: a response that is closed has given its permit back before.
    for followed in _returned.get():
        end = followed()
        if end is not None and not end.permit.released:
            end.permit._abandon()


def _close_with(request: Any, end: _End) -> None:
    # The request refers to the end weakly: a request whose user is known is on a cycle of its own.
    followed, itself, before = weakref.ref(end), weakref.ref(request), vars(request).get("close")

    def close() -> None:
        try:
            if (end := followed()) is not None:
                end()
        finally:
            if before is not None:  # of another stream's
                before()
            elif (request := itself()) is not None:
                type(request).close(request)

    request.close = close


def _handled(response: weakref.ref[Any], permit: Permit, task: asyncio.Task[Any]) -> None:
    # Not by exception(), which would mark the exception as retrieved.
    failed = task.cancelled() or getattr(task, "_exception", None) is not None
    if (failed or task.result() is not response()) and not permit.released:
        permit._abandon()  # Django has nothing left to close


class _AsyncParts:
    """The parts of an asynchronous stream."""

    def __init__(self, parts: AsyncIterator[Any], permit: Permit) -> None:
        self.parts = parts
        self.permit = permit

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return await anext(self.parts)
        except StopAsyncIteration:
            raise
        except Exception:
            await self.permit._aclose()
            raise


def _sync_parts(parts: Iterator[Any], permit: Permit) -> Iterator[Any]:
    """Yield the parts of a synchronous stream."""
    try:
        yield from parts
    except Exception:
        permit._close()
        raise


class _End:
    """Closes the permit with the response. A dropped response is no mistake of the program: nothing is logged."""

    def __init__(self, permit: Permit) -> None:
        self.permit = permit
        self.parts: Any = None
        permit._goes_with_response = True  # the collector may come to it first

    def __call__(self) -> None:
        try:
            close = getattr(self.parts, "close", None)
            if close is not None:  # what the generator cleans up comes before the next holder
                close()
        finally:
            self.permit._close()

    def rendered(self, response: object) -> None:
        at_transaction_end(None, self.permit._close)  # somebody may render inside the transaction

    def __del__(self) -> None:
        if not self.permit.released:
            self.permit._abandon()  # only a note for the keeper: a finaliser may run at any point
