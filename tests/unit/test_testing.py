"""``django_sqlsem.testing``: busy, held and lost, on the real backends and on the one that ``TestCase`` gets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time

import pytest
from django.db import connections, transaction

from django_sqlsem import (
    AcquireTimeoutError,
    AlreadyHeldError,
    PermitLostError,
    control,
    mutex,
    queries,
    semaphore,
    testing,
)
from django_sqlsem.backends import get_backend
from django_sqlsem.locks import counter, rlock, rwlock
from django_sqlsem.snapshots import LossReason
from tests.support.threads import run_in_threads, wait_until

pytestmark = pytest.mark.process_side


def test_busy_refuses_at_once_whatever_the_timeout(world):
    lock = semaphore("reports", slots=3, timeout=None, using=world)
    started = time.monotonic()
    with testing.busy("reports"):
        assert lock.try_acquire() is None
        with pytest.raises(AcquireTimeoutError, match=r"^No slot of 'reports' became free \(0 of 3 held\)\.$"):
            lock.acquire()
        with pytest.raises(AcquireTimeoutError, match=r"became free within 60 s"):
            lock.acquire(timeout=60)
        with pytest.raises(AcquireTimeoutError, match=r"is free"), mutex("reports", timeout=0, using=world):
            pass
        semaphore("others", using=world).acquire().release()
    assert time.monotonic() - started < 5
    with lock:
        pass


def test_busy_refuses_tasks_and_threads(world):
    lock = semaphore("reports", slots=3, timeout=60, using=world)

    async def main():
        assert await lock.atry_acquire() is None
        with pytest.raises(AcquireTimeoutError):
            await lock.aacquire()

    with testing.busy(lock):
        asyncio.run(main())
        assert run_in_threads(2, lambda _: lock.try_acquire()) == [None, None]


def test_busy_nests(world):
    lock = mutex("reports", timeout=0, using=world)
    with testing.busy(lock):
        with testing.busy("reports"), testing.busy("others"):
            assert lock.try_acquire() is None
        assert lock.try_acquire() is None
    lock.acquire().release()


def test_busy_ends_with_the_block_however_it_ends(world):
    lock = mutex("reports", timeout=0, using=world)
    with pytest.raises(ZeroDivisionError), testing.busy(lock):
        1 / 0  # noqa: B018
    lock.acquire().release()


def test_busy_makes_a_decorated_function_busy(world):
    ran = []

    @semaphore("reports:{year}", on_busy="skip", using=world)
    def report(year):
        ran.append(year)
        return year

    with testing.busy("reports:2026"):
        assert report(2026) is None
        assert report(2027) == 2027
    assert report(2026) == 2026
    assert ran == [2027, 2026]


def test_held_takes_all_slots_as_somebody_else(world):
    lock = semaphore("reports", slots=3, timeout=0, using=world)
    with testing.held(lock) as permits:
        assert sorted(permit.slot for permit in permits) == [1, 2, 3]
        assert lock.status().held == 3
        with pytest.raises(AcquireTimeoutError, match=r"No slot of 'reports' is free \(3 of 3 held\): slot 1: "):
            lock.acquire()
        permits[1].release()
        with lock as permit:  # in the very thread that opened the block: the permits are not its own
            assert permit.slot == permits[1].slot
    assert lock.status().held == 0


def test_held_takes_some(world):
    lock = semaphore("reports", slots=3, timeout=0, using=world)
    with testing.held(lock, 2), lock as permit:
        assert permit.slot == 3
        assert run_in_threads(1, lambda _: lock.try_acquire()) == [None]
    assert lock.status().held == 0


def test_held_by_name(world, settings):
    settings.SQLSEM = {"DATABASE": world}
    with testing.held("unused") as permits:
        assert len(permits) == 1
    with testing.held("wide", total=3) as permits:
        assert len(permits) == 3
        assert queries.semaphore("wide").slots == 3
    with testing.held("wide") as permits:
        assert len(permits) == 3
    with testing.held("wide", 2, total=3) as permits:
        assert len(permits) == 2


def test_held_by_the_name_of_another_kind_of_lock(world, settings):
    settings.SQLSEM = {"DATABASE": world}
    shared = rwlock("shared", readers=3)
    for lock in (mutex("alone", timeout=0), rlock("alone again", timeout=0), shared.write(timeout=0)):
        lock.acquire().release()
        with testing.held(lock.name) as permits:
            assert len(permits) == 1
            assert lock.try_acquire() is None
        lock.acquire().release()
    with testing.held("shared", 2) as permits:
        assert len(permits) == 2
        assert shared.write(timeout=0).try_acquire() is None
        shared.read(timeout=0).acquire().release()
    with pytest.raises(ValueError, match="one slot, not 2"), testing.held("alone", 2):
        pass
    counter("counted", 3).acquire()
    with pytest.raises(ValueError, match="'counted' is a counter"), testing.held("counted"):
        pass


def test_held_of_a_mutex(world):
    lock = mutex("alone", timeout=0, using=world)
    with testing.held(lock) as permits:
        assert len(permits) == 1
        assert lock.status().kind == "mutex"
        assert lock.try_acquire() is None
    lock.acquire().release()


def test_held_more_than_are_free_gives_back_what_it_got(world):
    lock = semaphore("reports", slots=2, timeout=0, using=world)
    with lock, pytest.raises(AcquireTimeoutError, match="2 of 2 held"), testing.held(lock, 2):
        pass
    assert lock.status().held == 0


def test_held_lets_a_waiter_in_when_a_permit_is_released(world):
    lock = mutex("queue", timeout=20, using=world)
    waited = []

    def wait():
        with lock as permit:
            waited.append(permit.waited)
        connections.close_all()

    thread = threading.Thread(target=wait)
    with testing.held(lock) as permits:
        thread.start()
        time.sleep(0.2)
        assert not waited
        permits[0].release()
        thread.join(10)
    assert len(waited) == 1
    assert waited[0] > 0


def test_held_in_an_async_test(world):
    lock = semaphore("reports", slots=2, timeout=0, using=world)

    async def main():
        async with lock:
            with testing.held(lock, 1) as permits:
                assert (await lock.astatus()).held == 2
                await permits[0].arelease()
                assert (await lock.astatus()).held == 1
        with testing.held(lock):
            assert await lock.atry_acquire() is None
        assert (await lock.astatus()).held == 0

    asyncio.run(main())


def test_held_keeps_the_operators_number(world):
    lock = semaphore("reports", slots=3, timeout=0, using=world)
    lock.acquire().release()
    control.set_slots("reports", 2, by="ann", using=world)
    with testing.held(lock) as permits:
        assert len(permits) == 2
        assert lock.try_acquire() is None


def test_lost_of_a_permit(world, caplog):
    told = []
    with mutex("reports", on_lost=lambda permit: told.append(permit.name), using=world) as permit:
        permit.check()
        with testing.lost(permit):
            assert permit.lost.reason is LossReason.EXPIRED
            assert "testing.lost() says so" in permit.lost.detail
            with pytest.raises(PermitLostError, match=r"^The permit of 'reports' was lost: "):
                permit.check()
            wait_until(lambda: told == ["reports"])
        assert permit.lost  # it stays so
        assert mutex("reports", using=world).status().held == 1
    assert mutex("reports", using=world).status().held == 0
    assert [record.levelname for record in caplog.records if "was lost" in record.message] == ["ERROR"]


def test_lost_of_a_name_is_for_those_held_and_those_to_come(world):
    lock = semaphore("reports", slots=2, timeout=0, using=world)
    with semaphore("others", using=world) as other, lock as before:
        before.detach()
        with testing.lost("reports"):
            assert before.lost
            with lock as during:
                assert during.lost
                with pytest.raises(PermitLostError):
                    during.check()
        assert not other.lost
        with lock as after:
            after.check()
    assert lock.status().held == 0


def test_lost_nests(world):
    lock = mutex("reports", timeout=0, using=world)
    with testing.lost(lock):
        with testing.lost("reports"):
            pass
        with lock as permit:
            assert permit.lost
    with lock as permit:
        assert not permit.lost


def test_lost_in_a_task(world):
    async def main():
        async with semaphore("reports", using=world) as permit:
            with testing.lost("reports"):
                assert permit.lost
            with pytest.raises(PermitLostError):
                permit.check()

    asyncio.run(main())


@pytest.mark.parametrize("helper", [testing.busy, testing.held, testing.lost])
def test_what_they_take(helper):
    with (
        pytest.raises(TypeError, match="A semaphore's name must be a str or a tuple of parts, not 3 of type int"),
        helper(3),
    ):
        pass


# The backend that TestCase gets.


def keeper_threads():
    """Return the library's threads in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sqlsem")]


def test_in_a_testcase_there_are_no_threads_and_no_rows(db):
    from django_sqlsem.models import SemaphoreRow

    lock = semaphore("reports", slots=2)
    with lock as permit:
        assert queries.semaphore("reports").held == 1
        assert not SemaphoreRow.objects.exists()
        assert keeper_threads() == []
        assert permit.check() is None


def test_in_a_testcase_a_rollback_changes_nothing(db):
    lock = mutex("reports", timeout=0)
    with contextlib.suppress(ZeroDivisionError), transaction.atomic():
        permit = lock.acquire()
        1 / 0  # noqa: B018
    assert permit.lost is None
    assert lock.status().held == 1
    permit.release()


def test_in_a_testcase_threads_and_tasks_share_the_locks_of_the_test(db):
    lock = semaphore("reports", slots=1, timeout=10)
    with lock:
        assert run_in_threads(2, lambda _: lock.try_acquire()) == [None, None]

        async def main():
            assert await lock.atry_acquire() is None

        run_in_threads(1, lambda _: asyncio.run(main()))
    inside, peaks = [], []

    def body(number):
        with lock:
            inside.append(number)
            peaks.append(len(inside))
            time.sleep(0.002)
            inside.remove(number)

    run_in_threads(10, body)
    assert max(peaks) == 1
    assert lock.status().held == 0


def test_in_a_testcase_tasks_wait_for_one_another(db):
    lock = semaphore("reports", slots=2, timeout=10)
    inside, peaks = [], []

    async def body(number):
        async with lock:
            inside.append(number)
            peaks.append(len(inside))
            await asyncio.sleep(0.002)
            inside.remove(number)

    async def main():
        await asyncio.gather(*(body(number) for number in range(10)))

    asyncio.run(main())
    assert max(peaks) == 2
    assert lock.status().held == 0


def test_in_a_testcase_a_second_acquire_in_the_same_thread_is_refused(db):
    lock = semaphore("reports", slots=3)
    with lock, pytest.raises(AlreadyHeldError, match="You have acquired 'reports' already"):
        lock.acquire()


def test_in_a_testcase_a_forgotten_permit_comes_back(db, caplog):
    lock = mutex("reports", timeout=0)
    lock.acquire()
    lock.acquire().release()
    assert "garbage-collected" in caplog.text


def test_in_a_testcase_a_revoked_permit_is_lost(db):
    told = []
    lock = mutex("reports", timeout=0, on_lost=lambda permit: told.append(permit.lost.by))
    with lock as permit:
        (holder,) = control.revoke("reports", by="ann")
        assert holder.slot == permit.slot
        assert permit.lost.reason is LossReason.REVOKED
        assert permit.lost.by == "ann"
        with pytest.raises(PermitLostError, match="revoked by ann"):
            permit.check()
        wait_until(lambda: told == ["ann"])
        with lock as successor:  # the slot is free, and what is lost is not held
            permit.release()
            successor.check()
            assert lock.status().held == 1


def test_in_a_testcase_a_resumed_or_widened_semaphore_lets_waiters_in(db):
    lock = semaphore("reports", slots=1, timeout=20)
    lock.acquire().release()
    granted = []

    def wait():
        with lock:
            granted.append(True)

    control.pause("reports", by="ann")
    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    assert not granted
    control.resume("reports", by="ann")
    thread.join(5)
    assert granted == [True]
    with lock:
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        control.set_slots("reports", 2, by="ann")
        thread.join(5)
        assert len(granted) == 2


_leaked = []


@pytest.mark.parametrize("nth", [1, 2])
def test_what_one_testcase_leaves_held_the_next_one_does_not_see(db, nth):
    lock = mutex("leaked", timeout=0)
    assert lock.status().held == 0
    _leaked.append(lock.acquire())  # alive until this module ends
    assert lock.status().held == 1
    if nth == 2:
        assert _leaked[0].lost
        with pytest.raises(PermitLostError):
            _leaked[0].check()
        _leaked[0].release()
        assert lock.status().held == 1
        _leaked.pop().release()
        assert lock.status().held == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
def test_in_a_testcase_a_forked_child_is_not_stuck_by_a_thread_of_its_parent(db):
    busy_inside, go_on = threading.Event(), threading.Event()

    def be_inside():
        with get_backend("default")._lock:
            busy_inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=be_inside)
    thread.start()
    busy_inside.wait(10)
    pid = os.fork()
    if not pid:
        signal.alarm(10)  # ends a child that is stuck
        with contextlib.suppress(BaseException):
            mutex("reports", timeout=0).acquire().release()
            os._exit(0)
        os._exit(1)
    go_on.set()
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0


def test_other_settings_keep_the_locks(db, settings):
    lock = mutex("reports", timeout=0)
    with lock:
        settings.SQLSEM = {"TIMEOUT": 1}
        assert run_in_threads(1, lambda _: lock.try_acquire()) == [None]
        del settings.SQLSEM
        assert run_in_threads(1, lambda _: lock.try_acquire()) == [None]
    assert lock.status().held == 0


def test_stop_requested_asks_who_holds_and_who_comes(world):
    lock, told = semaphore("asked", slots=2, using=world), []
    with lock.acquire() as before:
        before.detach()
        before.on_stop_requested(told.append)
        with testing.stop_requested("asked", by="ann"):
            assert (before.stop_requested, before.stop_requested_by) == (True, "ann")
            with lock as inside:
                assert inside.stop_requested
                inside.check()
            with semaphore("others", using=world) as other:
                assert not other.stop_requested
        wait_until(lambda: told == [before])
        with lock as after:
            assert not after.stop_requested
            with testing.stop_requested(after):
                assert after.stop_requested_by == "a test"


def test_an_operator_asks_in_a_test(world):
    """Also on the process-local backend, where it is known at once."""
    lock = semaphore("asked", slots=3, using=world)
    with lock.acquire() as one:
        one.detach()
        with lock.acquire() as two:
            (found,) = control.request_stop("asked", two.slot, two.token, by="ann", using=world)
            assert (found.slot, found.stop_by) == (two.slot, "ann")
            wait_until(lambda: two.stop_requested, timeout=20)
            assert not one.stop_requested
            assert control.request_stop("asked", two.slot, two.token + 1, by="ann", using=world) == []
            assert control.drain("asked", by="bob", using=world)
            wait_until(lambda: one.stop_requested, timeout=20)
            assert (one.stop_requested_by, two.stop_requested_by) == ("bob", "ann")
            status = queries.semaphore("asked", using=world)
            assert (status.draining, status.stopping) == (True, 2)
    assert not control.drain("nothing of the name", by="ann", using=world)
    control.resume("asked", by="ann", using=world)
    with lock as permit:
        assert not permit.stop_requested
        old = permit
    assert control.request_stop("asked", old.slot, old.token, by="ann", using=world) == []


def test_modes_are_asked_as_a_whole(world):
    prices = rwlock("prices", using=world)
    with prices.upgradable() as permit:
        permit.upgrade()
        assert len(control.request_stop("prices", by="ann", using=world)) == 1
        wait_until(lambda: permit.stop_requested, timeout=20)
    with prices.read() as reader:
        assert not reader.stop_requested
