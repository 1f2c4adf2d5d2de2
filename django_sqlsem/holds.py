"""The process's own record of one acquisition, from before its claim is sent until it has been given back."""

from __future__ import annotations

import collections
import dataclasses
import enum
import threading
import uuid
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django_sqlsem.answers import Awaited
from django_sqlsem.backends.base import Claim, Grant, Held
from django_sqlsem.clocks import boot_now
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django_sqlsem.fences import Fence
    from django_sqlsem.keeper import Keeper
    from django_sqlsem.permits import Permit


class State(enum.Enum):
    """Where an acquisition stands."""

    NEW = "new"
    QUEUED = "queued"
    HELD = "held"
    OVER = "over"


#: Counts the forks behind this process: a hold of another generation belongs to an ancestor.
_generation = 0


def after_fork() -> None:
    """Disown, in a forked child, every hold that was made before."""
    global _generation
    _generation += 1


def margin(lease: float) -> float:
    """Return how much earlier than the database a holder counts its lease as over, in seconds."""
    return min(1.0, lease / 20)


class Hold(Awaited):
    """One acquisition. The keeper and the arbiter know it by this record; the program has the ``Permit``.

    Fields are written by one side at a time: by the caller until it is queued, by the keeper until it is granted,
    and then each on its own (``loss`` is latched, ``releasing`` is a test-and-set).
    """

    def __init__(self, keeper: Keeper, claim: Claim, *, max_hold: float | None, kept: bool = True) -> None:
        super().__init__(keeper)
        self.claim = claim
        self.max_hold = max_hold
        #: Whether a grant is kept until it is released; else the caller takes it for good in a moment.
        self.kept = kept
        self.state = State.NEW
        self.grant: Grant | None = None
        self.arrived = boot_now()
        #: The boot clock when its caller gives up waiting; ``None``: never.
        self.patient_until: float | None = None
        self.granted_at = 0.0
        self.waited = 0.0
        self.deadline = 0.0
        self.renew_at = 0.0
        self.loss: Loss | None = None
        self.renewal_error = ""
        #: The boot clock when the last statement was sent that found it still waiting, or made it wait.
        self.proved = 0.0
        self.asked = False  # whether the claim, as it is now, may have been sent
        self.abandoned = False
        self.settled = False  # whether the caller knows of its grant
        self.queued = False  # whether the caller waits for an answer
        self.released = False
        #: The caller's transactions that are fenced with it: until they end, it is not given back.
        self.fences: tuple[Fence, ...] = ()
        self.release_wanted = False
        self.releasing = threading.Lock()
        self.releasing_since = 0.0
        self.release_retried = False
        self.recorded = threading.Lock()  # taken by who tells the history how it ended
        self.callbacks: list[Callable[[Permit], object]] = []
        #: By whom its holder was asked to stop; empty: by nobody. And whom to tell of that: see ``stops``.
        self.stop_by = ""
        self.stop_callbacks: collections.deque[Callable[[Permit], object]] = collections.deque()
        self.stop_told = threading.Lock()
        #: The grant that it belongs to, if it is only a part of what its holder has.
        self.part_of: Hold | None = None
        self.permit: Callable[[], Permit | None] = lambda: None
        self.owner: weakref.ref[Any] | None = None
        self.worker: weakref.ref[threading.Thread] | None = None
        #: The thread that its caller blocks while it waits.
        self.thread: weakref.ref[threading.Thread] | None = None
        self.scope: tuple[int, str, str] | None = None
        #: What its thread or task had taken when it asked.
        self.beside: tuple[weakref.ref[Hold], ...] = ()
        self._generation = _generation
        self._notified = threading.Lock()

    @property
    def permit_id(self) -> str:
        """The random id that the claim carries."""
        return self.claim.permit_id

    @property
    def fenced(self) -> bool:
        """Whether a transaction that is fenced with it is open."""
        return any(fence.stands for fence in self.fences)

    @property
    def foreign(self) -> bool:
        """Whether this is a parent process's hold, inherited by fork."""
        return self._generation != _generation

    @property
    def held(self) -> Held:
        """What to tell the backend of it."""
        assert self.grant is not None  # noqa: S101
        claim = self.claim
        asked = bool(self.stop_by)
        return Held(claim.permit_id, claim.resource, self.grant, self.keeper.presence, claim.durable, claim.mode, asked)

    @property
    def overdue(self) -> str:
        """Says in words that it is held for longer than it may be; else empty."""
        if self.max_hold is None or boot_now() - self.granted_at <= self.max_hold:
            return ""
        return f"held for longer than max_hold={self.max_hold:g} s"

    def patience(self, now: float) -> float | None:
        """For how many more seconds its caller waits; ``None``: for ever."""
        return None if self.patient_until is None else max(0.0, self.patient_until - now)

    @property
    def renewal_interval(self) -> float:
        """How often it is renewed, in seconds."""
        return min(self.claim.lease / 4, self.keeper.backend.heartbeat)

    def fresh_claim(self) -> None:
        """Ask under a new permit id: what became of the old one is unknown."""
        self.claim = dataclasses.replace(self.claim, permit_id=uuid.uuid4().hex, presence=self.keeper.presence)
        self.asked = False

    def stand_apart(self) -> None:
        """Wait in a place of its own: a task that has come back is before those of its process who came later."""
        self.claim = dataclasses.replace(self.claim, apart=True)

    def granted(self, grant: Grant, sent: float, lasts: float, *, at_once: bool) -> None:
        """Note the grant; ``sent`` is the boot clock from which its ``lasts`` seconds count here.

        ``at_once``: the claim's own statement was granted, as nobody held all slots or stood before it.
        """
        self.grant = grant
        self.granted_at = boot_now()
        if not at_once or self.waited:  # once it has waited, it has waited, whatever became of that grant
            self.waited = max(self.granted_at - self.arrived, 1e-9)
        self.renewed(sent, lasts)
        self.state = State.HELD

    def renewed(self, sent: float, lasts: float | None = None) -> None:
        """Note a proof of possession that was asked for at ``sent`` on the boot clock, good for ``lasts`` seconds."""
        lease = self.claim.lease if lasts is None else lasts
        self.deadline = sent + lease - margin(lease)
        # One that was handed over must be confirmed soon, unless it is given back sooner still.
        self.renew_at = sent + self.renewal_interval if lease >= self.claim.lease else self.granted_at + lease / 8
        self.renewal_error = ""

    def darkened(self, until: float) -> None:
        """The process's beacon is out: unless it is lit again by then, others may take the slot soon after."""
        self.deadline = min(self.deadline, until)
        self.renewal_error = self.renewal_error or "the session that shows that this process lives has ended"

    def current_loss(self) -> Loss | None:
        """Return how the permit was lost, if it was: decided at this very moment, and for good."""
        if self.loss is None:
            if self.foreign:
                self.loss = Loss(LossReason.FORKED, "it belongs to the parent process")
            elif self.state is State.HELD and not self.released and (loss := self._judge()) is not None:
                self.lose(loss)
        return self.loss

    def _judge(self) -> Loss | None:
        if not self.keeper.backend.supports_renewal:
            loss = self.keeper.backend.taken_away(self.held)
            return None if self.releasing.locked() else loss  # it is just being given back
        if boot_now() < self.deadline or any(fence.exclusive and fence.stands for fence in self.fences):
            return None
        if self.renewal_error:
            return Loss(LossReason.CUT_OFF, f"it could not be renewed: {self.renewal_error}")
        asked_at = self.keeper.own.asked_at
        if asked_at is not None and asked_at < self.deadline:
            # Its turn never came: the keeper still waits for the answer to something else.
            return Loss(LossReason.CUT_OFF, "it could not be renewed: the database has not answered yet")
        return Loss(LossReason.EXPIRED, "its lease ran out while this process did not run")

    def slept_through(self) -> bool:
        """Whether the grant was over before its caller had it: then nobody needs to be told of a loss."""
        over = self.keeper.backend.supports_renewal and boot_now() >= self.deadline
        return self.state is State.HELD and (over or self.loss is not None)

    def lose(self, loss: Loss) -> None:
        """Latch a loss, and tell the program once."""
        if self.loss is None:
            self.loss = loss
        if self._notified.acquire(blocking=False):
            self.keeper.tell_lost(self)

    def rearm(self) -> None:
        """Forget a grant that came to nothing, and ask anew."""
        self.fresh_claim()
        self.state, self.grant, self.loss = State.NEW, None, None
        self.stop_by, self.stop_told = "", threading.Lock()
        self.settled = self.queued = False
        self._notified = threading.Lock()
        self.await_anew()
