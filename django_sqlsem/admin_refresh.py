"""The admin's list of the values of ``refresh_every()``: when each was built last, by whom, and when it is due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_sqlsem import queries
from django_sqlsem.admin_display import EMPTY, instant, program
from django_sqlsem.backends.refresh_view import snapshot_of
from django_sqlsem.backends.row_clock import RowClock
from django_sqlsem.durations import duration
from django_sqlsem.models import RefreshRow

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest
    from django.utils.safestring import SafeString

    from django_sqlsem.snapshots import RefreshSnapshot

    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin


@admin.register(RefreshRow)
class RefreshAdmin(ModelAdmin):
    """Refreshed values, read-only."""

    list_display = ("name", "built", "built_by", "work", "took", "period", "due")
    list_per_page = 100
    show_full_result_count = False
    search_fields = ("name", "host", "label")
    ordering = ("name",)
    fields = list_display
    readonly_fields = list_display

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Read from the database that keeps the locks."""
        return super().get_queryset(request).using(queries.locks_database())

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Rows are made by builds."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Rows are changed by builds only."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """A row that is gone is a value that is gone."""
        return False

    @admin.display(description=gettext_lazy("built"))
    def built(self, row: RefreshRow) -> SafeString | str:
        """Return how long ago it was built."""
        found = _snapshot(row)
        return EMPTY if found.age is None or found.built_at is None else instant(found.age, found.built_at)

    @admin.display(description=gettext_lazy("built by"))
    def built_by(self, row: RefreshRow) -> str:
        """Return the program that built it."""
        return program(row.host, row.pid, row.thread) if row.built_us is not None else EMPTY

    @admin.display(description=gettext_lazy("work"))
    def work(self, row: RefreshRow) -> str:
        """Return the request, task or command in which it was built."""
        return row.label or EMPTY

    @admin.display(description=gettext_lazy("build took"))
    def took(self, row: RefreshRow) -> str:
        """Return how long the build took."""
        found = _snapshot(row)
        return EMPTY if found.took is None else duration(found.took)

    @admin.display(description=gettext_lazy("every"))
    def period(self, row: RefreshRow) -> str:
        """Return the period."""
        return duration(row.period_us / 1e6)

    @admin.display(description=gettext_lazy("due"))
    def due(self, row: RefreshRow) -> str:
        """Return when the next caller rebuilds it, and whether the last build failed."""
        found = _snapshot(row)
        when = _("in %(time)s") % {"time": duration(found.due_in)} if found.due_in else _("now")
        if found.failed is None:
            return when
        return _("%(when)s, failed %(age)s ago") % {"when": when, "age": duration(found.failed)}


def _snapshot(row: RefreshRow) -> RefreshSnapshot:
    known: RefreshSnapshot | None = row.__dict__.get("sqlsem")
    if known is None:
        known = row.__dict__["sqlsem"] = snapshot_of(RowClock.of(queries.locks_database()), row)
    return known
