"""What one keeper has to tell: noted at any moment and from anywhere, at the price of one tuple in a list."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from django_sqlsem.clocks import boot_now
from django_sqlsem.conf import config
from django_sqlsem.history.events import DEADLOCK, GRANTED, LOST, RELEASED, TIMED_OUT, several

if TYPE_CHECKING:
    from django_sqlsem.backends.base import Claim, Grant
    from django_sqlsem.snapshots import Loss

#: So many notes wait to be looked at; what comes beyond is only counted.
MAX_NOTES: Final = 20_000


class Entry(NamedTuple):
    """Something that has happened to a claim, at ``at`` on the boot clock. Lengths are seconds."""

    what: str
    at: float
    claim: Claim
    grant: Grant | None
    waited: float | None
    held: float | None
    by: str
    detail: str


#: The same as it is noted: plain, as a busy process makes thousands in a second.
Note: TypeAlias = "tuple[str, float, Claim, Grant | None, float | None, float | None, str, str]"


class Recorder:
    """The notes of one keeper. It takes no lock, so that a finaliser or a signal handler may use it too.

    A forked child has keepers of its own, and so begins with an empty one.
    """

    def __init__(self, alias: str, *, beside_rows: bool = False) -> None:
        self.alias = alias
        #: Whether nothing is told where no rows are kept beside the locks.
        self._beside_rows = beside_rows
        self.notes: deque[Note] = deque()
        #: How many could not be kept since it was last asked.
        self.dropped = 0

    def granted(self, claim: Claim, grant: Grant, at: float, waited: float) -> None:
        """Note that a permit was granted, and how long it was waited for."""
        self.put((GRANTED, at, claim, grant, waited, None, "", ""))

    def released(self, claim: Claim, grant: Grant, at: float, held: float, detail: str = "") -> None:
        """Note that a permit was given back."""
        self.put((RELEASED, at, claim, grant, None, held, "", detail))

    def lost(self, claim: Claim, grant: Grant, held: float, loss: Loss) -> None:
        """Note that a permit was lost."""
        self.put((LOST, boot_now(), claim, grant, None, held, loss.by, f"{loss.reason}: {loss.detail}"))

    def turned_away(self, claim: Claim, waited: float | None) -> None:
        """Note that an acquire ended without a slot; ``None``: it did not want to wait."""
        self.put((TIMED_OUT, boot_now(), claim, None, waited, None, "", ""))

    def deadlock(self, claim: Claim, waited: float, detail: str) -> None:
        """Note that a wait is part of a deadlock, in a sentence."""
        self.put((DEADLOCK, boot_now(), claim, None, waited, None, "", detail))

    def put(self, note: Note) -> None:
        """Keep a note, unless none is wanted by the settings, or there are too many."""
        settings = config(self.alias)
        if not settings.history or (self._beside_rows and not settings.record):
            return
        if len(self.notes) < MAX_NOTES:
            self.notes.append(note)
        else:
            self.dropped += 1


def told(entry: Entry) -> str:
    """Return what an event says in words: all its slots, if there are several, and the reason."""
    slots = several(entry.grant.slots) if entry.grant is not None else ""
    return ": ".join(filter(None, (slots, entry.detail)))
