"""Clients that stop before each statement, and go on when they are told: each a thread with connections of its own.

What a client does is the library's own code. Its cursors are replaced by ones that ask the client first. On PostgreSQL
a statement by itself is two steps, since others may come between what it has seen and its commit: it runs, and it
commits. On SQLite, which has one writer, a transaction is one step, and its commit another.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import threading
from collections.abc import Callable
from typing import Any, Final

from django.db import connections
from django.db.backends.utils import CursorWrapper

from django_sqlsem.database.sessions import OwnSession
from tests.support.databases import raw_connection

#: What the scheduler may say to a client that has stopped.
GO: Final = "go"
CRASH: Final = "crash"  # its process ends, and the database ends its transaction
LOST: Final = "lost"  # its session ends before the statement is sent
UNHEARD: Final = "unheard"  # its session ends after the statement was done, and before the answer
BUSY: Final = "busy"  # SQLite is locked by somebody else

#: Which steps there are.
READ, WRITE, BEGIN, COMMIT, ROLLBACK = "read", "write", "begin", "commit", "rollback"
#: Two that send nothing: a waiter's second look is due, and an operator's act tries again.
LOOK, AGAIN = "look", "again"

_WRITES: Final = re.compile(r"\b(UPDATE|INSERT INTO|DELETE FROM) \"?sqlsem_")
_ENDS: Final = {"BEGIN": BEGIN, "COMMIT": COMMIT, "ROLLBACK": ROLLBACK}
#: A client that has not answered for so long is looked at, and one that never does is a fault of the harness.
_ANSWERS_WITHIN: Final = 0.002
_HANGS_AFTER: Final = 20.0


class CrashedError(BaseException):
    """The client's process is dead."""


def kind_of(text: str) -> str | None:
    """Return what kind of step a statement is; ``None``: it concerns nobody else."""
    first = text.split(maxsplit=1)[0]
    if first in _ENDS:
        return _ENDS[first]
    if "sqlsem_" not in text:
        return None
    return WRITE if _WRITES.search(text) else READ


class Client:
    """A thread that runs one program after the other, statement by statement."""

    here = threading.local()

    def __init__(self, number: int, alias: str, monitor: Any) -> None:
        self.number, self.alias, self._monitor = number, alias, monitor
        self.postgresql = connections[alias].vendor == "postgresql"
        self.session = OwnSession(alias)
        self._wake, self._arrived = threading.Semaphore(0), threading.Semaphore(0)
        self._raw, self._program = None, None
        self.forget()
        threading.Thread(target=self._work, daemon=True, name=f"client-{number}").start()

    def forget(self) -> None:
        """Begin anew."""
        self._word = GO
        self.state, self.error = "new", None  # then "stopped" or "running", and at last "done" or "dead"
        self.blocked = False  # whether its statement waits for a row's lock
        self.kind, self.text = "", ""  # of the step that it has stopped before
        self.open = False  # whether it is in a transaction
        self.passed = False  # whether another one has gone on since it stopped
        self.mid, self.fresh = False, False  # whether an operation is under way, and has not sent anything yet
        self.history = 0  # what it has sent and seen
        self.process = ""  # whose process it is
        self.holds: Any = None
        self.waits: Any = None

    # In the scheduler's thread.

    def start(self, program: Callable[[Client], None] | None) -> None:
        """Run a program up to its first step; ``None`` ends the thread."""
        self.forget()
        self._program = program
        self._wake.release()
        if program is not None:
            self.arrive()

    def step(self, word: str) -> None:
        """Let it take its step; returns when it has stopped again, ended, or waits for a row's lock."""
        self.fresh = self.passed = False
        self._word = word
        if self.postgresql and word in (CRASH, LOST):
            self.end_session()
        self._wake.release()
        self.arrive()

    def arrive(self) -> None:
        """Wait until it has stopped again, has ended, or waits for a row's lock."""
        for _ in range(round(_HANGS_AFTER / _ANSWERS_WITHIN)):
            self.blocked = not self._arrived.acquire(timeout=_ANSWERS_WITHIN)
            if not self.blocked or (self.postgresql and self._waits_for_a_lock()):
                return
        raise AssertionError(f"client {self.number} does not come back from: {self.text}")

    def _waits_for_a_lock(self) -> bool:
        if self._raw is None or self._raw.closed:
            return False
        pid = self._raw.info.backend_pid
        return bool(self._monitor.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", (pid,)).fetchone()[0])

    def end_session(self) -> None:
        """Have the server end its session, and wait until that is done."""
        if self._raw is not None and not self._raw.closed:
            self._monitor.execute("SELECT pg_terminate_backend(%s, 5000)", (self._raw.info.backend_pid,))

    # In its own thread.

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call one operation of the library's."""
        self.mid = self.fresh = True
        try:
            return function(*arguments, **options)
        finally:
            self.mid = self.fresh = False

    def look_later(self) -> None:
        """Wait until the operations are through that are under way now: it takes them less than 25 ms."""
        self._stop(LOOK, "")

    def try_later(self, _seconds: float) -> None:
        """Wait until somebody else has gone on."""
        self._stop(AGAIN, "")

    def saw(self, what: Any) -> None:
        """Note what it knows: two runs in which all clients have seen the same go on in the same ways."""
        self.history = hash((self.history, repr(what)))

    def run(self, text: str, raw: Any, execute: Callable[[], Any], count: Callable[[], int]) -> Any:
        """Run one statement, when it is told to."""
        kind = kind_of(text)
        self._raw = raw
        if self._word == CRASH:  # it is dead, whatever may have swallowed the exception
            raise CrashedError
        if kind is None or (self.postgresql and kind == BEGIN) or (not self.postgresql and self._within(kind)):
            return execute()
        word = self._stop(kind, text)
        alone = self.postgresql and kind == WRITE and raw.autocommit and raw.info.transaction_status == 0
        if alone and word == GO:
            raw.execute("BEGIN")
        try:
            result = execute()
        except Exception:
            self._close(raw, "ROLLBACK" if alone else "")
            raise
        if kind in (READ, WRITE):
            self.saw((text, count()))
        self.open = raw.info.transaction_status != 0 if self.postgresql else raw.in_transaction
        if alone and word == GO:
            if count() == 0 and not text.startswith("WITH"):  # it has changed nothing and has no lock
                self._close(raw, "COMMIT")
            else:
                word = self._stop(COMMIT, "COMMIT")
                self._close(raw, "COMMIT")
        if word == UNHEARD:
            self.end_session()
            raw.execute("SELECT 1")  # raises what the driver raises
        return result

    def _close(self, raw: Any, how: str) -> None:
        self.open = False
        if how and not raw.closed:
            raw.execute(how)

    def _within(self, kind: str) -> bool:
        return self.open and kind not in (COMMIT, ROLLBACK)

    def _stop(self, kind: str, text: str) -> str:
        self.kind, self.text, self.state = kind, text, "stopped"
        self._arrived.release()
        self._wake.acquire()
        self.state = "running"
        word = self._word
        self.saw((kind, word))
        if word == CRASH:
            if not self.postgresql and self._raw is not None:
                self._raw.close()  # a dead process does nothing on its way out, such as Django's set_autocommit()
            raise CrashedError
        if word == BUSY:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = 5
            raise error
        return word

    def _work(self) -> None:
        self.here.client = self
        while True:
            self._wake.acquire()
            connection = connections[self.alias]
            if self._program is None:
                self.session.close()
                connection.close()
                return
            try:
                watch(connection, self)
                self.session.run(lambda cursor: None)  # it is open at the beginning of each run
                self._program(self)
            except BaseException as error:
                self.error = error
            end = "dead" if self._word == CRASH else "done"
            if end == "dead":
                self.error = None
            if end == "dead" or self.error is not None:
                self.session.close()
                with contextlib.suppress(Exception):  # it may be dead
                    connection.close()
                del connections[self.alias]
            self.mid = self.fresh = self.open = False
            self.state = end
            self._arrived.release()


def stepped(kind: Any) -> Any:
    """Return a class of cursors that ask the client of their thread, if it has one."""

    class SteppedCursor(kind):  # type: ignore[misc]
        def execute(self, sql: str, parameters: Any = None) -> None:
            client, execute = getattr(Client.here, "client", None), super().execute
            if client is None:
                return execute(sql, parameters)
            raw = self.db.connection
            return client.run(sql, raw, lambda: execute(sql, parameters), lambda: self.rowcount)

        def fetchone(self) -> Any:
            return _seen(super().fetchone())

        def fetchall(self) -> Any:
            return _seen(super().fetchall())

    return SteppedCursor


def _seen(result: Any) -> Any:
    if (client := getattr(Client.here, "client", None)) is not None:
        client.saw(result)
    return result


class WatchedCursor(CursorWrapper):
    """The same for the ORM, by which operators act."""

    def execute(self, sql: str, params: Any = None) -> Any:
        execute, client = super().execute, Client.here.client
        with self.db.wrap_database_errors:
            return client.run(sql, self.db.connection, lambda: execute(sql, params), lambda: self.cursor.rowcount)

    def fetchone(self) -> Any:
        return _seen(self.cursor.fetchone())

    def fetchall(self) -> Any:
        return _seen(self.cursor.fetchall())

    def fetchmany(self, *size: int) -> Any:
        return _seen(self.cursor.fetchmany(*size))


def watch(connection: Any, client: Client) -> None:
    """Have the ORM of the client's thread ask it."""
    connection.ensure_connection()
    if "make_cursor" in vars(connection):
        return

    def told(text: str, end: Callable[[], None]) -> None:
        with connection.wrap_database_errors:
            client.run(text, connection.connection, end, lambda: 0)

    commit, rollback = connection._commit, connection._rollback
    connection.make_cursor = lambda cursor: WatchedCursor(cursor, connection)
    connection._commit = lambda: told("COMMIT", commit)
    connection._rollback = lambda: told("ROLLBACK", rollback)


def monitor_of(alias: str) -> Any:
    """Return a connection that ends sessions and tells who waits for a lock; SQLite needs none."""
    return raw_connection(alias) if connections[alias].vendor == "postgresql" else None
