"""Two views that share three slots with the tasks. A busy one answers 503 with ``Retry-After`` by itself."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from django.shortcuts import render

from django_sqlsem import semaphore
from example_project.demo import meter
from example_project.reports.work import seconds_of_work

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

REPORTS = semaphore("reports", slots=3)


@semaphore("reports", slots=3, timeout=0.3)
def monthly_report(request: HttpRequest) -> HttpResponse:
    """Make a report in a sync view: wait for a slot for 0.3 seconds at most."""
    with meter.counted():
        time.sleep(seconds_of_work(request.GET.get("seconds")))
    return render(request, "reports/report.html", {"title": "Monthly report"})


@semaphore("reports", slots=3, timeout=0.3)
async def yearly_report(request: HttpRequest) -> HttpResponse:
    """Make a report in an async view: the same slots, and no thread is held while it waits."""
    async with meter.acounted():
        await asyncio.sleep(seconds_of_work(request.GET.get("seconds")))
    return render(request, "reports/report.html", {"title": "Yearly report"})


def index(request: HttpRequest) -> HttpResponse:
    """Say what is going on."""
    status = REPORTS.status()
    holders = {holder.slot: holder for holder in status.holders}
    places = [(slot, holders.get(slot)) for slot in range(1, status.slots + 1)]
    return render(request, "reports/index.html", {"status": status, "places": places, "meter": meter.read()})
