"""Holders that are killed, stopped, or just busy for long."""

from __future__ import annotations

import io
import json

import pytest
from django.core.management import call_command

from django_sqlsem import queries, semaphore
from django_sqlsem.models import SlotRow
from django_sqlsem.snapshots import SlotState
from tests.programs.lock_clients import Actor
from tests.support.databases import held_rows
from tests.support.operators import now_us
from tests.support.processes import Child
from tests.support.threads import wait_until

#: The longest pause between two looks of the first in line, and what a busy machine adds, in microseconds.
POLL_US = 130_000
SLACK_US = 20_000_000


def slot_row(database, name):
    return SlotRow.objects.using(database).get(semaphore__name=name, slot=1)


def wait_for_waiters(database, name, count):
    wait_until(lambda: queries.semaphore(name, using=database).waiting == count, what=f"{count} waiters")


@pytest.mark.rows_only("lease")
def test_slot_of_a_killed_holder_goes_to_a_waiter_when_its_lease_ends(database, settings):
    settings.SQLSEM = {"BEACONS": False}
    lease = 6
    with Actor(database, "killed", lease=lease) as holder, Actor(database, "killed", lease=lease) as waiter:
        holder.ready().acquire()
        waiter.ready().ask_for()
        wait_for_waiters(database, "killed", 1)
        killed_us = now_us(database)
        holder.kill()
        expires_us = slot_row(database, "killed").expires_us
        assert 0 < expires_us - killed_us <= lease * 1e6

        wait_until(lambda: queries.semaphore("killed", using=database).holders[0].state is SlotState.STALE)
        listed = io.StringIO()
        call_command("locks", "list", "--stale", database=database, stdout=listed)
        listed = listed.getvalue()
        assert str(holder.pid) in listed
        assert "killed" in listed
        assert str(waiter.pid) not in listed
        assert now_us(database) < expires_us, "the machine was too slow to look in time"

        slots, _ = waiter.granted()
        row = slot_row(database, "killed")
        assert slots == [1]
        assert row.pid == waiter.pid
        assert 0 <= row.acquired_us - expires_us <= POLL_US + SLACK_US
        assert row.acquired_us - killed_us <= lease * 1e6 + POLL_US + SLACK_US
        waiter.release()
        waiter.end()


@pytest.mark.rows_only("beacons")
@pytest.mark.leaves_held
@pytest.mark.parametrize("how", ["acquire", "aacquire", "task of a crowd"])
def test_a_process_that_is_killed_right_after_its_first_claim_has_a_beacon(database, how):
    """Its first statements are hardly over: it is seen to be dead all the same, long before its lease runs out.

    A lease that is longer than the server runs would be waited for: whoever was there before that has no beacon.
    """
    code = f"""
import asyncio, os, signal
from django_sqlsem import semaphore
lock = semaphore("killed at once", lease=120, using=args[0])
listen()
async def acquire():
    await lock.aacquire()
    os.kill(os.getpid(), signal.SIGKILL)
async def crowd():
    await asyncio.gather(*(acquire() for _ in range(3)))
if {how!r} == "acquire":
    lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(acquire() if {how!r} == "aacquire" else crowd())
"""
    with Child(code, database) as holder:
        holder.send()
        assert holder.wait(60) == -9
        row = slot_row(database, "killed at once")
        assert row.pid == holder.pid
        assert row.beacon
    with semaphore("killed at once", using=database, timeout=60) as permit:
        assert permit.slot == 1


def test_killed_waiter_is_passed_over(database):
    permit = semaphore("queue", lease=30, using=database).acquire()
    with Actor(database, "queue") as first, Actor(database, "queue") as second:
        first.ready().ask_for()
        wait_for_waiters(database, "queue", 1)
        second.ready().ask_for()
        wait_for_waiters(database, "queue", 2)
        first.kill()
        permit.release()
        second.granted(timeout=20)
        second.release()
        second.end()


WORK = """
import time
from django_sqlsem import semaphore
with semaphore("long", lease=1, using=args[0]) as permit:
    say(f"held {permit.token}")
    end = time.monotonic() + 5
    while time.monotonic() < end:  # leaves the other threads little time
        sum(range(1000))
    permit.check()
    assert listen() == "release"
say("released")
"""


def test_a_holder_that_works_for_five_leases_keeps_its_slot(database):
    with Child(WORK, database) as holder, Actor(database, "long") as waiter:
        token = int(holder.expect("held"))
        waiter.ready().ask_for()
        wait_for_waiters(database, "long", 1)
        waiter.silent(5)
        (row,) = held_rows(database)
        assert (row.pid, row.token) == (holder.pid, token)
        holder.send("release")
        holder.expect("released")
        waiter.granted()
        waiter.release()
        holder.finish()
        waiter.end()


@pytest.mark.rows_only("lease")
def test_a_stopped_holder_finds_itself_lost_on_waking(database):
    with Actor(database, "stopped", lease=2) as sleeper, Actor(database, "stopped") as waiter:
        _, (old,) = sleeper.ready().acquire()
        waiter.ready().ask_for()
        wait_for_waiters(database, "stopped", 1)
        sleeper.stop()
        sleeper.send("check")  # the first thing that it does when it wakes
        slots, (token,) = waiter.granted()
        assert slots == [1]
        assert token > old
        sleeper.cont()
        reason, message = json.loads(sleeper.expect("lost"))
        assert reason == "expired"
        assert "was lost" in message
        told = wait_until(lambda: sleeper.ask("told"))
        assert told == [["sqlsem-on-lost", "expired"]]
        sleeper.release()
        (row,) = held_rows(database)
        assert (row.pid, row.token) == (waiter.pid, token)
        assert waiter.check() is None
        waiter.release()
        assert sleeper.acquire(5) is not None
        sleeper.release()
        sleeper.end()
        waiter.end()


@pytest.mark.rows_only("lease")
def test_a_holder_stopped_for_less_than_its_lease_keeps_its_slot(database):
    with Actor(database, "paused", lease=4) as holder:
        holder.ready().acquire()
        holder.stop()
        before = slot_row(database, "paused").expires_us
        wait_until(lambda: now_us(database) > before - 2_000_000)  # its renewal is overdue
        assert slot_row(database, "paused").expires_us == before
        holder.cont()
        assert holder.check() is None
        wait_until(lambda: slot_row(database, "paused").expires_us > before)
        assert holder.check() is None
        holder.release()
        holder.end()


@pytest.mark.one_server("beacons")
def test_who_wants_two_slots_does_not_wait_for_the_lease_of_a_dead_holder_of_one(database: str) -> None:
    wanted = semaphore("several", slots=2, take=2, using=database)
    with wanted.acquire():
        pass  # the name is no longer new
    with Child("hold", database, "several", 2) as holder:
        holder.expect("held")
        holder.kill()
    with wanted.acquire(timeout=25) as permit:  # the other slot was free all the time; the lease is 60 s
        assert permit.slots == (1, 2)
