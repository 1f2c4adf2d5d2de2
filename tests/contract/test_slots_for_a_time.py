"""Numbers of slots that an operator sets for a time: who, why and until when; and that they end by themselves."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time

import pytest

from django_sqlsem import control, mutex, queries, semaphore
from django_sqlsem.backends import get_backend
from django_sqlsem.database.sessions import OwnSession
from django_sqlsem.history import events
from django_sqlsem.locks import rwlock
from django_sqlsem.models import SemaphoreRow, SlotRow
from tests.programs.lock_clients import Actor
from tests.support.databases import held_rows
from tests.support.keepers import chore_of
from tests.support.threads import run_beside, wait_until

FAR = 3600


def known(database, name="sized"):
    found = queries.semaphore(name, using=database)
    assert found is not None
    return found


def row(database, name="sized"):
    return SemaphoreRow.objects.using(database).get(name=name)


def sets_for_a_time(database, slots, name="sized"):
    """Set a number whose time passes at once, as nobody looks."""
    control.set_slots(name, slots, by="ann", duration=FAR, using=database)
    SemaphoreRow.objects.using(database).filter(name=name).update(slots_until_us=1)


def tries(lock, times):
    """Return the slots that as many callers get at once, who give them back."""
    permits = [permit for permit in (taken(lock) for _ in range(times)) if permit]
    slots = [permit.slot for permit in permits]
    for permit in permits:
        permit.release()
    return slots


def taken(lock):
    """Try once; as several callers of one thread, which may have the same name once."""
    permit = lock.try_acquire()
    if permit is not None:
        permit.detach()
    return permit


@contextlib.contextmanager
def actors(database, count, **options):
    """Processes of the name, each for one permit."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(Actor(database, "sized", **options)) for _ in range(count)]
        yield [actor.ready() for actor in found]
        for actor in found:
            actor.end()


@pytest.fixture
def lock(database):
    lock = semaphore("sized", slots=3, using=database, timeout=20)
    lock.acquire().release()
    return lock


def test_who_set_them_and_why_and_until_when_is_told(lock, database):
    assert control.set_slots("sized", 5, by="ann@web1", reason="month end,\n INC-12", duration=FAR, using=database)
    found = known(database)
    assert (found.slots, found.operator_slots, found.slots_by) == (5, 5, "ann@web1")
    assert found.slots_reason == "month end, INC-12"
    assert FAR - 60 < found.slots_end_in <= FAR
    assert abs((found.slots_until - datetime.datetime.now(datetime.UTC)).total_seconds() - FAR) < 60
    assert lock.status().slots_by == "ann@web1"
    assert control.set_slots("sized", 4, by="ben", using=database)  # until he says so
    found = known(database)
    assert (found.slots, found.slots_by, found.slots_reason) == (4, "ben", "")
    assert (found.slots_until, found.slots_end_in) == (None, None)
    assert control.set_slots("sized", None, by="ben", using=database)
    found = known(database)
    assert (found.slots, found.operator_slots, found.slots_by) == (3, None, "")


def test_more_slots_for_a_time(database):
    """From one to three, and back to one: judged by who gets in."""
    with actors(database, 4, slots=1) as (a, b, c, d):
        assert a.acquire()[0] == [1]
        assert b.try_acquire() is None
        control.set_slots("sized", 3, by="ann", duration=FAR, using=database)
        assert sorted(b.try_acquire()[0] + c.try_acquire()[0]) == [2, 3]
        assert d.try_acquire() is None
        sets_for_a_time(database, 3)
        assert [each.check() for each in (a, b, c)] == [None] * 3  # nobody is interrupted
        b.release()
        assert b.try_acquire() is None
        c.release()
        assert c.try_acquire() is None
        assert len(held_rows(database)) == 1
        a.release()
        assert d.try_acquire()[0] == [1]
        assert a.try_acquire() is None
        d.release()
    assert known(database).slots == 1


def test_fewer_slots_for_a_time_and_who_waits_is_served_at_its_end(database, counter):
    with actors(database, 3, slots=3) as (a, b, c):
        a.acquire()
        assert control.set_slots("sized", 1, by="ann", duration=FAR, using=database)
        b.ask_for()
        c.ask_for()
        wait_until(lambda: known(database).waiting == 2)
        began = time.monotonic()
        assert control.set_slots("sized", 1, by="ann", duration=1.5, using=database)
        slots = b.granted()[0] + c.granted()[0]
        assert time.monotonic() - began > 1.4
        assert sorted(slots) == [2, 3]
        assert a.check() is None
        assert len(held_rows(database)) == 3
        for each in (a, b, c):
            each.release()


def test_until_its_end_fewer_count(database):
    with actors(database, 3, slots=3) as (a, b, c):
        for each in (a, b, c):
            each.acquire()
        assert control.set_slots("sized", 1, by="ann", duration=FAR, using=database)
        a.release()
        assert a.try_acquire() is None
        b.release()
        assert b.try_acquire() is None
        c.release()
        assert a.try_acquire()[0] == [1]
        assert b.try_acquire() is None
        sets_for_a_time(database, 1)
        assert b.try_acquire()[0] != [1]
        assert c.try_acquire() is not None
        for each in (a, b, c):
            each.release()


@pytest.mark.rows_only("row grants")
def test_a_claim_sees_the_end_by_itself(lock, database):
    """Nobody keeps house here: the name is in order after one claim."""
    sets_for_a_time(database, 1)
    assert SlotRow.objects.using(database).filter(semaphore__name="sized", closed=True).count() == 2
    assert tries(lock, 4) == [1, 2, 3]
    assert row(database).operator_slots is None
    assert not SlotRow.objects.using(database).filter(semaphore__name="sized", closed=True).exists()


@pytest.mark.rows_only("row grants")
def test_a_release_sees_the_end_by_itself(lock, database):
    """One that finds somebody waiting, whose own look is far off."""
    one, two, leave = taken(lock), taken(lock), threading.Event()
    control.set_slots("sized", 1, by="ann", duration=FAR, using=database)
    got = []

    def take():
        with lock as permit:
            got.append(permit.slot)
            leave.wait(60)

    waiters = [threading.Thread(target=take) for _ in range(2)]
    for waiter in waiters:
        waiter.start()
    wait_until(lambda: known(database).waiting == 2)
    sets_for_a_time(database, 1)
    two.release()
    wait_until(lambda: sorted(got) == [2, 3])
    leave.set()
    for waiter in waiters:
        waiter.join(20)
    one.release()


@pytest.mark.rows_only("row grants")
@pytest.mark.parametrize("kind", ["writer", "mutex"])
def test_the_end_while_somebody_has_them_all(database, kind):
    if kind == "writer":
        pair = rwlock("sized", readers=3, using=database, timeout=20)
        alone, beside = pair.write(), pair.read()
    else:
        alone, beside = mutex("sized", using=database, timeout=20), semaphore("sized", slots=3, using=database)
    beside.acquire().release()
    control.set_slots("sized", 2, by="ann", duration=FAR, using=database)
    with alone:
        SemaphoreRow.objects.using(database).filter(name="sized").update(slots_until_us=1)
        for _ in range(2):
            assert run_beside(lambda: tries(beside, 1)).result(20) == []
    assert tries(beside, 4) == [1, 2, 3]
    assert row(database).operator_slots is None


def test_what_reads_takes_a_number_whose_time_has_passed_for_over(lock, database):
    sets_for_a_time(database, 5)
    assert row(database).operator_slots == 5  # nobody has written that it is over
    found = known(database)
    assert (found.slots, found.operator_slots, found.slots_by, found.slots_until) == (3, None, "", None)
    assert found.free == 3
    plan = control.plan_purge(stale=False, idle=0, using=database)
    assert [each.name for each in plan.names] == ["sized"]


@pytest.mark.rows_only("row grants")
def test_a_name_whose_number_is_over_may_be_purged(lock, database):
    control.set_slots("sized", 5, by="ann", duration=FAR, using=database)
    assert not get_backend(database).purge_idle("sized")
    sets_for_a_time(database, 5)
    assert get_backend(database).purge_idle("sized")


def test_housekeeping_writes_that_it_is_over(lock, database):
    backend, session = get_backend(database), OwnSession(database)
    sets_for_a_time(database, 1)
    try:
        assert [(act.name, act.what) for act in backend.end_acts(session)] == [("sized", "slots")]
        assert backend.end_acts(session) == []
    finally:
        session.close()
    found = row(database)
    assert (found.operator_slots, found.slots_until_us, found.slots_by, found.slots_reason) == (None, None, "", "")
    assert len(tries(lock, 4)) == 3


def test_that_it_was_set_and_that_it_is_over_stands_in_the_history(lock, database):
    """Any process that lives writes the end: once, with the instant at which it was."""
    control.set_slots("sized", 5, by="ann", duration=1, reason="once", using=database)
    until = row(database).slots_until_us

    def is_told():
        chore_of(database, "housekeeping")._at = 0.0  # where looking takes long it looks seldom
        return len(queries.acts(using=database)) == 2

    with semaphore("alive", using=database):
        wait_until(is_told)
    over, begun = queries.acts(using=database)
    assert (begun.what, begun.by, begun.detail) == (events.RESIZED, "ann", "5 slots for 1.0 s: once")
    assert (over.what, over.by) == (events.RESIZED, "")
    assert over.detail == "as declared by the code: its time is over"
    assert abs(over.at.timestamp() * 1e6 - until) < 1000


def test_in_a_test_case_it_ends_by_itself(world):
    lock = semaphore("local", slots=2, using=world, timeout=0)
    lock.acquire().release()
    control.set_slots("local", 1, by="ann", duration=FAR, reason="why", using=world)
    found = known(world, "local")
    assert (found.slots, found.slots_by, found.slots_reason) == (1, "ann", "why")
    assert FAR - 60 < found.slots_end_in <= FAR
    assert tries(lock, 2) == [1]
    control.set_slots("local", 1, by="ann", duration=0, using=world)
    assert tries(lock, 3) == [1, 2]
    assert known(world, "local").operator_slots is None


@pytest.mark.parametrize("duration", [-1, float("nan"), "1h"])
def test_a_length_that_means_nothing_is_refused(lock, database, duration):
    with pytest.raises((TypeError, ValueError), match="duration"):
        control.set_slots("sized", 1, by="ann", duration=duration, using=database)
    assert known(database).slots == 3


def test_the_number_of_the_code_has_no_end(lock, database):
    with pytest.raises(ValueError, match="no end"):
        control.set_slots("sized", None, by="ann", duration=FAR, using=database)
