"""The keeper's thread: it sleeps until something is due or heard, looks after what is held, and ends in good order.

Sleeping until a deadline, a word from another thread, or something to read.
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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from django_sqlsem.backends.base import Grant, Granted
from django_sqlsem.conf import config
from django_sqlsem.core import testmode
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.database.sessions import OwnSession
from django_sqlsem.decorators import busy_log
from django_sqlsem.exceptions import BackendError
from django_sqlsem.runtime.acquisition import Acquisition
from django_sqlsem.runtime.keeper import DARK, DOUBTS, LOOK_AROUND, RecordingKeeper
from django_sqlsem.runtime.queue import HEARTBEAT, Arbiter

if TYPE_CHECKING:
    from django_sqlsem.backends.base import BaseSemaphoreBackend


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


logger = logging.getLogger("django_sqlsem")

#: For how long posted steps are worked off before renewals and waiters have their turn, in seconds.
TURN: Final = 0.1
#: The thread wakes at least so often while there is anything to look after: then a new waiter need not wake it.
NAP: Final = HEARTBEAT * 0.85
#: So many notes from the bell at once, and there may have been more.
MANY: Final = 8


class ThreadKeeper(RecordingKeeper):
    """A keeper with one thread, which starts with the first hold and ends ``IDLE`` seconds after the last."""

    def __init__(self, backend: BaseSemaphoreBackend) -> None:
        super().__init__(backend)
        self._life = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._alarm: Alarm | None = None
        self._wakes_at = 0.0

    # What other threads call.

    def register(self, acquisition: Acquisition) -> None:
        """Know of a hold, and see that somebody looks after it."""
        super().register(acquisition)
        if not self._runs():
            self._start()

    def post(self, step: Callable[[], object]) -> None:
        """Run a step on the keeper's thread."""
        self.inbox_put(step)
        if not self._runs():
            self._start()

    def inbox_put(self, step: Callable[[], object]) -> None:
        """Leave a step for the thread, and wake it."""
        super().inbox_put(step)
        alarm = self._alarm
        if alarm is not None:
            alarm.ring()

    def accept(
        self,
        acquisition: Acquisition,
        permit_id: str,
        grant: Grant,
        sent: float,
        lasts: float,
        *,
        at_once: bool = False,
    ) -> bool:
        """Give a grant to its hold; one that ends soon is looked after sooner than at the next look around."""
        accepted = super().accept(acquisition, permit_id, grant, sent, lasts, at_once=at_once)
        if accepted and self._dark_since is not None and acquisition.request.presence.beacon:
            acquisition.darkened(self._dark_since + DARK)
        if accepted and self.presence.beacon and not acquisition.request.presence.beacon:
            acquisition.renew_at = 0.0  # its row was written before the beacon was lit, and must say that it is
        if accepted and acquisition.renew_at < min(self._scan_at, boot_now() + LOOK_AROUND):
            self._scan_at = acquisition.renew_at
            self._due(acquisition.renew_at)
        return accepted

    def poke(self, arbiter: Arbiter) -> None:
        """Have the thread look at a queue now."""
        arbiter.next_at = 0.0
        self._due(0.0)

    def reconsider(self, arbiter: Arbiter) -> None:
        """Have the thread look at a queue when it is due."""
        self._due(arbiter.next_at)

    def _due(self, at: float) -> None:
        # In the thread itself nothing sleeps. A wake-up costs two switches, so not for what it will see in time.
        alarm = self._alarm
        if alarm is not None and at < self._wakes_at:
            alarm.ring()

    def stop(self) -> None:
        """End the thread, then give everything back and close the connections."""
        self._stopping = True
        try:
            self._end(time.monotonic())
        finally:
            self._stopping = False
        if self.acquisitions or not self.inbox.empty():
            with contextlib.suppress(RuntimeError):  # at the interpreter's end no thread can start
                self._start()

    def _end(self, started: float) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            self.inbox_put(_wake)
            thread.join(timeout=10)
        self.empty_inbox()
        self._clear_doubts(boot_now() + max(DOUBTS))
        with self.queue_lock:
            arbiters = list(self.arbiters.values())
            for arbiter in arbiters:
                for acquisition in list(arbiter.queue):
                    acquisition.answer(BackendError("The process is ending."))
                    self.waiting.pop(acquisition.permit_id, None)
                    if arbiter.enrolled is acquisition:
                        arbiter.unwanted.append(acquisition.request)
                    arbiter.remove(acquisition)
        for arbiter in arbiters:
            if not self.own.unreachable(started):
                arbiter.step(self.own)
        self._watch.finish()
        self.give_up_unanswered()
        super().stop()
        self._reach.close()

    def after_fork(self) -> None:
        """In a forked child: let go of the parent's sockets and files."""
        self._reach.after_fork()
        if self._alarm is not None:
            self._alarm.close()

    # The thread's life.

    def _start(self) -> None:
        with self._life:
            if not self._runs() and not self._stopping:
                if self._alarm is None:
                    self._alarm = Alarm()
                self._open_at = boot_now()
                self._thread = threading.Thread(target=self._run, name=f"sqlsem-keeper-{self.alias}", daemon=True)
                self._thread.start()

    def _runs(self) -> bool:
        # One whose start was interrupted by a signal is not alive, or gives way to its successor.
        thread = self._thread
        return thread is not None and thread.is_alive()

    def _run(self) -> None:
        me = threading.current_thread()
        alarm = self._alarm
        assert alarm is not None  # noqa: S101
        while not self._stopping and self._thread is me:
            try:
                self._sleep(alarm)
                self._work_off()
                self._tick()
            except Exception:
                logger.exception("The keeper of %r met an error and goes on.", self.alias)
                time.sleep(0.05)  # what is still due must not be retried as fast as it fails
            if self._may_end():
                return
        with self._life:
            if self._thread is me:
                self._thread = None

    def _sleep(self, alarm: Alarm) -> None:
        alarm.asleep = True
        self._wakes_at = boot_now() + NAP  # before the look at what is due: who comes later rings
        if not self._reach.quiet():  # heard while it was busy with a statement
            alarm.asleep = False
            self._hear()
            return
        if not self.inbox.empty():
            alarm.asleep = False
            return
        pause = self._pause()
        self._wakes_at = boot_now() + pause
        own = self.own
        connection = own.connection if isinstance(own, OwnSession) and own.is_open else None
        if alarm.sleep(pause, self._reach.descriptors(connection)):
            self._hear()

    def _hear(self) -> None:
        heard = self._reach.heard()
        if self._reach.ended:
            self.own.close()
        elif not heard and self.own.is_open and not self._reach.listens:
            self._probe()
        if len(heard) >= MANY:  # a bell forgets what is too much for it
            with self.queue_lock:
                for arbiter in self.arbiters.values():
                    arbiter.look_soon()
        for each in heard:
            if isinstance(each, Granted):
                self.deliver(each)
            elif (acquisition := self.waiting.get(each)) is not None:
                sent = boot_now()
                with contextlib.suppress(BackendError):  # it looks again at its next heartbeat
                    granted = self.backend.granted(self.own, acquisition.request)
                    if granted is not None:
                        self.deliver(granted, sent)
            else:
                self._renew_soon(each)

    def _renew_soon(self, permit_id: str) -> None:
        """An operator has something to say to a holder: its renewal brings it."""
        for acquisition in list(self.acquisitions.values()):
            if acquisition.permit_id == permit_id:
                acquisition.renew_at = self._scan_at = 0.0

    def _probe(self) -> None:
        """Something is to be read where nothing should be: the server has most likely ended the session."""
        with contextlib.suppress(BackendError):
            self.own.run(lambda cursor: cursor.execute("SELECT 1"))

    def _work_off(self) -> None:
        # Not until the inbox is empty: while many tasks come and go it never is.
        turn_ends = boot_now() + TURN
        with contextlib.suppress(queue.Empty):
            while boot_now() < turn_ends:
                self.inbox.get_nowait()()

    def _pause(self) -> float:
        now = boot_now()
        if self._reach.reopened:
            return 0.0
        if not (self.acquisitions or self.arbiters or self._doubts or self._watch.busy):
            return min(LOOK_AROUND, max(self._idle() - self._unused(), 0.0))
        due = [now + NAP, self._watch.next_at]
        if self.acquisitions:
            due.append(self._scan_at)
            if not self.own.is_open and self._open_at:
                due.append(self._open_at)
        due.extend(at for at, *_ in self._doubts)
        with self.queue_lock:
            due.extend(arbiter.next_at for arbiter in self.arbiters.values())
        return max(0.0, min(due) - now)

    def _unused(self) -> float:
        return time.monotonic() - max(self.own.last_used, self.work.last_used)

    def _idle(self) -> float:
        # A test database can be dropped only when nobody is connected to it.
        return 0.0 if testmode.active() else config(self.alias).idle

    def _may_end(self) -> bool:
        if self.acquisitions or self.arbiters or self._doubts or self._watch.busy or not self.inbox.empty():
            return False
        if self._unused() < self._idle():
            return False
        self.end_history()
        with self._life:
            self._thread = None
            # Whoever registered before it could see that no thread runs is seen here, and the other way round.
            if self.acquisitions or self.arbiters or not self.inbox.empty():
                self._thread = threading.current_thread()
                return False
            self._watch.forget()
            self.own.close()
            self.work.close()
            self._reach.close()
            self._dark_since = None
            return True

    def _tick(self) -> None:
        now = boot_now()
        self._shine(now)
        if self.acquisitions and now >= self._scan_at:
            self._scan(now)
        if self._doubts:
            self._clear_doubts(now)
        with self.queue_lock:
            due = [arbiter for arbiter in self.arbiters.values() if arbiter.next_at <= now]
        if due and not self.own.is_open:
            self._open()
        for arbiter in due:
            arbiter.step(self.own)
            # A thousand names take a while.
            if self.acquisitions and (now := boot_now()) >= self._scan_at:
                self._scan(now)
        # Renewals and waiters come first.
        if self._watch.next_at <= now and not (self.acquisitions and boot_now() >= self._scan_at):
            self._watch.step(self._leisure(now))
        self.write_history(boot_now())
        busy_log.log_rest()


def _wake() -> None:
    """Nothing to do but look at the clock."""
