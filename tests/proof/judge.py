"""The log of a campaign, and who judges it: processes write lines to one file, in the order that the kernel keeps.

All lines are of one length, and each is appended by one call. A line's time is the host's boot clock, which no one can
set: read *after* a grant (``I``), and *before* the last look at ``permit.lost`` (``O``). So a permit that was not lost
at its ``O`` was live all the time between the two. A fault is noted before it happens, and once more when it is over.

``W`` somebody waits; ``I`` is in; ``O`` leaves, with what became of the permit; ``G`` gave up, with the reason;
``B`` a worker saw a broken promise; ``K`` a process is killed; ``S`` it is stopped; ``C`` it goes on; ``E`` it has
ended by itself; ``F`` a fault begins, ``f`` it is over; ``A`` the database goes away, ``a`` it is back; ``N`` an
operator's number is about to change, ``n`` it has changed.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

#: Bytes of a line.
SIZE = 96
LIVE = "live"
#: A grant that its process has not confirmed for so long is nobody's: so an ``I`` is at most so much younger, in
#: nanoseconds. An operator's number counts at the grant.
CONFIRMED = 2_000_000_000
_SECOND = 1_000_000_000


class Line(NamedTuple):
    """One event. ``number`` is its place in the file."""

    at: int
    number: int
    kind: str
    pid: int
    who: str = ""
    slot: int = 0
    token: int = 0
    note: str = ""

    def __str__(self) -> str:
        said = f"{self.at / 1e9:.6f} {self.kind} {self.pid} {self.who} {self.slot or ''} {self.token or ''} {self.note}"
        return f"{self.number:>8} {' '.join(said.split())}"


def now() -> int:
    """Return the host's boot clock, in nanoseconds."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Log:
    """Appends lines. Threads, forked children and signal handlers may share it: there is nothing to lock."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(
        self, kind: str, who: str = "", slot: int = 0, token: int = 0, note: str = "", at: int = 0, pid: int = 0
    ) -> None:
        """Append one line, of this process and this moment if nothing else is said."""
        text = f"{kind} {at or now():019} {pid or os.getpid():7} {who or '-':8.8} {slot:3} {token:19} {note:.30}"
        os.write(self._file, f"{text:<{SIZE - 1}.{SIZE - 1}}\n".encode("ascii", "replace"))


def read(path: str) -> Iterator[Line]:
    """Return the lines of a file, in its order. A process that was killed in the middle leaves no part of one."""
    with open(path, encoding="ascii") as file:
        for number, text in enumerate(file):
            kind, at, pid, who, slot, token, *note = text.split(None, 6)
            yield Line(int(at), number, kind, int(pid), who, int(slot), int(token), "".join(note).strip())


@dataclass(frozen=True)
class Rules:
    """What counts in one run. ``slots``: what the code says. Lengths are seconds.

    ``heard``: after a fault a holder may go on for so long before it hears that its slot was taken; what it does in
    that time is not held against it. ``idle``: for how long a free slot may stand idle.
    """

    slots: int = 3
    lease: float = 3.0
    heard: float | None = None
    idle: float = 5.0
    may_end: bool = False


@dataclass
class Body:
    """A body: since when it waited, since when and until when its permit was live. ``until`` 0: that is not known."""

    line: Line
    asked: int
    until: int = 0


@dataclass
class Verdict:
    """What a log says. ``broken``: each broken promise, with the numbers of its lines."""

    grants: int = 0
    faults: int = 0
    lost: int = 0
    over: int = 0
    idle: float = 0.0
    gave_up: Counter[str] = field(default_factory=Counter)
    broken: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)


def judge(lines: list[Line], rules: Rules) -> Verdict:
    """Judge a log of ended processes."""
    lines = sorted(lines)
    verdict = Verdict()
    numbers = Numbers(lines, rules.slots)
    bodies = _bodies(lines, rules, verdict)
    _most_at_once(bodies, numbers, verdict)
    _tokens(bodies, verdict)
    _idle(lines, rules, verdict)
    return verdict


class Numbers:
    """How many slots an operator allowed, and when."""

    def __init__(self, lines: list[Line], slots: int) -> None:
        #: From when on how many: both the old and the new number, while it changes.
        self._steps = [(0, slots)]
        now_in_force = slots
        for line in lines:
            if line.kind == "N":
                self._steps.append((line.at, max(line.slot, now_in_force)))
            elif line.kind == "n":
                now_in_force = line.slot
                self._steps.append((line.at, line.slot))

    def most(self, since: int, until: int) -> int:
        """Return the largest number in a span."""
        most = 0
        for at, slots in reversed(self._steps):
            if at <= until:
                most = max(most, slots)
            if at <= since:
                break
        return most

    def at_grant(self, body: Body) -> int:
        """Return how many there may have been when a body was granted its slot."""
        return self.most(max(body.asked, body.line.at - CONFIRMED), body.line.at)


def _bodies(lines: list[Line], rules: Rules, verdict: Verdict) -> list[Body]:
    """Return the bodies whose permits were live for a known time."""
    asked: dict[tuple[int, str], int] = {}
    inside: dict[tuple[int, str], Body] = {}
    killed: set[int] = set()
    found: list[Body] = []
    faults: list[list[int]] = []

    def ended(pid: int, until: int) -> None:
        for key in [key for key in inside if key[0] == pid]:
            body = inside.pop(key)
            body.until = until
            if until:
                found.append(body)

    for line in lines:
        key = (line.pid, line.who)
        if line.kind in "KE":
            ended(line.pid, line.at if line.kind == "K" else 0)
            killed.add(line.pid)
            if line.kind == "E" and not rules.may_end:
                verdict.broken.append((f"process {line.pid} ended by itself: {line.note}", (line.number,)))
        elif line.kind == "F":
            verdict.faults += 1
            faults.append([line.at, line.at])
        elif line.kind == "f" and faults:
            faults[-1][1] = line.at
        elif line.pid in killed:
            continue  # it ran on for a moment
        elif line.kind == "W":
            asked[key] = line.at
        elif line.kind == "I":
            verdict.grants += 1
            inside[key] = Body(line, asked.get(key, line.at))
        elif line.kind == "O" and key in inside:
            body = inside.pop(key)
            if line.note == LIVE:
                body.until = line.at
                found.append(body)
            else:
                verdict.lost += 1
        elif line.kind == "G":
            verdict.gave_up[line.note] += 1
        elif line.kind == "B":
            verdict.broken.append((f"seen by {line.pid} {line.who}: {line.note}", (line.number,)))
    for body in inside.values():
        verdict.broken.append(("somebody went in and never came out", (body.line.number,)))
    return [body for body in found if not _excused(body, faults, rules.heard)]


def _excused(body: Body, faults: list[list[int]], heard: float | None) -> bool:
    """Whether a body may not have heard yet that a fault has cost it its slot. Cuts off what came after the fault."""
    if heard is None:
        return False
    for began, over in faults:
        if began < body.until <= over + heard * _SECOND:
            if max(body.asked, body.line.at - CONFIRMED) <= over < body.line.at:
                return True  # it was told late of a grant that may have been older than the fault
            if body.line.at <= over:
                body.until = began
    return body.until <= body.line.at


def _most_at_once(bodies: list[Body], numbers: Numbers, verdict: Verdict) -> None:
    """Of bodies that are inside at once, one was granted last, while all others had their slots."""
    events = sorted([(body.until, 0, body) for body in bodies] + [(body.line.at, 1, body) for body in bodies], key=_key)
    inside: dict[int, Body] = {}
    for _, begins, body in events:
        if not begins:
            inside.pop(body.line.number, None)
            continue
        inside[body.line.number] = body
        if numbers.at_grant(body) == 0:
            verdict.over += 1
            verdict.broken.append(("granted while nothing was to be granted", (body.line.number,)))
        elif len(inside) > max(map(numbers.at_grant, inside.values())):
            verdict.over += 1
            verdict.broken.append((f"{len(inside)} at once", tuple(inside)))
        if body.until <= body.line.at:
            del inside[body.line.number]


def _key(event: tuple[int, int, Body]) -> tuple[int, int]:
    return event[:2]


def _tokens(bodies: list[Body], verdict: Verdict) -> None:
    last: dict[int, Body] = {}
    for body in sorted(bodies, key=lambda body: body.line):
        before = last.get(body.line.slot)
        if before is not None and body.line.token and body.line.token <= before.line.token:
            verdict.broken.append(("a token that did not grow", (before.line.number, body.line.number)))
        last[body.line.slot] = body


def _idle(lines: list[Line], rules: Rules, verdict: Verdict) -> None:
    """Find the longest time for which a slot was free, the database was there, and somebody alive waited."""
    free = dict.fromkeys(range(1, rules.slots + 1), 0)  # slot: since when
    opened = dict.fromkeys(free, 0)  # slots that may be granted: since when
    inside: dict[int, tuple[int, str]] = {}
    waiting: set[tuple[int, str]] = set()
    stopped: set[int] = set()
    crowd = 0  # since when somebody waits
    back = 0  # since when the database is there
    number = rules.slots

    def stood_idle(line: Line, slots: list[int]) -> None:
        for slot in slots:
            if crowd and slot in opened and slot in free:
                since = max(free[slot], opened[slot], crowd, back)
                if (seconds := (line.at - since) / _SECOND) > verdict.idle:
                    verdict.idle = seconds
                    if seconds > rules.idle:
                        verdict.broken.append((f"slot {slot} stood idle for {seconds:.2f} s", (line.number,)))

    away = False
    for line in lines:
        key = (line.pid, line.who)
        if line.kind == "A":
            stood_idle(line, list(free))
            away = True
        elif line.kind == "a":
            away, back = False, line.at
        elif line.kind == "N" and line.slot < number:
            stood_idle(line, [slot for slot in opened if slot > line.slot])
            opened = {slot: since for slot, since in opened.items() if slot <= line.slot}
        elif line.kind == "n":
            number = line.slot
            for slot in range(1, number + 1):
                opened.setdefault(slot, line.at)
                if slot not in inside:
                    free.setdefault(slot, line.at)
        elif line.kind == "W":
            waiting.add(key)
        elif line.kind == "I":
            if not away:
                stood_idle(line, [line.slot])
            waiting.discard(key)
            inside[line.slot] = key
            free.pop(line.slot, None)
        elif line.kind == "O" and inside.get(line.slot) == key:
            del inside[line.slot]
            free[line.slot] = line.at
        elif line.kind == "G":
            waiting.discard(key)
        elif line.kind in "KE":
            waiting = {each for each in waiting if each[0] != line.pid}
            for slot in [slot for slot, each in inside.items() if each[0] == line.pid]:
                del inside[slot]
                free[slot] = line.at
        elif line.kind == "S":
            stopped.add(line.pid)
            for slot in [slot for slot, each in inside.items() if each[0] == line.pid]:
                free[slot] = line.at + int(rules.lease * _SECOND)
        elif line.kind == "C":
            stopped.discard(line.pid)
            for slot in [slot for slot, each in inside.items() if each[0] == line.pid]:
                free.pop(slot, None)
        if any(each[0] not in stopped for each in waiting):
            crowd = crowd or line.at
        elif crowd:
            if not away:
                stood_idle(line, list(free))
            crowd = 0
