"""New connections of our own: to the database that an alias means now, with settings fit for locks."""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.db import Error as DjangoDatabaseError
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import load_backend

from django_sqlsem.database import limits, sockets, sqlite
from django_sqlsem.database.cursors import cursor_of

if TYPE_CHECKING:
    from django_sqlsem.database.cursors import AnyCursor


T = TypeVar("T")

#: What a driver's connection has, by PEP 249.
_DRIVERS: Final = ("cursor", "commit", "rollback", "close")


def open_connection(alias: str, made: list[Any] | None = None) -> BaseDatabaseWrapper:
    """Open a connection and set its limits. Raises Django's database errors.

    ``made`` gets what the caller must close if an exception strikes before it has the result.
    """
    made = [] if made is None else made
    try:
        connection = _connection(alias, made)
        sqlite.leave_inherited(sqlite.file_id(connection))
        connection.ensure_connection()  # unlike connect(), it raises Django's errors, not the driver's
        limits.prepare(connection)
        return connection
    except BaseException as error:
        made += _half_open(error)
        close_all(made)
        raise


def close_all(made: list[Any]) -> None:
    """Close what was made under way to a connection that nobody has got."""
    for each in made:
        with contextlib.suppress(Exception):
            each.close()


def django_transaction(connection: BaseDatabaseWrapper, work: Callable[[AnyCursor], T | None]) -> T | None:
    """Call ``work`` in a transaction of Django's kind; commit unless it returns ``None``. Raises database errors."""
    connection.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
    result = None
    try:
        with cursor_of(connection) as cursor:
            result = work(cursor)
    except DjangoDatabaseError:
        if connection.connection is not None:  # else the next word would open another one
            with contextlib.suppress(DjangoDatabaseError):
                connection.rollback()
                connection.set_autocommit(True)
        raise
    if result is None:
        _roll_back(connection)
    else:
        connection.commit()
    connection.set_autocommit(True)
    return result


def _roll_back(connection: BaseDatabaseWrapper) -> None:
    try:
        connection.rollback()
    except DjangoDatabaseError as error:
        if limits.is_disconnect(error):
            raise
        # FreeTDS says that there is no transaction any more, after a deadlock or a cancelled statement.


def _half_open(error: BaseException) -> list[Any]:
    """Return the driver's connection that an interrupted ``connect()`` of Django's had made and not yet kept."""
    values = [value for frame, _ in traceback.walk_tb(error.__traceback__) for value in frame.f_locals.values()]
    drivers = [value for value in values if all(hasattr(value, name) for name in _DRIVERS)]
    return [value for value in drivers if not isinstance(value, BaseDatabaseWrapper)]


def _connection(alias: str, made: list[Any]) -> BaseDatabaseWrapper:
    settings: dict[str, Any] = copy.deepcopy(dict(connections[alias].settings_dict))
    backend: Any = load_backend(settings["ENGINE"])
    limits.adapt(settings, backend.DatabaseWrapper.vendor)
    connection: BaseDatabaseWrapper = limits.without_pool(backend.DatabaseWrapper)(settings, alias)
    made.append(connection)
    connection.inc_thread_sharing()
    get_new_connection = connection.get_new_connection

    def get_limited(parameters: dict[str, Any]) -> Any:
        if connection.vendor != "microsoft":
            raw = get_new_connection(parameters)
            made.append(raw)
            limits.limit_waiting(raw)
            return raw
        options, port = settings["OPTIONS"], sockets.port_in(settings)
        limit = int(options["connection_timeout"])
        raw, _ = sockets.opening(lambda: get_new_connection(parameters), port, limit, patience=2 * limit)
        made.append(raw)
        sockets.limit_reads(raw, options["query_timeout"])
        return raw

    connection.get_new_connection = get_limited  # type: ignore[method-assign,assignment]
    # Polls and renewals would drown DEBUG's query log.
    connection.make_debug_cursor = connection.make_cursor  # type: ignore[method-assign,assignment]
    return connection
