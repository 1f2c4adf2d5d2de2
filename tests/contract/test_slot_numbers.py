"""How many slots count: what processes declare, what an operator says, and names that are purged in between."""

from __future__ import annotations

import contextlib
import json
import select
import sys
import threading
import time
from functools import partial

import pytest

from django_sqlsem import AcquireTimeoutError, control, mutex, queries, semaphore
from django_sqlsem.backends.base import Place
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow
from django_sqlsem.runtime.keepers import keeper_at
from tests.programs.contenders import WORK, SharedCounter, Tally, say
from tests.programs.lock_clients import Actor
from tests.support.databases import held_rows
from tests.support.operators import now_us
from tests.support.processes import Child
from tests.support.statements import CountedSession
from tests.support.threads import run_beside, wait_until

#: One heartbeat and what a busy machine adds, in microseconds.
HEARTBEAT_US = 20_000_000


def barge(database, name, *, fair=False, **options):
    """Try once, past all waiters unless it is ``fair``."""
    permit = semaphore(name, fair=fair, using=database, **options).try_acquire()
    if permit is not None:
        permit.detach()
    return permit


@contextlib.contextmanager
def actors_of(database, name, count, **options):
    with contextlib.ExitStack() as stack:
        actors = [stack.enter_context(Actor(database, name, **options)) for _ in range(count)]
        yield [actor.ready() for actor in actors]
        for actor in actors:
            actor.end()


def wait_for_waiters(database, name, count):
    wait_until(lambda: queries.semaphore(name, using=database).waiting == count, what=f"{count} waiters")


def test_of_two_declared_numbers_the_largest_is_the_bound(database):
    with Actor(database, "declared", slots=3) as three:
        three.ready()
        assert three.acquire() == ([1], [held_rows(database)[0].token])
        mine = [barge(database, "declared", slots=5) for _ in range(5)]
        assert [permit.slot for permit in mine if permit] == [2, 3, 4, 5]
        assert mine[4] is None
        assert three.check() is None
        status = queries.semaphore("declared", using=database)
        assert {status.declared_slots, status.other_declared_slots} == {3, 5}
        # The smaller number never takes a slot above it.
        three.release()
        mine[0].release()
        assert three.try_acquire()[0] == [1]
        with Actor(database, "declared", slots=3) as again:
            assert again.ready().try_acquire()[0] == [2]
            assert len(held_rows(database)) == 5
            assert barge(database, "declared", slots=5) is None
            again.release()
            three.release()
            assert len(held_rows(database)) == 3
            for permit in mine[1:4]:
                permit.release()
            again.end()
        three.end()


def test_a_waiter_who_goes_by_fewer_slots_keeps_no_other_slot_from_anybody(database):
    """As while a larger number is deployed: as long as an old process waits, too."""
    with actors_of(database, "raised", 3, slots=1) as (holder, old, older), Actor(database, "raised", slots=3) as new:
        holder.acquire()
        for count, each in enumerate((older, old), start=1):
            each.ask_for()
            wait_for_waiters(database, "raised", count)
        # Who does not wait, and who does.
        two = barge(database, "raised", slots=3, fair=True)
        assert two.slot == 2
        assert new.ready().acquire(timeout=30)[0] == [3]
        # Nobody has overtaken those who wait for slot 1.
        assert barge(database, "raised", slots=3, fair=True) is None
        with Actor(database, "raised", slots=3) as later:
            later.ready().ask_for()
            wait_for_waiters(database, "raised", 3)
            two.release()
            assert later.granted()[0] == [2]
            holder.release()
            assert older.granted()[0] == [1]
            assert barge(database, "raised", slots=3, fair=True) is None
            old.silent(0.3)
            older.release()
            assert old.granted()[0] == [1]
            for each in (old, later, new):
                each.release()
            for each in (later, new):
                each.end()


def test_slots_gather_for_who_came_first_of_those_that_it_could_use(database):
    with actors_of(database, "gathered", 1, slots=3, take=2) as (head,), Actor(database, "gathered", slots=4) as other:
        mine = [barge(database, "gathered", slots=3) for _ in range(3)]
        head.ask_for()
        wait_for_waiters(database, "gathered", 1)
        other.ready().ask_for()
        assert other.granted()[0] == [4]
        mine[0].release()
        assert barge(database, "gathered", slots=4, fair=True) is None
        mine[1].release()
        assert head.granted()[0] == [1, 2]
        mine[2].release()
        for each in (head, other):
            each.release()
        other.end()


@pytest.mark.rows_only("row statements")
def test_only_slots_that_a_waiter_could_use_are_free_to_it(database):
    """Else it would not look whether the holder of its own is dead."""
    few, keeper, session = semaphore("few", slots=1, using=database), keeper_at(database), CountedSession(database)
    barge(database, "few", slots=3).release()
    with contextlib.closing(session), few:
        request = few._request(keeper, "")
        waited = keeper.backend.enrol(session, request, Place(boot_now(), 1), first=False)
        assert waited.queue.free == 0
        keeper.backend.leave(session, request)


def test_in_one_process_too_who_goes_by_fewer_slots_keeps_no_other_from_anybody(world):
    few, many = (semaphore("beside", slots=slots, using=world) for slots in (1, 3))
    held = few.acquire()
    held.detach()
    got = []

    def wait(lock) -> None:
        with lock.acquire(timeout=60) as permit:
            got.append(permit.slot)

    waiting = run_beside(lambda: wait(few))
    wait_until(lambda: keeper_at(world).queues)
    two, three = barge(world, "beside", slots=3, fair=True), many.acquire(30)
    assert (two.slot, three.slot) == (2, 3)
    later = run_beside(lambda: wait(many))
    wait_until(lambda: sum(len(each.waiting) for each in keeper_at(world).queues.values()) == 2)
    three.release()
    later.result(60)
    held.release()
    waiting.result(60)
    assert got == [3, 1]
    two.release()


def test_an_omitted_number_is_the_declared_one(database):
    first = barge(database, "omitted", slots=4)
    mine = [barge(database, "omitted") for _ in range(4)]
    assert [permit.slot for permit in mine if permit] == [2, 3, 4]
    for permit in (first, *mine[:3]):
        permit.release()


@pytest.mark.parametrize("other", [mutex, partial(semaphore, slots=1)], ids=["mutex", "semaphore"])
def test_what_others_go_by_does_not_make_a_request_impossible(world, other):
    """Two of three slots are in use, and a caller with ``slots=1`` was refused."""
    three = semaphore("fewer", slots=3, timeout=0, using=world)
    held = []
    for _ in range(2):
        held.append(three.acquire())
        held[-1].detach()
    assert other("fewer", using=world).try_acquire() is None
    with pytest.raises(AcquireTimeoutError, match=r"No 2 slots of 'fewer' are free \(2 of 3 held\)"):
        semaphore("fewer", slots=3, take=2, timeout=0, using=world).acquire()
    with three:
        pass
    if other is mutex:  # it never was one
        assert three.status().slots == 3
    for permit in held:
        permit.release()


def test_an_operators_growth_wakes_waiters_within_a_heartbeat(database):
    with actors_of(database, "grown", 4, slots=1) as (holder, *waiters):
        holder.acquire()
        for count, waiter in enumerate(waiters, start=1):
            waiter.ask_for()
            wait_for_waiters(database, "grown", count)
        assert control.set_slots("grown", 4, by="test", using=database)
        at = now_us(database)
        slots = [waiter.granted(timeout=20)[0][0] for waiter in waiters]
        assert sorted(slots) == [2, 3, 4]
        assert all(row.acquired_us - at < HEARTBEAT_US for row in held_rows(database))
        assert queries.semaphore("grown", using=database).slots == 4
        for actor in (holder, *waiters):
            assert actor.check() is None
            actor.release()


def test_a_shrink_interrupts_nobody_and_grants_nothing_until_fewer_are_held(database):
    with actors_of(database, "shrunk", 4, slots=3, lease=4) as (*holders, waiter):
        slots = [holder.acquire()[0] for holder in holders]
        assert slots == [[1], [2], [3]]
        assert control.set_slots("shrunk", 1, by="test", using=database)
        waiter.ask_for()
        wait_for_waiters(database, "shrunk", 1)
        time.sleep(4.5)  # longer than their lease
        assert all(holder.check() is None for holder in holders)
        for holder in holders[:2]:
            holder.release()
            waiter.silent(0.3)
            assert barge(database, "shrunk") is None
        released = now_us(database)
        holders[2].release()
        assert waiter.granted(timeout=20)[0] == [1]
        assert held_rows(database)[0].acquired_us - released < HEARTBEAT_US
        assert barge(database, "shrunk") is None
        waiter.release()
        assert control.set_slots("shrunk", None, by="test", using=database)
        assert [holder.acquire()[0] for holder in holders] == [[1], [2], [3]]
        for holder in holders:
            holder.release()


def test_an_operators_number_beats_a_larger_declared_one(database):
    reports = semaphore("governed", slots=5, using=database)
    reports.acquire().release()
    assert control.set_slots("governed", 2, by="test", using=database)
    mine = [barge(database, "governed", slots=5) for _ in range(3)]
    assert [permit and permit.slot for permit in mine] == [1, 2, None]
    for permit in mine[:2]:
        permit.release()


def test_pause_and_resume(database):
    with actors_of(database, "paused", 2, slots=2, lease=4) as (holder, waiter):
        holder.acquire()
        assert control.pause("paused", by="test", using=database)
        assert barge(database, "paused") is None
        waiter.ask_for()
        wait_for_waiters(database, "paused", 1)
        waiter.silent(1.2)
        assert holder.check() is None
        assert control.resume("paused", by="test", using=database)
        at = now_us(database)
        assert waiter.granted(timeout=20)[0] == [2]
        row = SlotRow.objects.using(database).get(semaphore__name="paused", slot=2)
        assert row.acquired_us - at < HEARTBEAT_US
        holder.release()
        waiter.release()


#: For how long at least a name is purged while others use it, in seconds.
PURGED = 1.5


def take_now_and_then(alias: str, name: str) -> None:
    """Take a mutex with pauses until a line comes; tell the tokens, each with a clock that all processes share."""
    tally = Tally()
    seen = []
    lock = semaphore(name, timeout=None, using=alias)
    say("ready")
    with SharedCounter(alias) as counter, tally.noting_errors():
        while not select.select([sys.stdin], [], [], 0)[0]:
            began = time.monotonic()
            with lock as permit, counter.inside():
                seen.append([time.monotonic(), permit.token])
                time.sleep(WORK)
            time.sleep(4 * (time.monotonic() - began))  # nobody is in most of the time, on a busy machine too
    say(f"seen {json.dumps([seen, tally.errors])}")


def test_tokens_grow_while_the_idle_name_is_purged_between_grants(database, counter):
    tokens = []
    for _ in range(4):
        with semaphore("between", using=database) as permit:
            tokens.append(permit.token)
            assert not control.execute_purge(control.plan_purge(idle=0, using=database), by="test").deleted
        plan = control.plan_purge(idle=0, using=database)
        assert control.execute_purge(plan, by="test").deleted == ("between",)
    assert tokens == sorted(set(tokens))

    with contextlib.ExitStack() as stack:
        where = "tests.contract.test_slot_numbers:take_now_and_then"
        children = [stack.enter_context(Child(where, database, "between")) for _ in range(2)]
        for child in children:
            child.expect("ready", timeout=60)
        purged = 0
        began = time.monotonic()
        while time.monotonic() < began + PURGED or not purged or counter.entered <= 10:
            assert time.monotonic() < began + 60
            plan = control.plan_purge(idle=0, name_glob="between", using=database)
            purged += len(control.execute_purge(plan, by="test").deleted)
        for child in children:
            child.send()
        told = [json.loads(child.expect("seen", timeout=60)) for child in children]
        for child in children:
            child.finish()
    assert [errors for _, errors in told] == [[], []]
    assert counter.peak == 1
    assert purged > 0
    by_time = [token for _, token in sorted(each for seen, _ in told for each in seen)]
    assert len(by_time) > 10
    assert by_time == sorted(set(by_time))


@pytest.mark.rows_only("row queue")
def test_who_took_a_place_while_the_name_was_purged_is_served(database):
    """A purge sees nobody wait, and the place is there a moment later: here the rows are deleted after it."""
    lock = semaphore("purged", using=database)
    held = lock.acquire()
    granted = []

    def wait() -> None:
        with lock.acquire(timeout=120) as permit:
            granted.append(permit.slot)

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_until(lambda: WaiterRow.objects.using(database).exists(), timeout=60)
    for model in (SlotRow, SemaphoreRow):  # without the cascade of Django's, as a purge deletes
        model.objects.using(database).all()._raw_delete(database)
    waiter.join(90)
    assert granted == [1]
    held.release()
