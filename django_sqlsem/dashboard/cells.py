"""The slots of a lock as cells: one for each, or one for all of a state where there are many."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from django.utils.html import escape
from django.utils.safestring import mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_sqlsem.admin_display import program_of
from django_sqlsem.dashboard.svg import visible
from django_sqlsem.modes import WRITER
from django_sqlsem.snapshots import SlotState

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise
    from django.utils.safestring import SafeString

    from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot

#: More slots than these are drawn as groups.
MANY: Final = 40
#: The states in the order in which groups stand.
WORDS: Final[dict[str, _StrPromise]] = {
    "stale": gettext_lazy("stale"),
    "held": gettext_lazy("held"),
    "draining": gettext_lazy("draining"),
    "paused": gettext_lazy("paused"),
    "free": gettext_lazy("free"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One slot, or ``count`` of them in the same state; then ``slot`` is the first one's number."""

    slot: int
    state: str
    title: str
    count: int = 1


def cells(snapshot: SemaphoreSnapshot) -> list[Cell]:
    """Return the cells of a lock, by slot; none for a count of tokens, which has no slots.

    Slots beyond the number that counts are there while they are held.
    """
    if snapshot.tokens is not None:
        return []
    holders = {slot: holder for holder in snapshot.holders for slot in holder.numbers}
    # The writer's place is shown while somebody has it and nothing else: an upgradable reader.
    lone = {WRITER} if any(holder.numbers == (WRITER,) for holder in snapshot.holders) else set()
    slots = sorted({*range(1, snapshot.slots + 1), *(holders.keys() - {WRITER}), *lone})
    states = {slot: _state(snapshot, holders.get(slot)) for slot in slots}
    if len(slots) > MANY:
        counts = Counter(states.values())
        first = {state: min(slot for slot in slots if states[slot] == state) for state in counts}
        return [
            Cell(first[state], state, _("%(count)d %(state)s") % {"count": counts[state], "state": word}, counts[state])
            for state, word in WORDS.items()
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
        for state, word in WORDS.items()
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
    said = ", ".join([str(WORDS[state]), *(visible(part) for part in who if part)])
    return _("%(place)s: %(state)s") % {"place": place, "state": said}
