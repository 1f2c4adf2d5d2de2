"""The list of all locks with its columns, and a page of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models.functions import Coalesce
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_sqlsem.admin import actions, live, lock_page
from django_sqlsem.admin.base import OperatorAdmin, column
from django_sqlsem.admin.display import declared, drawn, kind_of, percent, users, visible
from django_sqlsem.admin.overview import (
    KindFilter,
    OverviewChangeList,
    OverviewStateFilter,
    TemplateFilter,
    overview_answer,
    searched,
)
from django_sqlsem.core.durations import duration
from django_sqlsem.models import SemaphoreRow
from django_sqlsem.snapshots import TemplateSnapshot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern

    from django_sqlsem.queries import Reading
    from django_sqlsem.snapshots import SemaphoreSnapshot


#: What stands where nothing is to be said, and a reader of screens passes over.
NONE: Final = mark_safe('<span class="sqlsem-none" aria-hidden="true">·</span>')


@admin.register(SemaphoreRow)
class SemaphoreAdmin(OperatorAdmin):
    """The overview of all locks, and a page of each with its holders and waiters.

    A row of the list carries its snapshot as ``known``, what it was like in the last hour as ``lately``, and whether it
    is ``deadlocked``.
    """

    list_display = (
        "lock_name", "cells", "held", "waiting", "stale", "utilisation", "longest_hold", "longest_wait", "turned_away",
        "kind_word", "declared",
    )  # fmt: skip
    list_filter = (OverviewStateFilter, KindFilter, TemplateFilter)
    list_per_page = 50
    search_fields = ("name",)
    ordering = ("name",)
    actions = tuple(actions.ACTIONS.values())

    class Media:
        css = {"all": ("sqlsem/locks.css", "sqlsem/overview.css")}

    def read(self, reading: Reading, rows: list[SemaphoreRow]) -> Mapping[Any, SemaphoreSnapshot]:
        found = reading.by_name(row.name for row in rows)
        return {row.pk: found[row.name] for row in rows if row.name in found}

    def own_urls(self) -> list[URLPattern]:
        """Add where the buttons on the page of one lock lead, and the same as JSON."""
        return [*actions.urls(self), *live.json_urls(self)]

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

    lock_name = column(gettext_lazy("name"), lambda row: users(row.name), ordering="name")
    cells = column(
        gettext_lazy("slots"), lambda row: _cells(row), ordering=Coalesce("operator_slots", "declared_slots")
    )
    held = column(gettext_lazy("held"), lambda row: _held(row.known), ordering="held")
    waiting = column(gettext_lazy("waiting"), lambda row: _marked(row.known.waiting, "waiting"), ordering="waiting")
    stale = column(gettext_lazy("stale"), lambda row: _marked(row.known.stale, "stale"), ordering="stale")
    utilisation = column(gettext_lazy("utilisation"), lambda row: _meter(row.lately.utilisation))
    longest_hold = column(gettext_lazy("longest hold"), lambda row: _length(row.lately.longest_hold))
    longest_wait = column(gettext_lazy("longest wait"), lambda row: _length(row.lately.longest_wait))
    turned_away = column(gettext_lazy("turned away"), lambda row: _marked(row.lately.turned_away or 0, "away"))
    kind_word = column(gettext_lazy("kind"), lambda row: _kinds(row.known), ordering="kind")
    declared = column(gettext_lazy("declared"), lambda row: _declared(row.known))


def _cells(row: Any) -> SafeString | str:
    """Return the slots as cells, with what an operator must know of all of them in a word."""
    snapshot = row.known
    if isinstance(snapshot, TemplateSnapshot):
        return _names(snapshot)
    shown: SafeString | str = drawn(snapshot)
    if snapshot.units is not None:
        shown = _("%(units)d units") % {"units": snapshot.units}
    badges = []
    if row.deadlocked:
        badges.append(("bad", _("deadlock")))
    if snapshot.paused:
        badges.append(("draining", _("draining")) if snapshot.draining else ("paused", _("paused")))
    if snapshot.operator_slots is not None:
        badges.append(("operator", _("set by operator")))
    for state, word in badges:
        shown = format_html('{} <span class="sqlsem-badge sqlsem-{}">{}</span>', shown, state, word)
    return shown


def _kinds(snapshot: SemaphoreSnapshot | TemplateSnapshot) -> str:
    """Return what kind of lock it is, and as which other one it is used at this moment."""
    if isinstance(snapshot, TemplateSnapshot):
        return kind_of(snapshot.kind)
    return ", ".join(kind_of(each) for each in (snapshot.kind, snapshot.other_kind) if each)


def _names(template: TemplateSnapshot) -> SafeString:
    """Return how many names a template has made, and what is wrong with them."""
    shown = format_html("{}", ngettext("%(count)d name", "%(count)d names", template.names) % {"count": template.names})
    words = {"stale": _("stale"), "deadlocked": _("deadlocked"), "waited for": _("waited for"), "paused": _("paused")}
    looks = {"stale": "stale", "deadlocked": "bad", "waited for": "waiting", "paused": "paused"}
    for state, count in template.trouble.items():
        told = _("%(count)d %(state)s") % {"count": count, "state": words[state]}
        shown = format_html('{} <span class="sqlsem-badge sqlsem-{}">{}</span>', shown, looks[state], told)
    return shown


def _held(snapshot: SemaphoreSnapshot | TemplateSnapshot) -> SafeString | str:
    if isinstance(snapshot, TemplateSnapshot):
        return _marked(snapshot.held, "held")
    if snapshot.units is not None:
        return NONE
    return _("%(held)d of %(slots)d") % {"held": snapshot.held, "slots": snapshot.slots}


def _declared(snapshot: SemaphoreSnapshot | TemplateSnapshot) -> SafeString | str:
    return NONE if isinstance(snapshot, TemplateSnapshot) else declared(snapshot)


def _meter(used: float | None) -> SafeString:
    """Return which part of the slots' time they were held in the last hour, as a bar with the number."""
    if used is None:
        return NONE
    return format_html(
        '<span class="sqlsem-used"><svg class="sqlsem-meter" viewBox="0 0 100 10" preserveAspectRatio="none"'
        ' aria-hidden="true" focusable="false"><rect class="sqlsem-meter-all" width="100" height="10"/>'
        '<rect class="sqlsem-meter-used" width="{}" height="10"/></svg> {}</span>',
        f"{100 * used:.1f}",
        percent(used),
    )


def _marked(count: int, state: str) -> SafeString:
    return format_html('<span class="sqlsem-count sqlsem-{}">{}</span>', state, count) if count else NONE


def _length(seconds: float | None) -> SafeString | str:
    return duration(seconds).replace(" ", "\N{NO-BREAK SPACE}") if seconds else NONE
