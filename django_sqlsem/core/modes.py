"""How a permit shares a name with others, and how that is said to people."""

from __future__ import annotations

from typing import Final

#: One or more slots, beside others.
SHARED: Final = ""
#: All slots at once, alone: a writer, or a semaphore that is drained.
WHOLE: Final = "whole"
#: The writer's place, beside readers: a reader that may become the writer.
UPDATE: Final = "update"
#: All slots but the writer's place, for the upgradable reader that has that. Only requests have this mode: what they
#: get is ``WHOLE``.
UPGRADE: Final = "upgrade"

#: The two kinds of which either may be used where the other was: a mutex is a semaphore of one slot.
SEMAPHORE: Final = "semaphore"
#: Also how rows say that somebody holds, or waits for, a slot as a mutex: alone, whatever others declare.
MUTEX: Final = "mutex"

#: The modes that want all other holders to leave; nothing is granted past them while they wait.
EXCLUSIVE: Final = (WHOLE, UPGRADE)
#: The kind of locks whose slot 0 is the writer's place.
RWLOCK: Final = "rwlock"
#: The slot that is the writer's place.
WRITER: Final = 0


def line_of(key: str, mode: str) -> str:
    """Return the queue in which a request for a name's key waits inside its process.

    Upgradable readers have a queue of their own, as they do not keep readers out; so do upgrades, which come first.
    """
    return key if mode in (SHARED, WHOLE) else f"{key}/{mode}"


def interchangeable(one: str, other: str) -> bool:
    """Return whether a lock of one kind may be used as the other."""
    return one == other or {one, other} == {SEMAPHORE, MUTEX}


def word(kind: str, mode: str) -> str:
    """Return what a holder or a waiter with this mode is; nothing for a plain slot of a lock of this kind."""
    if kind != RWLOCK and mode == WHOLE:
        return "drains"
    if kind in (SEMAPHORE, MUTEX):
        used_as = mode or SEMAPHORE
        return "" if used_as == kind else used_as
    if kind != RWLOCK:
        return ""
    return {SHARED: "reader", WHOLE: "writer", UPDATE: "upgradable", UPGRADE: "upgrades"}[mode]


def refused(name: str, kind: str, mode: str, when: str) -> str:
    """Return the beginning of a sentence about a request that was refused; ``when``: ``within 5 s``, or nothing."""
    within = f" {when}" if when else ""
    if mode == UPGRADE:
        return f"The readers of {name!r} have not left{within}"
    if mode == UPDATE:
        return f"{name!r} has been closed to an upgradable reader{within}"
    verb = "written" if kind == RWLOCK else "drained"
    return f"{name!r} could not be {verb}{within}"
