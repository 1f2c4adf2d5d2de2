"""The page of one lock: who holds it, who waits, the last hour, and the buttons for what may be done about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_sqlsem import queries
from django_sqlsem.admin import live, tables
from django_sqlsem.admin.actions import Buttons
from django_sqlsem.admin.display import drawn, kind_of, length, users, visible
from django_sqlsem.admin.last_hour import recent
from django_sqlsem.conf import config
from django_sqlsem.core.modes import MUTEX
from django_sqlsem.history import events

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

    from django_sqlsem.history.events import Event
    from django_sqlsem.queries import Reading
    from django_sqlsem.snapshots import SemaphoreSnapshot


#: So many sentences about who waits for whom.
_MAX_WAITS: Final = 50
#: What operators do that lasts. Of these acts so many are looked through for the latest of each kind.
_LASTING: Final = (events.PAUSED, events.DRAINED, events.RESIZED)
_MAX_LASTING: Final = 50


@dataclass(frozen=True, slots=True)
class Said:
    """A sentence, or a figure with its word and a note; ``loud`` if somebody should see it."""

    key: str
    text: Any
    word: str = ""
    note: str = ""
    loud: bool = False


def lock_page(model_admin: Any, request: HttpRequest, object_id: str) -> HttpResponse:
    """Return the page of one lock, or what changes of it. Raises ``BackendError``."""
    if request.method not in ("GET", "HEAD"):
        raise PermissionDenied
    row = model_admin.get_object(request, unquote(object_id))
    if not model_admin.has_view_permission(request, row):
        raise PermissionDenied
    if row is None or row.known is None:
        if live.is_fragment(request):
            return live.plain(_("There is no such lock any more."), 404)
        return cast(
            "HttpResponse", model_admin._get_obj_does_not_exist_redirect(request, model_admin.opts, unquote(object_id))
        )
    snapshot, reading = row.known, live.reading_of(request)
    buttons = Buttons(model_admin, request, snapshot)
    acts = _last_acts(snapshot)
    context = {
        "acts": buttons,
        "waits": _waits(reading, snapshot.name),  # before the deadlocks, which come with them
        "notices": _notices(reading, snapshot, acts),
        "facts": _facts(snapshot, acts),
        "cells": drawn(snapshot),
        "holders": tables.holders(snapshot, buttons.beside),
        "waiters": tables.waiters(snapshot),
        "recent": None if live.is_light(request) else recent(reading, snapshot),
    }
    if live.is_fragment(request):
        return live.fragment(request, "admin/sqlsem/_one.html", context)
    context |= {
        "title": visible(snapshot.name),
        "subtitle": None,
        "shown_name": users(snapshot.name),
        "kind": kind_of(snapshot.kind),
        "original": row,
        "preserved_filters": model_admin.get_preserved_filters(request),
    }
    return cast("HttpResponse", live.page(model_admin, request, "admin/sqlsem/one.html", context))


def _last_acts(snapshot: SemaphoreSnapshot) -> list[Event]:
    """Return what operators have set, the newest first, if anything is."""
    if not snapshot.paused and snapshot.operator_slots is None:
        return []
    return queries.events(snapshot.name, what=_LASTING, limit=_MAX_LASTING)


def _last(acts: list[Event], *what: str) -> Event | None:
    return next((act for act in acts if act.what in what), None)


def _notices(reading: Reading, snapshot: SemaphoreSnapshot, acts: list[Event]) -> list[Said]:
    bad = [str(each) for each in reading.deadlocks if snapshot.name in each.names]
    notices = [
        Said(f"deadlock {number}", format_html(_("<strong>Deadlock:</strong> {}"), visible(text)), loud=True)
        for number, text in enumerate(bad)
    ]
    if snapshot.stale:
        text = ngettext(
            "%(count)d slot is stale: its holder seems gone. It comes back by itself.",
            "%(count)d slots are stale: their holders seem gone. They come back by themselves.",
            snapshot.stale,
        )
        notices.append(Said("stale", text % {"count": snapshot.stale}))
    if snapshot.paused:
        text = _paused(snapshot, _last(acts, events.PAUSED, events.DRAINED)) + _until(snapshot)
        notices.append(Said("paused", text))
    if snapshot.other_kind:
        text = _(
            "It is in use as a mutex and as a semaphore: one is let in at a time while anybody uses it as a mutex."
        )
        notices.append(Said("kinds", text))
    elif snapshot.other_declared_slots is not None and snapshot.kind != MUTEX:
        text = _("Processes disagree: some declare %(one)d slots, others %(other)d. The larger number is the bound.")
        numbers = {"one": snapshot.declared_slots, "other": snapshot.other_declared_slots}
        notices.append(Said("declared", text % numbers))
    if not config(reading.using).history:
        notices.append(Said("history", _("The history is turned off: only operators' acts and what is now are shown.")))
    return [*notices, *(Said(f"note {number}", note) for number, note in enumerate(queries.notes()))]


def _paused(snapshot: SemaphoreSnapshot, last: Event | None) -> str:
    who = snapshot.paused_by or (last.by if last is not None else "")
    by = _(" by %(user)s") % {"user": visible(who)} if who else ""
    held = len([holder for holder in snapshot.holders if not holder.expired])
    if last is not None and last.what == events.DRAINED:
        if not held:
            return _("Drained%(by)s: nobody holds it, and nothing is granted until it is resumed.") % {"by": by}
        text = ngettext(
            "Draining%(by)s: %(count)d holder has not left yet. Nothing is granted until it is resumed.",
            "Draining%(by)s: %(count)d holders have not left yet. Nothing is granted until it is resumed.",
            held,
        )
        return text % {"by": by, "count": held}
    return _("Paused%(by)s: nothing is granted until it is resumed. Holders keep what they have.") % {"by": by}


def _until(snapshot: SemaphoreSnapshot) -> str:
    """Return what else is known of a pause: why, and until when."""
    told = ""
    if snapshot.paused_until is not None and snapshot.resumes_in is not None:
        when = {"at": f"{snapshot.paused_until:%Y-%m-%d %H:%M} UTC", "left": length(snapshot.resumes_in)}
        told += " " + _("It is resumed by itself at %(at)s, in %(left)s.") % when
    if snapshot.paused_reason:
        told += " " + _("Reason: %(reason)s") % {"reason": visible(snapshot.paused_reason)}
    return told


def _facts(snapshot: SemaphoreSnapshot, acts: list[Event]) -> list[Said]:
    note = ""
    if snapshot.away:
        note = ngettext("%(count)d task will come back", "%(count)d tasks will come back", snapshot.away)
        note %= {"count": snapshot.away}
    waiting = Said("waiting", snapshot.waiting, _("waiting"), note, loud=bool(snapshot.waiting))
    if snapshot.units is not None:
        return [Said("units", snapshot.units, _("units")), waiting]
    found = [
        Said("slots", snapshot.slots, _("slots"), _who_set(snapshot, _last(acts, events.RESIZED))),
        Said("held", snapshot.held, _("held")),
        Said("free", snapshot.free, _("free")),
        Said("stale", snapshot.stale, _("stale"), loud=bool(snapshot.stale)),
        waiting,
    ]
    if snapshot.usual_hold is not None:
        found.append(Said("usual", length(snapshot.usual_hold), _("usual hold")))
    return found


def _who_set(snapshot: SemaphoreSnapshot, last: Event | None) -> str:
    if snapshot.operator_slots is None:
        return _("as the code declares")
    who = visible(last.by) if last is not None and last.by else _("an operator")
    return _("set by %(who)s; the code declares %(slots)d") % {"who": who, "slots": snapshot.declared_slots}


def _waits(reading: Reading, name: str) -> list[Said]:
    """Return who waits for this lock while holding others, and who holds it while waiting for others."""
    found = [each for each in reading.waits if each.name == name or any(held.name == name for held in each.holds)]
    return [Said(f"wait {each.wait_id}", users(str(each))) for each in found[:_MAX_WAITS]]
