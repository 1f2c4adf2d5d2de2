"""A view with a lock for each user, of which a decorator fills in the name."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import path

from django_sqlsem import semaphore
from tests.places.views import held, ping


@semaphore("sync:{user}", slots=2, timeout=0)
def sync(request: HttpRequest, user: int) -> HttpResponse:
    """Two at a time for each user."""
    return held(request) if "id" in request.GET else HttpResponse("synchronized")


urlpatterns = [path("ping", ping), path("sync/<int:user>", sync)]
