"""The words of the history: kinds of events, and what readers of it are given."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from typing import Final

GRANTED: Final = "granted"
RELEASED: Final = "released"
#: An acquire that ended without a slot: after its timeout, or at once if it did not want to wait.
TIMED_OUT: Final = "timed_out"
LOST: Final = "lost"
DEADLOCK: Final = "deadlock"
#: What operators do.
STOP_ASKED: Final = "stop_asked"
REVOKED: Final = "revoked"
PURGED: Final = "purged"
RESIZED: Final = "resized"
PAUSED: Final = "paused"
RESUMED: Final = "resumed"
DRAINED: Final = "drained"

ACTS: Final = (STOP_ASKED, REVOKED, PURGED, RESIZED, PAUSED, RESUMED, DRAINED)
#: What comes and goes with the work itself; everything else is kept for long.
PASSING: Final = frozenset({GRANTED, RELEASED, TIMED_OUT})

#: The columns of a minute's counts: those that add up, and the longest of which counts.
ADDED_UP: Final = ("granted", "released", "turned_away", "lost", "held_us")
LONGEST_ONES: Final = ("longest_hold_us", "longest_wait_us")

_SEVERAL: Final = re.compile(r"slots ([\d, -]+)")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to one name. Instants are the database's, lengths are seconds."""

    at: datetime.datetime
    what: str
    name: str
    #: The lowest, if there were several; ``None`` where no slot is concerned.
    slot: int | None
    token: int | None
    waited: float | None
    held: float | None
    #: Whose permit it is or was to be.
    host: str
    pid: int
    thread: str
    label: str
    user: str
    #: The operator.
    by: str
    detail: str

    @property
    def slots(self) -> tuple[int, ...]:
        """All slots that are concerned, ascending."""
        if self.slot is None:
            return ()
        several = _SEVERAL.match(self.detail)
        return parse_slots(several[1]) or (self.slot,) if several else (self.slot,)


@dataclass(frozen=True, slots=True)
class Span:
    """A past hold of one slot, by the event that ended it."""

    slot: int
    start: datetime.datetime
    end: datetime.datetime
    event: Event


@dataclass(frozen=True, slots=True)
class Percentiles:
    """How long something took, in seconds: the longest exactly, the others within ten per cent."""

    count: int
    p50: float
    p95: float
    longest: float
    mean: float = 0.0


@dataclass(frozen=True, slots=True)
class Totals:
    """What happened to one name, or to those of one template, in a while. Lengths are seconds."""

    granted: int = 0
    released: int = 0
    #: Acquires that ended without a slot.
    turned_away: int = 0
    lost: int = 0
    #: Slots times seconds, of the holds that ended in it.
    held: float = 0.0
    longest_hold: float = 0.0
    longest_wait: float = 0.0

    def with_(self, other: Totals) -> Totals:
        """Return both together."""
        return Totals(
            self.granted + other.granted,
            self.released + other.released,
            self.turned_away + other.turned_away,
            self.lost + other.lost,
            self.held + other.held,
            max(self.longest_hold, other.longest_hold),
            max(self.longest_wait, other.longest_wait),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Minute(Totals):
    """What happened in one step of time, which begins at ``at``."""

    at: datetime.datetime
    #: Of grants, and of those who waited in vain.
    waits: Percentiles | None
    holds: Percentiles | None


@dataclass(frozen=True, slots=True)
class Trend:
    """What happened to one name, or to those of one template, in steps of time: those in which anything did."""

    step: float
    #: By the beginning of each step: slots times seconds of the holds that ended in it, and how many were refused.
    steps: dict[datetime.datetime, tuple[float, int]]
    totals: Totals


def several(slots: tuple[int, ...]) -> str:
    """Return ``slots 1-3, 7`` for more slots than one, else nothing; in no more than some 200 characters."""
    if len(slots) < 2:
        return ""
    runs: list[list[int]] = []
    for slot in sorted(slots):
        if runs and runs[-1][-1] == slot - 1:
            runs[-1][1:] = [slot]
        else:
            runs.append([slot])
    return f"slots {', '.join('-'.join(map(str, run)) for run in runs[:20])}"


def parse_slots(text: str) -> tuple[int, ...]:
    """Return the slots of what ``several`` has written."""
    found: set[int] = set()
    for run in text.split(","):
        first, _, last = run.strip().partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last if last.isdigit() else first) + 1))
    return tuple(sorted(found))
