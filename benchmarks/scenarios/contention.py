"""More processes than slots."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

from benchmarks.contenders.base import Contender
from benchmarks.processes import Process, WorkerError, processes
from benchmarks.scenarios.base import Cell, Context, Figures, Metric, Scenario, slots_for
from benchmarks.stats import Turn, jain, longest_wait, most_at_once, most_overtaken

PROCESSES = 8
#: How long connections are opened in, in seconds; a login of SQL Server takes long.
WARM_UP, LONG_WARM_UP = 0.3, 5.0


def warm_up_of(kind: type[Contender]) -> float:
    """Return how long a contender's processes warm up, in seconds."""
    return LONG_WARM_UP if kind.database == "mssql" else WARM_UP


def warm_up(team: list[Process], holds: Iterable[float]) -> None:
    """Have every process open its connections: by itself, then while the others use the lock too."""
    lasting = warm_up_of(team[0].kind)
    for worker in team:
        worker.ask("pairs", seconds=0.0, warm_up=2)
    start = time.monotonic() + 0.05
    for worker, hold in zip(team, holds, strict=True):
        worker.tell("contend", hold=hold, start=start, seconds=lasting)
    for worker in team:
        worker.answer()


class Contention(Scenario):
    """Eight processes for three slots, with holds of 10 ms."""

    name = "contention"
    title = "8 processes, 3 slots (mutexes: 1), each holds for 10 ms"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("share", "share of ideal", 3, ratio=True, plot=True, more=True),
        Metric("jain", "Jain", 3, plot=True, more=True),
        Metric("longest_s", "longest wait, s", 3, plot=True),
        Metric("overtaken", "most overtaken", 0),
        Metric("grants_per_s", "grants/s", 0, ratio=True, more=True),
        Metric("cpu_ms", "client CPU of a grant, ms", 2, ratio=True),
        Metric("server_cpu", "server CPU, s/s", 2),
        Metric("statements_per_s", "server statements/s", 0),
        Metric("batches_per_s", "round trips/s", 0),
    )
    holds: ClassVar[list[float]] = [0.01] * PROCESSES

    def measure(self, context: Context, cell: Cell) -> Figures:
        name, slots, server = context.new_name(), slots_for(cell.kind), context.server_of(cell.kind)
        cell.kind.prepare(name, slots)
        seconds = max(context.seconds, 20 * max(self.holds) / slots)
        before, watched = server.statements(), seconds + warm_up_of(cell.kind)
        with processes(cell.kind, name, slots, len(self.holds)) as team:
            warm_up(team, self.holds)
            spent, start = server.cpu(), time.monotonic() + 0.2
            for worker, hold in zip(team, self.holds, strict=True):
                worker.tell("contend", hold=hold, start=start, seconds=seconds)
            answers = [worker.answer(seconds + 120) for worker in team]
            spent_after = server.cpu()
        time.sleep(0.1)  # sessions report what they did, also to warm up, as they end
        after = server.statements()
        turns = [Turn(who, *event) for who, answer in enumerate(answers) for event in answer["events"]]
        if (most := most_at_once(turns)) > slots:
            raise WorkerError(f"{cell.kind.key}: {most} were in at once, where {slots} may.")
        end = start + seconds
        # Who was granted after the end only then counts as waiting still.
        turns = [turn if turn.granted <= end else turn._replace(granted=None, released=None) for turn in turns]
        batches = [answer["batches"] for answer in answers if answer["batches"] is not None]
        counts = Counter(turn.who for turn in turns if turn.granted is not None)
        held = sum(min(self.holds[turn.who], end - turn.granted) for turn in turns if turn.granted is not None)
        return {
            "share": held / (slots * seconds),
            "jain": jain([counts[who] for who in range(len(self.holds))]),
            "longest_s": longest_wait(turns, end),
            "overtaken": most_overtaken(turns, end),
            "grants_per_s": counts.total() / seconds,
            "cpu_ms": 1000 * sum(answer["cpu"] for answer in answers) / max(1, counts.total()),
            "server_cpu": None if spent is None or spent_after is None else (spent_after - spent) / seconds,
            "batches_per_s": sum(batches) / seconds if batches else None,
            "statements_per_s": None if before is None or after is None else (after - before) / watched,
        }


class ContentionUnequal(Contention):
    """The same with holds that differ by process."""

    name = "contention-unequal"
    title = "8 processes, 3 slots (mutexes: 1), holds of 1 to 300 ms by process"
    holds: ClassVar[list[float]] = [round(0.001 * 300 ** (each / (PROCESSES - 1)), 4) for each in range(PROCESSES)]


class ContentionNoWork(Contention):
    """The same without holds."""

    name = "contention-no-work"
    title = "8 processes, 3 slots (mutexes: 1), no work in between"
    metrics = tuple(metric for metric in Contention.metrics if metric.key != "share")
    holds: ClassVar[list[float]] = [0.0] * PROCESSES


SCENARIOS = (Contention(), ContentionUnequal(), ContentionNoWork())
