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
from django_sqlsem.runtime.acquisition import Acquisition, State
from django_sqlsem.runtime.lent_threads import LentThreads
from django_sqlsem.runtime.presence import Reach
from django_sqlsem.runtime.queue import Arbiter
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.backends.base import BaseSemaphoreBackend, Grant, Granted, Queue, Request
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
        self.acquisitions: dict[int, Acquisition] = {}
        self.arbiters: dict[str, Arbiter] = {}
        #: Who waits in the database, by permit id.
        self.waiting: dict[str, Acquisition] = {}
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
    def doubt(self, request: Request) -> None:
        """Free what this claim may have got, now and again until its statement must have ended."""

    @abc.abstractmethod
    def renew_now(self, acquisition: Acquisition) -> None:
        """Have a grant proved without waiting for its next renewal."""

    def register(self, acquisition: Acquisition) -> None:
        """Know of a hold, before anything is sent for it."""
        self.acquisitions[id(acquisition)] = acquisition

    def session_here(self) -> Session:
        """Return where the calling thread's statements go: on SQLite, inside ``atomic()``, its own connection."""
        if not self.backend.process_local:
            connection = connections[self.alias]
            # There is one writer, and it may be this very transaction: waiting for it would never end.
            if connection.vendor == "sqlite" and connection.in_atomic_block:
                return CallerSession(connection)
        return self.work

    def withdraw(self, acquisition: Acquisition) -> None:
        """Leave the queue, unless it was granted at this very moment."""
        with self.queue_lock:
            if acquisition.state is not State.HELD:
                acquisition.state = State.OVER
            known = self.waiting.pop(acquisition.permit_id, None) is not None and acquisition.state is not State.HELD
            arbiter = self.arbiters.get(acquisition.request.line)
            if arbiter is not None and acquisition in arbiter.queue:
                if arbiter.enrolled is acquisition:
                    arbiter.unwanted.append(acquisition.request)
                    known = False
                arbiter.remove(acquisition)
        if arbiter is not None and (not arbiter.known or arbiter.unwanted):
            self.poke(arbiter)
        if known:  # it was struck between the statement that took its place and the answer
            self.doubt(acquisition.request)

    def ask_anew(self, acquisition: Acquisition) -> None:
        """Go on under a new permit id: what became of the old one is unknown."""
        with self.queue_lock:
            self.renew_claim(acquisition)

    def renew_claim(self, acquisition: Acquisition) -> None:
        """Give the hold another permit id; the lock is held."""
        self.waiting.pop(acquisition.permit_id, None)
        acquisition.fresh_claim()

    def present(self, request: Request) -> Request:
        """Return the claim with the way to reach this process as it is now."""
        return request if request.presence == self.presence else dataclasses.replace(request, presence=self.presence)

    def forget_arbiter(self, arbiter: Arbiter) -> bool:
        """Drop an arbiter nobody waits in. Return whether it was dropped."""
        with self.queue_lock:
            if not arbiter.idle:
                return False
            if self.arbiters.get(arbiter.key) is arbiter:
                del self.arbiters[arbiter.key]
            return True

    # Giving back.

    def release(self, acquisition: Acquisition) -> bool:
        """Give a permit back; idempotent. Return whether this call did. A thread with an event loop is not blocked.

        Raises ``BackendError``: then the keeper goes on trying by itself.
        """
        if acquisition.foreign or acquisition.grant is None or not acquisition.releasing.acquire(blocking=False):
            return False
        if callers.in_event_loop():
            acquisition.releasing_since = boot_now()
            callers.leave(acquisition)
            self.post(lambda: self.release_again(acquisition))
        else:
            self._release(acquisition, self.session_here())
        return True

    async def arelease(self, acquisition: Acquisition) -> bool:
        """Give a permit back from a coroutine, on the keeper's side; see ``release()``."""
        if acquisition.foreign or acquisition.grant is None or not acquisition.releasing.acquire(blocking=False):
            return False
        acquisition.releasing_since = boot_now()
        await self.call(lambda: self._release(acquisition, self.own))
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

    def give_back(self, acquisition: Acquisition, session: Session) -> None:
        """Give back what nobody will use, without a word to the caller."""
        if acquisition.grant is not None and acquisition.releasing.acquire(blocking=False):
            with contextlib.suppress(BackendError):
                self._release(acquisition, session)

    def _release(self, acquisition: Acquisition, session: Session) -> None:
        acquisition.releasing_since = boot_now()
        callers.leave(acquisition)
        try:
            # Who had to wait is likely to leave others waiting.
            mine = not isinstance(session, CallerSession)
            released = self.backend.release(session, acquisition.acquired, wanted=acquisition.waited > 0, hand_on=mine)
        except BaseException:
            if (gone := self.backend.taken_away(acquisition.acquired)) is not None:
                acquisition.lose(gone)  # perhaps long before
            self.post(lambda: self.release_again(acquisition))
            raise
        if isinstance(session, CallerSession):
            # If that transaction is rolled back, so is this release.
            resource, permit_id = acquisition.request.resource, acquisition.permit_id

            def again() -> None:
                if not self.backend.discard(self.own, resource, permit_id):
                    self.backend.hand_out(self.own, resource)

            transactions.at_transaction_end(self.alias, lambda: self.post(again))
        for granted in released.granted:
            self.deliver(granted, acquisition.releasing_since, acquisition.request.resource)
        self.released(acquisition, released.freed)

    @abc.abstractmethod
    def deliver(
        self, granted: Granted, sent: float | None = None, resource: Resource | None = None, *, at_once: bool = False
    ) -> None:
        """Give what was handed over to the hold that waits for it."""

    def released(self, acquisition: Acquisition, freed: bool) -> None:
        """Note that the database has the slots back, or had given them to somebody else already."""
        acquisition.released = True
        self.acquisitions.pop(id(acquisition), None)
        if not freed and acquisition.loss is None and not acquisition.release_retried:
            acquisition.lose(self.backend.taken_away(acquisition.acquired) or NO_LONGER_ITS_OWN)

    def release_again(self, acquisition: Acquisition) -> None:
        """Try a release that failed once more, on the keeper's side."""
        if acquisition.released:
            self.acquisitions.pop(id(acquisition), None)  # the release was interrupted after its end
        if acquisition.released or acquisition.grant is None or id(acquisition) not in self.acquisitions:
            return
        acquisition.releasing_since = boot_now()
        acquisition.release_retried = (
            True  # the caller may only stand in line for its session: who comes second frees nothing
        )
        try:
            released = self.backend.release(self.own, acquisition.acquired)
            for granted in released.granted:
                self.deliver(granted, acquisition.releasing_since, acquisition.request.resource)
            self.released(acquisition, True)  # else the try that failed may have freed them all the same
        except BackendError as error:
            extra = {"semaphore": acquisition.request.resource.name, "what": "release_failed"}
            logger.warning("%s could not be given back yet: %s", acquisition.request.resource.name, error, extra=extra)

    def abandon(self, acquisition: Acquisition) -> None:
        """The caller has gone in the middle of an acquire: nothing that was or will be granted may stay."""
        acquisition.abandoned = True  # seen by the arbiter before it hands anything over
        self.inbox_put(lambda: self._clear(acquisition))

    def inbox_put(self, step: Callable[[], object]) -> None:
        """Leave a step for the keeper; safe in finalisers and signal handlers."""
        self.inbox.put(step)

    def _clear(self, acquisition: Acquisition) -> None:
        if id(acquisition) not in self.acquisitions:
            return
        callers.leave(acquisition)
        self.withdraw(acquisition)
        if acquisition.grant is not None:
            if not acquisition.released:
                acquisition.releasing.acquire(blocking=False)
                self.release_again(acquisition)
        else:
            if acquisition.asked:
                self.doubt(acquisition.request)
            self.acquisitions.pop(id(acquisition), None)

    def drop(self, acquisition: Acquisition) -> None:
        """The acquire ended without a grant, and nothing is in doubt."""
        callers.leave(acquisition)
        self.withdraw(acquisition)
        self.acquisitions.pop(id(acquisition), None)

    def forget(self, acquisition: Acquisition, why: str) -> None:
        """The program forgot a permit: say so, and give it back."""
        if (
            acquisition.foreign
            or acquisition.abandoned
            or acquisition.released
            or acquisition.grant is None
            or acquisition.releasing.locked()
        ):
            return
        events.log_forgotten(acquisition, why)
        acquisition.lose(Loss(LossReason.FORGOTTEN, f"it was forgotten: {why}"))
        self.give_back(acquisition, self.own)

    def tell_lost(self, acquisition: Acquisition) -> None:
        """Log a loss, and run the callbacks on a thread of their own."""
        events.tell(acquisition)

    def after_fork(self) -> None:  # noqa: B027 - only some have something to let go of
        """In a forked child: let go of what is the parent's."""

    def stop(self) -> None:
        """Give everything back and close the connections: the process ends, or a test does."""
        started = time.monotonic()
        for acquisition in list(self.acquisitions.values()):
            if acquisition.grant is not None and not acquisition.released and not acquisition.fenced:
                acquisition.loss = acquisition.loss or Loss(LossReason.STOPPED, "the process is ending")
                callers.leave(acquisition)
                acquisition.releasing.acquire(blocking=False)  # one whose release failed before is tried again too
                if not self.own.unreachable(started):  # else the leases run out: nobody waits for every one of them
                    self.release_again(acquisition)
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

    def acquire(self, acquisition: Acquisition, timeout: float | None) -> bool:
        """Get the hold granted within ``timeout`` seconds, blocking this thread. Return whether it was."""
        acquisition.patient_until = None if timeout is None else acquisition.arrived + timeout
        self.register(acquisition)
        session = self.session_here()
        mine = not isinstance(session, CallerSession)
        if timeout != 0 and mine:
            self._stand_apart(acquisition, session)
        if timeout == 0 and mine and (line := self._left(acquisition)) is not None:
            cleared = threading.Event()
            self.post(partial(line.step, self.own))
            self.post(cleared.set)
            cleared.wait(CLEARED)
        while self.may_go_first(acquisition) and self.try_now(
            acquisition, session, enrol=mine and self._may_wait(acquisition, timeout)
        ):
            if isinstance(session, CallerSession):
                # If that transaction is rolled back, so is this grant: have the keeper look at once.
                transactions.at_transaction_end(self.alias, lambda: self.renew_now(acquisition))
            if self.settled(acquisition, True):
                return True
        if timeout == 0:
            return False
        if isinstance(session, CallerSession):
            raise AcquireTimeoutError(
                f"No slot of {acquisition.request.resource.name!r} is free, and waiting inside atomic() on SQLite "
                "could never end: its one writer is this transaction. Acquire outside atomic(), use timeout=0, or keep "
                "the locks in a second file named by SQLSEM['DATABASE'].",
                name=acquisition.request.resource.name,
                timeout=timeout,
            )
        deadline = None if timeout is None else acquisition.arrived + timeout
        while True:
            self.enqueue(acquisition)
            answered = acquisition.wait(None if deadline is None else max(0.0, deadline - boot_now()))
            if self.settled(acquisition, answered):
                return acquisition.state is State.HELD

    async def aacquire(self, acquisition: Acquisition, timeout: float | None) -> bool:
        """Get the hold granted within ``timeout`` seconds, holding no thread meanwhile. Return whether it was."""
        acquisition.patient_until = None if timeout is None else acquisition.arrived + timeout
        self.register(acquisition)
        future = acquisition.prepare_future()
        self.post(lambda: self._first_try(acquisition, once=timeout == 0))
        remaining = None if timeout in (None, 0) else timeout
        while True:
            await acquisition.answered(future, remaining)
            if self.settled(acquisition, future.done()):
                return acquisition.state is State.HELD
            future = acquisition.prepare_future()
            remaining = None if timeout is None else max(0.0, acquisition.arrived + timeout - boot_now())
            self.enqueue(acquisition)

    def _left(self, acquisition: Acquisition) -> Arbiter | None:
        """Return the queue of the name if nobody of this process waits in it, and its place is just being given up."""
        arbiter = self.arbiters.get(acquisition.request.resource.key)
        return arbiter if arbiter is not None and not arbiter.queue else None

    def _stand_apart(self, acquisition: Acquisition, session: Session) -> None:
        """A task that has come back does not stand behind those of this process who came after its first try."""
        if (
            acquisition.request.rank
            and acquisition.request.line in self.arbiters
            and self.backend.keeps_place(session, acquisition.request)
        ):
            acquisition.stand_apart()

    def may_go_first(self, acquisition: Acquisition) -> bool:
        """Whether nobody waits for this name in this process, or the claim barges, or has a place of its own."""
        request = acquisition.request
        return not request.fair or bool(request.rank) or request.line not in self.arbiters

    def _may_wait(self, acquisition: Acquisition, timeout: float | None) -> bool:
        # Where others of this process wait already, one that barges joins them after its try.
        return timeout != 0 and acquisition.request.line not in self.arbiters

    def try_now(self, acquisition: Acquisition, session: Session, *, enrol: bool) -> bool:
        """Claim once, without waiting; ``enrol``: or else take a place in the queue. Return whether it is granted."""
        while True:
            sent = acquisition.proved = boot_now()
            acquisition.asked = True
            attempts = session.attempts
            try:
                if not enrol:
                    grant = self.backend.claim(session, acquisition.request)
                    if grant is None:
                        return False
                    return self.accept(
                        acquisition, acquisition.permit_id, grant, sent, acquisition.request.lease, at_once=True
                    )
                self.waiting[acquisition.permit_id] = acquisition
                place = Place(acquisition.arrived, waiting=1, patience=acquisition.patience(sent))
                waited = self.backend.enrol(session, acquisition.request, place, first=True)
            except BackendError as error:
                if session.attempts != attempts:  # else nothing was asked of the database
                    self.doubt(acquisition.request)
                self.ask_anew(acquisition)
                if error.stale_connection:
                    continue
                raise
            for granted in waited.granted:
                self.deliver(granted, sent, acquisition.request.resource, at_once=waited.at_once)
            if waited.queue is not None:
                self._join(acquisition, waited.queue, sent, session)
            return acquisition.state is State.HELD

    def _join(self, acquisition: Acquisition, queue: Queue, sent: float, session: Session) -> None:
        """The database knows of the hold: let the process know too, unless it has been granted by now."""
        with self.queue_lock:
            if acquisition.state is State.HELD and not acquisition.abandoned:
                return
            wanted = acquisition.state is State.NEW and not acquisition.abandoned
            if wanted:
                if (
                    acquisition.request.rank and acquisition.request.line in self.arbiters
                ):  # the place may be older than theirs
                    acquisition.stand_apart()
                arbiter = self._arbiter(acquisition)
                # Who stands in this queue comes last: if this thread is struck before, no place is taken twice.
                if first := not arbiter.queue:
                    arbiter.enrolled_by(acquisition, queue, sent)
                else:  # two threads asked at the same time: one place is enough
                    arbiter.unwanted.append(acquisition.request)
                    self.renew_claim(acquisition)
                self._queue(arbiter, acquisition)
            else:
                self.waiting.pop(acquisition.permit_id, None)
        if not wanted:
            try:
                self.backend.leave(session, acquisition.request)
            except BackendError:  # it is over
                self.doubt(acquisition.request)
        elif first:
            self.reconsider(arbiter)
        else:
            self.poke(arbiter)

    def accept(
        self,
        acquisition: Acquisition,
        permit_id: str,
        grant: Grant,
        sent: float,
        lasts: float,
        *,
        at_once: bool = False,
    ) -> bool:
        """Give a grant to its hold, unless that has given up meanwhile: then the slots go back."""
        with self.queue_lock:
            if acquisition.permit_id != permit_id:
                return False  # it asks anew by now, and the old claim is in doubt already
            again = acquisition.state is State.HELD and not acquisition.abandoned  # the same news by two ways
            wanted = not acquisition.abandoned and acquisition.state in (State.NEW, State.QUEUED)
            if wanted:
                acquisition.granted(grant, sent, min(lasts, acquisition.request.lease), at_once=at_once)
            arbiter = self._unqueue(acquisition)  # again too: who told of it first may have been struck before that
        if not wanted and not again:
            self.doubt(acquisition.request)
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
        acquisition = self.waiting.get(granted.permit_id)
        if acquisition is None:
            # It gave up, and whoever took it out of the queue gives back what it got; or nobody here knows of it.
            same = [each for each in list(self.acquisitions.values()) if each.permit_id == granted.permit_id]
            known = any(self.backend.supports_renewal or not each.releasing.locked() for each in same)
            if not known:  # one that is just being given back was served on another session: this is one grant more
                for each in same:
                    each.release_retried = True  # who comes second frees nothing
            if not known and resource is not None:
                self.doubt_permit(resource, granted.permit_id)
            return
        try:
            proved = acquisition.proved if sent is None else sent
            wanted = self.accept(acquisition, granted.permit_id, granted.grant, proved, granted.lasts, at_once=at_once)
            if wanted and acquisition.queued:
                acquisition.answer()
        finally:  # if this thread is struck, the one that waits is told all the same
            if acquisition.state is State.HELD and acquisition.queued and not acquisition.woken:
                self.answer_again(acquisition)

    def doubt(self, request: Request) -> None:
        """Free what this claim may have got, now and again until its statement must have ended."""
        self.doubt_permit(request.resource, request.permit_id)

    @abc.abstractmethod
    def doubt_permit(self, resource: Resource, permit_id: str) -> None:
        """Free what the claim with this id may have got."""

    def answer_again(self, acquisition: Acquisition) -> None:
        """Tell a waiter of its grant, whose messenger was struck on the way."""
        with self.queue_lock:
            arbiter = self._unqueue(acquisition)
        acquisition.answer()
        if arbiter is not None and not arbiter.known:
            self.reconsider(arbiter)

    def _unqueue(self, acquisition: Acquisition) -> Arbiter | None:
        """Have a hold wait no longer; the lock is held. Return the queue of its name, if there still is one."""
        self.waiting.pop(acquisition.permit_id, None)
        arbiter = self.arbiters.get(acquisition.request.line)
        if arbiter is not None and acquisition in arbiter.queue:
            arbiter.remove(acquisition)
            if arbiter.idle:
                del self.arbiters[arbiter.key]
                return None
        return arbiter

    def _queue(self, arbiter: Arbiter, acquisition: Acquisition) -> None:
        acquisition.state, acquisition.queued = State.QUEUED, True
        arbiter.queue.append(acquisition)

    def _first_try(self, acquisition: Acquisition, *, once: bool) -> None:
        if acquisition.abandoned or acquisition.state is not State.NEW:
            return
        try:
            if once and (line := self._left(acquisition)) is not None:
                line.step(self.own)
            if not once:
                self._stand_apart(acquisition, self.own)
            enrol = self._may_wait(acquisition, 0 if once else None)
            granted = self.may_go_first(acquisition) and self.try_now(acquisition, self.own, enrol=enrol)
            if granted or once:
                acquisition.answer()
            else:
                self.enqueue(acquisition)
        except Exception as error:  # noqa: BLE001 - it belongs to the waiting task, not to this thread
            acquisition.answer(error)

    def enqueue(self, acquisition: Acquisition) -> None:
        """Put the hold at the end of its name's queue, unless it is there."""
        with self.queue_lock:
            if acquisition.abandoned or acquisition.state is not State.NEW:
                return
            arbiter = self._arbiter(acquisition)
            self._queue(arbiter, acquisition)
            known = arbiter.known
        if not known:
            self.poke(arbiter)

    def _arbiter(self, acquisition: Acquisition) -> Arbiter:
        key = acquisition.request.line
        if (arbiter := self.arbiters.get(key)) is None:
            arbiter = self.arbiters[key] = Arbiter(self, key)
        return arbiter

    def settled(self, acquisition: Acquisition, answered: bool) -> bool:
        """After a wait: whether it is over. Raises what the keeper met. A grant that was slept through is not one."""
        if not answered:
            self.withdraw(acquisition)
        if acquisition.error is not None:
            raise acquisition.take_error()
        if acquisition.slept_through():
            self.doubt(acquisition.request)
            acquisition.rearm()
            return False
        acquisition.settled = True
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

    def renew_now(self, acquisition: Acquisition) -> None:
        """Have a grant proved at once."""

        def renew() -> None:
            acquisition.renew_at = self._scan_at = 0.0

        self.post(renew)

    def try_now(self, acquisition: Acquisition, session: Session, *, enrol: bool) -> bool:
        """Claim once, without waiting; if this process is killed right after it, others will see that."""
        # The keeper's thread may be about to open it: whoever comes meanwhile would claim as one whom nobody reaches.
        ready = self.own.is_open and (self._reach.known or not isinstance(self.own, OwnSession))
        if not ready and self._dark_since is None and isinstance(session, OwnSession):
            session.run(lambda cursor: None)  # if the database cannot be reached, one try is enough to tell
            if isinstance(self.own, OwnSession) and config(self.alias).beacons:
                with contextlib.suppress(BackendError):  # the keeper tries on
                    self.own.run(lambda cursor: None)
        acquisition.request = self.present(acquisition.request)
        return super().try_now(acquisition, session, enrol=enrol)

    def _queue(self, arbiter: Arbiter, acquisition: Acquisition) -> None:
        super()._queue(arbiter, acquisition)
        if acquisition.beside:  # who holds nothing keeps nobody waiting
            self._watch.add(acquisition)

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
            known = [
                acquisition
                for acquisition in self.acquisitions.values()
                if not (acquisition.told or acquisition.abandoned)
            ]
            left = [acquisition for acquisition in known if acquisition.asked and acquisition.grant is None]
            for acquisition in left:
                acquisition.abandoned = True  # if its thread goes on after all
                self.waiting.pop(acquisition.permit_id, None)
        for acquisition in left:
            acquisition.answer(BackendError("The process is ending."))
        if left:
            self.work.close()  # when the statement under way has ended
        for acquisition in left:
            if not self.own.unreachable(started):
                with contextlib.suppress(BackendError):
                    self.backend.discard(self.own, acquisition.request.resource, acquisition.permit_id)

    def break_off(self, acquisition: Acquisition, error: Exception) -> bool:
        """Have a wait end with an error. Return whether it was still waiting."""
        with self.queue_lock:
            arbiter = self.arbiters.get(acquisition.request.line)
            if arbiter is None or acquisition not in arbiter.queue or acquisition.state is not State.QUEUED:
                return False
            if arbiter.enrolled is acquisition:
                arbiter.unwanted.append(acquisition.request)
            arbiter.remove(acquisition)
            self.waiting.pop(acquisition.permit_id, None)
            acquisition.state = State.OVER
        acquisition.answer(error)
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
        renew: list[Acquisition] = []
        for acquisition in list(self.acquisitions.values()):
            if acquisition.state is State.HELD and acquisition.queued and not acquisition.woken:
                self.answer_again(acquisition)  # whoever brought its grant was struck
            if acquisition.releasing.locked():
                if now - acquisition.releasing_since > LOOK_AROUND and not self.own.unreachable(started):
                    self.release_again(acquisition)
            elif acquisition.abandoned:
                if not self.own.unreachable(started):  # its caller may have been struck before it could say so
                    self._clear(acquisition)
            elif (
                acquisition.state is not State.HELD
                or not acquisition.kept
                or (not acquisition.settled and boot_now() >= acquisition.deadline)
            ):
                continue  # its caller will find out that it slept through the grant, and try again
            elif acquisition.current_loss() is not None:
                # Nothing to renew; the holder will release it, or forget it.
                if self._forgotten(acquisition):
                    self.give_back(acquisition, self.own)
            elif why := self._forgotten(acquisition):
                self.forget(acquisition, why)
            else:
                if acquisition.renew_at - 0.1 * acquisition.renewal_interval <= now:
                    renew.append(acquisition)
                next_at = min(next_at, acquisition.renew_at, acquisition.deadline)
        self._lent_threads.look()
        if renew:
            self._renew(renew)
            next_at = min([next_at, *(acquisition.renew_at for acquisition in renew)])
        self._scan_at = max(next_at, now + 0.02)

    def _forgotten(self, acquisition: Acquisition) -> str:
        if acquisition.fenced:
            return ""  # somebody's transaction still counts on it
        if acquisition.overdue:
            return acquisition.overdue
        if callers.owner_is_gone(acquisition):
            return "the thread or task that took it has ended"
        if acquisition.permit() is None:  # a signal that raised in its finaliser has cut that short
            return "it was garbage-collected"
        return ""

    def _renew(self, acquisitions: list[Acquisition]) -> None:
        sent = boot_now()
        for acquisition in acquisitions:
            acquisition.renewal_error = acquisition.renewal_error or "the database has not answered yet"
        try:
            renewal = self.backend.renew(
                self.own, [acquisition.acquired for acquisition in acquisitions if acquisition.grant is not None]
            )
        except BackendError as error:
            if not self._renewals_fail:
                logger.warning("Permits could not be renewed, trying on until their leases run out: %s", error)
            self._renewals_fail = True
            for acquisition in acquisitions:
                acquisition.renewal_error = str(error.__cause__ or error).strip()
                acquisition.renew_at = boot_now() + min(1.0, acquisition.request.lease / 16)
            return
        if self._renewals_fail:
            logger.warning("Permits are renewed again.")
            self._renewals_fail = False
        for acquisition in acquisitions:
            if acquisition.permit_id in renewal.renewed:
                acquisition.renewed(sent)
            elif acquisition.releasing.locked() or not acquisition.settled:
                continue
            elif acquisition.permit_id in renewal.lost:
                acquisition.lose(renewal.lost[acquisition.permit_id])
            else:
                acquisition.renewal_error = "somebody's transaction keeps its row locked"
                acquisition.renew_at = boot_now() + min(1.0, acquisition.request.lease / 16)
        for (
            acquisition
        ) in acquisitions:  # all renewals are noted by now: what the program makes of a wish may take its time
            if acquisition.permit_id in renewal.asked:
                events.ask(acquisition, renewal.asked[acquisition.permit_id])

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
                for acquisition in list(self.acquisitions.values()):
                    if acquisition.state is State.HELD:
                        acquisition.darkened(now + DARK)
            if self.acquisitions and now >= self._open_at:
                self._open()
        if self._reach.reopened and self.own.is_open:
            self._reach.reopened = False
            if self.presence.beacon or self._dark_since is not None:
                # The rows must say whether the beacon is lit, and are proved anew.
                for acquisition in list(self.acquisitions.values()):
                    if acquisition.state is State.HELD:
                        acquisition.renew_at = 0.0
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

    def acquire(self, acquisition: Acquisition, timeout: float | None) -> bool:
        """Get the hold granted within ``timeout`` seconds; see ``Keeper.acquire()``."""
        try:
            return super().acquire(acquisition, timeout)
        except AcquireTimeoutError:
            self._turned_away(acquisition)
            raise

    def settled(self, acquisition: Acquisition, answered: bool) -> bool:
        """After a wait: whether it is over; see ``Keeper.settled()``."""
        over = super().settled(acquisition, answered)
        if over and acquisition.kept and acquisition.state is State.HELD and acquisition.grant is not None:
            self.history.granted(acquisition.request, acquisition.grant, acquisition.granted_at, acquisition.waited)
        return over

    def drop(self, acquisition: Acquisition) -> None:
        """The acquire ended without a grant."""
        super().drop(acquisition)
        self._turned_away(acquisition)

    def _turned_away(self, acquisition: Acquisition) -> None:
        tried_once = acquisition.patient_until is not None and acquisition.patient_until <= acquisition.arrived
        self.history.turned_away(acquisition.request, None if tried_once else boot_now() - acquisition.arrived)

    def released(self, acquisition: Acquisition, freed: bool) -> None:
        """Note that the database has the slots back, or had given them to somebody else already."""
        super().released(acquisition, freed)
        loss = acquisition.loss
        if loss is not None and loss.reason is not LossReason.STOPPED:
            self._lost(acquisition, loss)  # another thread has found it, and may be about to tell of it
        elif self._ends(acquisition) and acquisition.grant is not None:
            detail = str(loss) if loss is not None else ""
            held = acquisition.releasing_since - acquisition.granted_at
            self.history.released(
                acquisition.request, acquisition.grant, acquisition.releasing_since, max(0.0, held), detail
            )

    def tell_lost(self, acquisition: Acquisition) -> None:
        """Log a loss, and tell the program and the history."""
        super().tell_lost(acquisition)
        if acquisition.loss is not None:
            self._lost(acquisition, acquisition.loss)

    def _lost(self, acquisition: Acquisition, loss: Loss) -> None:
        if loss.reason is not LossReason.FORKED and self._ends(acquisition) and acquisition.grant is not None:
            self.history.lost(acquisition.request, acquisition.grant, boot_now() - acquisition.granted_at, loss)

    def _ends(self, acquisition: Acquisition) -> bool:
        """Whether a grant that was told of ends now: it does so once."""
        return acquisition.settled and acquisition.kept and acquisition.recorded.acquire(blocking=False)

    # When it is written.

    def write_history(self, now: float) -> None:
        """Write some of it if it is time for that, and time is left."""
        if not self._writer.due(now):
            return
        if self._writer.shares and self.acquisitions and not self.own.is_open:
            return  # to open it is no small matter while something is held
        self._writer.write(self._leisure(now))

    def end_history(self, since: float | None = None) -> None:
        """Write what there is: the thread ends, or the process, since an instant of ``time.monotonic()``."""
        if self._writer.unfinished:
            began, ends = time.monotonic() if since is None else since, since is not None
            self._writer.finish(began, lambda: not ends and bool(self.acquisitions or self.arbiters))
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
        deadlines = [
            acquisition.deadline
            for acquisition in list(self.acquisitions.values())
            if acquisition.grant is not None and not acquisition.loss
        ]
        left = [deadline - now for deadline in deadlines if deadline > now]
        statements = 3 if self._writer.shares else 8
        return min([LONGEST, *(each / statements for each in left)])
