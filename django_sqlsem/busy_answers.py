"""The answers of busy views, whatever kind of view it is; and what ``on_busy`` may not answer."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import TYPE_CHECKING, Any

from django.http.response import HttpResponseBase

from django_sqlsem.busy import Busy, busy_response
from django_sqlsem.view_chains import leads_to, of_ninja, view_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.http import HttpResponse

    from django_sqlsem.calls import Call


def answer_view(busy: Busy, call: Call, status: int) -> HttpResponse:
    """Return the answer of a busy view: by Django REST framework if the view is its, else JSON or a page."""
    request = call.request
    assert request is not None  # noqa: S101
    view = getattr(request.resolver_match, "func", None)
    api: Any = sys.modules.get("rest_framework.views")  # never imported for its own sake
    if api is not None:
        found = view_class(view)
        if call.given is not request or (found is not None and issubclass(found, api.APIView)):
            support: Any = importlib.import_module("django_sqlsem.contrib.rest_framework")
            response: HttpResponse = support.answer(busy, call.given, request, view, status)
            return response
    return busy_response(busy, request, status)


def refuse_answer(answer: object, on_busy: object, call: Call, wrapper: Callable[..., Any]) -> None:
    """Raise ``TypeError`` if a view can't answer what its ``on_busy`` has returned.

    ``None`` and awaitables of synchronous views never can. What else is no response may suit a framework that makes
    one of it, or a function that only gets the request.
    """
    if isinstance(answer, HttpResponseBase):
        return
    name = getattr(wrapper, "__qualname__", repr(wrapper))
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise TypeError(f"on_busy {on_busy!r} is asynchronous, but the view {name} is not.")
    view = getattr(call.request and call.request.resolver_match, "func", None)
    if answer is None or (view is not None and leads_to(view, wrapper) and not of_ninja(view)):
        raise TypeError(f"on_busy {on_busy!r} of the view {name} must return an HttpResponse, not {answer!r}.")
