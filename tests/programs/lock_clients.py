"""A process that takes, checks and gives back as it is told."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from django_sqlsem import (
    AcquireTimeoutError,
    Permit,
    PermitLostError,
    semaphore,
)
from tests.support.children import listen, say
from tests.support.processes import Child


def obey(alias: str, name: str, options: dict[str, Any]) -> None:
    """Do what the parent's lines say, until one says ``end``."""
    told: list[list[str]] = []

    def on_lost(permit: Permit) -> None:
        told.append([threading.current_thread().name, permit.lost.reason.value if permit.lost else ""])
        if announce:
            say(f"on_lost {json.dumps(told[-1])}")

    def on_stop(permit: Permit) -> None:
        say(f"on_stop {json.dumps([threading.current_thread().name, permit.stop_requested_by])}")

    announce = options.pop("announce", False)
    heeds = options.pop("heeds", False)
    shared = semaphore(name, on_lost=on_lost, using=alias, **options)
    permit: Permit | None = None
    say("ready")
    while (line := listen()) != "end":
        verb, _, argument = line.partition(" ")
        if verb == "acquire":
            started = time.monotonic()
            try:
                permit = shared.acquire(timeout=float(argument) if argument else None)
                if heeds:
                    permit.on_stop_requested(on_stop)
                say(f"held {json.dumps([permit.slots, permit.tokens, permit.waited])}")
            except AcquireTimeoutError:
                say(f"busy {time.monotonic() - started}")
        elif verb == "try":
            permit = shared.try_acquire()
            say(f"held {json.dumps([permit.slots, permit.tokens, permit.waited])}" if permit else "busy 0")
        elif verb == "release":
            assert permit is not None
            permit.release()
            say("released")
        elif verb == "check":
            assert permit is not None
            try:
                permit.check()
                say("ours")
            except PermitLostError as error:
                say(f"lost {json.dumps([error.loss.reason.value if error.loss else '', str(error)])}")
        elif verb == "asked":
            assert permit is not None
            say(f"asked {json.dumps([permit.stop_requested, permit.stop_requested_by])}")
        elif verb == "told":
            say(f"told {json.dumps(told)}")
        elif verb == "status":
            status = shared.status()
            say("status " + json.dumps([[holder.age, holder.lease_left, holder.state] for holder in status.holders]))
        else:
            raise ValueError(line)


class Actor(Child):
    """The parent's side of ``obey``. Its methods send a line and wait for the answer."""

    def __init__(self, alias: str, name: str, *, env: dict[str, str] | None = None, **options: Any) -> None:
        super().__init__("tests.programs.lock_clients:obey", alias, name, options, env=env)

    def ready(self) -> Actor:
        """Wait until it listens."""
        self.expect("ready", timeout=60)
        return self

    def acquire(self, timeout: float | None = None) -> tuple[list[int], list[int]] | None:
        """Have it acquire; return the slots and tokens, or ``None`` if it was busy."""
        self.ask_for(timeout)
        return self.granted() if timeout is None else self._held_or_busy()

    def try_acquire(self) -> tuple[list[int], list[int]] | None:
        """Have it try once."""
        self.send("try")
        return self._held_or_busy()

    def ask_for(self, timeout: float | None = None) -> None:
        """Have it acquire, without waiting for the answer."""
        self.send("acquire" if timeout is None else f"acquire {timeout}")

    def granted(self, timeout: float = 60.0) -> tuple[list[int], list[int]]:
        """Wait for its grant."""
        slots, tokens, _ = json.loads(self.expect("held", timeout=timeout))
        return slots, tokens

    def release(self) -> None:
        """Have it release."""
        self.send("release")
        self.expect("released")

    def check(self) -> list[str] | None:
        """Have it check; return ``None`` if the permit is its own, else the reason and the message."""
        self.send("check")
        line = self.expect()
        if line == "ours":
            return None
        assert line.startswith("lost "), line
        found: list[str] = json.loads(line[5:])
        return found

    def ask(self, what: str) -> Any:
        """Return its answer to ``told``, ``asked`` or ``status``."""
        self.send(what)
        return json.loads(self.expect(what))

    def end(self) -> None:
        """Have it end."""
        self.send("end")
        self.finish()

    def _held_or_busy(self) -> tuple[list[int], list[int]] | None:
        line = self.expect()
        if line.startswith("busy "):
            return None
        assert line.startswith("held "), line
        slots, tokens, _ = json.loads(line[5:])
        return slots, tokens
