"""What breaks a deadlock off, and looks for them, does nothing else: no lock is kept, delayed or lost by it."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from django_sqlsem import DeadlockError, mutex
from django_sqlsem.backends import get_backend
from django_sqlsem.keepers import keeper_for
from tests.databases import held_rows
from tests.threads import wait_until

SOON = 20.0


def keeper_of(alias):
    return keeper_for(get_backend(alias))


def waits_of(alias):
    """The holds of this process that wait, and hold something meanwhile."""
    return [hold for hold, _ in list(keeper_of(alias)._watch._waits.values())]


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
