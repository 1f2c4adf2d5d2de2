"""Shows who waits for what while holding what, and the deadlocks; ends with 1 if there is one."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, Final

from django.core.management.base import CommandParser

from django_sqlsem import queries, serialize
from django_sqlsem.core.durations import duration
from django_sqlsem.core.modes import UPDATE, UPGRADE, WHOLE
from django_sqlsem.management import arguments, output
from django_sqlsem.management.console import Console
from django_sqlsem.snapshots import WaitSnapshot

_HEADERS: Final = ("WAITS FOR", "AS", "SINCE", "PROCESS", "WORK", "USER", "HOLDS", "HELD BY")
#: What JSON tells of a holder.
HOLDER_FIELDS: Final = (
    "name", "slot", "slots", "mode", "token", "host", "pid", "thread", "label", "user", "acquired_at", "age",
)  # fmt: skip
_AS: Final = {WHOLE: "all of it", UPDATE: "upgradable", UPGRADE: "upgrade"}


def add_arguments(parser: CommandParser) -> None:
    arguments.add_format(parser, "table", "json")


def handle(console: Console, *, format: str, database: str | None, **_: Any) -> None:  # noqa: A002
    """Print the waits and the deadlocks; end with 1 if there is one."""
    found, deadlocks = queries.waits(using=database), queries.deadlocks(using=database)
    if format == "json":
        told = [{"text": str(each), "names": each.names, "waits": _plain(each.waits)} for each in deadlocks]
        console.say(serialize.as_json({"waits": _plain(found), "deadlocks": told}))
    else:
        body = output.cleaned(map(_row, found))
        console.lines(output.table(body, _HEADERS, fit=False) if body else ())
        if not found:
            console.say("Nobody waits while holding something else.")
        for deadlock in deadlocks:
            console.say(console.style.ERROR(output.clean(f"Deadlock: {deadlock}.")))
    if deadlocks:
        sys.exit(1)


def _row(wait: WaitSnapshot) -> tuple[str, ...]:
    return (
        wait.name,
        _AS.get(wait.mode) or (f"{wait.take} slots" if wait.take != 1 else "slot"),
        f"{duration(wait.age)} ago",
        f"{wait.host} pid {wait.pid} {wait.thread}".strip(),
        wait.label,
        wait.user,
        wait.holds_text,
        wait.held_by_text,
    )


def _plain(waits: Sequence[WaitSnapshot]) -> list[dict[str, Any]]:
    return [
        dataclasses.asdict(wait)
        | {
            side: [{field: getattr(holder, field) for field in HOLDER_FIELDS} for holder in getattr(wait, side)]
            for side in ("holds", "held_by")
        }
        for wait in waits
    ]
