"""What holding much and waiting much cost, while nothing happens."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.contenders.base import database_entry
from benchmarks.proc import open_files, process_threads, sockets_to
from benchmarks.processes import Process, processes
from benchmarks.scenarios.base import Cell, Context, Figures, Metric, Scenario
from benchmarks.servers import PORTS

PERMITS = 1000
LEASE = 8.0  # seconds; the library renews at every quarter
WAITERS = 500
#: As many permits as a process holds where each of one name needs a connection, and how long that may take, in seconds.
FEWER, LONG = 200, 600.0
#: How many slots are taken at once, and how many are left.
TAKEN, LEFT = (200, 2000), 5


def connections(context: Context, cell: Cell, process: Process) -> int | None:
    """Return how many connections a process has open, by its sockets; on SQLite, by its open files."""
    if cell.kind.database == "sqlite":
        return open_files(process.pid, str(Path(database_entry("sqlite")["NAME"]).resolve()))
    return sockets_to(process.pid, int(database_entry(cell.kind.database)["PORT"] or PORTS[cell.kind.database]))


def watch(context: Context, cell: Cell, process: Process, seconds: float) -> Figures:
    """Watch a process for a while in which nothing happens."""
    server = context.server_of(cell.kind)
    time.sleep(2.5)  # until what happened before is over, and PostgreSQL has counted it
    cpu, before, sent, began = process.ask("cpu"), server.statements(), process.ask("sent"), time.monotonic()
    time.sleep(seconds)
    lasted, sent_after, after = time.monotonic() - began, process.ask("sent"), server.statements()
    if sent is not None:  # it counts by itself what not every server does
        before, after = sent, sent_after
    return {
        "connections": connections(context, cell, process),
        "threads": process_threads(process.pid),
        "statements_per_s": None if before is None or after is None else (after - before) / lasted,
        "cpu": (process.ask("cpu") - cpu) / lasted,
    }


class ManyHolders(Scenario):
    """A thousand permits in one process."""

    name = "many-holders"
    title = "1,000 permits of one name held in one process, with a lease of 8 s (renewed every 2 s)"
    metrics = (
        Metric("acquired_s", "acquired in, s", 2),
        Metric("connections", "connections", 0),
        Metric("threads", "threads", 0),
        Metric("statements_per_renewal", "statements per 2 s", 1),
        Metric("cpu", "client CPU, s/s", 3),
        Metric("released_s", "released in, s", 2),
    )
    ours_only = True
    most_rounds = 2

    def cells(self, context: Context) -> list[Cell]:
        """Leave SQL Server to ``ManyHeld``: each permit of one name needs a connection there."""
        return [cell for cell in super().cells(context) if cell.kind.database != "mssql"]

    def measure(self, context: Context, cell: Cell) -> Figures:
        with processes(cell.kind, context.new_name(), PERMITS, 1) as (holder,):
            acquired = holder.ask("hold_many", count=PERMITS, lease=LEASE)
            figures = watch(context, cell, holder, 6 if context.quick else 16)
            released = holder.ask("release_many")
        if figures["statements_per_s"] is not None:
            figures["statements_per_renewal"] = figures["statements_per_s"] * LEASE / 4
        return figures | {"acquired_s": acquired, "released_s": released}


class ManyHeld(Scenario):
    """Permits of one name, and permits of as many names, in one process."""

    name = "many-held"
    title = f"{FEWER} permits held in one process"
    metrics = (
        Metric("acquired_s", "acquired in, s", 2),
        Metric("connections", "connections", 0),
        Metric("threads", "threads", 0),
        Metric("statements_per_s", "statements/s", 1),
        Metric("cpu", "client CPU, s/s", 3),
        Metric("released_s", "released in, s", 2),
    )
    ours_only = True
    most_rounds = 2

    def cells(self, context: Context) -> list[Cell]:
        return [Cell(cell.kind, each) for cell in super().cells(context) for each in ("a name each", "of one name")]

    def measure(self, context: Context, cell: Cell) -> Figures:
        with processes(cell.kind, context.new_name(), FEWER, 1) as (holder,):
            holder.tell("hold_many", count=FEWER, names=cell.variant == "a name each")
            acquired = holder.answer(LONG)
            figures = watch(context, cell, holder, 4 if context.quick else 10)
            holder.tell("release_many")
            return figures | {"acquired_s": acquired, "released_s": holder.answer(LONG)}


class ManyTaken(Scenario):
    """One permit of nearly all slots."""

    name = "many-taken"
    title = f"A take of all slots but {LEFT}"
    metrics = (Metric("taken_s", "taken in, s", 3), Metric("released_s", "released in, s", 3))
    ours_only = True
    most_rounds = 3

    def cells(self, context: Context) -> list[Cell]:
        return [Cell(cell.kind, f"{count:,}") for cell in super().cells(context) for count in TAKEN]

    def measure(self, context: Context, cell: Cell) -> Figures:
        name, take = context.new_name(), int(cell.variant.replace(",", ""))
        with processes(cell.kind, name, take + LEFT, 1) as (holder,):
            holder.tell("take_many", take=take)
            figures: Figures = holder.answer(LONG)
        return figures


class ManyWaiters(Scenario):
    """Hundreds that wait in one process, and a single one."""

    name = "many-waiters"
    title = "Waiting in one process while another holds the only slot"
    metrics = (
        Metric("connections", "connections", 0),
        Metric("threads", "threads", 0),
        Metric("statements_per_s", "statements/s", 1),
        Metric("cpu", "client CPU, s/s", 3),
        Metric("served_per_s", "then served, 1/s", 0),
    )
    ours_only = True
    most_rounds = 2

    def cells(self, context: Context) -> list[Cell]:
        variants = ("1 thread", f"{WAITERS} threads", f"{WAITERS} asyncio tasks")
        return [Cell(cell.kind, variant) for cell in super().cells(context) for variant in variants]

    def measure(self, context: Context, cell: Cell) -> Figures:
        count, _, what = cell.variant.partition(" ")
        name = context.new_name()
        with processes(cell.kind, name, 1, 1) as (holder,):
            holder.acquire()
            with processes(cell.kind, name, 1, 1) as (waiter,):
                waiter.ask("wait_in", what=what.split()[-1].rstrip("s"), count=int(count))
                figures = watch(context, cell, waiter, 3 if context.quick else 10)
                began = holder.ask("release")
                ended = waiter.ask("served")
        return figures | {"served_per_s": int(count) / (ended - began)}


SCENARIOS = (ManyHolders(), ManyHeld(), ManyTaken(), ManyWaiters())
