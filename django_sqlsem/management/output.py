"""What ``manage.py locks`` prints: sentences and tables for people, JSON and CSV for programs."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import io
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from django.utils.translation import gettext, ngettext, pgettext, pgettext_lazy

from django_sqlsem import queries, serialize
from django_sqlsem.control import PurgePlan
from django_sqlsem.core.durations import duration
from django_sqlsem.core.modes import UPDATE
from django_sqlsem.snapshots import (
    HolderSnapshot,
    RefreshSnapshot,
    SemaphoreSnapshot,
    SlotState,
    TemplateSnapshot,
    WaiterSnapshot,
    WaitSnapshot,
)

#: The columns of the table that give way when the terminal is narrow: holder's work, name, holder; and what they keep.
SHRINKING: Final = {4: 12, 0: 12, 3: 16}
#: How many paused names of templates are named.
MOST_PAUSED: Final = 10
#: What slots, holders, waiters and templates are, in the words of a reader.
WORDS: Final = {
    "free": pgettext_lazy("state", "free"),
    "held": pgettext_lazy("state", "held"),
    "stale": pgettext_lazy("state", "stale"),
    "paused": pgettext_lazy("state", "paused"),
    "deadlocked": pgettext_lazy("state", "deadlocked"),
    "with a queue": pgettext_lazy("state", "with a queue"),
    "semaphore": pgettext_lazy("used as", "semaphore"),
    "mutex": pgettext_lazy("used as", "mutex"),
    "rlock": pgettext_lazy("used as", "rlock"),
    "rwlock": pgettext_lazy("used as", "rwlock"),
    "claim": pgettext_lazy("used as", "claim"),
    "refresh": pgettext_lazy("used as", "refresh"),
    "reader": pgettext_lazy("used as", "reader"),
    "writer": pgettext_lazy("used as", "writer"),
    "upgradable": pgettext_lazy("used as", "upgradable"),
    "upgrades": pgettext_lazy("used as", "upgrades"),
    "drains": pgettext_lazy("used as", "drains"),
}
CSV_FIELDS: Final = (
    "name", "slot", "slots", "state", "host", "pid", "thread", "work", "user", "since", "age_seconds",
    "lease_left_seconds", "token", "waiting", "session", "stop_by",
)  # fmt: skip


def clean(text: str) -> str:
    """Return ``text`` without anything that could move a terminal's cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def word(known: str) -> str:
    """Return a state, or what somebody uses a lock as, in the reader's language."""
    return str(WORDS.get(known, known))


def count_slots(number: int) -> str:
    """Return ``3 slots`` or ``1 slot``."""
    return ngettext("%(count)d slot", "%(count)d slots", number) % {"count": number}


def count_names(number: int) -> str:
    """Return ``3 names`` or ``1 name``."""
    return ngettext("%(count)d name", "%(count)d names", number) % {"count": number}


def count_known(names: int, made: Sequence[int]) -> str:
    """Return ``2 names and 1 template of 3 names``; ``made``: how many names each template has made."""
    known = count_names(names)
    if not made:
        return known
    templates = ngettext("%(count)d template", "%(count)d templates", len(made)) % {"count": len(made)}
    told = gettext("%(names)s and %(templates)s of %(made)s")
    return told % {"names": known, "templates": templates, "made": count_names(sum(made))}


def count_units(number: int) -> str:
    """Return ``3 units`` or ``1 unit``."""
    return ngettext("%(count)d unit", "%(count)d units", number) % {"count": number}


def which(name: str, slot: int | None) -> str:
    """Return what of a name is meant: one slot of it, or all."""
    quoted = repr(clean(name))
    return quoted if slot is None else gettext("slot %(slot)d of %(name)s") % {"slot": slot, "name": quoted}


def ago(seconds: float) -> str:
    return gettext("%(age)s ago") % {"age": duration(seconds)}


def who(someone: HolderSnapshot | WaiterSnapshot | WaitSnapshot | RefreshSnapshot) -> str:
    """Return the program and the thread of somebody, if anything is known of them."""
    if not someone.host and not someone.pid:
        return ""
    told = {"host": someone.host, "pid": someone.pid, "thread": someone.thread}
    return clean(gettext("%(host)s pid %(pid)d %(thread)s") % told).strip()


def lease(holder: HolderSnapshot) -> str:
    """Return how much of the lease is left, or how long ago it ran out."""
    if holder.lease_left is None:
        return ""
    if holder.expired:
        return gettext("ran out %(age)s ago") % {"age": duration(-holder.lease_left)}
    return duration(holder.lease_left)


def state(holder: HolderSnapshot) -> str:
    known = word(holder.state)
    return gettext("%(state)s, asked to stop") % {"state": known} if holder.stop_requested else known


def session(holder: HolderSnapshot) -> str:
    """Return the database session that holds, with its program and login if they are known."""
    if holder.session_id is None:
        return gettext("session unknown")
    told = gettext("session %(session)d") % {"session": holder.session_id}
    known = []
    if holder.program:
        known.append(gettext("program %(program)s") % {"program": clean(holder.program)})
    if holder.login:
        known.append(gettext("login %(login)s") % {"login": clean(holder.login)})
    return f"{told} ({', '.join(known)})" if known else told


def sentence(holder: HolderSnapshot) -> str:
    parts = [who(holder), clean(holder.label)]
    if holder.user:
        parts.append(gettext("user %(user)s") % {"user": clean(holder.user)})
    if holder.recorded:
        parts.append(gettext("taken %(age)s ago") % {"age": duration(holder.age)})
    if holder.lease_left is not None:
        told = gettext("lease %(lease)s") if holder.expired else gettext("lease left %(lease)s")
        parts.append(told % {"lease": lease(holder)})
    else:
        told = gettext("its %(session)s has ended") if holder.expired else "%(session)s"
        parts.append(told % {"session": session(holder)})
    if holder.stop_requested:
        parts.append(gettext("asked to stop by %(by)s") % {"by": clean(holder.stop_by)})
    return f"{clean(holder.name)} {_where(holder)} ({word(holder.state)}): {', '.join(filter(None, parts))}"


def _where(holder: HolderSnapshot) -> str:
    if holder.mode == UPDATE:
        return holder.place
    return ngettext("slot %(which)s", "slots %(which)s", 2 if "-" in holder.place else 1) % {"which": holder.place}


def summary(snapshot: SemaphoreSnapshot) -> str:
    slots = snapshot.slots
    parts = [
        ngettext("%(held)d of %(slots)d slot held", "%(held)d of %(slots)d slots held", slots)
        % {"held": snapshot.held, "slots": slots}
    ]
    if snapshot.units is not None:
        parts = [count_units(snapshot.units)]
    if snapshot.stale:
        parts.append(gettext("%(count)d stale") % {"count": snapshot.stale})
    parts.append(gettext("%(count)d waiting") % {"count": snapshot.waiting})
    if snapshot.paused:
        parts.append(paused(snapshot))
    if snapshot.stopping:
        parts.append(gettext("%(count)d asked to stop") % {"count": snapshot.stopping})
    if snapshot.operator_slots is not None:
        parts.append(sized(snapshot))
    if snapshot.other_kind:
        parts.append(gettext("in use as a %(kind)s too") % {"kind": word(snapshot.other_kind)})
    if (other := snapshot.other_declared_slots) is not None:
        parts.append(gettext("other processes declare %(slots)s") % {"slots": count_slots(other)})
    return f"{clean(snapshot.name)}: {', '.join(parts)}"


def paused(snapshot: SemaphoreSnapshot) -> str:
    """Return who paused it, since when, until when and why, as far as that is known."""
    parts = [pgettext("state", "paused")]
    if snapshot.paused_by:
        parts.append(gettext("by %(by)s") % {"by": clean(snapshot.paused_by)})
    if snapshot.paused_at is not None:
        parts.append(gettext("since %(when)s UTC") % {"when": f"{snapshot.paused_at:%Y-%m-%d %H:%M}"})
    return " ".join([*parts, *_until(snapshot.paused_until, snapshot.resumes_in, snapshot.paused_reason)])


def sized(snapshot: SemaphoreSnapshot) -> str:
    """Return who set its number of slots, until when and why, as far as that is known."""
    told = {"by": clean(snapshot.slots_by) or gettext("an operator"), "slots": snapshot.declared_slots}
    parts = [gettext("set by %(by)s (the code says %(slots)d)") % told]
    return " ".join([*parts, *_until(snapshot.slots_until, snapshot.slots_end_in, snapshot.slots_reason)])


def _until(end: datetime.datetime | None, left: float | None, reason: str) -> list[str]:
    parts = []
    if end is not None and left is not None:
        until = {"when": f"{end:%Y-%m-%d %H:%M}", "length": duration(left)}
        parts.append(gettext("until %(when)s UTC (in %(length)s)") % until)
    if reason:
        parts.append(f"({clean(reason)})")
    return parts


def details(snapshot: SemaphoreSnapshot) -> list[str]:
    """Return lines about what the code declares of one semaphore, who holds and who waits."""
    since = last_granted(snapshot)
    if snapshot.units is None:
        declared = {"kind": word(snapshot.kind), "slots": count_slots(snapshot.declared_slots), "since": since}
        lines = [gettext("A %(kind)s; the code declares %(slots)s. It was %(since)s.") % declared]
    else:
        began = {"units": count_units(snapshot.declared_slots), "since": since}
        lines = [gettext("A counter, which began at %(units)s. It was %(since)s.") % began]
    for holder in snapshot.holders:
        lines.append(f"  {sentence(holder)}")
        if holder.recorded:
            told = {"token": holder.token, "when": f"{holder.acquired_at:%Y-%m-%d %H:%M:%S}"}
            lines.append("    " + gettext("token %(token)d, since %(when)s UTC") % told)
    lines += [f"  {_waits(waiter, snapshot)}" for waiter in snapshot.waiters]
    if not snapshot.holders and not snapshot.waiters:
        nobody = gettext("Nobody holds it and nobody waits.") if snapshot.units is None else gettext("Nobody waits.")
        lines.append(f"  {nobody}")
    return lines


def _waits(waiter: WaiterSnapshot, snapshot: SemaphoreSnapshot) -> str:
    parts = [gettext("waiting: %(who)s") % {"who": who(waiter)}, clean(waiter.label)]
    if waiter.session_id is not None:
        parts.append(gettext("session %(session)d") % {"session": waiter.session_id})
    number = waiter.waiting
    parts.append(ngettext("%(count)d thread or task", "%(count)d threads or tasks", number) % {"count": number})
    parts.append(gettext("for %(age)s") % {"age": duration(waiter.age)})
    counted = count_slots if snapshot.units is None else count_units
    parts.append(wants(counted(waiter.take) if waiter.take else gettext("all slots")))
    return ", ".join(filter(None, parts))


def wants(what: str) -> str:
    return gettext("wants %(what)s") % {"what": what}


def plan(purge: PurgePlan) -> list[str]:
    """Return lines about what a purge would do, and what it would leave alone."""
    lines = []
    if purge.slots:
        leases = any(holder.lease_left is not None for holder in purge.slots)
        number = len(purge.slots)
        told = (
            ngettext(
                "To be freed, as the lease has run out (%(count)d slot):",
                "To be freed, as the lease has run out (%(count)d slots):",
                number,
            )
            if leases
            else ngettext(
                "To be freed, as the session has ended (%(count)d slot):",
                "To be freed, as the session has ended (%(count)d slots):",
                number,
            )
        )
        lines.append(told % {"count": number})
        lines += [f"  {sentence(holder)}" for holder in purge.slots]
    if purge.pending:
        lines.append(gettext("Left alone, as the lease still runs although the holder seems gone:"))
        later = gettext("%(holder)s: to be purged in %(lease)s")
        lines += ["  " + later % {"holder": sentence(each), "lease": lease(each)} for each in purge.pending]
    if purge.names:
        number = len(purge.names)
        told = ngettext(
            "To be deleted, as nobody uses it (%(count)d name):",
            "To be deleted, as nobody uses it (%(count)d names):",
            number,
        )
        lines.append(told % {"count": number})
        lines += [f"  {clean(snapshot.name)}: {last_granted(snapshot)}" for snapshot in purge.names]
    return lines


def only_stale(snapshot: SemaphoreSnapshot) -> SemaphoreSnapshot:
    """Return the semaphore with only those holders that seem gone, and without its waiters."""
    stale = tuple(holder for holder in snapshot.holders if holder.state is SlotState.STALE)
    return dataclasses.replace(snapshot, holders=stale, waiters=())


def last_granted(snapshot: SemaphoreSnapshot) -> str:
    """Return how long ago a slot was granted, or a count changed."""
    if snapshot.units is not None:
        return gettext("changed %(age)s ago") % {"age": duration(snapshot.idle or 0.0)}
    if snapshot.idle is None:
        return gettext("never granted")
    return gettext("last granted %(age)s ago") % {"age": duration(snapshot.idle)}


def headers(snapshots: Iterable[SemaphoreSnapshot]) -> tuple[str, ...]:
    """Return the table's headers: the last column is what ends a hold, a lease or a database session."""
    holders = [holder for snapshot in snapshots for holder in snapshot.holders]
    sessions = any(holder.lease_left is None for holder in holders)
    return (
        pgettext("column", "NAME"),
        pgettext("column", "SLOT"),
        pgettext("column", "STATE"),
        pgettext("column", "HOLDER"),
        pgettext("column", "WORK"),
        pgettext("column", "USER"),
        pgettext("column", "AGE"),
        pgettext("column", "SESSION") if sessions else pgettext("column", "LEASE LEFT"),
    )


class TableLine(NamedTuple):
    """A line of the table of holders and waiters."""

    cells: tuple[str, ...]
    #: Whether an operator should look at it.
    warns: bool = False
    #: Whether it is of a name that nobody holds or waits for.
    idle: bool = False


def rows(snapshots: Iterable[SemaphoreSnapshot]) -> list[TableLine]:
    """Return the table's lines: the holders and then the waiters of each name."""
    found = []
    for snapshot in snapshots:
        for holder in snapshot.holders:
            place, stale = f"{holder.place}/{snapshot.slots}", holder.state is SlotState.STALE
            how = [state(holder), word(snapshot.role(holder))]
            age = duration(holder.age) if holder.recorded else ""
            end = str(holder.session_id or "") if holder.lease_left is None else lease(holder)
            found.append(TableLine(_of(holder, place, how, age, end), stale))
        for waiter in snapshot.waiters:
            place = "" if waiter.take == 1 else wants(str(waiter.take or gettext("all")))
            many = f"x{waiter.waiting}" if waiter.waiting > 1 else ""
            how = [pgettext("state", "waiting"), many, word(snapshot.role(waiter))]
            found.append(TableLine(_of(waiter, place, how, duration(waiter.age), str(waiter.session_id or ""))))
    return found


def _of(
    someone: HolderSnapshot | WaiterSnapshot, place: str, how: Iterable[str], age: str, end: str
) -> tuple[str, ...]:
    state = " ".join(filter(None, how))
    return fit_to_print((someone.name, place, state, who(someone), someone.label, someone.user, age, end))


def idle_rows(snapshots: Iterable[SemaphoreSnapshot]) -> list[TableLine]:
    """Return a line of the table for each name that nobody holds or waits for."""
    found = []
    for each in snapshots:
        if not each.holders and not each.waiters:
            place, idle = f"0/{each.slots}", pgettext("state", "idle")
            if each.units is not None:
                place, idle = "", count_units(each.units)
            known = word("paused") if each.paused else idle
            cells = (each.name, place, known, "", last_granted(each), "", "", "")
            found.append(TableLine(fit_to_print(cells), each.paused, idle=True))
    return found


def fit_to_print(cells: Iterable[str]) -> tuple[str, ...]:
    """Return cells that are fit for a terminal, with a dash for nothing."""
    return tuple(clean(cell) or "-" for cell in cells)


#: The columns of a table: the headers, and what each says of a row.
Columns: TypeAlias = Sequence[tuple[Any, Callable[[Any], str]]]


def tabular(columns: Columns, found: Iterable[object]) -> list[str]:
    """Return a table, whose first line has the headers."""
    body = [fit_to_print(cell(each) for _head, cell in columns) for each in found]
    return table(body, tuple(str(head) for head, _cell in columns), fit=False)


#: What the names of a template amount to; refusals are of the last hour.
TEMPLATES: Final[Columns] = (
    (pgettext_lazy("column", "TEMPLATE"), lambda each: each.template),
    (pgettext_lazy("column", "NAMES"), lambda each: str(each.names)),
    (pgettext_lazy("column", "HELD"), lambda each: str(each.held or "")),
    (pgettext_lazy("column", "WAITING"), lambda each: str(each.waiting or "")),
    (pgettext_lazy("column", "REFUSED"), lambda each: str(each.turned_away or "")),
    (pgettext_lazy("column", "LONGEST HOLD"), lambda each: duration(each.longest_hold) if each.longest_hold else ""),
    (pgettext_lazy("column", "TROUBLE"), lambda each: _trouble(each)),
)


def _trouble(template: TemplateSnapshot) -> str:
    return ", ".join(f"{count} {word(trouble)}" for trouble, count in template.trouble.items())


def paused_names(templates: Iterable[TemplateSnapshot], using: str | None) -> list[str]:
    """Return a line for each name of a template that an operator has paused, and how many more there are."""
    if not any(each.paused for each in templates):
        return []
    found = (queries.survey(using).in_use or {}).values()
    names = sorted(each.name for each in found if each.paused and each.template)
    lines = [summary(each) for each in queries.by_name(names[:MOST_PAUSED], using=using).values()]
    if more := len(names) - len(lines):
        told = ngettext("%(count)d more name is paused.", "%(count)d more names are paused.", more)
        lines.append(told % {"count": more})
    return [*lines, ""]


def table(body: Sequence[tuple[str, ...]], head: tuple[str, ...], *, fit: bool) -> list[str]:
    """Return aligned lines; with ``fit`` those of ``rows()`` are cut to the width of the terminal."""
    lines = [head, *body]
    widths = [max(_width(line[index]) for line in lines) for index in range(len(head))]
    excess = sum(widths) + 2 * (len(widths) - 1) - shutil.get_terminal_size().columns if fit else 0
    for index, least in SHRINKING.items() if fit else ():
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


#: When each value was built last, by whom, how long that took, and when it is due.
REFRESHES: Final[Columns] = (
    (pgettext_lazy("column", "REFRESHED VALUE"), lambda each: each.name),
    (pgettext_lazy("column", "BUILT"), lambda each: pgettext("built", "never") if each.age is None else ago(each.age)),
    (pgettext_lazy("column", "BY"), lambda each: who(each)),
    (pgettext_lazy("column", "WORK"), lambda each: each.label),
    (pgettext_lazy("column", "TOOK"), lambda each: "" if each.took is None else duration(each.took)),
    (pgettext_lazy("column", "EVERY"), lambda each: duration(each.period)),
    (pgettext_lazy("column", "DUE"), lambda each: due(each)),
)


def refresh_table(refreshes: Sequence[RefreshSnapshot]) -> list[str]:
    """Return a table of refreshed values below an empty line; nothing if there is none."""
    return ["", *tabular(REFRESHES, refreshes)] if refreshes else []


def due(refresh: RefreshSnapshot) -> str:
    """Return when the next caller rebuilds it."""
    told = {"length": duration(refresh.due_in), "failed": duration(refresh.failed or 0.0)}
    if refresh.failed is None:
        return gettext("in %(length)s") % told if refresh.due_in else pgettext("due", "now")
    if refresh.due_in:
        return gettext("in %(length)s, failed %(failed)s ago") % told
    return gettext("now, failed %(failed)s ago") % told


def as_plain(
    snapshots: Sequence[SemaphoreSnapshot], values: Iterable[RefreshSnapshot], using: str | None
) -> list[dict[str, Any]]:
    """Return the semaphores with what they were like in the last hour, those of values with ``refresh``."""
    built = {each.name: dataclasses.asdict(each) for each in values}
    lately, deadlocked = queries.lately(snapshots, using=using), queries.deadlocked(using=using)
    return [
        serialize.as_plain(snapshot, lately[snapshot.name], deadlocked=snapshot.name in deadlocked)
        | ({"refresh": built[snapshot.name]} if snapshot.name in built else {})
        for snapshot in snapshots
    ]
