"""The key rows of transaction locks: made and purged on a connection of our own, in autocommit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.sessions import OwnSession
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.cursors import AnyCursor, Cursor


TABLE: Final = "sqlsem_transaction_lock"
#: How many rows a purge deletes in one transaction.
CHUNK: Final = 500
#: How long one maker of a row waits for another, in seconds: less than a statement of ours may take.
_TURN: Final = 3

_SEEN: Final = f"SELECT 1 FROM {TABLE} WHERE name_key = %(key)s"
_VALUES: Final = f"{TABLE} (name_key, name, grants) VALUES (%(key)s, %(name)s, 0)"


def insert(cursor: AnyCursor, resource: Resource) -> None:
    """Insert the row unless it is there."""
    dialect_for(cursor.db).insert_missing(cursor, _VALUES, {"key": resource.key, "name": resource.name})


def make(alias: str, resource: Resource) -> None:
    """Have the row there, committed, whoever makes it. Raises ``BackendError``."""

    def work(cursor: Cursor) -> None:
        with _alone(cursor, resource.key):
            cursor.execute(_SEEN, {"key": resource.key})
            if cursor.fetchone() is None:
                insert(cursor, resource)

    with _session(alias) as session:
        session.run(work)  # type: ignore[arg-type] # our own session's cursor is never Django's


def grants(alias: str, resource: Resource) -> int | None:
    """Return how many committed transactions have had the lock; ``None`` if that cannot be read."""

    def read(cursor: AnyCursor) -> int:
        cursor.execute(f"SELECT grants FROM {TABLE} WHERE name_key = %(key)s", {"key": resource.key})
        row = cursor.fetchone()
        return int(row[0]) if row else 0

    with contextlib.suppress(BackendError), _session(alias) as session:
        return session.run(read)
    return None


def purge(alias: str) -> int:
    """Delete the rows that no transaction has locked, and return how many. Raises ``BackendError``."""
    deleted = 0
    with _session(alias) as session:
        after: str | None = ""
        while after is not None:
            found = session.transaction(lambda cursor, after=after: _purge_some(cursor, after))  # type: ignore[misc]
            count, after = found or (0, None)
            deleted += count
    return deleted


def _purge_some(cursor: AnyCursor, after: str) -> tuple[int, str | None]:
    """Delete the rows of one chunk that are free, and return where the next one begins."""
    cursor.execute(
        f"SELECT name_key FROM {TABLE} WHERE name_key > %(after)s ORDER BY name_key LIMIT {CHUNK}", {"after": after}
    )
    keys = [row[0] for row in cursor.fetchall()]
    if not keys:
        return 0, None
    listed = ", ".join(["%s"] * len(keys))
    # Who has a row locked is not waited for, so that nobody who waits for that row finds it gone in the end.
    free = f"SELECT name_key FROM {TABLE} WHERE name_key IN ({listed}){dialect_for(cursor.db).lock_skipping}"
    cursor.execute(free, keys)
    unlocked = [row[0] for row in cursor.fetchall()]
    if unlocked:
        cursor.execute(f"DELETE FROM {TABLE} WHERE name_key IN ({', '.join(['%s'] * len(unlocked))})", unlocked)
    return len(unlocked), keys[-1] if len(keys) == CHUNK else None


@contextlib.contextmanager
def _session(alias: str) -> Iterator[OwnSession]:
    """A session for a moment: rows are made once, and a connection is not kept for the next."""
    session = OwnSession(alias)
    try:
        yield session
    finally:
        session.close()


@contextlib.contextmanager
def _alone(cursor: Cursor, key: str) -> Iterator[None]:
    """One maker of a row at a time, on MySQL and MariaDB.

    An insert that finds the row there locks it for a moment. To whoever tries it then, it would seem to be taken.
    """
    if cursor.db.vendor != "mysql":
        yield
        return
    failure = cursor.db.Database.Error  # type: ignore[attr-defined]
    name = f"sqlsem:t:{key}"
    with contextlib.suppress(failure):  # Galera may refuse it
        cursor.execute("SELECT GET_LOCK(%s, %s)", [name, _TURN])
        cursor.fetchone()
    try:
        yield
    finally:
        with contextlib.suppress(failure):
            cursor.execute("SELECT RELEASE_LOCK(%s)", [name])
            cursor.fetchone()
