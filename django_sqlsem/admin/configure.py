"""The admin's acts on whole locks: their number of slots, and whether anything is granted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_sqlsem import control, queries
from django_sqlsem.admin import confirm
from django_sqlsem.admin.confirm import Page
from django_sqlsem.admin.display import visible
from django_sqlsem.core.names import MAX_SLOTS
from django_sqlsem.exceptions import SemaphoreError
from django_sqlsem.models import SemaphoreRow

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse


class SlotsForm(forms.Form):
    """An operator's number of slots."""

    slots = forms.IntegerField(
        label=gettext_lazy("Slots"),
        min_value=1,
        max_value=MAX_SLOTS,
        required=False,
        help_text=gettext_lazy("Leave it empty to go by the number that the code declares."),
    )


def _configure(
    model_admin: ModelAdmin[SemaphoreRow], request: HttpRequest, names: list[str], act: Any, message: str
) -> None:
    """Do ``act`` to every name, log it, and say what happened."""
    done = 0
    for name in names:
        try:
            known = act(name)
        except (SemaphoreError, TypeError, ValueError) as error:
            model_admin.message_user(request, visible(str(error)), messages.ERROR)
            continue
        if known:
            done += 1
            confirm.log(model_admin, request, name, message)
        else:
            text = _("There is no semaphore %(name)s any more.") % {"name": visible(name)}
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
    form = SlotsForm(request.POST if targets is not None else None, auto_id="id_sqlsem_%s")
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
        semaphores, holders = confirm.shown(request, queryset)
        if len(semaphores) == 1:
            form.initial["slots"] = semaphores[0].operator_slots
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
    return confirm.confirmation(model_admin, request, page)


@admin.action(description=gettext_lazy("Pause"), permissions=["configure"])
def pause(
    model_admin: ModelAdmin[SemaphoreRow], request: HttpRequest, queryset: QuerySet[SemaphoreRow]
) -> HttpResponse | None:
    """Stop granting."""
    page = Page(
        action="pause",
        title=_("Pause"),
        question=_("Nothing more will be granted until these are resumed. Whoever waits goes on waiting."),
        confirm=_("Yes, pause"),
        others_title=_("Holders, who keep their slots"),
    )
    return _granting(model_admin, request, queryset, page, control.pause, _("Paused."))


@admin.action(description=gettext_lazy("Resume"), permissions=["configure"])
def resume(
    model_admin: ModelAdmin[SemaphoreRow], request: HttpRequest, queryset: QuerySet[SemaphoreRow]
) -> HttpResponse | None:
    """Grant again."""
    page = Page(
        action="resume",
        title=_("Resume"),
        question=_("Slots will be granted again, first to those who have waited longest."),
        confirm=_("Yes, resume"),
        others_title=_("Holders, who keep their slots"),
    )
    return _granting(model_admin, request, queryset, page, control.resume, _("Resumed."))


@admin.action(description=gettext_lazy("Drain"), permissions=["drain"])
def drain(
    model_admin: ModelAdmin[SemaphoreRow], request: HttpRequest, queryset: QuerySet[SemaphoreRow]
) -> HttpResponse | None:
    """Stop granting, and ask every holder to stop."""
    page = Page(
        action="drain",
        title=_("Drain"),
        question=_(
            "Nothing more will be granted until these are resumed, and whoever holds one is asked to stop. Holders"
            " that pay no heed keep their slots until they are done; nothing is taken from anybody."
        ),
        confirm=_("Yes, drain"),
        others_title=_("Holders, who are asked to stop"),
    )
    return _granting(model_admin, request, queryset, page, control.drain, _("Draining: holders are asked to stop."))


def _granting(
    model_admin: ModelAdmin[SemaphoreRow],
    request: HttpRequest,
    queryset: QuerySet[SemaphoreRow],
    page: Page,
    act: Any,
    message: str,
) -> HttpResponse | None:
    """Show the page, or do what it says by ``act``."""
    targets = confirm.confirmed(request)
    if targets is not None:
        by, using = confirm.by(request), queries.locks_database()
        _configure(
            model_admin, request, confirm.name_targets(targets), lambda name: act(name, by=by, using=using), message
        )
        return None
    semaphores, holders = confirm.shown(request, queryset)
    names = [snapshot.name for snapshot in semaphores]
    page = replace(page, targets=names, semaphores=semaphores, others=holders)
    return confirm.confirmation(model_admin, request, page)
