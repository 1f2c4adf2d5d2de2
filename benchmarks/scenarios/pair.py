"""Acquire and release, where nobody else wants it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from benchmarks import SILENT
from benchmarks.processes import Process, WorkerError, processes
from benchmarks.scenarios.base import Cell, Context, Figures, Metric, Scenario, slots_for
from benchmarks.stats import percentile


class Pair(Scenario):
    """One process, one thread, acquire and release in turn.

    Every contender's process is there during the whole round, and they take turns several times a second: a load
    from outside that comes and goes meets all of them.
    """

    name = "pair"
    title = "Uncontended acquire and release: one process, one thread"
    metrics = (
        Metric("p50_ms", "p50, ms", 3, ratio=True, plot=True),
        Metric("p95_ms", "p95, ms", 3),
        Metric("cpu_ms", "client CPU, ms", 3, ratio=True),
        Metric("above_floor_ms", "above its floor, ms", 3),
    )
    #: How long one contender measures before it is the next one's turn, in seconds.
    slice = 0.25

    def round(self, context: Context, cells: list[Cell]) -> dict[Cell, Figures]:
        slices: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in cells}
        results: dict[Cell, Figures] = {}
        with contextlib.ExitStack() as stack:
            workers = {}
            for cell in cells:
                with self.failures_noted(context, cell, results):
                    workers[cell] = self.start(context, cell, stack)
            for _ in range(max(1, round(context.seconds / self.slice))):
                for cell, worker in workers.items():
                    if cell not in results:
                        with self.failures_noted(context, cell, results):
                            slices[cell].append(worker.ask("pairs", seconds=self.slice))
        for cell in cells:
            if cell not in results:
                results[cell] = self.figures(slices[cell])
                self.say(context, cell, results[cell])
        self.compare(results)
        return {cell: results[cell] for cell in cells}

    def start(self, context: Context, cell: Cell, stack: contextlib.ExitStack) -> Process:
        """Start the process of a contender."""
        name, slots = context.new_name(), slots_for(cell.kind)
        cell.kind.prepare(name, slots)
        (worker,) = stack.enter_context(processes(cell.kind, name, slots, 1, self.alias(cell)))
        return worker

    def alias(self, cell: Cell) -> str | None:
        """Return the alias of the database, if it is not the contender's usual one."""
        return None

    @contextlib.contextmanager
    def failures_noted(self, context: Context, cell: Cell, results: dict[Cell, Figures]) -> Iterator[None]:
        """Note a contender that fails, and go on without it."""
        try:
            yield
        except WorkerError as error:
            results[cell] = self.failed(context, error)

    def figures(self, slices: list[dict[str, Any]]) -> Figures:
        """Return the figures of all slices of one contender."""
        durations = [1000 * duration for each in slices for duration in each["durations"]]
        return {
            "p50_ms": percentile(durations, 0.5),
            "p95_ms": percentile(durations, 0.95),
            "cpu_ms": 1000 * sum(each["cpu"] for each in slices) / len(durations),
        }

    def compare(self, results: dict[Cell, Figures]) -> None:
        """Add how much longer than its floor's each pair took."""
        for cell, figures in results.items():
            kinds = {other.kind.kind for other in results if other.kind.database == cell.kind.database}
            wanted = "lock" if cell.kind.mutex_only or "rows" not in kinds else "rows"
            for floor, its in results.items():
                same = floor.kind.database == cell.kind.database and floor.kind.kind == wanted and floor != cell
                if same and "p50_ms" in figures and "p50_ms" in its:
                    figures["above_floor_ms"] = figures["p50_ms"] - its["p50_ms"]


RECORDED, NOT_RECORDED = "recorded", "HISTORY=False"


class History(Pair):
    """The same with and without the history. Turns are longer, so that each does its own writing in its own time."""

    name = "history"
    title = "What the history costs: uncontended acquire and release"
    ours_only = True
    metrics = (
        Metric("p50_ms", "p50, ms", 3, plot=True),
        Metric("mean_ms", "mean, ms", 3),
        Metric("times", "× without, mean", 3),
        Metric("cpu_ms", "client CPU, ms", 3),
    )
    slice = 1.0

    def cells(self, context: Context) -> list[Cell]:
        return [Cell(kind, variant) for kind in context.kinds if kind.kind == "ours" for variant in self.variants]

    variants = (NOT_RECORDED, RECORDED)

    def alias(self, cell: Cell) -> str | None:
        return f"{cell.kind.database}{SILENT}" if cell.variant == NOT_RECORDED else None

    def figures(self, slices: list[dict[str, Any]]) -> Figures:
        durations = [1000 * duration for each in slices for duration in each["durations"]]
        # A slice that the machine was busy in is no figure of either: the middle one of the means.
        means = [1000 * sum(each["durations"]) / len(each["durations"]) for each in slices]
        return super().figures(slices) | {"mean_ms": percentile(means, 0.5), "p50_ms": percentile(durations, 0.5)}

    def compare(self, results: dict[Cell, Figures]) -> None:
        for cell, figures in results.items():
            without = results.get(Cell(cell.kind, NOT_RECORDED), {}).get("mean_ms")
            mean = figures.get("mean_ms")
            figures["times"] = mean / without if mean and without else None


SCENARIOS = (Pair(), History())
