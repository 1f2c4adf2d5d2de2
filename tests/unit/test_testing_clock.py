"""``testing.clock()``: what takes time, in no time; on the real backends and on the one that ``TestCase`` gets."""

from __future__ import annotations

import asyncio
import datetime
import threading
import time

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.cache import caches
from django.db import connections
from django.test import AsyncRequestFactory

from django_sqlsem import (
    AcquireTimeoutError,
    PermitLostError,
    mutex,
    semaphore,
    testing,
)
from django_sqlsem.backends import get_backend
from django_sqlsem.claims import claim
from django_sqlsem.core import clocks
from django_sqlsem.refresh import BuildFailedError, refresh_every
from django_sqlsem.runtime import acquisition
from django_sqlsem.snapshots import LossReason
from tests.support import applocks
from tests.support.threads import wait_until
from tests.testapp.models import Inventory

pytestmark = pytest.mark.process_side

#: A wait that is jumped over takes less than this, and a real one of LONG seconds more.
SOON = 250
LONG = 600


@pytest.fixture
def quick():
    """The test takes no time to speak of."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < SOON


def test_a_lease_runs_out(world, quick):
    lock = mutex("reports", timeout=0, using=world)
    told = []
    with testing.clock() as now, lock as permit:
        permit.on_lost(lambda permit: told.append(permit.lost.reason))
        now.advance(30)
        permit.check()
        now.advance(61)
        assert permit.lost.reason is LossReason.EXPIRED
        with pytest.raises(PermitLostError, match="its lease ran out while this process did not run"):
            permit.check()
        wait_until(lambda: told == [LossReason.EXPIRED])
        assert now.elapsed == 91
        if not applocks.are_at(world):
            with lock as successor:  # seen from the database too: the slot is free
                assert successor.token > permit.token
                assert lock.status().held == 1
                assert permit.lost
    assert lock.status().held == 0


def test_a_lease_of_its_own(world, quick):
    with testing.clock() as now, mutex("reports", lease=500, using=world) as permit:
        now.advance(300)
        permit.check()
        now.advance(datetime.timedelta(seconds=501))
        assert permit.lost


def test_a_process_that_runs_on_renews(world, quick):
    lock = mutex("reports", timeout=0, using=world)
    with testing.clock() as now, lock as permit:
        for _ in range(2):
            now.advance(3600, renewed=True)
            permit.check()
        (holder,) = lock.status().holders
        assert 7200 <= holder.age < 7300
        assert holder.lease_left > 30
        with testing.held("others", total=1):
            assert lock.status().held == 1


def test_what_is_held_as_somebody_else_runs_out_too(world, quick):
    lock = mutex("reports", timeout=0, using=world)
    if applocks.are_at(world):
        pytest.skip("an application lock has no lease")
    with testing.clock() as now, testing.held(lock):
        assert lock.try_acquire() is None
        now.advance(61)
        with lock as permit:
            permit.check()


def test_a_wait_ends_at_once(world, quick):
    lock = semaphore("reports", slots=2, timeout=LONG, using=world)
    with testing.clock() as now, testing.held(lock) as others:
        with pytest.raises(AcquireTimeoutError, match=rf"became free within {LONG} s \(2 of 2 held") as caught:
            lock.acquire()
        assert now.elapsed == pytest.approx(LONG, abs=5)
        assert caught.value.holders[0].age == pytest.approx(LONG, abs=5)
        assert caught.value.retry_after == 60  # they have been held for long
        for other in others:
            other.check()  # time passed, and they were renewed


def test_a_wait_is_told_of_by_signals_and_decorators(world, quick, rf):
    @semaphore("reports", timeout=LONG, using=world)
    def view(request):
        raise AssertionError("it was let in")

    with testing.clock(), testing.held(semaphore("reports", using=world)):
        response = view(rf.get("/"))
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "60"


def test_max_hold_passes(world, quick):
    lock = mutex("reports", timeout=0, max_hold=100, using=world)
    with testing.clock() as now:
        permit = lock.acquire()
        now.advance(50, renewed=True)
        permit.check()
        now.advance(51, renewed=True)
        wait_until(lambda: permit.released)
        assert permit.lost.reason is LossReason.FORGOTTEN
        assert lock.status().held == 0


def test_a_wait_jumps_to_what_ends_it(world, quick):
    lock = mutex("reports", timeout=None, max_hold=100, using=world)
    first = lock.acquire()
    first.detach()
    with testing.clock() as now, lock as second:
        assert second.waited == pytest.approx(100, abs=5)
        assert now.elapsed == pytest.approx(100, abs=5)
        assert first.lost.reason is LossReason.FORGOTTEN


def test_another_threads_wait_ends_when_the_clock_is_moved(world, quick):
    lock, ended = mutex("reports", timeout=LONG, using=world), []

    def wait():
        try:
            lock.acquire()
        except AcquireTimeoutError as error:
            ended.append(error)
        finally:
            connections.close_all()

    with testing.clock() as now, testing.held(lock):
        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: waiting() == 1)
        now.advance(LONG - 50, renewed=True)
        assert not ended
        assert waiting() == 1
        now.advance(51, renewed=True)
        thread.join(SOON)
        assert len(ended) == 1


def waiting():
    from django_sqlsem.runtime.acquisition import State
    from django_sqlsem.runtime.keepers import all_acquisitions

    return sum(hold.state is State.QUEUED for hold in all_acquisitions())


def test_all_waits_may_jump_and_none(world, quick):
    lock, ended = mutex("reports", timeout=LONG, using=world), threading.Event()

    def wait():
        try:
            with pytest.raises(AcquireTimeoutError):
                lock.acquire()
            ended.set()
        finally:
            connections.close_all()

    with testing.held(lock):
        with testing.clock(autojump=True):
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join(SOON)
        assert ended.is_set()
        began = time.monotonic()
        with testing.clock(autojump=False), pytest.raises(AcquireTimeoutError):
            lock.acquire(timeout=0.3)
        assert time.monotonic() - began >= 0.3


def test_tasks(world, quick):
    lock = mutex("reports", timeout=LONG, using=world)

    async def main():
        with testing.clock() as now, testing.held(lock) as (permit,):
            with pytest.raises(AcquireTimeoutError):
                await lock.aacquire()  # of this very task, which could not move the clock
            task = asyncio.create_task(lock.aacquire())
            while waiting() == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            now.advance(LONG / 2, renewed=True)
            await asyncio.sleep(0.05)
            assert not task.done()
            now.advance(LONG, renewed=True)
            with pytest.raises(AcquireTimeoutError):
                await task
            task = asyncio.create_task(lock.aacquire())
            while waiting() == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await permit.arelease()
            await (await task).arelease()

    asyncio.run(main())


def test_what_a_task_calls_in_a_thread_jumps_and_the_other_way_round(world, quick):
    lock = semaphore("reports", timeout=LONG, using=world)

    async def main():
        with testing.clock(), testing.held(lock), pytest.raises(AcquireTimeoutError):
            await sync_to_async(lock.acquire)()

    asyncio.run(main())

    @semaphore("reports", timeout=LONG, using=world)
    async def view(request):
        raise AssertionError("it was let in")

    with testing.clock(), testing.held(semaphore("reports", using=world)):
        assert async_to_sync(view)(AsyncRequestFactory().get("/")).status_code == 503


def test_periods_pass(world, quick):
    caches["default"].clear()
    built = []

    def build():
        built.append(1)
        return len(built)

    prices = refresh_every("prices", 3600, build, using=world)
    with testing.clock() as now:
        assert [prices(), prices()] == [1, 1]
        now.advance(3500)
        assert prices() == 1
        now.advance(101)
        assert [prices(), prices()] == [2, 2]
    assert prices() == 2


def test_a_claim_runs_out(database, quick):
    if applocks.are_at(database):
        pytest.skip("an application lock has no lease")
    row = Inventory.objects.using(database).create()
    rows = Inventory.objects.using(database).order_by("pk")
    with testing.clock() as now:
        first = claim(rows, using=database)
        with pytest.raises(PermitLostError), first:  # noqa: PT012 - its end raises
            now.advance(61)
            with claim(rows, using=database) as second:  # the row was given back, and is taken by somebody else
                assert second.one.pk == row.pk
        assert rows.get().status == "Calculated"


def test_after_a_build_that_failed(world, quick):
    caches["default"].clear()
    built = []

    def build():
        built.append(1)
        if len(built) == 1:
            raise ZeroDivisionError
        return "a price"

    prices = refresh_every("prices", 3600, build, retry_after=300, using=world)
    with testing.clock() as now:
        with pytest.raises(ZeroDivisionError):
            prices()
        with pytest.raises(BuildFailedError, match=r"failed .* ago"):
            prices()
        now.advance(301)
        assert prices() == "a price"


def test_it_refuses_nonsense(world):
    with testing.clock() as now:
        with pytest.raises(ValueError, match="seconds must be from 0"):
            now.advance(-1)
        with pytest.raises(TypeError, match="seconds must be seconds"):
            now.advance("61")
        now.advance(0)
    with pytest.raises(RuntimeError, match="block has ended"):
        now.advance(1)


def test_it_nests_and_ends_with_its_block_however_that_ends(world, quick):
    before = clocks.boot_now()
    lock = mutex("reports", timeout=LONG, using=world)

    def block():
        with testing.clock() as outer:
            with testing.clock(autojump=False) as inner:
                inner.advance(1000)
            assert outer.elapsed == 0
            with testing.held(lock), pytest.raises(AcquireTimeoutError):
                lock.acquire()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert acquisition.jumper is None
    assert clocks.boot_now() - before >= 1000 + LONG  # it never goes back
    with lock as permit:  # what comes later is as it should be
        permit.check()
        assert 0 <= lock.status().holders[0].age < SOON


def test_nobody_elses_time_moves(world):
    """Nor is ours theirs: a program that freezes ``time`` does not freeze leases."""
    walls = [time.time(), time.monotonic(), time.perf_counter()]
    with testing.clock() as now, mutex("reports", using=world) as permit:
        now.advance(10_000)
        assert permit.lost
    for before, after in zip(walls, [time.time(), time.monotonic(), time.perf_counter()], strict=True):
        assert after - before < 1000


def test_a_frozen_time_changes_nothing(db, quick, monkeypatch):
    frozen = time.time()
    monkeypatch.setattr(time, "time", lambda: frozen)
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    lock = mutex("reports", timeout=LONG)
    assert get_backend("default").process_local
    with testing.clock() as now:
        with lock as permit:
            now.advance(61)
            assert permit.lost
        with testing.held(lock), pytest.raises(AcquireTimeoutError):
            lock.acquire()
