"""One queue per process and name: threads and tasks wait here, and the process waits in the database as one."""

from __future__ import annotations

import contextlib
import copy
import random
import uuid
from collections import deque
from typing import TYPE_CHECKING, Final

from django_sqlsem.backends.base import Grant, Place
from django_sqlsem.clocks import boot_now
from django_sqlsem.exceptions import BackendError
from django_sqlsem.holds import Hold, State

if TYPE_CHECKING:
    from django_sqlsem.keeper import Keeper
    from django_sqlsem.sessions import Session

#: How often a waiting process says that it lives, in seconds.
HEARTBEAT: Final = 0.7
#: The first in line looks again after this long at first, and never later than that, in seconds.
FIRST_LOOK: Final = 0.008
LAST_LOOK: Final = 0.1


class Arbiter:
    """The queue of one name in one process. ``keeper.queue_lock`` guards it."""

    def __init__(self, keeper: Keeper, key: str) -> None:
        self.keeper = keeper
        self.key = key
        self.queue: deque[Hold] = deque()
        self.next_at = 0.0
        self._ticket = uuid.uuid4().hex
        self._written_for: Hold | None = None
        self._refresh_at = 0.0
        self._ahead = 0
        self._pause = FIRST_LOOK

    def step(self, session: Session) -> None:
        """Grant to as many local waiters as the database allows now, and plan the next look."""
        while True:
            with self.keeper.queue_lock:
                head = self.queue[0] if self.queue else None
                waiting = len(self.queue)
            if head is None:
                self._leave(session)
                return
            now = boot_now()
            place = Place(
                ticket=self._ticket,
                age=now - head.arrived,
                waiting=waiting,
                refresh=now >= self._refresh_at,
                moved=head is not self._written_for,
            )
            head.asked = True
            try:
                waited = self.keeper.backend.wait(session, head.claim, place)
            except BackendError as error:
                if not error.unsent:
                    self.keeper.doubt(head.claim)
                head.fresh_claim()
                if error.stale_connection:
                    continue
                self._fail(error)
                return
            except Exception as error:  # noqa: BLE001 - whatever is wrong with this one, its waiter must hear it
                self.keeper.doubt(head.claim)
                self._fail(error, only=head)
                continue
            if place.refresh:
                self._refresh_at = now + HEARTBEAT
            self._written_for = head
            if waited.grant is None:
                self._plan(now, waited.ahead, waited.expiry_in)
                return
            self._pause = FIRST_LOOK
            self._hand_over(head, waited.grant, now)

    def _hand_over(self, head: Hold, grant: Grant, sent: float) -> None:
        accepted = self.keeper.accept(head, grant, sent)
        with self.keeper.queue_lock:
            if head in self.queue:  # one that gave up leaves as well, or it would be granted again and again
                self.queue.remove(head)
        if accepted:
            head.answer()

    def _plan(self, now: float, ahead: int | None, expiry_in: float | None) -> None:
        if ahead is not None:
            if ahead < self._ahead:
                self._pause = FIRST_LOOK
            self._ahead = ahead
        # Whoever stands further back looks less often.
        pause = max(self._pause, min(0.006 * self._ahead, HEARTBEAT / 2))
        self._pause = min(self._pause * 1.15, LAST_LOOK)
        pause *= random.uniform(0.7, 1.3)  # noqa: S311 - no two processes in step
        if expiry_in is not None and not self._ahead:
            pause = min(pause, expiry_in + 0.002)
        self.next_at = min(now + pause, self._refresh_at)

    def _fail(self, error: Exception, only: Hold | None = None) -> None:
        with self.keeper.queue_lock:
            failed = [hold for hold in self.queue if only is None or hold is only]
            for hold in failed:
                self.queue.remove(hold)
                hold.state = State.OVER
        for hold in failed:
            # Each raises one of its own: a traceback grows with every raise, and keeps the frames it passed.
            hold.answer(error if only is not None else _same(error))
        if only is None:
            self._written_for = None  # its row, if it was written, lapses by itself
            self.keeper.forget_arbiter(self)

    def _leave(self, session: Session) -> None:
        if not self.keeper.forget_arbiter(self):
            self.next_at = 0.0
            return
        if self._written_for is not None:
            self._written_for = None
            with contextlib.suppress(BackendError):  # the row lapses by itself
                self.keeper.backend.leave(session, self._ticket)


def _same(error: Exception) -> Exception:
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    return copied
