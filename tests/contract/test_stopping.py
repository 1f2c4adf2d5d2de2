"""A holder that an operator asks to stop: it hears of it, keeps what it has, and nobody else is meant."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time

import pytest
from django.db import connections
from django.db.models import F

from django_sqlsem import (
    control,
    mutex,
    queries,
    semaphore,
)
from django_sqlsem.backends import get_backend
from django_sqlsem.claims import claim
from django_sqlsem.database import bells
from django_sqlsem.locks import (
    acquire_all,
    current_permit,
    rlock,
    rwlock,
)
from django_sqlsem.models import SlotRow
from django_sqlsem.runtime.keepers import keeper_for
from django_sqlsem.runtime.loop import ThreadLoop
from django_sqlsem.runtime.presence import Reach
from django_sqlsem.signals import permit_stop_requested
from tests.programs.lock_clients import Actor
from tests.support import applocks
from tests.support.databases import held_rows, kill_sessions, raw_connection, session_ids
from tests.support.statements import CountedSession
from tests.support.threads import run_in_threads, wait_until
from tests.testapp.models import Inventory

#: So long that no renewal comes while a test lasts: what is heard by then was brought by a bell.
LONG = 3600
LEASE = 8
SOON = 20.0


def heard(child):
    """Wait until a child was told, on a thread of its own; return by whom."""
    thread, by = json.loads(child.expect("on_stop", timeout=SOON))
    assert thread == "sqlsem-on-stop"
    return by


def write_wish(database, name, by):
    """Write a wish as an operator whom no bell obeys."""
    rows = SlotRow.objects.using(database).filter(semaphore__name=name, expires_us__isnull=False)
    assert rows.update(stop_token=F("token"), stop_by=by) == 1


def test_a_holder_hears_at_once_and_keeps_what_it_has(database):
    with Actor(database, "asked", lease=LONG, heeds=True) as holder:
        _, (token,) = holder.ready().acquire()
        assert holder.ask("asked") == [False, ""]
        (found,) = control.request_stop("asked", by="ann", using=database)
        assert (found.slot, found.token, found.stop_by, found.pid) == (1, token, "ann", holder.pid)
        assert heard(holder) == "ann"
        assert holder.ask("asked") == [True, "ann"]
        assert holder.check() is None
        (row,) = held_rows(database)
        assert (row.pid, row.token) == (holder.pid, token)
        (seen,) = queries.semaphore("asked", using=database).holders
        assert (seen.stop_requested, seen.stop_by) == (True, "ann")
        holder.release()
        holder.end()


@pytest.mark.rows_only("beacons")
def test_the_first_grant_of_a_process_says_how_that_is_reached(database, monkeypatch):
    """Also if its claim comes while another thread finds that out, on a connection that is open by then."""
    begun = threading.Event()
    opened, ensure = Reach.opened, ThreadLoop.ensure

    def open_slowly(reach, connection):
        begun.set()
        time.sleep(1.0)
        opened(reach, connection)

    def ensure_and_let_begin(loop):
        ensure(loop)
        assert begun.wait(SOON)

    monkeypatch.setattr(Reach, "opened", open_slowly)
    monkeypatch.setattr(ThreadLoop, "ensure", ensure_and_let_begin)
    with semaphore("first", lease=LONG, using=database).acquire() as permit:
        (row,) = held_rows(database)
        assert row.channel == keeper_for(get_backend(database)).reach.presence.channel != ""
        assert row.beacon
        assert len(control.request_stop("first", by="ann", using=database)) == 1
        wait_until(lambda: permit.stop_requested, timeout=SOON)


def test_where_no_bell_rings_the_next_renewal_tells(database):
    with Actor(database, "renewed", lease=LEASE, heeds=True) as holder:
        holder.ready().acquire()
        write_wish(database, "renewed", "bob")
        assert heard(holder) == "bob"
        holder.release()
        holder.end()


def test_the_server_wakes_a_holder_whom_no_bell_reaches(database, monkeypatch):
    if connections[database].vendor != "postgresql":
        pytest.skip("only PostgreSQL wakes sessions")
    monkeypatch.setattr(bells, "ring", lambda channel, note: False)  # as from another host
    with Actor(database, "notified", lease=LONG, heeds=True) as holder:
        holder.ready().acquire()
        control.request_stop("notified", by="ann", using=database)
        assert heard(holder) == "ann"
        holder.release()
        holder.end()


def test_whoever_gets_the_slot_next_is_not_meant(database):
    with (
        Actor(database, "passed", lease=LEASE, heeds=True) as holder,
        Actor(database, "passed", lease=LEASE, heeds=True) as waiter,
    ):
        _, (old,) = holder.ready().acquire()
        waiter.ready().ask_for()
        wait_until(lambda: queries.semaphore("passed", using=database).waiting == 1)
        control.request_stop("passed", by="ann", using=database)
        assert heard(holder) == "ann"
        holder.release()
        _, (new,) = waiter.granted()
        # What was said to the one before it acts on nobody now.
        assert control.request_stop("passed", 1, old, by="ann", using=database) == []
        (seen,) = queries.semaphore("passed", using=database).holders
        assert (seen.token, seen.stop_by) == (new, "")
        time.sleep(LEASE / 4 + 0.5)  # a renewal
        assert waiter.ask("asked") == [False, ""]
        waiter.release()
        # Nor is the same process by its next permit.
        holder.acquire()
        assert holder.ask("asked") == [False, ""]
        holder.release()
        assert control.request_stop("passed", by="ann", using=database) == []
        holder.end()
        waiter.end()


def test_one_slot_of_several_is_the_whole_holder(database):
    with (
        Actor(database, "several", slots=3, take=2, lease=LONG, heeds=True) as pair,
        Actor(database, "several", slots=3, lease=LONG, heeds=True) as single,
    ):
        assert pair.ready().acquire()[0] == [1, 2]
        assert single.ready().acquire()[0] == [3]
        assert len(control.request_stop("several", 2, by="ann", using=database)) == 1
        assert heard(pair) == "ann"
        stop_by = [holder.stop_by for holder in queries.semaphore("several", using=database).holders]
        assert stop_by == ["ann", "ann", ""]
        assert single.ask("asked") == [False, ""]
        pair.release()
        single.release()
        pair.end()
        single.end()


def test_whoever_has_all_slots_is_asked_as_one(database):
    with semaphore("emptied", slots=3, using=database).exclusive() as permit:
        (found,) = control.request_stop("emptied", by="ann", using=database)
        assert found.stop_by == "ann"
        wait_until(lambda: permit.stop_requested, timeout=SOON)


def test_a_writer_and_a_reader_that_became_one(database):
    prices = rwlock("prices", using=database)
    with prices.write() as permit:
        (found,) = control.request_stop("prices", by="ann", using=database)
        assert found.stop_by == "ann"
        wait_until(lambda: permit.stop_requested, timeout=SOON)
    if applocks.are_at(database):
        return
    told = []
    with prices.upgradable() as permit:
        permit.on_stop_requested(told.append)
        permit.upgrade()
        (found,) = control.request_stop("prices", by="bob", using=database)
        wait_until(lambda: told, timeout=SOON)
        assert permit.stop_requested_by == "bob"
        permit.downgrade()
        (found,) = queries.semaphore("prices", using=database).holders
        assert found.stop_by == "bob"
        permit.upgrade()
        (found,) = queries.semaphore("prices", using=database).holders
        assert found.stop_by == "bob"
    assert told == [permit]


def test_monitors_mutexes_and_several_at_once(database):
    with rlock("outer", using=database) as outer, rlock("outer", using=database) as inner:
        control.request_stop("outer", by="ann", using=database)
        wait_until(lambda: inner.stop_requested, timeout=SOON)
        assert (outer.stop_requested, outer.stop_requested_by) == (True, "ann")
    told = []
    with acquire_all([mutex("one", using=database), mutex("two", using=database)]) as permits:
        permits.on_stop_requested(told.append)
        assert (permits.stop_requested, permits.stop_requested_by) == (False, "")
        control.request_stop("two", by="bob", using=database)
        wait_until(lambda: told, timeout=SOON)
        assert told == [permits[1]]
        assert (permits.stop_requested, permits.stop_requested_by) == (True, "bob")


def test_callbacks_and_the_signal_come_once_each_on_a_thread_of_their_own(database, caplog):
    told, signalled = [], []

    def fails(permit):
        told.append(threading.current_thread().name)
        raise ZeroDivisionError

    def receiver(*, semaphore, permit, by, **_):
        signalled.append((semaphore.name, permit.name, by))

    permit_stop_requested.connect(receiver)
    try:
        with mutex("told", using=database) as permit:
            with pytest.raises(TypeError, match="on_stop_requested takes a callable, not 3"):
                permit.on_stop_requested(3)
            permit.on_stop_requested(fails)
            permit.on_stop_requested(lambda permit: told.append(permit.stop_requested_by))
            for by in ("ann", "bob"):
                control.request_stop("told", by=by, using=database)
            wait_until(lambda: signalled, timeout=SOON)
            assert told == ["sqlsem-on-stop", "ann"]
            # Whoever comes late is told at once.
            late = []
            permit.on_stop_requested(late.append)
            wait_until(lambda: late == [permit], timeout=SOON)
            assert permit.stop_requested_by == "ann"
    finally:
        permit_stop_requested.disconnect(receiver)
    assert signalled == [("told", "told", "ann")]
    assert "ZeroDivisionError" in caplog.text
    assert caplog.text.count("is asked to stop by ann") == 1


def test_two_operators_at_once_are_heard_as_one(database):
    with Actor(database, "both", lease=LONG, heeds=True) as holder:
        _, (token,) = holder.ready().acquire()
        found = run_in_threads(
            2, lambda nth: control.request_stop("both", 1, token, by=("ann", "bob")[nth], using=database)
        )
        assert [len(each) for each in found] == [1, 1]
        (seen,) = queries.semaphore("both", using=database).holders
        assert seen.stop_by in ("ann", "bob")
        assert heard(holder) == seen.stop_by
        holder.release()
        holder.end()
        assert len([line for line in holder.lines if line.startswith("on_stop")]) == 1


def test_a_wish_that_meets_a_locked_row_is_written_and_heard_when_that_is_free(database):
    """A renewal passes the row over meanwhile, or waits; one after it brings the wish."""
    vendor = connections[database].vendor
    if vendor == "microsoft":
        pytest.skip("a lock of a row keeps no renewal from being proved there")
    with Actor(database, "locked", lease=60, heeds=True) as holder:
        holder.ready().acquire()
        (row,) = held_rows(database)
        with contextlib.closing(raw_connection(database)) as raw:
            cursor = raw.cursor()
            cursor.execute("BEGIN IMMEDIATE" if vendor == "sqlite" else "BEGIN")
            if vendor != "sqlite":
                cursor.execute(f"SELECT id FROM sqlsem_slot WHERE semaphore_key = '{row.semaphore_id}' FOR UPDATE")
            asking = threading.Thread(target=run_in_threads, args=(1, lambda _: ask_for_a_while(database, "locked")))
            asking.start()
            assert bells.ring(row.channel, row.permit_id)  # it renews now
            time.sleep(0.5)
            assert holder.ask("asked") == [False, ""]
            cursor.execute("ROLLBACK")
        asking.join(60)
        assert heard(holder) == "ann"
        assert holder.check() is None
        holder.release()
        holder.end()


def ask_for_a_while(database, name):
    """Ask whoever holds, again if the database gives up."""
    wait_until(lambda: _asked(database, name), timeout=60)


def _asked(database, name):
    try:
        return control.request_stop(name, by="ann", using=database)
    except Exception:
        return []


def test_a_holder_that_was_cut_off_hears_when_it_is_back(database):
    if connections[database].vendor in ("sqlite", "microsoft"):
        pytest.skip("its sessions can't be cut without costing the permit")
    connections[database].ensure_connection()
    mine = set(session_ids(database))
    # With a beacon it would have to be back within a second.
    env = {"SQLSEM_TEST_SETTINGS": json.dumps({"BEACONS": False})}
    with Actor(database, "cut", lease=20, heeds=True, env=env) as holder:
        holder.ready().acquire()
        kill_sessions(database, [each for each in session_ids(database) if each not in mine])
        write_wish(database, "cut", "ann")
        assert heard(holder) == "ann"
        assert holder.check() is None
        holder.release()
        holder.end()


def test_a_wish_before_a_revocation_and_one_to_nobody(database):
    with Actor(database, "both", lease=20, heeds=True, announce=True) as holder:
        _, (token,) = holder.ready().acquire()
        control.request_stop("both", 1, token, by="ann", using=database)
        assert heard(holder) == "ann"
        control.revoke("both", 1, token, by="bob", using=database, kill=True)
        assert json.loads(holder.expect("on_lost", timeout=SOON))[1] == "revoked"
        assert holder.ask("asked") == [True, "ann"]
        assert control.request_stop("both", 1, token, by="ann", using=database) == []
        holder.release()
        assert control.request_stop("nobody", by="ann", using=database) == []
        with pytest.raises(ValueError, match="give the slot too"):
            control.request_stop("both", token=token, by="ann", using=database)
        holder.end()


@pytest.mark.rows_only("row statements")
def test_a_renewal_takes_no_statement_more_for_it(database):
    with semaphore("counted", slots=2, take=2, lease=LONG, using=database).acquire() as permit:
        backend, session = get_backend(database), CountedSession(database)

        def renewal():
            found = backend.renew(session, [permit._acquisition.acquired])
            return found.renewed, dict(found.asked), session.sent()

        mine, usual = frozenset({permit._acquisition.permit_id}), 2 if connections[database].vendor == "mysql" else 1
        try:
            # Again while the keeper is busy with the very rows.
            wait_until(lambda: renewal() == (mine, {}, usual), timeout=SOON)
            control.request_stop("counted", by="ann", using=database)
            wait_until(lambda: renewal() == (mine, {permit._acquisition.permit_id: "ann"}, usual), timeout=SOON)
        finally:
            session.close()


@pytest.mark.rows_only("row statements")
def test_the_next_holder_of_a_slot_may_be_of_the_same_process(database):
    """A renewal of both tells the first that it has lost it, and not that it is asked."""
    lock = semaphore("twice", lease=LONG, using=database)
    first = lock.acquire()
    first.detach()
    control.revoke("twice", by="ann", using=database)
    with lock.acquire() as second:
        control.request_stop("twice", 1, second.token, by="bob", using=database)
        keeper = keeper_for(get_backend(database))
        keeper.renew_now(first._acquisition)
        keeper.renew_now(second._acquisition)
        wait_until(lambda: first.lost and second.stop_requested, timeout=SOON)
        assert (first.lost.by, first.stop_requested_by, second.stop_requested_by) == ("ann", "", "bob")
        assert second.lost is None
    first.release()


def test_an_operators_drain(database):
    with (
        Actor(database, "drained", slots=2, lease=LONG, heeds=True) as one,
        Actor(database, "drained", slots=2, lease=LONG, heeds=True) as two,
        Actor(database, "drained", slots=2) as late,
    ):
        for each in (one, two):
            each.ready().acquire()
        assert control.drain("drained", by="ann", using=database)
        assert [heard(one), heard(two)] == ["ann", "ann"]
        found = queries.semaphore("drained", using=database)
        assert (found.paused, found.draining, found.stopping) == (True, True, 2)
        one.release()
        assert late.ready().try_acquire() is None
        assert queries.semaphore("drained", using=database).draining
        two.release()
        found = queries.semaphore("drained", using=database)
        assert (found.paused, found.draining, found.held) == (True, False, 0)
        control.resume("drained", by="ann", using=database)
        assert late.try_acquire() is not None
        assert late.ask("asked") == [False, ""]
        late.release()
        for each in (one, two, late):
            each.end()
    assert not control.drain("unknown", by="ann", using=database)


def test_the_permit_of_a_decorated_call_is_found(database):
    lock = mutex("decorated", using=database)
    assert current_permit("decorated", using=database) is None

    @lock
    def work():
        permit = current_permit("decorated", using=database)
        control.request_stop("decorated", by="ann", using=database)
        wait_until(lambda: permit.stop_requested, timeout=SOON)
        elsewhere = run_in_threads(1, lambda _: current_permit("decorated", using=database))
        assert elsewhere == [None]
        assert current_permit() is permit
        with mutex("inner", using=database) as inner:
            assert current_permit() is inner
            assert current_permit("decorated", using=database) is permit
        assert current_permit() is permit
        return permit

    permit = work()
    assert permit.released
    assert current_permit("decorated", using=database) is None
    assert current_permit() is None
    with pytest.raises(TypeError, match="no name was given"):
        current_permit(using=database)

    @lock
    async def works():
        mine = current_permit("decorated", using=database)
        assert await asyncio.to_thread(current_permit, "decorated", using=database) is mine
        return mine.token

    assert asyncio.run(works()) > permit.token


def test_a_claim_passes_it_on(database):
    for _ in range(3):
        Inventory.objects.using(database).create()
    told, done = [], []
    with claim(Inventory.objects.using(database).order_by("pk"), n=3, using=database) as jobs:
        assert (jobs.stop_requested, jobs.stop_requested_by) == (False, "")
        jobs.on_stop_requested(told.append)
        for job in jobs:
            if jobs.stop_requested:
                jobs.give_back(job)
                continue
            done.append(job.pk)
            jobs.finish(job)
            control.request_stop(jobs.permit.name, jobs.permit.slot, jobs.permit.token, by="ann", using=database)
            wait_until(lambda: told, timeout=SOON)
        assert told == [jobs.permit]
        assert jobs.stop_requested_by == "ann"
    assert len(done) == 1
    assert Inventory.objects.using(database).filter(status="Not Started").count() == 2
    with claim(Inventory.objects.using(database).filter(pk=0), using=database) as none:
        none.on_stop_requested(told.append)
        assert not none.stop_requested
