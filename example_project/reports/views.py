"""Two views that share three slots with the tasks. A busy one answers 503 with ``Retry-After`` by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.shortcuts import render

from django_sqlsem import semaphore
from example_project.reports import work

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse


@semaphore("reports", slots=3, timeout=0.3)
def monthly_report(request: HttpRequest) -> HttpResponse:
    """Make a report in a sync view: wait for a slot for 0.3 seconds at most."""
    work.make_report(request.GET.get("seconds"))
    return render(request, "reports/report.html", {"title": "Monthly report"})


@semaphore("reports", slots=3, timeout=0.3)
async def yearly_report(request: HttpRequest) -> HttpResponse:
    """Make a report in an async view: the same slots, and no thread is held while it waits."""
    await work.amake_report(request.GET.get("seconds"))
    return render(request, "reports/report.html", {"title": "Yearly report"})
