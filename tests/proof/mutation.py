"""Mutants: small mistakes put into the modules that decide, one at a time. The tests should fail with each of them.

``python -m tests.proof.mutation --count 100``, with ``pip install cosmic-ray``. Each job has a copy of the project, so
that nothing is changed here. The tests run once without a mistake, which tells how long each takes; then the quick ones
go first. A sample is drawn by ``--seed``; the mutants that survive are shown as differences.
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
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
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
#: What runs on SQLite and in memory; a mutant that makes a test hang is killed by its time limit.
TESTS = (
    "tests/contract",
    "tests/unit/test_acquisition.py",
    "tests/unit/test_claims.py",
    "tests/unit/test_control.py",
    "tests/unit/test_many_permits.py",
    "tests/unit/test_outages.py",
    "tests/proof/test_interleavings.py",
)
COMMAND = "{python} -m pytest -q -n {workers} --maxschedchunk 4 --timeout 90 -p no:cacheprovider"
PATIENCE = 1200.0
#: Seconds that all quick tests take together, by one process.
QUICK = 25.0
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
    os.environ.update(PYTHONPATH=str(directory), PYTHONDONTWRITEBYTECODE="1", SQLSEM_TEST_SERVERS="none")


def order(command: str, tests: list[str]) -> list[list[str]]:
    """Run the tests as they are. Return the quick ones, and the others.

    Raises:
        SystemExit: A test fails without a mistake.
    """
    enter_copy()
    ran = subprocess.run([*command.split(), "-vv", "--durations=0", *tests], capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"the tests fail without a mutant:\n{ran.stdout[-4000:]}")
    seconds: Counter[str] = Counter()
    for duration, test in DURATION.findall(ran.stdout):
        seconds[test] += float(duration)
    quick, rest, spent = [], [], 0.0
    for test in sorted(seconds, key=lambda each: seconds[each]):
        spent += seconds[test] + 0.01
        (quick if spent <= QUICK else rest).append(test)
    print(f"{len(quick)} tests go first, then {len(rest)}", flush=True)
    return [quick, rest]


def judge(mutant: Any, command: str) -> Any:
    """Run the tests with one mutant. Return what came of it."""
    from cosmic_ray.mutating import mutate_and_test

    return mutate_and_test([mutant], command, PATIENCE)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.mutation", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="how many mutants are tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=3, help="test processes of a job")
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=list(MODULES), metavar="PATH")
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    options = parser.parse_args()
    known = mutants(options.modules)
    chosen = random.Random(options.seed).sample(known, min(options.count, len(known)))
    print(f"{len(chosen)} of {len(known)} mutants, seed {options.seed}", flush=True)
    command = COMMAND.format(python=sys.executable, workers=options.workers)
    stages = []
    for tests in order(command, options.tests):
        # A list of a thousand tests is too long for a command line.
        listed = Path(tempfile.mkdtemp(prefix="mutants-"), "tests")
        listed.write_text("\n".join(tests))
        stages.append(f"{command} -x @{listed}")
    command = shlex.join(["sh", "-c", " && ".join(stages)])
    outcomes: Counter[tuple[str, str]] = Counter()
    with ProcessPoolExecutor(options.jobs, initializer=enter_copy) as pool:
        for mutant, result in zip(chosen, pool.map(judge, chosen, [command] * len(chosen)), strict=True):
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
