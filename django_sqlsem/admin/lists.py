"""The lists beside that of the locks: slots, refreshed values, claimed rows, and transaction locks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from django.contrib import admin
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_sqlsem.admin import actions
from django_sqlsem.admin.base import OperatorAdmin
from django_sqlsem.admin.display import EMPTY, STATES, held_since, instant, lease_left, program, program_of, users
from django_sqlsem.admin.live import reading_of
from django_sqlsem.core.durations import duration
from django_sqlsem.models import ClaimRow, RefreshRow, SlotRow, TransactionLockRow
from django_sqlsem.snapshots import SlotState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from django.db.models import QuerySet
    from django.http import HttpRequest
    from django.utils.safestring import SafeString

    from django_sqlsem.queries import Reading
    from django_sqlsem.snapshots import HolderSnapshot


class StateFilter(admin.SimpleListFilter):
    """Keeps slots in a state, or slots of names that are waited for."""

    title = gettext_lazy("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the states."""
        return [("held", _("held")), ("stale", _("stale")), ("waiting", _("waited for"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Ask the query layer, whose clock is the database's."""
        state = cast("Any", self.value())
        return queryset if state is None else queryset.filter(reading_of(request).slots_in_state(state))


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

    @admin.display(description=gettext_lazy("name"), ordering="semaphore__name")
    def name(self, row: SlotRow) -> str:
        return users(row.semaphore.name)

    @admin.display(description=gettext_lazy("state"))
    def state(self, row: Any) -> str:
        return str(STATES[row.known.state if row.known else SlotState.FREE])

    @admin.display(description=gettext_lazy("age"))
    def age(self, row: Any) -> str:
        return held_since(row.known) if row.known else EMPTY

    @admin.display(description=gettext_lazy("lease left"))
    def lease_left(self, row: Any) -> str:
        return lease_left(row.known) if row.known else EMPTY

    @admin.display(description=gettext_lazy("holder"))
    def holder(self, row: Any) -> str:
        return program_of(row.known) if row.known else EMPTY

    @admin.display(description=gettext_lazy("work"))
    def work(self, row: Any) -> str:
        return users(row.known.label if row.known else "") or EMPTY

    @admin.display(description=gettext_lazy("user"))
    def user_name(self, row: Any) -> str:
        return users(row.known.user if row.known else "") or EMPTY


@admin.register(RefreshRow)
class RefreshAdmin(OperatorAdmin):
    """Refreshed values."""

    list_display = ("name", "built", "built_by", "work", "took", "period", "due")
    search_fields = ("name", "host", "label")
    ordering = ("name",)

    def read(self, reading: Reading, rows: list[RefreshRow]) -> Mapping[Any, Any]:
        """Return the snapshots."""
        return reading.refreshed(rows)

    @admin.display(description=gettext_lazy("built"))
    def built(self, row: Any) -> str:
        return EMPTY if row.known.built_at is None else instant(row.known.age, row.known.built_at)

    @admin.display(description=gettext_lazy("built by"))
    def built_by(self, row: RefreshRow) -> str:
        return EMPTY if row.built_us is None else program(row.host, row.pid, row.thread)

    @admin.display(description=gettext_lazy("work"))
    def work(self, row: RefreshRow) -> str:
        return row.label or EMPTY

    @admin.display(description=gettext_lazy("build took"))
    def took(self, row: Any) -> str:
        return EMPTY if row.known.took is None else duration(row.known.took)

    @admin.display(description=gettext_lazy("every"))
    def period(self, row: RefreshRow) -> str:
        return duration(row.period_us / 1e6)

    @admin.display(description=gettext_lazy("due"))
    def due(self, row: Any) -> str:
        when = _("in %(time)s") % {"time": duration(row.known.due_in)} if row.known.due_in else _("now")
        if row.known.failed is None:
            return when
        return _("%(when)s, failed %(age)s ago") % {"when": when, "age": duration(row.known.failed)}


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

    @admin.display(description=gettext_lazy("since"), ordering="claimed_us")
    def since(self, row: Any) -> SafeString:
        return instant(*row.known)

    @admin.display(description=gettext_lazy("worker"))
    def worker(self, row: ClaimRow) -> str:
        return program(row.host, row.pid, row.thread)

    @admin.display(description=gettext_lazy("work"))
    def work(self, row: ClaimRow) -> str:
        return row.label or EMPTY


@admin.register(TransactionLockRow)
class TransactionLockAdmin(OperatorAdmin):
    """Names that transactions lock. Who has one only the database's server knows: to look would be to lock."""

    list_display = ("name",)
    search_fields = ("name",)
    ordering = ("name",)
