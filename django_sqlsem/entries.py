"""Which permit a ``with`` block ends: a semaphore is shared and keeps no state, so its blocks are noted here."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from django_sqlsem import scopes

if TYPE_CHECKING:
    from django_sqlsem.permits import Permit
    from django_sqlsem.semaphores import Semaphore

_lock = threading.Lock()
_entered: dict[int, list[tuple[weakref.ref[Any], Permit]]] = {}


def after_fork() -> None:
    """Blocks that were open at the fork end in the child too, and do nothing there; only the lock starts anew."""
    global _lock
    _lock = threading.Lock()


def push(semaphore: Semaphore, permit: Permit) -> None:
    """Note that the current task or thread has entered a block of this semaphore."""
    owner = weakref.ref(scopes.current_owner())
    with _lock:
        _entered.setdefault(id(semaphore), []).append((owner, permit))


def pop(semaphore: Semaphore) -> Permit:
    """Return the permit of the innermost open block of the current task or thread.

    A block may be left by another task than entered it (async fixtures do so): then it is the newest block whose
    task or thread has ended, else the newest of all.
    """
    current = scopes.current_owner()
    with _lock:
        blocks = _entered.get(id(semaphore), [])
        for wanted in (lambda owner: owner is current, lambda owner: owner is None or _ended(owner), lambda _: True):
            for index in range(len(blocks) - 1, -1, -1):
                owner, permit = blocks[index]
                if wanted(owner()):
                    del blocks[index]
                    if not blocks:
                        _entered.pop(id(semaphore), None)
                    return permit
    raise RuntimeError(f"No open block of {semaphore.name!r} to leave.")


def _ended(owner: Any) -> bool:
    done = getattr(owner, "done", None)
    return bool(done()) if done is not None else not owner.is_alive()
