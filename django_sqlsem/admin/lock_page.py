"""The page of one lock: who holds it, who waits, what happened lately, and the buttons for what can be done."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final, cast

from django.contrib.admin.models import LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_sqlsem import queries
from django_sqlsem.admin import drawing, live, tables
from django_sqlsem.admin.actions import Button, Buttons
from django_sqlsem.admin.display import drawn, kind_of, length, named, percent, users, visible
from django_sqlsem.admin.drawing import Bar, Lane, Mark, Panel, Range, TimeScale
from django_sqlsem.admin.lists import tabs
from django_sqlsem.conf import config
from django_sqlsem.core.durations import duration
from django_sqlsem.core.erlang import Forecast, forecast
from django_sqlsem.core.modes import MUTEX, WRITER
from django_sqlsem.history import events
from django_sqlsem.history.events import ACTS, DEADLOCK, LOST, PURGED, REVOKED, Event, Minute, Span, Totals
from django_sqlsem.history.reading import MAX_SPANS
from django_sqlsem.queries import Reading
from django_sqlsem.serialize import lately
from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot, SlotState

#: How many sentences about who waits for whom.
_MAX_WAITS: Final = 50
#: What counts as a rare event, and how many of the newest are shown.
_RARE: Final = (*ACTS, DEADLOCK, LOST)
_MAX_RARE: Final = 2 * drawing.MAX_MARKS
#: The most actions that the audit log shows.
_MAX_AUDIT: Final = 200
#: The most events of all kinds that are read, to be folded into rows.
_MAX_EVENTS: Final = 200
_SECOND: Final = datetime.timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Said:
    """A sentence, or a figure with its word and a note; ``loud`` if somebody should see it."""

    key: str
    text: Any
    word: str = ""
    note: str = ""
    loud: bool = False
    #: What undoes what it tells of.
    undo: Button | None = None


def lock_page(model_admin: Any, request: HttpRequest, object_id: str) -> HttpResponse:
    """Return the page of one lock, or what changes of it. Raises ``BackendError``."""
    if request.method not in ("GET", "HEAD"):
        raise PermissionDenied
    row = _seen(
        model_admin, request, lambda: live.trusted_row(request) or model_admin.find(request, unquote(object_id))
    )
    if row is not None:
        if (answer := live.known(request, model_admin.allowed(request), row)) is not None:
            return answer
        row = model_admin.known(request, [row])[0]
    if row is None or row.known is None:
        if live.is_fragment(request):
            return live.plain(_("There is no such lock any more."), 404)
        return cast(
            "HttpResponse", model_admin._get_obj_does_not_exist_redirect(request, model_admin.opts, unquote(object_id))
        )
    snapshot, reading = row.known, live.reading_of(request)
    buttons = Buttons(model_admin, request, snapshot)
    # Without the drawings nothing is told of them but who paused it or set its slots.
    told = not live.is_light(request) or snapshot.paused or snapshot.operator_slots is not None
    rare = queries.events(snapshot.name, what=_RARE, limit=_MAX_RARE) if told else []
    chosen = drawing.chosen_range(request)
    context = {
        "acts": buttons,
        "waits": _waits(reading, snapshot.name),  # before the deadlocks, which come with them
        "notices": _notices(reading, snapshot, rare, buttons),
        "facts": _facts(snapshot),
        "cells": drawn(snapshot),
        "holders": tables.holders(snapshot, buttons.beside),
        "waiters": tables.waiters(snapshot),
        "recent": None if live.is_light(request) else _recent(reading, snapshot, rare, chosen),
        "ranges": drawing.range_links(request, chosen),
    }
    template = "admin/sqlsem/_one.html"
    if live.is_fragment(request):
        return live.fragment(request, template, context)
    context |= {
        "sqlsem_part": live.part(request, template, context),
        "title": visible(snapshot.name),
        "subtitle": None,
        "shown_name": named(snapshot.name),
        "kind": kind_of(snapshot.kind),
        "original": row,
        "light_refreshes": chosen.light,
        "preserved_filters": model_admin.get_preserved_filters(request),
    }
    return cast("HttpResponse", live.page(model_admin, request, "admin/sqlsem/one.html", context))


def _seen(model_admin: Any, request: HttpRequest, find: Callable[[], Any]) -> Any:
    """Return the row, if the user may see it. Who may see none does not learn, by time either, whether it is there."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    row = find()
    if row is not None and not model_admin.has_view_permission(request, row):
        raise PermissionDenied
    return row


def audit_log(model_admin: Any, request: HttpRequest, object_id: str) -> HttpResponse | None:
    """Return what operators did to a lock, by the admin or the command; ``None``: there is no such lock."""
    row = _seen(model_admin, request, lambda: model_admin.get_object(request, unquote(object_id)))
    if row is None:
        return None
    entries = LogEntry.objects.filter(
        object_id=unquote(object_id), content_type=get_content_type_for_model(model_admin.model)
    )
    context = {
        "title": _("Audit log: %(name)s") % {"name": visible(row.name)},
        "subtitle": None,
        "shown_name": named(row.name),
        "object": row,
        "entries": entries.select_related("user").order_by("-action_time")[:_MAX_AUDIT],
    }
    return _audited(model_admin, request, queries.events(row.name, what=ACTS, limit=_MAX_AUDIT), context)


def audit_of_all(model_admin: Any, request: HttpRequest) -> HttpResponse:
    """Return what operators did to any lock."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    context = {"title": _("Audit log"), "sqlsem_tabs": tabs(model_admin, request, "audit")}
    return _audited(model_admin, request, queries.acts(limit=_MAX_AUDIT), context, link=model_admin.address_of)


def _audited(
    model_admin: Any, request: HttpRequest, done: Sequence[Event], context: dict[str, Any], **how: Any
) -> HttpResponse:
    caption, nothing = _("What operators did"), _("Nothing is recorded.")
    table = tables.happened("sqlsem-audit", caption, done, nothing, most=_MAX_AUDIT, dated=True, **how)
    days = math.ceil(config(queries.locks_database()).history_acts / 86400)
    kept = _("By the admin, the command and programs, with their reasons; kept for %(days)d days.") % {"days": days}
    context |= {"table": table, "kept": kept}
    return cast("HttpResponse", live.page(model_admin, request, "admin/sqlsem/audit_log.html", context))


def _last(acts: list[Event], *what: str) -> Event | None:
    return next((act for act in acts if act.what in what), None)


def _notices(reading: Reading, snapshot: SemaphoreSnapshot, acts: list[Event], buttons: Buttons) -> list[Said]:
    bad = [str(each) for each in reading.deadlocks if snapshot.name in each.names]
    notices = [
        Said(f"deadlock {number}", format_html(_("<strong>Deadlock:</strong> {}"), visible(text)), loud=True)
        for number, text in enumerate(bad)
    ]
    if snapshot.stale:
        text = ngettext(
            "%(count)d slot is stale: its holder seems gone. It comes back by itself.",
            "%(count)d slots are stale: their holders seem gone. They come back by themselves.",
            snapshot.stale,
        )
        notices.append(Said("stale", text % {"count": snapshot.stale}))
    if snapshot.paused:
        text = _paused(snapshot, _last(acts, events.PAUSED, events.DRAINED)) + _until(snapshot)
        notices.append(Said("paused", text, undo=buttons.undo.get("resume")))
    if snapshot.operator_slots is not None:
        text = _set_by(snapshot, _last(acts, events.RESIZED))
        notices.append(Said("resized", text, undo=buttons.undo.get("undo_slots")))
    if snapshot.other_kind:
        text = _(
            "It is in use as a mutex and as a semaphore: one is let in at a time while anybody uses it as a mutex."
        )
        notices.append(Said("kinds", text))
    elif snapshot.other_declared_slots is not None and snapshot.kind != MUTEX:
        text = _("Processes disagree: some declare %(one)d slots, others %(other)d. The larger number is the bound.")
        numbers = {"one": snapshot.declared_slots, "other": snapshot.other_declared_slots}
        notices.append(Said("declared", text % numbers))
    if not config(reading.using).history:
        notices.append(Said("history", _("The history is turned off: only operators' acts and what is now are shown.")))
    return [*notices, *(Said(f"note {number}", note) for number, note in enumerate(queries.notes()))]


def _paused(snapshot: SemaphoreSnapshot, last: Event | None) -> str:
    who = snapshot.paused_by or (last.by if last is not None else "")
    by = _(" by %(user)s") % {"user": visible(who)} if who else ""
    held = len([holder for holder in snapshot.holders if not holder.expired])
    if last is not None and last.what == events.DRAINED:
        if not held:
            return _("Drained%(by)s: nobody holds it, and nothing is granted until it is resumed.") % {"by": by}
        text = ngettext(
            "Draining%(by)s: %(count)d holder has not left yet. Nothing is granted until it is resumed.",
            "Draining%(by)s: %(count)d holders have not left yet. Nothing is granted until it is resumed.",
            held,
        )
        return text % {"by": by, "count": held}
    return _("Paused%(by)s: nothing is granted until it is resumed. Holders keep what they have.") % {"by": by}


def _until(snapshot: SemaphoreSnapshot) -> str:
    """Return what else is known of a pause: why, and until when."""
    told = ""
    if snapshot.paused_until is not None and snapshot.resumes_in is not None:
        when = {"at": f"{snapshot.paused_until:%Y-%m-%d %H:%M} UTC", "left": length(snapshot.resumes_in)}
        told += " " + _("It is resumed by itself at %(at)s, in %(left)s.") % when
    return told + _why(snapshot.paused_reason)


def _why(reason: str) -> str:
    return " " + _("Reason: %(reason)s") % {"reason": visible(reason)} if reason else ""


def _facts(snapshot: SemaphoreSnapshot) -> list[Said]:
    note = _("as the code declares") if snapshot.operator_slots is None else _("set by an operator")
    slots = Said("slots", snapshot.slots, _("slots"), note)
    note = ""
    if snapshot.away:
        note = ngettext("%(count)d task will come back", "%(count)d tasks will come back", snapshot.away)
        note %= {"count": snapshot.away}
    waiting = Said("waiting", snapshot.waiting, _("waiting"), note, loud=bool(snapshot.waiting))
    if snapshot.units is not None:
        return [Said("units", snapshot.units, _("units")), waiting]
    found = [
        slots,
        Said("held", snapshot.held, _("held")),
        Said("free", snapshot.free, _("free")),
        Said("stale", snapshot.stale, _("stale"), loud=bool(snapshot.stale)),
        waiting,
    ]
    if snapshot.usual_hold is not None:
        found.append(Said("usual", length(snapshot.usual_hold), _("usual hold")))
    return found


def _set_by(snapshot: SemaphoreSnapshot, last: Event | None) -> str:
    """Return what an operator has set instead of what the code says: who, when and why."""
    who = visible(snapshot.slots_by or (last.by if last is not None else "")) or _("an operator")
    if last is not None:
        who = f"{who}, {timezone.localtime(last.at):%Y-%m-%d %H:%M %Z}"
    told = {"slots": snapshot.slots, "declared": snapshot.declared_slots, "who": who}
    text = _("Slots set to %(slots)d by %(who)s; the code declares %(declared)d.") % told
    if snapshot.slots_until is not None and snapshot.slots_end_in is not None:
        when = {"at": f"{snapshot.slots_until:%Y-%m-%d %H:%M} UTC", "left": length(snapshot.slots_end_in)}
        text += " " + _("That ends by itself at %(at)s, in %(left)s.") % when
    return text + _why(snapshot.slots_reason)


def _waits(reading: Reading, name: str) -> list[Said]:
    """Return who waits for this lock while holding others, and who holds it while waiting for others."""
    found = [each for each in reading.waits if each.name == name or any(held.name == name for held in each.holds)]
    return [Said(f"wait {each.wait_id}", users(str(each))) for each in found[:_MAX_WAITS]]


#: Single holds are kept, and drawn, for so long.
_SINGLE: Final = 3600.0
#: How many figures are drawn at the most.
_MOST_STEPS: Final = 100


def _recent(reading: Reading, snapshot: SemaphoreSnapshot, rare: list[Event], chosen: Range) -> dict[str, Any]:
    """Read and draw what happened in a range, for the template. Raises ``BackendError``."""
    name, now = snapshot.name, reading.now
    known = _known_for(snapshot, queries.since(name), now)
    window = min(chosen.seconds, max(60.0, known))
    step = drawing.step_of(window, _MOST_STEPS)
    scale = TimeScale(now, window, step)
    young = window < chosen.seconds
    # Of all that is known the oldest step counts as a whole.
    minutes = queries.minutes(name, window=window + step if young else window, step=step, now=now)
    covered = max(60.0, min(window, (now - minutes[0].at).total_seconds()))
    spans = queries.spans(name, window=window, now=now) if window <= _SINGLE else []
    latest = queries.events(name, limit=_MAX_EVENTS)
    marks = _marks(rare, scale)
    lanes = _lanes(snapshot, spans) if window <= _SINGLE else []
    panels = _panels(snapshot, lanes, spans, minutes, marks, scale)
    up_to = timezone.localtime(now)  # templates do not convert it where USE_TZ is off
    return {
        "up_to": up_to,
        "zone": f"{up_to:%Z}",
        "title": _("Last %(window)s") % {"window": duration(window)} if young else chosen.title,
        "young": young,
        "drawing": drawing.together(panels, marks, scale),
        "notes": _notes(snapshot, lanes, spans, minutes),
        "bars": tables.bars(spans) if lanes else None,
        "minutes": tables.by_minute(minutes, scale.words),
        "facts": _figures(reading, snapshot, minutes, covered),
        "sizing": _sizing(snapshot, minutes, latest, covered),
        "acts": tables.happened(
            "sqlsem-rare", _("Losses, deadlocks and operators' actions"), rare, _("None is recorded.")
        ),
        "events": tables.happened("sqlsem-events", _("Recent events"), latest, _("Nothing is recorded.")),
    }


def _known_for(snapshot: SemaphoreSnapshot, first: datetime.datetime | None, now: datetime.datetime) -> float:
    """Return for how many seconds anything is known of a lock."""
    ages = [holder.age for holder in snapshot.holders if holder.recorded] + [each.age for each in snapshot.waiters]
    if first is not None:
        ages.append((now - first).total_seconds())
    return max(ages, default=0.0)


def _panels(
    snapshot: SemaphoreSnapshot,
    lanes: Sequence[Lane],
    spans: Sequence[Span],
    minutes: Sequence[Minute],
    marks: Sequence[Mark],
    scale: TimeScale,
) -> list[Panel]:
    """Return what is drawn: slots or how many were held, who waited, who was refused, and how long it all took."""
    panels = []
    if lanes:
        bars = _bars(snapshot, spans, scale, {lane.slot for lane in lanes})
        bars += _averages(snapshot, spans, minutes, scale)
        title = _("Who held which slot")
        panels.append(drawing.timeline(lanes, bars, title=title, description=_about(lanes, spans, marks)))
    if snapshot.units is None and (not lanes or snapshot.slots > len(lanes)):
        ended = {nth: each.held for nth, each in enumerate(minutes)}
        held = drawing.held_by_step(ended, snapshot, scale.now, scale.step, len(minutes))
        now = _("%(held)d of %(slots)d now") % {"held": snapshot.held, "slots": snapshot.slots}
        panels.append(
            drawing.amounts(
                "sqlsem-used", _("Held"), [(each.at, held.get(nth, 0.0)) for nth, each in enumerate(minutes)], scale,
                kind="granted",
                said=lambda value: _("%(held).1f held on average") % {"held": value},
                beside=[(now, "now")], most=snapshot.slots,
            )
        )  # fmt: skip
    waited = (_("%(count)d now") % {"count": snapshot.waiting}, "away" if snapshot.waiting else "none")
    refused = sum(each.turned_away for each in minutes)
    by_step = [(each.at, float(each.turned_away)) for each in minutes]
    panels += [
        drawing.amounts(
            "sqlsem-queue", _("Waiting"), _queued(snapshot, minutes, scale), scale, kind="away",
            said=lambda value: _("%(count).2g waited on average") % {"count": value}, beside=[waited],
        ),
        drawing.amounts(
            "sqlsem-refused", _("Refused"), by_step, scale, kind="away",
            said=lambda value: _("%(count)d refused") % {"count": value},
            beside=[(str(refused) if refused else _("none"), "away" if refused else "none")],
        ),
        drawing.lengths("sqlsem-holds", _("How long it was held"), [(each.at, each.holds) for each in minutes], scale),
        drawing.lengths("sqlsem-waits", _("How long they waited"), [(each.at, each.waits) for each in minutes], scale),
    ]  # fmt: skip
    return panels


def _queued(
    snapshot: SemaphoreSnapshot, minutes: Sequence[Minute], scale: TimeScale
) -> list[tuple[datetime.datetime, float]]:
    """Return how many waited on average in each step: how long they waited in all, over the step (Little's law)."""
    ages = [(waiter.age, waiter.waiting) for waiter in snapshot.waiters]
    return [
        (
            each.at,
            ((each.waits.mean * (each.granted + each.turned_away) if each.waits else 0.0)
             + _overlap(each.at, ages, scale)) / _length_of(each.at, scale),
        )
        for each in minutes
    ]  # fmt: skip


def _length_of(at: datetime.datetime, scale: TimeScale) -> float:
    """Return how much of a step is over."""
    return max(1.0, min(scale.step, (scale.now - at).total_seconds()))


def _overlap(at: datetime.datetime, ages: Iterable[tuple[float, int]], scale: TimeScale) -> float:
    """Return for how long, in all, those of this many ages were there in a step."""
    begun = (scale.now - at).total_seconds()
    ended = max(0.0, begun - scale.step)
    return sum(max(0.0, min(age, begun) - ended) * count for age, count in ages)


def _figures(
    reading: Reading, snapshot: SemaphoreSnapshot, minutes: Sequence[Minute], window: float
) -> list[tuple[str, str]]:
    """Return the figures of the range with their words, as the overview has them; none if nothing is recorded."""
    if not config(reading.using).history:
        return []
    holds = [each.holds.longest for each in minutes if each.holds]
    waits = [each.waits.longest for each in minutes if each.waits]
    added = ("granted", "released", "turned_away", "lost", "held")
    sums: dict[str, Any] = {field: sum(getattr(each, field) for each in minutes) for field in added}
    totals = Totals(**sums, longest_hold=max(holds, default=0.0), longest_wait=max(waits, default=0.0))
    found = lately(snapshot, totals, window=window)
    facts = [
        (_("granted"), str(found.granted)),
        (_("refused"), str(found.turned_away)),
        (_("lost"), str(found.lost)),
        (_("longest wait"), length(found.longest_wait or 0.0)),
        (_("longest hold"), length(found.longest_hold or 0.0)),
    ]
    if found.utilisation is not None:
        facts.insert(0, (_("used"), percent(found.utilisation)))
    return facts


#: With fewer calls, or fewer ended holds, nothing is said of other numbers of slots.
_LEAST_CALLS, _LEAST_HOLDS, _LEAST_SECONDS = 50, 30, 240.0
#: Who gave up within this many seconds did not wait.
_AT_ONCE: Final = 0.05


def _sizing(
    snapshot: SemaphoreSnapshot, minutes: Sequence[Minute], latest: Sequence[Event], window: float
) -> dict[str, Any] | None:
    """Return what to expect with one slot fewer and one and two more, beside what happened; ``None``: too little."""
    calls = sum(each.granted + each.turned_away for each in minutes)
    refused = sum(each.turned_away for each in minutes)
    ended = sum(each.holds.count for each in minutes if each.holds)
    if snapshot.kind != "semaphore" or calls < _LEAST_CALLS or ended < _LEAST_HOLDS or window < _LEAST_SECONDS:
        return None
    held = sum(each.held for each in minutes)
    hold, waits = held / ended, [each.waits for each in minutes if each.waits]
    load = calls / window * hold
    if not load:
        return None
    patience = _patience(minutes, latest)
    wanted = [each for each in range(snapshot.slots - 1, snapshot.slots + 3) if each > 0]
    rows = [_expected(forecast(load, hold, slots, patience), snapshot.slots) for slots in wanted]
    waited = sum(each.mean * each.count for each in waits) / max(1, sum(each.count for each in waits))
    happened = [
        _("%(slots)d, what happened") % {"slots": snapshot.slots},
        percent(min(1.0, held / (snapshot.slots * window))),
        length(waited),
        percent(refused / calls),
    ]
    rows.insert(wanted.index(snapshot.slots) + 1, tables.Row("sizing now", happened))
    columns = [_("Slots"), _("Used"), _("Mean wait"), _("Refused")]
    table = tables.Table("sqlsem-sizing", _("How many slots do I need?"), columns, rows)
    told = {"calls": calls, "hold": length(hold), "load": f"{load:.2g}", "patience": length(patience or 0.0)}
    if patience:
        last = _("that nobody waits longer than %(patience)s, as those did not who were refused.") % told
    elif patience == 0:
        last = _("that nobody waits, as those did not who were refused.")
    else:
        last = _("that whoever waits is served in the end.")
    return {
        "table": table,
        "load": _("%(calls)d calls, held for %(hold)s on average: %(load)s slots would be busy on average.") % told,
        "assumes": _("This is Erlang C, which assumes that calls come at random, each for itself, at the same rate all"
                     " the time, that short holds are common and long ones rare, and %(last)s") % {"last": last},
    }  # fmt: skip


def _patience(minutes: Sequence[Minute], latest: Sequence[Event]) -> float | None:
    """Return after how many seconds calls were refused; ``None`` if none was."""
    gave_up = [event.waited for event in latest if event.what == events.TIMED_OUT and event.waited is not None]
    if not gave_up:  # waits in vain count as waits
        gave_up = [each.waits.longest for each in minutes if each.turned_away and each.waits]
    usual = statistics.median(gave_up) if gave_up else None
    return 0.0 if usual is not None and usual < _AT_ONCE else usual


def _expected(found: Forecast, slots: int) -> tables.Row:
    """Return a row of what to expect with a number of slots."""
    change = found.slots - slots
    word = str(found.slots) if not change else _("%(slots)d (%(change)+d)") % {"slots": found.slots, "change": change}
    cells = [
        word if change else _("%(slots)d, as computed") % {"slots": slots},
        percent(found.used),
        _("grows without end") if math.isinf(found.mean_wait) else length(found.mean_wait),
        percent(found.refused),
    ]
    return tables.Row(f"sizing {change:+d}", cells)


#: How a past hold ended that did not end well.
_BADLY: Final = (LOST, REVOKED, PURGED)


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
    return [Lane(slot, _("writer") if slot == WRITER else str(slot), _kind(now.get(slot))) for slot in chosen]


def _kind(holder: HolderSnapshot | None) -> str:
    if holder is None:
        return "free"
    return "stale" if holder.state is SlotState.STALE else "held"


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
            left = scale.x(scale.now - min(holder.age, scale.window) * _SECOND)
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
        end = min(first, each.at + scale.step * _SECOND)
        if each.held and end > each.at:
            part, left = min(1.0, each.held / (snapshot.slots * scale.step)), scale.x(each.at)
            title = _("%(time)s: %(percent)d %% of all slots were held; single holds are not drawn here") % {
                "time": scale.words(each.at),
                "percent": round(100 * part),
            }
            found.append(Bar(None, left, scale.x(end) - left, drawing.DENSE, title, drawing.density(part)))
    return found


def _marks(rare: Sequence[Event], scale: TimeScale) -> list[Mark]:
    """Return the marks of acts and deadlocks; a loss has its cross."""
    marks = []
    for event in rare:
        if event.what != LOST and (scale.now - event.at).total_seconds() < scale.window:
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
        " them taken away or lost; %(acts)d actions of operators. The table below says the same."
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
    if lanes and ended > listed * 1.02 + 2:
        text = ngettext(
            "%(ended)d hold ended in this time; %(listed)d are drawn one by one.",
            "%(ended)d holds ended in this time; %(listed)d are drawn one by one.",
            ended,
        )
        notes.append(text % {"ended": ended, "listed": listed})
        if listed >= MAX_SPANS:
            notes.append(_("Before the first of these: the average of all slots, minute by minute."))
    return notes


def _end(span: Span) -> tuple[object, ...]:
    return (span.end, span.event.token, span.event.pid)
