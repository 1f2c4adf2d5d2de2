"""The admin's list of transaction locks: the names that transactions have locked, and whether one does so now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_sqlsem import queries
from django_sqlsem.models import TransactionLockRow

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest
    from django.utils.functional import _StrPromise

    ModelAdmin = admin.ModelAdmin[TransactionLockRow]
else:
    ModelAdmin = admin.ModelAdmin

_HELD: Final[dict[str | None, _StrPromise]] = {
    "free": gettext_lazy("free"),
    "shared": gettext_lazy("shared"),
    "held": gettext_lazy("held"),
    None: gettext_lazy("not known"),
}


class ProbedChangeList(ChangeList):
    """A list whose rows carry how they were held when the page was read, all tried at once."""

    def get_results(self, request: HttpRequest) -> None:
        """Read the page, and then try its locks."""
        super().get_results(request)
        rows: list[Any] = list(self.result_list)
        held = queries.transaction_locks_held([row.pk for row in rows]) or {}
        for row in rows:
            row.sqlsem_held = held.get(row.pk)
        self.result_list = rows


@admin.register(TransactionLockRow)
class TransactionLockAdmin(ModelAdmin):
    """Transaction locks. Who has one is known to the database's server alone."""

    list_display = ("name", "held")
    list_per_page = 100
    show_full_result_count = False
    search_fields = ("name",)
    ordering = ("name",)
    fields = list_display
    readonly_fields = list_display

    def get_queryset(self, request: HttpRequest) -> QuerySet[TransactionLockRow]:
        """Read from the database that keeps the locks."""
        return super().get_queryset(request).using(queries.locks_database())

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ProbedChangeList]:
        """Try the locks of a page at once."""
        return ProbedChangeList

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Rows are made by the first transaction that wants the lock."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """There is nothing to change."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Rows that nobody has locked are deleted by ``purge_transaction_locks()``."""
        return False

    @admin.display(description=gettext_lazy("held now"))
    def held(self, row: TransactionLockRow) -> str:
        """Return whether a transaction has it."""
        known: Any = row
        if not hasattr(known, "sqlsem_held"):
            known.sqlsem_held = (queries.transaction_locks_held([row.pk]) or {}).get(row.pk)
        return str(_HELD.get(known.sqlsem_held, _("not known")))
