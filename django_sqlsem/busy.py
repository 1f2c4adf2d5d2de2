"""What happens to a decorated call when no slot became free in time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from django.http import HttpResponse, JsonResponse
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.utils.cache import patch_vary_headers
from django.utils.translation import ngettext

from django_sqlsem.wording import shown

if TYPE_CHECKING:
    from django.http import HttpRequest
    from django.http.response import HttpResponseBase

    from django_sqlsem.exceptions import AcquireTimeoutError
    from django_sqlsem.snapshots import HolderSnapshot

logger = logging.getLogger("django_sqlsem")

POLICIES: Final = ("raise", "skip", "retry")


@dataclass(frozen=True, slots=True)
class Busy:
    """What a call that got no slot is told: who holds, how many wait, and after how many seconds to try again."""

    name: str
    holders: tuple[HolderSnapshot, ...]
    waiting: int
    retry_after: int

    @classmethod
    def from_error(cls, error: AcquireTimeoutError) -> Busy:
        """Take over what the error knows. ``retry_after`` becomes a whole number of seconds, at least 1."""
        seconds = error.retry_after if math.isfinite(error.retry_after) else 1.0
        return cls(error.name, error.holders, error.waiting, max(1, math.ceil(seconds)))


OnBusy: TypeAlias = "int | str | Callable[[Busy], Any] | None"


def validate_on_busy(value: object) -> OnBusy:
    """Return ``value`` if it says what to do when busy.

    Allowed are an HTTP error status from 400 to 599, ``"raise"``, ``"skip"``, ``"retry"``, a callable that takes a
    ``Busy``, and ``None`` for what suits the call. Raises ``ValueError`` or ``TypeError`` for anything else.
    """
    allowed = (
        "an HTTP error status from 400 to 599, 'raise', 'skip', 'retry', a callable that takes a Busy, "
        "or None for what suits the call"
    )
    if isinstance(value, bool) or not (value is None or isinstance(value, (int, str)) or callable(value)):
        raise TypeError(f"on_busy must be {allowed}, not {shown(value)} of type {type(value).__name__}.")
    if isinstance(value, int) and not 400 <= value <= 599:
        raise ValueError(f"on_busy must be {allowed}, not {shown(value)}.")
    if isinstance(value, str) and value not in POLICIES:
        raise ValueError(f"on_busy must be {allowed}, not {shown(value)}.")
    return value


def busy_response(busy: Busy, request: HttpRequest, status: int) -> HttpResponse:
    """Return the answer of a busy view: JSON or a page, as the request's ``Accept`` prefers, never to be cached."""
    if request.get_preferred_type(["application/json", "text/html"]) == "text/html":
        response = HttpResponse(_page(busy, request), status=status)
    else:
        body = {"error": "busy", "detail": _detail(busy), "retry_after": busy.retry_after}
        response = JsonResponse(body, status=status)
    response.headers["Retry-After"] = str(busy.retry_after)
    response.headers["Cache-Control"] = "no-store"
    patch_vary_headers(response, ["Accept"])
    return response


def log_busy(busy: Busy, work: str, outcome: str, **extra: object) -> None:
    """Log as one WARNING that a piece of work found no free slot, and what came of it."""
    logger.warning(
        "Busy: %s %s, because no slot of %r was free; %d held, %d waiting.",
        work.encode("unicode_escape").decode("ascii"),  # as Django does: a path may hold line breaks
        outcome,
        busy.name,
        len(busy.holders),
        busy.waiting,
        extra={
            "semaphore": busy.name,
            "what": "busy",
            "holders": len(busy.holders),
            "waiting": busy.waiting,
            "retry_after": busy.retry_after,
            **extra,
        },
    )


def log_busy_response(busy: Busy, request: HttpRequest, response: HttpResponseBase) -> None:
    """Log a busy view's answer, instead of the ERROR with which Django would mail the admins."""
    status = response.status_code
    outcome = f"was answered {status}"
    log_busy(busy, f"{request.method} {request.path}", outcome, status_code=status, request=request)
    response._has_been_logged = True  # type: ignore[attr-defined]  # what Django's log_response() looks at


def _page(busy: Busy, request: HttpRequest) -> str:
    context = {"busy": busy, "retry_after": busy.retry_after, "can_reload": request.method in ("GET", "HEAD")}
    try:
        return render_to_string("sqlsem/busy.html", context, request)
    except TemplateDoesNotExist:  # a project whose templates don't come from its apps
        return f"<!doctype html><title>Busy</title><p>{_detail(busy)}</p>"


def _detail(busy: Busy) -> str:
    return ngettext(
        "This is busy just now. Please try again in %(seconds)d second.",
        "This is busy just now. Please try again in %(seconds)d seconds.",
        busy.retry_after,
    ) % {"seconds": busy.retry_after}
