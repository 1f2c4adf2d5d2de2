"""The demo's start page: the slots, and what the counter says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.shortcuts import render

from django_sqlsem import semaphore
from example_project.demo import meter

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse


def index(request: HttpRequest) -> HttpResponse:
    """Say what is going on."""
    status = semaphore("reports", slots=3).status()
    holders = {holder.slot: holder for holder in status.holders}
    places = [(slot, holders.get(slot)) for slot in range(1, status.slots + 1)]
    return render(request, "demo/index.html", {"status": status, "places": places, "meter": meter.read()})
