"""What a keeper does besides granting and giving back: chores, each with a name and an hour of its own.

Higher rooms plug in chores of their own, when ``apps.ready`` has them do so.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import ClassVar, Final

from django.db.backends.base.base import BaseDatabaseWrapper

from django_sqlsem.backends.base import Ended, OverAct, Request
from django_sqlsem.conf import config
from django_sqlsem.core.clocks import boot_now, chance
from django_sqlsem.core.identity import process_id
from django_sqlsem.core.names import Resource
from django_sqlsem.database.sessions import OwnSession, RefusedError
from django_sqlsem.exceptions import BackendError
from django_sqlsem.runtime import callers, events
from django_sqlsem.runtime.acquisition import Acquisition, AcquisitionKeeper, State, renewal_interval
from django_sqlsem.snapshots import Loss

logger = logging.getLogger("django_sqlsem")

#: How often it looks for forgotten permits and stuck releases while anything is held, in seconds.
LOOK_AROUND: Final = 1.0
#: When to free what an interrupted request may have got, in seconds after it: its statement may still be running.
DOUBTS: Final = (0.0, 0.1, 0.5, 2.0, 6.0)
#: A holder without its beacon for so long, in seconds, counts its permits as lost; others wait half as long again.
DARK: Final = 1.0
#: How often a broken session is opened again meanwhile, in seconds.
RELIGHT: Final = 0.2
#: A renewal that has failed is tried again after this many seconds at the least.
MOST_OFTEN: Final = 0.1
#: How often it is looked for what is over, in seconds.
TIDY_EVERY: Final = 10.0
#: Again so soon, if somebody seems to be dead; and at most this part of its time.
TIDY_SOON: Final = 1.6
TIDY_SHARE: Final = 100
#: And for the first time, so long after the first acquire.
TIDY_FIRST: Final = 2.0
#: Idle names are looked for so often, in seconds; sooner where there are more of them than one look takes.
FORGET_EVERY: Final = 60.0


class Chore:
    """One of a keeper's chores. What a chore does not need stays as it is here: nothing is done.

    ``next_at``, ``run`` and what follows them are called on the keeper's thread, the rest on any.
    """

    name: ClassVar[str]
    #: Whether the thread wakes for it; else it is done when the thread is awake.
    wakes: ClassVar[bool] = True

    def next_at(self) -> float:
        """Return when there is something to do, on the boot clock."""
        return math.inf

    @property
    def busy(self) -> bool:
        """Whether the keeper's thread must not end yet."""
        return False

    def run(self, now: float) -> None:
        """Do what is due."""

    def finish(self, since: float | None) -> None:
        """The thread is about to end; or the process, since an instant of ``time.monotonic()``."""

    def forget(self) -> None:
        """The keeper closes its connections: know of nothing any more."""

    def after_fork(self) -> None:
        """In a forked child: let go of what is the parent's."""

    # What it is told.

    def queued(self, acquisition: Acquisition) -> None:
        """A caller waits."""

    def granted(self, acquisition: Acquisition) -> None:
        """A caller has its permit."""

    def refused(self, request: Request, waited: float | None) -> None:
        """A caller got nothing in ``waited`` seconds; ``None``: it did not want to wait."""

    def released(self, acquisition: Acquisition) -> None:
        """The slots are back."""

    def lost(self, acquisition: Acquisition, loss: Loss) -> None:
        """A permit was lost."""

    def ended(self, hold: Ended) -> None:
        """The hold of a process that is gone was ended."""

    def act_over(self, session: OwnSession, act: OverAct) -> None:
        """The time of something that an operator did is over; ``session``: to write that on."""

    def deadlocked(self, request: Request, waited: float, detail: str) -> None:
        """A wait is part of a deadlock, in a sentence."""


#: What makes the chores of other rooms for a keeper.
_plugged_in: list[Callable[[AcquisitionKeeper], Chore]] = []


def plug_in(make: Callable[[AcquisitionKeeper], Chore]) -> None:
    """Have every keeper that is made from now on do the chore that ``make(keeper)`` returns. Idempotent."""
    if make not in _plugged_in:
        _plugged_in.append(make)


def plugged_in(keeper: AcquisitionKeeper) -> list[Chore]:
    """Return other rooms' chores for a new keeper."""
    return [make(keeper) for make in _plugged_in]


class Renewals(Chore):
    """Keeps alive what is held, and finds what is lost, forgotten or stuck."""

    name = "renewals"

    def __init__(self, keeper: AcquisitionKeeper) -> None:
        self._keeper = keeper
        self._at = 0.0
        self._failing = False
        #: Those that the program had dropped at the last look, by ``id()``.
        self._dropped: set[int] = set()

    def next_at(self) -> float:
        return self._at if self._keeper.acquisitions else math.inf

    def soon(self, at: float = 0.0) -> None:
        """Look at what is held at ``at``, if not before."""
        self._at = min(self._at, at)

    def run(self, now: float) -> None:
        """Look at everything that is held: what is lost, forgotten, stuck or to be renewed."""
        self._at = next_at = now + LOOK_AROUND
        renew: list[Acquisition] = []
        dropped, self._dropped = self._dropped, set()
        started, heartbeat = time.monotonic(), self._keeper.backend.heartbeat
        for each in list(self._keeper.acquisitions.values()):
            if each.has_slots and each.waits_unanswered:
                self._keeper.answer_again(each)  # the thread that brought its grant was interrupted
            if each.is_left:
                each.abandon()
                if each.state is State.OVER:  # it had given up: nothing may be left of it here
                    self._keeper.clear(each)
            if each.given_back or each.abandoned:
                late = each.abandoned or now - each.releasing_since > LOOK_AROUND
                if late and not self._keeper.own.unreachable(started):
                    self._keeper.clear(each)  # its caller may have been interrupted before it could say so
            elif self._looks_after(each, dropped):
                if each.lease.renew_at - 0.1 * renewal_interval(each.request.lease, heartbeat) <= now:
                    renew.append(each)
                next_at = min(next_at, each.lease.renew_at, each.lease.deadline)
        if renew:
            self._renew(renew)
            next_at = min([next_at, *(each.lease.renew_at for each in renew)])
        self._at = max(next_at, now + 0.02)

    def _looks_after(self, acquisition: Acquisition, dropped: set[int]) -> bool:
        """Give back a permit that the program has dropped. Return whether it is to be renewed.

        ``dropped``: those of which that was seen at the last look.
        """
        if not acquisition.has_slots or not acquisition.kept:
            return False
        if acquisition.state is State.GRANTED and boot_now() >= acquisition.lease.deadline:
            return False  # its caller will find out that it slept through the grant, and try again
        why = _forgotten(acquisition)
        if acquisition.is_dropped and not acquisition.fenced:
            self._dropped.add(id(acquisition))
            # Its finaliser says so before the next look, unless a signal that raised in it has cut it short.
            if id(acquisition) in dropped:
                why = why or "it was garbage-collected"
        if acquisition.current_loss() is not None:
            # Nothing to renew; the holder will release it, or forget it.
            if why:
                self._keeper.give_back(acquisition, self._keeper.own)
            return False
        if why:
            self._keeper.forget(acquisition, why)
        return not why

    def _renew(self, acquisitions: list[Acquisition]) -> None:
        sent = boot_now()
        for each in acquisitions:
            each.lease.error = each.lease.error or "the database has not answered yet"
        try:
            renewal = self._keeper.backend.renew(self._keeper.own, [each.acquired for each in acquisitions])
        except BackendError as error:
            self._say_failed(error)
            for each in acquisitions:
                _not_renewed(each, str(error.__cause__ or error).strip())
            return
        self._keeper.answered()
        if self._failing:
            logger.warning("Permits are renewed again.")
            self._failing = False
        for each in acquisitions:
            if each.permit_id in renewal.renewed:
                each.renewed(sent)
            elif each.given_back or each.state is State.GRANTED:
                continue
            elif each.permit_id in renewal.lost:
                each.lose(renewal.lost[each.permit_id])
            else:
                _not_renewed(each, "somebody's transaction keeps its row locked")
        for each in acquisitions:  # all renewals are noted by now: what the program does then may take its time
            if each.permit_id in renewal.asked:
                events.ask_to_stop(each, renewal.asked[each.permit_id])

    def _say_failed(self, error: BackendError) -> None:
        if self._keeper.outage.met(error):
            return
        if not self._failing:
            logger.warning("Permits could not be renewed, trying on until their leases run out: %s", error)
        self._failing = True


def _not_renewed(acquisition: Acquisition, why: str) -> None:
    acquisition.lease.error, now = why, boot_now()
    # What was handed over and never confirmed ends long before a lease.
    left = acquisition.lease.deadline - now
    acquisition.lease.renew_at = now + max(MOST_OFTEN, min(1.0, acquisition.request.lease / 16, left / 4))


def _forgotten(acquisition: Acquisition) -> str:
    """Say why the program will not release it; empty: it may."""
    if acquisition.fenced:
        return ""  # somebody's transaction still counts on it
    if acquisition.overdue:
        return acquisition.overdue
    if callers.caller_is_gone(acquisition):
        return "the thread or task that took it has ended"
    return ""


class Doubts(Chore):
    """Frees what requests may have got whose outcome is unknown, until their statements must have ended."""

    name = "doubts"

    def __init__(self, keeper: AcquisitionKeeper) -> None:
        self._keeper = keeper
        self._doubts: list[tuple[float, float, Resource, str]] = []

    def add(self, resource: Resource, permit_id: str) -> None:
        """Doubt a request from now on; on the keeper's thread."""
        now = boot_now()
        self._doubts += [(now + delay, delay, resource, permit_id) for delay in DOUBTS]

    @property
    def busy(self) -> bool:
        return bool(self._doubts)

    def next_at(self) -> float:
        return min((at for at, *_ in self._doubts), default=math.inf)

    def run(self, now: float) -> None:
        started, keeper, failed = time.monotonic(), self._keeper, False
        later = []
        for doubt in self._doubts:
            due, delay, resource, permit_id = doubt
            if due > now:
                later.append(doubt)
                continue
            try:
                if not failed and not keeper.own.unreachable(started):
                    keeper.backend.discard(keeper.own, resource, permit_id)
                    continue
            except BackendError as error:
                failed = keeper.outage.met(error)  # the others would meet the same
            # What was sent before the database went away may reach it when it is back: look then, and a while later.
            later.append((boot_now() + max(delay, LOOK_AROUND), delay, resource, permit_id))
        self._doubts[:] = later

    def finish(self, since: float | None) -> None:
        """The process ends: free what can be freed now."""
        if since is not None:
            self.run(boot_now() + max(DOUBTS))


class BeaconChore(Chore):
    """Shows that the process lives: keeps the keeper's session open, and its beacon lit, while anything is held."""

    name = "beacon"

    def __init__(self, keeper: AcquisitionKeeper) -> None:
        self._keeper = keeper
        self.reach = keeper.reach
        #: When the beacon went out unasked, on the boot clock, and when to try to light it again.
        self.dark_since: float | None = None
        self._open_at = 0.0
        #: Since when the life of the server was known that the last connection led to.
        self._server_since: int | None = None
        #: When to free what has come back in a new life of the server.
        self._free_at = math.inf

    def opened(self, connection: BaseDatabaseWrapper) -> None:
        """Make a new connection of the keeper's own ready. Raises Django's database errors."""
        self.any_opened(connection)
        self.reach.opened(connection)

    def any_opened(self, connection: BaseDatabaseWrapper) -> None:
        """Make any new connection of the keeper's ready. Raises Django's database errors."""
        self._keeper.backend.opened(connection)
        before, self._server_since = self._server_since, getattr(connection, "sqlsem_since_us", 0)
        if before not in (None, self._server_since):
            self._free_at = 0.0

    def open(self) -> None:
        """Open the keeper's session."""
        self._open_at = boot_now() + RELIGHT
        try:
            self._keeper.own.run(lambda cursor: None)
        except BackendError as error:  # whatever needs it will hear
            self._keeper.outage.met(error)

    def next_at(self) -> float:
        if self.reach.reopened or self._answered_too:
            return 0.0
        return min(self._free_at, self._opens_at() if self._is_needed else math.inf)

    @property
    def busy(self) -> bool:
        return self._keeper.outage.passing

    @property
    def _answered_too(self) -> bool:
        """Whether the keeper's session has had its answer too, since another one's."""
        return self._keeper.outage.passing and self._keeper.own.asked_at is None

    @property
    def _is_needed(self) -> bool:
        """Whether the keeper's session is closed though it is needed: the log hears by it that an outage is over."""
        return bool(self._keeper.acquisitions or self._keeper.outage.passing) and not self._keeper.own.is_open

    def _opens_at(self) -> float:
        """Return when to open the session: while anything is held, soon, whatever has come of the last try."""
        held = any(each.has_slots for each in list(self._keeper.acquisitions.values()))
        return self._open_at if held else max(self._open_at, self._keeper.rests_until)

    def run(self, now: float) -> None:
        """See that the keeper's session stands while anything is held or waited for."""
        own, acquisitions = self._keeper.own, self._keeper.acquisitions
        if self._answered_too:
            self._keeper.answered()
        if not own.is_open:
            if self.reach.presence.beacon and self.dark_since is None and self.reach.tied:
                self.dark_since, self._open_at = now, now
                self.reach.darken()
                for each in list(acquisitions.values()):
                    if each.has_slots:
                        each.lease.darken(now + DARK)
            if self._is_needed and now >= self._opens_at():
                self.open()
        if self.reach.reopened and own.is_open:
            self.reach.reopened = False
            # The rows must say whether the beacon is lit, and are proved anew. So are those that could not be renewed.
            lit = self.reach.presence.beacon or self.dark_since is not None
            for each in list(acquisitions.values()):
                if each.has_slots and (lit or each.lease.error):
                    each.lease.renew_at = 0.0
            self.dark_since = None
            self._keeper.look_at_all()
        if now >= self._free_at:
            self._free_what_came_back()

    def _free_what_came_back(self) -> None:
        """Free what this process has given back, if a standby was promoted that had not heard of it."""
        self._free_at = math.inf
        try:
            for resource, permit_id in self._keeper.backend.held_by(self._keeper.own, process_id()):
                if not self._keeper.knows(permit_id):
                    self._keeper.doubt_permit(resource, permit_id)
        except BackendError as error:
            self._free_at = boot_now() + LOOK_AROUND
            self._keeper.outage.met(error)

    def accepted(self, acquisition: Acquisition) -> None:
        """A grant came: its row was written by what the request said of the beacon."""
        if self.dark_since is not None and acquisition.request.presence.beacon:
            acquisition.lease.darken(self.dark_since + DARK)
        if self.reach.presence.beacon and not acquisition.request.presence.beacon:
            acquisition.lease.renew_at = 0.0  # its row must say that the beacon is lit

    def forget(self) -> None:
        self.reach.close(left=bool(self._keeper.acquisitions))
        self.dark_since = None

    def after_fork(self) -> None:
        self.reach.after_fork()


_OVER: Final = {
    "pause": ("The pause of %r is over.", {"what": "pause_over"}),
    "slots": ("The time of the slots set for %r is over: the code's number counts again.", {"what": "slots_over"}),
}


class Housekeeping(Chore):
    """Ends what is over though nobody is there to end it: operators' acts for a time, and holds of the dead.

    And it forgets names that nobody has used for long.
    """

    name = "housekeeping"
    wakes = False

    def __init__(self, keeper: AcquisitionKeeper) -> None:
        self._keeper = keeper
        self._shares = isinstance(keeper.own, OwnSession)
        self._session = keeper.own if isinstance(keeper.own, OwnSession) else OwnSession(keeper.alias)
        self._at = boot_now() + TIDY_FIRST
        self._proofs: dict[tuple[int, int], int] = {}
        self._turn = False
        self._forget_at = self._at
        #: The key after which it looks for idle names: no two processes begin with the same ones.
        self._after = secrets.token_hex(16)

    def next_at(self) -> float:
        return self._at if self._session.is_open or not self._shares else math.inf

    def run(self, now: float) -> None:
        """Look for what is over; a failure costs nothing, as it is looked for again."""
        self._at = now + TIDY_EVERY * chance.uniform(0.8, 1.2)  # no two processes in step
        used, soon = self._session.last_used, False
        try:
            # One of the two in a turn: who only waits sends few statements. Where locks end by themselves, both.
            self._turn = not self._turn
            if self._turn:
                soon = self._end_dead()
                # Where there are very many names, page after page.
                soon = self._keeper.backend.set_aside(self._session) or soon
            if not (self._turn and self._keeper.backend.supports_renewal):
                for act in self._keeper.backend.end_acts(self._session):
                    text, extra = _OVER[act.what]
                    logger.info(text, act.name, extra={"semaphore": act.name, **extra})
                    self._keeper.tell("act_over", self._session, act)
            if now >= self._forget_at:
                self._forget(now)
        except (BackendError, RefusedError) as error:
            logger.debug("Nothing could be tidied up at %r: %s", self._keeper.alias, error)
        finally:
            self._session.last_used = used  # no connection stays open longer for this
            took = boot_now() - now  # where there are very many names, it looks less often
            self._at = now + TIDY_SOON if soon else max(self._at, now + took * TIDY_SHARE)

    def _forget(self, now: float) -> None:
        """Delete a few idle names; if there are more, go on in a moment."""
        self._forget_at = now + FORGET_EVERY
        seconds = config(self._keeper.alias).forget_after
        if seconds is None:
            return
        deleted, self._after, more = self._keeper.backend.forget(self._session, seconds=seconds, after=self._after)
        if deleted:
            logger.debug("%d idle names at %r are forgotten.", deleted, self._keeper.alias)
        if more:
            self._forget_at, self._at = now, now + TIDY_SOON

    def _end_dead(self) -> bool:
        """End the holds of the dead. Return whether somebody seems to be dead, so that this turn is to come again."""
        witness = self._keeper.reach.presence.beacon
        ended, soon = self._keeper.backend.end_dead(self._session, witness=witness, proofs=self._proofs)
        for each in ended:
            self._keeper.tell("ended", each)
        if soon:
            self._turn = False
        else:
            self._proofs.clear()
        return soon

    def finish(self, since: float | None) -> None:
        if not self._shares:
            self._session.close()

    def forget(self) -> None:
        self.finish(None)
