"""The plot of a run: bars, a panel per scenario and figure; curves for what grows with the number of processes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from benchmarks.scenarios.base import Metric

COLOURS = {"ours": "#1f6f3f", "rows": "#9a9a9a", "lock": "#6a6a6a", "alternative": "#4a6fa5", "peer": "#c2703d"}
LABELS = {"ours": "this package", "rows": "floor: rows", "lock": "floor: lock", "alternative": "other ways"}
LABELS["peer"] = "peer"
#: Inches per bar and per panel.
BAR, PANEL = 0.2, 6.0
#: Variants that are points of a curve.
POINT = re.compile(r"(\d+) processes, (.+)")


def draw(content: dict[str, Any], path: Path) -> str:
    """Write an SVG with the figures of a run. Returns a line that says what was done."""
    if importlib.util.find_spec("matplotlib") is None:
        return "Plot: left out, since matplotlib is not installed."
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    from benchmarks.scenarios import all_scenarios

    panels = []
    for name, result in content["scenarios"].items():
        metrics = [metric for metric in all_scenarios()[name].metrics if metric.plot]
        panels += [(name, metric, result["rows"], is_curve(result["rows"])) for metric in metrics]
    if not panels:
        return "Plot: left out, since nothing that was measured is drawn."
    heights = [PANEL if curve else BAR * len(rows) + 1 for _, _, rows, curve in panels]
    figure, axes = pyplot.subplots(
        len(panels), figsize=(1.6 * PANEL, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for (name, metric, rows, curve), axis in zip(panels, axes[:, 0], strict=True):
        axis.set_title(f"{name}: {metric.title}", fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        if curve:
            draw_curves(axis, metric, rows)
            continue
        labels = [f"{row['contender']}{row['variant'] and ', '}{row['variant']}" for row in rows]
        kinds = [content["contenders"][row["contender"]]["kind"] for row in rows]
        values = [row["median"].get(metric.key) for row in rows]
        widths = [value if isinstance(value, int | float) else 0 for value in values]
        bars = axis.barh(range(len(rows)), widths, color=[COLOURS[kind] for kind in kinds])
        shown = [
            value if isinstance(value, str) else "-" if value is None else f"{value:,.{metric.digits}f}"
            for value in values
        ]
        axis.bar_label(bars, labels=shown, padding=3, fontsize=7)
        axis.set_yticks(range(len(rows)), labels, fontsize=7)
        axis.invert_yaxis()
        axis.margins(x=0.12)
    figure.legend(handles=[Patch(color=COLOURS[kind], label=LABELS[kind]) for kind in COLOURS], loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return f"Plot: {path}"


def is_curve(rows: list[dict[str, Any]]) -> bool:
    """Return whether the variants of a scenario are counts of processes."""
    return all(POINT.fullmatch(row["variant"]) for row in rows)


def draw_curves(axis: Any, metric: Metric, rows: list[dict[str, Any]]) -> None:
    """Draw a figure against the number of processes: a line per contender and kind of load."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        count, load = POINT.fullmatch(row["variant"]).groups()  # type: ignore[union-attr]
        value = row["median"].get(metric.key)
        if isinstance(value, int | float):
            lines.setdefault(f"{row['contender']}, {load}", []).append((int(count), value))
    styles = ("-", "--", ":", "-.")
    for number, (label, points) in enumerate(line for line in lines.items() if len(line[1]) > 1):
        axis.plot(*zip(*points, strict=True), styles[number // 10 % 4], marker=".", label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("processes", fontsize=8)
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
