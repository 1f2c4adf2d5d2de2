"""Tasks of ``django.tasks``, what workers of them are, and a client that does as the test says."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from django.core.management import execute_from_command_line
from django.db import close_old_connections, connection
from django.test import override_settings
from django_tasks import default_task_backend, task, task_backends
from django_tasks_db.models import DBTaskResult

from django_sqlsem import lifecycle, semaphore
from django_sqlsem.contrib.tasks import alatest, latest
from tests.places.queue_work import recipe
from tests.places.tasks_notes import note
from tests.support.children import listen, say
from tests.support.databases import OutsideCounter

__all__ = ["alatest", "recipe", "task_backends"]


@task
@semaphore("plain")
def plain(path: str, word: str = "plain") -> str:
    note(path, word=word)
    return word


@task(takes_context=True, queue_name="other", priority=7)
@semaphore("context:{word}")
def with_context(context: Any, path: str, word: str) -> str:
    note(path, word=word, attempt=context.attempt, id=context.task_result.id)
    return word


@task
@semaphore("async")
async def asynchronous(path: str) -> str:
    note(path)
    return "async"


@task
@semaphore("strict", on_busy="raise")
def strict(path: str) -> None:
    note(path)


@task
@semaphore("skipped", on_busy="skip")
def skipped(path: str) -> str:
    note(path)
    return "ran"


@task
@semaphore("told", on_busy=lambda busy: f"busy: {busy.name}")
def told(path: str) -> str:
    note(path)
    return "ran"


@task
@semaphore("patient", timeout=1.5)
def patient(path: str) -> str:
    note(path)
    return "patient"


@task
@semaphore("outer")
@semaphore("inner")
def twice(path: str) -> str:
    note(path)
    return "twice"


@task
@semaphore("again:{depth}", timeout=0.2)
def calls_itself(path: str, depth: int) -> str:
    note(path, depth=depth)
    if depth:
        return calls_itself.call(path, depth - 1)
    return "bottom"


@task
@semaphore("nesting")
def nests(path: str) -> list[str]:
    """Run another task at once, by a backend that runs them so, and then wait for one's own label."""
    inner = plain.using(backend="immediate").enqueue(path, "within")
    note(path, word="after")
    return [inner.status, inner.errors[0].exception_class_path if inner.errors else ""]


@task
def undecorated(path: str) -> None:
    with semaphore("block"):
        note(path)


@task
@semaphore("counted", slots=2)
def counted(seconds: float) -> str:
    with OutsideCounter("default") as counter, counter.inside():
        deadline = time.monotonic() + 60
        while counter.peak < 2 and time.monotonic() < deadline:  # the first one waits for the second
            time.sleep(0.05)
        time.sleep(seconds)
    return "counted"


@task
@semaphore("counted", slots=2)
def stuck(path: str) -> None:
    note(path, word="stuck")
    time.sleep(600)


@task
def fan_out(count: int, seconds: float) -> list[str]:
    return [counted.enqueue(seconds).id for _ in range(count)]


# What the test says.


def put(name: str, *args: Any, **options: Any) -> str:
    """Enqueue a task; return its result's id."""
    found = globals()[name]
    return str((found.using(**options) if options else found).enqueue(*args).id)


def run_batch(*options: str) -> int:
    """Run the worker until nothing is ready; return how many there are still for later."""
    close_old_connections()
    execute_from_command_line(["manage.py", "db_worker", "--batch", "--no-startup-delay", "-v0", *options])
    lifecycle.stop_all()  # the test deletes all rows
    return DBTaskResult.objects.filter(status="READY").count()


def impatient(function: Callable[[], Any]) -> Any:
    """Call a function where a plain call waits for 0.2 seconds instead of 30."""
    with override_settings(SQLSEM={"TIMEOUT": 0.2}):
        return function()


def state(task_id: str) -> dict[str, Any]:
    """The row of a result."""
    fields = ("status", "return_value", "exception_class_path", "queue_name", "priority", "backend_name", "args_kwargs")
    found = DBTaskResult.objects.get(id=task_id)
    later = (found.run_after - found.enqueued_at).total_seconds() if found.run_after.year < 9999 else 0
    return {field: getattr(found, field) for field in fields} | {"later": later}


def last(task_id: str) -> dict[str, Any]:
    """The latest attempt of a task."""
    found = latest(default_task_backend.get_result(task_id))
    return {"id": found.id, "status": found.status, "value": found.return_value if found.is_finished else None}


def due() -> int:
    """Let what is for later be ready now."""
    return int(DBTaskResult.objects.filter(status="READY").update(run_after="2000-01-01T00:00:00Z"))


def tables(wanted: bool) -> None:
    """Make the table of the tasks, or drop it."""
    there = DBTaskResult._meta.db_table in connection.introspection.table_names()
    with connection.schema_editor() as editor:
        if there:
            editor.delete_model(DBTaskResult)
        if wanted:
            editor.create_model(DBTaskResult)


def client() -> None:
    """Evaluate each line, and say the value as JSON."""
    while True:
        value = eval(listen(), globals())  # noqa: S307 - the test's own words
        say(json.dumps(value, default=str))


def worker(*options: str) -> None:
    """Be ``manage.py db_worker``."""
    say("ready")
    execute_from_command_line(["manage.py", "db_worker", "--no-startup-delay", "--interval=0.1", *options])
