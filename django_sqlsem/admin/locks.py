"""The list of all locks with its columns, and a page of each."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from django.contrib import admin
from django.contrib.admin import AdminSite
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_sqlsem.admin import actions, drawing, live, lock_page
from django_sqlsem.admin.display import NONE, declared, drawn, kind_of, lasting, named, today, visible
from django_sqlsem.admin.lists import OperatorAdmin, column
from django_sqlsem.admin.overview import (
    KindFilter,
    OverviewChangeList,
    OverviewStateFilter,
    TemplateFilter,
    overview_answer,
    searched,
)
from django_sqlsem.core.durations import duration
from django_sqlsem.core.modes import MUTEX
from django_sqlsem.core.names import key_of
from django_sqlsem.models import SemaphoreRow
from django_sqlsem.queries import Reading
from django_sqlsem.snapshots import SemaphoreSnapshot, TemplateSnapshot, longest


def _entrance(model_admin: SemaphoreAdmin, app_index: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Return the index of an app in the admin: that of the locks is the overview, for whoever may see it."""

    @functools.wraps(app_index)
    def index(request: HttpRequest, app_label: str, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        ours = app_label == model_admin.opts.app_label and model_admin.admin_site.is_registered(model_admin.model)
        if ours and model_admin.has_view_permission(request):
            query = request.META.get("QUERY_STRING", "")
            overview = live.address(model_admin, "changelist")
            return HttpResponseRedirect(f"{overview}?{query}" if query else overview)
        return app_index(request, app_label, extra_context)

    return index


@admin.register(SemaphoreRow)
class SemaphoreAdmin(OperatorAdmin):
    """The overview of all locks, and a page of each with its holders and waiters.

    A row of the list carries its snapshot as ``known``, what happened to it in the chosen range as ``trend`` (``None``:
    no history is kept), whether it is ``deadlocked``, and the ``address`` that it leads to.
    """

    list_display = ("lock_name", "cells", "waiting", "longest_hold", "lately")
    list_filter = (OverviewStateFilter, KindFilter, TemplateFilter)
    list_per_page = 50
    search_fields = ("name",)
    ordering = ("name",)
    actions = tuple(actions.ACTIONS.values())

    class Media:
        css = {"all": ("sqlsem/locks.css", "sqlsem/overview.css")}

    def __init__(self, model: type[SemaphoreRow], admin_site: AdminSite) -> None:
        super().__init__(model, admin_site)
        cast("Any", admin_site).app_index = _entrance(self, admin_site.app_index)

    def read(self, reading: Reading, rows: list[SemaphoreRow]) -> Mapping[Any, SemaphoreSnapshot]:
        found = reading.by_name(row.name for row in rows)
        return {row.pk: found[row.name] for row in rows if row.name in found}

    def own_urls(self) -> list[URLPattern]:
        """Add the log of what operators did, where the buttons on the page of one lock lead, and the same as JSON."""
        audit = path(
            "audit/",
            self.admin_site.admin_view(lambda request: lock_page.audit_of_all(self, request)),
            name=f"{self.opts.app_label}_{self.opts.model_name}_audit",
        )
        return [audit, *actions.urls(self), *live.json_urls(self)]

    def address_of(self, name: str) -> str:
        return live.address(self, "change", key_of(name))

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[OverviewChangeList]:
        """Order and filter by what is read once for the whole page."""
        return OverviewChangeList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search names alone, whatever the case of letters, on every database."""
        return searched(queryset, search_term), False

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Answer with the whole page, or with the part that refreshes itself."""
        if live.is_fragment(request) and self.has_view_permission(request):
            answer = live.known(request, actions.permitted(self, request))
            if answer is not None:
                return answer
        response = super().changelist_view(request, {"title": _("Locks"), **(extra_context or {})})
        return overview_answer(request, response)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show one lock, or what changes of it."""
        return lock_page.lock_page(self, request, object_id)

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show what operators did to one lock, whatever they did it by."""
        found = lock_page.audit_log(self, request, object_id)
        return super().history_view(request, object_id, extra_context) if found is None else found

    def action_checkbox(self, row: SemaphoreRow) -> SafeString:
        """Return what Django does, without a template for each row; actions are for names, one by one."""
        if isinstance(row.known, TemplateSnapshot):  # type: ignore[attr-defined]
            return SafeString("")
        return format_html(
            '<input type="checkbox" name="{}" value="{}" class="action-select" aria-label="{}">',
            ACTION_CHECKBOX_NAME,
            row.pk,
            _("Choose %(name)s for an action") % {"name": visible(row.name)},
        )

    lock_name = column(gettext_lazy("name"), lambda row: _name(row), ordering="name")
    cells = column(gettext_lazy("slots"), lambda row: _cells(row.known), ordering="held")
    waiting = column(gettext_lazy("queue"), lambda row: _queue(row.known), ordering="waiting")
    longest_hold = column(gettext_lazy("longest hold"), lambda row: _longest_hold(row))
    lately = column(gettext_lazy("held, refused"), lambda row: _trend(row))


def _name(row: Any) -> SafeString:
    """Return the name, which leads on, with its kind, and below it what an operator must know of it in a few words."""
    known = row.known
    kinds = [known.kind]
    if not isinstance(known, TemplateSnapshot) and known.other_kind:
        kinds.append(known.other_kind)
    shown = format_html(
        '<a href="{}">{}</a> <span class="sqlsem-kind">{}</span>',
        row.address,
        named(row.name),
        ", ".join(map(kind_of, kinds)),
    )
    badges = _of_names(known) if isinstance(known, TemplateSnapshot) else _of_name(known, deadlocked=row.deadlocked)
    words = format_html_join(" ", '<span class="sqlsem-badge sqlsem-{}">{}</span>', badges)
    return format_html('{}<span class="sqlsem-badges">{}</span>', shown, words) if words else shown


def _of_name(known: SemaphoreSnapshot, *, deadlocked: bool) -> list[tuple[str, str]]:
    badges = []
    if known.stale:
        badges.append(("stale", _("%(count)d stale") % {"count": known.stale}))
    if deadlocked:
        badges.append(("bad", _("deadlock")))
    if known.paused:
        badges.append(("draining", _("draining")) if known.draining else ("paused", _("paused")))
    if known.operator_slots is not None:
        badges.append(("operator", _of_slots(known)))
    if known.other_declared_slots is not None and known.kind != MUTEX:
        badges.append(("operator", _("declared %(slots)s") % {"slots": declared(known)}))
    return badges


#: So much of a reason stands in the list.
_REASON: Final = 60


def _of_slots(known: SemaphoreSnapshot) -> str:
    """Return what an operator has set: with an end, until when, by whom and why."""
    if known.slots_until is None:
        return _("set by operator")
    end = timezone.localtime(known.slots_until)
    at = f"{end:%H:%M}" if end.date() == today() else f"{end:%Y-%m-%d %H:%M}"
    told = ngettext("%(count)d slot until %(at)s", "%(count)d slots until %(at)s", known.slots)
    told %= {"count": known.slots, "at": at}
    if known.slots_by:
        told = _("%(told)s, by %(user)s") % {"told": told, "user": visible(known.slots_by)}
    return f"{told}: {visible(Truncator(known.slots_reason).chars(_REASON))}" if known.slots_reason else told


def _of_names(known: TemplateSnapshot) -> list[tuple[str, str]]:
    """Return how many names a template has made, and what is wrong with them."""
    badges = [("names", ngettext("%(count)d name", "%(count)d names", known.names) % {"count": known.names})]
    states = {
        "stale": ("stale", _("stale")),
        "deadlocked": ("bad", _("deadlocked")),
        "with a queue": ("waiting", _("with a queue")),
        "paused": ("paused", _("paused")),
    }
    for state, count in known.trouble.items():
        look, word = states[state]
        badges.append((look, _("%(count)d %(state)s") % {"count": count, "state": word}))
    return badges


def _cells(known: SemaphoreSnapshot | TemplateSnapshot) -> SafeString | str:
    """Return the slots as cells, and how many of them are held."""
    if isinstance(known, TemplateSnapshot):
        return format_html("<span>{}</span>", _("%(count)d held") % {"count": known.held}) if known.held else NONE
    if known.units is not None:
        return _("%(units)d units") % {"units": known.units}
    told = _("%(held)d of %(slots)d") % {"held": known.held, "slots": known.slots}
    return format_html('{} <span class="sqlsem-of">{}</span>', drawn(known), told)


def _queue(known: SemaphoreSnapshot | TemplateSnapshot) -> SafeString:
    """Return how many wait, and for how long the first of them has."""
    if not known.waiting:
        return NONE
    if isinstance(known, TemplateSnapshot):
        first = known.longest_wait
    else:
        first = longest(*(waiter.age for waiter in known.waiters))
    shown = format_html('<span class="sqlsem-count sqlsem-waiting">{}</span>', known.waiting)
    if first is None:
        return shown
    return format_html('{} <span class="sqlsem-second">{}</span>', shown, format_html(_("for {}"), lasting(first)))


def _longest_hold(row: Any) -> SafeString | str:
    """Return the longest hold of the range, and of those that go on."""
    known = row.known
    if isinstance(known, TemplateSnapshot):
        now = known.longest_hold
    else:
        now = longest(*(holder.age for holder in known.holders if holder.recorded))
    past = row.trend.totals.longest_hold if row.trend is not None else 0.0
    if now is not None and now >= past:
        return lasting(now)
    return duration(past).replace(" ", "\N{NO-BREAK SPACE}") if past else NONE


def _trend(row: Any) -> SafeString:
    """Return how much was held and how many were refused in the chosen range, as a small drawing and a number."""
    if row.trend is None:
        return NONE
    step, known, count = row.trend.step, row.known, max(1, round(row.window / row.trend.step))
    steps = {count - 1 - round((_begun(row.now, step) - at).total_seconds() / step): each
             for at, each in row.trend.steps.items()}  # fmt: skip
    held = drawing.held_by_step({nth: each[0] for nth, each in steps.items()}, known, row.now, step, count)
    refused = {nth: each[1] for nth, each in steps.items() if each[1]}
    if not held and not refused:
        return NONE
    slots = 0 if isinstance(known, TemplateSnapshot) or known.units is not None else known.slots
    in_all = row.trend.totals.turned_away
    words = ngettext("%(count)d refused", "%(count)d refused", in_all) % {"count": in_all}
    mean = sum(held.values()) / count
    about = _("%(mean).1f held on average, %(refused)s") % {"mean": mean, "refused": words}
    shown = drawing.sparkline(held, refused, count=count, most=float(slots), about=about)
    return format_html('{} <span class="sqlsem-count sqlsem-away">{}</span>', shown, words) if in_all else shown


def _begun(now: datetime.datetime, step: float) -> datetime.datetime:
    """Return when the step began in which ``now`` is."""
    return datetime.datetime.fromtimestamp(now.timestamp() // step * step, datetime.UTC)
