"""The lists of locks and of slots, with what an operator may do to them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, cast

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models.functions import Coalesce
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_sqlsem.admin import actions as admin_actions
from django_sqlsem.admin import configure, json, live, lock_page
from django_sqlsem.admin.base import OperatorAdmin
from django_sqlsem.admin.display import (
    EMPTY,
    STATES,
    SnapshotChangeList,
    StateFilter,
    attach,
    declared,
    drawn,
    held_since,
    holder_of,
    kind_of,
    lease_left,
    program_of,
    snapshot_of,
    users,
    visible,
)
from django_sqlsem.admin.overview import KindFilter, OverviewChangeList, OverviewStateFilter, overview_answer, searched
from django_sqlsem.core.durations import duration
from django_sqlsem.models import SemaphoreRow, SlotRow
from django_sqlsem.serialize import Lately
from django_sqlsem.snapshots import SlotState

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern


#: What stands where nothing is to be said, and a reader of screens passes over.
NONE: Final = mark_safe('<span class="sqlsem-none" aria-hidden="true">·</span>')

COLUMNS: Final = (
    "lock_name", "cells", "held", "waiting", "stale", "utilisation", "longest_hold", "longest_wait", "turned_away",
    "kind_word", "declared",
)  # fmt: skip


@admin.register(SemaphoreRow)
class SemaphoreAdmin(OperatorAdmin):
    """The overview of all locks, and a page of each with its holders and waiters."""

    list_display = COLUMNS
    list_filter = (OverviewStateFilter, KindFilter)
    list_per_page = 50
    search_fields = ("name",)
    ordering = ("name",)
    actions = (
        admin_actions.stop,
        admin_actions.revoke,
        admin_actions.purge_stale,
        configure.set_slots,
        configure.pause,
        configure.resume,
        configure.drain,
    )
    fields = ("name", "kind_word", "cells", "held", "stale", "waiting", "declared")
    readonly_fields = fields

    class Media:
        css = {"all": ("sqlsem/locks.css", "sqlsem/overview.css")}

    def own_urls(self) -> list[URLPattern]:
        """Add where the buttons on the page of one lock lead, and the same as JSON."""
        return [*lock_page.urls(self), *json.urls(self), *super().own_urls()]

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

    @live.guarded
    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show one lock, or what changes of it."""
        usual = functools.partial(super().change_view, request, object_id, form_url, extra_context)
        return lock_page.lock_page(self, request, object_id, usual)

    def action_checkbox(self, row: SemaphoreRow) -> SafeString:
        """Return what Django does, without a template for each row."""
        return format_html(
            '<input type="checkbox" name="{}" value="{}" class="action-select" aria-label="{}">',
            ACTION_CHECKBOX_NAME,
            row.pk,
            _("Choose %(name)s for an action") % {"name": visible(row.name)},
        )

    @admin.display(description=gettext_lazy("name"), ordering="name")
    def lock_name(self, row: SemaphoreRow) -> SafeString:
        """Return the name, whatever characters it is made of."""
        return users(row.name)

    @admin.display(description=gettext_lazy("kind"), ordering="kind")
    def kind_word(self, row: SemaphoreRow) -> str:
        """Return the kind's own word."""
        return kind_of(row.kind)

    @admin.display(description=gettext_lazy("slots"), ordering=Coalesce("operator_slots", "declared_slots"))
    def cells(self, row: SemaphoreRow) -> SafeString | str:
        """Return the slots as cells, with what an operator must know of all of them in a word."""
        snapshot = snapshot_of(row)
        if snapshot is None:
            return EMPTY
        shown: SafeString | str = drawn(snapshot)
        if snapshot.tokens is not None:
            shown = _("%(tokens)d tokens") % {"tokens": snapshot.tokens}
        badges = []
        if getattr(row, "sqlsem_deadlocked", False):
            badges.append(("bad", _("deadlock")))
        if snapshot.paused:
            badges.append(("draining", _("draining")) if snapshot.draining else ("paused", _("paused")))
        if snapshot.operator_slots is not None:
            badges.append(("operator", _("set by operator")))
        for state, word in badges:
            shown = format_html('{} <span class="sqlsem-badge sqlsem-{}">{}</span>', shown, state, word)
        return shown

    @admin.display(description=gettext_lazy("held"), ordering="held")
    def held(self, row: SemaphoreRow) -> SafeString | str:
        """Return how many slots are taken by live permits, of how many."""
        snapshot = snapshot_of(row)
        if snapshot is None or snapshot.tokens is not None:
            return NONE
        return _("%(held)d of %(slots)d") % {"held": snapshot.held, "slots": snapshot.slots}

    @admin.display(description=gettext_lazy("stale"), ordering="stale")
    def stale(self, row: SemaphoreRow) -> SafeString | str:
        """Return how many slots belong to holders that seem gone."""
        snapshot = snapshot_of(row)
        return _marked(snapshot.stale if snapshot else 0, "stale")

    @admin.display(description=gettext_lazy("waiting"), ordering="waiting")
    def waiting(self, row: SemaphoreRow) -> SafeString | str:
        """Return how many threads and tasks wait."""
        snapshot = snapshot_of(row)
        return _marked(snapshot.waiting if snapshot else 0, "waiting")

    @admin.display(description=gettext_lazy("utilisation"))
    def utilisation(self, row: SemaphoreRow) -> SafeString | str:
        """Return which part of the slots' time they were held in the last hour, as a bar with the number."""
        used = _lately(row).utilisation
        if used is None:
            return NONE
        percent = _percent(used)
        return format_html(
            '<span class="sqlsem-used"><svg class="sqlsem-meter" viewBox="0 0 100 10" preserveAspectRatio="none"'
            ' aria-hidden="true" focusable="false"><rect class="sqlsem-meter-all" width="100" height="10"/>'
            '<rect class="sqlsem-meter-used" width="{}" height="10"/></svg> {}</span>',
            f"{100 * used:.1f}",
            percent,
        )

    @admin.display(description=gettext_lazy("longest hold"))
    def longest_hold(self, row: SemaphoreRow) -> SafeString | str:
        """Return the longest hold of this moment and the last hour."""
        return _length(_lately(row).longest_hold)

    @admin.display(description=gettext_lazy("longest wait"))
    def longest_wait(self, row: SemaphoreRow) -> SafeString | str:
        """Return the longest wait of this moment and the last hour."""
        return _length(_lately(row).longest_wait)

    @admin.display(description=gettext_lazy("turned away"))
    def turned_away(self, row: SemaphoreRow) -> SafeString | str:
        """Return how many got nothing within their timeout in the last hour."""
        return _marked(_lately(row).turned_away or 0, "away")

    @admin.display(description=gettext_lazy("declared"))
    def declared(self, row: SemaphoreRow) -> SafeString | str:
        """Return what the code says, and whether processes disagree."""
        snapshot = snapshot_of(row)
        return declared(snapshot) if snapshot else EMPTY


@admin.register(SlotRow)
class SlotAdmin(OperatorAdmin):
    """Slots, with their holders."""

    list_display = ("name", "slot", "state", "age", "lease_left", "holder", "work", "user_name")
    list_display_links = ("name", "slot")
    list_filter = (StateFilter,)
    list_select_related = ("semaphore",)
    search_fields = ("semaphore__name", "host", "label", "user")
    ordering = ("semaphore__name", "slot")
    actions = (admin_actions.stop, admin_actions.revoke, admin_actions.purge_stale)
    fields = (*list_display, "token")
    readonly_fields = fields

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[SnapshotChangeList]:
        """Read the snapshots of a page at once, not row by row."""
        return SnapshotChangeList

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """Read the snapshot with the row: a page is rendered where no failure of the database is expected."""
        row = super().get_object(request, object_id, from_field)
        if row is not None:
            attach([row])
        return row

    @admin.display(description=gettext_lazy("name"), ordering="semaphore__name")
    def name(self, row: SlotRow) -> str:
        """Return the semaphore's name."""
        return users(row.semaphore.name)

    @admin.display(description=gettext_lazy("state"))
    def state(self, row: SlotRow) -> str:
        """Return whether it is free, held or stale."""
        holder = holder_of(row)
        return str(STATES[holder.state if holder else SlotState.FREE])

    @admin.display(description=gettext_lazy("holder"))
    def holder(self, row: SlotRow) -> str:
        """Return the program that holds it."""
        holder = holder_of(row)
        return program_of(holder) if holder else EMPTY

    @admin.display(description=gettext_lazy("work"))
    def work(self, row: SlotRow) -> str:
        """Return the request, task or command that it is held for."""
        holder = holder_of(row)
        return users(holder.label if holder else "") or EMPTY

    @admin.display(description=gettext_lazy("user"))
    def user_name(self, row: SlotRow) -> str:
        """Return the user behind the work."""
        holder = holder_of(row)
        return users(holder.user if holder else "") or EMPTY

    @admin.display(description=gettext_lazy("age"))
    def age(self, row: SlotRow) -> str:
        """Return for how long it has been held."""
        holder = holder_of(row)
        return held_since(holder) if holder else EMPTY

    @admin.display(description=gettext_lazy("lease left"))
    def lease_left(self, row: SlotRow) -> str:
        """Return how much of the lease is left."""
        holder = holder_of(row)
        return lease_left(holder) if holder else EMPTY


def _lately(row: SemaphoreRow) -> Lately:
    return cast("Any", row).__dict__.get("sqlsem_lately") or Lately()


def _marked(count: int, state: str) -> SafeString:
    return format_html('<span class="sqlsem-count sqlsem-{}">{}</span>', state, count) if count else NONE


def _length(seconds: float | None) -> SafeString | str:
    return duration(seconds).replace(" ", "\N{NO-BREAK SPACE}") if seconds else NONE


def _percent(part: float) -> str:
    if 0 < part < 0.01:
        return _("< 1 %")
    return _("%(percent)d %%") % {"percent": int(100 * part)}
