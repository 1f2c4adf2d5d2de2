"""What a keeper's notes amount to: counts of each minute, and the events that are listed one by one."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from django_sqlsem.history import buckets
from django_sqlsem.history.events import DEADLOCK, GRANTED, LOST, PASSING, RELEASED, TIMED_OUT
from django_sqlsem.history.recorder import Entry, Recorder

if TYPE_CHECKING:
    from django_sqlsem.naming import Resource

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
        number = buckets.bucket(length)
        self.waits[number] = self.waits.get(number, 0) + 1
        if length > self.longest_wait_us:
            self.longest_wait_us = length

    def held(self, seconds: float, slots: int) -> None:
        """Count a hold."""
        length = int(seconds * 1e6)
        number = buckets.bucket(length)
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
            what, at, claim, grant, waited, held, _by, _detail = note
            at_us = int(at * 1e6) + offset_us
            tally = self._tally(claim.resource, max(self._closed_us, at_us - at_us % MINUTE_US))
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
            if what not in PASSING or (self._of_second < LISTED_AT_MOST and self._may_list(claim.resource.key)):
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
