"""The admin's actions: each shows whom it means, and acts after a confirmation on just those."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from django.contrib import admin, messages
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_sqlsem import control, queries
from django_sqlsem.admin import confirm
from django_sqlsem.admin.confirm import Page
from django_sqlsem.admin.display import visible
from django_sqlsem.exceptions import SemaphoreError
from django_sqlsem.models import SemaphoreRow, SlotRow
from django_sqlsem.snapshots import SlotState

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.contrib.admin import ModelAdmin
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse
    from django.utils.functional import _StrPromise

    from django_sqlsem.snapshots import HolderSnapshot


RowT = TypeVar("RowT", SemaphoreRow, SlotRow)


_LOSE: Final = gettext_lazy(
    "These holders will lose their slots at once. Each learns it within a quarter of its lease, and may still be at"
    " work until it heeds that."
)
_KILLS: Final = gettext_lazy(
    "These slots belong to database sessions. The sessions will be ended, with whatever else they hold. Each holder"
    " learns it within 2 seconds, and may still be at work until it heeds that."
)


@admin.action(description=gettext_lazy("Ask to stop"), permissions=["operate"])
def stop(model_admin: ModelAdmin[RowT], request: HttpRequest, queryset: QuerySet[RowT]) -> HttpResponse | None:
    """Ask holders to stop, and leave them their slots until they do."""
    targets = confirm.slot_targets(request)
    if targets is None:
        _semaphores, holders = confirm.shown(request, queryset)
        new = [holder for holder in holders if holder.recorded and not (holder.expired or holder.stop_requested)]
        if not new:
            text = _("Nobody holds any of these who has not been asked already.")
            model_admin.message_user(request, text, messages.INFO)
            return None
        page = Page(
            action="stop",
            title=_("Ask to stop"),
            question=_(
                "These holders will be asked to stop. They keep their slots until they are done; nothing is taken from"
                " anybody. Each learns it at its next renewal at the latest, if its code asks at all."
            ),
            confirm=_("Yes, ask to stop"),
            targets=confirm.targets_of(new),
            holders=new,
            others=[holder for holder in holders if holder.stop_requested and not holder.expired],
            others_title=_("Asked already"),
        )
        return confirm.confirmation(model_admin, request, page)
    by, using = confirm.by(request), queries.locks_database()
    asked = _each(
        model_admin,
        request,
        targets,
        lambda name, slot, token: control.request_stop(name, slot, token, by=by, using=using),
        gettext_lazy("Asked %(holder)s to stop."),
    )
    if asked:
        text = ngettext("Asked %(count)d holder to stop.", "Asked %(count)d holders to stop.", asked)
        model_admin.message_user(request, text % {"count": asked}, messages.SUCCESS)
    return None


@admin.action(description=gettext_lazy("Revoke permits"), permissions=["operate"])
def revoke(model_admin: ModelAdmin[RowT], request: HttpRequest, queryset: QuerySet[RowT]) -> HttpResponse | None:
    """Take slots away from their holders."""
    targets = confirm.slot_targets(request)
    if targets is None:
        _semaphores, holders = confirm.shown(request, queryset)
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
        return confirm.confirmation(model_admin, request, page)
    by, using = confirm.by(request), queries.locks_database()
    revoked = _each(
        model_admin,
        request,
        targets,
        lambda name, slot, token: control.revoke(name, slot, token, by=by, using=using, kill=True),
        gettext_lazy("Revoked %(holder)s."),
    )
    if revoked:
        text = ngettext("Revoked %(count)d permit.", "Revoked %(count)d permits.", revoked)
        model_admin.message_user(request, text % {"count": revoked}, messages.SUCCESS)
    return None


def _each(
    model_admin: ModelAdmin[RowT],
    request: HttpRequest,
    targets: list[tuple[str, int, int]],
    act: Callable[[str, int, int], list[HolderSnapshot]],
    message: _StrPromise,
) -> int:
    """Do ``act`` to every holder that is still there, log it, and say who was not; return how many were."""
    done, changed = 0, []
    for name, slot, token in targets:
        try:
            holders = act(name, slot, token)
        except SemaphoreError as error:
            model_admin.message_user(request, visible(str(error)), messages.ERROR)
            continue
        if not holders:
            changed.append(confirm.place(name, slot))
        for holder in holders:
            done += 1
            confirm.log(model_admin, request, name, message % {"holder": holder})
    confirm.report_changed(model_admin, request, changed)
    return done


@admin.action(description=gettext_lazy("Purge stale slots"), permissions=["operate"])
def purge_stale(model_admin: ModelAdmin[RowT], request: HttpRequest, queryset: QuerySet[RowT]) -> HttpResponse | None:
    """Free slots whose lease has run out."""
    targets = confirm.slot_targets(request)
    if targets is None:
        _semaphores, holders = confirm.shown(request, queryset)
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
        return confirm.confirmation(model_admin, request, page)
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
