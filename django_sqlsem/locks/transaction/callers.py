"""Locks of the caller's own transaction: the checks before, the grant, and the error after a timeout.

Which database takes transaction locks in which way.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError
from django.utils.asyncio import async_unsafe

from django_sqlsem import conf
from django_sqlsem.core.durations import Unset, to_seconds
from django_sqlsem.core.text import shown
from django_sqlsem.database.errors import backend_error
from django_sqlsem.database.transactions import open_transactions
from django_sqlsem.exceptions import AcquireTimeoutError
from django_sqlsem.locks.transaction.base import TransactionLocking, Wanted
from django_sqlsem.locks.transaction.mysql import MySQLLocking
from django_sqlsem.locks.transaction.postgresql import PostgreSQLLocking
from django_sqlsem.locks.transaction.sqlite import SQLiteLocking
from django_sqlsem.locks.transaction.sqlserver import ApplockLocking

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.locks.transaction.base import Mark


_LOCKINGS: Final[dict[str, type[TransactionLocking]]] = {
    "postgresql": PostgreSQLLocking,
    "sqlite": SQLiteLocking,
    "mysql": MySQLLocking,
    "microsoft": ApplockLocking,
}


def locking_for(connection: BaseDatabaseWrapper) -> TransactionLocking:
    """Return what takes locks in a connection's transaction. Raises ``ImproperlyConfigured`` for an unknown vendor."""
    if connection.vendor not in _LOCKINGS:
        raise ImproperlyConfigured(
            f"No transaction locks on {connection.vendor!r} databases; there are for {', '.join(_LOCKINGS)}."
        )
    return _LOCKINGS[connection.vendor](connection)


logger = logging.getLogger("django_sqlsem")

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


def check_options(shared: object, timeout: object, using: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` for an option that is not allowed."""
    if not isinstance(shared, bool):
        raise TypeError(f"shared must be True or False, not {shown(shared)}.")
    if not isinstance(timeout, Unset):
        to_seconds(timeout, what="timeout", allow_none=True)
    if using is not None and not isinstance(using, str):
        raise TypeError(f"using must be the alias of a database or None, not {shown(using)}.")


@async_unsafe(_SYNCHRONOUS)
def lock_here(wanted: Wanted, timeout: object, alias: str, *, mark: Mark | None = None) -> TransactionPermit:
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
    seconds = _seconds(timeout, alias)
    left = seconds if seconds is None or mark is None else max(0.0, seconds - (time.monotonic() - mark.at))
    waited = locking_for(connection).lock(wanted, left, mark=mark)
    if waited is None:
        raise _refusal(wanted, seconds)
    name = wanted.resource.name
    extra = {"semaphore": name, "what": "granted", "database": alias, "waited": waited}
    logger.debug("%s locked by the transaction on %r after %.3f s", name, alias, waited, extra=extra)
    return TransactionPermit(wanted.resource.name, wanted.shared, waited, alias)


@contextlib.contextmanager
def open_locked(wanted: Wanted, timeout: object, alias: str) -> Iterator[TransactionPermit]:
    """Open a transaction, or a savepoint of the open one, whose first act is to take the lock."""
    _refuse_coroutines()
    connection = connections[alias]
    mark = None
    with contextlib.ExitStack() as stack:
        if connection.get_autocommit():
            locking, seconds = locking_for(connection), _seconds(timeout, alias)
            mark = locking.mark(wanted)
            try:
                with locking.patience(seconds):
                    stack.enter_context(transaction.atomic(using=alias))
            except DatabaseError as error:
                raise _refusal(wanted, seconds) if locking.is_busy(error) else backend_error(alias, error) from error
        else:
            stack.enter_context(transaction.atomic(using=alias))
        yield lock_here(wanted, timeout, alias, mark=mark)


@async_unsafe(_SYNCHRONOUS)
def _refuse_coroutines() -> None:
    """Raise ``SynchronousOnlyOperation`` where an event loop runs."""


def _seconds(timeout: Any, alias: str) -> float | None:
    if isinstance(timeout, Unset):
        return conf.config(alias).timeout
    return to_seconds(timeout, what="timeout", allow_none=True)


def _refusal(wanted: Wanted, seconds: float | None) -> AcquireTimeoutError:
    name = wanted.resource.name
    when = f" and was not given back within {seconds:g} s" if seconds else ""
    return AcquireTimeoutError(f"{name!r} is locked by another transaction{when}.", name=name, timeout=seconds)
