"""Named semaphores and mutexes for Django, in the database that the project already has."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from django_sqlsem.core import hooks

if TYPE_CHECKING:
    from typing import Any

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
    from django_sqlsem.locks.permit import Permit, current_permit
    from django_sqlsem.locks.semaphore import Semaphore, mutex, semaphore

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
    "__version__",
    "current_permit",
    "mutex",
    "semaphore",
]

__version__ = "0.1.0"

_ELSEWHERE = {
    "Permit": "locks.permit",
    "Semaphore": "locks.semaphore",
    "current_permit": "locks.permit",
    "mutex": "locks.semaphore",
    "semaphore": "locks.semaphore",
}


def _decorate(lock: Any, function: Any) -> Any:
    """Load what decorates when something is decorated: like all else here, not before Django may be imported."""
    return importlib.import_module(f"{__name__}.decorators.wrapper").decorate(lock, function)


hooks.decorate = _decorate


if not TYPE_CHECKING:  # which would take any name for one of these

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
