"""A process that takes, checks and gives back as it is told, and reports what the database did to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from django_sqlsem import (
    AcquireTimeoutError,
    BackendError,
    Permit,
    PermitLostError,
    semaphore,
)
from tests.support.children import listen, say
from tests.support.databases import OutsideCounter
from tests.support.processes import Child


def obey(alias: str, name: str, options: dict[str, Any]) -> None:
    """Do what the parent's lines say, until one says ``end``; answer each with the outcome and how long it took."""
    lock = semaphore(name, using=alias, **options)
    permits: list[Permit] = []
    blocks = contextlib.ExitStack()

    async def aacquire(timeout: float) -> None:
        permit = await lock.aacquire(timeout=timeout)
        permit.detach()
        permits.append(permit)

    def attempt(verb: str, argument: str) -> str:
        if verb == "acquire":
            permits.append(lock.acquire(timeout=float(argument)))
            return "held"
        if verb == "aacquire":
            asyncio.run(aacquire(float(argument)))
            return "held"
        if verb == "release":
            permits.pop().release()
            return "released"
        if verb == "enter":
            permits.append(blocks.enter_context(lock))
            return "held"
        if verb == "leave":
            permits.pop()
            blocks.close()
            return "left"
        if verb == "check":
            permits[-1].check()
            return "ours"
        raise ValueError(verb)

    say("ready")
    while (line := listen()) != "end":
        verb, _, argument = line.partition(" ")
        say(json.dumps(_outcome(lambda verb=verb, argument=argument: attempt(verb, argument))))


def _outcome(attempt: Callable[[], str]) -> list[Any]:
    started = time.monotonic()
    cause = ""
    try:
        outcome = attempt()
    except BackendError as error:
        outcome = "failed"
        cause = f"{type(error.__cause__).__module__}.{type(error.__cause__).__name__}: {error.__cause__}"
    except PermitLostError as error:
        outcome = "lost"
        cause = error.loss.reason.value if error.loss else "released"
    except AcquireTimeoutError as error:
        outcome, cause = "busy", str(error)
    return [outcome, time.monotonic() - started, cause]


class Sufferer(Child):
    """The parent's side of ``obey``."""

    def __init__(self, alias: str, name: str, *, env: dict[str, str] | None = None, **options: Any) -> None:
        super().__init__("tests.programs.outage_clients:obey", alias, name, options, env=env)
        self.expect("ready", timeout=60)

    def answer(self, expected: str, within: float = 25.0) -> str:
        """Wait for the outcome of the last line sent, which must be ``expected``; return its cause."""
        outcome, took, cause = json.loads(self.expect(timeout=60))
        assert outcome == expected, (outcome, took, cause, self.stderr)
        assert took < within, (outcome, took, cause)
        return str(cause)

    def does_either(self, line: str, *expected: str, within: float = 25.0) -> str:
        """Send a line, and wait for one of these outcomes, which is returned."""
        self.send(line)
        outcome, took, cause = json.loads(self.expect(timeout=60))
        assert outcome in expected, (outcome, took, cause, self.stderr)
        assert took < within, (outcome, took, cause)
        return str(outcome)

    def does(self, line: str, expected: str, within: float = 25.0) -> str:
        """Send a line, and wait for its outcome."""
        self.send(line)
        return self.answer(expected, within)


def fight(alias: str, name: str, slots: int, outside: str, counted: str) -> None:
    """Take and give back, again and again, and count oneself in and out elsewhere, until told to end."""
    lock = semaphore(name, slots=slots, timeout=60, lease=3, using=alias)
    counter = OutsideCounter(outside, counted)
    ended = threading.Event()
    threading.Thread(target=lambda: (listen(), ended.set()), daemon=True).start()
    grants = 0
    say("ready")
    while not ended.is_set():
        with lock as permit:
            if permit.lost is None:  # else it may be somebody else's by now
                counter.enter()
                time.sleep(0.005)
                counter.leave()
                grants += 1
    counter.close()
    say(f"ended {grants}")


class Fighter(Child):
    """The parent's side of ``fight``."""

    def __init__(self, alias: str, name: str, *arguments: Any, env: dict[str, str]) -> None:
        super().__init__("tests.programs.outage_clients:fight", alias, name, *arguments, env=env)
        self.expect("ready", timeout=60)

    def ends(self) -> None:
        """Have it end; each of its acquires must have been granted."""
        self.send("end")
        assert int(self.expect("ended", timeout=90)) > 0
