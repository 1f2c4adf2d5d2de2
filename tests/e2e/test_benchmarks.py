"""The benchmarks run, and their statistics are right. How fast anything is, is not tested."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from benchmarks import cli, report, stats
from benchmarks.contenders import all_contenders
from benchmarks.scenarios import all_scenarios
from benchmarks.scenarios.base import Cell, Figures, Metric, Scenario, text
from benchmarks.stats import Turn
from tests.support.databases import ROOT


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command as its user does."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "DJANGO_"))}
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, timeout=240)


def test_a_quick_run_writes_its_figures(tmp_path: Path) -> None:
    figures, plot = tmp_path / "new" / "figures.json", tmp_path / "new" / "figures.svg"
    options = ["--quick", "--peers", "none", "--database", "sqlite", "--json", str(figures), "--svg", str(plot)]
    done = run("pair", "contention", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(figures.read_text(encoding="utf-8"))
    assert set(content["scenarios"]) == {"pair", "contention"}
    assert set(content["servers"]) == {"sqlite"}
    assert content["options"]["rounds"] == 2
    assert content["machine"]["packages"]["Django"]
    rows = {row["contender"]: row for row in content["scenarios"]["pair"]["rows"]}
    assert {"django_sqlsem (SQLite)", "floor: rows (SQLite)"} <= set(rows) == set(content["contenders"])
    assert all(kind["database"] == "sqlite" for kind in content["contenders"].values())
    for row in rows.values():
        assert len(row["rounds"]) == 2
        assert 0 < row["median"]["p50_ms"] <= row["median"]["p95_ms"]
        assert row["ratios"]["p50_ms"]["rows"] > 0
    assert rows["floor: rows (SQLite)"]["ratios"]["p50_ms"]["rows"] == 1
    for row in content["scenarios"]["contention"]["rows"]:
        assert 0 < row["median"]["share"] <= 1.5
        assert 0 < row["median"]["jain"] <= 1
        assert row["contender"] in done.stdout
    assert plot.exists() or "matplotlib is not installed" in done.stdout


@pytest.mark.soak
@pytest.mark.skipif("mssql" not in settings.DATABASES, reason="no mssql")
def test_application_locks_are_measured(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ["--quick", "--rounds", "1", "--peers", "none", "--database", "mssql", "--json", str(figures)]
    done = run("pair", *options, "--svg", str(tmp_path / "plot.svg"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(figures.read_text(encoding="utf-8"))["scenarios"]["pair"]["rows"]
    assert {row["contender"]: row["ratios"]["p50_ms"]["lock"] for row in rows}["floor: applock (SQL Server)"] == 1
    assert {"django_sqlsem (SQL Server)", "django_sqlsem (SQL Server, RECORD=False)"} < {
        row["contender"] for row in rows
    }


def test_a_server_that_does_not_answer_is_named() -> None:
    done = run("pair", "--quick", "--database", "redis", SQLSEM_TEST_REDIS_URL="redis://127.0.0.1:1/0")
    assert done.returncode == 1
    assert "redis does not answer" in done.stdout
    assert "SQLSEM_TEST_REDIS_URL" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named", "allowed"),
    [
        (["pairs"], "'pairs'", "handoff-processes"),
        (["--database", "oracle"], "'oracle'", "sqlite, postgres, mariadb, mssql, redis"),
        (["--peers", "zookeeper"], "'zookeeper'", "django-pglock"),
        (["--peers", "none", "django-pglock"], "none django-pglock", "excludes"),
        (["--seconds", "soon"], "'soon'", "a number from 0.1 on"),
        (["--seconds", "0"], "'0'", "a number from 0.1 on"),
        (["--seconds", "nan"], "'nan'", "a number from 0.1 on"),
        (["--rounds", "1.5"], "'1.5'", "a whole number from 1 on"),
        (["--rounds", "0"], "'0'", "a whole number from 1 on"),
        (["--names", "-1"], "'-1'", "a whole number from 1 on"),
        (["--quick", "--seconds", "1"], "--seconds", "--quick"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], named: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert named in message
    assert allowed in message


def test_percentile() -> None:
    assert stats.percentile([3, 1, 2], 0.5) == 2
    assert stats.percentile([1, 2], 0.5) == 1.5
    assert stats.percentile(range(101), 0.95) == 95
    assert stats.percentile([7], 0.95) == 7
    assert stats.median([math.inf, math.inf, 1]) == math.inf
    with pytest.raises(ValueError, match="at least one value"):
        stats.percentile([], 0.5)
    with pytest.raises(ValueError, match="from 0 to 1, not 95"):
        stats.percentile([1], 95)


def test_jain() -> None:
    assert stats.jain([5, 5, 5]) == 1
    assert stats.jain([9, 0, 0]) == pytest.approx(1 / 3)
    assert stats.jain([0, 0]) == 1
    with pytest.raises(ValueError, match="0 or more"):
        stats.jain([1, -1])
    with pytest.raises(ValueError, match="0 or more"):
        stats.jain([])


def test_overtaken_counts_later_arrivals_that_went_first() -> None:
    in_order = [Turn(1, 0, 1, 2), Turn(2, 1, 2, 3), Turn(3, 2, 3, 4)]
    assert stats.most_overtaken(in_order, 10) == 0
    # It asked at 0 and was granted at 5; two that asked at 1 and 3 were granted at 2 and 4, one asked before it.
    passed = [Turn(1, 0, 5, 6), Turn(2, 1, 2, 3), Turn(2, 3, 4, 5), Turn(3, -1, 1, 2)]
    assert stats.most_overtaken(passed, 10) == 2
    starved = [Turn(1, 0, None, None), Turn(2, 1, 2, 3), Turn(2, 3, 4, 5), Turn(2, 8, 12, 13)]
    assert stats.most_overtaken(starved, 10) == 2
    assert stats.most_overtaken([], 10) == 0


def test_longest_wait_and_most_at_once() -> None:
    turns = [Turn(1, 0, 1, 4), Turn(2, 1, 3, 5), Turn(3, 4, None, None), Turn(4, 4, 5, 6)]
    assert stats.longest_wait(turns, 10) == 6
    assert stats.longest_wait([], 10) == 0
    assert stats.most_at_once(turns) == 2
    assert stats.most_at_once([Turn(1, 0, 1, 2), Turn(2, 0, 2, 3)]) == 1


class _Two(Scenario):
    name, title, limit = "two", "Two figures", 45.0
    metrics = (
        Metric("p50_ms", "p50, ms", 2, ratio=True),
        Metric("seconds", "seconds", 1),
        Metric("worst_ms", "worst, ms", 0, worst=True),
    )


def test_ratios_are_taken_within_a_round() -> None:
    kinds = all_contenders()
    ours, floor = Cell(kinds["django_sqlsem (SQLite)"]), Cell(kinds["floor: rows (SQLite)"])
    # The machine was ten times slower in the second round: the ratio is 3 all the same.
    rounds: list[dict[Cell, Figures]] = [
        {ours: {"p50_ms": 3.0, "seconds": math.inf}, floor: {"p50_ms": 1.0, "seconds": None}},
        {ours: {"p50_ms": 30.0, "seconds": math.inf}, floor: {"p50_ms": 10.0, "seconds": 30.0}},
        {ours: {"p50_ms": 3.0, "seconds": 1.0}, floor: {"p50_ms": 1.0, "seconds": 31.0}},
    ]
    first, second = report.rows_of(_Two(), rounds)
    assert first.ratios == {"p50_ms": {"rows": 3.0}}
    assert (first.medians["p50_ms"], second.medians["seconds"]) == (3.0, 30.5)
    lines = report.table(_Two(), [first, second]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "> 45" in lines[2]
    rounds = [{ours: {"worst_ms": 2.0}}, {ours: {"worst_ms": 700.0}}, {ours: {"worst_ms": 3.0}}]
    assert report.rows_of(_Two(), rounds)[0].medians == {"worst_ms": 700.0}
    assert text({}, _Two.metrics[0]) == "-"


def test_contenders_and_scenarios_are_complete() -> None:
    kinds: dict[str, Any] = all_contenders()
    assert {kind.database for kind in kinds.values()} == set(cli.DATABASES)
    for key, kind in kinds.items():
        assert kind.key == key
        assert kind.kind in ("ours", "rows", "lock", "alternative", "peer")
        assert bool(kind.package) == (kind.kind == "peer")
        assert kind.kind == "alternative" or kind.mutex_only == (kind.kind in ("lock", "peer"))
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for name, scenario in all_scenarios().items():
        assert scenario.name == name
        assert scenario.metrics
        assert f"`{name}`" in page
