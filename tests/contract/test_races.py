"""Races and rare turns: floods, cold starts, threads side by side, sleeps, and databases that can't be reached."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import uuid
from dataclasses import replace

import pytest
from django.db import connections, transaction

from django_sqlsem import (
    BackendError,
    lifecycle,
    mutex,
    semaphore,
)
from django_sqlsem.backends import get_backend
from django_sqlsem.backends.rows.acquire import SlotRequest
from django_sqlsem.backends.rows.backend import RowsBackend
from django_sqlsem.core.names import key_of
from django_sqlsem.runtime.chores import DOUBTS
from django_sqlsem.runtime.keeper import Keeper
from django_sqlsem.runtime.keepers import keeper_for
from django_sqlsem.snapshots import LossReason
from tests.support.applocks import is_connected
from tests.support.databases import held_rows, raw_connection
from tests.support.processes import Child
from tests.support.threads import run_beside, run_in_threads, wait_until


@contextlib.contextmanager
def elsewhere(alias, **changes):
    """The database of an alias is at another place for a while; connections that are open stay so."""
    settings = connections[alias].settings_dict
    kept = dict(settings)
    settings.update(changes)
    try:
        yield
    finally:
        settings.clear()
        settings.update(kept)


@contextlib.contextmanager
def silent_server(alias):
    """The database's server takes connections and never says a word."""
    if connections[alias].vendor == "sqlite":
        pytest.skip("SQLite has no server")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        with elsewhere(alias, HOST="127.0.0.1", PORT=str(server.getsockname()[1])):
            yield


def test_a_database_that_refuses_connections_is_a_backend_error_and_no_storm(database, caplog):
    lifecycle.stop_all()
    sqlite = connections[database].vendor == "sqlite"
    wrong = {"NAME": "/nonexistent/locks.sqlite3"} if sqlite else {"HOST": "127.0.0.1", "PORT": "1"}
    with elsewhere(database, **wrong):
        with pytest.raises(BackendError) as caught:
            mutex("refused", timeout=0, using=database).acquire()
        assert caught.value.__cause__ is not None
        busy = time.process_time()
        time.sleep(1)
        assert time.process_time() - busy < 0.7
    assert len(caplog.records) < 10
    mutex("refused", timeout=5, using=database).acquire().release()


def test_threads_that_meet_a_silent_server_together_fail_together(database):
    lifecycle.stop_all()
    lock = semaphore("silent", slots=5, using=database)

    def ask(_number):
        with pytest.raises(BackendError):
            lock.acquire(timeout=1)

    with silent_server(database):
        started = time.monotonic()
        run_in_threads(5, ask)
        assert time.monotonic() - started < 16


@pytest.mark.leaves_held
def test_an_end_without_the_server_does_not_take_a_timeout_per_permit(database):
    many = semaphore("many", slots=6, lease=60, using=database)
    permits = []
    for _ in range(6):
        permits.append(many.acquire())
        permits[-1].detach()
    keeper = keeper_for(get_backend(database))
    with silent_server(database):
        keeper.own.close()
        keeper.work.close()
        started = time.monotonic()
        lifecycle.stop_all()
        assert time.monotonic() - started < 16
    for permit in permits:
        assert permit.lost is not None
    lifecycle.stop_all()


def test_renewals_go_out_while_many_tasks_come_and_go(database):
    async def come_and_go(number, permit, ends):
        lock = semaphore(f"flood-{number}", using=database)
        while len(ends) < 4 and permit.lost is None:  # granted, and renewed three times
            async with lock:
                ends.add(permit._acquisition.lease.deadline)

    async def main():
        async with semaphore("kept", lease=3, using=database) as permit:
            ends = set()
            await asyncio.gather(*(come_and_go(number, permit, ends) for number in range(60)))
            permit.check()

    asyncio.run(main())


def test_threads_that_start_together_share_one_keeper(database):
    code = """
import threading, time
from django_sqlsem import semaphore
from django_sqlsem.runtime import keepers
barrier = threading.Barrier(30)
def run():
    barrier.wait()
    with semaphore("cold", slots=30, using=args[0]):
        time.sleep(0.2)
threads = [threading.Thread(target=run) for _ in range(30)]
for thread in threads: thread.start()
for thread in threads: thread.join()
say(len(keepers._keepers))
"""
    with Child(code, database) as child:
        child.expect("1", timeout=60)
        child.finish()


def test_threads_side_by_side_for_one_task_are_not_inside_one_another(database):
    first = mutex("first", using=database)
    pair = semaphore("pair", slots=2, timeout=10, using=database)
    both = threading.Barrier(2)
    slots = []

    def work(delay):
        time.sleep(delay)
        with pair as permit:
            both.wait(10)
            slots.append(permit.slot)
            both.wait(10)
            time.sleep(delay)
            permit.check()

    async def main():
        async with first:
            pass
        await asyncio.gather(asyncio.to_thread(work, 0), asyncio.to_thread(work, 0.3))

    asyncio.run(main())
    assert sorted(slots) == [1, 2]


def test_a_thread_outlives_the_task_in_whose_name_it_works(database):
    lock = mutex("outlives", timeout=30, using=database)
    entered = threading.Event()
    background = []

    def work():
        with lock as permit:
            entered.set()
            time.sleep(2.5)  # the keeper looks for forgotten permits every second
            permit.check()

    async def view():
        async with mutex("first", using=database):
            pass
        background.append(asyncio.create_task(asyncio.to_thread(work)))
        await asyncio.to_thread(entered.wait, 10)

    async def main():
        await asyncio.create_task(view())
        await asyncio.gather(*background)

    asyncio.run(main())


def test_a_permit_that_a_task_returned_is_not_forgotten_with_it(database):
    lock = mutex("returned", timeout=30, using=database)

    async def main():
        permit = await asyncio.create_task(lock.aacquire())
        await asyncio.sleep(2.5)  # the keeper looks for forgotten permits every second
        permit.check()
        await permit.arelease()
        permit = await asyncio.wait_for(lock.aacquire(), 30)
        permit.check()
        await permit.arelease()

    asyncio.run(main())


@pytest.mark.rows_only("lease")
def test_a_first_try_that_was_slept_through_is_made_again_without_a_word(database, monkeypatch, caplog):
    real = RowsBackend.claim
    grants = []

    def claim_and_sleep(self, session, claim):
        grants.append(real(self, session, claim))
        if len(grants) == 1:
            time.sleep(4.1)  # as a process does that is stopped before it has the answer
        return grants[-1]

    monkeypatch.setattr(RowsBackend, "claim", claim_and_sleep)
    lost = []
    permit = mutex("slept", lease=4, timeout=0, on_lost=lost.append, using=database).acquire()
    permit.check()
    assert len(grants) == 2
    assert lost == []
    assert "lost" not in caplog.text
    permit.release()


def test_the_connection_that_a_status_opened_is_closed(database):
    lifecycle.stop_all()
    mutex("status", using=database).status()
    keeper = keeper_for(get_backend(database))
    wait_until(lambda: not is_connected(keeper.work), timeout=20)


def test_a_release_inside_a_transaction_that_is_rolled_back(database):
    lock = mutex("rolled-back", timeout=30, using=database)
    permit = lock.acquire()
    with transaction.atomic(using=database):
        permit.release()
        transaction.set_rollback(True, using=database)
    wait_until(lambda: held_rows(database) == [], timeout=20)
    lock.acquire().release()


@pytest.mark.rows_only("row statements")
def test_a_row_that_someone_keeps_locked_costs_no_other_permit_its_lease(database):
    if connections[database].vendor == "sqlite":
        pytest.skip("SQLite locks no rows")
    locked, other = (mutex(name, lease=5, using=database).acquire() for name in ("locked", "other"))
    with contextlib.closing(raw_connection(database)) as connection:
        cursor = connection.cursor()
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT id FROM sqlsem_slot WHERE semaphore_key = '{key_of('locked')}' FOR UPDATE")
        wait_until(lambda: locked.lost, timeout=10)
        other.check()
        assert "keeps its row locked" in str(locked.lost)
    other.check()
    other.release()
    locked.release()


def test_a_release_that_the_keeper_overtook_is_no_loss(database, caplog):
    """A caller may wait for its session for so long that the keeper takes it for stuck, and gives back first."""
    lock = semaphore("overtaken", 1, using=database)
    permit = lock.acquire()
    permit.detach()
    keeper = keeper_for(get_backend(database))
    with keeper.work._lock:  # as when many threads stand in line for it
        caller = threading.Thread(target=permit.release)
        caller.start()
        wait_until(lambda: held_rows(database) == [], timeout=10)
        assert caller.is_alive()
    caller.join(10)
    assert permit.lost is None
    assert "lost" not in caplog.text


def test_served_while_the_keepers_own_look_fails(database, monkeypatch):
    """What that statement was about is no longer in doubt: the slot is its holder's."""
    backend = get_backend(database)
    lock = mutex("served", using=database)
    with lock:  # with its rows, and sessions that are open
        pass
    holder = lock.acquire()
    holder.detach()
    wait, failed, granted, done = type(backend).wait, [], threading.Event(), threading.Event()

    def wait_and_fail(self, session, claim, place):
        if failed:
            return wait(self, session, claim, place)
        failed.append(claim.permit_id)
        run_beside(holder.release).result(60)
        assert granted.wait(60)
        raise BackendError("The statement failed.")

    monkeypatch.setattr(type(backend), "wait", wait_and_fail)

    def wait_or_watch(number):
        if number == 0:
            with lock as permit:
                granted.set()
                assert done.wait(60)
                permit.check()
                return permit.lost
        try:
            wait_until(lambda: failed, timeout=60)
            # What is in doubt is freed again and again: by now it has been.
            wait_until(lambda: 0 < len(keeper_for(backend).doubts._doubts) < len(DOUBTS) - 1, timeout=60)
            return [row.slot for row in held_rows(database)]
        finally:
            done.set()

    assert run_in_threads(2, wait_or_watch, timeout=120) == [None, [1]]


def test_what_the_end_takes_back_before_its_thread_has_it_is_not_asked_for_again(database, monkeypatch):
    lock, join = semaphore("ended", using=database), Keeper._join

    def join_and_end(*args):
        join(*args)
        monkeypatch.undo()
        run_beside(lifecycle.stop_all).result(60)

    monkeypatch.setattr(Keeper, "_join", join_and_end)
    assert run_beside(lambda: lock.acquire().lost).result(60).reason is LossReason.STOPPED
    assert held_rows(database) == []


@pytest.mark.rows_only("row statements")
def test_who_takes_a_slot_locks_no_other_one(database):
    """Else a newcomer would be refused the free ones, and everybody would wait for that one's commit."""
    if connections[database].vendor == "sqlite":
        pytest.skip("SQLite locks no rows")
    lock, several = (semaphore("taken", slots=4, take=take, using=database) for take in (1, 2))
    with lock.acquire() as permit:
        session, request = keeper_for(get_backend(database)).work, permit._acquisition.request
    with transaction.atomic(using=database), connections[database].cursor() as cursor:
        assert SlotRequest(session, replace(request, permit_id=uuid.uuid4().hex))._take(cursor)[1] == 1

        def take_others():
            with several.acquire(timeout=0) as others:
                return others.slots

        assert run_beside(take_others).result(60) == (2, 3)
        transaction.set_rollback(True, using=database)
