"""``rwlock()`` and ``drain()`` inside one process: their arguments, uses, and the backend that ``TestCase`` gets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools

import pytest

from django_sqlsem import (
    AcquireTimeoutError,
    AlreadyHeldError,
    PermitLostError,
    control,
    mutex,
    semaphore,
    testing,
)
from django_sqlsem.backends import get_backend
from django_sqlsem.locks import rwlock
from django_sqlsem.locks.permit import UpgradablePermit
from tests.support import databases
from tests.support.interruptions import Striking
from tests.support.threads import run_in_threads, wait_until

REAL = [pytest.param(alias, id=databases.label(alias)) for alias in databases.covered()]


@pytest.fixture(params=[*REAL, pytest.param("local", id="process-local")])
def world(request):
    """An alias with its real backend, or ``default`` inside the transaction that a ``TestCase`` has."""
    if request.param == "local":
        request.getfixturevalue("db")
        assert get_backend("default").process_local
        yield "default"
    else:
        request.getfixturevalue("committed")
        yield request.param


def elsewhere(function):
    """Return what a function returns in another thread."""
    return run_in_threads(1, lambda _: function())[0]


def refuses(lock):
    """Whether another thread gets nothing of it now. What it gets it gives back."""
    permit = elsewhere(lock.try_acquire)
    if permit is not None:
        permit.release()
    return permit is None


def test_bad_arguments_are_refused_at_the_call():
    for bad, error, words in (
        ({"readers": 0}, ValueError, "readers must be from 1"),
        ({"readers": "3"}, TypeError, "readers must be an int"),
        ({"slots": 3}, TypeError, "readers="),
        ({"take": 2}, TypeError, "a writer all"),
        ({"fair": False}, TypeError, "order"),
        ({"reader": 3}, TypeError, "unexpected"),
        ({"timeout": -1}, ValueError, "timeout"),
    ):
        with pytest.raises(error, match=words):
            rwlock("x", **bad)
    with pytest.raises(ValueError, match="timeout"):
        rwlock("x").read(timeout=-1)
    lock = rwlock("x", 7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        lock.name = "y"
    assert hash(lock.read()) == hash(lock.read())
    assert (lock.read(timeout=3).timeout, lock.readers) == (3.0, 7)


def test_readers_writers_and_upgrades_in_one_process(world):
    lock = rwlock("x", 2, using=world, timeout=0)
    with lock.read():
        assert elsewhere(lambda: lock.read().acquire().release()) is None
        assert elsewhere(lambda: lock.write().try_acquire()) is None
        with pytest.raises(AlreadyHeldError):
            lock.write().acquire()
    with lock.write() as permit:
        assert lock.status().exclusive.slots == permit.slots == (0, 1, 2)
        for other in (lock.read(), lock.write(), lock.upgradable()):
            assert elsewhere(other.try_acquire) is None
    with lock.upgradable() as permit:
        assert isinstance(permit, UpgradablePermit)
        assert elsewhere(lock.upgradable().try_acquire) is None
        with contextlib.ExitStack() as stack:
            reader = elsewhere(lambda: _detached(lock.read()))
            stack.callback(reader.release)
            with pytest.raises(AcquireTimeoutError, match="have not left"):
                permit.upgrade(timeout=0)
        assert not permit.upgraded
        assert permit.upgrade(timeout=20) is permit
        assert permit.upgraded
        assert elsewhere(lock.read().try_acquire) is None
        permit.downgrade()
        permit.downgrade()
        elsewhere(lambda: lock.read().acquire().release())
        permit.upgrade(timeout=20)
    assert lock.status().holders == ()
    elsewhere(lambda: lock.write().acquire().release())


def _detached(lock):
    permit = lock.acquire()
    permit.detach()
    return permit


def test_a_waiting_writer_and_an_upgrade_go_first_among_threads(world):
    lock = rwlock("x", 3, using=world, timeout=30)
    order = []
    upgradable = lock.upgradable().acquire()
    upgradable.detach()
    reader = _detached(lock.read())

    def write(_):
        with lock.write():
            order.append("write")

    def act(number):
        if number == 0:
            return write(number)
        wait_until(lambda: refuses(lock.read(timeout=0)), timeout=30)  # the writer waits
        if number == 1:
            upgradable.upgrade()
            order.append("upgrade")
            upgradable.release()
        else:
            reader.release()
        return None

    run_in_threads(3, act)
    assert order == ["upgrade", "write"]


def test_what_is_revoked_in_part_is_lost(world):
    lock = rwlock("x", 3, using=world, timeout=0)
    lost = []
    for upgrade in (False, True):
        permit = (lock.upgradable() if upgrade else lock.write()).acquire()
        permit.on_lost(lost.append)
        if upgrade:
            permit.upgrade(timeout=20)
        control.revoke("x", 2, by="me", using=world)
        elsewhere(lambda: lock.write().acquire().release())
        permit._acquisition.keeper.renew_now(permit._acquisition)
        if upgrade:
            permit._acquisition.keeper.renew_now(permit._upgrade._acquisition)
        wait_until(lambda permit=permit: permit.lost is not None, timeout=30)
        with pytest.raises(PermitLostError, match="revoked by me"):
            permit.check()
        permit.release()
    assert lock.status().holders == ()


def test_decorators_coroutines_and_testing(world):
    lock = rwlock("x", 2, using=world, timeout=0)

    @lock.read()
    def read():
        return elsewhere(lock.write().try_acquire)

    @lock.write()
    async def write():
        return await lock.astatus()

    assert read() is None
    assert asyncio.run(write()).exclusive

    async def main():
        async with lock.upgradable() as permit:
            await permit.aupgrade(timeout=20)
            assert (await lock.astatus()).exclusive
            await permit.adowngrade()
            assert not permit.upgraded
            await permit.aupgrade(timeout=20)
        assert (await lock.astatus()).holders == ()
        work = semaphore("work", 3, using=world)
        async with await work.aexclusive(timeout=20):
            assert (await work.astatus()).exclusive
        with testing.held(lock.write()):
            assert await lock.read().atry_acquire() is None

    asyncio.run(main())


def test_draining_in_one_process(world):
    work, barging = (semaphore("work", 2, using=world, timeout=0, fair=fair) for fair in (True, False))
    held = _detached(work)
    seen = []

    def act(number):
        if number == 0:
            with work.exclusive(timeout=30) as permit:
                seen.append(permit.slots)
                assert elsewhere(barging.try_acquire) is None
        else:
            wait_until(lambda: refuses(barging), timeout=30)  # it waits to drain
            assert elsewhere(work.try_acquire) is None
            held.release()

    run_in_threads(2, act)
    assert seen == [(1, 2)]
    elsewhere(lambda: barging.acquire().release())
    one = mutex("one", using=world, timeout=0)
    with one.exclusive():
        assert elsewhere(one.try_acquire) is None
    elsewhere(lambda: one.acquire().release())


# What is struck, and what stays.


def test_upgrades_that_are_over_are_forgotten(world):
    lock = rwlock("x", 2, using=world, timeout=0)
    with lock.upgradable() as permit:
        reader = elsewhere(lambda: _detached(lock.read()))
        for _ in range(5):
            with pytest.raises(AcquireTimeoutError):
                permit.upgrade(timeout=0)
        reader.release()
        for _ in range(5):
            permit.upgrade(timeout=20)
            permit.downgrade()
        permit.upgrade(timeout=20)
        assert len(permit._acquisition.losing.callbacks) == 1
        assert permit._parts[-1] is permit._upgrade._acquisition
        assert len(permit._parts) <= 2  # the keeper may not have forgotten the last one yet
        with pytest.raises(AlreadyHeldError):
            permit.upgrade(timeout=20)
        assert permit.upgraded


@pytest.mark.parametrize("way", ["upgrade", "aupgrade"])
def test_an_upgrade_struck_at_every_statement_is_no_more_about_to_be(committed, way):
    lock = rwlock("struck", 2, timeout=20)
    for nth in itertools.count(1):
        strikes = Striking(nth, KeyboardInterrupt("struck"), _of_upgrades)
        with lock.upgradable() as permit:
            with contextlib.suppress(KeyboardInterrupt), strikes:
                permit.upgrade() if way == "upgrade" else asyncio.run(permit.aupgrade())
            if strikes.struck is None:
                break
            if not permit.upgraded:
                permit.upgrade()
            assert permit.upgraded, strikes.struck
    assert nth > 10


def _of_upgrades(frame):
    return frame.f_code.co_qualname.startswith("UpgradablePermit.") and frame.f_code.co_name != "_give_up"
