"""One keeper per process and database: it claims, waits, gives back, and keeps what is held alive.

Giving back: what every keeper does with a permit that is released, forgotten, abandoned, or left at the end.

What a keeper does for what is held: renewals, forgotten permits, stuck releases, claims in doubt, lost sessions.

What a keeper tells the history, and when it takes the time to write that down: after all else that it does.
"""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from django.db import connections

from django_sqlsem.backends.base import Place, Presence
from django_sqlsem.conf import config
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.database import transactions
from django_sqlsem.database.sessions import CallerSession, OwnSession, Session
from django_sqlsem.deadlocks.watch import Watch
from django_sqlsem.exceptions import AcquireTimeoutError, BackendError
from django_sqlsem.history.recorder import Recorder
from django_sqlsem.history.writer import LONGEST, Writer
from django_sqlsem.runtime import callers, events
from django_sqlsem.runtime.acquisition import Hold, State
from django_sqlsem.runtime.lent_threads import LentThreads
from django_sqlsem.runtime.presence import Reach
from django_sqlsem.runtime.queue import Arbiter
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.backends.base import BaseSemaphoreBackend, Claim, Grant, Granted, Queue
    from django_sqlsem.core.names import Resource


logger = logging.getLogger("django_sqlsem")

T = TypeVar("T")

NO_LONGER_ITS_OWN: Final = Loss(LossReason.EXPIRED, "when it was released, its slot was no longer its own")


class KeeperBase(abc.ABC):
    """The part of a keeper that ends holds."""

    def __init__(self, backend: BaseSemaphoreBackend) -> None:
        self.backend = backend
        self.alias = backend.alias
        self.work = backend.session()
        self.own = backend.session()
        for session in (self.work, self.own):
            if isinstance(session, OwnSession):
                session.opened = backend.opened
        backend.announce(self.deliver)
        self.holds: dict[int, Hold] = {}
        self.arbiters: dict[str, Arbiter] = {}
        #: Who waits in the database, by permit id.
        self.waiting: dict[str, Hold] = {}
        self.queue_lock = threading.Lock()
        # Its put() may be called at any moment, from a finaliser too.
        self.inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    @property
    def presence(self) -> Presence:
        """How others reach this process; without a thread, nobody has to."""
        return Presence()

    @abc.abstractmethod
    def post(self, step: Callable[[], object]) -> None:
        """Run a step soon, on the keeper's side."""

    @abc.abstractmethod
    def poke(self, arbiter: Arbiter) -> None:
        """Have the arbiter look again now."""

    def reconsider(self, arbiter: Arbiter) -> None:
        """Have the arbiter take its next step when it is due: something in it has changed."""
        self.poke(arbiter)

    @abc.abstractmethod
    def doubt(self, claim: Claim) -> None:
        """Free what this claim may have got, now and again until its statement must have ended."""

    @abc.abstractmethod
    def renew_now(self, hold: Hold) -> None:
        """Have a grant proved without waiting for its next renewal."""

    def register(self, hold: Hold) -> None:
        """Know of a hold, before anything is sent for it."""
        self.holds[id(hold)] = hold

    def session_here(self) -> Session:
        """Return where the calling thread's statements go: on SQLite, inside ``atomic()``, its own connection."""
        if not self.backend.process_local:
            connection = connections[self.alias]
            # There is one writer, and it may be this very transaction: waiting for it would never end.
            if connection.vendor == "sqlite" and connection.in_atomic_block:
                return CallerSession(connection)
        return self.work

    def withdraw(self, hold: Hold) -> None:
        """Leave the queue, unless it was granted at this very moment."""
        with self.queue_lock:
            if hold.state is not State.HELD:
                hold.state = State.OVER
            known = self.waiting.pop(hold.permit_id, None) is not None and hold.state is not State.HELD
            arbiter = self.arbiters.get(hold.claim.line)
            if arbiter is not None and hold in arbiter.queue:
                if arbiter.enrolled is hold:
                    arbiter.unwanted.append(hold.claim)
                    known = False
                arbiter.remove(hold)
        if arbiter is not None and (not arbiter.known or arbiter.unwanted):
            self.poke(arbiter)
        if known:  # it was struck between the statement that took its place and the answer
            self.doubt(hold.claim)

    def ask_anew(self, hold: Hold) -> None:
        """Go on under a new permit id: what became of the old one is unknown."""
        with self.queue_lock:
            self.renew_claim(hold)

    def renew_claim(self, hold: Hold) -> None:
        """Give the hold another permit id; the lock is held."""
        self.waiting.pop(hold.permit_id, None)
        hold.fresh_claim()

    def present(self, claim: Claim) -> Claim:
        """Return the claim with the way to reach this process as it is now."""
        return claim if claim.presence == self.presence else dataclasses.replace(claim, presence=self.presence)

    def forget_arbiter(self, arbiter: Arbiter) -> bool:
        """Drop an arbiter nobody waits in. Return whether it was dropped."""
        with self.queue_lock:
            if not arbiter.idle:
                return False
            if self.arbiters.get(arbiter.key) is arbiter:
                del self.arbiters[arbiter.key]
            return True

    # Giving back.

    def release(self, hold: Hold) -> bool:
        """Give a permit back; idempotent. Return whether this call did. A thread with an event loop is not blocked.

        Raises ``BackendError``: then the keeper goes on trying by itself.
        """
        if hold.foreign or hold.grant is None or not hold.releasing.acquire(blocking=False):
            return False
        if callers.in_event_loop():
            hold.releasing_since = boot_now()
            callers.leave(hold)
            self.post(lambda: self.release_again(hold))
        else:
            self._release(hold, self.session_here())
        return True

    async def arelease(self, hold: Hold) -> bool:
        """Give a permit back from a coroutine, on the keeper's side; see ``release()``."""
        if hold.foreign or hold.grant is None or not hold.releasing.acquire(blocking=False):
            return False
        hold.releasing_since = boot_now()
        await self.call(lambda: self._release(hold, self.own))
        return True

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the keeper's side, and return what it returns. It runs even if this task is cancelled."""
        callers.refuse_other_loops()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def step() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - it belongs to the task that waits
                future.set_exception(error)
            else:
                future.set_result(result)

        self.post(step)
        return await asyncio.shield(asyncio.wrap_future(future))

    def give_back(self, hold: Hold, session: Session) -> None:
        """Give back what nobody will use, without a word to the caller."""
        if hold.grant is not None and hold.releasing.acquire(blocking=False):
            with contextlib.suppress(BackendError):
                self._release(hold, session)

    def _release(self, hold: Hold, session: Session) -> None:
        hold.releasing_since = boot_now()
        callers.leave(hold)
        try:
            # Who had to wait is likely to leave others waiting.
            mine = not isinstance(session, CallerSession)
            released = self.backend.release(session, hold.held, wanted=hold.waited > 0, hand_on=mine)
        except BaseException:
            if (gone := self.backend.taken_away(hold.held)) is not None:
                hold.lose(gone)  # perhaps long before
            self.post(lambda: self.release_again(hold))
            raise
        if isinstance(session, CallerSession):
            # If that transaction is rolled back, so is this release.
            resource, permit_id = hold.claim.resource, hold.permit_id

            def again() -> None:
                if not self.backend.discard(self.own, resource, permit_id):
                    self.backend.hand_out(self.own, resource)

            transactions.at_transaction_end(self.alias, lambda: self.post(again))
        for granted in released.granted:
            self.deliver(granted, hold.releasing_since, hold.claim.resource)
        self.released(hold, released.freed)

    @abc.abstractmethod
    def deliver(
        self, granted: Granted, sent: float | None = None, resource: Resource | None = None, *, at_once: bool = False
    ) -> None:
        """Give what was handed over to the hold that waits for it."""

    def released(self, hold: Hold, freed: bool) -> None:
        """Note that the database has the slots back, or had given them to somebody else already."""
        hold.released = True
        self.holds.pop(id(hold), None)
        if not freed and hold.loss is None and not hold.release_retried:
            hold.lose(self.backend.taken_away(hold.held) or NO_LONGER_ITS_OWN)

    def release_again(self, hold: Hold) -> None:
        """Try a release that failed once more, on the keeper's side."""
        if hold.released:
            self.holds.pop(id(hold), None)  # the release was interrupted after its end
        if hold.released or hold.grant is None or id(hold) not in self.holds:
            return
        hold.releasing_since = boot_now()
        hold.release_retried = True  # the caller may only stand in line for its session: who comes second frees nothing
        try:
            released = self.backend.release(self.own, hold.held)
            for granted in released.granted:
                self.deliver(granted, hold.releasing_since, hold.claim.resource)
            self.released(hold, True)  # else the try that failed may have freed them all the same
        except BackendError as error:
            extra = {"semaphore": hold.claim.resource.name, "what": "release_failed"}
            logger.warning("%s could not be given back yet: %s", hold.claim.resource.name, error, extra=extra)

    def abandon(self, hold: Hold) -> None:
        """The caller has gone in the middle of an acquire: nothing that was or will be granted may stay."""
        hold.abandoned = True  # seen by the arbiter before it hands anything over
        self.inbox_put(lambda: self._clear(hold))

    def inbox_put(self, step: Callable[[], object]) -> None:
        """Leave a step for the keeper; safe in finalisers and signal handlers."""
        self.inbox.put(step)

    def _clear(self, hold: Hold) -> None:
        if id(hold) not in self.holds:
            return
        callers.leave(hold)
        self.withdraw(hold)
        if hold.grant is not None:
            if not hold.released:
                hold.releasing.acquire(blocking=False)
                self.release_again(hold)
        else:
            if hold.asked:
                self.doubt(hold.claim)
            self.holds.pop(id(hold), None)

    def drop(self, hold: Hold) -> None:
        """The acquire ended without a grant, and nothing is in doubt."""
        callers.leave(hold)
        self.withdraw(hold)
        self.holds.pop(id(hold), None)

    def forget(self, hold: Hold, why: str) -> None:
        """The program forgot a permit: say so, and give it back."""
        if hold.foreign or hold.abandoned or hold.released or hold.grant is None or hold.releasing.locked():
            return
        events.log_forgotten(hold, why)
        hold.lose(Loss(LossReason.FORGOTTEN, f"it was forgotten: {why}"))
        self.give_back(hold, self.own)

    def tell_lost(self, hold: Hold) -> None:
        """Log a loss, and run the callbacks on a thread of their own."""
        events.tell(hold)

    def after_fork(self) -> None:  # noqa: B027 - only some have something to let go of
        """In a forked child: let go of what is the parent's."""

    def stop(self) -> None:
        """Give everything back and close the connections: the process ends, or a test does."""
        started = time.monotonic()
        for hold in list(self.holds.values()):
            if hold.grant is not None and not hold.released and not hold.fenced:
                hold.loss = hold.loss or Loss(LossReason.STOPPED, "the process is ending")
                callers.leave(hold)
                hold.releasing.acquire(blocking=False)  # one whose release failed before is tried again too
                if not self.own.unreachable(started):  # else the leases run out: nobody waits for every one of them
                    self.release_again(hold)
        self.last_words(started)
        self.work.close()
        self.own.close()

    def last_words(self, since: float) -> None:  # noqa: B027 - only some have something to say
        """Everything has been given back that can be, since an instant of ``time.monotonic()``; what is left to do."""


#: For how long one that does not wait lets the process give up a place in which nobody waits any more, in seconds.
CLEARED: Final = 1.0


class Keeper(KeeperBase):
    """What every keeper does; ``ThreadKeeper`` runs its steps in a thread of its own, ``InlineKeeper`` at once.

    The caller's own thread makes the first try and the release, on the ``work`` session; whatever must go on
    without the caller is posted to the keeper, which uses the session ``own``. A hold is registered before its
    claim is sent, so that nothing that may have been granted is ever unknown here.
    """

    history: Recorder | None = None  #: Where to tell what happens, if that is recorded.

    # Acquiring, in the caller's thread or from its event loop.

    def acquire(self, hold: Hold, timeout: float | None) -> bool:
        """Get the hold granted within ``timeout`` seconds, blocking this thread. Return whether it was."""
        hold.patient_until = None if timeout is None else hold.arrived + timeout
        self.register(hold)
        session = self.session_here()
        mine = not isinstance(session, CallerSession)
        if timeout != 0 and mine:
            self._stand_apart(hold, session)
        if timeout == 0 and mine and (line := self._left(hold)) is not None:
            cleared = threading.Event()
            self.post(partial(line.step, self.own))
            self.post(cleared.set)
            cleared.wait(CLEARED)
        while self.may_go_first(hold) and self.try_now(hold, session, enrol=mine and self._may_wait(hold, timeout)):
            if isinstance(session, CallerSession):
                # If that transaction is rolled back, so is this grant: have the keeper look at once.
                transactions.at_transaction_end(self.alias, lambda: self.renew_now(hold))
            if self.settled(hold, True):
                return True
        if timeout == 0:
            return False
        if isinstance(session, CallerSession):
            raise AcquireTimeoutError(
                f"No slot of {hold.claim.resource.name!r} is free, and waiting inside atomic() on SQLite could never "
                "end: its one writer is this transaction. Acquire outside atomic(), use timeout=0, or keep the locks "
                "in a second file named by SQLSEM['DATABASE'].",
                name=hold.claim.resource.name,
                timeout=timeout,
            )
        deadline = None if timeout is None else hold.arrived + timeout
        while True:
            self.enqueue(hold)
            answered = hold.wait(None if deadline is None else max(0.0, deadline - boot_now()))
            if self.settled(hold, answered):
                return hold.state is State.HELD

    async def aacquire(self, hold: Hold, timeout: float | None) -> bool:
        """Get the hold granted within ``timeout`` seconds, holding no thread meanwhile. Return whether it was."""
        hold.patient_until = None if timeout is None else hold.arrived + timeout
        self.register(hold)
        future = hold.prepare_future()
        self.post(lambda: self._first_try(hold, once=timeout == 0))
        remaining = None if timeout in (None, 0) else timeout
        while True:
            await hold.answered(future, remaining)
            if self.settled(hold, future.done()):
                return hold.state is State.HELD
            future = hold.prepare_future()
            remaining = None if timeout is None else max(0.0, hold.arrived + timeout - boot_now())
            self.enqueue(hold)

    def _left(self, hold: Hold) -> Arbiter | None:
        """Return the queue of the name if nobody of this process waits in it, and its place is just being given up."""
        arbiter = self.arbiters.get(hold.claim.resource.key)
        return arbiter if arbiter is not None and not arbiter.queue else None

    def _stand_apart(self, hold: Hold, session: Session) -> None:
        """A task that has come back does not stand behind those of this process who came after its first try."""
        if hold.claim.rank and hold.claim.line in self.arbiters and self.backend.keeps_place(session, hold.claim):
            hold.stand_apart()

    def may_go_first(self, hold: Hold) -> bool:
        """Whether nobody waits for this name in this process, or the claim barges, or has a place of its own."""
        claim = hold.claim
        return not claim.fair or bool(claim.rank) or claim.line not in self.arbiters

    def _may_wait(self, hold: Hold, timeout: float | None) -> bool:
        # Where others of this process wait already, one that barges joins them after its try.
        return timeout != 0 and hold.claim.line not in self.arbiters

    def try_now(self, hold: Hold, session: Session, *, enrol: bool) -> bool:
        """Claim once, without waiting; ``enrol``: or else take a place in the queue. Return whether it is granted."""
        while True:
            sent = hold.proved = boot_now()
            hold.asked = True
            attempts = session.attempts
            try:
                if not enrol:
                    grant = self.backend.claim(session, hold.claim)
                    if grant is None:
                        return False
                    return self.accept(hold, hold.permit_id, grant, sent, hold.claim.lease, at_once=True)
                self.waiting[hold.permit_id] = hold
                place = Place(hold.arrived, waiting=1, patience=hold.patience(sent))
                waited = self.backend.enrol(session, hold.claim, place, first=True)
            except BackendError as error:
                if session.attempts != attempts:  # else nothing was asked of the database
                    self.doubt(hold.claim)
                self.ask_anew(hold)
                if error.stale_connection:
                    continue
                raise
            for granted in waited.granted:
                self.deliver(granted, sent, hold.claim.resource, at_once=waited.at_once)
            if waited.queue is not None:
                self._join(hold, waited.queue, sent, session)
            return hold.state is State.HELD

    def _join(self, hold: Hold, queue: Queue, sent: float, session: Session) -> None:
        """The database knows of the hold: let the process know too, unless it has been granted by now."""
        with self.queue_lock:
            if hold.state is State.HELD and not hold.abandoned:
                return
            wanted = hold.state is State.NEW and not hold.abandoned
            if wanted:
                if hold.claim.rank and hold.claim.line in self.arbiters:  # the place may be older than theirs
                    hold.stand_apart()
                arbiter = self._arbiter(hold)
                # Who stands in this queue comes last: if this thread is struck before, no place is taken twice.
                if first := not arbiter.queue:
                    arbiter.enrolled_by(hold, queue, sent)
                else:  # two threads asked at the same time: one place is enough
                    arbiter.unwanted.append(hold.claim)
                    self.renew_claim(hold)
                self._queue(arbiter, hold)
            else:
                self.waiting.pop(hold.permit_id, None)
        if not wanted:
            try:
                self.backend.leave(session, hold.claim)
            except BackendError:  # it is over
                self.doubt(hold.claim)
        elif first:
            self.reconsider(arbiter)
        else:
            self.poke(arbiter)

    def accept(
        self, hold: Hold, permit_id: str, grant: Grant, sent: float, lasts: float, *, at_once: bool = False
    ) -> bool:
        """Give a grant to its hold, unless that has given up meanwhile: then the slots go back."""
        with self.queue_lock:
            if hold.permit_id != permit_id:
                return False  # it asks anew by now, and the old claim is in doubt already
            again = hold.state is State.HELD and not hold.abandoned  # the same news by two ways
            wanted = not hold.abandoned and hold.state in (State.NEW, State.QUEUED)
            if wanted:
                hold.granted(grant, sent, min(lasts, hold.claim.lease), at_once=at_once)
            arbiter = self._unqueue(hold)  # again too: who told of it first may have been struck before that
        if not wanted and not again:
            self.doubt(hold.claim)
        elif arbiter is not None and not arbiter.known:
            self.reconsider(arbiter)
        return wanted

    def deliver(
        self,
        granted: Granted,
        sent: float | None = None,
        resource: Resource | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        """Give what was handed over to the hold that waits for it.

        ``sent``: the boot clock when the statement was sent that told of it; ``None``: somebody else's statement did,
        after the last one that found the hold waiting. ``resource``: the name, where it is known. ``at_once``: its
        first claim was granted.
        """
        hold = self.waiting.get(granted.permit_id)
        if hold is None:
            # It gave up, and whoever took it out of the queue gives back what it got; or nobody here knows of it.
            same = [each for each in list(self.holds.values()) if each.permit_id == granted.permit_id]
            known = any(self.backend.supports_renewal or not each.releasing.locked() for each in same)
            if not known:  # one that is just being given back was served on another session: this is one grant more
                for each in same:
                    each.release_retried = True  # who comes second frees nothing
            if not known and resource is not None:
                self.doubt_permit(resource, granted.permit_id)
            return
        try:
            proved = hold.proved if sent is None else sent
            wanted = self.accept(hold, granted.permit_id, granted.grant, proved, granted.lasts, at_once=at_once)
            if wanted and hold.queued:
                hold.answer()
        finally:  # if this thread is struck, the one that waits is told all the same
            if hold.state is State.HELD and hold.queued and not hold.woken:
                self.answer_again(hold)

    def doubt(self, claim: Claim) -> None:
        """Free what this claim may have got, now and again until its statement must have ended."""
        self.doubt_permit(claim.resource, claim.permit_id)

    @abc.abstractmethod
    def doubt_permit(self, resource: Resource, permit_id: str) -> None:
        """Free what the claim with this id may have got."""

    def answer_again(self, hold: Hold) -> None:
        """Tell a waiter of its grant, whose messenger was struck on the way."""
        with self.queue_lock:
            arbiter = self._unqueue(hold)
        hold.answer()
        if arbiter is not None and not arbiter.known:
            self.reconsider(arbiter)

    def _unqueue(self, hold: Hold) -> Arbiter | None:
        """Have a hold wait no longer; the lock is held. Return the queue of its name, if there still is one."""
        self.waiting.pop(hold.permit_id, None)
        arbiter = self.arbiters.get(hold.claim.line)
        if arbiter is not None and hold in arbiter.queue:
            arbiter.remove(hold)
            if arbiter.idle:
                del self.arbiters[arbiter.key]
                return None
        return arbiter

    def _queue(self, arbiter: Arbiter, hold: Hold) -> None:
        hold.state, hold.queued = State.QUEUED, True
        arbiter.queue.append(hold)

    def _first_try(self, hold: Hold, *, once: bool) -> None:
        if hold.abandoned or hold.state is not State.NEW:
            return
        try:
            if once and (line := self._left(hold)) is not None:
                line.step(self.own)
            if not once:
                self._stand_apart(hold, self.own)
            enrol = self._may_wait(hold, 0 if once else None)
            granted = self.may_go_first(hold) and self.try_now(hold, self.own, enrol=enrol)
            if granted or once:
                hold.answer()
            else:
                self.enqueue(hold)
        except Exception as error:  # noqa: BLE001 - it belongs to the waiting task, not to this thread
            hold.answer(error)

    def enqueue(self, hold: Hold) -> None:
        """Put the hold at the end of its name's queue, unless it is there."""
        with self.queue_lock:
            if hold.abandoned or hold.state is not State.NEW:
                return
            arbiter = self._arbiter(hold)
            self._queue(arbiter, hold)
            known = arbiter.known
        if not known:
            self.poke(arbiter)

    def _arbiter(self, hold: Hold) -> Arbiter:
        key = hold.claim.line
        if (arbiter := self.arbiters.get(key)) is None:
            arbiter = self.arbiters[key] = Arbiter(self, key)
        return arbiter

    def settled(self, hold: Hold, answered: bool) -> bool:
        """After a wait: whether it is over. Raises what the keeper met. A grant that was slept through is not one."""
        if not answered:
            self.withdraw(hold)
        if hold.error is not None:
            raise hold.take_error()
        if hold.slept_through():
            self.doubt(hold.claim)
            hold.rearm()
            return False
        hold.settled = True
        return True


#: How often it looks for forgotten permits and stuck releases while anything is held, in seconds.
LOOK_AROUND: Final = 1.0
#: When to free what an interrupted claim may have got, in seconds after it: its statement may still be running.
DOUBTS: Final = (0.0, 0.1, 0.5, 2.0, 6.0)
#: A holder without its beacon for so long, in seconds, counts its permits as lost; others wait half as long again.
DARK: Final = 1.0
#: How often a broken session is opened again meanwhile, in seconds.
RELIGHT: Final = 0.2


class CaringKeeper(Keeper):
    """The part of the thread's keeper that looks after what is held."""

    def __init__(self, backend: BaseSemaphoreBackend) -> None:
        super().__init__(backend)
        self._doubts: list[tuple[float, float, Resource, str]] = []
        self._scan_at = 0.0
        self._renewals_fail = False
        self._reach = Reach(self.alias)
        self._watch = Watch(self, self.break_off)
        self._lent_threads = LentThreads(self, self.break_off)
        if isinstance(self.own, OwnSession):
            self.own.opened = self._opened
        #: When the beacon went out unasked, on the boot clock, and when to try to light it again.
        self._dark_since: float | None = None
        self._open_at = 0.0

    @property
    def presence(self) -> Presence:
        """How others reach this process now."""
        return self._reach.presence

    def renew_now(self, hold: Hold) -> None:
        """Have a grant proved at once."""

        def renew() -> None:
            hold.renew_at = self._scan_at = 0.0

        self.post(renew)

    def try_now(self, hold: Hold, session: Session, *, enrol: bool) -> bool:
        """Claim once, without waiting; if this process is killed right after it, others will see that."""
        # The keeper's thread may be about to open it: whoever comes meanwhile would claim as one whom nobody reaches.
        ready = self.own.is_open and (self._reach.known or not isinstance(self.own, OwnSession))
        if not ready and self._dark_since is None and isinstance(session, OwnSession):
            session.run(lambda cursor: None)  # if the database cannot be reached, one try is enough to tell
            if isinstance(self.own, OwnSession) and config(self.alias).beacons:
                with contextlib.suppress(BackendError):  # the keeper tries on
                    self.own.run(lambda cursor: None)
        hold.claim = self.present(hold.claim)
        return super().try_now(hold, session, enrol=enrol)

    def _queue(self, arbiter: Arbiter, hold: Hold) -> None:
        super()._queue(arbiter, hold)
        if hold.beside:  # who holds nothing keeps nobody waiting
            self._watch.add(hold)

    def empty_inbox(self) -> None:
        """Before the end: take all steps that are left, whatever becomes of one of them."""
        with contextlib.suppress(queue.Empty):  # the thread may take some too, if it goes on after all
            while True:
                step = self.inbox.get_nowait()
                try:
                    step()
                except Exception:
                    logger.exception("The keeper of %r met an error and goes on.", self.alias)

    def give_up_unanswered(self) -> None:
        """Before the end: whoever has asked the database, and does not know what came of it, gets nothing."""
        started = time.monotonic()
        with self.queue_lock:
            known = [hold for hold in self.holds.values() if not (hold.told or hold.abandoned)]
            left = [hold for hold in known if hold.asked and hold.grant is None]
            for hold in left:
                hold.abandoned = True  # if its thread goes on after all
                self.waiting.pop(hold.permit_id, None)
        for hold in left:
            hold.answer(BackendError("The process is ending."))
        if left:
            self.work.close()  # when the statement under way has ended
        for hold in left:
            if not self.own.unreachable(started):
                with contextlib.suppress(BackendError):
                    self.backend.discard(self.own, hold.claim.resource, hold.permit_id)

    def break_off(self, hold: Hold, error: Exception) -> bool:
        """Have a wait end with an error. Return whether it was still waiting."""
        with self.queue_lock:
            arbiter = self.arbiters.get(hold.claim.line)
            if arbiter is None or hold not in arbiter.queue or hold.state is not State.QUEUED:
                return False
            if arbiter.enrolled is hold:
                arbiter.unwanted.append(hold.claim)
            arbiter.remove(hold)
            self.waiting.pop(hold.permit_id, None)
            hold.state = State.OVER
        hold.answer(error)
        self.poke(arbiter)
        return True

    def doubt_permit(self, resource: Resource, permit_id: str) -> None:
        """Free what the claim with this id may have got, now and again until its statement must have ended."""
        now = boot_now()
        due = [(now + delay, delay, resource, permit_id) for delay in DOUBTS]
        self.post(partial(self._doubts.extend, due))

    def look_at_all(self) -> None:
        """Look at everything at the next turn: the clock was moved. For the keeper's side."""
        self._scan_at = 0.0
        with self.queue_lock:
            for arbiter in self.arbiters.values():
                arbiter.look_soon()

    def _scan(self, now: float) -> None:
        """Look at everything that is held: what is lost, forgotten, stuck or to be renewed."""
        started = time.monotonic()
        self._scan_at = next_at = now + LOOK_AROUND
        renew: list[Hold] = []
        for hold in list(self.holds.values()):
            if hold.state is State.HELD and hold.queued and not hold.woken:
                self.answer_again(hold)  # whoever brought its grant was struck
            if hold.releasing.locked():
                if now - hold.releasing_since > LOOK_AROUND and not self.own.unreachable(started):
                    self.release_again(hold)
            elif hold.abandoned:
                if not self.own.unreachable(started):  # its caller may have been struck before it could say so
                    self._clear(hold)
            elif hold.state is not State.HELD or not hold.kept or (not hold.settled and boot_now() >= hold.deadline):
                continue  # its caller will find out that it slept through the grant, and try again
            elif hold.current_loss() is not None:
                # Nothing to renew; the holder will release it, or forget it.
                if self._forgotten(hold):
                    self.give_back(hold, self.own)
            elif why := self._forgotten(hold):
                self.forget(hold, why)
            else:
                if hold.renew_at - 0.1 * hold.renewal_interval <= now:
                    renew.append(hold)
                next_at = min(next_at, hold.renew_at, hold.deadline)
        self._lent_threads.look()
        if renew:
            self._renew(renew)
            next_at = min([next_at, *(hold.renew_at for hold in renew)])
        self._scan_at = max(next_at, now + 0.02)

    def _forgotten(self, hold: Hold) -> str:
        if hold.fenced:
            return ""  # somebody's transaction still counts on it
        if hold.overdue:
            return hold.overdue
        if callers.owner_is_gone(hold):
            return "the thread or task that took it has ended"
        if hold.permit() is None:  # a signal that raised in its finaliser has cut that short
            return "it was garbage-collected"
        return ""

    def _renew(self, holds: list[Hold]) -> None:
        sent = boot_now()
        for hold in holds:
            hold.renewal_error = hold.renewal_error or "the database has not answered yet"
        try:
            renewal = self.backend.renew(self.own, [hold.held for hold in holds if hold.grant is not None])
        except BackendError as error:
            if not self._renewals_fail:
                logger.warning("Permits could not be renewed, trying on until their leases run out: %s", error)
            self._renewals_fail = True
            for hold in holds:
                hold.renewal_error = str(error.__cause__ or error).strip()
                hold.renew_at = boot_now() + min(1.0, hold.claim.lease / 16)
            return
        if self._renewals_fail:
            logger.warning("Permits are renewed again.")
            self._renewals_fail = False
        for hold in holds:
            if hold.permit_id in renewal.renewed:
                hold.renewed(sent)
            elif hold.releasing.locked() or not hold.settled:
                continue
            elif hold.permit_id in renewal.lost:
                hold.lose(renewal.lost[hold.permit_id])
            else:
                hold.renewal_error = "somebody's transaction keeps its row locked"
                hold.renew_at = boot_now() + min(1.0, hold.claim.lease / 16)
        for hold in holds:  # all renewals are noted by now: what the program makes of a wish may take its time
            if hold.permit_id in renewal.asked:
                events.ask(hold, renewal.asked[hold.permit_id])

    def _clear_doubts(self, now: float) -> None:
        started = time.monotonic()
        later = []
        for doubt in self._doubts:
            due, delay, resource, permit_id = doubt
            if due > now:
                later.append(doubt)
                continue
            try:
                if not self.own.unreachable(started):
                    self.backend.discard(self.own, resource, permit_id)
                    continue
            except BackendError:
                pass
            # What was sent before the database went away may reach it when it is back: look then, and a while later.
            later.append((boot_now() + max(delay, LOOK_AROUND), delay, resource, permit_id))
        self._doubts[:] = later

    # Showing that the process lives.

    def _opened(self, connection: BaseDatabaseWrapper) -> None:
        self.backend.opened(connection)
        self._reach.opened(connection)

    def _open(self) -> None:
        self._open_at = boot_now() + RELIGHT
        with contextlib.suppress(BackendError):  # who needs it will hear
            self.own.run(lambda cursor: None)

    def _shine(self, now: float) -> None:
        """See that the keeper's session stands while anything is held or waited for."""
        if not self.own.is_open:
            if self.presence.beacon and self._dark_since is None and self._reach.tied:
                self._dark_since, self._open_at = now, now
                self._reach.darken()
                for hold in list(self.holds.values()):
                    if hold.state is State.HELD:
                        hold.darkened(now + DARK)
            if self.holds and now >= self._open_at:
                self._open()
        if self._reach.reopened and self.own.is_open:
            self._reach.reopened = False
            if self.presence.beacon or self._dark_since is not None:
                # The rows must say whether the beacon is lit, and are proved anew.
                for hold in list(self.holds.values()):
                    if hold.state is State.HELD:
                        hold.renew_at = 0.0
                self._scan_at = 0.0
            self._dark_since = None
            with self.queue_lock:
                for arbiter in self.arbiters.values():
                    arbiter.look_soon()


class RecordingKeeper(CaringKeeper):
    """The part of the thread's keeper that notes what happens. Nothing is sent where it is noted."""

    def __init__(self, backend: BaseSemaphoreBackend) -> None:
        super().__init__(backend)
        self.history: Recorder = Recorder(self.alias, beside_rows=backend.released_on_disconnect)
        self._writer = Writer(self.history, self.own)

    # What is told.

    def acquire(self, hold: Hold, timeout: float | None) -> bool:
        """Get the hold granted within ``timeout`` seconds; see ``Keeper.acquire()``."""
        try:
            return super().acquire(hold, timeout)
        except AcquireTimeoutError:
            self._turned_away(hold)
            raise

    def settled(self, hold: Hold, answered: bool) -> bool:
        """After a wait: whether it is over; see ``Keeper.settled()``."""
        over = super().settled(hold, answered)
        if over and hold.kept and hold.state is State.HELD and hold.grant is not None:
            self.history.granted(hold.claim, hold.grant, hold.granted_at, hold.waited)
        return over

    def drop(self, hold: Hold) -> None:
        """The acquire ended without a grant."""
        super().drop(hold)
        self._turned_away(hold)

    def _turned_away(self, hold: Hold) -> None:
        tried_once = hold.patient_until is not None and hold.patient_until <= hold.arrived
        self.history.turned_away(hold.claim, None if tried_once else boot_now() - hold.arrived)

    def released(self, hold: Hold, freed: bool) -> None:
        """Note that the database has the slots back, or had given them to somebody else already."""
        super().released(hold, freed)
        loss = hold.loss
        if loss is not None and loss.reason is not LossReason.STOPPED:
            self._lost(hold, loss)  # another thread has found it, and may be about to tell of it
        elif self._ends(hold) and hold.grant is not None:
            detail = str(loss) if loss is not None else ""
            held = hold.releasing_since - hold.granted_at
            self.history.released(hold.claim, hold.grant, hold.releasing_since, max(0.0, held), detail)

    def tell_lost(self, hold: Hold) -> None:
        """Log a loss, and tell the program and the history."""
        super().tell_lost(hold)
        if hold.loss is not None:
            self._lost(hold, hold.loss)

    def _lost(self, hold: Hold, loss: Loss) -> None:
        if loss.reason is not LossReason.FORKED and self._ends(hold) and hold.grant is not None:
            self.history.lost(hold.claim, hold.grant, boot_now() - hold.granted_at, loss)

    def _ends(self, hold: Hold) -> bool:
        """Whether a grant that was told of ends now: it does so once."""
        return hold.settled and hold.kept and hold.recorded.acquire(blocking=False)

    # When it is written.

    def write_history(self, now: float) -> None:
        """Write some of it if it is time for that, and time is left."""
        if not self._writer.due(now):
            return
        if self._writer.shares and self.holds and not self.own.is_open:
            return  # to open it is no small matter while something is held
        self._writer.write(self._leisure(now))

    def end_history(self, since: float | None = None) -> None:
        """Write what there is: the thread ends, or the process, since an instant of ``time.monotonic()``."""
        if self._writer.unfinished:
            began, ends = time.monotonic() if since is None else since, since is not None
            self._writer.finish(began, lambda: not ends and bool(self.holds or self.arbiters))
        elif since is not None:
            self._writer.begin_anew()
        self._writer.leave()

    def last_words(self, since: float) -> None:
        """Write what there is, now that everything has been given back."""
        super().last_words(since)
        self.end_history(since)

    def _leisure(self, now: float) -> float:
        """How long a statement may take, in seconds: there are a few, and the nearest lease is to outlast them."""
        if not self.backend.supports_renewal:
            return LONGEST
        deadlines = [hold.deadline for hold in list(self.holds.values()) if hold.grant is not None and not hold.loss]
        left = [deadline - now for deadline in deadlines if deadline > now]
        statements = 3 if self._writer.shares else 8
        return min([LONGEST, *(each / statements for each in left)])
