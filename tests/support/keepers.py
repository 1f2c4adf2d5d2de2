"""The keeper of this process and its chores, for tests of what only they know."""

from __future__ import annotations

from typing import Any

from django_sqlsem.backends import get_backend
from django_sqlsem.runtime.keeper import Keeper
from django_sqlsem.runtime.keepers import keeper_for


def keeper_of(alias: str) -> Keeper:
    """Return this process's keeper of an alias."""
    return keeper_for(get_backend(alias))


def chore_of(alias: str, name: str) -> Any:
    """Return one of its chores."""
    [found] = [chore for chore in keeper_of(alias).chores if chore.name == name]
    return found
