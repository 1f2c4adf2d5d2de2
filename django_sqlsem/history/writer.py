"""Writing the history down, on a keeper's thread and between its other duties: late rather than in anybody's way."""

from __future__ import annotations

import functools
import logging
import operator
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from django.db import connections
from django.db.models import Field, Q

from django_sqlsem.conf import Config, config
from django_sqlsem.core.clocks import boot_now, boot_now_us, chance
from django_sqlsem.core.identity import printable
from django_sqlsem.database.cursors import TEXT, AnyCursor, declare_types, padded
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.sessions import KeeperSession, OwnSession, briefly, passes
from django_sqlsem.history import recorder as history_recorder
from django_sqlsem.history.events import ADDED_UP, LONGEST_ONES, PASSING
from django_sqlsem.history.recorder import MINUTE_US, Entry, Recorder, Tallies, Tally
from django_sqlsem.models import EventRow, MinuteRow
from django_sqlsem.snapshots import who

logger = logging.getLogger("django_sqlsem")

#: How many rows of a table a transaction writes; and how many where they take several statements.
BATCH: Final = 100
SMALL_BATCH: Final = 20
#: A statement deletes this many.
PRUNED: Final = 200
_IDENTITY: Final = ("key", "minute_us", "writer")
_COUNTS: Final = [
    each.name
    for each in MinuteRow._meta.local_fields
    if each.name not in (*_IDENTITY, "until_us") and not each.primary_key
]


#: What happens is written down so often, in seconds; sooner if this many events wait.
EVERY: Final = 5.0
_MANY: Final = 1_000
#: After an error it rests, for twice as long each time, in seconds.
LONGEST_REST: Final = 60.0
#: What has run out is deleted about so often, in seconds, a little at a time.
PRUNE_EVERY: Final = 30.0
#: A transaction of the writer takes no longer, in seconds; all of them at the end of a process; and those of one turn.
_LONGEST: Final = 1.3
AT_THE_END: Final = 3.0
_TURN: Final = 0.03
#: How long it waits for SQLite's one writer, in seconds.
IN_LINE: Final = 0.1
#: The clocks are compared so often, in seconds.
COMPARED: Final = 30.0
#: That something is missing is said so often at the most, in seconds.
TOLD_EVERY: Final = 60.0
#: Refusals that pass by themselves are worth a word when there were this many in a row.
WORTH_A_WORD: Final = 3


def write_events(cursor: AnyCursor, rows: Sequence[EventRow]) -> None:
    """Insert events."""
    if dialect_for(cursor.db).fixed_texts:
        _insert(cursor, rows)
    elif rows:
        EventRow._default_manager.using(cursor.db.alias).bulk_create(rows)


def write_minutes(cursor: AnyCursor, rows: Sequence[MinuteRow]) -> None:
    """Insert the counts of minutes, or write them anew."""
    features, all_rows = cursor.db.features, MinuteRow._default_manager.using(cursor.db.alias)
    if dialect_for(cursor.db).fixed_texts:
        _delete_same(cursor, rows)
        _insert(cursor, rows)
    elif rows and features.supports_update_conflicts:
        unique = _IDENTITY if features.supports_update_conflicts_with_target else None
        all_rows.bulk_create(rows, update_conflicts=True, update_fields=_COUNTS, unique_fields=unique)
    elif rows:
        same = (Q(*((name, getattr(row, name)) for name in _IDENTITY)) for row in rows)
        all_rows.filter(functools.reduce(operator.or_, same)).delete()
        all_rows.bulk_create(rows)


def delete_old(cursor: AnyCursor, model: type[EventRow | MinuteRow], now_us: int) -> int:
    """Delete some rows whose time is over, and that nobody else is deleting. Return how many."""
    if dialect_for(cursor.db).fixed_texts:
        return _delete_some(cursor, model, now_us, PRUNED)
    rows = model._default_manager.using(cursor.db.alias)
    ids = list(rows.filter(until_us__lte=now_us).order_by("until_us").values_list("pk", flat=True)[:PRUNED])
    if cursor.db.features.has_select_for_update_skip_locked:
        # By the primary key: who locks by another index meets who deletes half-way, and one of them is refused.
        free = rows.filter(pk__in=ids).order_by("pk").select_for_update(skip_locked=True)
        ids = list(free.values_list("pk", flat=True))
    # Unlike delete() it sends no signals of a program's. Should Django rename it, every pruning fails, and says so.
    return rows.filter(pk__in=ids)._raw_delete(cursor.db.alias) if ids else 0


# SQL Server compiles each text anew, and pyodbc asks it of each NULL what it is: with the ORM each number of rows would
# be another text, and each event several round trips. So there a table has one text, of ten rows always, without NULL.

#: How many rows, or keys, one statement has.
_AT_ONCE: Final = 10
_COLUMN_TYPES: Final = {"BigIntegerField": "bigint", "PositiveIntegerField": "int"}


def _insert(cursor: AnyCursor, rows: Sequence[EventRow | MinuteRow]) -> None:
    """Insert rows of one table. Nothing that is written is -1, and no key is empty: they stand for NULL and no row."""
    if not rows:
        return
    fields: list[Field[Any, Any]] = [each for each in rows[0]._meta.local_fields if not each.primary_key]
    types = [_COLUMN_TYPES.get(each.get_internal_type(), TEXT) for each in fields]
    columns = [str(each.column) for each in fields]
    picked = [name if kind == TEXT else f"NULLIF({name}, -1)" for name, kind in zip(columns, types, strict=True)]
    one = f"({', '.join(['%s'] * len(columns))})"
    given = f"(VALUES {', '.join([one] * _AT_ONCE)}) AS given ({', '.join(columns)})"
    text = (
        f"INSERT INTO {rows[0]._meta.db_table} ({', '.join(columns)})"
        f" SELECT {', '.join(picked)} FROM {given} WHERE semaphore_key <> ''"
    )
    filler = ["" if kind == TEXT else 0 for kind in types]
    with cursor.db.execute_wrapper(functools.partial(declare_types, declared=types * _AT_ONCE)):
        for some in _some(rows):
            values = [getattr(row, each.attname) for row in some for each in fields]
            filled = [-1 if value is None else value for value in values] + filler * (_AT_ONCE - len(some))
            cursor.execute(text, filled)


def _delete_same(cursor: AnyCursor, rows: Sequence[MinuteRow]) -> None:
    """Delete what was written before of the same minutes."""
    # Without a seek it would scan a small table, and wait for the rows that others write. The hint has a FROM of its
    # own, as it may not follow the table that is written.
    text = (
        "DELETE FROM sqlsem_minute FROM sqlsem_minute WITH (ROWLOCK, FORCESEEK) WHERE minute_us = %s AND writer = %s"
        f" AND semaphore_key IN ({', '.join(['%s'] * _AT_ONCE)})"
    )
    for (minute_us, writer), same in groupby(sorted(rows, key=_of), _of):
        for some in _some([row.key for row in same]):
            cursor.execute(text, [minute_us, writer, *padded(some, (_AT_ONCE,))])


def _delete_some(cursor: AnyCursor, model: type[EventRow | MinuteRow], now_us: int, count: int) -> int:
    """Delete some rows whose time is over, and that nobody else is deleting. Return how many."""
    hints = "WITH (READPAST, ROWLOCK)"
    cursor.execute(f"DELETE TOP ({count}) FROM {model._meta.db_table} {hints} WHERE until_us <= %s", [now_us])
    return max(0, int(cursor.rowcount))


def _of(row: MinuteRow) -> tuple[int, int]:
    return row.minute_us, row.writer


def _some(all_: Sequence[Any]) -> list[Sequence[Any]]:
    return [all_[start : start + _AT_ONCE] for start in range(0, len(all_), _AT_ONCE)]


def event_row(at_us: int, entry: Entry, settings: Config) -> EventRow | None:
    """Return the row of an event, or ``None`` if such are not kept."""
    kept = settings.history_grants if entry.what in PASSING else settings.history_acts
    if not kept:
        return None
    request, grant = entry.request, entry.grant
    return EventRow(
        key=request.resource.key,
        name=request.resource.name,
        at_us=at_us,
        until_us=at_us + round(kept * 1e6),
        what=entry.what,
        slot=grant.slots[0] if grant is not None and grant.slots else None,
        token=grant.tokens[0] if grant is not None and grant.tokens else None,
        waited_us=None if entry.waited is None else round(entry.waited * 1e6),
        held_us=None if entry.held is None else round(entry.held * 1e6),
        **who(request.holder),
        by=printable(entry.by, 150),
        detail=printable(entry.told(), 500),
    )


def minute_row(at_us: int, tally: Tally, writer: int, settings: Config) -> MinuteRow:
    """Return the row of what was counted in a minute."""
    return MinuteRow(
        key=tally.resource.key,
        template=tally.template,
        minute_us=at_us,
        writer=writer,
        until_us=at_us + MINUTE_US + round(settings.history_minutes * 1e6),
        **{name: getattr(tally, name) for name in (*ADDED_UP, *LONGEST_ONES)},
        holds=history_recorder.to_text(tally.holds),
        waits=history_recorder.to_text(tally.waits),
    )


class Writer:
    """Writes what one recorder has noted. All its methods are the keeper's to call."""

    #: The minutes that are left to be written in this turn; ``None``: the next one begins with all that changed.
    _left: list[tuple[int, Tally]] | None

    def __init__(self, recorder: Recorder, session: KeeperSession) -> None:
        self.recorder = recorder
        self.alias = recorder.alias
        self._dialect = dialect_for(connections[self.alias])
        #: Whether it writes on the keeper's own session: not where that is none for statements of any kind.
        self.shares = isinstance(session, OwnSession) and bool(self._dialect.begin)
        self.session: KeeperSession = session if self.shares else OwnSession(self.alias)
        self._offset_us: int | None = None
        self._compare_at = 0.0
        self._prune_at = boot_now() + chance.uniform(0, PRUNE_EVERY)  # no two processes in step
        #: Whether the next turn is for what has run out: what is held may not have the time for both in one.
        self._prunes = False
        self._tell_at = 0.0
        self.begin_anew()

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
        many = len(self.tallies.listed) >= _MANY or len(self.recorder.notes) >= 10 * _MANY
        return many and not self._refusals

    def write(self, seconds: float) -> None:
        """Write a few batches, none of which may take longer than ``seconds``. Never raises a database's error."""
        if self.session.is_open and seconds < self._dialect.shortest(self.session.connection):
            return  # what is held comes first
        if self._prunes:
            self._prunes = False
            self._prune(min(seconds, _LONGEST))
            return
        began = boot_now()
        while self._attempt(min(seconds, _LONGEST), IN_LINE):
            if not (self.tallies.listed or self._left):
                self._left, self._write_at, self._prunes = None, boot_now() + EVERY, True
                return
            if boot_now() - began > _TURN:
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
            self._attempt(_LONGEST, _LONGEST)  # a refusal or two of a busy server may pass
            self._left = None
        if not self._refusals and not self.session.unreachable(since):
            self._prune(_LONGEST)
        self._lost += len(self.recorder.notes) + len(self.tallies.listed) + self.recorder.dropped
        self._lost += sum(tally.changed for tally in self.tallies.minutes.values())
        if self._lost:
            logger.warning("The history of %r ends; %d entries are missing.", self.alias, self._lost)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all there was. What comes later is told under another number: it replaces nothing that is written."""
        self.recorder.notes.clear()
        self.recorder.dropped = 0
        self.tallies = Tallies()
        self._writer = secrets.randbits(62)
        self._left = None
        self._refusals = 0
        self._told = False
        self._lost = 0
        self._rest = EVERY
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
        try:
            briefly(self.session, lambda cursor: self._send(cursor, batch), seconds, in_line)
        except Exception as error:  # noqa: BLE001 - a fault of the history's own is no permit's concern either
            self._refused(batch, error)
            return False
        finally:
            self.session.last_used = used  # no connection stays open longer for the history's sake
        self._written(batch)
        return True

    def _send(self, cursor: AnyCursor, batch: _Batch) -> None:
        now_us = self._clock(cursor)
        while self.tallies.gather(self.recorder, self._offset_us or 0):
            pass
        if self._left is None:
            self._left = [(at, tally) for (_, at), tally in self.tallies.minutes.items() if tally.changed]
        settings = config(self.alias)
        batch.now_us = now_us
        most = BATCH if cursor.db.features.supports_update_conflicts else SMALL_BATCH
        batch.listed = min(len(self.tallies.listed), most)
        batch.minutes = self._left[:most]
        listed = (self.tallies.listed[nth] for nth in range(batch.listed))
        events = [event_row(at_us, entry, settings) for at_us, entry in listed]
        write_events(cursor, [row for row in events if row is not None])
        if settings.history_minutes:
            rows = [minute_row(at_us, tally, self._writer, settings) for at_us, tally in batch.minutes]
            write_minutes(cursor, rows)
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
        now_us = boot_now_us() + self._offset_us
        left: list[type[EventRow] | type[MinuteRow]] = chance.sample((EventRow, MinuteRow), 2)
        while left and boot_now() - began < _TURN:
            try:
                deleted = briefly(self.session, lambda cursor: delete_old(cursor, left[0], now_us), seconds, IN_LINE)
            except Exception:  # noqa: BLE001 - the next time will do
                deleted = 0
            if deleted < PRUNED:
                del left[0]
        self.session.last_used = used
        self._prune_at = boot_now() + (0.0 if left else PRUNE_EVERY * chance.uniform(0.7, 1.3))


@dataclass(slots=True)
class _Batch:
    """What one transaction writes."""

    now_us: int = 0
    listed: int = 0
    minutes: list[tuple[int, Tally]] = field(default_factory=list)
    #: Whether all of it was sent, and only the commit was left.
    sent: bool = False
