"""A process that reads, writes, upgrades and drains as it is told, and counts from outside who is alone and who is not.

So it does with one name as a mutex and as a semaphore.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from django_sqlsem import SemaphoreError, mutex, semaphore
from django_sqlsem.locks import rwlock
from tests.programs.contenders import SharedCounter
from tests.programs.queue_clients import Queuer
from tests.support.children import listen, say
from tests.support.databases import OutsideCounter


class NamedCounter(SharedCounter):
    """One connection for all threads of a process."""

    def __init__(self, alias: str, name: str) -> None:
        self._lock = threading.Lock()
        self._shared: Any = None
        OutsideCounter.__init__(self, alias, name)

    def _read(self, column: str) -> int:
        with self._lock:
            return super()._read(column)


class Counters:
    """Who is inside, in the database and not by the library."""

    def __init__(self, alias: str) -> None:
        self.readers = NamedCounter(alias, "readers")
        self.writers = NamedCounter(alias, "writers")

    def enter(self, alone: bool) -> None:
        """Count one in. Who is alone sees that nobody else is in, and a reader that no writer is."""
        (self.writers if alone else self.readers).enter()
        seen = (self.readers.current, self.writers.current)
        assert (seen == (0, 1)) if alone else (seen[1] == 0), f"readers and writers inside: {seen}"

    def leave(self, alone: bool) -> None:
        """Count one out."""
        (self.writers if alone else self.readers).leave()


def target(alias: str, name: str, verb: str, options: dict[str, Any]) -> Any:
    """Return what to acquire for a verb."""
    if verb in ("slot", "drain"):
        return semaphore(name, using=alias, **options)
    if verb == "mutex":
        return mutex(name, using=alias, **{key: value for key, value in options.items() if key != "slots"})
    return getattr(rwlock(name, using=alias, **options), verb)()


class Sharer:
    """The child's side: one thread for each word of the parent's."""

    def __init__(self, alias: str, name: str, options: dict[str, Any]) -> None:
        self.alias, self.name, self.options = alias, name, options
        self.counters = Counters(alias)
        self.orders: dict[str, queue.SimpleQueue[list[Any]]] = {}

    def take(self, who: str, verb: str, options: dict[str, Any]) -> None:
        """Have a new thread acquire."""
        self.orders[who] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(who, verb, options), name=who, daemon=True).start()

    def _run(self, who: str, verb: str, options: dict[str, Any]) -> None:
        timeout = options.pop("timeout", 120)
        alone = verb in ("write", "drain", "mutex")
        try:
            wanted = target(self.alias, self.name, verb, self.options | options)
            permit = (wanted.exclusive if verb == "drain" else wanted.acquire)(timeout=timeout)
            self.counters.enter(alone)
        except BaseException as error:
            return say(f"{who} {type(error).__name__} {json.dumps(str(error))}")
        say(f"{who} held {json.dumps({'slots': permit.slots, 'token': permit.token, 'at': time.monotonic()})}")
        while True:
            order, *args = self.orders[who].get()
            try:
                if order == "upgrade":
                    self.counters.leave(alone)
                    try:
                        permit.upgrade(*args)
                        alone = True
                    finally:
                        self.counters.enter(alone)
                    say(f"{who} upgraded")
                elif order == "downgrade":
                    self.counters.leave(alone)
                    self.counters.readers.enter()
                    permit.downgrade()
                    alone = False
                    say(f"{who} downgraded")
                elif order == "again":
                    target(self.alias, self.name, *args, self.options).acquire(timeout=60)
                    say(f"{who} acquired")
                elif order == "uncount":  # who will be killed cannot count itself out
                    self.counters.leave(alone)
                    say(f"{who} uncounted")
                elif order == "lost":
                    say(f"{who} lost {json.dumps(permit.lost.reason.value if permit.lost else None)}")
                else:
                    self.counters.leave(alone)
                    permit.release()
                    return say(f"{who} released")
            except SemaphoreError as error:
                say(f"{who} {type(error).__name__} {json.dumps(str(error))}")
            except BaseException as error:
                say(f"{who} failed {json.dumps(repr(error))}")


def obey(alias: str, name: str, options: dict[str, Any], _counted: bool) -> None:
    """Do what the parent's lines say."""
    mine = Sharer(alias, name, options)
    say("parent ready")
    while True:
        verb, *args = json.loads(listen())
        if verb == "take":
            mine.take(*args)
        elif verb == "tell":
            mine.orders[args[0]].put(args[1:])
        elif verb == "cpu":
            say("parent answer 0")
        else:
            return


class Sharing(Queuer):
    """The parent's side of ``obey``."""

    program = "tests.programs.rwlock_clients:obey"

    def ready(self, *_first: str) -> Sharing:
        """Wait until it listens."""
        self.word("parent", "ready", timeout=60)
        return self

    def asks(self, who: str, verb: str, **options: Any) -> None:
        """Have a thread acquire, without waiting for it."""
        self.tell("take", who, verb, options)

    def has(self, who: str, verb: str, **options: Any) -> dict[str, Any]:
        """Have a thread acquire, and wait for the grant."""
        self.asks(who, verb, **options)
        return self.held(who, timeout=40)

    def orders(self, who: str, *order: Any) -> None:
        """Tell a thread, without waiting."""
        self.tell("tell", who, *order)

    def does(self, who: str, order: str, *args: Any, says: str) -> Any:
        """Tell a thread, and wait for its answer."""
        self.orders(who, order, *args)
        return self.word(who, says, timeout=40)

    def release(self, who: str = "a") -> float:
        """Have it release."""
        self.does(who, "release", says="released")
        return 0.0


def run_each(count: int, work: Callable[..., None], *, salted: bool = False) -> None:
    """Run it in so many threads, each with its number if it is ``salted``."""
    threads = [threading.Thread(target=work, args=(each,) * salted) for each in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def churn(alias: str, name: str, options: dict[str, Any], seconds: float, seed: int) -> None:
    """Read, write and upgrade at random, and count from outside what is in. Says how often, and errors."""
    import random

    chance = random.Random(seed)
    counters = Counters(alias)
    lock = rwlock(name, using=alias, **options)
    verbs = ["read", "read", "read", "write", "upgrade"]
    done = dict.fromkeys(verbs, 0)
    errors: list[str] = []

    def warm_up() -> None:
        with lock.read(timeout=60):
            pass

    run_each(3, warm_up)  # a first session may take seconds on a busy stand-in for SQL Server
    say("ready")
    listen()
    until = time.monotonic() + seconds

    def work(salt: int) -> None:
        mine = random.Random(f"{seed} {salt}")
        try:
            while time.monotonic() < until:
                which = mine.choice(verbs)
                if which == "upgrade":
                    with lock.upgradable(timeout=60) as permit:
                        counters.enter(False)
                        counters.leave(False)
                        permit.upgrade(60)
                        counters.enter(True)
                        counters.leave(True)
                        if mine.random() < 0.5:
                            permit.downgrade()
                            counters.enter(False)
                            counters.leave(False)
                else:
                    with getattr(lock, which)(timeout=60):
                        counters.enter(which == "write")
                        time.sleep(chance.random() / 200)
                        counters.leave(which == "write")
                done[which] += 1
        except BaseException as error:
            errors.append(repr(error))

    run_each(3, work, salted=True)
    say(f"done {json.dumps([done, errors])}")


def roll(alias: str, name: str, verb: str, slots: int) -> None:
    """Take and give back a mutex or a semaphore in some threads, until told to end. Says how often, and errors."""
    counters = Counters(alias)
    lock = target(alias, name, verb, {"slots": slots, "timeout": 120})
    ends = threading.Event()
    done: list[float] = []
    errors: list[str] = []

    def work() -> None:
        try:
            while not ends.is_set():
                asked = time.monotonic()
                with lock as permit:
                    counters.enter(verb == "mutex")
                    time.sleep(0.005)
                    counters.leave(verb == "mutex")
                    permit.check()
                done.append(time.monotonic() - asked)
        except BaseException as error:
            errors.append(repr(error))
            raise

    def end_when_told() -> None:
        listen()
        ends.set()

    threading.Thread(target=end_when_told, daemon=True).start()
    say("ready")
    run_each(2, work)
    say(f"done {json.dumps([len(done), max(done, default=0.0), errors])}")
