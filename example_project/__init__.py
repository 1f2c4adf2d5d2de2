"""A small Django project that uses django_sqlsem: two views, two Celery tasks, the admin, ``manage.py demo``."""

from __future__ import annotations

from example_project.celery import app as celery_app

__all__ = ["celery_app"]
