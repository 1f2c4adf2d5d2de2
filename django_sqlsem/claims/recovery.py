"""Rows whose worker is gone: the next worker finds them, and gives them back."""

from __future__ import annotations

import logging
from typing import Any, Final

from django.core.exceptions import ValidationError

from django_sqlsem.claims.rows import Outcome, StatusColumn, let_go, owned
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.names import Resource
from django_sqlsem.exceptions import BackendError
from django_sqlsem.models import ClaimRow
from django_sqlsem.runtime.keeper import Keeper

logger = logging.getLogger("django_sqlsem")

#: How often a process that claims looks for rows whose worker is gone, in seconds: at first, and at the least.
_LOOK_EVERY: Final = 1.0
SELDOM: Final = 5.0
#: Of this many workers each looks a little less often, since they see for one another.
_MANY: Final = 4
#: For how long it waits for the keeper to look, in seconds: it opens a connection first.
_PATIENCE: Final = 30.0
_looked: dict[tuple[str, str], float] = {}


def is_due(keeper: Keeper, key: str) -> bool:
    """Whether it is time to look again; counts as having looked."""
    now, place = boot_now(), (keeper.alias, key)
    # What is kept inside the process is looked at in no time.
    if not keeper.backend.process_local and now < _looked.get(place, 0.0):
        return False
    if len(_looked) > 10_000:
        _looked.clear()
    _looked[place] = now + _LOOK_EVERY
    return True


def give_back_abandoned(keeper: Keeper, column: StatusColumn) -> list[Any]:
    """Give back the rows of a column whose worker is gone. Returns their primary keys. Raises ``BackendError``."""
    alias, resource = keeper.alias, column.resource
    # Read before the permits: a row is only ever owned by a permit that was granted before.
    rows = owned(alias, resource.key)
    if not rows:
        return []
    workers = len({row.slot for row in rows})
    _looked[alias, resource.key] = boot_now() + min(SELDOM, _LOOK_EVERY * max(1.0, workers / _MANY))

    held = _standing(keeper, resource)
    gone = {row.object_pk: row for row in rows if (row.slot, row.token) not in held and _is_readable(column, row)}
    outcomes = let_go(column, alias, [(row, column.value_from(row.from_status)) for row in gone.values()])
    back = []
    for object_pk, outcome in outcomes.items():
        row = gone[object_pk]
        who = f"{row.host} pid {row.pid} {row.label}".strip()
        if outcome is Outcome.WRITTEN:
            back.append(column.pk_from(object_pk))
            extra = _fields(resource.name, "claim_returned", row)
            logger.warning("%s was given back: its worker (%s) is gone.", row, who, extra=extra)
        elif outcome is Outcome.CHANGED:
            message = "%s was left alone: its worker (%s) is gone, but its status was changed since."
            logger.warning(message, row, who, extra=_fields(resource.name, "claim_left", row))
    return back


def _standing(keeper: Keeper, resource: Resource) -> set[tuple[int, int]]:
    """Return which permits of the name still stand, on the keeper's thread, once those of the dead are freed."""
    backend, own = keeper.backend, keeper.own
    if backend.process_local:
        return backend.standing(own, resource)

    def look() -> set[tuple[int, int]]:
        if not backend.released_on_disconnect:
            own.run(lambda cursor: None)  # with the connection, the beacon is lit
        backend.free_dead(own, resource, witness=keeper.reach.presence.beacon)
        return backend.standing(own, resource)

    try:
        return keeper.submit(look).result(_PATIENCE)
    except TimeoutError as error:
        raise BackendError(f"The database {keeper.alias!r} did not answer within {_PATIENCE:g} s.") from error


def _is_readable(column: StatusColumn, row: ClaimRow) -> bool:
    try:
        column.pk_from(row.object_pk), column.value_from(row.from_status), column.value_from(row.status)
    except (ValidationError, ValueError) as error:
        extra = _fields(column.resource.name, "claim_left", row)
        logger.error("%s can't be given back, as its model has changed: %s", row, error, extra=extra)
        return False
    return True


def _fields(name: str, what: str, row: ClaimRow) -> dict[str, Any]:
    return {"semaphore": name, "what": what, "object": row.object_pk, "holder_host": row.host, "holder_pid": row.pid}
