"""Many processes and threads fight for few slots: never too many inside, nobody fails, nothing is left."""

from __future__ import annotations

import os

import pytest

from tests.programs.contenders import fight
from tests.support.databases import held_rows, label, query

PROCESSES = 8
THREADS = 4
SLOTS = 3
#: How long they fight, in seconds.
FIGHT = 4.0
MIXED = 2.0


def check(database, counter, figures):
    print(f"\n{label(database)}: {figures}")
    assert not figures.errors, "\n".join(figures.errors)
    assert counter.peak == SLOTS
    assert counter.current == 0
    assert held_rows(database) == []
    assert query(database, "SELECT COUNT(*) FROM sqlsem_waiter") == [(0,)]
    assert sorted(figures.tokens) == [1, 2, 3]
    for tokens in figures.tokens.values():
        assert len(set(tokens)) == len(tokens)


def contend(database, counter, seconds):
    figures = fight("contend", PROCESSES, seconds, database, "fight", SLOTS, THREADS)
    check(database, counter, figures)
    assert counter.entered == figures.grants
    assert all(tally["grants"] for tally in figures.tallies)


def contend_mixed(database, counter, seconds):
    figures = fight("contend_mixed", PROCESSES // 2, seconds, database, "fight", SLOTS, THREADS, THREADS)
    check(database, counter, figures)
    assert sum(map(len, figures.tokens.values())) == counter.entered
    assert counter.entered > figures.grants


def test_eight_processes_with_four_threads_on_three_slots(database, counter):
    contend(database, counter, FIGHT)


def test_threads_and_tasks_with_timeouts_that_take_one_or_two(database, counter):
    contend_mixed(database, counter, MIXED)


@pytest.mark.soak
def test_eight_processes_with_four_threads_on_three_slots_for_long(database, counter):
    contend(database, counter, float(os.environ.get("SOAK_SECONDS", "20")))


@pytest.mark.soak
def test_threads_and_tasks_with_timeouts_for_long(database, counter):
    contend_mixed(database, counter, float(os.environ.get("SOAK_SECONDS", "20")))
