"""The tables and charts of docs/benchmarks.md, written from the figures of runs.

They stand between ``<!-- begin results postgres -->`` and ``<!-- end results postgres -->``. What is written around
them stays, and so does what stands between the marks of a database that was not measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import plot
from benchmarks.report import markdown
from benchmarks.scenarios import all_scenarios
from benchmarks.scenarios.base import Metric, text
from benchmarks.scenarios.budget import CALL, HANDOVER, PAIR
from benchmarks.stored import databases_of

DOCS: Final = Path(__file__).parents[1] / "docs"
#: What is measured for the page on every database, and on SQL Server besides.
SCENARIOS: Final = (
    "pair", "handoff-processes", "contention", "contention-unequal", "contention-no-work", "crash", "budget",
)  # fmt: skip
MSSQL_SCENARIOS: Final = (*SCENARIOS, "waiters")
#: By how much another must be better to be named.
NOTED: Final = 1.05

Row = dict[str, Any]


class Column(NamedTuple):
    """One column of the results: a figure, or its ratio to a floor."""

    title: str
    scenario: str
    key: str
    floor: str = ""

    @property
    def metric(self) -> Metric:
        """The metric of its figures."""
        return next(metric for metric in all_scenarios()[self.scenario].metrics if metric.key == self.key)

    def shown(self, row: Row | None) -> str:
        """Return what stands in its cell."""
        if row is None:
            return "-"
        if self.floor:
            ratio = row["ratios"].get(self.key, {}).get(self.floor)
            return "-" if ratio is None else f"{ratio:.2f}"
        value = row["median"].get(self.key)
        return value if isinstance(value, str) else text({self.key: value}, self.metric)


COLUMNS: Final = (
    Column("pair, ms", "pair", "p50_ms"),
    Column("× rows", "pair", "p50_ms", "rows"),
    Column("hand-over, ms", "handoff-processes", "p50_ms"),
    Column("× lock", "handoff-processes", "p50_ms", "lock"),
    Column("share", "contention", "share"),
    Column("share, unequal", "contention-unequal", "share"),
    Column("grants/s, no work", "contention-no-work", "grants_per_s"),
    Column("Jain", "contention", "jain"),
    Column("longest wait, s", "contention", "longest_s"),
    Column("most overtaken", "contention", "overtaken"),
    Column("crash, s", "crash", "seconds"),
)
MSSQL_COLUMNS: Final = (
    Column("pair, × raw lock", "pair", "p50_ms", "lock"),
    Column("client CPU, ×", "pair", "cpu_ms", "lock"),
    Column("hand-over, ×", "handoff-processes", "p50_ms", "lock"),
    Column("share", "contention", "share"),
    Column("Jain", "contention", "jain"),
    Column("longest wait, s", "contention", "longest_s"),
    Column("most overtaken", "contention", "overtaken"),
    Column("CPU of the server while 5 wait, s/s", "waiters", "server_cpu"),
)


class Run:
    """What a run found on one database."""

    def __init__(self, content: dict[str, Any], database: str) -> None:
        self.content, self.database = content, database
        self.kinds = {key: each for key, each in content["contenders"].items() if each["database"] == database}

    def rows(self, scenario: str) -> list[Row]:
        """Return the rows of a scenario: this package's first, then the floors', then the others'."""
        order = ["ours", "rows", "lock", "alternative", "peer"]
        rows = self.content["scenarios"].get(scenario, {"rows": []})["rows"]
        here = [row for row in rows if row["contender"] in self.kinds]
        return sorted(here, key=lambda row: order.index(self.kinds[row["contender"]]["kind"]))

    def row(self, scenario: str, contender: str) -> Row | None:
        """Return what a scenario without variants found for a contender."""
        return next((row for row in self.rows(scenario) if row["contender"] == contender), None)

    # The blocks.

    def results(self) -> str:
        """Return the table of all contenders, and when and where it was measured."""
        columns = MSSQL_COLUMNS if self.database == "mssql" else COLUMNS
        names = [row["contender"] for row in self.rows("pair")]
        cells = {column: [column.shown(self.row(column.scenario, name)) for name in names] for column in columns}
        cells = {column: each for column, each in cells.items() if set(each) != {"-"}}
        lines = [[title_of(name), *(cells[column][number] for column in cells)] for number, name in enumerate(names)]
        picture = f"![The figures of the table as bars.](images/benchmarks-{self.database}.svg)"
        return f"{self.circumstances()}\n\n{markdown(['', *(column.title for column in cells)], lines)}\n\n{picture}"

    def circumstances(self) -> str:
        """Return when and where the run was, and what else the machine did."""
        machine, options, load = self.content["machine"], self.content["options"], self.content["load"]
        ours = ("django-pglock", "django-db-mutex", "sqlalchemy-dlock", "python-redis-lock", "redis")
        notes = "".join(self.kinds)
        peers = "".join(
            f", {name} {version}"
            for name, version in machine["packages"].items()
            if name in ours and (name in notes or (name == "redis" and self.database == "redis"))
        )
        return (
            f"{machine['at'][:10]}: {self.content['servers'][self.database]}, Python {machine['python']}, Django "
            f"{machine['packages']['Django']}{peers}; {machine['cpus']} CPUs, load average {load['before']:.1f} before "
            f"and {load['after']:.1f} after; {options['rounds']} rounds of {options['seconds']:g} s."
        )

    def budget(self) -> str:
        """Return the tables and the picture of what a step costs."""
        picture = f"![Where the time of each step goes.](images/budget-{self.database}.svg)"
        return "\n\n".join([self.circumstances(), *self.steps(), picture])

    def steps(self) -> list[str]:
        """Return a table for pairs and one for hand-overs: a line for each figure, a column for each contender."""
        tables = []
        for group in ((PAIR, CALL), (HANDOVER,)):
            rows = [row for step in group for row in self.rows("budget") if row["variant"] == step]
            head = [
                ", ".join(group),
                *(title_of(row["contender"]) + ", called" * (row["variant"] == CALL) for row in rows),
            ]
            lines = []
            for metric in all_scenarios()["budget"].metrics:
                lines.append([metric.title, *(text(row["median"], metric) for row in rows)])
                for floor in ("rows", "lock") if metric.ratio else ():
                    column = Column(f"… × {floor}", "budget", metric.key, floor)
                    lines.append([column.title, *map(column.shown, rows)])
            tables += [markdown(head, [line for line in lines if set(line[1:]) != {"-"}])] if rows else []
        return tables

    def behind(self) -> str:
        """Return a table of the figures in which somebody else is better."""
        ours = next((name for name, each in self.kinds.items() if each["kind"] == "ours"), None)
        lines = []
        for column in COLUMNS if ours else ():
            values = {
                row["contender"]: row["median"].get(column.key)
                for row in self.rows(column.scenario)
                if not column.floor and self.kinds[row["contender"]]["kind"] != "ours"
            }
            known = {name: value for name, value in values.items() if isinstance(value, int | float) and value > 0}
            row = self.row(column.scenario, ours or "")
            own = row["median"].get(column.key) if row else None
            if not known or not isinstance(own, int | float) or column.floor:
                continue
            better: Callable[..., str] = max if column.metric.more else min
            best = better(known, key=lambda name: known[name])
            times = known[best] / own if column.metric.more and own else own / known[best]
            if times > NOTED:
                value = text({column.key: known[best]}, column.metric)
                lines.append([column.title, column.shown(row), value, title_of(best), f"{times:.1f}"])
        if not lines:
            return "Nobody is ahead in any figure."
        return markdown(["", "this package", "the best of the others", "who", "behind by a factor of"], lines)


def title_of(contender: str) -> str:
    """Return how the page calls a contender, under a heading that says the database."""
    name, _, rest = contender.partition(" (")
    option = rest.rstrip(")").partition(", ")[2]
    return name.replace("floor: ", "raw ") + (f", `{option}`" if option else "")


def fill(page: str, blocks: dict[str, str]) -> str:
    """Put blocks into a page, each between its marks. ``ValueError``: a mark is missing."""
    for name, block in blocks.items():
        marks = re.compile(f"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        page, count = marks.subn(lambda match, block=block: f"{match[1]}\n{block}\n\n{match[2]}", page)
        if count != 1:
            raise ValueError(f"The page has {count} times a block {name!r}, instead of once.")
    return page


def write(contents: list[dict[str, Any]], docs: Path = DOCS) -> list[str]:
    """Write the blocks and pictures of all databases that were measured. Returns what was written."""
    path, images, blocks = docs / "benchmarks.md", docs / "images", {}
    for content in contents:
        for database in databases_of(content):
            run = Run(content, database)
            if not run.rows("pair"):
                continue
            blocks[f"results {database}"] = run.results()
            found = content["scenarios"].items()
            here = {name: each | {"rows": run.rows(name)} for name, each in found if name != "budget"}
            plot.draw(content | {"scenarios": here}, images / f"benchmarks-{database}.svg")
            if database != "redis":
                blocks[f"behind {database}"] = run.behind()
            if run.rows("budget"):
                blocks[f"budget {database}"] = run.budget()
                plot.draw_budget(run.rows("budget"), images / f"budget-{database}.svg")
    path.write_text(fill(path.read_text(encoding="utf-8"), blocks), encoding="utf-8")
    return list(blocks)
