"""Passing one slot from its holder to the oldest waiter in few steps, where one statement cannot do it all.

Without the lock of the semaphore's row: the waiter's row is deleted on condition that it is there, and the slot
changed on condition that it is still the holder's, in one transaction. Who loses a race for a waiter tries the next.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends import rows_sql as sql
from django_sqlsem.backends.base import Granted
from django_sqlsem.backends.dialects import Dialect
from django_sqlsem.backends.rows_beacons import is_dead
from django_sqlsem.backends.rows_serve import GIVEN, HEAD, HERE, LEFT, channel_of, granted_to

if TYPE_CHECKING:
    from django_sqlsem.cursors import AnyCursor
    from django_sqlsem.sessions import Session

#: How often a waiter is looked for that another releaser has not taken meanwhile.
TRIES: Final = 8


@functools.cache
def _look(dialect: Dialect) -> str:
    """The semaphore and its oldest waiter, without a lock."""
    waiter = ", ".join(f"w.{column}" for column in HEAD)
    return (
        f"SELECT m.operator_slots, m.declared_slots, m.paused, m.shrinking, {{now}}, {waiter}"
        " FROM sqlsem_semaphore m LEFT JOIN sqlsem_waiter w ON w.semaphore_key = m.name_key"
        f" AND {dialect.waits_sql('w.')}{dialect.alive('w.')} WHERE m.name_key = %(key)s ORDER BY w.queued_us, w.id"
    )


#: First how long it was held: MySQL would reckon with the values that come after it.
_PASS: Final = (
    f"UPDATE sqlsem_slot SET {sql.HELD}, {GIVEN} WHERE id = %(row0)s AND permit_id = %(permit_id)s AND closed = %(no)s"
)


def free(session: Session, dialect: Dialect, parameters: dict[str, Any], rows: int, *, unwanted: bool = False) -> bool:
    """Free the rows of a permit; ``unwanted``: only if nobody waits. Return whether any was still the permit's."""

    def run(cursor: AnyCursor) -> bool:
        dialect.execute(cursor, sql.release(dialect, rows, unwanted), parameters)
        return cursor.rowcount > 0

    return session.run(run)


def pass_on(session: Session, dialect: Dialect, parameters: dict[str, Any]) -> tuple[str, Granted] | bool | None:
    """Pass the slot on, and return the waiter's channel and grant.

    ``True``: nobody waits, and it was freed; ``False``: it was no longer the permit's; ``None``: this is not for here.
    """

    def look(cursor: AnyCursor) -> tuple[Any, bool]:
        dialect.execute(cursor, _look(dialect), parameters)
        row = cursor.fetchone()
        head = dict(zip(HEAD, row[5:], strict=True)) if row is not None and row[5] is not None else {}
        return row, bool(head) and bool(head["beacon"]) and is_dead(cursor, head["process_id"])

    for _ in range(TRIES):
        row, dead = session.run(look)
        if row is None or row[5] is None:
            return free(session, dialect, parameters, 1)
        operator_slots, declared_slots, paused, shrinking, now, *columns = row
        head = dict(zip(HEAD, columns, strict=True))
        bound = sql.bound(operator_slots, head["slots"], declared_slots)
        if dead or paused or shrinking or head["take"] != 1 or parameters["slot0"] > bound:
            return None
        slot = (parameters["row0"], parameters["slot0"], parameters["token0"])
        channel = channel_of(head, parameters)
        granted, [values] = granted_to(dialect, head, [slot], int(now), here=channel == HERE)
        attempt = _Attempt(dialect, parameters | values)
        if session.transaction(attempt, again=False):
            return channel, granted
        if not attempt.raced:
            return None
    return None


class _Attempt:
    """Takes the waiter's row, then changes the slot: both, or neither."""

    def __init__(self, dialect: Dialect, values: dict[str, Any]) -> None:
        self.dialect = dialect
        self.values = values
        #: Whether the waiter was another's by then.
        self.raced = False

    def __call__(self, cursor: AnyCursor) -> bool | None:
        self.dialect.execute(cursor, LEFT, self.values)
        self.raced = cursor.rowcount <= 0
        if self.raced:
            return None
        self.dialect.execute(cursor, _PASS, self.values)
        return True if cursor.rowcount > 0 else None
