"""What the rows say: snapshots of names, and how all names stand.

The operator's side reads with the ORM, on an alias's ordinary connection. One name is also read on a connection of our
own, whatever the caller's transaction is up to.

The survey is one pass over the slots that were used in the last minutes, whatever the number of names. Whether a slot
is taken changes with every claim: an index on that would end the updates in place that make claims cheap on
PostgreSQL. So the index is on the lease, which claims write as it is, and which housekeeping sets to 0 once nobody has
used the slot for a while: see ``operator.set_aside``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from django.db import connections
from django.db.models import (
    Aggregate,
    Avg,
    BigIntegerField,
    Count,
    FloatField,
    Max,
    Min,
    Model,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    Sum,
    Value,
)

from django_sqlsem.backends.clock import RowClock
from django_sqlsem.backends.rows.beacons import dead_among
from django_sqlsem.backends.rows.statements import Statements
from django_sqlsem.core.modes import UPDATE, WRITER
from django_sqlsem.core.names import key_of
from django_sqlsem.database.errors import database_errors
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow
from django_sqlsem.snapshots import (
    MOST_NAMES,
    HolderSnapshot,
    InUse,
    Listed,
    SemaphoreSnapshot,
    Survey,
    TemplateSnapshot,
    WaiterSnapshot,
    longest,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session
    from django_sqlsem.snapshots import SurveyState


#: How many names one query asks for; every database takes as many parameters.
_AT_ONCE: Final = 500
#: What is true of all slots that are taken, and of some more: an index has it.
_USED: Final = Q(lease_us__gt=0)


def _selected(model: type[Model]) -> str:
    columns = ", ".join(str(each.column) for each in model._meta.concrete_fields)
    return f"SELECT {columns} FROM {model._meta.db_table}"


def inspect(
    alias: str,
    names: Collection[str] | None,
    prefix: str,
    template: str | None = None,
    *,
    at: RowClock | None = None,
) -> list[SemaphoreSnapshot]:
    """Return snapshots ordered by name, in three reads per 500 ``names``, or in three reads of a prefix or template."""
    with database_errors(alias):
        clock = at or RowClock.of(alias)
        if names is None:
            # Some databases fold case here, so the prefix is tested once more.
            wanted, related = Q(name__startswith=prefix), Q(semaphore__name__startswith=prefix)
            if template is not None:
                wanted, related = wanted & Q(template=template), related & Q(semaphore__template=template)
            found = _read(alias, clock, wanted, related)
            found = [snapshot for snapshot in found if snapshot.name.startswith(prefix)]
        else:
            found = []
            for part in _parts({key_of(name) for name in names}):
                found += _read(alias, clock, Q(key__in=part), Q(semaphore__in=part))
    return sorted(found, key=lambda snapshot: snapshot.name)


def _read(alias: str, clock: RowClock, wanted: Q, related: Q) -> list[SemaphoreSnapshot]:
    slots, waiters = SlotRow.objects.using(alias), WaiterRow.objects.using(alias)
    of_name = slots.filter(semaphore=OuterRef("pk")).order_by().values("semaphore")
    last_grant = of_name.annotate(at=Max(clock.grant_instant())).values("at")
    usual = of_name.filter(held_us__gt=0).annotate(mean=Avg("held_us")).values("mean")
    semaphores = list(
        SemaphoreRow.objects.using(alias)
        .filter(wanted)
        .annotate(
            last_grant_us=Subquery(last_grant, output_field=BigIntegerField()),
            usual_us=Subquery(usual, output_field=FloatField()),
        )
    )
    names = {row.pk: row.name for row in semaphores}
    holders: dict[str, list[HolderSnapshot]] = defaultdict(list)
    taken = list(slots.filter(related, expires_us__isnull=False).order_by("slot"))
    _ask(alias, clock, {slot.process_id for slot in taken if slot.beacon})
    for slot in taken:
        if slot.semaphore_id in names:
            holders[slot.semaphore_id].append(clock.holder(names[slot.semaphore_id], slot))
    waiting: dict[str, list[WaiterSnapshot]] = defaultdict(list)
    away: Counter[str] = Counter()
    for waiter in waiters.filter(related, clock.live()).order_by("queued_us", "pk"):
        if waiter.away:
            away[waiter.semaphore_id] += 1
        elif waiter.semaphore_id in names:
            waiting[waiter.semaphore_id].append(clock.waiter(names[waiter.semaphore_id], waiter))
    overdue: Counter[str] = Counter()
    if any(row.units is not None for row in semaphores):
        handed = waiters.filter(related, ~clock.live(), away=True)
        for key, take in handed.values_list("semaphore_id", "take"):
            overdue[key] += take
    return [
        clock.semaphore(
            row,
            tuple(holders[row.pk]),
            tuple(waiting[row.pk]),
            usual_hold=mean / 1e6 if (mean := getattr(row, "usual_us", None)) else None,
            away=away[row.pk],
            overdue=overdue[row.pk],
        )
        for row in semaphores
    ]


def _taken(alias: str) -> QuerySet[SlotRow]:
    return SlotRow.objects.using(alias).filter(_USED, expires_us__isnull=False)


def _ask(alias: str, clock: RowClock, processes: Collection[str]) -> None:
    """Ask who of these processes is dead."""
    if processes and not clock.asked_of_all:
        with connections[alias].cursor() as cursor:
            clock.dead |= dead_among(cursor, processes)


def _ask_of_all(alias: str, clock: RowClock, processes: Collection[str] | None = None) -> None:
    """Ask once which holders are dead. ``processes``: the holders; omitted, one more pass over the slots tells."""
    if clock.asked_of_all:
        return
    if processes is None:
        lit = _taken(alias).filter(clock.live(), beacon=True)
        processes = set(lit.order_by().values_list("process_id", flat=True).distinct())
    _ask(alias, clock, processes)
    clock.asked_of_all = True


def survey(alias: str, *, at: RowClock | None = None) -> Survey:
    """Return how all names stand, in two reads and a question about who is dead; in some more for very many."""
    with database_errors(alias):
        clock = at or RowClock.of(alias)
        taken = _taken(alias)
        by_process = ("semaphore", "process_id", "beacon")
        # Waiters are told from slots by what no slots are.
        waits = {"taken": Value(-1), "held": Sum("waiting"), "stale": Value(0), "since": Min("queued_us")}
        slots: dict[str, Aggregate] = {"taken": Count("pk"), "held": Count("pk", filter=_live(clock))}
        slots |= {"stale": Count("pk", filter=clock.stale()), "since": Min("acquired_us", filter=clock.live())}
        waiting = _waiters(alias, clock).values_list(*by_process).annotate(**waits)
        found = taken.order_by().values_list(*by_process).annotate(**slots).union(waiting, all=True)
        rows = list(found[: MOST_NAMES + 1])
        if len(rows) > MOST_NAMES:
            return _survey_of_many(alias, clock)
        _ask(alias, clock, {process for _key, process, beacon, count, *_rest in rows if beacon and count > 0})
        clock.asked_of_all = True
        in_use: dict[str, InUse] = defaultdict(lambda: InUse(""))
        for key, process, beacon, count, held, stale, since in rows:
            known, age = in_use[key], _since(clock, since)
            if count < 0:
                wait = longest(known.longest_wait, age)
                in_use[key] = replace(known, waiting=known.waiting + held, longest_wait=wait)
            else:
                stale = count if beacon and process in clock.dead else stale
                hold = longest(known.longest_hold, age)
                in_use[key] = replace(known, held=known.held + held, stale=known.stale + stale, longest_hold=hold)
        if not _named(alias, clock, in_use):
            return _survey_of_many(alias, clock)
    counts: dict[SurveyState, dict[str, int]] = {
        "held": {key: each.held for key, each in in_use.items()},
        "stale": {key: each.stale for key, each in in_use.items()},
        "waiting": {key: each.waiting for key, each in in_use.items()},
        "paused": {key: int(each.paused) for key, each in in_use.items()},
        "draining": {key: each.held for key, each in in_use.items() if each.paused},
    }
    names: dict[str, Listed] = {state: Listed.of(of_state.items()) for state, of_state in counts.items()}
    sums = {state: sum(counts[state].values()) for state in ("held", "stale", "waiting", "paused")}
    return Survey(**sums, draining=len(names["draining"].counts), names=names, in_use=in_use)


def _named(alias: str, clock: RowClock, in_use: dict[str, InUse]) -> bool:
    """Add what their rows say of names in use, and the names that are paused. Return whether these are not too many."""
    parts = list(_parts(in_use, connections[alias].features.max_query_params or MOST_NAMES)) or [[]]
    for number, part in enumerate(parts):
        wanted = Q(pk__in=part) if number else Q(pk__in=part) | clock.paused()
        rows = SemaphoreRow.objects.using(alias).filter(wanted)
        most = len(part) + MOST_NAMES
        found = list(rows.values_list("pk", "name", "kind", "template", "paused", "paused_until_us")[: most + 1])
        if len(found) > most:
            return False
        for key, name, kind, template, paused, until_us in found:
            known, paused = in_use.get(key) or InUse(""), clock.pauses(paused, until_us)
            in_use[key] = replace(known, name=name, kind=kind, template=template or "", paused=paused)
    for key in [key for key, each in in_use.items() if not each.name]:
        del in_use[key]  # it was purged just now
    return True


def _paused(alias: str, clock: RowClock) -> QuerySet[SemaphoreRow]:
    return SemaphoreRow.objects.using(alias).filter(clock.paused())


def _survey_of_many(alias: str, clock: RowClock) -> Survey:
    """Return how very many names stand: totals, and of each state those with most."""
    _ask_of_all(alias, clock)
    live = _live(clock)
    counts = {"held": Count("pk", filter=live), "stale": Count("pk", filter=clock.stale())}
    taken = _taken(alias)
    by_name: QuerySet[Any, Any] = taken.order_by().values("semaphore").annotate(**counts)
    found = list(by_name.order_by("-stale", "-held").values_list("semaphore", "held", "stale")[: MOST_NAMES + 1])
    complete = len(found) <= MOST_NAMES
    totals = taken.aggregate(**counts)
    held = Listed(dict(sorted(((k, n) for k, n, _s in found if n), key=lambda pair: -pair[1])), complete)
    stale = Listed({key: count for key, _held, count in found[:MOST_NAMES] if count}, complete or not found[-1][2])
    waiting = Listed.of(
        (waiters := _waiters(alias, clock))
        .values("semaphore")
        .annotate(count=Sum("waiting"))
        .order_by("-count")
        .values_list("semaphore", "count")[: MOST_NAMES + 1]
    )
    of_paused = _paused(alias, clock)
    paused = Listed.of((key, 1) for key in of_paused.values_list("pk", flat=True)[: MOST_NAMES + 1])
    draining = taken.filter(live, semaphore__in=of_paused.order_by().values("pk")).order_by().values("semaphore")
    drained = Listed.of(draining.annotate(held=Count("pk")).values_list("semaphore", "held"))
    return Survey(
        held=totals["held"],
        stale=totals["stale"],
        waiting=sum(waiting.counts.values()) if waiting.complete else waiters.aggregate(count=Sum("waiting"))["count"],
        paused=len(paused.counts) if paused.complete else of_paused.count(),
        draining=len(drained.counts),
        names={"held": held, "stale": stale, "waiting": waiting, "paused": paused, "draining": drained},
    )


def template_sums(alias: str, *, at: RowClock | None = None) -> dict[str, TemplateSnapshot]:
    """Return what the names in use amount to, by template: one pass over the slots for their names, and by these."""
    with database_errors(alias):
        clock = at or RowClock.of(alias)
        taken = _taken(alias)
        by_whom = list(taken.order_by().values_list("semaphore", "process_id", "beacon")[: MOST_NAMES + 1])
        some = [taken]
        if len(by_whom) <= MOST_NAMES:  # else a join begins with all names on MariaDB, however few of them are in use
            some = [taken.filter(semaphore__in=part) for part in _parts({key for key, _process, _beacon in by_whom})]
        processes = {process for _key, process, beacon in by_whom if beacon}
        _ask_of_all(alias, clock, processes if len(by_whom) <= MOST_NAMES else None)
        states = [Count("pk", filter=_live(clock)), Count("pk", filter=clock.stale())]
        held = [row for part in some for row in _by_template(part, *states, Min("acquired_us", filter=clock.live()))]
        names = Count("semaphore", distinct=True)
        waits = _by_template(_waiters(alias, clock), Sum("waiting"), names, Min("queued_us"))
        found: dict[str, TemplateSnapshot] = {}
        for template, count, stale, since in held:
            known = found.get(template) or TemplateSnapshot(template, 0)
            hold = longest(known.longest_hold, _since(clock, since))
            found[template] = replace(known, held=known.held + count, stale=known.stale + stale, longest_hold=hold)
        for template, count, queues, since in waits:
            known = found.get(template) or TemplateSnapshot(template, 0)
            found[template] = replace(known, waiting=count, queues=queues, longest_wait=_since(clock, since))
    return found


def _parts(keys: Collection[str], most: int = _AT_ONCE) -> Iterable[list[str]]:
    found = sorted(keys)
    return (found[start : start + most] for start in range(0, len(found), most))


def _by_template(rows: QuerySet[Any], *sums: Aggregate) -> Iterable[Any]:
    named: Any = rows.exclude(semaphore__template="").order_by().values_list("semaphore__template")
    return named.annotate(**{f"sum_{nth}": each for nth, each in enumerate(sums)})  # type: ignore[no-any-return]


def _live(clock: RowClock) -> Q:
    """Slots that live permits have. A writer or an upgradable reader has slot 0 besides those that count."""
    return clock.live() & (~Q(slot=WRITER) | Q(mode=UPDATE))


def _since(clock: RowClock, instant: int | None) -> float | None:
    return None if instant is None else max(0.0, clock.age(instant, clock.boot_id))


def _waiters(alias: str, clock: RowClock) -> QuerySet[WaiterRow]:
    return WaiterRow.objects.using(alias).filter(clock.live(), away=False).order_by()


def in_state(alias: str, state: SurveyState, *, at: RowClock | None = None) -> Q:
    """Return the condition on ``SemaphoreRow`` that a name is in a state, by the database's clock."""
    with database_errors(alias):
        clock = at or RowClock.of(alias)
    if state == "paused":
        return clock.paused()
    if state == "waiting":
        return Q(pk__in=_waiters(alias, clock).values("semaphore"))
    if state == "stale":
        with database_errors(alias):
            _ask_of_all(alias, clock)
    of_state = clock.stale() if state == "stale" else clock.live()
    taken = _taken(alias).filter(of_state)
    found = Q(pk__in=taken.order_by().values("semaphore"))
    return found & clock.paused() if state == "draining" else found


def slots_in_state(alias: str, state: SurveyState, *, at: RowClock | None = None) -> Q:
    """Return the condition on ``SlotRow``, by the database's clock."""
    with database_errors(alias):
        clock = at or RowClock.of(alias)
    if state == "held":
        return _USED & clock.live()
    if state == "stale":
        with database_errors(alias):
            _ask_of_all(alias, clock)
        return _USED & clock.stale()
    names = SemaphoreRow.objects.using(alias).filter(in_state(alias, state, at=clock))
    return Q(semaphore__in=names.order_by().values("pk"))


_USUAL: Final = (
    "SELECT (SELECT AVG(held_us) FROM sqlsem_slot WHERE semaphore_key = %(key)s AND held_us > 0),"
    " (SELECT COUNT(*) FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND {live} AND away = %(yes)s),"
    " (SELECT SUM(take) FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND NOT ({live}) AND away = %(yes)s),"
    " (SELECT MAX(CASE WHEN boot_id = %(boot_id)s THEN acquired_us WHEN acquired_us IS NOT NULL THEN 0 END)"
    " FROM sqlsem_slot WHERE semaphore_key = %(key)s)"
)
_SEMAPHORE: Final = f"{_selected(SemaphoreRow)} WHERE name_key = %(key)s"
_HOLDERS: Final = f"{_selected(SlotRow)} WHERE semaphore_key = %(key)s AND expires_us IS NOT NULL ORDER BY slot"
_WAITERS: Final = f"{_selected(WaiterRow)} WHERE semaphore_key = %(key)s AND {{waits}} ORDER BY queued_us, id"


def read_snapshot(session: Session, resource: Resource) -> SemaphoreSnapshot | None:
    """Return the snapshot of one name, or ``None`` if it has no rows. Raises ``BackendError``."""

    def read(cursor: AnyCursor) -> SemaphoreSnapshot | None:
        statements = Statements(cursor, {"key": resource.key, "yes": True})
        clock = RowClock(statements.dialect.now(cursor), statements.dialect.boot_id)
        found = statements.row(_SEMAPHORE)
        if found is None:
            return None
        usual, away, overdue, last_grant_us = statements.row(_USUAL)
        slots = [SlotRow(*row) for row in statements.rows(_HOLDERS)]
        if lit := {row.process_id for row in slots if row.beacon}:
            clock.dead = dead_among(cursor, lit)
        waiters = [WaiterRow(*row) for row in statements.rows(_WAITERS)]
        semaphore = SemaphoreRow(*found)
        semaphore.last_grant_us = last_grant_us  # type: ignore[attr-defined]
        return clock.semaphore(
            semaphore,
            tuple(clock.holder(resource.name, row) for row in slots),
            tuple(clock.waiter(resource.name, row) for row in waiters),
            usual_hold=float(usual) / 1e6 if usual else None,
            away=int(away),
            overdue=int(overdue or 0),
        )

    return session.run(read)
