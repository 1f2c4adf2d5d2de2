"""Since when a database server is known: after its start or promotion nothing runs out for one lease."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from django.db.models.constants import OnConflict

from django_sqlsem.backends.dialects import dialect_for
from django_sqlsem.backends.incarnation import read

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


_SEEN: Final = "SELECT seen_us FROM sqlsem_server WHERE identity = %s"


def _note(connection: BaseDatabaseWrapper) -> str:
    """Insert it unless it is there; no error, as that would break a transaction of the caller's."""
    insert = connection.ops.insert_statement(on_conflict=OnConflict.IGNORE)
    rest = connection.ops.on_conflict_suffix_sql([], OnConflict.IGNORE, [], [])
    return f"{insert} sqlsem_server (identity, seen_us) VALUES (%s, %s) {rest}"


def note_server(connection: BaseDatabaseWrapper) -> None:
    """Note, on a new connection, since when this life of the server is known, in microseconds of its own clock.

    For one lease after that nothing has run out: see ``Dialect.free``. Raises what the database raises.
    """
    with connection.cursor() as cursor:
        server = read(connection, cursor)
        if server is None:
            return
        cursor.execute(_SEEN, [server.identity])
        row = cursor.fetchone()
        if row is None:
            now = dialect_for(connection).now(cursor)
            # One that is new to a database with locks may have been promoted; the very first one has not.
            cursor.execute("SELECT COUNT(*) FROM sqlsem_server")
            seen = now if cursor.fetchone()[0] else server.started_us or now
            cursor.execute(_note(connection), [server.identity, seen])
            cursor.execute(_SEEN, [server.identity])  # another connection may have been first
            row = cursor.fetchone() or (seen,)
        connection.sqlsem_since_us = int(row[0])  # type: ignore[attr-defined]
        connection.sqlsem_since_of = connection.connection  # type: ignore[attr-defined]


def server_since(connection: BaseDatabaseWrapper) -> int:
    """Return the same of an ordinary connection, asking once after each connect."""
    connection.ensure_connection()
    if getattr(connection, "sqlsem_since_of", None) is not connection.connection:
        connection.sqlsem_since_us = 0  # type: ignore[attr-defined]
        note_server(connection)
        connection.sqlsem_since_of = connection.connection  # type: ignore[attr-defined]
    return int(getattr(connection, "sqlsem_since_us", 0))
