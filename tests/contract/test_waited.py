"""``permit.waited`` is 0 for a claim that was granted at once, and more for one that somebody held or stood before."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading

import pytest

from django_sqlsem import AcquireTimeoutError, mutex, semaphore
from django_sqlsem.backends import get_backend
from django_sqlsem.backends.rows.acquire import SlotRequest
from django_sqlsem.runtime import keeper as runtime_keeper
from django_sqlsem.runtime.acquisition import State
from django_sqlsem.runtime.keeper import Keeper
from django_sqlsem.runtime.keepers import keeper_for
from django_sqlsem.runtime.queue import LocalQueue
from tests.support import applocks
from tests.support.children import listen, say
from tests.support.databases import OutsideCounter, held_rows
from tests.support.processes import Child
from tests.support.threads import run_in_threads, wait_until

pytestmark = pytest.mark.process_side("postgres")

#: Requests, and how often they come together, each time for another name.
REQUESTS, ROUNDS = 10, 10

both = pytest.mark.parametrize("way", ["sync", "async"])


def acquire(lock, way):
    """Take and detach a permit."""
    permit = asyncio.run(lock.aacquire()) if way == "async" else lock.acquire()
    permit.detach()
    return permit


@contextlib.contextmanager
def warm(database):
    """This process can be reached, and stays so."""
    found = keeper_for(get_backend(database))
    with semaphore("warm", using=database):
        wait_until(lambda: found.own.is_open and (found.reach.presence.near or applocks.are_at(database)), timeout=30)
        yield


@both
def test_what_is_granted_at_once_has_not_waited(database, way):
    lock = semaphore("three", slots=3, using=database)
    permits = [acquire(lock, way) for _ in range(3)]
    assert [permit.waited for permit in permits] == [0, 0, 0]
    permits.pop().release()
    permits.append(acquire(lock, way))  # others hold, and one is free
    assert permits[-1].waited == 0
    for permit in permits:
        permit.release()
    pair = acquire(semaphore("pair", slots=2, take=2, using=database), way)
    assert (pair.waited, pair.slots) == (0, (1, 2))
    pair.release()
    tried = semaphore("tried", using=database).try_acquire()
    assert tried.waited == 0
    tried.release()


@both
def test_what_was_busy_a_moment_ago_and_is_free_now_was_not_waited_for(database, way):
    lock = semaphore("just freed", using=database)
    for _ in range(3):
        holder = acquire(lock, way)
        assert lock.try_acquire() is None
        holder.release()
        permit = lock.acquire(timeout=30)
        assert permit.waited == 0
        permit.release()


@pytest.mark.rows_only("row queue")
@pytest.mark.parametrize(("holder", "way"), [("process", "sync"), ("thread", "sync"), ("thread", "async")])
def test_served_before_its_own_process_knew_of_its_place(database, monkeypatch, holder, way):
    """It has a place in the database, and is handed the slot before the place is noted in its process."""
    places = []
    join = Keeper._join

    def join_late(keeper, hold, waited, *args):
        if waited.queue is not None:
            places.append(hold)
            assert hold.state is State.NEW
            wait_until(lambda: hold.state is State.GRANTED, timeout=60)
        join(keeper, hold, waited, *args)

    monkeypatch.setattr(Keeper, "_join", join_late)
    with contextlib.ExitStack() as stack:
        if holder == "process":
            stack.enter_context(warm(database))
            child = stack.enter_context(Child("hold", database, "late"))
            child.expect("held", timeout=60)
            release = child.send
        else:
            release = acquire(semaphore("late", using=database), "sync").release

        def release_when_it_has_a_place(number):
            if number == 0:
                return acquire(semaphore("late", using=database), way)
            wait_until(lambda: places, timeout=60)
            return release()

        permit, _ = run_in_threads(2, release_when_it_has_a_place, timeout=120)
        assert permit.waited > 0
        permit.release()


@pytest.mark.rows_only("slot rows")
@both
def test_a_new_name_is_never_seen_free_by_others(database, monkeypatch, way):
    seen = []
    create = SlotRequest._create

    def watch(name):
        return [row.slot for row in held_rows(database)], mutex(name, using=database).try_acquire()

    def create_and_be_watched(claim, slots):
        grant = create(claim, slots)
        if not seen:
            name = claim.request.resource.name
            seen.append(run_in_threads(1, lambda _: watch(name)))  # apart from the keeper's thread
        return grant

    monkeypatch.setattr(SlotRequest, "_create", create_and_be_watched)
    for number in range(3):
        permit = acquire(mutex(f"new-{number}", using=database), way)
        assert (permit.waited, seen.pop()) == (0, [([1], None)])
        permit.release()
        assert seen == []


@pytest.mark.rows_only("slot rows")
@both
def test_a_name_that_was_made_meanwhile_has_no_line_while_slots_are_free(database, monkeypatch, way):
    """Its claim found no such name; by now there is one, with one slot taken and one free."""
    look = SlotRequest.look_and_take
    holders = []

    def look_when_it_is_there(claim, **options):
        if claim.request.resource.name == "meanwhile" and not holders:
            holders.append(child)
            child.send()
            child.expect("held", timeout=60)
        return look(claim, **options)

    monkeypatch.setattr(SlotRequest, "look_and_take", look_when_it_is_there)
    code = """
listen()
from tests.support.children import hold
hold(*args)
"""
    with Child(code, database, "meanwhile", 2) as child:
        permit = acquire(semaphore("meanwhile", slots=2, using=database), way)
        assert (permit.waited, permit.slot, holders) == (0, 2, [child])
        permit.release()
        child.send()
        child.expect("released")
        child.finish()


@pytest.mark.rows_only("row queue")
def test_a_try_when_the_last_waiter_of_its_process_has_just_given_up(database, monkeypatch):
    """Nobody waits any more, although the keeper has not yet said so to the database."""
    monkeypatch.setattr(runtime_keeper, "CLEARED", 60.0)
    asked = threading.Event()
    lines, leave = Keeper._lines, LocalQueue._leave

    def left_and_noted(*args):
        found = lines(*args)
        asked.set()
        return found

    def leave_late(*args):
        assert asked.wait(60)
        leave(*args)

    monkeypatch.setattr(Keeper, "_lines", left_and_noted)
    monkeypatch.setattr(LocalQueue, "_leave", leave_late)
    lock = semaphore("given-up", using=database)
    with Child("hold", database, "given-up") as child:
        child.expect("held", timeout=60)
        with pytest.raises(AcquireTimeoutError):
            lock.acquire(timeout=0.2)
        child.send()
        child.expect("released")
        permit = lock.try_acquire()
        assert permit is not None
        permit.release()
        child.finish()


def requests(alias: str, threads: int) -> None:
    """Have so many threads or tasks ask for each of the parent's names at once; each says what it did."""
    counter = OutsideCounter(alias)

    def all_wait(name: str) -> bool:
        return mutex(name, using=alias).status().waiting == REQUESTS - 1

    def ask(name: str) -> str:
        with mutex(name, timeout=60, using=alias) as permit:
            if permit.waited:
                return "left"  # somebody else has just done the work
            with counter.inside():
                say("working")
                wait_until(functools.partial(all_wait, name), timeout=60)
            return f"worked {name}"

    async def aask(name: str) -> str:
        async with mutex(name, timeout=60, using=alias) as permit:
            if permit.waited:
                return "left"
            with counter.inside():
                say("working")
                everybody = functools.partial(wait_until, functools.partial(all_wait, name), timeout=60)
                await asyncio.to_thread(everybody)
            return f"worked {name}"

    async def tasks(names: list[str]) -> list[str]:
        return list(await asyncio.gather(*(aask(name) for name in names)))

    say("ready")
    while (line := listen()) != "end":
        way, *names = line.split()
        names *= threads
        if way == "async":
            done = asyncio.run(tasks(names))
        else:
            done = run_in_threads(len(names), lambda index, names=names: ask(names[index]), timeout=120)
        say(f"done {json.dumps(done)}")


def test_of_ten_identical_requests_one_does_the_work(database, counter):
    """Of five processes, for names that nobody has used before."""
    processes = 5
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(Child("tests.contract.test_waited:requests", database, REQUESTS // processes))
            for _ in range(processes)
        ]
        for child in children:
            child.expect("ready", timeout=90)
        for number in range(0, ROUNDS, 2):  # two names at a time
            for index, child in enumerate(children):
                way = "async" if (index + number // 2) % 2 else "sync"
                child.send(f"{way} work-{number} work-{number + 1}")
            done = []
            for child in children:
                while (line := child.expect(timeout=120)) == "working":
                    pass
                assert line.startswith("done "), (line, child.stderr)
                done += json.loads(line[5:])
            assert sorted(done) == ["left"] * 2 * (REQUESTS - 1) + [
                f"worked work-{number}",
                f"worked work-{number + 1}",
            ], number
            assert counter.entered == number + 2
        for child in children:
            child.send("end")
        for child in children:
            child.finish()


@pytest.mark.rows_only("row statements")
def test_a_try_finds_the_free_slots_of_a_name_that_was_made_meanwhile(database, monkeypatch):
    """Another one makes the name after the try has found nothing, and before it looks why."""
    lock = semaphore("made meanwhile", slots=3, using=database)
    real, first, others = SlotRequest.take_one, threading.Lock(), []

    def take_one(claim):
        grant = real(claim)
        if first.acquire(blocking=False):
            assert grant is None
            run_in_threads(1, lambda _: others.append(acquire(lock, "sync")))
        return grant

    monkeypatch.setattr(SlotRequest, "take_one", take_one)
    permit = lock.try_acquire()
    assert (permit.slot, permit.waited) == (2, 0)
    assert [other.slot for other in others] == [1]
    for each in (permit, *others):
        each.release()
