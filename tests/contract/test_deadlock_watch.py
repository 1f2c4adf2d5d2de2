"""What breaks a deadlock off, and looks for them, does nothing else: no lock is kept, delayed or lost by it."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from django_sqlsem import DeadlockError, mutex, semaphore
from django_sqlsem.deadlocks import graph, watch
from django_sqlsem.models import WaitRow
from tests.support.databases import held_rows
from tests.support.keepers import chore_of, keeper_of
from tests.support.threads import wait_until

pytestmark = pytest.mark.process_side("postgres")

SOON = 20.0


def waits_of(alias):
    """The holds of this process that wait, and hold something meanwhile."""
    return [hold for hold, _ in list(chore_of(alias, "deadlocks")._waits.values())]


class Crossed:
    """A thread that holds one name, waits for another, which is held here, and says what came of that."""

    def __init__(self, alias, *, lease=None):
        self.caught = self.permit = None
        self._alias, self._lease = alias, lease
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        try:
            self._wait()
        except DeadlockError as error:
            self.caught = str(error)

    def _wait(self):
        permit = mutex("inner", lease=self._lease, using=self._alias).acquire()
        self.permit = weakref.ref(permit)
        mutex("outer", lease=self._lease, using=self._alias).acquire(timeout=None)

    def __enter__(self):
        self._thread.start()
        wait_until(lambda: waits_of(self._alias), timeout=SOON)
        [self.hold] = waits_of(self._alias)
        return self

    def __exit__(self, *exc_info):
        self._thread.join(SOON)
        assert not self._thread.is_alive()


def test_a_wait_that_was_broken_off_keeps_nothing_alive(database):
    gc.collect()
    gc.disable()
    try:
        with mutex("outer", using=database), Crossed(database) as crossed:
            assert keeper_of(database).break_off(crossed.hold, DeadlockError("so it is"))
            wait_until(lambda: crossed.caught, timeout=SOON)
            assert crossed.caught == "so it is"
            wait_until(lambda: crossed.permit() is None, timeout=SOON)  # its frame has ended, and all that it held
            wait_until(lambda: len(held_rows(database)) == 1, timeout=SOON)
    finally:
        gc.enable()


def test_a_fault_of_the_watch_is_no_permits_and_no_busy_loop(database, monkeypatch, caplog):
    asked = []

    def broken(*args, **kwargs):
        asked.append(time.monotonic())
        raise KeyError("something that nobody has thought of")

    monkeypatch.setattr(graph, "knots", broken)
    monkeypatch.setattr(watch, "LATE", 0.1)
    with mutex("outer", lease=8, using=database) as permit, Crossed(database, lease=8) as crossed:
        wait_until(lambda: "cannot be looked for now" in caplog.text, timeout=SOON)
        permit.check()
        crossed.permit().check()
        assert keeper_of(database).break_off(crossed.hold, DeadlockError("enough"))
    assert 0 < len(asked) <= watch.WORTH_A_WORD + 1  # a busy server may have refused some before; it rests after each
    assert "met an error" not in caplog.text


def test_a_slow_database_writes_a_crowd_of_waits_down_a_few_at_a_time(database, monkeypatch):
    crowd, slow = 12, 0.25
    insert, written = watch.insert, []

    def slowly(*args):
        insert(*args)
        written[-1] += 1
        time.sleep(slow)

    def step(seconds):
        written.append(0)
        real(seconds)

    go = threading.Event()
    real = chore_of(database, "deadlocks")._step
    monkeypatch.setattr(watch, "insert", slowly)
    monkeypatch.setattr(watch, "INSERTED", 1)
    monkeypatch.setattr(chore_of(database, "deadlocks"), "_step", step)
    monkeypatch.setattr(watch, "REST", 1.0)  # on a busy machine a statement may take too long as well

    def wait(number):
        with mutex(f"mine {number}", lease=2, using=database) as permit:
            go.wait(SOON)
            with semaphore("outer", slots=1, lease=2, using=database):
                permit.check()  # nobody was kept from renewing it

    threads = [threading.Thread(target=wait, args=(number,), daemon=True) for number in range(crowd)]
    with semaphore("outer", slots=1, lease=2, using=database) as permit:
        for thread in threads:
            thread.start()
        go.set()
        wait_until(lambda: WaitRow.objects.using(database).count() == crowd, timeout=60)
        permit.check()
        monkeypatch.setattr(watch, "insert", insert)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert 0 < max(written) < crowd, written  # not all in one go


def test_what_nobody_waits_for_any_more_does_not_keep_the_thread(database, monkeypatch):
    monkeypatch.setattr(watch, "LATE", 0.1)
    keeper, watching = keeper_of(database), chore_of(database, "deadlocks")
    with mutex("outer", using=database), Crossed(database) as crossed:
        wait_until(lambda: watching.busy, timeout=SOON)
        monkeypatch.setattr(watching, "_rest_until", float("inf"))  # it was refused, and rests
        assert keeper.break_off(crossed.hold, DeadlockError("enough"))
    wait_until(lambda: not (keeper.is_in_use() or keeper.doubts.busy), timeout=SOON)
    watching._session.close()  # as a fork does with SQLite's
    keeper.own.close()
    watching._rest_until = 0.0
    wait_until(lambda: not watching.busy, timeout=SOON)
    wait_until(lambda: not keeper.loop.runs(), timeout=SOON)
