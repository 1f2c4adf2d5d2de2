"""Which permit a ``with`` block ends: a semaphore is shared and keeps no state, so its blocks are noted here."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from django_sqlsem import scopes
from django_sqlsem.exceptions import NotEnteredError

if TYPE_CHECKING:
    from django_sqlsem.permits import Permit
    from django_sqlsem.semaphores import Semaphore

_lock = threading.Lock()
_entered: dict[Hashable, list[tuple[weakref.ref[Any], Permit]]] = {}


def after_fork() -> None:
    """Blocks that were open at the fork end in the child too, and do nothing there; only the lock starts anew."""
    global _lock
    _lock = threading.Lock()


def push(semaphore: Semaphore, permit: Permit) -> None:
    """Note that the current task or thread has entered a block of this semaphore."""
    owner = weakref.ref(scopes.current_owner())
    with _lock:
        _entered.setdefault(semaphore._blocks, []).append((owner, permit))


def innermost(semaphore: Semaphore, *, own: bool = False) -> Permit:
    """Return the permit of the innermost open block of the current task or thread.

    A block may be left by another task than entered it (async fixtures do so): then it is the newest block whose
    task or thread has ended, else the newest of all. Not so if only one's ``own`` counts. Raises ``NotEnteredError``.
    """
    with _lock:
        blocks = _entered.get(semaphore._blocks, [])
        if not blocks:
            raise NotEnteredError(f"No open block of {semaphore.name!r} to leave.")
        ended = [index for index, (owner, _) in enumerate(blocks) if not own and _ended(owner())]
        found = _mine(blocks) or ended
        if not found and (own or semaphore._left_by_its_own):
            raise NotEnteredError(f"Only the thread or task that entered {semaphore.name!r} may leave it.")
        _owner, permit = blocks[found[-1] if found else -1]
        return permit


def remove(semaphore: Semaphore, permit: Permit) -> None:
    """Note that the block of this permit has ended."""
    with _lock:
        left = [block for block in _entered.get(semaphore._blocks, []) if block[1] is not permit]
        if left:
            _entered[semaphore._blocks] = left
        else:
            _entered.pop(semaphore._blocks, None)


def give_up(semaphore: Semaphore, permit: Permit | None) -> None:
    """Something struck while a block was entered or left: its permit, by default of the innermost, must not stay."""
    if permit is None:
        with contextlib.suppress(RuntimeError):  # there is no open block, which is what went wrong
            permit = innermost(semaphore)
    if permit is not None:
        permit._abandon()
        remove(semaphore, permit)


def _mine(blocks: list[tuple[weakref.ref[Any], Permit]]) -> list[int]:
    # Threads that work for one task share its name; what they took themselves they know best.
    taken = scopes.taken_here()
    flow = [index for hold in taken for index, (_, permit) in enumerate(blocks) if permit._hold is hold]
    current = scopes.current_owner()
    return flow or [index for index, (owner, _) in enumerate(blocks) if owner() is current]


def _ended(owner: Any) -> bool:
    if owner is None:
        return True
    done = getattr(owner, "done", None)
    return bool(done()) if done is not None else not owner.is_alive()
