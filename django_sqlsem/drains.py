"""Draining a semaphore is taking all of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from django_sqlsem.backends import database_for, get_backend
from django_sqlsem.modes import SHARED, WHOLE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from django_sqlsem.semaphores import Semaphore
    from django_sqlsem.snapshots import SemaphoreSnapshot


def of(semaphore: Semaphore, status: Callable[[], SemaphoreSnapshot]) -> Semaphore:
    """Return the semaphore whose permits drain this one. ``status`` is only asked where no mode says *all slots*."""
    return _all_of(semaphore, None if _has_mode(semaphore) else status().slots)


async def aof(semaphore: Semaphore, status: Callable[[], Awaitable[SemaphoreSnapshot]]) -> Semaphore:
    """Do what ``of()`` does, from a coroutine."""
    return _all_of(semaphore, None if _has_mode(semaphore) else (await status()).slots)


def _has_mode(semaphore: Semaphore) -> bool:
    return WHOLE in get_backend(database_for(semaphore.using)).modes


def _all_of(semaphore: Semaphore, slots: int | None) -> Semaphore:
    return dataclasses.replace(
        semaphore,
        take=slots or 1,
        mode=SHARED if slots else WHOLE,
        fair=True,
        release_policy="on_exit",
        max_hold=None,
        on_lost=None,
        rank="",
    )
