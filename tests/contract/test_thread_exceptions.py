"""An exception that another thread raises in a waiting one, as the time limits of some workers do."""

from __future__ import annotations

import ctypes
import sys
import threading
import time

import pytest

from django_sqlsem import semaphore
from tests.support.threads import wait_until

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
