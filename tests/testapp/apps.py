from __future__ import annotations

from django.apps import AppConfig

from tests.support import citus


class TestappConfig(AppConfig):
    """What the tests need of a project. It has no migrations: its tables are made with the test databases."""

    name = "tests.testapp"
    label = "testapp"

    def ready(self) -> None:
        """Have the library know which alias is distributed."""
        citus.know()
