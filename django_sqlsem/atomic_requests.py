"""``ATOMIC_REQUESTS``: a decorated view's permit is taken before the BEGIN and given back after the COMMIT."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from django.db import connections, transaction
from django.views.generic import View

from django_sqlsem.view_chains import leads_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django.http import HttpRequest


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
def atomic(aliases: list[str], request: HttpRequest | None) -> Iterator[None]:
    """Open a transaction on each alias, nested as the handler nests them."""
    if request is None or not aliases:
        yield
        return
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
