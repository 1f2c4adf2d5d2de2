"""``testing``: what was left held, what was acquired, and what a busy call is told."""
# ruff: noqa: PT012 - a block that is to fail at its end has something in it

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading

import pytest
from django.db import connections, transaction
from django.http import HttpResponse

from django_sqlsem import (
    AcquireTimeoutError,
    mutex,
    semaphore,
    testing,
)
from django_sqlsem.busy import Busy
from tests.support.threads import run_in_threads, wait_until

pytestmark = pytest.mark.process_side


def test_a_permit_that_is_left_is_told_of(world):
    lock = semaphore("reports", slots=2, using=world)
    testing.assert_nothing_held()
    with pytest.raises(AssertionError) as caught, testing.nothing_held():
        permit = lock.acquire()
    said = str(caught.value)
    assert f"held: 'reports' on '{world}', slot {permit.slot}, for " in said
    assert f"thread {threading.current_thread().name}" in said
    assert re.search(r"test_testing_leaks\.py:\d+ in test_a_permit_that_is_left_is_told_of: permit = lock\.acq", said)
    assert "django_sqlsem/locks/semaphore.py" not in said
    with pytest.raises(AssertionError, match="held: 'reports'"):
        testing.assert_nothing_held()
    with testing.nothing_held(), mutex("others", using=world):
        pass  # what was held before the block is not its own
    permit.release()


def test_what_is_given_back_is_no_leak(world):
    lock = semaphore("reports", slots=2, timeout=10, using=world)
    with testing.nothing_held():
        with lock:
            pass
        with testing.held(lock):
            assert lock.try_acquire() is None
        run_in_threads(4, lambda _: lock.acquire().release())

        async def main():
            async with lock:
                pass
            (await lock.aacquire()).release()  # the keeper is still at it when this returns

        asyncio.run(main())


def test_a_forgotten_permit_is_told_of_though_it_came_back(world):
    lock = mutex("reports", timeout=10, using=world)
    told = "forgotten: 'reports', which was held for .*garbage-collected"
    with pytest.raises(AssertionError, match=told), testing.nothing_held():
        lock.acquire()
    with lock:
        pass


def test_a_waiter_that_is_left_is_told_of(world):
    lock, done = mutex("reports", timeout=60, using=world), threading.Event()

    def wait():
        lock.acquire().release()
        connections.close_all()
        done.set()

    thread = threading.Thread(target=wait, name="impatient")
    told = r"waiting: 'reports' on '\w+' by thread impatient"
    with testing.held(lock) as (other,):
        with pytest.raises(AssertionError, match=told), testing.nothing_held():
            thread.start()
            wait_until(_waiting)
        other.release()
        thread.join(30)
    assert done.is_set()


def _waiting():
    from django_sqlsem.runtime.acquisition import State
    from django_sqlsem.runtime.keepers import all_acquisitions

    return any(hold.state is State.QUEUED for hold in all_acquisitions())


def test_a_block_that_raises_is_not_looked_at(world):
    with pytest.raises(ZeroDivisionError), testing.nothing_held():
        permit = mutex("reports", using=world).acquire()
        1 / 0  # noqa: B018
    permit.release()


def test_a_lost_permit_that_is_left_is_told_of(world):
    told = r"held: 'reports'.*, lost \(django_sqlsem.testing.lost\(\) says so\)"
    with pytest.raises(AssertionError, match=told), testing.nothing_held():
        permit = mutex("reports", using=world).acquire()
        with testing.lost(permit):
            pass
    permit.release()


def test_what_was_acquired_is_recorded(world, rf):
    @semaphore("reports:{year}", slots=2, timeout=0, using=world)
    def report(request, year):
        return HttpResponse("x")

    with testing.recorded() as acquired:
        report(rf.get("/"), 2026)
        assert acquired.names == ["reports:2026"]
        (one,) = acquired
        assert (one.slots, one.waited, one.released) == ((1,), 0.0, True)
        assert one.held >= 0
        permit = semaphore("wide", slots=3, take=2, using=world).acquire()
        assert (acquired[1].slots, acquired[1].released) == (permit.slots, False)
    permit.release()
    assert not acquired[1].released  # the block had ended
    with testing.recorded("reports:2027") as acquired, testing.busy("reports:2027"):
        report(rf.get("/"), 2026)
        assert report(rf.get("/"), 2027).status_code == 503
    assert (acquired, acquired.refused) == ([], ["reports:2027"])


def test_tasks_are_recorded_at_once(world):
    async def main():
        with testing.recorded("reports") as acquired:
            async with mutex("reports", using=world), mutex("others", using=world):
                assert acquired.names == ["reports"]
            assert acquired[0].released

    asyncio.run(main())


def test_a_permit_that_is_kept_until_the_commit(db):
    lock = mutex("reports", timeout=0, release="on_commit")
    with testing.recorded() as acquired, testing.nothing_held():
        with transaction.atomic():
            with lock:
                pass
            assert not acquired[0].released
        assert acquired[0].released  # Django's on_commit callbacks don't run in a TestCase; this does
    lock.acquire().release()


def test_a_made_up_busy_is_what_a_callable_gets(world):
    told = []
    lock = mutex("reports", timeout=0, using=world)

    @semaphore("reports", timeout=0, on_busy=told.append, using=world)._as("mutex")
    def work():
        raise AssertionError("it was let in")

    with testing.held(lock):
        work()
    (real,), made = told, testing.make_busy("reports", retry_after=7)
    assert isinstance(made, Busy)
    assert (made.name, len(made.holders), made.waiting, made.retry_after) == ("reports", 1, 0, 7)
    (theirs,), (ours,) = real.holders, made.holders
    same = {"slot", "state", "host", "pid", "thread", "name"}
    for field in dataclasses.fields(theirs):
        assert type(getattr(theirs, field.name)) is type(getattr(ours, field.name)), field.name
        if field.name in same:
            assert getattr(theirs, field.name) == getattr(ours, field.name)
    assert [holder.slot for holder in testing.make_busy("x", holders=3).holders] == [1, 2, 3]
    with pytest.raises(TypeError, match="name must be a str"):
        testing.make_busy(3)


def test_a_refusal_in_another_thread_is_recorded(world):
    lock = mutex("reports", timeout=0, using=world)

    def refused(_):
        with pytest.raises(AcquireTimeoutError):
            lock.acquire()

    with testing.held(lock), testing.recorded(lock) as acquired:
        run_in_threads(2, refused)
    assert acquired.refused == ["reports", "reports"]
