"""When a slot may be free: the estimate behind Retry-After, alone and as the tables feed it."""

from __future__ import annotations

import dataclasses
import datetime

import pytest

from django_sqlsem import AcquireTimeoutError, semaphore
from django_sqlsem.models import SlotRow
from django_sqlsem.runtime import callers
from django_sqlsem.snapshots import (
    LEAST,
    LONGEST_ESTIMATE,
    HolderSnapshot,
    SemaphoreSnapshot,
    SlotState,
    WaiterSnapshot,
    expected_waits,
    retry_after,
)

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def holder(age, left=60.0):
    return HolderSnapshot("x", 1, SlotState.HELD, 1, "host", 1, "thread", "", "", NOW, NOW, age, left)


def waiters(count):
    return (WaiterSnapshot("x", "host", 1, "thread", "", "", NOW, 1.0, count, 1),) if count else ()


def snapshot(ages, *, slots=None, usual=None, waiting=0, away=0):
    holders = tuple(holder(age) for age in ages)
    return SemaphoreSnapshot(
        "x", "semaphore", slots or len(ages), 1, None, False, holders, waiters(waiting), usual_hold=usual, away=away
    )


@pytest.mark.parametrize(
    ("shot", "expected"),
    [
        pytest.param(snapshot([4.0], usual=10.0), 6.0, id="what is left of the usual hold"),
        pytest.param(snapshot([4.0, 9.0], usual=20.0), 11.0, id="the first of two"),
        pytest.param(snapshot([30.0], usual=20.0), 2.0, id="over time: a tenth of the usual hold"),
        pytest.param(snapshot([4.0], usual=10.0, waiting=2), 26.0, id="two holds of waiters before"),
        pytest.param(snapshot([4.0], usual=10.0, away=2), 26.0, id="two holds of tasks that come back"),
        pytest.param(snapshot([0.0, 5.0], usual=10.0, waiting=3), 20.0, id="played through on two slots"),
        pytest.param(snapshot([7.0]), 7.0, id="nothing measured: half done"),
        pytest.param(snapshot([4.0], slots=2, usual=10.0), LEAST, id="a slot is free"),
        pytest.param(snapshot([0.1], usual=0.2), LEAST, id="never less than a second"),
        pytest.param(snapshot([1.0], usual=10.0, waiting=10_000_000), LONGEST_ESTIMATE, id="never more than a minute"),
        pytest.param(snapshot([], slots=1), LEAST, id="nobody holds"),
    ],
)
def test_estimate(shot, expected):
    assert retry_after(shot) == pytest.approx(expected)


def test_it_grows_with_the_place_in_line():
    shot = snapshot([0.0, 0.0, 0.0], usual=3.0, waiting=5)
    assert [retry_after(shot, before) for before in (0, 1, 2, 3, 6)] == [3.0, 3.0, 3.0, 6.0, 9.0]


def test_how_long_slots_are_held_is_measured_at_the_release(database):
    lock = semaphore("measured", 1, timeout=0, using=database)
    lock.acquire().release()
    row = SlotRow.objects.using(database).get()
    assert 0 < row.held_us < 5e6
    # As if it had always been held for ten seconds: one more short hold weighs an eighth.
    SlotRow.objects.using(database).update(held_us=10_000_000)
    with lock:
        assert lock.status().usual_hold == pytest.approx(10.0)
        # Another flow of control is refused.
        with pytest.raises(AcquireTimeoutError) as caught:
            refused(lock)
        assert 8.0 < caught.value.retry_after <= 10.0
    assert 8.7e6 < SlotRow.objects.using(database).get().held_us < 9.5e6


def refused(lock):
    with callers.as_stranger():
        lock.acquire()


@pytest.mark.parametrize(
    ("shot", "expected"),
    [
        pytest.param(snapshot([4.0], usual=10.0, waiting=2), [6.0], id="what is left of the usual hold"),
        pytest.param(snapshot([0.0, 5.0], usual=10.0), [], id="nobody waits"),
        pytest.param(snapshot([4.0], waiting=1), [4.0], id="nothing measured: half done"),
        pytest.param(snapshot([], slots=2, waiting=1), [None], id="nothing is known"),
        pytest.param(dataclasses.replace(snapshot([4.0], usual=10.0, waiting=1), paused=True), [None], id="paused"),
        pytest.param(
            dataclasses.replace(snapshot([4.0], usual=10.0, waiting=1), paused=True, resumes_in=90.0),
            [90.0],
            id="paused for a time",
        ),
    ],
)
def test_how_soon_each_waiter_is_served(shot, expected):
    assert expected_waits(shot) == [each if each is None else pytest.approx(each) for each in expected]


def test_who_wants_more_waits_for_more_and_keeps_those_behind_waiting():
    takes = [(1, 2), (1, 1), (0, 1)]  # slots, threads of the process; 0: all slots
    line = tuple(WaiterSnapshot("x", "h", 1, "t", "", "", NOW, 1.0, threads, take) for take, threads in takes)
    shot = dataclasses.replace(snapshot([2.0, 6.0], usual=10.0), waiters=line)
    # The slots are free in 4 and 8 s; the first process takes both for 10 s each, the second the first of these.
    assert expected_waits(shot) == [4.0, 14.0, 24.0]
