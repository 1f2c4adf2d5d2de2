"""A process of a campaign: threads and tasks that take and give back one slot after the other, and note it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any

from django_sqlsem import AcquireTimeoutError, Semaphore, semaphore
from django_sqlsem.exceptions import BackendError
from django_sqlsem.snapshots import LossReason
from tests.proof.judge import LIVE, Log, now
from tests.support.children import say
from tests.support.interruptions import SoftLimit

NAME = "campaign"
#: How long one waits, in seconds: mostly until it is served.
TIMEOUTS = (60.0, 60.0, 60.0, 60.0, 0.3, 0.02)
#: With ``rest`` all processes stand back at the same time, so that the name is idle: of each second, the last part.
RESTS = 0.85
#: How many forked children a process may have at once.
FORKS = 2
#: How long a forked child may take, in seconds.
PATIENCE = 100.0
#: What a body and an acquire may raise; anything else is a mistake.
USUAL = (AcquireTimeoutError, BackendError, SoftLimit, asyncio.CancelledError, MemoryError)


class Worker:
    """One process. ``options``: slots, lease, threads, tasks, hold; rest, cancel, hungry."""

    def __init__(self, alias: str, log: str, seed: int, options: dict[str, Any]) -> None:
        self.alias = alias
        self.log = Log(log)
        self.options = options
        self.chance = random.Random(seed)
        self.stop = threading.Event()
        #: The permits that are in use now, by who has them.
        self.inside: dict[str, Any] = {}
        self.armed = False
        self.forks = threading.Semaphore(FORKS)
        self.locks = {timeout: self.lock(timeout) for timeout in set(TIMEOUTS)}
        signal.signal(signal.SIGUSR1, self.strike)

    def lock(self, timeout: float) -> Semaphore:
        """Return the semaphore of all, with this timeout."""
        return semaphore(
            NAME, slots=self.options["slots"], lease=self.options["lease"], timeout=timeout, using=self.alias
        )

    def strike(self, number: int, frame: FrameType | None) -> None:
        """Interrupt the main thread: it is out of its body from now on."""
        if self.armed:
            self.armed = False
            self.leave("main")
            raise SoftLimit("a signal interrupts the body")

    def enter(self, who: str, permit: Any) -> None:
        """Note a grant. A signal may come at any point."""
        at = now()
        self.inside[who] = permit
        self.log.write("I", who, permit.slot, permit.token or 0, at=at)

    def leave(self, who: str) -> None:
        """Note who is about to leave, unless that was noted already."""
        while (permit := self.inside.get(who)) is not None:
            try:
                at, lost = now(), permit.lost
                said = LIVE if lost is None else lost.reason.value
                self.log.write("O", who, permit.slot, permit.token or 0, said, at=at)
                self.inside.pop(who, None)
            except MemoryError:
                time.sleep(0.005)  # for a moment there was none left

    def work(self) -> float:
        """Return how long a body takes; some need memory."""
        if self.options.get("hungry"):
            bytearray(self.chance.choice((1, 1 << 16, 1 << 22)))
        return float(self.chance.choice((0, 0, self.chance.uniform(0, self.options["hold"]))))

    def tired(self, who: str) -> float:
        """Return how long to stand back now. In every other second only main threads want a slot: there are enough."""
        second, part = divmod(time.monotonic(), 1.0)
        rests = (second % 2 and who != "main") or (self.options.get("rest") and part > RESTS)
        return 1.0 - part if rests else 0.0

    def gave_up(self, who: str, error: BaseException) -> None:
        """Note why an attempt came to nothing, or a body was cut short."""
        self.leave(who)
        usual = isinstance(error, USUAL) or self.options.get("hungry")
        self.log.write("G" if usual else "B", who, note=type(error).__name__)
        if not usual:
            traceback.print_exception(error)

    def use(self, who: str) -> None:
        """Take a slot and give it back."""
        self.log.write("W", who)
        with self.locks[self.chance.choice(TIMEOUTS)] as permit:
            self.enter(who, permit)
            try:
                time.sleep(self.work())
            finally:
                self.leave(who)

    def thread(self, who: str) -> None:
        """Do so over and over."""
        while not self.stop.is_set():
            try:
                try:
                    if who == "main":
                        self.armed = True
                    self.use(who)
                finally:
                    if who == "main":
                        self.armed = False
            except BaseException as error:
                self.gave_up(who, error)
                self.stop.wait(self.chance.uniform(0, 0.05))
            if pause := self.tired(who):
                time.sleep(pause)

    async def task(self, who: str) -> None:
        """Do so over and over, in a task that may be cancelled."""
        this = asyncio.current_task()
        assert this is not None
        while not self.stop.is_set():
            while this.cancelling():
                this.uncancel()
            try:
                self.log.write("W", who)
                async with self.locks[self.chance.choice(TIMEOUTS)] as permit:
                    self.enter(who, permit)
                    try:
                        await asyncio.sleep(self.work())
                    finally:
                        self.leave(who)
            except BaseException as error:
                self.gave_up(who, error)
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(self.chance.uniform(0, 0.05))
            if pause := self.tired(who):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(pause)

    async def loop(self) -> None:
        """Run the tasks; with ``cancel`` one of them is cancelled now and then."""
        tasks = [asyncio.create_task(self.task(f"task{each}")) for each in range(self.options["tasks"])]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(self.chance.uniform(0.02, 0.3))
            if self.options.get("cancel") and not self.stop.is_set():
                self.chance.choice(tasks).cancel()
        await asyncio.gather(*tasks)

    def fork(self) -> None:
        """Fork a child in the middle of everything. It has nothing of its parent's, and may use the semaphore."""
        pid = os.fork()
        if pid == 0:
            self.child()
        deadline = time.monotonic() + PATIENCE
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                self.log.write("B", note="a forked child hangs")
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.forks.release()

    def child(self) -> None:
        try:
            for permit in list(self.inside.values()):
                if permit.lost is None or permit.lost.reason is not LossReason.FORKED:
                    self.log.write("B", "child", note="a forked child has a permit")
            self.inside.clear()
            self.use("child")
            if self.chance.random() < 0.5:
                self.log.write("W", "child")
                with self.locks[TIMEOUTS[0]] as permit:
                    self.enter("child", permit)
                    self.log.write("K")
                    os._exit(0)  # as abruptly as by kill -9
        except BaseException as error:
            self.gave_up("child", error)
        finally:
            os._exit(0)

    def listen(self) -> None:
        """Do what the parent says, until it says ``end`` or is gone."""
        for line in sys.stdin:
            if line != "fork\n":
                break
            if self.forks.acquire(blocking=False):
                threading.Thread(target=self.fork, daemon=True).start()
        self.stop.set()

    def run(self) -> None:
        """Work until the end."""
        others = [
            threading.Thread(target=self.thread, args=(f"thread{n}",)) for n in range(self.options["threads"] - 1)
        ]
        others.append(threading.Thread(target=asyncio.run, args=(self.loop(),)))
        threading.Thread(target=self.listen, daemon=True).start()
        for each in others:
            each.start()
        self.thread("main")
        for each in others:
            each.join()
        for _ in range(FORKS):
            self.forks.acquire()
        say("done")


def work(alias: str, log: str, seed: int, options: dict[str, Any]) -> None:
    """Be a worker until the parent says ``end``."""
    worker = Worker(alias, log, seed, options)
    say("ready")
    worker.run()
