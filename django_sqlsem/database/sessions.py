"""Connections of our own, apart from the caller's: opened late, used by one thread at a time, dropped when in doubt.

Statements on connections that are not ours: the caller's own, and an operator's.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from django.db import Error as DjangoDatabaseError
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_sqlsem.core import forks
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.database import limits, sockets, sqlite
from django_sqlsem.database.cursors import BEGIN, cursor_of
from django_sqlsem.database.opening import close_all, django_transaction, open_connection
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from django_sqlsem.database.cursors import AnyCursor


T = TypeVar("T")

#: How long a statement is repeated while the database answers "locked" or "deadlock", in seconds.
LOCKED_PATIENCE: Final = 10.0
#: How long a fork waits for statements under way, and statements for a fork, in seconds.
FORK_PATIENCE: Final = 5.0


class Session(Protocol):
    """Where a backend runs its statements."""

    #: How often something was sent, by any thread.
    attempts: int

    @property
    def connection(self) -> BaseDatabaseWrapper:
        """The Django connection, for its vendor and features."""

    def run(self, work: Callable[[AnyCursor], T], *, again: bool = True) -> T:
        """Call ``work`` with a cursor in autocommit, and return what it returns."""

    def transaction(self, work: Callable[[AnyCursor], T | None], *, again: bool = True) -> T | None:
        """Call ``work`` in a transaction of its own; commit unless it returns ``None``."""


class KeeperSession(Session, Protocol):
    """A session as keepers need it."""

    last_used: float
    #: Since when a statement is under way, by the boot clock; ``None`` while none is.
    asked_at: float | None

    @property
    def is_open(self) -> bool:
        """Whether a connection to the database is open."""

    def unreachable(self, since: float) -> bool:
        """Whether no connection could be opened since an instant of ``time.monotonic()``."""

    def close(self) -> None:
        """Close the connection. The session stays usable."""


class OwnSession:
    """One connection that belongs to this library alone, opened at the first statement.

    ``run`` may be called from any thread: statements take turns. It repeats a statement that lost a deadlock or
    found SQLite locked. After any other database error, and after any exception that struck in the driver, the
    connection is thrown away, since its state is unknown; the next call opens a new one. ``again`` says whether
    the work may be repeated when the connection turns out to be dead, its outcome unknown.
    """

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.last_used = time.monotonic()
        self.attempts = 0
        #: Since when the database owes an answer, by the boot clock; ``None`` if the last statement was answered.
        self.asked_at: float | None = None
        #: Called with each connection that was opened, before its first use.
        self.opened: Callable[[BaseDatabaseWrapper], object] | None = None
        self._lock = threading.Lock()
        self._connection: BaseDatabaseWrapper | None = None
        self._file: sqlite.FileId = None
        #: When a connection could not be opened last, and why; ``None`` since one could.
        self._unreachable: tuple[float, DjangoDatabaseError] | None = None
        with _gate:  # who is about to fork goes through all of them
            _sessions.add(self)

    @property
    def connection(self) -> BaseDatabaseWrapper:
        """The connection in use, opened or not."""
        return self._connection or connections[self.alias]

    @property
    def is_open(self) -> bool:
        """Whether a connection to the database is open."""
        return self._connection is not None

    def unreachable(self, since: float) -> bool:
        """Whether no connection could be opened since an instant of ``time.monotonic()``."""
        return self._unreachable is not None and self._unreachable[0] >= since

    def run(self, work: Callable[[AnyCursor], T], *, again: bool = True) -> T:
        """Call ``work`` with a cursor in autocommit. Raises ``BackendError``."""

        def attempt(connection: BaseDatabaseWrapper) -> T:
            with cursor_of(connection) as cursor:
                return work(cursor)

        return self._repeat(attempt, again=again)

    def transaction(self, work: Callable[[AnyCursor], T | None], *, again: bool = True) -> T | None:
        """Call ``work`` in a transaction; commit unless it returns ``None``. Raises ``BackendError``."""

        def attempt(connection: BaseDatabaseWrapper) -> T | None:
            begin = BEGIN.get(connection.vendor)
            if begin is None:
                return django_transaction(connection, work)
            # The driver stays in autocommit: Django's way would cost MySQL two more round trips.
            with cursor_of(connection) as cursor:
                cursor.execute(begin)
                try:
                    result = work(cursor)
                    cursor.execute("ROLLBACK" if result is None else "COMMIT")  # SQLite may be too busy for that
                except _driver_errors(connection):
                    with contextlib.suppress(_driver_errors(connection)):
                        cursor.execute("ROLLBACK")
                    raise  # anything else costs the connection: not a word more on it
                return result

        return self._repeat(attempt, again=again)

    def close(self) -> None:
        """Close the connection. The session stays usable."""
        with self._lock:
            self._discard()

    def _repeat(self, attempt: Callable[[BaseDatabaseWrapper], T], *, again: bool) -> T:
        asked = time.monotonic()
        with _gate:
            pass
        with self._lock:
            if self._unreachable is not None and self._unreachable[0] >= asked:
                # Who stood in line meanwhile need not find it out anew, one long connect timeout after the other.
                raise backend_error(self.alias, self._unreachable[1]) from self._unreachable[1]
            give_up = time.monotonic() + LOCKED_PATIENCE
            tries = 0
            while True:
                tries += 1
                fresh, opened = self._connection is None, False
                self.asked_at = self.asked_at or boot_now()
                try:
                    connection = self._open()
                    opened, self._unreachable = True, None
                    self.attempts += 1
                    result = attempt(connection)
                    self.asked_at = None
                    return result
                except DjangoDatabaseError as error:
                    if limits.is_transient(error) and time.monotonic() < give_up:
                        # Django's errors are on a cycle with all the frames they came through, one with a permit in it.
                        error.__traceback__ = None
                    else:
                        self._discard()
                        if not opened:
                            self._unreachable = (time.monotonic(), error)
                        # A connection that was opened long ago may have died unnoticed: once more on a new one.
                        stale = not fresh and limits.is_disconnect(error)
                        if not (stale and again):
                            raise backend_error(self.alias, error, stale=stale) from error
                        again = False
                        error.__traceback__ = None
                        continue
                except BaseException:
                    # A signal's or another thread's exception in the driver leaves the protocol at an unknown point.
                    self._discard()
                    raise
                finally:
                    self.last_used = time.monotonic()
                time.sleep(random.uniform(0.0005, min(0.002 * tries, 0.02)))  # noqa: S311

    def _open(self) -> BaseDatabaseWrapper:
        if self._connection is not None:
            # A test runner renames the database under way; and a file may have been put in the place of SQLite's.
            same_name = self._connection.settings_dict["NAME"] == connections[self.alias].settings_dict["NAME"]
            if same_name and self._file == sqlite.file_id(self._connection):
                return self._connection
            self._discard()
        made: list[Any] = []
        try:
            connection = open_connection(self.alias, made)
            self._connection, self._file = connection, sqlite.file_id(connection)
            if self.opened is not None:
                self.opened(connection)
            return connection
        except BaseException:
            self._connection = None
            close_all(made)
            raise

    def _discard(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    def after_fork(self) -> None:
        """In a forked child: cut the inherited connection off without a word to the server."""
        self._lock = threading.Lock()
        connection, self._connection = self._connection, None
        if connection is None or connection.connection is None:
            return
        _inherited.append(connection)  # never finalised: that would speak on the parent's session
        for descriptor in limits.socket_descriptors(connection.connection):
            # The child's copy of the socket would keep the session alive after the parent has died.
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, descriptor, inheritable=False)
            os.close(null)


def backend_error(alias: str, error: Exception, *, stale: bool = False) -> BackendError:
    """Wrap a driver's error in one sentence that names the database; ``BackendError`` explains the flag."""
    message = f"The database {alias!r} failed: {str(error).strip() or type(error).__name__}"
    if limits.is_missing_table(error):
        message += f" (the lock tables are not there: run manage.py migrate --database {alias})"
    elif limits.is_read_only(error):
        message += " (it cannot be written to: locks must be kept by the primary, see SQLSEM['DATABASE'])"
    wrapped = BackendError(message)
    wrapped.stale_connection = stale
    return wrapped


def _driver_errors(connection: BaseDatabaseWrapper) -> type[Exception]:
    driver: Any = connection.Database  # type: ignore[attr-defined]
    found: type[Exception] = driver.Error
    return found


_sessions: weakref.WeakSet[OwnSession] = weakref.WeakSet()
_inherited: list[BaseDatabaseWrapper] = []
_frozen: list[threading.Lock] = []
#: Taken while a thread wants to fork: else it would have to race all the others for each session.
_gate = threading.Lock()


def before_fork() -> None:
    """Let every statement under way finish, so that the child inherits no half-done one."""
    _gate.acquire()
    for session in sorted(_sessions, key=id):
        lock = session._lock
        if lock.acquire(timeout=FORK_PATIENCE):
            _frozen.append(lock)
            if session._connection is not None and session._connection.vendor == "sqlite":
                session._discard()


def after_fork_in_parent() -> None:
    """Go on."""
    while _frozen:
        _frozen.pop().release()
    _gate.release()


def after_fork_in_child() -> None:
    """Leave the parent's connections alone."""
    global _gate
    _frozen.clear()
    _gate = threading.Lock()
    sqlite.after_fork()
    sockets.forget_watched()
    sockets.after_fork()
    for session in list(_sessions):
        session.after_fork()
    _sessions.clear()


forks.register(
    "sessions",
    "parent and child would speak on one connection, and the child's end would end the parent's session",
    before=before_fork,
    in_parent=after_fork_in_parent,
    in_child=after_fork_in_child,
)


class CallerSession:
    """The caller's own connection inside its ``atomic()``: on SQLite there is only one writer."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection = connection
        self.attempts = 0

    def run(self, work: Callable[[AnyCursor], T], *, again: bool = True) -> T:
        """Call ``work`` with a cursor of the caller's transaction. Raises ``BackendError``."""
        self.attempts += 1
        try:
            with self.connection.cursor() as cursor:
                return work(cursor)
        except DjangoDatabaseError as error:
            raise backend_error(self.connection.alias, error) from error

    def transaction(self, work: Callable[[AnyCursor], T | None], *, again: bool = True) -> T | None:
        """Call ``work`` inside a savepoint; undo it if it returns ``None``. Raises ``BackendError``."""
        savepoint = self.connection.savepoint()
        try:
            result = self.run(work)
        except BaseException:
            if savepoint is not None:
                with contextlib.suppress(DjangoDatabaseError):  # a deadlock has ended the transaction, and it with that
                    self.connection.savepoint_rollback(savepoint)
            raise
        if savepoint is None:
            pass  # the caller's atomic() was told to use none
        elif result is None:
            self.connection.savepoint_rollback(savepoint)
        else:
            self.connection.savepoint_commit(savepoint)
        return result


class OrdinarySession(CallerSession):
    """The ordinary connection of an alias, for what follows an operator's act."""

    def transaction(self, work: Callable[[AnyCursor], T | None], *, again: bool = True) -> T | None:
        """Call ``work`` in a transaction, or a savepoint of the one that is open. Raises ``BackendError``."""
        with transaction.atomic(using=self.connection.alias):
            return super().transaction(work)
