"""Draining: newcomers are kept out, the holders leave, and then all goes on. Over processes."""

from __future__ import annotations

import contextlib
import threading

import pytest

from django_sqlsem import (
    AcquireTimeoutError,
    AlreadyHeldError,
    control,
    mutex,
    queries,
    semaphore,
    testing,
)
from django_sqlsem.models import SlotRow, WaiterRow
from tests.contract.test_rwlock import refused, wait_for_waiters
from tests.programs.rwlock_clients import Sharing
from tests.support.databases import held_rows
from tests.support.threads import run_beside, run_in_threads, wait_until

NAME = "work"


@contextlib.contextmanager
def sharing(database, count=2):
    """So many processes that share three slots."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Sharing(database, NAME, slots=3)) for _ in range(count)]
        yield [child.ready() for child in children]
        for child in children:
            if child.process.poll() is None:
                child.end()


def test_holders_finish_and_newcomers_are_kept_out_until_it_is_over(database):
    with sharing(database) as (here, there):
        here.has("a", "slot")
        there.has("b", "slot")
        here.asks("d", "drain")
        wait_for_waiters(database, "whole")

        def nobody_gets_in():
            for options in ({}, {"fair": False}, {"slots": 6}, {"slots": 6, "fair": False}):
                refused(there, "no", "slot", **options)
                refused(here, "no", "slot", **options)

        nobody_gets_in()
        there.asks("barging", "slot", fair=False, slots=5)
        wait_for_waiters(database, "whole", "")
        here.release("a")
        assert here.is_silent("d")
        nobody_gets_in()
        there.release("b")
        assert here.held("d", timeout=40)["slots"][:3] == [1, 2, 3]
        nobody_gets_in()
        control.set_slots(NAME, 8, by="test", using=database)
        nobody_gets_in()
        found = queries.semaphore(NAME, using=database)
        assert [(each.place[:2], found.role(each)) for each in found.holders] == [("1-", "drains")]
        assert found.free == 0
        assert there.is_silent("barging")
        here.release("d")
        there.held("barging", timeout=40)
        for number in range(7):
            here.has(f"n{number}", "slot")
        refused(here, "no", "slot", fair=False)
        for number in range(7):
            here.release(f"n{number}")
        there.release("barging")
    assert held_rows(database) == []


def test_the_semaphores_own_options_do_not_count(database):
    """It waits although nobody may, behind those who came before, and for as long as it is wanted."""
    lost = []
    shared = semaphore(NAME, 3, using=database, max_waiting=0, fair=False, max_hold=1, on_lost=lost.append)
    with sharing(database) as (here, there):
        here.has("a", "slot", take=3)
        there.asks("b", "slot")
        wait_for_waiters(database, "")

        def let_go():
            wait_for_waiters(database, "", "whole")
            here.release("a")
            there.held("b", timeout=40)
            with pytest.raises(AcquireTimeoutError):
                semaphore(NAME, 3, using=database, timeout=0, fair=False).acquire()
            there.release("b")

        helper = run_beside(let_go)
        with shared.exclusive(timeout=120) as permit, testing.clock() as now:
            helper.result(60)
            now.advance(2, renewed=True)
            permit.check()
            assert shared.status().held == 3
            told = threading.Event()
            permit.on_lost(lambda _: told.set())  # after all that the semaphore wants to be called
            with testing.lost(permit):
                assert told.wait(30)
    assert lost == []


@pytest.mark.rows_only("slot rows")
@pytest.mark.parametrize("kind", ["drain", "mutex"])
def test_slots_that_are_made_while_somebody_is_alone_are_closed_until_that_is_over(database, kind):
    """A claim under way that saw the name before may see its new slots."""
    lock = semaphore(NAME, 5, using=database)
    with mutex(NAME, using=database) if kind == "mutex" else semaphore(NAME, 3, using=database).exclusive() as alone:
        assert run_beside(lock.try_acquire).result(60) is None
        slots = SlotRow.objects.using(database).filter(semaphore__name=NAME)
        assert {each.slot for each in slots.filter(closed=True)} == {1, 2, 3, 4, 5} - set(alone.slots)
    lock.acquire().release()
    assert not slots.filter(closed=True).exists()


def test_whoever_drains_and_dies_is_no_longer_in_the_way(database):
    with sharing(database, 3) as (here, there, third):
        there.has("a", "slot")
        here.asks("d", "drain")
        wait_for_waiters(database, "whole")
        there.asks("b", "slot", fair=False)
        wait_for_waiters(database, "whole", "")
        here.kill()  # while it waits
        there.held("b", timeout=40)
        third.asks("d", "drain")
        wait_until(lambda: [row.mode for row in WaiterRow.objects.using(database) if row.pid == third.pid] == ["whole"])
        there.release("a")
        there.release("b")
        third.held("d", timeout=40)
        there.asks("c", "slot")
        third.does("d", "uncount", says="uncounted")
        third.kill()  # while it is drained
        there.held("c", timeout=40)
        there.has("e", "slot", fair=False)
        there.release("c")
        there.release("e")


def test_a_drain_that_gives_up_leaves_nothing(database):
    shared = semaphore(NAME, 2, using=database, timeout=0)
    assert shared.exclusive(timeout=0).release() is None
    with shared as permit:
        with pytest.raises(AlreadyHeldError):
            shared.exclusive()

        def drain(_):
            with pytest.raises(AcquireTimeoutError, match=r"could not be drained within 0\.3 s"):
                shared.exclusive(timeout=0.3)

        run_in_threads(1, drain)
        wait_until(lambda: not WaiterRow.objects.using(database).exists(), timeout=30)
        wait_until(lambda: shared.status().waiting == 0, timeout=30, what="the server has ended its wait")
        run_in_threads(1, lambda _: shared.acquire().release())
        permit.check()
    with shared.exclusive() as permit:
        assert permit.slots == (1, 2)
        assert run_in_threads(1, lambda _: shared.try_acquire()) == [None]
    control.pause(NAME, by="test", using=database)
    with pytest.raises(AcquireTimeoutError, match="paused"):
        shared.exclusive(timeout=0)
    control.resume(NAME, by="test", using=database)
    shared.exclusive(timeout=0).release()
    assert run_in_threads(2, lambda _: shared.acquire(timeout=30).release()) == [None, None]
