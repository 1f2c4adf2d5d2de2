"""The page of one lock: who holds it, who waits, what happened lately, and the buttons for what can be done."""

from __future__ import annotations

import datetime
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from django_sqlsem.admin.actions import Button, Buttons, permitted
from django_sqlsem.admin.display import STATES, drawn, kind_of, length, named, percent, users, visible
from django_sqlsem.admin.drawing import Bar, Lane, Mark, Panel, Range, TimeScale
from django_sqlsem.admin.lists import tabs
from django_sqlsem.conf import config
from django_sqlsem.core.durations import duration
from django_sqlsem.core.erlang import Forecast, forecast
from django_sqlsem.core.modes import MUTEX, WRITER
from django_sqlsem.history import events
from django_sqlsem.history.events import ACTS, DEADLOCK, LOST, PURGED, REVOKED, Event, Minute, Totals
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
        if (answer := live.known(request, permitted(model_admin, request), row)) is not None:
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
        "recent": None if live.is_light(request) else Recent(reading, snapshot, rare, chosen).context(),
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
        text = _paused(snapshot, _last(acts, events.PAUSED, events.DRAINED))
        by_itself = _("It is resumed by itself at %(at)s, in %(left)s.")
        text += _until(by_itself, snapshot.paused_until, snapshot.resumes_in) + _why(snapshot.paused_reason)
        notices.append(Said("paused", text, undo=buttons.undo.get("resume")))
    if snapshot.operator_slots is not None:
        text = _set_by(snapshot, _last(acts, events.RESIZED))
        by_itself = _("That ends by itself at %(at)s, in %(left)s.")
        text += _until(by_itself, snapshot.slots_until, snapshot.slots_end_in) + _why(snapshot.slots_reason)
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


def _until(text: str, end: datetime.datetime | None, left: float | None) -> str:
    """Return when what an operator has set ends by itself, if it does."""
    if end is None or left is None:
        return ""
    return " " + text % {"at": f"{end:%Y-%m-%d %H:%M} UTC", "left": length(left)}


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
    """Return what an operator has set instead of what the code says: who, and when."""
    who = visible(snapshot.slots_by or (last.by if last is not None else "")) or _("an operator")
    if last is not None:
        who = f"{who}, {timezone.localtime(last.at):%Y-%m-%d %H:%M %Z}"
    told = {"slots": snapshot.slots, "declared": snapshot.declared_slots, "who": who}
    return _("Slots set to %(slots)d by %(who)s; the code declares %(declared)d.") % told


def _waits(reading: Reading, name: str) -> list[Said]:
    """Return who waits for this lock while holding others, and who holds it while waiting for others."""
    found = [each for each in reading.waits if each.name == name or any(held.name == name for held in each.holds)]
    return [Said(f"wait {each.wait_id}", users(str(each))) for each in found[:_MAX_WAITS]]


#: Single holds are kept, and drawn, for so long.
_SINGLE: Final = 3600.0
#: How many figures are drawn at the most.
_MOST_STEPS: Final = 100
#: With fewer calls, or fewer ended holds, nothing is said of other numbers of slots.
_LEAST_CALLS, _LEAST_HOLDS, _LEAST_SECONDS = 50, 30, 240.0
#: Who gave up within this many seconds did not wait.
_AT_ONCE: Final = 0.05
#: How a past hold ended that did not end well.
_BADLY: Final = (LOST, REVOKED, PURGED)


class Recent:
    """What happened to one lock in a range: read at once, and then drawn, added up and listed.

    ``rare``: its rare events. Raises ``BackendError``.
    """

    def __init__(self, reading: Reading, snapshot: SemaphoreSnapshot, rare: list[Event], chosen: Range) -> None:
        name, now = snapshot.name, reading.now
        self.snapshot, self.rare, self.chosen = snapshot, rare, chosen
        self.recorded = config(reading.using).history
        ages = [holder.age for holder in snapshot.holders if holder.recorded] + [each.age for each in snapshot.waiters]
        first = queries.since(name)
        if first is not None:
            ages.append((now - first).total_seconds())
        #: How far back the page looks: no further than anything is known.
        self.window = min(chosen.seconds, max([60.0, *ages]))
        self.young = self.window < chosen.seconds
        step = drawing.step_of(self.window, _MOST_STEPS)
        self.scale = TimeScale(now, self.window, step)
        # Of all that is known the oldest step counts as a whole.
        window = self.window + step if self.young else self.window
        self.minutes = queries.minutes(name, window=window, step=step, now=now)
        #: How many seconds the figures are about.
        self.covered = max(60.0, min(self.window, (now - self.minutes[0].at).total_seconds()))
        single = self.window <= _SINGLE
        self.spans = queries.spans(name, window=self.window, now=now) if single else []
        self.latest = queries.events(name, limit=_MAX_EVENTS)
        self.lanes = self._lanes() if single else []
        self.marks = self._marks()

    def context(self) -> dict[str, Any]:
        """Return all of it for the template."""
        up_to = timezone.localtime(self.scale.now)  # templates do not convert it where USE_TZ is off
        return {
            "up_to": up_to,
            "zone": f"{up_to:%Z}",
            "title": _("Last %(window)s") % {"window": duration(self.window)} if self.young else self.chosen.title,
            "young": self.young,
            "drawing": drawing.together(self._panels(), self.marks, self.scale),
            "notes": self._notes(),
            "bars": tables.bars(self.spans) if self.lanes else None,
            "minutes": tables.by_minute(self.minutes, self.scale.words),
            "facts": self._figures() if self.recorded else [],
            "sizing": self._sizing(),
            "acts": tables.happened(
                "sqlsem-rare", _("Losses, deadlocks and operators' actions"), self.rare, _("None is recorded.")
            ),
            "events": tables.happened("sqlsem-events", _("Recent events"), self.latest, _("Nothing is recorded.")),
        }

    def _panels(self) -> list[Panel]:
        """Return what is drawn: slots or how many were held, who waited, who was refused, and how long it all took."""
        snapshot, minutes, scale = self.snapshot, self.minutes, self.scale
        panels = []
        if self.lanes:
            bars = [*self._bars({lane.slot for lane in self.lanes}), *self._averages()]
            title = _("Who held which slot")
            panels.append(drawing.timeline(self.lanes, bars, title=title, description=self._about()))
        if snapshot.units is None and snapshot.slots > len(self.lanes):
            ended = {nth: each.held for nth, each in enumerate(minutes)}
            held = drawing.held_by_step(ended, snapshot, scale.now, scale.step, len(minutes))
            now = _("%(held)d of %(slots)d now") % {"held": snapshot.held, "slots": snapshot.slots}
            panels.append(
                drawing.amounts(
                    "sqlsem-used", _("Held"), [(each.at, held.get(nth, 0.0)) for nth, each in enumerate(minutes)],
                    scale, kind="granted", said=lambda value: _("%(held).1f held on average") % {"held": value},
                    beside=[(now, "now")], most=snapshot.slots,
                )
            )  # fmt: skip
        waited = (_("%(count)d now") % {"count": snapshot.waiting}, "away" if snapshot.waiting else "none")
        refused = sum(each.turned_away for each in minutes)
        by_step = [(each.at, float(each.turned_away)) for each in minutes]
        return [
            *panels,
            drawing.amounts(
                "sqlsem-queue", _("Waiting"), [(each.at, self._queued(each)) for each in minutes], scale, kind="away",
                said=lambda value: _("%(count).2g waited on average") % {"count": value}, beside=[waited],
            ),
            drawing.amounts(
                "sqlsem-refused", _("Refused"), by_step, scale, kind="away",
                said=lambda value: _("%(count)d refused") % {"count": value},
                beside=[(str(refused) if refused else _("none"), "away" if refused else "none")],
            ),
            drawing.lengths(
                "sqlsem-holds", _("How long it was held"), [(each.at, each.holds) for each in minutes], scale
            ),
            drawing.lengths(
                "sqlsem-waits", _("How long they waited"), [(each.at, each.waits) for each in minutes], scale
            ),
        ]  # fmt: skip

    def _queued(self, step: Minute) -> float:
        """Return how many waited on average in a step: how long they did in all, over its length (Little's law)."""
        begun = (self.scale.now - step.at).total_seconds()
        ended = max(0.0, begun - self.scale.step)
        waited = step.waits.mean * (step.granted + step.turned_away) if step.waits else 0.0
        waited += sum(max(0.0, min(each.age, begun) - ended) * each.waiting for each in self.snapshot.waiters)
        return waited / max(1.0, min(self.scale.step, begun))

    def _figures(self) -> list[tuple[str, str]]:
        """Return the figures of the range with their words, as the overview has them."""
        holds = [each.holds.longest for each in self.minutes if each.holds]
        waits = [each.waits.longest for each in self.minutes if each.waits]
        added = ("granted", "released", "turned_away", "lost", "held")
        sums: dict[str, Any] = {field: sum(getattr(each, field) for each in self.minutes) for field in added}
        totals = Totals(**sums, longest_hold=max(holds, default=0.0), longest_wait=max(waits, default=0.0))
        found = lately(self.snapshot, totals, window=self.covered)
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

    def _sizing(self) -> dict[str, Any] | None:
        """Return what to expect with a slot fewer and one and two more, beside what happened; ``None``: too little."""
        snapshot, minutes, window = self.snapshot, self.minutes, self.covered
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
        patience = self._patience()
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
            "assumes": _("This is Erlang C, which assumes that calls come at random, each for itself, at the same rate"
                         " all the time, that short holds are common and long ones rare, and %(last)s")
                       % {"last": last},
        }  # fmt: skip

    def _patience(self) -> float | None:
        """Return after how many seconds calls were refused; ``None`` if none was."""
        gave_up = [event.waited for event in self.latest if event.what == events.TIMED_OUT and event.waited is not None]
        if not gave_up:  # waits in vain count as waits
            gave_up = [each.waits.longest for each in self.minutes if each.turned_away and each.waits]
        usual = statistics.median(gave_up) if gave_up else None
        return 0.0 if usual is not None and usual < _AT_ONCE else usual

    def _lanes(self) -> list[Lane]:
        """Return the lanes in the order of slots: all of them, or of many those that matter most."""
        snapshot = self.snapshot
        if snapshot.units is not None:
            return []
        now: dict[int, HolderSnapshot] = {slot: each for each in snapshot.holders for slot in each.numbers}
        past = Counter(span.slot for span in self.spans)
        slots = {*now, *past}
        if snapshot.slots <= drawing.MAX_LANES and not (snapshot.kind == "rwlock" and slots):
            slots |= set(range(1, snapshot.slots + 1))

        def weight(slot: int) -> tuple[bool, float, int, int]:
            holder = now.get(slot)
            return (_kind(holder) != drawing.STALE, -holder.age if holder else 0.0, -past[slot], slot)

        chosen = sorted(sorted(slots, key=weight)[: drawing.MAX_LANES])
        return [Lane(slot, _("writer") if slot == WRITER else str(slot), _kind(now.get(slot))) for slot in chosen]

    def _bars(self, drawn: AbstractSet[int]) -> Iterator[Bar]:
        scale = self.scale
        for span in self.spans:
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
            yield Bar(span.slot, left, scale.x(span.end) - left, kind, title)
        for holder in self.snapshot.holders:
            if holder.recorded:
                kind = _kind(holder)
                title = _("slot %(slot)s: %(who)s, held %(age)s up to now, %(state)s") % {
                    "slot": holder.place,
                    "who": tables.program_text(holder),
                    "age": duration(holder.age),
                    "state": STATES[kind],
                }
                left = scale.x(scale.now - min(holder.age, scale.window) * _SECOND)
                wide = scale.x(scale.now) - left
                yield from (Bar(slot, left, wide, kind, title) for slot in holder.numbers if slot in drawn)

    def _averages(self) -> Iterator[Bar]:
        """Yield how much was held before the first hold that is drawn, if there are more than can be."""
        if self._listed() < MAX_SPANS:
            return
        scale, first = self.scale, min(span.end for span in self.spans)
        for each in self.minutes:
            end = min(first, each.at + scale.step * _SECOND)
            if each.held and end > each.at:
                part, left = min(1.0, each.held / (self.snapshot.slots * scale.step)), scale.x(each.at)
                title = _("%(time)s: %(percent)d %% of all slots were held; single holds are not drawn here") % {
                    "time": scale.words(each.at),
                    "percent": round(100 * part),
                }
                yield Bar(None, left, scale.x(end) - left, drawing.DENSE, title, drawing.density(part))

    def _listed(self) -> int:
        """Return how many holds are drawn one by one: one of several slots is several spans."""
        return len({(span.end, span.event.token, span.event.pid) for span in self.spans})

    def _marks(self) -> list[Mark]:
        """Return the marks of acts and deadlocks; a loss has its cross."""
        marks = []
        for event in self.rare:
            if event.what != LOST and (self.scale.now - event.at).total_seconds() < self.window:
                word = tables.word(event.what)
                parts = [f"{timezone.localtime(event.at):%H:%M:%S} {word}"]
                if event.by:
                    parts.append(_("by %(user)s") % {"user": event.by})
                marks.append(Mark(event.at, word, " ".join([*parts, event.detail]).strip()))
        return marks

    def _about(self) -> str:
        """Return what somebody who does not see the timeline should know of it."""
        kinds = Counter(lane.kind for lane in self.lanes)
        return _(
            "%(lanes)d slots drawn, of which %(held)d held and %(stale)d stale now; %(past)d holds that ended, %(lost)d"
            " of them taken away or lost; %(acts)d actions of operators. The table below says the same."
        ) % {
            "lanes": len(self.lanes),
            "held": kinds[drawing.HELD],
            "stale": kinds[drawing.STALE],
            "past": len(self.spans),
            "lost": sum(span.event.what in _BADLY for span in self.spans),
            "acts": len(self.marks),
        }

    def _notes(self) -> list[str]:
        """Return what the timeline leaves out."""
        notes, lanes, slots = [], self.lanes, self.snapshot.slots
        if lanes and slots > len(lanes) and slots > drawing.MAX_LANES:
            text = _("%(drawn)d of %(slots)d slots are drawn: stale ones, those held longest, and the busiest.")
            notes.append(text % {"drawn": len(lanes), "slots": slots})
        ended, listed = sum(each.released + each.lost for each in self.minutes), self._listed()
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


def _expected(found: Forecast, slots: int) -> tables.Row:
    """Return a row of what to expect with a number of slots."""
    change = found.slots - slots
    text = _("%(slots)d (%(change)+d)") if change else _("%(slots)d, as computed")
    cells = [
        text % {"slots": found.slots, "change": change},
        percent(found.used),
        _("grows without end") if math.isinf(found.mean_wait) else length(found.mean_wait),
        percent(found.refused),
    ]
    return tables.Row(f"sizing {change:+d}", cells)


def _kind(holder: HolderSnapshot | None) -> str:
    return "free" if holder is None else drawing.STALE if holder.state is SlotState.STALE else drawing.HELD
