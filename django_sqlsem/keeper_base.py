"""Giving back: what every keeper does with a permit that is released, forgotten, abandoned, or left at the end."""

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
from typing import TYPE_CHECKING, Final, TypeVar

from django.db import connections

from django_sqlsem import losses, scopes, transactions
from django_sqlsem.backends.base import Presence
from django_sqlsem.caller_sessions import CallerSession
from django_sqlsem.clocks import boot_now
from django_sqlsem.exceptions import BackendError
from django_sqlsem.holds import Hold, State
from django_sqlsem.sessions import OwnSession, Session
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django_sqlsem.arbiter import Arbiter
    from django_sqlsem.backends.base import BaseSemaphoreBackend, Claim, Granted
    from django_sqlsem.naming import Resource

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
        if scopes.in_event_loop():
            hold.releasing_since = boot_now()
            scopes.leave(hold)
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
        scopes.refuse_other_loops()
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
        scopes.leave(hold)
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
        scopes.leave(hold)
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
        scopes.leave(hold)
        self.withdraw(hold)
        self.holds.pop(id(hold), None)

    def forget(self, hold: Hold, why: str) -> None:
        """The program forgot a permit: say so, and give it back."""
        if hold.foreign or hold.abandoned or hold.released or hold.grant is None or hold.releasing.locked():
            return
        losses.log_forgotten(hold, why)
        hold.lose(Loss(LossReason.FORGOTTEN, f"it was forgotten: {why}"))
        self.give_back(hold, self.own)

    def tell_lost(self, hold: Hold) -> None:
        """Log a loss, and run the callbacks on a thread of their own."""
        losses.tell(hold)

    def after_fork(self) -> None:  # noqa: B027 - only some have something to let go of
        """In a forked child: let go of what is the parent's."""

    def stop(self) -> None:
        """Give everything back and close the connections: the process ends, or a test does."""
        started = time.monotonic()
        for hold in list(self.holds.values()):
            if hold.grant is not None and not hold.released and not hold.fenced:
                hold.loss = hold.loss or Loss(LossReason.STOPPED, "the process is ending")
                scopes.leave(hold)
                hold.releasing.acquire(blocking=False)  # one whose release failed before is tried again too
                if not self.own.unreachable(started):  # else the leases run out: nobody waits for every one of them
                    self.release_again(hold)
        self.last_words(started)
        self.work.close()
        self.own.close()

    def last_words(self, since: float) -> None:  # noqa: B027 - only some have something to say
        """Everything has been given back that can be, since an instant of ``time.monotonic()``; what is left to do."""
