"""A Celery task that was refused keeps its place: it goes before who came later, and stands in nobody's way."""

from __future__ import annotations

import itertools
import threading
import types

import pytest

from django_sqlsem import AcquireTimeoutError, control, queries, semaphore
from django_sqlsem.backends import get_backend
from django_sqlsem.backends.rows.backend import RowsBackend
from django_sqlsem.core import identity
from django_sqlsem.decorators import tasks
from django_sqlsem.locks.acquire import Bound
from django_sqlsem.models import SlotRow, WaiterRow
from django_sqlsem.runtime import callers
from django_sqlsem.runtime.keepers import keeper_for
from tests.programs.lock_clients import Actor
from tests.support.databases import held_rows
from tests.support.threads import wait_until

pytestmark = pytest.mark.rows_only("ranks")


def a_task(task_id, name="shop.work"):
    """A task that a worker runs."""
    return types.SimpleNamespace(id=task_id, label=f"{name}[{task_id}]")


def refuse(lock, task_id):
    """Have a task refused and stepped aside; return when it should come back."""
    with callers.as_stranger(), pytest.raises(AcquireTimeoutError) as caught:
        lock._take(0, tasks.rank_of(task_id))
    return tasks.step_aside(lock, a_task(task_id), caught.value)


def come_back(lock, task_id, **options):
    """Try once as the task, in a flow of control of its own."""
    with callers.as_stranger():
        permit = lock._acquire(lock._keeper(), 0.0, tasks.rank_of(task_id))
    if permit is not None:
        permit.detach()
    return permit


def away(database):
    return WaiterRow.objects.using(database).filter(away=True).count()


def test_a_place_is_kept_once_and_given_up_with_the_grant(database):
    lock = semaphore("kept", 1, using=database)
    with lock:
        refuse(lock, "a")
        refuse(lock, "b")
        refuse(lock, "a")
        assert away(database) == 2
        status = queries.semaphore("kept", using=database)
        assert (status.away, status.waiting) == (2, 0)
        assert lock.status().away == 2
    # Whoever comes back first gets the slot: none is idle for one that is away.
    permit = come_back(lock, "b")
    assert permit is not None
    assert away(database) == 1
    permit.release()
    lock.acquire(timeout=0).release()  # nor is it kept from a newcomer
    come_back(lock, "a").release()
    assert away(database) == 0


def test_a_task_that_comes_back_goes_before_a_later_waiter(database):
    lock = semaphore("order", 2, timeout=20, using=database)
    first, second = lock.acquire(), None
    first.detach()
    second = lock.acquire()
    second.detach()
    refuse(lock, "early")
    both = semaphore("order", 2, take=2, timeout=20, using=database)
    got = []
    waiter = threading.Thread(target=lambda: got.append(both.acquire().release()))
    waiter.start()
    wait_until(lambda: queries.semaphore("order", using=database).waiting == 1)
    second.release()  # it gathers for the one who wants both
    wait_until(lambda: len(held_rows(database)) == 1)
    assert come_back(lock, "newcomer") is None
    permit = come_back(lock, "early")
    assert permit is not None
    permit.release()
    first.release()
    waiter.join(20)
    assert got == [None]


def test_a_task_that_waits_in_a_worker_stands_at_its_old_place(database):
    lock = semaphore("old", 1, using=database)
    held = lock.acquire()
    held.detach()
    refuse(lock, "task")
    with Actor(database, "old") as later:
        later.ready().ask_for()
        wait_until(lambda: queries.semaphore("old", using=database).waiting == 1)
        first = WaiterRow.objects.using(database).get(away=True)
        assert first.queued_us < WaiterRow.objects.using(database).get(away=False).queued_us
        entered, leave = threading.Event(), threading.Event()

        def work():
            with lock._take(20, tasks.rank_of("task")):
                entered.set()
                leave.wait(20)

        task = threading.Thread(target=work)
        task.start()
        wait_until(lambda: queries.semaphore("old", using=database).waiting == 2)
        wait_until(lambda: away(database) == 0)
        held.release()
        assert entered.wait(10)
        later.silent(0.3)
        leave.set()
        later.granted(timeout=10)
        later.release()
        later.end()
        task.join(20)


class Queue:
    """Threads that wait for a slot that this test holds, and in which order they got it."""

    def __init__(self, database, name):
        self.lock = semaphore(name, 1, timeout=60, using=database)
        self.held = self.lock.acquire()
        self.held.detach()
        self.got, self.threads = [], []

    def waiting(self):
        return queries.semaphore(self.lock.name, using=self.lock.using).waiting

    def ask(self, word, task_id=None, timeout=60):
        """Have a thread wait: for itself, or as a task."""
        rank = tasks.rank_of(task_id) if task_id else ""

        def work():
            with self.lock._take(timeout, rank):
                self.got.append(word)

        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()

    def order(self):
        """Let them have it, and return in which order they did."""
        self.held.release()
        for each in self.threads:
            each.join(60)
        return self.got


def test_it_goes_before_later_ones_of_its_own_process_too(database):
    queue = Queue(database, "beside")
    refuse(queue.lock, "early")
    queue.ask("first newcomer")
    wait_until(lambda: queue.waiting() == 1)
    refuse(queue.lock, "late")
    queue.ask("second newcomer")
    wait_until(lambda: queue.waiting() == 2)
    queue.ask("late", "late")
    wait_until(lambda: away(database) == 1)
    queue.ask("early", "early", timeout=None)
    wait_until(lambda: away(database) == 0)
    assert queue.order() == ["early", "first newcomer", "late", "second newcomer"]


def test_two_threads_that_ask_at_once_do_not_cost_it_its_place(database, monkeypatch):
    """Its row takes the old place, and only then the process learns that another one has begun to wait here."""
    queue = Queue(database, "at-once")
    refuse(queue.lock, "early")
    enrol = RowsBackend.enrol

    def enrol_and_wait(backend, session, claim, place, *, first):
        waited = enrol(backend, session, claim, place, first=first)
        if claim.rank and first:
            queue.ask("newcomer")
            wait_until(lambda: keeper_for(get_backend(database)).queues)
        return waited

    monkeypatch.setattr(RowsBackend, "enrol", enrol_and_wait)
    queue.ask("early", "early")
    wait_until(lambda: queue.waiting() == 2)
    assert queue.order() == ["early", "newcomer"]


def test_the_countdown_follows_the_place(database):
    lock = semaphore("countdown", 1, using=database)
    with lock:
        pass
    with lock:
        SlotRow.objects.using(database).update(held_us=10_000_000)
        seconds = [refuse(lock, str(number)) for number in range(4)]
        assert seconds == sorted(seconds)
        assert [round(later - sooner) for sooner, later in itertools.pairwise(seconds)] == [10, 10, 10]
        assert refuse(lock, "0") == pytest.approx(seconds[0], abs=2.0)


def test_a_task_that_was_turned_away_keeps_its_place(database):
    """As nobody else may wait, or while the name is paused."""
    lock = semaphore("full", 1, using=database, max_waiting=0)
    with lock:
        for number, bound in enumerate((Bound(max_waiting=0), Bound(refused_if_paused=True))):
            if bound.refused_if_paused:
                control.pause("full", by="a test", using=database)
            with callers.as_stranger(), pytest.raises(AcquireTimeoutError) as caught:
                lock._take(10, tasks.rank_of(str(number)), None, bound)
            assert caught.value._snapshot is None
            assert tasks.step_aside(lock, a_task(str(number)), caught.value) == caught.value.retry_after
            assert away(database) == number + 1
        tasks.hand_on(lock, a_task("1"), "heir")
    control.resume("full", by="a test", using=database)
    for each in ("heir", "0"):
        come_back(lock, each).release()
    assert away(database) == 0


def test_a_copy_that_was_delivered_twice_is_recognised(database, caplog):
    lock = semaphore("twice", 1, using=database)
    with identity.activity("shop.work[same]"), lock:
        refuse(lock, "same")
        assert away(database) == 0
        refuse(lock, "other")
        assert away(database) == 1
    said = [record.getMessage() for record in caplog.records if "delivered twice" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("shop.work[same] was delivered twice: its other copy holds slot 1 of 'twice', on ")
