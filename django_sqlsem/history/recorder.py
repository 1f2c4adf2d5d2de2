"""What one keeper has to tell: noted at any moment and from anywhere, at the price of one entry in a list."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from django_sqlsem.clocks import boot_now
from django_sqlsem.conf import config
from django_sqlsem.history.events import DEADLOCK, GRANTED, LOST, RELEASED, TIMED_OUT, several

if TYPE_CHECKING:
    from django_sqlsem.backends.base import Claim, Grant
    from django_sqlsem.snapshots import Loss

#: So many entries wait to be looked at; what comes beyond is only counted.
MAX_ENTRIES: Final = 20_000


class Entry(NamedTuple):
    """Something that has happened to a claim, at ``at`` on the boot clock. Lengths are seconds."""

    what: str
    at: float
    claim: Claim
    grant: Grant | None
    waited: float | None = None
    held: float | None = None
    by: str = ""
    detail: str = ""


class Recorder:
    """The entries of one keeper. It takes no lock, so that a finaliser or a signal handler may use it too.

    A forked child has keepers of its own, and so begins with an empty one.
    """

    def __init__(self, alias: str, *, beside_rows: bool = False) -> None:
        self.alias = alias
        #: Whether nothing is told where no rows are kept beside the locks.
        self._beside_rows = beside_rows
        self.entries: deque[Entry] = deque()
        #: How many could not be kept since it was last asked.
        self.dropped = 0

    @property
    def wanted(self) -> bool:
        """Whether anything is to be recorded, by the settings."""
        settings = config(self.alias)
        return settings.history and (settings.record or not self._beside_rows)

    def granted(self, claim: Claim, grant: Grant, at: float, waited: float) -> None:
        """Note that a permit was granted, and how long it was waited for."""
        if self.wanted:
            self.put(Entry(GRANTED, at, claim, grant, waited))

    def released(self, claim: Claim, grant: Grant, at: float, held: float, detail: str = "") -> None:
        """Note that a permit was given back."""
        if self.wanted:
            self.put(Entry(RELEASED, at, claim, grant, None, held, "", detail))

    def lost(self, claim: Claim, grant: Grant, held: float, loss: Loss) -> None:
        """Note that a permit was lost."""
        if self.wanted:
            self.put(Entry(LOST, boot_now(), claim, grant, None, held, loss.by, f"{loss.reason}: {loss.detail}"))

    def turned_away(self, claim: Claim, waited: float | None) -> None:
        """Note that an acquire ended without a slot; ``None``: it did not want to wait."""
        if self.wanted:
            self.put(Entry(TIMED_OUT, boot_now(), claim, None, waited))

    def deadlock(self, claim: Claim, waited: float, detail: str) -> None:
        """Note that a wait is part of a deadlock, in a sentence."""
        if self.wanted:
            self.put(Entry(DEADLOCK, boot_now(), claim, None, waited, None, "", detail))

    def put(self, entry: Entry) -> None:
        """Keep an entry, unless there are too many."""
        if len(self.entries) < MAX_ENTRIES:
            self.entries.append(entry)
        else:
            self.dropped += 1


def told(entry: Entry) -> str:
    """Return what an event says in words: all its slots, if there are several, and the reason."""
    slots = several(entry.grant.slots) if entry.grant is not None else ""
    return ": ".join(filter(None, (slots, entry.detail)))
