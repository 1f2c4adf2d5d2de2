"""The only way to read: what is held, stale and waited for, as frozen snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from django_sqlsem.backends import database_for, get_backend
from django_sqlsem.globs import literal_prefix, matcher
from django_sqlsem.naming import Name, validate_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from django_sqlsem.snapshots import HolderSnapshot, RefreshSnapshot, SemaphoreSnapshot

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
    from django_sqlsem.backends import usage  # it needs the models, which this module must not

    alias = database_for(using)
    backend = get_backend(alias)
    if backend.process_local:
        return [each for each in backend.inspect() if each.holders or each.waiters][:most]
    found = by_name(usage.names_in_use(alias, most), using=alias)
    return sorted(found.values(), key=lambda snapshot: snapshot.name)


def refreshes(name_glob: str | None = None, *, using: str | None = None) -> list[RefreshSnapshot]:
    """Return the values of ``refresh_every()`` by name: when each was built, by whom, and when it is due.

    Raises ``BackendError`` if the database fails.
    """
    prefix = literal_prefix(name_glob)
    if prefix is None:
        return []
    matches = matcher(name_glob)
    from django_sqlsem.backends import refresh_view  # it needs the models, which this module must not

    return [each for each in refresh_view.refreshes(database_for(using), prefix) if matches(each.name)]


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


def notes(using: str | None = None) -> list[str]:
    """Return sentences about what these snapshots cannot show: usually none."""
    return get_backend(database_for(using)).notes()
