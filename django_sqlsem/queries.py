"""The only way to read: what is held, stale and waited for, as frozen snapshots."""

from __future__ import annotations

import datetime
import threading
from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

from django.db.models import Q

from django_sqlsem import conf, serialize
from django_sqlsem.backends import database_for, get_backend
from django_sqlsem.backends.base import Templates
from django_sqlsem.backends.clock import RowClock
from django_sqlsem.core.names import Name, literal_prefix, matcher, validate_name
from django_sqlsem.database.errors import database_errors
from django_sqlsem.deadlocks import reading as deadlocks_reading
from django_sqlsem.deadlocks.reading import deadlocks, waits
from django_sqlsem.history.events import Totals, Trend
from django_sqlsem.history.reading import acts, events, minutes, since, spans, template_totals, totals, trends
from django_sqlsem.history.reading import clock as history_clock
from django_sqlsem.models import ClaimRow, RefreshRow
from django_sqlsem.refresh import job as refresh_job
from django_sqlsem.serialize import Lately
from django_sqlsem.snapshots import (
    TROUBLE,
    DeadlockSnapshot,
    HolderSnapshot,
    RefreshSnapshot,
    SemaphoreSnapshot,
    Survey,
    SurveyState,
    TemplateSnapshot,
    WaitSnapshot,
    longest,
)

__all__ = [
    "Reading",
    "State",
    "acts",
    "by_name",
    "deadlocked",
    "deadlocks",
    "events",
    "held_along",
    "history_clock",
    "holders",
    "in_use",
    "lately",
    "locks_database",
    "minutes",
    "notes",
    "refreshes",
    "semaphore",
    "semaphores",
    "since",
    "spans",
    "survey",
    "templates",
    "totals",
    "trends",
    "waits",
    "with_totals",
]

#: What happened lately, by names and by templates.
Trends: TypeAlias = "tuple[dict[str, Trend], dict[str, Trend]]"
State: TypeAlias = Literal["held", "stale", "waiting", "free", "paused", "busy"]


def locks_database(using: str | None = None) -> str:
    """Return the alias of the database that keeps the locks: ``using``, or the configured one."""
    return database_for(using)


class Reading:
    """What one request, or several of one moment, read: all by one instant of the database's clock, and nothing twice.

    Whatever is asked of it may raise ``BackendError``. ``expected``: names that will be asked for, to be read with the
    first; ``all_waits``: ``waits`` will be asked for as well as ``deadlocks``.
    """

    def __init__(self, using: str | None = None, *, expected: Iterable[str] = (), all_waits: bool = False) -> None:
        self.using = database_for(using)
        self._backend = get_backend(self.using)
        self._lock = threading.Lock()
        self._expected = tuple(expected)
        self._expects_waits = all_waits
        self._known: dict[str, SemaphoreSnapshot | None] = {}
        #: The names that were asked for.
        self.asked: set[str] = set()
        self._surveyed: Survey | None = None
        self._trends: dict[tuple[Any, ...], tuple[AbstractSet[str], Trends]] = {}
        self._trends_lock = threading.Lock()

    @cached_property
    def _clock(self) -> RowClock:
        with database_errors(self.using):
            return RowClock.of(self.using)

    @cached_property
    def now(self) -> datetime.datetime:
        """The instant, by the clock that the history uses."""
        return history_clock(self.using, at=self._clock)

    def by_name(self, names: Iterable[str]) -> dict[str, SemaphoreSnapshot]:
        """Return the snapshots of these names by name, in that order; unknown ones are left out."""
        wanted = sorted(set(names))
        with self._lock:
            self.asked.update(wanted)
            if any(name not in self._known for name in wanted):
                several = dict.fromkeys([*wanted, *self._expected])
                new = [*(name for name in several if name not in self._known)]
                read = {each.name: each for each in self._backend.inspect(new, at=self._clock)}
                self._known |= {name: read.get(name) for name in new}
        return {name: found for name in wanted if (found := self._known[name]) is not None}

    @cached_property
    def survey(self) -> Survey:
        """How all names stand. Asked for before ``templates``, it spares those some reads."""
        self._surveyed = self._backend.survey(at=self._clock)
        return self._surveyed

    @cached_property
    def _templates(self) -> Templates:
        return self._backend.templates(at=self._clock, survey=self._surveyed)

    @property
    def without_template(self) -> int | None:
        """How many names no template has made; ``None``: the tables have to be asked."""
        return self._templates.plain

    @property
    def disputed(self) -> tuple[int, str]:
        """Of how many names processes declare different numbers of slots, and one of these names; after ``survey``."""
        return self._templates.disputed

    @cached_property
    def templates(self) -> list[TemplateSnapshot]:
        """What the names of each template amount to: those in trouble first, and then by template."""
        found = self.standing_templates
        if not found or not conf.config(self.using).history:
            return found
        known = template_totals([each.template for each in found], using=self.using)
        return [with_totals(each, known.get(each.template, Totals())) for each in found]

    @cached_property
    def standing_templates(self) -> list[TemplateSnapshot]:
        """The same by what goes on now, and nothing of the last hour."""
        found = self._templates.found
        if not found:
            return []
        bad = {name for deadlock in self.deadlocks for name in deadlock.names}
        deadlocked = Counter(each.template for each in self.by_name(bad).values())
        told = (replace(each, deadlocked=deadlocked[each.template]) for each in found)
        return sorted(told, key=lambda each: (len(TROUBLE) if each.rank is None else each.rank, each.template))

    def trends(self, names: Iterable[str], templates: Iterable[str], *, window: float, step: float) -> Trends | None:
        """Return what happened lately to names and to those of templates, by these; ``None``: no history is kept."""
        if not conf.config(self.using).history:
            return None
        wanted, of = set(names), tuple(templates)
        with self._trends_lock:
            known = self._trends.get((of, window, step))
            if known is None or not wanted <= known[0]:
                # Of a long while a name is much to read.
                more = self._expected if window <= serialize.WINDOW else ()
                names = wanted.union(known[0] if known else (), more)
                found = trends(sorted(names), list(of), window=window, step=step, now=self.now, using=self.using)
                known = self._trends[of, window, step] = (names, found)
        return known[1]

    @cached_property
    def _all_waits(self) -> tuple[list[WaitSnapshot], list[DeadlockSnapshot]]:
        return deadlocks_reading.standing(self.using, at=self._clock)

    @property
    def waits(self) -> list[WaitSnapshot]:
        """Who waits while holding something. Asked for before ``deadlocks``, it answers those too."""
        return self._all_waits[0]

    @property
    def waits_read(self) -> bool:
        """Whether ``waits`` was asked for."""
        return "_all_waits" in vars(self)

    @cached_property
    def deadlocks(self) -> list[DeadlockSnapshot]:
        if self._expects_waits or self.waits_read:
            return self._all_waits[1]
        return deadlocks_reading.standing(self.using, everything=False, at=self._clock)[1]

    def in_state(self, state: SurveyState) -> Q:
        """Return the condition on ``SemaphoreRow`` that a name is in a state."""
        return self._backend.in_state(state, at=self._clock)

    def slots_in_state(self, state: SurveyState) -> Q:
        """Return the condition on ``SlotRow`` that a slot is held or stale, or that its name is in another state."""
        return self._backend.slots_in_state(state, at=self._clock)

    def refreshed(self, rows: Iterable[RefreshRow]) -> dict[str, RefreshSnapshot]:
        """Return what rows of refreshed values say, by their keys."""
        return {row.pk: refresh_job.snapshot_of(self._clock, row) for row in rows}

    def claimed(self, rows: Iterable[ClaimRow]) -> dict[int, tuple[float, datetime.datetime]]:
        """Return for how many seconds rows have been claimed, and since when, by their keys."""
        ages = {row.pk: max(0.0, self._clock.age(row.claimed_us, row.boot_id)) for row in rows}
        return {key: (age, self._clock.at(age)) for key, age in ages.items()}


def with_totals(found: TemplateSnapshot, totals: Totals) -> TemplateSnapshot:
    """Add what happened in a while to what goes on now."""
    return replace(
        found,
        turned_away=totals.turned_away,
        longest_hold=longest(found.longest_hold, totals.longest_hold),
        longest_wait=longest(found.longest_wait, totals.longest_wait),
    )


def semaphores(
    name_glob: str | None = None,
    *,
    state: State | None = None,
    template: str | None = None,
    using: str | None = None,
) -> list[SemaphoreSnapshot]:
    """Return snapshots ordered by name.

    ``name_glob`` is a shell pattern with case (``reports:*``). ``state`` keeps the semaphores that have a slot or
    a waiter in that state, or (``busy``) are held, waited for or paused; but for ``free`` idle names cost nothing then.
    ``template`` keeps those that a decorator with this name has made (``sync:{request.user.pk}``); empty: those that no
    template has made. Raises ``ValueError`` for an unknown state and ``BackendError`` if the database fails.
    """
    if state is not None and state not in get_args(State):
        raise ValueError(f"state must be one of {', '.join(get_args(State))}, not {state!r}.")
    prefix = literal_prefix(name_glob)
    if prefix is None:
        return []
    matches = matcher(name_glob)
    backend = get_backend(database_for(using))
    in_use = None if state in (None, "free") else backend.survey().in_use
    if in_use is None:
        found = backend.inspect(prefix=prefix, template=template)
    else:
        like = [each for each in in_use.values() if each.name.startswith(prefix)]
        found = backend.inspect([each.name for each in like if template in (None, each.template)])
    return [snapshot for snapshot in found if matches(snapshot.name) and (state is None or getattr(snapshot, state))]


def semaphore(name: Name, using: str | None = None) -> SemaphoreSnapshot | None:
    """Return the snapshot of one name, or ``None`` if there is no such semaphore.

    Raises ``TypeError`` or ``ValueError`` if no semaphore could have that name.
    """
    text = validate_name(name)
    return by_name([text], using=using).get(text)


def by_name(names: Iterable[str], *, using: str | None = None) -> dict[str, SemaphoreSnapshot]:
    """Return the snapshots of these names by name, all read at once; unknown ones are left out."""
    wanted = set(names)
    if not wanted:
        return {}
    return {snapshot.name: snapshot for snapshot in get_backend(database_for(using)).inspect(wanted)}


def holders(
    name_glob: str | None = None, *, state: Literal["held", "stale"] | None = None, using: str | None = None
) -> list[HolderSnapshot]:
    """Return who holds, by name and slot: all, or those in a state."""
    found = semaphores(name_glob, using=using)
    return [holder for snapshot in found for holder in snapshot.holders if state in (None, holder.state.value)]


def in_use(*, most: int, using: str | None = None) -> list[SemaphoreSnapshot]:
    """Return the snapshots of names of which a slot is taken or waited for, by name: at most ``most``.

    One query finds them, whatever the number of idle names; the rest is that of ``by_name()``. Raises ``BackendError``.
    """
    return get_backend(database_for(using)).in_use(most)


def refreshes(name_glob: str | None = None, *, using: str | None = None) -> list[RefreshSnapshot]:
    """Return the values of ``refresh_every()`` by name: when each was built, by whom, and when it is due.

    Raises ``BackendError`` if the database fails.
    """
    prefix = literal_prefix(name_glob)
    if prefix is None:
        return []
    matches = matcher(name_glob)
    return [each for each in refresh_job.refreshes(database_for(using), prefix) if matches(each.name)]


def lately(snapshots: Iterable[SemaphoreSnapshot], *, using: str | None = None) -> dict[str, Lately]:
    """Return what each of these was like in the last hour, by name, all read at once.

    Raises ``BackendError`` if the database fails.
    """
    found = list(snapshots)
    recorded = conf.config(database_for(using)).history
    names = [snapshot.name for snapshot in found]
    known = totals(names, window=serialize.WINDOW, using=using) if recorded and names else {}
    return {each.name: serialize.lately(each, known.get(each.name), recorded=recorded) for each in found}


def deadlocked(using: str | None = None) -> frozenset[str]:
    """Return the names that wait for each other in a circle. Raises ``BackendError`` if the database fails."""
    return frozenset(wait.name for deadlock in deadlocks(using=using) for wait in deadlock.waits)


def held_along(chosen: Iterable[HolderSnapshot], *, using: str | None = None) -> list[HolderSnapshot]:
    """Return who else would lose slots if the database sessions that hold the ``chosen`` ones were ended."""
    slots = {(holder.name, holder.slot) for holder in chosen}
    sessions = {(holder.session_id, holder.session_us) for holder in chosen if holder.needs_kill}
    if not sessions - {(None, None)}:
        return []
    return [
        holder
        for holder in holders(using=using)
        if holder.needs_kill
        and (holder.session_id, holder.session_us) in sessions
        and (holder.name, holder.slot) not in slots
    ]


def survey(using: str | None = None) -> Survey:
    """Return how all names stand: totals, and which are held, stale, waited for, paused or draining.

    A few reads, whatever the number of names. Raises ``BackendError``.
    """
    return get_backend(database_for(using)).survey()


def templates(using: str | None = None) -> list[TemplateSnapshot]:
    """Return what the names of each template amount to, of the thousand with the most names: those in trouble first.

    A few reads, whatever the number of names. Raises ``BackendError``.
    """
    return Reading(using).templates


def notes(using: str | None = None) -> list[str]:
    """Return sentences about what these snapshots cannot show: usually none."""
    return get_backend(database_for(using)).notes()
