"""New connections of our own: to the database that an alias means now, with settings fit for locks."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.utils import load_backend

from django_sqlsem import session_settings, sqlite_files

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


def open_connection(alias: str) -> BaseDatabaseWrapper:
    """Open a connection and set its limits. Raises Django's database errors."""
    connection = _connection(alias)
    sqlite_files.leave_inherited(sqlite_files.file_id(connection))
    try:
        connection.ensure_connection()  # unlike connect(), it raises Django's errors, not the driver's
        session_settings.prepare(connection)
    except BaseException:
        with contextlib.suppress(Exception):
            connection.close()
        raise
    return connection


def _connection(alias: str) -> BaseDatabaseWrapper:
    settings: dict[str, Any] = copy.deepcopy(dict(connections[alias].settings_dict))
    backend: Any = load_backend(settings["ENGINE"])
    session_settings.adapt(settings, backend.DatabaseWrapper.vendor)
    connection: BaseDatabaseWrapper = backend.DatabaseWrapper(settings, alias)
    connection.inc_thread_sharing()
    get_new_connection = connection.get_new_connection

    def get_limited(parameters: dict[str, Any]) -> Any:
        raw = get_new_connection(parameters)
        session_settings.limit_waiting(raw)
        return raw

    connection.get_new_connection = get_limited  # type: ignore[method-assign,assignment]
    # Polls and renewals would drown DEBUG's query log.
    connection.make_debug_cursor = connection.make_cursor  # type: ignore[method-assign,assignment]
    return connection
