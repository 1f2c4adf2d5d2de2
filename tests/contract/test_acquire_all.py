"""Several locks at once: all or none, in one order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction

from django_sqlsem import (
    AcquireTimeoutError,
    BackendError,
    PermitLostError,
    SemaphoreError,
    control,
    mutex,
    semaphore,
    testing,
)
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.locks import aacquire_all, acquire_all, counter
from tests.programs.queue_clients import Queuer
from tests.programs.several_clients import SLOTS
from tests.support import applocks, databases, tds
from tests.support.databases import OutsideCounter, held_rows
from tests.support.processes import Child
from tests.support.threads import wait_until

REAL = [pytest.param(alias, id=databases.label(alias)) for alias in databases.covered()]
PATIENT = 30.0
ROUNDS = 12


@pytest.fixture(params=[*REAL, pytest.param("local", id="process-local")])
def world(request):
    """An alias with its real backend, or ``default`` inside the transaction that a ``TestCase`` has."""
    if request.param == "local":
        request.getfixturevalue("db")
        yield "default"
        return
    request.getfixturevalue("committed")
    if tds.is_stand_in(request.param):
        # There a statement that a session sees for the first time may outlast what units are handed over for.
        warm = counter("warm", 2, using=request.param)
        warm.acquire(timeout=PATIENT)
        asyncio.run(warm.aacquire(timeout=PATIENT))
    yield request.param
    databases.assert_nothing_held(request.param)


def held(*locks):
    """How many of each are held."""
    return [lock.status().held for lock in locks]


def test_in_the_callers_order_and_given_back_in_reverse(world, monkeypatch):
    a, b, c = mutex("a", using=world), semaphore("b", 3, take=2, using=world), counter("c", 5, take=2, using=world)
    for named in ([c, b, a], [a, c, b]):
        with acquire_all(named, timeout=PATIENT) as permits:
            assert [permit.name for permit in permits] == [lock.name for lock in named]
            assert len(permits) == 3
            assert permits[named.index(b)].slots == (1, 2)
            assert held(a, b) == [1, 2]
            permits.check()
        assert held(a, b) == [0, 0]
    assert c.value() == 1  # they are used up
    permits = acquire_all((a, b))
    with testing.lost(permits[1]), pytest.raises(PermitLostError, match="'b'"):
        permits.check()
    order = []
    for permit in permits:
        monkeypatch.setattr(
            permit, "release", lambda permit=permit, real=permit.release: (order.append(permit), real())
        )
    permits.release()
    assert order == list(reversed(permits))
    permits.release()
    assert held(a, b) == [0, 0]

    async def main():
        async with aacquire_all([b, a], timeout=PATIENT) as both:
            assert [permit.name for permit in both] == ["b", "a"]
            both.check()
        permits = await aacquire_all([b, a])
        await permits.arelease()
        with pytest.raises(PermitLostError, match="released already"):
            permits.check()

    asyncio.run(main())
    assert held(a, b) == [0, 0]
    assert len(acquire_all([])) == 0


def test_all_or_none(world):
    a, b, c = mutex("a", using=world), counter("b", 3, using=world), semaphore("c", 2, using=world)
    wrong = semaphore("b", using=world)
    with testing.held(c, 2):
        with pytest.raises(AcquireTimeoutError, match=r"'c' .* \(2 of 2 held"):
            acquire_all([c, b, a], timeout=3)
        with pytest.raises(AcquireTimeoutError, match="'c'"):
            asyncio.run(_enter(aacquire_all([c, b, a], timeout=0)))

        async def cancelled():
            task = asyncio.create_task(_enter(aacquire_all([c, b, a], timeout=None)))
            for _ in range(3000):
                if [(await a.astatus()).held, await b.avalue()] == [1, 2]:
                    break
                await asyncio.sleep(0.01)
            else:
                raise AssertionError("it did not get as far as the last one")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return [(await a.astatus()).held, await b.avalue()]

        assert asyncio.run(cancelled()) == [0, 3]
    with pytest.raises(ImproperlyConfigured):
        acquire_all([a, wrong])
    # What was handed to the one that had just been cancelled is given back by its keeper.
    wait_until(lambda: held(a, c) == [0, 0], timeout=30)
    assert b.value() == 3
    with pytest.raises(ZeroDivisionError), acquire_all([a, c]):
        raise ZeroDivisionError
    assert held(a, c) == [0, 0]


async def _enter(pending):
    async with pending:
        pass


async def _wait_for(pending):
    return await pending


def test_bad_input(world):
    a = mutex("a", using=world)
    for function in (acquire_all, aacquire_all):
        with pytest.raises(ValueError, match="locks names 'a' twice"):
            function([a, semaphore("b", using=world), semaphore("a", 3, using=world)])
        for wrong in (a, "ab", 3):
            with pytest.raises(TypeError, match="locks must be several locks"):
                function(wrong)
        with pytest.raises(TypeError, match="locks must be locks"):
            function([a, threading.Lock()])
        with pytest.raises(ValueError, match="timeout must be"):
            function([a], timeout=-1)


class Noted:
    """A lock that notes for how long it may wait, and lets some seconds go by before it asks."""

    def __init__(self, lock, lasts=0.0):
        self.name, self.using, self.lock, self.lasts = lock.name, lock.using, lock, lasts

    def _note(self, timeout):
        began, self.timeout = boot_now(), timeout
        wait_until(lambda: boot_now() - began >= self.lasts)

    def acquire(self, timeout):
        self._note(timeout)
        return self.lock.acquire(timeout)

    async def aacquire(self, timeout):
        self._note(timeout)
        return await self.lock.aacquire(timeout)


def test_one_timeout_for_all_of_them(world):
    """The second one is waited for as long as the first has left over."""
    first, second = Noted(mutex("a", using=world), lasts=0.3), Noted(mutex("b", using=world))
    with testing.held(second.lock):
        for take in (acquire_all, lambda *args, **options: asyncio.run(_enter(aacquire_all(*args, **options)))):
            with pytest.raises(AcquireTimeoutError, match="'b'"):
                take([second, first], timeout=0.8)
            assert first.timeout <= 0.8
            assert second.timeout <= 0.5
    wait_until(lambda: held(first.lock, second.lock) == [0, 0], timeout=PATIENT)


def test_what_is_released_on_commit_stays_until_then(database):
    if connections[database].vendor == "sqlite":
        pytest.skip("there the caller's transaction is the only writer")
    a, b = semaphore("a", release="on_commit", using=database), mutex("b", using=database)
    with transaction.atomic(using=database):
        with acquire_all([a, b]):
            assert held(a, b) == [1, 1]
        assert held(a, b) == [1, 0]
    assert held(a, b) == [0, 0]


class Stubborn:
    """A lock of somebody's own that is not given back."""

    name = "aa"

    def __init__(self, using):
        self.using = using
        self.ended = []

    def acquire(self, timeout):
        return self

    async def aacquire(self, timeout):
        return self

    def release(self):
        self.ended.append("released")
        raise BackendError("no way back")

    async def arelease(self):
        self.release()

    async def __aexit__(self, *exc_info):
        self.ended.append("left")


def test_what_cannot_be_given_back_hides_no_refusal(world, caplog):
    stubborn, a, b = Stubborn(world), mutex("a", using=world), mutex("b", using=world)
    with testing.held(b):
        with pytest.raises(AcquireTimeoutError, match="'b'"):
            acquire_all([b, stubborn, a], timeout=0)
        with pytest.raises(AcquireTimeoutError, match="'b'"):
            asyncio.run(_enter(aacquire_all([b, stubborn, a], timeout=0)))
        assert held(a) == [0]
    assert [record.message for record in caplog.records if record.semaphore == "aa"] == [
        "What acquire_all() had taken could not be given back yet: no way back"
    ] * 2
    asyncio.run(_enter(aacquire_all([stubborn, a])))
    assert stubborn.ended == ["released", "released", "left"]  # the end of a block is that of each permit's own
    assert held(a) == [0]


def test_it_is_awaited_or_entered_once(world):
    async def main():
        for again in (_enter, _wait_for):
            pending = aacquire_all([mutex("a", using=world), semaphore("b", 4, using=world)])
            async with pending as permits:
                with pytest.raises(RuntimeError, match="once"):
                    await again(pending)
                assert len(permits) == 2
                permits.check()

    asyncio.run(main())
    assert held(mutex("a", using=world), semaphore("b", 4, using=world)) == [0, 0]


def test_one_name_in_two_databases_is_two_locks(committed):
    aliases = databases.covered()[:2]
    if len(aliases) < 2:
        pytest.skip("one database")
    locks = [mutex("a", using=alias) for alias in aliases]
    with acquire_all(locks, timeout=PATIENT):
        assert held(*locks) == [1, 1]
    assert held(*locks) == [0, 0]


def test_crossing_lists_never_deadlock(database):
    """Two processes, each with threads and tasks, name the same locks in opposite orders."""
    fuel = counter("fuel", using=database)
    with contextlib.ExitStack() as stack:
        counters = {name: stack.enter_context(OutsideCounter(database, name)) for name in SLOTS}
        target = "tests.programs.several_clients:collect"
        children = [stack.enter_context(Child(target, database, ROUNDS, backwards)) for backwards in (False, True)]
        for child in children:
            child.expect("ready", timeout=60)
        for child in children:
            child.send("go")
        fuel.release(4 * ROUNDS)  # one for each time that a thread of theirs takes all it wants
        told = [json.loads(child.expect("tally", timeout=120)) for child in children]
        for child in children:
            child.finish()
            assert "Traceback" not in child.stderr, child.stderr
        assert [errors for _, errors in told] == [[], []]
        assert sum(done for done, _ in told) == 4 * ROUNDS
        assert fuel.value() == 0
        for name, inside in counters.items():
            assert inside.current == 0
            assert 1 <= inside.peak <= SLOTS[name]


def test_what_was_taken_comes_back_when_its_process_is_killed(database):
    a, b = mutex("a", using=database), mutex("b", using=database)
    code = """
from django_sqlsem import mutex
from django_sqlsem.locks import acquire_all
acquire_all([mutex("b", using=args[0], lease=4), mutex("a", using=args[0], lease=4)], timeout=60)
"""
    with b.acquire(), Child(code, database) as child:
        wait_until(lambda: len(held_rows(database)) == 2 and b.status().waiting == 1, timeout=PATIENT)
        child.kill()
        with a.acquire(timeout=PATIENT):
            pass
    with acquire_all([a, b], timeout=PATIENT):
        pass


# Many slots of one semaphore.


def test_who_wants_more_than_an_operator_has_left_does_not_block_the_others(database):
    with (
        Queuer(database, "many", slots=4, counted=False) as few,
        Queuer(database, "many", slots=4, counted=False) as many,
    ):
        few.ready().takes("x", take=2)
        few.takes("y", take=2)
        many.ready().ask(take=3)
        lock = semaphore("many", 4, using=database)
        wait_until(lambda: lock.status().waiting == 1, timeout=PATIENT)
        assert control.set_slots("many", 2, by="test", using=database)
        few.ask("one")
        wait_until(lambda: lock.status().waiting == 2, timeout=PATIENT)
        few.release("y")
        few.release("x")
        left = ([1], [2]) if applocks.are_at(database) else ([1],)  # SQL Server hands on whichever is free first
        assert few.held("one", timeout=PATIENT)["slots"] in left
        assert many.is_silent()
        few.release("one")
        assert control.set_slots("many", None, by="test", using=database)
        assert len(many.held(timeout=PATIENT)["slots"]) == 3
        many.release()
        for each in (few, many):
            each.end()


def test_who_wants_many_is_neither_stuck_nor_starved(database):
    """Two processes want three and four of four slots, while a third takes one after the other all the time."""
    with contextlib.ExitStack() as stack:
        counter = stack.enter_context(OutsideCounter(database))
        target = "tests.programs.several_clients:grab"
        *many, few = [
            stack.enter_context(Child(target, database, take, rounds)) for take, rounds in ((3, 8), (4, 8), (1, 0))
        ]
        for child in (few, *many):
            child.expect("ready", timeout=60)
        few.send("go")
        wait_until(lambda: counter.entered > 2, timeout=PATIENT)
        for child in many:
            child.send("go")
        told = [json.loads(child.expect("tally", timeout=120)) for child in many]
        few.send("stop")
        told.append(json.loads(few.expect("tally", timeout=60)))
        for child in (few, *many):
            child.finish()
        assert [errors for _, errors in told] == [[], [], []]
        assert [done for done, _ in told[:2]] == [16, 16]
        assert counter.entered == 16 * 3 + 16 * 4 + told[2][0]
        assert counter.current == 0
        assert counter.peak == 4


def test_more_than_there_are_is_refused_at_once(world):
    with semaphore("gpu", 2, using=world).acquire() as one:
        one.detach()  # as somebody else's
        for want in (semaphore("gpu", take=3, using=world), semaphore("new", take=2, using=world)):
            with pytest.raises(SemaphoreError, match=r"has (1 slot|2 slots): take=[23] can never be met"):
                want.acquire(timeout=None)  # which would never end
            with pytest.raises(SemaphoreError, match="can never be met"):
                acquire_all([want, mutex("a", using=world)], timeout=None)
        one.check()
    assert held(mutex("a", using=world)) == [0]
