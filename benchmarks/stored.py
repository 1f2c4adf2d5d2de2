"""The ratios of a run that are kept with the code, and how a later run compares with them.

A ratio is a figure of this package over a floor's of the same run; a count, such as statements, is kept as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from benchmarks.scenarios import all_scenarios

PATH: Final = Path(__file__).parent / "stored.json"
#: By how much a ratio may be worse, as a share.
MARGIN: Final = 0.15

#: Scenario, contender and variant, metric, and what it is compared with: a value.
Ratios = dict[str, float]


def databases_of(content: dict[str, Any]) -> list[str]:
    """Return the databases that a run measured this package or its peers on, in their order."""
    return list(dict.fromkeys(each["database"] for each in content["contenders"].values()))


def ratios_of(content: dict[str, Any], database: str) -> Ratios:
    """Return the ratios and counts of this package in a run."""
    found: Ratios = {}
    for name, result in content["scenarios"].items():
        for row in result["rows"]:
            contender = content["contenders"][row["contender"]]
            if contender["kind"] != "ours" or contender["database"] != database:
                continue
            who = ", ".join(filter(None, (row["contender"], row["variant"])))
            for metric in all_scenarios()[name].metrics:
                for floor, ratio in row["ratios"].get(metric.key, {}).items():
                    found[f"{name} | {who} | {metric.key} | × {floor}"] = round(ratio, 3)
                if metric.count and row["median"].get(metric.key) is not None:
                    found[f"{name} | {who} | {metric.key} | count"] = round(row["median"][metric.key], 2)
    return found


def keep(path: Path, contents: list[dict[str, Any]]) -> None:
    """Store the ratios of runs; those of databases that were not measured stay."""
    stored = read(path) if path.exists() else {}
    for content in contents:
        for database in databases_of(content):
            if ratios := ratios_of(content, database):
                at, versions = content["machine"]["at"], content["servers"][database]
                stored[database] = {"at": at, "version": versions, "load": content["load"], "ratios": ratios}
    path.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """Read what ``keep`` wrote."""
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return stored


def scenarios_in(stored: dict[str, Any]) -> list[str]:
    """Return the scenarios of which there are ratios."""
    return list(dict.fromkeys(key.partition(" | ")[0] for each in stored.values() for key in each["ratios"]))


def compare(stored: dict[str, Any], contents: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """Return how many ratios of runs were there to compare, and a line for each that is worse than stored."""
    more = {(name, metric.key) for name, each in all_scenarios().items() for metric in each.metrics if metric.more}
    compared, lines = 0, []
    for content in contents:
        for database in databases_of(content):
            before = stored.get(database, {}).get("ratios", {})
            for key, now in ratios_of(content, database).items():
                name, _, metric, _ = key.split(" | ")
                was = before.get(key)
                if not was or not now:
                    continue
                compared += 1
                times = was / now if (name, metric) in more else now / was
                if times > 1 + MARGIN:
                    lines.append(f"{key}: {was:g} before, {now:g} now: worse by {times - 1:.0%}")
    return compared, lines
