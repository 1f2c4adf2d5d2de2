"""Busy answers of Django REST framework's views: through their own exception handler and renderers."""

from __future__ import annotations

import contextlib
from typing import Any

from django.http import HttpRequest, HttpResponse
from rest_framework import exceptions
from rest_framework.views import APIView

from django_sqlsem.busy import Busy, detail, finish
from django_sqlsem.decorators.calls import Call
from django_sqlsem.decorators.views import view_class


class BusyAnswer(exceptions.APIException):  # type: ignore[misc]  # of a library without types
    """What the project's exception handler gets for a busy view. ``wait``: seconds until the next try; ``busy``."""

    default_code = "busy"

    def __init__(self, busy: Busy, status: int) -> None:
        """``status``: the HTTP status of the answer."""
        super().__init__(detail(busy, busy.request), code=self.default_code)
        self.status_code = status
        self.wait = busy.retry_after
        self.busy = busy


def answer(busy: Busy, call: Call, status: int) -> HttpResponse | None:
    """Return the busy answer of a view; ``None`` if neither the view nor its request is the framework's."""
    request, given = call.request, call.given
    assert request is not None  # noqa: S101
    view: Any = getattr(request.resolver_match, "func", None)
    is_its_own = issubclass(view_class(view) or object, APIView)
    if given is request and not is_its_own:
        return None
    running = (getattr(given, "parser_context", None) or {}).get("view")
    try:
        if isinstance(running, APIView):
            response = running.handle_exception(BusyAnswer(busy, status))
        elif is_its_own:
            response = _answer_ahead(BusyAnswer(busy, status), request, view)
        else:  # a request like the framework's, in a view that is none of its
            return None
    except BusyAnswer:  # the project's exception handler does not answer it
        return None
    return finish(response, busy)


def _answer_ahead(error: BusyAnswer, request: HttpRequest, view: Any) -> HttpResponse:
    """Answer as a view does that was decorated above its ``dispatch()``'s own steps, and has not begun."""
    match = request.resolver_match
    args, kwargs = (match.args, match.kwargs) if match else ((), {})
    running = view.cls(**getattr(view, "initkwargs", {}))
    if actions := getattr(view, "actions", None):
        running.action_map = actions
    running.setup(request, *args, **kwargs)
    wrapped = running.request = running.initialize_request(request, *args, **kwargs)
    running.headers = running.default_response_headers
    with contextlib.suppress(exceptions.APIException):  # the page names the user; a login that fails leaves none
        wrapped.user  # noqa: B018
    running.format_kwarg = running.get_format_suffix(**kwargs)
    response: HttpResponse = running.finalize_response(wrapped, running.handle_exception(error), *args, **kwargs)
    return response
