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

    *Stale* means that we judge the holder gone: its lease has run out, or it has missed two renewals in a row.
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
    expires_at: datetime.datetime
    age: float
    lease_left: float

    @property
    def expired(self) -> bool:
        """The lease has run out: nobody is disturbed by taking this slot away."""
        return self.lease_left <= 0

    def __str__(self) -> str:
        who = f"{self.host} pid {self.pid}"
        return f"slot {self.slot}: {who}, {self.label or self.thread}, for {self.age:.1f} s"


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

    @property
    def held(self) -> int:
        """How many slots are taken by live permits."""
        return sum(not holder.expired for holder in self.holders)

    @property
    def free(self) -> int:
        """How many slots could be granted now."""
        return 0 if self.paused else max(0, self.slots - self.held)

    @property
    def stale(self) -> int:
        """How many slots belong to holders that we judge gone."""
        return sum(holder.state is SlotState.STALE for holder in self.holders)

    @property
    def waiting(self) -> int:
        """How many threads and tasks wait, over all processes."""
        return sum(waiter.waiting for waiter in self.waiters)
