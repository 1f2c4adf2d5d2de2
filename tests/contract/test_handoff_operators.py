"""What operators do, and leases that run out, while somebody waits who never looks around by itself."""

from __future__ import annotations

import contextlib
import json
import time

import pytest

from django_sqlsem import control
from django_sqlsem.models import SlotRow, WaiterRow
from tests.programs.queue_clients import Queuer
from tests.support import applocks
from tests.support.databases import held_rows
from tests.support.operators import now_us
from tests.support.threads import wait_until

PROMPT = 20.0


@pytest.fixture
def process(database):
    """A process that holds slots of ``acted``, of which there are two."""
    with Queuer(database, "acted", slots=2) as process:
        yield process.ready()
        process.end()


@contextlib.contextmanager
def waiting(database, count=1, **options):
    """Processes that wait, and would sleep for a quarter of an hour if nobody woke them."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(Queuer(database, "acted", slots=2, **options)) for _ in range(count)]
        for number, each in enumerate(found, start=1):
            each.ready("warm", "unhurried").ask()
            wait_until(lambda number=number: WaiterRow.objects.using(database).count() == number)
            each.do("asleep")
        yield found
        for each in found:
            each.end()


def slot(database, number=1):
    return SlotRow.objects.using(database).get(semaphore__name="acted", slot=number)


def test_growth(database, counter, process):
    process.takes(take=2)
    with waiting(database, 3) as waiters:
        acted = time.monotonic()
        assert control.set_slots("acted", 5, by="test", using=database)
        found = [waiter.held() for waiter in waiters]
        assert all(each["at"] - acted < PROMPT for each in found)
        slots = [each["slots"] for each in found]
        if applocks.are_at(database):  # the first in line begins behind the slot that has been held longest
            slots.sort()
        assert slots == [[3], [4], [5]]
        for waiter in waiters:
            waiter.release()
    process.release()
    assert counter.peak == 5


def test_growth_is_given_to_the_first_in_line_only(database, process):
    process.takes(take=2)
    with waiting(database, 2) as (first, second):
        acted = time.monotonic()
        assert control.set_slots("acted", 3, by="test", using=database)
        assert first.held()["at"] - acted < PROMPT
        assert second.is_silent()
        first.release()
        second.held()
        second.release()
    process.release()


def test_shrink(database, counter, process):
    process.takes("x")
    process.takes("y")
    assert control.set_slots("acted", 1, by="test", using=database)
    with waiting(database) as [waiter]:
        process.release("x")
        time.sleep(0.3)
        assert waiter.is_silent()
        assert len(held_rows(database)) == 1
        released = process.release("y")
        told = waiter.held()
        assert told["at"] - released < PROMPT
        assert told["slots"] == [1]
        process.ask("z", timeout=0)
        process.word("z", "busy")
        waiter.release()
    assert counter.peak == 2


def test_the_code_gets_its_number_back(database, process):
    process.takes()
    assert control.set_slots("acted", 1, by="test", using=database)
    with waiting(database) as [waiter]:
        acted = time.monotonic()
        assert control.set_slots("acted", None, by="test", using=database)
        assert waiter.held()["at"] - acted < PROMPT
        waiter.release()
    process.release()


def test_pause_and_resume(database, counter, process):
    process.takes(take=2)
    with waiting(database, 2) as waiters:
        assert control.pause("acted", by="test", using=database)
        process.release()
        time.sleep(0.3)
        assert all(waiter.is_silent() for waiter in waiters)
        assert held_rows(database) == []
        acted = time.monotonic()
        assert control.resume("acted", by="test", using=database)
        assert all(waiter.held()["at"] - acted < PROMPT for waiter in waiters)
        for waiter in waiters:
            waiter.release()
    assert counter.peak == 2


def test_a_pause_while_many_wait_and_one_gives_up(database, process):
    process.takes(take=2)
    with waiting(database) as [waiter]:
        assert control.pause("acted", by="test", using=database)
        process.ask("b", timeout=1)
        process.word("b", "busy")
        process.release()
        assert control.resume("acted", by="test", using=database)
        waiter.held(timeout=PROMPT)
        waiter.release()


def test_revoke(database, counter, process):
    process.takes("x")
    process.takes("y")
    with waiting(database) as [waiter]:
        token = slot(database).token
        acted = time.monotonic()
        kill = applocks.are_at(database)  # a session of its own, as it is one of two of this name
        [revoked] = control.revoke("acted", 1, token, by="test", kill=kill, using=database)
        assert revoked.token == token
        told = waiter.held()
        assert told["at"] - acted < PROMPT
        assert told["slots"] == [1]
        assert told["tokens"] > [token]
        assert waiter.check() == "ours"
        assert process.check("y") == "ours"
        if kill:  # else it would hear of it as it gives back
            wait_until(lambda: process.check("x") != "ours")
        process.release("x")  # which takes nothing from the one who has it now
        assert waiter.check() == "ours"
        assert slot(database).token == told["tokens"][0]
        waiter.release()
        process.release("y")


@pytest.mark.rows_only("lease")
def test_a_purge_of_what_is_stale(database, process):
    process.takes("x")
    process.takes("y")
    with waiting(database) as [waiter]:
        process.stop()
        SlotRow.objects.using(database).filter(slot=1).update(expires_us=now_us(database) - 1)
        acted = time.monotonic()
        plan = control.plan_purge(name_glob="acted", using=database)
        assert len(control.execute_purge(plan, by="test").freed) == 1
        told = waiter.held()
        assert told["at"] - acted < PROMPT
        assert told["slots"] == [1]
        process.cont()
        waiter.release()
    process.release("x")
    process.release("y")


def test_a_name_that_is_waited_for_is_not_idle(database, process):
    process.takes(take=2)
    with waiting(database) as [waiter]:
        assert control.pause("acted", by="test", using=database)
        process.release()
        assert control.resume("acted", by="test", using=database)
        waiter.held()
        plan = control.plan_purge(idle=0, name_glob="acted", using=database)
        assert plan.names == ()
        waiter.release()


@pytest.mark.parametrize("beacons", [True, False])
@pytest.mark.rows_only("lease")
def test_a_lease_that_runs_out(database, counter, beacons):
    """It is seen to the moment, by who is first in line."""
    env = {"SQLSEM_TEST_SETTINGS": json.dumps({"BEACONS": beacons})}
    with Queuer(database, "acted", env=env) as gone, Queuer(database, "acted", env=env) as waiter:
        gone.ready()
        waiter.ready()
        gone.takes(lease=3)
        waiter.ask()
        wait_until(lambda: WaiterRow.objects.using(database).exists())
        waiter.do("asleep")
        gone.kill()
        expires_us = slot(database).expires_us
        waiter.held()
        assert slot(database).acquired_us - expires_us < 500_000
        if not beacons:
            assert slot(database).acquired_us >= expires_us
        waiter.release()
        waiter.end()
