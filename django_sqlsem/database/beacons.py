"""Beacons: one lock per process, by which others can tell that it is dead long before its lease runs out.

Files that are locked as long as their process lives, in a directory beside an SQLite database.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django.db import NotSupportedError, ProgrammingError

from django_sqlsem.database.dialects import BEACON_CLASS, MySQL, PostgreSQL
from django_sqlsem.database.server import several_writers

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper


try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]


#: Does this system have the locks?
POSSIBLE: Final = fcntl is not None

#: The directory's name is the database's and this.
SUFFIX: Final = "-sqlsem"
#: How long the file of a dead process is left for others to ask about, in seconds.
KEEP: Final = 3600.0
#: How often, and how long apart in seconds, a file is created that somebody sweeps at this moment.
FILE_TRIES: Final = 200
FILE_PAUSE: Final = 0.001
_NAME: Final = re.compile(r"[0-9a-f]{32}")


class LockFile:
    """One locked file. Raises ``OSError`` if it cannot be created.

    It is locked by ``flock()``, which a forked child shares: the child closes its copy and does not unlock it.
    """

    def __init__(self, database: str, name: str) -> None:
        self.database, self.name = database, name
        self.directory = database + SUFFIX
        self.path = os.path.join(self.directory, name)
        self._file: int | None = None
        try:
            self._create(os.stat(database).st_mode)
        except OSError:
            self.close()
            raise

    @property
    def stands(self) -> bool:
        """Whether it is still open here, and what is found at its path."""
        return self._file is not None and _same(self._file, self.path)

    def remove(self) -> None:
        """Remove it, and the directory if it was the last one, then let the lock go."""
        if self.stands:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
                os.rmdir(self.directory)
        self.close()

    def close(self) -> None:
        """Close it. The lock goes with the last copy."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _create(self, mode: int) -> None:
        for _ in range(FILE_TRIES):
            with contextlib.suppress(BlockingIOError, FileNotFoundError):  # somebody sweeps at this moment
                _make_directory(self.directory)
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.stands:
                    break
            self.close()
            time.sleep(FILE_PAUSE)
        if self._file is None:
            raise BlockingIOError(f"{self.path} is locked by another")
        with contextlib.suppress(OSError):
            os.fchmod(self._file, mode & 0o666)  # who may use the database may ask
        os.write(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        if is_free(self.directory, self.name):
            self.remove()
            raise OSError(f"the file system of {self.directory} does not keep locks of files")


def is_free(directory: str, name: str) -> bool:
    """Whether a file is there and nobody has locked it; ``False`` too if this cannot be known."""
    with _locked(
        os.path.join(directory, name), os.O_RDONLY, fcntl.LOCK_SH
    ) as file:  # shared: those who ask never see each other
        return file is not None


def path_of(cursor: CursorWrapper) -> str:
    """Return the real path of an SQLite database; empty if it is in memory."""
    cursor.execute("PRAGMA database_list")
    path = next((row[2] for row in cursor.fetchall() if row[1] == "main"), "")
    return os.path.realpath(path) if path else ""


def sweep(directory: str) -> None:
    """Empty the files of the dead, and remove those that were emptied ``KEEP`` seconds ago.

    Only under the lock, and only what is at its path: a process that creates its own at this moment then finds that
    it is gone, and creates another.
    """
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                recent = found.st_size == 0 and time.time() - found.st_mtime < KEEP
                if recent or not _NAME.fullmatch(entry.name):
                    continue
                with _locked(entry.path, os.O_RDWR, fcntl.LOCK_EX) as file:
                    if file is not None and found.st_size:
                        os.ftruncate(file, 0)
                    elif file is not None:
                        os.unlink(entry.path)


def _make_directory(directory: str) -> None:
    """Who may create files beside the database, as SQLite itself must, may create them here."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory)
        beside = os.stat(os.path.dirname(directory))
        with contextlib.suppress(OSError):
            os.chmod(directory, beside.st_mode & 0o7777)
            if os.geteuid() == 0:
                os.chown(directory, beside.st_uid, beside.st_gid)


def _same(file: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except OSError:
        return False


@contextlib.contextmanager
def _locked(path: str, flags: int, lock: int) -> Iterator[int | None]:
    """Lock the file at ``path`` for a moment; ``None`` if it is not there or somebody has it."""
    try:
        file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield None
        return
    try:
        try:
            fcntl.flock(file, lock | fcntl.LOCK_NB)
            locked = _same(file, path)
        except OSError:
            locked = False
        yield file if locked else None
    finally:
        os.close(file)


logger = logging.getLogger("django_sqlsem")

AT_ONCE: Final = 1000  # how many are asked about in one statement
#: A former session of ours may still have the lock, and a prober for an instant: how often it is tried.
TRIES: Final = 10
PAUSE: Final = 0.02  # seconds between two tries
_PROCESS_ID: Final = re.compile(r"[0-9a-f]{32}")


class Beacon(abc.ABC):
    """The beacon of this process in one database.

    It is held as long as the process lives and, but for SQLite, its keeper's session stands. A stopped process keeps
    it. It only ever says that a process is *dead*: one that never lit a beacon looks the same, so a row must say
    whether its process had one when it was written, and only then may it be asked about. For the same reason only a
    process whose own beacon is lit learns anything: by that the answer is known to come from the server, or the
    directory, that has the beacons, and not from a replica, another node, or a server that was started a moment ago.

    Methods are for one thread at a time; cursors are in autocommit.
    """

    #: A boolean expression inside statements, never NULL; ``{process_id}`` is to be replaced by a column or parameter.
    #: True: the beacon is free at this moment. A statement that trusts it must also ask for ``alive_sql`` of its
    #: own process, for the reason above. ``None`` where SQL cannot tell.
    dead_sql: ClassVar[str | None] = None
    #: Its opposite. True of the caller's own process only if its beacon is lit where the statement runs.
    alive_sql: ClassVar[str | None] = None

    def __init__(self) -> None:
        self._process_id = ""  # lit for

    @property
    def lit(self) -> bool:
        """Whether ``light()`` succeeded last time."""
        return bool(self._process_id)

    @abc.abstractmethod
    def works(self, cursor: CursorWrapper) -> bool:
        """Whether this session can hold a beacon. Says in the log, once per process, why it cannot."""

    def light(self, cursor: CursorWrapper, process_id: str) -> bool:
        """Take the beacon on the keeper's session; idempotent. ``False`` if it cannot be had, so that leases decide.

        Raises what the database raises, and ``ValueError`` for what is no process id.
        """
        if not _PROCESS_ID.fullmatch(process_id):
            raise ValueError(f"{process_id!r} is no process id: 32 hexadecimal digits")
        lit = self._light(cursor, process_id)
        self._process_id = process_id if lit else ""
        return lit

    def dead(self, cursor: CursorWrapper, process_ids: Collection[str]) -> set[str]:
        """Return those whose beacon is certainly free at this moment; none if this process's own is not lit.

        Works on any session of the database, by one statement for each 1000. Raises what the database raises.
        """
        asked = sorted(filter(_PROCESS_ID.fullmatch, set(process_ids) - {self._process_id}))
        found: set[str] = set()
        for start in range(0, len(asked) if self._process_id else 0, AT_ONCE):
            free = self._free(cursor, [self._process_id, *asked[start : start + AT_ONCE]])
            if self._process_id in free:
                return set()  # this is not where the beacons are
            found |= free
        return found

    @abc.abstractmethod
    def _light(self, cursor: CursorWrapper, process_id: str) -> bool: ...

    @abc.abstractmethod
    def _free(self, cursor: CursorWrapper, process_ids: list[str]) -> set[str]: ...

    def put_out(self) -> None:
        """Let the beacon go at the end of the process; where it is tied to a session, the session's end does it."""
        self._process_id = ""

    def after_fork(self) -> None:
        """In a forked child: forget the parent's beacon, without putting it out."""
        self._process_id = ""


class SessionBeacon(Beacon):
    """A lock of the keeper's database session."""

    _session = 0  # on which it was lit last

    @abc.abstractmethod
    def _look(self, cursor: CursorWrapper, process_id: str) -> tuple[int, int | None]:
        """Return the session's number on the server, and that of the session that has the lock."""

    @abc.abstractmethod
    def _take(self, cursor: CursorWrapper, process_id: str) -> None: ...

    @abc.abstractmethod
    def _end(self, cursor: CursorWrapper, session: int) -> None: ...

    def _light(self, cursor: CursorWrapper, process_id: str) -> bool:
        try:
            session, holder = self._look(cursor, process_id)
            if holder != session and self.works(cursor):
                for attempt in range(TRIES):
                    if holder is None:
                        self._take(cursor, process_id)
                    elif attempt == 0 and holder == self._session:
                        # The server has not noticed yet that we have left that session.
                        self._end(cursor, holder)
                    session, holder = self._look(cursor, process_id)
                    if holder == session:
                        break
                    time.sleep(PAUSE)
        except (ProgrammingError, NotSupportedError) as error:
            _say(logging.INFO, cursor.db.alias, f"the database refuses its lock ({error})")
            return False
        if holder == session:
            self._session = session
        return holder == session


class PostgreSQLBeacon(SessionBeacon):
    """An advisory lock. Asking takes it for an instant, shared, so that those who ask never see each other."""

    dead_sql = PostgreSQL.dead
    alive_sql = f"(NOT {dead_sql})"

    def works(self, cursor: CursorWrapper) -> bool:
        """Whether the session is the client's alone: behind a pooler the server's has another number."""
        cursor.execute("SELECT pg_backend_pid()")
        return _is_own(cursor, cursor.fetchone()[0], cursor.db.connection.info.backend_pid)

    def _look(self, cursor: CursorWrapper, process_id: str) -> tuple[int, int | None]:
        cursor.execute(
            "SELECT pg_backend_pid(), (SELECT min(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
            " AND mode = 'ExclusiveLock' AND database = (SELECT oid FROM pg_database WHERE datname ="
            " current_database()) AND classid = %s AND objid = %s AND objsubid = 2)",
            [BEACON_CLASS, lock_key(process_id) % 2**32],
        )
        session, holder = cursor.fetchone()
        return session, holder

    def _take(self, cursor: CursorWrapper, process_id: str) -> None:
        cursor.execute(
            "SELECT CASE WHEN pg_try_advisory_lock(%s, %s) THEN set_config('sqlsem.beacon', %s, FALSE) END",
            [BEACON_CLASS, lock_key(process_id), process_id],
        )

    def _end(self, cursor: CursorWrapper, session: int) -> None:
        cursor.execute("SELECT pg_terminate_backend(%s)", [session])

    def _free(self, cursor: CursorWrapper, process_ids: list[str]) -> set[str]:
        dead = self.dead_sql.format(process_id="asked.id")
        cursor.execute(f"SELECT asked.id FROM unnest(%s::text[]) AS asked(id) WHERE {dead}", [process_ids])
        return {row[0] for row in cursor.fetchall()}


class MySQLBeacon(SessionBeacon):
    """A lock of ``GET_LOCK()``. Its names are the whole server's."""

    dead_sql = MySQL.dead
    alive_sql = f"(NOT {dead_sql})"

    def works(self, cursor: CursorWrapper) -> bool:
        """Whether the session is the client's alone, and the server the only one that is written to."""
        cursor.execute("SELECT CONNECTION_ID()")
        own = _is_own(cursor, cursor.fetchone()[0], cursor.db.connection.thread_id())
        if several_writers(cursor):
            _say(logging.INFO, cursor.db.alias, "every node of the cluster has locks of its own")
            return False
        return own

    def _look(self, cursor: CursorWrapper, process_id: str) -> tuple[int, int | None]:
        cursor.execute("SELECT CONNECTION_ID(), IS_USED_LOCK(%s)", [lock_name(process_id)])
        session, holder = cursor.fetchone()
        return session, holder

    def _take(self, cursor: CursorWrapper, process_id: str) -> None:
        cursor.execute("SELECT GET_LOCK(%s, 0)", [lock_name(process_id)])

    def _end(self, cursor: CursorWrapper, session: int) -> None:
        cursor.execute(f"KILL {int(session)}")

    def _free(self, cursor: CursorWrapper, process_ids: list[str]) -> set[str]:
        columns = ", ".join(["IS_FREE_LOCK(%s)"] * len(process_ids))
        cursor.execute(f"SELECT {columns}", [lock_name(each) for each in process_ids])
        return {each for each, free in zip(process_ids, cursor.fetchone(), strict=True) if free == 1}


class FileBeacon(Beacon):
    """A locked file per process in the directory ``<database>-sqlsem``.

    Not a process number: containers have numbers of their own. A file that is not there says nothing, as it may have
    been cleaned away under a live process; so the dead's are left for a while.
    """

    _file: LockFile | None = None

    def works(self, cursor: CursorWrapper) -> bool:
        """Whether the database is a file."""
        return bool(path_of(cursor))

    def put_out(self) -> None:
        """Remove the file."""
        super().put_out()
        if self._file is not None:
            self._file.remove()

    def after_fork(self) -> None:
        """Close the child's copy of the file."""
        super().after_fork()
        if self._file is not None:
            self._file.close()

    def _light(self, cursor: CursorWrapper, process_id: str) -> bool:
        database = path_of(cursor)
        if self._file is not None:
            if self._file.stands and (self._file.database, self._file.name) == (database, process_id):
                return True
            self._file.remove()
        if not database:
            return False
        try:
            self._file = LockFile(database, process_id)
        except OSError as error:
            _say(logging.WARNING, cursor.db.alias, str(error))
            return False
        sweep(self._file.directory)
        return True

    def _free(self, cursor: CursorWrapper, process_ids: list[str]) -> set[str]:
        if self._file is None or not self._file.stands:
            return set(process_ids)  # the own one too: nobody is believed to be dead
        return {each for each in process_ids if is_free(self._file.directory, each)}


def lock_key(process_id: str) -> int:
    """Return the second key of a process's advisory lock on PostgreSQL, a signed number of 32 bits."""
    return int.from_bytes(bytes.fromhex(process_id[:8]), "big", signed=True)


def lock_name(process_id: str) -> str:
    """Return the name of a process's lock on MySQL and MariaDB."""
    return f"sqlsem:{process_id}"


def _is_own(cursor: CursorWrapper, server: Any, driver: Any) -> bool:
    if server != driver:
        _say(logging.INFO, cursor.db.alias, "a pooler is in between, which lends its sessions to anybody")
    return bool(server == driver)


_said: set[tuple[str, str]] = set()


def _say(level: int, alias: str, why: str) -> None:
    if (alias, why) not in _said:
        _said.add((alias, why))
        text = "No beacons on %r: %s. The slots of a killed process come back when their leases run out."
        logger.log(level, text, alias, why)


def beacon_for(connection: BaseDatabaseWrapper) -> Beacon | None:
    """Return a new beacon, not yet lit, for the database of a connection; ``None`` where there can be none."""
    if connection.vendor == "postgresql":
        return PostgreSQLBeacon()
    if connection.vendor == "mysql":
        return MySQLBeacon()
    if connection.vendor != "sqlite" or not POSSIBLE or connection.is_in_memory_db():  # type: ignore[attr-defined]
        return None
    return FileBeacon()
