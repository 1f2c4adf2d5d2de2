"""Two tasks that share three slots with the views. A busy one is retried later by itself."""

from __future__ import annotations

import time

from celery import shared_task

from django_sqlsem import semaphore
from example_project.demo import meter
from example_project.reports.work import seconds_of_work


@shared_task
@semaphore("reports", slots=3)
def send_digest() -> None:
    """Try once, as tasks do unless told otherwise: when busy, the worker is free for other tasks until the retry."""
    with meter.counted():
        time.sleep(seconds_of_work())


@shared_task
@semaphore("reports", slots=3, timeout=2)
def rebuild_figures() -> None:
    """Stand in line for two seconds before a retry: first come, first served, with the views."""
    with meter.counted():
        time.sleep(seconds_of_work())
