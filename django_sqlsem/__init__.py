"""Named semaphores and mutexes for Django, in the database that the project already has."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_ELSEWHERE = {"Permit": "permits", "Semaphore": "semaphores", "mutex": "factories", "semaphore": "factories"}


def __getattr__(name: str) -> object:
    """Import what is asked for: pytest loads a plugin from here before Django may be imported."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_ELSEWHERE.get(name, 'exceptions')}")
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
