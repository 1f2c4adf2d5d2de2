"""A process that writes to outside data under a permit, in a transaction of its own, as it is told."""

from __future__ import annotations

import re
from typing import Any

from django.db import DatabaseError, connections, transaction
from django.db.models import F

from django_sqlsem import (
    BackendError,
    Permit,
    PermitLostError,
    mutex,
    semaphore,
)
from django_sqlsem.locks import fenced
from tests.support.children import listen, say
from tests.support.databases import ROOT
from tests.support.processes import Child
from tests.testapp.models import Probe


def run_page() -> dict[str, Any]:
    """Run the examples of the documentation; return what they define."""
    namespace: dict[str, Any] = {}
    text = (ROOT / "docs" / "fencing.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(block, namespace)
    return namespace


def obey(alias: str, name: str, archive: str, options: dict[str, Any]) -> None:
    """Do what the parent's lines say, until one says ``end``. The option ``row``: what it writes to, else ``name``."""
    probe = Probe.objects.using(alias).filter(name=options.pop("row", name))
    page = run_page()
    block = transaction.atomic(using=alias)
    permit: Permit | None = None
    connections[alias].ensure_connection()
    lock = mutex if options.pop("kind", "semaphore") == "mutex" else semaphore
    say("ready")
    while (line := listen()) != "end":
        verb, _, argument = line.partition(" ")
        if verb == "acquire":
            while permit is None:
                try:
                    permit = lock(name, using=alias, **options).acquire(timeout=120)
                except BackendError as error:  # SQLite's one writer may be busy for long
                    if "database is locked" not in str(error):
                        raise
            say(f"held {permit.token}")
            continue
        assert permit is not None
        if verb == "believe":  # as if it had no clock to tell it
            permit._acquisition.current_loss = lambda: None  # type: ignore[method-assign]
            say("believes")
        elif verb == "begin":
            block.__enter__()
            say("begun")
        elif verb == "fence":
            try:
                permit.fence()
                say("fenced")
            except PermitLostError as error:
                say(f"lost {error}")
        elif verb == "write":
            probe.update(inside=int(argument), entered=F("entered") + 1)
            say("written")
        elif verb == "fenced-write":
            say(f"rows {probe.filter(fenced(permit)).update(inside=int(argument), entered=F('entered') + 1)}")
        elif verb == "archive":
            try:
                page["export"](permit, page["Archive"](archive), argument)
                say("archived")
            except page["StaleTokenError"]:
                say("stale")
        elif verb == "commit":
            try:
                block.__exit__(None, None, None)
                say("committed")
            except DatabaseError as error:
                say(f"refused {error}")
        elif verb == "rollback":
            transaction.set_rollback(True, using=alias)
            block.__exit__(None, None, None)
            say("rolled-back")
        elif verb == "release":
            permit.release()
            say("released")
        elif verb == "lost":
            say(f"lost {permit.lost.reason.value if permit.lost else ''}".strip())
        else:
            raise ValueError(line)
    if permit is not None:
        permit.release()


class Fencer(Child):
    """The parent's side of ``obey``."""

    def __init__(
        self, alias: str, name: str, archive: object = "", *, env: dict[str, str] | None = None, **options: Any
    ) -> None:
        super().__init__("tests.programs.fence_clients:obey", alias, name, str(archive), options, env=env)
        self.token = 0

    def tell(self, line: str, timeout: float = 40.0) -> str:
        """Have it do something; return its answer."""
        self.send(line)
        return self.expect(timeout=timeout)

    def holds(self) -> Fencer:
        """Have it acquire, and wait until it has."""
        self.expect("ready", timeout=60)
        self.token = int(self.tell("acquire", 120).removeprefix("held "))
        return self

    def waits(self) -> Fencer:
        """Have it acquire, without waiting for that."""
        self.expect("ready", timeout=60)
        self.send("acquire")
        return self

    def granted(self) -> Fencer:
        """Wait until it has what it waits for."""
        self.token = int(self.expect("held", timeout=60))
        return self

    def end(self) -> None:
        """Have it end."""
        self.send("end")
        self.finish(40)


def written(alias: str, name: str) -> tuple[int, int]:
    """Return what was written last, and how many writes there were."""
    return tuple(Probe.objects.using(alias).values_list("inside", "entered").get(name=name))  # type: ignore[return-value]
