"""Where the time of a step goes: our own Python, the driver, the server, statements, bytes, switches and flushes."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.budget_roles import PAUSE
from benchmarks.contenders.base import database_entry
from benchmarks.counting import Counting
from benchmarks.processes import Process, processes
from benchmarks.scenarios.base import Cell, Context, Figures, Metric, Scenario, slots_for
from benchmarks.stats import median

PAIR, CALL, HANDOVER = "pair", "decorated call", "hand-over"
#: Until the connections are open and the statements prepared, in seconds; the least for a figure, and the most.
WARM_UP, LEAST, MOST = 0.3, 0.2, 60.0
MICRO = 1e6


class Budget(Scenario):
    """Each step is done by processes that nobody looks into, by some whose driver is timed behind a proxy that counts,
    and by some whose calls are followed: looking costs time itself."""

    name = "budget"
    title = "What a step costs: a pair of acquire and release, a decorated call, a hand-over between two processes"
    metrics = (
        Metric("took_us", "takes, µs", 0, ratio=True),
        Metric("client_us", "client CPU, µs", 0, ratio=True),
        Metric("caller_us", "of it the calling thread's, µs", 0),
        Metric("own_us", "of it own Python, µs", 0),
        Metric("calls", "own calls", 0, count=True),
        Metric("files", "own files", 0, count=True),
        Metric("crossings", "crossings of files", 0, count=True),
        Metric("statements", "statements", 2, count=True),
        Metric("trips", "round trips", 2, count=True),
        Metric("bytes", "bytes", 0, count=True),
        Metric("server_us", "server CPU, µs", 0, ratio=True),
        Metric("switches", "switches of threads", 1),
        Metric("flushes", "flushes to the disk", 2),
    )
    most_rounds = 3

    def cells(self, context: Context) -> list[Cell]:
        """Leave out peers: what they cost says nothing about where ours goes."""
        kinds = [kind for kind in context.kinds if kind.kind in ("ours", "rows", "lock") and kind.database != "redis"]
        cells = [Cell(kind, step) for step in (PAIR, CALL, HANDOVER) for kind in kinds]
        return [cell for cell in cells if cell.variant != CALL or cell.kind.kind == "ours"]

    def measure(self, context: Context, cell: Cell) -> Figures:
        name, slots = context.new_name(), slots_for(cell.kind)
        cell.kind.prepare(name, slots)
        seconds = max(LEAST, context.seconds)
        with contextlib.ExitStack() as stack:
            if cell.variant == HANDOVER and slots > 1:  # the others are held elsewhere
                for holder in stack.enter_context(processes(cell.kind, name, slots, slots - 1)):
                    holder.acquire()
            figures = self.spent(context, cell, name, seconds)
            figures |= self.counted(context, cell, name, figures, max(LEAST, seconds / 3))
            if cell.kind.kind == "ours" and cell.variant == HANDOVER:
                with self.team(cell, name, watch="calls") as team:
                    self.do(cell, team, WARM_UP)
                    figures |= self.followed(context, self.do(cell, team, max(LEAST, seconds / 3)))
        return figures

    def spent(self, context: Context, cell: Cell, name: str, seconds: float) -> Figures:
        """Return what processes and server spend on a step while nobody looks into them."""
        server = context.server_of(cell.kind)
        flushed = server.flushes()
        with self.team(cell, name) as team:
            steps = self.do(cell, team, WARM_UP)["steps"]
            before = server.cpu()
            spent = self.do(cell, team, seconds)
            after = server.cpu()
            steps += spent["steps"]
            alone = cell.kind.kind == "ours" and cell.variant != HANDOVER
            way = self.followed(context, team[0].ask("follow", what=cell.variant)) if alone else {}
        time.sleep(0.1)  # sessions report what they did as they end
        flushes = None if flushed is None else (server.flushes() or 0.0) - flushed
        used = None if before is None or after is None else after - before
        return {
            "took_us": MICRO * spent["took"],
            "client_us": MICRO * spent["cpu"] / spent["steps"],
            "caller_us": MICRO * spent["caller"] / spent["steps"],
            "server_us": None if used is None else MICRO * used / spent["steps"],
            "switches": spent["switches"] / spent["steps"],
            "flushes": None if flushes is None else flushes / steps,
            **way,
        }

    def followed(self, context: Context, spent: dict[str, Any]) -> Figures:
        """Return how many calls were followed, and list them if that is wanted."""
        if context.listing:
            context.say("\n".join(f"      {line}" for line in spent["list"]))
        figures: Figures = spent["way"]
        return figures

    def counted(self, context: Context, cell: Cell, name: str, figures: Figures, seconds: float) -> Figures:
        """Return what passes between processes and server in a step, and what is their own in ``figures``."""
        with contextlib.ExitStack() as stack:
            proxy = None
            if cell.kind.database != "sqlite":
                proxy = stack.enter_context(Counting(cell.kind.database, database_entry(cell.kind.database)))
            port = proxy.port if proxy else None
            team = stack.enter_context(self.team(cell, name, watch="driver", port=port))
            self.do(cell, team, WARM_UP)
            before, passed = [each.ask("driver") for each in team], proxy.counts() if proxy else {}
            spent = self.do(cell, team, seconds)
            after, passed_after = [each.ask("driver") for each in team], proxy.counts() if proxy else {}
        steps = spent["steps"]
        result: Figures = {
            key: None if value is None else (value - (passed[key] or 0)) / steps for key, value in passed_after.items()
        }

        def driver(key: str) -> float:
            """Return what was added to a figure of the driver's, for each step."""
            return sum(its[key] - was[key] for was, its in zip(before, after, strict=True)) / steps

        if cell.kind.database == "sqlite":
            result["statements"] = driver("statements")
            if not after[0]["flushed"]:
                result["flushes"] = 0.0
        if cell.kind.kind == "ours" and cell.kind.database != "mssql":  # there the driver's cursors are its own
            whole = spent["cpu"] / steps - driver("measuring")
            result["own_us"] = (figures["client_us"] or 0.0) * (1 - driver("driver") / whole)
        return result

    @contextlib.contextmanager
    def team(self, cell: Cell, name: str, **watched: Any) -> Iterator[list[Process]]:
        """Start those who do a step: two processes for a hand-over, else one."""
        count = 2 if cell.variant == HANDOVER else 1
        with processes(cell.kind, name, slots_for(cell.kind), count, **watched) as team:
            yield team

    def do(self, cell: Cell, team: list[Process], seconds: float) -> dict[str, Any]:
        """Have a team do a step for a while. Return how often, what all of it spent, and how long one took."""
        if cell.variant != HANDOVER:
            spent: dict[str, Any] = team[0].ask("repeat", what=cell.variant, seconds=seconds)
            return spent
        start = time.monotonic() + 0.05
        for number, each in enumerate(team):
            each.tell("take_turns", start=start + number * PAUSE, seconds=seconds)
        answers = [each.answer(seconds + 120) for each in team]
        turns = sorted((turn for answer in answers for turn in answer["turns"]), key=lambda turn: turn[1])
        took = [later[1] - turn[2] for turn, later in itertools.pairwise(turns) if later[0] < turn[2]]
        if not took and seconds < MOST:  # the machine is so busy that nothing was handed over
            return self.do(cell, team, 2 * seconds)
        if "way" in answers[0]:  # the processes enter the same files
            ways = [answer["way"] for answer in answers]
            counts = {key: sum(way[key] for way in ways) / len(turns) for key in ("calls", "crossings")}
            listed = sum((answer["list"] for answer in answers), Counter()).most_common()
            lines = [f"{count / len(turns):8.2f} × {file}: {function}" for (file, function), count in listed]
            return {"way": {"files": max(way["files"] for way in ways), **counts}, "list": lines}
        whole = {key: sum(answer[key] for answer in answers) for key in ("cpu", "caller", "switches")}
        return whole | {"steps": len(turns), "took": median(took)}


SCENARIOS = (Budget(),)
