"""What a keeper does for what is held: renewals, forgotten permits, stuck releases, claims in doubt, lost sessions."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from django_sqlsem import scopes, stops
from django_sqlsem.clocks import boot_now
from django_sqlsem.conf import config
from django_sqlsem.deadlocks.watch import Watch
from django_sqlsem.exceptions import BackendError
from django_sqlsem.holds import Hold, State
from django_sqlsem.keeper import Keeper
from django_sqlsem.lent_threads import LentThreads
from django_sqlsem.reach import Reach
from django_sqlsem.sessions import OwnSession

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.arbiter import Arbiter
    from django_sqlsem.backends.base import BaseSemaphoreBackend, Presence
    from django_sqlsem.naming import Resource
    from django_sqlsem.sessions import Session

logger = logging.getLogger("django_sqlsem")

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
        if scopes.owner_is_gone(hold):
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
                stops.ask(hold, renewal.asked[hold.permit_id])

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
