"""Whatever the order of their statements, clients of the stored procedures keep what is promised."""

from __future__ import annotations

import os
import random
import time
from itertools import combinations_with_replacement

import pytest

from tests.backends.applock.plain import ALIAS, skip_unless_covered
from tests.proof.procedures import OPERATIONS, Explorer, Scenario, World
from tests.support import databases

skip_unless_covered()

#: What goes on at once in a short run, the number of slots, and how many of them are held at the beginning.
SHORT = [
    Scenario(("release", "try"), 1, 1),
    Scenario(("release", "acquire"), 1, 1),
    Scenario(("release", "acquire"), 2, 2),
    Scenario(("try", "purge name"), 1, 0),
    Scenario(("acquire", "pause"), 1, 0),
]
#: With one crash, at any point.
FAULTY = [Scenario(("try", "shrink"), 2, 0), Scenario(("acquire", "purge name"), 2, 0)]
#: The first in line waits for one slot while another one becomes free, and somebody comes.
THREE = Scenario(("release", "acquire", "acquire"), 2, 2)
#: For how long ``make proof`` runs, in seconds.
PROOF_SECONDS = float(os.environ.get("PROOF_SECONDS", "600"))


@pytest.fixture
def mistake():
    """The name of the mistake that is put back, where a test has one as its parameter."""
    return ""


@pytest.fixture
def explorer(committed, mistake):
    world = World(ALIAS, mistake=MISTAKES[mistake][0]) if mistake else World(ALIAS)
    yield Explorer(world)
    world.close()
    databases.assert_nothing_held(ALIAS)


def explored(explorer, scenario, **options):
    found = explorer.explore(scenario, **options)
    print(found)
    assert not found.broken, str(found)
    return found


@pytest.mark.parametrize("scenario", SHORT, ids=str)
def test_no_order_of_two_breaks_a_promise(explorer, scenario):
    assert explored(explorer, scenario).exhausted


_SHARED = "@resource, 'Shared', 'Session', @wait, 'public';\n                    IF @rc >= 0 AND @full"
#: By what is put back: what is written in internal_acquire_1, and what in its place; what goes on at once; what breaks.
MISTAKES = {
    "newcomers do not yield": (
        ("(@fair > 0 AND (@low = 0", "(@take < 0 AND (@low = 0"),
        THREE,
        "was served before",
    ),
    "a gate is left closed": (
        ("IF @head = 1 AND (@result <> -4", "IF @head = 1 AND (@result < -4"),
        Scenario(("release", "acquire"), 1, 1),
        "are left",
    ),
    "tokens stand still": (
        ("THEN @token + 1 ELSE @now END", "THEN @token ELSE @now END"),
        Scenario(("release", "acquire"), 1, 1),
        "old token",
    ),
    "a pause is not looked at": (
        ("WHEN @paused = 1 THEN -4", "WHEN @take < 0 THEN -4"),
        Scenario(("acquire", "pause"), 1, 0),
        "in a pause",
    ),
    "a slot is shared": (
        ("@resource, 'Exclusive', 'Session', @wait, 'public';\n                    IF @rc >= 0 AND @full", _SHARED),
        Scenario(("acquire", "acquire"), 1, 0),
        "2 slots are held of 1",
    ),
    "slots are kept while standing in line": (
        ("IF (@head = 0 OR (@own <> @gate AND @take > 1))", "IF (@take < 0 OR (@own <> @gate AND @take > 1))"),
        Scenario(("acquire two", "acquire two"), 2, 0),
        "slots are free, and client",
    ),
}


@pytest.mark.parametrize("scenario", FAULTY, ids=str)
def test_no_crash_breaks_a_promise(explorer, scenario):
    assert explored(explorer, scenario, faults=1).exhausted


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_scheduler_finds_a_mistake_that_is_put_back(explorer, mistake):
    _, scenario, broken = MISTAKES[mistake]
    found = explorer.explore(scenario, late=0)
    print(found)
    assert broken in found.broken


def _scenarios(size):
    """All sets of ``size`` operations: with everything held, and with a slot free."""
    for names in combinations_with_replacement(OPERATIONS, size):
        names = tuple(sorted(names, key=lambda name: not OPERATIONS[name].holder))
        holders = sum(OPERATIONS[name].holder for name in names)
        yield from (Scenario(names, max(1, holders), held) for held in sorted({max(1, holders), holders}))
        yield Scenario(names, max(1, holders) + 1, holders)


@pytest.mark.soak
@pytest.mark.parametrize("faults", [0, 1])
def test_every_pair_in_every_order(explorer, faults):
    _run_many(explorer, list(_scenarios(2)), faults)


@pytest.mark.soak
def test_three_at_once_in_every_order_that_there_is_time_for(explorer):
    _run_many(explorer, list(_scenarios(3)), 0)


def _run_many(explorer, scenarios, faults):
    seed = int(os.environ.get("PROOF_SEED", random.randrange(10**6)))
    print(f"PROOF_SEED={seed}")
    random.Random(seed).shuffle(scenarios)
    until, totals = time.monotonic() + PROOF_SECONDS, {"scenarios": 0, "schedules": 0, "states": 0, "runs": 0}
    for scenario in scenarios:
        if time.monotonic() > until:
            break
        found = explored(explorer, scenario, faults=faults, until=until)
        totals["scenarios"] += found.exhausted
        for what in ("schedules", "states", "runs"):
            totals[what] += getattr(found, what)
    print(f"with {faults} faults: {totals} of {len(scenarios)} scenarios")
