"""The last hour of one lock: its timeline, its charts, and what is said about them."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_sqlsem import queries
from django_sqlsem.admin import drawing, tables
from django_sqlsem.admin.drawing import Average, Bar, Lane, Mark, TimeScale, length
from django_sqlsem.conf import config
from django_sqlsem.core.durations import duration
from django_sqlsem.core.modes import WRITER
from django_sqlsem.history.events import ACTS, DEADLOCK, LOST, PURGED, REVOKED, Totals
from django_sqlsem.history.reading import MAX_SPANS
from django_sqlsem.serialize import lately
from django_sqlsem.snapshots import SlotState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from django.utils.safestring import SafeString

    from django_sqlsem.admin.tables import Table
    from django_sqlsem.history.events import Event, Minute, Span
    from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot


#: What the drawings look back on, in seconds, and one step of the charts.
WINDOW: Final = 3600.0
STEP: Final = 60.0
#: How a past hold ended that did not end well.
_BADLY: Final = (LOST, REVOKED, PURGED)
_SECOND: Final = datetime.timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing under its heading."""

    title: str
    drawing: SafeString


@dataclass(frozen=True, slots=True)
class Recent:
    """What the page shows of the last hour."""

    up_to: datetime.datetime
    zone: str
    timeline: SafeString | None
    timeline_notes: Sequence[str]
    bars: Table
    facts: Sequence[tuple[str, str]]
    charts: Sequence[Chart]
    minutes: Table
    acts: Table
    events: Table


def recent(snapshot: SemaphoreSnapshot) -> Recent:
    """Read and draw the last hour. Raises ``BackendError``."""
    name = snapshot.name
    scale = TimeScale(queries.history_clock(), WINDOW)
    spans = queries.spans(name, window=WINDOW)
    minutes = queries.minutes(name, window=WINDOW, step=STEP)
    rare = queries.events(name, what=(*ACTS, DEADLOCK, LOST), limit=2 * drawing.MAX_MARKS)
    acts = [event for event in rare if event.what != LOST]
    lanes = _lanes(snapshot, spans)
    timeline = None
    if lanes:
        title = _("Who held which slot in the last hour")
        about = _about(lanes, spans, minutes, acts, scale)
        timeline = drawing.draw(
            lanes,
            _bars(snapshot, spans, scale, {lane.slot for lane in lanes}),
            _marks(acts, scale),
            _averages(snapshot, spans, minutes),
            scale,
            title=title,
            description=about,
        )
    return Recent(
        up_to=timezone.localtime(scale.now),  # templates do not convert it where USE_TZ is off
        zone=f"{timezone.localtime(scale.now):%Z}",
        timeline=timeline,
        timeline_notes=_notes(snapshot, lanes, spans, minutes),
        bars=tables.bars(spans),
        facts=_facts(snapshot, minutes),
        charts=_charts(minutes, scale),
        minutes=tables.by_minute(minutes),
        acts=tables.rare(rare),
        events=tables.recent_events(queries.events(name, limit=tables.MAX_ROWS)),
    )


def _facts(snapshot: SemaphoreSnapshot, minutes: Sequence[Minute]) -> list[tuple[str, str]]:
    """Return the figures of the hour with their words, as the overview has them; none if nothing is recorded."""
    if not config(queries.locks_database()).history:
        return []
    holds = [each.holds.longest for each in minutes if each.holds]
    waits = [each.waits.longest for each in minutes if each.waits]
    found = lately(
        snapshot,
        Totals(
            granted=sum(each.granted for each in minutes),
            released=sum(each.released for each in minutes),
            turned_away=sum(each.turned_away for each in minutes),
            lost=sum(each.lost for each in minutes),
            held=sum(each.held for each in minutes),
            longest_hold=max(holds, default=0.0),
            longest_wait=max(waits, default=0.0),
        ),
    )
    facts = [
        (_("granted"), str(found.granted)),
        (_("turned away"), str(found.turned_away)),
        (_("lost"), str(found.lost)),
        (_("longest wait"), length(found.longest_wait or 0.0)),
        (_("longest hold"), length(found.longest_hold or 0.0)),
    ]
    if found.utilisation is not None:
        little = 0 < found.utilisation < 0.01
        used = _("< 1 %") if little else _("%(percent)d %%") % {"percent": round(100 * found.utilisation)}
        facts.insert(0, (_("used"), used))
    return facts


def _charts(minutes: Sequence[Minute], scale: TimeScale) -> list[Chart]:
    waits, holds = [(each.at, each.waits) for each in minutes], [(each.at, each.holds) for each in minutes]
    titles = _("Waits, minute by minute"), _("Holds, minute by minute"), _("Granted and turned away, minute by minute")
    found = (
        drawing.numbers("sqlsem-numbers", titles[2], minutes, scale, STEP),
        drawing.lengths("sqlsem-waits", titles[0], waits, scale, STEP),
        drawing.lengths("sqlsem-holds", titles[1], holds, scale, STEP),
    )
    order = titles[2], titles[0], titles[1]
    return [Chart(title, chart) for title, chart in zip(order, found, strict=True) if chart is not None]


def _lanes(snapshot: SemaphoreSnapshot, spans: Sequence[Span]) -> list[Lane]:
    """Return the lanes in the order of slots: all of them, or of many those that matter most."""
    if snapshot.tokens is not None:
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
        event = span.event
        title = _("slot %(slot)s: %(who)s, held %(length)s from %(start)s to %(end)s, %(end_word)s") % {
            "slot": span.slot,
            "who": tables.program_text(event),
            "length": length((span.end - span.start).total_seconds()),
            "start": f"{timezone.localtime(span.start):%H:%M:%S}",
            "end": f"{timezone.localtime(span.end):%H:%M:%S}",
            "end_word": tables.word(event.what),
        }
        kind = drawing.LOST if event.what in _BADLY else drawing.PAST
        found.append(Bar(span.slot, span.start, span.end, kind, title))
    for holder in snapshot.holders:
        slots = [slot for slot in holder.numbers if slot in drawn]
        if holder.recorded and slots:
            title = _("slot %(slot)s: %(who)s, held %(age)s up to now, %(state)s") % {
                "slot": holder.place,
                "who": tables.program_text(holder),
                "age": duration(holder.age),
                "state": _("stale") if holder.state is SlotState.STALE else _("held"),
            }
            kind = drawing.STALE if holder.state is SlotState.STALE else drawing.HELD
            start = scale.now - min(holder.age, WINDOW * 2) * _SECOND
            found += [Bar(slot, start, scale.now, kind, title) for slot in slots]
    return found


def _marks(acts: Sequence[Event], scale: TimeScale) -> list[Mark]:
    marks = []
    for event in acts:
        if (scale.now - event.at).total_seconds() < WINDOW:
            word = tables.word(event.what)
            parts = [f"{timezone.localtime(event.at):%H:%M:%S} {word}"]
            if event.by:
                parts.append(_("by %(user)s") % {"user": event.by})
            marks.append(Mark(event.at, word, " ".join([*parts, event.detail]).strip()))
    return marks


def _averages(snapshot: SemaphoreSnapshot, spans: Sequence[Span], minutes: Sequence[Minute]) -> list[Average]:
    """Return how much was held before the first hold that is drawn, if there are more than can be."""
    if len({_end(span) for span in spans}) < MAX_SPANS:
        return []
    first = min(span.end for span in spans)
    found = []
    for each in minutes:
        end = min(first, each.at + STEP * _SECOND)
        if each.held and end > each.at:
            part = min(1.0, each.held / (snapshot.slots * STEP))
            title = _("%(time)s: %(percent)d %% of all slots were held; single holds are not drawn here") % {
                "time": f"{timezone.localtime(each.at):%H:%M}",
                "percent": round(100 * part),
            }
            found.append(Average(each.at, end, part, title))
    return found


def _about(
    lanes: Sequence[Lane], spans: Sequence[Span], minutes: Sequence[Minute], acts: Sequence[Event], scale: TimeScale
) -> str:
    """Return what somebody who does not see the timeline should know of it."""
    held = sum(lane.kind == "held" for lane in lanes)
    stale = sum(lane.kind == "stale" for lane in lanes)
    return _(
        "%(lanes)d slots drawn, of which %(held)d held and %(stale)d stale now; %(past)d holds that ended, %(lost)d of"
        " them taken away or lost; %(acts)d acts of operators. The table below says the same."
    ) % {
        "lanes": len(lanes),
        "held": held,
        "stale": stale,
        "past": len(spans),
        "lost": sum(span.event.what in _BADLY for span in spans),
        "acts": len(_marks(acts, scale)),
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
