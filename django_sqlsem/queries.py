"""The only way to read: what is held, stale and waited for, as frozen snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from django_sqlsem import conf, serialize
from django_sqlsem.backends import database_for, get_backend
from django_sqlsem.core.names import Name, literal_prefix, matcher, validate_name

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Collection, Iterable, Mapping

    from django.db.models import Q

    from django_sqlsem.history.events import (
        Event,
        Minute,
        Span,
        Totals,
    )
    from django_sqlsem.locks.transaction.base import LockState
    from django_sqlsem.models import ClaimRow, RefreshRow
    from django_sqlsem.serialize import Lately
    from django_sqlsem.snapshots import (
        DeadlockSnapshot,
        HolderSnapshot,
        RefreshSnapshot,
        SemaphoreSnapshot,
        Survey,
        SurveyState,
        WaitSnapshot,
    )

State: TypeAlias = Literal["held", "stale", "waiting", "free", "paused"]

_STATES: dict[State, Callable[[SemaphoreSnapshot], bool]] = {
    "held": lambda snapshot: snapshot.held > 0,
    "stale": lambda snapshot: snapshot.stale > 0,
    "waiting": lambda snapshot: snapshot.waiting > 0,
    "free": lambda snapshot: snapshot.free > 0,
    "paused": lambda snapshot: snapshot.paused,
}


def locks_database(using: str | None = None) -> str:
    """Return the alias of the database that keeps the locks: ``using``, or the configured one."""
    return database_for(using)


def semaphores(
    name_glob: str | None = None, *, state: State | None = None, using: str | None = None
) -> list[SemaphoreSnapshot]:
    """Return snapshots ordered by name.

    ``name_glob`` is a shell pattern with case (``reports:*``). ``state`` keeps the semaphores that have a slot or
    a waiter in that state. Raises ``ValueError`` for an unknown state and ``BackendError`` if the database fails.
    """
    if state is not None and state not in _STATES:
        raise ValueError(f"state must be one of {', '.join(_STATES)}, not {state!r}.")
    prefix = literal_prefix(name_glob)
    if prefix is None:
        return []
    matches = matcher(name_glob)
    wanted = _STATES[state] if state else None
    found = get_backend(database_for(using)).inspect(prefix=prefix)
    return [snapshot for snapshot in found if matches(snapshot.name) and (wanted is None or wanted(snapshot))]


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
    from django_sqlsem.backends.rows import reading  # it needs the models, which this module must not

    alias = database_for(using)
    backend = get_backend(alias)
    if backend.process_local:
        return [each for each in backend.inspect() if each.holders or each.waiters][:most]
    found = by_name(reading.names_in_use(alias, most), using=alias)
    return sorted(found.values(), key=lambda snapshot: snapshot.name)


def refreshes(name_glob: str | None = None, *, using: str | None = None) -> list[RefreshSnapshot]:
    """Return the values of ``refresh_every()`` by name: when each was built, by whom, and when it is due.

    Raises ``BackendError`` if the database fails.
    """
    prefix = literal_prefix(name_glob)
    if prefix is None:
        return []
    matches = matcher(name_glob)
    from django_sqlsem.refresh import rows  # it needs the models, which this module must not

    return [each for each in rows.refreshes(database_for(using), prefix) if matches(each.name)]


def refreshed(rows: Collection[RefreshRow], *, using: str | None = None) -> dict[str, RefreshSnapshot]:
    """Return what rows of refreshed values say at one instant, by their keys. Raises ``BackendError``."""
    from django_sqlsem.backends.clock import RowClock
    from django_sqlsem.refresh.rows import snapshot_of

    clock = RowClock.of(database_for(using))
    return {row.pk: snapshot_of(clock, row) for row in rows}


def claimed(rows: Collection[ClaimRow], *, using: str | None = None) -> dict[int, tuple[float, datetime.datetime]]:
    """Return for how many seconds rows have been claimed, and since when, by their keys. Raises ``BackendError``."""
    from django_sqlsem.backends.clock import RowClock

    clock = RowClock.of(database_for(using))
    ages = {row.pk: max(0.0, clock.age(row.claimed_us, row.boot_id)) for row in rows}
    return {key: (age, clock.at(age)) for key, age in ages.items()}


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


def waits(using: str | None = None) -> list[WaitSnapshot]:
    """Return who waits while holding something, since when, and who has what it waits for; the longest waits first.

    Waits shorter than about a second, and those of who holds nothing else, are not known here. Raises
    ``BackendError`` if the database fails.
    """
    from django_sqlsem.deadlocks import reading as deadlocks_reading  # it needs the models, which this module must not

    return deadlocks_reading.waits(database_for(using))


def deadlocks(using: str | None = None) -> list[DeadlockSnapshot]:
    """Return the deadlocks over named locks, each with its waits in order round the cycle; the oldest first.

    ``str()`` of one is a sentence. Raises ``BackendError`` if the database fails.
    """
    from django_sqlsem.deadlocks import reading as deadlocks_reading  # it needs the models, which this module must not

    return deadlocks_reading.deadlocks(database_for(using))


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


def transaction_locks_held(keys: Collection[str], *, using: str | None = None) -> Mapping[str, LockState] | None:
    """Return for each key of ``TransactionLockRow`` whether it is ``free``, ``shared`` or ``held`` right now.

    They are tried, and let go of at once. ``None`` where the database does not tell. Raises ``BackendError``.
    """
    from django_sqlsem.locks.transaction import callers  # it is not needed by who only reads semaphores

    return callers.held(database_for(using), keys)


def survey(using: str | None = None) -> Survey:
    """Return how all names stand: totals, and which are held, stale, waited for, paused or draining.

    A few reads, whatever the number of names. Raises ``BackendError``.
    """
    return get_backend(database_for(using)).survey()


def in_state(state: SurveyState, using: str | None = None) -> Q:
    """Return the condition on ``SemaphoreRow`` that a name is in a state. Raises ``BackendError``."""
    return get_backend(database_for(using)).in_state(state)


def slots_in_state(state: SurveyState, using: str | None = None) -> Q:
    """Return the condition on ``SlotRow`` that a slot is held or stale, or that its name is in another state.

    Raises ``BackendError``.
    """
    return get_backend(database_for(using)).slots_in_state(state)


def notes(using: str | None = None) -> list[str]:
    """Return sentences about what these snapshots cannot show: usually none."""
    return get_backend(database_for(using)).notes()


# What has happened: see ``history``. Its reader needs the models, which this module must not.


def events(
    name: Name, *, limit: int = 50, what: Collection[str] | None = None, using: str | None = None
) -> list[Event]:
    """Return what happened to a name, the newest first: all, or these kinds of ``history.events``.

    Raises ``BackendError`` if the database fails.
    """
    from django_sqlsem.history import reading as history_reading

    return history_reading.events(validate_name(name), limit=limit, what=what, using=using)


def spans(name: Name, *, window: float = 3600.0, using: str | None = None) -> list[Span]:
    """Return the holds of each slot that ended within the last ``window`` seconds; of many, the newest thousand."""
    from django_sqlsem.history import reading as history_reading

    return history_reading.spans(validate_name(name), window=window, using=using)


def minutes(name: Name, *, window: float = 3600.0, step: float = 60.0, using: str | None = None) -> list[Minute]:
    """Return what happened in each ``step`` (whole minutes, in seconds) of the last ``window`` seconds.

    The oldest first, and those too in which nothing did. The last one is not over yet.
    """
    from django_sqlsem.history import reading as history_reading

    return history_reading.minutes(validate_name(name), window=window, step=step, using=using)


def totals(names: Collection[str], *, window: float = 3600.0, using: str | None = None) -> dict[str, Totals]:
    """Return what happened to each of these names within the last ``window`` seconds, all read at once.

    Those to which nothing did are left out.
    """
    from django_sqlsem.history import reading as history_reading

    return history_reading.totals(names, window=window, using=using)


def history_clock(using: str | None = None) -> datetime.datetime:
    """Return the instant now, by the clock of the database, which the history goes by."""
    from django_sqlsem.history import reading as history_reading

    return history_reading.clock(using)
