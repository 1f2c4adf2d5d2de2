"""What Python's own threads and locks lack: an interrupted thread leaves no ``Turn`` taken, and a start has an end.

A signal handler may raise anywhere (``KeyboardInterrupt``, Celery's soft time limit), also between taking a lock and
the ``try`` that gives it back. Whoever left without releasing it is known by its frame, which no longer runs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final, TypeAlias

#: How often those who wait see whether the user is still there, in seconds.
LOOK: Final = 0.05

#: The outermost frame of ours in a thread, and the thread: it runs for as long as the use lasts.
User: TypeAlias = tuple[FrameType | None, int]


class Turn:
    """Held by one user at a time. One who has left without a word, as its frame is gone, does not hold it any more."""

    def __init__(self, mend: Callable[[], object], inside: tuple[str, ...] = ()) -> None:
        #: The modules whose frames belong to a use.
        self._inside = inside
        #: Called by whoever gets it after one who has left it in the middle of something.
        self._mend = mend
        self._mending = False
        # One entry: setdefault() takes it and notes by whom, and no signal can come in between.
        self._user: dict[str, User] = {}
        self._lock = threading.Lock()  # a condition's own ``__enter__`` is no single step
        self._changed = threading.Condition(self._lock)
        self._waiting = 0

    def acquire(self, blocking: bool = True, timeout: float = -1, *, for_good: bool = False) -> bool:
        """Take it, as ``threading.Lock.acquire`` does; ``for_good``: until it is released, whatever else happens."""
        mine = (None, threading.get_ident()) if for_good else user(self._inside)
        give_up = time.monotonic() + timeout if timeout >= 0 else None
        while self._user.setdefault("user", mine) is not mine:  # each has a tuple of its own
            if self._take_from_the_gone():
                continue
            left = LOOK if give_up is None else min(LOOK, give_up - time.monotonic())
            if not blocking or left <= 0:
                return False
            self._wait(left)
        if self._mending:
            self._mend()
            self._mending = False
        return True

    def release(self) -> None:
        """Give it back."""
        self._user.clear()
        if self._waiting:
            with self._lock:
                self._changed.notify()

    def locked(self) -> bool:
        """Return whether somebody has it."""
        return bool(self._user)

    def _wait(self, seconds: float) -> None:
        with self._lock:
            self._waiting += 1  # one that is struck here leaves it too high: then a release costs a little more
            if self._user:
                self._changed.wait(seconds)
            self._waiting -= 1

    def _take_from_the_gone(self) -> bool:
        found = self._user.get("user")
        if found is None:
            return True
        if is_there(found):
            return False
        with _taking:
            if self._user.get("user") is found:
                self._mending = True
                del self._user["user"]
        return True


#: Two who find the same user gone must not both take it away: the second would take it from the first.
_taking = threading.Lock()


def user(inside: tuple[str, ...]) -> User:
    """Return who has called the caller, beyond the frames of modules whose names begin with these."""
    outermost = frame = sys._getframe(2)
    while (caller := frame.f_back) is not None and str(caller.f_globals.get("__name__")).startswith(inside):
        outermost = frame = caller
    return outermost, threading.get_ident()


def is_there(found: User) -> bool:
    """Return whether a use still goes on: then its frame runs, which is the one thing that ``clear()`` refuses.

    A look at the stacks of other threads would tell it too. But ``sys._current_frames()`` may stop the process for
    ever, and ``f_back`` may crash it: https://github.com/python/cpython/issues/106883 and 111363.
    """
    outermost = found[0]
    if outermost is None:
        return True
    try:
        outermost.clear()  # a frame of ours, and nobody needs what was in it
    except RuntimeError:
        return True
    return False


def after_fork() -> None:
    """In a forked child: nobody takes anything."""
    global _taking
    _taking = threading.Lock()


# Threads of our own.

#: For how many looks, and seconds each, ``start()`` waits for the thread to begin. One long wait would be over at once
#: in a process that was stopped meanwhile.
_LOOKS: Final = 100
_LOOK: Final = 0.05


def runs(thread: threading.Thread) -> bool:
    """Return whether a thread runs.

    Before Python 3.13, an exception that a signal handler or another thread raises inside ``is_alive()`` marks the
    thread as ended, for good. Under gevent an exception that ends a greenlet may do that.
    """
    known = _is_running(thread)
    return thread.is_alive() if known is None else known


def _is_running(thread: threading.Thread) -> bool | None:
    lock = getattr(thread, "_tstate_lock", None)  # of Python 3.12 and before: taken while the thread runs
    return None if lock is None else bool(lock.locked())


class DaemonThread(threading.Thread):
    """A daemon thread whose ``start()`` does not wait for ever.

    Python's waits until the new thread says that it has begun. Where memory is short the thread may end before that:
    https://github.com/python/cpython/issues/140746.
    """

    def __init__(self, name: str, run: Callable[..., object], *args: object) -> None:
        super().__init__(target=run, args=args, name=name, daemon=True)
        self._started = _Begun()
        self._process = os.getpid()
        self._over = False

    def run(self) -> None:
        """Do what it was made for."""
        try:
            super().run()
        finally:
            self._over = True

    def is_alive(self) -> bool:
        """Return whether it runs: see ``runs()``."""
        if self._over or self._process != os.getpid():
            return False
        known = _is_running(self)
        return super().is_alive() if known is None else known

    def start(self) -> None:
        """Start the thread. Raises ``RuntimeError`` if it can't start, or does not begin within 5 seconds."""
        super().start()
        if self.ident is None:
            raise RuntimeError(f"can't start new thread: {self.name!r} did not begin, as memory is short")


class _Begun(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        return any(super(_Begun, self).wait(_LOOK) for _ in range(_LOOKS))
