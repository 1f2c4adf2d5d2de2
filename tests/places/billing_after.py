"""The small project of ``billing_before`` in its next version: three at a time."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import path

from django_sqlsem import semaphore
from tests.places.billing import bill
from tests.places.views import ping


@semaphore("billing", slots=3, timeout=60)
def billing(request: HttpRequest) -> HttpResponse:
    """Bill somebody, beside two others at most."""
    return bill(alone=False)


urlpatterns = [path("ping", ping), path("billing", billing)]
