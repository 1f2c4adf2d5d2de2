"""What waiting costs while nothing happens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.proc import process_cpu
from benchmarks.processes import Process, processes
from benchmarks.scenarios.base import Cell, Context, Figures, Metric, Scenario, slots_for

PROCESSES = 5
#: Until all have begun to wait, in seconds; until a server that compiles for them has done so, at the most.
SETTLE, MOST_SETTLE = 1.0, 30.0
#: A server is done when its CPU of a second differs by no more from that of the one before, in seconds, so often in a
#: row: one that compiles on all cores uses as much in each second too, but not for long.
ALIKE, IN_A_ROW = 0.02, 3
#: The length of the wait that the long one is compared with, in seconds.
SHORT = 0.2


class Spent(NamedTuple):
    """What one wait cost; ``None``: not known here."""

    lasted: float
    statements: float | None
    batches: int | None
    server_cpu: float | None
    client_cpu: float | None


class Waiters(Scenario):
    """Some processes wait for what is held elsewhere. Connecting and ending cost the same in a short wait."""

    name = "waiters"
    title = f"{PROCESSES} processes wait, one thread each, while other processes hold all 3 slots (mutexes: 1)"
    metrics = (
        Metric("server_cpu", "server CPU, s/s", 3, plot=True),
        Metric("client_cpu", "client CPU, s/s", 3),
        Metric("statements_per_s", "server statements/s", 1),
        Metric("batches_per_s", "round trips/s", 1),
    )
    most_rounds = 3

    def measure(self, context: Context, cell: Cell) -> Figures:
        short, long = (self.wait(context, cell, seconds) for seconds in (SHORT, max(context.seconds, 2 * SHORT)))

        def more(before: float | None, after: float | None) -> float | None:
            return None if before is None or after is None else max(0.0, after - before) / (long.lasted - short.lasted)

        return {
            "server_cpu": None if long.server_cpu is None else long.server_cpu / long.lasted,
            "client_cpu": None if long.client_cpu is None else long.client_cpu / long.lasted,
            "statements_per_s": more(short.statements, long.statements),
            "batches_per_s": more(short.batches, long.batches),
        }

    def wait(self, context: Context, cell: Cell, seconds: float) -> Spent:
        """Have all wait for so long."""
        name, slots, server = context.new_name(), slots_for(cell.kind), context.server_of(cell.kind)
        cell.kind.prepare(name, slots)
        before = server.statements()
        with contextlib.ExitStack() as stack:
            holders = stack.enter_context(processes(cell.kind, name, slots, slots))
            for each in holders:
                each.acquire()
            team = stack.enter_context(processes(cell.kind, name, slots, PROCESSES))
            for each in team:
                each.tell("turn")
            for each in team:
                each.answer(of="calling")
            settle(server.cpu)
            server_cpu, client_cpu, began = server.cpu(), cpu_of(team), time.monotonic()
            time.sleep(seconds)
            lasted, server_after, client_after = time.monotonic() - began, server.cpu(), cpu_of(team)
            for each in holders:
                each.ask("release")
            batches = [each.answer() for each in team]
        time.sleep(0.1)  # sessions report what they did as they end
        after = server.statements()
        return Spent(
            lasted,
            None if before is None or after is None else after - before,
            None if None in batches else sum(batches),
            None if server_cpu is None or server_after is None else server_after - server_cpu,
            None if client_cpu is None or client_after is None else client_after - client_cpu,
        )


def settle(cpu: Callable[[], float | None]) -> None:
    """Wait until all wait, and the server uses as much CPU in each second as in the one before."""
    ends = time.monotonic() + MOST_SETTLE
    used, before, alike = cpu(), None, 0
    while time.monotonic() < ends and alike < IN_A_ROW:
        time.sleep(SETTLE)
        last, used = used, cpu()
        if last is None or used is None:
            return
        spent = used - last
        alike = alike + 1 if before is not None and abs(spent - before) <= ALIKE else 0
        before = spent


def cpu_of(team: list[Process]) -> float | None:
    """Return the CPU seconds that some processes have used so far."""
    used = [process_cpu(each.pid) for each in team]
    return None if None in used else sum(filter(None, used))


SCENARIOS = (Waiters(),)
