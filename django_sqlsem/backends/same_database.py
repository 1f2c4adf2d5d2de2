"""Whether two aliases lead to one database: by a pooler and past it, say, or under two names of its host."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from django.db import Error as DatabaseError
from django.db import connections

from django_sqlsem.backends.incarnation import read
from django_sqlsem.own_connections import open_connection

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.backends.base import Held
    from django_sqlsem.sessions import Session

_WHERE: Final = ("ENGINE", "HOST", "PORT", "NAME")
_VENDORS: Final = ("postgresql", "mysql")
#: Pairs of addresses that were found to be one database's.
_known: set[tuple[Any, ...]] = set()


def leads_to_locks(alias: str, home: str, session: Session, held: Held, *, ask: bool) -> bool:
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
        mine = session.run(lambda _: _identify(session.connection, held))
        if mine is None or mine != _ask(alias, held):
            return False
        _known.add((here, there))
    return True


def _address(alias: str) -> tuple[Any, ...]:
    settings = connections[alias].settings_dict
    options = settings.get("OPTIONS") or {}
    service = [str(options.get(name, "")) for name in ("service", "host", "port", "read_default_file", "unix_socket")]
    return (*(str(settings.get(name)) for name in _WHERE), tuple(service))


def _ask(alias: str, held: Held) -> object:
    """Ask on a connection that is not the caller's: a statement that fails would spoil the transaction there."""
    with contextlib.suppress(DatabaseError), contextlib.closing(open_connection(alias)) as connection:
        return _identify(connection, held)
    return None


def _identify(connection: BaseDatabaseWrapper, held: Held) -> object:
    """Return what no other database has: the life of its server (replicas have their own), and this very grant."""
    rows = ",".join(map(str, held.grant.row_ids))
    with connection.cursor() as cursor:
        server = read(connection, cursor)
        cursor.execute(f"SELECT id, permit_id FROM sqlsem_slot WHERE id IN ({rows}) ORDER BY id")
        found = [tuple(row) for row in cursor.fetchall()]
    return (server, found) if server is not None and any(row[1] == held.permit_id for row in found) else None
