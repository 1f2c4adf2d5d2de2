"""A measured process: it does what the first process tells it through a pipe."""

from __future__ import annotations

import os
import queue
import random
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.budget_roles import BudgetRoles
from benchmarks.contenders import all_contenders
from benchmarks.contenders.base import Contender, database_entry
from benchmarks.many_roles import ManyRoles

#: How long a waiter has been waiting before its hand-off, in seconds: varied, so that no rhythm of polls is met.
SETTLE = (0.03, 0.06)
#: The first hand-off in each direction opens connections; it is left out.
FIRST = 2


def main(pipe: Any) -> None:
    """Do what is asked until the pipe closes. Each order is the name of a role and its arguments."""
    worker = Worker(pipe)
    while True:
        try:
            role, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(("done", getattr(worker, role)(**arguments)))
        except BaseException:  # noqa: BLE001 - the first process raises it again
            pipe.send(("failed", traceback.format_exc()))
        if role == "end":
            return


class Worker(ManyRoles, BudgetRoles):
    """The roles. Durations are in seconds; instants are of the monotonic clock, which all processes share."""

    contender: Contender
    make: Callable[[], Contender]

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def setup(
        self, key: str, name: str, slots: int, alias: str | None = None, port: int | None = None, watch: str = ""
    ) -> int:
        """Become a user of a lock, and connect. Returns the process id.

        ``port`` is that of a proxy of this host in front of the server; ``watch`` is what to note: see
        ``BudgetRoles.be_watched``.
        """
        kind = all_contenders()[key]
        if port:
            database_entry(alias or kind.database).update(HOST="127.0.0.1", PORT=str(port))
        if watch:
            self.be_watched(watch)
        self.make = lambda: kind(name, slots, alias)
        self.contender = self.make()
        self.contender.setup()
        return os.getpid()

    def end(self) -> None:
        """Disconnect, and end."""
        self.contender.teardown()

    def acquire(self) -> float:
        """Say that it is about to wait, acquire, and return when that was done."""
        self.pipe.send(("calling", None))
        self.contender.acquire()
        return time.monotonic()

    def release(self) -> float:
        """Release, and return when it began to."""
        began = time.monotonic()
        self.contender.release()
        return began

    def turn(self) -> int | None:
        """Say that it is about to wait, acquire, and release at once. Returns how many batches that took."""
        sent = self.sent()
        self.pipe.send(("calling", None))
        self.contender.acquire()
        self.contender.release()
        return None if sent is None else self.sent() - sent

    def pairs(self, seconds: float, warm_up: int = 20) -> dict[str, Any]:
        """Acquire and release for a while. Returns each pair's duration, and the CPU seconds of all."""
        contender, clock = self.contender, time.perf_counter
        for _ in range(warm_up):
            contender.acquire()
            contender.release()
        durations = []
        cpu = time.process_time()
        end = began = clock()
        while end - began < seconds:
            start = clock()
            contender.acquire()
            contender.release()
            end = clock()
            durations.append(end - start)
        return {"durations": durations, "cpu": time.process_time() - cpu, "wall": end - began}

    def contend(self, hold: float, start: float, seconds: float) -> dict[str, Any]:
        """Acquire, hold and release from ``start`` on. Returns (asked, granted, released) of each, and the CPU."""
        contender, clock, events = self.contender, time.monotonic, []
        time.sleep(max(0.0, start - clock()))
        cpu, end, sent = time.process_time(), start + seconds, self.sent()
        while (asked := clock()) < end:
            contender.acquire()
            granted = clock()
            if hold:
                time.sleep(hold)
            released = clock()
            contender.release()
            events.append((asked, granted, released))
        batches = None if sent is None else self.sent() - sent
        return {"events": events, "cpu": time.process_time() - cpu, "batches": batches}

    def sent(self) -> int | None:
        """Return how many batches it has sent so far, if it counts them."""
        return self.contender.batches

    def hand_over(self, seconds: float) -> list[float]:
        """Hand one slot to and fro between two threads. Returns how long each hand-off took."""
        sides = [_Side(self.make()) for _ in range(2)]
        giver, taker = sides
        giver.ask("acquire")
        giver.answer()
        durations, end = [], time.monotonic() + seconds
        while time.monotonic() < end or len(durations) < 2 + FIRST:
            taker.ask("acquire")
            taker.calling.wait()
            time.sleep(random.uniform(*SETTLE))  # noqa: S311
            giver.ask("release")
            began, granted = giver.answer()[0], taker.answer()[1]
            durations.append(granted - began)
            giver, taker = taker, giver
        giver.ask("release")
        giver.answer()
        for side in sides:
            side.ask("end")  # its connections end with the process
        return durations


class _Side:
    """One of two threads that hand a slot to each other."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[float, float] | Exception] = queue.SimpleQueue()
        self.calling = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, verb: str) -> None:
        """Have the thread call a method of its contender; ``answers`` will have when it began and ended."""
        self.calling.clear()
        self.orders.put(verb)

    def answer(self) -> tuple[float, float]:
        """Return when the method began and ended, or raise what it raised."""
        result = self.answers.get(timeout=60)
        if isinstance(result, Exception):
            raise result
        return result

    def _run(self) -> None:
        try:
            self.contender.setup()
            while (verb := self.orders.get()) != "end":
                self.calling.set()
                began = time.monotonic()
                getattr(self.contender, verb)()
                self.answers.put((began, time.monotonic()))
        except Exception as error:  # noqa: BLE001 - answer() raises it
            self.answers.put(error)
            self.calling.set()
