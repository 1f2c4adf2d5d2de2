"""A slot that is given back goes to whoever waits longest, whatever happens at that very moment."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import time

import pytest
from django.db import connections

from django_sqlsem import AcquireTimeoutError, semaphore
from django_sqlsem.models import SlotRow, WaiterRow
from tests.programs.contenders import SharedCounter, Tally
from tests.programs.queue_clients import Queuer
from tests.support.children import listen, say
from tests.support.databases import held_rows, query, raw_connection
from tests.support.operators import now_us
from tests.support.processes import Child
from tests.support.threads import wait_until

#: A waiter that nobody wakes looks around after a heartbeat, of 0.65 s; the rest is for a busy machine.
HEARTBEAT = 20.0
#: A slot that was handed over and not confirmed lapses after 2 s, and a waiter sees that at once.
LAPSE = 20.0


def waiters(database):
    """The tickets in the queue."""
    return list(WaiterRow.objects.using(database).order_by("queued_us", "pk").values_list("ticket", flat=True))


def wait_for_waiters(database, count):
    wait_until(lambda: len(waiters(database)) == count, what=f"{count} waiters")


def lock_waits(database):
    """How many statements stand before a lock."""
    if connections[database].vendor == "postgresql":
        sql = "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    else:
        time.sleep(0.15)  # InnoDB shows what it showed before, unless nobody has looked for 0.1 s
        sql = "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
    return query(database, sql)[0][0]


def wait_for_a_lock(database):
    """Wait until some statement stands before a lock."""
    wait_until(lambda: lock_waits(database), what="a statement that waits for a lock")


@contextlib.contextmanager
def locked(database, table):
    """The rows of a table are locked by somebody; yields what lets go of them."""
    if connections[database].vendor == "sqlite":
        pytest.skip("SQLite locks no rows")
    with contextlib.closing(raw_connection(database)) as connection:
        cursor = connection.cursor()
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT id FROM {table} FOR UPDATE")
        cursor.fetchall()
        yield lambda: cursor.execute("ROLLBACK")


@pytest.fixture
def pair(database):
    """A process that holds the only slot of ``handed``, and one that will wait; both have been running for a while."""
    with Queuer(database, "handed") as holder, Queuer(database, "handed") as waiter:
        holder.ready()
        waiter.ready()
        holder.takes()
        yield holder, waiter
        holder.end()
        waiter.end()


# A release that cannot see the waiter.


@pytest.mark.parametrize(
    ("when", "text"),
    [
        ("before", "INSERT INTO sqlsem_waiter"),
        ("after", "INSERT INTO sqlsem_waiter"),
        ("before", "UPDATE sqlsem_waiter SET expires_us"),
        ("after", "UPDATE sqlsem_waiter SET expires_us"),
    ],
)
@pytest.mark.parametrize("temperature", ["cold", "warm"])
@pytest.mark.rows_only("row statements")
def test_a_release_between_the_statements_of_a_waiter(database, counter, when, text, temperature):
    with Queuer(database, "handed") as holder, Queuer(database, "handed") as waiter:
        holder.ready()
        waiter.ready("cpu" if temperature == "cold" else "warm")
        holder.takes()
        waiter.gate(when, text)
        waiter.ask()
        waiter.reached()
        holder.release()
        opened = time.monotonic()
        waiter.tell("open", when)
        assert waiter.held()["at"] - opened < HEARTBEAT
        assert waiter.check() == "ours"
        waiter.release()
        holder.end()
        waiter.end()
    assert counter.peak == 1
    assert waiters(database) == []


@contextlib.contextmanager
def held_up_inserts(database):
    """Whoever takes a place has read all there is, and is held up before it is seen; yields what lets it go on."""
    if connections[database].vendor != "postgresql":
        pytest.skip("needs a trigger that waits")
    with contextlib.closing(raw_connection(database)) as connection:
        connection.execute(
            "CREATE OR REPLACE FUNCTION sqlsem_pause() RETURNS trigger LANGUAGE plpgsql AS"
            " $$BEGIN PERFORM pg_advisory_xact_lock(471147); RETURN NEW; END$$"
        )
        connection.execute(
            "CREATE TRIGGER sqlsem_pause BEFORE INSERT ON sqlsem_waiter FOR EACH ROW EXECUTE FUNCTION sqlsem_pause()"
        )
        try:
            connection.execute("SELECT pg_advisory_lock(471147)")
            yield lambda: connection.execute("SELECT pg_advisory_unlock(471147)")
        finally:
            connection.execute("SELECT pg_advisory_unlock_all()")
            connection.execute("DROP TRIGGER sqlsem_pause ON sqlsem_waiter")
            connection.execute("DROP FUNCTION sqlsem_pause()")


@pytest.mark.one_server("own statements")
@pytest.mark.rows_only("row statements")
def test_a_release_while_the_waiters_insert_is_under_way(database, counter, pair):
    """The waiter's statement has seen the slot taken; the release does not see the waiter, which has not committed."""
    holder, waiter = pair
    with held_up_inserts(database) as let_go:
        waiter.ask()
        wait_for_a_lock(database)
        holder.release()
        assert held_rows(database) == []
        assert waiter.is_silent()
        opened = time.monotonic()
        let_go()
        assert waiter.held()["at"] - opened < HEARTBEAT
    waiter.release()
    assert counter.peak == 1


@pytest.mark.one_server("own statements")
@pytest.mark.rows_only("row statements")
def test_a_release_that_expected_waiters_and_saw_none_looks_again(database, counter, pair):
    """A permit that has waited is given back as above; by then the waiter has committed, and has not looked again."""
    first, waiter = pair
    with Queuer(database, "handed") as holder:
        holder.ready()
        holder.ask()
        wait_for_waiters(database, 1)
        first.release()
        holder.held()
        with held_up_inserts(database) as let_go:
            waiter.gate("before", "UPDATE sqlsem_waiter SET expires_us", "second look")
            waiter.ask()
            wait_for_a_lock(database)
            holder.gate("before", "SELECT 1 FROM sqlsem_waiter", "release")
            holder.tell("tell", "a", "release")
            holder.reached()
            assert held_rows(database) == []
            let_go()
            waiter.reached()
            holder.tell("open", "release")
            holder.word("a", "released")
            assert len(held_rows(database)) == 1
            waiter.tell("open", "second look")
            waiter.held()
        waiter.release()
        holder.end()
    assert counter.peak == 1


@pytest.mark.one_server("own statements")
@pytest.mark.rows_only("row statements")
def test_a_waiter_comes_while_the_release_is_under_way(database, counter, pair):
    """The release has looked for waiters before this one came, and frees the slot after it has looked for free ones."""
    if connections[database].vendor == "sqlite":
        pytest.skip("SQLite locks no rows")
    holder, waiter = pair
    waiter.gate("before", "INSERT INTO sqlsem_waiter")
    waiter.ask()
    waiter.reached()  # MariaDB's claims wait for locked rows: this one is over
    with locked(database, "sqlsem_slot") as let_go:
        holder.tell("tell", "a", "release")
        wait_for_a_lock(database)
        waiter.tell("open", "before")
        wait_for_waiters(database, 1)
        waiter.do("asleep")  # its second look is behind it
        opened = time.monotonic()
        let_go()
        holder.word("a", "released")
        assert waiter.held()["at"] - opened < HEARTBEAT
    waiter.release()
    assert counter.peak == 1


@pytest.mark.one_server("own statements")
@pytest.mark.rows_only("row statements")
def test_a_release_while_the_waiters_row_is_locked(database, counter, pair):
    """As its own heartbeat does. Whether a release waits for the row or passes over it, the waiter is served."""
    holder, waiter = pair
    waiter.ask()
    wait_for_waiters(database, 1)
    with locked(database, "sqlsem_waiter") as let_go:
        holder.tell("tell", "a", "release")
        wait_until(lambda: lock_waits(database) or held_rows(database) == [])
        assert waiter.is_silent()
        opened = time.monotonic()
        let_go()
        assert waiter.held()["at"] - opened < HEARTBEAT
        holder.word("a", "released")
    waiter.release()
    assert counter.peak == 1


@pytest.mark.rows_only("row statements")
def test_a_waiter_leaves_between_the_two_statements_of_a_release(database, pair):
    holder, waiter = pair
    waiter.ask(timeout=1)
    wait_for_waiters(database, 1)
    holder.gate("after", "UPDATE sqlsem_slot SET expires_us = NULL")
    holder.tell("tell", "a", "release")
    holder.reached()
    waiter.word("a", "busy")
    wait_for_waiters(database, 0)
    holder.tell("open", "after")
    holder.word("a", "released")
    assert held_rows(database) == []
    waiter.takes("b", timeout=0)
    waiter.release("b")


# A waiter that gives up when it is granted.


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.rows_only("row grants")
def test_a_waiter_gives_up_after_it_was_granted_and_before_it_heard(database, counter, others):
    with contextlib.ExitStack() as stack:
        holder, waiter, *behind = [stack.enter_context(Queuer(database, "handed")) for _ in range(2 + others)]
        for each in (holder, waiter, *behind):
            each.ready()
        for verb in ("deaf", "unhurried"):
            waiter.do(verb)
        holder.takes()
        waiter.ask(timeout=2)
        wait_for_waiters(database, 1)
        waiter.do("asleep")
        ticket = waiters(database)[0]
        for each in behind:
            each.ask()
            wait_for_waiters(database, 2)
        holder.release()
        assert [row.permit_id for row in held_rows(database)] == [ticket]
        waiter.word("a", "busy")
        gave_up = time.monotonic()
        if behind:
            assert behind[0].held()["at"] - gave_up < HEARTBEAT
            behind[0].release()
        else:
            wait_until(lambda: held_rows(database) == [], timeout=HEARTBEAT)
        assert waiters(database) == []
        for each in (holder, waiter, *behind):
            each.end()
    assert counter.peak <= 1


#: How often each process of ``gamble()`` must have been granted a slot, and refused one.
ENOUGH = 7


def gamble(alias, name, slots, rounds, most):
    """Ask with timeouts about as long as one has to wait; tell how often it was granted and refused.

    So many rounds, and as many more as it takes until it has met both some times.
    """
    shared = semaphore(name, slots=slots, using=alias)
    tally = Tally()
    say("ready")
    listen()
    with SharedCounter(alias) as counter:

        def run():
            with tally.noting_errors():
                for attempt in itertools.count():
                    if attempt >= rounds and min(tally.grants, tally.refused) > ENOUGH:
                        return
                    started = time.monotonic()
                    try:
                        permit = shared.acquire(timeout=random.uniform(0.001, most))
                    except AcquireTimeoutError:
                        tally.refused += 1
                        continue
                    with permit:
                        with counter.inside():
                            tally.granted(started, permit)
                            time.sleep(random.uniform(0.002, 0.02))
                        permit.check()

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    tally.tell()
    listen()


@pytest.mark.parametrize("slots", [1, 2])
def test_two_hundred_timeouts_near_the_moment_of_the_hand_off(database, counter, slots):
    with contextlib.ExitStack() as stack:
        where = "tests.contract.test_handoff:gamble"
        children = [stack.enter_context(Child(where, database, "gambled", slots, 35, 0.1 / slots)) for _ in range(3)]
        for child in children:
            child.expect("ready", timeout=60)
        for child in children:
            child.send()
        tallies = [json.loads(child.expect("tally", timeout=200)) for child in children]
        assert [tally["errors"] for tally in tallies] == [[]] * 3
        assert sum(tally["grants"] + tally["refused"] for tally in tallies) >= 210
        assert min(tally[each] for tally in tallies for each in ("grants", "refused")) > ENOUGH
        assert counter.peak <= slots
        wait_until(lambda: held_rows(database) == [] and waiters(database) == [], timeout=HEARTBEAT)
        semaphore("gambled", slots=slots, using=database).acquire(timeout=0).release()
        for child in children:
            child.send()
            child.finish()
            assert "Traceback" not in child.stderr, child.stderr
    tokens = {}
    for tally in tallies:
        for slot, token in tally["tokens"]:
            tokens.setdefault(slot, []).append(token)
    assert all(len(found) == len(set(found)) for found in tokens.values())


# What is granted and not confirmed; what is told and not heard.


@pytest.mark.rows_only("row grants")
def test_a_grant_that_nobody_confirms_lapses(database, pair):
    holder, waiter = pair
    waiter.ask()
    wait_for_waiters(database, 1)
    waiter.do("asleep")
    waiter.stop()
    holder.release()
    row = SlotRow.objects.using(database).get(semaphore__name="handed")
    assert row.pid == waiter.pid
    assert row.expires_us - row.acquired_us == 2_000_000
    wait_until(lambda: held_rows(database) == [], timeout=LAPSE)
    waiter.cont()
    waiter.held()  # it asks anew
    assert waiter.check() == "ours"
    waiter.release()


def test_a_grant_that_is_confirmed_stays(database, counter, pair):
    holder, waiter = pair
    waiter.ask()
    wait_for_waiters(database, 1)
    holder.release()
    told = waiter.held()
    wait_until(lambda: held_rows(database)[0].expires_us - now_us(database) > 30e6, timeout=2, what="confirmed")
    holder.ask("b")
    wait_for_waiters(database, 1)
    granted = SlotRow.objects.using(database).get(semaphore__name="handed").acquired_us
    wait_until(lambda: now_us(database) > granted + 2_500_000)
    assert waiter.check() == "ours"
    assert holder.is_silent("b")
    [row] = held_rows(database)
    assert ([row.slot], [row.token]) == (told["slots"], told["tokens"])
    waiter.release()
    holder.held("b")
    holder.release("b")
    assert counter.peak == 1


def test_a_lost_word_costs_a_heartbeat(database, counter, pair):
    holder, waiter = pair
    waiter.do("deaf")
    for _ in range(3):
        waiter.ask()
        wait_for_waiters(database, 1)
        released = holder.release()
        assert waiter.held()["at"] - released < HEARTBEAT
        holder.ask()
        wait_for_waiters(database, 1)
        assert waiter.check() == "ours"
        waiter.release()
        holder.held()
    holder.release()
    holder.takes()
    holder.release()
    assert counter.peak == 1


@pytest.mark.rows_only("row statements")
def test_a_word_that_comes_amid_another_statement_is_heard(database, pair):
    """And the keeper rests afterwards."""
    holder, waiter = pair
    waiter.ask()
    wait_for_waiters(database, 1)
    waiter.do("asleep")
    waiter.gate("before", "UPDATE sqlsem_waiter SET expires_us")
    waiter.reached()
    released = holder.release()
    waiter.tell("open", "before")
    assert waiter.held()["at"] - released < HEARTBEAT
    busy = waiter.do("cpu")
    time.sleep(1)
    assert waiter.do("cpu") - busy < 0.5
    waiter.release()


def test_waited_and_tokens(database, pair):
    holder, waiter = pair
    tokens = []
    holder.release()
    for _ in range(3):
        first = holder.takes()
        assert first["waited"] == 0
        waiter.ask()
        wait_for_waiters(database, 1)
        waiter.do("asleep")
        holder.release()
        second = waiter.held()
        assert 0 < second["waited"] < 30
        waiter.release()
        tokens += [*first["tokens"], *second["tokens"]]
    assert tokens == sorted(set(tokens))
