"""Claims that want everybody else to leave, and the writer's place: writers, upgrades, and semaphores that are drained.

Whoever has all slots has their rows: the row locks keep others out, as they do for any claim. So that no slot may be
claimed that is made meanwhile, the name is then marked like one that shrinks: everybody claims under the lock of the
semaphore's row, where it is seen, and slots are born closed. Whoever finds there that it is over takes the mark away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends.base import Grant, Request
from django_sqlsem.backends.rows.statements import COUNT_LIVE, KEPT, LOCK, Statements, granting
from django_sqlsem.core.modes import EXCLUSIVE, UPDATE, UPGRADE, WHOLE

if TYPE_CHECKING:
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
#: Whom a claim would overtake. A shared claim that waits for a slot is not in the way of the writer's place.
_WAITING: Final = "SELECT COUNT(*) FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {w.waits}"
_OLDER: Final = f" AND w.queued_us < COALESCE({KEPT}, {{now}})"
_WAITED_FOR: Final = {
    (mode, ranked): _WAITING + yields + (_OLDER if ranked else "")
    for mode, yields in ((WHOLE, ""), (UPDATE, " AND w.lock_mode <> ''"))
    for ranked in (False, True)
}
#: Takes all slots from whoever had them, if that is over: else it might prove them again, one by one.
_LAPSE: Final = (
    "UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL WHERE semaphore_key = %(key)s"
    " AND lock_mode = 'whole' AND expires_us IS NOT NULL AND {free}"
)
#: Slots that were made while somebody had all of them, or an operator wanted more of them.
_OPEN: Final = (
    "UPDATE sqlsem_slot SET closed = %(no)s WHERE semaphore_key = %(key)s AND closed = %(yes)s AND slot > 0"
    " AND slot <= COALESCE((SELECT operator_slots FROM sqlsem_semaphore WHERE name_key = %(key)s), slot)"
)


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


def settle(statements: Statements, operator_slots: int | None) -> tuple[bool, bool]:
    """Take the mark of a shrinking name away if it is over, and open what was closed for it; the row is locked.

    Returns whether slots above the operator's number are live still, and whether somebody has all slots.
    """
    statements.change(_LAPSE)
    _live, above, whole = statements.row(COUNT_LIVE, bound=operator_slots)
    if not above and not whole:
        statements.change(_OPEN, yes=True)
        statements.change(_UNMARK)
    return bool(above), bool(whole)
