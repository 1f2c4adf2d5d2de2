"""Snapshots as plain data: what the admin's JSON and ``manage.py locks --format json`` both say of a lock."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Final

from django_sqlsem.history.events import Totals
from django_sqlsem.snapshots import SemaphoreSnapshot

#: The time that figures are about, in seconds.
WINDOW: Final = 3600.0

_OF_SESSIONS: Final = ("session_id", "session_us", "login", "program", "recorded")


@dataclass(frozen=True, slots=True)
class Lately:
    """What one lock was like in the last hour, with what goes on now. Lengths are seconds.

    ``None``: not known, as no history is kept; of the utilisation also where there are no slots.
    """

    granted: int | None = None
    released: int | None = None
    turned_away: int | None = None
    lost: int | None = None
    #: The part of all slots' time in which they were held, from 0 to 1.
    utilisation: float | None = None
    longest_hold: float | None = None
    longest_wait: float | None = None


def lately(
    snapshot: SemaphoreSnapshot, totals: Totals | None, *, recorded: bool = True, window: float = WINDOW
) -> Lately:
    """Return what ``totals`` of the last ``window`` seconds and the holders and waiters of this moment amount to.

    ``recorded``: whether a history is kept; then no totals means that nothing has ended.
    """
    ages = [holder.age for holder in snapshot.holders if holder.recorded]
    waits = [waiter.age for waiter in snapshot.waiters]
    if not recorded:
        return Lately(longest_hold=max(ages, default=None), longest_wait=max(waits, default=None))
    totals = totals or Totals()
    used = None
    if snapshot.units is None and snapshot.slots:
        # A hold that ended counts as a whole, even if it had begun before.
        held = totals.held + sum(min(holder.age, window) * (len(holder.slots) or 1) for holder in snapshot.holders)
        used = min(1.0, held / (snapshot.slots * window))
    return Lately(
        granted=totals.granted,
        released=totals.released,
        turned_away=totals.turned_away,
        lost=totals.lost,
        utilisation=used,
        longest_hold=max([totals.longest_hold, *ages]),
        longest_wait=max([totals.longest_wait, *waits]),
    )


def as_plain(snapshot: SemaphoreSnapshot, recent: Lately | None = None, *, deadlocked: bool = False) -> dict[str, Any]:
    """Return a lock as plain data, with the counts that are computed."""
    plain = dataclasses.asdict(snapshot)
    for holder in plain["holders"]:
        if not holder["slots"]:  # one slot
            del holder["slots"]
        if not holder["mode"]:
            del holder["mode"]
        if holder["lease_left"] is not None:  # no session has its lock
            for key in _OF_SESSIONS:
                del holder[key]
    for waiter in plain["waiters"]:
        if not waiter["mode"]:
            del waiter["mode"]
        if waiter["session_id"] is None:
            del waiter["session_id"]
    plain |= {key: getattr(snapshot, key) for key in ("held", "free", "stale", "waiting", "draining", "other_kind")}
    plain["deadlocked"] = deadlocked
    if recent is not None:
        plain["last_hour"] = dataclasses.asdict(recent)
    return plain


def as_json(data: object, *, indent: int | None = 2) -> str:
    """Return JSON with ISO 8601 instants."""
    return json.dumps(data, indent=indent, ensure_ascii=False, default=lambda value: value.isoformat())
