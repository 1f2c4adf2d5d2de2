"""A small Django project that uses django_sqlsem.

``reports`` is what a user writes: two views, two Celery tasks and their tests, as in the tutorial. It knows nothing of
``demo``, the machinery of ``manage.py demo``, which puts them under load and counts who is in at once.
"""

from __future__ import annotations

from example_project.celery import app as celery_app

__all__ = ["celery_app"]
