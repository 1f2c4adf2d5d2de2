"""One keeper per process and database: it has requests granted, lets callers wait, and gives back what they leave.

The caller's own thread makes the first try and the release, on the session ``work``; whatever must go on without the
caller is posted to the keeper's side, which uses the session ``own``. An acquisition is registered before anything is
sent for it. So one mechanism gives back what an interrupted caller leaves: the keeper looks through its registrations.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections

from django_sqlsem.backends.base import BaseSemaphoreBackend, Crowd, Grant, Granted, Place, Released, Request, Waited
from django_sqlsem.conf import config
from django_sqlsem.core import testmode
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.names import Resource
from django_sqlsem.database import transactions
from django_sqlsem.database.errors import Outage, copy_of
from django_sqlsem.database.sessions import CallerSession, OwnSession, Session
from django_sqlsem.exceptions import AcquireTimeoutError, BackendError
from django_sqlsem.runtime import callers, events
from django_sqlsem.runtime.acquisition import Acquisition, State, TurnedAwayError
from django_sqlsem.runtime.chores import LOOK_AROUND, BeaconChore, Chore, Doubts, Housekeeping, Renewals, plugged_in
from django_sqlsem.runtime.loop import NAP, InlineLoop, ThreadLoop
from django_sqlsem.runtime.presence import Reach
from django_sqlsem.runtime.queue import OLD_PROOF, LocalQueue
from django_sqlsem.snapshots import Loss, LossReason

logger = logging.getLogger("django_sqlsem")

T = TypeVar("T")

NO_LONGER_ITS_OWN: Final = Loss(LossReason.EXPIRED, "when it was released, its slot was no longer its own")
#: For how long a try without waiting lets the process give up its own deserted place in the queue first, in seconds.
CLEARED: Final = 1.0
#: The first chores are the keeper's own: beacon, renewals and doubts.
OWN_CHORES: Final = 3
#: How many notes from the bell at once, and there may have been more.
MANY_NOTES: Final = 8
#: With so much of its patience left, in seconds, a wait did not end for want of time.
SOME_TIME: Final = 0.01


class Keeper:
    """What one process has and wants of the locks of one database."""

    def __init__(self, backend: BaseSemaphoreBackend, siblings: Callable[[], Iterable[Keeper]]) -> None:
        """Keep a backend's locks; ``siblings`` returns all keepers of this process."""
        self.backend = backend
        self._siblings = siblings
        self.alias = backend.alias
        self.work = backend.session()
        self.own = backend.session()
        self.outage = Outage(backend.alias)
        self.acquisitions: dict[int, Acquisition] = {}
        #: The queues of this process, by ``Request.line``.
        self.queues: dict[str, LocalQueue] = {}
        #: The acquisitions that the database knows as waiting, by permit id.
        self.waiting: dict[str, Acquisition] = {}
        self.queue_lock = threading.Lock()
        #: How others reach this process: without a thread, not at all.
        self.reach = Reach(self.alias)
        #: On SQLite there is one writer, and it may be the caller's own transaction: waiting for that would never end.
        self._shares_writer = not backend.process_local and connections[self.alias].vendor == "sqlite"
        self.beacon: BeaconChore | None = None
        self.renewals = Renewals(self)
        self.doubts = Doubts(self)
        self.chores: list[Chore] = []
        self._stepping = threading.RLock()
        if backend.process_local:
            self.loop: InlineLoop | ThreadLoop = InlineLoop()
            backend.listen(self._look_again)
        else:
            self.loop = ThreadLoop(self.alias, self)
            self.beacon = BeaconChore(self)
            self.chores = [self.beacon, self.renewals, self.doubts, *plugged_in(self), Housekeeping(self)]
            for session, opened in ((self.work, self.beacon.any_opened), (self.own, self.beacon.opened)):
                if isinstance(session, OwnSession):
                    session.opened = opened
        events_heard = ("queued", "granted", "refused", "released", "lost", "ended", "act_over", "deadlocked")
        self._listeners = {event: _listeners(self.chores, event) for event in events_heard}
        backend.announce(self.deliver)

    def tell(self, event: str, *about: Any) -> None:
        """Tell the chores that listen: ``event`` is the name of one of their methods."""
        for listener in self._listeners[event]:
            listener(*about)

    # How others reach this process.

    def present(self, request: Request) -> Request:
        """Return the request with the way to reach this process as it is now."""
        presence = self.reach.presence
        if request.presence is presence or request.presence == presence:
            return request
        return dataclasses.replace(request, presence=presence)

    def session_here(self) -> Session:
        """Return where the calling thread's statements go: on SQLite, inside ``atomic()``, its own connection."""
        if self._shares_writer and (connection := connections[self.alias]).in_atomic_block:
            return CallerSession(connection)
        return self.work

    @property
    def _may_be_locked_out(self) -> bool:
        """Whether a thread waits for this coroutine that may have SQLite's one writer: its open transaction."""
        return self._shares_writer and callers.works_for_thread()

    # While the database is away.

    @property
    def rests_until(self) -> float:
        """When to ask again, by the boot clock; 0 while the keeper's own session gets answers."""
        return 0.0 if self.own.asked_at is None else self.outage.again_at

    def answered(self) -> None:
        """The database has written something: it is back, unless the keeper's own session has had no answer yet."""
        outage = self.outage
        outage.known = True
        if outage.error is None:
            return
        if self.own.asked_at is None:
            outage.over()
        else:
            outage.passing = True  # nothing else may use that session, once nothing is held

    # Steps on the keeper's side.

    def post(self, step: Callable[[], object]) -> None:
        """Have a step taken soon, on the keeper's side."""
        self.loop.post(step)

    def note(self, step: Callable[[], object]) -> None:
        """Leave a step for the keeper; safe in finalisers and signal handlers."""
        self.loop.note(step)

    async def call(self, work: Callable[[Session], T]) -> T:
        """Run ``work`` with a session, and return what it returns. It runs even if this task is cancelled.

        That is on the keeper's side, or in the thread that waits for this coroutine and may have SQLite's one writer.
        """
        if self._may_be_locked_out:
            return await callers.to_its_end(self._call_here, work)
        callers.refuse_other_loops()
        return await asyncio.shield(asyncio.wrap_future(self.submit(lambda: work(self.own))))

    def _call_here(self, work: Callable[[Session], T]) -> T:
        result = work(self.session_here())
        self.post(lambda: None)  # its thread closes the connection that was opened for this, once it is idle
        return result

    def submit(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run ``work`` on the keeper's side; returns the future of its result."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def step() -> None:
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - it belongs to the caller that waits
                future.set_exception(error)

        self.post(step)
        return future

    def poke(self, queue: LocalQueue) -> None:
        """Have a queue looked at now."""
        if isinstance(self.loop, InlineLoop):
            with self._stepping:
                queue.look_soon()
                queue.step(self.own)
        else:
            queue.next_at = 0.0
            self.loop.wake_by(0.0)

    def _poke_in_turn(self, queues: Iterable[LocalQueue]) -> None:
        with self.queue_lock:
            queues = sorted(queues, key=LocalQueue.turn)
        for local in queues:
            self.poke(local)

    def _reconsider(self, queue: LocalQueue) -> None:
        """Have a queue looked at when it is due: something in it has changed."""
        self.loop.wake_by(queue.next_at)

    # Acquiring, in the caller's thread or from its event loop.

    def acquire(self, acquisition: Acquisition, timeout: float | None) -> bool:
        """Have it granted within ``timeout`` seconds, blocking this thread. Return whether it was."""
        acquisition.patient_until = None if timeout is None else acquisition.arrived + timeout
        self.acquisitions[id(acquisition)] = acquisition
        self.loop.ensure()
        session, away = self.session_here(), self.outage.error
        if away is None or not self._outlives(acquisition, timeout, session):
            away = None
            try:
                if (outcome := self._ask(acquisition, timeout, session)) is not None:
                    return outcome
            except BackendError as error:
                if not self._outlives(acquisition, timeout, session, error):
                    raise
                away = copy_of(error)
        while True:
            self._enqueue(acquisition, away=away)
            away = None
            answered = acquisition.wait(acquisition.patience(boot_now()))
            if self._settled(acquisition, answered):
                return acquisition.state is State.HELD

    def _ask(self, acquisition: Acquisition, timeout: float | None, session: Session) -> bool | None:
        """Make the first try, in the caller's thread. Return whether it was granted; ``None``: it has to wait."""
        mine = session is self.work
        if isinstance(session, CallerSession):
            session.become_writer()
        if mine and self.queues:
            self._prepare_first_try(acquisition, session, timeout)
        while (first := not self.queues or self._is_first(acquisition)) or self._may_go_first(acquisition):
            if not self._try_now(acquisition, session, enrol=first and mine and timeout != 0):
                break
            if not mine:
                # If that transaction is rolled back, so is this grant: have the keeper look at once.
                transactions.at_transaction_end(self.alias, lambda: self.renew_now(acquisition))
            if acquisition.state is State.GRANTED:
                if self._taken(acquisition, acquisition.granted_at):
                    return True
            elif self._settled(acquisition, True):  # it was given up meanwhile, as the process ends
                return True
        if timeout == 0:
            return False
        if not mine:
            self._refuse_to_wait_inside(acquisition, timeout)
        self._refuse_crowds(acquisition, session)
        return None

    def _refuse_to_wait_inside(self, acquisition: Acquisition, timeout: float | None) -> NoReturn:
        self._refused(acquisition)
        raise AcquireTimeoutError(
            f"No slot of {acquisition.name!r} is free, and waiting inside atomic() on SQLite could never end: its "
            "one writer is this transaction. Acquire outside atomic(), use timeout=0, or keep the locks in a "
            "second file named by SQLSEM['DATABASE'].",
            name=acquisition.name,
            timeout=timeout,
        )

    def _outlives(
        self, acquisition: Acquisition, timeout: float | None, session: Session, error: BackendError | None = None
    ) -> bool:
        """Whether an acquire may wait until the database is back, though its first try ended with an error.

        Or without a try: while nobody gets an answer, a caller's own try may take longer than it has time. One that
        would rather be refused than wait is not kept waiting by this either.
        """
        if session not in (self.work, self.own):
            return False  # the caller's own transaction has failed
        away = self.outage.met(error) if error is not None else bool(session.asked_at and self.own.asked_at)
        if not away or timeout == 0 or acquisition.request.max_waiting is not None:
            return False
        if acquisition.request.rank and acquisition.state is State.NEW:
            acquisition.stand_apart()  # its place may be older than those of others here
        return True

    async def aacquire(self, acquisition: Acquisition, timeout: float | None) -> bool:
        """Have it granted within ``timeout`` seconds, holding no thread meanwhile. Return whether it was."""
        if self._may_be_locked_out and await sync_to_async(lambda: connections[self.alias].in_atomic_block)():
            return await callers.to_its_end(self.acquire, acquisition, timeout)  # which does not wait there
        acquisition.patient_until = None if timeout is None else acquisition.arrived + timeout
        self.acquisitions[id(acquisition)] = acquisition
        self.loop.ensure()
        future = acquisition.answer.prepare_future()
        self.post(lambda: self._first_try(acquisition, timeout))
        remaining = None if timeout in (None, 0) else timeout
        while True:
            await acquisition.answered(future, remaining)
            if self._settled(acquisition, future.done()):
                return acquisition.state is State.HELD
            future = acquisition.answer.prepare_future()
            remaining = acquisition.patience(boot_now())
            self._enqueue(acquisition)

    def _first_try(self, acquisition: Acquisition, timeout: float | None) -> None:
        if acquisition.state is not State.NEW:
            return
        away = self.outage.error
        try:
            if away is None or not self._outlives(acquisition, timeout, self.own):
                away = None
                self._prepare_first_try(acquisition, self.own, timeout)
                first = self._is_first(acquisition)
                goes = first or self._may_go_first(acquisition)
                granted = goes and self._try_now(acquisition, self.own, enrol=first and timeout != 0)
                if granted or timeout == 0:
                    acquisition.tell()
                else:
                    self._refuse_crowds(acquisition, self.own)
        except BackendError as error:
            if not self._outlives(acquisition, timeout, self.own, error):
                acquisition.tell(error)
            else:
                away = copy_of(error)
        except Exception as error:  # noqa: BLE001 - it belongs to the waiting task, not to this thread
            acquisition.tell(error)
        if away is not None:
            self._enqueue(acquisition, away=away)

    def _prepare_first_try(self, acquisition: Acquisition, session: Session, timeout: float | None) -> None:
        request = acquisition.request
        if request.rank and timeout != 0 and self.queues.get(request.line) is not None:
            # A task that has come back does not stand behind those of this process that came after its first try.
            if self.backend.keeps_place(session, request):
                acquisition.stand_apart()
        elif timeout == 0 and (deserted := [each for each in self._lines(request) if not each.waiting]):
            # Their last waiters have left, and their places are just being given up.
            if session is self.own:
                self._step_all(deserted)
            else:
                concurrent.futures.wait([self.submit(partial(self._step_all, deserted))], CLEARED)

    def _step_all(self, queues: list[LocalQueue]) -> None:
        for local in queues:
            local.step(self.own)

    def _lines(self, request: Request) -> list[LocalQueue]:
        """Return the queues of a name in this process."""
        return [local for line, local in list(self.queues.items()) if line.startswith(request.resource.key)]

    def _is_first(self, acquisition: Acquisition) -> bool:
        """Whether no other caller of this process waits for the name."""
        return acquisition.request.line not in self.queues

    def _may_go_first(self, acquisition: Acquisition) -> bool:
        """Whether the request barges, or has a place of its own, though others of this process wait for the name."""
        return not acquisition.request.fair or bool(acquisition.request.rank)

    def _try_now(self, acquisition: Acquisition, session: Session, *, enrol: bool) -> bool:
        """Ask once, without waiting; ``enrol``: or else take a place in the queue. Return whether it is granted."""
        if self.beacon is not None and not (self.own.is_open and self.reach.known):
            self._see_to_beacon(self.beacon, session)
        if acquisition.request.presence is not self.reach.presence:
            acquisition.request = self.present(acquisition.request)
        while True:
            sent = acquisition.lease.proved = boot_now()
            acquisition.sent = True
            attempts = session.attempts
            try:
                if not enrol:
                    grant = self.backend.claim(session, acquisition.request)
                    if grant is None:
                        return False
                    lease = acquisition.request.lease
                    return self._accept(acquisition, acquisition.permit_id, grant, sent, lease, at_once=True)
                self.waiting[acquisition.request.permit_id] = acquisition
                place = Place(acquisition.arrived, waiting=1, patience=acquisition.patience(sent))
                waited = self.backend.enrol(session, acquisition.request, place, first=True)
            except BackendError as error:
                if self.in_doubt(acquisition, asked=session.attempts != attempts):
                    return True  # another caller's statement has served it
                if error.stale_connection:
                    continue
                raise
            for granted in waited.granted:
                if granted.permit_id == acquisition.request.permit_id:
                    self._accept(
                        acquisition, granted.permit_id, granted.grant, sent, granted.lasts, at_once=waited.at_once
                    )
                else:
                    self.deliver(granted, sent, acquisition.request.resource)
            self._join(acquisition, waited, sent, session)
            return acquisition.grant is not None

    def _refuse_crowds(self, acquisition: Acquisition, session: Session) -> None:
        """Let a request that has no place yet wait behind others of this process, or turn it away if it may not."""
        request, crowd = acquisition.request, None
        if request.bounded and acquisition.state is State.NEW:
            crowd = self.backend.crowd(session, request, self._waiting_here(request))
        if crowd is None:
            crowd = self._enqueue(acquisition, at_first=True)
        if crowd is not None:
            self._turn_away(acquisition, crowd)

    def _waiting_here(self, request: Request) -> int:
        """How many wait for the name in this process, if that may turn the request away."""
        return sum(len(local.waiting) for local in self._lines(request)) if request.bounded else 0

    def _turn_away(self, acquisition: Acquisition, crowd: Crowd) -> NoReturn:
        """End an acquire that may not wait: nothing is in doubt. Raises ``TurnedAwayError``."""
        self.waiting.pop(acquisition.permit_id, None)
        self.drop(acquisition)
        raise TurnedAwayError(crowd)

    def _see_to_beacon(self, beacon: BeaconChore, session: Session) -> None:
        """Have the keeper's session open first: if this process is killed after its grant, others will see that."""
        own = self.own
        # The keeper's thread may be about to open it: the holder of a grant that came before could not be reached.
        if own.is_open and not isinstance(own, OwnSession):
            return
        if beacon.dark_since is None and isinstance(session, OwnSession):
            session.run(lambda cursor: None)  # if the database cannot be reached, one try is enough to tell
            if isinstance(own, OwnSession) and config(self.alias).beacons:
                with contextlib.suppress(BackendError):  # the keeper tries on
                    own.run(lambda cursor: None)

    def _settled(self, acquisition: Acquisition, answered: bool) -> bool:
        """After a wait: whether it is over. Raises what the keeper met. A grant that was slept through is not one."""
        if not answered:
            away = self._away(acquisition)
            self.withdraw(acquisition)
            if away is not None and acquisition.state is State.OVER:
                raise copy_of(away)
        if acquisition.has_error:
            raise acquisition.take_error()
        return acquisition.state is not State.GRANTED or self._taken(acquisition, boot_now())

    def _away(self, acquisition: Acquisition) -> BaseException | None:
        """Return what a wait that ends for want of time has met last; ``None``: the database is not away."""
        local, left = self.queues.get(acquisition.request.line), acquisition.patience(boot_now())
        if local is None or left is None or left > SOME_TIME:  # its client has gone
            return None
        return local.away

    def _taken(self, acquisition: Acquisition, now: float) -> bool:
        """Let the caller have what it was granted. Return ``False`` if that was slept through, and it asks anew."""
        if acquisition.loss is not None or (now >= acquisition.lease.deadline and self.backend.supports_renewal):
            self.doubt(acquisition.request)
            acquisition.ask_anew()
            return False
        if acquisition.taken() and acquisition.undo is None:
            for listener in self._listeners["granted"]:
                listener(acquisition)
        return True

    # Waiting in this process.

    def _join(self, acquisition: Acquisition, waited: Waited, sent: float, session: Session) -> None:
        """The database knows that it waits: let the process know too, unless it has been granted by now."""
        crowd, queue = waited.refused, waited.queue
        if crowd is not None:
            self._turn_away(acquisition, crowd)
        if queue is None:
            return
        with self.queue_lock:
            if acquisition.was_served():
                return
            if here := self._waiting_here(acquisition.request):  # two threads asked at the same time
                crowd = Crowd.at(acquisition.request, paused=False, waiting=here)
            wanted = acquisition.state is State.NEW and crowd is None
            if wanted:
                if acquisition.request.rank and acquisition.request.line in self.queues:
                    acquisition.stand_apart()  # the place may be older than theirs
                local = self._queue_of(acquisition)
                # Add to the local queue last: an exception before this line leaves no second entry.
                if first := not local.waiting:
                    local.enrolled_by(acquisition, queue, sent)
                else:  # two threads asked at the same time: one place is enough
                    local.unwanted.append(acquisition.request)
                    self.renew_request(acquisition)
                local.add(acquisition)
            else:
                self.waiting.pop(acquisition.permit_id, None)
        if not wanted:
            try:
                self.backend.leave(session, acquisition.request)
            except BackendError:
                self.doubt(acquisition.request)
            if crowd is not None:
                self._turn_away(acquisition, crowd)
            return
        self.tell("queued", acquisition)
        if first:
            self._reconsider(local)
        else:
            self.poke(local)

    def _enqueue(
        self, acquisition: Acquisition, *, at_first: bool = False, away: BaseException | None = None
    ) -> Crowd | None:
        """Put it at the end of its name's queue, unless it is there; ``at_first``: or return why it may not wait.

        ``away``: what its first try has met.
        """
        with self.queue_lock:
            if acquisition.state is not State.NEW:
                return None
            here = self._waiting_here(acquisition.request)
            if at_first and (crowd := Crowd.at(acquisition.request, paused=False, waiting=here)) is not None:
                return crowd
            local = self._queue_of(acquisition)
            local.add(acquisition)
            known = local.known
            if not known:
                local.away = away or local.away
        self.tell("queued", acquisition)
        if not known:
            self.poke(local)
        return None

    def _queue_of(self, acquisition: Acquisition) -> LocalQueue:
        key = acquisition.request.line
        if (found := self.queues.get(key)) is None:
            found = self.queues[key] = LocalQueue(self, key)
        return found

    def withdraw(self, acquisition: Acquisition) -> None:
        """Leave the queue, unless it was granted at this very moment."""
        with self.queue_lock:
            acquisition.give_up()
            known = self.waiting.pop(acquisition.permit_id, None) is not None and acquisition.grant is None
            local = self.queues.get(acquisition.request.line)
            if local is not None and acquisition in local.waiting:
                known = local.give_up(acquisition) and known
        if local is not None and (not local.known or local.unwanted):
            self.poke(local)
        if known:  # it was interrupted between the statement that took its place and the answer
            self.doubt(acquisition.request)

    def break_off(self, acquisition: Acquisition, error: Exception) -> bool:
        """Have a wait end with an error. Return whether it was still waiting."""
        with self.queue_lock:
            local = self.queues.get(acquisition.request.line)
            if local is None or acquisition not in local.waiting or not acquisition.give_up():
                return False
            local.give_up(acquisition)
            self.waiting.pop(acquisition.permit_id, None)
        acquisition.tell(error)
        self.poke(local)
        return True

    def in_doubt(self, acquisition: Acquisition, *, asked: bool) -> bool:
        """Have it ask anew, as the outcome of its claim is unknown, unless it has been served: return whether.

        ``asked``: whether anything was sent.
        """
        with self.queue_lock:
            request, served = acquisition.request, acquisition.was_served()
            if not served:
                self.renew_request(acquisition)
        if asked:
            # What was served is not to be freed; but the statement may have left something on its session.
            self.doubt_permit(request.resource, secrets.token_hex(16) if served else request.permit_id)
        return served

    def renew_request(self, acquisition: Acquisition) -> None:
        """Go on under another permit id, as what became of the old one is unknown; the lock is held."""
        self.waiting.pop(acquisition.permit_id, None)
        acquisition.fresh_request()

    def forget_queue(self, queue: LocalQueue) -> bool:
        """Drop an empty queue. Return whether it was dropped."""
        with self.queue_lock:
            if not queue.idle:
                return False
            if self.queues.get(queue.key) is queue:
                del self.queues[queue.key]
            return True

    # What the database grants.

    def deliver(
        self, granted: Granted, sent: float | None = None, resource: Resource | None = None, *, at_once: bool = False
    ) -> None:
        """Give what was handed over to the acquisition that waits for it.

        ``sent``: the boot clock when the statement was sent that told of it; ``None``: somebody else's statement did,
        after the last one that found it waiting. ``resource``: the name, where it is known. ``at_once``: its first
        request was granted.
        """
        acquisition = self.waiting.get(granted.permit_id)
        if acquisition is None:
            for sibling in self._siblings():  # a waiter of this process may have come by another alias
                if granted.permit_id in sibling.waiting:
                    sibling.deliver(granted, sent, resource, at_once=at_once)
                    return
            self._deliver_to_none(granted, resource)
            return
        try:
            proved = acquisition.lease.proved if sent is None else sent
            wanted = self._accept(acquisition, granted.permit_id, granted.grant, proved, granted.lasts, at_once=at_once)
            if wanted and acquisition.waits_unanswered:
                acquisition.tell()
        finally:  # the waiter is told all the same if this thread is interrupted
            if acquisition.has_slots and acquisition.waits_unanswered:
                self.answer_again(acquisition)

    def _deliver_to_none(self, granted: Granted, resource: Resource | None) -> None:
        # The waiter gave up, and the thread that took it out of the queue gives back what it got; or this process never
        # knew the permit.
        same = self._known(granted.permit_id)
        known = any(self.backend.supports_renewal or not each.given_back for each in same)
        if known:
            return
        for each in same:  # one that is just being given back was served on another session: this is one grant more
            each.freed_elsewhere = True
        if resource is not None:
            self.doubt_permit(resource, granted.permit_id)

    def knows(self, permit_id: str) -> bool:
        """Whether this process asks for this permit or has it, by whatever alias."""
        return bool(self._known(permit_id))

    def _known(self, permit_id: str) -> list[Acquisition]:
        here = (each for sibling in self._siblings() for each in list(sibling.acquisitions.values()))
        return [each for each in here if each.permit_id == permit_id]

    def _accept(
        self, acquisition: Acquisition, permit_id: str, grant: Grant, sent: float, lasts: float, *, at_once: bool
    ) -> bool:
        """Give a grant to its acquisition, unless that has given up meanwhile: then the slots go back."""
        with self.queue_lock:
            if acquisition.request.permit_id != permit_id:
                return False  # it asks anew by now, and the old request is in doubt already
            wanted = acquisition.granted(grant, sent, lasts, at_once=at_once)
            # Again too: the first messenger may have been interrupted before that.
            self.waiting.pop(permit_id, None)
            local = self._unqueue(acquisition) if self.queues else None
        if self.outage.error is not None or not self.outage.known:
            self.answered()
        if not wanted and not acquisition.was_served():  # else it is the same news by two ways
            self.doubt(acquisition.request)
        elif local is not None and not local.known:
            self._reconsider(local)
        if wanted and self.beacon is not None:
            if self.beacon.dark_since is not None or self.reach.presence is not acquisition.request.presence:
                self.beacon.accepted(acquisition)
            renew_at = acquisition.lease.renew_at
            if renew_at < acquisition.granted_at + LOOK_AROUND:  # one that ends soon is looked after sooner
                self.renewals.soon(renew_at)
                self.loop.wake_by(renew_at)
        return wanted

    def _unqueue(self, acquisition: Acquisition) -> LocalQueue | None:
        """Have it wait no longer; the lock is held. Return the queue of its name, if there still is one."""
        self.waiting.pop(acquisition.permit_id, None)
        local = self.queues.get(acquisition.request.line)
        if local is not None and acquisition in local.waiting:
            local.remove(acquisition)
            if local.idle:
                del self.queues[local.key]
                return None
        return local

    def answer_again(self, acquisition: Acquisition) -> None:
        """Tell a waiter of its grant, whose messenger was interrupted on the way."""
        with self.queue_lock:
            local = self._unqueue(acquisition)
        acquisition.tell()
        if local is not None and not local.known:
            self._reconsider(local)

    # Giving back.

    def release(self, acquisition: Acquisition) -> bool:
        """Give a permit back; idempotent. Return whether this call did. A thread with an event loop is not blocked.

        Raises ``BackendError``: then the keeper goes on trying by itself.
        """
        if not acquisition.release():
            return False
        if callers.running_loop() is not None:
            callers.leave(acquisition)
            self.post(lambda: self.clear(acquisition))
        else:
            self._give_back(acquisition, self.session_here())
        return True

    async def arelease(self, acquisition: Acquisition) -> bool:
        """Give a permit back from a coroutine; see ``release()`` and ``call()``."""
        if not acquisition.release():
            return False
        await self.call(lambda session: self._give_back(acquisition, session))
        return True

    def give_back(self, acquisition: Acquisition, session: Session) -> None:
        """Give back what the program will not use, without telling its caller."""
        if acquisition.release():
            with contextlib.suppress(BackendError):
                self._give_back(acquisition, session)

    def _give_back(self, acquisition: Acquisition, session: Session) -> None:
        callers.leave(acquisition)
        if session is self.own:
            acquisition.releasing_since = boot_now()  # it has waited for its turn
        mine, sent, repeats = not isinstance(session, CallerSession), boot_now(), session.repeats
        try:
            # One that had to wait is likely to leave others waiting.
            wanted = acquisition.waited > 0
            released = self.backend.release(session, acquisition.acquired, wanted=wanted, hand_on=mine)
        except BackendError as error:
            if mine:
                self.outage.met(error)
            if (gone := self.backend.taken_away(acquisition.acquired)) is not None:
                acquisition.lose(gone)  # perhaps long before
            self.post(lambda: self.clear(acquisition))
            raise
        if not mine:
            # If that transaction is rolled back, so is this release.
            transactions.at_transaction_end(self.alias, lambda: self.post(lambda: self._discard_again(acquisition)))
        if session.repeats != repeats:
            acquisition.freed_elsewhere = True  # by the statement whose answer was lost
        self._released(acquisition, released, sent)

    def _discard_again(self, acquisition: Acquisition) -> None:
        resource = acquisition.request.resource
        if not self.backend.discard(self.own, resource, acquisition.permit_id):
            self.backend.hand_out(self.own, resource)

    def _released(self, acquisition: Acquisition, released: Released, sent: float) -> None:
        """Note that the database has the slots back, or had given them to another holder already.

        ``sent``: the boot clock before the statement was sent. The acquisition's own time may be that of another try.
        """
        for granted in released.granted:
            self.deliver(granted, sent, acquisition.request.resource)
        acquisition.released()
        if self.outage.error is not None:
            self.answered()
        self.acquisitions.pop(id(acquisition), None)
        if not (released.freed or acquisition.loss or acquisition.freed_elsewhere):
            acquisition.lose(self.backend.taken_away(acquisition.acquired) or NO_LONGER_ITS_OWN)
        for listener in self._listeners["released"]:
            listener(acquisition)
        if isinstance(self.loop, InlineLoop):
            self._poke_in_turn(self._lines(acquisition.request))

    def clear(self, acquisition: Acquisition) -> None:
        """Give back what an acquisition has, or may have got, that its caller left or could not give back."""
        if id(acquisition) not in self.acquisitions:
            return
        if acquisition.state is State.RELEASED:
            self.acquisitions.pop(id(acquisition), None)  # its release was interrupted after its end
            return
        callers.leave(acquisition)
        if acquisition.abandoned or acquisition.state is State.OVER:
            self.withdraw(acquisition)
        if acquisition.grant is None:
            if acquisition.sent:
                self.doubt(acquisition.request)
            self.acquisitions.pop(id(acquisition), None)
        elif acquisition.retry():
            acquisition.freed_elsewhere = True  # by the try that failed, or that still waits for its session
            sent = boot_now()
            try:
                released = self.backend.release(self.own, acquisition.acquired)
            except BackendError as error:
                if not self.outage.met(error):
                    extra = {"semaphore": acquisition.name, "what": "release_failed"}
                    logger.warning("%s could not be given back yet: %s", acquisition.name, error, extra=extra)
                return
            self._released(acquisition, released, sent)

    def abandon(self, acquisition: Acquisition) -> None:
        """The caller has gone in the middle of an acquire: nothing that was or will be granted may stay."""
        acquisition.abandon()  # from here on, no grant is accepted
        self.note(lambda: self.clear(acquisition))

    def drop(self, acquisition: Acquisition) -> None:
        """The acquire ended without a grant, and nothing is in doubt."""
        callers.leave(acquisition)
        self.withdraw(acquisition)
        if not acquisition.abandoned:
            self.acquisitions.pop(id(acquisition), None)
        self._refused(acquisition)

    def _refused(self, acquisition: Acquisition) -> None:
        tried_once = acquisition.patient_until is not None and acquisition.patient_until <= acquisition.arrived
        self.tell("refused", acquisition.request, None if tried_once else boot_now() - acquisition.arrived)

    def forget(self, acquisition: Acquisition, why: str) -> None:
        """The program forgot a permit: say so, and give it back."""
        if acquisition.foreign or not acquisition.has_slots:
            return
        events.log_forgotten(acquisition, why)
        acquisition.lose(Loss(LossReason.FORGOTTEN, f"it was forgotten: {why}"))
        self.give_back(acquisition, self.own)

    def used(self, acquisition: Acquisition) -> None:
        """The units that it was granted were taken for good: nothing is held from here on."""
        acquisition.used()
        self.acquisitions.pop(id(acquisition), None)
        self.tell("granted", acquisition)

    def tell_lost(self, acquisition: Acquisition) -> None:
        """Log a loss, and tell the program on a thread of its own, and the chores."""
        events.tell_lost(acquisition)
        if acquisition.loss is not None:
            self.tell("lost", acquisition, acquisition.loss)

    # Doubts and renewals.

    def doubt(self, request: Request) -> None:
        """Free what this request may have got, now and again until its statement must have ended."""
        self.doubt_permit(request.resource, request.permit_id)

    def doubt_permit(self, resource: Resource, permit_id: str) -> None:
        """Free what the request with this id may have got."""
        if isinstance(self.loop, InlineLoop):  # in memory, a request's outcome is known
            self.backend.discard(self.own, resource, permit_id)
        else:
            self.post(lambda: self.doubts.add(resource, permit_id))

    def renew_now(self, acquisition: Acquisition) -> None:
        """Have a grant proved without waiting for its next renewal."""
        if isinstance(self.loop, ThreadLoop):
            self.post(lambda: self._renew_soon(acquisition))

    def _renew_soon(self, acquisition: Acquisition) -> None:
        acquisition.lease.renew_at = 0.0
        self.renewals.soon()

    def look_at_all(self) -> None:
        """Look at everything at the next turn: the clock was moved, or a session opened. For the keeper's side."""
        if isinstance(self.loop, InlineLoop):
            self._poke_in_turn(self.queues.values())
            return
        self.renewals.soon()
        with self.queue_lock:
            for local in self.queues.values():
                local.look_soon()

    def _look_again(self) -> None:
        """An operator did something in this process: without a thread, look at once."""
        self.look_at_all()
        held = [each for each in list(self.acquisitions.values()) if each.has_slots and each.kept]
        asked = self.backend.renew(self.own, [each.acquired for each in held]).asked
        for each in held:
            if each.permit_id in asked:
                events.ask_to_stop(each, asked[each.permit_id])

    # What the thread has to do: see ``loop.Duties``.

    def pause(self) -> float:
        now = boot_now()
        due = min((chore.next_at() for chore in self.chores if chore.wakes), default=math.inf)
        if not (self.is_in_use() or any(chore.busy for chore in self.chores)):
            idle = min(LOOK_AROUND, max(self._idle() - self._unused(), 0.0))
            return max(0.0, min(due - now, idle))
        with self.queue_lock:
            due = min([due, now + NAP, *(local.next_at for local in self.queues.values())])
        return max(0.0, due - now)

    def take_turn(self) -> None:
        """Do what is due: renewals and waiters come before what is only for people."""
        for first in self.chores[:OWN_CHORES]:
            _run_if_due(first)
        now = boot_now()
        with self.queue_lock:
            due = tuple(local for local in self.queues.values() if local.next_at <= now)
        if due and self.beacon is not None and not self.own.is_open and now >= self.rests_until:
            self.beacon.open()
        for local in due:
            local.step(self.own)
            _run_if_due(self.renewals)  # a thousand names take a while
        for chore in self.chores[OWN_CHORES:]:
            if self.renewals.next_at() > boot_now():
                _run_if_due(chore)

    def descriptors(self) -> list[int]:
        own = self.own
        connection = own.connection if isinstance(own, OwnSession) and own.is_open else None
        return self.reach.descriptors(connection)

    def is_quiet(self) -> bool:
        return self.reach.quiet()

    def hear(self) -> None:
        """Act on grants that were announced, and on words about permits."""
        reach = self.reach
        heard = reach.heard()
        if reach.ended:
            self.own.close()
        elif not heard and self.own.is_open and not reach.listens:
            # Something is to be read where nothing should be: the server has most likely ended the session.
            with contextlib.suppress(BackendError):
                self.own.run(lambda cursor: cursor.execute("SELECT 1"))
        if len(heard) >= MANY_NOTES:  # a bell forgets what is too much for it
            with self.queue_lock:
                for local in self.queues.values():
                    local.look_soon()
        for each in heard:
            waiting = self.waiting.get(each.permit_id if isinstance(each, Granted) else each)
            if isinstance(each, Granted) and (waiting is None or boot_now() < waiting.lease.proved + OLD_PROOF):
                self.deliver(each)
            elif waiting is not None:
                sent = boot_now()
                with contextlib.suppress(BackendError):  # it looks again at its next heartbeat
                    granted = self.backend.granted(self.own, waiting.request)
                    if granted is not None:
                        self.deliver(granted, sent)
            else:  # an operator has something to say to a holder: its renewal brings it
                for acquisition in list(self.acquisitions.values()):
                    if acquisition.permit_id == each:
                        self._renew_soon(acquisition)
        if heard:  # the waiters go on at once, while this thread would keep the interpreter
            time.sleep(0)

    def has_work(self) -> bool:
        if self.is_in_use() or any(chore.busy for chore in self.chores):
            return True
        return self._unused() < self._idle()

    def is_in_use(self) -> bool:
        return bool(self.acquisitions or self.queues)

    def say_goodbye(self) -> None:
        for chore in self.chores:
            chore.finish(None)

    def close(self) -> None:
        self.own.close()
        self.work.close()
        for chore in self.chores:
            chore.forget()

    def _unused(self) -> float:
        return time.monotonic() - max(self.own.last_used, self.work.last_used)

    def _idle(self) -> float:
        # A test database can be dropped only when nobody is connected to it.
        return 0.0 if testmode.active() else config(self.alias).idle

    def time_left(self, now: float) -> float:
        """Return for how many seconds everything that is held will last without a renewal."""
        if not self.backend.supports_renewal:
            return math.inf
        left = [each.lease.deadline - now for each in list(self.acquisitions.values()) if each.grant and not each.loss]
        return min((each for each in left if each > 0), default=math.inf)

    # The end.

    def stop(self, *, told: bool) -> None:
        """Give everything back and close the connections: the process ends, or a test does.

        ``told``: whether those who wait are told so, by an error.
        """
        if isinstance(self.loop, InlineLoop):
            self._end(time.monotonic(), told)
            return
        with self.loop.stopped():
            self._end(time.monotonic(), told)
        if self.acquisitions or not self.loop.inbox.empty():
            with contextlib.suppress(RuntimeError):  # at the interpreter's end no thread can start
                self.loop.ensure()

    def _end(self, started: float, told: bool) -> None:
        if self.chores:
            self.doubts.finish(started)
            self._end_waits(started, told)
        away = False
        for each in list(self.acquisitions.values()):
            if each.grant is not None and not each.fenced and each.state is not State.RELEASED:
                each.loss = each.loss or Loss(LossReason.STOPPED, "the process is ending")
                # Else the leases run out: the process does not wait for each of them.
                if not (away or self.own.unreachable(started)):
                    self.clear(each)
                    away = each.state is State.RETRYING and self.outage.error is not None
        for chore in self.chores:
            if chore is not self.doubts:
                chore.finish(started)
        self.close()

    def _end_waits_in(self, queue: LocalQueue, told: bool) -> None:
        for each in list(queue.waiting):
            if each.give_up() and told:
                each.tell(BackendError("The process is ending."))
            self.waiting.pop(each.permit_id, None)
            queue.give_up(each)

    def _end_waits(self, started: float, told: bool) -> None:
        with self.queue_lock:
            queues = list(self.queues.values())
            for local in queues:
                self._end_waits_in(local, told)
        for local in queues:
            if not self.own.unreachable(started):
                local.step(self.own)
        with self.queue_lock:
            # Those that have asked the database, and do not know what came of it, get nothing.
            left = tuple(each for each in self.acquisitions.values() if each.sent and each.state is State.NEW)
            for each in left:
                each.abandon()  # if its thread goes on after all
                self.waiting.pop(each.permit_id, None)
        for each in left if told else ():
            each.tell(BackendError("The process is ending."))
        if left:
            self.work.close()  # when the statement under way has ended
        for each in left:
            if not self.own.unreachable(started):
                with contextlib.suppress(BackendError):
                    self.backend.discard(self.own, each.request.resource, each.permit_id)

    def after_fork(self) -> None:
        """In a forked child: let go of the parent's sockets and files."""
        for chore in self.chores:
            chore.after_fork()
        if isinstance(self.loop, ThreadLoop):
            self.loop.after_fork()


def _run_if_due(chore: Chore) -> None:
    now = boot_now()
    if chore.next_at() <= now:
        chore.run(now)


def _listeners(chores: list[Chore], event: str) -> tuple[Callable[..., object], ...]:
    own = getattr(Chore, event)
    return tuple(getattr(chore, event) for chore in chores if getattr(type(chore), event) is not own)
