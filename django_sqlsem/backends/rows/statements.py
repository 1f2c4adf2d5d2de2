"""How statements are run, and what several of them share: lists of columns, the semaphore's lock, parameters.

The lists follow the models' fields. Words in braces are the dialect's: see ``Dialect``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.models import HOLDER_COLUMNS, SlotRow, WaiterRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_sqlsem.backends.base import Place, Request
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session


Row: TypeAlias = tuple[Any, ...]

#: A waiter that has not been heard of for so long is dead, in microseconds: three heartbeats.
PATIENCE_US: Final = 2_100_000


class Statements:
    """Runs texts on one cursor with the parameters that they share."""

    __slots__ = ("cursor", "dialect", "parameters")

    def __init__(self, cursor: AnyCursor, parameters: dict[str, Any]) -> None:
        self.cursor = cursor
        self.dialect = dialect_for(cursor.db)
        self.parameters = parameters

    def change(self, text: str, **more: Any) -> int:
        """Run a statement, and return how many rows it changed."""
        self.dialect.execute(self.cursor, text, self.parameters | more)
        return int(self.cursor.rowcount)

    def row(self, text: str, **more: Any) -> Any:
        """Run a query, and return its first row, or ``None``."""
        self.dialect.execute(self.cursor, text, self.parameters | more)
        return self.cursor.fetchone()

    def rows(self, text: str, **more: Any) -> list[Any]:
        """Run a query, and return its rows."""
        self.dialect.execute(self.cursor, text, self.parameters | more)
        return list(self.cursor.fetchall())

    def insert(self, values: str, **more: Any) -> bool:
        """Insert a row unless it is there already. Return whether it was not."""
        return self.dialect.insert_missing(self.cursor, values, self.parameters | more)

    @property
    def skip_locked(self) -> str:
        """What has a locking query pass over rows that are locked; MariaDB before 10.6 waits for them."""
        skips = self.dialect.lock_skipping and self.cursor.db.features.has_select_for_update_skip_locked
        return self.dialect.lock_skipping if skips else self.dialect.for_update


def change(session: Session, text: str, parameters: dict[str, Any], *, again: bool = True) -> int:
    """Run a statement by itself, and return how many rows it changed. Raises ``BackendError``."""

    def work(cursor: AnyCursor) -> int:
        session.dialect.execute(cursor, text, parameters)
        return int(cursor.rowcount)

    return session.run(work, again=again)


def row_of(session: Session, text: str, parameters: dict[str, Any], *, again: bool = True) -> Any:
    """Run a query by itself, and return its first row, or ``None``. Raises ``BackendError``."""

    def work(cursor: AnyCursor) -> Any:
        session.dialect.execute(cursor, text, parameters)
        return cursor.fetchone()

    return session.run(work, again=again)


def request_parameters(request: Request, place: Place | None = None) -> dict[str, Any]:
    """Return what a request is in statements; ``place``: with a place in the queue."""
    holder, presence = request.holder, request.presence
    parameters = {
        "key": request.resource.key,
        "kind": request.resource.kind,
        "template": request.template,
        "permit_id": request.permit_id,
        "slots": request.slots,
        "take": request.take,
        "lease_us": round(request.lease * 1e6),
        "host": holder.host,
        "pid": holder.pid,
        "thread": holder.thread,
        "label": holder.label,
        "user_name": holder.user,
        "process_id": holder.process,
        "channel": presence.channel,
        "near": presence.near,
        "beacon": presence.beacon,
        "witness": presence.beacon,
        "rank": request.rank,
        "lock_mode": request.lock_mode,
    }
    if place is not None:
        parameters |= {
            "arrived_us": round(place.arrived * 1e6),
            "waiting": place.waiting,
            "patience_us": PATIENCE_US,
        }
    return parameters


# What is written into a slot that is granted.

#: The lowest token that is higher than the one before, and not behind the clock.
NEXT_TOKEN: Final = "CASE WHEN token + 1 > {token_now} THEN token + 1 ELSE {token_now} END"  # noqa: S105


def granting(
    token: str, *, lasts: str = "%(lasts_us)s", mode: str = "", source: str = "%({})s", suspect: str = "NULL"
) -> str:
    """Return the columns of a slot that is granted. ``source``: where who gets it is read from, by columns."""
    columns = {
        "suspect_us": suspect,
        "token": token,
        "permit_id": source.format("permit_id"),
        "acquired_us": "{now}",
        "expires_us": f"{{now}} + {lasts}",
        "lease_us": source.format("lease_us"),
        "lock_mode": mode or source.format("lock_mode"),
    } | {column: source.format(column) for column in HOLDER_COLUMNS}
    return ", ".join(f"{column} = {value}" for column, value in columns.items())


#: How long a slot is held, on average, if its hold ends now.
HELD_FOR: Final = (
    "CASE WHEN {now} <= acquired_us THEN held_us WHEN held_us = 0 THEN {now} - acquired_us"
    " ELSE held_us + ({now} - acquired_us - held_us) / 8 END"
)
#: It stands before ``granting``: MySQL reckons with what was set before.
HELD: Final = f"held_us = {HELD_FOR}"
#: How many rows one statement names at the most; every database takes lists of this length.
ROWS_AT_ONCE: Final = 500


def among(rows: int) -> str:
    """Return the condition that a row is one of this many of a name: see ``rows_named``."""
    return f"semaphore_key = %(key)s AND id IN ({', '.join(f'%(row{each})s' for each in range(rows))})"


def rows_named(ids: Sequence[int]) -> dict[str, int]:
    """Return the parameters of ``among``."""
    return {f"row{number}": row_id for number, row_id in enumerate(ids)}


FREED: Final = f"UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL, suspect_us = NULL, {HELD}"
DISCARD: Final = f"{FREED} WHERE semaphore_key = %(key)s AND permit_id = %(permit_id)s"

# What is written into a waiter's row.

_PLACE: Final = {
    "ticket": "%(permit_id)s",
    "semaphore_key": "%(key)s",
    "queued_us": "{now} - %(age_us)s",
    "expires_us": "{now} + %(patience_us)s",
    "away": "%(no)s",
}
_WAITER_COLUMNS: Final = tuple(str(each.column) for each in WaiterRow._meta.concrete_fields if not each.primary_key)
#: Begins the insert of a waiter.
WAITER: Final = f"INSERT INTO sqlsem_waiter ({', '.join(_WAITER_COLUMNS)})"


def standing(**other: str) -> str:
    """Return a waiter's values, in the order of its columns; ``other``: those that are not as usual."""
    values = {column: f"%({column})s" for column in _WAITER_COLUMNS} | _PLACE | other
    return ", ".join(values[column] for column in _WAITER_COLUMNS)


# What is missing is created with these: see ``Statements.insert``.

#: ``units``: NULL for any other kind of lock.
NEW_SEMAPHORE: Final = (
    "sqlsem_semaphore (name_key, name, kind, template, declared_slots, declared_us, paused, shrinking, units)"
    " VALUES (%(key)s, %(name)s, %(kind)s, %(template)s, %(declared)s, {now}, %(no)s, %(no)s, %(units)s)"
)
_BLANK: Final = {str: "''", bool: "%(no)s", int: "0"}
_OF_SLOT: Final = {"semaphore_key": "%(key)s", "slot": "%(slot)s", "closed": "%(closed)s"}
_SLOT: Final = {
    str(each.column): _OF_SLOT.get(str(each.column)) or _BLANK[type(each.get_default())]
    for each in SlotRow._meta.concrete_fields
    if not each.null and not each.primary_key
}
NEW_SLOT: Final = f"sqlsem_slot ({', '.join(_SLOT)}) VALUES ({', '.join(_SLOT.values())})"

# The semaphore.


def bound(operator_slots: int | None, own_slots: int | None, declared_slots: int) -> int:
    """Return how many slots count: the operator's number, else the claim's own, else the declared one."""
    return next(each for each in (operator_slots, own_slots, declared_slots) if each is not None)


#: An operator's number. A mutex has one slot, whatever number an operator gave it while it was a semaphore.
OPERATOR: Final = "CASE WHEN kind = 'mutex' THEN 1 ELSE {operator} END"
#: What ``LOCK`` says of a name whose slots are to be settled; the second: as the time of an operator's number is over.
UNSETTLED: Final = 1
OVER: Final = 2
#: Locks the semaphore's row until the transaction ends.
LOCK: Final = (
    f"SELECT {OPERATOR}, declared_slots, CASE WHEN {{unpaused}} THEN 0 ELSE 1 END, CASE WHEN {{settled}} THEN 0"
    f" WHEN slots_until_us <= {{token_now}} THEN {OVER} ELSE {UNSETTLED} END, {{now}}, kind"
    " FROM sqlsem_semaphore{lock_hint}"
    " WHERE name_key = %(key)s{lock}"
)
#: Slots that have run out and were not freed. ``skip_locked`` follows, so that none is fenced or just being changed.
RUN_OUT: Final = (
    "SELECT s.id, s.token FROM sqlsem_slot s{lock_hint}"
    " WHERE s.semaphore_key = %(key)s AND s.expires_us IS NOT NULL AND {s.free}"
)
#: How many slots are live, how many of those are above the bound, and how many whoever took all of them has not lost.
COUNT_LIVE: Final = (
    "SELECT COUNT(CASE WHEN slot > 0 AND {live} THEN 1 END), COUNT(CASE WHEN slot > %(bound)s AND {live} THEN 1 END),"
    " COUNT(CASE WHEN lock_mode = 'whole' THEN 1 END)"
    " FROM sqlsem_slot WHERE semaphore_key = %(key)s AND expires_us IS NOT NULL"
)
#: Since when a task has its place that was kept while it was away; NULL for anybody else.
KEPT: Final = "(SELECT a.queued_us FROM sqlsem_waiter a WHERE a.semaphore_key = %(key)s AND a.ticket = %(rank)s)"
