"""``kill -9`` of a holder."""

from __future__ import annotations

import contextlib
import math
import time

from benchmarks.processes import Process, WorkerError
from benchmarks.scenarios.base import Cell, Context, Figures, Metric, Scenario, text

#: How long a waiter has been waiting before the holder is killed, in seconds; a login of SQL Server takes long.
SETTLE, LONG_SETTLE = 1.0, 4.0
#: How long the next contender's turn is put off, in seconds; slower waiters go on waiting beside it.
TURN = 4.0


class Crash(Scenario):
    """The holder of a lock with one slot is killed; another process waits already."""

    name = "crash"
    title = "kill -9 of the holder to the grant of a process that waits already; one slot, default settings"
    metrics = (Metric("seconds", "seconds", 3, ratio=False, plot=True),)
    limit = 45.0  # seconds; a grant after more is still reported if it comes while others have their turn
    most_rounds = 3

    def round(self, context: Context, cells: list[Cell]) -> dict[Cell, Figures]:
        turn = TURN
        if context.quick:
            self.limit, turn = 5.0, 1.0
        results: dict[Cell, Figures] = {}
        waiting: dict[Cell, tuple[Process, float]] = {}
        with contextlib.ExitStack() as stack:
            for cell in cells:
                try:
                    waiter, killed = self.kill_holder(context, cell, stack)
                except WorkerError as error:
                    results[cell] = self.failed(context, error)
                else:
                    waiting[cell] = waiter, killed
                    if waiter.pipe.poll(turn):
                        results[cell] = self.outcome(context, waiting.pop(cell))
            for cell, wait in waiting.items():
                results[cell] = self.outcome(context, wait)
        for cell in cells:
            context.say(f"    {cell.kind.key}: {text(results[cell], self.metrics[0], self.limit)} s")
        return {cell: results[cell] for cell in cells}

    def kill_holder(self, context: Context, cell: Cell, stack: contextlib.ExitStack) -> tuple[Process, float]:
        """Have one process hold and one wait; kill the holder. Returns the waiter, and when the holder was killed."""
        name = context.new_name()
        cell.kind.prepare(name, 1)
        pair = [Process(cell.kind, name, 1) for _ in range(2)]
        for each in pair:
            stack.callback(each.join, 0.5)
            stack.callback(each.kill)
        for each in pair:
            each.answer()
        holder, waiter = pair
        holder.acquire()
        waiter.start_to_acquire()
        time.sleep(LONG_SETTLE if cell.kind.database == "mssql" else SETTLE)
        killed = time.monotonic()
        holder.kill()
        return waiter, killed

    def outcome(self, context: Context, wait: tuple[Process, float]) -> Figures:
        """Wait for the grant for as long as the limit says."""
        waiter, killed = wait
        if not waiter.pipe.poll(max(0.0, killed + self.limit - time.monotonic())):
            return {"seconds": math.inf}
        try:
            return {"seconds": waiter.answer() - killed}
        except WorkerError as error:
            return self.failed(context, error)


SCENARIOS = (Crash(),)
