"""Which server and which database it is.

The life of the server: one that was started or promoted knows of nobody's session, and nothing runs out for one lease.
Whether two aliases lead to one database: by a pooler and past it, say, or under two names of its host.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from django.apps import apps
from django.conf import settings
from django.db import Error as DatabaseError
from django.db import connections

from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.sessions import open_connection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

    from django_sqlsem.database.sessions import Session


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of a database server.

    ``identity`` is the same for every session of it, and changes with every start and every promotion. ``started_us``
    is when it was started, in microseconds since 1970 by its own clock, ``None`` if that cannot be known. A standby
    that was promoted may have been started long before: who meets an identity that is new must count from now.
    """

    identity: str
    started_us: int | None


#: Both may be called by any role. The clock is that of ``statement_timestamp()``.
_STARTED: Final = "(EXTRACT(EPOCH FROM pg_postmaster_start_time()) * 1000000)::bigint"
#: The timeline. A standby has no current position; promotion without a restart takes the server to a new timeline.
_TIMELINE: Final = (
    "CASE WHEN pg_is_in_recovery() THEN 'standby' ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END"
)


def read(connection: BaseDatabaseWrapper, cursor: CursorWrapper) -> Incarnation | None:
    """Ask a session, in autocommit, whose server it is; ``None`` for SQLite, whose server is the host.

    It stays so as long as the session lives, but for a promotion. Raises what the database raises.
    """
    if connection.vendor == "postgresql":
        return _postgresql(cursor)
    if connection.vendor == "mysql":
        return _mysql(cursor)
    return None


def _postgresql(cursor: CursorWrapper) -> Incarnation:
    try:
        cursor.execute(f"SELECT {_STARTED}, {_TIMELINE}")
    except DatabaseError:
        # Some hosted servers have no log positions; those start anew when they are promoted.
        cursor.execute(f"SELECT {_STARTED}, ''")
    started, timeline = cursor.fetchone()
    return Incarnation(f"{started}:{timeline}", int(started))


def _mysql(cursor: CursorWrapper) -> Incarnation | None:
    if several_writers(cursor):
        return _cluster(cursor)
    for _ in range(10):
        cursor.execute("SELECT UNIX_TIMESTAMP()")
        before = int(cursor.fetchone()[0])
        uptime = int(_shown(cursor, "STATUS", "Uptime"))
        cursor.execute("SELECT UNIX_TIMESTAMP(), @@hostname, @@port, @@server_id")
        after, *identity = cursor.fetchone()
        # Both count whole seconds of one clock: within one second of it the difference is exact, and always the same.
        if before == int(after):
            started = before - uptime
            return Incarnation(":".join(map(str, [*identity, started])), started * 1_000_000)
    return None


def several_writers(cursor: CursorWrapper) -> bool:
    """Whether a MySQL or MariaDB server is a node of a cluster whose other nodes are written to as well."""
    cursor.execute("SHOW GLOBAL VARIABLES WHERE Variable_name IN ('wsrep_on', 'group_replication_single_primary_mode')")
    found = {str(name).lower(): str(value).upper() in ("ON", "1") for name, value in cursor.fetchall()}
    return found.get("wsrep_on", False) or not found.get("group_replication_single_primary_mode", True)


def _cluster(cursor: CursorWrapper) -> Incarnation | None:
    """No commit is lost when a node of a cluster starts, and its sessions are on any node: they share a name."""
    for name in ("wsrep_cluster_state_uuid", "group_replication_group_name"):
        kind = "STATUS" if name.startswith("wsrep") else "VARIABLES"
        if found := _shown(cursor, kind, name):
            return Incarnation(found, None)
    return None


def _shown(cursor: CursorWrapper, kind: str, name: str) -> Any:
    cursor.execute(f"SHOW GLOBAL {kind} LIKE '{name}'")
    row = cursor.fetchone()
    return row[1] if row else None


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
_VENDORS: Final = ("postgresql", "mysql")
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
    if not ask or connections[alias].vendor not in _VENDORS or connections[alias].vendor != connections[home].vendor:
        return False
    if (here, there) not in _known:
        mine = session.run(lambda _: _identify(session.connection, permit_id, row_ids))
        if mine is None or mine != _ask(alias, permit_id, row_ids):
            return False
        _known.add((here, there))
    return True


def _address(alias: str) -> tuple[Any, ...]:
    settings = connections[alias].settings_dict
    options = settings.get("OPTIONS") or {}
    service = [str(options.get(name, "")) for name in ("service", "host", "port", "read_default_file", "unix_socket")]
    return (*(str(settings.get(name)) for name in _WHERE), tuple(service))


def _ask(alias: str, permit_id: str, row_ids: Sequence[int]) -> object:
    """Ask on a connection that is not the caller's: a statement that fails would spoil the transaction there."""
    with contextlib.suppress(DatabaseError), contextlib.closing(open_connection(alias)) as connection:
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
