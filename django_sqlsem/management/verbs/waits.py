"""``manage.py locks waits``: who waits for whom, and the deadlocks."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem import queries, serialize
from django_sqlsem.core.durations import duration
from django_sqlsem.core.modes import UPDATE, UPGRADE, WHOLE
from django_sqlsem.management import output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_sqlsem.snapshots import DeadlockSnapshot, WaitSnapshot


HEADERS: Final = ("WAITS FOR", "AS", "SINCE", "PROCESS", "WORK", "USER", "HOLDS", "HELD BY")
#: What JSON tells of a holder.
HOLDER: Final = (
    "name", "slot", "slots", "mode", "token", "host", "pid", "thread", "label", "user", "acquired_at", "age",
)  # fmt: skip
_AS: Final = {WHOLE: "all of it", UPDATE: "upgradable", UPGRADE: "upgrade"}


class WaitsVerb:
    """The verb ``waits`` of the command."""

    _print: Any
    style: Any

    def handle_waits(self, *, format: str, database: str | None, **_: Any) -> None:  # noqa: A002
        """Print the waits and the deadlocks; end with 1 if there is one."""
        found, deadlocks = queries.waits(using=database), queries.deadlocks(using=database)
        if format == "json":
            self._print(serialize.as_json(as_dict(found, deadlocks)))
        else:
            for line in table(found):
                self._print(line)
            if not found:
                self._print("Nobody waits while holding something else.")
            for deadlock in deadlocks:
                self._print(self.style.ERROR(output.clean(f"Deadlock: {deadlock}.")))
        if deadlocks:
            sys.exit(1)


def table(waits: Sequence[WaitSnapshot]) -> list[str]:
    """Return a table of who waits for what since when, and of what they hold meanwhile."""
    body = [
        (
            each.name,
            _AS.get(each.mode) or (f"{each.take} slots" if each.take != 1 else "slot"),
            f"{duration(each.age)} ago",
            f"{each.host} pid {each.pid} {each.thread}".strip(),
            each.label,
            each.user,
            each.holds_text,
            each.held_by_text,
        )
        for each in waits
    ]
    if not body:
        return []
    return output.table([tuple(output.clean(cell) or "-" for cell in row) for row in body], HEADERS, fit=False)


def as_dict(waits: Sequence[WaitSnapshot], deadlocks: Sequence[DeadlockSnapshot]) -> dict[str, Any]:
    """Return both as plain data: the deadlocks with their sentences."""
    return {
        "waits": [_wait(each) for each in waits],
        "deadlocks": [
            {"text": str(each), "names": each.names, "waits": [_wait(wait) for wait in each.waits]}
            for each in deadlocks
        ],
    }


def _wait(wait: WaitSnapshot) -> dict[str, Any]:
    values = dataclasses.asdict(wait)
    for side in ("holds", "held_by"):
        values[side] = [{field: getattr(holder, field) for field in HOLDER} for holder in getattr(wait, side)]
    return values
