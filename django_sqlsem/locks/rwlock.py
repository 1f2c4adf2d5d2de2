"""``rwlock()``: many readers or one writer, and a reader that may become the writer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack, cast

from django_sqlsem.core.durations import UNSET, Seconds, Unset, to_seconds
from django_sqlsem.core.modes import RWLOCK, SHARED, UPDATE, WHOLE
from django_sqlsem.core.names import Name, validate_slots
from django_sqlsem.core.text import shown
from django_sqlsem.locks.semaphore import Options, Semaphore, semaphore
from django_sqlsem.snapshots import SemaphoreSnapshot

if TYPE_CHECKING:

    class Upgradable(Semaphore):
        """What ``upgradable()`` returns, for type checkers: a ``Semaphore`` whose permits can be upgraded."""

        def acquire(self, timeout: Seconds | Unset | None = UNSET) -> UpgradablePermit: ...

        def try_acquire(self) -> UpgradablePermit | None: ...

        async def aacquire(self, timeout: Seconds | Unset | None = UNSET) -> UpgradablePermit: ...

        async def atry_acquire(self) -> UpgradablePermit | None: ...

        def __enter__(self) -> UpgradablePermit: ...

        async def __aenter__(self) -> UpgradablePermit: ...

    from django_sqlsem.locks.permit import UpgradablePermit


_NOT_FOR_IT = {
    "slots": "readers= says how many may read at once",
    "take": "a reader takes one slot, and a writer all of them",
    "fair": "readers and writers are served in the order in which they come",
}


@dataclass(frozen=True)
class RwLock:
    """A lock of readers and writers. Make it with ``rwlock()``.

    It holds no state: one object at module level may be used by any number of threads and tasks at once. So may what
    ``read()``, ``write()`` and ``upgradable()`` return: a ``Semaphore`` each, with all its uses.
    """

    name: str
    readers: int
    _shared: Semaphore

    def read(self, timeout: Seconds | Unset | None = UNSET) -> Semaphore:
        """Return what lets in readers, beside other readers. ``timeout``: as for ``semaphore()``."""
        return self._in(SHARED, timeout)

    def write(self, timeout: Seconds | Unset | None = UNSET) -> Semaphore:
        """Return what lets in one writer alone. It comes before readers that come later."""
        return self._in(WHOLE, timeout)

    def upgradable(self, timeout: Seconds | Unset | None = UNSET) -> Upgradable:
        """Return what lets in one reader beside others that may become the writer: see ``UpgradablePermit``."""
        return cast("Upgradable", self._in(UPDATE, timeout))

    def status(self) -> SemaphoreSnapshot:
        """Return a frozen snapshot: see ``Semaphore.status()``. Its ``exclusive`` is the writer, if there is one."""
        return self._shared.status()

    async def astatus(self) -> SemaphoreSnapshot:
        """Return what ``status()`` does, without blocking the event loop."""
        return await self._shared.astatus()

    def _in(self, mode: str, timeout: Seconds | Unset | None) -> Semaphore:
        found = self._shared._as(RWLOCK, mode)
        if isinstance(timeout, Unset):
            return found
        return dataclasses.replace(found, timeout=to_seconds(timeout, what="timeout", allow_none=True))


def rwlock(name: Name, readers: int = 100, **options: Unpack[Options]) -> RwLock:
    """Return the lock of readers and writers ``name``.

    ``readers``: how many may read at once (1 to 10,000); a writer takes as many rows. The other arguments are those of
    ``semaphore()``; ``slots``, ``take`` and ``fair`` are not for it. Nothing is looked up before the first acquire.
    Raises ``TypeError`` or ``ValueError`` for a bad argument.
    """
    for option, why in _NOT_FOR_IT.items():
        if option in options:
            raise TypeError(f"{option}={shown({**options}[option])} is not for a lock of readers and writers: {why}.")
    shared = semaphore(name, validate_slots(readers, what="readers"), **options)._as(RWLOCK)
    return RwLock(shared.name, readers, shared)
