"""Frozen read models of one instant: semaphores, holders and waiters, waits and deadlocks, and all names at once."""

from __future__ import annotations

import datetime
import enum
import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

from django_sqlsem.core.durations import duration
from django_sqlsem.core.modes import MUTEX, SEMAPHORE, UPDATE, WHOLE, WRITER, word
from django_sqlsem.core.names import key_of

#: Who asked a holder to stop, if they did not say.
SOMEBODY: Final = "an operator"
#: What an operator is told of who holds or waits.
WHO: Final = ("host", "pid", "thread", "label", "user")


def who(source: object) -> dict[str, Any]:
    """Return what a row, an identity or a snapshot tells of who holds or waits, by these names."""
    return {name: getattr(source, name) for name in WHO}


class LossReason(enum.StrEnum):
    """Why a permit is no longer its holder's."""

    EXPIRED = "expired"
    REVOKED = "revoked"
    CUT_OFF = "cut off"
    SESSION_ENDED = "session ended"
    FORGOTTEN = "forgotten"
    FORKED = "forked"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Loss:
    """How a permit was lost: the reason, a sentence for people, and for a revoked one, by whom."""

    reason: LossReason
    detail: str
    by: str = ""

    def __str__(self) -> str:
        return self.detail


class SlotState(enum.StrEnum):
    """What an operator sees of one slot.

    *Stale* means that we judge the holder gone: its lease has run out, it has missed two renewals in a row, or the
    session that had the lock has ended.
    """

    FREE = "free"
    HELD = "held"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class HolderSnapshot:
    """One held or stale slot. Ages and lengths are seconds by the database's clock."""

    name: str
    slot: int
    state: SlotState
    token: int
    host: str
    pid: int
    thread: str
    label: str
    user: str
    acquired_at: datetime.datetime
    #: ``None``, like ``lease_left``: there is no lease; the lock lasts as long as the database session that has it.
    expires_at: datetime.datetime | None
    age: float
    lease_left: float | None
    #: The database session that has the lock, and when it began; only where that is what holds it.
    session_id: int | None = None
    session_us: int | None = None
    #: What the server knows of that session, if it may be seen.
    login: str = ""
    program: str = ""
    #: Whether a row says since when it is held, and for what. Else the token is when the session began, or 0.
    recorded: bool = True
    #: How it shares the name with others, and all its slots, if that is by more than one slot: see ``modes``.
    mode: str = ""
    slots: tuple[int, ...] = ()
    #: By whom it was asked to stop; empty: by nobody.
    stop_by: str = ""

    @property
    def stop_requested(self) -> bool:
        """Whether an operator has asked the holder to stop."""
        return bool(self.stop_by)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of all its slots."""
        return self.slots or (self.slot,)

    @property
    def place(self) -> str:
        """The slots in a word: ``3``, ``1-100``; or ``upgradable``, which is the writer's place and none of them."""
        if self.mode == UPDATE:
            return "upgradable"
        slots = [slot for slot in self.numbers if slot != WRITER] or [self.slot]
        return f"{slots[0]}-{slots[-1]}" if len(slots) > 1 else str(slots[0])

    @property
    def where(self) -> str:
        """The same in a sentence."""
        return self.place if self.mode == UPDATE else f"slot{'s' if '-' in self.place else ''} {self.place}"

    @property
    def expired(self) -> bool:
        """The lease has run out, or the lock is free: nobody is disturbed by taking this slot away."""
        return self.state is SlotState.STALE if self.lease_left is None else self.lease_left <= 0

    @property
    def needs_kill(self) -> bool:
        """Only the end of its database session takes this slot from the holder."""
        return self.lease_left is None and not self.expired

    def __str__(self) -> str:
        who = f"{self.host} pid {self.pid}" if self.host or self.pid else ""
        work = self.label or self.thread or self.program
        age = f"for {self.age:.1f} s" if self.recorded else ""
        return f"{self.where}: {', '.join(filter(None, (who, work, age)))}"


@dataclass(frozen=True, slots=True)
class WaiterSnapshot:
    """One waiting process: a process has one place in the queue of a name, whatever waits inside it."""

    name: str
    host: str
    pid: int
    thread: str
    label: str
    user: str
    waiting_since: datetime.datetime
    age: float
    waiting: int
    #: 0: all of them.
    take: int
    #: The database session that waits, where only the server knows of it.
    session_id: int | None = None
    mode: str = ""


@dataclass(frozen=True, slots=True)
class RefreshSnapshot:
    """One value of ``refresh_every()`` at one instant. Lengths are seconds by the database's clock."""

    name: str
    period: float
    #: Who built it last: empty before the first build.
    host: str
    pid: int
    thread: str
    label: str
    user: str
    #: When that was, for people to read, and how long ago; ``None`` before the first build.
    built_at: datetime.datetime | None
    age: float | None
    #: How long the last build took.
    took: float | None
    #: Seconds until the next caller rebuilds it: 0 if it is due.
    due_in: float
    #: Seconds since a build failed, if none has gone well since.
    failed: float | None


@dataclass(frozen=True, slots=True)
class SemaphoreSnapshot:
    """One semaphore at one instant. ``waiting`` counts the waiting threads and tasks of all processes."""

    name: str
    kind: str
    slots: int
    declared_slots: int
    operator_slots: int | None
    paused: bool
    holders: tuple[HolderSnapshot, ...] = ()
    waiters: tuple[WaiterSnapshot, ...] = ()
    #: Another number of slots that some process declared lately, if they disagree.
    other_declared_slots: int | None = None
    #: Seconds since a slot was last granted; ``None`` if none ever was.
    idle: float | None = field(default=None)
    #: Seconds for which slots are usually held, measured at releases; ``None`` before the first one.
    usual_hold: float | None = field(default=None)
    #: How many Celery tasks were refused and will come back.
    away: int = 0
    #: How many units there are to take, if it is a counter: that has no slots.
    units: int | None = None
    #: Of a pause: by whom, why, since when and until when, and seconds until then; ``None``: until it is resumed.
    paused_by: str = ""
    paused_reason: str = ""
    paused_at: datetime.datetime | None = None
    paused_until: datetime.datetime | None = None
    resumes_in: float | None = None
    #: Of an operator's number: by whom, why and until when, and seconds until then; ``None``: until it is undone.
    slots_by: str = ""
    slots_reason: str = ""
    slots_until: datetime.datetime | None = None
    slots_end_in: float | None = None
    #: The decorator's name before a call's arguments filled it in: ``sync:{request.user.pk}``. Empty for other names.
    template: str = ""

    @property
    def held(self) -> int:
        """How many slots are taken by live permits; an upgradable reader counts as one."""
        return sum(len(set(holder.numbers) - {WRITER}) or 1 for holder in self.holders if not holder.expired)

    @property
    def free(self) -> int:
        """How many slots, or units, could be granted now."""
        if self.paused or self.exclusive:
            return 0
        beside = self.upgradable is not None
        return max(0, self.slots - self.held + beside) if self.units is None else self.units

    @property
    def draining(self) -> bool:
        """Whether it is paused, and somebody holds it still."""
        return self.paused and any(not holder.expired for holder in self.holders)

    @property
    def stopping(self) -> int:
        """How many holders have been asked to stop."""
        return sum(holder.stop_requested for holder in self.holders if not holder.expired)

    @property
    def exclusive(self) -> HolderSnapshot | None:
        """Who has all slots at once: the writer, or whoever drains it."""
        return next((holder for holder in self.holders if holder.mode == WHOLE and not holder.expired), None)

    @property
    def upgradable(self) -> HolderSnapshot | None:
        """The reader that may become the writer."""
        return next((holder for holder in self.holders if holder.mode == UPDATE and not holder.expired), None)

    def role(self, someone: HolderSnapshot | WaiterSnapshot) -> str:
        """Return ``reader``, ``writer``, ``upgradable``, ``upgrades`` or ``drains``; nothing for a plain slot.

        Of who uses a mutex as a semaphore, or the other way round: ``semaphore`` or ``mutex``, as far as rows tell.
        """
        told = someone.recorded if isinstance(someone, HolderSnapshot) else someone.session_id is None
        return word(self.kind, someone.mode) if told else ""

    @property
    def other_kind(self) -> str:
        """As what it is used too at this moment: ``mutex`` or ``semaphore``; empty: as nothing but its kind."""
        users: list[HolderSnapshot | WaiterSnapshot] = [
            *(holder for holder in self.holders if not holder.expired),
            *self.waiters,
        ]
        return next((role for each in users if (role := self.role(each)) in (MUTEX, SEMAPHORE)), "")

    @property
    def stale(self) -> int:
        """How many slots belong to holders that we judge gone."""
        return sum(len(holder.numbers) for holder in self.holders if holder.state is SlotState.STALE)

    @property
    def waiting(self) -> int:
        """How many threads and tasks wait, over all processes."""
        return sum(waiter.waiting for waiter in self.waiters)

    @property
    def busy(self) -> bool:
        """Whether it is held, waited for or paused."""
        return bool(self.holders or self.waiters or self.paused)


def grouped(holders: Iterable[HolderSnapshot]) -> tuple[HolderSnapshot, ...]:
    """Return one snapshot for all slots of who has all of them, instead of one for each."""
    found: list[HolderSnapshot] = []
    wholes: dict[int, list[HolderSnapshot]] = {}
    for holder in holders:
        if holder.mode == WHOLE:
            wholes.setdefault(holder.token, []).append(holder)
        else:
            found.append(holder)
    for parts in wholes.values():
        first, slots = parts[0], tuple(part.slot for part in parts)
        place = next((each for each in found if each.mode == UPDATE and not each.expired), None)
        if place is not None and WRITER not in slots and not first.expired:  # an upgrade, which came beside it
            found.remove(place)
            first, slots = replace(first, slot=WRITER, token=place.token), (WRITER, *slots)
            first = replace(first, stop_by=first.stop_by or place.stop_by)
        found.append(replace(first, slots=slots))
    return tuple(sorted(found, key=lambda holder: holder.slot))


#: What an operator can ask a list of names for.
SurveyState: TypeAlias = Literal["held", "stale", "waiting", "paused", "draining"]
SURVEY_STATES: Final[tuple[SurveyState, ...]] = ("held", "stale", "waiting", "paused", "draining")
#: How many names of each state a survey lists: one more than these need another pass over all slots for the totals.
MOST_NAMES: Final = 5000


@dataclass(frozen=True, slots=True)
class Listed:
    """The names of one state by their keys, with how many slots, threads or tasks make it so: the largest first."""

    counts: Mapping[str, int] = field(default_factory=dict)
    #: Whether these are all; else it is this many that have most.
    complete: bool = True

    @classmethod
    def of(cls, counts: Iterable[tuple[str, int]], most: int = MOST_NAMES) -> Listed:
        """Keep the largest."""
        found = sorted(((key, count) for key, count in counts if count), key=lambda pair: -pair[1])
        return cls(dict(found[:most]), len(found) <= most)


@dataclass(frozen=True, slots=True)
class InUse:
    """A name that is held, waited for or paused, in a few numbers. Lengths are seconds."""

    name: str
    kind: str = ""
    template: str = ""
    held: int = 0
    stale: int = 0
    waiting: int = 0
    paused: bool = False
    #: Of those that go on.
    longest_hold: float | None = None
    longest_wait: float | None = None

    @classmethod
    def of(cls, snapshot: SemaphoreSnapshot) -> InUse:
        """Return what a snapshot amounts to."""
        return cls(
            snapshot.name,
            snapshot.kind,
            snapshot.template,
            snapshot.held,
            snapshot.stale,
            snapshot.waiting,
            snapshot.paused,
            longest(*(holder.age for holder in snapshot.holders if holder.recorded and not holder.expired)),
            longest(*(waiter.age for waiter in snapshot.waiters)),
        )


@dataclass(frozen=True, slots=True)
class Survey:
    """How all names of a database stand at one instant. Names are told by the keys of their rows."""

    #: How many slots are taken by live permits, and how many belong to holders that seem gone.
    held: int = 0
    stale: int = 0
    #: How many threads and tasks wait.
    waiting: int = 0
    #: How many names grant nothing, and how many of these still have holders.
    paused: int = 0
    draining: int = 0
    names: Mapping[str, Listed] = field(default_factory=dict)
    #: The names in any state, by their keys; ``None``: they are too many.
    in_use: Mapping[str, InUse] | None = None

    def listed(self, state: str) -> Listed:
        """Return the names in a state."""
        return self.names.get(state, Listed())


def survey_of(snapshots: Iterable[SemaphoreSnapshot]) -> Survey:
    """Return what snapshots of all names amount to."""
    counts: dict[str, dict[str, int]] = {state: {} for state in SURVEY_STATES}
    in_use: dict[str, InUse] = {}
    for each in snapshots:
        draining = each.held if each.draining else 0
        for state, count in zip(
            SURVEY_STATES, (each.held, each.stale, each.waiting, int(each.paused), draining), strict=True
        ):
            if count:
                counts[state][key_of(each.name)] = count
                in_use[key_of(each.name)] = InUse.of(each)
    return Survey(
        held=sum(counts["held"].values()),
        stale=sum(counts["stale"].values()),
        waiting=sum(counts["waiting"].values()),
        paused=len(counts["paused"]),
        draining=len(counts["draining"]),
        names={state: Listed.of(each.items()) for state, each in counts.items()},
        in_use=in_use,
    )


#: What names may be that an operator should look at, the worst first.
TROUBLE: Final = ("stale", "deadlocked", "with a queue", "paused")


@dataclass(frozen=True, slots=True)
class TemplateSnapshot:
    """All names that one template has made, as sums at one instant. Lengths are seconds by the database's clock."""

    #: ``sync:{request.user.pk}``.
    template: str
    #: How many names it has made that are not forgotten.
    names: int
    kind: str = ""
    #: How many slots are taken by live permits, and how many belong to holders that seem gone.
    held: int = 0
    stale: int = 0
    #: How many threads and tasks wait, and for how many of the names.
    waiting: int = 0
    queues: int = 0
    #: How many of the names grant nothing; how many wait for each other in a circle.
    paused: int = 0
    deadlocked: int = 0
    #: The longest hold and the longest wait: of those that go on, and with a history also of the last hour.
    longest_hold: float | None = None
    longest_wait: float | None = None
    #: How many calls were refused in the last hour; ``None``: no history is kept.
    turned_away: int | None = None

    @property
    def trouble(self) -> dict[str, int]:
        """What an operator should look at, as in ``TROUBLE``: slots that are stale, and names in other states."""
        counts = (self.stale, self.deadlocked, self.queues, self.paused)
        return {state: count for state, count in zip(TROUBLE, counts, strict=True) if count}

    @property
    def rank(self) -> int | None:
        """The place of its worst trouble among ``TROUBLE``; ``None``: there is none."""
        return next((TROUBLE.index(state) for state in self.trouble), None)


#: How many templates are told of: those with the most names.
MOST_TEMPLATES: Final = 1000


def templates_of(names: Iterable[InUse]) -> dict[str, TemplateSnapshot]:
    """Return what names amount to, by template."""
    found: dict[str, TemplateSnapshot] = {}
    for each in names:
        if each.template:
            known = found.get(each.template) or TemplateSnapshot(each.template, 0)
            found[each.template] = replace(
                known,
                names=known.names + 1,
                kind=each.kind,
                held=known.held + each.held,
                stale=known.stale + each.stale,
                waiting=known.waiting + each.waiting,
                queues=known.queues + bool(each.waiting),
                paused=known.paused + each.paused,
                longest_hold=longest(known.longest_hold, each.longest_hold),
                longest_wait=longest(known.longest_wait, each.longest_wait),
            )
    return found


def longest(*seconds: float | None) -> float | None:
    """Return the longest of these lengths; ``None`` if none of them is known."""
    return max((each for each in seconds if each is not None), default=None)


#: The bounds of an estimate, in seconds.
LEAST: Final = 1.0
LONGEST_ESTIMATE: Final = 60.0
#: Of a name that an operator has paused and will resume, nobody knows when, in seconds.
PAUSED_ESTIMATE: Final = 30.0


def retry_after(snapshot: SemaphoreSnapshot, before: int | None = None) -> float:
    """Estimate in how many seconds one more slot may be free, from 1 to 60.

    ``before``: how many are served earlier; omitted, all who wait and all tasks that will come back. Every slot is
    taken to be held for as long as slots of this name usually are (measured at each release, a moving average over
    some eight holds), and the holders of now to be through after what is left of that, or a tenth of it if they are
    over time. Then the queue is played through: each of those before takes the slot that is free first. While it is
    paused: until that is over, or 30.
    """
    if snapshot.paused:
        return PAUSED_ESTIMATE if snapshot.resumes_in is None else max(LEAST, snapshot.resumes_in)
    hold, free_in = _free_in(snapshot)
    if before is None:
        before = snapshot.waiting + snapshot.away
    if hold > 0:
        for _ in range(before):
            if free_in[0] >= LONGEST_ESTIMATE:
                break
            heapq.heapreplace(free_in, free_in[0] + hold)
    return min(LONGEST_ESTIMATE, max(LEAST, free_in[0]))


def _free_in(snapshot: SemaphoreSnapshot) -> tuple[float, list[float]]:
    """Return how long a slot is held, and, as a heap, in how many seconds each slot may be free."""
    holders = [holder for holder in snapshot.holders if not holder.expired for _ in holder.numbers]
    hold = snapshot.usual_hold
    if hold is None:
        # Nothing was released yet: holders are about half done.
        hold = 2 * sum(holder.age for holder in holders) / len(holders) if holders else 0.0
    free_in = [max(hold - holder.age, hold / 10) for holder in holders]
    free_in += [0.0] * (snapshot.slots - len(free_in))
    heapq.heapify(free_in)
    return hold, free_in


#: Of this many threads and tasks of one process the queue is played through: those behind them wait longer.
_PLAYED: Final = 1000


def expected_waits(snapshot: SemaphoreSnapshot) -> list[float | None]:
    """Estimate in how many seconds each of ``waiters`` may be served, as ``retry_after()`` does, but without bounds.

    ``None`` where nobody can tell: of counters and readers and writers, of a pause without an end, and while nothing is
    known of how long slots are held.
    """
    hold, free_in = _free_in(snapshot)
    shared = any(each.mode for each in snapshot.holders) or any(each.mode for each in snapshot.waiters)
    unknown = snapshot.units is not None or shared
    if unknown or not hold or not free_in or (snapshot.paused and snapshot.resumes_in is None):
        return [None] * len(snapshot.waiters)
    free_in = [max(each, snapshot.resumes_in or 0.0) for each in free_in]  # a heap still
    found: list[float | None] = []
    for waiter in snapshot.waiters:
        take = min(waiter.take or len(free_in), len(free_in))
        for number in range(min(waiter.waiting, _PLAYED)):  # whoever waits in one process stands at one place
            begins = [heapq.heappop(free_in) for _ in range(take)][-1]
            for _ in range(take):
                heapq.heappush(free_in, begins + hold)
            if not number:
                found.append(begins)
    return found


#: How many of one side are named in a sentence.
NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class WaitSnapshot:
    """One thread or task that waits for a name. ``age`` is seconds by the database's clock."""

    #: What tells it from other waits.
    wait_id: str
    name: str
    #: 0: all slots.
    take: int
    mode: str
    host: str
    pid: int
    thread: str
    label: str
    user: str
    waiting_since: datetime.datetime
    age: float
    #: What it holds meanwhile.
    holds: tuple[HolderSnapshot, ...] = ()
    #: Who holds what it waits for; in a deadlock, only those who are part of it.
    held_by: tuple[HolderSnapshot, ...] = ()
    #: In a deadlock: for whose ends it waits, by wait id.
    waits_for: tuple[str, ...] = field(default=(), repr=False)

    @property
    def who(self) -> str:
        """The process, the thread and the work in one phrase."""
        return _who(self)

    @property
    def holds_text(self) -> str:
        """What it holds in one phrase; empty if that is nothing."""
        return _listed(f"{holder.name!r} ({holder.where})" for holder in self.holds)

    @property
    def held_by_text(self) -> str:
        """Who holds what it waits for in one phrase; empty if that is nobody."""
        return _listed(f"{_who(holder)} ({holder.where})" for holder in self.held_by)

    def __str__(self) -> str:
        text = f"{self.who} has waited {duration(self.age)} for {self.name!r}"
        if self.held_by:
            text += f", held by {self.held_by_text}"
        return f"{text}, and holds {self.holds_text}" if self.holds else text


@dataclass(frozen=True, slots=True)
class DeadlockSnapshot:
    """Waits of which none can end before another one has ended, in order round the cycle."""

    waits: tuple[WaitSnapshot, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are waited for in it, each once."""
        return tuple(dict.fromkeys(wait.name for wait in self.waits))

    @property
    def youngest(self) -> WaitSnapshot:
        """The wait that began last, of those who hold something: that is broken off if settings say so."""
        return max((wait for wait in self.waits if wait.holds), key=lambda wait: (-wait.age, wait.wait_id))

    def __str__(self) -> str:
        known = {wait.wait_id: wait for wait in self.waits}
        return "; ".join(_side(wait, known) for wait in self.waits)


def _side(wait: WaitSnapshot, known: dict[str, WaitSnapshot]) -> str:
    """Return one side of a deadlock: who waits for what, and who has it."""
    text = f"{wait.who} has waited {duration(wait.age)} for {wait.name!r}"
    if wait.held_by:
        return f"{text}, held by {_listed(dict.fromkeys(_who(holder) for holder in wait.held_by))}"
    ahead = dict.fromkeys(known[each].who for each in wait.waits_for if each in known)
    return f"{text}, behind {_listed(ahead)}" if ahead else text


def _who(someone: WaitSnapshot | HolderSnapshot) -> str:
    place = f"{someone.host} pid {someone.pid} {someone.thread}".strip()
    return f"{place} ({someone.label})" if someone.label else place


def _listed(texts: Iterable[str]) -> str:
    found = list(texts)
    more = len(found) - NAMED
    return ", ".join(found) if more <= 0 else f"{', '.join(found[:NAMED])} and {more} more"
