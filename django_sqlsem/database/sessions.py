"""Connections of our own, apart from the caller's: opened late, used by one thread at a time, dropped when in doubt.

And where statements run: on these, on the caller's connection, or on an operator's. And what SQLite asks of those who
share a file: no open connection passes a fork, and no file is swapped unseen.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from django.db import Error as DjangoDatabaseError
from django.db import IntegrityError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import load_backend

from django_sqlsem.conf import config
from django_sqlsem.core import forks
from django_sqlsem.core.clocks import boot_now, chance
from django_sqlsem.database import dialects, errors, sockets
from django_sqlsem.database.cursors import driver_errors
from django_sqlsem.database.dialects import Dialect, dialect_for
from django_sqlsem.database.errors import backend_error
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from django.db.models import Model

    from django_sqlsem.database.cursors import AnyCursor


T = TypeVar("T")
FileId: TypeAlias = "tuple[int, int] | None"

#: What a driver's connection has, by PEP 249.
_DRIVERS: Final = ("cursor", "commit", "rollback", "close")
#: How long a fork waits for statements under way, and statements for a fork, in seconds.
FORK_PATIENCE: Final = 5.0


class Session(Protocol):
    """Where a backend runs its statements."""

    #: How often something was sent, by any thread.
    attempts: int

    @property
    def repeats(self) -> int:
        """How often this thread repeated a statement that may have been done, as its answer was lost."""

    @property
    def dialect(self) -> Dialect:
        """What its database's SQL is like."""

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


# How a connection of our own is opened.


def open_connection(alias: str, made: list[Any] | None = None) -> BaseDatabaseWrapper:
    """Open a connection to the database that an alias means now, and set its limits. Raises Django's database errors.

    ``made`` gets what ``close_all`` must close in the end, and if the caller is interrupted before it has the result.
    Of several hosts, the next is asked if one is away.
    """
    made = [] if made is None else made
    for _ in config(alias).hosts[1:]:
        host = _host_of(alias)
        try:
            return _open(alias, made, host)
        except DjangoDatabaseError as error:
            if not errors.is_outage(error, known=True):
                raise
            errors.without_frames(error)
            _leave_host(alias, host)
    return _open(alias, made, _host_of(alias))


def _open(alias: str, made: list[Any], host: str) -> BaseDatabaseWrapper:
    try:
        connection = _connection(alias, made, host)
        connection.sqlsem_host = host  # type: ignore[attr-defined]
        dialect = dialect_for(connection)
        if dialect.in_a_file:
            _leave_inherited(_file_id(connection))
        connection.ensure_connection()  # unlike connect(), it raises Django's errors, not the driver's
        # A test runner that forbids the database from here on means the tests, not what is left to be given back.
        connection.ensure_connection = _stay_open  # type: ignore[method-assign]
        connection.close_if_unusable_or_obsolete = _stay_open  # type: ignore[method-assign]
        dialect.prepare(connection)
        return connection
    except BaseException as error:
        made += _half_open(error)
        close_all(made)
        raise


#: Which of the hosts of an alias is asked first, by its place in the list: the one that answered last.
_first_hosts: dict[str, int] = {}


def _host_of(alias: str) -> str:
    """Return the host that is asked first; empty: as the alias's settings say."""
    hosts = config(alias).hosts
    return hosts[_first_hosts.get(alias, 0) % len(hosts)] if hosts else ""


def _leave_host(alias: str, host: str) -> int:
    """Ask the next host first from now on, unless another thread does already. Return how many others there are."""
    hosts = config(alias).hosts
    if host and host == _host_of(alias):
        _first_hosts[alias] = (hosts.index(host) + 1) % len(hosts)
    return len(hosts) - 1


@contextlib.contextmanager
def connected(alias: str) -> Iterator[BaseDatabaseWrapper]:
    """Open a connection of our own for a block. Raises Django's database errors."""
    made: list[Any] = []
    try:
        yield open_connection(alias, made)
    finally:
        close_all(made)


def _stay_open() -> None:
    """Open no other connection in the place of one that was lost: it would have neither limits nor a beacon."""


def close_all(made: list[Any]) -> None:
    """Close all that ``open_connection`` noted: Django itself does not close SQLite in memory."""
    for each in made:
        with contextlib.suppress(Exception):
            each.close()
    made.clear()


def _half_open(error: BaseException) -> list[Any]:
    """Return the driver's connection that an interrupted ``connect()`` of Django's had made and not yet kept.

    Only a local variable of Django's knows of it. If Django kept it sooner, nothing would be found here, nor missed.
    """
    values = [value for frame, _ in traceback.walk_tb(error.__traceback__) for value in frame.f_locals.values()]
    drivers = [value for value in values if all(hasattr(value, name) for name in _DRIVERS)]
    return [value for value in drivers if not isinstance(value, BaseDatabaseWrapper)]


def _connection(alias: str, made: list[Any], host: str) -> BaseDatabaseWrapper:
    settings: dict[str, Any] = copy.deepcopy(dict(connections[alias].settings_dict))
    backend: Any = load_backend(settings["ENGINE"])
    options = settings["OPTIONS"] = dict(settings.get("OPTIONS") or {})
    settings |= {"ATOMIC_REQUESTS": False, "AUTOCOMMIT": True}
    if host:
        name, _, port = host.rpartition(":")
        settings |= {"HOST": name.strip("[]"), "PORT": port} if name and port.isdigit() else {"HOST": host}
    dialect = dialect_for(backend.DatabaseWrapper)
    dialect.adapt(options)
    connection: BaseDatabaseWrapper = dialects.without_pool(backend.DatabaseWrapper)(settings, alias)
    made.append(connection)
    connection.inc_thread_sharing()
    get_new_connection = connection.get_new_connection

    def get_limited(parameters: dict[str, Any]) -> Any:
        raw = dialect.connect(lambda: get_new_connection(parameters), settings)
        made.append(raw)
        return raw

    connection.get_new_connection = get_limited  # type: ignore[method-assign,assignment]
    # Polls and renewals would drown DEBUG's query log.
    connection.make_debug_cursor = connection.make_cursor  # type: ignore[method-assign,assignment]
    return connection


# SQLite's files.

#: The connections to files that any code of the process has opened.
_known: weakref.WeakSet[BaseDatabaseWrapper] = weakref.WeakSet()
#: Those that came along at the fork.
_brought: list[tuple[weakref.ref[BaseDatabaseWrapper], Any]] = []
#: Two threads may open their first connections at the same moment: none opens before the inherited ones are closed.
_leaving = threading.Lock()


def remember(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    """Know of a connection that was opened by any code of the process: a receiver of ``connection_created``."""
    if connection.vendor == "sqlite":
        _known.add(connection)


def _file_id(connection: BaseDatabaseWrapper) -> FileId:
    """Return what file an SQLite connection's name means now; ``None`` if none."""
    try:
        found = os.stat(connection.settings_dict["NAME"])
    except (OSError, TypeError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _note_inherited() -> None:
    global _leaving
    _leaving = threading.Lock()
    _brought[:] = [(weakref.ref(each), each.connection) for each in list(_known) if each.connection is not None]


def _leave_inherited(file: FileId) -> None:
    """Close the connections to a file that came along at the fork, before the first of our own is opened.

    As long as SQLite sees them it believes that this process has the file's locks. The system says that the parent
    has: others would take the write-ahead log away under this process, which went on alone in a file of its own.
    A connection inside a transaction is left alone, as its end would undo the parent's.
    """
    if not _brought:
        return
    with _leaving:
        for reference, raw in _brought[:]:
            _leave_one(reference, raw, file)


def _leave_one(reference: weakref.ref[BaseDatabaseWrapper], raw: Any, file: FileId) -> None:
    connection = reference()
    mine = connection is not None and connection.connection is raw
    if connection is not None and mine and file is not None and _file_id(connection) == file:
        if raw.in_transaction:
            return
        with contextlib.suppress(Exception):
            raw.close()
        connection.connection = None
    if connection is None or connection.connection is not raw:
        _brought.remove((reference, raw))


# How it is used.


@contextlib.contextmanager
def used_by_orm(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Have the ORM of this thread find a connection under its alias.

    Django keeps its connections per thread. If threads came to share them, others' queries would run on this one.
    """
    alias = connection.alias
    usual = next((each for each in connections.all(initialized_only=True) if each.alias == alias), None)
    connections[alias] = connection
    try:
        yield
    finally:
        if usual is None:
            del connections[alias]
        else:
            connections[alias] = usual


def insert_missing(rows: Sequence[Model], *, using: str) -> None:
    """Insert rows of one model with the ORM, but for those that are there already."""
    if not rows:
        return
    manager = type(rows[0])._default_manager.using(using)
    if connections[using].features.supports_ignore_conflicts:
        manager.bulk_create(rows, ignore_conflicts=True)
        return
    for row in rows:
        with contextlib.suppress(IntegrityError), transaction.atomic(using=using):
            manager.bulk_create([row])


class RefusedError(Exception):
    """The database refused what was to be done briefly; its session goes on. ``__cause__`` is the driver's error."""


def briefly(session: Session, work: Callable[[AnyCursor], T], seconds: float, in_line: float = 0.0) -> T:
    """Call ``work`` in a transaction of which no statement takes longer than ``seconds``, nor waits long for a lock.

    It may use the ORM. Its failure costs nothing: the connection, on which others count, goes on. ``in_line``: for how
    many seconds it is tried again where the database has one writer. Raises ``RefusedError`` if the database refused
    it, and ``BackendError`` if the connection is gone.
    """

    def limited(cursor: AnyCursor) -> T | RefusedError:
        connection: Any = cursor.db
        dialect = dialect_for(connection)
        limits = dialect.limits(connection, seconds)
        result: T | RefusedError
        try:
            if limits.before:
                cursor.execute(limits.before)
            with used_by_orm(connection), dialect.limited(connection, seconds), _atomic(connection) as inside:
                if limits.first:
                    inside.execute(limits.first)
                result = work(inside)
        except (connection.Database.Error, DjangoDatabaseError) as error:
            if errors.is_disconnect(error) or connection.connection is None:
                raise
            result = RefusedError(str(error).strip())
            errors.without_frames(error)
            result.__cause__ = error.__cause__ or error
        if limits.after:
            cursor.execute(limits.after)
        return result

    def attempt() -> T:
        result = session.run(limited, again=False)
        try:
            if isinstance(result, RefusedError):
                raise result
            return result
        finally:
            del result  # the error's traceback keeps this frame

    one_writer = dialect_for(session.connection).one_writer
    return errors.patiently(attempt, lambda error: one_writer and passes(error), in_line)


@contextlib.contextmanager
def _atomic(connection: BaseDatabaseWrapper) -> Iterator[AnyCursor]:
    try:
        cursor_of = dialect_for(connection).cursor
        with (
            transaction.atomic(using=connection.alias),
            connection.wrap_database_errors,
            cursor_of(connection) as cursor,
        ):
            yield cursor
    except AttributeError as error:
        # The end of a transaction that could not be rolled back asks mssql-django for a connection that is closed.
        met: BaseException | None = error
        while met is not None and not isinstance(met, DjangoDatabaseError):
            met = met.__context__
        if met is None or connection.connection is not None:
            raise
        raise met  # noqa: B904 - it has its own cause


def passes(error: Exception) -> bool:
    """Whether an error of ``briefly`` is likely to be over soon, so that it is worth to try again."""
    found = error.__cause__ if isinstance(error, BackendError | RefusedError) else error
    known = (errors.is_transient, errors.is_timeout, errors.is_disconnect)
    return isinstance(found, Exception) and any(each(found) for each in known)


class OwnSession:
    """One connection that belongs to this library alone, opened at the first statement.

    ``run`` may be called from any thread: statements take turns. It repeats a statement that lost a deadlock or
    found SQLite locked. After any other database error, and after any other exception, the
    connection is thrown away, since its state is unknown; the next call opens a new one. ``again`` says whether
    the work may be repeated when the connection turns out to be dead, its outcome unknown.
    """

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.last_used = time.monotonic()
        self.attempts = 0
        self._here = threading.local()
        #: Since when the database owes an answer, by the boot clock; ``None`` if the last statement was answered.
        self.asked_at: float | None = None
        #: Called with each connection that was opened, before its first use.
        self.opened: Callable[[BaseDatabaseWrapper], object] | None = None
        self._lock: Any = threading.RLock()  # never taken twice: it knows its thread
        self._connection: BaseDatabaseWrapper | None = None
        #: Of the connection that is open.
        self._dialect: Dialect | None = None
        #: What must be closed with the connection, or was made under way to one.
        self._made: list[Any] = []
        self._file: FileId = None
        #: Which of several hosts its connection leads to, or led to last.
        self._host = ""
        #: When a connection could not be opened last, and why; ``None`` since one could.
        self._unreachable: tuple[float, DjangoDatabaseError] | None = None
        with _gate:  # a thread that is about to fork goes through all sessions
            _sessions.add(self)

    @property
    def dialect(self) -> Dialect:
        """What its database's SQL is like: what an alias means may change between two connections."""
        return self._dialect or dialect_for(connections[self.alias])

    @property
    def connection(self) -> BaseDatabaseWrapper:
        """The connection in use, opened or not."""
        return self._connection or connections[self.alias]

    @property
    def repeats(self) -> int:
        """How often this thread repeated a statement."""
        found: int = getattr(self._here, "repeats", 0)
        return found

    @property
    def is_open(self) -> bool:
        """Whether a connection to the database is open."""
        return self._connection is not None

    def unreachable(self, since: float) -> bool:
        """Whether no connection could be opened since an instant of ``time.monotonic()``."""
        return self._unreachable is not None and self._unreachable[0] >= since

    def transaction(self, work: Callable[[AnyCursor], T | None], *, again: bool = True) -> T | None:
        """Call ``work`` in a transaction; commit unless it returns ``None``. Raises ``BackendError``."""

        def whole(cursor: AnyCursor) -> T | None:
            connection: Any = cursor.db
            if not self.dialect.begin:
                with used_by_orm(connection), _atomic(connection) as inside:
                    result = work(inside)
                    transaction.set_rollback(result is None, using=connection.alias)
                    return result
            # The driver stays in autocommit: Django's way would cost MySQL two more round trips.
            cursor.execute(self.dialect.begin)
            try:
                result = work(cursor)
                cursor.execute("ROLLBACK" if result is None else "COMMIT")  # SQLite may be too busy for that
            except driver_errors(connection):
                with contextlib.suppress(driver_errors(connection)):
                    cursor.execute("ROLLBACK")
                raise  # anything else costs the connection: not a word more on it
            return result

        return self.run(whole, again=again)

    def close(self) -> None:
        """Close the connection. The session stays usable."""
        with self._lock:
            self._discard()

    def run(self, work: Callable[[AnyCursor], T], *, again: bool = True) -> T:
        """Call ``work`` with a cursor in autocommit; the driver's errors come out of it as Django's.

        Raises ``BackendError``.
        """
        asked = time.monotonic()
        with _gate:  # a thread that is about to fork goes first
            pass
        if self._lock._is_owned():
            raise RuntimeError(
                "Locks can't be used here: a signal handler or a finaliser has interrupted a statement of theirs."
            )
        with self._lock:
            return self._run(work, asked, again)

    def _run(self, work: Callable[[AnyCursor], T], asked: float, again: bool) -> T:
        if self._unreachable is not None and self._unreachable[0] >= asked:
            # The threads that waited meanwhile are told at once: each connect would time out in turn.
            raise backend_error(self.alias, self._unreachable[1]) from self._unreachable[1]
        give_up = time.monotonic() + errors.LOCKED_PATIENCE
        tries = moves = 0
        while True:
            tries += 1
            fresh, opened = self._connection is None, False
            self.asked_at = self.asked_at or boot_now()
            try:
                connection = self._open()
                opened, self._unreachable = True, None
                self.attempts += 1
                with connection.wrap_database_errors, self.dialect.cursor(connection) as cursor:
                    result = work(cursor)
                self.asked_at = None
                return result
            except DjangoDatabaseError as error:
                if not opened:
                    self._discard()
                if errors.is_transient(error) and time.monotonic() < give_up:
                    errors.without_frames(error)
                else:
                    self._discard()
                    if not opened:
                        self._unreachable = (time.monotonic(), error)
                    if errors.asks_elsewhere(error) and _leave_host(self.alias, self._host) > moves:
                        moves += 1
                        errors.without_frames(error)
                        continue
                    # A connection that was opened long ago may have died unnoticed: once more on a new one.
                    stale = not fresh and errors.is_disconnect(error)
                    if not (stale and again):
                        raise backend_error(self.alias, error, stale=stale) from error
                    again = False
                    self._here.repeats = self.repeats + 1
                    errors.without_frames(error)
                    continue
            except BaseException:
                # A signal's or another thread's exception in the driver leaves the protocol at an unknown point.
                self._discard()
                raise
            finally:
                self.last_used = time.monotonic()
            time.sleep(chance.uniform(0.0005, min(0.002 * tries, 0.02)))

    def _open(self) -> BaseDatabaseWrapper:
        if self._connection is not None:
            # A test runner renames the database under way; and a file may have been put in the place of SQLite's.
            same_name = self._connection.settings_dict["NAME"] == connections[self.alias].settings_dict["NAME"]
            stands = self._connection.connection is not None  # Django closes one that it could not roll back
            in_place = self._file is None or self._file == _file_id(self._connection)
            # A node's clock is looked at when a connection is opened, and may change.
            lasts = time.monotonic() < getattr(self._connection, "sqlsem_ends_at", math.inf)
            if same_name and stands and in_place and lasts:
                return self._connection
            self._discard()
        connection = self._connection = open_connection(self.alias, self._made)
        self._host = connection.sqlsem_host  # type: ignore[attr-defined]
        self._dialect = dialect_for(connection)
        self._file = _file_id(connection) if self._dialect.in_a_file else None
        if self.opened is not None:
            self.opened(connection)
        return connection

    def _discard(self) -> None:
        self._connection = self._dialect = None
        close_all(self._made)

    def after_fork(self) -> None:
        """In a forked child: cut the inherited connection off without a word to the server."""
        self._lock = threading.RLock()
        connection, self._connection, self._dialect = self._connection, None, None
        _inherited.extend(self._made)  # never finalised: that would speak on the parent's session
        self._made = []
        if connection is None or connection.connection is None:
            return
        for descriptor in sockets.descriptors(connection.connection):
            sockets.let_go(descriptor)


_sessions: weakref.WeakSet[OwnSession] = weakref.WeakSet()
_inherited: list[Any] = []
_frozen: list[Any] = []
#: Taken while a thread wants to fork: else it would have to race all the others for each session.
_gate = threading.Lock()


def before_fork() -> None:
    """Let every statement under way finish, so that the child inherits no half-done one."""
    _gate.acquire()
    for session in sorted(_sessions, key=id):
        lock = session._lock
        if lock.acquire(timeout=FORK_PATIENCE):
            _frozen.append(lock)
            if session._connection is not None and dialect_for(session._connection).in_a_file:
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
    _note_inherited()
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


#: Changes nothing, and makes its transaction SQLite's writer all the same.
_WRITER: Final = "UPDATE sqlsem_semaphore SET units = units WHERE name_key = ''"


class CallerSession:
    """The ordinary connection of an alias: an operator's, or the caller's inside its ``atomic()``."""

    repeats = 0

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection = connection
        self.dialect = dialect_for(connection)
        self.attempts = 0

    def run(self, work: Callable[[AnyCursor], T], *, again: bool = True) -> T:
        """Call ``work`` with a cursor, in the transaction that is open. Raises ``BackendError``."""
        self.attempts += 1
        try:
            with self.connection.cursor() as cursor:
                return work(cursor)
        except DjangoDatabaseError as error:
            raise backend_error(self.connection.alias, error) from error

    def become_writer(self) -> None:
        """On SQLite, wait until the open transaction may write: once it has read, it would be refused at once.

        Raises ``BackendError``.
        """
        if self.dialect.one_writer:
            self.run(lambda cursor: cursor.execute(_WRITER))

    def transaction(self, work: Callable[[AnyCursor], T | None], *, again: bool = True) -> T | None:
        """Call ``work`` in a transaction, or in a savepoint of the one that is open; undo it if it returns ``None``.

        Raises ``BackendError``.
        """
        alias = self.connection.alias
        with errors.database_errors(alias), transaction.atomic(using=alias):
            result = self.run(work)
            transaction.set_rollback(result is None, using=alias)
            return result
