"""What application locks do where the contract's tests are about rows alone (``ROWS_ONLY``)."""

from __future__ import annotations

import json
import time

import pytest
from django.db import transaction

from django_sqlsem import AcquireTimeoutError, control, queries, semaphore
from django_sqlsem.backends.applock import acquire, calls
from django_sqlsem.exceptions import KillNeededError
from django_sqlsem.locks import transaction_lock
from django_sqlsem.snapshots import SlotState
from tests.backends.applock.plain import ALIAS, skip_unless_covered
from tests.programs.lock_clients import Actor
from tests.support import tds
from tests.support.databases import held_rows
from tests.support.threads import wait_until

skip_unless_covered()

#: A process proves every 2 s that its sessions stand; the rest is for a busy machine.
HEARTBEAT = 3.0


@pytest.fixture
def database(committed):
    yield ALIAS
    assert held_rows(ALIAS) == []


def in_line(name, count=1):
    wait_until(lambda: queries.semaphore(name, using=ALIAS).waiting == count, what=f"{count} waiters")


def test_slot_of_a_killed_holder_goes_to_a_waiter_at_once(database):
    """As soon as the server sees that the session has ended, whatever the lease."""
    with Actor(ALIAS, "killed", lease=600) as holder, Actor(ALIAS, "killed") as waiter:
        _, (old,) = holder.ready().acquire()
        waiter.ready().ask_for()
        in_line("killed")
        killed = time.monotonic()
        holder.kill()
        slots, (token,) = waiter.granted(timeout=5)
        print(f"\ngranted {1000 * (time.monotonic() - killed):.0f} ms after the kill")
        assert slots == [1]
        assert token > old
        waiter.release()
        waiter.end()


def test_row_of_a_killed_holder_is_stale_until_somebody_takes_the_slot(database):
    with Actor(ALIAS, "left", lease=600) as holder:
        holder.ready().acquire()
        holder.kill()
        wait_until(lambda: queries.semaphore("left", using=ALIAS).holders[0].state is SlotState.STALE)
        assert held_rows(ALIAS) == []
        assert queries.semaphore("left", using=ALIAS).holders[0].pid == holder.pid
        with semaphore("left", timeout=0, using=ALIAS):
            assert queries.semaphore("left", using=ALIAS).holders[0].state is SlotState.HELD


def test_a_stopped_holder_keeps_its_slot_beyond_its_lease(database):
    with Actor(ALIAS, "stopped", lease=1) as holder, Actor(ALIAS, "stopped") as waiter:
        _, (token,) = holder.ready().acquire()
        waiter.ready().ask_for()
        in_line("stopped")
        holder.stop()
        waiter.silent(4)
        assert [row.token for row in held_rows(ALIAS)] == [token]
        holder.cont()
        assert holder.check() is None
        holder.release()
        waiter.granted()
        waiter.release()
        for actor in (holder, waiter):
            actor.end()


def test_a_revoked_holder_loses_its_session_and_all_that_it_has_there(database):
    with Actor(ALIAS, "revoked", announce=True) as holder, Actor(ALIAS, "revoked") as waiter:
        _, (token,) = holder.ready().acquire()
        waiter.ready().ask_for()
        in_line("revoked")
        with pytest.raises(KillNeededError):
            control.revoke("revoked", 1, token, by="test", using=ALIAS)
        assert holder.check() is None
        control.revoke("revoked", 1, token, by="test", kill=True, using=ALIAS)
        revoked = time.monotonic()
        thread, reason = json.loads(holder.expect("on_lost"))
        assert time.monotonic() - revoked < HEARTBEAT + (4 if tds.is_stand_in(ALIAS) else 0)
        assert (thread, reason) == ("sqlsem-on-lost", "revoked")
        _, (later,) = waiter.granted()
        assert later > token
        reason, message = holder.check()
        assert reason == "revoked"
        assert "revoked by test" in message
        holder.release()
        assert [row.token for row in held_rows(ALIAS)] == [later]
        waiter.release()
        assert holder.acquire(5) is not None
        holder.release()
        for actor in (holder, waiter):
            actor.end()


def test_a_lock_of_another_kind_under_the_name_is_named_as_a_reason(database):
    """It has no row that would say who has it."""
    semaphore("taken otherwise", using=ALIAS).acquire().release()
    with transaction.atomic(using=ALIAS):
        transaction_lock("taken otherwise", using=ALIAS)
        with pytest.raises(AcquireTimeoutError, match=r"0 of 1 held\).*perhaps a transaction_lock\(\)"):
            semaphore("taken otherwise", timeout=0.5, using=ALIAS).acquire()


def test_a_new_name_is_made_however_long_the_first_call_took(database, monkeypatch):
    """A server that compiles on a busy machine may take longer for that call than there is for all of them."""
    monkeypatch.setattr(acquire, "PATIENCE", 0.0)
    with semaphore("slow", slots=2, timeout=0, using=ALIAS).acquire() as permit:
        assert permit.slot == 1


def test_a_row_that_is_a_deadlocks_victim_is_written_again_however_long_the_call_waited(database, monkeypatch):
    semaphore("victim", slots=2, timeout=0, using=ALIAS).acquire().release()  # now it has its rows
    monkeypatch.setattr(acquire, "PATIENCE", 0.0)
    real, failed = acquire.Claims._ask, []

    def ask(*arguments, **options):
        if failed:
            return real(*arguments, **options)
        failed.append({"error": 1205, "why": "It was the victim."})
        return acquire.Answer(None, calls.ROW_FAILED), failed[0]

    monkeypatch.setattr(acquire.Claims, "_ask", ask)
    with semaphore("victim", slots=2, timeout=0, using=ALIAS).acquire() as permit:
        assert failed
        assert permit.slot == 1
