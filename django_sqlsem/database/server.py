"""Which server and which database it is.

The life of the server: one that was started or promoted knows of nobody's session, and nothing runs out for one lease.
Whether two aliases lead to one database: by a pooler and past it, say, or under two names of its host.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from django.apps import apps
from django.conf import settings
from django.db import Error as DatabaseError
from django.db import connections

from django_sqlsem.database.dialects import Incarnation, dialect_for
from django_sqlsem.database.sessions import connected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

    from django_sqlsem.database.sessions import Session


def read(connection: BaseDatabaseWrapper, cursor: CursorWrapper) -> Incarnation | None:
    """Ask a session, in autocommit, whose server it is; ``None`` for SQLite, whose server is the host.

    It stays so as long as the session lives, but for a promotion. Raises what the database raises.
    """
    return dialect_for(connection).incarnation(cursor)


_SEEN: Final = "SELECT seen_us FROM sqlsem_server WHERE identity = %(identity)s"
_NOTE: Final = "sqlsem_server (identity, seen_us) VALUES (%(identity)s, %(seen)s)"


def note_server(connection: BaseDatabaseWrapper) -> None:
    """Note, on a new connection, since when this life of the server is known, in microseconds of its own clock.

    For one lease after that nothing has run out: see ``Dialect.free``. Raises what the database raises.
    """
    with connection.cursor() as cursor:
        server = read(connection, cursor)
        if server is None:
            return
        dialect = dialect_for(connection)
        dialect.execute(cursor, _SEEN, {"identity": server.identity})
        row = cursor.fetchone()
        if row is None:
            now = dialect.now(cursor)
            # One that is new to a database with locks may have been promoted; the very first one has not.
            cursor.execute("SELECT COUNT(*) FROM sqlsem_server")
            seen = now if cursor.fetchone()[0] else server.started_us or now
            dialect.insert_missing(cursor, _NOTE, {"identity": server.identity, "seen": seen})
            dialect.execute(cursor, _SEEN, {"identity": server.identity})  # another connection may have been first
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


_WHERE: Final = ("ENGINE", "HOST", "PORT", "NAME")
#: Options that may lead elsewhere; ``options`` may name a schema.
_OPTIONS: Final = ("service", "host", "port", "read_default_file", "unix_socket", "options")
#: Pairs of addresses that were found to be one database's.
_known: set[tuple[Any, ...]] = set()


def leads_to_locks(
    alias: str, home: str, session: Session, permit_id: str, row_ids: Sequence[int], *, ask: bool
) -> bool:
    """Whether the alias leads to the database that keeps a permit, whose own alias is ``home``.

    ``session`` is our own at home. Where the settings differ and ``ask`` is true, the servers are asked, once per
    process. Raises ``BackendError`` if the database at home fails.
    """
    here, there = _address(alias), _address(home)
    if here[:-1] == there[:-1] and (here == there or not ask):
        return True
    if not ask or dialect_for(connections[alias]) is not dialect_for(connections[home]):
        return False
    if (here, there) not in _known:
        mine = session.run(lambda _: _identify(session.connection, permit_id, row_ids))
        if mine is None or mine != _ask(alias, permit_id, row_ids):
            return False
        _known.add((here, there))
    return True


def is_one_database(alias: str, other: str) -> bool:
    """Whether the settings of two aliases name one database, and one user's view of it."""
    user, others = (connections[each].settings_dict.get("USER") for each in (alias, other))
    return alias == other or (user == others and _address(alias) == _address(other))


def _address(alias: str) -> tuple[Any, ...]:
    settings = connections[alias].settings_dict
    options = settings.get("OPTIONS") or {}
    return (*(str(settings.get(name)) for name in _WHERE), tuple(str(options.get(name, "")) for name in _OPTIONS))


def _ask(alias: str, permit_id: str, row_ids: Sequence[int]) -> object:
    """Ask on a connection that is not the caller's: a statement that fails would spoil the transaction there."""
    with contextlib.suppress(DatabaseError), connected(alias) as connection:
        return _identify(connection, permit_id, row_ids)
    return None


def _identify(connection: BaseDatabaseWrapper, permit_id: str, row_ids: Sequence[int]) -> object:
    """Return what no other database has: the life of its server (replicas have their own), and this very grant."""
    rows = ",".join(map(str, row_ids))
    with connection.cursor() as cursor:
        server = read(connection, cursor)
        cursor.execute(f"SELECT id, permit_id FROM sqlsem_slot WHERE id IN ({rows}) ORDER BY id")
        found = [tuple(row) for row in cursor.fetchall()]
    return (server, found) if server is not None and any(row[1] == permit_id for row in found) else None


def is_per_tenant(connection: BaseDatabaseWrapper, app_label: str) -> bool:
    """Whether an app has its tables in each tenant's schema, which the connection's search path decides on."""
    if not hasattr(connection, "set_tenant"):
        return False
    app = apps.get_app_config(app_label)
    names = {app.name, f"{type(app).__module__}.{type(app).__name__}"}
    types: dict[str, Any] = getattr(settings, "TENANT_TYPES", {})
    public = getattr(settings, "PUBLIC_SCHEMA_NAME", "public")
    lists = [kind.get("APPS", ()) for name, kind in types.items() if name != public]
    return any(names.intersection(each) for each in (getattr(settings, "TENANT_APPS", ()), *lists))
