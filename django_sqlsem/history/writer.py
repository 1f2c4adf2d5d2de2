"""Writing the history down, on a keeper's thread and between its other duties: late rather than in anybody's way.

The statements that write and prune the history: small ones, each with limits of its own.

A transaction beside what a session is really for: whatever is refused there leaves the session as it was.

The rows of the history, as they are written: values in the order of ``statements.EVENT_COLUMNS`` and the other.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.db import Error as DjangoDatabaseError
from django.db import connections

from django_sqlsem.conf import Config, config
from django_sqlsem.core.clocks import boot_now, boot_now_us
from django_sqlsem.core.identity import printable
from django_sqlsem.database.cursors import BEGIN, TEXT, SQLServerCursor, limited, padded
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.limits import (
    LOCK_TIMEOUT_MS,
    STATEMENT_TIMEOUT_MS,
    is_disconnect,
    is_timeout_of_sql_server,
    is_transient,
    sqlstate,
)
from django_sqlsem.database.sessions import OwnSession
from django_sqlsem.exceptions import BackendError
from django_sqlsem.history import recorder as history_recorder
from django_sqlsem.history.events import PASSING
from django_sqlsem.history.recorder import MINUTE_US, Entry, Recorder, Tallies, Tally, told

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import KeeperSession


T = TypeVar("T")

EVENTS: Final = "sqlsem_event"
MINUTES: Final = "sqlsem_minute"
TABLES: Final = (EVENTS, MINUTES)
EVENT_COLUMNS: Final = {
    "semaphore_key": "text",
    "name": "text",
    "at_us": "bigint",
    "until_us": "bigint",
    "what": "text",
    "slot": "int",
    "token": "bigint",
    "waited_us": "bigint",
    "held_us": "bigint",
    "host": "text",
    "pid": "bigint",
    "thread": "text",
    "label": "text",
    "user_name": "text",
    "done_by": "text",
    "detail": "text",
}
MINUTE_COLUMNS: Final = {
    "semaphore_key": "text",
    "minute_us": "bigint",
    "writer": "bigint",
    "until_us": "bigint",
    "granted": "int",
    "released": "int",
    "turned_away": "int",
    "lost": "int",
    "held_us": "bigint",
    "longest_hold_us": "bigint",
    "longest_wait_us": "bigint",
    "holds": "text",
    "waits": "text",
}
_IDENTITY: Final = ("semaphore_key", "minute_us", "writer")
_COUNTS: Final = [column for column in MINUTE_COLUMNS if column not in (*_IDENTITY, "until_us")]
#: A transaction writes so many rows of a table; and so many where they take several statements.
BATCH: Final = 100
SMALL_BATCH: Final = 20
#: A statement deletes so many.
PRUNED: Final = 200
#: SQL Server compiles each text: one has so many rows, or keys, always.
AT_ONCE: Final = 10
_SQL_SERVER: Final = {"text": TEXT, "bigint": "bigint", "int": "int"}
#: A lock is waited for no longer, in seconds.
LOCK_PATIENCE: Final = 0.2

_AGAIN: Final = {
    "postgresql": f" ON CONFLICT ({', '.join(_IDENTITY)}) DO UPDATE SET "
    + ", ".join(f"{column} = EXCLUDED.{column}" for column in _COUNTS),
    "mysql": " ON DUPLICATE KEY UPDATE " + ", ".join(f"{column} = VALUES({column})" for column in _COUNTS),
}
_AGAIN["sqlite"] = _AGAIN["postgresql"]


def is_mysql(connection: BaseDatabaseWrapper) -> bool:
    """Whether it is MySQL itself, which counts in whole seconds, and only for a session."""
    return connection.vendor == "mysql" and not getattr(connection, "mysql_is_mariadb", False)


def batch_of(connection: BaseDatabaseWrapper) -> int:
    """Return how many rows of a table to write in one transaction."""
    return BATCH if connection.vendor in ("postgresql", "mysql", "sqlite") else SMALL_BATCH


def limit(cursor: AnyCursor, seconds: float) -> None:
    """Inside a transaction: have no statement of it take longer than ``seconds``, and none wait long for a lock."""
    vendor = cursor.db.vendor
    if vendor == "postgresql":
        # A loss of the last moments of history, when the server crashes, is nobody's loss.
        cursor.execute(
            "SELECT set_config('lock_timeout', %s, true), set_config('statement_timeout', %s, true),"
            " set_config('synchronous_commit', 'off', true)",
            [f"{min(seconds, LOCK_PATIENCE) * 1000:.0f}ms", f"{seconds * 1000:.0f}ms"],
        )
    elif is_mysql(cursor.db):
        cursor.execute("SET SESSION innodb_lock_wait_timeout = 1, SESSION lock_wait_timeout = 1")
    elif vendor == "microsoft":
        cursor.execute(f"SET LOCK_TIMEOUT {LOCK_PATIENCE * 1000:.0f}")


def unlimit(cursor: AnyCursor) -> None:
    """After the transaction: lift the limits that would outlive it."""
    if is_mysql(cursor.db):
        usual = STATEMENT_TIMEOUT_MS // 1000 - 1
        cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {usual}, SESSION lock_wait_timeout = {usual}")
    elif cursor.db.vendor == "microsoft":
        cursor.execute(f"SET LOCK_TIMEOUT {LOCK_TIMEOUT_MS}")


def write_events(cursor: AnyCursor, rows: Sequence[Sequence[Any]], seconds: float) -> None:
    """Insert events."""
    _insert(cursor, EVENTS, EVENT_COLUMNS, rows, "", seconds)


def write_minutes(cursor: AnyCursor, rows: Sequence[Sequence[Any]], seconds: float) -> None:
    """Insert the counts of minutes, or write them anew."""
    again = _AGAIN.get(cursor.db.vendor)
    if again is None:
        _forget(cursor, rows)
    _insert(cursor, MINUTES, MINUTE_COLUMNS, rows, again or "", seconds)


def delete_old(cursor: AnyCursor, table: str, now_us: int, seconds: float) -> int:
    """Delete some rows whose time is over, and that nobody else is deleting. Return how many."""
    cursor.execute(_limited(cursor.db, _oldest(cursor.db, table), seconds), [now_us])
    ids = sorted(int(row[0]) for row in cursor.fetchall())
    if ids and cursor.db.vendor == "mysql":
        # By the primary key: who locks by another index meets who deletes half-way, and one of them is refused.
        places = ", ".join(["%s"] * len(ids))
        text = f"SELECT id FROM {table} WHERE id IN ({places}) ORDER BY id{_skipping(cursor.db)}"
        cursor.execute(_limited(cursor.db, text, seconds), ids)
        ids = [int(row[0]) for row in cursor.fetchall()]
    if not ids:
        return 0
    if cursor.db.vendor == "postgresql":
        cursor.execute(f"DELETE FROM {table} WHERE id = ANY(%s::bigint[])", [ids])
    else:
        if cursor.db.vendor == "microsoft":
            ids = padded(ids, (AT_ONCE, PRUNED))
        places = ", ".join(["%s"] * len(ids))
        cursor.execute(_limited(cursor.db, f"DELETE FROM {table} WHERE id IN ({places})", seconds), ids)
    return max(0, int(cursor.rowcount))  # another may have been faster where no row is passed over


def _oldest(connection: BaseDatabaseWrapper, table: str) -> str:
    where = "WHERE until_us <= %s ORDER BY until_us"
    if connection.vendor == "microsoft":
        return f"SELECT TOP ({PRUNED}) id FROM {table} WITH (READPAST, UPDLOCK, ROWLOCK) {where}"
    if connection.vendor == "oracle":
        return f"SELECT id FROM {table} {where} FETCH FIRST {PRUNED} ROWS ONLY"
    locked = "" if connection.vendor == "mysql" else _skipping(connection)
    return f"SELECT id FROM {table} {where} LIMIT {PRUNED}{locked}"


def _skipping(connection: BaseDatabaseWrapper) -> str:
    skips = connection.features.has_select_for_update_skip_locked
    return dialect_for(connection).lock_skipping if skips else ""


def _limited(connection: BaseDatabaseWrapper, sql: str, seconds: float) -> str:
    """Return a statement with its time limit, where that is a part of it."""
    if connection.vendor == "mysql" and not is_mysql(connection):
        return f"SET STATEMENT max_statement_time = {seconds:.3f} FOR {sql}"
    return sql


def _insert(
    cursor: AnyCursor, table: str, columns: dict[str, str], rows: Sequence[Sequence[Any]], again: str, seconds: float
) -> None:
    if not rows:
        return
    connection = cursor.db
    insert = f"INSERT INTO {table} ({', '.join(columns)})"
    one = f"({', '.join(['%s'] * len(columns))})"
    if connection.vendor == "postgresql":
        # One text for any number of rows: others would push the claims' out of those that are prepared.
        lists = ", ".join(f"%s::{kind}[]" for kind in columns.values())
        cursor.execute(
            f"{insert} SELECT * FROM unnest({lists}){again}", [list(column) for column in zip(*rows, strict=True)]
        )
    elif connection.vendor == "mysql":
        text = f"{insert} VALUES {', '.join([one] * len(rows))}{again}"
        cursor.execute(_limited(connection, text, seconds), [value for row in rows for value in row])
    elif isinstance(cursor, SQLServerCursor):
        _insert_on_sql_server(cursor, insert, one, columns, rows)
    else:
        for row in rows:
            cursor.execute(f"{insert} VALUES {one}{again}", list(row))


def _insert_on_sql_server(
    cursor: SQLServerCursor, insert: str, one: str, columns: dict[str, str], rows: Sequence[Sequence[Any]]
) -> None:
    # Of each NULL pyodbc would ask the server what it is: nothing that is written is -1, and no key is empty.
    numbers = [kind != "text" for kind in columns.values()]
    picked = [f"NULLIF({name}, -1)" if number else name for name, number in zip(columns, numbers, strict=True)]
    given = f"(VALUES {', '.join([one] * AT_ONCE)}) AS given ({', '.join(columns)})"
    text = f"{insert} SELECT {', '.join(picked)} FROM {given} WHERE semaphore_key <> ''"
    declared = [_SQL_SERVER[kind] for kind in columns.values()] * AT_ONCE
    for some in _some(rows):
        values = [-1 if value is None else value for row in some for value in row]
        values += [0 if number else "" for number in numbers] * (AT_ONCE - len(some))
        cursor.execute_declared(text, values, declared)


def _forget(cursor: AnyCursor, rows: Sequence[Sequence[Any]]) -> None:
    by_minute: dict[tuple[int, int], list[str]] = {}
    for key, minute_us, writer, *_ in rows:
        by_minute.setdefault((minute_us, writer), []).append(key)
    # Else it would scan a small table, and wait for the rows that others write.
    sought = f" FROM {MINUTES} WITH (ROWLOCK, FORCESEEK)" if cursor.db.vendor == "microsoft" else ""
    places = ", ".join(["%s"] * AT_ONCE)
    text = f"DELETE FROM {MINUTES}{sought} WHERE minute_us = %s AND writer = %s AND semaphore_key IN ({places})"
    for (minute_us, writer), keys in by_minute.items():
        for some in _some(keys):
            cursor.execute(text, [minute_us, writer, *padded(some, (AT_ONCE,))])


def _some(all_: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(all_), AT_ONCE):
        yield all_[start : start + AT_ONCE]


#: The shortest limit that MySQL knows, and a little more, in seconds.
MYSQL_SECONDS: Final = 1.2

_TIMED_OUT_SQLSTATE: Final = "57014"
_TIMED_OUT_MYSQL: Final = (1969, 3024)


class TooSoonError(Exception):
    """So little time as there is now cannot be kept to on this database."""


def in_transaction(
    session: KeeperSession, body: Callable[[AnyCursor], object], seconds: float, in_line: float
) -> Exception | None:
    """Call ``body`` in a transaction in which no statement takes longer than ``seconds``. Returns an error or ``None``.

    ``in_line``: for how many seconds to stand in line where a database has one writer.
    """

    def apart(cursor: AnyCursor) -> bool:
        limit(cursor, seconds)
        with limited(cursor, seconds) as fresh:
            body(fresh)
        return True

    def beside(cursor: AnyCursor) -> Exception | None:
        # On an error that a session hears of it throws its connection away, and others count on this one.
        connection: Any = cursor.db
        refused = connection.Database.Error
        if is_mysql(connection) and seconds < MYSQL_SECONDS:
            return TooSoonError()
        try:
            _begin(cursor, in_line, refused)
        except refused as error:
            return _kept(error)
        try:
            apart(cursor)
            cursor.execute("COMMIT")
        except refused as error:
            found = _kept(error)
            cursor.execute("ROLLBACK")
            return found
        finally:
            unlimit(cursor)
        return None

    refusals: list[Exception] = []

    def once(cursor: AnyCursor) -> bool | None:
        done = None
        try:
            done = apart(cursor)
        except DjangoDatabaseError as error:
            if not (is_transient(error) or is_timeout_of_sql_server(error)):
                raise  # and the session throws its connection away
            refusals.append(_kept(error))  # of which the session would make its own time-consuming tries
        unlimit(cursor)
        return done

    vendor = session.connection.vendor
    try:
        if vendor == "microsoft" and seconds < 1:
            return TooSoonError()
        if vendor in BEGIN:
            return session.run(beside, again=False)
        session.transaction(once, again=False)
        return refusals[0] if refusals else None
    except Exception as error:  # noqa: BLE001 - a fault of the history's own is no permit's concern either
        return error


def passes(error: Exception) -> bool:
    """Whether an error of ``in_transaction`` is likely to be over soon, so that it is worth to try again."""
    if isinstance(error, BackendError):
        if not isinstance(error.__cause__, Exception):
            return False
        error = error.__cause__
    cause: Any = error.__cause__ or error
    code = cause.args[0] if getattr(cause, "args", ()) else None
    late = sqlstate(cause) == _TIMED_OUT_SQLSTATE or code in _TIMED_OUT_MYSQL
    return late or is_transient(error) or is_timeout_of_sql_server(error) or is_disconnect(error)


def _kept(error: Any) -> Exception:
    """Return an error that has not cost the connection; raise any other."""
    if is_disconnect(error):
        raise error
    error.__traceback__ = None  # it is on a cycle with the frames that it came through
    found: Exception = error
    return found


def _begin(cursor: AnyCursor, in_line: float, refused: Any) -> None:
    give_up = time.monotonic() + in_line
    while True:
        try:
            cursor.execute(BEGIN[cursor.db.vendor])
            return
        except refused as error:
            if not is_transient(error) or time.monotonic() > give_up:
                raise
        time.sleep(random.uniform(0.001, 0.003))  # noqa: S311 - no two in step


def event_row(at_us: int, entry: Entry, settings: Config) -> list[Any] | None:
    """Return the values of an event, or ``None`` if such are not kept."""
    kept = settings.history_grants if entry.what in PASSING else settings.history_acts
    if not kept:
        return None
    request, grant, who = entry.request, entry.grant, entry.request.holder
    return [
        request.resource.key,
        request.resource.name,
        at_us,
        at_us + round(kept * 1e6),
        entry.what,
        grant.slots[0] if grant is not None and grant.slots else None,
        grant.tokens[0] if grant is not None and grant.tokens else None,
        None if entry.waited is None else round(entry.waited * 1e6),
        None if entry.held is None else round(entry.held * 1e6),
        who.host,
        who.pid,
        who.thread,
        who.label,
        who.user,
        printable(entry.by, 150),
        printable(told(entry), 500),
    ]


def minute_row(at_us: int, tally: Tally, writer: int, settings: Config) -> list[Any]:
    """Return the values of what was counted in a minute."""
    return [
        tally.resource.key,
        at_us,
        writer,
        at_us + MINUTE_US + round(settings.history_minutes * 1e6),
        tally.granted,
        tally.released,
        tally.turned_away,
        tally.lost,
        tally.held_us,
        tally.longest_hold_us,
        tally.longest_wait_us,
        history_recorder.to_text(tally.holds),
        history_recorder.to_text(tally.waits),
    ]


logger = logging.getLogger("django_sqlsem")

#: What happens is written down so often, in seconds; sooner if this many events wait.
EVERY: Final = 5.0
MANY: Final = 1_000
#: After an error it rests, for twice as long each time, in seconds.
LONGEST_REST: Final = 60.0
#: What has run out is deleted about so often, in seconds, a little at a time.
PRUNE_EVERY: Final = 30.0
#: A transaction of the writer takes no longer, in seconds; all of them at the end of a process; and those of one turn.
LONGEST: Final = 1.3
AT_THE_END: Final = 3.0
TURN: Final = 0.03
#: It does not begin one when there is less time, in seconds.
SHORTEST: Final = 0.05
#: How long it stands in line for SQLite's one writer, in seconds.
IN_LINE: Final = 0.1
#: The clocks are compared so often, in seconds.
COMPARED: Final = 30.0
#: That something is missing is said so often at the most, in seconds.
TOLD_EVERY: Final = 60.0
#: Refusals that pass by themselves are worth a word when there were so many in a row.
WORTH_A_WORD: Final = 3


class Writer:
    """Writes what one recorder has noted. All its methods are the keeper's to call."""

    def __init__(self, recorder: Recorder, session: KeeperSession) -> None:
        self.recorder = recorder
        self.alias = recorder.alias
        self.tallies = Tallies()
        vendor = connections[self.alias].vendor
        #: Whether it writes on the keeper's own session: not where that is none for statements of any kind.
        self.shares = isinstance(session, OwnSession) and vendor in BEGIN
        self.session: KeeperSession = session if self.shares else OwnSession(self.alias)
        self._writer = secrets.randbits(62)
        self._offset_us: int | None = None
        self._compare_at = 0.0
        self._write_at = boot_now() + EVERY
        self._prune_at = boot_now() + random.uniform(0, PRUNE_EVERY)  # noqa: S311 - no two processes in step
        #: Whether the next turn is for what has run out: what is held may not have the time for both in one.
        self._prunes = False
        self._rest = EVERY
        self._refusals = 0
        self._told = False
        self._tell_at = 0.0
        self._lost = 0
        #: The minutes that are left to be written in this turn; ``None``: the next one begins with all that changed.
        self._left: list[tuple[int, Tally]] | None = None

    @property
    def pending(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.recorder.notes) or self.tallies.changed

    @property
    def unfinished(self) -> bool:
        """Whether there is anything to write, or to say, before the end."""
        return self.pending or bool(self._lost or self.recorder.dropped)

    def due(self, now: float) -> bool:
        """Whether to write now, by the boot clock. Counts what has been noted, meanwhile."""
        if self._offset_us is not None and self.recorder.notes:
            self.tallies.gather(self.recorder, self._offset_us)
        if self._prunes or now >= self._write_at:
            return self._prunes or self.pending
        many = len(self.tallies.listed) >= MANY or len(self.recorder.notes) >= 10 * MANY
        return many and not self._refusals

    def write(self, seconds: float) -> None:
        """Write a few batches, none of which may take longer than ``seconds``. Never raises a database's error."""
        if seconds < SHORTEST:
            return  # what is held comes first
        if self._prunes:
            self._prunes = False
            self._prune(min(seconds, LONGEST))
            return
        began = boot_now()
        while self._attempt(min(seconds, LONGEST), IN_LINE):
            if not (self.tallies.listed or self._left):
                self._left, self._write_at, self._prunes = None, boot_now() + EVERY, True
                return
            if boot_now() - began > TURN:
                return

    def finish(self, since: float, wanted: Callable[[], bool]) -> None:
        """Write all there is, as nobody may come back to it. What cannot be written is let go, and counted.

        ``since``: an instant of ``time.monotonic()``; who was not reached from then on is not asked again.
        ``wanted``: whether the keeper has better things to do by now; then the rest is left for later.
        """
        give_up = boot_now() + AT_THE_END
        self._left = None
        while self.pending and not self._told and boot_now() < give_up and not self.session.unreachable(since):
            if wanted():
                return
            self._attempt(LONGEST, LONGEST)  # a refusal or two of a busy server may pass
            self._left = None
        if not self._refusals and not self.session.unreachable(since):
            self._prune(LONGEST)
        self._lost += len(self.recorder.notes) + len(self.tallies.listed) + self.recorder.dropped
        self._lost += sum(tally.changed for tally in self.tallies.minutes.values())
        if self._lost:
            logger.warning("The history of %r ends; %d entries are missing.", self.alias, self._lost)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all there was. What comes later is told under another number: it replaces nothing that is written."""
        self.recorder.notes.clear()
        self.recorder.dropped = 0
        self.tallies, self._writer, self._left = Tallies(), secrets.randbits(62), None
        self._refusals, self._told, self._lost, self._rest = 0, False, 0, EVERY
        self._write_at = boot_now() + EVERY

    def leave(self) -> None:
        """Close the connection, if it is the writer's alone."""
        if not self.shares:
            self.session.close()

    # One transaction.

    def _attempt(self, seconds: float, in_line: float) -> bool:
        """Write one batch. Return whether it went well."""
        batch = _Batch()
        used = self.session.last_used
        error = in_transaction(self.session, lambda cursor: self._send(cursor, batch, seconds), seconds, in_line)
        self.session.last_used = used  # no connection stays open longer for the history's sake
        if error is None:
            self._written(batch)
        elif not isinstance(error, TooSoonError):
            self._refused(batch, error)
        return error is None

    def _send(self, cursor: AnyCursor, batch: _Batch, seconds: float) -> None:
        now_us = self._clock(cursor)
        while self.tallies.gather(self.recorder, self._offset_us or 0):
            pass
        if self._left is None:
            self._left = [(at, tally) for (_, at), tally in self.tallies.minutes.items() if tally.changed]
        settings = config(self.alias)
        batch.now_us = now_us
        most = batch_of(cursor.db)
        batch.listed = min(len(self.tallies.listed), most)
        batch.minutes = self._left[:most]
        listed = (self.tallies.listed[nth] for nth in range(batch.listed))
        events = [event_row(at_us, entry, settings) for at_us, entry in listed]
        write_events(cursor, [row for row in events if row is not None], seconds)
        if settings.history_minutes:
            rows = [minute_row(at_us, tally, self._writer, settings) for at_us, tally in batch.minutes]
            write_minutes(cursor, rows, seconds)
        batch.sent = True

    def _clock(self, cursor: AnyCursor) -> int:
        """Return Unix time by the database's clock, in microseconds."""
        now = boot_now()
        if self._offset_us is None or now >= self._compare_at:
            dialect = dialect_for(cursor.db)
            asked_us = boot_now_us()
            there_us = dialect.token_clock(dialect.now(cursor))
            slack_us = (boot_now_us() - asked_us) // 2
            measured = there_us - asked_us - slack_us
            # One that was within the error was no worse: what is told later is not to be earlier than what was before.
            if self._offset_us is None or abs(measured - self._offset_us) > slack_us:
                self._offset_us = measured
            self._compare_at = now + COMPARED
        return boot_now_us() + self._offset_us

    def _written(self, batch: _Batch) -> None:
        self._forget(batch)
        self.tallies.close(batch.now_us - MINUTE_US)
        self._rest, self._refusals = EVERY, 0
        self._lost += self.recorder.dropped + self.tallies.dropped
        self.recorder.dropped = self.tallies.dropped = 0
        if self._told or (self._lost and boot_now() >= self._tell_at):
            lost = f"; {self._lost} entries are missing" if self._lost else ""
            logger.warning("The history of %r is written%s%s.", self.alias, " again" if self._told else "", lost)
            self._told, self._lost, self._tell_at = False, 0, boot_now() + TOLD_EVERY

    def _refused(self, batch: _Batch, error: Exception) -> None:
        self._refusals += 1
        passing = passes(error)
        if batch.sent or not passing:  # it may have been committed; or it would be refused again
            self._lost += batch.listed
            self._forget(_Batch(listed=batch.listed))
        if not passing:
            self.tallies.close(boot_now_us() + (self._offset_us or 0), unwritten=True)
        self._left = None
        if not self._told and (not passing or self._refusals >= WORTH_A_WORD):
            self._told = True
            message = "The history of %r cannot be written just now, which is no permit's concern: %s"
            logger.warning(message, self.alias, str(error).strip() or type(error).__name__)
        self._rest = min(2 * self._rest, LONGEST_REST) if self._told else EVERY
        self._write_at = boot_now() + self._rest

    def _forget(self, batch: _Batch) -> None:
        """Let go of what has been written."""
        for _ in range(batch.listed):
            self.tallies.listed.popleft()
        for _, tally in batch.minutes:
            tally.changed = False
        if self._left is not None:
            del self._left[: len(batch.minutes)]

    def _prune(self, seconds: float) -> None:
        """Delete a little of what has run out, if it is time for that."""
        if boot_now() < self._prune_at or self._offset_us is None:
            return
        began, used = boot_now(), self.session.last_used
        now_us, deleted = boot_now_us() + self._offset_us, 0
        left = random.sample(TABLES, len(TABLES))

        def prune(cursor: AnyCursor) -> None:
            nonlocal deleted
            deleted = delete_old(cursor, left[0], now_us, seconds)

        while left and boot_now() - began < TURN:
            failed = in_transaction(self.session, prune, seconds, IN_LINE) is not None
            if failed or deleted < PRUNED:
                del left[0]
        self.session.last_used = used
        self._prune_at = boot_now() + (0.0 if left else PRUNE_EVERY * random.uniform(0.7, 1.3))  # noqa: S311


@dataclass(slots=True)
class _Batch:
    """What one transaction writes."""

    now_us: int = 0
    listed: int = 0
    minutes: list[tuple[int, Tally]] = field(default_factory=list)
    #: Whether all of it was sent, and only the commit was left.
    sent: bool = False
