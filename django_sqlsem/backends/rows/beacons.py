"""Taking slots from the dead: a holder whose beacon stays out loses its slot long before its lease runs out."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends.rows.fences import reap
from django_sqlsem.backends.rows.statements import Statements
from django_sqlsem.core.identity import process_id
from django_sqlsem.database import beacons
from django_sqlsem.database.dialects import dialect_for

if TYPE_CHECKING:
    from django_sqlsem.backends.base import Request
    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.dialects import Dialect
    from django_sqlsem.database.sessions import Session


#: For how long a beacon must have been out, in microseconds: its process has a second to light it again.
_OUT_FOR_US: Final = 1_500_000

_HOLDERS: Final = (
    "SELECT DISTINCT process_id FROM sqlsem_slot WHERE semaphore_key = %(key)s AND beacon = %(yes)s"
    " AND process_id <> %(process_id)s AND {live}"
)
_GONE: Final = (
    "UPDATE sqlsem_slot SET expires_us = {now} WHERE semaphore_key = %(key)s AND process_id = %(dead)s AND {live}"
)
#: The slots that are held, dead holders' too.
_STANDING: Final = "SELECT slot, token FROM sqlsem_slot WHERE semaphore_key = %(key)s AND expires_us IS NOT NULL"
#: Frees for good what has run out: else a holder that slept could renew it.
_FREE_DEAD: Final = (
    "UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL, suspect_us = NULL"
    " WHERE semaphore_key = %(key)s AND expires_us IS NOT NULL AND {free}"
)


@functools.cache
def suspects(dialect: Dialect) -> str:
    """How many holding processes have their beacons out, as a column; NULL where SQL cannot tell.

    Slots that have run out and were fenced count too, where a claim does not take them by itself.
    """
    dead = dialect.dead_sql("d.")
    count = (
        "(SELECT COUNT(*) FROM (SELECT DISTINCT s.process_id, s.beacon FROM sqlsem_slot s"
        f" WHERE s.semaphore_key = %(key)s AND {{s.live}}) d WHERE {dead})"
    )
    fenced = (
        " + (SELECT COUNT(*) FROM sqlsem_slot x WHERE x.semaphore_key = %(key)s AND x.expires_us <= {now}"
        " AND x.fenced = x.token)"
    )
    return (count if dead else "NULL") + (fenced if dialect.fence == "sibling" else "")


@functools.cache
def burial(dialect: Dialect) -> tuple[str, str]:
    """Let run out what has been suspect for long enough, and note who is suspect now."""
    assert dialect.dead is not None  # noqa: S101
    own = "%(process_id)s::text" if dialect.notifies else "%(process_id)s"
    # Only where its own beacon is seen lit does a process believe that another one's is out.
    dead = (
        f"semaphore_key = %(key)s AND {{live}} AND {dialect.dead_sql('')}"
        f" AND NOT {dialect.dead.replace('{process_id}', own)}"
    )
    unflushed = " RETURNING id{unflushed}" if dialect.unflushed else ""
    return (
        f"UPDATE sqlsem_slot SET expires_us = {{now}} WHERE suspect_us <= {{now}} - %(out_for_us)s AND {dead}",
        f"UPDATE sqlsem_slot SET suspect_us = {{now}} WHERE suspect_us IS NULL AND {dead}{unflushed}",
    )


def take_from_suspects(session: Session, dialect: Dialect, request: Request, count: int | None) -> bool:
    """Let slots run out whose holders are gone. Return whether any did. ``count``: what ``suspects`` says."""
    reaped = bool(count) and dialect.fence == "sibling" and reap(session, request.resource.key)
    if not request.presence.beacon or count == 0:
        return reaped
    if count is None and session.connection.vendor != "sqlite":
        return False
    parameters = {"key": request.resource.key, "process_id": request.holder.process}
    return take_from_the_dead(session, dialect, parameters) or reaped


def take_from_the_dead(session: Session, dialect: Dialect, parameters: dict[str, Any]) -> bool:
    """Let the slots of dead processes run out. Return whether any did. Only for a process whose own beacon is lit."""

    def by_sql(cursor: AnyCursor) -> bool:
        statements = Statements(cursor, parameters)
        gone, suspect = burial(dialect)
        taken = statements.change(gone, out_for_us=_OUT_FOR_US) > 0
        statements.change(suspect)
        return taken

    def by_files(cursor: AnyCursor) -> bool:
        """On SQLite: a process has the lock of its file until its very end, so what is out is out for good."""
        statements = Statements(cursor, parameters)
        dead = [each for (each,) in statements.rows(_HOLDERS, yes=True) if is_dead(cursor, each)]
        return sum(statements.change(_GONE, dead=each) for each in dead) > 0

    return session.run(by_files if dialect.dead is None else by_sql)


def free_dead(session: Session, resource: Resource, *, witness: bool) -> bool:
    """Let the slots of the dead run out, and free what has run out. Return whether any was freed."""
    parameters = {"key": resource.key, "process_id": process_id()}
    if witness:
        take_from_the_dead(session, dialect_for(session.connection), parameters)
    return session.run(lambda cursor: Statements(cursor, parameters).change(_FREE_DEAD) > 0)


def standing(session: Session, resource: Resource) -> set[tuple[int, int]]:
    """Return the pairs of slot and token that are held."""
    rows = session.run(lambda cursor: list(Statements(cursor, {"key": resource.key}).rows(_STANDING)))
    return {(slot, token) for slot, token in rows}


def is_dead(cursor: AnyCursor, process_id: str) -> bool:
    """Whether the file of a process on SQLite says that it is dead."""
    if cursor.db.vendor != "sqlite" or not beacons.POSSIBLE:
        return False
    database = beacons.path_of(cursor)  # type: ignore[arg-type]
    return bool(database) and beacons.is_free(database + beacons.SUFFIX, process_id)
