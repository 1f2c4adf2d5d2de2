"""The command line: what to measure, with whom, for how long."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
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
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmarks. Returns 0; 1 if a server that was asked for does not answer; 2 if a contender failed."""
    parse = parser()
    options = parse.parse_args(arguments)
    if options.peers and "none" in options.peers and len(options.peers) > 1:
        parse.error(f"argument --peers: 'none' excludes the others: {' '.join(options.peers)}")
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
    from benchmarks import servers as server_side

    servers, missing = server_side.find(list(options.database or DATABASES))
    missing = {name: f"does not answer: {reason}" for name, reason in missing.items()}
    if options.database and missing:
        for name, reason in missing.items():
            say(f"{name} {reason}")
        variables = ", ".join(f"SQLSEM_TEST_{name.upper()}_URL" for name in missing)
        say(f"Nothing was measured, since {', '.join(missing)} was asked for. {variables} can say where it is.")
        return 1
    with server_side.databases(servers) as databases:
        os.environ[ENVIRONMENT] = json.dumps(databases)
        os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
        migrate(databases)
        return measure(options, servers, missing)


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


def measure(options: argparse.Namespace, servers: dict[str, Any], left_out: dict[str, str]) -> int:
    """Measure, print the tables, and write JSON and plot. Returns the exit status."""
    from benchmarks import plot, report
    from benchmarks.scenarios import all_scenarios
    from benchmarks.scenarios.base import Context

    known = all_scenarios()
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
    )
    json_path, svg_path = options.json or DIRECTORY / "results.json", options.svg or DIRECTORY / "results.svg"
    results: dict[Any, list[report.Row]] = {}
    for name in dict.fromkeys(options.scenario or known):
        scenario = known[name]
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
        say("\n" + report.table(scenario, results[scenario]))
        chosen = {
            "seconds": context.seconds,
            "rounds": context.rounds,
            "names": context.names,
            "quick": context.quick,
        }
        versions = {name: server.version for name, server in servers.items()}
        content = report.document(chosen, versions, left_out, kinds, context.remarks, results)
        report.write_json(json_path, content)  # after each scenario: a run that is broken off has what it had
    say(f"\nFigures: {json_path}")
    say(plot.draw(content, svg_path) if results else "Nothing was measured.")
    return 2 if context.failures else 0
