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
from collections.abc import Sequence
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
    HELD_FOR,
    LOCK,
    NEXT_TOKEN,
    ROWS_AT_ONCE,
    Statements,
    among,
    bound,
    change,
    granting,
    row_of,
    rows_named,
)
from django_sqlsem.core.modes import MUTEX, RWLOCK, SEMAPHORE, SHARED, UPDATE
from django_sqlsem.core.names import MAX_SLOTS
from django_sqlsem.database import bells
from django_sqlsem.database.dialects import Dialect
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
LEFT: Final = "DELETE FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND id = %(waiter)s"
NOTIFY: Final = "SELECT pg_notify(%(channel)s, %(note)s)"

#: How often a waiter is looked for that another releaser has not taken meanwhile.
_TRIES: Final = 8


@functools.cache
def free_sql(dialect: Dialect, rows: int, unwanted: bool) -> str:
    """Free some rows of one permit; ``unwanted``: only if nobody waits."""
    text = DISCARD if rows > ROWS_AT_ONCE else f"{FREED} WHERE {among(rows)} AND permit_id = %(permit_id)s"
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
    dialect, parameters = session.dialect, _parameters(held)
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
    grant, request = held.grant, held.request
    parameters = {
        "key": request.resource.key,
        "permit_id": request.permit_id,
        "process_id": request.holder.process,
        "witness": request.presence.beacon,
        "bells": request.presence.bells,
        "held_as": request.lock_mode,
        "slot0": grant.slots[0],
        "token0": grant.tokens[0],
    }
    if not request.mode:
        parameters |= rows_named(grant.row_ids)
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
    return dialect.inserting_ctes and row_of(session, _SOMEBODY, parameters) is not None


#: As what a waiter must wait whom a slot is passed to: as the name's kind, and as it was held.
_HELD_AS: Final = "CASE kind WHEN 'mutex' THEN 'mutex' ELSE '' END"
#: One statement, on PostgreSQL: the semaphore (``m``); the oldest waiter (``o``); the slot (``s``), which is locked
#: first as everywhere, or two would wait for each other; the lock of the waiter's row (``h``), which is not waited for
#: at first: a heartbeat has it, or another hand-off, and nobody is served in its place. The slot goes to that waiter
#: (``w``, ``u``), or is freed if nobody waits (``f``). It tells which bell to ring, as that is cheaper than NOTIFY, in
#: which commits wait for one another.
_PASS_IN_ONE: Final = f"""
WITH m AS (
  SELECT {{operator}} AS operator_slots, declared_slots, {{unpaused}} AS unpaused, {{settled}} AS settled,
  {_HELD_AS} AS held_as
  FROM sqlsem_semaphore WHERE name_key = %(key)s
), o AS MATERIALIZED (
  SELECT w.id FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {{w.waits}}{{w.alive}}
  ORDER BY w.queued_us, w.id LIMIT 1
), s AS MATERIALIZED (
  SELECT id, slot, closed, {HELD_FOR} AS held_us FROM sqlsem_slot
  WHERE semaphore_key = %(key)s AND id = %(row0)s AND permit_id = %(permit_id)s FOR UPDATE
), h AS MATERIALIZED (
  SELECT w.id, w.take, w.slots, w.lock_mode FROM sqlsem_waiter w
  WHERE EXISTS (SELECT 1 FROM s) AND w.semaphore_key = %(key)s AND w.id = (SELECT id FROM o)
  FOR UPDATE SKIP LOCKED
), w AS (
  DELETE FROM sqlsem_waiter w USING h, m, s WHERE w.semaphore_key = %(key)s AND w.id = h.id
  AND h.take = 1 AND m.unpaused AND h.lock_mode = m.held_as AND h.lock_mode = %(held_as)s
  AND m.settled AND s.closed = %(no)s AND s.slot <= COALESCE(m.operator_slots, h.slots, m.declared_slots)
  RETURNING w.*, w.ticket AS permit_id, w.process_id = %(process_id)s AS here,
  CASE WHEN w.process_id = %(process_id)s THEN w.lease_us ELSE LEAST(%(lapse_us)s, w.lease_us) END AS lasts_us
), u AS (
  UPDATE sqlsem_slot p SET held_us = s.held_us, {granting(NEXT_TOKEN, lasts="w.lasts_us", source="w.{}")}
  FROM s, w WHERE p.semaphore_key = %(key)s AND p.id = s.id
  RETURNING p.id, p.slot, p.token, w.ticket, w.channel, w.here, w.lasts_us
), f AS (
  UPDATE sqlsem_slot p SET expires_us = NULL, permit_id = NULL, suspect_us = NULL, held_us = s.held_us FROM s
  WHERE p.semaphore_key = %(key)s AND p.id = s.id AND NOT EXISTS (SELECT 1 FROM o)
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
        text = text.replace("SKIP LOCKED", "")
    parameters = parameters | {"lapse_us": LAPSE_US}
    if session.dialect.sharded:  # nobody listens to the server that runs it: all channels are told here
        parameters["bells"] = "%"
    row = row_of(session, text, parameters)
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
    "SELECT {m.operator}, m.declared_slots, CASE WHEN {m.unpaused} THEN 0 ELSE 1 END,"
    " CASE WHEN {m.settled} THEN 0 ELSE 1 END, {now},"
    f" {_HELD_AS}, {_OF_HEAD} FROM sqlsem_semaphore m"
    " LEFT JOIN sqlsem_waiter w ON w.semaphore_key = m.name_key AND {w.waits}{w.alive}"
    " WHERE m.name_key = %(key)s ORDER BY w.queued_us, w.id"
)
_PASS: Final = (
    f"UPDATE sqlsem_slot SET {HELD}, {granting('%(token)s')}"
    " WHERE semaphore_key = %(key)s AND id = %(row0)s AND permit_id = %(released)s AND closed = %(no)s"
)


def _pass_by_steps(session: Session, dialect: Dialect, parameters: dict[str, Any]) -> HandOff:
    def look(cursor: AnyCursor) -> tuple[Any, Any]:
        row = Statements(cursor, parameters).row(_LOOK)
        head = _head(row[6:]) if row is not None and row[6] is not None else None
        return row, head and head | {"dead": head["beacon"] and is_dead(cursor, head["process_id"])}

    row, head = session.run(look)
    if head is None:
        freed = change(session, free_sql(dialect, 1, False), parameters) > 0
        return HandOff(Passing.DONE if freed else Passing.GONE)
    operator_slots, declared_slots, paused, shrinking, now, held_as = row[:6]
    too_few = parameters["slot0"] > bound(operator_slots, head["slots"], declared_slots)
    unlike = not head["lock_mode"] == (held_as or SHARED) == parameters["held_as"]
    if head["dead"] or paused or shrinking or too_few or unlike or head["take"] != 1:
        return HandOff(Passing.OPEN)
    slot = (parameters["row0"], parameters["slot0"], parameters["token0"])
    channel, lasts_us = _told(head, parameters["process_id"])
    grant = _grant(dialect, [slot], int(now))
    written = _holder(head) | {"waiter": head["id"], "token": grant.tokens[0], "lasts_us": lasts_us}
    outcome = Passing.DONE

    def pass_on(cursor: AnyCursor) -> bool | None:
        nonlocal outcome
        statements = Statements(cursor, parameters | written | {"released": parameters["permit_id"]})
        outcome = Passing.RACED if statements.change(LEFT) <= 0 else Passing.OPEN
        if outcome is Passing.OPEN and statements.change(_PASS) > 0:
            outcome = Passing.DONE
        return outcome is Passing.DONE or None  # else what was done is rolled back

    session.transaction(pass_on, again=False)
    granted = Granted(head["ticket"], grant, lasts_us / 1e6)
    return HandOff(outcome, [(channel, granted)] if outcome is Passing.DONE else ())


def _told(head: dict[str, Any], process: str) -> tuple[str, int]:
    """Return where a waiter is told of its grant, and how long that lasts: here it needs no confirmation."""
    if head["process_id"] == process:
        return HERE, head["lease_us"]
    return head["channel"], min(LAPSE_US, head["lease_us"])


def _holder(head: dict[str, Any]) -> dict[str, Any]:
    """Return what is written into the rows of what a waiter gets."""
    columns = ("lease_us", "lock_mode", *HOLDER_COLUMNS)
    return {column: head[column] for column in columns} | {"permit_id": head["ticket"]}


def _grant(dialect: Dialect, rows: Sequence[tuple[int, ...]], now: int) -> Grant:
    """Return the grant of slots (id, number, last token): one token for all of them."""
    ids, slots, tokens = zip(*rows, strict=True)
    return Grant(slots, (max(max(tokens) + 1, dialect.token_clock(now)),) * len(slots), ids)


# Under the lock of the semaphore's row: taking several slots, and serving all waiters.

#: Slots that are free; what locks them follows.
_FREE: Final = (
    "SELECT s.id, s.slot, s.token FROM sqlsem_slot s{lock_hint} WHERE s.semaphore_key = %(key)s"
    " AND s.closed = %(no)s AND s.slot > %(wanted)s AND s.slot <= %(bound)s AND {s.free} ORDER BY s.slot{limit}"
)
_TAKE: Final = f"UPDATE sqlsem_slot SET {granting('%(token)s')}"


def take_sql(rows: int) -> str:
    """Take this many slots that are locked, as they were free: not asked again, as the clock may have been set back."""
    return f"{_TAKE} WHERE {among(rows)}"


def free_rows(statements: Statements, take: int, wanted: int, limit: int, *, crowded: bool) -> list[tuple[int, ...]]:
    """Lock this many free slots, above those that others want first; none if there are fewer.

    ``crowded``: slots above an operator's number are held still, and count.
    """
    rows = statements.rows(f"{_FREE}{statements.skip_locked}", take=take, wanted=wanted, bound=limit)[:take]
    if len(rows) < take or (crowded and statements.row(COUNT_LIVE, bound=limit)[0] + take > limit):
        return []
    return rows


def give(
    statements: Statements, rows: Sequence[tuple[int, ...]], now: int, lasts_us: int, who: dict[str, Any] | None = None
) -> Grant:
    """Write into slots that are locked who gets them: ``who``, else as the statements' parameters say."""
    grant = _grant(statements.dialect, rows, now)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = grant.row_ids[start : start + ROWS_AT_ONCE]
        written = (who or {}) | rows_named(some) | {"token": grant.tokens[0], "lasts_us": lasts_us}
        statements.change(take_sql(len(some)), **written)
    return grant


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
    operator_slots, declared_slots, paused, shrinking, now, kind = found
    heads = [] if paused else waiters(statements)
    if (becomes := _becomes(kind, heads)) != kind and exclusive.adopt(statements, becomes):
        operator_slots, declared_slots, paused, shrinking, now, kind = found = statements.row(LOCK)
    if shrinking:
        shrinking, whole = exclusive.settle(statements, found)
        paused = paused or whole
    served: list[Served] = []
    seen: set[int] = set()
    wanted = 0  # up to here slots are wanted by somebody who waits on
    while heads and not (paused or wanted):
        seen.update(head["id"] for head in heads)
        for head in heads:
            limit, plain = bound(operator_slots, head["slots"], declared_slots), head["lock_mode"] in (SHARED, MUTEX)
            if head["take"] > limit or (plain and limit <= wanted):
                continue  # it wants more than there is since an operator's act, or what others want who came before
            if head["beacon"] and is_dead(statements.cursor, head["process_id"]):
                statements.change(LEFT, waiter=head["id"])
            elif head["lock_mode"] == UPDATE:  # who waits for the writer's place keeps nobody out
                served += _give_mode(statements, head, int(now))
            elif not plain:  # whoever got or wants all slots does
                served += [] if wanted else _give_mode(statements, head, int(now))
                wanted = MAX_SLOTS
                break
            elif rows := free_rows(statements, head["take"], wanted, limit, crowded=bool(shrinking)):
                if statements.change(LEFT, waiter=head["id"]) > 0:  # else it has left at this moment
                    served.append(_give(statements, head, rows, int(now)))
            else:
                wanted = limit
        heads = [] if wanted else [each for each in waiters(statements) if each["id"] not in seen]
    return HandOff(Passing.DONE, served)


def _becomes(kind: str, heads: Sequence[dict[str, Any]]) -> str:
    """Return what kind a name of this kind is to be for those who wait: a mutex, if anybody waits for it as one."""
    modes = {head["lock_mode"] for head in heads} if kind in (SEMAPHORE, MUTEX) else ()
    return MUTEX if MUTEX in modes else SEMAPHORE if SHARED in modes else kind


def waiters(statements: Statements) -> list[dict[str, Any]]:
    """Return those that may be served, in order, by their columns."""
    return [_head(row) for row in statements.rows(_HEADS)]


def _head(row: Sequence[Any]) -> dict[str, Any]:
    """Return a waiter by its columns."""
    head = dict(zip(_HEAD, row, strict=True))
    return head | {"lock_mode": head["lock_mode"] or SHARED}  # Oracle knows no empty text


def _give(statements: Statements, head: dict[str, Any], rows: list[tuple[int, ...]], now: int) -> Served:
    channel, lasts_us = _told(head, statements.parameters["process_id"])
    grant = give(statements, rows, now, lasts_us, _holder(head))
    granted = Granted(head["ticket"], grant, lasts_us / 1e6)
    notify(statements, channel, granted)
    return channel, granted


def _give_mode(statements: Statements, head: dict[str, Any], now: int) -> list[Served]:
    """Give all slots, or the writer's place, to a waiter; nothing if somebody is in the way."""
    channel, lasts_us = _told(head, statements.parameters["process_id"])
    grant = exclusive.take(statements, head["lock_mode"], _holder(head), now, lasts_us)
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
