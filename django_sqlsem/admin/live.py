"""What the admin's addresses answer: pages that refresh themselves, errors of the database, and JSON.

A script asks for the changing part of a page alone, by a header. The page has ``<div id="sqlsem-live"
data-sqlsem-refresh="3" data-sqlsem-url="...">`` around that part and includes ``admin/sqlsem/_live_bar.html`` before
it. Whatever is in the part keeps its focus, checked boxes and open details; where several things look alike (rows),
each has a ``data-sqlsem-key``, and what the script must leave alone has ``data-sqlsem-keep``.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, cast

from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db import Error as DatabaseError
from django.http import HttpResponse
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.cache import add_never_cache_headers, patch_vary_headers
from django.utils.translation import gettext as _

from django_sqlsem import queries
from django_sqlsem.exceptions import BackendError
from django_sqlsem.serialize import as_json, as_plain
from django_sqlsem.snapshots import TemplateSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.http import HttpRequest
    from django.urls import URLPattern

    from django_sqlsem.queries import Reading


logger = logging.getLogger("django_sqlsem")

#: Seconds between two looks of an open page.
REFRESH_SECONDS: Final = 3
#: Asks for the changing part alone; the answer has it too, so that a login page in between is not taken for one.
HEADER: Final = "X-Sqlsem-Fragment"
#: Asks for it without what costs most.
LIGHT: Final = "X-Sqlsem-Light"


def reading_of(request: HttpRequest) -> Reading:
    """Return what this request reads by: whatever draws on it sees one instant, and asks for nothing twice."""
    if not hasattr(request, "sqlsem_reading"):
        request.sqlsem_reading = queries.Reading()  # type: ignore[attr-defined]
    return cast("Reading", cast("Any", request).sqlsem_reading)


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


def _marked(response: HttpResponse) -> HttpResponse:
    response[HEADER] = "1"
    add_never_cache_headers(response)
    return response


def page(model_admin: Any, request: HttpRequest, template: str, context: dict[str, Any], status: int = 200) -> Any:
    """Return a whole page of the admin, with what every page of it needs."""
    site = model_admin.admin_site
    request.current_app = site.name
    common = {"opts": model_admin.opts, "media": model_admin.media, "refresh_seconds": REFRESH_SECONDS}
    return TemplateResponse(request, template, {**site.each_context(request), **common, **context}, status=status)


def guarded(model_admin: Any, view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Make a view answer with a message if the locks database fails.

    A page answers with a page that goes on asking, the script's request with 503 and a line of text.
    """

    @functools.wraps(view)
    def answer(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            response = view(request, *args, **kwargs)
            if is_fragment(request) and isinstance(response, TemplateResponse):
                response.render()  # what is read only then may fail as well
        except (BackendError, DatabaseError) as error:
            if not model_admin.admin_site.has_permission(request):
                raise  # what a database says is no stranger's business
            logger.warning("the locks could not be shown: %s", error)
            text = _("The locks could not be read: %(error)s") % {"error": first_line(error)}
            if is_fragment(request):
                response = plain(text, 503)
            else:
                context = {"title": _("The locks cannot be shown"), "problem": text}
                response = page(model_admin, request, "admin/sqlsem/failed.html", context, status=503)
                add_never_cache_headers(response)
        patch_vary_headers(response, [HEADER])
        return response

    return answer


def first_line(error: Exception) -> str:
    """Return what an error says, short enough for a message."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


# The overview and one lock as JSON, for scripts: the same numbers under the same permissions as the pages.


def json_urls(model_admin: Any) -> list[URLPattern]:
    """Return the addresses: of a page of the list, with the list's own parameters, and of one lock."""
    name = f"{model_admin.opts.app_label}_{model_admin.opts.model_name}_snapshot"
    return [
        path("snapshot.json", _json_view(model_admin, _page), name=f"{name}s"),
        path("<path:object_id>/snapshot.json", _json_view(model_admin, _one), name=name),
    ]


def _json_view(model_admin: Any, read: Callable[..., dict[str, Any] | None]) -> Callable[..., HttpResponse]:
    site = model_admin.admin_site

    def answer(request: HttpRequest, **kwargs: Any) -> HttpResponse:
        if request.method not in ("GET", "HEAD"):
            response = _json({"error": _("Only GET is allowed.")}, 405)
            response["Allow"] = "GET, HEAD"
            return response
        try:
            if not model_admin.has_view_permission(request):
                raise PermissionDenied
            found = read(model_admin, request, **kwargs)
        except PermissionDenied:
            return _json({"error": _("You may not see this.")}, 403)
        except IncorrectLookupParameters:
            return _json({"error": _("There is no such page, filter or order.")}, 400)
        except (BackendError, DatabaseError) as error:
            return _json({"error": _("The locks could not be read: %(error)s") % {"error": error}}, 503)
        return _json({"error": _("There is no such lock.")}, 404) if found is None else _json(found, 200)

    def view(request: HttpRequest, **kwargs: Any) -> HttpResponse:
        # Who asks for JSON can do nothing with a login page.
        wanted = request.get_preferred_type(["text/html", "application/json"])
        if wanted == "application/json" and not site.has_permission(request):
            return _json({"error": _("Log in first.")}, 403)
        return cast("HttpResponse", site.admin_view(answer)(request, **kwargs))

    return view


def _json(data: dict[str, Any], status: int) -> HttpResponse:
    response = HttpResponse(as_json(data), status=status, content_type="application/json")
    add_never_cache_headers(response)
    return response


def _page(model_admin: Any, request: HttpRequest) -> dict[str, Any]:
    found, reading = model_admin.get_changelist_instance(request), reading_of(request)
    return {
        "database": reading.using,
        "page": {
            "number": found.page_num,
            "pages": found.paginator.num_pages,
            "per_page": found.list_per_page,
            "names": found.result_count - len(found.groups),
            "templates": len(found.groups),
        },
        "totals": {key: getattr(reading.survey, key) for key in ("held", "stale", "waiting", "paused", "draining")},
        "deadlocks": [str(deadlock) for deadlock in reading.deadlocks],
        "notes": queries.notes(),
        "templates": [asdict(row.known) for row in found.result_list if isinstance(row.known, TemplateSnapshot)],
        "semaphores": [
            as_plain(row.known, row.lately, deadlocked=row.deadlocked)
            for row in found.result_list
            if not isinstance(row.known, TemplateSnapshot)
        ],
    }


def _one(model_admin: Any, request: HttpRequest, object_id: str) -> dict[str, Any] | None:
    row = model_admin.get_object(request, unquote(object_id))
    if row is None or row.known is None:
        return None
    deadlocked = any(row.name in deadlock.names for deadlock in reading_of(request).deadlocks)
    return as_plain(row.known, queries.lately([row.known])[row.name], deadlocked=deadlocked)
