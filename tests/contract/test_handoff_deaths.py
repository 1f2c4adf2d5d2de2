"""Waiters that die, stop or lose their sessions, and those behind them."""

from __future__ import annotations

import json
import os
import time

import pytest
from django.db import connections

from django_sqlsem import mutex
from django_sqlsem.models import SlotRow, WaiterRow
from tests.programs.queue_clients import Queuer
from tests.support import applocks
from tests.support.databases import held_rows, kill_sessions, session_ids
from tests.support.operators import now_us
from tests.support.processes import Child
from tests.support.threads import wait_until

HEARTBEAT = 20.0
#: What is handed to the dead is free after 2 s; the rest is for a busy machine.
LAPSE = 20.0


def pids(database, **conditions):
    """Who waits, in order."""
    rows = WaiterRow.objects.using(database).filter(**conditions)
    return list(rows.order_by("queued_us", "pk").values_list("pid", flat=True))


def live(database):
    """Whose places have not lapsed, in order."""
    return pids(database, expires_us__gt=now_us(database))


def join(database, child, who="a", **options):
    """Have a process ask, and wait until it is in the queue."""
    before = len(pids(database))
    child.ask(who, **options)
    wait_until(lambda: len(pids(database)) == before + 1, what="one more waiter")


@pytest.fixture(params=["beacons", "leases"])
def trio(request, database):
    """A process that holds the only slot of ``queue``, and two that wait, with and without beacons."""
    if request.param == "leases" and applocks.are_at(database):
        pytest.skip(f"rows only: {applocks.ROWS_ONLY['beacons']}")
    env = {} if request.param == "beacons" else {"SQLSEM_TEST_SETTINGS": json.dumps({"BEACONS": False})}
    with (
        Queuer(database, "queue", env=env) as holder,
        Queuer(database, "queue", env=env) as first,
        Queuer(database, "queue", env=env) as second,
    ):
        for each in (holder, first, second):
            each.ready()
        holder.takes()
        join(database, first)
        join(database, second)
        yield holder, first, second


def test_the_first_waiter_is_killed(database, counter, trio):
    holder, first, second = trio
    first.kill()
    released = holder.release()
    assert second.held()["at"] - released < LAPSE
    assert second.check() == "ours"
    second.release()
    holder.takes(timeout=30)
    holder.release()
    assert counter.peak == 1
    for each in (holder, second):
        each.end()
    assert pids(database) in ([], [first.pid])  # whose row ends by itself


def test_the_first_waiter_is_killed_as_it_is_granted(database, counter, trio):
    holder, first, second = trio
    first.stop()
    released = holder.release()
    wait_until(lambda: [row.pid for row in held_rows(database)] == [first.pid], timeout=LAPSE)
    first.kill()
    assert second.held()["at"] - released < LAPSE
    second.release()
    assert counter.peak == 1


@pytest.mark.parametrize("stopped_for", [0.5, 1.5, 2.5, 6.0])
@pytest.mark.rows_only("row grants")
def test_the_first_waiter_is_stopped(database, counter, trio, stopped_for):
    """Whether it wakes before its grant has lapsed or after it, it holds only what is its own."""
    holder, first, second = trio
    first.stop()
    stopped = time.monotonic()
    released = holder.release()
    assert held_rows(database)[0].pid == first.pid
    if stopped_for > 3.0:
        assert second.held(timeout=LAPSE)["at"] - released < LAPSE
    while time.monotonic() < stopped + stopped_for:
        time.sleep(0.01)
    first.cont()
    order = [first, second]
    if stopped_for > 3.0:
        # It asks anew, and keeps its rank.
        wait_until(lambda: pids(database) == [first.pid], timeout=HEARTBEAT)
        assert first.is_silent()
        assert second.check() == "ours"
        second.release()
        order = [first]
    for _ in order:
        [row] = wait_until(lambda: held_rows(database), timeout=LAPSE)
        owner = wait_until(
            lambda: next((each for each in order if not each.is_silent()), None), timeout=LAPSE, what="somebody held"
        )
        told = owner.held()
        assert owner.check() == "ours"
        row = SlotRow.objects.using(database).get(semaphore__name="queue")
        assert (row.pid, [row.token]) == (owner.pid, told["tokens"])
        owner.release()
    assert counter.peak == 1
    for each in trio:
        each.end()
    assert pids(database) == []


@pytest.mark.rows_only("row statements")
def test_old_word_of_a_grant_that_has_lapsed(database, counter, trio):
    """The first waiter is held up in its heartbeat, asks anew, and only then hears of what it was once granted."""
    holder, first, second = trio
    first.gate("before", "UPDATE sqlsem_waiter SET expires_us")
    first.reached()
    released = holder.release()
    assert held_rows(database)[0].pid == first.pid
    assert second.held()["at"] - released < LAPSE
    first.tell("open", "before")
    wait_until(lambda: pids(database) == [first.pid], timeout=HEARTBEAT)
    time.sleep(0.5)  # it has heard of everything by now
    assert first.is_silent()
    assert second.check() == "ours"
    released = second.release()
    assert first.held()["at"] - released < HEARTBEAT
    assert first.check() == "ours"
    first.release()
    assert counter.peak == 1
    for each in trio:
        each.end()


@pytest.mark.rows_only("lease")
def test_a_waiter_that_was_stopped_for_long_is_passed_over(database, counter, trio):
    holder, first, second = trio
    first.stop()
    row = WaiterRow.objects.using(database).get(pid=first.pid)
    wait_until(lambda: now_us(database) > row.expires_us + 700_000, what="its place has lapsed")
    released = holder.release()
    assert second.held()["at"] - released < HEARTBEAT
    first.cont()
    wait_until(lambda: live(database) == [first.pid], what="it is there again")
    holder.ask("late")
    wait_until(lambda: live(database) == [first.pid, holder.pid], what="it is before who came later")
    second.release()
    first.held()
    assert holder.is_silent("late")
    first.release()
    holder.held("late")
    holder.release("late")
    assert counter.peak == 1


HANDS_OVER_TO_ITSELF = """
import os, signal, threading
from django_sqlsem import mutex
from django_sqlsem.backends.rows.backend import RowsBackend

shared = mutex("slept", lease=2, timeout=60, using=args[0])
release, wait, again, armed = RowsBackend.release, RowsBackend.wait, threading.Event(), []
handing = threading.Lock()

def not_meanwhile(self, *args):
    with handing:  # else the keeper may see the grant before the process is stopped
        pass
    return wait(self, *args)

def stopped_before_it_is_told(self, session, held, **options):
    if not armed:
        again.set()  # the keeper tries too, as this has taken long
        return release(self, session, held, **options)
    armed.clear()
    with handing:
        released = release(self, session, held, **options)
        assert released.granted
        say("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
    assert again.wait(30)
    return released

def second():
    with shared as permit:
        say(f"inside {permit.token}")
        listen()
        permit.check()

first = shared.acquire()
thread = threading.Thread(target=second)
thread.start()
say("holds")
listen()
RowsBackend.release, RowsBackend.wait = stopped_before_it_is_told, not_meanwhile
armed.append(True)
first.release()
say("released")
thread.join()
say("done")
"""


@pytest.mark.rows_only("lease")
def test_a_hand_over_within_a_process_that_was_slept_through(database):
    """Its slot lapsed and was taken before the process could tell its own waiter, which asks anew."""
    with Child(HANDS_OVER_TO_ITSELF, database) as child:
        child.expect("holds")
        wait_until(lambda: pids(database) == [child.pid])
        child.send()
        child.expect("stopping")
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        with mutex("slept", lease=20, timeout=60, using=database) as permit:
            child.cont()
            child.expect("released")
            wait_until(lambda: pids(database) == [child.pid], what="its waiter asks anew")
            permit.check()
        assert int(child.expect("inside")) > permit.token
        child.send()
        child.expect("done")
    assert held_rows(database) == []


@pytest.fixture
def server(database):
    """A database on which a statement that is held up locks rows, not the whole file."""
    if connections[database].vendor == "sqlite":
        pytest.skip("what is held up after its statement may have the file locked: nobody else can do anything")


@pytest.mark.rows_only("lease")
def test_a_waiter_whose_heartbeat_took_long_is_not_passed_over(database, server, counter, trio):
    """It is granted before it knows that its place, which had lapsed, is there again."""
    holder, first, second = trio
    first.gate("before", "UPDATE sqlsem_waiter SET expires_us", "sent")
    first.reached()
    first.gate("after", "UPDATE sqlsem_waiter SET expires_us", "answered")
    row = WaiterRow.objects.using(database).get(pid=first.pid)
    wait_until(lambda: now_us(database) > row.expires_us, what="its place has lapsed")
    first.tell("open", "sent")
    first.reached()
    wait_until(lambda: live(database) == [first.pid, second.pid], what="it is there again")
    holder.release()
    assert [each.pid for each in held_rows(database)] == [first.pid]
    first.tell("open", "answered")
    first.held()
    assert second.is_silent()
    first.release()
    second.held()
    second.release()
    assert counter.peak == 1


# A waiter that holds others, and loses its session.


@pytest.fixture
def busy(database):
    """A process that holds two other names and waits first in line, one that holds, and one behind."""
    if connections[database].vendor == "sqlite":
        pytest.skip("SQLite has no sessions")
    with (
        Queuer(database, "third") as holder,
        Queuer(database, "third", lease=4) as busy,
        Queuer(database, "third") as behind,
    ):
        for each in (holder, busy, behind):
            each.ready()
        holder.takes()
        busy.takes("one", name="first")
        busy.takes("two", name="second")
        join(database, busy)
        join(database, behind)
        yield holder, busy, behind


def finish(database, busy, behind, released):
    assert busy.held()["at"] - released < LAPSE
    for who in ("one", "two", "a"):
        assert busy.check(who) == "ours"
        busy.release(who)
    behind.held()
    behind.release()
    assert pids(database) == []


@pytest.mark.rows_only("sessions")
def test_the_server_ends_the_session_of_a_waiter_that_holds_others(database, counter, busy):
    holder, busy, behind = busy
    session = busy.do("session")
    assert session in session_ids(database)
    for _ in range(2):
        kill_sessions(database, [session])
        wait_until(lambda session=session: busy.do("session") not in (0, session), timeout=20)
        session = busy.do("session")
    wait_until(lambda: all(busy.check(who) == "ours" for who in ("one", "two")))
    time.sleep(1.5)  # for longer than a process may be without its beacon
    assert [busy.check(who) for who in ("one", "two")] == ["ours", "ours"]
    # A place that was taken for a dead one's is taken again with the next heartbeat.
    wait_until(lambda: pids(database) == [busy.pid, behind.pid])
    finish(database, busy, behind, holder.release())
    assert counter.peak == 1


@pytest.mark.rows_only("sessions")
def test_the_server_ends_the_session_of_a_waiter_that_is_just_granted(database, counter, busy):
    """It hears of its grant by nobody; whoever is served first, nothing is lost."""
    holder, busy, behind = busy
    session = busy.do("session")
    busy.stop()
    released = holder.release()
    assert held_rows(database)[-1].pid == busy.pid
    kill_sessions(database, [session])
    busy.cont()
    finish(database, busy, behind, released)
    assert counter.peak == 1


def test_two_names_are_kept_while_a_third_is_waited_for(database, counter):
    """Through several renewals of a short lease."""
    with Queuer(database, "third") as holder, Queuer(database, "third", lease=1) as busy:
        holder.ready()
        busy.ready()
        holder.takes()
        found = [busy.takes(who, name=who)["tokens"] for who in ("first", "second")]
        join(database, busy)
        time.sleep(2.5)
        for who, tokens in zip(("first", "second"), found, strict=True):
            assert busy.check(who) == "ours"
            assert [SlotRow.objects.using(database).get(semaphore__name=who).token] == tokens
        released = holder.release()
        assert busy.held()["at"] - released < HEARTBEAT
        for who in ("first", "second", "a"):
            assert busy.check(who) == "ours"
            busy.release(who)
        for each in (holder, busy):
            each.end()
    assert counter.peak == 1
