"""The rows of waits, what keeps them, and what they mean as snapshots: read by each process, and by operators."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from django.db import connections
from django.db.models import Model

from django_sqlsem.backends import database_for, get_backend
from django_sqlsem.backends.base import BaseSemaphoreBackend
from django_sqlsem.backends.clock import RowClock
from django_sqlsem.conf import config
from django_sqlsem.core.modes import MUTEX
from django_sqlsem.database.cursors import AnyCursor, padded
from django_sqlsem.database.dialects import Dialect, dialect_for
from django_sqlsem.database.sessions import CallerSession
from django_sqlsem.deadlocks import graph
from django_sqlsem.deadlocks.graph import Knot, Name, Slot, Wait, entangled
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow, WaitRow
from django_sqlsem.snapshots import WHO, DeadlockSnapshot, HolderSnapshot, SlotState, WaitSnapshot, grouped

#: A row, by the names of its model's fields; of waiters in line, by those of ``WaitRow``.
Rows: TypeAlias = list[dict[str, Any]]

#: A row whose process has not been heard of for so long is swept away, in microseconds.
SWEEP_US: Final = 60_000_000
#: How many ids one statement takes: one of these numbers, as each is another text, which is planned anew.
COUNTS: Final = (1, 5, 25, 200)
IDS_AT_ONCE: Final = COUNTS[-1]
#: A deadlock must still be there after this many seconds: what is read in several statements may fit ill together.
_AGAIN: Final = 0.05


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
                operator=1 if row["kind"] == MUTEX else row["operator_slots"],
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
    for row in _select(cursor, dialect, WaitRow, "1 = 1", {}):
        if _lives(row, dialect, found.now):
            found.waits[row["wait_id"]] = row
        elif not _lives(row, dialect, found.now - SWEEP_US):
            found.dead.append(row["wait_id"])
    waits = [_wait(row) for row in found.waits.values()]
    if everything:
        keys = {key for wait in waits for key in (wait.key, *(key for key, _permit in wait.permits))}
    else:
        keys = {wait.key for wait in entangled(waits)}
    for some, parameters in at_once(keys):
        _look_at(cursor, dialect, found, some, parameters, leases=leases)
    return found


def _look_at(
    cursor: AnyCursor, dialect: Dialect, found: Look, some: str, parameters: Mapping[str, str], *, leases: bool
) -> None:
    for row in _select(cursor, dialect, SemaphoreRow, f"name_key IN ({some})", parameters):
        clock = RowClock(found.now, dialect.boot_id)
        found.names[row["key"]] = row | {
            "paused": clock.pauses(row["paused"], row["paused_until_us"]),
            "operator_slots": clock.operates(row["operator_slots"], row["slots_until_us"]),
        }
    where = f"semaphore_key IN ({some}) AND expires_us IS NOT NULL"
    for row in _select(cursor, dialect, SlotRow, where, parameters):
        if row["permit_id"] and (not leases or _lives(row, dialect, found.now)):
            found.slots.setdefault(row["semaphore_id"], []).append(row)
    where = f"semaphore_key IN ({some}) AND {{waits}}"
    # Without leases a place in line is the process's, under a ticket of its own, and tells which thread is next.
    places = set() if leases else {_place(row) for row in found.waits.values()}
    for place in _select(cursor, dialect, WaiterRow, where, parameters):
        named = {"wait_id": place["ticket"], "key": place["semaphore_id"], "since_us": place["queued_us"]}
        row = place | named | {"permits": "", "fair": True}
        if row["wait_id"] not in found.waits and _place(row) not in places:
            found.waiters[row["wait_id"]] = row


def _place(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return row["key"], row["process_id"], row["thread"], row["label"]


def _lives(row: Mapping[str, Any], dialect: Dialect, now: int) -> bool:
    """Whether a row's time has not run out, nor the host's boot ended by whose clock it counts."""
    return bool(row["expires_us"] > now) and (not dialect.boot_id or row["boot_id"] == dialect.boot_id)


def _wait(row: Mapping[str, Any]) -> Wait:
    return Wait(
        id=row["wait_id"],
        key=row["key"],
        since=row["since_us"],
        permits=frozenset(_pairs(row)),
        take=row["take"],
        mode=row["mode"],
        slots=row["slots"],
        fair=bool(row["fair"]),
    )


def _select(cursor: AnyCursor, dialect: Dialect, model: type[Model], where: str, values: Mapping[str, Any]) -> Rows:
    # Not with the ORM: SQL Server would scan small tables, and wait for the rows of all other names.
    columns = {field.attname: str(field.column) for field in model._meta.concrete_fields}
    text = f"SELECT {', '.join(columns.values())} FROM {model._meta.db_table} WHERE {where}"  # noqa: S608 - our names
    dialect.execute(cursor, text, values)
    return [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]


def at_once(ids: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield as many ids as one statement takes: its placeholders, and the parameters by name.

    The last one is repeated, so that there are few texts.
    """
    ordered = sorted(ids)
    for start in range(0, len(ordered), IDS_AT_ONCE):
        some = padded(ordered[start : start + IDS_AT_ONCE], COUNTS)
        parameters = {f"id{number}": value for number, value in enumerate(some)}
        yield ", ".join(f"%({name})s" for name in parameters), parameters


def has_rows(backend: BaseSemaphoreBackend) -> bool:
    """Whether the rows of a backend tell who holds what."""
    return not backend.process_local and (backend.supports_renewal or config(backend.alias).record)


def waits(using: str | None = None) -> list[WaitSnapshot]:
    """Return who waits while holding something, since when, and who has what it waits for; the longest waits first.

    Waits shorter than about a second, and those of who holds nothing else, are not known here. Raises
    ``BackendError`` if the database fails.
    """
    return standing(database_for(using))[0]


def deadlocks(using: str | None = None) -> list[DeadlockSnapshot]:
    """Return the deadlocks over named locks, each with its waits in order round the cycle; the oldest first.

    ``str()`` of one is a sentence. Raises ``BackendError`` if the database fails.
    """
    return standing(database_for(using), everything=False)[1]


def standing(
    alias: str, *, everything: bool = True, at: RowClock | None = None
) -> tuple[list[WaitSnapshot], list[DeadlockSnapshot]]:
    """Return the waits and the deadlocks, from one look; from two, if there seems to be a deadlock.

    ``everything``: what all waits are about; else the deadlocks alone. ``at``: the instant as of which it is read.
    """
    backend, connection = get_backend(alias), connections[alias]
    if not has_rows(backend):
        return [], []
    dialect, leases, session = dialect_for(connection), backend.supports_renewal, CallerSession(connection)

    def read(now: int | None) -> Look:
        return session.run(lambda cursor: read_waits(cursor, dialect, leases=leases, everything=everything, now=now))

    look = read(None if at is None else at.now)
    first = {knot.identity for knot in graph.knots(*look.graph())}
    if first:
        time.sleep(_AGAIN)
        look = read(None)
    teller = Teller(look, dialect, leases=leases)
    knots = graph.knots(*look.graph()) if first else []
    rows = sorted(look.waits.values(), key=lambda row: (row["since_us"], row["wait_id"])) if everything else []
    return (
        [teller.wait(row) for row in rows if row["wait_id"] not in teller.granted],
        [teller.deadlock(knot) for knot in knots if knot.identity in first],
    )


class Teller:
    """Turns the rows of one look into snapshots."""

    def __init__(self, look: Look, dialect: Dialect, *, leases: bool) -> None:
        self._look = look
        self._leases = leases
        self._clock = RowClock(look.now, dialect.boot_id)
        self._slots = {key: [self._holder(key, row) for row in rows] for key, rows in look.slots.items()}
        #: The permits by which something is held.
        self.granted = {row["permit_id"] for rows in look.slots.values() for row in rows}

    def wait(self, row: Mapping[str, Any], of: Collection[str] | None = None) -> WaitSnapshot:
        """Return one wait. ``of``: only those holders of what it waits for that have one of these permits."""
        mine = {permit for _key, permit in _pairs(row)}
        age = max(0.0, self._clock.age(row["since_us"], row["boot_id"]))
        held = self._slots.get(row["key"], ())
        names = self._look.names
        return WaitSnapshot(
            wait_id=row["wait_id"],
            name=row["name"] if "name" in row else names[row["key"]]["name"],
            take=row["take"],
            mode=row["mode"],
            **{name: row[name] for name in WHO},
            waiting_since=self._clock.at(age),
            age=age,
            holds=grouped(
                holder for key, permit in _pairs(row) for holder, its in self._slots.get(key, ()) if its == permit
            ),
            held_by=grouped(holder for holder, permit in held if permit not in mine and (of is None or permit in of)),
        )

    def deadlock(self, knot: Knot) -> DeadlockSnapshot:
        """Return a deadlock that was found in this look."""
        known = {wait.id: wait for wait in knot.waits}
        found = []
        for wait in knot.waits:
            others = knot.blockers[wait.id]
            permits = {permit for other in others for _key, permit in known[other].permits}
            row = self._look.waits.get(wait.id) or self._look.waiters[wait.id]
            found.append(dataclasses.replace(self.wait(row, permits), waits_for=tuple(sorted(others))))
        return DeadlockSnapshot(tuple(found))

    def _holder(self, key: str, row: Mapping[str, Any]) -> tuple[HolderSnapshot, str]:
        name = self._look.names[key]["name"] if key in self._look.names else ""
        holder = self._clock.holder(name, SlotRow(**row))
        if not self._leases:  # it lasts as long as its database session
            holder = dataclasses.replace(holder, state=SlotState.HELD, expires_at=None, lease_left=None)
        return holder, row["permit_id"]


def _pairs(row: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for each in row["permits"].split():
        key, _slash, permit = each.partition("/")
        yield key, permit
