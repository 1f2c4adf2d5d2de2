"""Other libraries that a project may use: systems of tasks, Django REST framework, metrics. None is imported here."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from django.http import HttpResponse

from django_sqlsem.busy import Busy
from django_sqlsem.contrib import celery, tasks
from django_sqlsem.core import identity
from django_sqlsem.decorators import answers
from django_sqlsem.decorators import tasks as systems_of_tasks
from django_sqlsem.decorators.calls import Call


def register() -> None:
    """Have decorators ask what is here. Idempotent."""
    systems_of_tasks.systems.update({"celery": celery, **dict.fromkeys(tasks.LIBRARIES, tasks)})
    identity.task_labels.update({"celery": celery.label, **dict.fromkeys(tasks.LIBRARIES, tasks.label)})
    answers.frameworks[:] = [_rest_framework]
    tasks.listen()


def _rest_framework(busy: Busy, call: Call, status: int) -> HttpResponse | None:
    if "rest_framework.views" not in sys.modules:  # then no view is its own
        return None
    ours: Any = importlib.import_module(f"{__name__}.rest_framework")
    answer: HttpResponse | None = ours.answer(busy, call, status)
    return answer
