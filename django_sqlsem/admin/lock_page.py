"""The page of one lock: who holds it, who waits, the last hour, and the buttons for what may be done about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from django.contrib import messages
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import Error as DatabaseError
from django.http import HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_sqlsem import queries
from django_sqlsem.admin import actions, configure, confirm, drawing, live, tables
from django_sqlsem.admin.display import drawn, kind_of, snapshot_of
from django_sqlsem.admin.drawing import length
from django_sqlsem.admin.last_hour import recent
from django_sqlsem.conf import config
from django_sqlsem.core.names import ONE_SLOT, key_of
from django_sqlsem.exceptions import BackendError
from django_sqlsem.history import events

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern

    from django_sqlsem.history.events import Event
    from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot


#: By the names that actions have on lists, which are those of the functions.
ACTS: Final[dict[str, Any]] = {
    act.__name__: act
    for act in (
        actions.stop,
        actions.revoke,
        actions.purge_stale,
        configure.set_slots,
        configure.pause,
        configure.resume,
        configure.drain,
    )
}


@dataclass(frozen=True, slots=True)
class Button:
    """One button: what it sends, what is on it, and, for who does not see what it is beside, what it is about."""

    value: str
    text: str
    label: str
    dangerous: bool = False


class Acts:
    """What a user may do to one lock, as buttons. They belong to the form of ``_acts_form.html``.

    ``url`` is where the form goes, ``lock`` the buttons of the lock as a whole; ``beside(holder)`` those of a holder.
    """

    def __init__(self, model_admin: Any, request: HttpRequest, snapshot: SemaphoreSnapshot) -> None:
        self._snapshot = snapshot
        self._may = {act for act in ACTS if permitted(model_admin, request, act)}
        self.url = _address(model_admin, "act", key_of(snapshot.name))
        self.lock = self._of_the_lock()

    def __bool__(self) -> bool:
        """Whether the user may do anything at all."""
        return bool(self._may)

    def beside(self, holder: HolderSnapshot) -> list[Button]:
        """Return the buttons of one holder: it is meant by its slot and token."""
        wanted = [("purge_stale", _("Purge"), False)]
        if not holder.expired:
            wanted = [("revoke", _("Revoke"), True)]
            if _can_be_asked(holder):
                wanted.insert(0, ("stop", _("Ask to stop"), False))
        return [
            Button(
                f"{act} {holder.slot} {holder.token}",
                text,
                _("%(act)s: %(holder)s") % {"act": text, "holder": drawing.visible(str(holder))},
                dangerous,
            )
            for act, text, dangerous in wanted
            if act in self._may
        ]

    def _of_the_lock(self) -> list[Button]:
        snapshot, live = self._snapshot, [each for each in self._snapshot.holders if not each.expired]
        unasked = [each for each in live if _can_be_asked(each)]
        texts = {
            "stop": (_("Ask all to stop"), len(unasked) > 1),
            "set_slots": (_("Set slots"), snapshot.tokens is None and snapshot.kind not in ONE_SLOT),
            "pause": (_("Pause"), not snapshot.paused),
            "resume": (_("Resume"), snapshot.paused),
            "drain": (_("Drain"), not snapshot.paused or bool(unasked)),
        }
        return [
            Button(act, text, _("%(act)s: %(name)s") % {"act": text, "name": drawing.visible(snapshot.name)})
            for act, (text, useful) in texts.items()
            if useful and act in self._may
        ]


def _can_be_asked(holder: HolderSnapshot) -> bool:
    # Without a record there is no place for the wish.
    return holder.recorded and not holder.stop_requested


def permitted(model_admin: Any, request: HttpRequest, act: str) -> bool:
    """Whether the user may do this act, as the action of a list is allowed or not."""
    needed = ACTS[act].allowed_permissions
    return any(getattr(model_admin, f"has_{permission}_permission")(request) for permission in needed)


def refuse(model_admin: Any, request: HttpRequest) -> None:
    """Answer 403 to who sends a list an act without permission: Django would say that none was chosen."""
    if request.method == "POST":
        for act in request.POST.getlist("action"):
            if act in ACTS and not permitted(model_admin, request, act):
                raise PermissionDenied


def urls(model_admin: Any) -> list[URLPattern]:
    """Return where the buttons lead."""

    def act_view(request: HttpRequest, object_id: str) -> HttpResponse:
        return _view(model_admin, request, unquote(object_id))

    name = f"{model_admin.opts.app_label}_{model_admin.opts.model_name}_act"
    return [path("<path:object_id>/act/", model_admin.admin_site.admin_view(act_view), name=name)]


def _view(model_admin: Any, request: HttpRequest, key: str) -> HttpResponse:
    """Ask, and act after the confirmation; then show the page of the lock again, with what happened."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    back = HttpResponseRedirect(_address(model_admin, "change", key))
    if request.method != "POST":  # somebody had to log in again, say
        return back
    try:
        act = confirm.button(request)[0] or request.POST.get("action", "")
        if act not in ACTS:
            raise confirm.DamagedFormError
        if not permitted(model_admin, request, act):
            raise PermissionDenied
        chosen = model_admin.get_queryset(request).filter(pk=key)
        if confirm.confirmed(request) is None and not chosen.exists():
            return cast("HttpResponse", model_admin._get_obj_does_not_exist_redirect(request, model_admin.opts, key))
        return ACTS[act](model_admin, request, chosen) or back
    except (confirm.DamagedFormError, ValidationError):
        model_admin.message_user(request, _("The form came back damaged: nothing was done."), messages.ERROR)
    except confirm.ChangedError as error:
        confirm.report_changed(model_admin, request, [str(error)])
    except (BackendError, DatabaseError) as error:
        model_admin.message_user(request, live.first_line(error), messages.ERROR)
    return back


def _address(model_admin: Any, view: str, key: str) -> str:
    name = f"admin:{model_admin.opts.app_label}_{model_admin.opts.model_name}_{view}"
    return reverse(name, args=[quote(key)], current_app=model_admin.admin_site.name)


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
        "title": drawing.visible(snapshot.name),
        "subtitle": None,
        "shown_name": drawing.users(snapshot.name),
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
        Notice(
            f"deadlock {number}", format_html(_("<strong>Deadlock:</strong> {}"), drawing.visible(str(each))), bad=True
        )
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
    last = _last_act(snapshot.name, events.PAUSED, events.DRAINED)
    by = _(" by %(user)s") % {"user": drawing.visible(last.by)} if last is not None and last.by else ""
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
    last = _last_act(snapshot.name, events.RESIZED)
    who = drawing.visible(last.by) if last is not None and last.by else _("an operator")
    return _("set by %(who)s; the code declares %(slots)d") % {"who": who, "slots": snapshot.declared_slots}


def _last_act(name: str, *what: str) -> Event | None:
    return next(iter(queries.events(name, what=what, limit=1)), None)


def _waits(name: str) -> Sequence[Sentence]:
    """Return who waits for this lock while holding others, and who holds it while waiting for others."""
    found = [each for each in queries.waits() if each.name == name or any(holder.name == name for holder in each.holds)]
    return [Sentence(f"wait {each.wait_id}", drawing.users(str(each))) for each in found[:_MAX_WAITS]]
