"""The lists beside that of the locks: slots, refreshed values, claimed rows, and transaction locks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_sqlsem.admin import actions
from django_sqlsem.admin.base import OperatorAdmin, column
from django_sqlsem.admin.display import EMPTY, STATES, held_since, instant, lease_left, program, program_of, users
from django_sqlsem.admin.live import reading_of
from django_sqlsem.core.durations import duration
from django_sqlsem.models import ClaimRow, RefreshRow, SlotRow, TransactionLockRow
from django_sqlsem.queries import Reading
from django_sqlsem.snapshots import HolderSnapshot, RefreshSnapshot, SlotState


class StateFilter(admin.SimpleListFilter):
    """Keeps slots in a state, or slots of names that are waited for."""

    title = gettext_lazy("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("held", _("held")), ("stale", _("stale")), ("waiting", _("waited for"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        state = cast("Any", self.value())
        return queryset if state is None else queryset.filter(reading_of(request).slots_in_state(state))


def worker(row: ClaimRow | RefreshRow) -> str:
    """Return the program that works on a row."""
    return program(row.host, row.pid, row.thread)


@admin.register(SlotRow)
class SlotAdmin(OperatorAdmin):
    """Slots, with their holders."""

    list_display = ("name", "slot", "state", "age", "lease_left", "holder", "work", "user_name")
    list_display_links = ("name", "slot")
    list_filter = (StateFilter,)
    list_select_related = ("semaphore",)
    search_fields = ("semaphore__name", "host", "label", "user")
    ordering = ("semaphore__name", "slot")
    actions = (actions.stop, actions.revoke, actions.purge_stale)
    fields = (*list_display, "token")

    def read(self, reading: Reading, rows: list[SlotRow]) -> Mapping[Any, HolderSnapshot]:
        """Return who holds slots."""
        snapshots = reading.by_name(row.semaphore.name for row in rows)
        holders = {
            (name, slot): holder
            for name, snapshot in snapshots.items()
            for holder in snapshot.holders
            for slot in holder.numbers
        }
        places = ((row.pk, (row.semaphore.name, row.slot)) for row in rows)
        return {key: holders[place] for key, place in places if place in holders}

    name = column(gettext_lazy("name"), lambda row: users(row.semaphore.name), ordering="semaphore__name")
    state = column(gettext_lazy("state"), lambda row: STATES[row.known.state if row.known else SlotState.FREE])
    age = column(gettext_lazy("age"), lambda row: held_since(row.known) if row.known else EMPTY)
    lease_left = column(gettext_lazy("lease left"), lambda row: lease_left(row.known) if row.known else EMPTY)
    holder = column(gettext_lazy("holder"), lambda row: program_of(row.known) if row.known else EMPTY)
    work = column(gettext_lazy("work"), lambda row: (row.known and users(row.known.label)) or EMPTY)
    user_name = column(gettext_lazy("user"), lambda row: (row.known and users(row.known.user)) or EMPTY)


@admin.register(RefreshRow)
class RefreshAdmin(OperatorAdmin):
    """Refreshed values."""

    list_display = ("name", "built", "built_by", "work", "took", "period", "due")
    search_fields = ("name", "host", "label")
    ordering = ("name",)

    def read(self, reading: Reading, rows: list[RefreshRow]) -> Mapping[Any, Any]:
        return reading.refreshed(rows)

    built = column(
        gettext_lazy("built"), lambda row: instant(row.known.age, row.known.built_at) if row.known.built_at else EMPTY
    )
    built_by = column(gettext_lazy("built by"), lambda row: worker(row) if row.known.built_at else EMPTY)
    work = column(gettext_lazy("work"), lambda row: row.label or EMPTY)
    took = column(gettext_lazy("build took"), lambda row: EMPTY if row.known.took is None else duration(row.known.took))
    period = column(gettext_lazy("every"), lambda row: duration(row.known.period))
    due = column(gettext_lazy("due"), lambda row: _due(row.known))


def _due(found: RefreshSnapshot) -> str:
    """Return when the next caller rebuilds a value, and whether the last build failed."""
    when = _("in %(time)s") % {"time": duration(found.due_in)} if found.due_in else _("now")
    if found.failed is None:
        return when
    return _("%(when)s, failed %(age)s ago") % {"when": when, "age": duration(found.failed)}


@admin.register(ClaimRow)
class ClaimAdmin(OperatorAdmin):
    """Claimed rows, with their workers. A worker's slot, and whether it is stale, is in the list of slots."""

    list_display = ("model", "object_pk", "field", "status", "since", "worker", "work", "slot")
    list_display_links = ("model", "object_pk")
    list_filter = ("model",)
    search_fields = ("model", "object_pk", "host", "label")
    ordering = ("id",)
    fields = (*list_display, "from_status", "token")

    def read(self, reading: Reading, rows: list[ClaimRow]) -> Mapping[Any, Any]:
        """Return for how long rows have been claimed, and since when."""
        return reading.claimed(rows)

    since = column(gettext_lazy("since"), lambda row: instant(*row.known), ordering="claimed_us")
    worker = column(gettext_lazy("worker"), worker)
    work = column(gettext_lazy("work"), lambda row: row.label or EMPTY)


@admin.register(TransactionLockRow)
class TransactionLockAdmin(OperatorAdmin):
    """Names that transactions lock. Who has one only the database's server knows: to look would be to lock."""

    list_display = ("name",)
    search_fields = ("name",)
    ordering = ("name",)
