"""How throughput grows with processes, names, slots and waiters; and a simulation of a large site."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from typing import ClassVar

from benchmarks.proc import machine_cpu
from benchmarks.processes import Process, processes
from benchmarks.scenarios.base import SLOTS, Cell, Context, Figures, Metric, Scenario
from benchmarks.scenarios.contention import WARM_UP, warm_up
from benchmarks.scenarios.names import fill, idle_name
from benchmarks.stats import percentile

PROCESSES = (1, 2, 4, 8, 16)
NAMES = (1, 100, 10_000)
SLOT_COUNTS = (1, 3, 10, 100)
#: A site of this many concurrent workers, in processes of their own as far as the server has connections for them.
WORKERS = 100
#: Connections of a server that are left to others.
SPARE = 10
PER_PROCESS = 2  # connections that each process of this package may open
#: How unevenly the site's names are used: the share of the n-th is 1/n to this power.
SKEW = 1.0
#: How long the site's workers hold, in seconds.
HOLD = 0.005
#: From which share on something counts as saturated.
FULL = 0.9


class Load:
    """Watches server and machine while a team of processes works."""

    def __init__(self, context: Context, cell: Cell) -> None:
        self.server = context.server_of(cell.kind)
        self.began, self.cpu, self.machine = time.monotonic(), self.server.cpu(), machine_cpu()
        self.waits: Counter[str] = Counter()

    def watch_until(self, end: float) -> None:
        """Look twenty times a second at what the server's sessions wait for."""
        while time.monotonic() < end:
            self.waits.update(self.server.waits_on())
            time.sleep(0.05)
        self.lasted = time.monotonic() - self.began
        self.cpu_after, self.machine_after = self.server.cpu(), machine_cpu()

    def figures(self, client_cpu: float) -> Figures:
        """Return the cores that the server, its clients and the whole machine kept busy."""
        server = None if self.cpu is None or self.cpu_after is None else (self.cpu_after - self.cpu) / self.lasted
        busy = None
        if self.machine and self.machine_after:
            spent, passed = (after - before for before, after in zip(self.machine, self.machine_after, strict=True))
            busy = spent / passed if passed else None
        return {"server_cpu": server, "client_cpu": client_cpu, "machine": busy}

    def bottleneck(self, figures: Figures) -> str:
        """Say in words what was saturated first, as far as it can be told from here."""
        waits = [f"{what} {count / sum(self.waits.values()):.0%}" for what, count in self.waits.most_common(3)]
        seen = f"; active sessions: {', '.join(waits)}" if waits else ""
        if figures["machine"] is None:
            return f"unknown{seen}"
        if figures["machine"] < FULL:
            return f"not the CPU ({figures['machine']:.0%} busy): flushes, locks or round trips{seen}"
        server, clients = figures["server_cpu"] or 0.0, figures["client_cpu"] or 0.0
        return f"the CPU: {server:.2f} cores by the server, {clients:.2f} by its clients{seen}"


class Scaling(Scenario):
    """Acquire and release as fast as they can."""

    name = "scaling"
    title = "Acquires per second by processes, names, slots and waiters; holds of 0 s"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("acquires_per_s", "acquires/s", 0, plot=True),
        Metric("p95_ms", "p95 of acquire, ms", 2),
        Metric("server_cpu", "server CPU, cores", 2),
        Metric("client_cpu", "client CPU, cores", 2),
        Metric("machine", "machine busy", 2),
    )
    most_rounds = 2

    def cells(self, context: Context) -> list[Cell]:
        counts = PROCESSES[:3] if context.quick else PROCESSES
        cells = []
        for kind in context.kinds:
            if kind.kind == "peer" or kind.database == "redis":
                continue
            cells += [Cell(kind, f"{count} processes, a name each") for count in counts]
            cells += [Cell(kind, f"{count} processes, {SLOTS} slots") for count in counts if not kind.mutex_only]
            if kind.kind == "ours" and not getattr(kind, "options", {}):
                cells += [Cell(kind, f"8 processes, {count:,} names") for count in NAMES[: 2 if context.quick else 3]]
                cells += [
                    Cell(kind, f"8 processes, {count:,} slots") for count in SLOT_COUNTS[: 2 if context.quick else 4]
                ]
        return list(dict.fromkeys(cells))

    def measure(self, context: Context, cell: Cell) -> Figures:
        count, rest = int(cell.variant.split()[0]), cell.variant.partition(", ")[2]
        name, slots, names = context.new_name(), 1, 0
        if rest.endswith("slots"):
            slots = int(rest.split()[0].replace(",", ""))
        elif rest.endswith("names"):
            names = int(rest.split()[0].replace(",", ""))
        with contextlib.ExitStack() as stack:
            team: list[Process] = []
            if rest == "a name each":
                for number in range(count):
                    cell.kind.prepare(f"{name}_{number}", 1)
                    team += stack.enter_context(processes(cell.kind, f"{name}_{number}", 1, 1))
            else:
                cell.kind.prepare(name, slots)
                team = stack.enter_context(processes(cell.kind, name, slots, count))
            warm_up(team, [0.0] * count)
            load = Load(context, cell)
            start = time.monotonic() + 0.1
            for number, worker in enumerate(team):
                if names:
                    prefix = f"{name}_of_{names}_"
                    worker.tell(
                        "spread", prefix=prefix, count=names, start=start, seconds=context.seconds, seed=str(number)
                    )
                else:
                    worker.tell("contend", hold=0.0, start=start, seconds=context.seconds)
            load.watch_until(start + context.seconds)
            answers = [worker.answer(context.seconds + 120) for worker in team]
        end = start + context.seconds
        waits = [event[1] - event[0] for answer in answers for event in answer["events"] if event[1] <= end]
        figures = load.figures(sum(answer["cpu"] for answer in answers) / context.seconds)
        p95 = 1000 * percentile(waits, 0.95) if waits else None
        return figures | {"acquires_per_s": len(waits) / context.seconds, "p95_ms": p95}


class Simulation(Scenario):
    """A hundred workers, many names of very different popularity, three slots each, holds of 5 ms."""

    name = "simulation"
    title = f"{WORKERS} workers over many names (Zipf), {SLOTS} slots each, holds of {1000 * HOLD:g} ms"
    metrics = (*Scaling.metrics, Metric("longest_s", "longest wait, s", 2), Metric("processes", "processes", 0))
    ours_only = True
    most_rounds = 3

    def cells(self, context: Context) -> list[Cell]:
        return [Cell(cell.kind, f"{context.names:,} names") for cell in super().cells(context)]

    def prepare(self, context: Context) -> None:
        for database in dict.fromkeys(cell.kind.database for cell in self.cells(context)):
            context.say(f"  filling the tables on {database}")
            fill(f"{database}_full", context.names)

    def measure(self, context: Context, cell: Cell) -> Figures:
        spare = context.server_of(cell.kind).spare_connections()
        count = WORKERS if spare is None else min(WORKERS, max(1, (spare - SPARE) // PER_PROCESS))
        threads = -(-WORKERS // count)
        count = -(-WORKERS // threads)
        if threads > 1:
            context.remark(
                f"simulation on {cell.kind.database}: {count} processes with {threads} threads each, since the server"
                f" has only {spare} connections to spare, and each process may open {PER_PROCESS}."
            )
        seconds = 2 * context.seconds
        with processes(cell.kind, idle_name(0), SLOTS, count, f"{cell.kind.database}_full") as team:
            site = {"prefix": idle_name(0)[:-1], "count": context.names, "threads": threads, "skew": SKEW}
            for number, worker in enumerate(team):
                worker.tell("spread", **site, start=0.0, seconds=WARM_UP, seed=f"warm-up {number}")
            for worker in team:
                worker.answer()
            load = Load(context, cell)
            start = time.monotonic() + 0.1
            for number, worker in enumerate(team):
                worker.tell("spread", **site, start=start, seconds=seconds, seed=str(number), hold=HOLD)
            load.watch_until(start + seconds)
            answers = [worker.answer(seconds + 120) for worker in team]
        end = start + seconds
        waits = [event[1] - event[0] for answer in answers for event in answer["events"] if event[1] <= end]
        figures = load.figures(sum(answer["cpu"] for answer in answers) / seconds)
        context.remark(
            f"simulation, {cell.kind.key}, saturated first: {load.bottleneck(figures)}; {os.cpu_count()} CPUs."
        )
        return figures | {
            "acquires_per_s": len(waits) / seconds,
            "p95_ms": 1000 * percentile(waits, 0.95) if waits else None,
            "longest_s": max(waits, default=None),
            "processes": count,
        }


SCENARIOS = (Scaling(), Simulation())
