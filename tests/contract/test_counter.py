"""Units: added by anybody, taken for good, never lost and never taken twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time

import pytest
from django.contrib import admin
from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from django.core.management import call_command
from django.db import connections, transaction
from django.test import RequestFactory

from django_sqlsem import (
    AcquireTimeoutError,
    control,
    locks,
    mutex,
    queries,
    semaphore,
    testing,
)
from django_sqlsem.admin import SemaphoreAdmin
from django_sqlsem.backends import get_counting_backend
from django_sqlsem.backends.rows import counters, statements
from django_sqlsem.locks import Taken, counter
from django_sqlsem.models import SemaphoreRow, WaiterRow
from tests.programs.counter_clients import CounterUser
from tests.support import databases
from tests.support.databases import kill_sessions
from tests.support.processes import Child
from tests.support.threads import run_in_threads, wait_until

REAL = [pytest.param(alias, id=databases.label(alias)) for alias in databases.covered()]
#: Long enough for a grant that nobody takes to lapse (2 s), and for a busy machine.
PATIENT = 30.0
#: So long a process is waited for that may have to wait itself, in seconds.
SOON = 1.0
#: For how long the statements of a waiting process are counted, in seconds.
WATCHED = 4.0
#: Statements of one heartbeat at most.
LOOK = {"postgresql": 1, "sqlite": 4, "mysql": 2, "microsoft": 2}


@pytest.fixture(params=[*REAL, pytest.param("local", id="process-local")])
def world(request):
    """An alias with its real backend, or ``default`` inside the transaction that a ``TestCase`` has."""
    if request.param == "local":
        request.getfixturevalue("db")
        assert get_counting_backend("default").process_local
        yield "default"
        return
    request.getfixturevalue("committed")
    yield request.param


@contextlib.contextmanager
def users(database, count, **options):
    """Some processes that use the units ``jobs``."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(CounterUser(database, "jobs", **options)) for _ in range(count)]
        yield [user.ready() for user in found]


def waiters(database):
    """The rows of those who wait, in order; not of those that have been handed their units."""
    return list(
        WaiterRow.objects.using(database).filter(semaphore__name="jobs", away=False).order_by("queued_us", "pk")
    )


def handed(database):
    """How many have been handed units that they have not taken yet."""
    return WaiterRow.objects.using(database).filter(semaphore__name="jobs", away=True).count()


def wait_for_waiters(database, count, threads=None):
    wait_until(
        lambda: len(found := waiters(database)) == count and threads in (None, sum(row.waiting for row in found)),
        timeout=PATIENT,
        what=f"{count} waiting processes",
    )


def test_what_one_process_sees(world):
    jobs = counter("jobs", 2, using=world)
    assert jobs.status().units == 2  # before it was ever used
    assert jobs.try_acquire(3) is None
    assert jobs.acquire(2, timeout=0) == Taken(jobs, 2, 0.0)  # it did not wait
    assert jobs.value() == 0
    assert jobs.try_acquire() is None
    with pytest.raises(AcquireTimeoutError, match=r"^No 2 units of 'jobs' at once \(there are 0, 0 waiting\)\.$"):
        jobs.acquire(2, timeout=0)
    with pytest.raises(AcquireTimeoutError, match=r"^No unit of 'jobs' within 0.05 s"):
        jobs.acquire(timeout=0.05)
    jobs.release(3)  # by whoever likes, also the very one that will wait
    jobs.release()
    taken = jobs.acquire(3)
    assert (taken.name, taken.count) == ("jobs", 3)
    taken.put_back()
    assert jobs.value() == 4
    assert counter("jobs", 99, using=world).value() == 4  # it began before

    async def main():
        with pytest.raises(SynchronousOnlyOperation, match="aacquire"):
            jobs.acquire()
        with pytest.raises(SynchronousOnlyOperation, match="arelease"):
            jobs.release()
        assert (await jobs.aacquire(4)).count == 4
        assert await jobs.atry_acquire() is None
        waiting = [asyncio.create_task(jobs.aacquire(n)) for n in (2, 1)]
        await asyncio.sleep(0)
        await jobs.arelease(3)
        assert [(await each).count for each in waiting] == [2, 1]
        return await jobs.avalue()

    assert asyncio.run(main()) == 0
    with testing.busy("jobs"):
        jobs.release()
        assert jobs.try_acquire() is None
    assert jobs.acquire().count == 1

    def wait_or_give(index):
        return jobs.acquire(2, timeout=PATIENT) if index else jobs.release(5)

    assert sum(taken.count for taken in run_in_threads(3, wait_or_give) if taken) == 4
    assert jobs.value() == 1


def test_bad_input():
    for wrong in (0, -1, 10**9 + 1):
        with pytest.raises(ValueError, match="n must be from 1 to 1000000000, not"):
            counter("jobs").release(wrong)
        with pytest.raises(ValueError, match="take must be from 1 to"):
            counter("jobs", take=wrong)
    for wrong in (True, 1.0, "1"):
        with pytest.raises(TypeError, match="n must be an int from 1 to 1000000000, not"):
            counter("jobs").acquire(wrong)
    with pytest.raises(ValueError, match="initial must be from 0"):
        counter("jobs", -1)
    with pytest.raises(ValueError, match="timeout must be"):
        counter("jobs", timeout=-1)
    with pytest.raises(TypeError, match="using must be the alias"):
        counter("jobs", using=1)
    with pytest.raises(TypeError, match="nothing is given back at the end of a block"), counter("jobs"):
        pass


def test_kinds_are_kept_apart(world):
    counter("counted", 1, using=world).acquire()
    for lock in (semaphore("counted", 2, using=world), mutex("counted", using=world)):
        with pytest.raises(ImproperlyConfigured, match="'counted' is a counter already"):
            lock.acquire(timeout=0)
    semaphore("slotted", 2, using=world).acquire().release()
    for use in (counter("slotted", using=world).release, counter("slotted", using=world).acquire):
        with pytest.raises(ImproperlyConfigured, match="'slotted' is a semaphore already"):
            use()


def test_producers_and_consumers_in_many_processes(database, counter):
    """Each token is taken once, whatever gives up or is cancelled on the way."""
    total = 80
    jobs = locks.counter("jobs", using=database)
    with contextlib.ExitStack() as stack:
        module = "tests.programs.counter_clients"
        makers = [stack.enter_context(Child(f"{module}:produce", database, "jobs", total // 2)) for _ in range(2)]
        takers = [stack.enter_context(Child(f"{module}:consume", database, "jobs")) for _ in range(2)]
        for child in (*makers, *takers):
            child.expect("ready", timeout=60)
        for child in (*takers, *makers):
            child.send("go")
        for maker in makers:
            maker.expect("done", timeout=120)
        wait_until(lambda: counter.entered >= total - 5, timeout=120, what="most have been taken")
        for taker in takers:
            taker.send("stop")
        told = [json.loads(taker.expect("tally", timeout=60)) for taker in takers]
        for child in (*makers, *takers):
            child.finish()
            assert "Traceback" not in child.stderr, child.stderr
    assert [errors for _, _, errors in told] == [[], []]
    assert sum(gave_up for _, gave_up, _ in told) > 0
    assert sum(taken for taken, _, _ in told) == counter.entered
    wait_until(lambda: handed(database) == 0, timeout=PATIENT)
    assert counter.entered + jobs.value() == total


def test_a_name_that_appears_between_two_statements_loses_no_unit(database, monkeypatch):
    """Another process creates it, and adds to it, after it was looked for and after it was read."""
    with users(database, 1) as (other,):
        added = []

        def meet():
            if len(added) < 2:
                other.tell("release", 1)
                added.append(1)
                with contextlib.suppress(AssertionError):  # it waits for what is locked, as it must
                    other.word("parent", "answer", timeout=SOON)
                    added[-1] = 0

        class Between(counters.Statements):
            def change(self, text, **more):
                changed = super().change(text, **more)
                if text == counters._TOUCH:
                    meet()
                return changed

            def row(self, text, **more):
                found = super().row(text, **more)
                if text == counters._LOCK:
                    meet()
                return found

        monkeypatch.setattr(counters, "Statements", Between)
        jobs = counter("jobs", using=database)
        jobs.release(3)
        for _ in range(sum(added)):
            other.word("parent", "answer", timeout=PATIENT)
        assert jobs.value() == 3 + len(added) == 5


def test_one_release_of_ten_wakes_ten_in_two_processes(database):
    """None of them looks by itself: what wakes them is the release."""
    with users(database, 3, unhurried=True) as (giver, one, other):
        for index in range(5):
            for user in (one, other):
                user.asks(f"w{index}")
        wait_for_waiters(database, 2, threads=None)
        giver.gives(10)
        assert [user.took(f"w{index}") for user in (one, other) for index in range(5)] == [1] * 10
        assert counter("jobs", using=database).status().waiting == 0
        # One that sits in the very process that releases is woken as well.
        giver.asks()
        wait_for_waiters(database, 1)
        giver.gives()
        assert giver.took() == 1
    assert counter("jobs", using=database).value() == 0


def test_who_wants_most_is_not_overtaken(database, monkeypatch):
    monkeypatch.setattr(statements, "PATIENCE_US", 500_000_000)  # as those who are patient have it
    jobs = counter("jobs", using=database)
    with users(database, 3, patient=True) as (big, small, late):
        big.asks(n=5)
        wait_for_waiters(database, 1)
        small.asks()
        wait_for_waiters(database, 2)
        late.asks("pair", n=2)
        wait_for_waiters(database, 3)
        for given in range(1, 5):
            late.gives()
            # There are units, and they gather for the head: nobody else gets one, whether it waits or tries.
            assert late.tries() is None
            assert jobs.try_acquire() is None
            status = jobs.status()
            assert (status.units, [waiter.take for waiter in status.waiters]) == (given, [5, 1, 2])
        late.gives()
        assert big.took() == 5
        jobs.release(2)
        assert small.took() == 1
        assert jobs.value() == 1
        jobs.release()
        assert late.took("pair") == 2
    assert jobs.value() == 0


def test_who_is_killed_while_it_waits_loses_nothing(database):
    jobs = counter("jobs", using=database)
    with users(database, 3) as (first, second, third):
        for user in (first, second, third):
            user.asks(n=2)
            wait_for_waiters(database, 1 + (first, second, third).index(user))
        first.kill()
        jobs.release(2)
        assert second.took() == 2
        # One that has been handed its units, and is killed before it can take them.
        third.stop()
        jobs.release(2)
        assert handed(database) == 1
        third.kill()
        second.asks("b", n=2)
        assert second.took("b") == 2
    assert jobs.value() == 0
    assert handed(database) == 0


def test_who_comes_too_late_for_its_tokens_waits_on(database):
    jobs = counter("jobs", using=database)
    with users(database, 2) as (slow, other):
        slow.asks()
        wait_for_waiters(database, 1)
        slow.stop()
        jobs.release()
        assert handed(database) == 1
        other.asks()
        assert other.took() == 1  # once the grant had lapsed
        slow.cont()
        wait_for_waiters(database, 1)
        assert jobs.value() == 0
        jobs.release()
        assert slow.took() == 1
    assert jobs.value() == 0


def test_what_lapsed_counts_though_nobody_has_looked(database):
    jobs = counter("jobs", using=database)
    with users(database, 1) as (gone,):
        gone.asks(n=3)
        wait_for_waiters(database, 1)
        gone.stop()
        jobs.release(4)
        assert handed(database) == 1  # whoever asks sees one token, and all of them once the grant has lapsed
        assert jobs.status().units in (1, 4)
        gone.kill()
        wait_until(lambda: jobs.value() == 4, timeout=PATIENT)
        assert queries.semaphore("jobs", using=database).units == 4
        assert handed(database) == 1
        assert jobs.acquire(4, timeout=0).count == 4
    assert (jobs.value(), handed(database)) == (0, 0)


def test_who_gives_up_frees_the_way(database):
    jobs = counter("jobs", 1, using=database)
    assert jobs.value() == 1
    jobs.release()
    with users(database, 2) as (many, one):
        many.asks(n=9, timeout=6)
        wait_for_waiters(database, 1)
        one.asks()
        assert "No 9 units of 'jobs' within 6 s (there are" in many.word("a", "busy", PATIENT)
        assert one.took() == 1
    assert jobs.value() == 1


def test_a_rollback_does_not_take_tokens_back(database):
    """But on SQLite, where there is one writer, the caller's transaction is the one in which they are added."""
    jobs = counter("jobs", using=database)
    jobs.release()
    with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=database):
        jobs.release(2)
        assert jobs.acquire(timeout=0).count == 1
        raise ZeroDivisionError
    if connections[database].vendor == "sqlite":
        assert jobs.value() == 1
    else:
        assert jobs.value() == 2
    before = jobs.value()
    with users(database, 1) as (waiter,):
        waiter.asks(n=before + 3)
        wait_for_waiters(database, 1)
        with transaction.atomic(using=database):
            transaction.on_commit(lambda: jobs.release(1), using=database)
            jobs.release(2)
        assert waiter.took() == before + 3
    assert jobs.value() == 0


def test_connections_that_died_unnoticed(database):
    if connections[database].vendor == "sqlite":
        pytest.skip("SQLite has no sessions")
    jobs = counter("jobs", 1, using=database)
    for _ in range(3):
        assert jobs.acquire(timeout=PATIENT).count == 1
        kill_sessions(database)
        connections[database].close()
        jobs.release()
        kill_sessions(database)
        connections[database].close()
    assert jobs.value() == 1


def test_waiting_costs_next_to_nothing(database):
    tasks = 100
    jobs = counter("jobs", using=database)
    with Child("tests.programs.counter_clients:crowd", database, "jobs", tasks) as child:
        child.expect("ready", timeout=60)
        wait_until(lambda: [row.waiting for row in waiters(database)] == [tasks], timeout=PATIENT)

        def told():
            child.send("count")
            return json.loads(child.expect("told"))

        # Of SQL Server a login is watched by one more, which ends soon after.
        wait_until(lambda: told()[0] <= 2, timeout=PATIENT)
        threads, before = told()
        assert threads <= 2
        time.sleep(WATCHED)
        child.send("count")
        _threads, after = json.loads(child.expect("told"))
        during = after[len(before) :]
        assert 0 < len(during) <= 2 * WATCHED * LOOK[connections[database].vendor], during
        jobs.release(tasks)
        child.send("join")
        assert sorted(json.loads(child.expect("took", timeout=60))) == list(range(tasks))
        child.send("end")
        child.finish()
    assert jobs.value() == 0


def test_what_operators_see_and_do(database, capsys, settings):
    jobs = counter("jobs", using=database)
    jobs.release(5)
    call_command("locks", "list", database=database)
    assert "jobs: 5 units, 0 waiting\n" in capsys.readouterr().out
    row = SemaphoreRow.objects.using(database).get(name="jobs")
    settings.SQLSEM = {"DATABASE": database}
    pages = SemaphoreAdmin(SemaphoreRow, admin.site)
    [shown] = pages.known(RequestFactory().get("/"), [row])
    shown.deadlocked = False  # told by the list, which looks for all its rows at once
    assert pages.cells(shown).startswith("5 units")
    with pytest.raises(ValueError, match="'jobs' is a counter: it has no slots"):
        control.set_slots("jobs", 3, by="test", using=database)

    def purged():
        plan = control.plan_purge(idle=0, name_glob="jobs", using=database)
        found = queries.by_name(["jobs"], using=database)
        forced = control.PurgePlan(database, names=tuple(found.values()))
        return bool(plan), control.execute_purge(forced, by="test").deleted

    assert purged() == (False, ())
    with users(database, 1) as (waiter,):
        waiter.asks(n=7)
        wait_for_waiters(database, 1)
        call_command("locks", "show", "jobs", database=database)
        shown = capsys.readouterr().out
        assert "jobs: 5 units, 1 waiting" in shown
        assert "wants 7 units" in shown
        assert control.pause("jobs", by="test", using=database)
        jobs.release(2)
        assert jobs.try_acquire() is None
        assert jobs.value() == 7
        assert jobs.status().free == 0
        assert control.resume("jobs", by="test", using=database)
        assert waiter.took() == 7
    assert purged() == (True, ("jobs",))
    assert not SemaphoreRow.objects.using(database).filter(name="jobs").exists()
    began = counter("jobs", 1, using=database)
    began.acquire(timeout=0)
    assert purged() == (False, ())  # a new name would begin with another unit
    assert began.try_acquire() is None


def test_a_thread_that_is_struck_loses_no_tokens(world, monkeypatch):
    """Whatever strikes between the grant and the caller, the units go back."""
    locks_tokens = sys.modules["django_sqlsem.locks.counter"]  # the package has a function of this name

    jobs = counter("jobs", 1, using=world)
    real = locks_tokens._take_here

    def struck_before(hold):
        raise KeyboardInterrupt

    def struck_after(hold):
        assert real(hold)
        raise KeyboardInterrupt

    for strike in (struck_before, struck_after):
        monkeypatch.setattr(locks_tokens, "_take_here", strike)
        with pytest.raises(KeyboardInterrupt):
            jobs.acquire(timeout=PATIENT)
        monkeypatch.setattr(locks_tokens, "_take_here", real)
        assert jobs.acquire(timeout=PATIENT).count == 1
        jobs.release()
    assert jobs.value() == 1
