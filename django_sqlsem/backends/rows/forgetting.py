"""Deleting names that nobody uses: one that an operator purges, and those that housekeeping forgets.

Whoever deletes has the semaphore's row locked, so that no slot is made meanwhile, and all slots, so that none is taken.
A claim that comes at that moment waits for the semaphore's row, and makes the name anew. Who has just taken a place in
line finds no slots there any more, and comes anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db.models import Q

from django_sqlsem.backends.base import TOKENS, Forgotten
from django_sqlsem.backends.idle import IN_LINE, LONGEST, Idle, Look
from django_sqlsem.backends.rows.fences import unfenced
from django_sqlsem.backends.rows.operator import AT_ONCE, act
from django_sqlsem.core.names import key_of
from django_sqlsem.database.errors import repeated
from django_sqlsem.database.sessions import briefly, used_by_orm
from django_sqlsem.models import FenceRow, SemaphoreRow, SlotRow, WaiterRow

if TYPE_CHECKING:
    from collections.abc import Collection

    from django.db.models import QuerySet

    from django_sqlsem.backends.clock import RowClock
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session


@repeated
def purge_idle(alias: str, name: str) -> bool:
    """Delete a name that nobody holds or waits for, unless an operator has set its slots or paused it."""
    key = key_of(name)
    with act(alias, key) as clock:
        rows = SemaphoreRow.objects.using(alias).filter(key=key, operator_slots=None).exclude(clock.paused())
        row = rows.first()
        if row is None:
            return False
        if row.kind == TOKENS:
            away = WaiterRow.objects.using(alias).filter(semaphore=key, away=True)
            # What has been handed out and not taken counts; and a new name would begin with new tokens.
            if row.tokens or row.declared_slots or away.exists():
                return False
        unused = _unused(alias, [key], Q(expires_us=None) | clock.expired(), clock)
        _delete(alias, unused)
        return bool(unused)


def forget(session: Session, seconds: float, after: str) -> Forgotten:
    """Delete a few names that nobody has used for so long, of those whose keys follow ``after``.

    Raises ``BackendError`` and ``RefusedError``.
    """

    def look(cursor: AnyCursor) -> tuple[Idle, Look]:
        with used_by_orm(cursor.db):
            idle = Idle(cursor.db.alias, seconds)
            return idle, idle.look(after)

    def delete(cursor: AnyCursor) -> int:
        # They may have been used since; and what somebody else has locked is used.
        named = idle.names().filter(pk__in=list(found.names)).order_by("pk").values_list("pk", flat=True)
        keys = list(named.select_for_update(skip_locked=cursor.db.features.has_select_for_update_skip_locked))
        unused = _unused(idle.alias, keys, idle.free(), idle.clock)
        if not idle.drop(unused):
            return 0  # the rest of its history comes first, next time
        _delete(idle.alias, unused)
        return len(unused)

    idle, found = session.run(look)
    count = briefly(session, delete, LONGEST, IN_LINE) if found.names else 0
    return Forgotten(count, found.after, found.more)


def _unused(alias: str, keys: Collection[str], free: Q, clock: RowClock) -> dict[str, list[int]]:
    """Return those of these names, whose rows are locked, that nobody holds or waits for, each with its slots' rows.

    Their slots are locked from then on. ``free``: the condition that a slot is.
    """
    slots = SlotRow.objects.using(alias).filter(semaphore__in=keys)
    locked = set(unfenced(slots.filter(free), alias))
    waiters = WaiterRow.objects.using(alias).filter(clock.live(), semaphore__in=keys)
    found: dict[str, list[int]] = {key: [] for key in keys}
    used = set(waiters.values_list("semaphore_id", flat=True))
    for row, key in slots.values_list("pk", "semaphore_id"):
        found[key].append(row)
        if row not in locked:
            used.add(key)
    return {key: rows for key, rows in found.items() if key not in used}


def _delete(alias: str, names: dict[str, list[int]]) -> None:
    """Delete names by their keys, with their slots' rows."""
    rows = [row for slots in names.values() for row in slots]
    for start in range(0, len(rows), AT_ONCE):
        some = rows[start : start + AT_ONCE]
        _raw_delete(SlotRow.objects.using(alias).filter(pk__in=some))
        _raw_delete(FenceRow.objects.using(alias).filter(pk__in=some))
    _raw_delete(WaiterRow.objects.using(alias).filter(semaphore__in=list(names)))
    _raw_delete(SemaphoreRow.objects.using(alias).filter(pk__in=list(names)))


def _raw_delete(rows: QuerySet[Any]) -> None:
    # Without Django's collector: it would read first, and cascade over rows that this act must not touch.
    rows._raw_delete(rows.db)
