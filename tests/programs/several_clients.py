"""Processes that take several locks at once, as fast as it goes."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import Any

from django_sqlsem import AcquireTimeoutError, mutex, semaphore
from django_sqlsem.locks import aacquire_all, acquire_all, counter
from tests.programs.contenders import SharedCounter
from tests.support.children import listen, say
from tests.support.databases import OutsideCounter

#: How many may be inside of each.
SLOTS = {"a": 1, "b": 3, "c": 1}


class NamedCounter(SharedCounter):
    """One of several."""

    def __init__(self, alias: str, name: str) -> None:
        self._lock = threading.Lock()
        self._shared: Any = None
        OutsideCounter.__init__(self, alias, name)


def locks(alias: str) -> dict[str, Any]:
    """Three locks of different kinds; ``b`` is taken two at a time."""
    return {
        "a": mutex("a", using=alias),
        "b": semaphore("b", SLOTS["b"], take=2, using=alias),
        "c": semaphore("c", SLOTS["c"], using=alias),
    }


def collect(alias: str, rounds: int, backwards: bool) -> None:
    """Take all three, named in crossing orders, in threads and tasks; count who is inside of each."""
    found = locks(alias)
    fuel = counter("fuel", using=alias)
    errors: list[str] = []
    done = [0]
    say("ready")
    listen()
    counters = {name: NamedCounter(alias, name) for name in found}

    def names() -> list[str]:
        chosen = random.sample(sorted(found), random.choice((2, 3)))
        return sorted(chosen, reverse=backwards)

    def enter(chosen: list[str], permits: Any) -> None:
        for name, permit in zip(chosen, permits, strict=False):
            assert permit.name == name
            for _ in permit.slots:
                counters[name].enter()

    def leave(chosen: list[str], permits: Any) -> None:
        for name, permit in zip(chosen, permits, strict=False):
            for _ in permit.slots:
                counters[name].leave()

    def run() -> None:
        try:
            for _ in range(rounds):
                chosen = names()
                with acquire_all([*(found[name] for name in chosen), fuel], timeout=60) as permits:
                    enter(chosen, permits)
                    permits.check()
                    leave(chosen, permits)
                    done[0] += 1
        except BaseException as error:
            errors.append(repr(error))

    async def main() -> None:
        for number in range(rounds):
            chosen = names()
            try:
                # Some do not wait for long, and give back what they had.
                async with aacquire_all([found[name] for name in chosen], timeout=(60, 0.02)[number % 2]) as permits:
                    enter(chosen, permits)
                    permits.check()
                    leave(chosen, permits)
            except AcquireTimeoutError:
                pass

    def tasks() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=each) for each in (run, run, tasks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in counters.values():
        each.close()
    say(f"tally {json.dumps([done[0], errors])}")


def grab(alias: str, take: int, rounds: int) -> None:
    """Take so many of the four slots of ``many`` in each of two threads: some rounds, or until told to stop."""
    shared = semaphore("many", 4, take=take, timeout=120, using=alias)
    errors: list[str] = []
    done = [0]
    stop = threading.Event()
    say("ready")
    listen()
    with SharedCounter(alias) as counter:

        def run() -> None:
            try:
                for _ in range(rounds or 10**9):
                    if stop.is_set():
                        return
                    with shared as permit:
                        for _slot in permit.slots:
                            counter.enter()
                        for _slot in permit.slots:
                            counter.leave()
                    done[0] += 1
            except BaseException as error:
                errors.append(repr(error))

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        if not rounds:
            listen()
            stop.set()
        for thread in threads:
            thread.join()
    say(f"tally {json.dumps([done[0], errors])}")
