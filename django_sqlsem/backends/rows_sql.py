"""The statements of the rows backend, built once per dialect from one set of conditions."""

from __future__ import annotations

import functools
from typing import Final

from django_sqlsem.backends.dialects import Dialect

#: Who may go first. A newcomer yields to every live waiter; a waiter, to those that wait longer.
QUEUE: Final = {
    "barge": "",
    "newcomer": (" AND NOT EXISTS (SELECT 1 FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {waiter_live})"),
    "waiter": (
        " AND NOT EXISTS (SELECT 1 FROM sqlsem_waiter w, sqlsem_waiter me"
        " WHERE me.ticket = %(ticket)s AND w.semaphore_key = me.semaphore_key AND {waiter_live}"
        " AND (w.queued_us < me.queued_us OR (w.queued_us = me.queued_us AND w.id < me.id)))"
    ),
}

_SET: Final = (
    "token = CASE WHEN token + 1 > {token_now} THEN token + 1 ELSE {token_now} END,"
    " permit_id = %(permit_id)s, acquired_us = {{now}}, expires_us = {{now}} + %(lease_us)s, lease_us = %(lease_us)s,"
    " host = %(host)s, pid = %(pid)s, thread = %(thread)s, label = %(label)s, user_name = %(user)s,"
    " process_id = %(process_id)s, boot_id = %(boot_id)s"
)
_BOUND: Final = "COALESCE(m.operator_slots, %(slots)s, m.declared_slots)"
_DECLARED: Final = "SELECT declared_slots FROM sqlsem_semaphore WHERE name_key = %(key)s"

GRANTED: Final = (
    f"SELECT id, slot, token, ({_DECLARED}) FROM sqlsem_slot"
    " WHERE semaphore_key = %(key)s AND permit_id = %(permit_id)s ORDER BY slot"
)


@functools.cache
def claim(dialect: Dialect, queue: str, locked: bool) -> str:
    """Take one free slot; ``locked``: the caller has the semaphore's row, and has seen to a shrinking one."""
    allowed = "m.paused = %(no)s" + ("" if locked else " AND m.shrinking = %(no)s")
    order = QUEUE[queue].format(waiter_live=dialect.live_sql("w."))
    update = "UPDATE sqlsem_slot SET " + _SET.format(token_now=dialect.token_now.format(now="{now}"))
    if dialect.returning:
        return (
            f"{update} WHERE id = (SELECT s.id"
            " FROM sqlsem_slot s JOIN sqlsem_semaphore m ON m.name_key = s.semaphore_key"
            f" WHERE s.semaphore_key = %(key)s AND m.kind = %(kind)s AND {allowed} AND s.closed = %(no)s"
            f" AND s.slot <= {_BOUND} AND {dialect.free_sql('s.')}{order}"
            f" ORDER BY s.slot LIMIT 1 {dialect.skip_locked})"
            f" RETURNING id, slot, token, ({_DECLARED})"
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
def look(dialect: Dialect) -> str:
    """What a refused claim wants to know, in one row."""
    live = dialect.live_sql("s.")
    return (
        "SELECT m.kind, m.declared_slots, m.operator_slots, m.shrinking,"
        " (SELECT COUNT(*) FROM sqlsem_slot s WHERE s.semaphore_key = m.name_key),"
        f" (SELECT MIN(s.expires_us) FROM sqlsem_slot s WHERE s.semaphore_key = m.name_key AND {live}) - {{now}},"
        " (SELECT COUNT(*) FROM sqlsem_waiter w, sqlsem_waiter me WHERE me.ticket = %(ticket)s"
        f" AND w.semaphore_key = me.semaphore_key AND {dialect.live_sql('w.')}"
        " AND (w.queued_us < me.queued_us OR (w.queued_us = me.queued_us AND w.id < me.id)))"
        " FROM sqlsem_semaphore m WHERE m.name_key = %(key)s"
    )


@functools.cache
def ahead(dialect: Dialect) -> str:
    """What a waiter looks at between heartbeats, without a lock: how many wait longer, and how many slots are free."""
    return (
        "SELECT COUNT(*), (SELECT COUNT(*) FROM sqlsem_slot WHERE semaphore_key = %(key)s AND closed = %(no)s"
        f" AND {dialect.free_sql()}) FROM sqlsem_waiter w, sqlsem_waiter me WHERE me.ticket = %(ticket)s"
        f" AND w.semaphore_key = me.semaphore_key AND {dialect.live_sql('w.')}"
        " AND (w.queued_us < me.queued_us OR (w.queued_us = me.queued_us AND w.id < me.id))"
    )


@functools.cache
def lock(dialect: Dialect) -> str:
    """Lock the semaphore's row until the transaction ends."""
    return (
        "SELECT operator_slots, declared_slots, shrinking"
        f" FROM sqlsem_semaphore{dialect.lock_hint} WHERE name_key = %(key)s{dialect.for_update}"
    )


@functools.cache
def count(dialect: Dialect) -> str:
    """How many slots are live, and how many of those are above the bound."""
    return (
        "SELECT COUNT(*), SUM(CASE WHEN slot > %(bound)s THEN 1 ELSE 0 END) FROM sqlsem_slot"
        f" WHERE semaphore_key = %(key)s AND {dialect.live_sql()}"
    )


SHRUNK: Final = "UPDATE sqlsem_semaphore SET shrinking = %(no)s WHERE name_key = %(key)s"
DECLARE: Final = (
    "UPDATE sqlsem_semaphore SET other_slots = declared_slots, other_us = {now}, declared_slots = %(slots)s,"
    " declared_us = {now} WHERE name_key = %(key)s AND declared_slots <> %(slots)s"
)
INSERT_SEMAPHORE: Final = (
    "sqlsem_semaphore (name_key, name, kind, declared_slots, declared_us, paused, shrinking)"
    " VALUES (%(key)s, %(name)s, %(kind)s, %(slots)s, {now}, %(no)s, %(no)s)"
)
INSERT_SLOT: Final = (
    "sqlsem_slot (semaphore_key, slot, closed, token, lease_us, host, pid, thread, label, user_name, process_id,"
    " boot_id, revoked_by) VALUES (%s, %s, %s, 0, 0, '', 0, '', '', '', '', '', '')"
)
SLOTS: Final = "SELECT slot FROM sqlsem_slot WHERE semaphore_key = %(key)s"

ENQUEUE: Final = (
    "INSERT INTO sqlsem_waiter (ticket, semaphore_key, queued_us, expires_us, take, waiting, host, pid, thread, label,"
    " user_name, process_id, boot_id) VALUES (%(ticket)s, %(key)s, {now} - %(age_us)s, {now} + %(patience_us)s,"
    " %(take)s, %(waiting)s, %(host)s, %(pid)s, %(thread)s, %(label)s, %(user)s, %(process_id)s, %(boot_id)s)"
)
KEEP: Final = (
    "UPDATE sqlsem_waiter SET expires_us = {now} + %(patience_us)s, waiting = %(waiting)s WHERE ticket = %(ticket)s"
)
MOVE: Final = (
    "UPDATE sqlsem_waiter SET expires_us = {now} + %(patience_us)s, waiting = %(waiting)s,"
    " queued_us = {now} - %(age_us)s, take = %(take)s, thread = %(thread)s, label = %(label)s, user_name = %(user)s"
    " WHERE ticket = %(ticket)s"
)
LEAVE: Final = "DELETE FROM sqlsem_waiter WHERE ticket = %(ticket)s"
#: Waiters whose process has died without a word.
SWEEP: Final = (
    "DELETE FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND (expires_us < {now} - %(patience_us)s * 4{boot})"
)

RELEASE: Final = (
    "UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL WHERE id IN (%s) AND permit_id = %%(permit_id)s"
)
DISCARD: Final = (
    "UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL"
    " WHERE semaphore_key = %(key)s AND permit_id = %(permit_id)s"
)
UNLOCKED: Final = (
    "SELECT id FROM sqlsem_slot WHERE id IN (%s) AND permit_id IN (%s) AND expires_us IS NOT NULL"
    " FOR UPDATE SKIP LOCKED"
)
FATE: Final = "SELECT id, permit_id, revoked_token, revoked_by FROM sqlsem_slot WHERE id IN (%s)"


def renew(dialect: Dialect, row_ids: str, permit_ids: str) -> str:
    """Extend the grants that these rows still carry. A row that someone has locked is passed over, not waited for."""
    conditions = f"id IN ({row_ids}) AND permit_id IN ({permit_ids}) AND expires_us IS NOT NULL"
    if dialect.skip_locked:
        conditions = f"id IN (SELECT s.id FROM sqlsem_slot s WHERE {conditions} {dialect.skip_locked})"
    text = f"UPDATE sqlsem_slot SET expires_us = {{now}} + lease_us WHERE {conditions}"
    return f"{text} RETURNING id" if dialect.returning else text
