"""What many names or many slots in the tables cost an acquire."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from benchmarks.processes import processes
from benchmarks.scenarios.base import SLOTS, Cell, Context, Figures, Metric, Scenario
from benchmarks.servers import RUN
from benchmarks.stats import percentile

BATCH = 2000
MANY_SLOTS = 1000
METRICS = (
    Metric("p50_ms", "p50, ms", 3, plot=True),
    Metric("p95_ms", "p95, ms", 3),
    Metric("times", "× first variant", 2),
)


def figures(durations: list[float]) -> Figures:
    """Return the figures of pairs that took this many seconds each."""
    milliseconds = [1000 * duration for duration in durations]
    return {"p50_ms": percentile(milliseconds, 0.5), "p95_ms": percentile(milliseconds, 0.95)}


def idle_name(number: int) -> str:
    """Return one of the names that the full tables are filled with."""
    return f"idle:{RUN}:{number}"


def fill(alias: str, count: int) -> None:
    """Make the rows of this many names that were used once, with the slots of each."""
    from django.db import connections

    from django_sqlsem.core.names import resource_for
    from django_sqlsem.models import SemaphoreRow, SlotRow

    def semaphores() -> Iterator[SemaphoreRow]:
        for number in range(count):
            resource = resource_for(idle_name(number), "semaphore")
            yield SemaphoreRow(key=resource.key, name=resource.name, kind="semaphore", declared_slots=SLOTS)

    if SemaphoreRow.objects.using(alias).filter(name=idle_name(count - 1)).exists():
        return  # another scenario of this run has done it
    rows: Iterator[Any] = semaphores()
    while chunk := list(islice(rows, BATCH)):
        SemaphoreRow.objects.using(alias).bulk_create(chunk)
        slots = [SlotRow(semaphore_id=row.key, slot=slot) for row in chunk for slot in range(1, SLOTS + 1)]
        SlotRow.objects.using(alias).bulk_create(slots, batch_size=BATCH)
    with connections[alias].cursor() as cursor:
        analyze = {"postgresql": "VACUUM ANALYZE", "mysql": "ANALYZE TABLE sqlsem_semaphore, sqlsem_slot"}
        analyze["microsoft"] = "SELECT 1"  # it sees to that by itself
        cursor.execute(analyze.get(connections[alias].vendor, "ANALYZE"))
    connections[alias].close()


class ManyNames(Scenario):
    """Acquire and release while the tables have very many names that nobody uses."""

    name = "many-names"
    title = "Acquire and release with many idle names in the tables, 3 slots each, against empty tables"
    metrics = METRICS
    ours_only = True
    most_rounds = 3

    def cells(self, context: Context) -> list[Cell]:
        full = f"{context.names:,} idle names"
        variants = ("empty tables", f"{full}, one name", f"{full}, any of them")
        return [Cell(cell.kind, variant) for cell in super().cells(context) for variant in variants]

    def prepare(self, context: Context) -> None:
        for database in dict.fromkeys(cell.kind.database for cell in self.cells(context)):
            context.say(f"  filling the tables on {database}")
            fill(f"{database}_full", context.names)

    def measure(self, context: Context, cell: Cell) -> Figures:
        name, alias = context.new_name(), cell.kind.database
        if cell.variant != "empty tables":
            name, alias = idle_name(0), f"{alias}_full"
        with processes(cell.kind, name, SLOTS, 1, alias) as (worker,):
            if cell.variant.endswith("any of them"):
                got = worker.ask(
                    "pairs_of_names", seconds=context.seconds, prefix=idle_name(0)[:-1], count=context.names
                )
            else:
                got = worker.ask("pairs", seconds=context.seconds)
        return figures(got["durations"])

    def round(self, context: Context, cells: list[Cell]) -> dict[Cell, Figures]:
        results = super().round(context, cells)
        for cell, its in results.items():
            first = next(other for other in cells if other.kind is cell.kind)
            if its and results[first]:
                its["times"] = its["p50_ms"] / results[first]["p50_ms"]
        return results


class ManySlots(ManyNames):
    """Acquire and release where the name has a thousand slots."""

    name = "many-slots"
    title = "Acquire and release of a name with 1,000 slots, against 3"

    def cells(self, context: Context) -> list[Cell]:
        variants = (f"{SLOTS} slots", f"{MANY_SLOTS:,} slots, all free", f"{MANY_SLOTS:,} slots, 990 held")
        return [Cell(cell.kind, variant) for cell in Scenario.cells(self, context) for variant in variants]

    def prepare(self, context: Context) -> None:
        """Nothing is to be done."""

    def measure(self, context: Context, cell: Cell) -> Figures:
        name = context.new_name()
        slots = MANY_SLOTS if cell.variant.startswith(f"{MANY_SLOTS:,}") else SLOTS
        held = MANY_SLOTS - 10 if cell.variant.endswith("held") else 0
        with processes(cell.kind, name, slots, 1) as (holder,):
            if held:
                holder.ask("hold_many", count=held)
            with processes(cell.kind, name, slots, 1) as (worker,):
                got = worker.ask("pairs", seconds=context.seconds)
            if held:
                holder.ask("release_many")
        return figures(got["durations"])


SCENARIOS = (ManyNames(), ManySlots())
