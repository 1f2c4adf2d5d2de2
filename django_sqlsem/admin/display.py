"""How snapshots look in the admin: texts, and slots as cells."""

from __future__ import annotations

import datetime
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Final

from django.utils import timezone
from django.utils.html import escape, format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_sqlsem.core.durations import duration
from django_sqlsem.core.modes import WRITER
from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot, SlotState

#: The states of a slot, in the order in which groups of cells stand.
STATES: Final = {
    "stale": gettext_lazy("stale"),
    "held": gettext_lazy("held"),
    "draining": gettext_lazy("draining"),
    "paused": gettext_lazy("paused"),
    "free": gettext_lazy("free"),
}
#: What stands in a cell that has nothing to say.
EMPTY: Final = "-"
#: The same where a reader of screens passes over it.
NONE: Final = mark_safe('<span class="sqlsem-none" aria-hidden="true">·</span>')


#: What reorders or hides the text around it. Names and labels are users' text.
_DISORDERLY: Final = frozenset(
    "\u00ad\u061c\u180e\u200b\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2060\u2061\u2062\u2063\u2064"
    "\u2066\u2067\u2068\u2069\u206a\u206b\u206c\u206d\u206e\u206f\ufeff\ufff9\ufffa\ufffb"
)


#: What each kind of lock is called.
KIND_WORDS: Final = {
    "semaphore": gettext_lazy("semaphore"),
    "mutex": gettext_lazy("mutex"),
    "rlock": gettext_lazy("rlock"),
    "rwlock": gettext_lazy("readers and writer"),
    "counter": gettext_lazy("counter"),
    "claim": gettext_lazy("claims of rows"),
    "refresh": gettext_lazy("refreshed value"),
}


def today() -> datetime.date:
    """Return the day in the current time zone. Django's own clock tells no zone where ``USE_TZ`` is off."""
    return timezone.localtime(datetime.datetime.now(datetime.UTC)).date()


def kind_of(kind: str) -> str:
    return str(KIND_WORDS.get(kind, kind))


def visible(text: str) -> str:
    """Return users' text with its control characters and its reordering ones spelt out: ``[U+202E]``."""
    return "".join(
        f"[U+{ord(each):04X}]" if each in _DISORDERLY or unicodedata.category(each) == "Cc" else each for each in text
    )


def users(text: str) -> SafeString:
    """Return users' text as HTML: escaped, spelt out, and without an effect on the direction of what is around it."""
    return format_html("<bdi>{}</bdi>", visible(text)) if text else SafeString("")


#: Where a name may be broken that is too long for its line.
_JOINTS: Final = re.compile(r"(?<=[:/._\-}@|,])(?=[^:/._\-}@|,])")


def named(name: str) -> SafeString:
    """Return a name as HTML that may be broken between its parts."""
    if not name:
        return SafeString("")
    parts = [escape(part) for part in _JOINTS.split(visible(name))]
    return mark_safe(f"<bdi>{'<wbr>'.join(parts)}</bdi>")  # noqa: S308 - escaped


def instant(age: float, at: datetime.datetime) -> SafeString:
    """Return how long ago something was, with the exact instant as the tooltip. The script counts on."""
    return _time(duration(age), at, age)


def lasting(age: float) -> SafeString:
    """Return for how long something has gone on, or will if that is less than 0. The script counts on."""
    text = duration(abs(age)).replace(" ", "\N{NO-BREAK SPACE}")
    return format_html('<span data-sqlsem-ticks="{}">{}</span>', f"{age:.1f}", text)


def held_since(holder: HolderSnapshot) -> SafeString | str:
    """Return how long ago a slot was taken, if anything tells."""
    return instant(holder.age, holder.acquired_at) if holder.recorded else EMPTY


def lease_left(holder: HolderSnapshot) -> SafeString | str:
    """Return how much of the lease is left, or how long ago it ran out; nothing where there is no lease."""
    if holder.lease_left is None or holder.expires_at is None:
        return EMPTY
    if holder.expired:
        return format_html(_("ran out {} ago"), instant(-holder.lease_left, holder.expires_at))
    return _time(duration(holder.lease_left), holder.expires_at, -holder.lease_left)


def length(seconds: float) -> str:
    """Return a length of time; below a second in milliseconds, and round ones without a fraction."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.00095 or not seconds else "< 1 ms"
    for size, unit in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size and seconds % size == 0 and seconds < size * 60:
            return f"{seconds / size:.0f} {unit}"
    return duration(seconds)


def percent(part: float) -> str:
    """Return a part of a whole; nothing but 0 is 0 %."""
    return _("< 1 %") if 0 < part < 0.01 else _("%(percent)d %%") % {"percent": int(100 * part)}


def _time(text: str, at: datetime.datetime, age: float) -> SafeString:
    unbroken = text.replace(" ", "\N{NO-BREAK SPACE}")
    title = f"{at:%Y-%m-%d %H:%M:%S} UTC"
    return format_html(
        '<time datetime="{}" title="{}" data-sqlsem-ticks="{}">{}</time>',
        at.isoformat(timespec="seconds"), title, f"{age:.1f}", unbroken,
    )  # fmt: skip


def declared(snapshot: SemaphoreSnapshot) -> str:
    """Return what the code says about the slots, and whether processes disagree."""
    if snapshot.other_declared_slots is None:
        return str(snapshot.declared_slots)
    return _("%(one)d, elsewhere %(other)d") % {"one": snapshot.declared_slots, "other": snapshot.other_declared_slots}


def program(host: str, pid: int, thread: str) -> str:
    return _("%(host)s pid %(pid)d %(thread)s") % {"host": visible(host), "pid": pid, "thread": visible(thread)}


def program_of(holder: HolderSnapshot) -> str:
    """Return the program that holds, with its database session if that has the lock."""
    if not holder.host and not holder.pid:
        found = visible(holder.program) or EMPTY
    else:
        found = program(holder.host, holder.pid, holder.thread).strip()
    if holder.session_id is None:
        return found
    return _("%(program)s, session %(session)d") % {"program": found, "session": holder.session_id}


#: More slots than these are drawn as groups.
_MANY: Final = 40


@dataclass(frozen=True, slots=True)
class Cell:
    """One slot, or ``count`` of them in the same state; then ``slot`` is the first one's number."""

    slot: int
    state: str
    title: str
    count: int = 1


def cells(snapshot: SemaphoreSnapshot) -> list[Cell]:
    """Return the cells of a lock, by slot; none for a counter, which has no slots.

    Slots beyond the number that counts are there while they are held.
    """
    if snapshot.units is not None:
        return []
    holders = {slot: holder for holder in snapshot.holders for slot in holder.numbers}
    # The writer's place is shown while somebody has it and nothing else: an upgradable reader.
    lone = {WRITER} if any(holder.numbers == (WRITER,) for holder in snapshot.holders) else set()
    slots = sorted({*range(1, snapshot.slots + 1), *(holders.keys() - {WRITER}), *lone})
    states = {slot: _state(snapshot, holders.get(slot)) for slot in slots}
    if len(slots) > _MANY:
        counts = Counter(states.values())
        first = {state: min(slot for slot in slots if states[slot] == state) for state in counts}
        return [
            Cell(first[state], state, _("%(count)d %(state)s") % {"count": counts[state], "state": word}, counts[state])
            for state, word in STATES.items()
            if state in counts
        ]
    return [Cell(slot, states[slot], _title(slot, states[slot], holders.get(slot))) for slot in slots]


def drawn(snapshot: SemaphoreSnapshot) -> SafeString | str:
    """Return the cells as HTML, with their counts in words for who does not see them."""
    found = cells(snapshot)
    if not found:
        return ""
    counts: Counter[str] = Counter()
    parts = []
    for cell in found:
        counts[cell.state] += cell.count
        many, number = (" sqlsem-many", cell.count) if cell.count > 1 else ("", "")
        # By hand: format_html() for each of some hundred cells takes longer than to read them.
        parts.append(
            f'<span class="sqlsem-cell sqlsem-{cell.state}{many}" title="{escape(cell.title)}">{number}</span>'
        )
    said = ", ".join(
        _("%(count)d %(state)s") % {"count": counts[state], "state": word}
        for state, word in STATES.items()
        if state in counts
    )
    label = escape(_("Slots: %(states)s") % {"states": said})
    inside = "".join(parts)
    return mark_safe(f'<span class="sqlsem-cells" role="img" aria-label="{label}">{inside}</span>')  # noqa: S308


def _state(snapshot: SemaphoreSnapshot, holder: HolderSnapshot | None) -> str:
    if holder is None:
        return "paused" if snapshot.paused else "free"
    if holder.state is SlotState.STALE:
        return "stale"
    return "draining" if snapshot.paused else "held"


def _title(slot: int, state: str, holder: HolderSnapshot | None) -> str:
    place = _("Upgradable place") if slot == WRITER else _("Slot %(slot)s") % {"slot": slot}
    who = [] if holder is None else [program_of(holder), holder.label, holder.user]
    said = ", ".join([str(STATES[state]), *(visible(part) for part in who if part)])
    return _("%(place)s: %(state)s") % {"place": place, "state": said}
