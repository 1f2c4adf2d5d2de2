"""Actors of Dramatiq, by the documentation's recipe, and its workers: threads of one process."""

from __future__ import annotations

import os
import signal
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage

from django_sqlsem import semaphore
from tests.places import queue_work
from tests.places.tasks_notes import note, notes
from tests.support.children import say

_url, QUEUE = os.environ["SQLSEM_TEST_QUEUE"], os.environ["SQLSEM_TEST_QUEUE_NAME"]
broker: Any = (
    RedisBroker(url=_url, namespace=QUEUE, heartbeat_timeout=3000)
    if _url.startswith("redis:")
    else RabbitmqBroker(url=_url.removesuffix("//") + "/%2F" if _url.endswith("//") else _url)
)
broker.add_middleware(CurrentMessage())
dramatiq.set_broker(broker)
recipe: dict[str, Any] = {"__name__": __name__}
exec(queue_work.recipe("dramatiq").replace("@dramatiq.actor", f"@dramatiq.actor(queue_name={QUEUE!r})"), recipe)


@dramatiq.actor(queue_name=QUEUE, max_retries=0)
@semaphore("queued", slots=2, timeout=0, on_busy=recipe["later"])
def counted(seconds: float) -> None:
    queue_work.count(seconds)


@dramatiq.actor(queue_name=QUEUE, max_retries=0, time_limit=4000)
@semaphore("queued", slots=2)
def stuck(path: str) -> None:
    queue_work.stick(path, "stuck")


@dramatiq.actor(queue_name=QUEUE, max_retries=0, time_limit=4000)
def waits(path: str) -> None:
    """Wait for what does not come, until the time limit strikes."""
    try:
        with semaphore("never", timeout=None):
            note(path, word="held")
    except BaseException as error:
        note(path, word=type(error).__name__)
        raise


@dramatiq.actor(queue_name=QUEUE, max_retries=0, time_limit=3_600_000)
@semaphore("queued", slots=2)
def killed(path: str) -> None:
    """Be killed; Redis may deliver it a second time, to the next worker."""
    if not any(line["word"] == "killed" for line in notes(path)):
        queue_work.stick(path, "killed")


def client() -> None:
    """Do as the test says."""
    queue_work.serve(globals())


def clean() -> None:
    """Delete the queues."""
    if isinstance(broker, RabbitmqBroker):
        for suffix in ("", ".DQ", ".XQ"):
            broker.channel.queue_delete(QUEUE + suffix)
    else:
        for key in broker.client.scan_iter(f"{QUEUE}*"):
            broker.client.delete(key)
    broker.close()


def worker(threads: int) -> None:
    """Be a worker until SIGTERM."""
    found = dramatiq.Worker(broker, queues={QUEUE, f"{QUEUE}.DQ"}, worker_threads=threads, worker_timeout=100)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    found.start()
    broker.emit_after("process_boot")  # as the command line does: it starts what watches the time limits
    say("ready")
    signal.sigwait([signal.SIGTERM])
    found.stop()
