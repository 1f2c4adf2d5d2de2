"""Handing slots to waiters step by step, under the lock of the semaphore's row: for any database, and any number."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends import rows_sql as sql
from django_sqlsem.backends import rows_whole
from django_sqlsem.backends.base import Grant, Granted
from django_sqlsem.backends.dialects import Dialect
from django_sqlsem.backends.rows_beacons import is_dead
from django_sqlsem.modes import UPDATE

if TYPE_CHECKING:
    from django_sqlsem.cursors import AnyCursor

#: A slot that was handed to another process lapses after this long unless it is confirmed, in microseconds.
LAPSE_US: Final = 2_000_000
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
    dialect.execute(cursor, sql.lock(dialect), parameters)
    found = cursor.fetchone()
    if own:
        # After the lock, so that of two who free slots at once the later one sees the earlier one's.
        text = sql.release(dialect, 1, False) if "row0" in parameters else sql.DISCARD
        dialect.execute(cursor, text, parameters)
        if cursor.rowcount <= 0:
            return None
    served: list[tuple[str, Granted]] = []
    if found is None:
        return served
    operator_slots, declared_slots, paused, shrinking, now = found
    if shrinking:
        shrinking, whole = rows_whole.settle(dialect, cursor, parameters, operator_slots)
        paused = paused or whole
    passed: set[int] = set()
    while not paused:
        dialect.execute(cursor, heads(dialect), parameters)
        waiting = [dict(zip(HEAD, row, strict=True)) for row in cursor.fetchall()]
        # Who wants more than there is since an operator's act must not keep those behind it from what they can have.
        possible = (
            each
            for each in waiting
            if each["id"] not in passed and each["take"] <= sql.bound(operator_slots, each["slots"], declared_slots)
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
        bound = sql.bound(operator_slots, head["slots"], declared_slots)
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
    grant = rows_whole.take(dialect, cursor, parameters["key"], head["lock_mode"], head, now, lasts_us)
    if grant is None:
        return None
    dialect.execute(cursor, LEFT, {"waiter": head["id"]})
    if cursor.rowcount <= 0:  # it has given up meanwhile
        dialect.execute(cursor, sql.DISCARD, parameters | {"permit_id": head["ticket"]})
        return None
    granted = Granted(head["ticket"], grant, lasts_us / 1e6)
    _notify(dialect, cursor, channel, granted)
    return channel, granted


def _notify(dialect: Dialect, cursor: AnyCursor, channel: str, granted: Granted) -> None:
    if dialect.notifies and channel and channel != HERE:
        cursor.execute("SELECT pg_notify(%s, %s)", (channel, granted.note()))


def _fits(dialect: Dialect, cursor: AnyCursor, parameters: dict[str, Any], bound: int, take: int) -> bool:
    dialect.execute(cursor, sql.count(dialect), parameters | {"bound": bound})
    return bool(cursor.fetchone()[0] + take <= bound)
