"""What a session of application locks has for one permit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from django_sqlsem.backends.base import Grant
from django_sqlsem.core.modes import SHARED, line_of

if TYPE_CHECKING:
    from django_sqlsem.database.sqlserver import LockNames


@dataclass(frozen=True, slots=True)
class Holding:
    """One permit's locks on a session."""

    permit_id: str
    names: LockNames
    key: str
    slots: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    #: The slots that it stands for, if it has the name itself alone and one slot in place of all.
    whole: tuple[int, ...] = ()
    #: How it shares the name with others: see ``modes``.
    mode: str = SHARED

    @property
    def line(self) -> str:
        """The key of the name, and the mode of one that may become the writer, or has: a session keeps both of them."""
        return line_of(self.key, self.mode)

    def grant(self) -> Grant:
        """Return it as a backend grants it: ascending; for want of rows' ids, with the slots' numbers."""
        if self.whole:
            return Grant(self.whole, self.tokens * len(self.whole), self.whole)
        order = sorted(range(len(self.slots)), key=self.slots.__getitem__)
        slots = tuple(self.slots[number] for number in order)
        return Grant(slots, tuple(self.tokens[number] for number in order) if self.tokens else (), slots)

    @property
    def csv(self) -> str:
        """The slots as batches take them."""
        return f",{','.join(map(str, self.slots))},"
