"""Operators' pauses: who, why and until when; and that one with an end is over by itself."""

from __future__ import annotations

import datetime
import threading
import time

import pytest

from django_sqlsem import AcquireTimeoutError, control, queries, semaphore
from django_sqlsem.backends import get_backend
from django_sqlsem.database.sessions import OwnSession
from django_sqlsem.locks import counter, rwlock
from django_sqlsem.models import SemaphoreRow
from tests.support.keepers import chore_of
from tests.support.threads import wait_until

FAR = 3600


def known(database, name="paused"):
    found = queries.semaphore(name, using=database)
    assert found is not None
    return found


@pytest.fixture
def lock(database):
    lock = semaphore("paused", slots=2, using=database, timeout=20)
    lock.acquire().release()
    return lock


def test_who_paused_and_why_and_until_when_is_told(lock, database):
    assert control.pause("paused", by="ann@web1", reason="provider down,\n INC-12", duration=FAR, using=database)
    found = known(database)
    assert (found.paused, found.paused_by, found.paused_reason) == (True, "ann@web1", "provider down, INC-12")
    assert FAR - 60 < found.resumes_in <= FAR
    now = datetime.datetime.now(datetime.UTC)
    assert abs((found.paused_until - now).total_seconds() - FAR) < 60
    assert abs((now - found.paused_at).total_seconds()) < 60
    assert lock.status().paused_by == "ann@web1"
    assert lock.try_acquire() is None
    with pytest.raises(AcquireTimeoutError, match=r"it is paused by an operator \(provider down, INC-12\)\.$"):
        lock.acquire(timeout=0)
    assert control.pause("paused", by="ben", using=database)  # until he says so
    found = known(database)
    assert (found.paused_by, found.paused_reason, found.paused_until, found.resumes_in) == ("ben", "", None, None)
    assert control.resume("paused", by="ben", using=database)
    found = known(database)
    assert (found.paused, found.paused_by, found.paused_at) == (False, "", None)
    lock.try_acquire().release()


def test_the_error_of_a_counter_tells_why_it_is_paused(database):
    units = counter("units", 1, using=database)
    units.acquire(timeout=0)
    control.pause("units", by="ann", reason="INC-12", using=database)
    with pytest.raises(AcquireTimeoutError, match=r"it is paused by an operator \(INC-12\)\.$"):
        units.acquire(timeout=0)


@pytest.mark.rows_only("row grants")
@pytest.mark.parametrize("kind", ["slots", "several", "writer", "counter"])
def test_a_pause_ends_by_itself_and_who_waits_is_served(database, kind):
    """Nobody resumes it: the database's clock does."""
    if kind == "counter":
        lock = counter("ends", 2, using=database, timeout=60)
        acquire, give_back = lock.acquire, lambda got: None
        acquire()
    else:
        lock = semaphore("ends", slots=2, take=2 if kind == "several" else 1, using=database, timeout=60)
        if kind == "writer":
            lock = rwlock("ends", using=database, timeout=60).write()
        acquire, give_back = lock.acquire, lambda got: got.release()
        give_back(acquire())
    began = time.monotonic()
    assert control.pause("ends", by="ann", duration=datetime.timedelta(seconds=1.5), using=database)
    got = acquire()
    assert time.monotonic() - began > 1.4
    assert not known(database, "ends").paused
    give_back(got)


@pytest.mark.rows_only("row grants")
def test_a_release_hands_on_again_when_the_pause_is_over(lock, database):
    one, leave = lock.acquire(), threading.Event()

    def hold_the_other():
        with lock:
            leave.wait(60)

    thread = threading.Thread(target=hold_the_other)
    thread.start()
    wait_until(lambda: known(database).held == 2)
    control.pause("paused", by="ann", duration=0.3, using=database)
    wait_until(lambda: not known(database).paused)
    got = []

    def take_one():
        with lock as permit:
            got.append(permit.slot)

    waiter = threading.Thread(target=take_one)
    waiter.start()
    wait_until(lambda: known(database).waiting == 1)
    one.release()
    waiter.join(20)
    assert got == [1]
    leave.set()
    thread.join()


def test_what_reads_takes_a_pause_whose_time_has_passed_for_over(lock, database):
    control.pause("paused", by="ann", duration=0, using=database)
    if not get_backend(database).process_local:
        assert SemaphoreRow.objects.using(database).get(name="paused").paused  # nobody has written that it is over
        reading = queries.Reading(database)
        assert reading.survey.paused == 0
        assert not SemaphoreRow.objects.using(database).filter(reading.in_state("paused")).exists()
        assert not SemaphoreRow.objects.using(database).filter(reading.in_state("draining")).exists()
    assert not known(database).paused
    assert known(database).free == 2
    assert [each.name for each in queries.semaphores(state="paused", using=database)] == []


def test_housekeeping_writes_that_a_pause_is_over(lock, database):
    """For programs that only see whether a name is paused."""
    backend, session = get_backend(database), OwnSession(database)
    other = semaphore("other", using=database, timeout=0)
    other.acquire().release()
    control.pause("paused", by="ann", duration=0, reason="once", using=database)
    control.pause("other", by="ann", duration=FAR, using=database)
    try:
        assert [(act.name, act.what) for act in backend.end_acts(session)] == [("paused", "pause")]
        assert backend.end_acts(session) == []
    finally:
        session.close()
    row = SemaphoreRow.objects.using(database).get(name="paused")
    assert (row.paused, row.paused_until_us, row.paused_us, row.paused_by, row.paused_reason) == (
        False, None, None, "", "",
    )  # fmt: skip
    assert known(database, "other").paused
    control.resume("other", by="ann", using=database)


def test_any_living_process_keeps_house(lock, database):
    control.pause("paused", by="ann", duration=0, using=database)

    def is_over():
        chore_of(database, "housekeeping")._at = 0.0  # where looking takes long it looks seldom
        return not SemaphoreRow.objects.using(database).get(name="paused").paused

    with semaphore("alive", using=database):
        wait_until(is_over)
        wait_until(lambda: len(queries.acts(using=database)) == 2)
    done = {(act.what, act.by, act.detail) for act in queries.acts(using=database)}
    assert done == {("paused", "ann", "for 0.0 s"), ("resumed", "", "its time is over")}


def test_a_drain_may_end_by_itself(lock, database):
    with lock as permit:
        assert control.drain("paused", by="ann", duration=FAR, reason="deployment", using=database)
        found = known(database)
        assert (found.draining, found.paused_reason) == (True, "deployment")
        assert found.resumes_in > FAR - 60
        wait_until(lambda: permit.stop_requested)
    control.resume("paused", by="ann", using=database)


def test_a_pause_in_a_test_case_ends_by_itself(world):
    lock = semaphore("local", using=world, timeout=0)
    lock.acquire().release()
    control.pause("local", by="ann", duration=FAR, reason="why", using=world)
    assert lock.try_acquire() is None
    assert (known(world, "local").paused_by, known(world, "local").paused_reason) == ("ann", "why")
    control.pause("local", by="ann", duration=0, using=world)
    lock.try_acquire().release()


@pytest.mark.parametrize("duration", [-1, float("nan"), "1h"])
def test_a_length_of_a_pause_that_means_nothing_is_refused(lock, database, duration):
    with pytest.raises((TypeError, ValueError), match="duration"):
        control.pause("paused", by="ann", duration=duration, using=database)
    assert not known(database).paused
