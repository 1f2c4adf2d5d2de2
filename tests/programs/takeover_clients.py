"""A process that holds, knows how long it believed so, and takes part in what befalls holders; and one that waits."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

from django_sqlsem import PermitLostError, semaphore
from django_sqlsem.backends.rows import beacons
from django_sqlsem.runtime import chores
from tests.support.children import listen, say
from tests.support.processes import Child


def _give_time(factor: int) -> None:
    """Multiply the time that a beacon may be out: on a busy machine its process needs more than a second."""
    chores.DARK *= factor  # type: ignore[misc]
    beacons._OUT_FOR_US *= factor  # type: ignore[misc]


def hold(alias: str, name: str, options: dict[str, Any]) -> None:
    """Acquire, then do what the parent's lines say."""
    _give_time(options.pop("time_to_relight", 1))
    permit = semaphore(name, using=alias, **options).acquire(timeout=30)
    watched: list[Any] = [time.monotonic(), None]  # when it was seen to be ours last, and how it was lost
    stop = threading.Event()

    def watch() -> None:
        while watched[1] is None and not stop.is_set():
            looked = time.monotonic()
            loss = permit.lost
            if loss is None:
                watched[0] = looked
            else:
                watched[1] = loss.reason.value
            time.sleep(0.002)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    say(f"held {permit.token}")
    while (line := listen()) != "end":
        if line == "watched":
            say(f"watched {json.dumps(watched)}")
        elif line == "check":
            try:
                permit.check()
                say("ours")
            except PermitLostError as error:
                say(f"lost {error.loss.reason.value if error.loss else ''}")
        elif line == "fork":
            child = os.fork()
            if child == 0:
                signal.pause()
            say(f"forked {child}")
        elif line == "release":
            stop.set()
            watcher.join()
            try:
                permit.release()
                say("released")
            except Exception as error:
                say(f"failed {error!r}")
        else:
            raise ValueError(line)


def hold_another(alias: str, name: str, options: dict[str, Any]) -> None:
    """Hold ``<name>-first``, say so, and go on with ``hold`` when a line comes."""
    with semaphore(f"{name}-first", using=alias, **options):
        say("first")
        listen()
        hold(alias, name, options)


def wait(alias: str, name: str, options: dict[str, Any]) -> None:
    """Whenever a line comes, acquire and say when and which; release at the next."""
    _give_time(options.pop("time_to_relight", 1))
    if options.pop("connected", False):
        semaphore(f"{name}-connects", using=alias).acquire().detach()
    shared = semaphore(name, using=alias, **options)
    say("ready")
    while listen() != "end":
        permit = shared.acquire(timeout=120)
        say(f"granted {json.dumps([time.monotonic(), permit.slot, permit.token])}")
        assert listen() == "release"
        permit.check()
        permit.release()
        say("released")


class Holder(Child):
    """The parent's side of ``hold``. All instants are of ``time.monotonic()``, which is one clock for the host."""

    def __init__(self, alias: str, name: str, *, env: dict[str, str] | None = None, **options: Any) -> None:
        super().__init__("tests.programs.takeover_clients:hold", alias, name, options, env=env)
        self.token = 0

    def holds(self) -> Holder:
        """Wait until it does."""
        self.token = int(self.expect("held", timeout=60))
        return self

    def watched(self) -> tuple[float, str | None]:
        """Return when it last saw that its permit was its own, and how it was lost."""
        self.send("watched")
        until, reason = json.loads(self.expect("watched"))
        return until, reason

    def check(self) -> str:
        """Have it check; return ``ours``, or ``lost`` and why."""
        self.send("check")
        return self.expect()

    def fork(self) -> int:
        """Have it fork a child that lives on; return its process number."""
        self.send("fork")
        return int(self.expect("forked"))

    def release(self) -> str:
        """Have it release; return what came of it."""
        self.send("release")
        return self.expect(timeout=40)

    def end(self) -> None:
        """Have it end."""
        self.send("end")
        self.finish(40)


class Waiter(Child):
    """The parent's side of ``wait``."""

    def __init__(self, alias: str, name: str, *, env: dict[str, str] | None = None, **options: Any) -> None:
        super().__init__("tests.programs.takeover_clients:wait", alias, name, options, env=env)

    def ready(self) -> Waiter:
        """Wait until it listens."""
        self.expect("ready", timeout=60)
        return self

    def ask(self) -> None:
        """Have it acquire, without waiting for it."""
        self.send("acquire")

    def granted(self, timeout: float) -> tuple[float, int, int]:
        """Wait for its grant; return when it had it, the slot and the token."""
        at, slot, token = json.loads(self.expect("granted", timeout=timeout))
        return at, slot, token

    def release(self) -> None:
        """Have it see that the permit is its own, and release it."""
        self.send("release")
        self.expect("released")

    def end(self) -> None:
        """Have it end."""
        self.send("end")
        self.finish()
