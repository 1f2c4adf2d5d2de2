"""A value that is rebuilt once a period: by one caller of all processes, while the others get the old one at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading

import pytest
from asgiref.sync import async_to_sync
from django.core.cache import cache
from django.db import connections, transaction
from django.db.models import F

from django_sqlsem import AlreadyHeldError, queries
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.models import RefreshRow, SlotRow
from django_sqlsem.refresh import refresh_every
from django_sqlsem.refresh.job import Job
from tests.programs.refresh_clients import HOUR, Refresher, field_of, shared_cache
from tests.support import applocks, tds
from tests.support.threads import run_beside, run_in_threads, wait_until
from tests.testapp.models import Probe

NAME = "best-sellers"


@pytest.fixture(params=["cache", "field"])
def home(request, database):
    """Where values are kept."""
    Probe.objects.using(database).create(name="shop")
    return request.param


@pytest.fixture
def team(database, tmp_path):
    """A function that starts processes that all share one cache."""
    with contextlib.ExitStack() as stack:

        def start(*environments, home="cache", **options):
            found = [
                stack.enter_context(Refresher(database, tmp_path / "cache", home, env=each, **options))
                for each in environments or ({}, {})
            ]
            return [each.ready() for each in found]

        yield start


def row_of(database):
    return RefreshRow.objects.using(database).get(name=NAME)


def let_the_period_pass(database):
    assert RefreshRow.objects.using(database).update(built_us=F("built_us") - (HOUR + 1) * 1_000_000)


def kill(process, database):
    """End a builder whose row says that it has a beacon, so that its lock need not wait for the end of its lease."""
    if not applocks.are_at(database):
        rows = SlotRow.objects.using(database).filter(semaphore__name=NAME, pid=process.pid, beacon=True)
        wait_until(rows.exists, timeout=60)
    process.kill()


def ask_until_it_builds(process, old):
    """Have it ask again and again: it gets the old value while somebody else may be building."""

    def begins():
        process.send("get")
        line = process.expect(timeout=60)
        assert line in ("building", f"got {old}")
        return line == "building"

    wait_until(begins, timeout=90)


def test_one_builds_and_the_others_get_the_old_value_at_once(database, counter, home, team):
    a, b, c = processes = team({}, {}, {}, home=home)
    for process, verb in ((a, "get"), (b, "aget"), (c, "get")):
        process.send(verb)
    # Nobody has a value yet: one builds it, and the others wait.
    wait_until(lambda: sum("building" in process.lines for process in processes) == 1, timeout=60)
    (builder,) = [process for process in processes if "building" in process.lines]
    wait_until(lambda: queries.semaphore(NAME, using=database).waiting == 2, timeout=60)
    builder.building()
    assert builder.builds(1) == 1
    assert [process.got() for process in processes if process is not builder] == [1, 1]
    assert a.get("flood 4") == [1] * 8
    assert counter.entered == 1

    let_the_period_pass(database)
    a.begins()
    # While it is being built, all the others get the old value; the builder goes on only when they have it.
    for process in (b, c):
        assert process.get("flood 4") == [1] * 8
    assert a.builds(2) == 2
    assert [process.get("flood 4") for process in processes] == [[2] * 8] * 3
    assert (counter.entered, counter.peak) == (2, 1)


def test_who_comes_too_late_to_build_does_not_build_again(database, monkeypatch):
    """It has seen that the value is due, and gets the lock when somebody else has built it meanwhile."""
    built = []
    best = refresh_every(NAME, HOUR, lambda: built.append(0) or len(built), using=database)
    look = Job.look
    others = []

    def look_and_be_overtaken(job, **options):
        found = look(job, **options)
        if threading.current_thread() is threading.main_thread() and not options:
            others.extend(run_in_threads(1, lambda _: best.get()))
        return found

    monkeypatch.setattr(Job, "look", look_and_be_overtaken)
    assert (best.get(), others, len(built)) == (1, [1], 1)  # without an old value
    let_the_period_pass(database)
    assert (best.get(), others, len(built)) == (2, [1, 2], 2)  # with one


@pytest.mark.one_server("beacons")
@pytest.mark.leaves_held
def test_a_builder_that_is_killed_does_not_block_the_next(database, counter, team):
    a, b = team()
    a.begins()
    b.send("get")
    wait_until(lambda: queries.semaphore(NAME, using=database).waiting == 1, timeout=60)
    kill(a, database)
    b.building()  # it has waited, as there was no old value
    assert b.builds(1) == 1
    (c,) = team({})
    let_the_period_pass(database)
    c.begins()
    assert b.get() == 1
    kill(c, database)
    ask_until_it_builds(b, old=1)
    assert b.builds(2) == 2
    assert b.get() == 2
    assert counter.entered == 4


@pytest.mark.rows_only("lease")
def test_a_late_builders_value_does_not_overwrite_the_newer_one(database, counter, home, team):
    a, b = team(home=home, lease=1.5)
    a.begins()
    assert a.builds(1) == 1
    let_the_period_pass(database)
    a.begins()
    a.stop()  # past its lease: the next one may build
    ask_until_it_builds(b, old=1)
    assert b.builds(3) == 3
    token = row_of(database).token
    a.cont()
    assert a.builds(2) == 3  # it has built 2, and gets what counts
    assert "came too late" in a.stderr
    assert [a.get(), b.get("aget")] == [3, 3]
    assert (row_of(database).token, counter.entered) == (token, 3)
    assert row_of(database).pid == b.pid


def test_wrong_clocks_change_nothing(database, counter, team, wrong_clock):
    ahead, behind, right = team(wrong_clock("+1d"), wrong_clock("-1d"), {})
    processes = [ahead, behind, right]
    for number, builder in enumerate(processes, start=1):
        builder.begins()
        assert builder.builds(number) == number
        # For the one ahead it was built yesterday, for the one behind it will be tomorrow.
        assert [process.get() for process in processes] == [number] * 3
        assert counter.entered == number
        assert queries.refreshes(using=database)[0].age < 300
        let_the_period_pass(database)


def test_a_build_that_raises(database, team):
    a, b = team(retry_after=1000)
    a.begins()
    a.send("raise no books")
    assert a.expect("failed") == "RuntimeError: no books"
    b.send("get")  # there is no old value, and nobody tries again so soon
    assert b.expect("failed").startswith(f"BuildFailedError: The build of {NAME!r} failed ")
    b.begins("now")
    assert b.builds(1) == 1
    let_the_period_pass(database)
    a.begins()
    a.send("raise no books again")
    assert a.expect("failed") == "RuntimeError: no books again"
    assert [b.get(), a.get("aget")] == [1, 1]
    RefreshRow.objects.using(database).update(failed_us=F("failed_us") - 1000 * 1_000_000)
    b.begins()
    assert b.builds(2) == 2
    assert row_of(database).failed_us is None


def test_a_wait_for_the_first_build_ends_and_names_the_builder(database, team):
    a, b = team(timeout=0.3)
    a.begins()
    b.send("get")
    told = b.expect("failed", timeout=60)
    assert told.startswith("AcquireTimeoutError: ")
    assert f"pid {a.pid}" in told
    b.send("aget")
    assert b.expect("failed", timeout=60).startswith("AcquireTimeoutError: ")
    assert a.builds(1) == 1
    assert b.get() == 1


def test_a_call_that_is_cancelled_while_a_thread_builds(database):
    """Nothing stops the thread: nobody else builds before it has ended, and what it has built counts."""
    begun, go_on, built = threading.Event(), threading.Event(), []

    def build():
        begun.set()
        assert go_on.wait(30)
        built.append(1)
        return len(built)

    best = refresh_every(NAME, HOUR, build, using=database)

    async def main():
        caller = asyncio.create_task(best.aget())
        await asyncio.to_thread(begun.wait, 30)
        for _ in range(2):
            caller.cancel()
            await asyncio.sleep(0.1)
        held = run_beside(lambda: queries.semaphore(NAME, using=database).held)
        assert await asyncio.wrap_future(held) == 1
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert await best.aget() == 1

    asyncio.run(main())
    assert len(built) == 1


def test_out_of_date_while_it_is_being_built(database, counter, team):
    a, b = team()
    a.begins()
    assert b.get("invalidate") is None
    assert a.builds(1) == 1
    b.begins()  # what was built may lack what has changed
    assert a.get() == 1
    assert b.builds(2) == 2
    assert [a.get(), counter.entered] == [2, 2]


def test_a_cache_that_loses_a_value_and_none_as_a_value(database, settings, tmp_path):
    settings.CACHES = shared_cache(str(tmp_path))
    values = [None, None, 3]
    best = refresh_every(NAME, HOUR, lambda: values.pop(0), using=database)
    assert (best(), best(), len(values)) == (None, None, 2)
    cache.clear()
    assert (best(), best(), len(values)) == (None, None, 1)
    best.invalidate()
    assert (best(), best(), len(values)) == (3, 3, 0)
    assert len(list(tmp_path.glob("*.djcache"))) == 1  # what it replaces is gone


def test_a_value_read_in_a_serializable_transaction_keeps_nobody_from_rebuilding_it(database):
    """Where a plain read locks the row until the end."""
    if not dialect_for(connections[database]).reads_may_lock:
        pytest.skip("reads lock nothing")
    if tds.is_stand_in(database):
        pytest.skip("the stand-in has no serializable transactions")
    values = itertools.count(1)
    best = refresh_every(NAME, HOUR, lambda: next(values), using=database)
    with connections[database].cursor() as cursor:
        session = "" if connections[database].vendor == "microsoft" else "SESSION"
        cursor.execute(f"SET {session} TRANSACTION ISOLATION LEVEL SERIALIZABLE")
    try:
        assert best.get() == 1
        with transaction.atomic(using=database):
            assert best.get() == 1
            assert run_beside(best.now).result(60) == 2
    finally:
        connections[database].close()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["get", "aget"])
def test_in_a_transaction_that_is_rolled_back(database, home, asynchronous):
    if asynchronous and connections[database].vendor == "sqlite":
        pytest.skip("a coroutine has a session of its own, and SQLite one writer, which is the transaction")
    built = []
    where = {"field": field_of(database)} if home == "field" else {}
    timeout = 30 if asynchronous else 0.1  # a coroutine waits for the connection, too
    best = refresh_every(NAME, HOUR, lambda: built.append(0) or len(built), using=database, timeout=timeout, **where)
    # On SQLite the caller's transaction is the only writer; a field is written in it on purpose.
    undone = home == "field" or connections[database].vendor == "sqlite"
    with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=database):
        get = async_to_sync(best.aget) if asynchronous else best.get
        assert (get(), best()) == (1, 1)
        if home == "field":
            assert queries.semaphore(NAME, using=database).held == 1  # nobody builds what would not be seen yet
        raise ZeroDivisionError
    assert best() == 2 if undone else 1
    assert Probe.objects.using(database).get(name="shop").peak == (best() if home == "field" else 0)


def test_out_of_date_in_the_transaction_that_has_built_it(database, home):
    """The row is locked by the caller's own transaction, so that any other session would wait for it in vain."""
    values = itertools.count(1)
    where = {"field": field_of(database)} if home == "field" else {}
    best = refresh_every(NAME, HOUR, lambda: next(values), using=database, **where)
    for known in (False, True):  # the transaction makes the row, and then only locks it
        with transaction.atomic(using=database):
            old = best()
            best.invalidate()
            # A field's lock is kept until the COMMIT, and its old value is what there is.
            assert best() == old + (home == "cache")
            if home == "field":
                with pytest.raises(AlreadyHeldError, match=NAME):
                    best.now()
                async_to_sync(best.ainvalidate)()
            else:
                assert best.now() == old + 2
                best.invalidate()
        row = row_of(database)
        assert row.invalidations > row.built_for, known
        best()
        best.invalidate()
    assert row_of(database).invalidations == row_of(database).built_for + 1


def test_out_of_date_in_a_transaction_that_is_rolled_back(database):
    values = itertools.count(1)
    Probe.objects.using(database).create(name="shop")
    best = refresh_every(NAME, HOUR, lambda: next(values), using=database, field=field_of(database))
    assert best() == 1
    let_the_period_pass(database)
    before = row_of(database)
    with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=database):
        assert best() == 2
        best.invalidate()
        raise ZeroDivisionError
    after = row_of(database)
    assert (after.token, after.invalidations) == (before.token, before.invalidations)
    best.invalidate()  # by a session of its own again
    assert best() == 3
    assert Probe.objects.using(database).get(name="shop").peak == 3
