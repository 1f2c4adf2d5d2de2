"""What one keeper has to tell: noted at any moment and from anywhere, at the price of one tuple in a list.

Histograms of lengths of time: buckets that grow by a fifth, kept as a short text, added up by whoever reads them.

What a keeper's notes amount to: counts of each minute, and the events that are listed one by one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from django_sqlsem.conf import config
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.history.events import DEADLOCK, GRANTED, LOST, PASSING, RELEASED, TIMED_OUT, Percentiles, several

if TYPE_CHECKING:
    from django_sqlsem.backends.base import Grant, Request
    from django_sqlsem.core.names import Resource
    from django_sqlsem.snapshots import Loss


#: So many notes wait to be looked at; what comes beyond is only counted.
MAX_NOTES: Final = 20_000


class Entry(NamedTuple):
    """Something that has happened to a claim, at ``at`` on the boot clock. Lengths are seconds."""

    what: str
    at: float
    request: Request
    grant: Grant | None
    waited: float | None
    held: float | None
    by: str
    detail: str


#: The same as it is noted: plain, as a busy process makes thousands in a second.
Note: TypeAlias = "tuple[str, float, Request, Grant | None, float | None, float | None, str, str]"


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

    def granted(self, request: Request, grant: Grant, at: float, waited: float) -> None:
        """Note that a permit was granted, and how long it was waited for."""
        self.put((GRANTED, at, request, grant, waited, None, "", ""))

    def released(self, request: Request, grant: Grant, at: float, held: float, detail: str = "") -> None:
        """Note that a permit was given back."""
        self.put((RELEASED, at, request, grant, None, held, "", detail))

    def lost(self, request: Request, grant: Grant, held: float, loss: Loss) -> None:
        """Note that a permit was lost."""
        self.put((LOST, boot_now(), request, grant, None, held, loss.by, f"{loss.reason}: {loss.detail}"))

    def turned_away(self, request: Request, waited: float | None) -> None:
        """Note that an acquire ended without a slot; ``None``: it did not want to wait."""
        self.put((TIMED_OUT, boot_now(), request, None, waited, None, "", ""))

    def deadlock(self, request: Request, waited: float, detail: str) -> None:
        """Note that a wait is part of a deadlock, in a sentence."""
        self.put((DEADLOCK, boot_now(), request, None, waited, None, "", detail))

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


#: So many buckets for each doubling.
PER_DOUBLING: Final = 4
#: The longest text that a row takes.
MAX_TEXT: Final = 1000
_LAST: Final = 63 * PER_DOUBLING


def bucket(microseconds: int) -> int:
    """Return the number of the bucket of a length of time: 0 is for none at all."""
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
        merged: dict[int, int] = {}
        for number, count in counts.items():
            # Into the upper one, and what took no time stays apart.
            into = min(_LAST, -(-number // width) * width)
            merged[into] = merged.get(into, 0) + count
        text = " ".join(f"{number}:{merged[number]}" for number in sorted(merged))
        if len(text) <= MAX_TEXT:
            return text
        width *= 2


def from_text(text: str) -> dict[int, int]:
    """Return the counts of each bucket. What is not a histogram counts as none."""
    counts: dict[int, int] = {}
    for part in text.split():
        number, _, count = part.partition(":")
        if number.isdigit() and count.isdigit():
            counts[int(number)] = counts.get(int(number), 0) + int(count)
    return counts


def add_up(texts: Iterable[str]) -> dict[int, int]:
    """Return the sum of several histograms."""
    total: dict[int, int] = {}
    for text in texts:
        for number, count in from_text(text).items():
            total[number] = total.get(number, 0) + count
    return total


def percentiles(counts: Mapping[int, int], longest_us: int) -> Percentiles | None:
    """Return what a histogram says, in seconds; ``None`` if it is empty. ``longest_us``: the longest, exactly."""
    count = sum(counts.values())
    if not count:
        return None
    return Percentiles(
        count=count,
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
#: So many events are listed in a second; of a name of which none was yet, a few more, so that none drowns another.
LISTED: Final = 20
LISTED_AT_MOST: Final = 60
#: So many events wait to be written, and so many minutes of names are counted at once.
MAX_LISTED: Final = 2_000
MAX_TALLIES: Final = 5_000
#: So many notes are looked at in one go: ten milliseconds, or so.
TURN: Final = 5_000


class Tally:
    """What happened to one name in one minute, in this process."""

    __slots__ = (
        "changed",
        "granted",
        "held_us",
        "holds",
        "longest_hold_us",
        "longest_wait_us",
        "lost",
        "released",
        "resource",
        "turned_away",
        "waits",
    )

    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        self.granted = self.released = self.turned_away = self.lost = 0
        self.held_us = self.longest_hold_us = self.longest_wait_us = 0
        self.holds: dict[int, int] = {}
        self.waits: dict[int, int] = {}
        self.changed = True

    def waited(self, seconds: float) -> None:
        """Count a wait."""
        length = int(seconds * 1e6)
        number = bucket(length)
        self.waits[number] = self.waits.get(number, 0) + 1
        if length > self.longest_wait_us:
            self.longest_wait_us = length

    def held(self, seconds: float, slots: int) -> None:
        """Count a hold."""
        length = int(seconds * 1e6)
        number = bucket(length)
        self.holds[number] = self.holds.get(number, 0) + 1
        self.held_us += length * slots
        if length > self.longest_hold_us:
            self.longest_hold_us = length


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
        """Count what has been noted. Returns whether there is more. ``offset_us``: Unix time less the boot clock.

        It goes through everything that happens, and so counts every microsecond.
        """
        notes = recorder.notes
        for _ in range(min(TURN, len(notes))):
            note = notes.popleft()
            what, at, request, grant, waited, held, _by, _detail = note
            at_us = int(at * 1e6) + offset_us
            tally = self._tally(request.resource, max(self._closed_us, at_us - at_us % MINUTE_US))
            if tally is None:
                self.dropped += 1
            else:
                tally.changed = True
                if what == GRANTED:
                    tally.granted += 1
                elif what == RELEASED:
                    tally.released += 1
                elif what == TIMED_OUT:
                    tally.turned_away += 1
                elif what == LOST:
                    tally.lost += 1
                if waited is not None and what != DEADLOCK:
                    tally.waited(waited)
                if held is not None:
                    tally.held(held, len(grant.slots) if grant is not None else 1)
            if int(at) > self._second:
                self._second, self._of_second = int(at), 0
                self._names.clear()
            if what not in PASSING or (self._of_second < LISTED_AT_MOST and self._may_list(request.resource.key)):
                self._list(at_us, Entry(*note))
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
        if self._of_second >= LISTED and key in self._names:
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
        over = [(key, at) for (key, at), tally in self.minutes.items() if at < before_us and not tally.changed]
        late = [(key, at) for (key, at), tally in self.minutes.items() if at < before_us and tally.changed]
        for minute in over:
            del self.minutes[minute]
        if late and not unwritten:
            return
        self.dropped += len(late)
        for minute in late:
            del self.minutes[minute]
        self._closed_us = max(self._closed_us, before_us)
