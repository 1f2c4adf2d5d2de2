"""Whether the code runs inside a test whose transaction will be rolled back."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from django.db.backends.signals import connection_created

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper


_lock = threading.Lock()
_connections: weakref.WeakSet[BaseDatabaseWrapper] = weakref.WeakSet()


def _remember(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    if active():
        with _lock:
            _connections.add(connection)


def install() -> None:
    """Watch connections open, so that any thread can ask what the test's own connection is doing."""
    connection_created.connect(_remember, dispatch_uid="sqlsem_testmode")


def active() -> bool:
    """Whether a test runner has set up its environment (Django's, or pytest-django's)."""
    utils: Any = sys.modules.get("django.test.utils")  # never imported for its own sake
    return utils is not None and hasattr(utils._TestState, "saved_data")


def testcase_blocks(alias: str) -> Sequence[object]:
    """Return the ``atomic`` blocks that a running ``TestCase`` holds open on this database: its class's, its test's.

    The connection is looked for in all threads: an async test, a view or a thread of the test's own runs on
    another one, yet its locks must be as private as the test's data. A lock database that the ``TestCase`` does not
    name among its ``databases`` goes by another one's.
    """
    if not active():
        return ()
    with _lock:
        candidates = sorted(_connections, key=lambda connection: (connection.alias != alias, connection.alias))
    for connection in candidates:
        # Django marks them so that durable atomic blocks work inside TestCase.
        blocks = [block for block in connection.atomic_blocks if getattr(block, "_from_testcase", False)]
        if blocks:
            return blocks
    return ()


def in_testcase(alias: str) -> bool:
    """Whether a ``TestCase`` (or pytest-django's ``db``) has this database inside its transaction."""
    return bool(testcase_blocks(alias))


def refuse_forbidden(connection: BaseDatabaseWrapper) -> None:
    """Raise what Django does if the running test may not use this database, of which it sees ordinary use only."""
    guard: Any = vars(connection).get("connect")
    if type(guard).__name__ == "_DatabaseFailure":  # what SimpleTestCase puts there
        guard()
    ensure: Any = type(connection).ensure_connection
    if getattr(ensure, "__module__", "").startswith("pytest_django"):  # what it puts there
        ensure(connection)
