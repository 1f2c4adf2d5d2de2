"""The keeper's side of a process: a thread that sleeps until something is due or heard; or no thread at all.

``ThreadLoop`` runs the keeper's steps on a thread, which starts with the first one and ends when it is idle.
``InlineLoop`` runs each step where it arises, for backends that live inside the process.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.threads import DaemonThread

logger = logging.getLogger("django_sqlsem")

#: For how long posted steps are worked off before renewals and waiters have their turn, in seconds.
STEPS_TURN: Final = 0.1
#: The thread wakes at least so often while there is anything to look after: then a new waiter need not wake it.
NAP: Final = 0.55
#: Seconds until the same error is logged again.
SAME_ERROR: Final = 60.0


class Duties(Protocol):
    """What a loop works for."""

    def pause(self) -> float:
        """Return for how many seconds nothing will be due."""

    def descriptors(self) -> list[int]:
        """Return what becomes readable when there is something to hear."""

    def is_quiet(self) -> bool:
        """Whether nothing has been heard that was not acted on."""

    def hear(self) -> None:
        """Act on what has been heard."""

    def take_turn(self) -> None:
        """Do what is due."""

    def has_work(self) -> bool:
        """Whether the thread must go on."""

    def is_in_use(self) -> bool:
        """Whether something is registered that counts on a running thread."""

    def say_goodbye(self) -> None:
        """The thread is about to end: do what only it would do."""

    def close(self) -> None:
        """The thread ends: close what it had open."""


class Alarm:
    """Wakes one sleeping thread. ``ring`` may be called at any moment, in finalisers and signal handlers too."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self.asleep = False

    def ring(self) -> None:
        """Wake the sleeper, if it sleeps."""
        if self.asleep:
            with contextlib.suppress(OSError):  # it has rung already, or has been closed
                self._sender.send(b".")

    def sleep(self, seconds: float, descriptors: Sequence[int]) -> set[int]:
        """Sleep for so long at the most; ``asleep`` must have been set before the last look at what there is to do.

        Returns those of ``descriptors`` that are readable, or broken.
        """
        own = self._receiver.fileno()
        try:
            ready = _wait([own, *descriptors], max(0.0, seconds))
        finally:
            self.asleep = False
        if own in ready:
            with contextlib.suppress(BlockingIOError):
                self._receiver.recv(4096)
        return ready - {own}

    def close(self) -> None:
        """Close both ends."""
        self._receiver.close()
        self._sender.close()


def _wait(descriptors: Sequence[int], seconds: float) -> set[int]:
    if hasattr(select, "poll"):
        poller = select.poll()
        for each in descriptors:
            poller.register(each, select.POLLIN)
        # Rounded up, so that it never turns round and round in the last millisecond.
        return {number for number, _ in poller.poll(int(seconds * 1000) + 1)}
    with selectors.DefaultSelector() as selector:  # pragma: no cover - Windows
        for each in descriptors:
            selector.register(each, selectors.EVENT_READ)
        return {key.fd for key, _ in selector.select(seconds)}


class InlineLoop:
    """Takes each step where it arises."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    def ensure(self) -> None:
        """Do what finalisers left to do."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.inbox.get_nowait()()

    def post(self, step: Callable[[], object]) -> None:
        self.ensure()
        step()

    def note(self, step: Callable[[], object]) -> None:
        self.inbox.put(step)

    def wake_by(self, at: float) -> None:
        """Do nothing: no thread sleeps here."""


class ThreadLoop:
    """Takes the steps on one thread, and lets its duties have their turns in between."""

    def __init__(self, alias: str, duties: Duties) -> None:
        self.alias = alias
        self.inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._duties = duties
        self._life = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._alarm: Alarm | None = None
        self._wakes_at = 0.0
        #: The error that was logged last, and when.
        self._told, self._told_at = "", 0.0

    # What other threads call.

    def runs(self) -> bool:
        """Whether the thread runs. One whose start was interrupted by a signal is not alive, or has a successor."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def ensure(self) -> None:
        """See that the thread runs."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            with self._life:
                if not self.runs() and not self._stopping:
                    self._alarm = self._alarm or Alarm()
                    self._thread = DaemonThread(f"sqlsem-keeper-{self.alias}", self._run)
                    self._thread.start()

    def post(self, step: Callable[[], object]) -> None:
        """Have the thread take a step."""
        self.note(step)
        self.ensure()

    def note(self, step: Callable[[], object]) -> None:
        """Leave a step for the thread, and wake it."""
        self.inbox.put(step)
        alarm = self._alarm
        if alarm is not None:
            alarm.ring()

    def wake_by(self, at: float) -> None:
        """Wake the thread if it would sleep beyond ``at``. In the thread itself nothing sleeps."""
        # A wake-up costs two switches, so not for what it will see in time.
        alarm = self._alarm
        if alarm is not None and at < self._wakes_at:
            alarm.ring()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """End the thread, and let none start inside the block. Steps that are left are taken here."""
        self._stopping = True
        try:
            thread = self._thread
            if thread is not None and thread is not threading.current_thread() and thread.is_alive():
                self.note(_wake)
                thread.join(timeout=10)
            self._empty_inbox()
            yield
        finally:
            self._stopping = False

    def after_fork(self) -> None:
        """In a forked child: let go of the parent's sockets."""
        self._thread, self._stopping = None, True  # under gevent its greenlet goes on in the child
        if self._alarm is not None:
            self._alarm.close()

    # The thread.

    def _empty_inbox(self) -> None:
        with contextlib.suppress(queue.Empty):  # the thread may take some too, if it goes on after all
            while True:
                step = self.inbox.get_nowait()
                try:
                    step()
                except Exception as error:  # noqa: BLE001 - whatever one step meets, the others are taken
                    self._met(error)

    def _run(self) -> None:
        me = threading.current_thread()
        alarm = self._alarm
        assert alarm is not None  # noqa: S101
        while not self._stopping and self._thread is me:
            try:
                self._sleep(alarm)
                self._take_steps()
                self._duties.take_turn()
            except Exception as error:  # noqa: BLE001 - what is still due is tried again
                if self._thread is not me:
                    return
                self._met(error)
                time.sleep(0.05)  # not as fast as it fails
            if self._has_ended():
                return
        with self._life:
            if self._thread is me:
                self._thread = None

    def _met(self, error: Exception) -> None:
        told, now = repr(error), boot_now()
        if told != self._told or now > self._told_at + SAME_ERROR:
            self._told, self._told_at = told, now
            logger.error("The keeper of %r met an error and goes on.", self.alias, exc_info=error)

    def _sleep(self, alarm: Alarm) -> None:
        alarm.asleep = True
        self._wakes_at = boot_now() + NAP  # before the look at what is due: a thread that comes later rings
        if not self._duties.is_quiet():  # heard while it was busy with a statement
            alarm.asleep = False
            self._duties.hear()
        elif not self.inbox.empty():
            alarm.asleep = False
        else:
            pause = self._duties.pause()
            self._wakes_at = boot_now() + pause
            if alarm.sleep(pause, self._duties.descriptors()):
                self._duties.hear()

    def _take_steps(self) -> None:
        # Not until the inbox is empty: while many tasks come and go it never is.
        turn_ends = boot_now() + STEPS_TURN
        with contextlib.suppress(queue.Empty):
            while boot_now() < turn_ends:
                self.inbox.get_nowait()()

    def _has_ended(self) -> bool:
        if self._duties.has_work() or not self.inbox.empty():
            return False
        self._duties.say_goodbye()
        with self._life:
            self._thread = None
            # A caller that registered before it could see that no thread runs is seen here, and the other way round.
            if self._duties.is_in_use() or not self.inbox.empty():
                self._thread = threading.current_thread()
                return False
            self._duties.close()
            return True


def _wake() -> None:
    """Nothing to do but look at the clock."""
