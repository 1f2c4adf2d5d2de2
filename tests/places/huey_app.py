"""Tasks of Huey, by the documentation's recipe, and its workers."""

from __future__ import annotations

from typing import Any

from django.core.management import execute_from_command_line
from huey.contrib.djhuey import HUEY, db_task

from django_sqlsem import semaphore
from tests.places import queue_work
from tests.support.children import say

recipe: dict[str, Any] = {"__name__": __name__}
exec(queue_work.recipe("huey"), recipe)


@db_task(retries=1)
@semaphore("queued", slots=2, timeout=0, on_busy=recipe["later"])
def counted(seconds: float) -> str:
    queue_work.count(seconds)
    return "counted"


@db_task()
@semaphore("queued", slots=2)
def stuck(path: str) -> None:
    queue_work.stick(path, "stuck")


@db_task()
@semaphore("queued:strict", timeout=0.2)
def strict() -> str:
    return "ran"


def client() -> None:
    """Do as the test says."""
    queue_work.serve({"HUEY": HUEY, "counted": counted, "stuck": stuck, "strict": strict, "kept": kept})


kept: list[Any] = []


def worker(*options: str) -> None:
    """Be ``manage.py run_huey``."""
    say("ready")
    execute_from_command_line(["manage.py", "run_huey", "--quiet", *options])
