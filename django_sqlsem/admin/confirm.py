"""The page between an admin's act and its execution: it names whom the act means, and brings just those back."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django import forms
from django.contrib import messages
from django.contrib.admin import helpers
from django.contrib.admin.utils import unquote
from django.core import signing
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_sqlsem import queries
from django_sqlsem.admin import live, tables
from django_sqlsem.admin.display import users, visible
from django_sqlsem.control import MAX_REASON_LENGTH
from django_sqlsem.core.names import key_of
from django_sqlsem.models import SemaphoreRow
from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot

#: What the targets of a page are signed with, before the name of its act.
_SALT: Final = "django_sqlsem.admin."
#: What a button sends: an act, and the slot and token of the holder that it is beside.
_BUTTON: Final = re.compile(r"(?P<act>[a-z_]*)(?: (?P<slot>[0-9]{1,9}) (?P<token>[0-9]{1,19}))?")


class DamagedFormError(Exception):
    """The confirmation did not come back as it was sent."""


class ChangedError(Exception):
    """Whom a button was beside is gone: the arguments are the name and the slot."""


class ActionForm(helpers.ActionForm):
    """Chooses an action. django-unfold shows the button beside it once what ``x-model`` names has a value."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["action"].widget.attrs["x-model"] = "action"


@dataclass(frozen=True, slots=True)
class Page:
    """What a confirmation page says."""

    #: The act by its name.
    action: str
    title: Any
    question: Any = ""
    confirm: Any = ""
    #: What the confirmation brings back: names, or names with slots and tokens.
    targets: Sequence[Any] = ()
    holders: Sequence[HolderSnapshot] = ()
    #: Holders that are shown but left alone, and why.
    others: Sequence[HolderSnapshot] = ()
    others_title: Any = ""
    semaphores: Sequence[SemaphoreSnapshot] = ()
    form: forms.Form | None = None
    dangerous: bool = False


def confirmation(model_admin: Any, request: HttpRequest, page: Page) -> HttpResponse:
    match = request.resolver_match
    lock = unquote(match.kwargs.get("object_id", "")) if match else ""  # on a list there is none
    names = {each.name for each in page.semaphores} | {each.name for each in (*page.holders, *page.others)}
    context = {
        "title": page.title,
        "page": page,
        "tables": [
            tables.semaphores(page.semaphores),
            tables.meant("sqlsem-meant", _("Holders"), page.holders),
        ],
        "others": tables.meant("sqlsem-others", page.others_title, page.others),
        "targets": signing.dumps(page.targets, salt=_SALT + page.action),
        # Any one row makes the list view call the action again; whom it means is said by the targets alone.
        "selected": request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)[:1],
        "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
        "back": live.address(model_admin, "change", lock) if lock else request.get_full_path(),
        "one": users(names.pop()) if lock and len(names) == 1 else "",
    }
    answer: HttpResponse = live.page(model_admin, request, "admin/sqlsem/confirm_action.html", context)
    return answer


def button(request: HttpRequest) -> tuple[str, tuple[int, int] | None]:
    """Return the act that a button of a lock's page stands for, and the slot and token of the holder beside it.

    ``("", None)``: no such button was pressed. Raises ``DamagedFormError``.
    """
    found = _BUTTON.fullmatch(request.POST.get("do", ""))
    if found is None or int(found["token"] or 0) >= 2**63:
        raise DamagedFormError
    return found["act"], (int(found["slot"]), int(found["token"])) if found["token"] else None


def check_selected(model_admin: Any, request: HttpRequest) -> None:
    """Raise ``DamagedFormError`` if what a list sends as chosen rows cannot be such."""
    field = model_admin.opts.pk
    for value in request.POST.getlist(helpers.ACTION_CHECKBOX_NAME):
        try:
            found = field.to_python(value)
        except ValidationError:
            raise DamagedFormError from None
        if isinstance(found, int) and not 0 <= found < 2**63:
            raise DamagedFormError


def is_confirmed(request: HttpRequest) -> bool:
    """Whether this is the answer to a confirmation page."""
    return "confirmed" in request.POST


def targets(request: HttpRequest, action: str) -> list[Any]:
    """Return what the confirmed page of this very act means. Raises ``DamagedFormError``."""
    try:
        return list(signing.loads(request.POST.get("targets", ""), salt=_SALT + action))
    except signing.BadSignature:
        raise DamagedFormError from None


def shown(request: HttpRequest, queryset: QuerySet[Any]) -> tuple[list[SemaphoreSnapshot], list[HolderSnapshot]]:
    """Return the semaphores of the selected rows, and the holders of the selected slots, or the one beside a button.

    Raises ``ChangedError`` if that one has gone since the button was shown.
    """
    slots = queryset.model is not SemaphoreRow
    rows = set(queryset.values_list("semaphore__name", "slot") if slots else queryset.values_list("name"))
    snapshots = list(live.reading_of(request).by_name(name for name, *_slot in rows).values())
    holders = [
        holder
        for snapshot in snapshots
        for holder in snapshot.holders
        if not slots or any((holder.name, slot) in rows for slot in holder.numbers)
    ]
    beside = button(request)[1]
    if beside is not None:
        holders = [holder for holder in holders if (holder.slot, holder.token) == beside]
        if not holders:
            raise ChangedError(snapshots[0].name if snapshots else "", beside[0])
    return snapshots, holders


def log(model_admin: Any, request: HttpRequest, name: str, message: str) -> None:
    """Note an act with its reason in Django's log, under the semaphore's name."""
    if why := reason(request):
        message = _("%(message)s Reason: %(reason)s") % {"message": message, "reason": why}
    model_admin.log_change(request, SemaphoreRow(key=key_of(name), name=name), visible(message))


def reason(request: HttpRequest) -> str:
    """Return why the operator acts, as the confirmation says."""
    return " ".join(request.POST.get("reason", "").split())[:MAX_REASON_LENGTH]


def by(request: HttpRequest) -> str:
    return str(request.user.get_username())


def report_changed(model_admin: Any, request: HttpRequest, changed: Collection[tuple[str, int]]) -> None:
    """Say which holders were left alone, by name and slot, and who is there now."""
    if not changed:
        return
    text = ngettext(
        "The holder of %(slots)s has changed since it was shown: nobody there was disturbed. Now: %(now)s.",
        "The holders of %(slots)s have changed since they were shown: nobody there was disturbed. Now: %(now)s.",
        len(changed),
    )
    found, now = queries.by_name({name for name, _slot in changed}), []
    for name, slot in sorted(changed):
        holders = found[name].holders if name in found else ()
        there = next((str(each) for each in holders if slot in each.numbers), None)
        now.append(visible(there or _("slot %(slot)d is free") % {"slot": slot}))
    told = {"slots": ", ".join(place(name, slot) for name, slot in sorted(changed)), "now": "; ".join(now)}
    model_admin.message_user(request, text % told, messages.WARNING)


def standing(snapshot: SemaphoreSnapshot) -> str:
    """Return how a lock stands, in a few words."""
    parts = [_("%(held)d of %(slots)d held") % {"held": snapshot.held, "slots": snapshot.slots}]
    if snapshot.operator_slots is not None:
        parts.append(_("slots set by an operator") if not snapshot.slots_by else
                     _("slots set by %(user)s") % {"user": visible(snapshot.slots_by)})  # fmt: skip
    if snapshot.paused:
        by = snapshot.paused_by
        parts.append(_("paused by %(user)s") % {"user": visible(by)} if by else _("paused"))
    else:
        parts.append(_("not paused"))
    return _("%(name)s: %(standing)s") % {"name": visible(snapshot.name), "standing": ", ".join(parts)}


def place(name: str, slot: int) -> str:
    """Return a slot of a name in words."""
    return _("%(name)s slot %(slot)d") % {"name": visible(name), "slot": slot}
