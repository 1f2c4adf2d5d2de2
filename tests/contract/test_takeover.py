"""Exactly when a slot can be taken from a holder, and that the holder knows before anybody else has it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from functools import partial

import pytest
from django.db import connections

from django_sqlsem import queries
from django_sqlsem.database import server as database_server
from django_sqlsem.database.beacons import lock_key
from django_sqlsem.models import SlotRow
from tests.programs.takeover_clients import Holder, Waiter
from tests.support import applocks, databases
from tests.support.databases import held_rows, kill_sessions, session_ids
from tests.support.operators import now_us
from tests.support.private_servers import ALIAS, KINDS, private_server
from tests.support.processes import Child, is_alive, wait_for_end
from tests.support.proxy import proxy_for, through
from tests.support.threads import wait_until

pytestmark = pytest.mark.rows_only("lease")

SERVERS = [alias for alias in databases.covered() if alias != "default"]
#: A lease that no test waits for: what is taken before has been taken for another reason.
LONG = 120
#: How long nobody may take what only a beacon tells to be free, in seconds: the holder has this long to light it again.
PATIENCE = 1.0
#: Until when somebody must have it, on a busy machine.
SOON = 20.0
#: By what the time that a beacon may be out is multiplied: on a busy machine its process needs more than a second.
MUCH_TIME = 30
WITHOUT_BEACONS = {"SQLSEM_TEST_SETTINGS": json.dumps({"BEACONS": False})}


@pytest.fixture(params=SERVERS)
def server(request, committed):
    """The alias of one covered server after the other."""
    alias = applocks.parameter(request)
    yield alias
    databases.assert_nothing_held(alias)


@pytest.fixture
def start(database):
    """A function that starts a holder and a waiter of the same name; the waiter stands in line when it returns."""
    with contextlib.ExitStack() as stack:
        yield lambda name, **options: in_line(stack, database, name, **options)


def in_line(stack, alias, name, *, env=None, holder_env=None, time_to_relight=1, **options):
    time = {"time_to_relight": time_to_relight}
    holder = stack.enter_context(Holder(alias, name, env=holder_env or env, **time, **options)).holds()
    waiter = stack.enter_context(Waiter(alias, name, env=env, **time)).ready()
    waiter.ask()
    wait_until(lambda: queries.semaphore(name, using=alias).waiting == 1, what="one waiter")
    return holder, waiter


def slot_row(alias, name):
    return SlotRow.objects.using(alias).select_related("semaphore").get(semaphore__name=name, slot=1)


def renewed_since(alias, name, us):
    row = slot_row(alias, name)
    return row.expires_us - row.lease_us > us and row.beacon and row.suspect_us is None


def let_go(waiter):
    waiter.release()
    waiter.end()


def known_before(holder, granted_at, reasons):
    """Assert that the holder knew of its loss, for one of these reasons, before somebody else had the slot."""
    wait_until(lambda: holder.watched()[1], what="it knows")
    until, reason = holder.watched()
    assert reason in reasons
    assert until < granted_at, f"it believed to hold for {until - granted_at:.3f} s after the slot was another's"


# The holder's process.


@pytest.mark.one_server("beacons")
def test_a_killed_holders_slot_is_taken_long_before_its_lease_ends(database, start):
    holder, waiter = start("killed", lease=LONG)
    killed_at = time.monotonic()
    holder.kill()
    granted_at, slot, token = waiter.granted(SOON)
    assert slot == 1
    assert token > holder.token
    if database != "default":  # on SQLite its file is locked until its very end, so there is nothing to wait for
        assert granted_at - killed_at > PATIENCE
    let_go(waiter)


@pytest.mark.one_server("beacons")
def test_a_killed_holders_slot_is_taken_by_one_who_comes_later(database):
    """Nobody was waiting when it died."""
    with Holder(database, "later", lease=LONG) as holder, Waiter(database, "later") as waiter:
        holder.holds()
        # The first permit of a process may be granted a moment before its beacon is lit.
        wait_until(lambda: slot_row(database, "later").beacon)
        holder.kill()
        waiter.ready().ask()
        assert waiter.granted(SOON)[2] > holder.token
        let_go(waiter)


def test_without_beacons_a_killed_holders_slot_is_taken_when_its_lease_ends(database, start):
    holder, waiter = start("leased", lease=5, env=WITHOUT_BEACONS)
    holder.kill()
    expires_us = slot_row(database, "leased").expires_us
    assert expires_us - now_us(database) > 2_000_000
    waiter.granted(SOON)
    assert slot_row(database, "leased").acquired_us >= expires_us
    let_go(waiter)


def test_a_holder_stopped_for_less_than_its_lease_keeps_its_slot(database, start):
    holder, waiter = start("paused", lease=6)
    holder.stop()
    before = slot_row(database, "paused").expires_us
    # Longer than any patience with a beacon, which a stopped process keeps.
    wait_until(lambda: now_us(database) > before - 1_800_000)
    waiter.silent(0.01)
    holder.cont()
    assert holder.check() == "ours"
    wait_until(lambda: slot_row(database, "paused").expires_us > before)
    assert holder.check() == "ours"
    assert [row.token for row in held_rows(database)] == [holder.token]
    assert holder.release() == "released"
    waiter.granted(SOON)
    let_go(waiter)


def test_a_holder_stopped_for_more_than_its_lease_loses_its_slot(database, start):
    holder, waiter = start("stopped", lease=3)
    holder.stop()
    expires_us = slot_row(database, "stopped").expires_us
    granted_at, _, token = waiter.granted(SOON)
    assert slot_row(database, "stopped").acquired_us >= expires_us
    assert token > holder.token
    holder.send("check")  # the first thing that it does when it wakes
    holder.cont()
    assert holder.expect() == "lost expired"
    known_before(holder, granted_at, ["expired"])
    holder.release()
    assert [row.token for row in held_rows(database)] == [token]
    let_go(waiter)
    holder.end()


@pytest.mark.one_server("beacons")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_does_not_keep_its_killed_parents_slot(database, start):
    holder, waiter = start("forked", lease=LONG)
    child = holder.fork()
    assert holder.check() == "ours"
    holder.kill()
    waiter.granted(SOON)
    assert is_alive(child)
    let_go(waiter)
    holder.close()
    wait_for_end(child)


# Its sessions.


@pytest.mark.one_server("beacons")
def test_a_holder_whose_sessions_are_killed_keeps_its_slot(server):
    with contextlib.ExitStack() as stack:
        holder, waiter = in_line(stack, server, "sessions", lease=LONG, time_to_relight=MUCH_TIME)
        for _ in range(5):
            lit_again = partial(renewed_since, server, "sessions", now_us(server))
            connections.close_all()
            kill_sessions(server, session_ids(server))
            assert holder.check() == "ours"
            waiter.silent(0.2)
            wait_until(lit_again, what="its beacon is lit, and its row says so")
        assert [row.token for row in held_rows(server)] == [holder.token]
        assert holder.release() == "released"
        waiter.granted(SOON)
        let_go(waiter)


def test_sessions_killed_all_the_time_never_make_two_holders(server):
    """It may or may not lose its slot, but it knows first."""
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(Holder(server, "restless", lease=LONG)).holds()
        ours = set(session_ids(server))
        waiter = stack.enter_context(Waiter(server, "restless")).ready()
        waiter.ask()
        wait_until(lambda: queries.semaphore("restless", using=server).waiting == 1)
        connections.close_all()
        waiters = set(session_ids(server)) - ours
        end = time.monotonic() + 5
        while time.monotonic() < end:
            kill_sessions(server, list(set(session_ids(server)) - waiters))
            time.sleep(0.02)
        holder.release()
        granted_at, *_ = waiter.granted(SOON)
        until, _ = holder.watched()
        assert until < granted_at
        let_go(waiter)


def test_what_is_acquired_while_the_beacon_is_out_is_not_taken_for_a_dead_ones(committed):
    """The keeper's session was ended and cannot be opened again; the one that acquires stands."""
    lease = 5
    with private_server("postgres") as private, contextlib.ExitStack() as stack:
        target = "tests.programs.takeover_clients:hold_another"
        child = stack.enter_context(Child(target, ALIAS, "dark", {"lease": lease}, env=private.env()))
        waiter = stack.enter_context(Waiter(ALIAS, "dark", env=private.env(), connected=True)).ready()
        child.expect("first", timeout=60)
        wait_until(lambda: slot_row(ALIAS, "dark-first").beacon)
        since = started_us()
        wait_until(lambda: now_us(ALIAS) > since + lease * 1_000_000)  # the server's grace is over
        key = lock_key(slot_row(ALIAS, "dark-first").process_id) % 2**32
        private.query("ALTER DATABASE sqlsem ALLOW_CONNECTIONS false", database="postgres")
        end = f"SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = {key}"
        assert private.query(end, database="postgres") == [(True,)]
        time.sleep(0.5)  # the keeper has noticed, and fails to open it
        child.send()
        child.expect("held")
        waiter.ask()
        granted_at, *_ = waiter.granted(lease + SOON)
        child.send("watched")
        until, reason = json.loads(child.expect("watched"))
        assert reason is not None
        assert until < granted_at
        private.query("ALTER DATABASE sqlsem ALLOW_CONNECTIONS true", database="postgres")
        waiter.release()


# The network between the two.


@pytest.mark.one_server("beacons")
@pytest.mark.parametrize("outage", ["refuse", "silence"])
def test_a_short_cut_costs_nothing(server, outage):
    ends = outage == "refuse"  # the sessions; else they stand, and no beacon goes out
    with cut_off(server, "blip", lease=LONG, time_to_relight=MUCH_TIME if ends else 1) as (holder, waiter, proxy):
        for _ in range(3):
            lit_again = partial(renewed_since, server, "blip", now_us(server))
            getattr(proxy, outage)()
            waiter.silent(0.5)
            if ends:
                wait_until(lambda: slot_row(server, "blip").suspect_us, what="the waiter suspects that it is dead")
            proxy.resume()
            if ends:
                wait_until(lit_again, what="its beacon is lit, and its row says so")
            else:
                waiter.silent(2.5)  # longer than anybody's patience
        assert holder.watched()[1] is None
        assert [row.token for row in held_rows(server)] == [holder.token]
        assert holder.release() == "released"
        waiter.granted(SOON)
        let_go(waiter)


def test_a_cut_of_5_seconds_that_leaves_the_sessions_standing_costs_nothing(server):
    """The server knows of nothing: packets are lost."""
    with cut_off(server, "silent", lease=16) as (holder, waiter, proxy):
        proxy.silence()
        waiter.silent(5)
        proxy.resume()
        wait_until(lambda: held_rows(server)[0].expires_us - now_us(server) > 14_000_000, timeout=SOON, what="renewed")
        waiter.silent(2.5)
        assert holder.watched()[1] is None
        assert [row.token for row in held_rows(server)] == [holder.token]
        assert holder.release() == "released"
        waiter.granted(SOON)
        let_go(waiter)


@pytest.mark.one_server("beacons")
def test_a_cut_of_5_seconds_that_ends_the_sessions_costs_the_slot(server):
    with cut_off(server, "refused", lease=LONG) as (holder, waiter, proxy):
        cut_at = time.monotonic()
        proxy.refuse()
        granted_at, _, token = waiter.granted(SOON)
        assert granted_at - cut_at > PATIENCE
        known_before(holder, granted_at, LOST_TOUCH)
        waiter.silent(max(0.0, cut_at + 5 - time.monotonic()))
        proxy.resume()
        holder.release()
        assert [row.token for row in held_rows(server)] == [token]
        let_go(waiter)


#: How a holder says that it cannot know any more.
LOST_TOUCH = ("cut off", "session ended", "expired")


def test_without_beacons_a_cut_of_5_seconds_costs_nothing(server):
    with cut_off(server, "patient", lease=16, env=WITHOUT_BEACONS) as (holder, waiter, proxy):
        proxy.refuse()
        waiter.silent(5)
        proxy.resume()
        wait_until(lambda: held_rows(server)[0].expires_us - now_us(server) > 14_000_000, timeout=SOON, what="renewed")
        assert holder.watched()[1] is None
        assert [row.token for row in held_rows(server)] == [holder.token]
        assert holder.release() == "released"
        waiter.granted(SOON)
        let_go(waiter)


@pytest.mark.parametrize("outage", ["refuse", "silence"])
def test_a_cut_of_two_leases_costs_the_slot(server, outage):
    lease = 3
    with cut_off(server, "long", lease=lease) as (holder, waiter, proxy):
        getattr(proxy, outage)()
        cut_at = time.monotonic()
        expires_us = slot_row(server, "long").expires_us
        granted_at, _, token = waiter.granted(SOON)
        if outage == "silence":
            assert slot_row(server, "long").acquired_us >= expires_us
        known_before(holder, granted_at, LOST_TOUCH)
        waiter.silent(max(0.0, cut_at + 2 * lease - time.monotonic()))
        proxy.resume()
        holder.release()
        assert [row.token for row in held_rows(server)] == [token]
        let_go(waiter)


@contextlib.contextmanager
def cut_off(server, name, *, env=None, **options):
    """Start a holder that reaches the server through a proxy, and a waiter that reaches it by itself."""
    with proxy_for(server) as proxy, contextlib.ExitStack() as stack:
        holder_env = through(proxy, server) | (env or {})
        holder, waiter = in_line(stack, server, name, env=env, holder_env=holder_env, **options)
        yield holder, waiter, proxy


# The server.


@pytest.fixture(params=KINDS)
def private(request, committed):
    """A server of the test's own, of one kind after the other."""
    with private_server(request.param) as server:
        yield server


@pytest.fixture
def pair(private):
    """A function that starts a holder, which holds, and a waiter, which listens."""
    with contextlib.ExitStack() as stack:

        def start(name, **options):
            holder = stack.enter_context(Holder(ALIAS, name, env=private.env(), **options)).holds()
            return holder, stack.enter_context(Waiter(ALIAS, name, env=private.env())).ready()

        yield start


def started_us():
    """When the private server was started, by its clock, in microseconds."""
    with connections[ALIAS].cursor() as cursor:
        return database_server.read(connections[ALIAS], cursor).started_us


def test_a_server_that_is_killed_and_started_takes_no_slot_from_a_living_holder(private, pair):
    holder, waiter = pair("lives", lease=6, time_to_relight=MUCH_TIME)
    for _ in range(2):
        private.kill()
        private.start()
        connections[ALIAS].close()
        before = slot_row(ALIAS, "lives").expires_us
        wait_until(lambda before=before: slot_row(ALIAS, "lives").expires_us > before, what="renewed")
        assert holder.check() == "ours"
    waiter.ask()
    waiter.silent(4)
    assert holder.check() == "ours"
    assert [row.token for row in held_rows(ALIAS)] == [holder.token]
    assert holder.release() == "released"
    waiter.granted(SOON)
    let_go(waiter)


@pytest.mark.parametrize("down", ["for a moment", "for longer than the lease"])
def test_for_one_lease_after_a_start_nothing_is_taken(private, pair, down):
    """Nobody can tell whether the holder is dead, or only not connected yet."""
    lease = 4
    holder, waiter = pair("grace", lease=lease)
    expires_us = slot_row(ALIAS, "grace").expires_us
    private.kill()
    holder.kill()
    if down == "for longer than the lease":
        wait_until(lambda: time.time() * 1e6 > expires_us + 500_000, timeout=lease + 5)
    private.start()
    waiter.ask()
    waiter.granted(lease + SOON)
    connections[ALIAS].close()
    row = slot_row(ALIAS, "grace")
    assert row.token > holder.token
    # MariaDB tells its start in whole seconds, rounded down.
    assert row.acquired_us >= started_us() + lease * 1_000_000
    let_go(waiter)


def test_a_holder_cut_off_by_a_server_that_is_away_for_longer_than_its_lease_knows(private, pair):
    lease = 3
    holder, waiter = pair("away", lease=lease)
    private.kill()
    wait_until(lambda: holder.watched()[1], timeout=lease + 5)
    private.start()
    waiter.ask()
    granted_at, _, token = waiter.granted(lease + SOON)
    known_before(holder, granted_at, LOST_TOUCH)
    holder.release()
    connections[ALIAS].close()
    assert [row.token for row in held_rows(ALIAS)] == [token]
    let_go(waiter)


# Grants that are not flushed.


def test_a_durable_grant_survives_a_kill_of_the_server(private):
    for number in range(3):
        with Holder(ALIAS, f"kept {number}", env=private.env(), lease=LONG) as holder:
            holder.holds()
            private.kill()
            private.start()
            connections[ALIAS].close()
            assert slot_row(ALIAS, f"kept {number}").token == holder.token
            assert holder.release() in ("released", "failed")


def test_a_grant_that_is_not_durable_is_doubled_for_one_lease_at_the_most(committed):
    lease = 4
    # What is not flushed stays in the server's memory for long, unless somebody else's commit takes it along.
    with (
        private_server("postgres", wal_writer_delay="10s", autovacuum="off") as private,
        contextlib.ExitStack() as stack,
    ):
        waiter = stack.enter_context(Waiter(ALIAS, "fast", env=private.env(), lease=lease)).ready()
        waiter.ask()  # so that the rows are there
        waiter.granted(SOON)
        waiter.release()
        for _ in range(10):
            holder = stack.enter_context(Holder(ALIAS, "fast", env=private.env(), lease=lease, durable=False))
            holder.holds()
            private.kill()
            private.start()
            started_at = time.monotonic()
            connections[ALIAS].close()
            if slot_row(ALIAS, "fast").token != holder.token:
                break
            holder.release()
            holder.end()
        else:
            pytest.fail("no grant was ever lost")
        waiter.ask()
        granted_at, _, token = waiter.granted(lease + SOON)
        assert token > holder.token  # although the row had forgotten the other one
        wait_until(lambda: holder.watched()[1], timeout=lease + SOON, what="it is told")
        until, reason = holder.watched()
        assert reason == "expired"
        assert until - started_at < lease
        assert until - granted_at < lease
        holder.release()
        assert [row.token for row in held_rows(ALIAS)] == [token]
        let_go(waiter)
