"""Taking slots from the dead: a holder whose beacon stays out loses its slot long before its lease runs out."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.database import beacons
from django_sqlsem.database.dialects import Dialect

if TYPE_CHECKING:
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session


#: For how long a beacon must have been out, in microseconds: its process has a second to light it again.
OUT_FOR_US: Final = 1_500_000

_HOLDERS: Final = (
    "SELECT DISTINCT process_id FROM sqlsem_slot WHERE semaphore_key = %(key)s AND beacon = %(yes)s"
    " AND process_id <> %(process_id)s AND "
)
_GONE: Final = "UPDATE sqlsem_slot SET expires_us = {now} WHERE semaphore_key = %(key)s AND process_id = %(dead)s AND "


@functools.cache
def _statements(dialect: Dialect) -> tuple[str, str]:
    """Let run out what has been suspect for long enough, and note who is suspect now."""
    assert dialect.dead is not None  # noqa: S101
    own = "%(process_id)s::text" if dialect.notifies else "%(process_id)s"
    # Only where its own beacon is seen lit does a process believe that another one's is out.
    witness = f"NOT {dialect.dead.replace('{process_id}', own)}"
    dead = f"semaphore_key = %(key)s AND {dialect.live_sql()} AND {dialect.dead_sql('')} AND {witness}"
    unflushed = f" RETURNING id{dialect.unflushed}" if dialect.unflushed else ""
    return (
        f"UPDATE sqlsem_slot SET expires_us = {{now}} WHERE suspect_us <= {{now}} - %(out_for_us)s AND {dead}",
        f"UPDATE sqlsem_slot SET suspect_us = {{now}} WHERE suspect_us IS NULL AND {dead}{unflushed}",
    )


def take_from_the_dead(session: Session, dialect: Dialect, parameters: dict[str, Any]) -> bool:
    """Let the slots of dead processes run out. Return whether any did. Only for a process whose own beacon is lit."""
    if dialect.dead is None:
        return _take_by_files(session, dialect, parameters)
    gone, suspect = _statements(dialect)

    def take(cursor: AnyCursor) -> bool:
        dialect.execute(cursor, gone, parameters | {"out_for_us": OUT_FOR_US})
        taken = cursor.rowcount > 0
        dialect.execute(cursor, suspect, parameters)
        return taken

    return session.run(take)


def _take_by_files(session: Session, dialect: Dialect, parameters: dict[str, Any]) -> bool:
    """On SQLite: a process has the lock of its file until its very end, so what is out is out for good."""

    def take(cursor: AnyCursor) -> bool:
        dialect.execute(cursor, _HOLDERS + dialect.live_sql(), parameters | {"yes": True})
        taken = False
        for (process_id,) in cursor.fetchall():
            if is_dead(cursor, process_id):
                dialect.execute(cursor, _GONE + dialect.live_sql(), parameters | {"dead": process_id})
                taken = taken or cursor.rowcount > 0
        return taken

    return session.run(take)


def is_dead(cursor: AnyCursor, process_id: str) -> bool:
    """Whether the file of a process on SQLite says that it is dead."""
    if cursor.db.vendor != "sqlite" or not beacons.POSSIBLE:
        return False
    database = beacons.path_of(cursor)  # type: ignore[arg-type]
    return bool(database) and beacons.is_free(database + beacons.SUFFIX, process_id)
