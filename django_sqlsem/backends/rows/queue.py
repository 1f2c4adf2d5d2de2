"""The waiter's side: taking a place in the queue, keeping it, and giving it up."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends.base import Grant, Granted, Queue, Waited
from django_sqlsem.backends.rows import handoff, statements
from django_sqlsem.backends.rows.beacons import suspects, take_from_suspects
from django_sqlsem.backends.rows.statements import (
    KEPT,
    WAITER,
    Statements,
    change,
    request_parameters,
    row_of,
    standing,
)
from django_sqlsem.core.modes import MUTEX
from django_sqlsem.database.dialects import Dialect, dialect_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_sqlsem.backends.base import Place, Request
    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session


#: For how much longer than twice its countdown the place of a task is kept, in seconds: workers may be busy.
_AWAY: Final = 60.0

_STANDING: Final = standing(semaphore_key="m.name_key", slots="{own}", queued_us="{since}")
#: Takes a place, if the name has as many slots as it should; else inserts nothing.
_PLACE: Final = (
    f"{WAITER} SELECT {_STANDING} FROM sqlsem_semaphore m{{kept}} WHERE m.name_key = %(key)s AND {{kinds}}"
    " AND COALESCE({m.operator}, {own}, m.declared_slots) >= %(take)s AND EXISTS (SELECT 1 FROM sqlsem_slot s"
    " WHERE s.semaphore_key = %(key)s AND s.slot >= COALESCE({m.operator}, {own}, m.declared_slots))"
)
_LEAVE: Final = "DELETE FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND ticket = %(permit_id)s"
#: Deletes waiters whose processes have died without a word.
_SWEEP: Final = (
    "DELETE FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND (expires_us < {now} - %(patience_us)s * 4{rebooted})"
)
#: Of a waiter, how many were there before it. Who has the writer's place already is before everybody.
AHEAD: Final = (
    "(SELECT COUNT(*) FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {w.waits}"
    " AND sqlsem_waiter.lock_mode <> 'upgrade' AND (w.queued_us < sqlsem_waiter.queued_us"
    " OR (w.queued_us = sqlsem_waiter.queued_us AND w.id < sqlsem_waiter.id)))"
)
#: Says that a waiter lives.
STAYING: Final = (
    "UPDATE sqlsem_waiter SET expires_us = {now} + %(patience_us)s, waiting = %(waiting)s,"
    " channel = %(channel)s, beacon = %(beacon)s"
)
#: What the slots of a name say, in one pass over them: how many are free of those that the waiter could use, and so on.
_SLOTS: Final = (
    "(SELECT SUM(CASE WHEN (s.closed = %(no)s OR (m.operator_slots IS NOT NULL AND m.slots_until_us <= {token_now}))"
    " AND s.slot <= COALESCE({m.operator}, {own}, m.declared_slots) AND {s.free} THEN 1 ELSE 0 END) AS free_slots,"
    " MIN(CASE WHEN {s.live} THEN s.expires_us - {now} END) AS expiry_us,"
    " SUM(CASE WHEN {s.live} AND s.channel NOT LIKE %(near)s THEN 1 ELSE 0 END) AS strangers, MIN(m.kind) AS kind"
    " FROM sqlsem_semaphore m JOIN sqlsem_slot s ON s.semaphore_key = m.name_key WHERE m.name_key = %(key)s) v"
)
#: What a waiter looks at: see ``Queue``. Only the first in line asks who may be dead. Last: what kind the name is.
_SEEN: Final = (
    f"{AHEAD}, v.free_slots, v.expiry_us, v.strangers, CASE WHEN {AHEAD} = 0 THEN {{suspects}} ELSE 0 END, v.kind"
)
_MINE_THERE: Final = "sqlsem_waiter.semaphore_key = %(key)s AND sqlsem_waiter.ticket = %(permit_id)s"
_LOOK_AROUND: Final = f"SELECT {_SEEN} FROM {_SLOTS}, sqlsem_waiter WHERE {_MINE_THERE}"
_STAY: Final = f"{STAYING} WHERE {_MINE_THERE}"
_STAY_AND_LOOK: Final = f"{STAYING} FROM {_SLOTS} WHERE {_MINE_THERE} RETURNING {_SEEN}{{unflushed}}"
#: What was granted under a permit id, and how long it lasts, in microseconds.
_MINE: Final = (
    "SELECT id, slot, token, expires_us - {now} FROM sqlsem_slot"
    " WHERE semaphore_key = %(key)s AND permit_id = %(permit_id)s ORDER BY slot"
)

# The place of a task that is away.

#: It is away no more.
BACK: Final = "DELETE FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND ticket = %(rank)s"
_FIND: Final = "SELECT 1 FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND ticket = %(rank)s"
#: It comes back under another id.
_HAND_ON: Final = "UPDATE sqlsem_waiter SET ticket = %(heir)s WHERE semaphore_key = %(key)s AND ticket = %(rank)s"
_STILL_AWAY: Final = (
    "UPDATE sqlsem_waiter SET expires_us = {now} + %(away_us)s WHERE semaphore_key = %(key)s AND ticket = %(rank)s"
)
_BEFORE: Final = (
    "SELECT COUNT(*) FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {w.live} AND w.ticket <> %(rank)s"
    f" AND w.queued_us < COALESCE({KEPT}, {{now}})"
)
_ABSENT: Final = {
    "ticket": "%(rank)s",
    "queued_us": "{now}",
    "expires_us": "{now} + %(away_us)s",
    "away": "%(yes)s",
    "waiting": "1",
    "channel": "''",
    "beacon": "%(no)s",
}
_GO_AWAY: Final = f"{WAITER} VALUES ({standing(**_ABSENT)})"


#: As what a name is stood in line for: also as a mutex for a semaphore, and the other way round.
_KINDS: Final = "(m.kind = %(kind)s OR (m.kind IN ('semaphore', 'mutex') AND %(kind)s IN ('semaphore', 'mutex')))"


@functools.cache
def place_sql(dialect: Dialect, *, ranked: bool, kinds: str = _KINDS) -> str:
    """Take a place; ``ranked``: the one that was kept for a task while it was away."""
    since = "COALESCE(a.queued_us, {now} - %(age_us)s)" if ranked else "{now} - %(age_us)s"
    kept = " LEFT JOIN sqlsem_waiter a ON a.semaphore_key = m.name_key AND a.ticket = %(rank)s" if ranked else ""
    return (
        _PLACE.replace("{since}", since)
        .replace("{kept}", kept)
        .replace("{own}", _own(dialect))
        .replace("{kinds}", kinds)
    )


def _own(dialect: Dialect) -> str:
    """Return the claim's own number of slots, which may be NULL."""
    return "CAST(%(slots)s AS integer)" if dialect.notifies else "%(slots)s"


@functools.cache
def view_sql(dialect: Dialect, *, stay: bool) -> tuple[str, ...]:
    """Look around, and ``stay``: one statement, or two."""
    if stay and dialect.writing_ctes:
        texts: tuple[str, ...] = (_STAY_AND_LOOK,)
    else:
        texts = (_STAY, _LOOK_AROUND) if stay else (_LOOK_AROUND,)
    return tuple(text.replace("{suspects}", suspects(dialect)).replace("{own}", _own(dialect)) for text in texts)


@functools.cache
def sweep_sql(dialect: Dialect) -> str:
    """Delete those that stand in the way and are dead: their beacons are out, or their time lies where none can.

    A clock that was set back leaves such a time; one that lives says anew within a heartbeat that it does.
    """
    dead = dialect.dead_sql("")
    by_beacon = f" OR (%(witness)s <> %(no)s AND {dead})" if dead else ""
    return (
        "DELETE FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND away = %(no)s"
        f" AND (expires_us > {{now}} + %(patience_us)s * 2{by_beacon})"
    )


def sweep_dead(session: Session, dialect: Dialect, parameters: dict[str, Any]) -> bool:
    """Delete dead waiters. Return whether there were any."""
    return change(session, sweep_sql(dialect), {"patience_us": statements.PATIENCE_US} | parameters) > 0


def stand(session: Session, request: Request, parameters: dict[str, Any], unless: str = "") -> bool:
    """Take a place. Return whether there is one: not if the name has fewer slots than it should.

    ``unless``: what else must be, as the end of the statement's condition.
    """
    text = place_sql(dialect_for(session.connection), ranked=bool(request.rank)) + unless
    if change(session, text, parameters, again=False) <= 0:
        return False
    if request.rank:  # on its own: what is repeated because the database was locked must not take the place twice
        change(session, BACK, parameters)
    return True


def wait(session: Session, request: Request, place: Place) -> Waited:
    """Say that the waiter lives, look around, and hand out what is free."""
    return look_around(session, request, request_parameters(request, place), new=False)


def look_around(session: Session, request: Request, parameters: dict[str, Any], *, new: bool) -> Waited:
    """See what there is for a waiter whose place is ``new``, or to be kept."""
    dialect = dialect_for(session.connection)
    texts = view_sql(dialect, stay=not new)

    def view(cursor: AnyCursor) -> Any:
        here = Statements(cursor, parameters)
        for text in texts[:-1]:
            here.change(text)
        return here.row(texts[-1])

    row = session.run(view)
    if row is not None and row[1] is None:  # the name was purged: it comes anew, and makes it
        change(session, _LEAVE, parameters)
        row = None
    if row is None:
        mine = granted(session, request)
        if mine is None:
            change(session, _SWEEP, parameters)
        return Waited((mine,) if mine else ())
    ahead, free, expiry_us, strangers, dead = row[:5]
    queue = Queue(
        ahead=int(ahead),
        free=int(free),
        expiry_in=None if expiry_us is None else max(0.0, int(expiry_us) / 1e6),
        strangers=int(strangers),
        suspects=None if dead is None else int(dead),
    )
    # How many slots are free does not tell what a mode waits for, nor whether the name is to become another kind.
    enough = not request.lock_mode and queue.free >= request.take
    taken = not enough and take_from_suspects(session, dialect, request, queue.suspects)
    becomes = row[5] != request.resource.kind and (queue.ahead == 0 or request.resource.kind == MUTEX)
    if queue.free or taken or request.mode or becomes:
        return Waited(handoff.grant(session, parameters), queue)
    return Waited((), queue)


def granted(session: Session, request: Request) -> Granted | None:
    """Return what was granted under the waiter's permit id, if it was."""
    parameters = {"key": request.resource.key, "permit_id": request.permit_id}
    rows = session.run(lambda cursor: Statements(cursor, parameters).rows(_MINE))
    if not rows:
        return None
    ids, slots, tokens, left = zip(*rows, strict=True)
    return Granted(request.permit_id, Grant(slots, tokens, ids), min(map(int, left)) / 1e6)


def leave(session: Session, request: Request) -> None:
    """Delete the waiter's row. If it is not there any more, it was granted: then hand that on."""
    if change(session, _LEAVE, {"key": request.resource.key, "permit_id": request.permit_id}) <= 0:
        handoff.discard(session, request.resource, request.permit_id)
    elif request.take != 1:  # those behind it may be content with less
        handoff.hand_out(session, request.resource.key)


def discard(session: Session, resource: Resource, permit_id: str) -> bool:
    """Give up a place, and free whatever rows carry the permit's id. Return whether there were such rows."""
    change(session, _LEAVE, {"key": resource.key, "permit_id": permit_id})
    return handoff.discard(session, resource, permit_id)


def step_aside(session: Session, request: Request, estimate: Callable[[int], float]) -> float:
    """Keep the place of a task that goes away; it lapses if the task has not come back long after it should have."""
    parameters = request_parameters(request) | {"patience_us": statements.PATIENCE_US, "yes": True}

    def work(cursor: AnyCursor) -> float:
        here = Statements(cursor, parameters)
        seconds = estimate(int(here.row(_BEFORE)[0]))
        away_us = round((seconds * 2 + _AWAY) * 1e6)
        if here.change(_STILL_AWAY, away_us=away_us) <= 0:
            here.change(_SWEEP)
            here.change(_GO_AWAY, away_us=away_us)
        return seconds

    return session.run(work)


def keeps_place(session: Session, request: Request) -> bool:
    """Return whether the task's row is there."""
    return row_of(session, _FIND, {"key": request.resource.key, "rank": request.rank}) is not None


def hand_rank_on(session: Session, request: Request, heir: str) -> None:
    """Write the other rank into the task's row."""
    change(session, _HAND_ON, {"key": request.resource.key, "rank": request.rank, "heir": heir})
