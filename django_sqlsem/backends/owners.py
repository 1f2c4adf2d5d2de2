"""Which permits of a name still stand, so that what belonged to the others can be given to somebody else.

A pair of slot and token that was not found standing here will never stand again.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from django_sqlsem.backends.base import BaseSemaphoreBackend
from django_sqlsem.backends.dialects import dialect_for
from django_sqlsem.backends.rows import RowsBackend
from django_sqlsem.backends.rows_beacons import take_from_the_dead
from django_sqlsem.identity import process_id
from django_sqlsem.snapshots import SlotState

if TYPE_CHECKING:
    from django_sqlsem.cursors import AnyCursor
    from django_sqlsem.naming import Resource
    from django_sqlsem.sessions import Session

_STANDING: Final = "SELECT slot, token FROM sqlsem_slot WHERE semaphore_key = %(key)s AND expires_us IS NOT NULL"
# Else its holder, asleep until now, could still renew it.
_BURY: Final = (
    "UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL, suspect_us = NULL"
    " WHERE semaphore_key = %(key)s AND expires_us IS NOT NULL AND "
)


@functools.singledispatch
def bury(backend: BaseSemaphoreBackend, session: Session, resource: Resource, *, witness: bool) -> None:
    """Free for good the slots whose holders are dead or whose leases have run out.

    ``witness``: whether this process's own beacon is lit. Where locks end with their session there is nothing to do.
    """


@bury.register(RowsBackend)
def _(backend: RowsBackend, session: Session, resource: Resource, *, witness: bool) -> None:
    dialect = dialect_for(session.connection)
    parameters = {"key": resource.key, "process_id": process_id()}
    if witness:
        take_from_the_dead(session, dialect, parameters)

    def free(cursor: AnyCursor) -> int:
        dialect.execute(cursor, _BURY + dialect.free_sql(), parameters)
        return cursor.rowcount

    if session.run(free) > 0:
        backend.hand_out(session, resource)


@functools.singledispatch
def standing(backend: BaseSemaphoreBackend, session: Session, resource: Resource) -> set[tuple[int, int]]:
    """Return the pairs of slot and token that are held now. Those of dead holders may be among them for a while."""
    found = backend.snapshot(session, resource)
    holders = found.holders if found is not None else ()
    return {(holder.slot, holder.token) for holder in holders if holder.state is not SlotState.STALE}


@standing.register(RowsBackend)
def _(backend: RowsBackend, session: Session, resource: Resource) -> set[tuple[int, int]]:
    dialect = dialect_for(session.connection)

    def read(cursor: AnyCursor) -> set[tuple[int, int]]:
        dialect.execute(cursor, _STANDING, {"key": resource.key})
        return {(slot, token) for slot, token in cursor.fetchall()}

    return session.run(read)
