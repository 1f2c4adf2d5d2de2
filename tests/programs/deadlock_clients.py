"""A process whose worker holds one lock and, when told, waits for another one."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from typing import Any

from django_sqlsem import (
    AcquireTimeoutError,
    DeadlockError,
    mutex,
    semaphore,
)
from django_sqlsem.locks import rlock, rwlock
from tests.support.children import listen, say
from tests.support.processes import Child

#: How a line of its stderr begins that it has logged.
TOLD = "told "


def lock(alias: str, kind: str, name: str, *args: Any) -> Any:
    """Return a lock of any kind."""
    if kind in ("read", "write", "upgradable"):
        return getattr(rwlock(name, using=alias), kind)()
    makers: dict[str, Any] = {"mutex": mutex, "semaphore": semaphore, "rlock": rlock}
    return makers[kind](name, *args, using=alias)


class Worker:
    """Holds ``has``, says so, and after ``go`` waits for ``wants``, if anything; both are what ``lock()`` takes."""

    def __init__(self, alias: str, has: list[Any], wants: list[Any] | None, timeout: float | None) -> None:
        self.alias, self.has, self.wants, self.timeout = alias, has, wants, timeout
        self.going, self.leaving = threading.Event(), threading.Event()

    def acquire(self, permit: Any) -> Any:
        """Wait for what it wants."""
        kind, *rest = self.wants or []
        if kind == "upgrade":
            return permit.upgrade(self.timeout)
        if kind == "drain":
            return lock(self.alias, "semaphore", *rest).exclusive(self.timeout)
        return lock(self.alias, kind, *rest).acquire(self.timeout)

    def run(self) -> None:
        """Run in a thread."""
        with lock(self.alias, *self.has).acquire(20) as permit:
            say("held")
            if self.wants is not None:
                self.going.wait()
                try:
                    with self.acquire(permit):
                        say("got")
                except DeadlockError as error:
                    say(f"deadlock {error}")
                except AcquireTimeoutError:
                    say("timeout")
            self.leaving.wait()
        say("left")

    async def arun(self) -> None:
        """Run as a task of a loop."""
        async with await lock(self.alias, *self.has).aacquire(20):
            say("held")
            await asyncio.to_thread(self.going.wait)
            kind, *rest = self.wants or []
            try:
                async with await lock(self.alias, kind, *rest).aacquire(self.timeout):
                    say("got")
            except DeadlockError as error:
                say(f"deadlock {error}")
            await asyncio.to_thread(self.leaving.wait)
        say("left")


def serve(alias: str, has: list[Any], wants: list[Any] | None, timeout: float | None, asynchronous: bool) -> None:
    """What the child runs."""

    class Tell(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told = {"level": record.levelname, "text": record.getMessage(), "at": time.monotonic()}
            os.write(2, f"{TOLD}{json.dumps(told)}\n".encode())

    logging.getLogger("django_sqlsem").addHandler(Tell())
    worker = Worker(alias, has, wants, timeout)
    run = (lambda: asyncio.run(worker.arun())) if asynchronous else worker.run
    thread = threading.Thread(target=run, name="worker")
    thread.start()
    while (word := listen()) != "end":
        if word == "go":
            worker.going.set()
        elif word == "leave":
            worker.leaving.set()
    thread.join()


class Waiter(Child):
    """The parent's side. It leaves what it holds as soon as its wait has ended, unless it ``stays``."""

    def __init__(
        self,
        alias: str,
        has: list[Any],
        wants: list[Any] | None,
        *,
        timeout: float | None = 60,
        stays: bool = False,
        asynchronous: bool = False,
        env: dict[str, str] | None = None,
    ) -> None:
        super().__init__("tests.programs.deadlock_clients:serve", alias, has, wants, timeout, asynchronous, env=env)
        if not stays:
            self.send("leave")

    def go(self) -> None:
        """Have it wait."""
        self.send("go")

    def told(self, level: str = "ERROR") -> list[dict[str, Any]]:
        """Return what it has logged so far."""
        told = [json.loads(line.removeprefix(TOLD)) for line in self.stderr.splitlines() if line.startswith(TOLD)]
        return [each for each in told if each["level"] == level]

    def end(self) -> None:
        """Have it end in good order."""
        self.send("end")
        self.finish()
