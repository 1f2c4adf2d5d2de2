"""Locks that live and die with the caller's transaction: a name, a block that opens one, a model's table."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError
from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model
from django.db.transaction import TransactionManagementError
from django.utils.asyncio import async_unsafe

from django_sqlsem.backends import database_for
from django_sqlsem.core.durations import UNSET, Seconds, Unset, to_seconds
from django_sqlsem.core.names import MAX_NAME_LENGTH, Resource, key_of, refuse_fields, resource_for, validate_name
from django_sqlsem.core.templates import is_coroutine_function, is_or_calls
from django_sqlsem.core.text import shown
from django_sqlsem.database.errors import backend_error
from django_sqlsem.database.transactions import open_transactions
from django_sqlsem.exceptions import AcquireTimeoutError
from django_sqlsem.locks.acquire import seconds_to_wait
from django_sqlsem.locks.transaction import key_rows
from django_sqlsem.locks.transaction.base import LockMark, TransactionLocking, Wanted
from django_sqlsem.locks.transaction.mysql import MySQLLocking
from django_sqlsem.locks.transaction.postgresql import PostgreSQLLocking
from django_sqlsem.locks.transaction.sqlite import SQLiteLocking
from django_sqlsem.locks.transaction.sqlserver import ApplockLocking

T = TypeVar("T")

logger = logging.getLogger("django_sqlsem")

_LOCKINGS: Final[dict[str, type[TransactionLocking]]] = {
    "postgresql": PostgreSQLLocking,
    "sqlite": SQLiteLocking,
    "mysql": MySQLLocking,
    "microsoft": ApplockLocking,
}


def _locking_for(connection: BaseDatabaseWrapper) -> TransactionLocking:
    """Return what takes locks in a connection's transaction. Raises ``ImproperlyConfigured`` for an unknown vendor."""
    if connection.vendor not in _LOCKINGS:
        raise ImproperlyConfigured(
            f"No transaction locks on {connection.vendor!r} databases; there are for {', '.join(_LOCKINGS)}."
        )
    return _LOCKINGS[connection.vendor](connection)


_SYNCHRONOUS: Final = (
    "Transactions are synchronous, and so are their locks: call the function that has the atomic() through"
    " sync_to_async()."
)


@dataclass(frozen=True, slots=True)
class TransactionPermit:
    """A lock that the caller's transaction has until it ends."""

    name: str
    #: Shared with others that asked for the same.
    shared: bool
    #: How long it was waited for, in seconds; 0 only if nobody else had it. Then nobody has just done the work.
    waited: float
    #: The alias of the database whose transaction has it.
    using: str


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
    wanted = _wanted(name, shared, timeout, using)
    return _lock_here(wanted, timeout, database_for(using))


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
    wanted = _wanted(name, shared, timeout, using)
    return LockedAtomic(lambda: _open_locked(wanted, timeout, database_for(using)))


def purge_transaction_locks(*, using: str | None = None) -> int:
    """Delete the rows of names that no transaction has locked now, and return how many there were.

    They are made again when they are needed, so this is safe at any time. Raises ``BackendError``.
    """
    alias = database_for(using)
    return key_rows.purge(alias) if _locking_for(connections[alias]).keeps_rows else 0


class LockedAtomic(AbstractContextManager[TransactionPermit]):
    """What ``locked_atomic()`` returns: one block, or the decorator of a function each of whose calls is one."""

    def __init__(self, opened: Callable[[], AbstractContextManager[TransactionPermit]]) -> None:
        self._opened = opened
        self._block: AbstractContextManager[TransactionPermit] | None = None

    def __call__(self, func: Callable[..., T]) -> Callable[..., T]:
        """Decorate a function. Raises ``TypeError`` for a coroutine function or a generator function."""
        if is_coroutine_function(func) or is_or_calls(inspect.isasyncgenfunction, func):
            raise TypeError(f"@locked_atomic decorates synchronous functions, not {shown(func)}.")
        if is_or_calls(inspect.isgeneratorfunction, func):
            raise TypeError(f"@locked_atomic decorates no generators: put a block of it into {shown(func)}.")

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
    _check_options(shared, timeout, using)
    alias = database_for(router.db_for_write(model) if using is None else using)
    quoted: Any = connections[alias].ops.quote_name(model._meta.db_table)
    return _lock_here(Wanted(_resource(model._meta.db_table), shared, str(quoted)), timeout, alias)


def _resource(table: str) -> Resource:
    # A name may not contain NUL, so no name has the key of a table.
    key = key_of(f"table\0{table}")
    return Resource(f"table {table}"[:MAX_NAME_LENGTH], "table_lock", key)


# What they have in common.


def _check_options(shared: object, timeout: object, using: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` for an option that is not allowed."""
    if not isinstance(shared, bool):
        raise TypeError(f"shared must be True or False, not {shown(shared)}.")
    if not isinstance(timeout, Unset):
        to_seconds(timeout, what="timeout", allow_none=True)
    if using is not None and not isinstance(using, str):
        raise TypeError(f"using must be the alias of a database or None, not {shown(using)}.")


def _wanted(name: str, shared: bool, timeout: object, using: object) -> Wanted:
    wanted = Wanted(resource_for(validate_name(name), "transaction_lock"), shared)
    _check_options(shared, timeout, using)
    if isinstance(name, str):
        refuse_fields(name)
    return wanted


@async_unsafe(_SYNCHRONOUS)
def _lock_here(
    wanted: Wanted, timeout: Seconds | Unset | None, alias: str, *, mark: LockMark | None = None
) -> TransactionPermit:
    """Take a lock in the transaction that is open on ``alias`` in this thread.

    Raises ``TransactionManagementError`` without one, and what ``TransactionLocking.lock`` does;
    ``AcquireTimeoutError`` after ``timeout``.
    """
    connection = connections[alias]
    if connection.get_autocommit():
        others = [each for each in open_transactions() if each != alias]
        hint = f" One is open on {', '.join(map(repr, others))}: name it by using=." if others else ""
        raise TransactionManagementError(
            f"{wanted.resource.name!r} can be locked inside a transaction only, and none is open on {alias!r}: its end"
            f" is what unlocks it. Put it into `with transaction.atomic():`.{hint}"
        )
    seconds = seconds_to_wait(timeout, alias=alias)
    left = seconds if seconds is None or mark is None else max(0.0, seconds - (time.monotonic() - mark.at))
    waited = _locking_for(connection).lock(wanted, left, mark=mark)
    if waited is None:
        raise _refusal(wanted, seconds)
    name = wanted.resource.name
    extra = {"semaphore": name, "what": "granted", "database": alias, "waited": waited}
    logger.debug("%s locked by the transaction on %r after %.3f s", name, alias, waited, extra=extra)
    return TransactionPermit(wanted.resource.name, wanted.shared, waited, alias)


@async_unsafe(_SYNCHRONOUS)
@contextlib.contextmanager
def _open_locked(wanted: Wanted, timeout: Seconds | Unset | None, alias: str) -> Iterator[TransactionPermit]:
    """Open a transaction, or a savepoint of the open one, whose first act is to take the lock."""
    connection = connections[alias]
    mark = None
    with contextlib.ExitStack() as stack:
        if connection.get_autocommit():
            locking, seconds = _locking_for(connection), seconds_to_wait(timeout, alias=alias)
            mark = locking.mark(wanted)
            try:
                with locking.patience(seconds):
                    stack.enter_context(transaction.atomic(using=alias))
            except DatabaseError as error:
                raise _refusal(wanted, seconds) if locking.is_busy(error) else backend_error(alias, error) from error
        else:
            stack.enter_context(transaction.atomic(using=alias))
        yield _lock_here(wanted, timeout, alias, mark=mark)


def _refusal(wanted: Wanted, seconds: float | None) -> AcquireTimeoutError:
    name = wanted.resource.name
    when = f" and was not given back within {seconds:g} s" if seconds else ""
    return AcquireTimeoutError(f"{name!r} is locked by another transaction{when}.", name=name, timeout=seconds)
