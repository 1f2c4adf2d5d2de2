"""What ``manage.py locks`` prints: sentences and tables for people, JSON and CSV for programs."""

from __future__ import annotations

import csv
import dataclasses
import io
import shutil
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, Final

from django_sqlsem import queries, serialize
from django_sqlsem.control import PurgePlan
from django_sqlsem.core.durations import duration
from django_sqlsem.snapshots import (
    HolderSnapshot,
    RefreshSnapshot,
    SemaphoreSnapshot,
    SlotState,
    TemplateSnapshot,
    WaiterSnapshot,
)

HEADERS: Final = ("NAME", "SLOT", "STATE", "HOLDER", "WORK", "USER", "AGE", "LEASE LEFT")
#: The columns that give way when the terminal is narrow, and the width that they keep.
SHRINKING: Final = {"WORK": 12, "NAME": 12, "HOLDER": 16}
CSV_FIELDS: Final = (
    "name", "slot", "slots", "state", "host", "pid", "thread", "work", "user", "since", "age_seconds",
    "lease_left_seconds", "token", "waiting", "session", "stop_by",
)  # fmt: skip


def clean(text: str) -> str:
    """Return ``text`` without anything that could move a terminal's cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def count(number: int, one: str, many: str = "") -> str:
    """Return ``3 slots`` or ``1 slot``."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def which(name: str, slot: int | None) -> str:
    """Return what of a name is meant: one slot of it, or all."""
    return f"{'' if slot is None else f'slot {slot} of '}{clean(name)!r}"


def who(someone: HolderSnapshot | WaiterSnapshot) -> str:
    """Return the program that holds or waits, if anything is known of it."""
    if not someone.host and not someone.pid:
        return ""
    return clean(f"{someone.host} pid {someone.pid} {someone.thread}".strip())


def lease(holder: HolderSnapshot) -> str:
    """Return how much of the lease is left, or how long ago it ran out."""
    if holder.lease_left is None:
        return ""
    if holder.expired:
        return f"ran out {duration(-holder.lease_left)} ago"
    return duration(holder.lease_left)


def state(holder: HolderSnapshot) -> str:
    """Return how a holder stands."""
    return f"{holder.state.value}, asked to stop" if holder.stop_requested else holder.state.value


def session(holder: HolderSnapshot) -> str:
    """Return the database session that holds, with its program and login if they are known."""
    if holder.session_id is None:
        return "session unknown"
    known = (("program", holder.program), ("login", holder.login))
    told = ", ".join(f"{what} {clean(value)}" for what, value in known if value)
    return f"session {holder.session_id}" + (f" ({told})" if told else "")


def sentence(holder: HolderSnapshot) -> str:
    """Return one line about one holder."""
    parts = [who(holder), clean(holder.label), f"user {clean(holder.user)}" if holder.user else ""]
    if holder.recorded:
        parts.append(f"taken {duration(holder.age)} ago")
    if holder.lease_left is not None:
        parts.append(f"lease {lease(holder)}" if holder.expired else f"lease left {lease(holder)}")
    else:
        parts.append(f"its {session(holder)} has ended" if holder.expired else session(holder))
    if holder.stop_requested:
        parts.append(f"asked to stop by {clean(holder.stop_by)}")
    return f"{clean(holder.name)} {holder.where} ({holder.state}): {', '.join(filter(None, parts))}"


def summary(snapshot: SemaphoreSnapshot) -> str:
    """Return one line about one semaphore."""
    parts = [f"{snapshot.held} of {count(snapshot.slots, 'slot')} held"]
    if snapshot.units is not None:
        parts = [count(snapshot.units, "unit")]
    if snapshot.stale:
        parts.append(f"{snapshot.stale} stale")
    parts.append(f"{snapshot.waiting} waiting")
    if snapshot.paused:
        parts.append(paused(snapshot))
    if snapshot.stopping:
        parts.append(f"{snapshot.stopping} asked to stop")
    if snapshot.operator_slots is not None:
        parts.append(f"set by an operator (the code says {snapshot.declared_slots})")
    if snapshot.other_kind:
        parts.append(f"in use as a {snapshot.other_kind} too")
    if snapshot.other_declared_slots is not None:
        parts.append(f"other processes declare {count(snapshot.other_declared_slots, 'slot')}")
    return f"{clean(snapshot.name)}: {', '.join(parts)}"


def paused(snapshot: SemaphoreSnapshot) -> str:
    """Return who paused it, since when, until when and why, as far as that is known."""
    told = "paused"
    if snapshot.paused_by:
        told += f" by {clean(snapshot.paused_by)}"
    if snapshot.paused_at is not None:
        told += f" since {snapshot.paused_at:%Y-%m-%d %H:%M} UTC"
    if snapshot.paused_until is not None and snapshot.resumes_in is not None:
        told += f" until {snapshot.paused_until:%Y-%m-%d %H:%M} UTC (in {duration(snapshot.resumes_in)})"
    return f"{told} ({clean(snapshot.paused_reason)})" if snapshot.paused_reason else told


def idle_rows(snapshots: Iterable[SemaphoreSnapshot]) -> list[tuple[str, ...]]:
    """Return a row of the table for each name that nobody holds or waits for."""
    return cleaned(
        (
            each.name,
            f"0/{each.slots}" if each.units is None else "",
            "paused" if each.paused else "idle" if each.units is None else count(each.units, "unit"),
            "",
            last_granted(each),
            "",
            "",
            "",
        )
        for each in snapshots
        if not each.holders and not each.waiters
    )


def details(snapshot: SemaphoreSnapshot) -> list[str]:
    """Return lines about what the code declares of one semaphore, who holds and who waits."""
    declared = count(snapshot.declared_slots, "slot")
    lines = [f"A {snapshot.kind}; the code declares {declared}. It was {last_granted(snapshot)}."]
    wanted = "slot"
    if snapshot.units is not None:
        wanted, began = "unit", count(snapshot.declared_slots, "unit")
        lines = [f"A counter, which began at {began}. It was {last_granted(snapshot)}."]
    for holder in snapshot.holders:
        lines.append(f"  {sentence(holder)}")
        if holder.recorded:
            lines.append(f"    token {holder.token}, since {holder.acquired_at:%Y-%m-%d %H:%M:%S} UTC")
    for waiter in snapshot.waiters:
        work = f", {clean(waiter.label)}" if waiter.label else ""
        by = f", session {waiter.session_id}" if waiter.session_id is not None else ""
        waiting = count(waiter.waiting, "thread or task", "threads or tasks")
        lines.append(
            f"  waiting: {who(waiter)}{work}{by}, {waiting}, for {duration(waiter.age)},"
            f" wants {count(waiter.take, wanted) if waiter.take else 'all slots'}"
        )
    if not snapshot.holders and not snapshot.waiters:
        lines.append("  Nobody holds it and nobody waits." if snapshot.units is None else "  Nobody waits.")
    return lines


def plan(purge: PurgePlan) -> list[str]:
    """Return lines about what a purge would do, and what it would leave alone."""
    lines = []
    if purge.slots:
        leases = any(holder.lease_left is not None for holder in purge.slots)
        why = "the lease has run out" if leases else "the session has ended"
        lines.append(f"To be freed, as {why} ({count(len(purge.slots), 'slot')}):")
        lines += [f"  {sentence(holder)}" for holder in purge.slots]
    if purge.pending:
        lines.append("Left alone, as the lease still runs although the holder seems gone:")
        lines += [f"  {sentence(holder)}: to be purged in {lease(holder)}" for holder in purge.pending]
    if purge.names:
        lines.append(f"To be deleted, as nobody uses it ({count(len(purge.names), 'name')}):")
        lines += [f"  {clean(snapshot.name)}: {last_granted(snapshot)}" for snapshot in purge.names]
    return lines


def only_stale(snapshot: SemaphoreSnapshot) -> SemaphoreSnapshot:
    """Return the semaphore with only those holders that seem gone, and without its waiters."""
    stale = tuple(holder for holder in snapshot.holders if holder.state is SlotState.STALE)
    return dataclasses.replace(snapshot, holders=stale, waiters=())


def last_granted(snapshot: SemaphoreSnapshot) -> str:
    """Return how long ago a slot was granted, or a count changed."""
    if snapshot.units is not None:
        return f"changed {duration(snapshot.idle or 0.0)} ago"
    return "never granted" if snapshot.idle is None else f"last granted {duration(snapshot.idle)} ago"


def headers(snapshots: Iterable[SemaphoreSnapshot]) -> tuple[str, ...]:
    """Return the table's headers: the last column is what ends a hold, a lease or a database session."""
    holders = [holder for snapshot in snapshots for holder in snapshot.holders]
    sessions = any(holder.lease_left is None for holder in holders)
    return (*HEADERS[:-1], "SESSION") if sessions else HEADERS


def rows(snapshots: Iterable[SemaphoreSnapshot]) -> list[tuple[str, ...]]:
    """Return the table's rows: the holders and then the waiters of each name."""
    found = [row for snapshot in snapshots for row in (*_holder_rows(snapshot), *_waiter_rows(snapshot))]
    return cleaned(found)


def cleaned(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return rows that are fit for a terminal, with a dash for nothing."""
    return [tuple(clean(cell) or "-" for cell in row) for row in rows]


def _holder_rows(snapshot: SemaphoreSnapshot) -> list[tuple[str, ...]]:
    return [
        (
            holder.name,
            f"{holder.place}/{snapshot.slots}",
            " ".join(filter(None, (state(holder), snapshot.role(holder)))),
            who(holder),
            holder.label,
            holder.user,
            duration(holder.age) if holder.recorded else "",
            str(holder.session_id or "") if holder.lease_left is None else lease(holder),
        )
        for holder in snapshot.holders
    ]


def _waiter_rows(snapshot: SemaphoreSnapshot) -> list[tuple[str, ...]]:
    return [
        (
            waiter.name,
            "" if waiter.take == 1 else f"wants {waiter.take or 'all'}",
            " ".join(
                filter(None, ("waiting", f"x{waiter.waiting}" if waiter.waiting > 1 else "", snapshot.role(waiter)))
            ),
            who(waiter),
            waiter.label,
            waiter.user,
            duration(waiter.age),
            str(waiter.session_id or ""),
        )
        for waiter in snapshot.waiters
    ]


_TEMPLATE_HEADERS: Final = ("TEMPLATE", "NAMES", "HELD", "WAITING", "REFUSED", "LONGEST HOLD", "TROUBLE")


def template_table(templates: Iterable[TemplateSnapshot]) -> list[str]:
    """Return a table of what the names of each template amount to, with a header; refusals are of the last hour."""
    body = [
        (
            each.template,
            str(each.names),
            str(each.held or ""),
            str(each.waiting or ""),
            str(each.turned_away or ""),
            duration(each.longest_hold) if each.longest_hold else "",
            ", ".join(f"{count} {word}" for word, count in each.trouble.items()),
        )
        for each in templates
    ]
    return table(cleaned(body), _TEMPLATE_HEADERS, fit=False)


def table(body: Sequence[tuple[str, ...]], head: Sequence[str] = HEADERS, *, fit: bool) -> list[str]:
    """Return aligned lines; with ``fit`` they are cut to the width of the terminal."""
    lines = [head, *body]
    widths = [max(_width(line[index]) for line in lines) for index in range(len(head))]
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


def as_csv(snapshots: Iterable[SemaphoreSnapshot], *, header: bool = True) -> str:
    """Return one line per holder and per waiting process, with a header."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, CSV_FIELDS, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    for snapshot in snapshots:
        for holder in snapshot.holders:
            left = "" if holder.lease_left is None else f"{holder.lease_left:.3f}"
            writer.writerow(_csv(snapshot, holder, holder.acquired_at) | {
                "slot": holder.place, "state": holder.state.value, "lease_left_seconds": left, "token": holder.token,
                "stop_by": holder.stop_by,
            })  # fmt: skip
        for waiter in snapshot.waiters:
            row = _csv(snapshot, waiter, waiter.waiting_since)
            writer.writerow(row | {"state": "waiting", "waiting": waiter.waiting})
    return stream.getvalue().rstrip("\n")


def _csv(snapshot: SemaphoreSnapshot, someone: HolderSnapshot | WaiterSnapshot, since: Any) -> dict[str, object]:
    """Return what holders and waiters both have."""
    return {
        "name": someone.name, "slots": snapshot.slots, "host": someone.host, "pid": someone.pid,
        "thread": someone.thread, "work": someone.label, "user": someone.user, "since": since.isoformat(),
        "age_seconds": f"{someone.age:.3f}", "session": someone.session_id,
    }  # fmt: skip


_REFRESH_HEADERS: Final = ("REFRESHED VALUE", "BUILT", "BY", "WORK", "TOOK", "EVERY", "DUE")


def refresh_table(refreshes: Iterable[RefreshSnapshot]) -> list[str]:
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
    return ["", *table(cleaned(body), _REFRESH_HEADERS, fit=False)]


def due(refresh: RefreshSnapshot) -> str:
    """Return when the next caller rebuilds it."""
    when = f"in {duration(refresh.due_in)}" if refresh.due_in else "now"
    return when if refresh.failed is None else f"{when}, failed {duration(refresh.failed)} ago"


def as_json(
    snapshots: Sequence[SemaphoreSnapshot],
    refreshes: Iterable[RefreshSnapshot],
    templates: Iterable[TemplateSnapshot] = (),
    *,
    using: str | None,
    whole: bool,
    only: bool = False,
    indent: int | None = 2,
) -> str:
    """Return the semaphores as JSON with what they were like in the last hour, those of values with ``refresh``.

    ``templates``: what the names that are not among the ``snapshots`` amount to; it comes first.
    ``whole``: also the values of which nothing is known as a semaphore, since that was purged. ``only``: the one
    semaphore itself, not a list.
    """
    values = {each.name: each for each in refreshes}
    known = {snapshot.name for snapshot in snapshots}
    grouped = list(templates)
    if grouped:
        known |= queries.by_name(values.keys() - known, using=using).keys()
    purged = [SemaphoreSnapshot(name, "refresh", 1, 1, None, False) for name in values if name not in known]
    shown = sorted([*snapshots, *purged], key=lambda snapshot: snapshot.name) if whole else snapshots
    lately, deadlocked = queries.lately(shown, using=using), queries.deadlocked(using=using)
    found = [
        serialize.as_plain(snapshot, lately[snapshot.name], deadlocked=snapshot.name in deadlocked)
        | ({"refresh": dataclasses.asdict(values[snapshot.name])} if snapshot.name in values else {})
        for snapshot in shown
    ]
    return serialize.as_json(found[0] if only else [*map(dataclasses.asdict, grouped), *found], indent=indent)
