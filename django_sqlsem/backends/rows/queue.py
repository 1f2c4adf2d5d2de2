"""The waiter's side of the rows backend: taking a place in the queue, keeping it, and giving it up."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends.base import Grant, Granted, Queue
from django_sqlsem.backends.rows import statements
from django_sqlsem.database.dialects import Dialect

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_sqlsem.database.cursors import AnyCursor


#: A waiter that has not been heard of for so long is dead, in microseconds: three heartbeats.
PATIENCE_US: Final = 2_100_000

#: For how much longer than twice its countdown the place of a task is kept, in seconds: workers may be busy.
AWAY: Final = 60.0

_COLUMNS: Final = (
    "ticket, semaphore_key, queued_us, expires_us, take, slots, lease_us, away, waiting, host, pid, thread, label,"
    " user_name, process_id, boot_id, channel, beacon, lock_mode"
)
_VALUES: Final = (
    "%(permit_id)s, m.name_key, {now} - %(age_us)s, {now} + %(patience_us)s, %(take)s, {slots}, %(lease_us)s,"
    " %(no)s, %(waiting)s, %(host)s, %(pid)s, %(thread)s, %(label)s, %(user)s, %(process_id)s, %(boot_id)s,"
    " %(channel)s, %(beacon)s, %(mode)s"
)
#: Who has the writer's place already is before everybody.
AHEAD: Final = (
    "(SELECT COUNT(*) FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {waits}"
    " AND sqlsem_waiter.lock_mode <> 'upgrade' AND (w.queued_us < sqlsem_waiter.queued_us"
    " OR (w.queued_us = sqlsem_waiter.queued_us AND w.id < sqlsem_waiter.id)))"
)

LEAVE: Final = "DELETE FROM sqlsem_waiter WHERE ticket = %(permit_id)s"
#: A task that was away is away no more.
BACK: Final = "DELETE FROM sqlsem_waiter WHERE ticket = %(rank)s"
#: Is there such a task?
KEPT: Final = "SELECT 1 FROM sqlsem_waiter WHERE ticket = %(rank)s"
#: Waiters whose process has died without a word.
SWEEP: Final = (
    "DELETE FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND (expires_us < {now} - %(patience_us)s * 4{boot})"
)


@functools.cache
def enrol(dialect: Dialect, rank: bool = False) -> str:
    """Take a place, if the name is all that the claim takes it for; else insert nothing.

    ``rank``: the place is the one that was kept for a task while it was away.
    """
    bound = "COALESCE(m.operator_slots, {slots}, m.declared_slots)"
    slots = "CAST(%(slots)s AS integer)" if dialect.writing_ctes else "%(slots)s"
    values = _VALUES
    if rank:
        values = values.replace("{now} - %(age_us)s", f"COALESCE({statements.KEPT}, {{now}} - %(age_us)s)")
    return (
        f"INSERT INTO sqlsem_waiter ({_COLUMNS}) SELECT {values} FROM sqlsem_semaphore m"
        f" WHERE m.name_key = %(key)s AND m.kind = %(kind)s AND {bound} >= %(take)s AND EXISTS"
        f" (SELECT 1 FROM sqlsem_slot s WHERE s.semaphore_key = m.name_key AND s.slot >= {bound})"
    ).replace("{slots}", slots)


@functools.cache
def claim_or_enrol(dialect: Dialect, durable: bool) -> str:
    """Claim one slot, or else take a place, in one statement."""
    claim = statements.claim(dialect, "newcomer", False, durable)
    ahead = f"(SELECT COUNT(*) FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {dialect.waits_sql('w.')})"
    return (
        f"WITH c AS ({claim}), i AS ({enrol(dialect)} AND NOT EXISTS (SELECT 1 FROM c) RETURNING {ahead} AS ahead)"
        " SELECT id, slot, token, declared_slots, NULL::bigint, NULL::text FROM c"
        # A place in the queue need not survive a crash, and is seen the sooner.
        f" UNION ALL SELECT NULL, NULL, NULL, NULL, ahead{dialect.unflushed} FROM i"
    )


@functools.cache
def _slots(dialect: Dialect) -> str:
    """What the slots of a name say, in one pass over them."""
    live = dialect.live_sql("s.")
    return (
        f"SELECT SUM(CASE WHEN s.closed = %(no)s AND {dialect.free_sql('s.')} THEN 1 ELSE 0 END) AS free_slots,"
        f" MIN(CASE WHEN {live} THEN s.expires_us - {{now}} END) AS expiry_us,"
        f" SUM(CASE WHEN {live} AND s.channel NOT LIKE %(near)s THEN 1 ELSE 0 END) AS strangers"
        " FROM sqlsem_slot s WHERE s.semaphore_key = %(key)s"
    )


@functools.cache
def _seen(dialect: Dialect) -> str:
    """What a waiter looks at, in columns: see ``Queue``. Only the first in line asks who may be dead."""
    ahead = AHEAD.replace("{waits}", dialect.waits_sql("w."))
    suspects = f"CASE WHEN {ahead} = 0 THEN {statements.suspects(dialect)} ELSE 0 END"
    return f"{ahead}, v.free_slots, v.expiry_us, v.strangers, {suspects}"


@functools.cache
def _look(dialect: Dialect) -> str:
    seen, slots = _seen(dialect), _slots(dialect)
    return f"SELECT {seen} FROM ({slots}) v, sqlsem_waiter WHERE sqlsem_waiter.ticket = %(permit_id)s"


@functools.cache
def _keep(dialect: Dialect) -> tuple[str, ...]:
    """Say that the waiter lives, and look around: one statement, or two."""
    text = (
        "UPDATE sqlsem_waiter SET expires_us = {now} + %(patience_us)s, waiting = %(waiting)s,"
        " channel = %(channel)s, beacon = %(beacon)s"
    )
    where = "WHERE ticket = %(permit_id)s"
    if dialect.writing_ctes:
        return (f"{text} FROM ({_slots(dialect)}) v {where} RETURNING {_seen(dialect)}{dialect.unflushed}",)
    return f"{text} {where}", _look(dialect)


#: What was granted under a permit id, and how long it lasts, in microseconds.
MINE: Final = (
    "SELECT id, slot, token, expires_us - {now} FROM sqlsem_slot"
    " WHERE semaphore_key = %(key)s AND permit_id = %(permit_id)s ORDER BY slot"
)


def view(dialect: Dialect, cursor: AnyCursor, parameters: dict[str, Any], *, keep: bool) -> Queue | None:
    """Look around, and ``keep`` the place; ``None`` if there is no such place any more."""
    for text in _keep(dialect) if keep else (_look(dialect),):
        dialect.execute(cursor, text, parameters)
    row = cursor.fetchone()
    if row is None:
        return None
    ahead, free, expiry_us, strangers, dead = row[:5]
    return Queue(
        ahead=int(ahead),
        free=int(free or 0),
        gone=free is None,
        expiry_in=None if expiry_us is None else max(0.0, int(expiry_us) / 1e6),
        strangers=int(strangers or 0),
        suspects=None if dead is None else int(dead),
    )


def mine(dialect: Dialect, cursor: AnyCursor, parameters: dict[str, Any]) -> Granted | None:
    """Return what was granted under the permit id, if it was."""
    dialect.execute(cursor, MINE, parameters)
    rows = cursor.fetchall()
    if not rows:
        return None
    ids, slots, tokens, left = zip(*rows, strict=True)
    return Granted(parameters["permit_id"], Grant(slots, tokens, ids), min(map(int, left)) / 1e6)


def sweep(dialect: Dialect, cursor: AnyCursor, parameters: dict[str, Any]) -> None:
    """Delete what dead waiters left."""
    boot = " OR boot_id <> %(boot_id)s" if dialect.boot_id else ""
    dialect.execute(cursor, SWEEP.replace("{boot}", boot), parameters)


@functools.cache
def _before(dialect: Dialect) -> str:
    return (
        f"SELECT COUNT(*) FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {dialect.live_sql('w.')}"
        f" AND w.ticket <> %(rank)s AND w.queued_us < COALESCE({statements.KEPT}, {{now}})"
    )


#: A task comes back under another id.
HAND_ON: Final = "UPDATE sqlsem_waiter SET ticket = %(heir)s WHERE ticket = %(rank)s"
_STILL_AWAY: Final = "UPDATE sqlsem_waiter SET expires_us = {now} + %(away_us)s WHERE ticket = %(rank)s"
_GO_AWAY: Final = (
    f"INSERT INTO sqlsem_waiter ({_COLUMNS}) VALUES (%(rank)s, %(key)s, {{now}}, {{now}} + %(away_us)s, %(take)s,"
    " %(slots)s, %(lease_us)s, %(yes)s, 1, %(host)s, %(pid)s, %(thread)s, %(label)s, %(user)s, %(process_id)s,"
    " %(boot_id)s, '', %(no)s, %(mode)s)"
)


def step_aside(
    dialect: Dialect, cursor: AnyCursor, parameters: dict[str, Any], estimate: Callable[[int], float]
) -> float:
    """Keep the place of a task that goes away; it lapses if the task has not come back long after it should have."""
    dialect.execute(cursor, _before(dialect), parameters)
    seconds = estimate(int(cursor.fetchone()[0]))
    away = parameters | {"away_us": round((seconds * 2 + AWAY) * 1e6), "yes": True}
    dialect.execute(cursor, _STILL_AWAY, away)
    if cursor.rowcount <= 0:
        sweep(dialect, cursor, parameters | {"patience_us": PATIENCE_US})
        dialect.execute(cursor, _GO_AWAY, away)
    return seconds
