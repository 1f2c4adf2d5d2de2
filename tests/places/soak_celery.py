"""The Celery project of the soak test."""

from __future__ import annotations

import os
import time

from celery import Celery

from django_sqlsem import semaphore
from tests.places.presence import SLOTS, inside


def configured(url: str, queue: str) -> Celery:
    """Return an app whose one queue is ours alone."""
    app = Celery("sqlsem-soak", broker=url, set_as_current=False)
    app.conf.update(
        task_default_queue=queue,
        task_ignore_result=True,
        worker_enable_remote_control=False,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
    )
    return app


app = configured(os.environ["SQLSEM_SOAK_BROKER"], os.environ["SQLSEM_SOAK_QUEUE"])


@app.task(name="soak.work")
@semaphore("soak", slots=SLOTS)
def work(hold: float) -> None:
    """Comes back when it is busy."""
    with inside("celery"):
        time.sleep(hold)
