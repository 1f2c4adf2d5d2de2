"""The rows of refreshed values. What counts is decided by tokens, in conditional updates.

What operators see of refreshed values is read on the alias's ordinary connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from django.db import connections
from django.db.models import QuerySet
from django.db.models.expressions import Combinable

from django_sqlsem.backends.clock import RowClock
from django_sqlsem.core.clocks import ahead_us
from django_sqlsem.core.identity import current
from django_sqlsem.core.names import Resource
from django_sqlsem.database.cursors import AnyCursor
from django_sqlsem.database.dialects import DatabaseNow, dialect_for
from django_sqlsem.database.errors import database_errors
from django_sqlsem.database.sessions import CallerSession, OwnSession, Session, insert_missing, used_by_orm
from django_sqlsem.models import RefreshRow
from django_sqlsem.runtime.keeper import Keeper
from django_sqlsem.snapshots import RefreshSnapshot, who


@dataclass(frozen=True, slots=True)
class RefreshState:
    """What the row says at one instant of the database's clock."""

    #: Whose value counts; 0: there is none.
    token: int = 0
    #: Seconds since that was built; ``None``: never, or before the host's boot where that is the clock.
    age: float | None = None
    #: How often the value was said to be out of date, and of how many of these the builder knew when it began.
    invalidations: int = 0
    built_for: int = 0
    #: Seconds since a build failed, if none has gone well since.
    failed: float | None = None


# Not with the ORM, which takes twenty times as long: each call for a value reads this.
_READ: Final = (
    "SELECT token, built_us, boot_id, invalidations, built_for, failed_us, {now} FROM sqlsem_refresh"
    " WHERE name_key = %(key)s"
)


def has_own_session(keeper: Keeper) -> bool:
    """Whether there are sessions for these rows apart from the ordinary connection."""
    return not keeper.backend.process_local and isinstance(keeper.own, OwnSession)


def own_session(keeper: Keeper) -> Session:
    """Return a session apart from the caller's transaction; where there is none, the alias's ordinary connection."""
    return keeper.session_here() if has_own_session(keeper) else CallerSession(connections[keeper.alias])


def read(session: Session, resource: Resource) -> RefreshState:
    """Return what the row says. Raises ``BackendError``."""

    dialect = dialect_for(session.connection)

    def work(cursor: AnyCursor) -> Any:
        dialect.execute(cursor, _READ, {"key": resource.key})
        return cursor.fetchone()

    row = session.run(work)
    if row is None:
        return RefreshState()
    token, built_us, boot_id, invalidations, built_for, failed_us, there = row
    instant = int(there) + ahead_us()
    # What was before the boot of the host whose clock counts is too long ago to be told.
    known = built_us is not None and boot_id == dialect.boot_id
    return RefreshState(
        token=token,
        age=(instant - built_us) / 1e6 if known else None,
        invalidations=invalidations,
        built_for=built_for,
        failed=None if failed_us is None else (instant - failed_us) / 1e6,
    )


def write(
    session: Session, resource: Resource, period: float, values: dict[str, Any], *, later_than: int | None = None
) -> bool:
    """Update the row, or one of an earlier token than ``later_than``; it is made if it is not there.

    Joins the transaction that is open on ``session``. Returns whether it was written. Raises ``BackendError``.
    """
    period_us = round(period * 1e6)

    def update(cursor: AnyCursor) -> bool:
        with used_by_orm(cursor.db):
            rows = _row(cursor, resource)
            if later_than is not None:
                rows, values["period_us"] = rows.filter(token__lt=later_than), period_us
            return rows.update(**values) > 0

    def insert(cursor: AnyCursor) -> None:
        with used_by_orm(cursor.db):
            row = RefreshRow(key=resource.key, name=resource.name, period_us=period_us)
            insert_missing([row], using=cursor.db.alias)

    if session.run(update):
        return True
    session.run(insert)
    return session.run(update)


def built(session: Session, took: float, built_for: int) -> dict[str, Any]:
    """Return what a row says of a build by this thread or task that has just ended."""
    builder = current()
    return {
        "built_us": now(),
        "took_us": round(took * 1e6),
        "built_for": built_for,
        "failed_us": None,
        **who(builder),
        "process_id": builder.process,
        "boot_id": dialect_for(session.connection).boot_id,
    }


def _row(cursor: AnyCursor, resource: Resource) -> QuerySet[Any]:
    return RefreshRow._default_manager.using(cursor.db.alias).filter(key=resource.key)


def now() -> Combinable:
    """Return the time as this process tells it, which a test may have moved ahead."""
    return DatabaseNow() + ahead_us()


def refreshes(alias: str, prefix: str = "") -> list[RefreshSnapshot]:
    """Return the values whose names begin with ``prefix``, by name. Raises ``BackendError``."""
    with database_errors(alias):
        clock = RowClock.of(alias)
        rows = RefreshRow._default_manager.using(alias).filter(name__startswith=prefix).order_by("name")
        found = [snapshot_of(clock, row) for row in rows]
    # Some databases fold case here.
    return sorted((each for each in found if each.name.startswith(prefix)), key=lambda each: each.name)


def snapshot_of(clock: RowClock, row: RefreshRow) -> RefreshSnapshot:
    """Return what a row says at the clock's instant."""
    built = row.built_us is not None
    age = max(0.0, clock.age(row.built_us, row.boot_id)) if built else None
    period = row.period_us / 1e6
    # One from before the host's boot is due, as is one that was said to be out of date.
    counts = age is not None and row.boot_id == clock.boot_id and row.built_for == row.invalidations
    return RefreshSnapshot(
        name=row.name,
        period=period,
        **who(row),
        built_at=None if age is None else clock.at(age),
        age=age,
        took=row.took_us / 1e6 if built else None,
        due_in=max(0.0, period - age) if age is not None and counts else 0.0,
        failed=None if row.failed_us is None else max(0.0, (clock.now - row.failed_us) / 1e6),
    )
