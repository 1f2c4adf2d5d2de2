"""Shows who waits for what while holding what, and the deadlocks; ends with 1 if there is one."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, Final

from django.core.management.base import CommandParser
from django.utils.translation import gettext, pgettext, pgettext_lazy

from django_sqlsem import queries, serialize
from django_sqlsem.core.modes import UPDATE, UPGRADE, WHOLE
from django_sqlsem.management import arguments, output
from django_sqlsem.management.console import Console
from django_sqlsem.snapshots import WaitSnapshot

#: What JSON tells of a holder.
HOLDER_FIELDS: Final = (
    "name", "slot", "slots", "mode", "token", "host", "pid", "thread", "label", "user", "acquired_at", "age",
)  # fmt: skip
_AS: Final = {
    WHOLE: pgettext_lazy("waits for", "all of it"),
    UPDATE: pgettext_lazy("waits for", "upgradable"),
    UPGRADE: pgettext_lazy("waits for", "upgrade"),
}


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
        console.lines(output.table(body, _headers(), fit=False) if body else ())
        if not found:
            console.say(gettext("Nobody waits while holding something else."))
        for deadlock in deadlocks:
            sentence = gettext("Deadlock: %(waits)s.") % {"waits": deadlock}
            console.say(console.style.ERROR(output.clean(sentence)))
    if deadlocks:
        sys.exit(1)


def _headers() -> tuple[str, ...]:
    return (
        pgettext("column", "WAITS FOR"),
        pgettext("column", "AS"),
        pgettext("column", "SINCE"),
        pgettext("column", "PROCESS"),
        pgettext("column", "WORK"),
        pgettext("column", "USER"),
        pgettext("column", "HOLDS"),
        pgettext("column", "HELD BY"),
    )


def _row(wait: WaitSnapshot) -> tuple[str, ...]:
    return (
        wait.name,
        _what(wait),
        output.ago(wait.age),
        output.process(wait.host, wait.pid, wait.thread),
        wait.label,
        wait.user,
        wait.holds_text,
        wait.held_by_text,
    )


def _what(wait: WaitSnapshot) -> str:
    if wait.mode in _AS:
        return str(_AS[wait.mode])
    return pgettext("waits for", "slot") if wait.take == 1 else output.count_slots(wait.take)


def _plain(waits: Sequence[WaitSnapshot]) -> list[dict[str, Any]]:
    return [
        dataclasses.asdict(wait)
        | {
            side: [{field: getattr(holder, field) for field in HOLDER_FIELDS} for holder in getattr(wait, side)]
            for side in ("holds", "held_by")
        }
        for wait in waits
    ]
