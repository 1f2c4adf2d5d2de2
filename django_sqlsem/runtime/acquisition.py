"""The process's own record of one acquisition, from before its claim is sent until it has been given back.

How the caller of an acquisition waits for the keeper's answer: its thread, or its task.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import enum
import math
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from django_sqlsem.backends.base import Acquired, Grant, Request
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django_sqlsem.decorators.clients import Client
    from django_sqlsem.locks.fences import Fence
    from django_sqlsem.locks.permit import Permit
    from django_sqlsem.runtime.keeper import Keeper


class Jumper(Protocol):
    """What tests do instead of waiting: see ``testing.clock()``."""

    def jump(self, acquisition: Acquisition) -> None:
        """Let time pass until the wait is over, if this one is not to be waited for."""

    async def ajump(self, acquisition: Acquisition, future: asyncio.Future[None]) -> None:
        """Do the same for a task."""


jumper: Jumper | None = None

#: For how long a thread blocks at a time, in seconds.
_AT_A_TIME: Final = 1.0


class _TakenLock:
    """A lock to wait for: unlike an Event, a signal that raises in the waiter leaves it as it was.

    A thread that blocks hears nothing of what another raises in it (``PyThreadState_SetAsyncExc``), as the time limits
    of some workers do. So only the main thread blocks for long, which signals interrupt.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.release = self._lock.release
        self.woken = False

    def acquire(self, timeout: float) -> bool:
        """Wait until it is released, for so many seconds, or for ever if they are negative."""
        if threading.current_thread() is threading.main_thread():
            return self._lock.acquire(timeout=timeout)
        deadline = math.inf if timeout < 0 else time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if self._lock.acquire(timeout=max(0.0, min(left, _AT_A_TIME))):
                return True
            if left <= _AT_A_TIME:
                return False


class Awaited:
    """The part of an acquisition that its caller waits for."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.error: BaseException | None = None
        #: Whom a view that asks would answer, if it can be told whether they are there.
        self.client: Client | None = None
        self._future: asyncio.Future[None] | None = None
        self.await_anew()

    def await_anew(self) -> None:
        """Forget that there was an answer."""
        self.told = False
        self._unanswered = _TakenLock()

    @property
    def woken(self) -> bool:
        """Whether the answer has reached whoever waits: a messenger may be struck after it is ``told``."""
        return self._unanswered.woken

    def take_error(self) -> BaseException:
        """Return the error and forget it: its traceback keeps what its callers hold, and must be on no cycle."""
        error, self.error = self.error, None
        assert error is not None  # noqa: S101
        return error

    def prepare_future(self) -> asyncio.Future[None]:
        """Let the running event loop be told; returns the future to wait for."""
        self._future = asyncio.get_running_loop().create_future()
        return self._future

    def wait(self, timeout: float | None) -> bool:
        """Block this thread until there is an answer. Return whether there is one; not if its client has gone."""
        if jumper is not None:
            jumper.jump(cast("Acquisition", self))
        return self.wait_here(timeout) if self.client is None else self.client.wait(cast("Acquisition", self), timeout)

    async def wait_on_loop(self, timeout: float | None) -> bool:
        """Wait for the answer on the running event loop, in place of a thread that has asked."""
        future = self.prepare_future()
        try:
            if not self.told:  # else the answer came before the future
                await asyncio.wait({future}, timeout=timeout)
            return self.told
        finally:
            self._future = None

    def wait_here(self, timeout: float | None) -> bool:
        """Block this thread until there is an answer, whatever becomes of the client."""
        return self._unanswered.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))

    async def answered(self, future: asyncio.Future[None], timeout: float | None) -> None:
        """Wait for the future of an answer, or until the timeout."""
        if jumper is not None:
            await jumper.ajump(cast("Acquisition", self), future)
        await asyncio.wait({future}, timeout=timeout)

    def answer(self, error: BaseException | None = None) -> None:
        """Wake whoever waits: it was granted, or ``error`` happened. Called from any thread."""
        unanswered = self._unanswered  # whoever has slept through it waits for another one soon
        self.error = error
        self.told = True
        with contextlib.suppress(RuntimeError):  # it was answered before
            unanswered.release()
        if self._future is not None:
            self._resolve(self._future)
        unanswered.woken = True

    def _resolve(self, future: asyncio.Future[None]) -> None:
        def resolve() -> None:
            if not future.done():
                future.set_result(None)

        try:
            future.get_loop().call_soon_threadsafe(resolve)
        except RuntimeError:  # the loop was closed under its waiters: nobody will take the permit
            self.keeper.abandon(cast("Acquisition", self))


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


class Acquisition(Awaited):
    """One acquisition. The keeper and the arbiter know it by this record; the program has the ``Permit``.

    Fields are written by one side at a time: by the caller until it is queued, by the keeper until it is granted,
    and then each on its own (``loss`` is latched, ``releasing`` is a test-and-set).
    """

    def __init__(self, keeper: Keeper, request: Request, *, max_hold: float | None, kept: bool = True) -> None:
        super().__init__(keeper)
        self.request = request
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
        self.part_of: Acquisition | None = None
        self.permit: Callable[[], Permit | None] = lambda: None
        self.owner: weakref.ref[Any] | None = None
        self.worker: weakref.ref[threading.Thread] | None = None
        #: The thread that its caller blocks while it waits.
        self.thread: weakref.ref[threading.Thread] | None = None
        self.scope: tuple[int, str, str] | None = None
        #: What its thread or task had taken when it asked.
        self.beside: tuple[weakref.ref[Acquisition], ...] = ()
        self._generation = _generation
        self._notified = threading.Lock()

    @property
    def permit_id(self) -> str:
        """The random id that the claim carries."""
        return self.request.permit_id

    @property
    def fenced(self) -> bool:
        """Whether a transaction that is fenced with it is open."""
        return any(fence.stands for fence in self.fences)

    @property
    def foreign(self) -> bool:
        """Whether this is a parent process's hold, inherited by fork."""
        return self._generation != _generation

    @property
    def acquired(self) -> Acquired:
        """What to tell the backend of it."""
        assert self.grant is not None  # noqa: S101
        return Acquired(self.keeper.present(self.request), self.grant, bool(self.stop_by))

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
        return min(self.request.lease / 4, self.keeper.backend.heartbeat)

    def fresh_claim(self) -> None:
        """Ask under a new permit id: what became of the old one is unknown."""
        self.request = dataclasses.replace(self.request, permit_id=uuid.uuid4().hex, presence=self.keeper.presence)
        self.asked = False

    def stand_apart(self) -> None:
        """Wait in a place of its own: a task that has come back is before those of its process who came later."""
        self.request = dataclasses.replace(self.request, apart=True)

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
        lease = self.request.lease if lasts is None else lasts
        self.deadline = sent + lease - margin(lease)
        # One that was handed over must be confirmed soon, unless it is given back sooner still.
        self.renew_at = sent + self.renewal_interval if lease >= self.request.lease else self.granted_at + lease / 8
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
            loss = self.keeper.backend.taken_away(self.acquired)
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
