"""What ``manage.py locks`` prints: sentences and tables for people, JSON and CSV for programs."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import shutil
import unicodedata
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.durations import duration
from django_sqlsem.snapshots import SlotState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot, WaiterSnapshot

HEADERS: Final = ("NAME", "SLOT", "STATE", "HOLDER", "WORK", "USER", "AGE", "LEASE LEFT")
#: The columns that give way when the terminal is narrow, and the width that they keep.
SHRINKING: Final = {"WORK": 12, "NAME": 12, "HOLDER": 16}
CSV_FIELDS: Final = (
    "name", "slot", "slots", "state", "host", "pid", "thread", "work", "user", "since", "age_seconds",
    "lease_left_seconds", "token", "waiting",
)  # fmt: skip


def clean(text: str) -> str:
    """Return ``text`` without anything that could move a terminal's cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def count(number: int, one: str, many: str = "") -> str:
    """Return ``3 slots`` or ``1 slot``."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def who(someone: HolderSnapshot | WaiterSnapshot) -> str:
    """Return the program that holds or waits."""
    return clean(f"{someone.host} pid {someone.pid} {someone.thread}".strip())


def lease(holder: HolderSnapshot) -> str:
    """Return how much of the lease is left, or how long ago it ran out."""
    if holder.expired:
        return f"ran out {duration(-holder.lease_left)} ago"
    return duration(holder.lease_left)


def sentence(holder: HolderSnapshot) -> str:
    """Return one line about one holder."""
    work = f", {clean(holder.label)}" if holder.label else ""
    user = f", user {clean(holder.user)}" if holder.user else ""
    left = f"lease {lease(holder)}" if holder.expired else f"lease left {lease(holder)}"
    return (
        f"{clean(holder.name)} slot {holder.slot} ({holder.state}): {who(holder)}{work}{user},"
        f" taken {duration(holder.age)} ago, {left}"
    )


def summary(snapshot: SemaphoreSnapshot) -> str:
    """Return one line about one semaphore."""
    parts = [f"{snapshot.held} of {count(snapshot.slots, 'slot')} held"]
    if snapshot.stale:
        parts.append(f"{snapshot.stale} stale")
    parts.append(f"{snapshot.waiting} waiting")
    if snapshot.paused:
        parts.append("paused")
    if snapshot.operator_slots is not None:
        parts.append(f"set by an operator (the code says {snapshot.declared_slots})")
    if snapshot.other_declared_slots is not None:
        parts.append(f"other processes declare {count(snapshot.other_declared_slots, 'slot')}")
    return f"{clean(snapshot.name)}: {', '.join(parts)}"


def only_stale(snapshot: SemaphoreSnapshot) -> SemaphoreSnapshot:
    """Return the semaphore with only those holders that seem gone, and without its waiters."""
    stale = tuple(holder for holder in snapshot.holders if holder.state is SlotState.STALE)
    return dataclasses.replace(snapshot, holders=stale, waiters=())


def last_granted(snapshot: SemaphoreSnapshot) -> str:
    """Return how long ago a slot was granted."""
    return "never granted" if snapshot.idle is None else f"last granted {duration(snapshot.idle)} ago"


def rows(snapshots: Iterable[SemaphoreSnapshot]) -> list[tuple[str, ...]]:
    """Return the table's rows: the holders and then the waiters of each name."""
    found = [row for snapshot in snapshots for row in (*_holder_rows(snapshot), *_waiter_rows(snapshot))]
    return [tuple(clean(cell) or "-" for cell in row) for row in found]


def _holder_rows(snapshot: SemaphoreSnapshot) -> list[tuple[str, ...]]:
    return [
        (
            holder.name,
            f"{holder.slot}/{snapshot.slots}",
            holder.state.value,
            who(holder),
            holder.label,
            holder.user,
            duration(holder.age),
            lease(holder),
        )
        for holder in snapshot.holders
    ]


def _waiter_rows(snapshot: SemaphoreSnapshot) -> list[tuple[str, ...]]:
    return [
        (
            waiter.name,
            "" if waiter.take == 1 else f"wants {waiter.take}",
            "waiting" if waiter.waiting == 1 else f"waiting x{waiter.waiting}",
            who(waiter),
            waiter.label,
            waiter.user,
            duration(waiter.age),
            "",
        )
        for waiter in snapshot.waiters
    ]


def table(body: Sequence[tuple[str, ...]], *, fit: bool) -> list[str]:
    """Return aligned lines; with ``fit`` they are cut to the width of the terminal."""
    lines = [HEADERS, *body]
    widths = [max(_width(line[index]) for line in lines) for index in range(len(HEADERS))]
    excess = sum(widths) + 2 * (len(widths) - 1) - shutil.get_terminal_size().columns if fit else 0
    for header, least in SHRINKING.items():
        index = HEADERS.index(header)
        give = max(0, min(excess, widths[index] - least))
        widths[index] -= give
        excess -= give
    return ["  ".join(_pad(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _width(text: str) -> int:
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _pad(text: str, width: int) -> str:
    if _width(text) > width:
        while _width(text) > width - 1:
            text = text[:-1]
        text += "…"
    return text + " " * (width - _width(text))


def as_dict(snapshot: SemaphoreSnapshot) -> dict[str, Any]:
    """Return a semaphore as plain data for JSON, with the counts that are computed."""
    plain = dataclasses.asdict(snapshot)
    return plain | {key: getattr(snapshot, key) for key in ("held", "free", "stale", "waiting")}


def as_json(data: object, *, indent: int | None = 2) -> str:
    """Return JSON with ISO 8601 instants."""
    return json.dumps(data, indent=indent, ensure_ascii=False, default=lambda value: value.isoformat())


def as_csv(snapshots: Iterable[SemaphoreSnapshot], *, header: bool = True) -> str:
    """Return one line per holder and per waiting process, with a header."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    if header:
        writer.writerow(CSV_FIELDS)
    for snapshot in snapshots:
        for holder in snapshot.holders:
            writer.writerow((
                holder.name, holder.slot, snapshot.slots, holder.state.value, holder.host, holder.pid, holder.thread,
                holder.label, holder.user, holder.acquired_at.isoformat(), f"{holder.age:.3f}",
                f"{holder.lease_left:.3f}", holder.token, "",
            ))  # fmt: skip
        for waiter in snapshot.waiters:
            writer.writerow((
                waiter.name, "", snapshot.slots, "waiting", waiter.host, waiter.pid, waiter.thread, waiter.label,
                waiter.user, waiter.waiting_since.isoformat(), f"{waiter.age:.3f}", "", "", waiter.waiting,
            ))  # fmt: skip
    return stream.getvalue().rstrip("\n")
