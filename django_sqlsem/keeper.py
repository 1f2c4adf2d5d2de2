"""One keeper per process and database: it claims, waits, gives back, and keeps what is held alive."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

from django_sqlsem import transactions
from django_sqlsem.arbiter import Arbiter
from django_sqlsem.clocks import boot_now
from django_sqlsem.exceptions import AcquireTimeoutError, BackendError
from django_sqlsem.holds import Hold, State
from django_sqlsem.keeper_base import KeeperBase
from django_sqlsem.sessions import CallerSession, Session

if TYPE_CHECKING:
    from django_sqlsem.backends.base import Grant

logger = logging.getLogger("django_sqlsem")

T = TypeVar("T")


class Keeper(KeeperBase):
    """What every keeper does; ``ThreadKeeper`` runs its steps in a thread of its own, ``InlineKeeper`` at once.

    The caller's own thread makes the first try and the release, on the ``work`` session; whatever must go on
    without the caller is posted to the keeper, which uses the session ``own``. A hold is registered before its
    claim is sent, so that nothing that may have been granted is ever unknown here.
    """

    # Acquiring, in the caller's thread or from its event loop.

    def acquire(self, hold: Hold, timeout: float | None) -> bool:
        """Get the hold granted within ``timeout`` seconds, blocking this thread. Return whether it was."""
        self.register(hold)
        session = self.session_here()
        while self.may_go_first(hold) and self.try_now(hold, session):
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
            hold.asked = True
            try:
                grant = self.backend.claim(session, hold.claim)
            except BackendError as error:
                if not error.unsent:
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
                arbiter = self.arbiters[hold.claim.resource.key] = Arbiter(self, hold.claim.resource.key)
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
