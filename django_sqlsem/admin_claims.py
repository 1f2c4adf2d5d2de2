"""The admin's list of claimed rows: which row of which model, since when, and by whom. It changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import BigIntegerField, Value
from django.utils.translation import gettext_lazy

from django_sqlsem import queries
from django_sqlsem.admin_display import EMPTY, instant, program
from django_sqlsem.backends.row_clock import RowClock
from django_sqlsem.models import ClaimRow

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest
    from django.utils.safestring import SafeString

    ModelAdmin = admin.ModelAdmin[ClaimRow]
else:
    ModelAdmin = admin.ModelAdmin


@admin.register(ClaimRow)
class ClaimAdmin(ModelAdmin):
    """Claimed rows, with their workers. A worker's slot, and whether it is stale, is in the list of slots."""

    list_display = ("model", "object_pk", "field", "status", "since", "worker", "work", "slot")
    list_display_links = ("model", "object_pk")
    list_filter = ("model",)
    list_per_page = 100
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    search_fields = ("model", "object_pk", "host", "label")
    ordering = ("id",)
    fields = (*list_display, "from_status", "token")
    readonly_fields = fields

    def get_queryset(self, request: HttpRequest) -> QuerySet[ClaimRow]:
        """Read from the database that keeps the locks, with its clock."""
        alias = queries.locks_database()
        now = Value(RowClock.of(alias).now, output_field=BigIntegerField())
        return super().get_queryset(request).using(alias).annotate(now_us=now)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Rows are made by claiming."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Rows are changed by their workers only."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Rows of dead workers are given back by the next claim."""
        return False

    @admin.display(description=gettext_lazy("since"), ordering="claimed_us")
    def since(self, row: ClaimRow) -> SafeString:
        """Return how long ago it was claimed."""
        known: Any = row
        clock = RowClock(known.now_us, row.boot_id)
        age = max(0.0, clock.age(row.claimed_us, row.boot_id))
        return instant(age, clock.at(age))

    @admin.display(description=gettext_lazy("worker"))
    def worker(self, row: ClaimRow) -> str:
        """Return the program that works on it."""
        return program(row.host, row.pid, row.thread)

    @admin.display(description=gettext_lazy("work"))
    def work(self, row: ClaimRow) -> str:
        """Return the request, task or command that does so."""
        return row.label or EMPTY
