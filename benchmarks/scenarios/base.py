"""What scenarios have in common: their cells are measured one after the other, round by round."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from benchmarks.contenders.base import Contender
from benchmarks.processes import WorkerError
from benchmarks.servers import RUN, Server

#: What one measurement of one cell says: a figure per metric; ``None``: not known here; infinite: above the limit.
Figures = dict[str, float | None]

SLOTS = 3


@dataclass(frozen=True)
class Metric:
    """A figure of a scenario: what it is called, and how it is written."""

    key: str
    title: str
    digits: int = 2
    #: Whether the report also gives it as a ratio to the floors.
    ratio: bool = False
    #: Whether it is drawn.
    plot: bool = False
    #: Whether the largest of the rounds counts, not their median.
    worst: bool = False
    #: Whether more of it is better.
    more: bool = False
    #: Whether it is much the same on any machine, so that it can be compared with another run as it is.
    count: bool = False


@dataclass(frozen=True)
class Cell:
    """One row of a report: a contender, and the variant of the scenario."""

    kind: type[Contender]
    variant: str = ""


@dataclass
class Context:
    """The run: its options, servers and contenders."""

    seconds: float
    rounds: int
    quick: bool
    names: int
    servers: dict[str, Server]
    kinds: list[type[Contender]]
    say: Callable[[str], None]
    #: Whether to print the way of a call through our own files.
    listing: bool = False
    #: What a reader of the figures must know, as it turns out.
    remarks: list[str] = field(default_factory=list)
    failures: int = 0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def new_name(self) -> str:
        """Return a name that was not used before, on any server."""
        return f"bench_{RUN}_{next(self._numbers)}"

    def server_of(self, kind: type[Contender]) -> Server:
        """Return the server that a contender uses."""
        return self.servers[kind.database]

    def remark(self, text: str) -> None:
        """Note something for the report, once."""
        if text not in self.remarks:
            self.remarks.append(text)
            self.say(text)


class Scenario:
    """One scenario. ``measure`` measures one cell once; medians over the rounds are what is reported."""

    name: ClassVar[str]
    title: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    #: What stands for an infinite figure.
    limit: ClassVar[float] = math.inf
    #: Measure with this package alone.
    ours_only: ClassVar[bool] = False
    #: At most this many rounds.
    most_rounds: ClassVar[int] = 1000

    def cells(self, context: Context) -> list[Cell]:
        """Return the rows of the report."""
        return [Cell(kind) for kind in context.kinds if not self.ours_only or kind.kind == "ours"]

    def prepare(self, context: Context) -> None:
        """Do what must be done once, before the first round."""

    def measure(self, context: Context, cell: Cell) -> Figures:
        """Measure one cell."""
        raise NotImplementedError

    def attempt(self, context: Context, cell: Cell) -> Figures:
        """Measure one cell; that it failed is a remark, and no reason to lose the rest of the run."""
        try:
            return self.measure(context, cell)
        except WorkerError as error:
            return self.failed(context, error)

    def failed(self, context: Context, error: WorkerError) -> Figures:
        """Note that a contender failed, and return what there is to report of it: nothing."""
        context.failures += 1
        context.remark(f"{self.name} failed: {error}")
        if error.__cause__ is not None:
            context.say(f"{error.__cause__}")
        return {}

    def round(self, context: Context, cells: list[Cell]) -> dict[Cell, Figures]:
        """Measure every cell once, in turn."""
        results = {}
        for cell in cells:
            results[cell] = self.attempt(context, cell)
            self.say(context, cell, results[cell])
        return results

    def say(self, context: Context, cell: Cell, figures: Figures) -> None:
        """Print the first figures of a cell: a run is long, and its tables come last."""
        shown = ", ".join(f"{metric.title} {text(figures, metric, self.limit)}" for metric in self.metrics[:3])
        variant = cell.variant and f", {cell.variant}"
        context.say(f"    {time.strftime('%X')} {cell.kind.key}{variant}: {shown}")


def text(figures: Figures, metric: Metric, limit: float = math.inf) -> str:
    """Return a figure as it is written in a table."""
    value = figures.get(metric.key)
    if value is None:
        return "-"
    return f"> {limit:g}" if math.isinf(value) else f"{value:,.{metric.digits}f}"


def slots_for(kind: type[Contender]) -> int:
    """Return how many slots a contender has where several are wanted."""
    return 1 if kind.mutex_only else SLOTS
