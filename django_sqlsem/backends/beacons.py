"""Beacons: one lock per process, by which others can tell that it is dead long before its lease runs out."""

from __future__ import annotations

import abc
import logging
import re
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django.db import NotSupportedError, ProgrammingError

from django_sqlsem.backends import lock_files
from django_sqlsem.backends.incarnation import several_writers

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

logger = logging.getLogger("django_sqlsem")

#: The first key of the advisory locks, "sqls" in ASCII, so that an operator knows them in pg_locks. The form with two
#: keys has a space of its own, and most programs use the other. The second key is 32 bits of the process id: of two
#: of our processes with the same one, the later has no beacon. Nobody is ever taken for dead by a collision.
CLASS_ID: Final = 0x73716C73
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

    _KEYS: Final = f"{CLASS_ID}, ('x' || substr({{process_id}}, 1, 8))::bit(32)::int"
    # A session's own lock never stands in its way, so it is told apart by a setting of the session.
    dead_sql = (
        "(CASE WHEN length({process_id}) <> 32 OR translate({process_id}, '0123456789abcdef', '') <> '' THEN FALSE"
        " WHEN {process_id} = current_setting('sqlsem.beacon', TRUE) THEN FALSE"
        f" WHEN pg_try_advisory_lock_shared({_KEYS}) THEN pg_advisory_unlock_shared({_KEYS}) ELSE FALSE END)"
    )
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
            [CLASS_ID, lock_key(process_id) % 2**32],
        )
        session, holder = cursor.fetchone()
        return session, holder

    def _take(self, cursor: CursorWrapper, process_id: str) -> None:
        cursor.execute(
            "SELECT CASE WHEN pg_try_advisory_lock(%s, %s) THEN set_config('sqlsem.beacon', %s, FALSE) END",
            [CLASS_ID, lock_key(process_id), process_id],
        )

    def _end(self, cursor: CursorWrapper, session: int) -> None:
        cursor.execute("SELECT pg_terminate_backend(%s)", [session])

    def _free(self, cursor: CursorWrapper, process_ids: list[str]) -> set[str]:
        dead = self.dead_sql.format(process_id="asked.id")
        cursor.execute(f"SELECT asked.id FROM unnest(%s::text[]) AS asked(id) WHERE {dead}", [process_ids])
        return {row[0] for row in cursor.fetchall()}


class MySQLBeacon(SessionBeacon):
    """A lock of ``GET_LOCK()``. Its names are the whole server's."""

    dead_sql = (
        "(CASE WHEN CHAR_LENGTH({process_id}) = 32 THEN IS_FREE_LOCK(CONCAT('sqlsem:', {process_id})) <=> 1"
        " ELSE FALSE END)"
    )
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

    _file: lock_files.LockFile | None = None

    def works(self, cursor: CursorWrapper) -> bool:
        """Whether the database is a file."""
        return bool(lock_files.path_of(cursor))

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
        database = lock_files.path_of(cursor)
        if self._file is not None:
            if self._file.stands and (self._file.database, self._file.name) == (database, process_id):
                return True
            self._file.remove()
        if not database:
            return False
        try:
            self._file = lock_files.LockFile(database, process_id)
        except OSError as error:
            _say(logging.WARNING, cursor.db.alias, str(error))
            return False
        lock_files.sweep(self._file.directory)
        return True

    def _free(self, cursor: CursorWrapper, process_ids: list[str]) -> set[str]:
        if self._file is None or not self._file.stands:
            return set(process_ids)  # the own one too: nobody is believed to be dead
        return {each for each in process_ids if lock_files.is_free(self._file.directory, each)}


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
    if connection.vendor != "sqlite" or not lock_files.POSSIBLE or connection.is_in_memory_db():  # type: ignore[attr-defined]
        return None
    return FileBeacon()
