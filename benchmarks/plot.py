"""Charts as SVG: bars, a panel per scenario and figure; curves for what grows with the number of processes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.scenarios import all_scenarios
from benchmarks.scenarios.base import Metric

COLOURS = {"ours": "#1f6f3f", "rows": "#9a9a9a", "lock": "#6a6a6a", "alternative": "#4a6fa5", "peer": "#c2703d"}
LABELS = {"ours": "this package", "rows": "floor: rows", "lock": "floor: lock", "alternative": "other ways"}
LABELS["peer"] = "peer"
#: The parts of a step, from the left to the right.
PARTS = {
    "own Python": "#1f6f3f",
    "driver": "#8fbf9f",
    "server": "#4a6fa5",
    "flushes, network, waiting": "#d5d5d5",
}
CURVES = ("#1f6f3f", "#c2703d", "#4a6fa5", "#9a9a9a", "#8a4f9e", "#b8a02e", "#2e9c9c", "#6a6a6a")
#: Pixels: the whole picture, where bars begin and end at most, a bar with the space below it, a curve's panel.
WIDTH, LEFT, RIGHT, BAR, CURVE = 860, 300, 740, 16, 320
#: Variants that are points of a curve.
POINT = re.compile(r"(\d+) processes, (.+)")


@dataclass(frozen=True)
class Bar:
    """One bar: parts from the left to the right, each a length and a colour."""

    label: str
    parts: Sequence[tuple[float, str]]
    text: str


@dataclass
class Picture:
    """An SVG that grows downwards."""

    height: int = 10
    body: str = ""

    def text(self, x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> None:
        """Write some words."""
        place = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-weight="{weight}"'
        self.body += f"<text {place}>{escape(words)}</text>\n"

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Fill a rectangle."""
        self.body += f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}"/>\n'

    def title(self, words: str) -> None:
        """Begin a panel."""
        self.height += 24
        self.text(10, self.height - 6, words, weight="bold")

    def legend(self, colours: dict[str, str]) -> None:
        """Say what colours mean, in a line."""
        for number, (label, colour) in enumerate(colours.items()):
            x = 10 + number * (WIDTH - 20) / len(colours)
            self.box(x, self.height, 10, 10, colour)
            self.text(x + 15, self.height + 9, label)
        self.height += 22

    def bars(self, title: str, bars: Sequence[Bar]) -> None:
        """Draw a panel of bars."""
        self.title(title)
        longest = max((sum(length for length, _ in bar.parts) for bar in bars), default=0.0) or 1.0
        for bar in bars:
            x: float = LEFT
            self.text(LEFT - 6, self.height + 10, bar.label, "end")
            for length, colour in bar.parts:
                self.box(x, self.height, width := (RIGHT - LEFT) * length / longest, BAR - 4, colour)
                x += width
            self.text(x + 5, self.height + 10, bar.text)
            self.height += BAR

    def curves(self, title: str, lines: dict[str, list[tuple[int, float]]]) -> None:
        """Draw a panel of curves, both of whose axes are logarithmic."""
        self.title(title)
        points = [point for line in lines.values() for point in line]
        (left, right), (low, high) = ((math.log(min(axis)), math.log(max(axis))) for axis in zip(*points, strict=True))
        top, bottom = self.height + 5, self.height + CURVE - 30

        def place(count: int, value: float) -> tuple[float, float]:
            x = 70 + 430 * (math.log(count) - left) / (right - left or 1)
            return x, bottom - (bottom - top) * (math.log(value) - low) / (high - low or 1)

        for value in (math.exp(low), math.exp(high)):
            self.text(64, place(1, value)[1] + 4, f"{value:,.0f}", "end")
        for count in sorted({count for count, _ in points}):
            self.text(place(count, math.exp(low))[0], bottom + 16, f"{count}", "middle")
        self.text(285, bottom + 28, "processes", "middle")
        for number, (label, line) in enumerate(lines.items()):
            colour, dash = CURVES[number % len(CURVES)], number // len(CURVES) * 3
            drawn = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in sorted(line))
            self.body += f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-dasharray="{dash}"/>\n'
            self.box(520, top + 13 * number, 10, 3, colour)
            self.text(536, top + 6 + 13 * number, label)
        self.height += max(CURVE, 13 * len(lines) + 20)

    def write(self, path: Path) -> None:
        """Write it to a file."""
        size = f'width="{WIDTH}" height="{self.height + 10}" viewBox="0 0 {WIDTH} {self.height + 10}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{head}<rect width="100%" height="100%" fill="white"/>\n{self.body}</svg>\n', encoding="utf-8")


def draw(content: dict[str, Any], path: Path) -> str:
    """Write an SVG with the figures of a run. Returns a line that says what was done."""
    picture = Picture()
    picture.legend({LABELS[kind]: colour for kind, colour in COLOURS.items()})
    empty = picture.height
    for name, result in content["scenarios"].items():
        if name == "budget":
            panels_of(picture, result["rows"])
        for metric in all_scenarios()[name].metrics:
            if metric.plot and all(POINT.fullmatch(row["variant"]) for row in result["rows"]):
                lines = lines_of(metric, result["rows"])
                if lines:
                    picture.curves(f"{name}: {metric.title}", lines)
            elif metric.plot:
                kinds = content["contenders"]
                bars = [bar_of(row, metric, COLOURS[kinds[row["contender"]]["kind"]]) for row in result["rows"]]
                picture.bars(f"{name}: {metric.title}", bars)
    if picture.height == empty:
        return "Plot: left out, since nothing that was measured is drawn."
    picture.write(path)
    return f"Plot: {path}"


def bar_of(row: dict[str, Any], metric: Metric, colour: str) -> Bar:
    """Return the bar of one figure."""
    value = row["median"].get(metric.key)
    length = value if isinstance(value, int | float) else 0
    shown = value if isinstance(value, str) else "-" if value is None else f"{value:,.{metric.digits}f}"
    return Bar(f"{row['contender']}{row['variant'] and ', '}{row['variant']}", [(length, colour)], shown)


def lines_of(metric: Metric, rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return the points of a figure by the number of processes: a line per contender and kind of load."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        count, load = POINT.fullmatch(row["variant"]).groups()  # type: ignore[union-attr]
        value = row["median"].get(metric.key)
        if isinstance(value, int | float) and value > 0:
            lines.setdefault(f"{row['contender']}, {load}", []).append((int(count), value))
    return {label: points for label, points in lines.items() if len(points) > 1}


def draw_budget(rows: list[dict[str, Any]], path: Path) -> None:
    """Write an SVG of where the time of each step goes."""
    picture = Picture()
    panels_of(picture, rows)
    picture.write(path)


def panels_of(picture: Picture, rows: list[dict[str, Any]]) -> None:
    """Draw where the time of each step goes. What runs at the same time is drawn one after the other."""
    picture.legend(PARTS)
    for step in dict.fromkeys(row["variant"] for row in rows):
        bars = []
        for row in rows:
            figures = row["median"]
            if row["variant"] == step and figures.get("took_us"):
                client, own = figures["client_us"], figures.get("own_us") or 0.0
                server = figures.get("server_us") or 0.0
                rest = max(0.0, figures["took_us"] - client - server)
                parts = zip((own, client - own, server, rest), PARTS.values(), strict=True)
                bars.append(Bar(row["contender"], list(parts), f"{figures['took_us']:,.0f} µs"))
        picture.bars(step, bars)
