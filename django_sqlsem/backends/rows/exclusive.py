"""Claims that want everybody else to leave: writers, upgrades, drained semaphores, mutexes; and the writer's place.

Whoever has all slots has their rows: the row locks keep others out, as they do for any claim. So that no slot may be
claimed that is made meanwhile, the name is then marked like one that shrinks: everybody claims under the lock of the
semaphore's row, where it is seen, and slots are born closed. Whoever finds there that it is over takes the mark away.

A semaphore that becomes a mutex shrinks to one slot in the same way: the others are closed, and nobody gets the one
before they are empty. A slot says by its mode that a mutex had it last: that one may be had again by a single
statement, and loses its mode, under its row's lock, as the name becomes a semaphore again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends.base import Grant, Request
from django_sqlsem.backends.rows.statements import COUNT_LIVE, KEPT, LOCK, OPERATOR, OVER, RUN_OUT, Statements, granting
from django_sqlsem.core.modes import EXCLUSIVE, MUTEX, UPDATE, UPGRADE, WHOLE

if TYPE_CHECKING:
    from django_sqlsem.backends.rows.statements import Row
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session


#: Stands for a grant where the name was deleted: a claim makes it anew.
GONE: Final = Grant((), (), ())
#: Which slots each mode is about.
_SLOTS: Final = {WHOLE: "slot >= 0", UPGRADE: "slot > 0", UPDATE: "slot = 0"}
#: How many slots a mode wants, how many of those are live, and whether anybody has them all.
_STATE: Final = {
    mode: f"SELECT COUNT(CASE WHEN {slots} THEN 1 END), COUNT(CASE WHEN {slots} AND {{live}} THEN 1 END),"
    " COUNT(CASE WHEN lock_mode = 'whole' AND NOT {free} THEN 1 END)"
    " FROM sqlsem_slot WHERE semaphore_key = %(key)s"
    for mode, slots in _SLOTS.items()
}
#: Those that are free; what locks them follows.
_FREE: Final = {
    mode: "SELECT s.id, s.slot, s.token FROM sqlsem_slot s{lock_hint} WHERE s.semaphore_key = %(key)s"
    f" AND s.{slots} AND {{s.free}} ORDER BY s.slot"
    for mode, slots in _SLOTS.items()
}
_TAKE: Final = {
    mode: f"UPDATE sqlsem_slot SET {granting('%(token)s', mode='%(got)s')} WHERE semaphore_key = %(key)s AND {slots}"
    for mode, slots in _SLOTS.items()
}
_MARK: Final = "UPDATE sqlsem_semaphore SET shrinking = %(yes)s WHERE name_key = %(key)s"
_UNMARK: Final = "UPDATE sqlsem_semaphore SET shrinking = %(no)s WHERE name_key = %(key)s"
#: The code's number of slots counts again. What else the row tells stays until housekeeping has noted the end.
_END: Final = (
    "UPDATE sqlsem_semaphore SET operator_slots = NULL WHERE name_key = %(key)s AND slots_until_us <= {token_now}"
)
#: Whom a claim would overtake. A shared claim that waits for a slot is not in the way of the writer's place.
_WAITING: Final = "SELECT COUNT(*) FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {w.waits}"
_OLDER: Final = f" AND w.queued_us < COALESCE({KEPT}, {{now}})"
_WAITED_FOR: Final = {
    (mode, ranked): _WAITING + yields + (_OLDER if ranked else "")
    for mode, yields in ((WHOLE, ""), (UPDATE, " AND w.lock_mode <> ''"))
    for ranked in (False, True)
}
# Of whoever took all slots: those that have run out, and what is left of that one.
_WHOLE_RUN_OUT: Final = f"{RUN_OUT} AND s.lock_mode = 'whole'"
_LAPSE: Final = (
    "UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL WHERE semaphore_key = %(key)s"
    " AND lock_mode = 'whole' AND expires_us IS NOT NULL"
)
#: Slots that were made while somebody had all of them, or an operator wanted more of them.
_OPEN: Final = (
    "UPDATE sqlsem_slot SET closed = %(no)s WHERE semaphore_key = %(key)s AND closed = %(yes)s AND slot > 0"
    f" AND slot <= COALESCE((SELECT {OPERATOR} FROM sqlsem_semaphore WHERE name_key = %(key)s), slot)"
)
# The slots that a mutex has no more, those of them that nobody has, and what may be left of whoever had them.
_MORE: Final = "SELECT COUNT(*) FROM sqlsem_slot WHERE semaphore_key = %(key)s AND slot > 1"
_MORE_FREE: Final = (
    "SELECT s.id FROM sqlsem_slot s{lock_hint} WHERE s.semaphore_key = %(key)s AND s.slot > 1 AND {s.free}"
)
_CLEAR: Final = (
    "UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL WHERE semaphore_key = %(key)s AND slot > 1"
    " AND expires_us IS NOT NULL"
)
# As a semaphore becomes a mutex, or a mutex a semaphore.
_CLOSE: Final = "UPDATE sqlsem_slot SET closed = %(yes)s WHERE semaphore_key = %(key)s AND closed = %(no)s AND slot > 1"
_AWAITED: Final = (
    "SELECT COUNT(*) FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND w.lock_mode = 'mutex' AND {w.waits}"
)
_MUTEX_FREE: Final = (
    "SELECT s.id FROM sqlsem_slot s{lock_hint} WHERE s.semaphore_key = %(key)s AND s.lock_mode = 'mutex' AND {s.free}"
)
_NO_MUTEX: Final = (
    "UPDATE sqlsem_slot SET lock_mode = '', expires_us = NULL, permit_id = NULL"
    " WHERE semaphore_key = %(key)s AND id = %(id)s"
)
_MUTEX: Final = "SELECT COUNT(*) FROM sqlsem_slot WHERE semaphore_key = %(key)s AND lock_mode = 'mutex'"
_BECOME: Final = "UPDATE sqlsem_semaphore SET kind = %(becomes)s, shrinking = %(yes)s WHERE name_key = %(key)s"


def take(statements: Statements, mode: str, who: dict[str, Any], now: int, lasts_us: int) -> Grant | None:
    """Take what a mode is about, if nobody is in the way; the caller has the semaphore's row locked.

    ``who``: what is written into the rows of who gets it. Few statements, whatever the number of slots, and one token
    for all of them.
    """
    wanted, live, whole = statements.row(_STATE[mode])
    if not wanted or live or whole:
        return None
    # What somebody has locked at this moment is not waited for: that one hands on after it.
    rows = statements.rows(_FREE[mode] + statements.skip_locked)
    if len(rows) < wanted:
        return None
    ids, slots, tokens = zip(*rows, strict=True)
    token = max(max(tokens) + 1, statements.dialect.token_clock(now))
    got = UPDATE if mode == UPDATE else WHOLE
    statements.change(_TAKE[mode], **who, token=token, lasts_us=lasts_us, got=got)
    if mode in EXCLUSIVE:
        statements.change(_MARK, yes=True)
    return Grant(slots, (token,) * len(slots), ids)


def claim(session: Session, request: Request, parameters: dict[str, Any]) -> Grant | None:
    """Take all slots, or the writer's place, unless somebody is in the way or waits. ``GONE``: there is no name."""

    def work(cursor: AnyCursor) -> Grant | None:
        statements = Statements(cursor, parameters)
        found = statements.row(LOCK)
        if found is None:
            return GONE
        if found[2]:  # paused
            return None
        if request.mode != UPGRADE and statements.row(_WAITED_FOR[request.mode, bool(request.rank)])[0]:
            return None
        return take(statements, request.mode, {}, int(found[4]), parameters["lease_us"])

    return session.transaction(work, again=False)


def adopt(statements: Statements, kind: str) -> bool:
    """Make a mutex of a semaphore, or the other way round; the row is locked. It is to be settled then.

    Returns ``False`` if it stays a mutex, as somebody holds it or waits for it as such.
    """
    if kind == MUTEX:
        statements.change(_CLOSE, yes=True)
    else:
        if statements.row(_AWAITED)[0]:
            return False
        for (row_id,) in statements.rows(_MUTEX_FREE + statements.skip_locked):
            statements.change(_NO_MUTEX, id=row_id)
        if statements.row(_MUTEX)[0]:
            return False
    statements.change(_BECOME, becomes=kind, yes=True)
    return True


def settle(statements: Statements, found: Row) -> tuple[bool, bool]:
    """Take the mark of a shrinking name away if it is over, and open what was closed for it; the row is locked.

    ``found``: what ``LOCK`` has told. An operator's number whose time is over ends with that.
    Returns whether slots above the operator's number are live still, and whether nothing may be granted: somebody has
    all slots, or more than the one of a mutex.
    """
    operator_slots, _declared, _paused, shrinking, _now, kind = found
    _live, above, had = statements.row(COUNT_LIVE, bound=operator_slots)
    whole = had and not _lapsed(statements, had)
    if kind == MUTEX:
        above, whole = 0, whole or not _cleared(statements)
    if not above and not whole:
        if shrinking == OVER:
            statements.change(_END)
        statements.change(_OPEN, yes=True)
        statements.change(_UNMARK)
    return bool(above), bool(whole)


def _lapsed(statements: Statements, had: int) -> bool:
    """Whether all of somebody's slots have run out, for good: else it might prove them again, one by one."""
    # As in ``take``: what is fenced or just being changed is not free.
    if len(statements.rows(_WHOLE_RUN_OUT + statements.skip_locked)) < had:
        return False
    statements.change(_LAPSE)
    return True


def _cleared(statements: Statements) -> bool:
    """Whether nobody has any slot but the first, for good; see ``_lapsed``."""
    if len(statements.rows(_MORE_FREE + statements.skip_locked)) < statements.row(_MORE)[0]:
        return False
    statements.change(_CLEAR)
    return True
