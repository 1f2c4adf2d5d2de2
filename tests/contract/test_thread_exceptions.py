"""An exception that another thread raises in a waiting one, as the time limits of some workers do."""

from __future__ import annotations

import ctypes
import sys
import threading
import time

import pytest

from django_sqlsem import semaphore
from django_sqlsem.locks import rlock
from django_sqlsem.runtime.keeper import Keeper
from tests.support.databases import assert_nothing_held
from tests.support.keepers import keeper_of
from tests.support.threads import run_in_threads, wait_until

pytestmark = pytest.mark.process_side


class Limit(BaseException):
    """Is raised from outside."""


def raise_in(thread):
    """Raise ``Limit`` in a thread, when it next runs Python code."""
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Limit)) == 1


def is_blocked(thread):
    """Whether a thread is where it waits, after a moment."""
    time.sleep(0.01)
    return sys._current_frames()[thread.ident].f_code.co_filename.endswith("runtime/acquisition.py")


@pytest.mark.parametrize("timeout", [None, 600])
def test_a_waiting_thread_hears_it_and_leaves_the_queue(database, timeout):
    lock = semaphore("limits", using=database)
    struck = []

    def wait():
        try:
            lock.acquire(timeout=timeout)
        except Limit as error:
            struck.append(error)

    with lock:
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        wait_until(lambda: lock.status().waiting == 1, what="the thread to wait")
        wait_until(lambda: all(is_blocked(thread) for _ in range(20)), what="the thread to be blocked")
        raise_in(thread)
        thread.join(60)
        assert struck
        wait_until(lambda: lock.status().waiting == 0, what="its place to be given up")
    with lock.acquire(timeout=60):
        pass


class InterruptingLock:
    """The lock that tells Python whether a thread runs. A thread that takes it is interrupted, as by a signal."""

    def __init__(self, lock):
        self.locked = lock.locked

    def acquire(self, *_):
        raise Limit


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="there an exception inside is_alive() changes nothing")
def test_an_exception_cannot_mark_a_living_thread_as_ended(database, monkeypatch):
    """Before Python 3.13 one inside ``is_alive()`` does. All the thread's permits would pass for forgotten."""
    lock = rlock("entered", using=database)
    with lock as permit:
        keeper = keeper_of(database).loop._thread
        with monkeypatch.context() as patch:
            for thread in (threading.current_thread(), keeper):
                patch.setattr(thread, "_tstate_lock", InterruptingLock(thread._tstate_lock))
            with lock, semaphore("another", using=database):
                pass
        assert keeper_of(database).loop._thread is keeper
        permit.check()


def test_an_acquire_that_is_interrupted_twice_leaves_nothing(database, monkeypatch):
    """The second exception comes while the first one is cleaned up."""
    lock = semaphore("limits", lease=2, timeout=60, using=database)
    with lock:
        pass
    with monkeypatch.context() as patch:
        patch.setattr(Keeper, "acquire", granted_and(twice(patch)))
        with pytest.raises(Limit):
            lock.acquire()
    assert_nothing_held(database)
    with lock:
        pass


def twice(patch):
    """Return a function that raises, and has the cleaning up raise too."""

    def first(*_):
        patch.undo()
        patch.setattr(Keeper, "abandon", second)
        raise Limit

    def second(*_):
        patch.undo()
        raise Limit

    return first


def interrupted(action):
    """Return a function that tells whether ``action`` was interrupted, and keeps no traceback."""

    def call(_):
        try:
            action()
        except Limit:
            return True
        return False

    return call


def granted_and(interrupt):
    """Return a ``Keeper.acquire`` that is interrupted after the permit was granted."""
    acquire = Keeper.acquire

    def acquires(*args):
        assert acquire(*args)
        interrupt()

    return acquires


def test_an_acquire_that_is_interrupted_twice_as_it_gives_up_leaves_nothing(database, monkeypatch):
    """Else its keeper would be in use for ever."""
    lock = semaphore("limits", using=database)
    with lock, monkeypatch.context() as patch:
        interrupt = twice(patch)

        def gives_up(keeper, acquisition):
            acquisition.give_up()
            interrupt()

        patch.setattr(Keeper, "drop", gives_up)
        assert run_in_threads(1, interrupted(lock.try_acquire)) == [True]
    wait_until(lambda: not keeper_of(database).acquisitions, timeout=30, what="nothing is left of it")
