"""What one process does about deadlocks: it writes down its waits, looks at everybody's, and tells of its own.

Each statement is given up soon: nothing that is held or waited for may suffer from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from django.db import connections

from django_sqlsem.backends.base import COUNTER
from django_sqlsem.conf import config
from django_sqlsem.core.clocks import boot_now, chance
from django_sqlsem.core.identity import HolderIdentity
from django_sqlsem.core.names import resource_for
from django_sqlsem.database.cursors import AnyCursor
from django_sqlsem.database.dialects import DatabaseNow, Dialect, dialect_for
from django_sqlsem.database.errors import is_transient
from django_sqlsem.database.sessions import OwnSession, RefusedError, briefly, insert_missing
from django_sqlsem.deadlocks import graph as deadlocks_graph
from django_sqlsem.deadlocks.graph import Knot
from django_sqlsem.deadlocks.reading import IDS_AT_ONCE, Look, Teller, at_once, has_rows, read_waits
from django_sqlsem.exceptions import BackendError, DeadlockError
from django_sqlsem.models import WaitRow
from django_sqlsem.runtime import callers
from django_sqlsem.runtime.acquisition import Acquisition, AcquisitionKeeper, State
from django_sqlsem.runtime.chores import Chore
from django_sqlsem.snapshots import DeadlockSnapshot, who

logger = logging.getLogger("django_sqlsem")

#: A statement takes no longer, in seconds.
_LONGEST: Final = 0.4
#: A wait that has lasted this many seconds is written down, if its thread or task holds something meanwhile.
LATE: Final = 1.0
#: How often the process looks, in seconds; more rarely in proportion where more than this many wait.
_LOOK: Final = 1.0
_CROWD: Final = 20
#: A process that has not been heard of for this many looks is not counted.
MISSED: Final = 3.5
#: After a refusal it rests for one look, then for twice as long each time up to this, in seconds.
REST: Final = 10.0
#: How many in a row are worth a word.
WORTH_A_WORD: Final = 3
#: Where SQLite was merely being written to, it rests for a few seconds, unless it happened often in a row.
LOCKED: Final = 0.1
_PATIENCE: Final = 50
#: How many waits of one process are written down.
_MANY: Final = 100
#: How often who looks also sweeps up what the dead have left.
_SWEEP: Final = 0.2
#: How many rows one step inserts.
INSERTED: Final = 20

# Not with the ORM: SQL Server would scan a small table, and wait for the rows of others.
_REFRESH: Final = "UPDATE sqlsem_wait SET expires_us = {now} + %(patience_us)s WHERE wait_id IN ({some})"
_DELETE: Final = "DELETE FROM sqlsem_wait WHERE wait_id IN ({some})"


def insert(alias: str, acquisitions: Iterable[tuple[Acquisition, str]], boot_id: str, patience_us: int) -> None:
    """Write down waits, each with what its caller holds meanwhile."""
    rows = [_row(acquisition, permits, boot_id, patience_us) for acquisition, permits in acquisitions]
    insert_missing(rows, using=alias)


def _row(acquisition: Acquisition, permits: str, boot_id: str, patience_us: int) -> WaitRow:
    request, holder = acquisition.request, acquisition.request.holder
    return WaitRow(
        wait_id=request.permit_id,
        key=request.resource.key,
        name=request.resource.name,
        take=request.take,
        slots=request.slots,
        mode=request.lock_mode,
        fair=request.fair,
        permits=permits,
        since_us=DatabaseNow(was_us=round(acquisition.arrived * 1e6)),
        expires_us=DatabaseNow() + patience_us,
        **who(holder),
        process_id=holder.process,
        boot_id=boot_id,
    )


def refresh(cursor: AnyCursor, dialect: Dialect, wait_ids: Collection[str], patience_us: int) -> bool:
    """Say that these waits go on. Return whether all of their rows are there."""
    return _each(cursor, dialect, _REFRESH, wait_ids, {"patience_us": patience_us}) >= len(wait_ids)


def delete(cursor: AnyCursor, dialect: Dialect, wait_ids: Collection[str]) -> None:
    """Take the rows of waits away that are over. Idempotent."""
    _each(cursor, dialect, _DELETE, wait_ids, {})


def _each(cursor: AnyCursor, dialect: Dialect, text: str, ids: Collection[str], values: Mapping[str, Any]) -> int:
    changed = 0
    for some, parameters in at_once(ids):
        dialect.execute(cursor, text.replace("{some}", some), {**values, **parameters})
        changed += max(0, cursor.rowcount)
    return changed


def tell(keeper: AcquisitionKeeper, deadlock: DeadlockSnapshot, youngest: Acquisition, *, broken: bool) -> None:
    """Log a deadlock, and note it in the history of each name."""
    request = youngest.request
    name = request.resource.name
    end = f" The last wait, for {name!r}, was broken off." if broken else ""
    logger.error("Deadlock: %s.%s", deadlock, end, extra={"semaphores": deadlock.names, "broken": broken})
    for wait in {each.name: each for each in deadlock.waits}.values():
        holder = HolderIdentity(**who(wait), process="")
        theirs = dataclasses.replace(request, resource=resource_for(wait.name, request.resource.kind), holder=holder)
        keeper.tell("deadlocked", theirs, wait.age, f"{deadlock}.{end}")


@dataclass
class _Plan:
    """What one step asks of the database: the rows to delete, to insert and to keep alive, by wait id."""

    gone: set[str] = field(default_factory=set)
    new: dict[str, tuple[Acquisition, str]] = field(default_factory=dict)
    kept: dict[str, tuple[Acquisition, str]] = field(default_factory=dict)
    looks: bool = False


class DeadlockWatch(Chore):
    """The waits of one keeper's process. The keeper's thread takes the steps; any thread may add a wait."""

    name = "deadlocks"

    def __init__(self, keeper: AcquisitionKeeper) -> None:
        self._keeper = keeper
        self._alias = keeper.alias
        #: The keeper's own session; where that has no cursors, one that is opened for this alone.
        self._session = keeper.own if isinstance(keeper.own, OwnSession) else OwnSession(keeper.alias)
        self._dialect = dialect_for(connections[keeper.alias])
        #: The waits, and when each is to be written down, if it holds anything by then.
        self._waits: dict[int, tuple[Acquisition, float]] = {}
        #: The waits whose rows are there, and what these say is held meanwhile.
        self._written: dict[str, tuple[Acquisition, str]] = {}
        self._look_at = 0.0
        self._rest_until = 0.0
        self._crowd = 1.0
        self._refusals = 0
        self._failing = False
        #: What was seen at the last look, and until when each of those waits had been said to go on.
        self._seen: dict[Any, dict[str, int]] = {}
        self._told: set[Any] = set()

    # What the keeper calls.

    def queued(self, acquisition: Acquisition) -> None:
        """Watch a wait from now on, if its caller holds something: any other keeps nobody waiting."""
        if next(callers.held_beside(acquisition), None) is None:
            return
        if acquisition.request.resource.kind == COUNTER or config(self._alias).deadlocks == "ignore":
            return  # anybody may add units
        if has_rows(self._keeper.backend):
            self._waits[id(acquisition)] = (acquisition, acquisition.arrived + LATE)

    @property
    def busy(self) -> bool:
        """Whether there are rows that only this process takes away."""
        return bool(self._written) and not self._failing

    def next_at(self) -> float:
        """Return when there is something to do, on the boot clock."""
        at = self._look_at if self._written else math.inf
        for acquisition, due in list(self._waits.values()):
            if not _goes_on(acquisition):
                at = 0.0
            elif acquisition.permit_id not in self._written:
                at = min(at, due)
        return max(at, self._rest_until)

    def run(self, now: float) -> None:
        """Write what has changed, look around if it is time, and do what follows from that.

        It takes a part of the time that is left to what is held. Whatever fails here is no permit's concern.
        """
        try:
            self._step(self._keeper.time_left(now) / (3 if self._session is self._keeper.own else 8))
        except Exception as error:  # noqa: BLE001 - what is still due must not be retried as fast as it fails
            self._refused(error)

    def _step(self, seconds: float) -> None:
        plan = self._plan(boot_now())
        if plan.gone or plan.looks:
            # The keeper's session is the keeper's to open, which takes a while when the database is away.
            closed = self._session is self._keeper.own and not self._session.is_open
            if closed and not self._keeper.is_in_use():
                self.forget()  # nobody will open it again for them: the rows run out
                return
            if closed or seconds < self._dialect.shortest(self._session.connection):
                self._rest_until = boot_now() + LOCKED
                return
            limit = min(seconds / 3, _LONGEST)  # there are several
            self._written, look = briefly(self._session, lambda cursor: self._ask(cursor, plan), limit)
            if look is not None:
                suspected = self._judge(look)
                self._crowd = max(1.0, len(look.waits) / _CROWD)
                pause = _LOOK * self._crowd * chance.uniform(0.85, 1.15)  # no two processes in step
                self._look_at = boot_now() + (pause / 2 if suspected else pause)
            self._refusals = 0
            if self._failing:
                self._failing = False
                logger.warning("Deadlocks over the locks of %r are looked for again.", self._alias)
        if not self._waits and not self._written:
            self.forget()

    def finish(self, since: float | None) -> None:
        """Take away the rows that are left, as well as it can be done: the process ends."""
        if since is None:
            return
        if self._written and self._session.is_open:
            gone = _Plan(gone=set(self._written))
            with contextlib.suppress(BackendError, RefusedError):  # then they run out
                # In line, as processes that are stopped together end together, and SQLite has one writer.
                briefly(self._session, lambda cursor: self._ask(cursor, gone), _LONGEST, in_line=_LONGEST)
        self.forget()

    def forget(self) -> None:
        """Know of no waits. What rows are left run out by themselves."""
        self._waits.clear()
        self._written.clear()
        self._seen.clear()
        self._told.clear()
        if self._session is not self._keeper.own:
            self._session.close()

    # One step.

    def _plan(self, now: float) -> _Plan:
        plan = _Plan()
        for key, (acquisition, due) in list(self._waits.items()):
            if not _goes_on(acquisition):
                self._waits.pop(key, None)
                continue
            if now < due:
                continue
            permits = self._permits(acquisition)
            known = self._written.get(acquisition.permit_id)
            if known == (acquisition, permits):
                plan.kept[acquisition.permit_id] = known
            elif permits and (known is not None or len(plan.new) + len(self._written) < _MANY):
                if len(plan.new) < INSERTED:  # the next step is for the others
                    plan.new[acquisition.permit_id] = (acquisition, permits)
            else:
                self._waits[key] = (acquisition, now + _LOOK)  # it holds nothing now, or there are enough of them
        plan.gone = self._written.keys() - plan.kept.keys()
        plan.looks = bool(plan.new) or (bool(plan.kept) and now >= self._look_at)
        return plan

    def _permits(self, acquisition: Acquisition) -> str:
        """Return what the thread or task holds at this moment, as the row says it."""
        found: dict[str, str] = {}
        for other in callers.held_beside(acquisition):
            if other.keeper is not self._keeper or not callers.is_held(other):
                continue  # it is kept by another database
            upgrade = getattr(other.permit(), "_upgrade", None)
            for each in [other] if upgrade is None else [other, upgrade._acquisition]:
                if each.grant is not None:
                    found[each.permit_id] = f"{each.request.resource.key}/{each.permit_id}"
        return " ".join(found.values())

    def _ask(self, cursor: AnyCursor, plan: _Plan) -> tuple[dict[str, tuple[Acquisition, str]], Look | None]:
        """Send what is planned. It may be sent again if it was not answered. Return what is written by then."""
        dialect, written = self._dialect, plan.kept | plan.new
        patience_us = round(_LOOK * MISSED * self._crowd * 1e6)
        delete(cursor, dialect, plan.gone)
        if plan.looks and not refresh(cursor, dialect, plan.kept, patience_us):
            delete(cursor, dialect, plan.kept)  # some were swept up while this process was stopped: they are new again
            written = plan.new
        insert(self._alias, plan.new.values(), dialect.boot_id, patience_us)
        if not plan.looks:
            return written, None
        look = read_waits(cursor, dialect, leases=self._keeper.backend.supports_renewal)
        if look.dead and chance.random() < _SWEEP:
            delete(cursor, dialect, look.dead[:IDS_AT_ONCE])
        return written, look

    def _judge(self, look: Look) -> bool:
        """Tell of each deadlock once, and break it if settings say so. Return whether one is suspected.

        It is one when it is seen twice, and each of its waits was said to go on in between.
        """
        seen: dict[Any, dict[str, int]] = {}
        suspected = False
        for knot in deadlocks_graph.knots(*look.graph()):
            heard = {wait.id: look.heard(wait.id) for wait in knot.waits}
            before = self._seen.get(knot.identity)
            if before is None or any(heard[each] <= before[each] for each in heard.keys() - self._written.keys()):
                seen[knot.identity] = before or heard
                suspected = suspected or knot.identity not in self._told
                continue
            seen[knot.identity] = before
            # One of them speaks for all: all others leave it to the process of the youngest wait.
            if (mine := self._written.get(knot.youngest.id)) is not None:
                self._meet(look, knot, mine[0])
        self._seen = seen
        self._told.intersection_update(seen)
        return suspected

    def _meet(self, look: Look, knot: Knot, youngest: Acquisition) -> None:
        breaks = config(self._alias).deadlocks == "break" and knot.closed
        if knot.identity in self._told and not breaks:
            return
        deadlock = Teller(look, self._dialect, leases=self._keeper.backend.supports_renewal).deadlock(knot)
        mine = [self._written[wait.id][0] for wait in knot.waits if wait.id in self._written]
        if not all(_goes_on(acquisition) for acquisition in mine):
            return  # what was read is over by now
        name = youngest.request.resource.name
        told = f"Waiting for {name!r} was broken off, as it could not have ended: {deadlock}."
        broken = breaks and self._keeper.break_off(youngest, DeadlockError(told, deadlock))
        if breaks and not broken:
            return
        if knot.identity not in self._told:
            self._told.add(knot.identity)
            tell(self._keeper, deadlock, youngest, broken=broken)

    # Trouble with the database.

    def _refused(self, error: Exception) -> None:
        self._refusals += 1
        # It does not wait here for who is writing.
        if self._dialect.one_writer and is_transient(error) and self._refusals < _PATIENCE:
            self._rest_until = boot_now() + LOCKED * chance.uniform(0.5, 1.5)
            return
        # A busy server may take too long now and then.
        self._rest_until = boot_now() + min(REST, _LOOK * 2 ** min(self._refusals - 1, 10))
        if self._refusals >= WORTH_A_WORD and not self._failing:
            self._failing = True
            unknown = not isinstance(error, (BackendError, RefusedError))
            message = "Deadlocks over the locks of %r cannot be looked for now: %s"
            logger.warning(message, self._alias, error, exc_info=error if unknown else None)


def _goes_on(acquisition: Acquisition) -> bool:
    return acquisition.state is State.QUEUED and not acquisition.answer.told
