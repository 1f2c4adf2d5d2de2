"""A Celery app with decorated tasks, for workers in threads and in processes of their own."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from celery import Celery, Task, shared_task
from kombu.transport import filesystem
from kombu.utils import json as kombu_json

from django_sqlsem import semaphore
from django_sqlsem.core import identity

app = Celery("sqlsem-tests", set_as_current=False)
app.conf.update(
    broker_url="memory://",
    broker_connection_retry_on_startup=True,
    task_ignore_result=False,
    result_backend="cache+memory://",
    task_default_queue="sqlsem-tests",
    worker_hijack_root_logger=False,
)


def _put_whole(channel: filesystem.Channel, queue: str, payload: Any, **kwargs: Any) -> None:
    """Write a message beside the others and rename it: kombu's reader may take a file before anything is in it."""
    name = f"{round(time.monotonic() * 1000)}_{uuid.uuid4()}.{queue}.msg"
    folder = Path(channel.data_folder_out)
    begun = folder / f".{name}.begun"
    begun.write_text(kombu_json.dumps(payload))
    begun.rename(folder / name)


filesystem.Channel._put = _put_whole


def broker_settings(broker: str) -> dict[str, Any]:
    """Return the settings for a broker: a directory, or any broker's address."""
    if not os.path.isabs(broker):
        return {"broker_url": broker}
    queue, control = os.path.join(broker, "queue"), os.path.join(broker, "control")
    for folder in (queue, control):
        os.makedirs(folder, exist_ok=True)
    options = {"data_folder_in": queue, "data_folder_out": queue, "control_folder": control}
    return {"broker_url": "filesystem://", "broker_transport_options": options}


def note(path: str, **what: Any) -> None:
    """Add a line to a file that the test reads: one write, so that lines of several processes stay whole."""
    with open(path, "a") as file:
        file.write(json.dumps({"at": time.time(), "label": identity.current().label, **what}) + "\n")


def notes(path: str) -> list[dict[str, Any]]:
    """What tasks have noted so far."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if os.path.exists(path) else []


@app.task(name="tests.plain", max_retries=0)
@semaphore("tasks")
def plain(path: str, word: str = "plain") -> str:
    note(path, word=word)
    return word


@app.task(name="tests.bound", bind=True, max_retries=1)
@semaphore("tasks:{word}")
def bound(self: Any, path: str, word: str) -> str:
    note(path, word=word, retries=self.request.retries)
    return word


@app.task(name="tests.persistent", bind=True, max_retries=1, autoretry_for=(ZeroDivisionError,), default_retry_delay=0)
@semaphore("tasks")
def persistent(self: Any, path: str) -> int:
    note(path, retries=self.request.retries)
    return 1 // self.request.retries


@shared_task(name="tests.shared")
@semaphore("tasks")
def shared(path: str) -> None:
    note(path, word="shared")


class Worker(Task):
    name = "tests.class"

    @semaphore("tasks")
    def run(self, path: str) -> str:
        note(path, word="class")
        return "class"


class_based = app.register_task(Worker())


@app.task(name="tests.strict")
@semaphore("tasks", on_busy="raise")
def strict(path: str) -> None:
    note(path)


@app.task(name="tests.skipped")
@semaphore("tasks", on_busy="skip")
def skipped(path: str) -> str:
    note(path)
    return "ran"


@app.task(name="tests.patient")
@semaphore("tasks", timeout=20)
def patient(path: str) -> str:
    note(path, word="patient")
    return "patient"


@app.task(name="tests.parts", bind=True)
@semaphore("tasks:{word}", timeout=0)
def parts(self: Any, path: str, word: str, more: tuple[str, ...] = ()) -> None:
    note(path, word=word)
    for each in more:
        self.run(path, each)


class Once(Task):
    """As of packages that send nothing while the same is on its way."""

    def apply_async(self, *args: Any, task_id: str | None = None, **options: Any) -> Any:
        return None if task_id else super().apply_async(*args, **options)


@app.task(name="tests.once", base=Once)
@semaphore("tasks")
def once(path: str) -> str:
    note(path)
    return "once"


@app.task(name="tests.late", acks_late=True, autoretry_for=(Exception,), max_retries=0)
@semaphore("tasks")
def late(path: str) -> str:
    note(path)
    return "late"


@app.task(name="tests.slow")
@semaphore("tasks")
def slow(path: str, seconds: float) -> None:
    note(path, word="slow begins")
    time.sleep(seconds)
    note(path, word="slow ends")


@app.task(name="tests.calls")
def calls(path: str) -> str:
    return plain(path, word="called")


def work(broker: str, *options: str) -> None:
    """Run a worker until it is told to stop. For ``tests.support.processes.Child``."""
    app.conf.update(broker_settings(broker))
    app.worker_main(["worker", "--loglevel=WARNING", "--without-gossip", "--without-mingle", *options])
