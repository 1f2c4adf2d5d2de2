"""Frozen read models: what a semaphore, its holders and its waiters were like at one instant."""

from __future__ import annotations

import datetime
import enum
from dataclasses import dataclass, field


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
        return f"slot {self.slot}: {', '.join(filter(None, (who, work, age)))}"


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
    take: int
    #: The database session that waits, where only the server knows of it.
    session_id: int | None = None


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
    #: How many tokens there are to take, if it is a count of tokens: that has no slots.
    tokens: int | None = None

    @property
    def held(self) -> int:
        """How many slots are taken by live permits."""
        return sum(not holder.expired for holder in self.holders)

    @property
    def free(self) -> int:
        """How many slots, or tokens, could be granted now."""
        if self.paused:
            return 0
        return max(0, self.slots - self.held) if self.tokens is None else self.tokens

    @property
    def stale(self) -> int:
        """How many slots belong to holders that we judge gone."""
        return sum(holder.state is SlotState.STALE for holder in self.holders)

    @property
    def waiting(self) -> int:
        """How many threads and tasks wait, over all processes."""
        return sum(waiter.waiting for waiter in self.waiters)
