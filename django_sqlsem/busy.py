"""What happens to a decorated call when no slot became free in time, and the answer of a busy view."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

from django.apps import apps
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template import Context, Engine, TemplateDoesNotExist
from django.template.loader import get_template
from django.templatetags.static import static
from django.utils.cache import patch_vary_headers
from django.utils.translation import get_language_info, gettext, gettext_lazy, ngettext, pgettext

from django_sqlsem.core.text import shown
from django_sqlsem.exceptions import AcquireTimeoutError
from django_sqlsem.snapshots import HolderSnapshot

PAGE: Final = "sqlsem/busy.html"
#: What the page says, without a page around it.
MESSAGE: Final = "sqlsem/busy_message.html"
#: Methods by which nothing is changed.
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
#: By ``Busy.reason``.
TITLES: Final = {
    "full": gettext_lazy("Busy right now"),
    "queue full": gettext_lazy("Busy right now"),
    "paused": gettext_lazy("Paused"),
}
EXPLANATIONS: Final = {
    "full": gettext_lazy("This is busy right now."),
    "queue full": gettext_lazy("This is busy right now, and others are waiting already."),
    "paused": gettext_lazy("This is paused for the moment."),
}


def render(busy: Busy, request: HttpRequest, template: str) -> str:
    """Render a template of the project's, in whatever language its engine speaks, or else the library's own."""
    # The language that the texts are in, which is English where there is no catalogue for the visitor's.
    language = pgettext("the code of the language that you translate to", "en")
    context = {
        "busy": busy,
        "retry_after": busy.retry_after,
        "can_reload": request.method in ("GET", "HEAD"),
        "title": str(TITLES.get(busy.reason, TITLES["full"])),
        "explanation": _explanation(busy, request),
        "advice": _advice(busy),
        "again": gettext("Try again"),
        "language": language,
        "direction": "rtl" if get_language_info(language)["bidi"] else "ltr",
        "stylesheet": _stylesheet(),
    }
    try:
        found: Any = get_template(template)
    except TemplateDoesNotExist:  # the templates don't come from the apps, or are Jinja's
        return _engine().get_template(template).render(Context(context))
    return str(found.render(context, request))


@functools.cache
def _engine() -> Engine:
    return Engine(dirs=[str(Path(__file__).parent / "templates")])


def _stylesheet() -> str:
    """Return the address of the page's style, or nothing: the page must not fail for want of it."""
    if not apps.is_installed("django.contrib.staticfiles"):
        return ""
    try:
        return str(static("sqlsem/busy.css"))
    except Exception:  # noqa: BLE001 - of a storage of the project's: it was not collected
        return ""


POLICIES: Final = ("raise", "skip", "retry")


@dataclass(frozen=True, slots=True)
class Busy:
    """What a call that got no slot is told: who holds, how many wait, and after how many seconds to try again."""

    name: str
    holders: tuple[HolderSnapshot, ...]
    waiting: int
    retry_after: int
    #: The request of a view; ``None`` for other calls.
    request: HttpRequest | None = field(default=None, compare=False, repr=False)
    #: ``full``: all slots are taken; ``paused``: by an operator; ``queue full``: too many wait already.
    reason: str = "full"

    @classmethod
    def from_error(cls, error: AcquireTimeoutError, request: HttpRequest | None = None) -> Busy:
        """Take over what the error knows. ``retry_after`` becomes a whole number of seconds, at least 1."""
        seconds = error.retry_after if math.isfinite(error.retry_after) else 1.0
        return cls(error.name, error.holders, error.waiting, max(1, math.ceil(seconds)), request, error.reason)


OnBusy: TypeAlias = 'int | Literal["raise", "skip", "retry"] | Callable[[Busy], Any] | None'


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
    if (isinstance(value, int) and not 400 <= value <= 599) or (isinstance(value, str) and value not in POLICIES):
        raise ValueError(f"on_busy must be {allowed}, not {shown(value)}.")
    return cast("OnBusy", value)


def busy_response(busy: Busy, request: HttpRequest, status: int) -> HttpResponse:
    """Return the answer of a busy view: JSON or a page, as the request's ``Accept`` prefers, never to be cached.

    HTMX gets the page's text alone, for the place that it fills.
    """
    response: HttpResponse
    if request.headers.get("HX-Request") == "true" and request.headers.get("HX-Boosted") != "true":
        response = HttpResponse(render(busy, request, MESSAGE), status=status)
    elif _prefers_page(request):
        response = HttpResponse(render(busy, request, PAGE), status=status)
    else:
        body = {
            "error": "busy",
            "reason": busy.reason,
            "detail": detail(busy, request),
            "retry_after": busy.retry_after,
        }
        response = JsonResponse(body, status=status)
    patch_vary_headers(response, ["Accept", "HX-Request"])
    return finish(response, busy)


def finish(response: HttpResponse, busy: Busy) -> HttpResponse:
    """Set what every busy answer says to clients and caches."""
    response.headers["Retry-After"] = str(busy.retry_after)
    response.headers["Cache-Control"] = "no-store"
    return response


def detail(busy: Busy, request: HttpRequest | None) -> str:
    """Return the answer in two or three sentences, in the visitor's language."""
    return f"{_explanation(busy, request)} {_advice(busy)}"


def _explanation(busy: Busy, request: HttpRequest | None) -> str:
    why = str(EXPLANATIONS.get(busy.reason, EXPLANATIONS["full"]))
    if request is not None and request.method in SAFE_METHODS:  # there was nothing to save
        return why
    return f"{why} {gettext('Nothing was saved.')}"


def _advice(busy: Busy) -> str:
    seconds = busy.retry_after
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 120:
        told = ngettext("Please try again in %(seconds)d second.", "Please try again in %(seconds)d seconds.", seconds)
    elif seconds < 7200:
        told = ngettext(
            "Please try again in about %(minutes)d minute.", "Please try again in about %(minutes)d minutes.", minutes
        )
    else:
        told = ngettext(
            "Please try again in about %(hours)d hour.", "Please try again in about %(hours)d hours.", hours
        )
    return told % {"seconds": seconds, "minutes": minutes, "hours": hours}


def of_ninja(view: Any) -> bool:
    """Is it a view of django-ninja's, which makes responses of what its operations return?"""
    return str(getattr(inspect.unwrap(view), "__module__", "")).startswith("ninja.")


def _prefers_page(request: HttpRequest) -> bool:
    match = request.resolver_match
    if match is not None and of_ninja(match.func):  # whose clients get JSON whatever they accept
        return False
    return request.get_preferred_type(["application/json", "text/html"]) == "text/html"
