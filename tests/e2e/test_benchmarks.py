"""The benchmarks run, and their statistics are right. How fast anything is, is not tested."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from benchmarks import cli, counting, page, report, stats, stored
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
    assert ">pair: p50, ms<" in plot.read_text(encoding="utf-8")


def test_a_step_is_taken_apart_and_written_to_the_page(tmp_path: Path) -> None:
    figures, docs = tmp_path / "figures.json", tmp_path / "docs"
    options = ["--seconds", "0.2", "--rounds", "1", "--peers", "none", "--database", "sqlite", "--list"]
    done = run("pair", "budget", *options, "--json", str(figures), "--svg", str(tmp_path / "plot.svg"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "      backends/rows/acquire.py: " in done.stdout  # the calls of a pair, and those of a hand-over
    assert " × backends/rows/handoff.py: " in done.stdout
    content = json.loads(figures.read_text(encoding="utf-8"))
    rows = {(row["contender"], row["variant"]): row["median"] for row in content["scenarios"]["budget"]["rows"]}
    ours, floor = "django_sqlsem (SQLite)", "floor: rows (SQLite)"
    assert list(rows) == [
        (ours, "pair"), (floor, "pair"), (ours, "decorated call"), (ours, "hand-over"), (floor, "hand-over"),
    ]  # fmt: skip
    for (contender, step), found in rows.items():
        assert 0 < found["caller_us"] <= found["client_us"] * 1.01
        assert ("own_us" in found) == (contender == ours)
        assert contender == floor or 0 < found["own_us"] < found["client_us"]
        assert contender == floor or found["calls"] > found["crossings"] > found["files"] > 1
        assert found["statements"] == 2 if step != "hand-over" else found["statements"] > 2
        assert found["switches"] >= 0
        assert found["flushes"] == (0 if contender == ours else pytest.approx(2, abs=0.5))
    docs.mkdir()
    before = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    (docs / "benchmarks.md").write_text(before, encoding="utf-8")
    page.write([content], docs)
    written = (docs / "benchmarks.md").read_text(encoding="utf-8")
    block = re.compile(r"(<!-- begin (\w+) sqlite -->).*?(<!-- end \2 sqlite -->)", re.DOTALL)
    own = "".join(found.group() for found in block.finditer(written))
    assert own.count("; 1 rounds of 0.2 s.") == own.count("load average") == 2  # of the results and of the budget
    assert re.search(r"^\| of it own Python, µs +\| +[0-9]", own, re.MULTILINE)
    assert "flushes, network, waiting" in (docs / "images" / "budget-sqlite.svg").read_text(encoding="utf-8")
    assert len(block.findall(before)) == 3
    assert block.sub(r"\1\3", written) == block.sub(r"\1\3", before)


def test_the_page_has_a_place_for_each_database() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for database in cli.DATABASES:
        kinds = ["results"] if database == "redis" else ["results", "behind", "budget"]
        page.fill(text, {f"{kind} {database}": "" for kind in kinds})
    with pytest.raises(ValueError, match="0 times a block 'results oracle'"):
        page.fill(text, {"results oracle": ""})


def made_up(pair: float, share: float, statements: float) -> dict[str, Any]:
    """Return a run of three scenarios: two with ratios to a floor, one with a count."""
    ours, floor = "django_sqlsem (SQLite)", "floor: rows (SQLite)"

    def row(contender: str, key: str, value: float, variant: str = "", **ratios: float) -> dict[str, Any]:
        return {"contender": contender, "variant": variant, "median": {key: value}, "ratios": {key: ratios}}

    return {
        "machine": {"at": "2026-01-31T12:00:00+00:00"},
        "load": {"before": 0.1, "after": 2.0},
        "servers": {"sqlite": "SQLite 3"},
        "contenders": {ours: {"database": "sqlite", "kind": "ours"}, floor: {"database": "sqlite", "kind": "rows"}},
        "scenarios": {
            "pair": {"rows": [row(ours, "p50_ms", pair, rows=pair), row(floor, "p50_ms", 1.0, rows=1.0)]},
            "contention": {"rows": [row(ours, "share", share, rows=share)]},
            "budget": {"rows": [row(ours, "statements", statements, "pair")]},
        },
    }


def test_what_has_become_worse_is_shown(tmp_path: Path) -> None:
    kept, same, worse = (tmp_path / name for name in ("stored.json", "same.json", "worse.json"))
    stored.keep(kept, [made_up(1.0, 0.9, 2)])
    stored.keep(kept, [])  # what was not measured stays
    same.write_text(json.dumps(made_up(1.1, 1.9, 2)), encoding="utf-8")
    worse.write_text(json.dumps(made_up(0.5, 0.6, 3)), encoding="utf-8")
    done = run("--against", str(kept), "--measured", str(same))
    assert (done.returncode, "0 are worse" in done.stdout) == (0, True), done.stdout + done.stderr
    done = run("--against", str(kept), "--measured", str(worse))
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-3:] == [
        f"3 ratios compared with {kept}: 2 are worse.",
        "contention | django_sqlsem (SQLite) | share | × rows: 0.9 before, 0.6 now: worse by 50%",
        "budget | django_sqlsem (SQLite), pair | statements | count: 2 before, 3 now: worse by 50%",
    ]


PACKETS = {
    "postgres": [b"\0\0\0\x10\0\x03\0\0user\0a\0\0", b"P\0\0\0\x05!E\0\0\0\x04", b"S\0\0\0\x04Q\0\0", b"\0\x04"],
    "mariadb": [b"\x02\0\0\x01ab", b"\x02\0\0\0\x03a\x01\0\0", b"\0\x0e\x02\0\0\0\x17b"],
    "mssql": [b"\x12\x01\0\x09\0\0\0\0x", b"\x01\0\0\x08\0\0\0\0\x01\x01\0\x08\0\0\0\0", b"\x03\x01\0\x08\0\0\0\0"],
}
ENCRYPTED = {"mariadb": b"\x20\0\0\x01" + bytes(32)}


@pytest.mark.parametrize("database", PACKETS)
def test_statements_are_counted_wherever_messages_are_cut(database: str) -> None:
    statements, stream, count = counting.Counting.protocols[database], counting.Stream(), 0
    for data in PACKETS[database]:
        stream.said += data
        count += statements(stream)
    assert (count, stream.legible) == (2, True)
    encrypted = counting.Stream(bytearray(ENCRYPTED.get(database, b"\x17\x03\x03\0\x09unread...")))
    assert statements(encrypted) == 0
    assert not encrypted.legible


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
