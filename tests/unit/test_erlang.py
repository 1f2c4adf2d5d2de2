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
    found = forecast(0.8, 10.0, 1, None)
    assert (found.mean_wait, found.waits, found.refused) == (pytest.approx(40.0), pytest.approx(0.8), 0)


def test_patience_lies_between_the_two_formulas() -> None:
    found = [forecast(2.0, 2.0, 3, patience) for patience in (0, 1.0, 5.0, 1000.0, None)]
    assert found[0].refused == pytest.approx(erlang_b(2, 3))
    assert found[-2].waits == pytest.approx(found[-1].waits) == pytest.approx(erlang_c(2, 3))
    assert found[-2].mean_wait == pytest.approx(found[-1].mean_wait, rel=1e-6)
    for part in ("waits", "mean_wait", "used"):
        values = [getattr(each, part) for each in found[:-1]]
        assert values == sorted(values), part


def test_too_few_slots() -> None:
    assert forecast(4.0, 2.0, 3, None).mean_wait == math.inf
    for patience in (1000.0, 1e6):  # the others are served
        assert forecast(4.0, 2.0, 3, patience).refused == pytest.approx(0.25)
    assert forecast(3.0, 2.0, 3, 5.0).refused == pytest.approx(forecast(3.0001, 2.0, 3, 5.0).refused, rel=1e-3)


# Seconds between two calls: three slots can keep up with the first, and cannot with the other.
@pytest.mark.parametrize(("patience", "apart"), [(None, 1.8), (3.0, 1.8), (3.0, 1.2)])
def test_a_queue_that_is_played_through_does_the_same(patience: float | None, apart: float) -> None:
    slots, hold = 3, 4.0
    chance = random.Random(7)
    free, now, waits, refused = [0.0] * slots, 0.0, [], 0
    for _ in range(150_000):
        now += chance.expovariate(1 / apart)
        wait = max(0.0, free[0] - now)
        if patience is not None and wait > patience:
            refused, wait = refused + 1, patience
        else:
            heapq.heapreplace(free, now + wait + chance.expovariate(1 / hold))
        waits.append(wait)
    found = forecast(hold / apart, hold, slots, patience)
    assert sum(each > 0 for each in waits) / len(waits) == pytest.approx(found.waits, rel=0.05)
    assert sum(waits) / len(waits) == pytest.approx(found.mean_wait, rel=0.1)
    assert refused / len(waits) == pytest.approx(found.refused, rel=0.05, abs=1e-9)
