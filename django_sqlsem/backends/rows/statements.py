"""The statements of the rows backend, built once per dialect from one set of conditions."""

from __future__ import annotations

import functools
from typing import Final

from django_sqlsem.database.dialects import Dialect

#: Since when a task has its place that was kept while it was away; NULL for anybody else.
KEPT: Final = "(SELECT a.queued_us FROM sqlsem_waiter a WHERE a.ticket = %(rank)s)"

_WAITS: Final = "SELECT 1 FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {waits}"
#: Who waits for the writer's place beside readers is in nobody's way.
_IN_THE_WAY: Final = " AND w.lock_mode <> 'update'"

#: Who may go first. A newcomer yields to every live waiter; a task that comes back, to those that wait longer; who
#: barges, to those that want everybody to leave.
QUEUE: Final = {
    "barge": f" AND NOT EXISTS ({_WAITS} AND w.take = 0)",
    "ranked": f" AND NOT EXISTS ({_WAITS}{_IN_THE_WAY} AND w.queued_us < COALESCE({KEPT}, {{{{now}}}}))",
    "newcomer": f" AND NOT EXISTS ({_WAITS}{_IN_THE_WAY})",
}

_SET: Final = (
    "token = CASE WHEN token + 1 > {token_now} THEN token + 1 ELSE {token_now} END,"
    " permit_id = %(permit_id)s, acquired_us = {{now}}, expires_us = {{now}} + %(lease_us)s, lease_us = %(lease_us)s,"
    " host = %(host)s, pid = %(pid)s, thread = %(thread)s, label = %(label)s, user_name = %(user)s,"
    " process_id = %(process_id)s, boot_id = %(boot_id)s, channel = %(channel)s, beacon = %(beacon)s,"
    " suspect_us = NULL, lock_mode = ''"
)


def bound(operator_slots: int | None, own_slots: int | None, declared_slots: int) -> int:
    """Return how many slots count: the operator's number, else the claim's own, else the declared one."""
    return next(each for each in (operator_slots, own_slots, declared_slots) if each is not None)


#: The same in SQL.
_BOUND: Final = "COALESCE(m.operator_slots, %(slots)s, m.declared_slots)"
_DECLARED: Final = "SELECT declared_slots FROM sqlsem_semaphore WHERE name_key = %(key)s"

#: How many slots have run out, and were fenced by those who had them.
STUCK: Final = (
    "(SELECT COUNT(*) FROM sqlsem_slot x WHERE x.semaphore_key = %(key)s AND x.expires_us <= {now}"
    " AND x.fenced = x.token)"
)

#: For so long a name may be newer than a claim that did not find it, in microseconds.
YOUNG_US: Final = 2_000_000

GRANTED: Final = (
    f"SELECT id, slot, token, ({_DECLARED}) FROM sqlsem_slot"
    " WHERE semaphore_key = %(key)s AND permit_id = %(permit_id)s ORDER BY slot"
)


@functools.cache
def claim(dialect: Dialect, queue: str, locked: bool, durable: bool) -> str:
    """Take one free slot; ``locked``: the caller has the semaphore's row, and has seen to a shrinking one."""
    allowed = "m.paused = %(no)s" + ("" if locked else " AND m.shrinking = %(no)s")
    order = QUEUE[queue].format(waits=dialect.waits_sql("w."))
    update = "UPDATE sqlsem_slot SET " + _SET.format(token_now=dialect.token_now.format(now="{now}"))
    if dialect.returning:
        return (
            f"{update} WHERE id = (SELECT s.id"
            " FROM sqlsem_slot s JOIN sqlsem_semaphore m ON m.name_key = s.semaphore_key"
            f" WHERE s.semaphore_key = %(key)s AND m.kind = %(kind)s AND {allowed} AND s.closed = %(no)s"
            f" AND s.slot <= {_BOUND} AND {dialect.free_sql('s.')}{order}"
            f" ORDER BY s.slot LIMIT 1 {dialect.skip_locked})"
            f" RETURNING id, slot, token, ({_DECLARED}){'' if durable else dialect.unflushed}"
        )
    conditions = (
        f"semaphore_key = %(key)s AND closed = %(no)s AND {dialect.free_sql()} AND slot <= (SELECT {_BOUND}"
        f" FROM sqlsem_semaphore m WHERE m.name_key = %(key)s AND m.kind = %(kind)s AND {allowed}){order}"
    )
    if dialect.update_limit:
        return f"{update} WHERE {conditions} ORDER BY slot LIMIT 1"
    return f"{update} WHERE id = %(id)s AND {conditions}"


@functools.cache
def candidates(dialect: Dialect) -> str:
    """Portable claims look first: the free slots, in order."""
    return (
        f"SELECT id FROM sqlsem_slot WHERE semaphore_key = %(key)s AND closed = %(no)s AND {dialect.free_sql()}"
        " ORDER BY slot"
    )


@functools.cache
def suspects(dialect: Dialect) -> str:
    """How many holding processes have their beacons out, as a column; NULL where SQL cannot tell.

    Slots that have run out and were fenced count too, where a claim does not take them by itself.
    """
    dead = dialect.dead_sql("d.")
    holders = (
        "SELECT DISTINCT s.process_id, s.beacon FROM sqlsem_slot s WHERE s.semaphore_key = %(key)s"
        f" AND {dialect.live_sql('s.')}"
    )
    count = f"(SELECT COUNT(*) FROM ({holders}) d WHERE {dead})" if dead else "NULL"
    return f"{count} + {STUCK}" if dialect.fence == "sibling" else count


@functools.cache
def look(dialect: Dialect) -> str:
    """What a refused claim wants to know, in one row.

    Its last column: the name is so young that it may have been made since the claim, and has a free slot.
    """
    young = (
        f"CASE WHEN {{now}} - m.declared_us < {YOUNG_US} AND EXISTS (SELECT 1 FROM sqlsem_slot f WHERE"
        f" f.semaphore_key = m.name_key AND f.closed = %(no)s AND f.slot > 0 AND {dialect.free_sql('f.')})"
        " THEN 1 ELSE 0 END"
    )
    return (
        "SELECT m.kind, m.declared_slots, m.operator_slots, m.shrinking,"
        f" (SELECT COUNT(*) FROM sqlsem_slot s WHERE s.semaphore_key = m.name_key AND s.slot > 0),"
        f" {suspects(dialect)}, {young} FROM sqlsem_semaphore m WHERE m.name_key = %(key)s"
    )


@functools.cache
def lock(dialect: Dialect) -> str:
    """Lock the semaphore's row until the transaction ends."""
    return (
        f"SELECT operator_slots, declared_slots, paused, shrinking, {{now}} FROM sqlsem_semaphore{dialect.lock_hint}"
        f" WHERE name_key = %(key)s{dialect.for_update}"
    )


@functools.cache
def count(dialect: Dialect) -> str:
    """How many slots are live, how many of those are above the bound, and how many belong to who has all of them."""
    live = dialect.live_sql()
    return (
        f"SELECT COUNT(CASE WHEN slot > 0 AND {live} THEN 1 END),"
        f" COUNT(CASE WHEN slot > %(bound)s AND {live} THEN 1 END),"
        f" COUNT(CASE WHEN lock_mode = 'whole' AND NOT {dialect.free_sql()} THEN 1 END)"
        " FROM sqlsem_slot WHERE semaphore_key = %(key)s AND expires_us IS NOT NULL"
    )


@functools.cache
def lapse(dialect: Dialect) -> str:
    """Take all slots from whoever had them, if that is over: else it might prove them again, one by one."""
    return (
        "UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL WHERE semaphore_key = %(key)s"
        f" AND lock_mode = 'whole' AND expires_us IS NOT NULL AND {dialect.free_sql()}"
    )


SHRUNK: Final = "UPDATE sqlsem_semaphore SET shrinking = %(no)s WHERE name_key = %(key)s"
#: Slots that were made while somebody had all of them, or an operator wanted more of them.
OPEN: Final = (
    "UPDATE sqlsem_slot SET closed = %(no)s WHERE semaphore_key = %(key)s AND closed = %(yes)s AND slot > 0"
    " AND slot <= COALESCE((SELECT operator_slots FROM sqlsem_semaphore WHERE name_key = %(key)s), slot)"
)
DECLARE: Final = (
    "UPDATE sqlsem_semaphore SET other_slots = declared_slots, other_us = {now}, declared_slots = %(slots)s,"
    " declared_us = {now} WHERE name_key = %(key)s AND declared_slots <> %(slots)s"
)
INSERT_SEMAPHORE: Final = (
    "sqlsem_semaphore (name_key, name, kind, declared_slots, declared_us, paused, shrinking)"
    " VALUES (%(key)s, %(name)s, %(kind)s, %(slots)s, {now}, %(no)s, %(no)s)"
)
INSERT_SLOT: Final = (
    "sqlsem_slot (semaphore_key, slot, closed, beacon, token, lease_us, held_us, host, pid, thread, label, user_name,"
    " process_id, boot_id, channel, revoked_by, lock_mode)"
    " VALUES (%s, %s, %s, %s, 0, 0, 0, '', 0, '', '', '', '', '', '', '', '')"
)


@functools.cache
def take_new(dialect: Dialect) -> str:
    """Take the first slots of a name that only this transaction can see."""
    taken = _SET.format(token_now=dialect.token_now.format(now="{now}"))
    return f"UPDATE sqlsem_slot SET {taken} WHERE semaphore_key = %(key)s AND slot BETWEEN 1 AND %(take)s"


SLOTS: Final = "SELECT slot FROM sqlsem_slot WHERE semaphore_key = %(key)s"

HELD: Final = (
    "held_us = CASE WHEN {now} <= acquired_us THEN held_us WHEN held_us = 0 THEN {now} - acquired_us"
    " ELSE held_us + ({now} - acquired_us - held_us) / 8 END"
)
_FREE: Final = f"UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL, suspect_us = NULL, {HELD}"


@functools.cache
def release(dialect: Dialect, rows: int, unwanted: bool) -> str:
    """Free some rows of one permit; ``unwanted``: only if nobody waits."""
    ids = ", ".join(f"%(row{number})s" for number in range(rows))
    text = f"{_FREE} WHERE id IN ({ids}) AND permit_id = %(permit_id)s"
    if unwanted:
        text += QUEUE["newcomer"].format(waits=dialect.waits_sql("w."))
    # A release that a crash undoes is only an expiry that comes later.
    return f"{text} RETURNING id{dialect.unflushed}" if dialect.unflushed else text


#: The slots that are held, dead holders' too.
STANDING: Final = "SELECT slot, token FROM sqlsem_slot WHERE semaphore_key = %(key)s AND expires_us IS NOT NULL"
#: Frees for good what the condition that follows it says.
FREE_DEAD: Final = (
    "UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL, suspect_us = NULL"
    " WHERE semaphore_key = %(key)s AND expires_us IS NOT NULL AND "
)
DISCARD: Final = f"{_FREE} WHERE semaphore_key = %(key)s AND permit_id = %(permit_id)s"

#: By whom a slot's holder was asked to stop; NULL if it was not, or another one was.
ASKED: Final = "CASE WHEN stop_token = token THEN stop_by END"
#: Leaves out whom somebody has asked since the last renewal: the number of rows tells of that, where nothing else can.
_TOLD: Final = " AND (stop_token IS NULL OR stop_token <> token OR id IN ({told}))"

UNLOCKED: Final = (
    f"SELECT id, permit_id, {ASKED} FROM sqlsem_slot WHERE id IN (%s) AND permit_id IN (%s) AND expires_us IS NOT NULL"
    " FOR UPDATE SKIP LOCKED"
)
FATE: Final = f"SELECT id, permit_id, {ASKED}, revoked_token, revoked_by FROM sqlsem_slot WHERE id IN (%s)"


def unasked(text: str) -> str:
    """Return a statement for tables that know nothing of wishes."""
    return text.replace(ASKED, "NULL")


@functools.cache
def renew_arrays(dialect: Dialect) -> str:
    """Extend the grants of two arrays, so that one text serves any number of them."""
    return renew(dialect, "SELECT unnest(%(row_ids)s::bigint[])", "SELECT unnest(%(permit_ids)s::varchar[])")


def renew(dialect: Dialect, row_ids: str, permit_ids: str, told: str = "") -> str:
    """Extend the grants that these rows still carry. A row that someone has locked is passed over, not waited for.

    ``told``: of those whose holders are asked to stop only these rows, whose holders know.
    """
    conditions = f"id IN ({row_ids}) AND permit_id IN ({permit_ids}) AND expires_us IS NOT NULL"
    if told:
        conditions += _TOLD.format(told=told)
    if dialect.renewal_locked:
        conditions = f"id IN (SELECT s.id FROM sqlsem_slot s WHERE {conditions} {dialect.renewal_locked})"
    text = (
        "UPDATE sqlsem_slot SET expires_us = {now} + lease_us, beacon = %(beacon)s, suspect_us = NULL"
        f" WHERE {conditions}"
    )
    return f"{text} RETURNING id, permit_id, {ASKED}" if dialect.returning else text
