"""The answers of busy views, whatever kind of view it is; and what ``on_busy`` may not answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase

from django_sqlsem.busy import Busy, busy_response, of_ninja
from django_sqlsem.decorators.calls import Call
from django_sqlsem.decorators.views import leads_to

#: What ``contrib`` has registered: each returns a framework's own answer, or ``None`` for views that are not its own.
frameworks: list[Callable[[Busy, Call, int], HttpResponse | None]] = []


def answer_view(busy: Busy, call: Call, status: int) -> HttpResponse:
    """Return the answer of a busy view: by Django REST framework if the view is its, else JSON or a page."""
    for framework in frameworks:
        if (response := framework(busy, call, status)) is not None:
            return response
    assert call.request is not None  # noqa: S101
    return busy_response(busy, call.request, status)


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
