"""One session of the server that keeps locks: one statement at a time, never reconnected, cut off when in doubt.

Raw driver connections for locks, from an alias's own settings: encryption, tokens and extra parameters are kept.

A lock for the use of a session that a struck thread does not leave locked.

A signal handler may raise anywhere (``KeyboardInterrupt``, Celery's soft time limit), also between taking a lock and
the ``try`` that gives it back. The session behind it may have the locks of other permits, so it can't be thrown away.
"""

from __future__ import annotations

import contextlib
import copy
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from django.db import Error as DjangoDatabaseError
from django.db import connections

from django_sqlsem.backends.applock.calls import CLEAN, PROVE, Call
from django_sqlsem.core import greenlets
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.identity import process_id
from django_sqlsem.core.modes import UPDATE, line_of
from django_sqlsem.database import sockets as database_sockets
from django_sqlsem.database.dialects import answer_limit, limit_logins
from django_sqlsem.database.errors import backend_error
from django_sqlsem.database.sqlserver import FOREIGN, Meaning, failure, meaning
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.backends.applock.held import Holding
    from django_sqlsem.database.sqlserver import LockNames


#: What a lock connection must not have: a driver that reconnects by itself would come back without the locks, and a
#: readable secondary has a lock manager of its own.
_UNWANTED: Final = re.compile(
    r"\s*(ConnectRetryCount|ConnectRetryInterval|RetryExec|ApplicationIntent|APP|Timeout|MARS_Connection)\s*=", re.I
)


#: A batch that does not wait takes no longer than this, in seconds, or the server does not answer.
ANSWER_TIMEOUT: Final = 5


def answer_timeout(alias: str) -> int:
    """Return for how many seconds a batch that does not wait may take: as the alias's ``query_timeout`` says."""
    return answer_limit(connections[alias].settings_dict.get("OPTIONS") or {}, ANSWER_TIMEOUT)


def connect(
    alias: str, in_turn: Callable[[], object]
) -> tuple[Any, BaseDatabaseWrapper, list[database_sockets.Socket]]:
    """Open a connection in autocommit to the database that an alias means now.

    One at a time in a process; ``in_turn`` is called when its turn has come, and what it raises is raised. Returns
    the driver's connection, the Django wrapper that knows how to make one, and its socket. Raises
    Django's database errors.
    """
    wrapper = connections[alias].copy()
    parameters = copy.deepcopy(wrapper.get_connection_params())
    options = parameters["OPTIONS"] = dict(parameters.get("OPTIONS") or {})
    limit_logins(options)
    options["query_timeout"] = 0
    options["extra_params"] = ";".join(filter(None, [_kept(options.get("extra_params")), *_ours(alias, options)]))

    def connect_now() -> Any:
        in_turn()
        raw = wrapper.get_new_connection(parameters)
        raw.autocommit = True
        return raw

    with wrapper.wrap_database_errors:
        port = database_sockets.port_in(wrapper.settings_dict)
        raw, sockets = database_sockets.opening(connect_now, port, int(options["connection_timeout"]))
    return raw, wrapper, sockets


def _kept(extra: str | None) -> str:
    """Return the alias's own extra parameters but for those that lock connections must not have."""
    return ";".join(part for part in split(extra or "") if not _UNWANTED.match(part))


def _ours(alias: str, options: dict[str, Any]) -> list[str]:
    driver = str(options.get("driver", "ODBC Driver 18 for SQL Server"))
    if options.get("python_driver"):
        return ["ConnectRetryCount=0"]  # it refuses a name of the application's own
    name = f"APP=sqlsem/{re.sub(r'[^A-Za-z0-9_.-]', '_', alias)}"
    return [name, "ConnectRetryCount=0", "MARS_Connection=no"] if "ODBC Driver" in driver else [name]


def split(extra: str) -> list[str]:
    """Return the ``key=value`` parts of ODBC parameters; a semicolon inside braces belongs to the value."""
    parts, braced, start, position = [], False, 0, 0
    while position < len(extra):
        character = extra[position]
        if braced and extra.startswith("}}", position):
            position += 1  # a brace within the value
        elif braced and character == "}":
            braced = False
        elif not braced and character == "{" and extra[start:position].rstrip().endswith("="):
            braced = True
        elif not braced and character == ";":
            parts.append(extra[start:position])
            start = position + 1
        position += 1
    return [part.strip() for part in [*parts, extra[start:]] if part.strip()]


_NOT_INSTALLED: Final = (
    "The stored procedures of django-sqlsem are not in the database {alias!r}, or the login may not execute them. Run "
    "manage.py migrate, or have a DBA run what 'manage.py locks sql --database {alias}' prints."
)
#: How a session is set up. Without parameters: what a statement with parameters sets is undone at its end. Nobody waits
#: on a session that holds what others wait for, so as a deadlock's victim it would free nothing.
SETTINGS: Final = """SET XACT_ABORT ON;
SET IMPLICIT_TRANSACTIONS OFF;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET DEADLOCK_PRIORITY HIGH;
SET LOCK_TIMEOUT 2000;
"""
#: Stamp a fresh session, and see that it is fresh: a pool would hand out one with a stamp, and with its locks.
OPEN: Final = Call(
    """SET NOCOUNT ON;
DECLARE @stamp varchar(60) = ?;
DECLARE @before varbinary(128) = CONTEXT_INFO(), @new varbinary(128) = CAST(@stamp AS varbinary(128));
SET CONTEXT_INFO @new;
SELECT @@SPID AS session_id, CASE WHEN SUBSTRING(@before, 1, 7) = 0x73716C73656D3A THEN 1 ELSE 0 END AS used,
    CASE WHEN CAST(DATABASEPROPERTYEX(DB_NAME(), 'Updateability') AS nvarchar(20)) = N'READ_ONLY' THEN 1 ELSE 0 END
    AS read_only,
    (SELECT DATEDIFF_BIG(MICROSECOND, '1970-01-01', login_time) FROM sys.dm_exec_sessions WHERE session_id = @@SPID)
    AS session_us;
""",
    ("stamp",),
)

_USED_BY: Final = ("django_sqlsem.backends.applock", "contextlib")
#: How often those who wait see whether the user is still there, in seconds.
LOOK: Final = 0.05

#: The outermost frame of ours in a thread, and the thread: it is on that thread's stack for as long as the use lasts.
User: TypeAlias = tuple[FrameType | None, int]


class Turn:
    """Held by one user at a time. One who has left without a word, as its frame is gone, does not hold it any more."""

    def __init__(self, mend: Callable[[], object]) -> None:
        #: Called by whoever gets it after one who has left it in the middle of something.
        self._mend = mend
        self._mending = False
        # One entry: setdefault() takes it and notes by whom, and no signal can come in between.
        self._user: dict[str, User] = {}
        self._lock = threading.Lock()  # a condition's own ``__enter__`` is no single step
        self._changed = threading.Condition(self._lock)
        self._waiting = 0

    def acquire(self, blocking: bool = True, timeout: float = -1, *, for_good: bool = False) -> bool:
        """Take it, as ``threading.Lock.acquire`` does; ``for_good``: until it is released, whatever else happens."""
        mine = (None, threading.get_ident()) if for_good else user()
        give_up = time.monotonic() + timeout if timeout >= 0 else None
        while self._user.setdefault("user", mine) is not mine:  # each has a tuple of its own
            if self._take_from_the_gone():
                continue
            left = LOOK if give_up is None else min(LOOK, give_up - time.monotonic())
            if not blocking or left <= 0:
                return False
            self._wait(left)
        if self._mending:
            self._mend()
            self._mending = False
        return True

    def release(self) -> None:
        """Give it back."""
        self._user.clear()
        if self._waiting:
            with self._lock:
                self._changed.notify()

    def locked(self) -> bool:
        """Return whether somebody has it."""
        return bool(self._user)

    def _wait(self, seconds: float) -> None:
        with self._lock:
            self._waiting += 1  # one that is struck here leaves it too high: then a release costs a little more
            if self._user:
                self._changed.wait(seconds)
            self._waiting -= 1

    def _take_from_the_gone(self) -> bool:
        found = self._user.get("user")
        if found is None:
            return True
        if is_there(found):
            return False
        with _taking:
            if self._user.get("user") is found:
                self._mending = True
                del self._user["user"]
        return True


#: Two who find the same user gone must not both take it away: the second would take it from the first.
_taking = threading.Lock()


def user() -> User:
    """Return who has called the caller."""
    outermost = frame = sys._getframe(2)
    while (caller := frame.f_back) is not None and str(caller.f_globals.get("__name__")).startswith(_USED_BY):
        outermost = frame = caller
    return outermost, threading.get_ident()


def is_there(found: User) -> bool:
    """Return whether a use still goes on."""
    outermost, thread = found
    if outermost is None or greenlets.library():  # whose greenlets are on no stack
        return True
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame is outermost:
            return True
        frame = frame.f_back
    return False


def after_fork() -> None:
    """In a forked child: nobody takes anything."""
    global _taking
    _taking = threading.Lock()


#: So many seconds after the answer was due the server is not asked once more whether it is there.
SILENT: Final = 3.0
#: The key of the cursor of what only reads; others are kept by their statements.
_READING: Final = ("", False)


class LockSession:
    """A raw connection with a stamp. ``lock`` is held by whoever uses it; ``held`` is changed only by them."""

    def __init__(self, alias: str, in_turn: Callable[[], object] = lambda: None) -> None:
        self.alias = alias
        self.lock = Turn(self._mend)
        #: The permits whose locks it has, by their lines: one of a name, as locks are re-entrant, and its upgrade.
        self.held: dict[str, Holding] = {}
        #: Whether it is kept for the one permit that it has: its locks are converted, and that is waited for on it.
        self.kept = False
        #: Names of which a claim was cut short: what it may have got is to be freed first. With the last of the slots,
        #: or ``None`` if the rows say that; and whether there are rows.
        self.unclear: dict[str, tuple[LockNames, int | None, bool]] = {}
        #: By whom holders were asked to stop, by permit id, as its last proof told.
        self.asked_by: dict[str, str] = {}
        #: Why it is gone; empty while it stands.
        self.ended = ""
        #: Whether that is certain: the server, or the network on its behalf, has said so.
        self.surely_ended = False
        #: Whether it was ended from here, in the middle of a statement.
        self.was_cut = False
        #: The boot clock when the last statement was sent that proved that it stands.
        self.proved_at = boot_now()
        self.last_used = time.monotonic()
        #: Since when the server owes an answer, by ``time.monotonic()``; 0: it does not, or there is time.
        self.asked = 0.0
        #: For how many seconds it may owe one.
        self.limit = answer_timeout(alias)
        #: Whether somebody waits on it.
        self.waiting = False
        #: Kept while descriptors are used: once the connection is closed, their numbers are others'.
        self._sockets = threading.Lock()
        #: Whether nothing has worked on it yet: then another session will do no better.
        self.fresh = True
        self.stamp = f"sqlsem:{process_id()}:{secrets.token_hex(8)}"
        self._raw, self._wrapper, self._descriptors = connect(alias, in_turn)
        database_sockets.limit_reads(self._raw, self.limit)
        database_sockets.watch.add(self)
        #: By their statements, and whether those may take as long as they like.
        self._cursors: dict[tuple[str, bool], Any] = {}
        self.session_id, self.session_us = 0, 0
        try:
            with self._wrapper.wrap_database_errors, contextlib.closing(self._raw.cursor()) as cursor:
                cursor.execute(SETTINGS)
            opened = self.run(OPEN, {"stamp": self.stamp})
        except BaseException:
            self.end("it could not be opened")
            raise
        if opened["read_only"]:
            self.end("its database is read-only")
            raise BackendError(
                f"The database {alias!r} is read-only, or a readable secondary: its locks would exclude nobody on the "
                "primary. Connect to the primary, without ApplicationIntent=ReadOnly."
            )
        if opened["used"]:
            self.end("it came out of a connection pool")
            raise BackendError(
                f"A connection of {alias!r} came out of a pool, with the locks of its last user: "
                "set DATABASE_CONNECTION_POOLING = False. See docs/checks.md#sqlsemw002."
            )
        self.session_id, self.session_us = int(opened["session_id"]), int(opened["session_us"] or 0)

    @property
    def can_be_cut(self) -> bool:
        """Whether another thread can end a wait on it at once."""
        return bool(self._descriptors)

    def run(self, call: Call, values: dict[str, Any], *, waits: bool = False) -> dict[str, Any]:
        """Call a procedure and return its one row by column; one that ``waits`` may take as long as it likes.

        Raises ``BackendError``; then the session has ended, unless the server only refused the call.
        """
        if self.ended:
            raise BackendError(f"The database {self.alias!r} failed: the session has ended: {self.ended}")
        parameters = [values[name] for name in call.parameters]
        sent = boot_now()
        try:
            with self._wrapper.wrap_database_errors:
                row = self._execute(call.text, parameters, sizes=call.sizes(), waits=waits)
        except DjangoDatabaseError as error:
            # Whatever else the server said of this call, the other locks here are not to be lost for it.
            known = self._note_end(error)
            gone = known in (Meaning.SESSION_ENDED, Meaning.SILENT) or boot_now() - sent > self.limit + SILENT
            if gone or self._still_fails():
                self.end(str(error.__cause__ or error).strip())
            if known is Meaning.NO_PROCEDURES:
                raise BackendError(_NOT_INSTALLED.format(alias=self.alias)) from error
            raise backend_error(self.alias, error, stale=bool(self.ended) and not self.fresh) from error
        finally:
            self.last_used = time.monotonic()
        if call is not OPEN and bytes(row["stamp"] or b"").rstrip(b"\0") != self.stamp.encode():
            self.end("another session stands in its place")
            raise failure(self.alias, FOREIGN)
        self.proved_at, self.fresh = sent, call is OPEN
        return row

    def results(self, text: str, parameters: Sequence[Any]) -> list[list[dict[str, Any]]]:
        """Run what only reads and return its results, each as rows by column.

        Raises ``BackendError``; the session may have ended then.
        """
        try:
            with self._wrapper.wrap_database_errors:
                cursor = self._cursors[_READING] = self._raw.cursor()
                self.asked = time.monotonic()
                cursor.execute(text, list(parameters))
                return results_of(cursor)
        except DjangoDatabaseError as error:
            self._drop(_READING)
            if self._still_fails():  # nothing can come to pass later of what only reads
                self.end(str(error.__cause__ or error).strip())
            raise backend_error(self.alias, error, stale=bool(self.ended) and not self.fresh) from error
        finally:
            self.asked = 0.0
            self._drop(_READING)

    def _execute(
        self, text: str, parameters: Sequence[Any], *, sizes: Sequence[Any] = (), waits: bool = False
    ) -> dict[str, Any]:
        cursor = self._cursors.get((text, waits))
        if cursor is None:
            try:
                self._raw.timeout = 0 if waits else self.limit  # of a cursor, read when it is made
                cursor = self._cursors[text, waits] = self._raw.cursor()
            finally:
                self._raw.timeout = self.limit
        try:
            cursor.setinputsizes(sizes)
            self.asked = 0.0 if waits else time.monotonic()
            cursor.execute(text, parameters)
            while cursor.description is None:  # some servers send a word about each refused lock
                if not cursor.nextset():
                    raise RuntimeError("the server sent no result")
            names = [column[0] for column in cursor.description]
            row = dict(zip(names, cursor.fetchone(), strict=True))
            while cursor.nextset():
                pass
            return row
        except BaseException:
            self._drop((text, waits))
            raise
        finally:
            self.asked = 0.0

    def _drop(self, key: tuple[str, bool]) -> None:
        """Let go of a cursor, and of results that were not read: they would be in the way of the next statement."""
        with contextlib.suppress(Exception):
            self._cursors[key].close()
        self._cursors.pop(key, None)

    def _mend(self) -> None:
        """Let go of what a struck thread has left."""
        for key in list(self._cursors):
            self._drop(key)

    def _still_fails(self) -> bool:
        """Ask for nothing, as one error does not tell whether the session still stands; note what this one says."""
        try:
            self._execute("SELECT 1 AS one", ())
        except Exception as error:  # noqa: BLE001 - of the driver, whatever it is
            self._note_end(error)
            return True
        return False

    def _note_end(self, error: Exception) -> Meaning:
        """Note whether an error proves that the session has ended; not every driver says as much as its socket."""
        known = meaning(error)
        with self._sockets:
            closed = database_sockets.are_closed(self._descriptors)
        self.surely_ended = (known is Meaning.SESSION_ENDED or closed) and not self.was_cut
        return known

    def prove(self, *, record: bool = False) -> bool:
        """Ask the server whether all its locks are still there. Raises ``BackendError`` if the session has ended.

        ``record``: by the way, also who asks its permits' holders to stop.
        """
        held = [
            f"{each.key:32}{each.permit_id:32}{slot:6}{_units(each.names.base):4}{each.names.base}"
            for each in list(self.held.values())
            for slot in each.slots
        ]
        row = self.run(PROVE, {"held": "".join(held), "record": record})
        if row["missing"]:
            self.end("its locks are gone: another session stands in its place")
            return False
        self.asked_by = {line[:32].rstrip(): line[32:] for line in str(row["asked"]).split("\n") if line}
        return True

    def clean(self, key: str) -> None:
        """Free what a claim of a name that was cut short may have got."""
        names, last, record = self.unclear[key]
        self.run(CLEAN, {"base": names.base, "key": key, "last": last, "record": record})
        for line in (key, line_of(key, UPDATE)):
            self.held.pop(line, None)  # in case it was noted
        self.kept = self.kept and bool(self.held)
        del self.unclear[key]

    def cut(self) -> None:
        """End it from another thread, also in the middle of a wait: the server frees all its locks."""
        self.was_cut = True
        with self._sockets:
            database_sockets.cut(self._descriptors)

    def end(self, why: str) -> None:
        """Close it; what it held is free as soon as the server sees that."""
        if self.held or self.unclear:
            self.cut()  # a pool or a forked child might keep a session open that was only closed
        with self._sockets:
            closed, self._descriptors = self._descriptors, []
        self._mend()  # a driver may be hurt by cursors that outlive their connection
        with contextlib.suppress(Exception):
            self._raw.close()
        database_sockets.forget(closed)
        database_sockets.watch.remove(self)
        # Last: one that was struck on the way here is ended by its next user.
        self.ended = self.ended or why or "closed"

    def after_fork(self) -> None:
        """In a forked child: it is the parent's. Never closed or finalised here, which would speak on its session."""
        _inherited.append(self)


def results_of(cursor: Any) -> list[list[dict[str, Any]]]:
    """Return all the results of what a cursor has run that have columns, each as rows by column."""
    found = []
    while True:
        if cursor.description is not None:
            names = [column[0] for column in cursor.description]
            found.append([dict(zip(names, row, strict=True)) for row in cursor.fetchall()])
        if not cursor.nextset():
            return found


def _units(text: str) -> int:
    """Return the length of a text as SQL Server counts."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


_inherited: list[LockSession] = []
