"""Giving slots back, and handing them to those that have waited longest.

A release first frees its slot in one statement, on condition that nobody waits. If somebody does, the slot is passed to
the oldest waiter without a lock of the semaphore's row: the waiter's row is deleted on condition that it is there, and
the slot changed on condition that it is still the holder's, both or neither. PostgreSQL does that in one statement.

Everything else is served under the lock of the semaphore's row: several slots, modes, a semaphore that shrinks or is
paused, waiters that are dead; and what an operator's act, the end of a lease or a waiter that leaves makes free. That
is idempotent, and safe to do at any time.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from django_sqlsem.backends.base import LAPSE_US, Acquired, Grant, Granted, Released
from django_sqlsem.backends.rows import exclusive
from django_sqlsem.backends.rows.beacons import is_dead
from django_sqlsem.backends.rows.statements import (
    COUNT_LIVE,
    DISCARD,
    FREED,
    HELD,
    LOCK,
    NEXT_TOKEN,
    Statements,
    bound,
    change,
    granting,
    row_of,
)
from django_sqlsem.core.identity import process_id
from django_sqlsem.core.modes import RWLOCK, UPDATE
from django_sqlsem.database import bells
from django_sqlsem.database.dialects import Dialect, dialect_for
from django_sqlsem.models import HOLDER_COLUMNS

if TYPE_CHECKING:
    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session


class Passing(enum.Enum):
    """What came of passing a slot on."""

    #: The waiters in ``HandOff.served`` got what they wait for; if there are none, it is free.
    DONE = "done"
    #: Another one is at the oldest waiter's row: look again.
    RACED = "raced"
    #: The slot was no longer the permit's.
    GONE = "gone"
    #: To be decided under the lock of the semaphore's row.
    OPEN = "open"


#: A waiter that was served: the channel of its process, and what it got.
Served: TypeAlias = tuple[str, Granted]
#: Stands for the channel of the very process that gives.
HERE: Final = "here"


@dataclass(frozen=True, slots=True)
class HandOff:
    """One attempt to hand on what a permit had."""

    passing: Passing
    served: Sequence[Served] = ()


#: What is read of a waiter.
_HEAD: Final = ("id", "ticket", "take", "slots", "lease_us", "lock_mode", *HOLDER_COLUMNS)
_OF_HEAD: Final = ", ".join(f"w.{column}" for column in _HEAD)
#: Those who may be served, in order.
_HEADS: Final = (
    f"SELECT {_OF_HEAD} FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {{w.waits}}{{w.alive}}"
    " ORDER BY CASE WHEN w.lock_mode = 'upgrade' THEN 0 ELSE 1 END, w.queued_us, w.id"
)
LEFT: Final = "DELETE FROM sqlsem_waiter WHERE id = %(waiter)s"
NOTIFY: Final = "SELECT pg_notify(%(channel)s, %(note)s)"

#: How often a waiter is looked for that another releaser has not taken meanwhile.
_TRIES: Final = 8


@functools.cache
def free_sql(dialect: Dialect, rows: int, unwanted: bool) -> str:
    """Free some rows of one permit; ``unwanted``: only if nobody waits."""
    text = f"{FREED} WHERE id IN ({', '.join(f'%(row{each})s' for each in range(rows))}) AND permit_id = %(permit_id)s"
    if not unwanted:
        return text
    # Who waits for the writer's place beside readers is in nobody's way.
    text += (
        " AND NOT EXISTS (SELECT 1 FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {w.waits}"
        " AND w.lock_mode <> 'update')"
    )
    # A release that a crash undoes is only an expiry that comes later.
    return f"{text} RETURNING id{{unflushed}}" if dialect.unflushed else text


def release(session: Session, held: Acquired, *, wanted: bool, hand_on: bool) -> Released:
    """Free the rows of a permit, and hand them on; ``wanted``: it is likely that somebody waits."""
    dialect, parameters = dialect_for(session.connection), _parameters(held)
    mode, rows = held.request.mode, len(held.grant.row_ids)
    # With a mode they may be thousands, and are known by the permit's id.
    free = DISCARD if mode else free_sql(dialect, rows, False)
    if not hand_on:
        return Released(change(session, free, parameters) > 0)
    if not mode and not (wanted and rows == 1) and change(session, free_sql(dialect, rows, True), parameters) > 0:
        return Released(True)
    if rows == 1 and not mode and held.resource.kind != RWLOCK:
        handed = _pass_on(session, dialect, parameters, durable=held.request.durable)
        if handed.passing in (Passing.DONE, Passing.GONE):
            served = handed.served
            if not served and _was_missed(session, dialect, parameters):
                served = _serve(session, parameters).served
            return Released(handed.passing is Passing.DONE, woken(served))
    handed = _serve(session, parameters, free)
    return Released(handed.passing is Passing.DONE, woken(handed.served))


def _parameters(held: Acquired) -> dict[str, Any]:
    grant, presence = held.grant, held.request.presence
    parameters = {
        "key": held.resource.key,
        "permit_id": held.permit_id,
        "process_id": process_id(),
        "witness": presence.beacon,
        "bells": presence.bells,
        "slot0": grant.slots[0],
        "token0": grant.tokens[0],
    }
    if not held.request.mode:
        parameters |= {f"row{number}": row_id for number, row_id in enumerate(grant.row_ids)}
    return parameters


def discard(session: Session, resource: Resource, permit_id: str) -> bool:
    """Free whatever rows carry the permit's id, and hand them on. Return whether there were any."""
    freed = change(session, DISCARD, {"key": resource.key, "permit_id": permit_id}) > 0
    if freed:
        hand_out(session, resource.key)
    return freed


def hand_out(session: Session, key: str, **more: Any) -> None:
    """Hand out what is free as if from elsewhere: this process's own waiters are woken like any others."""
    grant(session, {"key": key, "process_id": ""} | more)


def grant(session: Session, parameters: dict[str, Any]) -> tuple[Granted, ...]:
    """Hand free slots to the oldest waiters until there are none of either. Return who in this process got one."""
    return woken(_serve(session, parameters).served)


def woken(served: Sequence[Served]) -> tuple[Granted, ...]:
    """Wake the processes that were served; what this process got is returned instead."""
    for channel, granted in served:
        bells.ring(channel, granted.note())
    return tuple(granted for channel, granted in served if channel == HERE)


# Passing one slot to the oldest waiter, without the lock of the semaphore's row.


def _pass_on(session: Session, dialect: Dialect, parameters: dict[str, Any], *, durable: bool) -> HandOff:
    for tries in range(_TRIES):
        if dialect.writing_ctes:
            handed = _pass_in_one(session, parameters, durable=durable, patient=tries > 0)
        else:
            handed = _pass_by_steps(session, dialect, parameters)
        if handed.passing is not Passing.RACED:
            break
    return handed


_SOMEBODY: Final = "SELECT 1 FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {w.waits}{w.alive} LIMIT 1"


def _was_missed(session: Session, dialect: Dialect, parameters: dict[str, Any]) -> bool:
    """Whether somebody waits, though nobody was seen as the slot was freed, and may not have seen that either.

    If it was no longer the permit's, who freed it has passed over it while this statement had its row locked. Where a
    place is not taken in the statement of a claim, who has taken one looks around by itself.
    """
    return dialect.writing_ctes and row_of(session, _SOMEBODY, parameters) is not None


#: One statement, on PostgreSQL: the semaphore (``m``); the oldest waiter (``o``); the slot (``s``), which is locked first
#: as everywhere, or two would wait for each other; the lock of the waiter's row (``h``), which is not waited for at
#: first: a heartbeat has it, or another hand-off, and nobody is served in its place. The slot goes to that waiter
#: (``w``, ``u``), or is freed if nobody waits (``f``). It tells which bell to ring, as that is cheaper than NOTIFY, in
#: which commits wait for one another.
_PASS_IN_ONE: Final = f"""
WITH m AS (
  SELECT operator_slots, declared_slots, {{unpaused}} AS unpaused, shrinking FROM sqlsem_semaphore
  WHERE name_key = %(key)s
), o AS MATERIALIZED (
  SELECT w.id FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {{w.waits}}{{w.alive}}
  ORDER BY w.queued_us, w.id LIMIT 1
), s AS MATERIALIZED (
  SELECT id, slot, closed FROM sqlsem_slot WHERE id = %(row0)s AND permit_id = %(permit_id)s FOR UPDATE
), h AS MATERIALIZED (
  SELECT w.id, w.take, w.slots FROM sqlsem_waiter w WHERE EXISTS (SELECT 1 FROM s) AND w.id = (SELECT id FROM o)
  FOR UPDATE SKIP LOCKED
), w AS (
  DELETE FROM sqlsem_waiter w USING h, m, s WHERE w.id = h.id AND h.take = 1 AND m.unpaused
  AND m.shrinking = %(no)s AND s.closed = %(no)s AND s.slot <= COALESCE(m.operator_slots, h.slots, m.declared_slots)
  RETURNING w.*, w.ticket AS permit_id, w.process_id = %(process_id)s AS here,
  CASE WHEN w.process_id = %(process_id)s THEN w.lease_us ELSE LEAST(%(lapse_us)s, w.lease_us) END AS lasts_us
), u AS (
  UPDATE sqlsem_slot p SET {HELD}, {granting(NEXT_TOKEN, lasts="w.lasts_us", source="w.{}")}
  FROM s, w WHERE p.id = s.id
  RETURNING p.id, p.slot, p.token, w.ticket, w.channel, w.here, w.lasts_us
), f AS (
  {FREED.replace("sqlsem_slot", "sqlsem_slot p")} FROM s WHERE p.id = s.id AND NOT EXISTS (SELECT 1 FROM o)
  RETURNING p.id
)
SELECT CASE
  WHEN u.id IS NOT NULL OR f.id IS NOT NULL THEN 'done' WHEN s.id IS NULL THEN 'gone'
  WHEN o.id IS NOT NULL AND h.id IS NULL THEN 'raced' ELSE 'open' END,
  u.ticket, u.id, u.slot, u.token, u.lasts_us, u.here,
  CASE WHEN u.channel LIKE %(bells)s AND NOT u.here THEN u.channel END,
  CASE WHEN u.channel <> '' AND NOT u.channel LIKE %(bells)s AND NOT u.here THEN
  pg_notify(u.channel, concat_ws(' ', u.ticket, u.id, u.slot, u.token)) END{{unflushed}}
FROM m LEFT JOIN o ON TRUE LEFT JOIN h ON TRUE LEFT JOIN s ON TRUE LEFT JOIN u ON TRUE LEFT JOIN f ON TRUE
"""


def _pass_in_one(session: Session, parameters: dict[str, Any], *, durable: bool, patient: bool) -> HandOff:
    text = _PASS_IN_ONE.replace("{unflushed}", "") if durable else _PASS_IN_ONE
    if patient:  # who has the row is done at its commit, which may take longer than many tries
        text = text.replace(" SKIP LOCKED", "")
    row = row_of(session, text, parameters | {"lapse_us": LAPSE_US})
    if row is None:  # there is no such name any more
        return HandOff(Passing.GONE)
    passing, ticket, row_id, slot, token, lasts_us, here, bell = row[:8]
    if ticket is None:
        return HandOff(Passing(passing))
    granted = Granted(ticket, Grant((slot,), (token,), (row_id,)), lasts_us / 1e6)
    if bell and not bells.ring(bell, granted.note()):
        row_of(session, NOTIFY, {"channel": bell, "note": granted.note()})
    return HandOff(Passing.DONE, [(HERE if here else "", granted)])


#: The semaphore and its oldest waiter.
_LOOK: Final = (
    "SELECT m.operator_slots, m.declared_slots, CASE WHEN {m.unpaused} THEN 0 ELSE 1 END, m.shrinking, {now},"
    f" {_OF_HEAD} FROM sqlsem_semaphore m"
    " LEFT JOIN sqlsem_waiter w ON w.semaphore_key = m.name_key AND {w.waits}{w.alive}"
    " WHERE m.name_key = %(key)s ORDER BY w.queued_us, w.id"
)
_PASS: Final = (
    f"UPDATE sqlsem_slot SET {HELD}, {granting('%(token)s')}"
    " WHERE id = %(row0)s AND permit_id = %(released)s AND closed = %(no)s"
)


def _pass_by_steps(session: Session, dialect: Dialect, parameters: dict[str, Any]) -> HandOff:
    def look(cursor: AnyCursor) -> tuple[Any, Any]:
        row = Statements(cursor, parameters).row(_LOOK)
        head = dict(zip(_HEAD, row[5:], strict=True)) if row is not None and row[5] is not None else None
        return row, head and head | {"dead": head["beacon"] and is_dead(cursor, head["process_id"])}

    row, head = session.run(look)
    if head is None:
        freed = change(session, free_sql(dialect, 1, False), parameters) > 0
        return HandOff(Passing.DONE if freed else Passing.GONE)
    operator_slots, declared_slots, paused, shrinking, now = row[:5]
    too_few = parameters["slot0"] > bound(operator_slots, head["slots"], declared_slots)
    if head["dead"] or paused or shrinking or too_few or head["take"] != 1:
        return HandOff(Passing.OPEN)
    slot = (parameters["row0"], parameters["slot0"], parameters["token0"])
    channel, granted, [written] = _granted_to(dialect, head, [slot], int(now), parameters["process_id"])
    outcome = Passing.DONE

    def pass_on(cursor: AnyCursor) -> bool | None:
        nonlocal outcome
        statements = Statements(cursor, parameters | written | {"released": parameters["permit_id"]})
        outcome = Passing.RACED if statements.change(LEFT) <= 0 else Passing.OPEN
        if outcome is Passing.OPEN and statements.change(_PASS) > 0:
            outcome = Passing.DONE
        return outcome is Passing.DONE or None  # else what was done is rolled back

    session.transaction(pass_on, again=False)
    return HandOff(outcome, [(channel, granted)] if outcome is Passing.DONE else ())


def _granted_to(
    dialect: Dialect, head: dict[str, Any], slots: Sequence[tuple[int, ...]], now: int, process: str
) -> tuple[str, Granted, list[dict[str, Any]]]:
    """Return a waiter's channel, what it gets with these slots (id, number, last token), and what to write."""
    channel, lasts_us = _told(head, process)
    tokens = tuple(max(token + 1, dialect.token_clock(now)) for _, _, token in slots)
    written = head | {"permit_id": head["ticket"], "waiter": head["id"], "lasts_us": lasts_us}
    granted = Granted(
        head["ticket"],
        Grant(tuple(each[1] for each in slots), tokens, tuple(each[0] for each in slots)),
        lasts_us / 1e6,
    )
    return (
        channel,
        granted,
        [written | {"id": each[0], "token": token} for each, token in zip(slots, tokens, strict=True)],
    )


def _told(head: dict[str, Any], process: str) -> tuple[str, int]:
    """Return where a waiter is told of its grant, and how long that lasts: here it needs no confirmation."""
    if head["process_id"] == process:
        return HERE, head["lease_us"]
    return head["channel"], min(LAPSE_US, head["lease_us"])


# Serving all waiters, under the lock of the semaphore's row.

#: Slots that are free; what locks them follows.
_FREE: Final = (
    "SELECT s.id, s.slot, s.token FROM sqlsem_slot s{lock_hint} WHERE s.semaphore_key = %(key)s"
    " AND s.closed = %(no)s AND s.slot <= %(bound)s AND {s.free} ORDER BY s.slot"
)
_TAKE: Final = f"UPDATE sqlsem_slot SET {granting('%(token)s')} WHERE id = %(id)s AND {{free}}"


def _serve(session: Session, parameters: dict[str, Any], free: str = "") -> HandOff:
    handed = session.transaction(lambda cursor: serve(Statements(cursor, parameters), free))
    return handed or HandOff(Passing.GONE)


def serve(statements: Statements, free: str = "") -> HandOff:
    """Free a permit's slots by the text ``free``, and hand free slots to the oldest waiters, in one transaction."""
    found = statements.row(LOCK)
    # After the lock, so that of two that free slots at once the later one sees the earlier one's.
    if free and statements.change(free) <= 0:
        return HandOff(Passing.GONE)
    if found is None:
        return HandOff(Passing.DONE)
    operator_slots, declared_slots, paused, shrinking, now = found
    if shrinking:
        shrinking, whole = exclusive.settle(statements, operator_slots)
        paused = paused or whole
    served: list[Served] = []
    for head in () if paused else _line(statements):
        limit = bound(operator_slots, head["slots"], declared_slots)
        if head["take"] > limit:
            # It wants more than there is since an operator's act, and does not keep those behind it from less.
            continue
        if head["beacon"] and is_dead(statements.cursor, head["process_id"]):
            statements.change(LEFT, waiter=head["id"])
        elif head["lock_mode"]:
            given = _give_mode(statements, head, int(now))
            served += given
            # Whoever waits for the writer's place keeps nobody out; whoever got or wants all slots does.
            if head["lock_mode"] != UPDATE:
                break
        else:
            rows = _free_rows(statements, head["take"], limit, shrinking=bool(shrinking))
            if not rows:
                break
            if statements.change(LEFT, waiter=head["id"]) > 0:  # else it has left at this moment
                served.append(_give(statements, head, rows, int(now)))
    return HandOff(Passing.DONE, served)


def waiters(statements: Statements) -> list[dict[str, Any]]:
    """Return those that may be served, in order, by their columns."""
    return [dict(zip(_HEAD, row, strict=True)) for row in statements.rows(_HEADS)]


def _line(statements: Statements) -> Iterator[dict[str, Any]]:
    """Yield those that may be served, in order, and those that come meanwhile."""
    seen: set[int] = set()
    while heads := [head for head in waiters(statements) if head["id"] not in seen]:
        seen.update(head["id"] for head in heads)
        yield from heads


def _free_rows(statements: Statements, take: int, limit: int, *, shrinking: bool) -> list[tuple[int, ...]]:
    """Lock so many free slots; none if there are fewer."""
    rows = statements.rows(f"{_FREE}{statements.skip_locked}", bound=limit)[:take]
    if len(rows) < take or (shrinking and statements.row(COUNT_LIVE, bound=limit)[0] + take > limit):
        return []
    return rows


def _give(statements: Statements, head: dict[str, Any], rows: list[tuple[int, ...]], now: int) -> Served:
    process = statements.parameters["process_id"]
    channel, granted, written = _granted_to(statements.dialect, head, rows, now, process)
    for values in written:
        statements.change(_TAKE, **values)
    notify(statements, channel, granted)
    return channel, granted


def _give_mode(statements: Statements, head: dict[str, Any], now: int) -> list[Served]:
    """Give all slots, or the writer's place, to a waiter; nothing if somebody is in the way."""
    channel, lasts_us = _told(head, statements.parameters["process_id"])
    written = {column: head[column] for column in ("lease_us", *HOLDER_COLUMNS)} | {"permit_id": head["ticket"]}
    grant = exclusive.take(statements, head["lock_mode"], written, now, lasts_us)
    if grant is None:
        return []
    if statements.change(LEFT, waiter=head["id"]) <= 0:  # it has given up meanwhile
        statements.change(DISCARD, permit_id=head["ticket"])
        return []
    granted = Granted(head["ticket"], grant, lasts_us / 1e6)
    notify(statements, channel, granted)
    return [(channel, granted)]


def notify(statements: Statements, channel: str, granted: Granted) -> None:
    """Have the server tell a waiter's process of its grant when the transaction commits, where it can."""
    if statements.dialect.notifies and channel not in ("", HERE):
        statements.row(NOTIFY, channel=channel, note=granted.note())
