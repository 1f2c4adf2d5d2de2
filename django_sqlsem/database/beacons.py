"""Beacons: one lock per process, by which others can tell that it is dead long before its lease runs out.

On servers it is a lock of the keeper's session, about which statements ask by ``Dialect.dead``. On SQLite it is a
locked file beside the database, about which ``is_free`` asks.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from django.db import NotSupportedError, ProgrammingError

from django_sqlsem.database.dialects import SessionLock, dialect_for

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

#: A former session of ours may still have the lock, and a prober for an instant: how often it is tried.
LIGHT_TRIES: Final = 10
LIGHT_PAUSE: Final = 0.02  # seconds between two tries


class Beacon(abc.ABC):
    """The beacon of this process in one database.

    It is held as long as the process lives and, but for SQLite, its keeper's session stands. A stopped process keeps
    it. It only ever says that a process is *dead*: one that never lit a beacon looks the same, so a row must say
    whether its process had one when it was written, and only then may it be asked about. For the same reason only a
    process whose own beacon is lit learns anything: by that the answer is known to come from the server, or the
    directory, that has the beacons, and not from a replica, another node, or a server that was started a moment ago.

    Methods are for one thread at a time; cursors are in autocommit.
    """

    @abc.abstractmethod
    def light(self, cursor: CursorWrapper, process_id: str) -> bool:
        """Take the beacon on the keeper's session; idempotent. ``False`` if it cannot be had, so that leases decide.

        Says in the log, once per process, why it cannot. Raises what the database raises.
        """

    def put_out(self, *, left: bool = False) -> None:  # noqa: B027
        """Let the beacon go at the end of the process; where it is tied to a session, the session's end does it.

        ``left``: something of the process's could not be given back, and others are to see that it is dead.
        """

    def after_fork(self) -> None:  # noqa: B027
        """In a forked child: forget the parent's beacon, without putting it out."""


def lock_key(process_id: str) -> int:
    """Return the second key of a process's advisory lock on PostgreSQL, a signed number of 32 bits."""
    return int.from_bytes(bytes.fromhex(process_id[:8]), "big", signed=True)


def lock_name(process_id: str) -> str:
    """Return the name of a process's lock on MySQL and MariaDB, which is the whole server's."""
    return f"sqlsem:{process_id}"


class SessionBeacon(Beacon):
    """A lock of the keeper's database session."""

    def __init__(self, lock: SessionLock) -> None:
        self._lock = lock
        self._session = 0  # on which it was lit last

    def light(self, cursor: CursorWrapper, process_id: str) -> bool:
        """Take the lock, from a session that we have left if need be."""
        try:
            session, holder = self._look(cursor, process_id)
            if holder != session and self._works(cursor):
                for attempt in range(LIGHT_TRIES):
                    if holder is None:
                        cursor.execute(self._lock.take, _parameters(process_id))
                    elif attempt == 0 and holder == self._session:
                        # The server has not noticed yet that we have left that session.
                        cursor.execute(self._lock.end, {"session": int(holder)})
                    session, holder = self._look(cursor, process_id)
                    if holder == session:
                        break
                    time.sleep(LIGHT_PAUSE)
        except (ProgrammingError, NotSupportedError) as error:
            _say(logging.INFO, cursor.db.alias, f"the database refuses its lock ({error})")
            return False
        if holder == session:
            self._session = session
        return holder == session

    def _look(self, cursor: CursorWrapper, process_id: str) -> tuple[int, int | None]:
        cursor.execute(self._lock.look, _parameters(process_id))
        session, holder = cursor.fetchone()
        return session, holder

    def _works(self, cursor: CursorWrapper) -> bool:
        cursor.execute(self._lock.session)
        if cursor.fetchone()[0] != self._lock.driver(cursor.db.connection):
            _say(logging.INFO, cursor.db.alias, "a pooler is in between, which lends its sessions to anybody")
        elif self._lock.several(cursor):
            _say(logging.INFO, cursor.db.alias, "every node of the cluster has locks of its own")
        else:
            return True
        return False


def _parameters(process_id: str) -> dict[str, Any]:
    key = lock_key(process_id)
    return {"process_id": process_id, "name": lock_name(process_id), "key": key, "unsigned": key % 2**32}


class FileBeacon(Beacon):
    """A locked file per process in the directory ``<database>-sqlsem``.

    Not a process number: containers have numbers of their own. A file that is not there says nothing, as it may have
    been cleaned away under a live process; so the dead's are left for a while.
    """

    _file: LockFile | None = None

    def light(self, cursor: CursorWrapper, process_id: str) -> bool:
        """Create the file, unless it stands."""
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

    def put_out(self, *, left: bool = False) -> None:
        """Remove the file; or leave it unlocked, as that of a killed process, if there is something ``left``."""
        if self._file is None:
            return
        if left:
            self._file.close()
        else:
            self._file.remove()

    def after_fork(self) -> None:
        """Close the child's copy of the file."""
        if self._file is not None:
            self._file.close()


_said: set[tuple[str, str]] = set()


def _say(level: int, alias: str, why: str) -> None:
    if (alias, why) not in _said:
        _said.add((alias, why))
        text = "No beacons on %r: %s. The slots of a killed process come back when their leases run out."
        logger.log(level, text, alias, why)


def beacon_for(connection: BaseDatabaseWrapper) -> Beacon | None:
    """Return a new beacon, not yet lit, for the database of a connection; ``None`` where there can be none."""
    dialect = dialect_for(connection)
    if dialect.session_lock is not None:
        return SessionBeacon(dialect.session_lock)
    if not dialect.in_a_file or not POSSIBLE or connection.is_in_memory_db():  # type: ignore[attr-defined]
        return None
    return FileBeacon()
