"""What is wrong now, in sentences: since when, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_sqlsem.admin.display import EMPTY, instant, lasting, length, named, program_of, users, visible
from django_sqlsem.models import SemaphoreRow
from django_sqlsem.snapshots import SlotState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from django_sqlsem.queries import Reading
    from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot


#: So many names of each kind of trouble have a sentence; the others are counted.
MOST: Final = 4
#: The states that are trouble, the worst first.
_STATES: Final = ("stale", "waiting", "paused")


@dataclass(frozen=True, slots=True)
class Wrong:
    """A sentence about what is wrong. ``look``: how bad it is."""

    key: str
    text: Any
    look: str = ""


@dataclass(frozen=True, slots=True)
class Worst:
    """The names that are worst off by their state, with how many there are in that state."""

    names: Mapping[str, tuple[list[str], int]]

    def all(self) -> list[str]:
        """Return all these names."""
        return [name for names, _count in self.names.values() for name in names]


def worst(reading: Reading) -> Worst:
    """Choose the names that sentences are about: of those that wait, the ones that have waited longest."""
    survey, found = reading.survey, {}
    for state in _STATES:
        counts = survey.listed(state).counts
        if survey.in_use is None:
            some = list(counts)[:MOST]
            rows = SemaphoreRow.objects.using(reading.using).filter(pk__in=some)
            names = list(rows.values_list("name", flat=True)) if some else []
        else:
            known = sorted(
                (survey.in_use[key] for key in counts), key=lambda each: (-(each.longest_wait or 0.0), each.name)
            )
            names = [each.name for each in known[:MOST]]
        found[state] = (names, len(counts))
    return Worst(found)


def wrong(reading: Reading, chosen: Worst, address: Callable[[str], str], states: Callable[[str], str]) -> list[Wrong]:
    """Return the sentences, the worst first. ``address(name)``, ``states(state)``: where a name or a state leads."""
    known = reading.by_name(chosen.all())
    found = []
    says = {"stale": _stale, "waiting": _queue, "paused": _paused}
    for state in _STATES:
        names, count = chosen.names[state]
        said = [(name, known[name]) for name in names if name in known]
        found += [
            Wrong(
                f"{state} {name}",
                format_html('<a href="{}">{}</a>: {}', address(name), named(name), says[state](snapshot)),
                state,
            )
            for name, snapshot in said
        ]
        if count > len(said) and said:
            more = ngettext("and %(count)d other", "and %(count)d others", count - len(said))
            more %= {"count": count - len(said)}
            found.append(Wrong(f"more {state}", format_html('<a href="{}">{}</a>', states(state), more), state))
    count, name = reading.disputed
    if count:
        text = ngettext(
            "{}: processes declare different numbers of slots; the larger one is the bound.",
            "{}, and {} others: processes declare different numbers of slots; the larger one is the bound.",
            count if count < 2 else 2,
        )
        link = format_html('<a href="{}">{}</a>', address(name), named(name))
        found.append(Wrong("disputed", format_html(text, link, count - 1), "disputed"))
    return found


def deadlocks(reading: Reading) -> list[Wrong]:
    """Return a sentence for each deadlock, with both sides."""
    found = []
    for deadlock in reading.deadlocks:
        who = sorted(wait.wait_id for wait in deadlock.waits)
        text = format_html("<strong>{}</strong> {}", _("Deadlock:"), users(str(deadlock)))
        found.append(Wrong(f"deadlock {' '.join(who)}", text, "bad"))
    return found


def _stale(snapshot: SemaphoreSnapshot) -> SafeString:
    gone = [holder for holder in snapshot.holders if holder.state is SlotState.STALE]
    text = ngettext("{count} slot is stale: {who} seems gone{since}. It comes back by itself.",
                    "{count} slots are stale: {who} seem gone{since}. They come back by themselves.",
                    len(gone))  # fmt: skip
    who = format_html_join(", ", "{}", ((_who(holder),) for holder in gone[:2]))
    return format_html(text, count=len(gone), who=who, since=_silent(gone))


def _silent(gone: list[HolderSnapshot]) -> SafeString | str:
    """Return for how long the lease of the first has run out, if it has."""
    late = [each for each in gone if each.lease_left is not None and each.lease_left <= 0 and each.expires_at]
    if not late:
        return ""
    first = min(late, key=lambda each: cast("float", each.lease_left))
    left = -cast("float", first.lease_left)
    return format_html(_(", its lease ran out {} ago"), instant(left, cast("Any", first.expires_at)))


def _who(holder: HolderSnapshot) -> str:
    return ", ".join(each for each in (program_of(holder), visible(holder.label)) if each and each != EMPTY)


def _queue(snapshot: SemaphoreSnapshot) -> SafeString:
    first = max((waiter.age for waiter in snapshot.waiters), default=0.0)
    told: dict[str, Any] = {"count": snapshot.waiting, "since": lasting(first)}
    told |= {"held": snapshot.held, "slots": snapshot.slots}
    if snapshot.units is not None:
        text = ngettext("{count} waits for units, for {since}.", "{count} wait for units, the first for {since}.",
                        snapshot.waiting)  # fmt: skip
    elif snapshot.held >= snapshot.slots:
        text = ngettext("full, {held} of {slots}; {count} waits, for {since}.",
                        "full, {held} of {slots}; {count} wait, the first for {since}.",
                        snapshot.waiting)  # fmt: skip
    else:
        text = ngettext("{count} waits, for {since}, with {held} of {slots} held.",
                        "{count} wait, the first for {since}, with {held} of {slots} held.",
                        snapshot.waiting)  # fmt: skip
    said = format_html(text, **told)
    oldest = max((each for each in snapshot.holders if each.recorded), key=lambda each: each.age, default=None)
    if oldest is None:
        return said
    usual = "" if snapshot.usual_hold is None else _(", usually %(usual)s") % {"usual": length(snapshot.usual_hold)}
    by = oldest.label or oldest.host
    return format_html(_("{} Longest hold: {}{}{}."), said, lasting(oldest.age), usual,
                       format_html(_(", by {}"), users(by)) if by else "")  # fmt: skip


def _paused(snapshot: SemaphoreSnapshot) -> SafeString:
    by = format_html(_(" by {}"), users(snapshot.paused_by)) if snapshot.paused_by else ""
    since = ""
    if snapshot.paused_at is not None:
        age = max(0.0, (timezone.now() - snapshot.paused_at).total_seconds())
        since = format_html(_(" for {}"), instant(age, snapshot.paused_at))
    why = format_html(": {}", users(snapshot.paused_reason.rstrip(" ."))) if snapshot.paused_reason else ""
    words = _("draining{}{}{}.") if snapshot.draining else _("paused{}{}{}.")
    said = format_html(words, since, by, why)
    if snapshot.resumes_in is not None:
        said = format_html(_("{} Resumes in {}."), said, lasting(-snapshot.resumes_in))
    return said
