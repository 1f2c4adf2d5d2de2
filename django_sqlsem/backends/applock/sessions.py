"""One session of the server that keeps locks: one statement at a time, never reconnected, cut off when in doubt.

Its turn is a lock that an interrupted thread does not leave locked, as the session may have the locks of other permits,
and can't be thrown away.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from django.db import Error as DjangoDatabaseError

from django_sqlsem.backends.applock.calls import CLEAN, PROVE, ProcedureCall
from django_sqlsem.backends.base import Grant
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.identity import process_id
from django_sqlsem.core.modes import SHARED, UPDATE, line_of
from django_sqlsem.core.text import check_page
from django_sqlsem.core.threads import Turn
from django_sqlsem.database import sockets as database_sockets
from django_sqlsem.database.errors import backend_error
from django_sqlsem.database.raw import AnswerRow, answer_timeout, connect, results_of
from django_sqlsem.database.sqlserver import FOREIGN, Meaning, failure, meaning, units
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from django_sqlsem.database.sqlserver import LockNames


_NOT_INSTALLED: Final = (
    "The stored procedures of django-sqlsem are not in the database {alias!r}, or the login may not execute them. Run "
    "'manage.py locks sql --apply --database {alias}', or have a DBA run what it prints without --apply."
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
OPEN: Final = """SET NOCOUNT ON;
DECLARE @before varbinary(128) = CONTEXT_INFO(), @new varbinary(128) = CAST('{stamp}' AS varbinary(128));
SET CONTEXT_INFO @new;
SELECT @@SPID AS session_id, CASE WHEN SUBSTRING(@before, 1, 7) = 0x73716C73656D3A THEN 1 ELSE 0 END AS used,
    CASE WHEN CAST(DATABASEPROPERTYEX(DB_NAME(), 'Updateability') AS nvarchar(20)) = N'READ_ONLY' THEN 1 ELSE 0 END
    AS read_only,
    (SELECT DATEDIFF_BIG(MICROSECOND, '1970-01-01', login_time) FROM sys.dm_exec_sessions WHERE session_id = @@SPID)
    AS session_us;
"""

#: The modules that use a session: what is called there goes on for as long as its outermost frame is on the stack.
INSIDE: Final = ("django_sqlsem.backends.applock", "contextlib")
#: For how many seconds after the answer was due the server is not asked once more whether it is there.
SILENT: Final = 3.0


@dataclass(frozen=True, slots=True)
class Holding:
    """One permit's locks on a session."""

    permit_id: str
    names: LockNames
    key: str
    #: Ascending.
    slots: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    #: The slots that it stands for, if it has the name itself alone and one slot in place of all.
    whole: tuple[int, ...] = ()
    #: How it shares the name with others: see ``modes``.
    mode: str = SHARED

    @property
    def line(self) -> str:
        """The key of the name, and the mode of one that may become the writer, or has: a session keeps both of them."""
        return line_of(self.key, self.mode)

    def grant(self) -> Grant:
        """Return it as a backend grants it; for want of rows' ids, with the slots' numbers."""
        if self.whole:
            return Grant(self.whole, self.tokens * len(self.whole), self.whole)
        return Grant(self.slots, self.tokens, self.slots)


class LockSession:
    """A raw connection with a stamp. ``lock`` is held by whoever uses it; ``held`` is changed only by them."""

    def __init__(self, alias: str, in_turn: Callable[[], object] = lambda: None) -> None:
        self.alias = alias
        self.lock = Turn(self._mend, INSIDE)
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
        wrapper: Any
        self._raw, wrapper, self._descriptors = connect(alias, in_turn)
        self._wrapper = wrapper
        database_sockets.limit_reads(self._raw, self.limit)
        database_sockets.watch.add(self)
        #: By their statements, and whether those may take as long as they like.
        self._cursors: dict[tuple[str, bool], Any] = {}
        self.session_id, self.session_us = 0, 0
        try:
            with self._wrapper.wrap_database_errors, contextlib.closing(self._raw.cursor()) as cursor:
                self.asked = time.monotonic()  # Microsoft's driver alone gives it up after 15 s
                cursor.execute(SETTINGS)
            opened = self.run(ProcedureCall(OPEN.format(stamp=self.stamp), (), ""), {}, opens=True)
        except BaseException:
            self.end("it could not be opened")
            raise
        self._refuse_useless(opened)
        self.session_id, self.session_us = int(opened["session_id"]), int(opened["session_us"] or 0)

    def _refuse_useless(self, opened: dict[str, Any]) -> None:
        """End a session whose locks would exclude nobody, or are somebody else's."""
        if opened["read_only"]:
            self.end("its database is read-only")
            raise BackendError(
                f"The database {self.alias!r} is read-only, or a readable secondary: its locks would exclude nobody on "
                "the primary. Connect to the primary, without ApplicationIntent=ReadOnly."
            )
        if opened["used"]:
            self.end("it came out of a connection pool")
            raise BackendError(
                f"A connection of {self.alias!r} came out of a pool, with the locks of its last user: "
                f"set DATABASE_CONNECTION_POOLING = False. See {check_page('sqlsem.W002')}"
            )

    @property
    def can_be_cut(self) -> bool:
        """Whether another thread can end a wait on it at once."""
        return bool(self._descriptors)

    def run(
        self, call: ProcedureCall, values: dict[str, Any], *, waits: bool = False, opens: bool = False
    ) -> dict[str, Any]:
        """Call a procedure and return its one row by column: see ``results()``."""
        return self.results(call, values, waits=waits, opens=opens)[0][0]

    def results(
        self, call: ProcedureCall, values: dict[str, Any], *, waits: bool = False, opens: bool = False
    ) -> list[list[dict[str, Any]]]:
        """Call a procedure and return its results, each as rows by column; one that ``waits`` may take as it likes.

        Raises ``BackendError``; then the session has ended, unless the server only refused the call.
        """
        if self.ended:
            raise BackendError(f"The database {self.alias!r} failed: the session has ended: {self.ended}")
        parameters = [values[name] for name in call.parameters]
        sent = boot_now()
        try:
            with self._wrapper.wrap_database_errors:
                found = self._execute(call.text, parameters, sizes=call.sizes(), waits=waits)
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
        first = next((row for rows in found for row in rows), AnswerRow())
        if not opens and bytes(first["stamp"] or b"").rstrip(b"\0") != self.stamp.encode():
            self.end("another session stands in its place")
            raise failure(self.alias, FOREIGN)
        self.proved_at, self.fresh = sent, opens
        return found

    def _execute(
        self, text: str, parameters: Sequence[Any], *, sizes: Sequence[Any] = (), waits: bool = False
    ) -> list[list[dict[str, Any]]]:
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
            return results_of(cursor)  # some servers send a word about each refused lock before
        except BaseException:
            self._drop((text, waits))
            raise
        finally:
            self.asked = 0.0

    def _drop(self, key: tuple[str, bool]) -> None:
        """Let go of a cursor, and of results that were not read: they would be in the way of the next statement."""
        cursor = self._cursors.pop(key, None)
        if cursor is not None:
            with contextlib.suppress(self._wrapper.Database.Error):  # what interrupts this thread is no such error
                cursor.close()

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
            f"{each.key:32}{each.permit_id:32}{slot:6}{units(each.names.base):4}{each.names.base}"
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
        self.run(CLEAN, {"base": names.base, "key": key, "last": last, "permit": "" if record else None})
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
