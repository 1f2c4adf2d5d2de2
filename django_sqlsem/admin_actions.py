"""The admin's actions: each shows whom it means, and acts after a confirmation on just those."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from django import forms
from django.contrib import admin, messages
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_sqlsem import admin_confirm as confirm
from django_sqlsem import control, queries
from django_sqlsem.admin_confirm import Page
from django_sqlsem.exceptions import BackendError, KillNeededError
from django_sqlsem.models import SemaphoreRow, SlotRow
from django_sqlsem.naming import MAX_SLOTS
from django_sqlsem.snapshots import SlotState

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse

RowT = TypeVar("RowT", SemaphoreRow, SlotRow)


_LOSE: Final = gettext_lazy(
    "These holders will lose their slots at once. Each learns it within a quarter of its lease, and may still be at"
    " work until it heeds that."
)
_KILLS: Final = gettext_lazy(
    "These slots belong to database sessions. The sessions will be ended, with whatever else they hold. Each holder"
    " learns it within 2 seconds, and may still be at work until it heeds that."
)


class SlotsForm(forms.Form):
    """An operator's number of slots."""

    slots = forms.IntegerField(
        label=gettext_lazy("Slots"),
        min_value=1,
        max_value=MAX_SLOTS,
        required=False,
        help_text=gettext_lazy("Leave it empty to go by the number that the code declares."),
    )


@admin.action(description=gettext_lazy("Revoke permits"), permissions=["operate"])
def revoke(model_admin: ModelAdmin[RowT], request: HttpRequest, queryset: QuerySet[RowT]) -> HttpResponse | None:
    """Take slots away from their holders."""
    targets = confirm.slot_targets(request)
    if targets is None:
        _semaphores, holders = confirm.shown(queryset)
        if not holders:
            model_admin.message_user(request, _("Nobody holds any of these: nothing to revoke."), messages.INFO)
            return None
        kills = any(holder.needs_kill for holder in holders)
        page = Page(
            action="revoke",
            title=_("Revoke permits"),
            question=str(_KILLS if kills else _LOSE),
            confirm=_("Yes, end the sessions") if kills else _("Yes, revoke"),
            targets=confirm.targets_of(holders),
            holders=holders,
            others=queries.held_along(holders),
            others_title=_("To be lost as well: the same sessions hold these"),
            dangerous=True,
        )
        return confirm.confirmation(model_admin, request, queryset, page)
    revoked, changed, by = 0, [], confirm.by(request)
    for name, slot, token in targets:
        try:
            holders = control.revoke(name, slot, token, by=by, using=queries.locks_database(), kill=True)
        except (BackendError, KillNeededError) as error:
            model_admin.message_user(request, str(error), messages.ERROR)
            continue
        if not holders:
            changed.append(confirm.place(name, slot))
        for holder in holders:
            revoked += 1
            confirm.log(model_admin, request, name, _("Revoked %(holder)s.") % {"holder": holder})
    if revoked:
        text = ngettext("Revoked %(count)d permit.", "Revoked %(count)d permits.", revoked)
        model_admin.message_user(request, text % {"count": revoked}, messages.SUCCESS)
    confirm.report_changed(model_admin, request, changed)
    return None


@admin.action(description=gettext_lazy("Purge stale slots"), permissions=["operate"])
def purge_stale(model_admin: ModelAdmin[RowT], request: HttpRequest, queryset: QuerySet[RowT]) -> HttpResponse | None:
    """Free slots whose lease has run out."""
    targets = confirm.slot_targets(request)
    if targets is None:
        _semaphores, holders = confirm.shown(queryset)
        expired = [holder for holder in holders if holder.expired]
        others = [holder for holder in holders if holder.state is SlotState.STALE and not holder.expired]
        if not expired:
            text = _("The lease of none of these has run out: nothing to purge.")
            if others:
                soon = max(others, key=lambda holder: -(holder.lease_left or 0.0))
                text += " " + _("%(slot)s seems gone; its lease runs out in %(seconds).0f s.") % {
                    "slot": confirm.place(soon.name, soon.slot),
                    "seconds": soon.lease_left,
                }
            model_admin.message_user(request, text, messages.INFO)
            return None
        page = Page(
            action="purge_stale",
            title=_("Purge stale slots"),
            question=_(
                "The leases of these holders have run out, or their sessions have ended. Their slots will be freed; no"
                " live holder is touched."
            ),
            confirm=_("Yes, purge"),
            targets=confirm.targets_of(expired),
            holders=expired,
            others=others,
            others_title=_("Left alone: these seem gone, but their lease still runs"),
        )
        return confirm.confirmation(model_admin, request, queryset, page)
    shown = {(name, slot): token for name, slot, token in targets}
    found = queries.by_name({name for name, _slot in shown}).values()
    holders = [
        each for snapshot in found for each in snapshot.holders if shown.get((each.name, each.slot)) == each.token
    ]
    plan = control.PurgePlan(queries.locks_database(), slots=tuple(holder for holder in holders if holder.expired))
    result = control.execute_purge(plan, by=confirm.by(request))
    for holder in result.freed:
        confirm.log(model_admin, request, holder.name, _("Purged %(holder)s.") % {"holder": holder})
    if result.freed:
        text = ngettext("Freed %(count)d slot.", "Freed %(count)d slots.", len(result.freed))
        model_admin.message_user(request, text % {"count": len(result.freed)}, messages.SUCCESS)
    freed = {(holder.name, holder.slot) for holder in result.freed}
    confirm.report_changed(model_admin, request, [confirm.place(*place) for place in shown if place not in freed])
    return None


def _configure(
    model_admin: ModelAdmin[SemaphoreRow], request: HttpRequest, names: list[str], act: Any, message: str
) -> None:
    """Do ``act`` to every name, log it, and say what happened."""
    done = 0
    for name in names:
        try:
            known = act(name)
        except (TypeError, ValueError) as error:
            model_admin.message_user(request, str(error), messages.ERROR)
            continue
        if known:
            done += 1
            confirm.log(model_admin, request, name, message)
        else:
            text = _("There is no semaphore %(name)s any more.") % {"name": name}
            model_admin.message_user(request, text, messages.WARNING)
    if done:
        text = ngettext("%(count)d semaphore: %(message)s", "%(count)d semaphores: %(message)s", done)
        model_admin.message_user(request, text % {"count": done, "message": message}, messages.SUCCESS)


@admin.action(description=gettext_lazy("Set slots"), permissions=["configure"])
def set_slots(
    model_admin: ModelAdmin[SemaphoreRow], request: HttpRequest, queryset: QuerySet[SemaphoreRow]
) -> HttpResponse | None:
    """Set the number of slots, whatever the code says."""
    targets = confirm.confirmed(request)
    form = SlotsForm(request.POST if targets is not None else None)
    if targets is not None and form.is_valid():
        slots = form.cleaned_data["slots"]
        message = (
            _("Slots as declared by the code.") if slots is None else _("Slots set to %(slots)d.") % {"slots": slots}
        )
        by, using = confirm.by(request), queries.locks_database()
        _configure(
            model_admin,
            request,
            confirm.name_targets(targets),
            lambda name: control.set_slots(name, slots, by=by, using=using),
            message,
        )
        return None
    if targets is None:
        semaphores, holders = confirm.shown(queryset)
    else:
        semaphores = list(queries.by_name(confirm.name_targets(targets)).values())
        holders = [holder for snapshot in semaphores for holder in snapshot.holders]
    page = Page(
        action="set_slots",
        title=_("Set slots"),
        question=_("The number counts at once, for every process. No holder is interrupted by a smaller one: nothing is"
                   " granted until fewer are held."),
        confirm=_("Set slots"),
        targets=[snapshot.name for snapshot in semaphores],
        semaphores=semaphores,
        others=holders,
        others_title=_("Holders, who keep their slots"),
        form=form,
    )  # fmt: skip
    return confirm.confirmation(model_admin, request, queryset, page)


@admin.action(description=gettext_lazy("Pause"), permissions=["configure"])
def pause(
    model_admin: ModelAdmin[SemaphoreRow], request: HttpRequest, queryset: QuerySet[SemaphoreRow]
) -> HttpResponse | None:
    """Stop granting."""
    return _pause_or_resume(
        model_admin,
        request,
        queryset,
        act=control.pause,
        message=_("Paused."),
        action="pause",
        title=_("Pause"),
        question=_("Nothing more will be granted until these are resumed. Whoever waits goes on waiting."),
        confirm=_("Yes, pause"),
    )


@admin.action(description=gettext_lazy("Resume"), permissions=["configure"])
def resume(
    model_admin: ModelAdmin[SemaphoreRow], request: HttpRequest, queryset: QuerySet[SemaphoreRow]
) -> HttpResponse | None:
    """Grant again."""
    return _pause_or_resume(
        model_admin,
        request,
        queryset,
        act=control.resume,
        message=_("Resumed."),
        action="resume",
        title=_("Resume"),
        question=_("Slots will be granted again, first to those who have waited longest."),
        confirm=_("Yes, resume"),
    )


def _pause_or_resume(
    model_admin: ModelAdmin[SemaphoreRow],
    request: HttpRequest,
    queryset: QuerySet[SemaphoreRow],
    *,
    act: Any,
    message: str,
    **texts: str,
) -> HttpResponse | None:
    targets = confirm.confirmed(request)
    if targets is not None:
        by, using = confirm.by(request), queries.locks_database()
        _configure(
            model_admin, request, confirm.name_targets(targets), lambda name: act(name, by=by, using=using), message
        )
        return None
    semaphores, holders = confirm.shown(queryset)
    page = Page(
        targets=[snapshot.name for snapshot in semaphores],
        semaphores=semaphores,
        others=holders,
        others_title=_("Holders, who keep their slots"),
        **texts,  # type: ignore[arg-type]
    )
    return confirm.confirmation(model_admin, request, queryset, page)
