"""What one process does about deadlocks: it writes down its waits, looks at everybody's, and tells of its own."""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem import scopes
from django_sqlsem.backends.counting import TOKENS
from django_sqlsem.backends.dialects import dialect_for
from django_sqlsem.clocks import boot_now
from django_sqlsem.conf import config
from django_sqlsem.deadlocks import graph, statements
from django_sqlsem.deadlocks.statements import RefusedError, briefly
from django_sqlsem.deadlocks.telling import error, tell
from django_sqlsem.exceptions import BackendError
from django_sqlsem.holds import Hold, State
from django_sqlsem.session_settings import is_transient
from django_sqlsem.sessions import OwnSession

if TYPE_CHECKING:
    from django_sqlsem.cursors import AnyCursor
    from django_sqlsem.deadlocks.graph import Knot
    from django_sqlsem.deadlocks.statements import Look
    from django_sqlsem.keeper import Keeper

logger = logging.getLogger("django_sqlsem")

#: A wait that has lasted so many seconds is written down, if its thread or task holds something meanwhile.
LATE: Final = 1.0
#: How often the process looks, in seconds; more rarely in proportion where more than so many wait.
LOOK: Final = 1.0
CROWD: Final = 20
#: A process that has not been heard of for so many looks is not counted.
MISSED: Final = 3.5
#: After a refusal it rests for one look, then for twice as long each time up to this, in seconds.
REST: Final = 10.0
#: So many in a row are worth a word.
WORTH_A_WORD: Final = 3
#: Where SQLite was merely being written to, it rests for so many seconds, unless there were so many in a row.
LOCKED: Final = 0.1
PATIENCE: Final = 50
#: So many waits of one process are written down.
MANY: Final = 100
#: How often who looks also sweeps up what the dead have left.
SWEEP: Final = 0.2


@dataclass
class _Plan:
    """What one step asks of the database: the rows to delete, to insert and to keep alive, by wait id."""

    gone: set[str] = field(default_factory=set)
    new: dict[str, tuple[Hold, str]] = field(default_factory=dict)
    kept: dict[str, tuple[Hold, str]] = field(default_factory=dict)
    looks: bool = False
    #: When, on the boot clock, to leave the rest to the next step; and the rows that are there by then.
    until: float = math.inf
    written: dict[str, tuple[Hold, str]] = field(default_factory=dict)


class Watch:
    """The waits of one keeper's process. The keeper's thread takes the steps; any thread may add a wait.

    ``end`` breaks off a wait with an error, and returns whether it was still waiting.
    """

    def __init__(self, keeper: Keeper, end: Callable[[Hold, Exception], bool]) -> None:
        self._keeper = keeper
        self._alias = keeper.alias
        self._end = end
        #: The keeper's own session; where that has no cursors, one that is opened for this alone.
        self._session = keeper.own if isinstance(keeper.own, OwnSession) else OwnSession(keeper.alias)
        #: The waits, and when each is to be written down, if it holds anything by then.
        self._waits: dict[int, tuple[Hold, float]] = {}
        #: The waits whose rows are there, and what these say is held meanwhile.
        self._written: dict[str, tuple[Hold, str]] = {}
        self._look_at = 0.0
        self._rest_until = 0.0
        self._crowd = 1.0
        self._refusals = 0
        self._failing = False
        #: What was seen at the last look, and until when each of those waits had been said to go on.
        self._seen: dict[Any, dict[str, int]] = {}
        self._told: set[Any] = set()

    # What the keeper calls.

    def add(self, hold: Hold) -> None:
        """Watch a wait from now on."""
        if hold.claim.resource.kind == TOKENS or config(self._alias).deadlocks == "ignore":
            return  # anybody may add tokens
        if self._has_rows():
            self._waits[id(hold)] = (hold, hold.arrived + LATE)

    @property
    def busy(self) -> bool:
        """Whether there are rows that only this process takes away."""
        return bool(self._written) and not self._failing

    @property
    def next_at(self) -> float:
        """When there is something to do, on the boot clock."""
        at = self._look_at if self._written else math.inf
        for hold, due in list(self._waits.values()):
            if not _goes_on(hold):
                at = 0.0
            elif hold.permit_id not in self._written:
                at = min(at, due)
        return max(at, self._rest_until)

    def step(self, seconds: float) -> None:
        """Write what has changed, look around if it is time, and do what follows from that.

        It should not take longer than ``seconds``, as something else is due by then. Whatever fails here is no
        permit's concern.
        """
        try:
            self._step(seconds)
        except Exception as error:  # noqa: BLE001 - what is still due must not be retried as fast as it fails
            self._refused(error)

    def _step(self, seconds: float) -> None:
        plan = self._plan(boot_now())
        if plan.gone or plan.looks:
            # The keeper's session is the keeper's to open, which takes a while when the database is away.
            closed = self._session is self._keeper.own and not self._session.is_open
            if closed and not (self._keeper.holds or self._keeper.arbiters):
                self.forget()  # nobody will open it again for them: the rows run out
                return
            if closed or seconds < statements.shortest(self._session.connection):
                self._rest_until = boot_now() + LOCKED
                return
            plan.until = boot_now() + seconds / 3
            limit = min(seconds / 3, statements.LONGEST)  # there are several
            look = briefly(self._session, lambda cursor: self._ask(cursor, plan), limit)
            self._written = plan.written
            if look is not None:
                suspected = self._judge(look)
                self._crowd = max(1.0, len(look.waits) / CROWD)
                pause = LOOK * self._crowd * random.uniform(0.85, 1.15)  # noqa: S311 - no two processes in step
                self._look_at = boot_now() + (pause / 2 if suspected else pause)
            self._answered()
        if not self._waits and not self._written:
            self.forget()

    def finish(self) -> None:
        """Take away the rows that are left, as well as it can be done: the process ends."""
        if self._written and self._session.is_open:
            gone = _Plan(gone=set(self._written))
            with contextlib.suppress(BackendError, RefusedError):  # then they run out
                briefly(self._session, lambda cursor: self._ask(cursor, gone))
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
        for key, (hold, due) in list(self._waits.items()):
            if not _goes_on(hold):
                self._waits.pop(key, None)
                continue
            if now < due:
                continue
            permits = self._permits(hold)
            known = self._written.get(hold.permit_id)
            if known is not None and known == (hold, permits):
                plan.kept[hold.permit_id] = known
            elif permits and (known is not None or len(plan.new) + len(self._written) < MANY):
                plan.new[hold.permit_id] = (hold, permits)
            else:
                self._waits[key] = (hold, now + LOOK)  # it holds nothing now, or there are enough of them
        plan.gone = self._written.keys() - plan.kept.keys()
        plan.looks = bool(plan.new) or (bool(plan.kept) and now >= self._look_at)
        return plan

    def _permits(self, hold: Hold) -> str:
        """Return what the thread or task holds at this moment, as the row says it."""
        found: list[Hold] = []
        for ref in hold.beside:
            other = ref()
            # What is kept by another database, was handed to somebody else or has been given back does not count.
            if other is None or other.keeper is not self._keeper or other.owner is None or not scopes.is_held(other):
                continue
            upgrade = getattr(other.permit(), "_upgrade", None)
            found += [other] if upgrade is None else [other, upgrade._hold]
        return " ".join(f"{each.claim.resource.key}/{each.permit_id}" for each in found if each.grant is not None)

    def _ask(self, cursor: AnyCursor, plan: _Plan) -> Look | None:
        """Send what is planned. It may be sent again if it was not answered."""
        dialect = dialect_for(cursor.db)
        patience_us = round(LOOK * MISSED * self._crowd * 1e6)
        statements.delete(cursor, dialect, plan.gone)
        inserted, plan.written = dict(plan.new), dict(plan.kept)
        if plan.looks and not statements.refresh(cursor, dialect, plan.kept, patience_us):
            statements.delete(cursor, dialect, plan.kept)  # some were swept up while this process was stopped
            inserted, plan.written = plan.kept | inserted, {}
        for wait_id, (hold, permits) in inserted.items():
            if plan.written and boot_now() > plan.until:
                break  # a row takes a round trip, and there may be a hundred
            values = statements.values(hold.claim, dialect, permits, hold.arrived, patience_us)
            statements.insert(cursor, dialect, values)
            plan.written[wait_id] = (hold, permits)
        if not plan.looks:
            return None
        look = statements.look(cursor, dialect, leases=self._keeper.backend.supports_renewal)
        if look.dead and random.random() < SWEEP:  # noqa: S311
            statements.delete(cursor, dialect, look.dead[: statements.CHUNK])
        return look

    def _judge(self, look: Look) -> bool:
        """Tell of each deadlock once, and break it if settings say so. Return whether one is suspected.

        It is one when it is seen twice, and each of its waits was said to go on in between.
        """
        seen: dict[Any, dict[str, int]] = {}
        suspected = False
        for knot in graph.knots(*look.graph()):
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

    def _meet(self, look: Look, knot: Knot, youngest: Hold) -> None:
        breaks = config(self._alias).deadlocks == "break" and knot.closed
        if knot.identity in self._told and not breaks:
            return
        from django_sqlsem.deadlocks.reading import Teller  # it needs the models, which this module must not

        dialect, leases = dialect_for(self._session.connection), self._keeper.backend.supports_renewal
        deadlock = Teller(look, dialect, leases=leases).deadlock(knot)
        mine = [self._written[wait.id][0] for wait in knot.waits if wait.id in self._written]
        if not all(_goes_on(hold) for hold in mine):
            return  # what was read is over by now
        broken = breaks and self._end(youngest, error(youngest, deadlock))
        if breaks and not broken:
            return
        if knot.identity not in self._told:
            self._told.add(knot.identity)
            tell(self._keeper, deadlock, youngest, broken=broken)

    # Trouble with the database.

    def _has_rows(self) -> bool:
        backend = self._keeper.backend
        return not backend.process_local and (backend.supports_renewal or config(self._alias).record)

    def _refused(self, error: Exception) -> None:
        self._refusals += 1
        # SQLite has one writer, and does not wait for it here.
        if self._session.connection.vendor == "sqlite" and is_transient(error) and self._refusals < PATIENCE:
            self._rest_until = boot_now() + LOCKED * random.uniform(0.5, 1.5)  # noqa: S311
            return
        # A busy server may take too long now and then.
        self._rest_until = boot_now() + min(REST, LOOK * 2 ** min(self._refusals - 1, 10))
        if self._refusals >= WORTH_A_WORD and not self._failing:
            self._failing = True
            unknown = not isinstance(error, (BackendError, RefusedError))
            message = "Deadlocks over the locks of %r cannot be looked for now: %s"
            logger.warning(message, self._alias, error, exc_info=error if unknown else None)

    def _answered(self) -> None:
        self._refusals = 0
        if self._failing:
            self._failing = False
            logger.warning("Deadlocks over the locks of %r are looked for again.", self._alias)


def _goes_on(hold: Hold) -> bool:
    return hold.state is State.QUEUED and not hold.abandoned and not hold.told
