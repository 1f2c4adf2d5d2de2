"""Named semaphores and mutexes for Django, in the database that the project already has."""

from __future__ import annotations

from django_sqlsem.exceptions import (
    AcquireTimeoutError,
    AlreadyHeldError,
    BackendError,
    DeadlockError,
    FencedError,
    InvalidSemaphoreBackendError,
    KillNeededError,
    NotEnteredError,
    PermitLostError,
    SemaphoreError,
)
from django_sqlsem.factories import mutex, semaphore
from django_sqlsem.permits import Permit
from django_sqlsem.semaphores import Semaphore

__all__ = [
    "AcquireTimeoutError",
    "AlreadyHeldError",
    "BackendError",
    "DeadlockError",
    "FencedError",
    "InvalidSemaphoreBackendError",
    "KillNeededError",
    "NotEnteredError",
    "Permit",
    "PermitLostError",
    "Semaphore",
    "SemaphoreError",
    "mutex",
    "semaphore",
]
