"""Counters: the kind of lock whose name's row has a number in place of slots.

Whatever changes the count keeps the name's row locked until it commits, so that a release and a new waiter never miss
one another. Units are handed to a waiter by moving them out of the count into the waiter's row, which is ``away`` from
then on. Whoever deletes that row has them: the waiter, which takes them for good; or, if it gave up or has not come for
them in time, the next one that looks at the name, which puts them back into the count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django_sqlsem.backends.base import COUNTER, LAPSE_US, Grant, Granted, Place, Queue, Waited
from django_sqlsem.backends.rows import reading, statements
from django_sqlsem.backends.rows.beacons import is_dead
from django_sqlsem.backends.rows.handoff import HERE, LEFT, Served, notify, waiters, woken
from django_sqlsem.backends.rows.queue import AHEAD, STAYING
from django_sqlsem.backends.rows.statements import (
    NEW_SEMAPHORE,
    WAITER,
    Statements,
    request_parameters,
    row_of,
    standing,
)
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.exceptions import BackendError, wrong_kind

if TYPE_CHECKING:
    from django_sqlsem.backends.base import Request
    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session


T = TypeVar("T")

_TOUCH: Final = "UPDATE sqlsem_semaphore SET units = units WHERE name_key = %(key)s"
_LOCK: Final = (
    "SELECT kind, units, CASE WHEN {unpaused} THEN 0 ELSE 1 END FROM sqlsem_semaphore{lock_hint}"
    " WHERE name_key = %(key)s{lock}"
)
_SAVE: Final = "UPDATE sqlsem_semaphore SET units = %(units)s, declared_us = {now} WHERE name_key = %(key)s"
#: Rows of those that have not come for their units, or were waiting and are dead since long; or whose time lies where
#: none can, since the clock was set back.
_OVERDUE: Final = (
    "SELECT id, take, away FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND (NOT ({live})"
    " AND (away = %(yes)s OR expires_us < {now} - %(patience_us)s * 4{rebooted})"
    " OR expires_us > {now} + %(patience_us)s * 2)"
)
_STANDING: Final = standing(expires_us="{now} + %(lasts_us)s", slots="NULL", away="%(away)s", lock_mode="''")
_STAND: Final = f"{WAITER} VALUES ({_STANDING})"
_HAND: Final = (
    "UPDATE sqlsem_waiter SET away = %(yes)s, expires_us = {now} + %(lasts_us)s"
    " WHERE semaphore_key = %(key)s AND id = %(waiter)s AND away = %(no)s"
)
_OWN: Final = "WHERE semaphore_key = %(key)s AND ticket = %(permit_id)s"
_FIND: Final = f"SELECT id, take, away, expires_us - {{now}} FROM sqlsem_waiter {_OWN}"
_LEAVE: Final = f"DELETE FROM sqlsem_waiter {_OWN} AND away = %(no)s"
_TAKE: Final = f"DELETE FROM sqlsem_waiter {_OWN} AND away = %(yes)s"
#: What a waiter looks at: how many are ahead, the count, and when units that were handed out come back.
_SEEN: Final = (
    f"{AHEAD}, (SELECT CASE WHEN {{m.unpaused}} THEN m.units ELSE 0 END FROM sqlsem_semaphore m"
    " WHERE m.name_key = %(key)s), (SELECT MIN(CASE WHEN {g.live} THEN g.expires_us - {now} ELSE 0 END)"
    " FROM sqlsem_waiter g WHERE g.semaphore_key = %(key)s AND g.away = %(yes)s)"
)
_MINE: Final = f"{_OWN} AND away = %(no)s"
_STAY: Final = f"{STAYING} {_MINE}"
_LOOK_AROUND: Final = f"SELECT {_SEEN} FROM sqlsem_waiter {_MINE}"
_STAY_AND_LOOK: Final = f"{STAYING} {_MINE} RETURNING {_SEEN}{{unflushed}}"


def granted_as(ticket: str, row_id: int, take: int, left_us: int) -> Granted:
    """Return units in a waiter's row as a grant: their number stands for the slot, and there is no fencing token."""
    return Granted(ticket, Grant((take,), (0,), (row_id,)), left_us / 1e6)


class Ledger:
    """The count of one name inside a transaction that has its row locked."""

    def __init__(self, cursor: AnyCursor, parameters: dict[str, Any], here: str) -> None:
        usual = {"patience_us": statements.PATIENCE_US, "lasts_us": LAPSE_US, "yes": True}
        self.on = Statements(cursor, usual | parameters)
        #: The process whose waiters are not told by the database.
        self.here = here
        self.units = 0
        self.paused = False
        self.changed = False
        #: Those that got units.
        self.served: list[Served] = []

    def lock(self) -> str | None:
        """Lock the name's row, and put back what is overdue. Return the name's kind, if there is such a name."""
        if self.on.dialect.locks_by_writing and self.on.change(_TOUCH) == 0:
            return None  # not even if it is there a moment later: then its row would not be locked
        found = self.on.row(_LOCK)
        if found is None:
            return None
        kind, units, paused = found
        if kind == COUNTER:
            self.units, self.paused = int(units), bool(paused)
            for waiter, take, away in self.on.rows(_OVERDUE):
                # It may be taken at this very moment, without this lock: who deletes the row has the units.
                if self.on.change(LEFT, waiter=waiter) > 0 and away:
                    self.add(int(take))
        return str(kind)

    def add(self, count: int) -> None:
        """Change the count."""
        self.units += count
        self.changed = True

    def save(self) -> None:
        """Write the count, if it has changed."""
        if self.changed:
            self.on.change(_SAVE, units=self.units)

    def serve(self) -> list[str]:
        """Hand units to the oldest waiters, as far as they go: none is passed over. Return who waits on, in order."""
        left = waiters(self.on)
        while left and not self.paused:
            head = left[0]
            if head["beacon"] and is_dead(self.on.cursor, head["process_id"]):
                self.on.change(LEFT, waiter=head["id"])
            elif head["take"] > self.units:
                break
            elif self.on.change(_HAND, waiter=head["id"]) > 0:  # else it has given up at this very moment
                self.add(-head["take"])
                channel = HERE if head["process_id"] == self.here else head["channel"]
                granted = granted_as(head["ticket"], head["id"], head["take"], LAPSE_US)
                notify(self.on, channel, granted)
                self.served.append((channel, granted))
            left.pop(0)
        return [head["ticket"] for head in left]

    def stand(self, *, stay: bool) -> tuple[Granted | None, int]:
        """Take what is wanted if nobody comes first; else take a place, and ``stay`` there.

        Return the grant, or how many are ahead.
        """
        ticket, take = self.on.parameters["permit_id"], self.on.parameters["take"]
        if not self.paused and take <= self.units and not waiters(self.on):
            self.on.change(_STAND, away=True)
            self.add(-take)
            return granted_as(ticket, 0, take, LAPSE_US), 0
        self.on.change(_STAND, away=False, lasts_us=self.on.parameters["patience_us"])
        ahead = self.serve()
        mine = next((each for each in self.served if each[1].permit_id == ticket), None)
        if mine is not None:
            self.served.remove(mine)
            return mine[1], 0
        if not stay:
            self.on.change(_LEAVE)
        # It is not in line while its own process seems to be dead: the beacon is about to be lit again.
        return None, ahead.index(ticket) if ticket in ahead else len(ahead)

    def put_back(self) -> bool:
        """Give up a place, or what was handed there. Return whether anything was."""
        found = self.on.row(_FIND)
        if found is None or self.on.change(LEFT, waiter=found[0]) <= 0:
            return False
        if found[2]:
            self.add(int(found[1]))
        self.serve()  # those behind may be content with less
        return bool(found[2])


def transact(
    session: Session,
    resource: Resource,
    parameters: dict[str, Any],
    work: Callable[[Ledger], T],
    *,
    initial: int | None = None,
    here: str = "",
) -> tuple[T | None, tuple[Granted, ...]]:
    """Run ``work`` with the name's row locked, and wake who was served.

    ``initial``: create a new name with this many units; ``None``: then there is nothing to do. ``here``: the process
    whose waiters are not woken but returned. Raises ``BackendError``, and ``ImproperlyConfigured`` for another kind.
    """
    named = {"key": resource.key} | parameters
    kind: str | None = None
    result: T | None = None
    served: list[Served] = []
    complete = False

    def attempt(cursor: AnyCursor) -> bool | None:
        nonlocal kind, result, served, complete
        complete = False
        ledger = Ledger(cursor, named, here)
        kind = ledger.lock()
        if kind != COUNTER:
            return None
        result = work(ledger)
        ledger.save()
        served, complete = ledger.served, True
        return True

    def create(cursor: AnyCursor) -> bool:
        more = {"name": resource.name, "kind": COUNTER, "template": "", "declared": initial, "units": initial}
        Statements(cursor, named).insert(NEW_SEMAPHORE, **more)
        return True

    while kind is None:
        try:
            session.transaction(attempt, again=False)
        except BackendError as error:
            if error.stale_connection and not complete:  # it had died before: nothing was committed
                kind = None
                continue
            raise
        if kind is None:
            if initial is None:
                return None, ()
            session.transaction(create)
    if kind != COUNTER:
        known = reading.read_snapshot(session, resource)
        raise wrong_kind(resource.name, kind, COUNTER, session.connection.alias, known)
    return result, woken(served)


def claim(session: Session, request: Request) -> Grant | None:
    """Have units handed out if they are there and nobody comes first."""
    mine, _, _ = _stand(session, request, request_parameters(request, Place(boot_now(), 1)), stay=False)
    return mine.grant if mine else None


def enrol(session: Session, request: Request, place: Place) -> Waited:
    """The same, or else take a place in the queue."""
    mine, others, ahead = _stand(session, request, request_parameters(request, place), stay=True)
    return Waited((mine, *others)) if mine else Waited(others, Queue(ahead=ahead))


def _stand(
    session: Session, request: Request, parameters: dict[str, Any], *, stay: bool
) -> tuple[Granted | None, tuple[Granted, ...], int]:
    # A claim that does not stay can tell nobody else in its process.
    here = request.holder.process if stay else ""
    work = functools.partial(Ledger.stand, stay=stay)
    result, others = transact(session, request.resource, parameters, work, initial=request.slots or 0, here=here)
    mine, ahead = result or (None, 0)
    return mine, others, ahead


def wait(session: Session, request: Request, place: Place) -> Waited:
    """Keep the place; the first in line sees that what is there, or comes back, is handed out."""
    parameters = request_parameters(request, place) | {"yes": True, "patience_us": statements.PATIENCE_US}

    def look(cursor: AnyCursor) -> Any:
        here = Statements(cursor, parameters)
        if here.dialect.writing_ctes:
            return here.row(_STAY_AND_LOOK)
        here.change(_STAY)
        return here.row(_LOOK_AROUND)

    row = session.run(look)
    if row is None:
        mine = granted(session, request)
        return Waited((mine,) if mine else ())
    ahead, free, lapse_us = row[:3]
    expiry_in = None if lapse_us is None else max(0.0, int(lapse_us) / 1e6)
    queue = Queue(ahead=int(ahead), free=int(free or 0), expiry_in=expiry_in)
    if queue.ahead == 0 and (queue.free >= request.take or queue.expiry_in == 0):
        return Waited(hand_out(session, request.resource, here=request.holder.process), queue)
    return Waited((), queue)


def granted(session: Session, request: Request) -> Granted | None:
    """Return what was handed to a waiter."""
    row = row_of(session, _FIND, {"key": request.resource.key, "permit_id": request.permit_id})
    return granted_as(request.permit_id, row[0], row[1], row[3]) if row and row[2] else None


def take(session: Session, resource: Resource, permit_id: str) -> bool:
    """Take for good what was handed to a claim. Return whether it was still there."""
    parameters = {"key": resource.key, "permit_id": permit_id, "yes": True}
    try:
        return statements.change(session, _TAKE, parameters, again=False) > 0
    except BackendError as error:
        # Most likely it never arrived; if the row is gone, nobody can say whether that was it.
        if error.stale_connection and statements.change(session, _TAKE, parameters, again=False) > 0:
            return True
        raise


def discard(session: Session, resource: Resource, permit_id: str) -> bool:
    """Give up a claim: its place in the queue, or the units that it was handed. Return whether it had any."""
    if row_of(session, _FIND, {"key": resource.key, "permit_id": permit_id}) is None:
        return False
    return bool(transact(session, resource, {"permit_id": permit_id}, Ledger.put_back)[0])


def hand_out(session: Session, resource: Resource, *, here: str = "") -> tuple[Granted, ...]:
    """Hand what is there to the oldest waiters. Return who in the process ``here`` got some."""
    return transact(session, resource, {}, Ledger.serve, here=here)[1]


def add(
    session: Session, resource: Resource, count: int, *, initial: int, witness: bool, here: str, hand_on: bool
) -> tuple[Granted, ...]:
    """Add units, and hand them on. Returns who in the process ``here`` got some."""

    def work(ledger: Ledger) -> None:
        ledger.add(count)
        if hand_on:
            ledger.serve()

    return transact(session, resource, {"witness": witness}, work, initial=initial, here=here)[1]
