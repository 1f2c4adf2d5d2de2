"""A database that goes away while somebody waits, holds or gives back, and comes back."""

from __future__ import annotations

import contextlib
import time

import pytest
from django.db import connections

from django_sqlsem import semaphore
from tests import databases
from tests.contract.sufferers import Sufferer
from tests.databases import held_rows, kill_sessions, session_ids
from tests.proxy import proxy_for, through
from tests.threads import wait_until

#: No call may take longer while the database is away, in seconds.
BOUND = 15.0
#: How soon a release that failed is made up for once the database is back: the keeper tries every second.
SOON = 3.0

SERVERS = [alias for alias in databases.covered() if alias != "default"]
OUTAGES = ["refuse", "silence"]



@pytest.fixture(params=SERVERS)
def server(request, committed):
    """The alias of one covered server after the other."""
    alias = request.param
    yield alias
    databases.assert_nothing_held(alias)


@pytest.fixture
def proxy(server):
    with proxy_for(server) as proxy:
        yield proxy


@pytest.fixture
def sufferer(server, proxy):
    """A function that starts a process which reaches the server through the proxy."""
    with contextlib.ExitStack() as stack:
        yield lambda name, impatient=True, **options: stack.enter_context(
            Sufferer(server, name, env=through(proxy, server, impatient=impatient), **options)
        )


def is_of_the_driver(cause, alias):
    """Whether a BackendError's cause is what Django made of the driver's error."""
    return cause.startswith(("django.db.utils.OperationalError: ", "django.db.utils.InterfaceError: "))


def test_proxy_passes_everything_on(server, proxy, sufferer):
    child = sufferer("proxied")
    child.does("acquire 5", "held")
    assert [row.pid for row in held_rows(server)] == [child.pid]
    child.does("release", "released")


@pytest.mark.parametrize("verb", ["acquire", "aacquire"])
@pytest.mark.parametrize("outage", OUTAGES)
def test_away_before_an_acquire(server, proxy, sufferer, outage, verb):
    child = sufferer("before", impatient=False)
    child.does("acquire 5", "held")
    child.does("release", "released")
    getattr(proxy, outage)()
    for _ in range(2):
        cause = child.does(f"{verb} 30", "failed", within=BOUND)
        assert is_of_the_driver(cause, server), cause
    proxy.resume()
    child.does(f"{verb} 30", "held")
    assert len(held_rows(server)) == 1
    child.does("release", "released")


@pytest.mark.parametrize("verb", ["acquire", "aacquire"])
@pytest.mark.parametrize("outage", OUTAGES)
def test_away_while_waiting(server, proxy, sufferer, outage, verb):
    lock = semaphore("waiting", using=server)
    holder = lock.acquire()
    child = sufferer("waiting")
    child.send(f"{verb} 60")
    wait_until(lambda: lock.status().waiting == 1)
    getattr(proxy, outage)()
    cause = child.answer("failed", within=BOUND + 5)
    assert is_of_the_driver(cause, server), cause
    proxy.resume()
    child.send(f"{verb} 60")
    wait_until(lambda: lock.status().waiting == 1)
    holder.release()
    child.answer("held", within=BOUND)
    assert len(held_rows(server)) == 1
    child.does("release", "released")


@pytest.mark.parametrize("outage", OUTAGES)
def test_a_timeout_ends_in_time_while_the_server_is_away(server, proxy, sufferer, outage):
    lock = semaphore("in-time", using=server)
    holder = lock.acquire()
    child = sufferer("in-time")
    child.send("acquire 3")
    wait_until(lambda: lock.status().waiting == 1)
    getattr(proxy, outage)()
    line = child.expect(timeout=BOUND)
    assert "failed" in line or "busy" in line, line
    proxy.resume()
    holder.release()
    child.does("acquire 30", "held")
    child.does("release", "released")


@pytest.mark.parametrize("outage", OUTAGES)
def test_holding_through_an_outage_shorter_than_the_lease(server, proxy, sufferer, outage):
    child = sufferer("short", lease=8)
    child.does("acquire 5", "held")
    (row,) = held_rows(server)
    getattr(proxy, outage)()
    time.sleep(3.5)  # a renewal is due after two seconds
    child.does("check", "ours")
    proxy.resume()
    wait_until(lambda: held_rows(server)[0].expires_us > row.expires_us + 3_000_000, timeout=6, what="renewed")
    time.sleep(4)
    child.does("check", "ours")
    assert [each.token for each in held_rows(server)] == [row.token]
    child.does("release", "released")
    assert held_rows(server) == []


@pytest.mark.parametrize("outage", OUTAGES)
def test_holding_through_an_outage_longer_than_the_lease(server, proxy, sufferer, outage):
    child = sufferer("long", lease=2)
    child.does("acquire 5", "held")
    getattr(proxy, outage)()
    lock = semaphore("long", using=server)
    next_holder = lock.acquire(timeout=5)
    # The old holder counts its lease as over before the database does.
    assert child.does("check", "lost", within=1.0) == "cut off"
    proxy.resume()
    child.does("release", "released", within=BOUND)
    next_holder.check()
    assert [row.token for row in held_rows(server)] == [next_holder.token]
    child.send("acquire 30")
    wait_until(lambda: lock.status().waiting == 1)
    next_holder.release()
    child.answer("held", within=BOUND)
    child.does("check", "ours")
    child.does("release", "released")


@pytest.mark.parametrize("outage", OUTAGES)
def test_release_while_away_raises_and_is_made_up_for(server, proxy, sufferer, outage):
    child = sufferer("late")
    child.does("acquire 5", "held")
    getattr(proxy, outage)()
    cause = child.does("release", "failed", within=BOUND)
    assert is_of_the_driver(cause, server), cause
    assert len(held_rows(server)) == 1
    proxy.resume()
    wait_until(lambda: not held_rows(server), timeout=SOON, what="given back by the keeper")
    child.does("acquire 5", "held")
    child.does("release", "released")


@pytest.mark.parametrize("outage", OUTAGES)
def test_a_block_that_ends_while_away_logs_and_is_made_up_for(server, proxy, sufferer, outage):
    child = sufferer("block")
    child.does("enter", "held")
    getattr(proxy, outage)()
    child.does("leave", "left", within=BOUND)
    assert "The permit of 'block' could not be given back; the keeper goes on trying" in child.stderr
    assert len(held_rows(server)) == 1
    proxy.resume()
    wait_until(lambda: not held_rows(server), timeout=SOON, what="given back by the keeper")
    child.does("enter", "held")
    child.does("leave", "left")


def test_the_lease_ends_what_an_outage_does_not_let_go(server, proxy, sufferer):
    child = sufferer("lease", lease=2)
    child.does("acquire 5", "held")
    proxy.refuse()
    child.does("release", "failed", within=BOUND)
    permit = semaphore("lease", using=server).acquire(timeout=2.5)
    proxy.resume()
    time.sleep(SOON)
    permit.check()
    assert [row.token for row in held_rows(server)] == [permit.token]
    permit.release()
    child.does("acquire 5", "held")
    child.does("release", "released")


# The server ends sessions, and is there.


def test_killed_idle_connections_are_replaced_unnoticed(server):
    lock = semaphore("idle", using=server)
    keeper = semaphore("keeps-the-connections-open", using=server).acquire()
    keeper.detach()
    for _ in range(3):
        lock.acquire().release()
        connections.close_all()
        assert kill_sessions(server, session_ids(server)) > 0
        with lock as permit:
            assert sorted(row.token for row in held_rows(server)) == sorted([permit.token, keeper.token])
            connections.close_all()
            kill_sessions(server, session_ids(server))
        assert [row.token for row in held_rows(server)] == [keeper.token]
    keeper.check()
    keeper.release()


def test_killed_while_waiting_goes_on_waiting(server):
    lock = semaphore("goes-on", using=server)
    holder = lock.acquire()
    holder.detach()
    with Sufferer(server, "goes-on") as child:
        child.send("acquire 60")
        wait_until(lambda: lock.status().waiting == 1)
        for _ in range(5):
            connections.close_all()
            kill_sessions(server, session_ids(server))
            time.sleep(0.3)
        wait_until(lambda: lock.status().waiting == 1, what="still waiting")
        holder.release()
        child.answer("held", within=BOUND)
        assert [row.pid for row in held_rows(server)] == [child.pid]
        child.does("release", "released")


def test_killed_while_holding_keeps_the_permit(server):
    with Sufferer(server, "keeps", lease=3) as child:
        child.does("acquire 5", "held")
        end = time.monotonic() + 6
        while time.monotonic() < end:
            connections.close_all()
            kill_sessions(server, session_ids(server))
            time.sleep(0.25)
            child.does("check", "ours")
        child.does("release", "released")
    assert held_rows(server) == []
