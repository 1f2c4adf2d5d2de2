"""The granter's side of the rows backend: whoever makes a slot free hands it to whoever has waited longest.

A release first frees its slot in one statement, on condition that nobody waits. If somebody does, it hands the slot
over in a second one: it takes the oldest live waiter's row away and writes that waiter into the slot. Whatever else
may make slots free (an operator's act, a lease that ran out, a waiter that leaves) calls ``grant``, which does the
same with all free slots until there are no more slots or waiters. Both are idempotent, and safe to call at any time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from django_sqlsem import bells
from django_sqlsem.backends import rows_sql as sql
from django_sqlsem.backends.base import Grant, Granted
from django_sqlsem.backends.dialects import Dialect
from django_sqlsem.backends.rows_pass import free, pass_on
from django_sqlsem.backends.rows_serve import HERE, LAPSE_US, serve
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from django_sqlsem.cursors import AnyCursor
    from django_sqlsem.sessions import Session

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
        taken += f", {sql.HELD}"
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
        f" {sql.HELD} FROM s WHERE p.id = s.id AND NOT EXISTS (SELECT 1 FROM w) RETURNING p.id, p.slot, p.token)"
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
