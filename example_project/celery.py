"""The Celery application, configured from Django's settings (``CELERY_…``)."""

from __future__ import annotations

import os

from celery import Celery

import example_project.demo.broker  # noqa: F401  (what a folder:// address means)

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")

app = Celery("example_project")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
