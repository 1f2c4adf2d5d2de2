"""How ``manage.py locks`` shows the values of ``refresh_every()``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from django_sqlsem import plain, queries
from django_sqlsem.durations import duration
from django_sqlsem.management import output
from django_sqlsem.plain import as_plain
from django_sqlsem.snapshots import SemaphoreSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from django_sqlsem.snapshots import RefreshSnapshot

HEADERS = ("REFRESHED VALUE", "BUILT", "BY", "WORK", "TOOK", "EVERY", "DUE")


def table(refreshes: Iterable[RefreshSnapshot]) -> list[str]:
    """Return a table of when each value was built last, by whom, how long that took, and when it is due."""
    body = [
        (
            each.name,
            "never" if each.age is None else f"{duration(each.age)} ago",
            f"{each.host} pid {each.pid} {each.thread}".strip() if each.age is not None else "",
            each.label,
            "" if each.took is None else duration(each.took),
            duration(each.period),
            due(each),
        )
        for each in refreshes
    ]
    if not body:
        return []
    return ["", *output.table([tuple(output.clean(cell) or "-" for cell in row) for row in body], HEADERS, fit=False)]


def due(refresh: RefreshSnapshot) -> str:
    """Return when the next caller rebuilds it."""
    when = f"in {duration(refresh.due_in)}" if refresh.due_in else "now"
    return when if refresh.failed is None else f"{when}, failed {duration(refresh.failed)} ago"


def as_json(
    snapshots: Sequence[SemaphoreSnapshot],
    refreshes: Iterable[RefreshSnapshot],
    *,
    using: str | None,
    whole: bool,
    only: bool = False,
    indent: int | None = 2,
) -> str:
    """Return the semaphores as JSON with what they were like in the last hour, those of values with ``refresh``.

    ``whole``: also the values of which nothing is known as a semaphore, since that was purged. ``only``: the one
    semaphore itself, not a list.
    """
    values = {each.name: each for each in refreshes}
    known = {snapshot.name for snapshot in snapshots}
    purged = [SemaphoreSnapshot(name, "refresh", 1, 1, None, False) for name in values if name not in known]
    shown = sorted([*snapshots, *purged], key=lambda snapshot: snapshot.name) if whole else snapshots
    lately, deadlocked = queries.lately(shown, using=using), queries.deadlocked(using=using)
    found = [
        as_plain(snapshot, lately[snapshot.name], deadlocked=snapshot.name in deadlocked)
        | ({"refresh": dataclasses.asdict(values[snapshot.name])} if snapshot.name in values else {})
        for snapshot in shown
    ]
    return plain.as_json(found[0] if only else found, indent=indent)
