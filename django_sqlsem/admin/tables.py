"""The tables on the page of one lock and on those that ask before an act."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from django.utils import timezone
from django.utils.functional import Promise
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext, pgettext_lazy

from django_sqlsem.admin.display import (
    EMPTY,
    STATES,
    held_since,
    instant,
    lasting,
    lease_left,
    length,
    named,
    today,
    users,
)
from django_sqlsem.conf import config
from django_sqlsem.core.identity import ids_of
from django_sqlsem.core.names import key_of
from django_sqlsem.history import events
from django_sqlsem.history.events import Event, Minute, Percentiles, Span
from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot, WaiterSnapshot, expected_waits

#: Who holds, waits, or did something.
Someone: TypeAlias = HolderSnapshot | WaiterSnapshot | Event
#: How many rows of a table are shown.
MAX_ROWS: Final = 25

#: What happened, in a word or two.
_WORDS: Final = {
    events.GRANTED: pgettext_lazy("event", "granted"),
    events.RELEASED: pgettext_lazy("event", "released"),
    events.TIMED_OUT: pgettext_lazy("event", "refused"),
    events.LOST: pgettext_lazy("event", "lost"),
    events.DEADLOCK: pgettext_lazy("event", "deadlock"),
    events.STOP_ASKED: pgettext_lazy("event", "asked to stop"),
    events.REVOKED: pgettext_lazy("event", "revoked"),
    events.PURGED: pgettext_lazy("event", "purged"),
    events.RESIZED: pgettext_lazy("event", "slots set"),
    events.PAUSED: pgettext_lazy("event", "paused"),
    events.RESUMED: pgettext_lazy("event", "resumed"),
    events.DRAINED: pgettext_lazy("event", "drained"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A row: its key tells it from others when the page refreshes itself."""

    key: str
    cells: Sequence[Any]
    #: The buttons beside it, if there are any.
    buttons: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a caption, and a note about what it leaves out."""

    key: str
    caption: str
    columns: Sequence[Any]
    rows: Sequence[Row]
    note: str = ""
    #: What is said instead if there are no rows.
    empty: str = ""
    #: Where there is little room: ``cards``, ``lines``; else it stays a table, and scrolls.
    look: str = ""

    @property
    def has_buttons(self) -> bool:
        """Whether any row has buttons, which need a column."""
        return any(row.buttons for row in self.rows)

    @property
    def labelled(self) -> list[tuple[Row, list[tuple[Any, Any, bool]]]]:
        """Each row with its cells: under what heading, what, and whether that is nothing."""
        return [
            (row, [(column, cell, cell == EMPTY) for column, cell in zip(self.columns, row.cells, strict=True)])
            for row in self.rows
        ]


def holders(snapshot: SemaphoreSnapshot, beside: Callable[[HolderSnapshot], Sequence[Any]]) -> Table:
    """Return who holds. ``beside(holder)`` are the buttons of one."""
    found = list(snapshot.holders)
    if len(found) > MAX_ROWS:  # what may need somebody's attention
        found.sort(key=lambda each: (each.state.value != "stale", not each.stop_by, -each.age))
    rows = [
        Row(f"holder {each.slot} {each.token}", _holder(each, snapshot.role(each)), beside(each))
        for each in found[:MAX_ROWS]
    ]
    note = _left_out(len(snapshot.holders), _("the stale ones and the oldest are listed"))
    return Table("sqlsem-holders", _("Holders"), _holder_columns(), rows, note, _("Nobody holds it."), "cards")


def meant(key: str, caption: str, found: Sequence[HolderSnapshot]) -> Table:
    """Return the holders that an act is about, or not about, with all that tells them from others."""
    rows = [
        Row(f"{key} {key_of(each.name)} {each.slot} {each.token}", [users(each.name), *_holder(each)]) for each in found
    ]
    return Table(key, caption, [_("Name"), *_holder_columns()], rows, look="cards")


def _holder_columns() -> list[str]:
    return [_("Slot"), _("State"), _("Held by"), _("Work, user"), _("For, since"), _("Lease left, token")]


def _holder(holder: HolderSnapshot, role: str = "") -> list[Any]:
    state: Any = users(str(STATES[holder.state]))
    if role:
        state = format_html("{} ({})", state, role)
    if holder.stop_by:
        asked = users(holder.stop_by)
        state = format_html(_('{} <span class="sqlsem-asked">asked to stop by {}</span>'), state, asked)
    return [
        holder.place,
        format_html('<span class="sqlsem-state sqlsem-{}">{}</span>', holder.state.value, state),
        _program(holder),
        _work(holder, holder.acquired_at if holder.recorded else None),
        format_html('{} <span class="sqlsem-second">{}</span>', held_since(holder), moment(holder.acquired_at))
        if holder.recorded
        else EMPTY,
        format_html('{} <span class="sqlsem-second"><code>{}</code></span>', lease_left(holder), holder.token),
    ]


def semaphores(found: Sequence[SemaphoreSnapshot]) -> Table:
    rows = []
    for each in found:
        paused = _("yes") if each.paused else _("no")
        cells = [users(each.name), each.slots, each.declared_slots, each.held, each.waiting, paused]
        rows.append(Row(f"semaphore {key_of(each.name)}", cells))
    columns = [_("Name"), _("Slots"), _("Declared by the code"), _("Held"), _("Waiting"), _("Paused")]
    return Table("sqlsem-semaphores", _("Locks"), columns, rows, look="cards")


def waiters(snapshot: SemaphoreSnapshot) -> Table:
    """Return who waits, in order: a process has one place, whatever waits inside it."""
    expected = expected_waits(snapshot)
    rows = [
        Row(
            f"waiter {waiter.host} {waiter.pid} {waiter.waiting_since.timestamp():.1f}",
            [
                place,
                instant(waiter.age, waiter.waiting_since),
                _soon(seconds),
                _program(waiter),
                _work(waiter, waiter.waiting_since),
                waiter.waiting,
                _wanted(snapshot, waiter),
            ],
        )
        for place, (waiter, seconds) in enumerate(zip(snapshot.waiters[:MAX_ROWS], expected, strict=False), 1)
    ]
    return Table(
        "sqlsem-waiters",
        _("Queue"),
        [_("Place"), _("Waiting for"), _("Served in about"), _("Waits in"), _("Work, user"), _("How many"), _("Wants")],
        rows,
        _left_out(len(snapshot.waiters), _("those who came first are listed")),
        _("Nobody waits."),
        "cards",
    )


def happened(
    key: str,
    caption: str,
    found: Sequence[Event],
    empty: str,
    *,
    most: int = MAX_ROWS,
    dated: bool = False,
    link: Callable[[str], str] | None = None,
) -> Table:
    """Return events, the newest first; of what comes and goes with the work, a run of the same is one row.

    ``dated``: with the day, also of today. ``link(name)``: with the names, where each leads; else all are of one.
    """
    runs: list[list[Event]] = []
    for event in found:
        if runs and event.what == runs[-1][0].what and event.what in events.PASSING:
            runs[-1].append(event)
        else:
            runs.append([event])
    rows = [
        Row(
            f"{key} {run[-1].at.timestamp():.6f} {run[-1].what} {run[-1].slot} {run[-1].pid}",
            [
                _times(run[-1].at, run[0].at, dated=dated),
                _counted(run),
                *([format_html('<a href="{}">{}</a>', link(run[0].name), named(run[0].name))] if link else []),
                _slots_of(run),
                _some([_place(run[0])] if len(run) == 1 else [event.host for event in run]),
                _work(run[0], run[0].at) if len(run) == 1 else _some(event.label for event in run),
                *([] if link else [_longest(event.waited for event in run), _longest(event.held for event in run)]),
                _act(run[0]),
            ],
        )
        for run in runs[:most]
    ]
    columns = [_("When"), _("What"), *([_("Name")] if link else []), _("Slot"), _("Who"), _("Work")]
    columns += [*([] if link else [_("Waited"), _("Held")]), _("By, detail")]
    return Table(key, caption, columns, rows, empty=empty, look="cards" if link else "lines")


def bars(found: Sequence[Span]) -> Table:
    """Return the past holds of the timeline, the newest first."""
    newest = sorted(found, key=lambda span: (span.end, span.slot), reverse=True)
    rows = [
        Row(
            f"span {span.slot} {span.end.timestamp():.6f}",
            [
                span.slot,
                moment(span.start),
                moment(span.end),
                length((span.end - span.start).total_seconds()),
                format_html("{} {}", _program(span.event), _work(span.event, span.start, span.end)),
                word(span.event.what),
            ],
        )
        for span in newest[:MAX_ROWS]
    ]
    columns = [_("Slot"), _("From"), _("To"), _("Held"), _("By"), _("Ended")]
    note = _left_out(len(found), _("the newest are listed"))
    return Table("sqlsem-spans", _("Past holds"), columns, rows, note, _("No hold has ended."))


def by_minute(found: Sequence[Minute], words: Callable[[datetime.datetime], str]) -> Table:
    """Return the figures of the drawing, the newest first; steps in which nothing happened are left out."""
    rows = [
        Row(
            f"minute {each.at.timestamp():.0f}",
            [
                words(each.at),
                each.granted,
                each.turned_away,
                each.lost,
                *_percentiles(each.waits),
                *_percentiles(each.holds),
            ],
        )
        for each in reversed(found)
        if each.granted or each.released or each.turned_away or each.lost or each.waits or each.holds
    ]
    columns = [_("From"), _("Granted"), _("Refused"), _("Lost")]
    columns += [_("Wait p50"), _("Wait p95"), _("Longest wait"), _("Hold p50"), _("Hold p95"), _("Longest hold")]
    return Table("sqlsem-minutes", _("Step by step"), columns, rows, empty=_("Nothing is recorded."))


def word(what: str) -> str:
    return str(_WORDS.get(what, what))


def moment(at: datetime.datetime, *, dated: bool = False) -> SafeString:
    """Return an instant in the current time zone; with the date, if that is not today or wanted."""
    local = timezone.localtime(at)
    text = f"{local:%H:%M:%S}" if not dated and local.date() == today() else f"{local:%Y-%m-%d %H:%M:%S}"
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        at.isoformat(timespec="seconds"),
        f"{local:%Y-%m-%d %H:%M:%S %Z}",
        text,
    )


def _place(someone: Someone) -> str:
    if not someone.host and not someone.pid:
        return getattr(someone, "program", "")
    return _("%(host)s pid %(pid)d") % {"host": someone.host, "pid": someone.pid}


def program_text(someone: Someone) -> str:
    """Return who somebody is, in one line: the program, and the work it does."""
    return ", ".join(filter(None, (_place(someone), someone.label)))


def _program(someone: Someone) -> SafeString:
    quiet = [_("pid %(pid)d") % {"pid": someone.pid}] if someone.pid else []
    quiet.append(users(someone.thread))
    if session := getattr(someone, "session_id", None):
        quiet.append(_("session %(session)d") % {"session": session})
    quiet += [users(getattr(someone, each, "")) for each in ("login", "program")]
    second = format_html_join(" \N{MIDDLE DOT} ", "{}", ((each,) for each in quiet if each))
    return format_html('{} <span class="sqlsem-second">{}</span>', users(someone.host) or EMPTY, second)


def _work(someone: Someone, since: datetime.datetime | None, until: datetime.datetime | None = None) -> SafeString:
    """Return the work, its user, and where more is known of it, as ``SQLSEM["LINKS"]`` says."""
    work = named(someone.label) or EMPTY
    links = [
        format_html('<a href="{}" target="_blank" rel="noopener noreferrer">{}</a>', address, word)
        for word, address in _links(someone, since, until)
    ]
    second = [users(someone.user), *links]
    shown = format_html_join(" \N{MIDDLE DOT} ", "{}", ((each,) for each in second if each))
    return format_html('{} <span class="sqlsem-second">{}</span>', work, shown) if shown else format_html("{}", work)


#: What the links are called.
_LINK_WORDS: Final = {
    "task": pgettext_lazy("link", "Task"),
    "trace": pgettext_lazy("link", "Trace"),
    "logs": pgettext_lazy("link", "Logs"),
}
#: So much around a piece of work is looked for in logs.
_AROUND: Final = datetime.timedelta(minutes=1)


def _links(
    someone: Someone, since: datetime.datetime | None, until: datetime.datetime | None
) -> Iterable[tuple[Promise, str]]:
    templates = config().links
    if not templates or not (someone.host or someone.label):
        return
    now = datetime.datetime.now(datetime.UTC)
    begin, end = (since or now) - _AROUND, (until or now) + _AROUND
    known = ids_of(someone.label) | {"name": someone.name, "host": someone.host, "pid": str(someone.pid)}
    known |= {"thread": someone.thread, "user": someone.user}
    known |= {"since": begin.isoformat(), "since_ms": f"{begin.timestamp() * 1000:.0f}"}
    known |= {"until": end.isoformat(), "until_ms": f"{end.timestamp() * 1000:.0f}"}
    fields = {key: quote(text, safe="") for key, text in known.items()}
    for key, word in _LINK_WORDS.items():
        if key in templates:
            try:
                yield word, templates[key].format_map(fields)
            except KeyError:  # no task, say
                continue


def _soon(seconds: float | None) -> str:
    """Return when somebody may be served: the script counts down."""
    if seconds is None:
        return EMPTY
    return lasting(-max(1.0, seconds))


def _times(first: datetime.datetime, last: datetime.datetime, *, dated: bool) -> SafeString:
    """Return when a run of events was: ``21:43:01 to 05``."""
    if (last - first).total_seconds() < 1:
        return moment(last, dated=dated)
    one, other = timezone.localtime(first), timezone.localtime(last)
    end = f"{other:%S}" if f"{one:%d %H:%M}" == f"{other:%d %H:%M}" else f"{other:%H:%M:%S}"
    return format_html(_("{} to {}"), moment(first), end)


def _counted(run: Sequence[Event]) -> SafeString:
    what, many = run[0].what, f" \N{MULTIPLICATION SIGN} {len(run)}" if len(run) > 1 else ""
    return format_html('<span class="sqlsem-event sqlsem-{}">{}{}</span>', what, word(what), many)


def _slots_of(run: Sequence[Event]) -> str:
    slots = sorted({slot for event in run for slot in event.slots})
    if len(slots) > 8:
        return _("%(count)d slots") % {"count": len(slots)}
    return ", ".join(map(str, slots)) or EMPTY


def _act(event: Event) -> SafeString | str:
    """Return who did it, and why."""
    by, detail = users(event.by), users(event.detail)
    if by and detail:
        return format_html('{} <span class="sqlsem-second">{}</span>', by, detail)
    return by or detail or EMPTY


def _some(texts: Iterable[str]) -> SafeString | str:
    """Return a few of several texts, each once."""
    found = [each for each in dict.fromkeys(texts) if each]
    if not found:
        return EMPTY
    shown = format_html_join(", ", "{}", ((users(each),) for each in found[:3]))
    more = len(found) - 3
    if more <= 0:
        return shown
    return format_html(ngettext("{} and {} other", "{} and {} others", more), shown, more)


def _longest(found: Iterable[float | None]) -> str:
    """Return a length of time, or of several the longest."""
    known = [each for each in found if each is not None]
    if not known:
        return EMPTY
    if len(known) == 1 or length(min(known)) == length(max(known)):
        return length(known[0])
    return _("%(least)s to %(most)s") % {"least": length(min(known)), "most": length(max(known))}


def _wanted(snapshot: SemaphoreSnapshot, waiter: WaiterSnapshot) -> str:
    if role := snapshot.role(waiter):
        return role
    if not waiter.take:
        return _("all slots")
    if snapshot.units is not None:
        return ngettext("%(count)d unit", "%(count)d units", waiter.take) % {"count": waiter.take}
    return ngettext("%(count)d slot", "%(count)d slots", waiter.take) % {"count": waiter.take}


def _percentiles(found: Percentiles | None) -> Iterable[str]:
    if found is None:
        return (EMPTY,) * 3
    return (length(found.p50), length(found.p95), length(found.longest))


def _left_out(count: int, which: str) -> str:
    if count <= MAX_ROWS:
        return ""
    return _("%(shown)d of %(count)d: %(which)s.") % {"shown": MAX_ROWS, "count": count, "which": which}
