"""What every database must do alike: grant, refuse, wait, give back."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime
import gc
import pickle
import signal
import threading
import time
import weakref

import pytest
from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from django.db import transaction

from django_sqlsem import (
    AcquireTimeoutError,
    AlreadyHeldError,
    PermitLostError,
    mutex,
    semaphore,
)
from django_sqlsem.backends.base import Acquired, Place
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.locks import acquire_all, locked_atomic, rlock
from django_sqlsem.locks import permit as blocks
from django_sqlsem.models import SlotRow
from django_sqlsem.runtime.keepers import keeper_at
from django_sqlsem.signals import permit_released
from tests.support import applocks
from tests.support.databases import held_rows
from tests.support.statements import CountedSession
from tests.support.threads import run_beside, run_in_threads, wait_until


def test_grants_distinct_slots_up_to_the_number(database):
    reports = semaphore("reports", slots=3, timeout=0, using=database)
    permits = []
    for _ in range(3):
        permit = reports.acquire()
        permit.detach()
        permits.append(permit)
    assert sorted(permit.slot for permit in permits) == [1, 2, 3]
    assert reports.try_acquire() is None
    with pytest.raises(AcquireTimeoutError, match=r"No slot of 'reports' is free \(3 of 3 held\): slot 1: .* pid"):
        reports.acquire()
    permits[1].release()
    again = reports.acquire()
    assert again.slot == permits[1].slot
    assert again.token > permits[1].token
    assert again.waited == 0
    for permit in (permits[0], permits[2], again):
        permit.release()
    assert held_rows(database) == []


@pytest.mark.rows_only("row statements")
def test_a_grant_is_what_the_rows_say(database):
    """Somebody made the slots' rows anew, and their tokens are years ahead: what was known of them no longer holds."""
    lock = semaphore("anew", slots=3, using=database)
    rows = SlotRow.objects.using(database).filter(semaphore__name="anew")
    for _ in range(3):
        with lock:
            pass
    key, token = rows[0].semaphore_id, max(row.token for row in rows) + 5 * 366 * 86_400 * 1_000_000
    rows.delete()
    for slot in (2, 3, 1):  # their ids are in another order than their numbers
        SlotRow.objects.using(database).create(semaphore_id=key, slot=slot, token=token)
    for round_ in range(1, 4):
        permits = []
        for slot in (1, 2, 3):
            permits.append(lock.acquire())
            permits[-1].detach()
            row, grant = rows.get(slot=slot), permits[-1]._acquisition.grant
            assert (grant.row_ids, grant.slots, grant.tokens) == ((row.id,), (slot,), (row.token,))
            assert (row.permit_id, row.token) == (permits[-1]._acquisition.permit_id, token + round_)
        for permit in permits:
            permit.release()
            assert permit.lost is None
        assert held_rows(database) == []


def test_release_is_idempotent_and_spares_the_next_holder(database):
    lock = mutex("once", timeout=0, using=database)
    first = lock.acquire()
    first.release()
    second = lock.acquire()
    first.release()
    second.check()
    assert len(held_rows(database)) == 1
    with pytest.raises(PermitLostError, match="released already"):
        first.check()
    second.release()


def test_a_second_acquire_in_the_same_thread_is_refused(database):
    reports = semaphore("reports", slots=3, using=database)
    with reports as permit:
        with pytest.raises(AlreadyHeldError, match=r"You have acquired 'reports' already"):
            reports.acquire()
        permit.detach()
        with reports:
            pass
    with reports:
        pass


def test_a_waiter_gets_the_slot_that_another_thread_gives_back(database):
    lock = mutex("handed", timeout=10, using=database)
    entered, leave = threading.Event(), threading.Event()
    waited = []

    def hold():
        with lock:
            entered.set()
            assert leave.wait(10)

    def wait():
        with lock as permit:
            waited.append(permit.waited)

    threads = [threading.Thread(target=hold), threading.Thread(target=wait)]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    wait_until(lambda: lock.status().waiting == 1)
    leave.set()
    for thread in threads:
        thread.join(10)
    assert len(waited) == 1
    assert waited[0] > 0


def test_times_out(database):
    lock = mutex("slow", using=database)
    holder = lock.acquire()
    holder.detach()
    started = time.monotonic()
    with pytest.raises(AcquireTimeoutError, match=r"became free within 0.3 s"):
        lock.acquire(timeout=0.3)
    assert time.monotonic() - started >= 0.3
    wait_until(lambda: lock.status().waiting == 0)
    holder.release()


def test_take_is_all_or_nothing(database):
    pair = semaphore("gpu", slots=3, take=2, timeout=0, using=database)
    one = semaphore("gpu", slots=3, timeout=0, using=database)
    first = pair.acquire()
    first.detach()
    assert first.slots == (1, 2)
    assert len(first.tokens) == 2
    assert pair.try_acquire() is None
    single = one.acquire()
    assert single.slot == 3
    single.release()
    first.release()
    assert held_rows(database) == []


def test_beside_a_take_of_hundreds_the_others_wait_and_get_no_error(database):
    slots, rounds = (305, 3) if applocks.are_at(database) else (1205, 5)
    semaphore("many", slots=slots, using=database).acquire().release()

    def work(index):
        for _ in range(rounds):
            take = slots - 5 if index == 0 else 2 * index
            with semaphore("many", slots=slots, take=take, timeout=60, using=database) as permit:
                assert len(permit.slots) == take

    run_in_threads(4, work, timeout=120)


@pytest.mark.rows_only("row statements")
def test_a_take_of_hundreds_is_a_few_statements(database):
    """Taken by a claim, handed to a waiter, renewed and given back: never one statement for each slot."""
    many = semaphore("many", slots=1205, take=1200, using=database)
    many.acquire().release()
    session, keeper = CountedSession(database), keeper_at(database)
    first, second = many._request(keeper, ""), many._request(keeper, "")
    sent = {}
    with contextlib.closing(session), mutex("beside", using=database):  # so that this process's beacon is lit
        grant = keeper.backend.claim(session, first)
        sent["claim"] = session.sent()
        assert grant.slots == tuple(range(1, 1201))
        held = Acquired(first, grant)
        assert keeper.backend.renew(session, [held]).renewed == {first.permit_id}
        sent["renewal"] = session.sent()
        assert not keeper.backend.enrol(session, second, Place(boot_now(), 1), first=False).granted
        session.sent()
        assert keeper.backend.release(session, held).freed
        sent["hand-over"] = session.sent()
        handed = keeper.backend.granted(session, second)
        assert handed.grant.slots == grant.slots
        session.sent()
        assert keeper.backend.release(session, Acquired(second, handed.grant)).freed
        sent["release"] = session.sent()
    assert all(1 <= count <= 12 for count in sent.values()), sent


def test_async(database):
    lock = semaphore("async", slots=2, timeout=30, using=database)
    inside = peak = 0
    pair = None

    async def work():
        nonlocal inside, peak
        async with lock as permit:
            inside += 1
            peak = max(peak, inside)
            await pair.wait()  # so that two must be inside together, and never a third
            permit.check()
            inside -= 1

    async def main():
        nonlocal pair
        pair = asyncio.Barrier(2)
        await asyncio.gather(*(work() for _ in range(20)))
        permit = await lock.atry_acquire()
        with pytest.raises(AlreadyHeldError):
            await lock.aacquire()
        await permit.arelease()

    asyncio.run(main())
    assert peak == 2


def test_hundred_threads_share_one_semaphore_and_one_decorated_function(database):
    shared = semaphore("shared", slots=3, timeout=60, using=database)

    @semaphore("decorated", slots=3, timeout=60, using=database)
    def decorated():
        return threading.get_ident()

    seen, inside, peaks, guard = [], [], [], threading.Lock()
    full = threading.Event()

    def body(number):
        with shared as permit:
            with guard:
                inside.append(number)
                peaks.append(len(inside))
                seen.append((permit.slot, permit.token))
                if len(inside) == 3:
                    full.set()
            assert full.wait(30)
            time.sleep(0.005)
            permit.check()
            with guard:
                inside.remove(number)
        assert decorated() == threading.get_ident()

    run_in_threads(100, body)
    assert max(peaks) == 3
    assert len(set(seen)) == 100
    assert held_rows(database) == []


@pytest.mark.leaves_held
def test_a_forgotten_permit_comes_back(database, caplog):
    lock = mutex("forgotten", timeout=10, using=database)
    lock.acquire()
    gc.collect()
    permit = lock.acquire()
    assert "garbage-collected" in caplog.text
    permit.release()

    thread = threading.Thread(target=lambda: kept.append(lock.acquire()))
    kept = []
    thread.start()
    thread.join()
    lock.acquire().release()
    assert kept[0].lost is not None


def test_renewed_for_five_leases(database):
    lock = mutex("long", lease=1, using=database)
    with lock as permit:
        time.sleep(5)
        permit.check()
        assert len(held_rows(database)) == 1


def test_a_name_of_another_kind_is_an_error_however_busy_it_is(database):
    holder = rlock("kinds", using=database).acquire()
    holder.detach()
    waiter = threading.Thread(target=lambda: rlock("kinds", timeout=30, using=database).acquire().release())
    waiter.start()
    wait_until(lambda: rlock("kinds", using=database).status().waiting == 1)
    with pytest.raises(ImproperlyConfigured, match="is an rlock already and can't be used as a semaphore"):
        semaphore("kinds", 1, timeout=0, using=database).acquire()
    holder.release()
    waiter.join(10)


def test_a_key_is_for_decorators():
    with pytest.raises(TypeError, match="key= gets a decorated function's arguments"):
        semaphore("keyed", key=lambda user: user).try_acquire()

    async def main():
        with pytest.raises(TypeError, match="key= gets a decorated function's arguments"):
            await semaphore("keyed", key=lambda user: user).atry_acquire()

    asyncio.run(main())


def test_a_block_that_has_ended_keeps_nothing(database):
    """However often one object is entered, sync or async, alone or beside others of its blocks."""
    lock = semaphore("blocks", 2, using=database)

    async def main():
        async with lock:
            inside, go_on = asyncio.Event(), asyncio.Event()

            async def other():
                async with lock:
                    inside.set()
                    await go_on.wait()

            task = asyncio.create_task(other())
            await inside.wait()
            go_on.set()
            await task
        async with lock as last:
            pass
        return weakref.ref(last)

    def block():
        with lock as last:
            pass
        return weakref.ref(last)

    for gone in (asyncio.run(main()), block()):
        gc.collect()
        assert gone() is None
    assert lock._blocks not in blocks._entered


class Report:
    """It has a generator that has it, so only the garbage collector ends the generator's block."""

    def __init__(self, lock, wrapped=None):
        self.lines = self.make(wrapped(lock) if wrapped else lock)

    def make(self, block):
        with block:
            yield self
            yield

    async def amake(self, lock):
        async with lock:
            yield self
            yield


@pytest.fixture
def dropped():
    """A function that has a thread leave a ``Report`` in the middle, and has it wait: nothing has collected it yet."""
    end, threads = threading.Event(), []

    def drop(lock, wrapped=None):
        left = threading.Event()

        def leave():
            next(Report(lock, wrapped).lines)
            left.set()
            assert end.wait(60)

        threads.append(run_beside(leave))
        assert left.wait(60)

    gc.disable()
    yield drop
    gc.enable()
    end.set()
    for thread in threads:
        thread.result(60)


def test_a_generator_that_another_thread_ends_gives_back_its_own_permit(database, dropped):
    """The collector ends its block in any thread: one that has a block of that very object keeps its permit."""
    lock = semaphore("generators", 2, timeout=0, using=database)
    dropped(lock)
    with lock as mine:
        assert len(held_rows(database)) == 2
        gc.collect()
        mine.check()
        assert len(held_rows(database)) == 1
    assert held_rows(database) == []
    assert lock._blocks not in blocks._entered


class Wrapped:
    """It enters and leaves a lock for others, in methods of its own."""

    def __init__(self, lock):
        self.lock = lock

    def __enter__(self):
        return self.lock.__enter__()

    def __exit__(self, *exc_info):
        return self.lock.__exit__(*exc_info)


@contextlib.contextmanager
def stacked(lock):
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(lock)


@pytest.mark.parametrize("wrapped", [stacked, Wrapped])
def test_what_enters_for_a_dropped_generator_leaves_its_block(database, dropped, wrapped):
    lock = semaphore("wrapped", 2, timeout=0, using=database)
    dropped(lock, wrapped)
    with lock as mine:
        gc.collect()
        mine.check()
        assert len(held_rows(database)) == 1
    assert held_rows(database) == []
    assert lock._blocks not in blocks._entered


@pytest.mark.process_side
def test_a_block_that_a_thread_is_inside_of_is_left_by_nobody_else(database):
    """As with fixtures, one thread enters and another one leaves, while a third one runs a ``with`` of that object."""
    lock, inside, leave = semaphore("fixture", 2, timeout=0, using=database), threading.Event(), threading.Event()

    def set_up():
        return lock.__enter__()

    def entering():
        permits.append(set_up())
        assert leave.wait(60)

    def working():
        with lock as permit:
            permits.append(permit)
            inside.set()
            assert leave.wait(60)
            permit.check()

    permits = []
    threads = [run_beside(entering)]
    wait_until(lambda: permits)
    threads.append(run_beside(working))
    assert inside.wait(60)
    lock.__exit__(None, None, None)
    assert [permit.released for permit in permits] == [True, False]
    leave.set()
    for thread in threads:
        thread.result(60)
    assert lock._blocks not in blocks._entered


@pytest.mark.rows_only("row statements")
def test_the_collector_ends_a_block_in_the_middle_of_a_statement(database, dropped):
    """Its end waits neither for the session, which this very thread uses, nor for anything else of ours."""
    lock = semaphore("in a statement", 2, timeout=0, using=database)
    with lock:
        dropped(lock)
        keeper_at(database).work.run(lambda cursor: gc.collect())
        wait_until(lambda: len(held_rows(database)) == 1)
        dropped(lock, stacked)
        keeper_at(database).work.run(lambda cursor: gc.collect())
        wait_until(lambda: len(held_rows(database)) == 1)
    assert held_rows(database) == []
    wait_until(lambda: lock._blocks not in blocks._entered)


@pytest.mark.process_side
def test_the_collector_ends_a_block_while_another_is_entered(database, dropped):
    class Key:
        def __hash__(self):
            gc.collect()
            return 1

    lock, key = semaphore("entered", 2, timeout=0, using=database), Key()
    dropped(lock)
    with lock as permit:
        blocks.push(key, permit, None)  # notes the block in a table, by a key
        blocks.remove(key, permit)
        wait_until(lambda: len(held_rows(database)) == 1)
    wait_until(lambda: lock._blocks not in blocks._entered)


@pytest.mark.process_side
@pytest.mark.rows_only("row statements")
def test_a_signal_handler_in_the_middle_of_a_statement(database):
    """What it gives back is left to the keeper; what it asks for, it does not get."""
    mine, other = semaphore("mine", using=database), semaphore("other", using=database)
    permit, found = mine.acquire(), []

    def handle(*_):
        permit.release()
        with pytest.raises(RuntimeError, match="a signal handler or a finaliser has interrupted a statement"):
            other.try_acquire()
        found.append(permit.released)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with semaphore("kept", using=database):
            keeper_at(database).work.run(lambda cursor: signal.raise_signal(signal.SIGUSR1))
            wait_until(lambda: permit.released)
            wait_until(lambda: len(held_rows(database)) == 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(found) == 1
    with other:
        pass
    wait_until(lambda: held_rows(database) == [])


def test_two_stacks_that_others_have_filled(database):
    """Each ends what was entered by it, though a task that has ended did that."""
    lock = semaphore("stacks", 2, using=database)

    async def work(entered, leave):
        async with contextlib.AsyncExitStack() as stack:
            (permit,) = await asyncio.gather(stack.enter_async_context(lock))
            entered.set()
            await leave.wait()
            permit.check()
        assert permit.released

    async def main():
        events = [(asyncio.Event(), asyncio.Event()) for _ in range(2)]
        tasks = []
        for entered, leave in events:
            tasks.append(asyncio.create_task(work(entered, leave)))
            await entered.wait()
        for (_, leave), task in zip(events, tasks, strict=True):
            leave.set()
            await task

    asyncio.run(main())
    assert held_rows(database) == []
    assert lock._blocks not in blocks._entered


def test_a_stack_whose_blocks_another_one_has_taken_over(database):
    """``pop_all()`` makes a new stack of the same blocks: each ends its own, and no other's."""
    lock = semaphore("handed on", 3, timeout=0, using=database)

    def connect(_nth):
        with contextlib.ExitStack() as stack:
            permit = stack.enter_context(lock)
            permit.detach()
            return permit, stack.pop_all()

    async def aconnect():
        async with contextlib.AsyncExitStack() as stack:
            permit = await stack.enter_async_context(lock)
            permit.detach()
            return permit, stack.pop_all()

    (first, one), (second, other) = (run_in_threads(1, connect)[0] for _ in range(2))
    one.close()
    assert (first.released, second.released) == (True, False)
    other.close()
    assert second.released

    async def main():
        (first, one), (second, other) = [await asyncio.create_task(aconnect()) for _ in range(2)]
        await one.aclose()
        assert (first.released, second.released) == (True, False)
        await other.aclose()

    asyncio.run(main())
    assert held_rows(database) == []
    assert lock._blocks not in blocks._entered


@pytest.mark.parametrize("first", [0, 1])
def test_one_helper_of_two_threads(database, first):
    """Each leaves its own block, though the same object enters for both, whichever leaves first."""
    lock = semaphore("helper", 2, timeout=0, using=database)
    guard, inside, leave = Wrapped(lock), threading.Event(), threading.Event()

    def work():
        with guard as permit:
            inside.set()
            assert leave.wait(60)
            permit.check()
        assert permit.released

    with guard as mine:
        other = run_beside(work)
        assert inside.wait(60)
        if first == 1:
            leave.set()
            other.result(60)
        mine.check()
    assert mine.released
    leave.set()
    other.result(60)
    assert held_rows(database) == []


@pytest.mark.parametrize("place", ["locked_atomic", "signal", "acquire_all", "on_commit"])
def test_what_users_run_within_ours_is_given_back_at_once(database, place):
    lock, outer = semaphore("within", timeout=0, using=database), semaphore("outer", timeout=0, using=database)
    held = []

    def use(**_):
        permit_released.disconnect(use)  # once
        for _ in range(2):
            with lock:
                pass
            held.append(lock.status().held)

    def wanted():
        use()
        yield outer

    if place == "locked_atomic":
        locked_atomic("table", using=database)(use)()
    elif place == "signal":
        permit_released.connect(use)
        with outer:
            pass
    elif place == "acquire_all":
        with acquire_all(wanted()):
            pass
    else:
        with locked_atomic("table", using=database):
            transaction.on_commit(use, using=database)
    assert held == [0, 0]


def test_a_permit_has_no_copy(database):
    with semaphore("copied", using=database) as permit:
        for copying in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="A permit can't be copied or pickled"):
                copying(permit)


def test_a_re_entrant_block_that_another_thread_ends(database, dropped):
    lock = rlock("generator", timeout=0, using=database)
    dropped(lock)
    gc.collect()
    with lock as mine:
        mine.check()
    assert held_rows(database) == []
    assert lock._blocks not in blocks._entered


@pytest.mark.parametrize(("make", "others"), [(semaphore, 0), (semaphore, 1), (rlock, 0)])
def test_a_generator_that_the_loop_ends_gives_back_its_own_permit(database, make, others):
    """``break`` leaves an ``async for``, and not the generator's block: the event loop ends that in another task."""
    lock = make("looped", using=database, **({"slots": 2} if make is semaphore else {}))
    leave = asyncio.Event()

    async def block(entered):
        async with lock as permit:
            entered.set()
            await leave.wait()
            permit.check()

    async def main():
        tasks = []
        for _ in range(others):
            entered = asyncio.Event()
            tasks.append(asyncio.create_task(block(entered)))
            await entered.wait()
        async for _ in Report(lock).amake(lock):
            break
        gc.collect()
        given_back = run_beside(lambda: wait_until(lambda: len(held_rows(database)) == others))
        await asyncio.wrap_future(given_back)
        leave.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert held_rows(database) == []
    assert lock._blocks not in blocks._entered


def test_a_permit_says_when_it_expires_where_it_does(database):
    with semaphore("expires", lease=30, using=database) as permit:
        if applocks.are_at(database):
            assert permit.expires_at is None
        else:
            left = permit.expires_at - datetime.datetime.now(datetime.UTC)
            assert 0 < left.total_seconds() <= 30


def test_a_status_is_not_read_in_an_event_loop(database):
    async def main():
        with pytest.raises(SynchronousOnlyOperation, match="astatus"):
            semaphore("status", using=database).status()
        assert (await semaphore("status", using=database).astatus()).held == 0

    asyncio.run(main())
