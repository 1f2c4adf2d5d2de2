"""A small project as it is deployed: one at a time. ``billing_after`` is its next version."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import path

from django_sqlsem import mutex
from tests.places.billing import bill
from tests.places.views import ping


@mutex("billing", timeout=60)
def billing(request: HttpRequest) -> HttpResponse:
    """Bill somebody, alone."""
    return bill(alone=True)


urlpatterns = [path("ping", ping), path("billing", billing)]
