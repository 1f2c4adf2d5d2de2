"""Claims that want everybody else to leave, and the writer's place: writers, upgrades, and semaphores that are drained.

Whoever has all slots has their rows: the row locks keep others out, as they do for any claim. So that no slot may be
claimed that is made meanwhile, the name is then marked like one that shrinks: everybody claims under the lock of the
semaphore's row, where it is seen, and slots are born closed. Whoever finds there that it is over takes the mark away.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends.base import Grant, Request
from django_sqlsem.backends.rows import statements
from django_sqlsem.core.modes import EXCLUSIVE, UPDATE, UPGRADE, WHOLE
from django_sqlsem.database.dialects import Dialect

if TYPE_CHECKING:
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session


_WHO: Final = ("host", "pid", "thread", "label", "user_name", "process_id", "boot_id", "channel", "beacon")
#: What is written into each row.
_GIVEN: Final = (
    "token = %(token)s, permit_id = %(ticket)s, acquired_us = {now}, expires_us = {now} + %(lasts_us)s,"
    " lease_us = %(lease_us)s, suspect_us = NULL, lock_mode = %(got)s, "
    + ", ".join(f"{column} = %({column})s" for column in _WHO)
)
_MARK: Final = "UPDATE sqlsem_semaphore SET shrinking = %(yes)s WHERE name_key = %(key)s"
#: Which slots each mode is about.
_SLOTS: Final = {WHOLE: "slot >= 0", UPGRADE: "slot > 0", UPDATE: "slot = 0"}
#: Whom each mode yields to, if they wait. A shared claim that waits for a slot is not in the way of the writer's place.
_YIELDS: Final = {WHOLE: "", UPDATE: " AND w.lock_mode <> ''"}


@functools.cache
def _state(dialect: Dialect, mode: str) -> str:
    """How many slots it wants, how many of those are live, and whether anybody has them all."""
    live = dialect.live_sql()
    return (
        f"SELECT COUNT(CASE WHEN {_SLOTS[mode]} THEN 1 END), COUNT(CASE WHEN {_SLOTS[mode]} AND {live} THEN 1 END),"
        f" COUNT(CASE WHEN lock_mode = 'whole' AND NOT {dialect.free_sql()} THEN 1 END) FROM sqlsem_slot"
        " WHERE semaphore_key = %(key)s"
    )


@functools.cache
def _free(dialect: Dialect, mode: str, skipping: bool) -> str:
    return (
        f"SELECT s.id, s.slot, s.token FROM sqlsem_slot s{dialect.lock_hint} WHERE s.semaphore_key = %(key)s"
        f" AND s.{_SLOTS[mode]} AND {dialect.free_sql('s.')} ORDER BY s.slot"
        f"{dialect.lock_skipping if skipping else dialect.for_update}"
    )


@functools.cache
def _take(mode: str) -> str:
    return f"UPDATE sqlsem_slot SET {_GIVEN} WHERE semaphore_key = %(key)s AND {_SLOTS[mode]}"


@functools.cache
def _waited_for(dialect: Dialect, mode: str, ranked: bool) -> str:
    older = f" AND w.queued_us < COALESCE({statements.KEPT}, {{now}})" if ranked else ""
    return (
        f"SELECT COUNT(*) FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {dialect.waits_sql('w.')}"
        f"{_YIELDS[mode]}{older}"
    )


def take(
    dialect: Dialect, cursor: AnyCursor, key: str, mode: str, who: dict[str, Any], now: int, lasts_us: int
) -> Grant | None:
    """Take what a mode is about, if nobody is in the way; the caller has the semaphore's row locked.

    ``who``: the columns of a waiter's row, and its ``ticket`` and ``lease_us``. Few statements, whatever the number of
    slots, and one token for all of them.
    """
    named = {"key": key}
    dialect.execute(cursor, _state(dialect, mode), named)
    wanted, live, whole = cursor.fetchone()
    if not wanted or live or whole:
        return None
    # What somebody has locked at this moment is not waited for: whoever it is hands on after it.
    skipping = bool(dialect.lock_skipping) and cursor.db.features.has_select_for_update_skip_locked
    dialect.execute(cursor, _free(dialect, mode, skipping), named)
    rows = cursor.fetchall()
    if len(rows) < wanted:
        return None
    ids, slots, tokens = zip(*rows, strict=True)
    token = max(max(tokens) + 1, dialect.token_clock(now))
    got = UPDATE if mode == UPDATE else WHOLE
    dialect.execute(cursor, _take(mode), who | named | {"token": token, "lasts_us": lasts_us, "got": got})
    if mode in EXCLUSIVE:
        dialect.execute(cursor, _MARK, named | {"yes": True})
    return Grant(slots, (token,) * len(slots), ids)


def claim(session: Session, dialect: Dialect, request: Request, parameters: dict[str, Any]) -> Grant | None:
    """Take all slots, or the writer's place, unless somebody is in the way or waits."""

    def work(cursor: AnyCursor) -> Grant | None:
        dialect.execute(cursor, statements.lock(dialect), parameters)
        found = cursor.fetchone()
        if found is None or found[2]:  # paused
            return None
        if request.mode != UPGRADE:
            dialect.execute(cursor, _waited_for(dialect, request.mode, bool(request.rank)), parameters)
            if cursor.fetchone()[0]:
                return None
        who = parameters | {"ticket": request.permit_id, "user_name": request.holder.user, "boot_id": dialect.boot_id}
        lease_us = parameters["lease_us"]
        return take(dialect, cursor, request.resource.key, request.mode, who, int(found[4]), lease_us)

    return session.transaction(work, again=False)


def settle(
    dialect: Dialect, cursor: AnyCursor, parameters: dict[str, Any], operator_slots: int | None
) -> tuple[bool, bool]:
    """Take the mark of a shrinking name away if it is over, and open what was closed for it; the row is locked.

    Returns whether slots above the operator's number are live still, and whether somebody has all slots.
    """
    dialect.execute(cursor, statements.lapse(dialect), parameters)
    dialect.execute(cursor, statements.count(dialect), parameters | {"bound": operator_slots})
    _live, above, whole = cursor.fetchone()
    if not above and not whole:
        dialect.execute(cursor, statements.OPEN, parameters | {"yes": True})
        dialect.execute(cursor, statements.SHRUNK, parameters)
    return bool(above), bool(whole)
