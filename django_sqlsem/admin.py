"""The admin, for operators: read-only lists of semaphores and slots, and actions that ask first."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin, messages
from django.db import connections, transaction
from django.http import HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

import django_sqlsem.admin_refresh
import django_sqlsem.admin_transaction_locks  # noqa: F401
from django_sqlsem import admin_actions, admin_claims, admin_configure, queries
from django_sqlsem.admin_confirm import ActionForm, ChangedError, DamagedFormError, check_selected, report_changed
from django_sqlsem.admin_display import (
    EMPTY,
    STATES,
    SnapshotChangeList,
    StateFilter,
    attach,
    held_since,
    holder_of,
    lease_left,
    program_of,
    users,
)
from django_sqlsem.dashboard import acts, live, page, snapshot_json
from django_sqlsem.dashboard.columns import COLUMNS, OverviewColumns
from django_sqlsem.dashboard.overview import (
    KindFilter,
    OverviewChangeList,
    OverviewStateFilter,
    overview_answer,
    searched,
)
from django_sqlsem.models import SemaphoreRow, SlotRow
from django_sqlsem.snapshots import SlotState

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern

    ModelAdmin = admin.ModelAdmin
else:

    class ModelAdmin(admin.ModelAdmin):
        """Django's class does not take a type parameter when it runs."""

        def __class_getitem__(cls, model: Any) -> Any:
            return cls


#: Registered by its import.
ClaimAdmin = admin_claims.ClaimAdmin


class OperatorAdmin(ModelAdmin[Any]):
    """Shows rows of the locks database as snapshots and changes nothing but through actions."""

    list_per_page = 100
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # each count would read all that is held
    list_filter: ClassVar[tuple[type[admin.SimpleListFilter], ...]] = (StateFilter,)
    action_form = ActionForm

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Read from the database that keeps the locks."""
        return super().get_queryset(request).using(queries.locks_database())

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[SnapshotChangeList]:
        """Read one snapshot per page, not per row."""
        return SnapshotChangeList

    def get_urls(self) -> list[URLPattern]:
        """Keep the requests out of ATOMIC_REQUESTS: an act counts at once, whatever becomes of the request."""
        urls = [*self.own_urls(), *super().get_urls()]
        for url in urls:
            for alias in connections:
                transaction.non_atomic_requests(using=alias)(url.callback)
        return urls

    def own_urls(self) -> list[URLPattern]:
        """Return what comes before Django's own addresses, whose last one would take any."""
        return []

    @live.guarded
    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Say it if the locks database fails, or a confirmation comes back damaged."""
        acts.refuse(self, request)
        try:
            check_selected(self, request)
            response = super().changelist_view(request, extra_context)
            self._note(request)
            return response
        except DamagedFormError:
            self.message_user(request, _("The form came back damaged: nothing was done."), messages.ERROR)
        except ChangedError as error:
            report_changed(self, request, [str(error)])
        return HttpResponseRedirect(reverse("admin:index", current_app=self.admin_site.name))

    @live.guarded
    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Say it if the locks database fails."""
        return super().change_view(request, object_id, form_url, extra_context)

    @live.guarded
    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Say it if the locks database fails."""
        return super().history_view(request, object_id, extra_context)

    @live.guarded
    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Refuse, or say it if the locks database fails."""
        return super().delete_view(request, object_id, extra_context)

    def render_change_form(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Say what the page cannot show."""
        self._note(request)
        return super().render_change_form(request, *args, **kwargs)

    def _note(self, request: HttpRequest) -> None:
        if request.method == "GET" and not live.is_fragment(request):
            for note in queries.notes():
                self.message_user(request, note, messages.INFO)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Rows are made by acquiring."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Rows are changed by actions only."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Idle names are deleted by ``manage.py locks purge --idle``."""
        return False

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Whether the user may ask to stop, revoke and purge."""
        return request.user.has_perm("sqlsem.operate_semaphorerow")

    def has_configure_permission(self, request: HttpRequest) -> bool:
        """Whether the user may set slots, pause and resume."""
        return request.user.has_perm("sqlsem.configure_semaphorerow")

    def has_drain_permission(self, request: HttpRequest) -> bool:
        """Whether the user may drain, which is to pause and to ask holders to stop."""
        return self.has_configure_permission(request) and self.has_operate_permission(request)


@admin.register(SemaphoreRow)
class SemaphoreAdmin(OverviewColumns, OperatorAdmin):
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
        admin_configure.set_slots,
        admin_configure.pause,
        admin_configure.resume,
        admin_configure.drain,
    )
    fields = ("name", "kind_word", "cells", "held", "stale", "waiting", "declared")
    readonly_fields = fields

    class Media:
        css = {"all": ("sqlsem/locks.css", "sqlsem/overview.css")}

    def own_urls(self) -> list[URLPattern]:
        """Add where the buttons on the page of one lock lead, and the same as JSON."""
        return [*acts.urls(self), *snapshot_json.urls(self), *super().own_urls()]

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
        return page.lock_page(self, request, object_id, usual)


@admin.register(SlotRow)
class SlotAdmin(OperatorAdmin):
    """Slots, with their holders."""

    list_display = ("name", "slot", "state", "age", "lease_left", "holder", "work", "user_name")
    list_display_links = ("name", "slot")
    list_select_related = ("semaphore",)
    search_fields = ("semaphore__name", "host", "label", "user")
    ordering = ("semaphore__name", "slot")
    actions = (admin_actions.stop, admin_actions.revoke, admin_actions.purge_stale)
    fields = (*list_display, "token")
    readonly_fields = fields

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
