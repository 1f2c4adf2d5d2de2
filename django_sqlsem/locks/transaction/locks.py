"""``transaction_lock()``: a named lock that lives and dies with the caller's transaction.

``table_lock()``: a model's table, locked until the caller's transaction ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import connections, router
from django.db.models import Model

from django_sqlsem.backends import database_for
from django_sqlsem.core.durations import UNSET, Seconds, Unset
from django_sqlsem.core.names import MAX_NAME_LENGTH, Resource, key_of, resource_for, validate_name
from django_sqlsem.core.templates import is_coroutine_function
from django_sqlsem.core.text import shown
from django_sqlsem.locks.transaction import rows
from django_sqlsem.locks.transaction.base import Wanted
from django_sqlsem.locks.transaction.callers import (
    TransactionPermit,
    check_options,
    lock_here,
    locking_for,
    open_locked,
)

if TYPE_CHECKING:
    from types import TracebackType


T = TypeVar("T")

__all__ = ["LockedAtomic", "TransactionPermit", "locked_atomic", "purge_transaction_locks", "transaction_lock"]


def transaction_lock(
    name: str,
    shared: bool = False,
    *,
    timeout: Seconds | Unset | None = UNSET,
    using: str | None = None,
) -> TransactionPermit:
    """Lock ``name`` until the transaction that is open in this thread ends, committed or rolled back.

    ``shared``: together with others that ask for the same, and with nobody else. ``timeout``: seconds or
    ``timedelta`` to wait, ``None`` for ever, 0 not at all; omitted, as ``SQLSEM["TIMEOUT"]`` says (30 s). ``using``:
    alias of the database whose transaction it is; omitted, the one that keeps the locks.

    Raises ``AcquireTimeoutError``, after which the transaction goes on; ``DeadlockError``, after which it can only be
    rolled back; ``BackendError``; Django's ``TransactionManagementError`` without a transaction, or in one whose reads
    would stay as old as its beginning; ``SynchronousOnlyOperation`` in a coroutine; ``TypeError`` or ``ValueError``
    for a bad argument.
    """
    wanted = _wanted(name, shared)
    check_options(shared, timeout, using)
    return lock_here(wanted, timeout, database_for(using))


def locked_atomic(
    name: str,
    shared: bool = False,
    *,
    timeout: Seconds | Unset | None = UNSET,
    using: str | None = None,
) -> LockedAtomic:
    """Open ``transaction.atomic()`` with ``name`` locked: a context manager and a decorator.

    It takes what ``transaction_lock()`` takes and raises what that does. On SQLite the timeout counts for the begin
    of the transaction too, and ``waited`` is known in its mode IMMEDIATE as well. Inside another transaction it is a
    savepoint, and the lock stays until the outer one ends.
    """
    wanted = _wanted(name, shared)
    check_options(shared, timeout, using)
    return LockedAtomic(lambda: open_locked(wanted, timeout, database_for(using)))


def purge_transaction_locks(*, using: str | None = None) -> int:
    """Delete the rows of names that no transaction has locked now, and return how many there were.

    They are made again when they are needed, so this is safe at any time. Raises ``BackendError``.
    """
    alias = database_for(using)
    return rows.purge(alias) if locking_for(connections[alias]).keeps_rows else 0


class LockedAtomic(AbstractContextManager[TransactionPermit]):
    """What ``locked_atomic()`` returns: one block, or the decorator of a function each of whose calls is one."""

    def __init__(self, opened: Callable[[], AbstractContextManager[TransactionPermit]]) -> None:
        self._opened = opened
        self._block: AbstractContextManager[TransactionPermit] | None = None

    def __call__(self, func: Callable[..., T]) -> Callable[..., T]:
        """Decorate a function. Raises ``TypeError`` for a coroutine function."""
        if is_coroutine_function(func):
            raise TypeError(f"@locked_atomic decorates synchronous functions, not {shown(func)}.")

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> T:
            with self._opened():
                return func(*args, **kwargs)

        return wrapper

    def __enter__(self) -> TransactionPermit:
        """Begin the transaction and take the lock."""
        if self._block is not None:
            raise RuntimeError("A block of locked_atomic() is entered once: call it for each block.")
        self._block = self._opened()
        return self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """End the transaction, and with it the lock."""
        return None if self._block is None else self._block.__exit__(kind, error, traceback)


def _wanted(name: str, shared: bool) -> Wanted:
    return Wanted(resource_for(validate_name(name), "transaction_lock"), shared)


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
