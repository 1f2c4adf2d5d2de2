"""Whether the code runs inside a test whose transaction will be rolled back."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from django.db.backends.signals import connection_created

if TYPE_CHECKING:
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


def testcase_block(alias: str) -> object | None:
    """Return the ``atomic`` block that a running ``TestCase`` holds open on this database, if there is one.

    The connection is looked for in all threads: an async test, a view or a thread of the test's own runs on
    another one, yet its locks must be as private as the test's data.
    """
    if not active():
        return None
    with _lock:
        candidates = [connection for connection in _connections if connection.alias == alias]
    for connection in candidates:
        # Django marks them so that durable atomic blocks work inside TestCase.
        blocks = [block for block in connection.atomic_blocks if getattr(block, "_from_testcase", False)]
        if blocks:
            return blocks[-1]
    return None


def in_testcase(alias: str) -> bool:
    """Whether a ``TestCase`` (or pytest-django's ``db``) has this database inside its transaction."""
    return testcase_block(alias) is not None
