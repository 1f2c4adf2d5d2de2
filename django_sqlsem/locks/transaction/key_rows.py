"""The key rows of transaction locks: locked by a read in the caller's transaction, made and purged beside it.

They are made and purged on a connection of our own, in autocommit: in the caller's transaction they would be in
everybody's way. It is closed at once: rows are made once.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import time
from collections.abc import Callable, Iterator
from typing import Final

from django.db.backends.base.base import BaseDatabaseWrapper

from django_sqlsem.core import testmode
from django_sqlsem.core.names import Resource
from django_sqlsem.database.cursors import AnyCursor, Cursor
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.sessions import OwnSession
from django_sqlsem.exceptions import BackendError
from django_sqlsem.locks.transaction.base import Wanted

KEY_ROWS: Final = "sqlsem_transaction_lock"
#: How many rows a purge deletes in one transaction.
_AT_ONCE: Final = 500
#: How long one maker of a row waits for another, in seconds: less than a statement of ours may take.
_TURN: Final = 3

#: A row may be purged between its making and its locking; so often in a row, something else is wrong.
_MAX_MAKES: Final = 20

_SEEN: Final = f"SELECT 1 FROM {KEY_ROWS} WHERE name_key = %(key)s"
_NEXT: Final = f"SELECT name_key FROM {KEY_ROWS} WHERE name_key > %(after)s ORDER BY name_key LIMIT {_AT_ONCE}"
_VALUES: Final = f"{KEY_ROWS} (name_key, name, grants) VALUES (%(key)s, %(name)s, 0)"


class Attempt(enum.Enum):
    """What became of one attempt to lock a key row."""

    GRANTED = "granted"
    #: Another transaction has it.
    TAKEN = "taken"
    #: There is no key row to lock.
    MISSING = "missing"


def lock(
    connection: BaseDatabaseWrapper,
    wanted: Wanted,
    timeout: float | None,
    *,
    try_now: Callable[[Wanted], Attempt],
    wait: Callable[[Wanted, float | None], Attempt],
) -> float | None:
    """Try at once, so that waiting is known from its opposite, then wait. Make the row if it is not there.

    ``try_now`` takes the lock if it is free; neither a row's making nor its purge makes it look taken. ``wait`` waits
    in the server for at most that long, and leaves the session's settings as they were. Returns what
    ``TransactionLocking.lock`` does.
    """
    started = time.monotonic()
    for _ in range(_MAX_MAKES):
        attempt = try_now(wanted)
        if attempt is Attempt.GRANTED:
            return 0.0
        if attempt is Attempt.TAKEN:
            left = None if timeout is None else started + timeout - time.monotonic()
            attempt = Attempt.TAKEN if left is not None and left <= 0 else wait(wanted, left)
            if attempt is Attempt.GRANTED:
                return max(time.monotonic() - started, 1e-6)
            if attempt is Attempt.TAKEN:
                return None
        # If anything was waited for, it was a purge: who comes first now has not waited for a holder.
        _make(connection, wanted.resource)
    raise BackendError(f"The row of {wanted.resource.name!r} on {connection.alias!r} goes away as it is made.")


def _make(connection: BaseDatabaseWrapper, resource: Resource) -> None:
    """Have the row there, committed, whoever makes it; inside a ``TestCase``, in the test's transaction."""

    def work(cursor: Cursor) -> None:
        with _alone(cursor, resource.key):
            cursor.execute(_SEEN, {"key": resource.key})
            if cursor.fetchone() is None:
                _insert(cursor, resource)

    if testmode.in_testcase(connection.alias):
        with connection.cursor() as ordinary:
            _insert(ordinary, resource)
        return
    with contextlib.closing(OwnSession(connection.alias)) as session:
        session.run(work)  # type: ignore[arg-type] # our own session's cursor is never Django's


def _insert(cursor: AnyCursor, resource: Resource) -> None:
    dialect_for(cursor.db).insert_missing(cursor, _VALUES, {"key": resource.key, "name": resource.name})


def grants(alias: str, resource: Resource) -> int | None:
    """Return how many committed transactions have had the lock; ``None`` if that cannot be read."""

    def read(cursor: AnyCursor) -> int:
        cursor.execute(f"SELECT grants FROM {KEY_ROWS} WHERE name_key = %(key)s", {"key": resource.key})
        row = cursor.fetchone()
        return int(row[0]) if row else 0

    with contextlib.suppress(BackendError), contextlib.closing(OwnSession(alias)) as session:
        return session.run(read)
    return None


def purge(alias: str) -> int:
    """Delete the rows that no transaction has locked, and return how many. Raises ``BackendError``."""
    deleted, after = 0, ""
    with contextlib.closing(OwnSession(alias)) as session:
        while found := session.transaction(functools.partial(_purge_some, after=after)):
            count, after = found
            deleted += count
    return deleted


def _purge_some(cursor: AnyCursor, after: str) -> tuple[int, str] | None:
    """Delete the rows of one chunk that are free. Return how many, and where the next one begins."""
    cursor.execute(_NEXT, {"after": after})
    keys = [row[0] for row in cursor.fetchall()]
    if not keys:
        return None
    # Who has a row locked is not waited for, so that nobody who waits for that row finds it gone in the end.
    free = f"SELECT name_key FROM {KEY_ROWS} WHERE name_key IN ({_places(keys)})"
    cursor.execute(f"{free}{dialect_for(cursor.db).lock_skipping}", keys)
    unlocked = [row[0] for row in cursor.fetchall()]
    if unlocked:
        cursor.execute(f"DELETE FROM {KEY_ROWS} WHERE name_key IN ({_places(unlocked)})", unlocked)
    return len(unlocked), keys[-1]


def _places(values: list[str]) -> str:
    return ", ".join(["%s"] * len(values))


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
