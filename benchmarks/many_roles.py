"""Roles of a measured process in which it holds much, waits much, or uses many names of this package."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import threading
import time
from typing import Any

from benchmarks.contenders.ours import Ours


@functools.cache
def _weights(count: int, skew: float) -> list[float]:
    """Return the sums of the shares of the first names."""
    return list(itertools.accumulate((number + 1) ** -skew for number in range(count)))


class ManyRoles:
    """To be mixed into the worker. The contender is this package."""

    contender: Any

    def cpu(self) -> float:
        """Return the CPU seconds that the process has used so far."""
        return time.process_time()

    def hold_many(self, count: int, lease: float | None = None, names: bool = False) -> float:
        """Take this many permits, of this name or of ``names`` names, and keep them. Returns the seconds it took."""
        from django_sqlsem import semaphore

        ours: Ours = self.contender
        options = ours.options | ({} if lease is None else {"lease": lease})
        options |= {"timeout": None, "using": ours.alias}
        many = [semaphore(f"{ours.name}_{number}", 1, **options) for number in range(count if names else 0)]
        many = many or [semaphore(ours.name, ours.slots, **options)]
        self.permits = []
        began = time.monotonic()
        for number in range(count):
            permit = many[number % len(many)].acquire()
            permit.detach()  # else the thread would not get another of the same name
            self.permits.append(permit)
        return time.monotonic() - began

    def release_many(self) -> float:
        """Give them all back. Returns the seconds it took."""
        began = time.monotonic()
        for permit in self.permits:
            permit.release()
        return time.monotonic() - began

    def take_many(self, take: int) -> dict[str, float]:
        """Take ``take`` slots at once and release them, three times; return the seconds of the last round."""
        from django_sqlsem import semaphore

        ours: Ours = self.contender
        many = semaphore(ours.name, ours.slots, take=take, timeout=None, using=ours.alias, **ours.options)
        for _ in range(3):
            began = time.monotonic()
            permit = many.acquire()
            taken = time.monotonic()
            permit.release()
        return {"taken_s": taken - began, "released_s": time.monotonic() - taken}

    def wait_in(self, what: str, count: int) -> None:
        """Start this many threads or tasks that acquire and release once; return when all have begun to wait."""
        self.waiters: list[threading.Thread] = []
        if what == "thread":
            self.waiters = [threading.Thread(target=self._wait_once, daemon=True) for _ in range(count)]
        else:
            self.waiters = [threading.Thread(target=asyncio.run, args=(self._wait_in_tasks(count),), daemon=True)]
        for waiter in self.waiters:
            waiter.start()
        deadline = time.monotonic() + 60
        while self.contender.semaphore.status().waiting < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all of {count} have begun to wait after 60 s")
            time.sleep(0.1)

    def _wait_once(self) -> None:
        self.contender.semaphore.acquire().release()

    async def _wait_in_tasks(self, count: int) -> None:
        async def wait_once() -> None:
            permit = await self.contender.semaphore.aacquire()
            await permit.arelease()

        await asyncio.gather(*(wait_once() for _ in range(count)))

    def served(self) -> float:
        """Wait until all have been served; return when that was."""
        for waiter in self.waiters:
            waiter.join(60)
            if waiter.is_alive():
                raise TimeoutError("a waiter was not served within 60 s")
        return time.monotonic()

    def spread(
        self,
        prefix: str,
        count: int,
        start: float,
        seconds: float,
        seed: str,
        threads: int = 1,
        hold: float = 0.0,
        skew: float = 0.0,
    ) -> dict[str, Any]:
        """Use ``count`` names at random, the n-th as often as 1/n to the power of ``skew``, in this many threads.

        ``start`` 0 is now.
        """
        names, weights = range(count), _weights(count, skew)
        events: list[tuple[float, float, float]] = []
        errors: list[Exception] = []

        def work(number: int) -> None:
            rng = random.Random(f"{seed}.{number}")  # noqa: S311
            try:
                while (asked := time.monotonic()) < start + seconds:
                    chosen = rng.choices(names, cum_weights=weights)[0]
                    events.append(self._use(f"{prefix}{chosen}", asked, hold))
            except Exception as error:  # noqa: BLE001 - raised again below
                errors.append(error)

        start = start or time.monotonic()
        time.sleep(max(0.0, start - time.monotonic()))
        cpu = time.process_time()
        team = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(threads)]
        for each in team:
            each.start()
        for each in team:
            each.join()
        if errors:
            raise errors[0]
        return {"events": events, "cpu": time.process_time() - cpu}

    def _use(self, name: str, asked: float, hold: float) -> tuple[float, float, float]:
        from django_sqlsem import semaphore

        ours: Ours = self.contender
        permit = semaphore(name, ours.slots, timeout=None, using=ours.alias, **ours.options).acquire()
        granted = time.monotonic()
        if hold:
            time.sleep(hold)
        released = time.monotonic()
        permit.release()
        return asked, granted, released

    def pairs_of_names(self, seconds: float, prefix: str, count: int) -> dict[str, Any]:
        """Acquire and release one of ``count`` names after the other, at random, for a while."""
        from django_sqlsem import semaphore

        ours: Ours = self.contender
        rng = random.Random(1)  # noqa: S311
        durations: list[float] = []
        end = time.perf_counter() + seconds
        while not durations or time.perf_counter() < end:
            name = f"{prefix}{rng.randrange(count)}"
            one = semaphore(name, ours.slots, timeout=None, using=ours.alias, **ours.options)
            began = time.perf_counter()
            one.acquire().release()
            durations.append(time.perf_counter() - began)
        return {"durations": durations}
