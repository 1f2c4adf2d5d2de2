"""Jobs of RQ, by the documentation's recipe, and its workers: a forked process for each job."""

from __future__ import annotations

import os
from typing import Any

import redis
from rq import Queue, SimpleWorker, Worker
from rq.decorators import job

from django_sqlsem import semaphore
from tests.places import queue_work
from tests.support.children import say

connection = redis.Redis.from_url(os.environ["SQLSEM_TEST_QUEUE"])
QUEUE = Queue(os.environ["SQLSEM_TEST_QUEUE_NAME"], connection=connection)
recipe: dict[str, Any] = {"__name__": __name__}
exec(queue_work.recipe("from rq"), recipe)


@semaphore("queued", slots=2, timeout=0, on_busy=recipe["later"])
def counted(seconds: float) -> str:
    queue_work.count(seconds)
    return "counted"


@semaphore("queued", slots=2)
def stuck(path: str, word: str) -> None:
    queue_work.stick(path, word)


@job(QUEUE, connection=connection)
@semaphore("queued:below")
def below() -> str:
    return "below"


@semaphore("queued:above", on_busy="skip", timeout=0)
@job(QUEUE, connection=connection)
def above() -> str:
    return "above"


def client() -> None:
    """Do as the test says."""
    queue_work.serve(globals())


def clean() -> None:
    """Delete the queue and its jobs."""
    QUEUE.delete(delete_jobs=True)
    for key in connection.scan_iter(f"*{QUEUE.name}*"):
        connection.delete(key)


def state(job_id: str) -> list[Any]:
    """The status and the value of a job."""
    found = QUEUE.fetch_job(job_id)
    assert found is not None
    latest = found.latest_result()
    return [
        found.get_status().value,
        latest.return_value if latest else None,
        (latest.exc_string if latest else "") or "",
    ]


def worker(simple: bool = False) -> None:
    """Be ``rq worker --with-scheduler``."""
    say("ready")
    (SimpleWorker if simple else Worker)([QUEUE], connection=connection).work(
        with_scheduler=True, logging_level="ERROR"
    )
