"""How a lock of the caller's own transaction is taken: what is common to the databases."""

from __future__ import annotations

import abc
import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from django.db import Error as DjangoDatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from django_sqlsem.core.names import Resource
from django_sqlsem.database.errors import backend_error, is_deadlock_of_sql_server, sqlstate
from django_sqlsem.exceptions import DeadlockError

#: Levels at which every statement sees what others have committed. What was read before a wait is read anew after it.
FRESH_LEVELS: Final = ("READ COMMITTED", "READ UNCOMMITTED")
_DEADLOCKS: Final = {"40P01", 1213}
#: The longest wait that all servers take, in milliseconds.
_MAX_MS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a transaction asks for."""

    #: The key row, or the application lock.
    resource: Resource
    shared: bool
    #: A table by its name in SQL, to be locked itself where the database can; empty for a name.
    table: str = ""


@dataclass(frozen=True, slots=True)
class LockMark:
    """The moment at which a lock was asked for."""

    at: float
    #: How many committed transactions had had it by then; ``None`` where the database itself tells who waits.
    grants: int | None = None


class TransactionLocking(abc.ABC):
    """Takes locks in the transaction that is open on a connection. They end with it."""

    #: Whether each name has a row, which can be purged.
    keeps_rows: ClassVar[bool] = True

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection = connection

    def mark(self, wanted: Wanted) -> LockMark:
        """Return what ``lock`` has to know of the time before the transaction, if it is asked for before that."""
        return LockMark(time.monotonic())

    @contextlib.contextmanager
    def patience(self, timeout: float | None) -> Iterator[None]:
        """Where the begin of a transaction waits for others: have it wait for ``timeout`` seconds, inside the block."""
        yield

    def is_busy(self, error: Exception) -> bool:
        """Whether the begin of a transaction failed because it waited for too long."""
        return False

    @abc.abstractmethod
    def lock(self, wanted: Wanted, timeout: float | None, *, mark: LockMark | None = None) -> float | None:
        """Take a lock within ``timeout`` seconds; ``None`` waits without a limit, 0 not at all.

        Returns how long it was waited for, in seconds: 0 only if nobody else had it; ``None`` after the timeout. Then
        the transaction is as it was. Raises ``DeadlockError``, ``BackendError``, and ``TransactionManagementError``
        under an isolation level whose reads may be older than the lock.
        """

    @contextlib.contextmanager
    def errors(self, wanted: Wanted) -> Iterator[None]:
        """Translate the database's errors."""
        try:
            yield
        except TransactionManagementError:
            raise
        except DjangoDatabaseError as error:
            if number_of(error) in _DEADLOCKS or is_deadlock_of_sql_server(error):
                self.doom()
                raise deadlock(wanted) from error
            raise backend_error(self.connection.alias, error) from error

    def doom(self) -> None:
        """Have Django refuse every further query: the transaction can only be rolled back."""
        if self.connection.in_atomic_block:
            self.connection.needs_rollback = True


def deadlock(wanted: Wanted) -> DeadlockError:
    """Return the error for the transaction that was chosen to break a deadlock."""
    return DeadlockError(
        f"The database chose this transaction to break a deadlock over {wanted.resource.name!r}. It must be rolled"
        " back as a whole: let this exception leave the outermost atomic(), then begin anew."
    )


def stale_reads(level: str, alias: str) -> TransactionManagementError:
    """Return the error for a transaction whose reads may show the time before the lock was granted."""
    return TransactionManagementError(
        f"The transaction on {alias!r} is {level}: after the lock is granted it could still read what was there before"
        " others gave it back. Use READ COMMITTED (isolation_level in the OPTIONS of DATABASES), or take a mutex before"
        " the transaction begins."
    )


def milliseconds(seconds: float | None, *, least: int = 0, no_limit: int = _MAX_MS) -> int:
    """Return for how long to wait in whole milliseconds, from ``least``; ``no_limit`` for ``None``."""
    return no_limit if seconds is None else min(max(math.ceil(seconds * 1000), least), _MAX_MS)


def number_of(error: Exception) -> str | int | None:
    """Return the driver's number of an error: a SQLSTATE on PostgreSQL, else an int."""
    cause: Any = error.__cause__ or error
    code = getattr(cause, "sqlite_errorcode", None) or next(iter(cause.args), None)
    if isinstance(code, int):
        return code
    return sqlstate(cause)
