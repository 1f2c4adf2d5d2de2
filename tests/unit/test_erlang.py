"""The formulas behind "how many slots": against values that are known, and against a queue that is played through."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from django_sqlsem.core.erlang import erlang_b, erlang_c, forecast


@pytest.mark.parametrize(
    ("load", "slots", "lost"),
    # One and two slots by hand; the others from published tables of Erlang B: 1 % and 10 % loss.
    [(1, 1, 1 / 2), (1, 2, 1 / 5), (2, 3, 4 / 19), (4.461, 10, 0.01), (7.511, 10, 0.10), (84.064, 100, 0.01)],
)
def test_erlang_b_is_as_in_the_tables(load: float, slots: int, lost: float) -> None:
    assert erlang_b(load, slots) == pytest.approx(lost, rel=2e-3)


@pytest.mark.parametrize(
    ("load", "slots", "waits"),
    # With one slot it is the load; with two a**2 / (2 + a); three at a load of two, by hand.
    [(0.3, 1, 0.3), (1, 2, 1 / 3), (1.5, 2, 2.25 / 3.5), (2, 3, 4 / 9), (0, 3, 0), (3, 3, 1), (9, 3, 1)],
)
def test_erlang_c_is_as_by_hand(load: float, slots: int, waits: float) -> None:
    assert erlang_c(load, slots) == pytest.approx(waits)


def test_a_thousand_slots_overflow_nothing() -> None:
    assert 0 < erlang_c(980, 1000) < 1
    assert erlang_b(1e6, 1000) == pytest.approx(0.999, abs=1e-3)


def test_one_slot_waits_as_the_textbook_says() -> None:
    """M/M/1: the mean wait is hold * load / (1 - load)."""
    found = forecast(0.8, 10.0, 1, 30.0)
    assert found.mean_wait == pytest.approx(40.0)
    assert found.p95_wait == pytest.approx(50.0 * math.log(16))
    assert found.refused == pytest.approx(0.8 * math.exp(-0.6))
    assert forecast(0.8, 10.0, 1, None).refused is None


def test_too_few_slots_and_no_patience() -> None:
    found = forecast(4.0, 2.0, 3, 5.0)
    assert (found.used, found.waits, found.mean_wait, found.refused) == (1.0, 1.0, math.inf, 0.25)
    found = forecast(2.0, 2.0, 3, 0)
    assert (found.refused, found.mean_wait) == (pytest.approx(4 / 19), 0)


def test_a_queue_that_is_played_through_does_the_same() -> None:
    chance = random.Random(7)
    slots, hold, apart = 3, 4.0, 1.8  # seconds
    free, now, waits = [0.0] * slots, 0.0, []
    for _ in range(200_000):
        now += chance.expovariate(1 / apart)
        begins = max(now, free[0])
        waits.append(begins - now)
        heapq.heapreplace(free, begins + chance.expovariate(1 / hold))
    found = forecast(hold / apart, hold, slots, 5.0)
    assert sum(each > 0 for each in waits) / len(waits) == pytest.approx(found.waits, rel=0.05)
    assert sum(waits) / len(waits) == pytest.approx(found.mean_wait, rel=0.1)
    assert sorted(waits)[int(0.95 * len(waits))] == pytest.approx(found.p95_wait, rel=0.1)
    assert sum(each > 5 for each in waits) / len(waits) == pytest.approx(found.refused, rel=0.1)
