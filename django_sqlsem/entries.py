"""Which permit a ``with`` block ends: a semaphore is shared and keeps no state, so its blocks are noted here."""

from __future__ import annotations

import contextlib
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


def innermost(semaphore: Semaphore) -> Permit:
    """Return the permit of the innermost open block of the current task or thread.

    A block may be left by another task than entered it (async fixtures do so): then it is the newest block whose
    task or thread has ended, else the newest of all.
    """
    current = scopes.current_owner()
    with _lock:
        blocks = _entered.get(id(semaphore), [])
        if not blocks:
            raise RuntimeError(f"No open block of {semaphore.name!r} to leave.")
        newest = len(blocks) - 1
        # Threads that work for one task share its name; what they took themselves they know best.
        taken = scopes.taken_here()
        flow = [index for hold in taken for index, (_, permit) in enumerate(blocks) if permit._hold is hold]
        mine = flow or [index for index, (owner, _) in enumerate(blocks) if owner() is current]
        ended = [index for index, (owner, _) in enumerate(blocks) if _ended(owner())]
        _owner, permit = blocks[(mine or ended or [newest])[-1]]
        return permit


def remove(semaphore: Semaphore, permit: Permit) -> None:
    """Note that the block of this permit has ended."""
    with _lock:
        left = [block for block in _entered.get(id(semaphore), []) if block[1] is not permit]
        if left:
            _entered[id(semaphore)] = left
        else:
            _entered.pop(id(semaphore), None)


def give_up(semaphore: Semaphore, permit: Permit | None) -> None:
    """Something struck while a block was entered or left: its permit, by default of the innermost, must not stay."""
    if permit is None:
        with contextlib.suppress(RuntimeError):  # there is no open block, which is what went wrong
            permit = innermost(semaphore)
    if permit is not None:
        permit._abandon()
        remove(semaphore, permit)


def _ended(owner: Any) -> bool:
    if owner is None:
        return True
    done = getattr(owner, "done", None)
    return bool(done()) if done is not None else not owner.is_alive()
