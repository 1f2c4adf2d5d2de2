"""What all lists of the locks in the admin have in common, and those of slots, values, claimed rows and transactions.

They read the locks database and never change rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, reverse
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_sqlsem import queries
from django_sqlsem.admin import actions, live
from django_sqlsem.admin.display import EMPTY, STATES, held_since, instant, lease_left, program, program_of, users
from django_sqlsem.core.durations import duration
from django_sqlsem.models import ClaimRow, RefreshRow, SemaphoreRow, SlotRow, TransactionLockRow
from django_sqlsem.queries import Reading
from django_sqlsem.snapshots import HolderSnapshot, RefreshSnapshot, SlotState


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
    action_form = actions.ActionForm

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
            actions.check_selected(self, request)
            context = {"sqlsem_tabs": tabs(self, request), **(extra_context or {})}
            response = super().changelist_view(request, context)
            self._note(request)
            return response
        except actions.NotDoneError as why:
            self.message_user(request, *why.args)
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

    def has_drain_permission(self, request: HttpRequest) -> bool:
        """To drain is to pause and to ask holders to stop."""
        return self.has_configure_permission(request) and self.has_stop_permission(request)


class StateFilter(admin.SimpleListFilter):
    """Keeps slots in a state, or slots of names that are waited for."""

    title = gettext_lazy("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("held", _("held")), ("stale", _("stale")), ("waiting", _("waited for"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        state = cast("Any", self.value())
        return queryset if state is None else queryset.filter(live.reading_of(request).slots_in_state(state))


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
