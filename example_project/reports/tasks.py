"""Two tasks that share three slots with the views. A busy one is retried later by itself."""

from __future__ import annotations

from celery import shared_task

from django_sqlsem import semaphore
from example_project.reports import work


@shared_task
@semaphore("reports", slots=3)
def send_report(address: str) -> None:
    """Try once, as tasks do unless told otherwise: when busy, the worker is free for other tasks until the retry."""
    work.make_report()


@shared_task
@semaphore("reports", slots=3, timeout=2)
def rebuild_figures() -> None:
    """Stand in line for two seconds before a retry: first come, first served, with the views."""
    work.make_report()
