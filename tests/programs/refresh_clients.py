"""A process that asks for a refreshed value, and whose builds wait for the parent's word."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from django.conf import settings
from django.test.utils import override_settings

from django_sqlsem.refresh import refresh_every
from tests.support.children import listen, say
from tests.support.databases import OutsideCounter
from tests.support.processes import Child
from tests.support.threads import run_in_threads

HOUR = 3600


def shared_cache(directory: str) -> dict[str, Any]:
    """Return CACHES that all processes share."""
    return {"default": {"BACKEND": "django.core.cache.backends.filebased.FileBasedCache", "LOCATION": directory}}


def field_of(alias: str) -> tuple[Any, str]:
    """Return the field of a row of which tests make a value's home."""
    from tests.testapp.models import Probe

    return Probe.objects.using(alias).filter(name="shop"), "peak"


def obey(alias: str, directory: str, home: str, options: dict[str, Any]) -> None:
    """Do what the parent's lines say, until one says ``end``. A build asks for its value."""
    override_settings(CACHES=shared_cache(directory) if directory else settings.CACHES).enable()
    counter = OutsideCounter(alias)

    def build() -> int:
        with counter.inside():
            say("building")
            verb, _, argument = listen().partition(" ")
        if verb == "raise":
            raise RuntimeError(argument)
        return int(argument)

    where = {"field": field_of(alias)} if home == "field" else {}
    best = refresh_every("best-sellers", options.pop("period", HOUR), build, using=alias, **where, **options)
    say("ready")
    while (line := listen()) != "end":
        verb, _, argument = line.partition(" ")
        try:
            if verb == "flood":
                # Half of them are threads, half are tasks.
                found = run_in_threads(int(argument), lambda _: best.get())
                found += asyncio.run(_flood(best, int(argument)))
            elif verb == "aget":
                found = asyncio.run(best.aget())
            elif verb == "invalidate":
                best.invalidate()
                found = None
            else:
                found = best.now() if verb == "now" else best.get()
        except Exception as error:
            say(f"failed {type(error).__name__}: {error}")
        else:
            say(f"got {json.dumps(found)}")


async def _flood(best: Any, count: int) -> list[int]:
    return list(await asyncio.gather(*(best.aget() for _ in range(count))))


class Refresher(Child):
    """The parent's side of ``obey``."""

    def __init__(
        self, alias: str, directory: Any, home: str = "cache", *, env: dict[str, str] | None = None, **options: Any
    ) -> None:
        target = "tests.programs.refresh_clients:obey"
        super().__init__(target, alias, str(directory), home, options, env=env)

    def ready(self) -> Refresher:
        """Wait until it listens."""
        self.expect("ready", timeout=90)
        return self

    def building(self, timeout: float = 60.0) -> None:
        """Wait until it builds."""
        self.expect("building", timeout=timeout)

    def got(self) -> Any:
        """Wait for the value that it got."""
        return json.loads(self.expect("got", timeout=60))

    def get(self, verb: str = "get") -> Any:
        """Have it ask, and return the value: nothing is to be built."""
        self.send(verb)
        return self.got()

    def begins(self, verb: str = "get") -> None:
        """Have it ask; it must build."""
        self.send(verb)
        self.building()

    def builds(self, value: int) -> Any:
        """Let it build this value, and return what it got."""
        self.send(f"finish {value}")
        return self.got()
