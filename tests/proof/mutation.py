"""Mutants: small mistakes put into the modules that decide, one at a time. The tests should fail with each of them.

``python -m tests.proof.mutation --count 100``, with ``pip install cosmic-ray pytest-cov``. Each job has a copy of the
project, so that nothing is changed here. The tests run once without a mistake, to see how long each takes and which
lines it runs. With a mutant only those run that run its line, quick ones before slow ones; with ``--every`` then all
others, as a line may also run in a process that a test starts. A line that no test runs may belong to a server:
``SQLSEM_TEST_SERVERS=all`` takes the servers along. A sample is drawn by ``--seed``; the mutants that survive are shown
as differences.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: What calls the procedures: only with a server in ``SQLSEM_TEST_MSSQL_URL``.
CALLERS = (
    "backends/applock/acquire.py",
    "backends/applock/calls.py",
    "backends/applock/line.py",
    "backends/applock/possession.py",
    "backends/applock/sessions.py",
)
MODULES = (
    "backends/rows/acquire.py",
    "backends/rows/exclusive.py",
    "backends/rows/handoff.py",
    "backends/rows/queue.py",
    "backends/rows/renewal.py",
    "backends/rows/statements.py",
    "locks/permit.py",
    "runtime/acquisition.py",
    "runtime/keeper.py",
    "runtime/queue.py",
)
#: Of arithmetic one mistake of a kind is enough; ``X | Y`` are types; ``is`` and ``==`` are mostly the same.
LEFT_OUT = re.compile(
    r"core/ReplaceBinaryOperator_(?!Add_Sub$|Sub_Add$|Mul_Div$|Div_Mul$)"
    r"|core/ReplaceComparisonOperator_(?:Is_Eq|Eq_Is|IsNot_NotEq|NotEq_IsNot)$"
)
#: A mutant that makes a test hang is killed by its time limit.
TESTS = (
    "tests/backends/test_golden.py",
    "tests/contract",
    "tests/unit/test_acquisition.py",
    "tests/unit/test_claims.py",
    "tests/unit/test_control.py",
    "tests/unit/test_many_permits.py",
    "tests/unit/test_outages.py",
    "tests/unit/test_rwlock.py",
    "tests/unit/test_transactions.py",
    "tests/proof/test_interleavings.py",
)
COMMAND = "{python} -m pytest -q -n {workers} --maxschedchunk 4 --timeout {timeout} -p no:cacheprovider"
#: The time limit of a test, in seconds: the first number, and the second times what it takes without a mutant.
PATIENCE, TIMES = 30.0, 6
#: How long all tests together may take, in seconds.
LONGEST = 1800.0
#: Seconds that the tests of the first stage take together, by one process.
FIRST = 20.0
DURATION = re.compile(r"^(\d+\.\d+)s (?:setup|call|teardown) +(\S.*)$", re.MULTILINE)


def mutants(modules: list[str]) -> list[Any]:
    """Return all mutants of some modules."""
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import WorkDB, use_db

    with use_db(":memory:", WorkDB.Mode.create) as db:
        init([Path("django_sqlsem", each) for each in modules], db, {})
        found = [item.mutations[0] for item in db.work_items]
    found = [each for each in found if not LEFT_OUT.match(each.operator_name)]
    return sorted(found, key=lambda each: (str(each.module_path), each.operator_name, each.occurrence))


def enter_copy() -> None:
    """Go to a copy of the project, which is this job's own."""
    directory = Path(tempfile.mkdtemp(prefix="mutants-"), "project")
    shutil.copytree(ROOT, directory, ignore=shutil.ignore_patterns(".git", ".venv", "build", "*.pyc", ".*_cache"))
    os.chdir(directory)
    os.environ.update(PYTHONPATH=str(directory), PYTHONDONTWRITEBYTECODE="1")
    os.environ.setdefault("SQLSEM_TEST_SERVERS", "none")


@dataclass(frozen=True)
class Suite:
    """What is known of the tests.

    Attributes:
        seconds: How long each test takes.
        of_line: The tests that run a line of a module, in their own process.
    """

    seconds: dict[str, float]
    of_line: dict[tuple[str, int], set[str]]

    def near(self, mutant: Any) -> set[str]:
        """Return the tests that run a mutant's lines."""
        path, lines = str(mutant.module_path), range(mutant.start_pos[0], mutant.end_pos[0] + 1)
        return set().union(*(self.of_line.get((path, line), ()) for line in lines))

    def stages(self, mutant: Any, *, every: bool) -> list[list[str]]:
        """Return which tests run with a mutant, stage by stage; ``every``: also those that don't run its line."""
        near = self.near(mutant)
        first: list[str] = []
        then: list[str] = []
        spent = 0.0
        for test in sorted(near, key=self.seconds.__getitem__):
            spent += self.seconds[test] + 0.01
            (first if spent <= FIRST else then).append(test)
        return [first, then, sorted(self.seconds.keys() - near, key=self.seconds.__getitem__) if every else []]


def look(command: str, tests: list[str], modules: list[str]) -> Suite:
    """Run the tests as they are. A test that fails without a mistake is printed and left out."""
    from coverage import CoverageData

    enter_copy()
    told = ["-vv", "--durations=0", "--cov=django_sqlsem", "--cov-context=test", "--cov-report="]
    ran = subprocess.run([*command.format(timeout=300).split(), *told, *tests], capture_output=True, text=True)
    failing = set(re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", ran.stdout, re.MULTILINE))
    print(ran.stdout.splitlines()[-1], *sorted(failing), sep="\n", flush=True)
    seconds: defaultdict[str, float] = defaultdict(float)
    for duration, test in DURATION.findall(ran.stdout):
        if test not in failing:
            seconds[test] += float(duration)
    data = CoverageData(".coverage")
    data.read()
    of_line = {}
    for path in (f"django_sqlsem/{each}" for each in modules):
        for line, contexts in data.contexts_by_lineno(str(Path(path).resolve())).items():
            of_line[path, line] = {each.rsplit("|", 1)[0] for each in contexts} & seconds.keys()
    return Suite(dict(seconds), of_line)


def judge(mutant: Any, command: str, suite: Suite, every: bool) -> Any:
    """Run the tests with one mutant. Return what came of it."""
    from cosmic_ray.mutating import mutate_and_test

    directory = Path(tempfile.mkdtemp(prefix="mutant-"))
    commands = []
    for number, tests in enumerate(suite.stages(mutant, every=every)):
        if tests:
            # A list of a thousand tests is too long for a command line.
            listed = directory / str(number)
            listed.write_text("\n".join(tests))
            timeout = PATIENCE + TIMES * max(map(suite.seconds.__getitem__, tests))
            commands.append(f"{command.format(timeout=int(timeout))} -x @{listed}")
    try:
        return mutate_and_test([mutant], shlex.join(["sh", "-c", " && ".join(commands)]), LONGEST)
    finally:
        shutil.rmtree(directory)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.mutation", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="how many mutants are tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=3, help="test processes of a job")
    parser.add_argument("--every", action="store_true", help="also run the tests that do not run the line")
    parser.add_argument("--modules", nargs="+", choices=MODULES + CALLERS, default=list(MODULES), metavar="PATH")
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    options = parser.parse_args()
    known = mutants(options.modules)
    chosen = random.Random(options.seed).sample(known, min(options.count, len(known)))
    print(f"{len(chosen)} of {len(known)} mutants, seed {options.seed}", flush=True)
    command = COMMAND.format(python=sys.executable, workers=options.workers, timeout="{timeout}")
    suite = look(command, options.tests, options.modules)
    if not options.every:
        reached = [each for each in chosen if suite.near(each)]
        print(f"no test runs the lines of {len(chosen) - len(reached)}", flush=True)
        chosen = reached
    outcomes: Counter[tuple[str, str]] = Counter()
    with ProcessPoolExecutor(options.jobs, initializer=enter_copy) as pool:
        for mutant, result in zip(
            chosen, pool.map(judge, chosen, repeat(command), repeat(suite), repeat(options.every)), strict=True
        ):
            outcome = "survived" if not result.is_killed else "killed"
            outcomes[str(mutant.module_path), outcome] += 1
            failed = re.findall(r"^FAILED (\S+)", result.output or "", re.MULTILINE)
            print(outcome, mutant.operator_name, mutant.module_path, *mutant.start_pos, *failed[:1], flush=True)
            if outcome == "survived" or not failed:
                print(result.diff, (result.output or "")[-2000:] if outcome == "killed" else "", sep="\n", flush=True)
    for path in sorted({path for path, _ in outcomes}):
        print(f"{path}: {outcomes[path, 'killed']} killed, {outcomes[path, 'survived']} survived")
    survived = sum(number for (_, outcome), number in outcomes.items() if outcome == "survived")
    print(f"{len(chosen) - survived} of {len(chosen)} killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
