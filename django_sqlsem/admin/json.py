"""The overview and one lock as JSON, for scripts: the same numbers under the same permissions as the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db import Error as DatabaseError
from django.http import HttpResponse
from django.urls import path
from django.utils.cache import add_never_cache_headers
from django.utils.translation import gettext as _

from django_sqlsem import queries
from django_sqlsem.admin.overview import Trouble
from django_sqlsem.core.names import key_of
from django_sqlsem.exceptions import BackendError
from django_sqlsem.serialize import as_json, as_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from django.http import HttpRequest
    from django.urls import URLPattern

    from django_sqlsem.snapshots import SemaphoreSnapshot


def urls(model_admin: Any) -> list[URLPattern]:
    """Return the addresses: of a page of the list, with the list's own parameters, and of one lock."""
    name = f"{model_admin.opts.app_label}_{model_admin.opts.model_name}_snapshot"
    return [
        path("snapshot.json", _view(model_admin, _page), name=f"{name}s"),
        path("<path:object_id>/snapshot.json", _view(model_admin, _one), name=name),
    ]


def _view(model_admin: Any, read: Callable[..., dict[str, Any] | None]) -> Callable[..., HttpResponse]:
    site = model_admin.admin_site

    def answer(request: HttpRequest, **kwargs: Any) -> HttpResponse:
        if request.method not in ("GET", "HEAD"):
            response = _answer({"error": _("Only GET is allowed.")}, 405)
            response["Allow"] = "GET, HEAD"
            return response
        try:
            if not model_admin.has_view_permission(request):
                raise PermissionDenied
            found = read(model_admin, request, **kwargs)
        except PermissionDenied:
            return _answer({"error": _("You may not see this.")}, 403)
        except IncorrectLookupParameters:
            return _answer({"error": _("There is no such page, filter or order.")}, 400)
        except (BackendError, DatabaseError) as error:
            return _answer({"error": _("The locks could not be read: %(error)s") % {"error": error}}, 503)
        return _answer({"error": _("There is no such lock.")}, 404) if found is None else _answer(found, 200)

    def view(request: HttpRequest, **kwargs: Any) -> HttpResponse:
        # Who asks for JSON can do nothing with a login page.
        wanted = request.get_preferred_type(["text/html", "application/json"])
        if wanted == "application/json" and not site.has_permission(request):
            return _answer({"error": _("Log in first.")}, 403)
        response: HttpResponse = site.admin_view(answer)(request, **kwargs)
        return response

    return view


def _page(model_admin: Any, request: HttpRequest) -> dict[str, Any]:
    found = model_admin.get_changelist_instance(request)
    survey, trouble = found.trouble.survey, found.trouble
    snapshots = [row.sqlsem for row in found.result_list if row.sqlsem is not None]
    recent = {row.name: row.sqlsem_lately for row in found.result_list}
    return {
        "database": queries.locks_database(),
        "page": {
            "number": found.page_num,
            "pages": found.paginator.num_pages,
            "per_page": found.list_per_page,
            "names": found.result_count,
        },
        "totals": {key: getattr(survey, key) for key in ("held", "stale", "waiting", "paused", "draining")},
        "deadlocks": [str(deadlock) for deadlock in trouble.deadlocks],
        "notes": queries.notes(),
        "semaphores": _plain(snapshots, recent, trouble),
    }


def _one(model_admin: Any, request: HttpRequest, object_id: str) -> dict[str, Any] | None:
    row = model_admin.get_object(request, unquote(object_id))
    snapshot = queries.semaphore(row.name, using=queries.locks_database()) if row is not None else None
    if snapshot is None:
        return None
    return _plain([snapshot], queries.lately([snapshot]), Trouble.of(request))[0]


def _plain(snapshots: Collection[SemaphoreSnapshot], recent: dict[str, Any], trouble: Trouble) -> list[dict[str, Any]]:
    return [
        as_plain(each, recent.get(each.name), deadlocked=key_of(each.name) in trouble.deadlocked) for each in snapshots
    ]


def _answer(data: dict[str, Any], status: int) -> HttpResponse:
    response = HttpResponse(as_json(data), status=status, content_type="application/json")
    add_never_cache_headers(response)
    return response
