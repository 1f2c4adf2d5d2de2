"""The last hour of one lock: its timeline, its charts, and what is said about them."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any, Final

from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_sqlsem import queries
from django_sqlsem.admin import drawing, tables
from django_sqlsem.admin.display import length, percent
from django_sqlsem.admin.drawing import MINUTE, Bar, Lane, Mark, TimeScale
from django_sqlsem.conf import config
from django_sqlsem.core.durations import duration
from django_sqlsem.core.modes import WRITER
from django_sqlsem.history.events import ACTS, DEADLOCK, LOST, PURGED, REVOKED, Totals
from django_sqlsem.history.reading import MAX_SPANS
from django_sqlsem.serialize import WINDOW, lately
from django_sqlsem.snapshots import SlotState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from django_sqlsem.history.events import Event, Minute, Span
    from django_sqlsem.queries import Reading
    from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot


#: How a past hold ended that did not end well.
_BADLY: Final = (LOST, REVOKED, PURGED)
_SECOND: Final = datetime.timedelta(seconds=1)


def recent(reading: Reading, snapshot: SemaphoreSnapshot) -> dict[str, Any]:
    """Read and draw the last hour, for the template. Raises ``BackendError``."""
    name, scale = snapshot.name, TimeScale(reading.now, WINDOW)
    spans = queries.spans(name, window=WINDOW, now=reading.now)
    minutes = queries.minutes(name, window=WINDOW, step=MINUTE, now=reading.now)
    rare = queries.events(name, what=(*ACTS, DEADLOCK, LOST), limit=2 * drawing.MAX_MARKS)
    marks = _marks(rare, scale)
    lanes = _lanes(snapshot, spans)
    bars = _bars(snapshot, spans, scale, {lane.slot for lane in lanes}) + _averages(snapshot, spans, minutes, scale)
    title, about = _("Who held which slot in the last hour"), _about(lanes, spans, marks)
    up_to = timezone.localtime(scale.now)  # templates do not convert it where USE_TZ is off
    return {
        "up_to": up_to,
        "zone": f"{up_to:%Z}",
        "timeline": drawing.draw(lanes, bars, marks, scale, title=title, description=about) if lanes else None,
        "timeline_notes": _notes(snapshot, lanes, spans, minutes),
        "bars": tables.bars(spans),
        "facts": _facts(reading, snapshot, minutes),
        "charts": _charts(minutes, scale),
        "minutes": tables.by_minute(minutes),
        "acts": tables.happened(
            "sqlsem-rare", _("Losses, deadlocks and operators' acts"), rare, _("None is recorded.")
        ),
        "events": tables.happened(
            "sqlsem-events",
            _("Recent events"),
            queries.events(name, limit=tables.MAX_ROWS),
            _("Nothing is recorded."),
        ),
    }


def _facts(reading: Reading, snapshot: SemaphoreSnapshot, minutes: Sequence[Minute]) -> list[tuple[str, str]]:
    """Return the figures of the hour with their words, as the overview has them; none if nothing is recorded."""
    if not config(reading.using).history:
        return []
    holds = [each.holds.longest for each in minutes if each.holds]
    waits = [each.waits.longest for each in minutes if each.waits]
    added = ("granted", "released", "turned_away", "lost", "held")
    sums: dict[str, Any] = {field: sum(getattr(each, field) for each in minutes) for field in added}
    found = lately(snapshot, Totals(**sums, longest_hold=max(holds, default=0.0), longest_wait=max(waits, default=0.0)))
    facts = [
        (_("granted"), str(found.granted)),
        (_("turned away"), str(found.turned_away)),
        (_("lost"), str(found.lost)),
        (_("longest wait"), length(found.longest_wait or 0.0)),
        (_("longest hold"), length(found.longest_hold or 0.0)),
    ]
    if found.utilisation is not None:
        facts.insert(0, (_("used"), percent(found.utilisation)))
    return facts


def _charts(minutes: Sequence[Minute], scale: TimeScale) -> list[dict[str, Any]]:
    """Return the drawings, each under its heading."""
    waits, holds = [(each.at, each.waits) for each in minutes], [(each.at, each.holds) for each in minutes]
    of_numbers, of_waits = _("Granted and turned away, minute by minute"), _("Waits, minute by minute")
    of_holds = _("Holds, minute by minute")
    found = {
        of_numbers: drawing.numbers("sqlsem-numbers", of_numbers, minutes, scale),
        of_waits: drawing.lengths("sqlsem-waits", of_waits, waits, scale),
        of_holds: drawing.lengths("sqlsem-holds", of_holds, holds, scale),
    }
    return [{"title": title, "drawing": chart} for title, chart in found.items() if chart is not None]


def _lanes(snapshot: SemaphoreSnapshot, spans: Sequence[Span]) -> list[Lane]:
    """Return the lanes in the order of slots: all of them, or of many those that matter most."""
    if snapshot.units is not None:
        return []
    now: dict[int, HolderSnapshot] = {slot: each for each in snapshot.holders for slot in each.numbers}
    past: dict[int, int] = {}
    for span in spans:
        past[span.slot] = past.get(span.slot, 0) + 1
    slots = {*now, *past}
    if snapshot.slots <= drawing.MAX_LANES and not (snapshot.kind == "rwlock" and slots):
        slots |= set(range(1, snapshot.slots + 1))

    def weight(slot: int) -> tuple[bool, float, int, int]:
        holder = now.get(slot)
        stale = holder is not None and holder.state is SlotState.STALE
        return (not stale, -holder.age if holder else 0.0, -past.get(slot, 0), slot)

    chosen = sorted(sorted(slots, key=weight)[: drawing.MAX_LANES])
    return [_lane(slot, now.get(slot), beyond=slot > snapshot.slots) for slot in chosen]


def _lane(slot: int, holder: HolderSnapshot | None, *, beyond: bool) -> Lane:
    word = _("writer") if slot == WRITER else str(slot)
    if holder is None:
        return Lane(slot, word, _("closed") if beyond else _("free"), "free")
    age = duration(holder.age) if holder.recorded else _("held")
    if holder.state is SlotState.STALE:
        return Lane(slot, word, _("stale, %(age)s") % {"age": age}, "stale")
    return Lane(slot, word, age, "held")


def _bars(snapshot: SemaphoreSnapshot, spans: Sequence[Span], scale: TimeScale, drawn: AbstractSet[int]) -> list[Bar]:
    found = []
    for span in spans:
        if span.slot not in drawn:
            continue
        event, left = span.event, scale.x(span.start)
        title = _("slot %(slot)s: %(who)s, held %(length)s from %(start)s to %(end)s, %(end_word)s") % {
            "slot": span.slot,
            "who": tables.program_text(event),
            "length": length((span.end - span.start).total_seconds()),
            "start": f"{timezone.localtime(span.start):%H:%M:%S}",
            "end": f"{timezone.localtime(span.end):%H:%M:%S}",
            "end_word": tables.word(event.what),
        }
        kind = drawing.LOST if event.what in _BADLY else drawing.PAST
        found.append(Bar(span.slot, left, scale.x(span.end) - left, kind, title))
    for holder in snapshot.holders:
        if holder.recorded:
            stale = holder.state is SlotState.STALE
            title = _("slot %(slot)s: %(who)s, held %(age)s up to now, %(state)s") % {
                "slot": holder.place,
                "who": tables.program_text(holder),
                "age": duration(holder.age),
                "state": _("stale") if stale else _("held"),
            }
            left = scale.x(scale.now - min(holder.age, WINDOW) * _SECOND)
            wide, kind = scale.x(scale.now) - left, drawing.STALE if stale else drawing.HELD
            found += [Bar(slot, left, wide, kind, title) for slot in holder.numbers if slot in drawn]
    return found


def _averages(
    snapshot: SemaphoreSnapshot, spans: Sequence[Span], minutes: Sequence[Minute], scale: TimeScale
) -> list[Bar]:
    """Return how much was held before the first hold that is drawn, if there are more than can be."""
    if len({_end(span) for span in spans}) < MAX_SPANS:
        return []
    first = min(span.end for span in spans)
    found = []
    for each in minutes:
        end = min(first, each.at + MINUTE * _SECOND)
        if each.held and end > each.at:
            part, left = min(1.0, each.held / (snapshot.slots * MINUTE)), scale.x(each.at)
            title = _("%(time)s: %(percent)d %% of all slots were held; single holds are not drawn here") % {
                "time": f"{timezone.localtime(each.at):%H:%M}",
                "percent": round(100 * part),
            }
            found.append(Bar(None, left, scale.x(end) - left, drawing.DENSE, title, drawing.density(part)))
    return found


def _marks(rare: Sequence[Event], scale: TimeScale) -> list[Mark]:
    """Return the marks of acts and deadlocks; a loss has its cross."""
    marks = []
    for event in rare:
        if event.what != LOST and (scale.now - event.at).total_seconds() < WINDOW:
            word = tables.word(event.what)
            parts = [f"{timezone.localtime(event.at):%H:%M:%S} {word}"]
            if event.by:
                parts.append(_("by %(user)s") % {"user": event.by})
            marks.append(Mark(event.at, word, " ".join([*parts, event.detail]).strip()))
    return marks


def _about(lanes: Sequence[Lane], spans: Sequence[Span], marks: Sequence[Mark]) -> str:
    """Return what somebody who does not see the timeline should know of it."""
    return _(
        "%(lanes)d slots drawn, of which %(held)d held and %(stale)d stale now; %(past)d holds that ended, %(lost)d of"
        " them taken away or lost; %(acts)d acts of operators. The table below says the same."
    ) % {
        "lanes": len(lanes),
        "held": sum(lane.kind == "held" for lane in lanes),
        "stale": sum(lane.kind == "stale" for lane in lanes),
        "past": len(spans),
        "lost": sum(span.event.what in _BADLY for span in spans),
        "acts": len(marks),
    }


def _notes(
    snapshot: SemaphoreSnapshot, lanes: Sequence[Lane], spans: Sequence[Span], minutes: Sequence[Minute]
) -> list[str]:
    """Return what the timeline leaves out."""
    notes = []
    if snapshot.slots > len(lanes) and lanes and snapshot.slots > drawing.MAX_LANES:
        notes.append(
            _("%(drawn)d of %(slots)d slots are drawn: stale ones, those held longest, and the busiest.")
            % {"drawn": len(lanes), "slots": snapshot.slots}
        )
    ended, listed = sum(each.released + each.lost for each in minutes), len({_end(span) for span in spans})
    if ended > listed * 1.02 + 2:
        text = ngettext(
            "%(ended)d hold ended in this hour; %(listed)d are drawn one by one.",
            "%(ended)d holds ended in this hour; %(listed)d are drawn one by one.",
            ended,
        )
        notes.append(text % {"ended": ended, "listed": listed})
        if listed >= MAX_SPANS:
            notes.append(_("Before the first of these: the average of all slots, minute by minute."))
    return notes


def _end(span: Span) -> tuple[object, ...]:
    return (span.end, span.event.token, span.event.pid)
