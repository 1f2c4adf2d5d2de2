from __future__ import annotations

from typing import Any

from celery import signals
from django.apps import AppConfig


class DemoConfig(AppConfig):
    """Counts who is at work, what becomes of the tasks by Celery's own events, and the permits that were lost."""

    name = "example_project.demo"
    label = "demo"

    def ready(self) -> None:
        """Connect the counters."""
        from django_sqlsem.signals import permit_lost
        from example_project.demo import meter
        from example_project.reports import work

        # The work is counted inside, where it holds its slot: so the counter bears witness to the locks.
        work.make_report = meter.counted()(work.make_report)
        work.amake_report = meter.acounted()(work.amake_report)
        signals.task_success.connect(_finished, weak=False)
        signals.task_retry.connect(_retried, weak=False)
        signals.task_failure.connect(_failed, weak=False)
        permit_lost.connect(_lost, weak=False)


def _finished(**kwargs: Any) -> None:
    _count("finished")


def _retried(**kwargs: Any) -> None:
    _count("retried")


def _failed(**kwargs: Any) -> None:
    _count("failed")


def _lost(**kwargs: Any) -> None:
    from django.db import connection

    _count("lost")
    connection.close()  # the signal comes on a thread of its own, which nobody else tidies up


def _count(column: str) -> None:
    from example_project.demo import meter

    meter.count(column)
