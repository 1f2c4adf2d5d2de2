"""The statements on the rows of refreshed values. What counts is decided by tokens, in conditional updates.

What operators see of refreshed values, read on the alias's ordinary connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from django.db import IntegrityError, connections

from django_sqlsem.backends.clock import RowClock
from django_sqlsem.core.clocks import ahead_us
from django_sqlsem.core.identity import current
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.errors import database_errors
from django_sqlsem.database.sessions import OrdinarySession, OwnSession
from django_sqlsem.models import RefreshRow
from django_sqlsem.snapshots import RefreshSnapshot

if TYPE_CHECKING:
    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.dialects import Dialect
    from django_sqlsem.database.sessions import Session
    from django_sqlsem.runtime.keeper import Keeper


@dataclass(frozen=True, slots=True)
class State:
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


_READ: Final = (
    "SELECT token, built_us, boot_id, invalidations, built_for, failed_us, {now} FROM sqlsem_refresh"
    " WHERE name_key = %(key)s"
)
_INSERT: Final = (
    "sqlsem_refresh (name_key, name, token, period_us, took_us, invalidations, built_for, host, pid, thread, label,"
    " user_name, process_id, boot_id, channel, beacon)"
    " VALUES (%(key)s, %(name)s, 0, %(period_us)s, 0, 0, 0, '', 0, '', '', '', '', '', '', %(no)s)"
)
_STORE: Final = (
    "UPDATE sqlsem_refresh SET token = %(token)s, built_us = {now}, period_us = %(period_us)s, took_us = %(took_us)s,"
    " built_for = %(built_for)s, failed_us = NULL, host = %(host)s, pid = %(pid)s, thread = %(thread)s,"
    " label = %(label)s, user_name = %(user)s, process_id = %(process_id)s, boot_id = %(boot_id)s"
    " WHERE name_key = %(key)s AND token < %(token)s"
)
_FAILED: Final = (
    "UPDATE sqlsem_refresh SET failed_us = {now}, period_us = %(period_us)s"
    " WHERE name_key = %(key)s AND token < %(token)s"
)
_INVALIDATE: Final = "UPDATE sqlsem_refresh SET invalidations = invalidations + 1 WHERE name_key = %(key)s"


def has_own_session(keeper: Keeper) -> bool:
    """Whether there are sessions for these rows apart from the ordinary connection."""
    return not keeper.backend.process_local and isinstance(keeper.own, OwnSession)


def own_session(keeper: Keeper) -> Session:
    """Return a session apart from the caller's transaction; where there is none, the alias's ordinary connection."""
    return keeper.session_here() if has_own_session(keeper) else OrdinarySession(connections[keeper.alias])


def read(session: Session, resource: Resource) -> State:
    """Return what the row says. Raises ``BackendError``."""
    dialect = dialect_for(session.connection)

    def work(cursor: AnyCursor) -> Any:
        dialect.execute(cursor, _here(_READ), {"key": resource.key})
        return cursor.fetchone()

    row = session.run(work)
    if row is None:
        return State()
    token, built_us, boot_id, invalidations, built_for, failed_us, now = row
    # What was before the boot of the host whose clock counts is too long ago to be told.
    known = built_us is not None and boot_id == dialect.boot_id
    return State(
        token=int(token),
        age=(int(now) - int(built_us)) / 1e6 if known else None,
        invalidations=int(invalidations),
        built_for=int(built_for),
        failed=None if failed_us is None else (int(now) - int(failed_us)) / 1e6,
    )


def store(session: Session, resource: Resource, token: int, *, period: float, took: float, built_for: int) -> bool:
    """Let the value built under ``token`` count, unless a later one does. Return whether it counts.

    Joins the transaction that is open on ``session``. Raises ``BackendError``.
    """
    who = current()
    values = _values(resource, period) | {
        "token": token,
        "took_us": round(took * 1e6),
        "built_for": built_for,
        "host": who.host,
        "pid": who.pid,
        "thread": who.thread,
        "label": who.label,
        "user": who.user,
        "process_id": who.process,
    }
    return _upsert(session, _STORE, values)


def note_failure(session: Session, resource: Resource, token: int, *, period: float) -> None:
    """Note that a build under ``token`` has failed, unless a later one has gone well. Raises ``BackendError``."""
    _upsert(session, _FAILED, _values(resource, period) | {"token": token})


def invalidate(session: Session, resource: Resource, *, period: float) -> None:
    """Say that the value is out of date, also the one that is being built now. Raises ``BackendError``."""
    _upsert(session, _INVALIDATE, _values(resource, period))


def _values(resource: Resource, period: float) -> dict[str, Any]:
    return {"key": resource.key, "name": resource.name, "period_us": round(period * 1e6)}


def _upsert(session: Session, update: str, values: dict[str, Any]) -> bool:
    dialect = dialect_for(session.connection)

    def change(cursor: AnyCursor) -> bool:
        dialect.execute(cursor, _here(update), values)
        return cursor.rowcount > 0

    if session.run(change):
        return True
    session.run(lambda cursor: _insert(cursor, dialect, values))
    return session.run(change)


def _here(sql: str) -> str:
    """Have a statement tell the time as this process does, which a test may have moved ahead."""
    ahead = ahead_us()
    return sql.replace("{now}", f"({{now}} + {ahead})") if ahead else sql


def _insert(cursor: AnyCursor, dialect: Dialect, values: dict[str, Any]) -> None:
    """Insert the row if it is not there."""
    begin, end = dialect.insert_ignore or ("INSERT INTO", "")
    driver: Any = cursor.db
    try:
        dialect.execute(cursor, f"{begin} {_INSERT}{end}", values)
    except (IntegrityError, driver.Database.IntegrityError):
        if dialect.insert_ignore:
            raise


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
        host=row.host,
        pid=row.pid,
        thread=row.thread,
        label=row.label,
        user=row.user,
        built_at=None if age is None else clock.at(age),
        age=age,
        took=row.took_us / 1e6 if built else None,
        due_in=max(0.0, period - age) if age is not None and counts else 0.0,
        failed=None if row.failed_us is None else max(0.0, (clock.now - row.failed_us) / 1e6),
    )
