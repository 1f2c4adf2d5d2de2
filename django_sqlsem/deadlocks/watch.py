"""What one process does about deadlocks: it writes down its waits, looks at everybody's, and tells of its own.

The statements about waits. Each is given up soon: nothing that is held or waited for may suffer from them.

Telling people of a deadlock: the log, the history of each name, and the error of the wait that is broken off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.db import Error as DjangoDatabaseError

from django_sqlsem.backends.base import TOKENS
from django_sqlsem.conf import config
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.identity import HolderIdentity
from django_sqlsem.core.names import resource_for
from django_sqlsem.database.cursors import limited, padded
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.limits import LOCK_TIMEOUT_MS, STATEMENT_TIMEOUT_MS, is_disconnect, is_transient
from django_sqlsem.database.sessions import OwnSession
from django_sqlsem.deadlocks import graph as deadlocks_graph
from django_sqlsem.deadlocks.graph import Name, Slot, Wait, entangled
from django_sqlsem.exceptions import BackendError, DeadlockError
from django_sqlsem.runtime import callers
from django_sqlsem.runtime.acquisition import Acquisition, AcquisitionKeeper, State
from django_sqlsem.runtime.chores import Chore

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.backends.base import Request
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.dialects import Dialect
    from django_sqlsem.database.sessions import Session
    from django_sqlsem.deadlocks.graph import Knot
    from django_sqlsem.snapshots import DeadlockSnapshot


T = TypeVar("T")

#: How long a statement may wait for a lock, and how long it may take, in seconds.
LOCK_PATIENCE: Final = 0.15
LONGEST: Final = 0.4
#: A row whose process has not been heard of for so long is swept away, in microseconds.
SWEEP_US: Final = 60_000_000
#: How many ids one statement takes: one of these numbers, as each is another text, which is planned anew.
COUNTS: Final = (1, 5, 25, 200)
CHUNK: Final = COUNTS[-1]

_WHO: Final = {
    "host": "host", "pid": "pid", "thread": "thread", "label": "label", "user": "user_name", "boot_id": "boot_id",
}  # fmt: skip
_WAIT: Final = {
    "wait_id": "wait_id", "key": "semaphore_key", "name": "name", "take": "take", "slots": "slots",
    "mode": "lock_mode", "fair": "fair", "permits": "permits", "since_us": "since_us", "expires_us": "expires_us",
    "process_id": "process_id", **_WHO,
}  # fmt: skip
_SLOT: Final = {
    "semaphore_id": "semaphore_key", "slot": "slot", "token": "token", "permit_id": "permit_id", "mode": "lock_mode",
    "acquired_us": "acquired_us", "expires_us": "expires_us", "lease_us": "lease_us", "suspect_us": "suspect_us",
    **_WHO,
}  # fmt: skip
_WAITER: Final = {
    "wait_id": "ticket", "key": "semaphore_key", "take": "take", "slots": "slots", "mode": "lock_mode",
    "since_us": "queued_us", "expires_us": "expires_us", "process_id": "process_id", **_WHO,
}  # fmt: skip
_NAME: Final = {
    "key": "name_key", "name": "name", "kind": "kind", "declared_slots": "declared_slots",
    "operator_slots": "operator_slots", "paused": "paused",
}  # fmt: skip

_INSERT: Final = (
    "sqlsem_wait (wait_id, semaphore_key, name, take, slots, lock_mode, fair, permits, since_us, expires_us, host, pid,"
    " thread, label, user_name, process_id, boot_id, channel, beacon) VALUES (%(wait_id)s, %(key)s, %(name)s, %(take)s,"
    " %(slots)s, %(mode)s, %(fair)s, %(permits)s, {now} - %(age_us)s, {now} + %(patience_us)s, %(host)s, %(pid)s,"
    " %(thread)s, %(label)s, %(user)s, %(process_id)s, %(boot_id)s, '', %(no)s)"
)
_REFRESH: Final = "UPDATE sqlsem_wait SET expires_us = {now} + %(patience_us)s WHERE wait_id IN ({some})"
_DELETE: Final = "DELETE FROM sqlsem_wait WHERE wait_id IN ({some})"

_ROW_LOCKS: Final = "SET SESSION innodb_lock_wait_timeout = {0}, SESSION lock_wait_timeout = {0}"
_USUAL: Final = STATEMENT_TIMEOUT_MS // 1000


class RefusedError(Exception):
    """The database refused a statement, and its session goes on; the driver's error is in ``__cause__``."""


def briefly(session: Session, work: Callable[[AnyCursor], T], seconds: float = LONGEST) -> T:
    """Call ``work`` with a cursor on which no statement takes longer than that, and none waits long for a lock.

    Raises ``RefusedError`` if the database refused one, and ``BackendError`` if the connection is gone.
    """

    def guarded(cursor: AnyCursor) -> T | RefusedError:
        connection: Any = cursor.db
        begin, end, undo = _limits(connection, seconds)
        try:
            if begin:
                cursor.execute(begin)
            with limited(cursor, seconds) as fresh:
                result = work(fresh)
            if end:
                cursor.execute(end)
            return result
        except (connection.Database.Error, DjangoDatabaseError) as error:
            if is_disconnect(error):
                raise
            # On an error that a session hears of it throws its connection away, and others count on this one.
            if undo:
                cursor.execute(undo)
            refused = RefusedError(str(error).strip())
            refused.__cause__ = error.with_traceback(None)
            return refused

    result = session.run(guarded, again=False)
    if isinstance(result, RefusedError):
        raise result
    return result


def shortest(connection: BaseDatabaseWrapper) -> float:
    """Return the shortest time that it can be limited to, in seconds. MySQL and SQL Server count in whole ones."""
    whole = connection.vendor == "mysql" and not getattr(connection, "mysql_is_mariadb", False)
    return 1.2 if whole or connection.vendor == "microsoft" else 0.15


def _limits(connection: Any, seconds: float) -> tuple[str, str, str]:
    """Return how work with short limits begins, and how it ends well or badly. SQLite waits for nothing anyhow."""
    if connection.vendor == "postgresql":
        begin = (
            "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL synchronous_commit = off;"
            f" SET LOCAL lock_timeout = {min(seconds, LOCK_PATIENCE) * 1000:.0f};"
            f" SET LOCAL statement_timeout = {seconds * 1000:.0f}"
        )
        return begin, "COMMIT", "ROLLBACK"
    if connection.vendor == "mysql" and getattr(connection, "mysql_is_mariadb", False):
        usual = f"SET SESSION max_statement_time = {_USUAL}"
        return f"SET SESSION max_statement_time = {seconds:.3f}", usual, usual
    if connection.vendor == "mysql":
        return _ROW_LOCKS.format(1), _ROW_LOCKS.format(_USUAL - 1), _ROW_LOCKS.format(_USUAL - 1)
    if connection.vendor == "microsoft":
        usual = f"SET LOCK_TIMEOUT {LOCK_TIMEOUT_MS}"
        return f"SET LOCK_TIMEOUT {LOCK_PATIENCE * 1000:.0f}", usual, usual
    return "", "", ""


def wait_values(request: Request, dialect: Dialect, permits: str, arrived: float, patience_us: int) -> dict[str, Any]:
    """Return what the row of a wait says. ``arrived``: when it began, by the boot clock."""
    holder = request.holder
    return {
        "wait_id": request.permit_id,
        "key": request.resource.key,
        "name": request.resource.name,
        "take": request.take,
        "slots": request.slots,
        "mode": request.mode,
        "fair": request.fair,
        "permits": permits,
        "arrived_us": round(arrived * 1e6),
        "patience_us": patience_us,
        "host": holder.host,
        "pid": holder.pid,
        "thread": holder.thread,
        "label": holder.label,
        "user": holder.user,
        "process_id": holder.process,
        "boot_id": dialect.boot_id,
    }


def insert(cursor: AnyCursor, dialect: Dialect, row: Mapping[str, Any]) -> None:
    """Write one wait."""
    begin, end = dialect.insert_ignore or ("INSERT INTO", "")
    dialect.execute(cursor, f"{begin} {_INSERT}{end}", row)


def refresh(cursor: AnyCursor, dialect: Dialect, wait_ids: Collection[str], patience_us: int) -> bool:
    """Say that these waits go on. Return whether all of their rows are there."""
    return _each(cursor, dialect, _REFRESH, wait_ids, {"patience_us": patience_us}) >= len(wait_ids)


def delete(cursor: AnyCursor, dialect: Dialect, wait_ids: Collection[str]) -> None:
    """Take the rows of waits away that are over. Idempotent."""
    _each(cursor, dialect, _DELETE, wait_ids, {})


def _each(cursor: AnyCursor, dialect: Dialect, text: str, ids: Collection[str], values: Mapping[str, Any]) -> int:
    ordered, changed = sorted(ids), 0
    for start in range(0, len(ordered), CHUNK):
        some = ordered[start : start + CHUNK]
        parameters = _numbered(some)
        dialect.execute(cursor, text.replace("{some}", _marks(len(parameters))), {**values, **parameters})
        changed += max(0, cursor.rowcount)
    return changed


@dataclass
class Look:
    """What was to be seen at one instant of the database's clock."""

    now: int
    #: The rows of all live waits, by wait id, and the ids of those that nobody keeps alive any more.
    waits: dict[str, dict[str, Any]] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)
    #: Of the names that were looked at: themselves, their taken slots, and who waits in line for them without a row.
    names: dict[str, dict[str, Any]] = field(default_factory=dict)
    slots: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    waiters: dict[str, dict[str, Any]] = field(default_factory=dict)

    def graph(self) -> tuple[dict[str, Name], list[Wait]]:
        """Return the names and waits, without the waits that are over by now."""
        names = {
            key: Name(
                tuple(Slot(row["slot"], row["permit_id"], row["mode"]) for row in self.slots.get(key, ())),
                declared=row["declared_slots"],
                operator=row["operator_slots"],
                paused=bool(row["paused"]),
            )
            for key, row in self.names.items()
        }
        granted = {slot.permit for name in names.values() for slot in name.slots}
        rows = [row for row in (*self.waits.values(), *self.waiters.values()) if row["key"] in names]
        return names, [_wait(row) for row in rows if row["wait_id"] not in granted]

    def heard(self, wait_id: str) -> int:
        """Return until when the process has said that this wait goes on."""
        row = self.waits.get(wait_id) or self.waiters[wait_id]
        return int(row["expires_us"])


def read_waits(
    cursor: AnyCursor, dialect: Dialect, *, leases: bool, everything: bool = False, now: int | None = None
) -> Look:
    """Read the waits, and what keeps them if they may be deadlocked, or in any case.

    ``leases``: whether what is held runs out unless it is renewed. ``now``: by the database's clock, if it was asked.
    """
    found = Look(dialect.now(cursor) if now is None else now)
    for row in _select(cursor, dialect, "sqlsem_wait", _WAIT, "1 = 1", {}):
        if _lives(row, dialect, found.now):
            found.waits[row["wait_id"]] = row
        elif not _lives(row, dialect, found.now - SWEEP_US):
            found.dead.append(row["wait_id"])
    waits = [_wait(row) for row in found.waits.values()]
    if everything:
        keys = {key for wait in waits for key in (wait.key, *(key for key, _permit in wait.permits))}
    else:
        keys = {wait.key for wait in entangled(waits)}
    ordered = sorted(keys)
    for start in range(0, len(ordered), CHUNK):
        _look_at(cursor, dialect, found, ordered[start : start + CHUNK], leases=leases)
    return found


def _look_at(cursor: AnyCursor, dialect: Dialect, found: Look, keys: Sequence[str], *, leases: bool) -> None:
    parameters = _numbered(keys)
    some = _marks(len(parameters))
    for row in _select(cursor, dialect, "sqlsem_semaphore", _NAME, f"name_key IN ({some})", parameters):
        found.names[row["key"]] = row
    where = f"semaphore_key IN ({some}) AND expires_us IS NOT NULL"
    for row in _select(cursor, dialect, "sqlsem_slot", _SLOT, where, parameters):
        if row["permit_id"] and (not leases or _lives(row, dialect, found.now)):
            found.slots.setdefault(row["semaphore_id"], []).append(row)
    where = f"semaphore_key IN ({some}) AND {dialect.waits_sql()}"
    # Without leases a place in line is the process's, under a ticket of its own, and tells which thread is next.
    places = set() if leases else {_place(row) for row in found.waits.values()}
    for row in _select(cursor, dialect, "sqlsem_waiter", _WAITER, where, parameters):
        if row["wait_id"] not in found.waits and _place(row) not in places:
            found.waiters[row["wait_id"]] = row | {"permits": "", "fair": True}


def _place(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return row["key"], row["process_id"], row["thread"], row["label"]


def _lives(row: Mapping[str, Any], dialect: Dialect, now: int) -> bool:
    """Whether a row's time has not run out, nor the host's boot ended by whose clock it counts."""
    return bool(row["expires_us"] > now) and (not dialect.boot_id or row["boot_id"] == dialect.boot_id)


def _wait(row: Mapping[str, Any]) -> Wait:
    pairs = (each.partition("/") for each in row["permits"].split())
    return Wait(
        id=row["wait_id"],
        key=row["key"],
        since=row["since_us"],
        permits=frozenset((key, permit) for key, _slash, permit in pairs),
        take=row["take"],
        mode=row["mode"],
        slots=row["slots"],
        fair=bool(row["fair"]),
    )


def _select(
    cursor: AnyCursor,
    dialect: Dialect,
    table: str,
    columns: Mapping[str, str],
    where: str,
    values: Mapping[str, Any],
) -> list[dict[str, Any]]:
    text = f"SELECT {', '.join(columns.values())} FROM {table} WHERE {where}"  # noqa: S608 - names of our own
    dialect.execute(cursor, text, values)
    return [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]


@functools.cache
def _marks(count: int) -> str:
    return ", ".join(f"%(id{number})s" for number in range(count))


def _numbered(values: Sequence[str]) -> dict[str, str]:
    return {f"id{number}": value for number, value in enumerate(padded(values, COUNTS))}


logger = logging.getLogger("django_sqlsem")


def error(acquisition: Acquisition, deadlock: DeadlockSnapshot) -> DeadlockError:
    """Return the error that breaks a wait off."""
    name = acquisition.request.resource.name
    return DeadlockError(f"Waiting for {name!r} was broken off, as it could not have ended: {deadlock}.", deadlock)


def tell(keeper: AcquisitionKeeper, deadlock: DeadlockSnapshot, youngest: Acquisition, *, broken: bool) -> None:
    """Log a deadlock, and note it in the history of each name."""
    request = youngest.request
    name = request.resource.name
    end = f" The last wait, for {name!r}, was broken off." if broken else ""
    logger.error("Deadlock: %s.%s", deadlock, end, extra={"semaphores": deadlock.names, "broken": broken})
    for wait in {each.name: each for each in deadlock.waits}.values():
        who = HolderIdentity(wait.host, wait.pid, wait.thread, wait.label, wait.user, "")
        theirs = dataclasses.replace(request, resource=resource_for(wait.name, request.resource.kind), holder=who)
        keeper.tell("deadlocked", theirs, wait.age, f"{deadlock}.{end}")


#: A wait that has lasted so many seconds is written down, if its thread or task holds something meanwhile.
LATE: Final = 1.0
#: How often the process looks, in seconds; more rarely in proportion where more than so many wait.
LOOK: Final = 1.0
CROWD: Final = 20
#: A process that has not been heard of for so many looks is not counted.
MISSED: Final = 3.5
#: After a refusal it rests for one look, then for twice as long each time up to this, in seconds.
REST: Final = 10.0
#: So many in a row are worth a word.
WORTH_A_WORD: Final = 3
#: Where SQLite was merely being written to, it rests for so many seconds, unless there were so many in a row.
LOCKED: Final = 0.1
PATIENCE: Final = 50
#: So many waits of one process are written down.
MANY: Final = 100
#: How often who looks also sweeps up what the dead have left.
SWEEP: Final = 0.2


@dataclass
class _Plan:
    """What one step asks of the database: the rows to delete, to insert and to keep alive, by wait id."""

    gone: set[str] = field(default_factory=set)
    new: dict[str, tuple[Acquisition, str]] = field(default_factory=dict)
    kept: dict[str, tuple[Acquisition, str]] = field(default_factory=dict)
    looks: bool = False
    #: When, on the boot clock, to leave the rest to the next step; and the rows that are there by then.
    until: float = math.inf
    written: dict[str, tuple[Acquisition, str]] = field(default_factory=dict)


class Watch(Chore):
    """The waits of one keeper's process. The keeper's thread takes the steps; any thread may add a wait."""

    name = "deadlocks"

    def __init__(self, keeper: AcquisitionKeeper) -> None:
        self._keeper = keeper
        self._alias = keeper.alias
        #: The keeper's own session; where that has no cursors, one that is opened for this alone.
        self._session = keeper.own if isinstance(keeper.own, OwnSession) else OwnSession(keeper.alias)
        #: The waits, and when each is to be written down, if it holds anything by then.
        self._waits: dict[int, tuple[Acquisition, float]] = {}
        #: The waits whose rows are there, and what these say is held meanwhile.
        self._written: dict[str, tuple[Acquisition, str]] = {}
        self._look_at = 0.0
        self._rest_until = 0.0
        self._crowd = 1.0
        self._refusals = 0
        self._failing = False
        #: What was seen at the last look, and until when each of those waits had been said to go on.
        self._seen: dict[Any, dict[str, int]] = {}
        self._told: set[Any] = set()

    # What the keeper calls.

    def queued(self, acquisition: Acquisition) -> None:
        """Watch a wait from now on, if its caller holds something: any other keeps nobody waiting."""
        if acquisition.caller is None or not acquisition.caller.beside:
            return
        if acquisition.request.resource.kind == TOKENS or config(self._alias).deadlocks == "ignore":
            return  # anybody may add tokens
        if self._has_rows():
            self._waits[id(acquisition)] = (acquisition, acquisition.arrived + LATE)

    @property
    def busy(self) -> bool:
        """Whether there are rows that only this process takes away."""
        return bool(self._written) and not self._failing

    def next_at(self) -> float:
        """Return when there is something to do, on the boot clock."""
        at = self._look_at if self._written else math.inf
        for acquisition, due in list(self._waits.values()):
            if not _goes_on(acquisition):
                at = 0.0
            elif acquisition.permit_id not in self._written:
                at = min(at, due)
        return max(at, self._rest_until)

    def run(self, now: float) -> None:
        """Write what has changed, look around if it is time, and do what follows from that.

        It takes a part of the time that is left to what is held. Whatever fails here is no permit's concern.
        """
        try:
            self._step(self._keeper.time_left(now) / (3 if self._session is self._keeper.own else 8))
        except Exception as error:  # noqa: BLE001 - what is still due must not be retried as fast as it fails
            self._refused(error)

    def _step(self, seconds: float) -> None:
        plan = self._plan(boot_now())
        if plan.gone or plan.looks:
            # The keeper's session is the keeper's to open, which takes a while when the database is away.
            closed = self._session is self._keeper.own and not self._session.is_open
            if closed and not (self._keeper.is_in_use()):
                self.forget()  # nobody will open it again for them: the rows run out
                return
            if closed or seconds < shortest(self._session.connection):
                self._rest_until = boot_now() + LOCKED
                return
            plan.until = boot_now() + seconds / 3
            limit = min(seconds / 3, LONGEST)  # there are several
            look = briefly(self._session, lambda cursor: self._ask(cursor, plan), limit)
            self._written = plan.written
            if look is not None:
                suspected = self._judge(look)
                self._crowd = max(1.0, len(look.waits) / CROWD)
                pause = LOOK * self._crowd * random.uniform(0.85, 1.15)  # noqa: S311 - no two processes in step
                self._look_at = boot_now() + (pause / 2 if suspected else pause)
            self._answered()
        if not self._waits and not self._written:
            self.forget()

    def finish(self, since: float | None) -> None:
        """Take away the rows that are left, as well as it can be done: the process ends."""
        if since is None:
            return
        if self._written and self._session.is_open:
            gone = _Plan(gone=set(self._written))
            with contextlib.suppress(BackendError, RefusedError):  # then they run out
                briefly(self._session, lambda cursor: self._ask(cursor, gone))
        self.forget()

    def forget(self) -> None:
        """Know of no waits. What rows are left run out by themselves."""
        self._waits.clear()
        self._written.clear()
        self._seen.clear()
        self._told.clear()
        if self._session is not self._keeper.own:
            self._session.close()

    # One step.

    def _plan(self, now: float) -> _Plan:
        plan = _Plan()
        for key, (acquisition, due) in list(self._waits.items()):
            if not _goes_on(acquisition):
                self._waits.pop(key, None)
                continue
            if now < due:
                continue
            permits = self._permits(acquisition)
            known = self._written.get(acquisition.permit_id)
            if known is not None and known == (acquisition, permits):
                plan.kept[acquisition.permit_id] = known
            elif permits and (known is not None or len(plan.new) + len(self._written) < MANY):
                plan.new[acquisition.permit_id] = (acquisition, permits)
            else:
                self._waits[key] = (acquisition, now + LOOK)  # it holds nothing now, or there are enough of them
        plan.gone = self._written.keys() - plan.kept.keys()
        plan.looks = bool(plan.new) or (bool(plan.kept) and now >= self._look_at)
        return plan

    def _permits(self, acquisition: Acquisition) -> str:
        """Return what the thread or task holds at this moment, as the row says it."""
        found: list[Acquisition] = []
        for ref in acquisition.caller.beside if acquisition.caller is not None else ():
            other = ref()
            # What is kept by another database, was handed to somebody else or has been given back does not count.
            if other is None or other.keeper is not self._keeper or other.caller is None or not callers.is_held(other):
                continue
            upgrade = getattr(other.permit(), "_upgrade", None)
            found += [other] if upgrade is None else [other, upgrade._acquisition]
        return " ".join(f"{each.request.resource.key}/{each.permit_id}" for each in found if each.grant is not None)

    def _ask(self, cursor: AnyCursor, plan: _Plan) -> Look | None:
        """Send what is planned. It may be sent again if it was not answered."""
        dialect = dialect_for(cursor.db)
        patience_us = round(LOOK * MISSED * self._crowd * 1e6)
        delete(cursor, dialect, plan.gone)
        inserted, plan.written = dict(plan.new), dict(plan.kept)
        if plan.looks and not refresh(cursor, dialect, plan.kept, patience_us):
            delete(cursor, dialect, plan.kept)  # some were swept up while this process was stopped
            inserted, plan.written = plan.kept | inserted, {}
        for wait_id, (acquisition, permits) in inserted.items():
            if plan.written and boot_now() > plan.until:
                break  # a row takes a round trip, and there may be a hundred
            values = wait_values(acquisition.request, dialect, permits, acquisition.arrived, patience_us)
            insert(cursor, dialect, values)
            plan.written[wait_id] = (acquisition, permits)
        if not plan.looks:
            return None
        look = read_waits(cursor, dialect, leases=self._keeper.backend.supports_renewal)
        if look.dead and random.random() < SWEEP:  # noqa: S311
            delete(cursor, dialect, look.dead[:CHUNK])
        return look

    def _judge(self, look: Look) -> bool:
        """Tell of each deadlock once, and break it if settings say so. Return whether one is suspected.

        It is one when it is seen twice, and each of its waits was said to go on in between.
        """
        seen: dict[Any, dict[str, int]] = {}
        suspected = False
        for knot in deadlocks_graph.knots(*look.graph()):
            heard = {wait.id: look.heard(wait.id) for wait in knot.waits}
            before = self._seen.get(knot.identity)
            if before is None or any(heard[each] <= before[each] for each in heard.keys() - self._written.keys()):
                seen[knot.identity] = before or heard
                suspected = suspected or knot.identity not in self._told
                continue
            seen[knot.identity] = before
            # One of them speaks for all: all others leave it to the process of the youngest wait.
            if (mine := self._written.get(knot.youngest.id)) is not None:
                self._meet(look, knot, mine[0])
        self._seen = seen
        self._told.intersection_update(seen)
        return suspected

    def _meet(self, look: Look, knot: Knot, youngest: Acquisition) -> None:
        breaks = config(self._alias).deadlocks == "break" and knot.closed
        if knot.identity in self._told and not breaks:
            return
        from django_sqlsem.deadlocks.reading import Teller  # it needs the models, which this module must not

        dialect, leases = dialect_for(self._session.connection), self._keeper.backend.supports_renewal
        deadlock = Teller(look, dialect, leases=leases).deadlock(knot)
        mine = [self._written[wait.id][0] for wait in knot.waits if wait.id in self._written]
        if not all(_goes_on(acquisition) for acquisition in mine):
            return  # what was read is over by now
        broken = breaks and self._keeper.break_off(youngest, error(youngest, deadlock))
        if breaks and not broken:
            return
        if knot.identity not in self._told:
            self._told.add(knot.identity)
            tell(self._keeper, deadlock, youngest, broken=broken)

    # Trouble with the database.

    def _has_rows(self) -> bool:
        backend = self._keeper.backend
        return not backend.process_local and (backend.supports_renewal or config(self._alias).record)

    def _refused(self, error: Exception) -> None:
        self._refusals += 1
        # SQLite has one writer, and does not wait for it here.
        if self._session.connection.vendor == "sqlite" and is_transient(error) and self._refusals < PATIENCE:
            self._rest_until = boot_now() + LOCKED * random.uniform(0.5, 1.5)  # noqa: S311
            return
        # A busy server may take too long now and then.
        self._rest_until = boot_now() + min(REST, LOOK * 2 ** min(self._refusals - 1, 10))
        if self._refusals >= WORTH_A_WORD and not self._failing:
            self._failing = True
            unknown = not isinstance(error, (BackendError, RefusedError))
            message = "Deadlocks over the locks of %r cannot be looked for now: %s"
            logger.warning(message, self._alias, error, exc_info=error if unknown else None)

    def _answered(self) -> None:
        self._refusals = 0
        if self._failing:
            self._failing = False
            logger.warning("Deadlocks over the locks of %r are looked for again.", self._alias)


def _goes_on(acquisition: Acquisition) -> bool:
    return acquisition.state is State.QUEUED and not acquisition.answer.told
