"""What SQLite asks of those who share a file: no open connection passes a fork, and no file is swapped unseen."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

from django_sqlsem.database.dialects import dialect_for

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


FileId: TypeAlias = "tuple[int, int] | None"

_known: weakref.WeakSet[BaseDatabaseWrapper] = weakref.WeakSet()
_inherited: list[tuple[weakref.ref[BaseDatabaseWrapper], Any]] = []
#: Two threads may open their first connections at the same moment: none opens before the inherited ones are closed.
_leaving = threading.Lock()


def file_id(connection: BaseDatabaseWrapper) -> FileId:
    """Return what file an SQLite connection's name means now; ``None`` if none, or for any other database."""
    if not dialect_for(connection).in_a_file:
        return None
    try:
        found = os.stat(connection.settings_dict["NAME"])
    except (OSError, TypeError, ValueError):
        return None
    return found.st_dev, found.st_ino


def remember(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    """Know of a connection that was opened by any code of the process: a receiver of ``connection_created``."""
    if isinstance(connection.connection, sqlite3.Connection):
        _known.add(connection)


def after_fork() -> None:
    """In a forked child: note the connections that came along."""
    global _leaving
    _leaving = threading.Lock()
    _inherited[:] = [(weakref.ref(each), each.connection) for each in list(_known) if each.connection is not None]


def leave_inherited(file: FileId) -> None:
    """Close the connections to a file that came along at the fork, before the first of our own is opened.

    As long as SQLite sees them it believes that this process has the file's locks. The system says that the parent
    has: others would take the write-ahead log away under this process, which went on alone in a file of its own.
    A connection inside a transaction is left alone, as its end would undo the parent's.
    """
    if not _inherited:
        return
    with _leaving:
        for reference, raw in list(_inherited):
            connection = reference()
            mine = connection is not None and connection.connection is raw
            if connection is not None and mine and file is not None and file_id(connection) == file:
                if raw.in_transaction:
                    continue
                with contextlib.suppress(Exception):
                    raw.close()
                connection.connection = None
            if connection is None or connection.connection is not raw:
                _inherited.remove((reference, raw))
