"""What one keeper has to tell: notes, taken at any moment at the price of a tuple, and what they amount to.

They amount to counts of each minute, with histograms of lengths of time, and to events that are listed one by one.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from django_sqlsem.conf import config
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.history.events import DEADLOCK, GRANTED, LOST, PASSING, RELEASED, TIMED_OUT, Percentiles, several

if TYPE_CHECKING:
    from django_sqlsem.backends.base import Grant, Request
    from django_sqlsem.core.names import Resource


#: How many notes wait to be looked at; what comes beyond is only counted.
MAX_NOTES: Final = 20_000


class Entry(NamedTuple):
    """Something that has happened to a request, at ``at`` on the boot clock. Lengths are seconds."""

    what: str
    at: float
    request: Request
    grant: Grant | None = None
    waited: float | None = None
    held: float | None = None
    by: str = ""
    detail: str = ""

    def told(self) -> str:
        """Return what the event says in words: all its slots, if there are several, and the reason."""
        slots = several(self.grant.slots) if self.grant is not None else ""
        return ": ".join(filter(None, (slots, self.detail)))


class Recorder:
    """The notes of one keeper. It takes no lock, so that a finaliser or a signal handler may use it too."""

    def __init__(self, alias: str, *, beside_rows: bool = False) -> None:
        self.alias = alias
        #: Whether nothing is told where no rows are kept beside the locks.
        self._beside_rows = beside_rows
        self.notes: deque[Entry] = deque()
        #: How many could not be kept since it was last asked.
        self.dropped = 0

    def note(
        self,
        what: str,
        request: Request,
        grant: Grant | None = None,
        *,
        at: float | None = None,
        waited: float | None = None,
        held: float | None = None,
        by: str = "",
        detail: str = "",
    ) -> None:
        """Note that something has happened, unless settings want no notes, or there are too many."""
        settings = config(self.alias)
        if not settings.history or (self._beside_rows and not settings.record):
            return
        if len(self.notes) < MAX_NOTES:
            self.notes.append(Entry(what, boot_now() if at is None else at, request, grant, waited, held, by, detail))
        else:
            self.dropped += 1


#: How many buckets for each doubling.
PER_DOUBLING: Final = 4
#: The longest text that a row takes.
MAX_TEXT: Final = 1000
_LAST: Final = 63 * PER_DOUBLING


def bucket(microseconds: int) -> int:
    """Return the number of the bucket of a length of time, of those that grow by a fifth: 0 is for none at all."""
    if microseconds <= 0:
        return 0
    return min(_LAST, 1 + int(PER_DOUBLING * math.log2(microseconds)))


def middle(number: int) -> float:
    """Return the middle of a bucket, in microseconds."""
    return 2.0 ** ((number - 0.5) / PER_DOUBLING) if number else 0.0


def to_text(counts: Mapping[int, int]) -> str:
    """Return ``"0:12 41:3"``; where that would be too long, with neighbours put together."""
    width = 1
    while True:
        merged: Counter[int] = Counter()
        for number, count in counts.items():
            merged[min(_LAST, -(-number // width) * width)] += count  # the upper one; 0 stays apart
        text = " ".join(f"{number}:{merged[number]}" for number in sorted(merged))
        if len(text) <= MAX_TEXT:
            return text
        width *= 2


def from_text(text: str) -> Counter[int]:
    """Return the counts of each bucket. What is not a histogram counts as none."""
    counts: Counter[int] = Counter()
    for part in text.split():
        number, _, count = part.partition(":")
        if number.isdigit() and count.isdigit():
            counts[int(number)] += int(count)
    return counts


def add_up(texts: Iterable[str]) -> Counter[int]:
    """Return the sum of several histograms."""
    return sum(map(from_text, texts), Counter())


def percentiles(counts: Mapping[int, int], longest_us: int, every: int = 1) -> Percentiles | None:
    """Return what a histogram says, in seconds; ``None`` if it is empty. ``longest_us``: the longest, exactly.

    ``every``: of how many it counts one.
    """
    count = sum(counts.values())
    if not count:
        return None
    return Percentiles(
        count=count * every,
        mean=min(sum(middle(number) * each for number, each in counts.items()) / count, float(longest_us)) / 1e6,
        p50=_at(counts, 0.50 * count, longest_us) / 1e6,
        p95=_at(counts, 0.95 * count, longest_us) / 1e6,
        longest=longest_us / 1e6,
    )


def _at(counts: Mapping[int, int], rank: float, longest_us: int) -> float:
    seen = 0
    for number in sorted(counts):
        seen += counts[number]
        if seen >= rank:
            break
    return min(middle(number), float(longest_us))


MINUTE_US: Final = 60_000_000
#: How many events are listed in a second; of a name of which none was yet, a few more, so that none drowns another.
LISTED: Final = 20
LISTED_AT_MOST: Final = 60
#: How many events wait to be written, and how many minutes of names are counted at once.
MAX_LISTED: Final = 2_000
MAX_TALLIES: Final = 5_000
#: How many notes are looked at in one go: ten milliseconds, or so.
_TURN: Final = 5_000


@dataclass(slots=True)
class Tally:
    """What happened to one name in one minute, in this process."""

    resource: Resource
    template: str = ""
    granted: int = 0
    released: int = 0
    turned_away: int = 0
    lost: int = 0
    held_us: int = 0
    longest_hold_us: int = 0
    longest_wait_us: int = 0
    holds: Counter[int] = field(default_factory=Counter)
    waits: Counter[int] = field(default_factory=Counter)
    changed: bool = True

    def count(self, entry: Entry) -> None:
        """Count one more."""
        self.changed = True
        self.template = self.template or entry.request.template
        if entry.what == GRANTED:
            self.granted += 1
        elif entry.what == RELEASED:
            self.released += 1
        elif entry.what == TIMED_OUT:
            self.turned_away += 1
        elif entry.what == LOST:
            self.lost += 1
        if entry.waited is not None and entry.what != DEADLOCK:
            length = int(entry.waited * 1e6)
            self.waits[bucket(length)] += 1
            self.longest_wait_us = max(self.longest_wait_us, length)
        if entry.held is not None:
            length = int(entry.held * 1e6)
            self.holds[bucket(length)] += 1
            self.held_us += length * (len(entry.grant.slots) if entry.grant is not None else 1)
            self.longest_hold_us = max(self.longest_hold_us, length)


class Tallies:
    """All that one keeper has counted and not written yet, and the minute that goes on."""

    def __init__(self) -> None:
        #: By key and the minute's instant in microseconds.
        self.minutes: dict[tuple[str, int], Tally] = {}
        #: Events to be listed, with their instants in microseconds of Unix time.
        self.listed: deque[tuple[int, Entry]] = deque()
        self.dropped = 0
        #: What was before this instant is counted as of it: those minutes are written for good.
        self._closed_us = 0
        self._second = 0
        self._of_second = 0
        self._names: set[str] = set()

    def gather(self, recorder: Recorder, offset_us: int) -> bool:
        """Count what has been noted. Returns whether there is more. ``offset_us``: Unix time less the boot clock."""
        notes = recorder.notes
        for _ in range(min(_TURN, len(notes))):
            entry = notes.popleft()
            at_us = int(entry.at * 1e6) + offset_us
            tally = self._tally(entry.request.resource, max(self._closed_us, at_us - at_us % MINUTE_US))
            if tally is None:
                self.dropped += 1
            else:
                tally.count(entry)
            if int(entry.at) > self._second:
                self._second, self._of_second = int(entry.at), 0
                self._names.clear()
            if entry.what not in PASSING or self._may_list(entry.request.resource.key):
                self._list(at_us, entry)
        return bool(notes)

    def _tally(self, resource: Resource, minute_us: int) -> Tally | None:
        of_minute = (resource.key, minute_us)
        tally = self.minutes.get(of_minute)
        if tally is None and len(self.minutes) < MAX_TALLIES:
            tally = self.minutes[of_minute] = Tally(resource)
        return tally

    def _list(self, at_us: int, entry: Entry) -> None:
        if len(self.listed) < MAX_LISTED:
            self.listed.append((at_us, entry))
        else:
            self.dropped += 1

    def _may_list(self, key: str) -> bool:
        if self._of_second >= (LISTED if key in self._names else LISTED_AT_MOST):
            return False
        self._names.add(key)
        self._of_second += 1
        return True

    @property
    def changed(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.listed) or any(tally.changed for tally in self.minutes.values())

    def close(self, before_us: int, *, unwritten: bool = False) -> None:
        """Let go of the minutes that were over by then: those that have been written, or the ``unwritten`` too."""
        before_us -= before_us % MINUTE_US
        over = {of_minute: tally for of_minute, tally in self.minutes.items() if of_minute[1] < before_us}
        late = sum(tally.changed for tally in over.values())
        for of_minute, tally in over.items():
            if unwritten or not tally.changed:
                del self.minutes[of_minute]
        if unwritten or not late:
            self.dropped += late
            self._closed_us = max(self._closed_us, before_us)
