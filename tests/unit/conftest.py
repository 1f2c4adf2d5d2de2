"""What tests of the admin share: the locks are in one database after the other, and somebody may do everything."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client


@pytest.fixture
def locks_alias(database: str, settings: Any) -> str:
    """The locks are in one database after the other; users and sessions are in ``default``."""
    settings.SQLSEM = {"DATABASE": database}
    return database


@pytest.fixture
def operator(locks_alias: str) -> Client:
    from tests.unit.test_admin import login

    return login("boss", is_superuser=True)
