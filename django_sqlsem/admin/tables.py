"""The tables on the page of one lock and on those that ask before an act."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _
from django.utils.translation import ngettext, pgettext_lazy

from django_sqlsem.admin.display import EMPTY, STATES, held_since, instant, lease_left, length, users
from django_sqlsem.core.names import key_of
from django_sqlsem.history import events

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise
    from django.utils.safestring import SafeString

    from django_sqlsem.history.events import Event, Minute, Percentiles, Span
    from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot, WaiterSnapshot


#: So many rows of a table are shown.
MAX_ROWS: Final = 25

#: What happened, in a word or two.
_WORDS: Final[dict[str, _StrPromise]] = {
    events.GRANTED: pgettext_lazy("event", "granted"),
    events.RELEASED: pgettext_lazy("event", "released"),
    events.TIMED_OUT: pgettext_lazy("event", "turned away"),
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

    @property
    def has_buttons(self) -> bool:
        """Whether any row has buttons, which need a column."""
        return any(row.buttons for row in self.rows)


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
    return Table("sqlsem-holders", _("Holders"), _holder_columns(), rows, note, _("Nobody holds it."))


def meant(key: str, caption: str, found: Sequence[HolderSnapshot]) -> Table:
    """Return the holders that an act is about, or not about, with all that tells them from others."""
    rows = []
    for each in found:
        since = f"{each.acquired_at:%Y-%m-%d %H:%M:%S} UTC" if each.recorded else EMPTY
        row = f"{key} {key_of(each.name)} {each.slot} {each.token}"
        rows.append(Row(row, [users(each.name), *_holder(each), since]))
    return Table(key, caption, [_("Name"), *_holder_columns(), _("Since")], rows)


def _holder_columns() -> list[str]:
    return [_("Slot"), _("State"), _("Held by"), _("Work, user"), _("For, token"), _("Lease left")]


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
        _work(holder),
        format_html('{} <span class="sqlsem-second"><code>{}</code></span>', held_since(holder), holder.token),
        lease_left(holder),
    ]


def semaphores(found: Sequence[SemaphoreSnapshot]) -> Table:
    """Return the locks that an act is about."""
    rows = []
    for each in found:
        paused = _("yes") if each.paused else _("no")
        cells = [users(each.name), each.slots, each.declared_slots, each.held, each.waiting, paused]
        rows.append(Row(f"semaphore {key_of(each.name)}", cells))
    columns = [_("Name"), _("Slots"), _("Declared by the code"), _("Held"), _("Waiting"), _("Paused")]
    return Table("sqlsem-semaphores", _("Semaphores"), columns, rows)


def waiters(snapshot: SemaphoreSnapshot) -> Table:
    """Return who waits: a process has one place, whatever waits inside it."""
    rows = [
        Row(
            f"waiter {waiter.host} {waiter.pid} {waiter.waiting_since.timestamp():.2f}",
            [
                instant(waiter.age, waiter.waiting_since),
                _program(waiter),
                _work(waiter),
                waiter.waiting,
                _wanted(snapshot, waiter),
            ],
        )
        for waiter in snapshot.waiters[:MAX_ROWS]
    ]
    return Table(
        "sqlsem-waiters",
        _("Waiters, first come first"),
        [_("For"), _("Waits in"), _("Work, user"), _("How many"), _("Wants")],
        rows,
        _left_out(len(snapshot.waiters), _("those who came first are listed")),
        _("Nobody waits."),
    )


def happened(key: str, caption: str, found: Sequence[Event], empty: str) -> Table:
    """Return events, the newest first."""
    rows = [
        Row(
            f"{key} {event.at.timestamp():.6f} {event.what} {event.slot} {event.pid}",
            [
                moment(event.at),
                format_html('<span class="sqlsem-event sqlsem-{}">{}</span>', event.what, word(event.what)),
                EMPTY if event.slot is None else ", ".join(map(str, event.slots[:8])),
                users(_place(event)) or EMPTY,
                users(event.label) or EMPTY,
                EMPTY if event.waited is None else length(event.waited),
                EMPTY if event.held is None else length(event.held),
                users(event.by) or EMPTY,
                users(event.detail) or EMPTY,
            ],
        )
        for event in found[:MAX_ROWS]
    ]
    columns = [_("When"), _("What"), _("Slot"), _("Who"), _("Work"), _("Waited"), _("Held"), _("By"), _("Detail")]
    return Table(key, caption, columns, rows, empty=empty)


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
                format_html("{} {}", _program(span.event), users(span.event.label)),
                word(span.event.what),
            ],
        )
        for span in newest[:MAX_ROWS]
    ]
    columns = [_("Slot"), _("From"), _("To"), _("Held"), _("By"), _("Ended")]
    note = _left_out(len(found), _("the newest are listed"))
    return Table("sqlsem-spans", _("Past holds"), columns, rows, note, _("No hold has ended."))


def by_minute(found: Sequence[Minute]) -> Table:
    """Return the figures of the charts, the newest minute first; those in which nothing happened are left out."""
    rows = [
        Row(
            f"minute {each.at.timestamp():.0f}",
            [
                f"{timezone.localtime(each.at):%H:%M}",
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
    columns = [_("Minute"), _("Granted"), _("Turned away"), _("Lost")]
    columns += [_("Wait p50"), _("Wait p95"), _("Longest wait"), _("Hold p50"), _("Hold p95"), _("Longest hold")]
    return Table("sqlsem-minutes", _("Minute by minute"), columns, rows, empty=_("Nothing is recorded."))


def word(what: str) -> str:
    """Return an event in a word."""
    return str(_WORDS.get(what, what))


def moment(at: datetime.datetime) -> SafeString:
    """Return an instant in the current time zone; with the date, if that is not today."""
    local = timezone.localtime(at)
    today = timezone.localtime().date() == local.date()
    text = f"{local:%H:%M:%S}" if today else f"{local:%Y-%m-%d %H:%M:%S}"
    return format_html(
        '<time datetime="{}" title="{}">{}</time>', at.isoformat(), f"{local:%Y-%m-%d %H:%M:%S %Z}", text
    )


def _place(someone: HolderSnapshot | WaiterSnapshot | Event) -> str:
    if not someone.host and not someone.pid:
        return getattr(someone, "program", "")
    return _("%(host)s pid %(pid)d") % {"host": someone.host, "pid": someone.pid}


def program_text(someone: HolderSnapshot | WaiterSnapshot | Event) -> str:
    """Return who somebody is, in one line: the program, and the work it does."""
    return ", ".join(filter(None, (_place(someone), someone.label)))


def _program(someone: HolderSnapshot | WaiterSnapshot | Event) -> SafeString:
    quiet = [_("pid %(pid)d") % {"pid": someone.pid}] if someone.pid else []
    quiet.append(users(someone.thread))
    if session := getattr(someone, "session_id", None):
        quiet.append(_("session %(session)d") % {"session": session})
    quiet += [users(getattr(someone, each, "")) for each in ("login", "program")]
    second = format_html_join(" \N{MIDDLE DOT} ", "{}", ((each,) for each in quiet if each))
    return format_html('{} <span class="sqlsem-second">{}</span>', users(someone.host) or EMPTY, second)


def _work(someone: HolderSnapshot | WaiterSnapshot) -> SafeString:
    work, user = users(someone.label) or EMPTY, users(someone.user)
    return format_html('{} <span class="sqlsem-second">{}</span>', work, user) if user else format_html("{}", work)


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
