"""A thread that is struck as it hands its slot on, or says so: whoever waits, or comes next, is none the worse."""

from __future__ import annotations

import threading
import time

import pytest

from django_sqlsem import semaphore
from django_sqlsem.runtime import keepers
from django_sqlsem.runtime.acquisition import Acquisition, Reply
from django_sqlsem.runtime.keeper import Keeper
from django_sqlsem.runtime.loop import ThreadLoop
from tests.support.databases import held_rows
from tests.support.threads import run_in_threads, wait_until

#: Longer than a waiter's heartbeat, and than the keeper's rounds.
A_WHILE = 2.2
#: A struck messenger is found out by the next round; the rest is for a busy machine.
SOON = 8.0
#: So often a slot is handed on until the one who does is struck.
TRIES = 10

pytestmark = [pytest.mark.rows_only("row grants"), pytest.mark.process_side("postgres")]


class Messenger:
    """The thread that is struck, and how many times it still is."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.left = 0

    def strikes(self):
        """Raise in that thread, unless it has been struck often enough."""
        if threading.current_thread() is self.thread and self.left:
            self.left -= 1
            raise KeyboardInterrupt("struck")


def as_it_is_granted(monkeypatch, messenger):
    granted = Acquisition.granted

    def granted_and_struck(hold, *args, **options):
        noted = granted(hold, *args, **options)
        messenger.strikes()
        return noted

    monkeypatch.setattr(Acquisition, "granted", granted_and_struck)


def as_it_is_answered(monkeypatch, messenger):
    give = Reply.give

    class Lock:
        def __init__(self, real):
            self.real, self.acquire = real, real.acquire

        def release(self):
            messenger.strikes()
            self.real.release()

    def give_and_be_struck(answer, error):
        answer._lock = Lock(getattr(answer._lock, "real", answer._lock))
        return give(answer, error)

    monkeypatch.setattr(Reply, "give", give_and_be_struck)


def strike_before(monkeypatch, messenger, owner, name):
    """Have the messenger struck as it begins with this method."""
    real = getattr(owner, name)

    def struck(*args):
        messenger.strikes()
        return real(*args)

    monkeypatch.setattr(owner, name, struck)


@pytest.mark.parametrize("strikes", [1, 2])
@pytest.mark.parametrize("where", [as_it_is_granted, as_it_is_answered])
def test_struck_as_it_hands_its_slot_on(database, monkeypatch, caplog, where, strikes):
    lock = semaphore("handed on", timeout=60, using=database)
    messenger = Messenger()
    where(monkeypatch, messenger)
    strike_before(monkeypatch, messenger, Keeper, "answer_again")
    for _ in range(TRIES):  # the keeper may have looked at the very moment of the release, and have brought the grant
        if struck := hand_on(lock, database, messenger, strikes):
            break
    assert struck
    assert messenger.left == 0
    assert not [record for record in caplog.records if "lost" in record.getMessage()]
    again = lock.try_acquire()
    assert again is not None
    again.release()


def hand_on(lock, database, messenger, strikes):
    """Have one thread hand its slot to another of the process. Return whether it was struck."""
    struck, told, seen, taken = [], [], [], []
    freed = threading.Event()
    before = lock.acquire()
    before.detach()

    def act(number):
        if number == 0:
            wait_until(lambda: lock.status().waiting == 1)
            before.release()  # who has waited itself hands on
            wait_until(lambda: taken)
            wait_until(lambda: lock.status().waiting == 1)
            messenger.thread, messenger.left = threading.current_thread(), strikes
            try:
                taken[0].release()
            except KeyboardInterrupt:
                struck.append(time.monotonic())
            freed.set()
            return
        if number == 1:
            taken.append(lock.acquire())
            taken[0].detach()
            assert freed.wait(60)
            return
        wait_until(lambda: taken)
        with lock.acquire() as permit:
            told.append(time.monotonic())
            assert freed.wait(60)
            until = time.monotonic() + A_WHILE
            while time.monotonic() < until:
                seen.extend(row.permit_id for row in held_rows(database))
                time.sleep(0.05)
            permit.check()
            assert set(seen) == {permit._acquisition.permit_id}

    run_in_threads(3, act, timeout=120)
    assert not struck or told[0] - struck[0] < SOON
    keeper = before._acquisition.keeper
    wait_until(lambda: not keeper.waiting and not keeper.acquisitions and not keeper.queues, timeout=SOON)
    return bool(struck)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may be struck in a finaliser
@pytest.mark.parametrize("waits", [False, True], ids=["holds", "waits"])
def test_struck_again_as_it_tells_the_keeper_that_it_was_struck(database, monkeypatch, waits):
    lock = semaphore("struck twice", timeout=60, using=database)
    messenger = Messenger()
    strike_before(monkeypatch, messenger, ThreadLoop, "note")
    other = lock.acquire() if waits else None

    def act(_number):
        permit = None if waits else lock.acquire()
        what = (Acquisition, "wait") if permit is None else (Keeper, "release")
        with monkeypatch.context() as patched:
            patched.setattr(*what, strike_now)
            with pytest.raises(KeyboardInterrupt):
                lock.acquire() if permit is None else permit.release()

    def strike_now(*_args):
        messenger.thread, messenger.left = threading.current_thread(), 1
        raise KeyboardInterrupt("struck")

    run_in_threads(1, act)
    assert messenger.left == 0
    if other is not None:
        wait_until(lambda: lock.status().waiting == 0, timeout=SOON)
        other.release()
    wait_until(lambda: not held_rows(database), timeout=SOON)


# The end.


def test_an_end_goes_on_after_errors(committed, monkeypatch, caplog):
    lock = semaphore("ends")
    permit = lock.acquire()
    permit.detach()
    keeper = permit._acquisition.keeper

    class Broken:
        alias = "broken"

        def stop(self, *, told):
            raise ValueError("broken")

    def fail():
        raise ValueError("a step that fails")

    monkeypatch.setattr(keepers, "_keepers", {-1: Broken(), **keepers._keepers})
    loop = keeper.loop
    monkeypatch.setattr(loop, "runs", lambda: True)  # nobody takes the steps before the end
    thread = loop._thread
    loop._stopping = True
    loop._alarm.ring()
    thread.join(30)
    loop.inbox.put(fail)
    taken = []
    loop.inbox.put(lambda: taken.append(loop.inbox.get_nowait()))  # as its thread does, if it goes on after all
    loop.inbox.put(fail)
    keepers.stop_all()
    assert taken == [fail]
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError, ValueError]
    assert permit.released
    assert not held_rows("default")
    assert not loop._stopping
