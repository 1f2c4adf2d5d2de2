"""One keeper per process and database: it claims, waits, gives back, and keeps what is held alive."""

from __future__ import annotations

import abc
import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from django_sqlsem import transactions
from django_sqlsem.arbiter import Arbiter
from django_sqlsem.backends.base import Place
from django_sqlsem.caller_sessions import CallerSession
from django_sqlsem.clocks import boot_now
from django_sqlsem.exceptions import AcquireTimeoutError, BackendError
from django_sqlsem.holds import Hold, State
from django_sqlsem.keeper_base import KeeperBase
from django_sqlsem.sessions import Session

if TYPE_CHECKING:
    from django_sqlsem.backends.base import Claim, Grant, Granted, Queue
    from django_sqlsem.history.recorder import Recorder
    from django_sqlsem.naming import Resource

logger = logging.getLogger("django_sqlsem")

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
