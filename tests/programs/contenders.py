"""Child processes that fight for slots, and the figures of what they did."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from django_sqlsem import AcquireTimeoutError, semaphore
from tests.support.children import listen, say
from tests.support.databases import OutsideCounter
from tests.support.processes import Child

#: How long one stays inside, in seconds.
WORK = 0.005


class SharedCounter(OutsideCounter):
    """One connection for all threads of a process: a server has only so many."""

    def __init__(self, alias: str) -> None:
        self._lock = threading.Lock()
        self._shared: Any = None
        super().__init__(alias)

    def _connection(self) -> Any:
        if self._shared is None:
            self._shared = super()._connection()
        return self._shared

    def _execute(self, sql: str) -> int:
        with self._lock:
            return super()._execute(sql)


@dataclass
class Tally:
    """What one process did."""

    grants: int = 0
    refused: int = 0
    longest_wait: float = 0.0
    waits: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    tokens: list[tuple[int, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def granted(self, started: float, permit: Any) -> None:
        """Count one grant that was asked for at ``started``."""
        waited = time.monotonic() - started
        with self.lock:
            self.grants += 1
            self.waits.append(waited)
            self.tokens += zip(permit.slots, permit.tokens, strict=True)
            self.longest_wait = max(self.longest_wait, waited)

    @contextlib.contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Keep what is raised, for the parent to see."""
        try:
            yield
        except BaseException as error:
            with self.lock:
                self.errors.append(f"{type(error).__name__}: {error}")

    def tell(self) -> None:
        """Say it all in one line."""
        keys = ("grants", "refused", "longest_wait", "waits", "errors", "tokens")
        say("tally " + json.dumps({key: getattr(self, key) for key in keys}))


def contend(alias: str, name: str, slots: int, threads: int, seconds: float) -> None:
    """Take and give back one slot in each of some threads, as fast as it goes; then tell what was done."""
    shared = semaphore(name, slots=slots, timeout=None, using=alias)
    tally = Tally()
    with SharedCounter(alias) as counter:
        barrier = threading.Barrier(threads + 1)

        def run() -> None:
            with tally.noting_errors():
                barrier.wait(60)
                deadline = time.monotonic() + seconds
                while time.monotonic() < deadline:
                    started = time.monotonic()
                    with shared as permit:
                        with counter.inside():
                            tally.granted(started, permit)
                            time.sleep(WORK)
                        permit.check()

        _together(barrier, [run] * threads)
    tally.tell()


def contend_mixed(alias: str, name: str, slots: int, threads: int, tasks: int, seconds: float) -> None:
    """Threads and async tasks with every timeout from 0 to 2 s, some of which take two slots."""
    one = semaphore(name, slots=slots, using=alias)
    two = semaphore(name, slots=slots, take=2, using=alias)
    tally = Tally()
    with SharedCounter(alias) as counter:
        barrier = threading.Barrier(threads + 2)

        def work(permit: Any, started: float) -> None:
            with contextlib.ExitStack() as stack:
                for _ in permit.slots:
                    stack.enter_context(counter.inside())
                tally.granted(started, permit)
                time.sleep(WORK)
            permit.check()

        def run() -> None:
            with tally.noting_errors():
                barrier.wait(60)
                deadline = time.monotonic() + seconds
                while time.monotonic() < deadline:
                    started = time.monotonic()
                    try:
                        permit = random.choice((one, one, two)).acquire(timeout=random.choice((0, 0.1, 0.5, 2)))
                    except AcquireTimeoutError:
                        tally.refused += 1
                        continue
                    with permit:
                        work(permit, started)

        async def task(deadline: float) -> None:
            while time.monotonic() < deadline:
                started = time.monotonic()
                try:
                    permit = await random.choice((one, one, two)).aacquire(timeout=random.choice((0, 0.1, 0.5, 2)))
                except AcquireTimeoutError:
                    tally.refused += 1
                    continue
                async with permit:
                    await asyncio.to_thread(work, permit, started)

        async def main() -> None:
            deadline = time.monotonic() + seconds
            await asyncio.gather(*(task(deadline) for _ in range(tasks)))

        def run_tasks() -> None:
            with tally.noting_errors():
                barrier.wait(60)
                asyncio.run(main())

        _together(barrier, [run] * threads + [run_tasks])
    tally.tell()


def _together(barrier: threading.Barrier, functions: list[Any]) -> None:
    running = [threading.Thread(target=function) for function in functions]
    for thread in running:
        thread.start()
    say("ready")
    assert listen() == "go"
    barrier.wait(60)
    for thread in running:
        thread.join()


@dataclass
class Figures:
    """What all processes did together."""

    tallies: list[dict[str, Any]]
    seconds: float

    @property
    def grants(self) -> int:
        """How often a permit was granted, in all."""
        return sum(tally["grants"] for tally in self.tallies)

    @property
    def errors(self) -> list[str]:
        """Every exception of every thread."""
        return [error for tally in self.tallies for error in tally["errors"]]

    @property
    def tokens(self) -> dict[int, list[int]]:
        """The tokens of each slot, in no order."""
        found: dict[int, list[int]] = {}
        for tally in self.tallies:
            for slot, token in tally["tokens"]:
                found.setdefault(slot, []).append(token)
        return found

    @property
    def fairness(self) -> float:
        """Jain's index of the grants per process: 1 if all got as many, 1/n if one got all."""
        each = [tally["grants"] for tally in self.tallies]
        return sum(each) ** 2 / (len(each) * sum(count * count for count in each))

    def __str__(self) -> str:
        waits = sorted(wait for tally in self.tallies for wait in tally["waits"])
        each = "/".join(str(tally["grants"]) for tally in self.tallies)
        refused = sum(tally["refused"] for tally in self.tallies)
        return (
            f"{self.grants / self.seconds:.0f} grants/s ({self.grants} in {self.seconds:.1f} s, {refused} refused),"
            f" per process {each}, Jain {self.fairness:.4f}, wait p50 {waits[len(waits) // 2] * 1e3:.0f} ms,"
            f" p95 {waits[len(waits) * 95 // 100] * 1e3:.0f} ms, longest {waits[-1]:.2f} s"
        )


def fight(
    function: str, processes: int, seconds: float, *args: Any, environments: list[dict[str, str]] | None = None
) -> Figures:
    """Run a function of this module in some processes that start together, and collect what they did."""
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(Child(f"tests.programs.contenders:{function}", *args, seconds, env=environment))
            for environment in environments or [{}] * processes
        ]
        for child in children:
            child.expect("ready", timeout=60)
        started = time.monotonic()
        for child in children:
            child.send("go")
        tallies = [json.loads(child.expect("tally", timeout=seconds + 60)) for child in children]
        elapsed = time.monotonic() - started
        for child in children:
            child.finish()
            assert "Traceback" not in child.stderr, child.stderr
        return Figures(tallies, elapsed)
