"""What the admin's addresses answer: pages that refresh themselves, errors of the database, and JSON.

A script asks for the changing part of a page alone, by a header. The page has ``<div id="sqlsem-live"
data-sqlsem-refresh="3" data-sqlsem-url="..." data-sqlsem-etag="...">`` around that part, which is ``part()``, and
includes ``admin/sqlsem/_live_bar.html`` before it. Whatever is in the part keeps its focus, checked boxes and open
details; where several things look alike (rows), each has a ``data-sqlsem-key``, and what the script must leave alone
has ``data-sqlsem-keep``.

An answer is small: it is compressed, and nothing if the script has it already (304). Ages are no change: they are told
as ``data-sqlsem-ticks``, in seconds, and the script counts on.

An answer is also cheap: who looks at the same view within a few seconds gets what another one has just been shown.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

from django.conf import settings
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import quote, unquote
from django.contrib.auth.signals import user_logged_out
from django.core.exceptions import PermissionDenied
from django.db import Error as DatabaseError
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.cache import add_never_cache_headers, patch_vary_headers
from django.utils.safestring import SafeString
from django.utils.text import compress_string
from django.utils.timezone import get_current_timezone_name
from django.utils.translation import get_language
from django.utils.translation import gettext as _

from django_sqlsem import queries
from django_sqlsem.exceptions import BackendError
from django_sqlsem.queries import Reading
from django_sqlsem.serialize import as_json, as_plain
from django_sqlsem.snapshots import TemplateSnapshot

logger = logging.getLogger("django_sqlsem")

#: Seconds between two looks of an open page.
REFRESH_SECONDS: Final = 3
#: Asks for the changing part alone; the answer has it too, so that a login page in between is not taken for one.
HEADER: Final = "X-Sqlsem-Fragment"
#: Asks for it without what costs most.
LIGHT: Final = "X-Sqlsem-Light"


def reading_of(request: HttpRequest) -> Reading:
    """Return what this request reads by: whatever draws on it sees one instant, and asks for nothing twice."""
    asked = cast("Any", request)
    if not hasattr(asked, "sqlsem_reading"):
        if is_fragment(request):
            asked.sqlsem_read_at, asked.sqlsem_reading = _readings.shared(_place(request))
        else:
            asked.sqlsem_reading = queries.Reading()
    return cast("Reading", asked.sqlsem_reading)


def _place(request: HttpRequest) -> tuple[str, ...]:
    """Return what tells where a request is answered: behind one alias, hosts may have tables of their own."""
    return request.get_host(), str(getattr(request, "urlconf", "")), queries.locks_database()


class Kept:
    """A limited number of things, each kept for a while by the monotonic clock; a new one removes the oldest."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._things: dict[Any, tuple[float, Any]] = {}

    def get(self, key: Any) -> Any:
        """Return a thing; ``None`` if it is not there, or its time is over."""
        until, found = self._things.get(key, (0.0, None))
        return found if until > time.monotonic() else None

    def keep(self, things: Mapping[Any, Any], until: float) -> None:
        """Keep things by their keys until an instant."""
        now = time.monotonic()
        with self._lock:
            kept = dict(item for item in self._things.items() if item[1][0] > now and item[0] not in things)
            kept |= {key: (until, each) for key, each in things.items()}
            self._things = dict(list(kept.items())[-self.most :])

    def standing(self) -> list[Any]:
        """Return the keys of all whose time is not over."""
        now = time.monotonic()
        return [key for key, (until, _found) in self._things.items() if until > now]

    def clear(self, of: Callable[[Any], bool] = lambda key: True) -> None:
        """Forget those whose keys are so; or all."""
        with self._lock:
            self._things = dict(item for item in self._things.items() if not of(item[0]))


class _Readings:
    """What is read for views that refresh themselves: within one refresh, those of one place draw on one reading.

    The names that their pages are about are read together, as these are known from the refresh before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By place: when it was begun, by the monotonic clock.
        self.found = Kept(_MOST_VIEWS)
        #: By place and name: that it is expected to be asked for again.
        self._names = Kept(_MOST_EXPECTED)

    def shared(self, place: tuple[str, ...]) -> tuple[float, Reading]:
        """Return a reading, and when it was begun: less than a refresh ago."""
        now = time.monotonic()
        with self._lock:
            at, found = self.found.get(place) or (0.0, None)
            if found is None or now - at >= REFRESH_SECONDS:
                waits = found is not None and found.waits_read
                if found is not None:
                    self._names.keep({(place, name): True for name in tuple(found.asked)}, at + 3 * REFRESH_SECONDS)
                expected = [*(name for where, name in self._names.standing() if where == place)]
                at, found = now, queries.Reading(place[-1], expected=expected, all_waits=waits)
                self.found.keep({place: (at, found)}, now + 3 * REFRESH_SECONDS)
            return at, found


#: The most views, and sessions, of which something is kept; the most names that are read before they are asked for.
_MOST_VIEWS: Final = 100
_MOST_EXPECTED: Final = 400
_readings: Final = _Readings()


def is_fragment(request: HttpRequest) -> bool:
    """Return whether the script asks for the changing part of a page."""
    return request.method == "GET" and HEADER in request.headers


def is_light(request: HttpRequest) -> bool:
    """Return whether the script can do without what costs most: it has that from a moment ago, and keeps it.

    What is left out has ``data-sqlsem-keep`` and nothing else.
    """
    return is_fragment(request) and LIGHT in request.headers


#: By how many seconds the answer is older than it seems.
AGE: Final = "X-Sqlsem-Age"
#: What changes by itself as time passes.
_AGES: Final = re.compile(r'data-sqlsem-ticks="[^"]*">[^<]*')


@dataclass(frozen=True, slots=True)
class Part:
    """The changing part of a page: its HTML, and what tells it from others."""

    html: SafeString
    etag: str


def part(request: HttpRequest, template: str, context: dict[str, Any]) -> Part:
    """Return the changing part of a page."""
    html = render_to_string(template, context, request)
    etag = hashlib.blake2b(_AGES.sub("", html).encode(), digest_size=16).hexdigest()
    return Part(html, f'"{etag}"')


def fragment(request: HttpRequest, template: str, context: dict[str, Any]) -> HttpResponse:
    """Return the changing part of a page, for the script alone, and keep it for others who look at the same."""
    found = part(request, template, context)
    _views.keep(request, found)
    now = time.monotonic()
    return _answer(request, found, now - getattr(request, "sqlsem_read_at", now))


def _answer(request: HttpRequest, found: Part, age: float) -> HttpResponse:
    if request.headers.get("If-None-Match") == found.etag:
        response = HttpResponse(status=304)
    else:
        response = HttpResponse(found.html)
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            # Random bytes at the end: the length is not to tell what is inside.
            response.content = compress_string(found.html.encode(), max_random_bytes=100)
            response["Content-Encoding"] = "gzip"
            response["Content-Length"] = str(len(response.content))
        patch_vary_headers(response, ["Accept-Encoding"])
    response["ETag"] = found.etag
    response[AGE] = f"{age:.1f}"
    return _for_the_script(response)


def plain(text: str, status: int) -> HttpResponse:
    """Return a short answer to the script, which shows it and keeps the old view."""
    return _for_the_script(HttpResponse(text, status=status, content_type="text/plain; charset=utf-8"))


def _for_the_script(response: HttpResponse) -> HttpResponse:
    response[HEADER] = "1"
    add_never_cache_headers(response)
    return response


#: For this many seconds a session that was shown a view is taken to be allowed to see it, and is not looked up again.
TRUSTED: Final = 15.0


class _Views:
    """What was shown lately in this process, and to which sessions: ten who look at one view cost about as much as one.

    Nothing of it is older than two refreshes. A session that is not known here is looked up as always.
    """

    def __init__(self) -> None:
        #: By what makes a view: when it was asked for, by the monotonic clock, and what it was.
        self.found = Kept(_MOST_VIEWS)
        #: By the same: that somebody has begun to read it anew. Meanwhile others are shown what there is.
        self._renewed = Kept(_MOST_VIEWS)
        #: By session and address: what it may do there, and the row that the address means.
        self.trusted = Kept(_MOST_VIEWS)
        #: By session: until when it is taken to be this user's.
        self._users = Kept(_MOST_VIEWS)

    def known(
        self, request: HttpRequest, allowed: tuple[str, ...] | None = None, row: Any = None
    ) -> HttpResponse | None:
        """Return the answer if it is known: to who is ``allowed`` so much, or to a session that was so just now.

        Else the request need not look up again who a session is that was looked up just now, nor the ``row`` of a lock.
        """
        if not is_fragment(request):
            return None
        asked, who = cast("Any", request), _who(request)
        if allowed is not None:
            asked.sqlsem_asked = (time.monotonic(), allowed)
            self._trust(request, who, allowed, row)
        else:
            if (known := self._users.get(who)) is not None:
                asked.sqlsem_trusted_until, user = known
                request.user = copy.copy(user)
            if (trusted := self.trusted.get((who, request.get_full_path()))) is None:
                return None
            allowed, asked.sqlsem_row = trusted
        view = (_view(request), allowed)
        if (kept := self.found.get(view)) is None:
            return None
        at, found = kept
        age = time.monotonic() - at
        if age >= REFRESH_SECONDS and self._renews(request, view):
            return None
        return _answer(request, found, age)

    def _renews(self, request: HttpRequest, view: tuple[Any, ...]) -> bool:
        """Whether this request reads a view anew: nobody else has begun to."""
        if not getattr(request, "sqlsem_renews", False):
            if self._renewed.get(view):
                return False
            self._renewed.keep({view: True}, time.monotonic() + REFRESH_SECONDS)
            cast("Any", request).sqlsem_renews = True
        return True

    def keep(self, request: HttpRequest, found: Part) -> None:
        """Keep what was found for a request about which ``known()`` was asked."""
        now, allowed = getattr(request, "sqlsem_asked", (None, ()))
        if now is not None:
            at = min(now, getattr(request, "sqlsem_read_at", now))
            self.found.keep({(_view(request), allowed): (at, found)}, at + 2 * REFRESH_SECONDS)

    def outdate(self) -> None:
        """Show nobody what is known: somebody has done something."""
        for each in (_readings.found, self.found, self._renewed):
            each.clear()

    def clear(self, **kwargs: Any) -> None:
        """Forget everything: somebody has logged out, say."""
        self.outdate()
        self.trusted.clear()
        self._users.clear()

    def distrust(self, request: HttpRequest) -> None:
        """Look up a session again."""
        who = _who(request)
        self._users.clear(lambda key: key == who)
        self.trusted.clear(lambda key: key[0] == who)

    def _trust(self, request: HttpRequest, who: tuple[Any, ...], allowed: tuple[str, ...], row: Any) -> None:
        if not who[0]:
            return
        # Not prolonged by itself.
        until = getattr(request, "sqlsem_trusted_until", None)
        if until is None:
            until = time.monotonic() + TRUSTED
            self._users.keep({who: (until, copy.copy(request.user))}, until)
        self.trusted.keep({(who, request.get_full_path()): (allowed, row)}, until)


def _who(request: HttpRequest) -> tuple[Any, ...]:
    """Return what tells whose a request is; nothing comes first without a session."""
    return request.COOKIES.get(settings.SESSION_COOKIE_NAME), *_place(request)


def _view(request: HttpRequest) -> tuple[Any, ...]:
    """Return what makes a view, but for what its reader may do."""
    where = (*_place(request), request.get_full_path(), is_light(request))
    return (*where, get_language(), get_current_timezone_name())


_views: Final = _Views()
known, forget = _views.known, _views.clear
user_logged_out.connect(forget)


def trusted_row(request: HttpRequest) -> Any:
    """Return the row that the address means to a session that is trusted, as it was read then; ``None``: read it."""
    return copy.copy(getattr(request, "sqlsem_row", None))


def address(model_admin: Any, view: str, *keys: str) -> str:
    """Return where a view of a list is, or of one row by its key."""
    name = f"admin:{model_admin.opts.app_label}_{model_admin.opts.model_name}_{view}"
    return reverse(name, args=[quote(key) for key in keys], current_app=model_admin.admin_site.name)


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
        if not is_fragment(request):
            _views.distrust(request)
        try:
            response = known(request) or view(request, *args, **kwargs)
            if request.method == "POST":
                _views.outdate()
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
    names = [row for row in found.result_list if not isinstance(row.known, TemplateSnapshot)]
    lately = queries.lately(row.known for row in names)
    shown = [row.name for row in found.result_list if isinstance(row.known, TemplateSnapshot)]
    templates = {each.template: each for each in reading.templates} if shown else {}
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
        "templates": [asdict(templates[each]) for each in shown],
        "semaphores": [as_plain(row.known, lately[row.name], deadlocked=row.deadlocked) for row in names],
    }


def _one(model_admin: Any, request: HttpRequest, object_id: str) -> dict[str, Any] | None:
    row = model_admin.get_object(request, unquote(object_id))
    if row is None or row.known is None:
        return None
    deadlocked = any(row.name in deadlock.names for deadlock in reading_of(request).deadlocks)
    return as_plain(row.known, queries.lately([row.known])[row.name], deadlocked=deadlocked)
