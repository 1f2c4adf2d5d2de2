"""Settings of the processes that run ``django.tasks``, or its backport: its tables are beside the locks."""

from __future__ import annotations

import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES as COVERED
from tests.settings import INSTALLED_APPS as APPS
from tests.settings import SQLSEM as GIVEN

DATABASES = {"default": COVERED[os.environ["SQLSEM_TEST_TASKS_DATABASE"]]}
SQLSEM = {key: value for key, value in GIVEN.items() if key != "DATABASE"}
INSTALLED_APPS = [*APPS, "django_tasks", "django_tasks_db"]
TASKS = {
    "default": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": ["default", "other"]},
    "second": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": []},
    "immediate": {"BACKEND": "django_tasks.backends.immediate.ImmediateBackend", "QUEUES": []},
    "dummy": {"BACKEND": "django_tasks.backends.dummy.DummyBackend", "QUEUES": []},
}
