"""Files that are locked as long as their process lives, in a directory beside an SQLite database."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from django.db.backends.utils import CursorWrapper

#: Does this system have the locks?
POSSIBLE: Final = fcntl is not None

#: The directory's name is the database's and this.
SUFFIX: Final = "-sqlsem"
#: How long the file of a dead process is left for others to ask about, in seconds.
KEEP: Final = 3600.0
#: How often, and how long apart in seconds, a file is created that somebody sweeps at this moment.
TRIES: Final = 200
PAUSE: Final = 0.001
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
        except BaseException:
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
        for _ in range(TRIES):
            with contextlib.suppress(BlockingIOError, FileNotFoundError):  # somebody sweeps at this moment
                _make_directory(self.directory)
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.stands:
                    break
            self.close()
            time.sleep(PAUSE)
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
