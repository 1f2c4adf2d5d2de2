"""Tables and JSON of a run."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders.base import Contender
from benchmarks.scenarios.base import Cell, Figures, Scenario, text
from benchmarks.stats import median

PACKAGES = (
    "Django",
    "django-sqlsem",
    "psycopg",
    "PyMySQL",
    "mysqlclient",
    "mssql-django",
    "pyodbc",
    "mssql-python",
    "redis",
    "django-db-mutex",
    "django-pglock",
    "sqlalchemy-dlock",
    "python-redis-lock",
)


@dataclass
class Row:
    """What came out for one cell: each round's figures, and their medians."""

    cell: Cell
    rounds: list[Figures]
    #: Per metric with a ratio and kind of floor, the median over the rounds of the ratio within the round.
    ratios: dict[str, dict[str, float]]
    #: Figures of which the largest counts.
    worst: frozenset[str] = frozenset()

    @property
    def medians(self) -> Figures:
        """The median over the rounds of each figure, or the largest where that is what counts."""
        keys = dict.fromkeys(key for figures in self.rounds for key in figures)
        known = {key: [value for each in self.rounds if (value := each.get(key)) is not None] for key in keys}
        return {
            key: (max(values) if key in self.worst else median(values)) if values else None
            for key, values in known.items()
        }


def rows_of(scenario: Scenario, rounds: list[dict[Cell, Figures]]) -> list[Row]:
    """Return the rows of a scenario. Ratios are taken within each round, then their median."""
    cells = list(dict.fromkeys(cell for each in rounds for cell in each))
    rows = []
    for cell in cells:
        own = [each[cell] for each in rounds if cell in each]
        ratios: dict[str, dict[str, float]] = {}
        for metric in scenario.metrics:
            for kind in ("rows", "lock") if metric.ratio else ():
                found = [ratio for each in rounds if (ratio := _ratio(each, cell, kind, metric.key)) is not None]
                if found:
                    ratios.setdefault(metric.key, {})[kind] = median(found)
        worst = frozenset(metric.key for metric in scenario.metrics if metric.worst)
        rows.append(Row(cell, own, ratios, worst))
    return rows


def _ratio(results: dict[Cell, Figures], cell: Cell, kind: str, key: str) -> float | None:
    value = results.get(cell, {}).get(key)
    for floor, figures in results.items():
        same = floor.kind.database == cell.kind.database and floor.variant == cell.variant
        if same and floor.kind.kind == kind and value is not None and figures.get(key):
            return value / figures[key]
    return None


def table(scenario: Scenario, rows: list[Row]) -> str:
    """Return the table of a scenario, in Markdown, so that it can go into the documentation as it is."""
    variants = any(row.cell.variant for row in rows)
    head = ["contender"] + (["variant"] if variants else [])
    for metric in scenario.metrics:
        head.append(metric.title)
        if metric.ratio:
            head += ["× rows", "× lock"]
    lines = []
    for row in rows:
        line = [row.cell.kind.key] + ([row.cell.variant] if variants else [])
        medians = row.medians
        for metric in scenario.metrics:
            line.append(text(medians, metric, scenario.limit))
            if metric.ratio:
                ratios = row.ratios.get(metric.key, {})
                line += [f"{ratios[kind]:.2f}" if kind in ratios else "-" for kind in ("rows", "lock")]
        lines.append(line)
    return markdown(head, lines)


def markdown(head: list[str], lines: list[list[str]]) -> str:
    """Return a table whose columns are aligned."""
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    rule = ["-" * width if not column else "-" * (width - 1) + ":" for column, width in enumerate(widths)]

    def joined(line: Iterable[str]) -> str:
        padded = (
            word.ljust(width) if not column else word.rjust(width)
            for column, (word, width) in enumerate(zip(line, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    return "\n".join(joined(line) for line in (head, rule, *lines))


def machine() -> dict[str, Any]:
    """Return what the run was on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "packages": versions,
    }


def document(
    options: dict[str, Any],
    servers: dict[str, str],
    left_out: dict[str, str],
    kinds: list[type[Contender]],
    remarks: list[str],
    results: dict[Scenario, list[Row]],
) -> dict[str, Any]:
    """Return the whole run as it goes into the JSON."""
    return {
        "format": 1,
        "machine": machine(),
        "options": options,
        "servers": servers,
        "left_out": left_out,
        "remarks": remarks,
        "contenders": {
            kind.key: {"database": kind.database, "kind": kind.kind, "mutex_only": kind.mutex_only, "note": kind.note}
            for kind in kinds
        },
        "scenarios": {
            scenario.name: {
                "title": scenario.title,
                "metrics": {metric.key: metric.title for metric in scenario.metrics},
                "rows": [
                    {
                        "contender": row.cell.kind.key,
                        "variant": row.cell.variant,
                        "median": _finite(row.medians, scenario),
                        "ratios": row.ratios,
                        "rounds": [_finite(figures, scenario) for figures in row.rounds],
                    }
                    for row in rows
                ],
            }
            for scenario, rows in results.items()
        },
    }


def _finite(figures: Figures, scenario: Scenario) -> dict[str, float | str | None]:
    return {
        key: f"> {scenario.limit:g}" if value is not None and math.isinf(value) else value
        for key, value in figures.items()
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the run as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
