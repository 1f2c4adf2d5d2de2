from __future__ import annotations

from django.apps import AppConfig


class TestappConfig(AppConfig):
    """What the tests need of a project. It has no migrations: its tables are made with the test databases."""

    name = "tests.testapp"
    label = "testapp"
