"""The page of one lock: who holds it, who waits, what happened in the last hour, and what may be done about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_sqlsem import queries
from django_sqlsem.admin_display import snapshot_of
from django_sqlsem.conf import config
from django_sqlsem.dashboard import live, svg, tables
from django_sqlsem.dashboard.acts import Acts
from django_sqlsem.dashboard.cells import drawn
from django_sqlsem.dashboard.overview import kind_of
from django_sqlsem.dashboard.recent import recent
from django_sqlsem.dashboard.scales import length
from django_sqlsem.history import events as kinds

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

    from django_sqlsem.history.events import Event
    from django_sqlsem.snapshots import SemaphoreSnapshot

#: So many sentences about who waits for whom.
_MAX_WAITS: Final = 50


@dataclass(frozen=True, slots=True)
class Notice:
    """A sentence above everything else."""

    key: str
    text: Any
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure with its word; ``loud`` if somebody should see it."""

    key: str
    word: str
    value: Any
    note: str = ""
    loud: bool = False


@dataclass(frozen=True, slots=True)
class Sentence:
    """One line about who waits for whom."""

    key: str
    text: Any


def lock_page(
    model_admin: Any, request: HttpRequest, object_id: str, usual: Callable[[], HttpResponse]
) -> HttpResponse:
    """Return the page of one lock, or what changes of it; ``usual()`` is Django's own answer, for everything else."""
    if request.method not in ("GET", "HEAD"):
        return usual()
    row = model_admin.get_object(request, unquote(object_id))
    if not model_admin.has_view_permission(request, row):
        raise PermissionDenied
    snapshot = None if row is None else snapshot_of(row)
    if snapshot is None:
        return live.plain(_("There is no such lock any more."), 404) if live.is_fragment(request) else usual()
    context = _changing(model_admin, request, snapshot)
    if live.is_fragment(request):
        return live.fragment(request, "admin/sqlsem/_one.html", context)
    context |= {
        **model_admin.admin_site.each_context(request),
        "title": svg.visible(snapshot.name),
        "subtitle": None,
        "shown_name": svg.users(snapshot.name),
        "kind": kind_of(snapshot.kind),
        "opts": model_admin.opts,
        "original": row,
        "preserved_filters": model_admin.get_preserved_filters(request),
        "media": model_admin.media,
        "refresh_seconds": live.REFRESH_SECONDS,
    }
    request.current_app = model_admin.admin_site.name
    return TemplateResponse(request, "admin/sqlsem/one.html", context)


def _changing(model_admin: Any, request: HttpRequest, snapshot: SemaphoreSnapshot) -> dict[str, Any]:
    acts = Acts(model_admin, request, snapshot)
    return {
        "acts": acts,
        "notices": _notices(snapshot),
        "facts": _facts(snapshot),
        "cells": drawn(snapshot),
        "holders": tables.holders(snapshot, acts.beside),
        "waiters": tables.waiters(snapshot),
        "waits": _waits(snapshot.name),
        "recent": None if live.is_light(request) else recent(snapshot),
    }


def _notices(snapshot: SemaphoreSnapshot) -> list[Notice]:
    notices = [
        Notice(f"deadlock {number}", format_html(_("<strong>Deadlock:</strong> {}"), svg.visible(str(each))), bad=True)
        for number, each in enumerate(queries.deadlocks())
        if snapshot.name in each.names
    ]
    if snapshot.stale:
        text = ngettext(
            "%(count)d slot is stale: its holder seems gone. It comes back by itself when its lease has run out.",
            "%(count)d slots are stale: their holders seem gone. They come back by themselves when their leases have"
            " run out.",
            snapshot.stale,
        )
        notices.append(Notice("stale", text % {"count": snapshot.stale}))
    if snapshot.paused:
        notices.append(Notice("paused", _paused(snapshot)))
    if snapshot.other_declared_slots is not None:
        text = _("Processes disagree: some declare %(one)d slots, others %(other)d. The larger number is the bound.")
        numbers = {"one": snapshot.declared_slots, "other": snapshot.other_declared_slots}
        notices.append(Notice("declared", text % numbers))
    if not config(queries.locks_database()).history:
        notices.append(
            Notice("history", _("The history is turned off: only operators' acts and what is now are shown."))
        )
    return [*notices, *(Notice(f"note {number}", note) for number, note in enumerate(queries.notes()))]


def _paused(snapshot: SemaphoreSnapshot) -> str:
    last = _last_act(snapshot.name, kinds.PAUSED, kinds.DRAINED)
    by = _(" by %(user)s") % {"user": svg.visible(last.by)} if last is not None and last.by else ""
    held = len([holder for holder in snapshot.holders if not holder.expired])
    if last is not None and last.what == kinds.DRAINED:
        if not held:
            return _("Drained%(by)s: nobody holds it, and nothing is granted until it is resumed.") % {"by": by}
        text = ngettext(
            "Draining%(by)s: %(count)d holder has not left yet. Nothing is granted until it is resumed.",
            "Draining%(by)s: %(count)d holders have not left yet. Nothing is granted until it is resumed.",
            held,
        )
        return text % {"by": by, "count": held}
    return _("Paused%(by)s: nothing is granted until it is resumed. Holders keep what they have.") % {"by": by}


def _facts(snapshot: SemaphoreSnapshot) -> list[Fact]:
    stale = Fact("stale", _("stale"), snapshot.stale, loud=bool(snapshot.stale))
    note = ""
    if snapshot.away:
        note = ngettext("%(count)d task will come back", "%(count)d tasks will come back", snapshot.away)
        note %= {"count": snapshot.away}
    waiting = Fact("waiting", _("waiting"), snapshot.waiting, note, loud=bool(snapshot.waiting))
    if snapshot.tokens is not None:
        return [Fact("tokens", _("tokens"), snapshot.tokens), waiting]
    slots = Fact("slots", _("slots"), snapshot.slots, _who_set(snapshot))
    held = Fact("held", _("held"), snapshot.held)
    free = Fact("free", _("free"), snapshot.free)
    found = [slots, held, free, stale, waiting]
    if snapshot.usual_hold is not None:
        found.append(Fact("usual", _("usual hold"), length(snapshot.usual_hold)))
    return found


def _who_set(snapshot: SemaphoreSnapshot) -> str:
    if snapshot.operator_slots is None:
        return _("as the code declares")
    last = _last_act(snapshot.name, kinds.RESIZED)
    who = svg.visible(last.by) if last is not None and last.by else _("an operator")
    return _("set by %(who)s; the code declares %(slots)d") % {"who": who, "slots": snapshot.declared_slots}


def _last_act(name: str, *what: str) -> Event | None:
    return next(iter(queries.events(name, what=what, limit=1)), None)


def _waits(name: str) -> Sequence[Sentence]:
    """Return who waits for this lock while holding others, and who holds it while waiting for others."""
    found = [each for each in queries.waits() if each.name == name or any(holder.name == name for holder in each.holds)]
    return [Sentence(f"wait {each.wait_id}", svg.users(str(each))) for each in found[:_MAX_WAITS]]
