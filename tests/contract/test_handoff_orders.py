"""Who is next: first come, first served, over processes, threads and claims of several slots."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import pytest
from django.db import connections

from django_sqlsem.models import SlotRow, WaiterRow
from tests.programs.contenders import SharedCounter, Tally, semaphore
from tests.programs.queue_clients import Queuer
from tests.support.children import listen, say
from tests.support.databases import held_rows, query, raw_connection
from tests.support.processes import Child
from tests.support.threads import wait_until

#: See ``test_handoff``.
HEARTBEAT = 20.0
#: A thread that comes to the front brings its age: how long that statement takes, it stands too far back, in seconds.
PRECISION = 0.5


def rows(database):
    """The queue."""
    return list(WaiterRow.objects.using(database).order_by("queued_us", "pk"))


def wait_for_waiters(database, count):
    wait_until(lambda: len(rows(database)) == count, what=f"{count} waiters")


@contextlib.contextmanager
def line_of(database, count, **options):
    """So many processes that have been running for a while, and end in good order."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Queuer(database, "line", **options)) for _ in range(count)]
        yield [child.ready() for child in children]
        for child in children:
            child.end()


def join(database, child, who="a", **options):
    """Have a process ask, and wait until it is in the queue."""
    before = len(rows(database))
    child.ask(who, **options)
    wait_for_waiters(database, before + 1)


# Claims of several slots.


def test_several_slots_among_single_ones(database, counter):
    with line_of(database, 6, slots=3) as (holder, one, three, other, two, last):
        assert holder.takes(take=3)["slots"] == [1, 2, 3]
        join(database, one)
        join(database, three, take=3)
        join(database, other)
        join(database, two, take=2)
        join(database, last)
        released = holder.release()
        assert one.held()["at"] - released < HEARTBEAT
        # Two slots are free, and gather for the one who wants three.
        wait_until(lambda: len(held_rows(database)) == 1)
        for _ in range(3):
            time.sleep(0.3)  # a heartbeat of each
            assert len(held_rows(database)) == 1
        assert all(each.is_silent() for each in (three, other, two, last))
        released = one.release()
        assert three.held()["at"] - released < HEARTBEAT
        assert len({row.permit_id for row in held_rows(database)}) == 1
        assert all(each.is_silent() for each in (other, two, last))
        released = three.release()
        found = [each.held() for each in (other, two)]
        assert all(each["at"] - released < HEARTBEAT for each in found)
        assert sorted(slot for each in found for slot in each["slots"]) == [1, 2, 3]
        assert last.is_silent()
        released = other.release()
        assert last.held()["at"] - released < HEARTBEAT
        two.release()
        last.release()
    assert counter.peak == 3
    assert rows(database) == []


def test_who_wants_several_and_gives_up_frees_the_way(database, counter):
    with line_of(database, 3, slots=2) as (holder, two, one):
        holder.takes()
        one.do("unhurried")
        join(database, two, take=2, timeout=6)  # so long that it is seen to wait on a busy machine
        join(database, one)
        one.do("asleep")
        two.word("a", "busy")
        gave_up = time.monotonic()
        assert one.held()["at"] - gave_up < HEARTBEAT
        one.release()
        holder.release()
    assert counter.peak <= 2
    assert rows(database) == []


def test_who_wants_several_and_gives_up_frees_the_way_for_its_own_process(database):
    with line_of(database, 2, slots=2) as (holder, both):
        holder.takes()
        join(database, both, take=2, timeout=6)  # so long that it is seen to wait on a busy machine
        both.ask("b")
        both.do("queued", 2)
        both.word("a", "busy")
        gave_up = time.monotonic()
        assert both.held("b")["at"] - gave_up < HEARTBEAT
        both.release("b")
        holder.release()
    assert rows(database) == []


def test_a_dead_waiter_that_wants_several_does_not_bar_the_way(database, counter):
    with line_of(database, 2, slots=2) as (holder, one), Queuer(database, "line", slots=2) as two:
        two.ready()
        holder.takes()
        join(database, two, take=2)
        join(database, one)
        two.kill()
        died = time.monotonic()
        assert one.held()["at"] - died < 3
        one.release()
        holder.release()
    assert counter.peak <= 2


def throng(alias, name, slots, takes, seconds):
    """Take and give back in one thread for each of ``takes``, as fast as it goes; tell every wait."""
    tally = Tally()
    waits = {}
    say("ready")
    listen()
    until = time.monotonic() + seconds
    with SharedCounter(alias) as counter:

        def run(take):
            shared = semaphore(name, slots=slots, take=take, timeout=30, using=alias)
            with tally.noting_errors():
                while time.monotonic() < until:
                    started = time.monotonic()
                    with shared as permit, contextlib.ExitStack() as inside:
                        tally.granted(started, permit)
                        waits.setdefault(take, []).append(time.monotonic() - started)
                        for _ in permit.slots:
                            inside.enter_context(counter.inside())
                        time.sleep(0.01)

        threads = [threading.Thread(target=run, args=(take,)) for take in takes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    say(f"waits {json.dumps([waits, tally.errors])}")


#: For how long many ask over and over, and how long one of them may wait at the most, in seconds.
THRONG = 4
STARVED = 5


def test_nobody_starves_who_wants_several(database, counter):
    """Ten ask for one slot over and over, in processes of their own with those who ask for two and for three."""
    seen = set()
    over = threading.Event()
    counted = "SELECT permit_id, COUNT(*) FROM sqlsem_slot WHERE expires_us IS NOT NULL GROUP BY permit_id"

    def watch():
        while not over.is_set():
            seen.update(count for _, count in query(database, counted))

    with contextlib.ExitStack() as stack:
        where = "tests.contract.test_handoff_orders:throng"
        takes = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 2], [3]]
        children = [stack.enter_context(Child(where, database, "throng", 3, each, THRONG)) for each in takes]
        for child in children:
            child.expect("ready", timeout=60)
        watcher = threading.Thread(target=watch)
        watcher.start()
        for child in children:
            child.send()
        told = [json.loads(child.expect("waits", timeout=90)) for child in children]
        over.set()
        watcher.join()
        for child in children:
            child.finish()
    assert [errors for _, errors in told] == [[]] * 4
    assert counter.peak <= 3
    assert seen <= {1, 2, 3}
    waits = {take: sorted(told[child][0][take]) for take, child in (("1", 0), ("2", 2), ("3", 3))}
    print({take: (len(found), round(found[len(found) // 2], 3), round(found[-1], 3)) for take, found in waits.items()})
    assert all(len(found) >= 3 for found in waits.values())
    assert all(found[-1] < STARVED for found in waits.values())


# Barging, and those who will not wait.


@pytest.mark.rows_only("gathering")
def test_who_barges_passes_waiters_and_a_fair_one_does_not(database, counter):
    with line_of(database, 4, slots=3) as (holder, two, rude, fair):
        holder.takes(take=2)
        join(database, two, take=2)  # one slot is free, and waits for another
        fair.ask("now", timeout=0)
        fair.word("now", "busy")
        fair.ask("soon", timeout=1)
        fair.word("soon", "busy")
        assert rude.takes("now", timeout=0, fair=False)["slots"] == [3]
        assert two.is_silent()
        rude.release("now")
        assert rude.takes("patient", timeout=5, fair=False)["slots"] == [3]
        rude.release("patient")
        join(database, fair)
        assert len(held_rows(database)) == 2
        released = holder.release()
        found = [two.held(), fair.held()]
        assert all(each["at"] - released < HEARTBEAT for each in found)
        two.release()
        fair.release()
    assert counter.peak <= 3


def test_one_that_barges_waits_in_line_like_the_others(database, counter):
    with line_of(database, 3) as (holder, first, rude):
        holder.takes()
        join(database, first)
        join(database, rude, fair=False)
        for giver, taker in ((holder, first), (first, rude)):
            released = giver.release()
            assert taker.held()["at"] - released < HEARTBEAT
        rude.release()
    assert counter.peak == 1


@pytest.mark.rows_only("row queue")
def test_nobody_is_served_in_the_place_of_a_waiter_whose_row_is_locked(database, counter):
    """As it is for an instant by each of its heartbeats."""
    if connections[database].vendor == "sqlite":
        pytest.skip("SQLite locks no rows")
    with line_of(database, 3) as (holder, first, second), contextlib.closing(raw_connection(database)) as session:
        holder.takes()
        join(database, first)
        (waiter,) = rows(database)
        join(database, second)
        cursor = session.cursor()
        cursor.execute("BEGIN")
        named = "semaphore_key = %s AND ticket = %s"
        cursor.execute(f"SELECT id FROM sqlsem_waiter WHERE {named} FOR UPDATE", (waiter.semaphore_id, waiter.ticket))
        release = threading.Thread(target=holder.release)
        release.start()
        release.join(0.3)
        assert second.is_silent()
        cursor.execute("ROLLBACK")
        release.join(20)
        first.held()
        assert second.is_silent()
        first.release()
        second.held()
        second.release()
    assert counter.peak == 1


def test_who_will_not_wait_does_not_yield_to_the_dead(database):
    with line_of(database, 1, slots=2) as (holder,), Queuer(database, "line", slots=2) as two:
        two.ready()
        holder.takes()
        join(database, two, take=2)
        holder.ask("b", timeout=0)
        holder.word("b", "busy")
        two.kill()
        died = time.monotonic()

        def gets_it():
            holder.ask("c", timeout=0)
            line = holder.expect()
            return line.startswith("c held")

        wait_until(gets_it, timeout=20)
        assert time.monotonic() - died < 20
        holder.release("c")
        holder.release()


# First come, first served.


def test_six_processes_are_served_in_the_order_in_which_they_came(database, counter):
    with line_of(database, 7) as (holder, *line):
        holder.takes()
        for child in line:
            join(database, child)
        assert [row.pid for row in rows(database)] == [child.pid for child in line]
        served = holder
        for number, child in enumerate(line, start=1):
            released = served.release()
            assert child.held()["at"] - released < HEARTBEAT
            assert all(other.is_silent() for other in line[number:])
            served = child
        served.release()
    assert counter.peak == 1
    assert rows(database) == []


def test_three_slots_given_back_at_once_go_to_the_first_three(database, counter):
    with line_of(database, 6, slots=3) as (holder, *line):
        holder.takes(take=3)
        for child in line:
            join(database, child)
        holder.release()
        for child in line[:3]:
            child.held()
        assert all(child.is_silent() for child in line[3:])
        for child in line[:2]:
            child.release()
        for child in line[3:]:
            child.held()
        for child in line[2:]:
            child.release()
    assert counter.peak == 3


@pytest.mark.parametrize("crowd", [50])
@pytest.mark.rows_only("row queue")
def test_a_process_with_many_waiting_threads_is_one_waiter(database, counter, crowd):
    """Two others come after its tenth and after its thirtieth thread."""
    with line_of(database, 4) as (holder, many, early, late):
        holder.takes()
        expected = []
        for number in range(crowd):
            many.ask(f"t{number}")
            many.do("queued", number + 1)
            expected.append((many, f"t{number}"))
            for after, other in ((10, early), (30, late)):
                if number + 1 == after:
                    time.sleep(PRECISION)
                    join(database, other)
                    expected.append((other, "a"))
        wait_for_waiters(database, 3)
        assert sorted(row.pid for row in rows(database)) == sorted(each.pid for each in (many, early, late))
        wait_until(lambda: [row.waiting for row in rows(database)] == [crowd, 1, 1], timeout=20)
        served = (holder, "a")
        for number, (child, who) in enumerate(expected, start=1):
            left = {each for each, _ in expected[number - 1 :]}
            wait_for_waiters(database, len(left))  # the next thread's arrival is known by now
            released = served[0].release(served[1])
            assert child.held(who)["at"] - released < HEARTBEAT
            served = (child, who)
        served[0].release(served[1])
        assert all(each.is_silent(who) for each, who in expected)
    assert counter.peak == 1
    assert SlotRow.objects.using(database).filter(semaphore__name="line").count() == 1
    assert rows(database) == []
