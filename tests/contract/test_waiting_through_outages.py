"""A server that stops or is killed and comes back while callers wait: those with time left get their slots in order."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from django.db import connections

from django_sqlsem import queries
from tests.programs.outage_clients import Fighter, Sufferer
from tests.support.databases import OutsideCounter
from tests.support.private_servers import ALIAS, KINDS, private_server
from tests.support.processes import Child
from tests.support.threads import wait_until

#: How long the server is away, in seconds.
AWAY = 5.0
#: Until when somebody must be served once it is back, on a busy machine.
SOON = 30.0
WITHOUT_BEACONS = {"SQLSEM_TEST_SETTINGS": json.dumps({"BEACONS": False})}


@pytest.fixture(scope="module", params=KINDS)
def private(request, django_db_setup, django_db_blocker):
    """A server of the module's own, of one kind after the other."""
    with django_db_blocker.unblock(), private_server(request.param) as server:
        yield server


@pytest.fixture
def server(private, committed):
    """That server, up and running before and after the test."""
    yield private
    if private.process is None:
        private.start()
    connections[ALIAS].close()


@pytest.fixture
def sufferer(server):
    """A function that starts a process which asks for a lock of the server's."""
    with contextlib.ExitStack() as stack:
        yield lambda name, env=None, **options: stack.enter_context(
            Sufferer(ALIAS, name, env=server.env() | (env or {}), **options)
        )


def stop(server):
    """Stop the server; the test's own connection goes with it."""
    connections[ALIAS].close()
    server.stop()


def waiting(name, count):
    """Wait until this many rows stand in line."""
    wait_until(lambda: queries.semaphore(name, using=ALIAS).waiting == count, timeout=SOON, what=f"{count} wait")


def holder_of(server, name):
    """Return the process that the rows say has the name's one slot."""
    found = server.query(
        "SELECT s.pid FROM sqlsem_slot s JOIN sqlsem_semaphore m ON m.name_key = s.semaphore_key"
        f" WHERE m.name = '{name}' AND s.expires_us IS NOT NULL"
    )
    assert len(found) <= 1
    return found[0][0] if found else None


def told(child, what):
    """Return the lines of a child's log that say that the database is ``away`` or ``back``."""
    return [line for line in child.stderr.splitlines() if f"The database '{ALIAS}' is {what}" in line]


@pytest.mark.parametrize("verb", ["acquire", "aacquire"])
def test_waiters_outlive_an_outage_and_are_served_in_order(server, sufferer, verb):
    name = f"in-order-{verb}"
    holder = sufferer(name, env=WITHOUT_BEACONS)  # else a session that has ended costs the permit after a second
    holder.does("acquire 5", "held")
    waiters = []
    for number in range(3):
        waiters.append(sufferer(name))
        waiters[-1].send(f"{verb} 60")
        waiting(name, number + 1)
    stop(server)
    time.sleep(AWAY)
    assert all(not each.lines[1:] for each in waiters), "a waiter has given up"
    server.start()
    waiting(name, 3)
    holder.does("check", "ours")
    assert holder_of(server, name) == holder.pid
    holder.does("release", "released")
    for each in waiters:
        each.answer("held", within=60)
        assert holder_of(server, name) == each.pid
        each.does("release", "released")
    for each in (holder, *waiters):
        wait_until(lambda each=each: told(each, "back"), timeout=SOON, what="the log has heard of the end")
        assert len(told(each, "away")) == len(told(each, "back")) == 1, each.stderr
        assert "Traceback" not in each.stderr


def test_the_log_hears_of_the_end_though_nothing_is_held_any_more(server, sufferer):
    holder = sufferer("end of it", env=WITHOUT_BEACONS)
    holder.does("acquire 5", "held")
    stop(server)
    wait_until(lambda: told(holder, "away"), timeout=SOON, what="it has noticed")
    time.sleep(AWAY)  # by now its keeper asks every 0.75 to 1.5 seconds
    server.start()
    holder.does("release", "released")
    wait_until(lambda: told(holder, "back"), timeout=SOON, what="the log has heard of the end")
    assert len(told(holder, "away")) == len(told(holder, "back")) == 1, holder.stderr


@pytest.mark.parametrize("verb", ["acquire", "aacquire"])
def test_time_that_ends_meanwhile_ends_the_wait_with_the_servers_error(server, sufferer, verb):
    name = f"in-time-{verb}"
    holder, waiter, comer = sufferer(name), sufferer(name), sufferer(name)
    holder.does("acquire 5", "held")
    waiter.send(f"{verb} 4")
    waiting(name, 1)
    stop(server)
    comer.send(f"{verb} 1")
    for child, patience in ((comer, 1), (waiter, 4)):
        outcome, took, cause = json.loads(child.expect(timeout=SOON))
        assert (outcome, cause.partition(":")[0]) == ("failed", "django.db.utils.OperationalError"), (outcome, cause)
        assert patience - 0.1 < took < patience + 2
    comer.does(f"{verb} 0", "failed", within=2)  # who does not wait hears of it at once
    server.start()
    holder.does_either("check", "ours", "lost")
    holder.does("release", "released")
    comer.does(f"{verb} 60", "held")
    comer.does("release", "released")
    assert len(told(comer, "away")) == len(told(comer, "back")) == 1, comer.stderr


@pytest.mark.parametrize("verb", ["acquire", "aacquire"])
def test_who_comes_meanwhile_waits_too(server, sufferer, verb):
    name = f"comes-{verb}"
    known, new = sufferer(name), sufferer(name)
    known.does("acquire 5", "held")
    known.does("release", "released")
    stop(server)
    for child in (known, new):
        child.send(f"{verb} 60")
    new.silent(AWAY)
    server.start()
    outcomes = {}
    wait_until(lambda: holder_of(server, name), timeout=SOON, what="one of them is served")
    first, second = (known, new) if holder_of(server, name) == known.pid else (new, known)
    for child in (first, second):
        outcomes[child] = child.answer("held", within=60)
        assert holder_of(server, name) == child.pid
        child.does("release", "released")


def test_the_limit_holds_through_a_kill_under_load(server, sufferer):
    name, path = "fight", ("default", "through-an-outage")
    slots, counter = 2, OutsideCounter(*path)
    with contextlib.ExitStack() as stack:
        fighters = [stack.enter_context(Fighter(ALIAS, name, slots, *path, env=server.env())) for _ in range(4)]
        for _ in range(2):
            before = counter.entered
            wait_until(lambda before=before: counter.entered > before + 40, timeout=60, what="grants")
            connections[ALIAS].close()
            server.kill()
            time.sleep(2.0)
            server.start()
        before = counter.entered
        wait_until(lambda: counter.entered > before + 40, timeout=60, what="grants after it")
        for each in fighters:
            each.ends()
            assert len(told(each, "away")) <= 2 * 2, each.stderr
    assert 1 <= counter.peak <= slots
    counter.close()


def test_what_was_given_back_is_free_though_the_new_primary_has_not_heard_of_it(server, sufferer):
    """A standby that is promoted without the last commits says that slots are held by those who gave them back."""
    of_name = "semaphore_key = (SELECT name_key FROM sqlsem_semaphore WHERE name = 'came back')"
    child = sufferer("came back", WITHOUT_BEACONS, lease=600, slots=2)
    child.does("aacquire 5", "held")
    child.does("acquire 5", "held")
    old = server.query(f"SELECT slot, permit_id, expires_us FROM sqlsem_slot WHERE {of_name} ORDER BY acquired_us")
    child.does("release", "released")
    # Before the server goes away: once it is back, the process looks for such rows the moment that it connects.
    slot, permit_id, expires = old[1]
    again = f"permit_id = '{permit_id}', expires_us = {expires}"
    server.query(f"UPDATE sqlsem_slot SET {again} WHERE slot = {slot} AND expires_us IS NULL AND {of_name}")
    held = f"SELECT permit_id FROM sqlsem_slot WHERE {of_name} AND expires_us IS NOT NULL ORDER BY acquired_us"
    assert server.query(held) == [(each[1],) for each in old]
    stop(server)
    server.start()
    child.does("acquire 30", "held")
    child.does("release", "released")
    assert server.query(held) == [(old[0][1],)]
    child.does("check", "ours")  # the one that it has kept all the time


CALLS = """
import asyncio
import time
from django.test import RequestFactory
from django_sqlsem import BackendError, semaphore

alias, name = args
lock = semaphore(name, using=alias)
request = RequestFactory().get("/")

def view(request):
    raise AssertionError("the view ran")

async def cancelled():
    waits = asyncio.create_task(lock.aacquire(timeout=None))
    await asyncio.to_thread(listen)
    say("still waits" if not waits.done() else f"ended {waits.exception()!r}")
    await asyncio.to_thread(listen)
    waits.cancel()
    try:
        await waits
    except asyncio.CancelledError:
        return "cancelled"

def outcome(call):
    began = time.monotonic()
    try:
        return call(), time.monotonic() - began
    except BackendError:
        return "failed", time.monotonic() - began

say("ready")
say(outcome(lambda: asyncio.run(cancelled()))[0])
listen()
for decorated in (semaphore(name, using=alias)(view), semaphore(name, using=alias, timeout=2)(view)):
    result, took = outcome(lambda: decorated(request))
    say(f"{result} {round(took)}")
result, took = outcome(lambda: semaphore(name, using=alias, max_waiting=9).acquire(timeout=60))
say(f"{result} {round(took)}")
listen()
"""


def test_how_waits_end_while_the_server_is_away(server, sufferer):
    """By a cancellation at once; of views, which must answer, soon; and who would rather be refused does not wait."""
    name = "ends"
    holder = sufferer(name, env=WITHOUT_BEACONS)
    holder.does("acquire 5", "held")
    with Child(CALLS, ALIAS, name, env=server.env()) as child:
        child.expect("ready")
        waiting(name, 1)
        stop(server)
        wait_until(lambda: told(child, "away"), timeout=SOON, what="it has noticed")
        child.send()
        child.expect("still waits")
        child.send()
        child.expect("cancelled", timeout=2)
        child.send()
        child.expect("failed 0")  # in a process's main thread no view waits
        child.expect("failed 2")
        child.expect("failed 0")
        server.start()
        holder.does("release", "released")
        wait_until(lambda: holder_of(server, name) is None, timeout=SOON, what="nothing is held for who has gone")
        waiting(name, 0)
        child.send()


# What is no outage is told at once.


def refused_at_once(server, settings):
    """Start a process with other settings of the alias, and return what its acquire meets."""
    databases = json.loads(server.env()["SQLSEM_TEST_DATABASES"])
    databases[ALIAS] |= settings
    with Sufferer(ALIAS, "refused", env={"SQLSEM_TEST_DATABASES": json.dumps(databases)}) as child:
        for verb in ("acquire", "aacquire"):
            cause = child.does(f"{verb} 60", "failed", within=15)
        assert not told(child, "away")
        return cause


def test_a_login_that_is_refused_is_no_outage(server):
    assert "nobody" in refused_at_once(server, {"USER": "nobody"})


def test_a_database_that_is_not_there_is_no_outage(server):
    assert "elsewhere" in refused_at_once(server, {"NAME": "elsewhere"})


def test_a_database_without_the_tables_is_no_outage(server):
    server.query("CREATE DATABASE bare")
    try:
        assert "sqlsem_" in refused_at_once(server, {"NAME": "bare"})
    finally:
        server.query("DROP DATABASE bare")


def read_only(server, on):
    """Have a PostgreSQL server take no writes, as a standby does, or take them again."""
    server.query(f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}")
    server.query("SELECT pg_reload_conf()")
    wait_until(lambda: server.query("SHOW default_transaction_read_only") == [("on" if on else "off",)])


@pytest.mark.parametrize("private", ["postgres"], indirect=True)
def test_a_server_that_takes_no_writes_for_a_while(server, sufferer):
    holder, waiter, stranger = sufferer("read-only"), sufferer("read-only"), sufferer("read-only")
    for each in (waiter, holder):
        each.does("acquire 5", "held")
        if each is waiter:
            each.does("release", "released")
    waiter.send("acquire 60")
    waiting("read-only", 1)
    read_only(server, True)
    try:
        assert "read-only" in stranger.does("acquire 60", "failed", within=15)  # it never knew another server
        wait_until(lambda: told(waiter, "away"), timeout=SOON, what="the waiter has noticed")
        waiter.silent(3.0)
    finally:
        read_only(server, False)
    holder.does("release", "released")
    waiter.answer("held", within=60)
    waiter.does("release", "released")
    assert len(told(waiter, "away")) == len(told(waiter, "back")) == 1, waiter.stderr
