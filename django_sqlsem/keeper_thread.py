"""The keeper's thread: renewals, polls for waiters, clean-up after interrupted claims, and an orderly end."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from django_sqlsem import scopes, testmode
from django_sqlsem.arbiter import Arbiter
from django_sqlsem.clocks import boot_now
from django_sqlsem.conf import config
from django_sqlsem.exceptions import BackendError
from django_sqlsem.holds import Hold, State
from django_sqlsem.keeper import Keeper

if TYPE_CHECKING:
    from django_sqlsem.backends.base import BaseSemaphoreBackend, Claim, Grant
    from django_sqlsem.naming import Resource

logger = logging.getLogger("django_sqlsem")

#: How often the thread looks for forgotten permits and stuck releases while anything is held, in seconds.
LOOK_AROUND: Final = 1.0
#: When to free what an interrupted claim may have got, in seconds after it: its statement may still be running.
DOUBTS: Final = (0.0, 0.1, 0.5, 2.0, 6.0)
#: For how long posted steps are worked off before renewals and waiters have their turn, in seconds.
TURN: Final = 0.1


class ThreadKeeper(Keeper):
    """A keeper with one thread, which starts with the first hold and ends ``IDLE`` seconds after the last."""

    def __init__(self, backend: BaseSemaphoreBackend) -> None:
        super().__init__(backend)
        self._life = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._doubts: list[tuple[float, float, Resource, str]] = []
        self._scan_at = 0.0
        self._renewals_fail = False

    def register(self, hold: Hold) -> None:
        """Know of a hold, and see that somebody looks after it."""
        super().register(hold)
        if not self._runs():
            self._start()

    def post(self, step: Callable[[], object]) -> None:
        """Run a step on the keeper's thread."""
        self.inbox.put(step)
        if not self._runs():
            self._start()

    def accept(self, hold: Hold, grant: Grant, sent: float) -> bool:
        """Give a grant to its hold; one with a short lease is looked after sooner than at the next look around."""
        accepted = super().accept(hold, grant, sent)
        if accepted and hold.claim.lease / 4 < LOOK_AROUND:

            def look_sooner() -> None:
                self._scan_at = min(self._scan_at, hold.renew_at)

            self.post(look_sooner)
        return accepted

    def renew_now(self, hold: Hold) -> None:
        """Have a grant proved at once."""

        def renew() -> None:
            hold.renew_at = self._scan_at = 0.0

        self.post(renew)

    def poke(self, arbiter: Arbiter) -> None:
        """Have the thread look at a queue now."""

        def now() -> None:
            arbiter.next_at = 0.0

        self.post(now)

    def doubt(self, claim: Claim) -> None:
        """Free what this claim may have got, now and again until its statement must have ended."""
        now = boot_now()
        due = [(now + delay, delay, claim.resource, claim.permit_id) for delay in DOUBTS]
        self.post(partial(self._doubts.extend, due))

    def stop(self) -> None:
        """End the thread, then give everything back and close the connections."""
        started = time.monotonic()
        self._stopping = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            self.inbox.put(_wake)
            thread.join(timeout=10)
        while not self.inbox.empty():
            self.inbox.get_nowait()()
        self._clear_doubts(boot_now() + max(DOUBTS))
        with self.queue_lock:
            arbiters = list(self.arbiters.values())
            for arbiter in arbiters:
                for hold in arbiter.queue:
                    hold.answer(BackendError("The process is ending."))
                arbiter.queue.clear()
        for arbiter in arbiters:
            if not self.own.unreachable(started):
                arbiter.step(self.own)
        super().stop()
        self._stopping = False
        if self.holds or not self.inbox.empty():
            with contextlib.suppress(RuntimeError):  # at the interpreter's end no thread can start
                self._start()

    def _start(self) -> None:
        with self._life:
            if not self._runs() and not self._stopping:
                self._thread = threading.Thread(target=self._run, name=f"sqlsem-keeper-{self.alias}", daemon=True)
                self._thread.start()

    def _runs(self) -> bool:
        # One whose start was interrupted by a signal is not alive, or gives way to its successor.
        thread = self._thread
        return thread is not None and thread.is_alive()

    def _run(self) -> None:
        me = threading.current_thread()
        while not self._stopping and self._thread is me:
            step: Callable[[], object] | None
            try:
                step = self.inbox.get(timeout=self._pause())
            except queue.Empty:
                step = None
            # Not until the inbox is empty: while many tasks come and go it never is.
            turn_ends = boot_now() + TURN
            try:
                while step is not None:
                    step()
                    step = None if self.inbox.empty() or boot_now() >= turn_ends else self.inbox.get_nowait()
                self._tick()
            except Exception:
                logger.exception("The keeper of %r met an error and goes on.", self.alias)
                time.sleep(0.05)  # what is still due must not be retried as fast as it fails
            if self._may_end():
                return
        with self._life:
            if self._thread is me:
                self._thread = None

    def _pause(self) -> float:
        now = boot_now()
        due = [now + LOOK_AROUND]
        if self.holds:
            due.append(self._scan_at)
        due.extend(at for at, *_ in self._doubts)
        with self.queue_lock:
            due.extend(arbiter.next_at for arbiter in self.arbiters.values())
        if len(due) == 1:
            due.append(now + max(self._idle() - self._unused(), 0.0))
        return max(0.0, min(due) - now)

    def _unused(self) -> float:
        return time.monotonic() - max(self.own.last_used, self.work.last_used)

    def _idle(self) -> float:
        # A test database can be dropped only when nobody is connected to it.
        return 0.0 if testmode.active() else config(self.alias).idle

    def _may_end(self) -> bool:
        if self.holds or self.arbiters or self._doubts or not self.inbox.empty():
            return False
        if self._unused() < self._idle():
            return False
        with self._life:
            self._thread = None
            # Whoever registered before it could see that no thread runs is seen here, and the other way round.
            if self.holds or self.arbiters or not self.inbox.empty():
                self._thread = threading.current_thread()
                return False
            self.own.close()
            self.work.close()
            return True

    def _tick(self) -> None:
        now = boot_now()
        if self.holds and now >= self._scan_at:
            self._scan(now)
        if self._doubts:
            self._clear_doubts(now)
        with self.queue_lock:
            due = [arbiter for arbiter in self.arbiters.values() if arbiter.next_at <= now]
        for arbiter in due:
            arbiter.step(self.own)
            # A thousand names take a while.
            if self.holds and (now := boot_now()) >= self._scan_at:
                self._scan(now)

    def _scan(self, now: float) -> None:
        """Look at everything that is held: what is lost, forgotten, stuck or to be renewed."""
        started = time.monotonic()
        self._scan_at = next_at = now + LOOK_AROUND
        renew: list[Hold] = []
        for hold in list(self.holds.values()):
            if hold.releasing.locked():
                if now - hold.releasing_since > LOOK_AROUND and not self.own.unreachable(started):
                    self.release_again(hold)
            elif hold.state is not State.HELD:
                continue
            elif hold.current_loss() is not None:
                # Nothing to renew; the holder will release it, or forget it.
                if self._forgotten(hold, now):
                    self.give_back(hold, self.own)
            elif why := self._forgotten(hold, now):
                self.forget(hold, why)
            else:
                if hold.renew_at - 0.1 * hold.claim.lease / 4 <= now:
                    renew.append(hold)
                next_at = min(next_at, hold.renew_at, hold.deadline)
        if renew:
            self._renew(renew)
            next_at = min([next_at, *(hold.renew_at for hold in renew)])
        self._scan_at = max(next_at, now + 0.02)

    def _forgotten(self, hold: Hold, now: float) -> str:
        if hold.max_hold is not None and now - hold.granted_at > hold.max_hold:
            return f"held for longer than max_hold={hold.max_hold:g} s"
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
            renewal = self.backend.renew(self.own, [hold.held for hold in holds])
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
            elif hold.releasing.locked():
                continue
            elif hold.permit_id in renewal.lost:
                hold.lose(renewal.lost[hold.permit_id])
            else:
                hold.renewal_error = "somebody's transaction keeps its row locked"
                hold.renew_at = boot_now() + min(1.0, hold.claim.lease / 16)

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


def _wake() -> None:
    """Nothing to do but look at the clock."""
