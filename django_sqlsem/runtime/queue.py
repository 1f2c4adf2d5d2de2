"""One queue per process and name: threads and tasks wait here, and the process waits in the database as one.

Those who go by another number of slots, or wait for another mode, have a queue of their own: see ``Request.line``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from typing import Final

from django_sqlsem.backends.base import Granted, Place, Queue, Request, Waited
from django_sqlsem.core.clocks import boot_now, chance
from django_sqlsem.core.modes import UPGRADE
from django_sqlsem.database.errors import copy_of
from django_sqlsem.database.sessions import Session
from django_sqlsem.exceptions import BackendError
from django_sqlsem.runtime.acquisition import Acquisition, AcquisitionKeeper

#: How often a waiting process says that it lives, in seconds.
HEARTBEAT: Final = 0.65
#: A grant to a waiter lasts for some time from when the last statement was sent that found it waiting. If that was
#: longer ago than this, in seconds, the process stood still, and asks the database what is left of the grant.
OLD_PROOF: Final = 2 * HEARTBEAT
#: A slot may have been freed by someone who could not see the place yet: look once more after this many seconds.
SECOND_LOOK: Final = 0.025
#: A holder seems to be dead: look again after this many seconds.
SUSPECTED: Final = 0.2
#: A waiter that no other process can wake polls: first after so long, then more and more slowly, in seconds.
FIRST_POLL: Final = 0.004
LAST_POLL: Final = 0.1


class LocalQueue:
    """One queue of one name in one process. ``keeper.queue_lock`` guards it; its statements run on the keeper's side.

    The first in line is *enrolled*: the database knows its permit id, and grants a slot that becomes free to that.
    """

    def __init__(self, keeper: AcquisitionKeeper, key: str) -> None:
        self.keeper = keeper
        self.key = key
        self.waiting: deque[Acquisition] = deque()
        self.enrolled: Acquisition | None = None
        #: Places in the database's queue, or grants, that are to be given up.
        self.unwanted: list[Request] = []
        #: What its last step met, while the database is away: who waits no longer raises that.
        self.away: BaseException | None = None
        self.next_at = 0.0
        self._refresh_at = 0.0
        self._pause = FIRST_POLL
        self._polls = False
        self._second_look = False

    def add(self, acquisition: Acquisition) -> None:
        """Put an acquisition at the end; the lock is held."""
        if acquisition.queue():
            self.waiting.append(acquisition)

    def enrolled_by(self, acquisition: Acquisition, queue: Queue, sent: float) -> None:
        """Note that the database knows the first in line; the lock is held."""
        self.enrolled = acquisition
        self._pause = FIRST_POLL
        self._plan(queue, sent, new=True)

    def remove(self, acquisition: Acquisition) -> None:
        """Take an acquisition out of the queue; the lock is held. The next one is enrolled at the next step."""
        if acquisition in self.waiting:
            self.waiting.remove(acquisition)
        if self.enrolled is acquisition:
            self.enrolled = None
        self.next_at = 0.0

    def give_up(self, acquisition: Acquisition) -> bool:
        """Take one out that waits no longer; the lock is held. Return ``False`` if its place is given up here."""
        enrolled = self.enrolled is acquisition
        if enrolled:
            self.unwanted.append(acquisition.request)
        self.remove(acquisition)
        return not enrolled

    @property
    def known(self) -> bool:
        """Whether the database knows the first in line."""
        return bool(self.waiting) and self.enrolled is self.waiting[0]

    def turn(self) -> tuple[bool, float]:
        """Return what tells which queue of a name comes first: upgrades, then who has waited longest."""
        return UPGRADE not in self.key, self.waiting[0].arrived if self.waiting else math.inf

    @property
    def idle(self) -> bool:
        """Whether it is empty, and nothing is to be given up."""
        return not self.waiting and not self.unwanted

    def step(self, session: Session) -> None:
        """Give up what is unwanted, let the first in line be known, and look around if it is time."""
        while True:
            with self.keeper.queue_lock:
                unwanted = list(self.unwanted)
                head = self.waiting[0] if self.waiting else None
                served = head is not None and head.was_served()
                waiting = len(self.waiting)
            for request in unwanted:
                self._leave(session, request)
            if head is None:
                if self.keeper.forget_queue(self):
                    return
                continue
            if served:  # the thread that brought its grant was interrupted before it was out of the queue
                self.keeper.answer_again(head)
            elif self._look(session, head, waiting):
                return

    def _look(self, session: Session, head: Acquisition, waiting: int) -> bool:
        """Take one step of waiting for the first in line. Return whether all is done for now."""
        now = boot_now()
        if now < self.keeper.rests_until:
            self.next_at = self.keeper.rests_until
            return True
        with self.keeper.queue_lock:
            if not self.waiting or self.waiting[0] is not head or head.was_served():
                return False  # it gave up, or was served, while others were let go
            new = self.enrolled is not head
            head.request = self.keeper.present(head.request)
            patience = self._patience(now)
            if new:
                self.keeper.waiting[head.permit_id] = head
        place = Place(head.arrived, waiting=waiting, patience=patience)
        head.sent = True
        attempts = session.attempts
        try:
            if new:
                head.lease.proved = now
                waited = self.keeper.backend.enrol(session, head.request, place, first=False)
            elif now >= self._refresh_at:
                waited = self.keeper.backend.wait(session, head.request, place)
            else:
                waited = self._glance(session, head)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with this one, its waiter must hear it
            return self._met(head, error, asked=not new or session.attempts != attempts)
        self.away = None
        if new or now >= self._refresh_at:  # between heartbeats it only reads
            self.keeper.answered()
        if not self._deliver(waited.granted, head, now, new=new):
            return False
        with self.keeper.queue_lock:
            if head.was_served() or head not in self.waiting:
                if new and not head.was_served() and waited.queue is not None:
                    self.unwanted.append(head.request)  # it gave up meanwhile
                return False
            if waited.queue is None:
                # Its place had lapsed: once more, under a new id, as word of the old one may be on its way. What the
                # old one may have got was never accepted.
                self.keeper.doubt(head.request)
                self.enrolled = None
                self.keeper.renew_request(head)
                return False
            head.lease.proved = now
            if new:
                self.enrolled_by(head, waited.queue, now)
            elif now >= self._refresh_at:
                self._plan(waited.queue, now)
            else:
                self.next_at = self._next(now)
            if self.unwanted:  # who left meanwhile has asked for a step already; renewals come in between
                self.next_at = 0.0
            return True

    def _deliver(self, grants: Collection[Granted], head: Acquisition, sent: float, *, new: bool) -> bool:
        """Give out what a step was granted. Return whether no more need be asked about the first in line."""
        old = not new and boot_now() > sent + OLD_PROOF
        for granted in grants:
            if not old or granted.permit_id != head.permit_id:
                self.keeper.deliver(granted, sent, head.request.resource)
        if old and any(granted.permit_id == head.permit_id for granted in grants):
            self.look_soon()
            return False
        return True

    def _met(self, head: Acquisition, error: Exception, *, asked: bool) -> bool:
        """A step has failed. Return whether all is done for now."""
        if self.keeper.in_doubt(head, asked=asked):
            return False  # another caller's statement has served it
        self.enrolled = None
        if not isinstance(error, BackendError):
            self._fail(error, only=head)
            return False
        if error.stale_connection:
            return False
        if self.keeper.outage.met(error):
            # It enrols anew, by the time of its arrival, as its place may be lost.
            self.away, self.next_at = copy_of(error), self.keeper.outage.again_at
        else:
            self._fail(error)
        return True

    def _patience(self, now: float) -> float | None:
        """For how many more seconds the most patient of the waiters waits; ``None``: for ever."""
        latest = 0.0
        for acquisition in self.waiting:
            if acquisition.patient_until is None:
                return None
            latest = max(latest, acquisition.patient_until)
        return max(0.0, latest - now)

    def _glance(self, session: Session, head: Acquisition) -> Waited:
        """Between heartbeats: has it been granted?"""
        if self._second_look:
            self._second_look = False
            return self.keeper.backend.wait(session, head.request, Place(head.arrived, len(self.waiting)))
        granted = self.keeper.backend.granted(session, head.request)
        return Waited((granted,) if granted else (), Queue(ahead=0))

    def _plan(self, queue: Queue, now: float, *, new: bool = False) -> None:
        self._refresh_at = now + HEARTBEAT * chance.uniform(0.9, 1.0)  # no two processes in step
        self._polls = not queue.told and (queue.strangers > 0 or not self.keeper.reach.presence.channel)
        self._second_look = new
        self.next_at = self._next(now)
        if new:
            # A releaser has most likely seen those further back.
            self.next_at = min(self.next_at, now + SECOND_LOOK * (1 + min(queue.ahead, 5)))
        if queue.suspects:
            self._refresh_at = self.next_at = min(self.next_at, now + SUSPECTED)
        if queue.expiry_in is not None and queue.ahead == 0 and queue.expiry_in < self._refresh_at - now:
            self.next_at = min(self.next_at, now + queue.expiry_in + 0.002)
            self._refresh_at = min(self._refresh_at, self.next_at)

    def _next(self, now: float) -> float:
        if not self._polls:
            return self._refresh_at
        pause = self._pause * chance.uniform(0.7, 1.3)
        self._pause = min(self._pause * 1.15, LAST_POLL)
        return min(now + pause, self._refresh_at)

    def look_soon(self) -> None:
        """Look around at the next step: something has changed."""
        self._refresh_at = self.next_at = 0.0

    def _fail(self, error: Exception, only: Acquisition | None = None) -> None:
        with self.keeper.queue_lock:
            failed = tuple(acquisition for acquisition in self.waiting if only is None or acquisition is only)
            for acquisition in failed:
                self.remove(acquisition)
                self.keeper.waiting.pop(acquisition.permit_id, None)
                acquisition.give_up()
        for acquisition in failed:
            # Each raises one of its own: a traceback grows with every raise, and keeps the frames it passed.
            acquisition.tell(error if only is not None else copy_of(error))
        if only is None:
            self.keeper.forget_queue(self)

    def _leave(self, session: Session, request: Request) -> None:
        try:
            self.keeper.backend.leave(session, request)
        except BackendError:
            self.keeper.doubt(request)
        with self.keeper.queue_lock:  # not before: others who step meanwhile would not wait for it
            self.unwanted = [*(each for each in self.unwanted if each is not request)]
