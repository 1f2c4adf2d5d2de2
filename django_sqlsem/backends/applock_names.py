"""The resources that SQL Server locks for a semaphore: those of the procedures that every DBA knows, and a gate."""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from typing import Final

from django_sqlsem.modes import RWLOCK, SHARED, UPDATE, WHOLE, WRITER

#: Begins whatever we lock that is neither a slot nor the name itself.
PREFIX: Final = "sqlsem:"
#: Begins the gate of a name; the rest is a digest of so many digits.
GATE: Final = f"{PREFIX}g:"
#: Begins what a transaction holds that is fenced with a permit.
FENCE: Final = f"{PREFIX}f:"
DIGEST_UNITS: Final = 20
#: A resource is cut after so many UTF-16 units, without an error.
MAX_UNITS: Final = 255
#: The longest number before a name, with its dash: ``2147483647-``.
_NUMBER_UNITS: Final = 11

_LIKE_A_SLOT: Final = re.compile(r"[0-9]+-")


@dataclass(frozen=True, slots=True)
class LockNames:
    """The resources of one semaphore."""

    #: Slots are ``<slot>-<base>``; every holder has the base itself too, in a mode that its kind of lock says.
    base: str
    #: Whoever holds it is the first in line.
    gate: str

    @property
    def fence(self) -> str:
        """Return what a transaction holds that is fenced with a permit of this name."""
        return f"{FENCE}{self.gate[len(GATE) : len(GATE) + DIGEST_UNITS]}"

    @property
    def told(self) -> str:
        """Return what the first in line holds to keep out those who barge, as it wants everybody else to leave."""
        return f"{self.gate}:w"

    def line(self, mode: str) -> LockNames:
        """Return the names of who waits in this mode: one that may become the writer keeps no readers out."""
        return LockNames(self.base, f"{self.gate}:u") if mode == UPDATE else self

    def slot(self, number: int) -> str:
        """Return the resource of a slot, counted from 1."""
        return f"{number}-{self.base}"


#: The mode in which holders of slots have the name itself: they do not exclude one another.
OF_SLOTS: Final = "IntentExclusive"
#: The same of others, by the kind of lock. Readers do not exclude one another either, and keep out holders of slots.
MODES: Final = {"monitor": "Exclusive", RWLOCK: "Shared"}
#: The modes of claims that say by themselves in which mode they have the name.
_BY_MODE: Final = {WHOLE: "Exclusive", UPDATE: "Update"}
#: The slot that says who drains a semaphore: it is free by then.
DRAINS: Final = 1


def mode_of(kind: str, mode: str = SHARED) -> str:
    """Return the mode in which a holder has the name itself: one that wants all slots, alone."""
    return _BY_MODE.get(mode) or MODES.get(kind, OF_SLOTS)


def place_of(kind: str, mode: str) -> int | None:
    """Return the very slot that a claim takes, which stands for all of them; ``None``: any that is free."""
    if mode == SHARED:
        return None
    return WRITER if kind == RWLOCK else DRAINS


@functools.lru_cache(maxsize=4096)
def lock_names(name: str) -> LockNames:
    """Return the resources of a validated name.

    Slot *i* of ``name`` is ``<i>-<name>``, as in "Counting Semaphore" of the series "Locking and Blocking". A name
    that is itself like a slot of another (``1-x``), that begins like our own locks, or whose slots would pass 255
    UTF-16 units goes by a digest instead: the first 128 bits of the SHA-256 of its UTF-16LE, which T-SQL computes as
    ``HASHBYTES('SHA2_256', @name)``.
    """
    text = name.encode("utf-16-le")
    digest = hashlib.sha256(text).hexdigest()
    # Only the first 32 characters of a resource are shown by the server's views.
    gate = f"{GATE}{digest[:DIGEST_UNITS]}"
    too_long = len(text) // 2 + _NUMBER_UNITS > MAX_UNITS
    if too_long or _LIKE_A_SLOT.match(name) or name.startswith(PREFIX):
        return LockNames(f"{PREFIX}{digest[:32]}", gate)
    return LockNames(name, gate)
