"""Lists that only show: refreshed values, claimed rows, and transaction locks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_sqlsem import queries
from django_sqlsem.admin.base import OperatorAdmin
from django_sqlsem.admin.display import EMPTY, instant, program
from django_sqlsem.core.durations import duration
from django_sqlsem.models import ClaimRow, RefreshRow, TransactionLockRow

if TYPE_CHECKING:
    import datetime
    from collections.abc import Collection, Mapping

    from django.http import HttpRequest
    from django.utils.functional import _StrPromise
    from django.utils.safestring import SafeString

    from django_sqlsem.snapshots import RefreshSnapshot


class ReadChangeList(ChangeList):
    """A list that reads what its model admin knows of all rows of a page at once."""

    def get_results(self, request: HttpRequest) -> None:
        """Read the page, and then what belongs to its rows."""
        super().get_results(request)
        self.result_list = list(self.result_list)
        model_admin: Any = self.model_admin
        found = model_admin.read(self.result_list)
        for row in self.result_list:
            row.sqlsem = found.get(row.pk)


def known(model_admin: Any, row: Any) -> Any:
    """Return what belongs to a row; it is read now if the row is not of a list."""
    if not hasattr(row, "sqlsem"):
        row.sqlsem = model_admin.read([row]).get(row.pk)
    return row.sqlsem


@admin.register(RefreshRow)
class RefreshAdmin(OperatorAdmin):
    """Refreshed values, read-only."""

    list_display = ("name", "built", "built_by", "work", "took", "period", "due")
    search_fields = ("name", "host", "label")
    ordering = ("name",)
    fields = list_display
    readonly_fields = list_display

    @admin.display(description=gettext_lazy("built"))
    def built(self, row: RefreshRow) -> SafeString | str:
        """Return how long ago it was built."""
        found = known(self, row)
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
        found = known(self, row)
        return EMPTY if found.took is None else duration(found.took)

    @admin.display(description=gettext_lazy("every"))
    def period(self, row: RefreshRow) -> str:
        """Return the period."""
        return duration(row.period_us / 1e6)

    @admin.display(description=gettext_lazy("due"))
    def due(self, row: RefreshRow) -> str:
        """Return when the next caller rebuilds it, and whether the last build failed."""
        found = known(self, row)
        when = _("in %(time)s") % {"time": duration(found.due_in)} if found.due_in else _("now")
        if found.failed is None:
            return when
        return _("%(when)s, failed %(age)s ago") % {"when": when, "age": duration(found.failed)}

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ReadChangeList]:
        """Read a page at once."""
        return ReadChangeList

    def read(self, rows: Collection[RefreshRow]) -> Mapping[Any, RefreshSnapshot]:
        """Return the snapshots of rows by their keys."""
        return queries.refreshed(rows)


@admin.register(ClaimRow)
class ClaimAdmin(OperatorAdmin):
    """Claimed rows, with their workers. A worker's slot, and whether it is stale, is in the list of slots."""

    list_display = ("model", "object_pk", "field", "status", "since", "worker", "work", "slot")
    list_display_links = ("model", "object_pk")
    list_filter = ("model",)
    search_fields = ("model", "object_pk", "host", "label")
    ordering = ("id",)
    fields = (*list_display, "from_status", "token")
    readonly_fields = fields

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ReadChangeList]:
        """Read a page at once."""
        return ReadChangeList

    def read(self, rows: Collection[ClaimRow]) -> Mapping[Any, tuple[float, datetime.datetime]]:
        """Return for how long rows have been claimed, and since when, by their keys."""
        return queries.claimed(rows)

    @admin.display(description=gettext_lazy("since"), ordering="claimed_us")
    def since(self, row: ClaimRow) -> SafeString:
        """Return how long ago it was claimed."""
        return instant(*known(self, row))

    @admin.display(description=gettext_lazy("worker"))
    def worker(self, row: ClaimRow) -> str:
        """Return the program that works on it."""
        return program(row.host, row.pid, row.thread)

    @admin.display(description=gettext_lazy("work"))
    def work(self, row: ClaimRow) -> str:
        """Return the request, task or command that does so."""
        return row.label or EMPTY


_HELD: Final[dict[str | None, _StrPromise]] = {
    "free": gettext_lazy("free"),
    "shared": gettext_lazy("shared"),
    "held": gettext_lazy("held"),
    None: gettext_lazy("not known"),
}


@admin.register(TransactionLockRow)
class TransactionLockAdmin(OperatorAdmin):
    """Transaction locks. Who has one is known to the database's server alone."""

    list_display = ("name", "held")
    search_fields = ("name",)
    ordering = ("name",)
    fields = list_display
    readonly_fields = list_display

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ReadChangeList]:
        """Read a page at once."""
        return ReadChangeList

    def read(self, rows: Collection[TransactionLockRow]) -> Mapping[Any, str | None]:
        """Return how rows are locked, by their keys: all of a page are tried at once."""
        held = queries.transaction_locks_held([row.pk for row in rows]) or {}
        return {row.pk: held.get(row.pk) for row in rows}

    @admin.display(description=gettext_lazy("held now"))
    def held(self, row: TransactionLockRow) -> str:
        """Return whether a transaction has it."""
        return str(_HELD.get(known(self, row), _("not known")))
