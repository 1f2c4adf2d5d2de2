"""What operators see of transaction locks: names, and how each is held right now where the database can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import connections

from django_sqlsem.backends.rows_acts import database_errors
from django_sqlsem.backends.transaction_lockings import locking_for

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from django_sqlsem.backends.transaction_base import Held


def held(alias: str, keys: Collection[str]) -> Mapping[str, Held] | None:
    """Return how transactions hold the rows with these keys; ``None`` where that is not known.

    Raises ``BackendError``.
    """
    with database_errors(alias):
        return locking_for(connections[alias]).holds(keys)
