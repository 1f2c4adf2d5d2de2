"""Rows whose worker is gone: found by whoever comes next, and given back.

Which permits of a name still stand, so that what belonged to the others can be given to somebody else.

A pair of slot and token that was not found standing here will never stand again.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.core.exceptions import ValidationError

from django_sqlsem.backends.base import BaseSemaphoreBackend
from django_sqlsem.backends.rows.backend import RowsBackend
from django_sqlsem.backends.rows.beacons import take_from_the_dead
from django_sqlsem.claims.rows import Ending, Outcome, Owner, let_go, owned
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.identity import process_id
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.exceptions import BackendError
from django_sqlsem.snapshots import SlotState

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_sqlsem.claims.rows import StatusColumn
    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session
    from django_sqlsem.models import ClaimRow
    from django_sqlsem.runtime.keeper import Keeper


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


logger = logging.getLogger("django_sqlsem")

T = TypeVar("T")

#: How often a process that claims looks for rows whose worker is gone, in seconds: at first, and at the least.
LOOK_EVERY: Final = 1.0
SELDOM: Final = 5.0
#: Of so many workers each looks a little less often, since they see for one another.
MANY: Final = 4
#: For how long it waits for the keeper to look, in seconds: it opens a connection first.
PATIENCE: Final = 30.0
_looked: dict[tuple[str, str], float] = {}


def is_due(keeper: Keeper, key: str) -> bool:
    """Whether it is time to look again; counts as having looked."""
    now, place = boot_now(), (keeper.alias, key)
    # What is kept inside the process is looked at in no time.
    if not keeper.backend.process_local and now < _looked.get(place, 0.0):
        return False
    if len(_looked) > 10_000:
        _looked.clear()
    _looked[place] = now + LOOK_EVERY
    return True


def give_back_abandoned(keeper: Keeper, column: StatusColumn) -> list[Any]:
    """Give back the rows of a column whose worker is gone. Returns their primary keys. Raises ``BackendError``."""
    alias, resource = keeper.alias, column.resource
    # Read before the permits: a row is only ever owned by a permit that was granted before.
    rows = owned(alias, resource.key)
    if not rows:
        return []
    workers = len({row.slot for row in rows})
    _looked[alias, resource.key] = boot_now() + min(SELDOM, LOOK_EVERY * max(1.0, workers / MANY))

    def look() -> set[tuple[int, int]]:
        if not keeper.backend.released_on_disconnect:
            keeper.own.run(lambda cursor: None)  # with the connection, the beacon is lit
        bury(keeper.backend, keeper.own, resource, witness=keeper.reach.presence.beacon)
        return standing(keeper.backend, keeper.own, resource)

    held = standing(keeper.backend, keeper.own, resource) if keeper.backend.process_local else _ask(keeper, look)
    found = [(row, _ending(column, row)) for row in rows if (row.slot, row.token) not in held]
    gone = [(row, ending) for row, ending in found if ending is not None]
    outcomes = let_go(column, alias, [ending for _row, ending in gone])
    back = []
    for row, ending in gone:
        outcome = outcomes[ending.object_pk]
        who = f"{row.host} pid {row.pid} {row.label}".strip()
        if outcome is Outcome.WRITTEN:
            back.append(ending.pk)
            extra = _fields(resource.name, "claim_returned", row)
            logger.warning("%s was given back: its worker (%s) is gone.", row, who, extra=extra)
        elif outcome is Outcome.CHANGED:
            message = "%s was left alone: its worker (%s) is gone, but its status was changed since."
            logger.warning(message, row, who, extra=_fields(resource.name, "claim_left", row))
    return back


def _ending(column: StatusColumn, row: ClaimRow) -> Ending | None:
    try:
        pk, before = column.pk_from(row.object_pk), column.value_from(row.from_status)
        meanwhile = column.value_from(row.status)
    except (ValidationError, ValueError) as error:
        extra = _fields(column.resource.name, "claim_left", row)
        logger.error("%s can't be given back, as its model has changed: %s", row, error, extra=extra)
        return None
    return Ending(Owner(row.key, row.slot, row.token), row.object_pk, pk, meanwhile, before)


def _fields(name: str, what: str, row: ClaimRow) -> dict[str, Any]:
    return {"semaphore": name, "what": what, "object": row.object_pk, "holder_host": row.host, "holder_pid": row.pid}


def _ask(keeper: Keeper, work: Callable[[], T]) -> T:
    """Run ``work`` on the keeper's thread, and wait for its result."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def step() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller
            future.set_exception(error)

    keeper.post(step)
    try:
        return future.result(PATIENCE)
    except TimeoutError as error:
        raise BackendError(f"The database {keeper.alias!r} did not answer within {PATIENCE:g} s.") from error
