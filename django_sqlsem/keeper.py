"""One keeper per process and database: it claims, waits, gives back, and keeps what is held alive."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from django.db import connections

from django_sqlsem import losses, scopes, transactions
from django_sqlsem.arbiter import Arbiter
from django_sqlsem.clocks import boot_now
from django_sqlsem.exceptions import AcquireTimeoutError, BackendError
from django_sqlsem.holds import Hold, State
from django_sqlsem.sessions import CallerSession, OwnSession, Session
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django_sqlsem.backends.base import BaseSemaphoreBackend, Claim, Grant

logger = logging.getLogger("django_sqlsem")

T = TypeVar("T")


class Keeper:
    """What every keeper does; ``ThreadKeeper`` runs its steps in a thread of its own, ``InlineKeeper`` at once.

    The caller's own thread makes the first try and the release, on the ``work`` session; whatever must go on
    without the caller is posted to the keeper, which uses the session ``own``. A hold is registered before its
    claim is sent, so that nothing that may have been granted is ever unknown here.
    """

    def __init__(self, backend: BaseSemaphoreBackend) -> None:
        self.backend = backend
        self.alias = backend.alias
        self.work = OwnSession(backend.alias)
        self.own = OwnSession(backend.alias)
        self.holds: dict[int, Hold] = {}
        self.arbiters: dict[str, Arbiter] = {}
        self.queue_lock = threading.Lock()
        # Its put() may be called at any moment, from a finaliser too.
        self.inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    # How steps are run: the two kinds differ in these.

    def post(self, step: Callable[[], object]) -> None:
        """Run a step soon, on the keeper's side."""
        raise NotImplementedError  # pragma: no cover - abstract

    def poke(self, arbiter: Arbiter) -> None:
        """Have the arbiter look again now."""
        raise NotImplementedError  # pragma: no cover - abstract

    def doubt(self, claim: Claim) -> None:
        """Free what this claim may have got, now and again until its statement must have ended."""
        raise NotImplementedError  # pragma: no cover - abstract

    def register(self, hold: Hold) -> None:
        """Know of a hold, before anything is sent for it."""
        self.holds[id(hold)] = hold

    # Acquiring, in the caller's thread or from its event loop.

    def session_here(self) -> Session:
        """Return where the calling thread's statements go: on SQLite, inside ``atomic()``, its own connection."""
        if not self.backend.process_local:
            connection = connections[self.alias]
            # There is one writer, and it may be this very transaction: waiting for it would never end.
            if connection.vendor == "sqlite" and connection.in_atomic_block:
                return CallerSession(connection)
        return self.work

    def acquire(self, hold: Hold, timeout: float | None) -> bool:
        """Get the hold granted within ``timeout`` seconds, blocking this thread. Return whether it was."""
        self.register(hold)
        session = self.session_here()
        while self.may_go_first(hold) and self.try_now(hold, session):
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
        self.register(hold)
        future = hold.prepare_future()
        self.post(lambda: self._first_try(hold, once=timeout == 0))
        remaining = None if timeout in (None, 0) else timeout
        while True:
            await asyncio.wait({future}, timeout=remaining)
            if self.settled(hold, future.done()):
                return hold.state is State.HELD
            future = hold.prepare_future()
            remaining = None if timeout is None else max(0.0, hold.arrived + timeout - boot_now())
            self.enqueue(hold)

    def may_go_first(self, hold: Hold) -> bool:
        """Whether nobody waits for this name in this process, or the claim barges."""
        return not hold.claim.fair or hold.claim.resource.key not in self.arbiters

    def try_now(self, hold: Hold, session: Session) -> bool:
        """Claim once, without waiting."""
        while True:
            sent = boot_now()
            try:
                grant = self.backend.claim(session, hold.claim)
            except BackendError as error:
                self.doubt(hold.claim)
                hold.fresh_claim()
                if error.stale_connection:
                    continue
                raise
            return grant is not None and self.accept(hold, grant, sent)

    def accept(self, hold: Hold, grant: Grant, sent: float) -> bool:
        """Give a grant to its hold, unless that has given up meanwhile: then the slots go back."""
        with self.queue_lock:
            wanted = not hold.abandoned and hold.state in (State.NEW, State.QUEUED)
            if wanted:
                hold.granted(grant, sent)
        if not wanted:
            self.doubt(hold.claim)
        return wanted

    def _first_try(self, hold: Hold, *, once: bool) -> None:
        if hold.abandoned:
            return
        try:
            granted = self.may_go_first(hold) and self.try_now(hold, self.own)
            if granted or once:
                hold.answer()
            else:
                self.enqueue(hold)
        except Exception as error:  # noqa: BLE001 - it belongs to the waiting task, not to this thread
            hold.answer(error)

    def enqueue(self, hold: Hold) -> None:
        """Put the hold at the end of its name's queue."""
        with self.queue_lock:
            if hold.abandoned or hold.state is State.OVER:
                return
            arbiter = self.arbiters.get(hold.claim.resource.key)
            if arbiter is None:
                arbiter = self.arbiters[hold.claim.resource.key] = Arbiter(self)
            hold.state = State.QUEUED
            arbiter.queue.append(hold)
        self.poke(arbiter)

    def settled(self, hold: Hold, answered: bool) -> bool:
        """After a wait: whether it is over. Raises what the keeper met. A grant that was slept through is not one."""
        if not answered:
            self.withdraw(hold)
        if hold.error is not None:
            raise hold.error
        if hold.slept_through():
            self.doubt(hold.claim)
            hold.rearm()
            return False
        return True

    def withdraw(self, hold: Hold) -> None:
        """Leave the queue, unless it was granted at this very moment."""
        with self.queue_lock:
            if hold.state is not State.HELD:
                hold.state = State.OVER
            arbiter = self.arbiters.get(hold.claim.resource.key)
            if arbiter is not None and hold in arbiter.queue:
                arbiter.queue.remove(hold)
        if arbiter is not None:
            self.poke(arbiter)

    def forget_arbiter(self, arbiter: Arbiter) -> bool:
        """Drop an arbiter nobody waits in. Return whether it was dropped."""
        with self.queue_lock:
            if arbiter.queue:
                return False
            for key, known in list(self.arbiters.items()):
                if known is arbiter:
                    del self.arbiters[key]
            return True

    # Giving back.

    def release(self, hold: Hold) -> None:
        """Give a permit back; idempotent. Raises ``BackendError``: then the keeper goes on trying by itself."""
        if hold.foreign or hold.grant is None or not hold.releasing.acquire(blocking=False):
            return
        self._release(hold, self.session_here())

    async def arelease(self, hold: Hold) -> None:
        """Give a permit back from a coroutine, on the keeper's side. Raises ``BackendError`` like ``release()``."""
        if hold.foreign or hold.grant is None or not hold.releasing.acquire(blocking=False):
            return
        hold.releasing_since = boot_now()
        await self.call(lambda: self._release(hold, self.own))

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the keeper's side, and return what it returns. It runs even if this task is cancelled."""
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
        if hold.grant is None or not hold.releasing.acquire(blocking=False):
            return
        with contextlib.suppress(BackendError):
            self._release(hold, session)

    def _release(self, hold: Hold, session: Session) -> None:
        hold.releasing_since = boot_now()
        scopes.leave(hold)
        try:
            freed = self.backend.release(session, hold.held)
        except BaseException:
            self.post(lambda: self.release_again(hold))
            raise
        if isinstance(session, CallerSession):
            # If that transaction is rolled back, so is this release.
            resource, permit_id = hold.claim.resource, hold.permit_id
            again = partial(self.backend.discard, self.own, resource, permit_id)
            transactions.at_transaction_end(self.alias, lambda: self.post(again))
        self.released(hold, freed)

    def released(self, hold: Hold, freed: bool) -> None:
        """Note that the database has the slots back, or had given them to somebody else already."""
        hold.released = True
        self.holds.pop(id(hold), None)
        if not freed and hold.loss is None:
            hold.lose(Loss(LossReason.EXPIRED, "when it was released, its slot was no longer its own"))
        arbiter = self.arbiters.get(hold.claim.resource.key)
        if arbiter is not None:
            self.poke(arbiter)

    def release_again(self, hold: Hold) -> None:
        """Try a release that failed once more, on the keeper's side."""
        if hold.released:
            self.holds.pop(id(hold), None)  # the release was interrupted after its end
        if hold.released or hold.grant is None or id(hold) not in self.holds:
            return
        hold.releasing_since = boot_now()
        try:
            self.backend.release(self.own, hold.held)
            self.released(hold, True)  # else the try that failed may have freed them all the same
        except BackendError as error:
            logger.warning("%s could not be given back yet: %s", hold.claim.resource.name, error)

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
            self.doubt(hold.claim)
            self.holds.pop(id(hold), None)

    def drop(self, hold: Hold) -> None:
        """The acquire ended without a grant, and nothing is in doubt."""
        scopes.leave(hold)
        self.withdraw(hold)
        self.holds.pop(id(hold), None)

    def forget(self, hold: Hold, why: str) -> None:
        """The program forgot a permit: say so, and give it back."""
        if hold.foreign or hold.released or hold.grant is None or hold.releasing.locked():
            return
        who = f"{hold.claim.resource.name!r} slot {', '.join(map(str, hold.grant.slots))}"
        logger.error("A permit of %s was forgotten (%s) and is given back; use a with block.", who, why)
        hold.lose(Loss(LossReason.FORGOTTEN, f"it was forgotten: {why}"))
        self.give_back(hold, self.own)

    def tell_lost(self, hold: Hold) -> None:
        """Log a loss, and run the callbacks on a thread of their own."""
        losses.tell(hold)

    def stop(self) -> None:
        """Give everything back and close the connections: the process ends, or a test does."""
        started = time.monotonic()
        for hold in list(self.holds.values()):
            if hold.grant is not None and not hold.released:
                if hold.loss is None:
                    hold.loss = Loss(LossReason.STOPPED, "the process is ending")
                scopes.leave(hold)
                hold.releasing.acquire(blocking=False)  # one whose release failed before is tried again too
                if not self.own.unreachable(started):  # else the leases run out: nobody waits for every one of them
                    self.release_again(hold)
        self.work.close()
        self.own.close()
