"""Workers of claims, each in a process of its own: what ``Child`` runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any, Final

from django.db import connections

from django_sqlsem import PermitLostError
from django_sqlsem.claims import claim
from tests.support import databases
from tests.support.children import listen, say
from tests.support.processes import Child
from tests.testapp.models import Inventory

#: What a busy machine may need, in seconds.
PATIENT: Final = 90.0


def rows(alias: str) -> Any:
    """Return all inventories of an alias, in order."""
    return Inventory.objects.using(alias).order_by("pk")


def count_up(connection: Any, pk: int) -> None:
    """Count on a plain connection, without the library, that a row is worked on."""
    connection.cursor().execute(f"UPDATE testapp_inventory SET worked = worked + 1 WHERE id = {int(pk)}")


def work() -> None:
    """Do what the parent says, one line of JSON after the other; say ``idle`` in between."""
    while True:
        say("idle")
        task, *arguments = json.loads(listen())
        try:
            TASKS[task](*arguments)
        finally:
            connections.close_all()


def calculate(alias: str) -> None:
    """The article's scenario: calculate the inventory, if nobody else does."""
    connections[alias].ensure_connection()
    say("ready")
    listen()
    with contextlib.closing(databases.raw_connection(alias)) as outside, claim(rows(alias), using=alias) as claimed:
        for row in claimed:
            count_up(outside, row.pk)
    say("calculated" if claimed else "left")


def drain(alias: str, n: int) -> None:
    """Work until there is nothing left."""
    connections[alias].ensure_connection()
    say("ready")
    listen()
    with contextlib.closing(databases.raw_connection(alias)) as outside:
        while True:
            with claim(rows(alias), n=n, using=alias) as claimed:
                for row in claimed:
                    count_up(outside, row.pk)
            if not claimed:
                break
    say("drained")


def hold(alias: str, options: dict[str, Any]) -> None:
    """Claim, say which rows, and leave the block as the parent says: ``end`` or ``fail``. Say what came of it."""
    try:
        with claim(rows(alias), using=alias, **options) as claimed:
            say(f"claimed {' '.join(str(row.pk) for row in claimed)}")
            if listen() == "fail":
                raise RuntimeError("as told")
    except RuntimeError:
        say("failed")
    except PermitLostError:
        say("lost")
    else:
        say("ended")


TASKS: Final[dict[str, Callable[..., None]]] = {"calculate": calculate, "drain": drain, "hold": hold}


class Workers:
    """Processes that ``work()``: started when they are needed first, and used by one test after the other."""

    def __init__(self) -> None:
        self._idle: list[Child] = []
        self._busy: list[Child] = []

    def tell(self, *tasks: list[Any]) -> list[Child]:
        """Give each task to a worker of its own. Returns these."""
        missing = [Child("tests.programs.claim_workers:work") for _nth in tasks[len(self._idle) :]]
        self._busy += missing
        for child in missing:
            child.expect("idle", timeout=PATIENT)
        self._busy += self._idle[: len(tasks) - len(missing)]
        del self._idle[: len(tasks) - len(missing)]
        told = self._busy[-len(tasks) :]
        for child, task in zip(told, tasks, strict=True):
            child.send(json.dumps(task))
        return told

    def together(self, *tasks: list[Any]) -> list[Child]:
        """Give each task to a worker of its own, and let them begin together."""
        told = self.tell(*tasks)
        for child in told:
            child.expect("ready", timeout=PATIENT)
        for child in told:
            child.send("go")
        return told

    def settle(self) -> None:
        """End those that are not done with their tasks; the others serve the next test."""
        while self._busy:
            child = self._busy.pop()
            if child.process.poll() is None and child.lines[-1:] == ["idle"]:
                self._idle.append(child)
            else:
                child.close()

    def close(self) -> None:
        """End all of them."""
        for child in (*self._idle, *self._busy):
            child.close()
