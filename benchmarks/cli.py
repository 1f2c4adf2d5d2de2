"""The command line: what to measure, with whom, for how long."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import ENVIRONMENT

DATABASES = ("sqlite", "postgres", "mariadb", "mssql", "redis")
DIRECTORY = Path("build") / "benchmarks"
NAMES, QUICK_NAMES = 100_000, 1_000


def one_of(allowed: list[str], what: str) -> Callable[[str], str]:
    """Return a type of argument that takes only these words."""

    def check(value: str) -> str:
        if value not in allowed:
            raise argparse.ArgumentTypeError(f"{value!r} is no {what}; allowed are {', '.join(allowed)}")
        return value

    return check


def number(convert: type[int] | type[float], least: float) -> Callable[[str], float]:
    """Return a type of argument that takes only numbers from ``least`` on."""
    what = "a whole number" if convert is int else "a number"

    def check(value: str) -> float:
        try:
            result = convert(value)
            if not least <= result <= 1e9:
                raise ValueError(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{value!r} is not {what} from {least:g} on") from None
        return result

    return check


def existing(value: str) -> Path:
    """Take the path of a file that is there, as a type of argument."""
    if not Path(value).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {value}")
    return Path(value)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    from benchmarks.contenders import peer_names
    from benchmarks.scenarios import all_scenarios

    scenarios, peers = list(all_scenarios()), peer_names()
    result = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compare django_sqlsem with its peers and with what the drivers alone can do, in one run.",
        epilog=f"Scenarios: {', '.join(scenarios)}. Peers: {', '.join(peers)}. docs/benchmarks.md explains them.",
    )
    add = result.add_argument
    add("scenario", nargs="*", type=one_of(scenarios, "scenario"), help="which scenarios (default: all)")
    add(
        "--peers",
        nargs="+",
        metavar="PEER",
        type=one_of([*peers, "none"], "peer"),
        help="which peers, or none (default: all that are installed)",
    )
    add(
        "--database",
        nargs="+",
        metavar="DATABASE",
        type=one_of(list(DATABASES), "database"),
        help=f"which of {', '.join(DATABASES)} (default: all that answer)",
    )
    length = result.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds", type=number(float, 0.1), metavar="N", help="how long one measurement takes (default: 3)"
    )
    length.add_argument("--quick", action="store_true", help="0.5 s, two rounds, small tables: to see that it works")
    add("--rounds", type=number(int, 1), metavar="N", help="how often everything is measured (default: 5)")
    add("--names", type=number(int, 1), metavar="N", help=f"idle names in the full tables (default: {NAMES:,})")
    add("--json", type=Path, metavar="FILE", help=f"where the figures go (default: {DIRECTORY}/results.json)")
    add("--svg", type=Path, metavar="FILE", help=f"where the plot goes (default: {DIRECTORY}/results.svg)")
    add("--list", action="store_true", help="budget: print the way of a call through this package's own files")
    add(
        "--all",
        action="store_true",
        help="one run for each database, of all that docs/benchmarks.md shows; writes its tables and charts, and stores"
        " the ratios",
    )
    add("--against", type=existing, metavar="FILE", help="show which ratios are worse than those stored in a file")
    add(
        "--measured",
        type=existing,
        nargs="+",
        metavar="FILE",
        help="use the figures of runs that are over, for --all or --against, and measure nothing",
    )
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmarks.

    Returns 0; 1 if a server that was asked for does not answer, or a ratio is worse; 2 if a contender failed.
    """
    parse = parser()
    options = parse.parse_args(arguments)
    if options.peers and "none" in options.peers and len(options.peers) > 1:
        parse.error(f"argument --peers: 'none' excludes the others: {' '.join(options.peers)}")
    if options.all and (options.scenario or options.json or options.svg):
        parse.error("argument --all: it chooses the scenarios and the files itself")
    if options.measured and not (options.all or options.against):
        parse.error("argument --measured: for --all or --against")
    # However it ends, the databases are dropped.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return run(options)
    except KeyboardInterrupt:
        say("Broken off.")
        return 130


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(options: argparse.Namespace) -> int:
    """Do what the options say."""
    from benchmarks import page, stored

    before = stored.read(options.against) if options.against else {}
    if options.measured:
        status, contents = 0, [json.loads(path.read_text(encoding="utf-8")) for path in options.measured]
    else:
        status, contents = measure_all(options, stored.scenarios_in(before))
    if options.all and contents:
        say(f"docs/benchmarks.md: wrote {', '.join(page.write(contents)) or 'nothing'}.")
        stored.keep(stored.PATH, contents)
        say(f"Ratios: {stored.PATH}")
    if options.against:
        compared, worse = stored.compare(before, contents)
        say("\n".join([f"\n{compared} ratios compared with {options.against}: {len(worse)} are worse.", *worse]))
        return 1 if worse or not compared else status
    return status


def measure_all(options: argparse.Namespace, stored: list[str]) -> tuple[int, list[dict[str, Any]]]:
    """Find the servers and measure: with ``--all`` in one run for each. Returns the exit status, and what came out.

    ``stored`` are the scenarios to measure if the options name none.
    """
    from benchmarks import page
    from benchmarks import servers as server_side
    from benchmarks.scenarios import all_scenarios

    servers, missing = server_side.find(list(options.database or DATABASES))
    missing = {name: f"does not answer: {reason}" for name, reason in missing.items()}
    if options.database and missing:
        for name, reason in missing.items():
            say(f"{name} {reason}")
        variables = ", ".join(f"SQLSEM_TEST_{name.upper()}_URL" for name in missing)
        say(f"Nothing was measured, since {', '.join(missing)} was asked for. {variables} can say where it is.")
        return 1, []
    with server_side.databases(servers) as databases:
        os.environ[ENVIRONMENT] = json.dumps(databases)
        os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
        migrate(databases)
        if not options.all:
            names = options.scenario or stored or list(all_scenarios())
            status, content = measure(options, names, servers, missing, "results")
            return status, [content] if content else []
        outcomes = [
            measure(
                options,
                page.MSSQL_SCENARIOS if name == "mssql" else page.SCENARIOS,
                {name: server},
                missing.copy(),
                name,
            )
            for name, server in servers.items()
        ]
        return max(status for status, _ in outcomes), [content for _, content in outcomes if content]


def migrate(databases: dict[str, Any]) -> None:
    """Create the tables of this package and of its peers."""
    import django
    from django.apps import apps
    from django.core.management import call_command
    from django.db import connections

    from tests.support import tds

    django.setup()
    from django_sqlsem.backends.applock import install

    for alias, entry in databases.items():
        if entry.get("ENGINE") == "mssql" and tds.is_stand_in(alias):  # some migrations need what it lacks
            with connections[alias].schema_editor() as editor:
                for model in apps.get_app_config("sqlsem").get_models():
                    editor.create_model(model)
            install.install(connections[alias])
        elif entry:
            call_command("migrate", database=alias, verbosity=0, skip_checks=True)
    connections.close_all()


def choose(options: argparse.Namespace, servers: dict[str, Any], left_out: dict[str, str]) -> list[Any]:
    """Return the contenders that can run, and note why others can not."""
    from benchmarks.contenders import all_contenders, missing_module

    chosen = []
    for kind in all_contenders().values():
        if kind.package and options.peers is not None and kind.package not in options.peers:
            continue
        if kind.database not in servers:
            if kind.package:
                left_out.setdefault(kind.key, f"{kind.database} is not among the databases")
        elif (module := missing_module(kind)) is not None:
            left_out[kind.key] = f"the module {module} is not installed"
        else:
            chosen.append(kind)
    if not any(kind.package and kind.database == "redis" for kind in chosen):
        chosen = [kind for kind in chosen if kind.database != "redis"]  # its floor alone says nothing
    return chosen


def measure(
    options: argparse.Namespace,
    scenarios: Iterable[str],
    servers: dict[str, Any],
    left_out: dict[str, str],
    file: str,
) -> tuple[int, dict[str, Any] | None]:
    """Measure, print the tables, and write JSON and plot. Returns the exit status, and what came out."""
    from benchmarks import page, plot, report
    from benchmarks.scenarios import all_scenarios
    from benchmarks.scenarios.base import Context

    load, content = os.getloadavg()[0], None
    kinds = choose(options, servers, left_out)
    if left_out:
        say(f"Left out: {'; '.join(f'{what} ({why})' for what, why in left_out.items())}.")
    context = Context(
        seconds=options.seconds or (0.5 if options.quick else 3.0),
        rounds=options.rounds or (2 if options.quick else 5),
        quick=options.quick,
        names=options.names or (QUICK_NAMES if options.quick else NAMES),
        servers=servers,
        kinds=kinds,
        say=say,
        listing=options.list,
    )
    json_path, svg_path = options.json or DIRECTORY / f"{file}.json", options.svg or DIRECTORY / f"{file}.svg"
    results: dict[Any, list[report.Row]] = {}
    for name in dict.fromkeys(scenarios):
        scenario = all_scenarios()[name]
        cells = scenario.cells(context)
        if not cells:
            say(f"\n{name}: nothing to measure on {', '.join(servers)}.")
            continue
        say(f"\n{name}: {scenario.title}")
        scenario.prepare(context)
        rounds = []
        for number_of_round in range(1, min(context.rounds, scenario.most_rounds) + 1):
            say(f"  round {number_of_round}")
            rounds.append(scenario.round(context, cells))
        results[scenario] = report.rows_of(scenario, rounds)
        chosen = {
            "seconds": context.seconds,
            "rounds": context.rounds,
            "names": context.names,
            "quick": context.quick,
        }
        versions = {name: server.version for name, server in servers.items()}
        content = report.document(chosen, versions, left_out, kinds, context.remarks, results)
        content["load"] = {"before": load, "after": os.getloadavg()[0]}
        tables = [report.table(scenario, results[scenario])]
        if name == "budget":  # too wide a table for any terminal
            tables = [table for server in servers for table in page.Run(content, server).steps()]
        say("\n" + "\n\n".join(tables))
        report.write_json(json_path, content)  # after each scenario: a run that is broken off has what it had
    say(f"\nFigures: {json_path}")
    say(plot.draw(content, svg_path) if content else "Nothing was measured.")
    return 2 if context.failures else 0, content
