"""How a lock of the caller's own transaction is taken: what is common to the databases."""

from __future__ import annotations

import abc
import contextlib
import enum
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django.db import Error as DjangoDatabaseError
from django.db.transaction import TransactionManagementError

from django_sqlsem.core import testmode
from django_sqlsem.database.errors import backend_error, is_deadlock_of_sql_server, sqlstate
from django_sqlsem.exceptions import BackendError, DeadlockError
from django_sqlsem.locks.transaction import rows

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.core.names import Resource


#: Levels at which every statement sees what others have committed. What was read before a wait is read anew after it.
FRESH_LEVELS: Final = ("READ COMMITTED", "READ UNCOMMITTED")
_DEADLOCKS: Final = {"40P01", 1213}
#: A row may be purged between its making and its locking; so often in a row, something else is wrong.
_MAX_MAKES: Final = 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a transaction asks for."""

    #: The key row, or the application lock.
    resource: Resource
    shared: bool
    #: A table by its name in SQL, to be locked itself where the database can; empty for a name.
    table: str = ""


class Outcome(enum.Enum):
    """What became of one attempt."""

    GRANTED = "granted"
    #: Another transaction has it.
    TAKEN = "taken"
    #: There is no key row to lock.
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Mark:
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

    def mark(self, wanted: Wanted) -> Mark:
        """Return what ``lock`` has to know of the time before the transaction, if it is asked for before that."""
        return Mark(time.monotonic())

    @contextlib.contextmanager
    def patience(self, timeout: float | None) -> Iterator[None]:
        """Where the begin of a transaction waits for others: have it wait for ``timeout`` seconds, inside the block."""
        yield

    def is_busy(self, error: Exception) -> bool:
        """Whether the begin of a transaction failed because it waited for too long."""
        return False

    @abc.abstractmethod
    def lock(self, wanted: Wanted, timeout: float | None, *, mark: Mark | None = None) -> float | None:
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


def number_of(error: Exception) -> str | int | None:
    """Return the driver's number of an error: a SQLSTATE on PostgreSQL, else an int."""
    cause: Any = error.__cause__ or error
    code = getattr(cause, "sqlite_errorcode", None) or next(iter(cause.args), None)
    if isinstance(code, int):
        return code
    return sqlstate(cause)


class RowLocking(TransactionLocking):
    """Locks the key row by a read, which the server lets wait."""

    def strength(self, *, shared: bool) -> str:
        """Return what follows a read that locks its rows, with others or alone."""
        return "FOR SHARE" if shared else "FOR UPDATE"

    def lock(self, wanted: Wanted, timeout: float | None, *, mark: Mark | None = None) -> float | None:
        """Try at once, so that waiting is known from its opposite, then wait. Make the row if it is not there."""
        started = time.monotonic()
        with self.errors(wanted):
            for _ in range(_MAX_MAKES):
                outcome = self.try_now(wanted)
                if outcome is Outcome.GRANTED:
                    return 0.0
                if outcome is Outcome.TAKEN:
                    left = None if timeout is None else started + timeout - time.monotonic()
                    outcome = Outcome.TAKEN if left is not None and left <= 0 else self.wait(wanted, left)
                    if outcome is Outcome.GRANTED:
                        return max(time.monotonic() - started, 1e-6)
                    if outcome is Outcome.TAKEN:
                        return None
                # If anything was waited for, it was a purge: who comes first now has not waited for a holder.
                self.make(wanted)
        raise BackendError(f"The row of {wanted.resource.name!r} on {self.connection.alias!r} goes away as it is made.")

    @abc.abstractmethod
    def try_now(self, wanted: Wanted) -> Outcome:
        """Take the lock if it is free. Nothing else makes it look taken: neither a row's making nor its purge."""

    @abc.abstractmethod
    def wait(self, wanted: Wanted, seconds: float | None) -> Outcome:
        """Wait in the server for at most so many seconds, and leave the session's settings as they were."""

    def make(self, wanted: Wanted) -> None:
        """Make the key row, on a connection of our own: in this transaction it would be in everybody's way.

        Inside a ``TestCase`` in the test's transaction, with which it goes.
        """
        if testmode.in_testcase(self.connection.alias):
            with self.connection.cursor() as cursor:
                rows.insert(cursor, wanted.resource)
        else:
            rows.make(self.connection.alias, wanted.resource)
