"""Pages that refresh themselves: a script asks for the changing part of a page alone, by a header.

The page has ``<div id="sqlsem-live" data-sqlsem-refresh="3" data-sqlsem-url="...">`` around that part and includes
``admin/sqlsem/_live_bar.html`` before it. Whatever is in the part keeps its focus, checked boxes and open details;
where several things look alike (rows), each has a ``data-sqlsem-key``, and what the script must leave alone has
``data-sqlsem-keep``.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from django.db import Error as DatabaseError
from django.http import HttpResponse
from django.template.response import TemplateResponse
from django.utils.cache import add_never_cache_headers, patch_vary_headers
from django.utils.translation import gettext as _

from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.http import HttpRequest


logger = logging.getLogger("django_sqlsem")

ViewT = TypeVar("ViewT", bound="Callable[..., HttpResponse]")

#: Seconds between two looks of an open page.
REFRESH_SECONDS: Final = 3
#: Asks for the changing part alone; the answer has it too, so that a login page in between is not taken for one.
HEADER: Final = "X-Sqlsem-Fragment"
#: Asks for it without what costs most.
LIGHT: Final = "X-Sqlsem-Light"


def is_fragment(request: HttpRequest) -> bool:
    """Return whether the script asks for the changing part of a page."""
    return request.method == "GET" and HEADER in request.headers


def is_light(request: HttpRequest) -> bool:
    """Return whether the script can do without what costs most: it has that from a moment ago, and keeps it.

    What is left out has ``data-sqlsem-keep`` and nothing else.
    """
    return is_fragment(request) and LIGHT in request.headers


def fragment(request: HttpRequest, template: str, context: dict[str, Any]) -> TemplateResponse:
    """Return the changing part of a page, for the script alone."""
    return cast("TemplateResponse", _marked(TemplateResponse(request, template, context)))


def plain(text: str, status: int) -> HttpResponse:
    """Return a short answer to the script, which shows it and keeps the old view."""
    return _marked(HttpResponse(text, status=status, content_type="text/plain; charset=utf-8"))


def guarded(view: ViewT) -> ViewT:
    """Make a view of a ``ModelAdmin`` answer with a message if the locks database fails.

    A page answers with a page that goes on asking, the script's request with 503 and a line of text.
    """

    @functools.wraps(view)
    def answer(model_admin: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            response = view(model_admin, request, *args, **kwargs)
            if is_fragment(request) and isinstance(response, TemplateResponse):
                response.render()  # what is read only then may fail as well
        except (BackendError, DatabaseError) as error:
            logger.warning("the locks could not be shown: %s", error)
            text = _("The locks could not be read: %(error)s") % {"error": first_line(error)}
            if is_fragment(request):
                return plain(text, 503)
            return _failed(model_admin, request, text)
        patch_vary_headers(response, [HEADER])
        return response

    return cast("ViewT", answer)


def _failed(model_admin: Any, request: HttpRequest, text: str) -> HttpResponse:
    context = {
        **model_admin.admin_site.each_context(request),
        "title": _("The locks cannot be shown"),
        "opts": model_admin.opts,
        "problem": text,
        "media": model_admin.media,
        "refresh_seconds": REFRESH_SECONDS,
    }
    request.current_app = model_admin.admin_site.name
    response = TemplateResponse(request, "admin/sqlsem/failed.html", context, status=503)
    add_never_cache_headers(response)
    return response


def _marked(response: HttpResponse) -> HttpResponse:
    response[HEADER] = "1"
    add_never_cache_headers(response)
    patch_vary_headers(response, [HEADER])
    return response


def first_line(error: Exception) -> str:
    """Return what an error says, short enough for a message."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
