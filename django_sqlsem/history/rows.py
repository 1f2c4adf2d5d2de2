"""The rows of the history, as they are written: values in the order of ``statements.EVENT_COLUMNS`` and the other."""

from __future__ import annotations

from typing import Any

from django_sqlsem.conf import Config
from django_sqlsem.history import buckets
from django_sqlsem.history.events import PASSING
from django_sqlsem.history.recorder import Entry, told
from django_sqlsem.history.tallies import MINUTE_US, Tally
from django_sqlsem.identity import printable


def event_row(at_us: int, entry: Entry, settings: Config) -> list[Any] | None:
    """Return the values of an event, or ``None`` if such are not kept."""
    kept = settings.history_grants if entry.what in PASSING else settings.history_acts
    if not kept:
        return None
    claim, grant, who = entry.claim, entry.grant, entry.claim.holder
    return [
        claim.resource.key,
        claim.resource.name,
        at_us,
        at_us + round(kept * 1e6),
        entry.what,
        grant.slots[0] if grant is not None and grant.slots else None,
        grant.tokens[0] if grant is not None and grant.tokens else None,
        None if entry.waited is None else round(entry.waited * 1e6),
        None if entry.held is None else round(entry.held * 1e6),
        who.host,
        who.pid,
        who.thread,
        who.label,
        who.user,
        printable(entry.by, 150),
        printable(told(entry), 500),
    ]


def minute_row(at_us: int, tally: Tally, writer: int, settings: Config) -> list[Any]:
    """Return the values of what was counted in a minute."""
    return [
        tally.resource.key,
        at_us,
        writer,
        at_us + MINUTE_US + round(settings.history_minutes * 1e6),
        tally.granted,
        tally.released,
        tally.turned_away,
        tally.lost,
        tally.held_us,
        tally.longest_hold_us,
        tally.longest_wait_us,
        buckets.to_text(tally.holds),
        buckets.to_text(tally.waits),
    ]
