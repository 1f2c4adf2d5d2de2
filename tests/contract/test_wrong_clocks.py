"""Processes whose wall clocks are wrong by a day, among others: the database's clock alone counts."""

from __future__ import annotations

import contextlib
import itertools
import time

import pytest
from django.db import connections

from django_sqlsem import control, queries, semaphore
from django_sqlsem.backends.rows.statements import Statements
from django_sqlsem.database import dialects
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.models import SlotRow
from tests.programs.contenders import fight
from tests.programs.lock_clients import Actor
from tests.support import applocks
from tests.support.operators import hold, make_semaphore, now_us
from tests.support.processes import Child
from tests.support.threads import wait_until

#: What the first in line and a busy machine take, in microseconds.
SOON_US = 20_000_000
#: What a wait of 3.3 s and a process's first imports and connections take at most on a busy machine, in seconds.
LONG = 60


def is_server(database):
    return connections[database].vendor != "sqlite"


def slot_row(database, name):
    return SlotRow.objects.using(database).get(semaphore__name=name, slot=1)


@pytest.fixture
def set_back(database, monkeypatch):
    """A function that sets back the database's clock, as this process sees it, by a number of seconds."""
    kind = type(dialect_for(connections[database]))

    def step(seconds):
        monkeypatch.setattr(kind, "now_sql", f"({kind.now_sql} - {seconds * 1_000_000})")
        dialects._prepare.cache_clear()

    yield step
    monkeypatch.undo()
    dialects._prepare.cache_clear()


@contextlib.contextmanager
def ahead_behind_right(database, name, wrong_clock, **options):
    """Three processes: a day ahead, a day behind, and right."""
    with contextlib.ExitStack() as stack:
        environments = (wrong_clock("+1d"), wrong_clock("-1d"), {})
        actors = [stack.enter_context(Actor(database, name, env=each, **options)) for each in environments]
        for actor in actors:
            actor.ready()
        yield actors


def test_the_clocks_are_wrong(committed, wrong_clock):
    for offset, expected in (("+1d", 86400), ("-1d", -86400)):
        with Child("import time; say(time.time())", env=wrong_clock(offset)) as child:
            assert abs(float(child.expect()) - time.time() - expected) < 60


def test_a_live_holder_keeps_its_slot_and_tokens_grow(database, wrong_clock):
    tokens = []
    with ahead_behind_right(database, "live", wrong_clock, lease=6) as actors:
        for holder in actors:
            _, (token,) = holder.acquire()
            tokens.append(token)
            if is_server(database):
                assert abs(token - now_us(database)) < 60e6
            others = [actor for actor in actors if actor is not holder]
            for other in others:
                other.ask_for(7)
            wait_until(lambda: queries.semaphore("live", using=database).waiting == 2)
            assert all(0 <= waiter.age < LONG for waiter in queries.semaphore("live", using=database).waiters)
            for other in others:
                assert 7 <= float(other.expect("busy")) < LONG
                ((age, left, state),) = other.ask("status")
                assert 7 < age < LONG
                # The clock is read before the row, which is renewed in between.
                assert left is None if applocks.are_at(database) else 0 < left < LONG
                assert state == "held"
            assert holder.check() is None
            holder.release()
        assert tokens == sorted(set(tokens))
        for actor in actors:
            actor.end()


@pytest.mark.rows_only("lease")
def test_a_dead_holders_slot_comes_back_when_its_lease_ends(database, wrong_clock, settings):
    settings.SQLSEM = {"BEACONS": False}
    with ahead_behind_right(database, "dead", wrong_clock, lease=4) as actors:
        actors[0].acquire()
        for count, waiter in enumerate(actors[1:], start=1):
            waiter.ask_for()
            wait_until(lambda count=count: queries.semaphore("dead", using=database).waiting == count)
        tokens = []
        for left, (holder, waiter) in zip((2, 1), itertools.pairwise(actors), strict=True):
            # A place that a killed process had no time to give up would count for three heartbeats.
            wait_until(lambda left=left: queries.semaphore("dead", using=database).waiting == left)
            holder.kill()
            expires_us = slot_row(database, "dead").expires_us
            assert 0 < expires_us - now_us(database) <= 4e6
            tokens += waiter.granted()[1]
            assert 0 <= slot_row(database, "dead").acquired_us - expires_us < SOON_US
        assert tokens == sorted(set(tokens))
        actors[2].release()
        actors[2].end()


def test_many_exclude_each_other(database, counter, wrong_clock):
    environments = [wrong_clock("+1d"), wrong_clock("-1d"), {}]
    figures = fight("contend", 3, 4.0, database, "fight", 2, 2, environments=environments)
    assert figures.errors == []
    assert counter.peak == 2
    assert counter.entered == figures.grants
    assert all(tally["grants"] for tally in figures.tallies)


def test_tokens_grow_by_a_servers_clock_after_a_purge(database, wrong_clock):
    if not is_server(database):
        pytest.skip("on SQLite the tokens of a purged name follow the wall clock")
    tokens = []
    with Actor(database, "purged", env=wrong_clock("+1d")) as ahead:
        tokens += ahead.ready().acquire()[1]
        ahead.release()
        ahead.end()
    for _ in range(3):
        plan = control.plan_purge(idle=0, name_glob="purged", using=database)
        assert control.execute_purge(plan, by="test").deleted == ("purged",)
        with semaphore("purged", using=database) as permit:
            tokens.append(permit.token)
    assert tokens == sorted(set(tokens))


@pytest.mark.rows_only("row statements")
def test_what_is_granted_is_written_though_the_clock_is_set_back_in_the_middle(database, set_back, monkeypatch):
    """By an hour, between the look for free slots, one of which has just run out, and their taking."""
    make_semaphore(database, "step", slots=2)
    hold(database, "step", slot=1, age=9, left=-5, lease=1)
    rows = Statements.rows

    def looks(self, text, **more):
        found = rows(self, text, **more)
        if "SELECT s.id, s.slot, s.token" in text:
            assert len(found) == 2
            set_back(3600)
        return found

    monkeypatch.setattr(Statements, "rows", looks)
    permit = semaphore("step", slots=2, take=2, using=database).acquire(timeout=0)
    assert [row.token for row in SlotRow.objects.using(database).order_by("slot")] == list(permit.tokens)
    permit.release()


@pytest.mark.rows_only("beacons")
def test_a_dead_holders_slot_comes_back_though_the_clock_was_set_back(database, set_back):
    """To before the server's start; and somebody had seen by the old clock that the holder's beacon is out."""
    if not is_server(database):
        pytest.skip("nobody can set the boot clock")
    make_semaphore(database, "back", slots=1)
    hold(database, "back", process_id="f" * 32, beacon=True, suspect_us=now_us(database))
    set_back(20 * 365 * 86400)
    semaphore("back", slots=1, using=database).acquire(timeout=20).release()
