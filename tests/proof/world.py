"""One name in a real database: put back to its beginning before each run, read after each step, and judged.

The clock stands still, so that two runs that have come to the same rows are the same: what time does is a step of its
own. Time stands far ahead of the servers' starts, after which nothing runs out for one lease.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

from django.db import connections, models

from django_sqlsem.backends.base import Acquired, Grant, Place, Request
from django_sqlsem.backends.rows import beacons, operator
from django_sqlsem.backends.rows.backend import RowsBackend
from django_sqlsem.core import clocks
from django_sqlsem.core.identity import HolderIdentity
from django_sqlsem.core.names import resource_for
from django_sqlsem.database import dialects
from django_sqlsem.database.sessions import OwnSession
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow
from tests.proof.clients import Client, stepped
from tests.support.databases import raw_connection

NOW: Final = 4_000_000_000_000_000
LEASE: Final = 60.0
NAME: Final = "proof"
RESOURCE: Final = resource_for(NAME, "semaphore")
_TABLES: Final = (SemaphoreRow, SlotRow, WaiterRow)
#: The first ids of rows that a run makes.
_NEW_IDS: Final = 100


@dataclass(frozen=True)
class Base:
    """What there is when the clients begin: slots, how many of them are held, and who waits in line."""

    slots: int = 1
    held: int = 1
    line: int = 0
    #: Of how many holders, from the last, the leases have run out.
    expired: int = 0
    there: bool = True


def permit_of(who: str, number: int, attempt: int = 0) -> str:
    """Return the permit id of a ``holder``, of one in ``line``, or of a ``client``'s attempt."""
    return f"{'abc'[('holder', 'line', 'client').index(who)]}{number:x}{attempt:x}".ljust(32, "0")


def process_of(permit_id: str) -> str:
    """Return the process of a permit: each has its own."""
    return permit_id[:2].ljust(32, "0")


def request(permit_id: str, **options: Any) -> Request:
    """Return a request of a process of its own."""
    who = HolderIdentity("host", 1, "thread", "proof", "", process_of(permit_id))
    values = {"slots": None, "take": 1, "lease": LEASE, "fair": True, "holder": who} | options
    return Request(RESOURCE, permit_id, **values)


def place(number: int) -> Place:
    """Return the place of a newcomer: the lower its number, the sooner it came."""
    return Place(arrived=(NOW - (10 - number) * 1000) / 1e6, waiting=1)


def slot_rows(base: Base) -> list[SlotRow]:
    rows = []
    for slot in range(1, base.slots + 1):
        row = SlotRow(id=slot, semaphore_id=RESOURCE.key, slot=slot, token=slot)
        if slot <= base.held:
            over = slot > base.held - base.expired
            row.permit_id = permit_of("holder", slot - 1)
            row.process_id = process_of(row.permit_id)
            row.lease_us, row.acquired_us = int(LEASE * 1e6), NOW - 5_000_000
            row.expires_us, row.boot_id = NOW - 1 if over else NOW + 30_000_000, clocks.boot_id()
        rows.append(row)
    return rows


def waiter_rows(base: Base) -> list[WaiterRow]:
    return [
        WaiterRow(
            id=number + 1,
            ticket=permit_of("line", number),
            semaphore_id=RESOURCE.key,
            queued_us=NOW - 8_000_000 + number,
            expires_us=NOW + 2_100_000,
            lease_us=int(LEASE * 1e6),
            process_id=process_of(permit_of("line", number)),
            boot_id=clocks.boot_id(),
        )
        for number in range(base.line)
    ]


def held_by(number: int) -> Acquired:
    """Return what a holder of the base has."""
    return Acquired(request(permit_of("holder", number)), Grant((number + 1,), (number + 1,), (number + 1,)))


@dataclass(frozen=True)
class Seen:
    """The rows at one instant, as anybody sees them."""

    names: tuple[dict[str, Any], ...]
    slots: tuple[dict[str, Any], ...]
    line: tuple[dict[str, Any], ...]

    @functools.cached_property
    def key(self) -> int:
        return hash(repr((self.names, self.slots, self.line)))

    @functools.cached_property
    def live(self) -> dict[int, dict[str, Any]]:
        """The slots with live permits, by number."""
        return {row["slot"]: row for row in self.slots if row["expires_us"] is not None and row["expires_us"] > NOW}

    @functools.cached_property
    def permits(self) -> set[str]:
        return {row["permit_id"] for row in self.live.values()}

    @functools.cached_property
    def bound(self) -> int:
        """How many slots count."""
        if not self.names:
            return 0
        (name,) = self.names
        over = name["slots_until_us"] is not None and name["slots_until_us"] <= NOW
        return name["declared_slots"] if over or name["operator_slots"] is None else name["operator_slots"]

    @functools.cached_property
    def paused(self) -> bool:
        return any(name["paused"] for name in self.names)

    @functools.cached_property
    def waiters(self) -> tuple[tuple[str, int], ...]:
        """The tickets of the live waiters, in order, and how many slots each wants."""
        live = [row for row in self.line if row["expires_us"] > NOW and not row["away"]]
        return tuple(
            (row["ticket"], row["take"]) for row in sorted(live, key=lambda row: (row["queued_us"], row["id"]))
        )

    @functools.cached_property
    def idle_slot(self) -> bool:
        """Whether slots are free for the first in line, and it has not got them."""
        opens = not any(name["shrinking"] for name in self.names)
        free = [row for row in self.slots if row["slot"] not in self.live and (opens or not row["closed"])]
        free = [row for row in free if row["slot"] <= self.bound]
        if not self.waiters or self.paused:
            return False
        take = next((take for _, take in self.waiters if take <= self.bound), self.bound + 1)
        return take <= len(free) and len(self.live) + take <= self.bound


class World:
    """The rows of one name, as the harness reads and writes them, and a session of its own."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.backend = RowsBackend(alias)
        self.session = OwnSession(alias)
        self.raw = raw_connection(alias)
        self.postgresql = connections[alias].vendor == "postgresql"
        self._columns = {model: [field.column for field in model._meta.concrete_fields] for model in _TABLES}

    def close(self) -> None:
        self._script(self._emptied())
        self.session.close()
        self.raw.close()

    def script(self, base: Base) -> str:
        """Return the statements that put the rows back to a beginning."""
        name = SemaphoreRow(key=RESOURCE.key, name=NAME, kind="semaphore", declared_slots=base.slots)
        name.declared_us = NOW - 10_000_000
        rows = [name, *slot_rows(base), *waiter_rows(base)] if base.there else []
        return self._emptied() + "".join(map(self._insert, rows))

    def reset(self, script: str) -> None:
        """Put the rows back."""
        self._script(script)

    def read(self) -> Seen:
        """Read all rows."""
        if self.postgresql:  # in one round trip
            rows = "(SELECT COALESCE(json_agg(t ORDER BY {1}), '[]') FROM {0} t)"
            each = [rows.format(model._meta.db_table, model._meta.pk.column) for model in _TABLES]
            return Seen(*map(tuple, self.raw.execute(f"SELECT {', '.join(each)}").fetchone()))
        found = []
        for model, columns in self._columns.items():
            text = f"SELECT {', '.join(columns)} FROM {model._meta.db_table} ORDER BY {model._meta.pk.column}"
            found.append(tuple(dict(zip(columns, row, strict=True)) for row in self.raw.execute(text)))
        return Seen(*found)

    def run_out(self, permits: Sequence[str]) -> None:
        """Have the leases of these permits run out, and the patience with these waiters."""
        listed = ", ".join(f"'{each}'" for each in permits) or "''"
        self.raw.execute(f"UPDATE sqlsem_slot SET expires_us = {NOW - 1} WHERE permit_id IN ({listed})")
        self.raw.execute(f"DELETE FROM sqlsem_waiter WHERE ticket IN ({listed})")

    def _emptied(self) -> str:
        text = "".join(f"DELETE FROM {model._meta.db_table};" for model in _TABLES)
        for table in ("sqlsem_slot", "sqlsem_waiter"):
            if self.postgresql:
                text += f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), {_NEW_IDS}, FALSE);"
            else:
                text += "INSERT OR REPLACE INTO sqlite_sequence (rowid, name, seq) SELECT (SELECT rowid FROM"
                text += f" sqlite_sequence WHERE name = '{table}'), '{table}', {_NEW_IDS - 1};"
        return text

    def _insert(self, row: models.Model) -> str:
        values = []
        for field in row._meta.concrete_fields:
            value = getattr(row, field.attname)
            quoted = "NULL" if value is None else str(value) if isinstance(value, bool | int) else f"'{value}'"
            values.append(quoted if self.postgresql or not isinstance(value, bool) else str(int(value)))
        table = row._meta.db_table
        return f"INSERT INTO {table} ({', '.join(self._columns[type(row)])}) VALUES ({', '.join(values)});"

    def _script(self, text: str) -> None:
        if self.postgresql:
            self.raw.execute(text)
        else:
            self.raw.executescript(f"BEGIN IMMEDIATE; {text} COMMIT;")


def _process_of_client() -> str:
    client = getattr(Client.here, "client", None)
    return "" if client is None else client.process


class _Time:
    """An operator's act that tries again waits for others."""

    monotonic = staticmethod(lambda: 0.0)

    @staticmethod
    def sleep(seconds: float) -> None:
        Client.here.client.try_later(seconds)


@contextlib.contextmanager
def stopped_clock(alias: str) -> Iterator[None]:
    """Inside the block the clock stands still, and cursors ask their clients."""
    kind = type(dialects.dialect_for(connections[alias]))
    clock = "%(now)s" if kind is dialects.SQLite else f"{NOW}::bigint"
    patches = [
        mock.patch.object(kind, "cursor", stepped(kind.cursor)),
        mock.patch.object(kind, "now_sql", clock),
        mock.patch.object(kind, "moment_sql", clock),
        mock.patch.object(kind, "token_now", clock),
        mock.patch.object(kind, "token_clock", lambda self, now: now),
        mock.patch.object(kind, "clock", return_value=(str(NOW), [])),
        mock.patch.object(clocks, "host_now_us", return_value=NOW),
        mock.patch.object(clocks, "_ahead", 0.0),
        mock.patch.object(beacons, "process_id", _process_of_client),
        mock.patch.object(operator, "server_since", return_value=0),
        mock.patch.object(operator, "time", _Time),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        dialects._prepare.cache_clear()
        yield
    dialects._prepare.cache_clear()
