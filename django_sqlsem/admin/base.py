"""What all pages of the locks in the admin have in common: they read the locks database and never change rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.db import connections, transaction
from django.http import HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext as _

from django_sqlsem import queries
from django_sqlsem.admin import live, lock_page
from django_sqlsem.admin.confirm import ActionForm, ChangedError, DamagedFormError, check_selected, report_changed

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


class OperatorAdmin(ModelAdmin[Any]):
    """Shows rows of the locks database and changes nothing but through actions, which ask first."""

    list_per_page = 100
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # each count would read all that is held
    action_form = ActionForm

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Read from the database that keeps the locks."""
        return super().get_queryset(request).using(queries.locks_database())

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
        lock_page.refuse(self, request)
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
        """The library makes the rows: by acquiring, claiming, building."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Only actions change something, and the library."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """``manage.py locks purge --idle`` deletes idle names."""
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
