"""What waiting costs, and waiting where the server cannot wake anybody."""

from __future__ import annotations

import json
import time

import pytest
from django.conf import settings
from django.db import connections

from django_sqlsem.models import SlotRow, WaiterRow
from tests.programs.queue_clients import Queuer
from tests.support import applocks
from tests.support.databases import held_rows, query, session_ids
from tests.support.pgbouncer import pgbouncer
from tests.support.processes import Child
from tests.support.threads import wait_until

HEARTBEAT = 20.0
#: What is handed to the dead is free after 2 s; the rest is for a busy machine.
LAPSE = 20.0
TASKS = 500
#: How long the statements of a waiter are counted, in seconds.
WATCHED = 5.0
#: Statements of one heartbeat at most. SQLite's go to no server, and look at the files of the holders.
LOOK = {"postgresql": 1, "sqlite": 4, "mysql": 2, "microsoft": 1}


@pytest.fixture(autouse=True)
def unrecorded(settings):
    """Statements of waiting are counted here: what is written of the acquires before it is none of them."""
    settings.SQLSEM = settings.SQLSEM | {"HISTORY": False}


@pytest.fixture
def holder(database):
    """A process that holds the only slot of ``costly``."""
    with Queuer(database, "costly", counted=False) as holder:
        holder.ready().takes()
        yield holder
        holder.end()


def wait_for_waiters(database, count):
    wait_until(lambda: WaiterRow.objects.using(database).count() == count, what=f"{count} waiters")


def test_five_hundred_tasks_wait(database, holder):
    WaiterRow.objects.using(database).count()
    before = set(session_ids(database))
    with Child("tests.programs.queue_clients:crowd", database, "costly", TASKS) as child:
        child.expect("ready", timeout=60)
        wait_until(lambda: [row.waiting for row in WaiterRow.objects.using(database).all()] == [TASKS])
        child.send("count")
        threads, statements = json.loads(child.expect("told"))
        # With one that waits in the server on a session of its own, and one that watches what is held.
        most, sessions = (4, 3) if applocks.are_at(database) else (2, 2)
        assert threads <= most
        if connections[database].vendor != "sqlite":
            assert 1 <= len(set(session_ids(database, child.pid)) - before) <= sessions
        time.sleep(WATCHED)
        child.send("count")
        threads, later = json.loads(child.expect("told"))
        assert threads <= most
        during = later[len(statements) :]
        print(f"{len(during) / WATCHED:.1f} statements a second")
        assert len(during) <= 2 * WATCHED * LOOK[connections[database].vendor], during
        assert WaiterRow.objects.using(database).count() == 1
        child.send("join")
        holder.release()
        served = json.loads(child.expect("served", timeout=60))
        assert served == list(range(TASKS))
        child.send()
        child.finish()
        assert child.stderr == ""
    assert WaiterRow.objects.using(database).count() == 0
    holder.takes(timeout=30)
    holder.release()


@pytest.mark.parametrize("ahead", [0, 1])
def test_one_waiter_at_rest(database, holder, ahead):
    """First in line, or behind another."""
    with Queuer(database, "costly", counted=False) as waiter, Queuer(database, "costly", counted=False) as first:
        for each in (waiter, first):
            each.ready()
        if ahead:
            first.ask()
            wait_for_waiters(database, 1)
        waiter.ask()
        wait_for_waiters(database, ahead + 1)
        waiter.do("asleep")
        statements = waiter.do("statements")
        busy = waiter.do("cpu")
        time.sleep(WATCHED)
        during = waiter.do("statements")[len(statements) :]
        print(f"{len(during) / WATCHED:.1f} statements a second")
        assert len(during) <= 2 * WATCHED * LOOK[connections[database].vendor], during
        assert waiter.do("cpu") - busy < 0.25 * WATCHED
        holder.release()
        for each in (first, waiter)[1 - ahead :]:
            each.held()
            each.release()
        for each in (waiter, first):
            each.end()


def test_who_is_woken_has_its_grant_without_a_statement(database, holder):
    """What wakes it says what was granted. A heartbeat may fall between, but not each time."""
    if database != "postgres":
        pytest.skip("only PostgreSQL wakes sessions")
    asked = []
    with Queuer(database, "costly", counted=False) as waiter:
        waiter.ready()
        for _ in range(8):
            waiter.ask()
            wait_for_waiters(database, 1)
            waiter.do("asleep")
            before = len(waiter.do("statements"))
            holder.release()
            waiter.held()
            asked.append(waiter.do("statements")[before:])
            waiter.release()
            holder.takes()
        waiter.end()
    assert [] in asked, asked


# Where a pooler lends the server's sessions for one transaction at a time.

SERVED = pytest.mark.skipif("postgres" not in settings.FOUND, reason="PostgreSQL is not covered")


@pytest.fixture
def pooler(committed):
    with pgbouncer("postgres", default_pool_size="3") as pooler:
        yield pooler


def pooled(pooler, **options):
    return Queuer("postgres", "pooled", env=pooler.env(), counted=False, **options)


@SERVED
def test_pgbouncer(pooler):
    with pooled(pooler) as holder, pooled(pooler) as waiter, pooled(pooler) as second:
        for each in (holder, waiter, second):
            each.ready("tepid")
        tokens = [*holder.takes()["tokens"]]
        [row] = held_rows("postgres")
        # Nobody listens, and the bell of the host needs no session.
        assert row.channel == "" or row.channel.startswith("bell:")
        assert not row.beacon
        waiter.ask()
        wait_for_waiters("postgres", 1)
        [row] = WaiterRow.objects.using("postgres").all()
        # Nobody listens, and the bell of the host needs no session.
        assert row.channel == "" or row.channel.startswith("bell:")
        assert not row.beacon
        second.ask()
        wait_for_waiters("postgres", 2)
        for giver, taker in ((holder, waiter), (waiter, second)):
            time.sleep(0.5)
            released = giver.release()
            told = taker.held()
            assert told["at"] - released < HEARTBEAT
            assert told["waited"] > 0
            tokens += told["tokens"]
            assert taker.check() == "ours"
        second.release()
        assert tokens == sorted(set(tokens))
        assert held_rows("postgres") == []
        assert WaiterRow.objects.using("postgres").count() == 0
        for each in (holder, waiter, second):
            said = [record for record in each.do("log") if "pooler" in record[1]]
            assert [level for level, _ in said] == ["INFO"], each.do("log")
            assert "transaction mode" in said[0][1]
            each.end()
        here = "(SELECT oid FROM pg_database WHERE datname = current_database())"
        sql = f"SELECT COUNT(*) FROM pg_locks WHERE locktype = 'advisory' AND database = {here}"
        assert query("postgres", sql) == [(0,)]


@SERVED
@pytest.mark.parametrize("releaser", ["pooled", "direct"])
@pytest.mark.parametrize("end", ["kill", "stop"])
def test_pgbouncer_and_a_dead_waiter(pooler, releaser, end):
    with (
        pooled(pooler) if releaser == "pooled" else Queuer("postgres", "pooled", counted=False) as holder,
        pooled(pooler) as first,
        pooled(pooler) as second,
    ):
        for each in (holder, first, second):
            each.ready("tepid")
        holder.takes()
        first.ask()
        wait_for_waiters("postgres", 1)
        second.ask()
        wait_for_waiters("postgres", 2)
        getattr(first, end)()
        released = holder.release()
        assert second.held(timeout=10)["at"] - released < LAPSE
        second.release()
        holder.takes(timeout=30)
        holder.release()


@SERVED
def test_pgbouncer_between_some_processes_only(pooler):
    """Those who are woken and those who look hand slots to one another."""
    with pooled(pooler) as one, Queuer("postgres", "pooled", counted=False) as other:
        one.ready("tepid")
        other.ready()
        one.takes()
        for giver, taker in ((one, other), (other, one)) * 3:
            taker.ask()
            wait_for_waiters("postgres", 1)
            released = giver.release()
            assert taker.held()["at"] - released < HEARTBEAT
        assert one.check() == "ours"
        one.release()
        for each in (one, other):
            each.end()
    assert SlotRow.objects.using("postgres").filter(expires_us__isnull=False).count() == 0
