"""Deadlocks over named locks: found, told of once, broken if settings say so; and nothing else is taken for one."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import pytest
from django.db import connections

from django_sqlsem import (
    AcquireTimeoutError,
    control,
    mutex,
    queries,
)
from django_sqlsem.core import identity
from django_sqlsem.database import errors
from django_sqlsem.deadlocks import watch
from django_sqlsem.locks import counter, rwlock
from django_sqlsem.models import WaiterRow, WaitRow
from tests.programs.deadlock_clients import Waiter
from tests.support.databases import raw_connection
from tests.support.keepers import chore_of, keeper_of
from tests.support.threads import wait_until

pytestmark = pytest.mark.process_side

A, B, C = ["mutex", "a"], ["mutex", "b"], ["mutex", "c"]
#: A deadlock is told of after some two seconds; the rest is for a busy machine.
SOON = 20.0
#: So long nothing is told of that is none: several looks.
QUIET = 4.0
BREAK = {"SQLSEM_TEST_SETTINGS": json.dumps({"DEADLOCKS": "break"})}
IGNORE = {"SQLSEM_TEST_SETTINGS": json.dumps({"DEADLOCKS": "ignore"})}


def started(*waiters):
    """Wait until each holds what it holds."""
    for each in waiters:
        each.expect("held", timeout=30)


def wait_in_turn(database, *waiters):
    """Let them wait one after the other, each once the last one's wait is known."""
    for number, each in enumerate(waiters):
        wait_until(lambda number=number: len(queries.waits(database)) == number, timeout=SOON, what="one more wait")
        each.go()


def found(database):
    [deadlock] = wait_until(lambda: queries.deadlocks(database), timeout=SOON, what="a deadlock")
    return deadlock


def rows(database):
    return WaitRow.objects.using(database).count()


def end(*waiters):
    for each in waiters:
        each.end()


@pytest.mark.one_server("beacons")
@pytest.mark.process_side("postgres")
def test_two_crossed_mutexes_are_told_of_once_with_both_sides(database):
    with Waiter(database, A, B) as first, Waiter(database, B, A) as second:
        started(first, second)
        wait_in_turn(database, first, second)
        deadlock = found(database)
        assert [(wait.name, wait.pid) for wait in deadlock.waits] == [("b", first.pid), ("a", second.pid)]
        assert [[(held.name, held.pid) for held in wait.held_by] for wait in deadlock.waits] == [
            [("b", second.pid)],
            [("a", first.pid)],
        ]
        assert [[held.name for held in wait.holds] for wait in deadlock.waits] == [["a"], ["b"]]
        assert deadlock.youngest.pid == second.pid
        assert deadlock.names == ("b", "a")
        [told] = wait_until(second.told, timeout=SOON)
        one, other = (f"pid {each.pid} worker" for each in (first, second))
        for side in (f"{one} ", "for 'b', held by ", f"{other} ", "for 'a', held by "):
            assert side in told["text"]
        assert "broken off" not in told["text"]
        first.silent(QUIET)
        assert [len(each.told()) for each in (first, second)] == [0, 1]
        second.kill()
        first.expect("got", timeout=SOON)
        first.expect("left")
        first.end()
    assert not queries.deadlocks(database)
    wait_until(lambda: not queries.waits(database), timeout=SOON)  # the killed one's row has run out


@pytest.mark.process_side("postgres")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["threads", "tasks"])
def test_the_last_one_to_wait_is_broken_off_and_the_other_goes_on(database, asynchronous):
    options = {"env": BREAK, "asynchronous": asynchronous, "timeout": None}
    with Waiter(database, A, B, **options) as first, Waiter(database, B, A, **options) as second:
        started(first, second)
        wait_in_turn(database, first, second)
        message = second.expect("deadlock", timeout=SOON)
        assert message.startswith("Waiting for 'a' was broken off, as it could not have ended: ")
        assert f"pid {first.pid} " in message
        assert f"pid {second.pid} " in message
        second.expect("left")
        first.expect("got", timeout=SOON)
        first.expect("left")
        [told] = wait_until(second.told, timeout=SOON)
        assert told["text"].endswith("The last wait, for 'a', was broken off.")
        assert not first.told()
        end(first, second)
    wait_until(lambda: rows(database) == 0, timeout=SOON)


def test_three_in_a_ring_and_one_that_is_merely_behind_them(database):
    with contextlib.ExitStack() as stack:
        ring = [stack.enter_context(Waiter(database, has, wants, env=BREAK)) for has, wants in ((A, B), (B, C), (C, A))]
        behind = stack.enter_context(Waiter(database, ["mutex", "d"], A, env=BREAK))
        started(*ring, behind)
        wait_in_turn(database, *ring[:2])
        wait_until(lambda: len(queries.waits(database)) == 2, timeout=SOON)
        assert not queries.deadlocks(database)
        ring[2].go()
        wait_until(lambda: queries.semaphore("a", using=database).waiting == 1, timeout=SOON)
        behind.go()
        message = ring[2].expect("deadlock", timeout=SOON)
        assert [f"pid {each.pid} " in message for each in (*ring, behind)] == [True, True, True, False]
        ring[2].expect("left")
        for each in (ring[1], ring[0], behind):
            each.expect("got", timeout=SOON)
            each.expect("left")
        end(*ring, behind)


def test_a_semaphore_whose_holders_both_wait_is_one_only_when_the_last_slot_does(database):
    two = ["semaphore", "two", 2]
    with (
        Waiter(database, two, A) as first,
        Waiter(database, two, A, env=BREAK) as second,
        Waiter(database, A, two) as third,
    ):
        started(first, second, third)
        wait_in_turn(database, first, third)
        time.sleep(QUIET)  # the second one could still give its slot back
        assert not queries.deadlocks(database)
        assert not first.told()
        assert not third.told()
        second.go()
        message = second.expect("deadlock", timeout=SOON)  # as the last one
        assert "for 'two', held by " in message
        assert message.count("for 'a', held by ") == 2
        second.expect("left")
        third.expect("got", timeout=SOON)
        third.expect("left")
        first.expect("got", timeout=SOON)
        first.expect("left")
        end(first, second, third)


def test_a_wait_that_ends_by_itself_is_told_of_and_ends_by_itself(database):
    with Waiter(database, A, B, timeout=30) as first, Waiter(database, B, A, timeout=6) as second:
        started(first, second)
        wait_in_turn(database, first, second)
        wait_until(second.told, timeout=SOON)
        second.expect("timeout", timeout=SOON)
        second.expect("left")
        first.expect("got", timeout=SOON)
        first.expect("left")
        end(first, second)


@pytest.mark.leaves_held
def test_a_name_that_is_paused_is_none_until_it_is_resumed(database):
    with Waiter(database, A, B) as first, Waiter(database, B, A) as second:
        started(first, second)
        control.pause("a", by="a test", using=database)
        wait_in_turn(database, first, second)
        wait_until(lambda: len(queries.waits(database)) == 2, timeout=SOON)
        time.sleep(QUIET)
        assert not queries.deadlocks(database)
        assert not first.told()
        assert not second.told()
        control.resume("a", by="a test", using=database)
        found(database)
        wait_until(second.told, timeout=SOON)


def test_an_upgrade_waits_for_a_reader_that_waits_for_what_it_holds(database):
    """The upgrading thread holds the lock of readers and writers itself, and nothing else."""
    reads, upgrades = ["read", "x"], ["upgradable", "x"]
    with Waiter(database, upgrades, ["upgrade"], env=BREAK) as first, Waiter(database, reads, A) as reader:
        with mutex("a", using=database).acquire(20):
            started(first, reader)
            wait_in_turn(database, reader, first)
            wait_until(lambda: len(queries.waits(database)) == 2, timeout=SOON)
            time.sleep(QUIET)  # the mutex is held by somebody who does not wait
            assert not queries.deadlocks(database)
        reader.expect("got", timeout=SOON)
        reader.expect("left")
        first.expect("got", timeout=SOON)
        end(first, reader)


def test_a_reader_behind_a_writer_that_waits_for_a_reader(database):
    """The writer holds nothing; but who reads waits for what the other one holds, which stands in line behind it."""
    with (
        Waiter(database, ["read", "x"], A, env=BREAK) as reader,
        Waiter(database, A, ["read", "x"], env=BREAK) as other,
    ):
        started(reader, other)
        writer = threading.Thread(target=lambda: rwlock("x", using=database).write().acquire(60).release())
        writer.start()
        wait_until(lambda: queries.semaphore("x", using=database).waiting == 1, timeout=SOON)
        wait_in_turn(database, reader, other)
        message = other.expect("deadlock", timeout=SOON)
        assert f"for 'x', behind {identity.current().host} pid " in message
        other.expect("left")
        reader.expect("got", timeout=SOON)
        reader.expect("left")
        writer.join(SOON)
        assert not writer.is_alive()
        end(reader, other)


@pytest.mark.parametrize("kind", ["write", "rlock", "drain"])
def test_other_kinds(database, kind):
    has, wants = {
        "write": (["write", "x"], ["read", "x"]),
        "rlock": (["rlock", "x"], ["rlock", "x"]),
        "drain": (["semaphore", "x", 3], ["drain", "x", 3]),
    }[kind]
    with Waiter(database, has, A) as first, Waiter(database, A, wants, env=BREAK) as second:
        started(first, second)
        wait_in_turn(database, first, second)
        second.expect("deadlock", timeout=SOON)
        second.expect("left")
        first.expect("got", timeout=SOON)
        first.expect("left")
        end(first, second)


def test_a_wait_is_shown_while_it_lasts_and_one_that_holds_nothing_is_not(database):
    lock = mutex("a", using=database)
    with lock.acquire(20) as permit, Waiter(database, B, A) as waiter:
        started(waiter)
        holds_nothing = threading.Thread(target=lambda: lock.acquire(60).release())
        holds_nothing.start()
        waiter.go()
        [wait] = wait_until(lambda: queries.waits(database), timeout=SOON)
        assert (wait.name, wait.pid, wait.thread, wait.take, wait.mode) == ("a", waiter.pid, "worker", 1, "mutex")
        assert [held.name for held in wait.holds] == ["b"]
        assert [(held.name, held.token) for held in wait.held_by] == [("a", permit.token)]
        assert wait.age >= watch.LATE * 0.9
        assert str(wait).startswith(f"{wait.host} pid {waiter.pid} worker (")
        assert str(wait).endswith(", and holds 'b' (slot 1)")
        time.sleep(watch.LATE + 1)
        assert queries.semaphore("a", using=database).waiting == 2
        assert rows(database) == 1
        permit.release()
        waiter.expect("got", timeout=SOON)
        waiter.expect("left")
        wait_until(lambda: rows(database) == 0, timeout=SOON)
        holds_nothing.join(SOON)
        waiter.end()


def test_the_end_of_the_process_takes_its_rows_away_beside_another_writer(database, monkeypatch):
    if connections[database].vendor != "sqlite":
        pytest.skip("others have more than one writer")
    lock, keeper = mutex("a", using=database), keeper_of(database)

    def wait():
        with mutex("b", using=database).acquire(20), lock.acquire(60):
            pass

    thread = threading.Thread(target=wait)
    with contextlib.closing(raw_connection(database)) as raw, lock.acquire(20):
        cursor = raw.cursor()
        thread.start()
        wait_until(lambda: rows(database) == 1, timeout=SOON)
        refused = []

        class Repeated:
            def uniform(self, *bounds):
                refused.append(bounds)
                cursor.execute("ROLLBACK")
                return 0.0

        with keeper.loop.stopped(), monkeypatch.context() as patch:
            patch.setattr(errors, "chance", Repeated())
            cursor.execute("BEGIN IMMEDIATE")
            chore_of(database, watch.DeadlockWatch.name).finish(time.monotonic())
        assert len(refused) == 1
        assert rows(database) == 0
        keeper.loop.ensure()
    thread.join(SOON)
    assert not thread.is_alive()


def test_what_was_handed_on_is_not_held_meanwhile_and_tokens_belong_to_nobody(database):
    """Three threads wait for as long: two of them can't be part of a deadlock, and are not written down."""

    def take_and_wait(name, lock, detached):
        with mutex(name, using=database).acquire(20) as permit:
            if detached:
                permit.detach()
            with contextlib.suppress(AcquireTimeoutError):
                lock.acquire(timeout=watch.LATE + 3)

    with mutex("a", using=database).acquire(20):
        lock = mutex("a", using=database)
        waits = (("b", lock, True), ("c", counter("d", using=database), False), ("e", lock, False))
        threads = [threading.Thread(target=take_and_wait, args=each) for each in waits]
        for each in threads:
            each.start()
        wait_until(lambda: rows(database), timeout=SOON)
        while any(each.is_alive() for each in threads):
            assert rows(database) <= 1
            time.sleep(0.1)
        for each in threads:
            each.join(SOON)
    wait_until(lambda: rows(database) == 0, timeout=SOON)


def test_ignored_waits_write_nothing(database):
    with Waiter(database, A, B, env=IGNORE, timeout=5) as first, Waiter(database, B, A, env=IGNORE) as second:
        started(first, second)
        first.go()
        second.go()
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            assert rows(database) == 0
            time.sleep(0.1)
        first.expect("timeout", timeout=SOON)
        second.expect("got", timeout=SOON)
        end(first, second)


def test_it_is_an_event_in_the_history_of_each_name(database):
    with Waiter(database, A, B) as first, Waiter(database, B, A, env=BREAK) as second:
        started(first, second)
        wait_in_turn(database, first, second)
        second.expect("deadlock", timeout=SOON)
        end(first, second)  # what they have to tell is written at their ends
    events = [event for name in "ab" for event in queries.events(name, using=database)]
    told = {event.name: event for event in events if event.what == "deadlock"}
    assert {name: event.pid for name, event in told.items()} == {"b": first.pid, "a": second.pid}
    for event in told.values():
        assert f"pid {first.pid} " in event.detail
        assert f"pid {second.pid} " in event.detail


@pytest.fixture(params=["missing", "locked"])
def trouble(request, database):
    """The table is missing, or somebody has locked it, until the context that this returns ends."""
    connection = connections[database]

    @contextlib.contextmanager
    def missing():
        with connection.schema_editor() as editor:
            editor.alter_db_table(WaitRow, "sqlsem_wait", "sqlsem_elsewhere")
        try:
            yield
        finally:
            with connection.schema_editor() as editor:
                editor.alter_db_table(WaitRow, "sqlsem_elsewhere", "sqlsem_wait")

    @contextlib.contextmanager
    def locked():
        with contextlib.closing(raw_connection(database)) as raw:
            cursor = raw.cursor()
            if connection.vendor == "postgresql":
                cursor.execute("BEGIN")
                cursor.execute("LOCK TABLE sqlsem_wait")
            else:
                cursor.execute("LOCK TABLES sqlsem_wait WRITE")
            yield
            cursor.execute("ROLLBACK" if connection.vendor == "postgresql" else "UNLOCK TABLES")

    if request.param == "locked" and connection.vendor == "sqlite":
        pytest.skip("its only lock is that of the whole file")
    return missing if request.param == "missing" else locked


@pytest.mark.process_side("postgres")
@pytest.mark.rows_only("lease")
def test_no_permit_and_no_waiter_suffers_from_the_table(database, trouble, counter):
    """Two with short leases wait crosswise, and one more stands in line: all goes on as if nothing were amiss."""
    env = {"SQLSEM_TEST_SETTINGS": json.dumps({"LEASE": 2})}
    with (
        Waiter(database, A, B, env=env, timeout=12, stays=True) as first,
        Waiter(database, B, A, env=env, timeout=40) as second,
        Waiter(database, C, ["mutex", "d"], env=env) as third,
    ):
        with mutex("d", using=database).acquire(20), trouble():
            started(first, second, third)
            for each in (first, second, third):
                each.go()
            wait_until(lambda: WaiterRow.objects.using(database).count() == 3, timeout=SOON)
            places = set(WaiterRow.objects.using(database).values_list("pk", flat=True))
            wait_until(lambda: first.told("WARNING"), timeout=SOON)
            first.expect("timeout", timeout=30)  # after several leases
            assert set(WaiterRow.objects.using(database).values_list("pk", flat=True)) <= places
            for each in (first, second, third):
                assert each.told() == []  # no permit was lost
            warned = [told["text"] for told in first.told("WARNING")]
            assert len([text for text in warned if "cannot be looked for" in text]) == 1
        first.send("leave")
        second.expect("got", timeout=SOON)
        third.expect("got", timeout=SOON)
        end(first, second, third)


@pytest.mark.process_side("postgres")
@pytest.mark.rows_only("lease")
def test_it_is_looked_for_again_once_the_table_is_there(database, monkeypatch, trouble, caplog):
    monkeypatch.setattr(watch, "REST", 1.0)
    caplog.set_level("WARNING", logger="django_sqlsem")
    lock = mutex("a", using=database)

    def wait():
        with mutex("b", using=database).acquire(20), lock.acquire(60):
            pass

    def said(text):
        return [record for record in caplog.records if text in record.getMessage()]

    thread = threading.Thread(target=wait)
    with lock.acquire(20) as permit:
        with trouble():
            thread.start()
            wait_until(lambda: said("cannot be looked for now"), timeout=SOON)
            time.sleep(2)
        wait_until(lambda: queries.waits(database), timeout=SOON)
        permit.check()
    thread.join(SOON)
    assert len(said("cannot be looked for now")) == len(said("are looked for again")) == 1
    wait_until(lambda: rows(database) == 0, timeout=SOON)
