"""What all lists of the locks in the admin have in common: they read the locks database and never change rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, reverse
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from django_sqlsem import queries
from django_sqlsem.admin import actions, confirm, live
from django_sqlsem.models import ClaimRow, RefreshRow, SemaphoreRow, SlotRow, TransactionLockRow
from django_sqlsem.queries import Reading


def column(text: Any, show: Callable[[Any], Any], ordering: Any = None) -> Any:
    """Return a column of a list, or a field of a page: what it shows of a row, under these words."""
    return admin.display(lambda _admin, row: show(row), description=text, ordering=ordering)


#: The models of the lists, in the order of their tabs.
_TABS: Final = (SemaphoreRow, SlotRow, ClaimRow, RefreshRow, TransactionLockRow)


def tabs(model_admin: Any, request: HttpRequest, current: str = "") -> list[tuple[str, str, bool]]:
    """Return the lists that somebody may see as links: words, address, and whether it is the one that is shown.

    ``current``: which one this is, if it is not that of a model.
    """
    registry = model_admin.admin_site._registry
    current = current or model_admin.opts.model_name
    shown = [registry[model] for model in _TABS if model in registry]
    shown = [each for each in shown if each.has_view_permission(request)]
    found = [
        (capfirst(each.opts.verbose_name_plural), live.address(each, "changelist"), each.opts.model_name == current)
        for each in shown
    ]
    if shown and shown[0].model is SemaphoreRow:
        found.append((_("Audit log"), live.address(shown[0], "audit"), current == "audit"))
    return found


class ReadChangeList(ChangeList):
    """A list that reads what its model admin knows of all rows of a page at once."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        count_all(self)
        self.result_list = self.model_admin.known(request, self.result_list)  # type: ignore[attr-defined]


def count_all(found: ChangeList) -> None:
    """Where nothing is searched or filtered, what is counted is all: there is no more to show."""
    if not (found.query or found.has_active_filters):
        found.full_result_count = found.result_count


class OperatorAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Shows rows of the locks database and changes nothing but through actions, which ask first.

    A list declares its columns, and what there is to know of rows besides their fields: ``read()`` returns it, and each
    row carries it as ``known``.
    """

    list_per_page = 100
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # each count would read all that is held
    action_form = confirm.ActionForm

    def get_model_perms(self, request: HttpRequest) -> dict[str, bool]:
        """Stay out of the menus where the overview is in them: this list is a tab of it."""
        perms = super().get_model_perms(request)
        overview = self.admin_site._registry.get(SemaphoreRow)
        if overview in (None, self) or not overview.has_view_permission(request):
            return perms
        return dict.fromkeys(perms, False)

    def read(self, reading: Reading, rows: list[Any]) -> Mapping[Any, Any]:
        """Return what is known of rows, by their keys."""
        return {}

    def known(self, request: HttpRequest, rows: Iterable[Any]) -> list[Any]:
        """Return the rows with what is known of them, all read at once."""
        found = list(rows)
        known = self.read(live.reading_of(request), found)
        for row in found:
            row.known = known.get(row.pk)
        return found

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).using(queries.locks_database())

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """Read what is known with the row: a page is rendered where no failure of the database is expected."""
        row = self.find(request, object_id, from_field)
        return row if row is None else self.known(request, [row])[0]

    def find(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """Return the row alone."""
        return super().get_object(request, object_id, from_field)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return ReadChangeList

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Show of one row what the list shows, unless fields are declared."""
        return self.fields or self.list_display

    def get_urls(self) -> list[URLPattern]:
        """Say it if the locks database fails, and keep out of ATOMIC_REQUESTS: an act counts at once."""
        urls = [*self.own_urls(), *super().get_urls()]
        for url in urls:
            url.callback = live.guarded(self, url.callback)
            for alias in connections:
                transaction.non_atomic_requests(using=alias)(url.callback)
        return urls

    def own_urls(self) -> list[URLPattern]:
        """Return what comes before Django's own addresses: the last of those takes any."""
        return []

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Refuse acts that are not allowed, and say it if a confirmation comes back damaged."""
        actions.refuse(self, request)
        try:
            confirm.check_selected(self, request)
            context = {"sqlsem_tabs": tabs(self, request), **(extra_context or {})}
            response = super().changelist_view(request, context)
            self._note(request)
            return response
        except confirm.DamagedFormError:
            self.message_user(request, _("The form came back damaged: nothing was done."), messages.ERROR)
        except confirm.ChangedError as error:
            confirm.report_changed(self, request, [error.args])
        return HttpResponseRedirect(reverse("admin:index", current_app=self.admin_site.name))

    def render_change_form(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Say what the page cannot show."""
        self._note(request)
        return super().render_change_form(request, *args, **kwargs)

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show what was done to a row, if the user may see rows: Django first tells whether there is this one."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return super().history_view(request, object_id, extra_context)

    def _note(self, request: HttpRequest) -> None:
        if request.method == "GET" and not live.is_fragment(request):
            for note in queries.notes():
                self.message_user(request, note, messages.INFO)

    def _never(self, request: HttpRequest, obj: Any = None) -> bool:
        """The library alone makes and changes rows, and ``manage.py locks purge --idle`` deletes idle names."""
        return False

    has_add_permission = has_change_permission = has_delete_permission = _never

    def has_stop_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("sqlsem.stop_semaphorerow")

    def has_revoke_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("sqlsem.revoke_semaphorerow")

    def has_configure_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("sqlsem.configure_semaphorerow")

    def allowed(self, request: HttpRequest) -> tuple[bool, ...]:
        """Return what somebody may do, which is what the same view differs by."""
        checks = (self.has_stop_permission, self.has_revoke_permission, self.has_configure_permission)
        return tuple(check(request) for check in (*checks, self.has_drain_permission))

    def has_drain_permission(self, request: HttpRequest) -> bool:
        """To drain is to pause and to ask holders to stop."""
        return self.has_configure_permission(request) and self.has_stop_permission(request)
