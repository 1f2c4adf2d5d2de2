"""Processes that add and take units as they are told, or as fast as it goes."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
import sys
import threading
from typing import Any

from django_sqlsem import AcquireTimeoutError, semaphore
from django_sqlsem.backends import get_counting_backend
from django_sqlsem.backends.rows import statements
from django_sqlsem.database import cursors
from django_sqlsem.locks import counter
from django_sqlsem.runtime import queue
from django_sqlsem.runtime.keepers import keeper_for
from tests.programs.contenders import SharedCounter
from tests.programs.queue_clients import Queuer
from tests.support.children import listen, say
from tests.support.processes import Child
from tests.support.threads import wait_until


def obey(alias: str, name: str, unhurried: bool, patient: bool) -> None:
    """Do what the parent's lines say, each acquire in a thread of its own."""
    if unhurried:  # never look around: only a word from elsewhere wakes who waits
        queue.HEARTBEAT = 1000.0  # type: ignore[misc]
    if unhurried or patient:  # nobody takes it for dead on a busy machine
        # Four times that is a number of 32 bits.
        statements.PATIENCE_US = 500_000_000  # type: ignore[misc]
    shared = counter(name, using=alias)
    keeper: Any = keeper_for(get_counting_backend(alias))
    lock = semaphore(f"warm-{os.getpid()}", using=alias)
    with lock:  # a process that has been running for a while: it can be reached
        pass
    counter(f"warm-counter-{os.getpid()}", 1, using=alias).acquire()
    wait_until(lambda: keeper.own.is_open)

    def acquire(who: str, n: int, timeout: float | None) -> None:
        try:
            taken = shared.acquire(n, timeout=timeout)
            say(f"{who} took {json.dumps([taken.count, taken.waited])}")
        except AcquireTimeoutError as error:
            say(f"{who} busy {json.dumps(str(error))}")
        except BaseException as error:
            say(f"{who} failed {json.dumps(repr(error))}")

    say("parent ready")
    while True:
        verb, *args = json.loads(listen())
        if verb == "acquire":
            threading.Thread(target=acquire, args=args, name=args[0], daemon=True).start()
        elif verb == "release":
            shared.release(*args)
            say("parent answer null")
        elif verb == "try":
            taken = shared.try_acquire(*args)
            say(f"parent answer {json.dumps(taken and taken.count)}")
        elif verb == "end":
            return


class CounterUser(Queuer):
    """The parent's side of ``obey``. Who asks is known by a word."""

    def __init__(self, alias: str, name: str, *, unhurried: bool = False, patient: bool = False) -> None:
        Child.__init__(self, "tests.programs.counter_clients:obey", alias, name, unhurried, patient)
        self._said = collections.defaultdict(collections.deque)
        self.alias = alias

    def ready(self, *first: str) -> CounterUser:
        """Wait until it listens."""
        self.word("parent", "ready", timeout=60)
        return self

    def asks(self, who: str = "a", n: int = 1, timeout: float | None = None) -> None:
        """Have a thread acquire, without waiting for it."""
        self.tell("acquire", who, n, timeout)

    def took(self, who: str = "a", timeout: float = 30.0) -> int:
        """Wait until it has got its units; return how many."""
        return int(self.word(who, "took", timeout)[0])

    def gives(self, n: int = 1) -> None:
        """Have it add units."""
        self.tell("release", n)
        self.word("parent", "answer", timeout=30)

    def tries(self, n: int = 1) -> int | None:
        """Have it try once."""
        self.tell("try", n)
        found: int | None = self.word("parent", "answer", timeout=30)
        return found


def produce(alias: str, name: str, total: int) -> None:
    """Add so many units, a few at a time, from threads and tasks."""
    jobs = counter(name, using=alias)
    say("ready")
    listen()
    halves = [total // 2, total - total // 2]

    def run() -> None:
        left = halves[0]
        while left:
            n = random.randint(1, min(3, left))
            jobs.release(n)
            left -= n

    async def main() -> None:
        left = halves[1]
        while left:
            n = random.randint(1, min(3, left))
            await jobs.arelease(n)
            left -= n

    thread = threading.Thread(target=run)
    thread.start()
    asyncio.run(main())
    thread.join()
    say("done")


def consume(alias: str, name: str) -> None:
    """Take one to three at a time in threads and tasks, with short timeouts and cancellations, until told to stop."""
    jobs = counter(name, using=alias)
    stop = threading.Event()
    lock = threading.Lock()
    taken, gave_up, errors = [0], [0], []
    say("ready")
    listen()
    with SharedCounter(alias) as inside:

        def got(count: int) -> None:
            for _ in range(count):
                inside.enter()
            with lock:
                taken[0] += count

        def run() -> None:
            while not stop.is_set():
                try:
                    got(jobs.acquire(random.randint(1, 3), timeout=random.choice((0, 0.02, 0.1, 0.5))).count)
                except AcquireTimeoutError:
                    gave_up[0] += 1
                except BaseException as error:
                    errors.append(repr(error))
                    return

        async def one() -> None:
            taken = await jobs.aacquire(random.randint(1, 3), timeout=0.5)
            got(taken.count)  # without an await: it has been counted if it has been taken

        async def main() -> None:
            while not stop.is_set():
                task = asyncio.ensure_future(one())
                await asyncio.sleep(random.random() * 0.05)
                if random.random() < 0.5:
                    task.cancel()
                try:
                    await task
                except (AcquireTimeoutError, asyncio.CancelledError):
                    gave_up[0] += 1

        def tasks() -> None:
            try:
                asyncio.run(main())
            except BaseException as error:
                errors.append(repr(error))

        threads = [threading.Thread(target=each) for each in (run, run, tasks)]
        for thread in threads:
            thread.start()
        listen()
        stop.set()
        for thread in threads:
            thread.join()
    say(f"tally {json.dumps([taken[0], gave_up[0], errors])}")


def crowd(alias: str, name: str, tasks: int) -> None:
    """Wait in so many tasks, with no thread for anything else; tell of threads and statements."""
    statements: list[str] = []
    for kind in (cursors.Cursor, *cursors.Cursor.__subclasses__()):
        if "execute" in vars(kind):
            _note(kind, statements)
    jobs = counter(name, timeout=None, using=alias)
    took: list[int] = []

    async def main() -> None:
        lines: asyncio.Queue[str] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), lambda: lines.put_nowait(listen()))

        async def wait(number: int) -> None:
            await jobs.aacquire()
            took.append(number)

        waiting = [asyncio.create_task(wait(number)) for number in range(tasks)]
        say("ready")
        while await lines.get() != "join":
            say(f"told {json.dumps([len(os.listdir('/proc/self/task')), statements])}")
        await asyncio.gather(*waiting)
        say(f"took {json.dumps(took)}")
        await lines.get()

    asyncio.run(main())


def _note(kind: type[cursors.Cursor], statements: list[str]) -> None:
    real = kind.execute

    def execute(cursor: Any, sql: str, parameters: Any = None) -> None:
        statements.append(sql)
        real(cursor, sql, parameters)

    kind.execute = execute  # type: ignore[method-assign]
