"""Whoever was killed looks dead at once to everybody who looks; any living process clears up what it left."""

from __future__ import annotations

import io
import json
import time

import pytest
from django.core.management import call_command
from django.db.models import F

from django_sqlsem import queries, semaphore
from django_sqlsem.backends.rows import beacons
from django_sqlsem.history import events
from django_sqlsem.locks import counter
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow
from django_sqlsem.snapshots import SlotState
from tests.programs.lock_clients import Actor
from tests.programs.queue_clients import Queuer
from tests.support.databases import held_rows
from tests.support.operators import wait
from tests.support.threads import wait_until

pytestmark = [pytest.mark.rows_only("beacons"), pytest.mark.leaves_held]

#: Within so many seconds of a kill it is told, with nobody waiting.
TOLD = 3.0
LEASE = 600


@pytest.fixture
def killed(database):
    """A process that holds a slot of ``dead`` has been killed a moment ago, and nobody waits."""
    with Actor(database, "dead", slots=3, lease=LEASE) as holder:
        holder.ready().acquire()
        wait_until(lambda: SlotRow.objects.using(database).filter(beacon=True).exists())
        assert queries.semaphore("dead", using=database).stale == 0
        holder.kill()
    return time.monotonic()


def listed(database, *options):
    out = io.StringIO()
    call_command("locks", "list", *options, database=database, stdout=out)
    return out.getvalue()


LOOKS = {
    "list": lambda database: " stale " in listed(database).splitlines()[1],
    "list --stale": lambda database: "dead  " in listed(database, "--stale"),
    "JSON": lambda database: json.loads(listed(database, "--format", "json"))[0]["holders"][0]["state"] == "stale",
    "status": lambda database: semaphore("dead", using=database).status().holders[0].state is SlotState.STALE,
    "overview": lambda database: queries.Reading(database).survey.stale == 1,
    "lists of the admin": lambda database: (
        SemaphoreRow.objects.using(database).filter(queries.Reading(database).in_state("stale")).count()
        == SlotRow.objects.using(database).filter(queries.Reading(database).slots_in_state("stale")).count()
        == 1
    ),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_killed_holder_is_stale_within_three_seconds_with_nobody_waiting(database, killed, look):
    def is_stale():
        began = time.monotonic()  # on a busy machine the command itself takes its time
        if LOOKS[look](database):
            return True
        assert began - killed < TOLD + 2
        return False

    wait_until(is_stale)
    assert held_rows(database)[0].suspect_us is None  # nobody has wanted the slot


def test_a_living_holder_is_held_however_often_it_is_looked_at(database):
    with Actor(database, "dead", slots=3, lease=LEASE) as holder:
        holder.ready().acquire()
        for _ in range(30):
            beacons._asked.clear()
            assert queries.semaphore("dead", using=database).stale == 0
            assert queries.Reading(database).survey.stale == 0
        holder.release()
        holder.end()


def test_a_process_is_asked_about_at_most_once_a_second(database, killed, monkeypatch):
    asked = []
    real = beacons._ask
    monkeypatch.setattr(beacons, "_ask", lambda cursor, some: asked.append(some) or real(cursor, some))
    beacons._asked.clear()
    began = time.monotonic()
    for _ in range(50):
        queries.semaphore("dead", using=database)
    assert len(asked) <= 1 + (time.monotonic() - began)


def test_any_living_process_frees_what_is_stale_and_writes_how_long_it_was_held(database, killed):
    """The hold ended with the last proof of life, not when somebody found it out."""
    (before,) = held_rows(database)
    proved = (before.expires_us - before.lease_us - before.acquired_us) / 1e6
    with Actor(database, "alive") as other:
        other.ready().acquire()
        wait_until(lambda: not [row for row in held_rows(database) if row.semaphore.name == "dead"], timeout=60)
        found = wait_until(lambda: queries.events("dead", what=[events.LOST], using=database), timeout=60)
        (lost,) = found
        assert (lost.slot, lost.token, lost.pid) == (before.slot, before.token, before.pid)
        assert lost.held == pytest.approx(proved, abs=0.01)
        assert lost.detail == "expired: its process is gone"
        totals = wait_until(lambda: queries.totals(["dead"], window=3600, using=database).get("dead"), timeout=60)
        assert totals.lost == 1
        other.release()
        other.end()
    assert queries.semaphore("dead", using=database).holders == ()


def test_several_slots_of_one_holder_are_one_loss_and_two_processes_do_not_write_it_twice(database):
    with Actor(database, "dead", slots=3, take=2, lease=LEASE) as holder:
        holder.ready().acquire()
        wait_until(lambda: SlotRow.objects.using(database).filter(beacon=True).count() == 2)
        holder.kill()
    with Actor(database, "alive", slots=2) as one, Actor(database, "alive", slots=2) as two:
        one.ready().acquire()
        two.ready().acquire()
        wait_until(lambda: {row.semaphore.name for row in held_rows(database)} == {"alive"}, timeout=60)
        wait_until(lambda: queries.events("dead", what=[events.LOST], using=database), timeout=60)
        for each in (one, two):
            each.release()
            each.end()  # whatever it has noted is written by now
    (lost,) = queries.events("dead", what=[events.LOST], using=database)
    assert lost.slots == (1, 2)


def test_a_killed_waiter_is_gone_for_who_does_not_wait(database):
    """It has lost its place at once, for those too that only try."""
    mine = semaphore("queue", using=database)
    permit = mine.acquire()
    with Queuer(database, "queue", counted=False) as waiter:
        waiter.ready().ask()
        wait_until(lambda: WaiterRow.objects.using(database).count() == 1)
        waiter.kill()
    WaiterRow.objects.using(database).update(expires_us=F("expires_us") + 3600 * 10**6)  # it does not lapse meanwhile
    permit.release()
    # A server may take a moment to see that a session has ended.
    wait_until(lambda: (got := mine.try_acquire()) is not None and (got.release() or True))
    assert WaiterRow.objects.using(database).count() == 0


def test_a_dead_waiter_for_tokens_is_gone_though_the_clock_was_set_back(database):
    counted = counter("queue", 2, using=database)
    counted.acquire(timeout=0)
    wait(database, "queue", left=3600)
    assert counted.try_acquire()
    assert WaiterRow.objects.using(database).count() == 0


def test_a_dead_waiter_is_gone_though_the_clock_was_set_back(database):
    mine = semaphore("queue", using=database)
    mine.acquire().release()
    wait(database, "queue", left=3600)  # an hour lies between: its time seems to lie ahead, and no beacon tells
    got = mine.try_acquire()
    assert got is not None
    got.release()
    assert WaiterRow.objects.using(database).count() == 0
