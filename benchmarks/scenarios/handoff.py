"""How long a freed slot takes to reach who waits for it."""

from __future__ import annotations

import contextlib
import random
import time

from benchmarks.processes import processes
from benchmarks.scenarios.base import Cell, Context, Figures, Metric, Scenario, slots_for
from benchmarks.stats import percentile
from benchmarks.worker import FIRST, SETTLE

METRICS = (
    Metric("p50_ms", "p50, ms", 2, ratio=True, plot=True),
    Metric("p95_ms", "p95, ms", 2, plot=True),
    Metric("worst_ms", "worst, ms", 1, worst=True),
    Metric("samples", "hand-offs", 0),
)


def figures(durations: list[float]) -> Figures:
    """Return the figures of hand-offs that took this many seconds each."""
    milliseconds = [1000 * duration for duration in durations[FIRST:]]
    return {
        "p50_ms": percentile(milliseconds, 0.5),
        "p95_ms": percentile(milliseconds, 0.95),
        "worst_ms": max(milliseconds),
        "samples": len(milliseconds),
    }


class HandoffProcesses(Scenario):
    """Two processes hand the one free slot to each other; the other slots are held elsewhere."""

    name = "handoff-processes"
    title = "Hand-off between two processes: from before release() to after acquire()"
    metrics = METRICS

    def measure(self, context: Context, cell: Cell) -> Figures:
        name, slots = context.new_name(), slots_for(cell.kind)
        cell.kind.prepare(name, slots)
        durations: list[float] = []
        with processes(cell.kind, name, slots, slots + 1) as (giver, taker, *holders):
            for each in (*holders, giver):
                each.acquire()
            end = time.monotonic() + context.seconds
            while time.monotonic() < end or len(durations) < 2 + FIRST:
                taker.start_to_acquire()
                time.sleep(random.uniform(*SETTLE))  # noqa: S311
                giver.tell("release")
                durations.append(-giver.answer() + taker.answer())
                giver, taker = taker, giver
            for each in (*holders, giver):
                each.ask("release")
        return figures(durations)


class HandoffThreads(Scenario):
    """The same between two threads of one process."""

    name = "handoff-threads"
    title = "Hand-off between two threads of one process"
    metrics = METRICS

    def measure(self, context: Context, cell: Cell) -> Figures:
        name, slots = context.new_name(), slots_for(cell.kind)
        cell.kind.prepare(name, slots)
        with contextlib.ExitStack() as stack:
            holders = stack.enter_context(processes(cell.kind, name, slots, slots - 1))
            for each in holders:
                each.acquire()
            (worker,) = stack.enter_context(processes(cell.kind, name, slots, 1))
            durations = worker.ask("hand_over", seconds=context.seconds)
            for each in holders:
                each.ask("release")
        return figures(durations)


SCENARIOS = (HandoffProcesses(), HandoffThreads())
