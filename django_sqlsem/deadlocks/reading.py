"""What the rows of waits mean, as snapshots; and what operators see of them, on the alias's ordinary connection."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from django.db import connections

from django_sqlsem.backends import database_for, get_backend
from django_sqlsem.backends.clock import RowClock
from django_sqlsem.conf import config
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.sessions import OrdinarySession
from django_sqlsem.deadlocks import graph, watch
from django_sqlsem.models import SlotRow
from django_sqlsem.snapshots import DeadlockSnapshot, HolderSnapshot, SlotState, WaitSnapshot, grouped

if TYPE_CHECKING:
    from django_sqlsem.backends.base import BaseSemaphoreBackend
    from django_sqlsem.database.dialects import Dialect
    from django_sqlsem.deadlocks.graph import Knot
    from django_sqlsem.deadlocks.watch import Look


#: A deadlock must still be there after so many seconds: what is read in several statements may fit ill together.
AGAIN: Final = 0.05

_WHO: Final = ("host", "pid", "thread", "label", "user")


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
    dialect, leases, session = dialect_for(connection), backend.supports_renewal, OrdinarySession(connection)

    def read(now: int | None) -> Look:
        return session.run(
            lambda cursor: watch.read_waits(cursor, dialect, leases=leases, everything=everything, now=now)
        )

    look = read(None if at is None else at.now)
    first = {knot.identity for knot in graph.knots(*look.graph())}
    if first:
        time.sleep(AGAIN)
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
            **{field: row[field] for field in _WHO},
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
        values = {name: value for name, value in row.items() if name not in ("permit_id", "semaphore_id")}
        name = self._look.names[key]["name"] if key in self._look.names else ""
        holder = self._clock.holder(name, SlotRow(**values))
        if not self._leases:  # it lasts as long as its database session
            holder = dataclasses.replace(holder, state=SlotState.HELD, expires_at=None, lease_left=None)
        return holder, row["permit_id"]


def _pairs(row: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for each in row["permits"].split():
        key, _slash, permit = each.partition("/")
        yield key, permit
