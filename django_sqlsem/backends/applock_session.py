"""One session of the server that keeps locks: one statement at a time, never reconnected, cut off when in doubt."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from django.db import Error as DjangoDatabaseError

from django_sqlsem import odbc_sockets, odbc_watch
from django_sqlsem.backends import applock_sql as sql
from django_sqlsem.backends.applock_codes import Meaning, failure, meaning
from django_sqlsem.backends.applock_connect import answer_timeout, connect
from django_sqlsem.backends.applock_parameters import input_sizes
from django_sqlsem.backends.applock_proof_sql import prove
from django_sqlsem.backends.applock_turns import Turn
from django_sqlsem.clocks import boot_now
from django_sqlsem.exceptions import BackendError
from django_sqlsem.identity import process_id
from django_sqlsem.modes import UPDATE, line_of
from django_sqlsem.sessions import backend_error

if TYPE_CHECKING:
    from django_sqlsem.backends.applock_held import Holding
    from django_sqlsem.backends.applock_names import LockNames

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
        #: Names of which a claim was cut short: what it may have got is to be freed first. With how many slots, or 0.
        self.unclear: dict[str, tuple[LockNames, int]] = {}
        #: By whom holders were asked to stop, by permit id, as its last proof told.
        self.wishes: dict[str, str] = {}
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
        odbc_sockets.limit_reads(self._raw, self.limit)
        odbc_watch.watch.add(self)
        #: By their statements, and whether those may take as long as they like.
        self._cursors: dict[tuple[str, bool], Any] = {}
        self.session_id, self.session_us = 0, 0
        try:
            opened = self.run(sql.OPEN, {"stamp": self.stamp})
        except BaseException:
            self.end("it could not be opened")
            raise
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

    def run(self, batch: sql.Batch, values: dict[str, Any], *, waits: bool = False) -> dict[str, Any]:
        """Run a batch and return its one row by column; one that ``waits`` may take as long as it likes.

        Raises ``BackendError``; then the session has ended, unless the server only refused the batch.
        """
        if self.ended:
            raise BackendError(f"The database {self.alias!r} failed: the session has ended: {self.ended}")
        parameters = [values[name] for name in batch.parameters]
        sent = boot_now()
        try:
            with self._wrapper.wrap_database_errors:
                row = self._execute(batch.text, parameters, sizes=input_sizes(batch.parameters), waits=waits)
        except DjangoDatabaseError as error:
            # Whatever else the server said of this batch, the other locks here are not to be lost for it.
            known = self._note_end(error)
            gone = known in (Meaning.SESSION_ENDED, Meaning.SILENT) or boot_now() - sent > self.limit + SILENT
            if gone or self._still_fails():
                self.end(str(error.__cause__ or error).strip())
            raise backend_error(self.alias, error, stale=bool(self.ended) and not self.fresh) from error
        finally:
            self.last_used = time.monotonic()
        if row.get("status") == sql.FOREIGN or not self._is_ours(row):
            self.end("another session stands in its place")
            raise failure(self.alias, sql.FOREIGN)
        self.proved_at, self.fresh = sent, batch is sql.OPEN
        return row

    def _is_ours(self, row: dict[str, Any]) -> bool:
        """Whether the session whose stamp an answer brings, if it does, is the one that we opened."""
        return "found" not in row or bytes(row["found"] or b"").rstrip(b"\0") == self.stamp.encode()

    def rows(self, text: str, parameters: Sequence[Any]) -> list[dict[str, Any]]:
        """Run a query and return its rows by column. Raises ``BackendError``; the session may have ended then."""
        try:
            with self._wrapper.wrap_database_errors:
                cursor = self._cursors[_READING] = self._raw.cursor()
                self.asked = time.monotonic()
                cursor.execute(text, list(parameters))
                names = [column[0] for column in cursor.description]
                return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
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
            closed = odbc_sockets.are_closed(self._descriptors)
        self.surely_ended = (known is Meaning.SESSION_ENDED or closed) and not self.was_cut
        return known

    def prove(self, *, record: bool = False) -> bool:
        """Ask the server whether all its locks are still there. Raises ``BackendError`` if the session has ended.

        ``record``: by the way, also who asks its permits' holders to stop.
        """
        held = list(self.held.values())
        resources = [each.names.slot(slot) for each in held for slot in each.slots]
        permits = held if record else []
        wishes = {}
        for start in range(0, max(len(resources), 1), 100):
            some, about = resources[start : start + 100], permits[start : start + 100]
            values: dict[str, Any] = {"stamp": self.stamp}
            values |= {f"resource{number}": name for number, name in enumerate(some)}
            for number, each in enumerate(about):
                values |= {f"key{number}": each.key, f"slot{number}": each.slots[0], f"permit{number}": each.permit_id}
            row = self.run(prove(len(some), len(about)), values)
            if row["missing"]:
                self.end("its locks are gone: another session stands in its place")
                return False
            for number, each in enumerate(about):
                if row[f"asked{number}"] is not None:
                    wishes[each.permit_id] = str(row[f"asked{number}"])
        self.wishes = wishes
        return True

    def clean(self, key: str) -> None:
        """Free what a claim of a name that was cut short may have got."""
        names, bound = self.unclear[key]
        values = {"stamp": self.stamp, "base": names.base, "gate": names.gate, "bound": bound}
        self.run(sql.CLEAN, values | {"key": "" if bound else key})
        for line in (key, line_of(key, UPDATE)):
            self.held.pop(line, None)  # in case it was noted
        self.kept = self.kept and bool(self.held)
        del self.unclear[key]

    def cut(self) -> None:
        """End it from another thread, also in the middle of a wait: the server frees all its locks."""
        self.was_cut = True
        with self._sockets:
            odbc_sockets.cut(self._descriptors)

    def end(self, why: str) -> None:
        """Close it; what it held is free as soon as the server sees that."""
        if self.held or self.unclear:
            self.cut()  # a pool or a forked child might keep a session open that was only closed
        with self._sockets:
            closed, self._descriptors = self._descriptors, []
        self._mend()  # a driver may be hurt by cursors that outlive their connection
        with contextlib.suppress(Exception):
            self._raw.close()
        odbc_sockets.forget(closed)
        odbc_watch.watch.remove(self)
        # Last: one that was struck on the way here is ended by its next user.
        self.ended = self.ended or why or "closed"

    def after_fork(self) -> None:
        """In a forked child: it is the parent's. Never closed or finalised here, which would speak on its session."""
        _inherited.append(self)


_inherited: list[LockSession] = []
