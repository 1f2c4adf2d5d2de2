"""The granter's side of the rows backend: whoever makes a slot free hands it to whoever has waited longest.

A release first frees its slot in one statement, on condition that nobody waits. If somebody does, it hands the slot
over in a second one: it takes the oldest live waiter's row away and writes that waiter into the slot. Whatever else
may make slots free (an operator's act, a lease that ran out, a waiter that leaves) calls ``grant``, which does the
same with all free slots until there are no more slots or waiters. Both are idempotent, and safe to call at any time.

Handing slots to waiters step by step, under the lock of the semaphore's row: for any database, and any number.

Passing one slot from its holder to the oldest waiter in few steps, where one statement cannot do it all.

Without the lock of the semaphore's row: the waiter's row is deleted on condition that it is there, and the slot
changed on condition that it is still the holder's, in one transaction. Who loses a race for a waiter tries the next.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends.base import LAPSE_US, Grant, Granted
from django_sqlsem.backends.rows import exclusive, statements
from django_sqlsem.backends.rows.beacons import is_dead
from django_sqlsem.core.modes import UPDATE
from django_sqlsem.database import bells
from django_sqlsem.database.dialects import Dialect
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session


#: Stands for the channel of the very process that gives.
HERE: Final = "here"

WHO: Final = ("host", "pid", "thread", "label", "user_name", "process_id", "boot_id", "channel", "beacon")
HEAD: Final = ("id", "ticket", "take", "slots", "lease_us", "lock_mode", *WHO)
#: What is written into a slot that a waiter gets.
GIVEN: Final = (
    "token = %(token)s, permit_id = %(ticket)s, acquired_us = {now}, expires_us = {now} + %(lasts_us)s,"
    " lease_us = %(lease_us)s, suspect_us = NULL, lock_mode = '', "
    + ", ".join(f"{column} = %({column})s" for column in WHO)
)
LEFT: Final = "DELETE FROM sqlsem_waiter WHERE id = %(waiter)s"


@functools.cache
def heads(dialect: Dialect) -> str:
    return (
        f"SELECT {', '.join(f'w.{column}' for column in HEAD)} FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s"
        f" AND {dialect.waits_sql('w.')}{dialect.alive('w.')}"
        " ORDER BY CASE WHEN w.lock_mode = 'upgrade' THEN 0 ELSE 1 END, w.queued_us, w.id"
    )


@functools.cache
def _free(dialect: Dialect, skipping: bool) -> str:
    return (
        f"SELECT s.id, s.slot, s.token FROM sqlsem_slot s{dialect.lock_hint} WHERE s.semaphore_key = %(key)s"
        f" AND s.closed = %(no)s AND s.slot <= %(bound)s AND {dialect.free_sql('s.')} ORDER BY s.slot"
        f"{dialect.lock_skipping if skipping else dialect.for_update}"
    )


@functools.cache
def _take(dialect: Dialect) -> str:
    return f"UPDATE sqlsem_slot SET {GIVEN} WHERE id = %(id)s AND {dialect.free_sql()}"


def serve(
    dialect: Dialect, cursor: AnyCursor, parameters: dict[str, Any], *, own: bool
) -> list[tuple[str, Granted]] | None:
    """Free a permit's slot (``own``), and hand free slots to the oldest waiters, in one transaction.

    Returns the waiters' channels and grants; ``None`` if the slot was no longer the permit's.
    """
    dialect.execute(cursor, statements.lock(dialect), parameters)
    found = cursor.fetchone()
    if own:
        # After the lock, so that of two who free slots at once the later one sees the earlier one's.
        text = statements.release(dialect, 1, False) if "row0" in parameters else statements.DISCARD
        dialect.execute(cursor, text, parameters)
        if cursor.rowcount <= 0:
            return None
    served: list[tuple[str, Granted]] = []
    if found is None:
        return served
    operator_slots, declared_slots, paused, shrinking, now = found
    if shrinking:
        shrinking, whole = exclusive.settle(dialect, cursor, parameters, operator_slots)
        paused = paused or whole
    passed: set[int] = set()
    while not paused:
        dialect.execute(cursor, heads(dialect), parameters)
        waiting = [dict(zip(HEAD, row, strict=True)) for row in cursor.fetchall()]
        # Who wants more than there is since an operator's act must not keep those behind it from what they can have.
        possible = (
            each
            for each in waiting
            if each["id"] not in passed
            and each["take"] <= statements.bound(operator_slots, each["slots"], declared_slots)
        )
        head = next(possible, None)
        if head is None:
            break
        if head["beacon"] and is_dead(cursor, head["process_id"]):
            dialect.execute(cursor, LEFT, {"waiter": head["id"]})
            continue
        if head["lock_mode"]:
            granted = _give_mode(dialect, cursor, parameters, head, int(now))
            if granted is not None:
                served.append(granted)
                if head["lock_mode"] != UPDATE:
                    break  # it is alone now
            elif head["lock_mode"] != UPDATE:
                break
            # Who waits for the writer's place keeps nobody out.
            passed.add(head["id"])
            continue
        bound = statements.bound(operator_slots, head["slots"], declared_slots)
        free = _free_rows(dialect, cursor, parameters | {"bound": bound}, head["take"])
        if len(free) < head["take"] or (shrinking and not _fits(dialect, cursor, parameters, bound, head["take"])):
            break
        dialect.execute(cursor, LEFT, {"waiter": head["id"]})
        if cursor.rowcount:
            served.append((channel_of(head, parameters), _give(dialect, cursor, parameters, head, free, int(now))))
    return served


def _free_rows(dialect: Dialect, cursor: AnyCursor, parameters: dict[str, Any], take: int) -> list[tuple[int, ...]]:
    # MariaDB before 10.6 waits for what is locked.
    skipping = bool(dialect.lock_skipping) and cursor.db.features.has_select_for_update_skip_locked
    dialect.execute(cursor, _free(dialect, skipping), parameters)
    rows: list[tuple[int, ...]] = []
    while len(rows) < take and (row := cursor.fetchone()) is not None:
        rows.append(row)
    return rows


def channel_of(head: dict[str, Any], parameters: dict[str, Any]) -> str:
    """Return where to tell a waiter of its grant."""
    return HERE if head["process_id"] == parameters["process_id"] else head["channel"]


def granted_to(
    dialect: Dialect, head: dict[str, Any], slots: Sequence[tuple[int, ...]], now: int, *, here: bool
) -> tuple[Granted, list[dict[str, Any]]]:
    """Return what a waiter gets with these slots (row's id, number, last token), and what to write into each row.

    ``here``: the waiter is of the process that gives. What that gives to itself needs no confirmation.
    """
    lasts_us = head["lease_us"] if here else min(LAPSE_US, head["lease_us"])
    clock = dialect.token_clock(now)
    tokens = tuple(max(token + 1, clock) for _, _, token in slots)
    grant = Grant(tuple(number for _, number, _ in slots), tokens, tuple(row_id for row_id, _, _ in slots))
    values = [
        head | {"waiter": head["id"], "id": row_id, "token": token, "lasts_us": lasts_us}
        for (row_id, _, _), token in zip(slots, tokens, strict=True)
    ]
    return Granted(head["ticket"], grant, lasts_us / 1e6), values


def _give(
    dialect: Dialect,
    cursor: AnyCursor,
    parameters: dict[str, Any],
    head: dict[str, Any],
    free: list[tuple[int, ...]],
    now: int,
) -> Granted:
    here = channel_of(head, parameters) == HERE
    granted, rows = granted_to(dialect, head, free, now, here=here)
    for values in rows:
        dialect.execute(cursor, _take(dialect), values)
    _notify(dialect, cursor, HERE if here else head["channel"], granted)
    return granted


def _give_mode(
    dialect: Dialect, cursor: AnyCursor, parameters: dict[str, Any], head: dict[str, Any], now: int
) -> tuple[str, Granted] | None:
    """Give all slots, or the writer's place, to a waiter; ``None`` if somebody is in the way."""
    channel = channel_of(head, parameters)
    lasts_us = head["lease_us"] if channel == HERE else min(LAPSE_US, head["lease_us"])
    grant = exclusive.take(dialect, cursor, parameters["key"], head["lock_mode"], head, now, lasts_us)
    if grant is None:
        return None
    dialect.execute(cursor, LEFT, {"waiter": head["id"]})
    if cursor.rowcount <= 0:  # it has given up meanwhile
        dialect.execute(cursor, statements.DISCARD, parameters | {"permit_id": head["ticket"]})
        return None
    granted = Granted(head["ticket"], grant, lasts_us / 1e6)
    _notify(dialect, cursor, channel, granted)
    return channel, granted


def _notify(dialect: Dialect, cursor: AnyCursor, channel: str, granted: Granted) -> None:
    if dialect.notifies and channel and channel != HERE:
        cursor.execute("SELECT pg_notify(%s, %s)", (channel, granted.note()))


def _fits(dialect: Dialect, cursor: AnyCursor, parameters: dict[str, Any], bound: int, take: int) -> bool:
    dialect.execute(cursor, statements.count(dialect), parameters | {"bound": bound})
    return bool(cursor.fetchone()[0] + take <= bound)


#: How often a waiter is looked for that another releaser has not taken meanwhile.
TRIES: Final = 8


@functools.cache
def _look(dialect: Dialect) -> str:
    """The semaphore and its oldest waiter, without a lock."""
    waiter = ", ".join(f"w.{column}" for column in HEAD)
    return (
        f"SELECT m.operator_slots, m.declared_slots, m.paused, m.shrinking, {{now}}, {waiter}"
        " FROM sqlsem_semaphore m LEFT JOIN sqlsem_waiter w ON w.semaphore_key = m.name_key"
        f" AND {dialect.waits_sql('w.')}{dialect.alive('w.')} WHERE m.name_key = %(key)s ORDER BY w.queued_us, w.id"
    )


#: First how long it was held: MySQL would reckon with the values that come after it.
_PASS: Final = (
    f"UPDATE sqlsem_slot SET {statements.HELD}, {GIVEN} "
    "WHERE id = %(row0)s AND permit_id = %(permit_id)s AND closed = %(no)s"
)


def free(session: Session, dialect: Dialect, parameters: dict[str, Any], rows: int, *, unwanted: bool = False) -> bool:
    """Free the rows of a permit; ``unwanted``: only if nobody waits. Return whether any was still the permit's."""

    def run(cursor: AnyCursor) -> bool:
        dialect.execute(cursor, statements.release(dialect, rows, unwanted), parameters)
        return cursor.rowcount > 0

    return session.run(run)


def pass_on(session: Session, dialect: Dialect, parameters: dict[str, Any]) -> tuple[str, Granted] | bool | None:
    """Pass the slot on, and return the waiter's channel and grant.

    ``True``: nobody waits, and it was freed; ``False``: it was no longer the permit's; ``None``: this is not for here.
    """

    def look(cursor: AnyCursor) -> tuple[Any, bool]:
        dialect.execute(cursor, _look(dialect), parameters)
        row = cursor.fetchone()
        head = dict(zip(HEAD, row[5:], strict=True)) if row is not None and row[5] is not None else {}
        return row, bool(head) and bool(head["beacon"]) and is_dead(cursor, head["process_id"])

    for _ in range(TRIES):
        row, dead = session.run(look)
        if row is None or row[5] is None:
            return free(session, dialect, parameters, 1)
        operator_slots, declared_slots, paused, shrinking, now, *columns = row
        head = dict(zip(HEAD, columns, strict=True))
        bound = statements.bound(operator_slots, head["slots"], declared_slots)
        if dead or paused or shrinking or head["take"] != 1 or parameters["slot0"] > bound:
            return None
        slot = (parameters["row0"], parameters["slot0"], parameters["token0"])
        channel = channel_of(head, parameters)
        granted, [values] = granted_to(dialect, head, [slot], int(now), here=channel == HERE)
        attempt = _Attempt(dialect, parameters | values)
        if session.transaction(attempt, again=False):
            return channel, granted
        if not attempt.raced:
            return None
    return None


class _Attempt:
    """Takes the waiter's row, then changes the slot: both, or neither."""

    def __init__(self, dialect: Dialect, values: dict[str, Any]) -> None:
        self.dialect = dialect
        self.values = values
        #: Whether the waiter was another's by then.
        self.raced = False

    def __call__(self, cursor: AnyCursor) -> bool | None:
        self.dialect.execute(cursor, LEFT, self.values)
        self.raced = cursor.rowcount <= 0
        if self.raced:
            return None
        self.dialect.execute(cursor, _PASS, self.values)
        return True if cursor.rowcount > 0 else None


logger = logging.getLogger("django_sqlsem")


@functools.cache
def hand_over(dialect: Dialect, own: bool, durable: bool, patient: bool = True) -> str:
    """Hand one slot to the oldest waiter: the one of a permit (``own``), which is freed if nobody may have it.

    Answers with one row: the slot's id, number and token, the waiter's ticket, whether it is of this process, how long
    the grant lasts, how many slots the oldest waiter wants, whether the semaphore shrinks, which bell to ring, as that
    is cheaper than ``NOTIFY``, with which commits stand in line, and whether nothing was done: unless it is
    ``patient``, it does nothing while the oldest waiter's row is locked, by its heartbeat or by another hand-over.
    """
    bound = "COALESCE(m.operator_slots, h.slots, m.declared_slots)"
    may = f"h.take = 1 AND m.paused = %(no)s AND m.shrinking = %(no)s AND s.closed = %(no)s AND s.slot <= {bound}"
    if own:
        slot = "SELECT id, slot, closed FROM sqlsem_slot WHERE id = %(row0)s AND permit_id = %(permit_id)s FOR UPDATE"
    else:
        slot = (
            f"SELECT s.id, s.slot, s.closed FROM sqlsem_slot s, h, m WHERE s.semaphore_key = %(key)s AND {may}"
            f" AND {dialect.free_sql('s.')} ORDER BY s.slot LIMIT 1 {dialect.skip_locked}"
        )
    taken = (
        "permit_id = w.ticket, acquired_us = {now}, expires_us = {now} + w.lasts_us, lease_us = w.lease_us,"
        f" token = CASE WHEN p.token + 1 > {dialect.token_now} THEN p.token + 1 ELSE {dialect.token_now} END,"
        " host = w.host, pid = w.pid, thread = w.thread, label = w.label, user_name = w.user_name,"
        " process_id = w.process_id, boot_id = w.boot_id, channel = w.channel, beacon = w.beacon, suspect_us = NULL,"
        " lock_mode = ''"
    )
    if own:
        taken += f", {statements.HELD}"
    # What a process gives to itself needs no confirmation.
    lasts = (
        "(w.process_id = %(process_id)s) AS here, CASE WHEN w.process_id = %(process_id)s THEN w.lease_us"
        " ELSE LEAST(%(lapse_us)s, w.lease_us) END AS lasts_us"
    )
    oldest = (
        f"FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {dialect.waits_sql('w.')}{dialect.alive('w.')}"
        " ORDER BY w.queued_us, w.id LIMIT 1"
    )
    if patient:
        heads = f" h AS MATERIALIZED (SELECT w.id, w.take, w.slots {oldest}{dialect.for_update}),"
        busy = "FALSE"
    else:
        # Locked alone: whoever comes next in the queue is not to be served in its place.
        heads = (
            f" o AS MATERIALIZED (SELECT w.id {oldest}), h AS MATERIALIZED (SELECT w.id, w.take, w.slots"
            f" FROM sqlsem_waiter w WHERE w.id = (SELECT id FROM o){dialect.lock_skipping}),"
        )
        busy = "EXISTS (SELECT 1 FROM o) AND NOT EXISTS (SELECT 1 FROM h)"
        slot = slot.replace(" FOR UPDATE", f" AND NOT ({busy}) FOR UPDATE")
    freed = (
        ", f AS (UPDATE sqlsem_slot p SET expires_us = NULL, permit_id = NULL, suspect_us = NULL,"
        f" {statements.HELD} FROM s WHERE p.id = s.id AND NOT EXISTS (SELECT 1 FROM w) RETURNING p.id, p.slot, p.token)"
        if own
        else ""
    )
    result = (
        "SELECT COALESCE(u.id, f.id), COALESCE(u.slot, f.slot), COALESCE(u.token, f.token), u.ticket"
        if own
        else "SELECT u.id, u.slot, u.token, u.ticket"
    )
    joined = "m LEFT JOIN h ON TRUE LEFT JOIN u ON TRUE" + (" LEFT JOIN f ON TRUE" if own else "")
    return (
        "WITH m AS (SELECT operator_slots, declared_slots, paused, shrinking FROM sqlsem_semaphore"
        " WHERE name_key = %(key)s),"
        f"{heads} s AS MATERIALIZED ({slot}),"
        f" w AS (DELETE FROM sqlsem_waiter w USING h, m, s WHERE w.id = h.id AND {may} RETURNING w.*, {lasts}),"
        f" u AS (UPDATE sqlsem_slot p SET {taken} FROM s, w WHERE p.id = s.id"
        f" RETURNING p.id, p.slot, p.token, w.ticket, w.channel, w.here, w.lasts_us){freed}"
        f" {result}, u.here, u.lasts_us, h.take, m.shrinking,"
        " CASE WHEN u.channel LIKE %(bells)s AND NOT u.here THEN u.channel END,"
        " CASE WHEN u.channel <> '' AND NOT u.channel LIKE %(bells)s AND NOT u.here THEN"
        " pg_notify(u.channel, concat_ws(' ', u.ticket, u.id, u.slot, u.token)) END"
        f", {busy}{'' if durable else dialect.unflushed} FROM {joined}"
    )


def release(
    session: Session, dialect: Dialect, parameters: dict[str, Any], rows: int, *, wanted: bool
) -> tuple[bool, tuple[Granted, ...]]:
    """Free the rows of a permit, and hand them on; ``wanted``: it is likely that somebody waits.

    Returns whether any was still the permit's, and who in this process got one.
    """
    if not (wanted and rows == 1) and free(session, dialect, parameters, rows, unwanted=True):
        return True, ()
    if rows > 1:
        freed = free(session, dialect, parameters, rows)
        return freed, _grant_if_possible(session, dialect, parameters) if freed else ()
    if not dialect.writing_ctes:
        return _release_by_steps(session, dialect, parameters)
    row = _hand_over(session, dialect, parameters, own=True, patient=False)
    if row is not None and row[10]:  # its heartbeat ends at once; what another has handed over by then is in order
        row = _hand_over(session, dialect, parameters, own=True)
    if row is None or row[0] is None:
        return False, ()
    if row[3] is None:  # somebody waited a moment ago, and could not be had then, or wants several
        return True, _grant_if_possible(session, dialect, parameters)
    return True, _here(row)


def release_by_steps(
    session: Session, dialect: Dialect, parameters: dict[str, Any], *, alone: bool, wanted: bool
) -> tuple[bool, tuple[Granted, ...]]:
    """Free what a permit has of a name with modes, and hand on what it may make possible.

    ``alone``: it kept others out by its mode, whether they wait or not.
    """
    if not (alone or wanted) and free(session, dialect, parameters, 1, unwanted=True):
        return True, ()
    served = session.transaction(lambda cursor: serve(dialect, cursor, parameters, own=True))
    return (False, ()) if served is None else (True, _woken(served))


def _grant_if_possible(session: Session, dialect: Dialect, parameters: dict[str, Any]) -> tuple[Granted, ...]:
    """What is released is released, even if it cannot be handed on: then those who wait find it."""
    try:
        return grant(session, dialect, parameters)
    except BackendError as error:
        logger.debug("A slot was freed, and could not be handed on: %s", error)
        return ()


def _release_by_steps(
    session: Session, dialect: Dialect, parameters: dict[str, Any]
) -> tuple[bool, tuple[Granted, ...]]:
    passed = pass_on(session, dialect, parameters)
    if isinstance(passed, bool):
        return passed, ()
    if passed is not None:
        return True, _woken([passed])
    served = session.transaction(lambda cursor: serve(dialect, cursor, parameters, own=True))
    return (False, ()) if served is None else (True, _woken(served))


def grant(session: Session, dialect: Dialect, parameters: dict[str, Any]) -> tuple[Granted, ...]:
    """Hand free slots to the oldest waiters until there are none of either. Return who in this process got one."""
    granted: tuple[Granted, ...] = ()
    try:
        for each in _grants(session, dialect, parameters):
            granted += each
    except BackendError:
        if not granted:  # else whoever was served must hear of it: the rest is found by those who wait
            raise
    return granted


def _grants(session: Session, dialect: Dialect, parameters: dict[str, Any]) -> Iterator[tuple[Granted, ...]]:
    nobody = 0
    while dialect.writing_ctes and not parameters.get("by_steps"):
        row = _hand_over(session, dialect, parameters, own=False)
        if row is None:
            return
        if row[6] is None:
            # Nobody waits, or who did was served by another while this waited for its row: then the next one counts.
            nobody += 1
            if nobody > 1:
                return
            continue
        if row[0] is None:
            if row[6] == 1 and not row[7]:
                return
            break  # several slots, or a semaphore that shrinks: those are counted under its row's lock
        yield _here(row)
    served = session.transaction(lambda cursor: serve(dialect, cursor, parameters, own=False))
    yield _woken(served or [])


def _hand_over(
    session: Session, dialect: Dialect, parameters: dict[str, Any], *, own: bool, patient: bool = True
) -> Any:
    text = hand_over(dialect, own, parameters["durable"], patient)
    values = {"bells": ""} | parameters | {"lapse_us": LAPSE_US}

    def run(cursor: AnyCursor) -> Any:
        dialect.execute(cursor, text, values)
        return cursor.fetchone()

    row = session.run(run)
    if row is not None and row[8]:
        note = _granted(row).note()
        if not bells.ring(row[8], note):
            session.run(lambda cursor: cursor.execute("SELECT pg_notify(%s, %s)", (row[8], note)))
    return row


def _granted(row: Any) -> Granted:
    return Granted(row[3], Grant((row[1],), (row[2],), (row[0],)), row[5] / 1e6)


def _here(row: Any) -> tuple[Granted, ...]:
    return (_granted(row),) if row[4] else ()


def _woken(served: list[tuple[str, Granted]]) -> tuple[Granted, ...]:
    """Wake the processes that were served; what this process got (without a channel) is returned instead."""
    for channel, granted in served:
        bells.ring(channel, granted.note())
    return tuple(granted for channel, granted in served if channel == HERE)
