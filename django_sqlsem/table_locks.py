"""``table_lock()``: a model's table, locked until the caller's transaction ends."""

from __future__ import annotations

from typing import Any

from django.db import connections, router
from django.db.models import Model

from django_sqlsem.backends import database_for
from django_sqlsem.backends.transaction_base import Wanted
from django_sqlsem.caller_locks import TransactionPermit, check_options, lock_here
from django_sqlsem.naming import MAX_NAME_LENGTH, Resource, key_of
from django_sqlsem.timeouts import UNSET, Seconds, Unset
from django_sqlsem.wording import shown

__all__ = ["table_lock"]


def table_lock(
    model: type[Model],
    shared: bool = False,
    *,
    timeout: Seconds | Unset | None = UNSET,
    using: str | None = None,
) -> TransactionPermit:
    """Lock a model's table until the transaction that is open in this thread ends, committed or rolled back.

    On PostgreSQL and SQL Server the table itself is locked: nobody writes to it, whether they know of this lock or
    not. Plain reads go on on PostgreSQL (mode ``EXCLUSIVE``, or ``SHARE`` if ``shared``) and wait on SQL Server
    (``TABLOCKX, HOLDLOCK``, or ``TABLOCK, HOLDLOCK``). On SQLite nobody writes to anything. On MySQL and MariaDB only
    those who call this wait for one another. ``timeout`` and what it raises: as ``transaction_lock()``. ``using``:
    alias of the database; omitted, where the router writes the model.
    """
    given: object = model
    if not (isinstance(given, type) and issubclass(given, Model)):
        raise TypeError(f"model must be a model class, not {shown(model)} of type {type(model).__name__}.")
    if model._meta.abstract:
        raise ValueError(f"model must have a table, and {model.__name__} is abstract.")
    check_options(shared, timeout, using)
    alias = database_for(router.db_for_write(model) if using is None else using)
    quoted: Any = connections[alias].ops.quote_name(model._meta.db_table)
    return lock_here(Wanted(_resource(model._meta.db_table), shared, str(quoted)), timeout, alias)


def _resource(table: str) -> Resource:
    # A name may not contain NUL, so no name has the key of a table.
    key = key_of(f"table\0{table}")
    return Resource(f"table {table}"[:MAX_NAME_LENGTH], "table_lock", key)
