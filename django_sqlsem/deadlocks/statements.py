"""The statements about waits. Each is given up soon: nothing that is held or waited for may suffer from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.db import Error as DjangoDatabaseError

from django_sqlsem.cursors import limited, padded
from django_sqlsem.deadlocks.graph import Name, Slot, Wait, entangled
from django_sqlsem.session_settings import LOCK_TIMEOUT_MS, STATEMENT_TIMEOUT_MS, is_disconnect

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.backends.base import Claim
    from django_sqlsem.backends.dialects import Dialect
    from django_sqlsem.cursors import AnyCursor
    from django_sqlsem.sessions import Session

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


def values(claim: Claim, dialect: Dialect, permits: str, arrived: float, patience_us: int) -> dict[str, Any]:
    """Return what the row of a wait says. ``arrived``: when it began, by the boot clock."""
    holder = claim.holder
    return {
        "wait_id": claim.permit_id,
        "key": claim.resource.key,
        "name": claim.resource.name,
        "take": claim.take,
        "slots": claim.slots,
        "mode": claim.mode,
        "fair": claim.fair,
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


def look(cursor: AnyCursor, dialect: Dialect, *, leases: bool, everything: bool = False) -> Look:
    """Read the waits, and what keeps them if they may be deadlocked, or in any case.

    ``leases``: whether what is held runs out unless it is renewed.
    """
    found = Look(dialect.now(cursor))
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
