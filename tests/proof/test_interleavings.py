"""Whatever the order of their statements, clients of the rows backend keep what is promised."""

from __future__ import annotations

import os
import random
import time
from itertools import combinations_with_replacement

import pytest
from django.db import connections

from django_sqlsem.backends.base import Queue, Waited
from django_sqlsem.backends.rows import acquire, handoff
from tests.proof import operations
from tests.proof.explore import Explorer
from tests.proof.operations import OPERATIONS, Scenario, base_for
from tests.proof.world import Base, World, stopped_clock

#: What goes on at once in a short run.
PAIRS = [
    ("acquire", "acquire"),
    ("acquire", "release"),
    ("acquire", "hand over"),
    ("acquire", "give up"),
    ("release", "release"),
    ("hand over", "give up"),
    ("heartbeat", "expire"),
    ("renew", "expire"),
    ("release", "revoke"),
    ("try", "purge name"),
    ("acquire", "pause"),
    ("acquire", "shrink"),
    ("acquire", "shrink for a time"),
    ("release", "shrink for a time"),
    ("try", "grow for a time"),
    ("heartbeat", "shrink for a time"),
]
THREE = [("acquire", "release", "give up"), ("hand over", "heartbeat", "expire")]
#: With one fault: a crash or a lost connection at each point, or a busy database.
FAULTY = [("acquire", "release"), ("hand over", "give up"), ("try", "renew")]
#: What a short run does on PostgreSQL, where a schedule takes ten times as long: what has found mistakes there.
BRIEF = [("acquire", "release"), ("release", "revoke"), ("hand over", "heartbeat", "expire")]
#: For how long ``make proof`` runs on each database, in seconds.
PROOF_SECONDS = float(os.environ.get("PROOF_SECONDS", "600"))


@pytest.fixture
def explorer(database):
    if connections[database].vendor not in ("sqlite", "postgresql"):
        pytest.skip("steps are told apart on SQLite and PostgreSQL")
    with stopped_clock(database):
        world = World(database)
        explorer = Explorer(world)
        yield explorer
        explorer.close()
        world.close()


def bases(names):
    """Everything held; the same, and one more waits; one slot free."""
    return [base_for(names), base_for(names, line=1), base_for(names, free=1)]


def short(explorer, names):
    """Leave to ``make proof``, which runs all of them, what takes too long on PostgreSQL."""
    if explorer.world.postgresql and names not in BRIEF:
        pytest.skip("on PostgreSQL by make proof")


def explored(explorer, names, base, **options):
    found = explorer.explore(Scenario(names, base), **options)
    assert not found.broken, str(found)
    return found


@pytest.mark.parametrize("names", PAIRS, ids=" | ".join)
def test_no_order_of_two_breaks_a_promise(explorer, names):
    short(explorer, names)
    for base in bases(names):
        assert explored(explorer, names, base).exhausted


@pytest.mark.parametrize("names", THREE, ids=" | ".join)
def test_no_order_of_three_and_a_waiter_breaks_a_promise(explorer, names):
    short(explorer, names)
    assert explored(explorer, names, base_for(names, line=1)).exhausted


@pytest.mark.parametrize("names", FAULTY, ids=" | ".join)
def test_no_crash_and_no_lost_connection_breaks_a_promise(explorer, names):
    short(explorer, (*names, "with a fault"))
    assert explored(explorer, names, base_for(names, line=1), faults=1).exhausted


def test_two_that_make_a_new_name_at_once(explorer):
    for names in (("acquire", "acquire"), ("acquire", "try")):
        explored(explorer, names, Base(slots=1, held=0, there=False))


def test_a_lease_that_has_run_out_goes_to_one(explorer):
    for names in (("acquire", "acquire"), ("acquire", "renew"), ("heartbeat", "housekeeping")):
        explored(explorer, names, base_for(names, expired=1))


# The harness finds mistakes that are put back.


def no_second_look(monkeypatch, world):
    monkeypatch.setattr(operations, "second_look", lambda *_: Waited((), Queue(ahead=0)))
    # PostgreSQL may lose a wake-up in one statement, SQLite between two.
    return ("acquire", "release" if world.postgresql else "hand over"), 0, "wait for a heartbeat"


def claim_ignores_the_lease(monkeypatch, _world):
    monkeypatch.setattr(acquire, "_TAKE_AND_TELL", acquire._TAKE_AND_TELL.replace("{s.free}", "1 = 1"))
    return ("try", "renew"), 0, "its slot was given away"


def newcomers_do_not_yield(monkeypatch, _world):
    monkeypatch.setitem(acquire._WANTED, "newcomer", "0")
    monkeypatch.setattr(handoff, "free_sql", lambda dialect, rows, _, free=handoff.free_sql: free(dialect, rows, False))
    return ("release", "try"), 1, "was served before"


def tokens_stand_still(monkeypatch, _world):
    monkeypatch.setattr(acquire, "_TAKE_AND_TELL", acquire._TAKE_AND_TELL.replace(acquire.NEXT_TOKEN, "token"))
    return ("try", "release"), 0, "old token"


def who_leaves_looks_for_no_grant(monkeypatch, _world):
    monkeypatch.setattr(handoff, "discard", lambda *_: False)
    return ("give up", "hand over"), 0, "nobody has them"


def release_frees_whoever_has_the_slot(monkeypatch, _world):
    free = handoff.free_sql

    def any_permit(dialect, rows, unwanted):
        return free(dialect, rows, unwanted).replace(" AND permit_id = %(permit_id)s", "")

    monkeypatch.setattr(handoff, "free_sql", any_permit)
    return ("release", "revoke", "try"), 0, "its slot was given away"


MISTAKES = [
    no_second_look,
    claim_ignores_the_lease,
    newcomers_do_not_yield,
    tokens_stand_still,
    who_leaves_looks_for_no_grant,
    release_frees_whoever_has_the_slot,
]


@pytest.fixture
def fresh_texts():
    """Texts are made once."""
    yield
    acquire.take_sql.cache_clear()
    acquire.take_or_stand.cache_clear()


@pytest.mark.leaves_held
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_the_scheduler_finds_a_mistake_that_is_put_back(explorer, fresh_texts, monkeypatch, mistake):
    names, line, broken = mistake(monkeypatch, explorer.world)
    short(explorer, names)
    acquire.take_sql.cache_clear()
    acquire.take_or_stand.cache_clear()
    scenario = Scenario(names, base_for(names, line=line))
    found = explorer.explore(scenario)
    print(found)
    assert broken in found.broken
    # It can be run again, and is the shortest that was found.
    again, _, trace = explorer.replay(scenario, found.schedule)
    assert again == found.broken
    assert trace == found.trace


# Long runs, by ``make proof``.


def _all(size):
    return list(combinations_with_replacement(OPERATIONS, size))


def _run_many(explorer, scenarios, faults, until, seed=None):
    totals = {"scenarios": 0, "schedules": 0, "states": 0, "runs": 0}
    for names, base in scenarios:
        if time.monotonic() > until:
            break
        found = explored(explorer, names, base, faults=faults, until=until, seed=seed)
        totals["scenarios"] += found.exhausted
        for what in ("schedules", "states", "runs"):
            totals[what] += getattr(found, what)
    print(f"with {faults} faults: {totals} of {len(scenarios)} scenarios")


@pytest.mark.soak
@pytest.mark.parametrize("faults", [0, 1])
def test_every_pair_in_every_order(explorer, faults):
    scenarios = [(names, base) for names in _all(2) for base in bases(names)]
    _run_many(explorer, scenarios, faults, time.monotonic() + PROOF_SECONDS)


@pytest.mark.soak
def test_three_at_once_in_every_order_that_there_is_time_for(explorer):
    seed = int(os.environ.get("PROOF_SEED", random.randrange(10**6)))
    print(f"PROOF_SEED={seed}")
    scenarios = [(names, base_for(names, line=1)) for names in _all(3)]
    random.Random(seed).shuffle(scenarios)
    _run_many(explorer, scenarios, 0, time.monotonic() + PROOF_SECONDS, seed)
