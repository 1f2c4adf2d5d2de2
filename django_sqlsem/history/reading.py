"""What operators read of the history, on the alias's ordinary connection. All instants are the database's."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, Final

from django.db import connections
from django.db.models import Aggregate, BigIntegerField, Count, F, Max, Min, Sum, Value
from django.db.models.expressions import RawSQL

from django_sqlsem.backends import database_for
from django_sqlsem.backends.clock import RowClock
from django_sqlsem.conf import config
from django_sqlsem.core.names import Name, key_of, validate_name
from django_sqlsem.database.dialects import DatabaseNow, dialect_for
from django_sqlsem.database.errors import database_errors
from django_sqlsem.history import recorder
from django_sqlsem.history.events import (
    ACTS,
    ADDED_UP,
    LONGEST_ONES,
    LOST,
    PURGED,
    RELEASED,
    REVOKED,
    Event,
    Minute,
    Span,
    Totals,
    Trend,
)
from django_sqlsem.models import EventRow, MinuteRow
from django_sqlsem.snapshots import who

MINUTE_US: Final = 60_000_000
#: No timeline shows more.
MAX_SPANS: Final = 1000
#: Of more rows of minutes than these, every second, third, ... tells how waits and holds were spread.
MAX_HISTOGRAMS: Final = 3000
#: A statement names this many keys.
_PAGE: Final = 500
_ENDS: Final = (RELEASED, LOST, REVOKED, PURGED)

_COUNTS: Final[dict[str, Aggregate]] = {
    **{f"all_{name}": Sum(name) for name in ADDED_UP},
    **{f"most_{name}": Max(name) for name in LONGEST_ONES},
}


def clock(using: str | None = None, *, at: RowClock | None = None) -> datetime.datetime:
    """Return the instant now, by the clock of the database, which the history uses; or that of ``at``.

    Raises ``BackendError``.
    """
    alias = database_for(using)
    return _instant(_now(alias) if at is None else dialect_for(connections[alias]).token_clock(at.now))


def events(
    name: Name, *, limit: int = 50, what: Collection[str] | None = None, using: str | None = None
) -> list[Event]:
    """Return what happened to a name, the newest first: all, or these kinds of ``history.events``.

    Raises ``BackendError`` if the database fails.
    """
    alias = database_for(using)
    with database_errors(alias):
        wanted = _events(alias, name) if what is None else _events(alias, name).filter(what__in=what)
        return [_event(row) for row in wanted.order_by("-at_us", "-id")[:limit]]


def acts(*, limit: int = 200, using: str | None = None) -> list[Event]:
    """Return what operators did to any name, the newest first. Raises ``BackendError``."""
    alias = database_for(using)
    settings = config(alias)
    with database_errors(alias):
        rows = EventRow._default_manager.using(alias).filter(what__in=ACTS)
        if settings.history_acts > 2 * settings.history_grants:
            # What is kept for long is found by that: an index has it in order, without what comes and goes.
            rows = rows.filter(until_us__gt=_now(alias) + round(settings.history_grants * 1e6))
            return [_event(row) for row in rows.order_by("-until_us", "-id")[:limit]]
        return [_event(row) for row in rows.order_by("-at_us", "-id")[:limit]]


def spans(
    name: Name, *, window: float = 3600.0, using: str | None = None, now: datetime.datetime | None = None
) -> list[Span]:
    """Return the holds of each slot that ended within ``window`` seconds up to ``now``; of many, the newest thousand.

    Raises ``BackendError``.
    """
    alias = database_for(using)
    since = _microseconds(now or clock(alias)) - int(window * 1e6)
    with database_errors(alias):
        ended = _events(alias, name).filter(what__in=_ENDS, held_us__isnull=False, at_us__gte=since)
        newest = [_event(row) for row in ended.order_by("-at_us", "-id")[:MAX_SPANS]]
    found: dict[tuple[int, int | None, datetime.datetime | None], Span] = {}
    for event in newest:
        start = event.at - datetime.timedelta(seconds=event.held or 0.0)
        for slot in event.slots:
            # Who revokes and who loses both tell of the same end: the earlier one was it.
            known = (slot, event.token, None if event.token is not None else event.at)
            found[known] = Span(slot, start, event.at, event)
    return sorted(found.values(), key=lambda span: (span.slot, span.start))


def minutes(
    name: Name,
    *,
    window: float = 3600.0,
    step: float = 60.0,
    using: str | None = None,
    now: datetime.datetime | None = None,
) -> list[Minute]:
    """Return what happened in each ``step`` (whole minutes, in seconds) of ``window`` seconds up to ``now``.

    The oldest first, and those too in which nothing did. The last one is not over yet. Counts are exact; of very many
    rows a sample tells how waits and holds were spread. Raises ``BackendError``.
    """
    alias = database_for(using)
    step_us = max(1, round(step / 60)) * MINUTE_US
    last = _microseconds(now or clock(alias)) // step_us * step_us
    first = last - (max(1, math.ceil(window * 1e6 / step_us)) - 1) * step_us
    rows = MinuteRow._default_manager.using(alias).filter(
        key=key_of(validate_name(name)), minute_us__gte=first, minute_us__lt=last + step_us
    )
    totals = dict.fromkeys(range(first, last + 1, step_us), Totals())
    waits: dict[int, list[str]] = defaultdict(list)
    holds: dict[int, list[str]] = defaultdict(list)

    def step_of(minute_us: int) -> int:
        return minute_us // step_us * step_us

    with database_errors(alias):
        in_all = 0
        counted = rows.order_by().values_list("minute_us").annotate(rows=Count("id"), **_COUNTS)
        for minute_us, count, *numbers in counted:
            in_all += count
            at = step_of(minute_us)
            totals[at] = totals[at].with_(_totals_of(numbers))
        every = max(1, math.ceil(in_all / MAX_HISTOGRAMS))
        if every > 1:
            rows = rows.annotate(rest=F("id") % every).filter(rest=0)
        for minute_us, waited, held in rows.values_list("minute_us", "waits", "holds"):
            waits[step_of(minute_us)].append(waited)
            holds[step_of(minute_us)].append(held)
    return [
        Minute(
            at=_instant(at),
            waits=recorder.percentiles(recorder.add_up(waits[at]), round(found.longest_wait * 1e6), every),
            holds=recorder.percentiles(recorder.add_up(holds[at]), round(found.longest_hold * 1e6), every),
            **dataclasses.asdict(found),
        )
        for at, found in totals.items()
    ]


def since(name: Name, *, using: str | None = None) -> datetime.datetime | None:
    """Return the oldest minute of which anything is known of a name, or ``None``. Raises ``BackendError``."""
    alias = database_for(using)
    with database_errors(alias):
        rows = MinuteRow._default_manager.using(alias).filter(key=key_of(validate_name(name)))
        found = rows.aggregate(first=Min("minute_us"))["first"]
    return None if found is None else _instant(found)


def totals(names: Collection[str], *, window: float = 3600.0, using: str | None = None) -> dict[str, Totals]:
    """Return what happened to each of these names within the last ``window`` seconds, all read at once.

    Those to which nothing did are left out. Raises ``BackendError``.
    """
    by_key = {key_of(name): name for name in names}
    found = _totals(database_for(using), "key", list(by_key), window)
    return {by_key[key]: totals for key, totals in found.items()}


def template_totals(
    templates: Collection[str], *, window: float = 3600.0, using: str | None = None
) -> dict[str, Totals]:
    """Return what happened to the names of each of these templates, as ``totals()`` does of names."""
    return _totals(database_for(using), "template", list(templates), window)


def trends(
    names: Collection[str],
    templates: Collection[str],
    *,
    window: float,
    step: float,
    now: datetime.datetime,
    using: str | None = None,
) -> tuple[dict[str, Trend], dict[str, Trend]]:
    """Return what happened to each of these names, and to the names of each of these templates, read at once.

    In steps of ``step`` seconds (whole minutes) that ended within ``window`` seconds up to ``now``. Those to which
    nothing happened are left out. Raises ``BackendError``.
    """
    alias = database_for(using)
    step_us = max(1, round(step / 60)) * MINUTE_US
    first = (_microseconds(now) - round(window * 1e6)) // step_us * step_us + step_us
    # A literal: some servers take two parameters of the same value for two different things to group by.
    rest = F("minute_us") % RawSQL(str(step_us), (), output_field=BigIntegerField())  # noqa: S611 - a number of ours
    rows = MinuteRow._default_manager.using(alias).order_by().filter(minute_us__gte=first)
    by_key = {key_of(name): name for name in names}
    parts = []
    for column, of_template, wanted in (("key", 0, list(by_key)), ("template", 1, list(templates))):
        if wanted:
            chosen = rows.filter(**{f"{column}__in": wanted}).annotate(at=F("minute_us") - rest)
            parts.append(chosen.values_list(column, "at").annotate(of=Value(of_template), **_COUNTS))
    if not parts:
        return {}, {}
    found: tuple[dict[str, Trend], dict[str, Trend]] = ({}, {})
    with database_errors(alias):
        for key, at, of_template, *numbers in parts[0].union(*parts[1:], all=True):
            name = key if of_template else by_key[key]
            known = found[of_template].setdefault(name, Trend(step, {}, Totals()))
            of_step = _totals_of(numbers)
            known.steps[_instant(at)] = (of_step.held, of_step.turned_away)
            found[of_template][name] = dataclasses.replace(known, totals=known.totals.with_(of_step))
    return found


def _totals_of(numbers: Sequence[int | None]) -> Totals:
    granted, released, turned_away, lost, held, hold, wait = (int(number or 0) for number in numbers)
    return Totals(granted, released, turned_away, lost, held / 1e6, hold / 1e6, wait / 1e6)


def _totals(alias: str, column: str, wanted: list[str], window: float) -> dict[str, Totals]:
    found = {}
    with database_errors(alias):
        for start in range(0, len(wanted), _PAGE):
            page = MinuteRow._default_manager.using(alias).filter(**{f"{column}__in": wanted[start : start + _PAGE]})
            counted = page.filter(minute_us__gt=DatabaseNow(unix=True) - int(window * 1e6)).values_list(column)
            for key, *numbers in counted.annotate(**_COUNTS):
                found[key] = _totals_of(numbers)
    return found


def _now(alias: str) -> int:
    connection = connections[alias]
    dialect = dialect_for(connection)
    with database_errors(alias), connection.cursor() as cursor:
        return dialect.token_clock(dialect.now(cursor))


def _events(alias: str, name: Name) -> Any:
    return EventRow._default_manager.using(alias).filter(key=key_of(validate_name(name)))


def _instant(microseconds: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(microseconds=microseconds)


def _microseconds(instant: datetime.datetime) -> int:
    return (instant - _instant(0)) // datetime.timedelta(microseconds=1)


def _event(row: EventRow) -> Event:
    return Event(
        at=_instant(row.at_us),
        what=row.what,
        name=row.name,
        slot=row.slot,
        token=row.token,
        waited=None if row.waited_us is None else row.waited_us / 1e6,
        held=None if row.held_us is None else row.held_us / 1e6,
        **who(row),
        by=row.by,
        detail=row.detail,
    )
