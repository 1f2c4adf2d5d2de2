"""The only way to act: an operator's verbs. Each names whom it means by slot and token, and disturbs nobody else."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from django.db import Error as DatabaseError
from django.db import connections, transaction

from django_sqlsem import queries
from django_sqlsem.backends import database_for, get_backend
from django_sqlsem.backends.base import BaseSemaphoreBackend
from django_sqlsem.core.durations import Seconds, to_seconds
from django_sqlsem.core.durations import duration as duration_text
from django_sqlsem.core.identity import MAX_USER_LENGTH, printable
from django_sqlsem.core.names import Name, validate_name, validate_slots
from django_sqlsem.database.errors import backend_error
from django_sqlsem.history import acts
from django_sqlsem.signals import operator_acted
from django_sqlsem.snapshots import SOMEBODY, HolderSnapshot, SemaphoreSnapshot, SlotState

logger = logging.getLogger("django_sqlsem")

#: So much of a reason is kept.
MAX_REASON_LENGTH: Final = 200


@dataclass(frozen=True, slots=True)
class PurgePlan:
    """What a purge would do, and nothing else: shown first, then executed as shown."""

    alias: str
    #: Slots whose lease has run out, or whose session has ended: they will be freed.
    slots: tuple[HolderSnapshot, ...] = ()
    #: Slots whose holder seems gone but whose lease still runs: they are left alone.
    pending: tuple[HolderSnapshot, ...] = ()
    #: Names that nobody uses: they will be deleted.
    names: tuple[SemaphoreSnapshot, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.slots or self.names)


@dataclass(frozen=True, slots=True)
class PurgeResult:
    """What a purge did, and what it left alone because it had changed since it was shown."""

    freed: tuple[HolderSnapshot, ...] = ()
    deleted: tuple[str, ...] = ()
    changed: tuple[HolderSnapshot, ...] = ()
    in_use: tuple[str, ...] = ()


def revoke(
    name: Name,
    slot: int | None = None,
    token: int | None = None,
    *,
    by: str,
    using: str | None = None,
    kill: bool = False,
    reason: str = "",
) -> list[HolderSnapshot]:
    """Take slots away from their holders, live ones too, and return those who lost them.

    Without ``slot`` all holders of this moment; without ``token`` the holder of this moment; with a ``token`` only
    the holder who has it. A holder that changes meanwhile is not disturbed. ``by`` is told to the holder.
    ``kill``: where a lock belongs to a database session, end that session; whatever else it holds goes with it. Raises
    ``KillNeededError`` where that is needed and was not said. ``reason`` is kept in the history, in 200 characters, as
    with all that follows.
    """
    name = validate_name(name)
    backend = get_backend(database_for(using))
    revoked = []
    for number, shown in _meant(backend, name, slot, token):
        holder = backend.revoke(name, number, shown, by=by, kill=kill)
        if holder is not None:
            revoked.append(holder)
            _acted(backend, "revoke", name, by, holder=holder, reason=reason)
    return revoked


def request_stop(
    name: Name,
    slot: int | None = None,
    token: int | None = None,
    *,
    by: str,
    using: str | None = None,
    reason: str = "",
) -> list[HolderSnapshot]:
    """Ask holders to stop, and return those who were asked. Nothing is taken from them: they decide.

    Without ``slot`` all holders of this moment; without ``token`` the holder of this moment; with a ``token`` only the
    holder who has it. Who has several slots is asked as a whole. One that has left meanwhile is not asked, and whoever
    got its slot isn't either. ``by`` is told to the holder; whoever asked first is. Raises ``SemaphoreError`` where a
    holder cannot be told: on SQL Server without rows.
    """
    name = validate_name(name)
    backend = get_backend(database_for(using))
    return _ask(backend, name, _meant(backend, name, slot, token), by, reason)


def drain(name: Name, *, by: str, using: str | None = None, duration: Seconds | None = None, reason: str = "") -> bool:
    """Grant nothing more until ``resume``, and ask every holder to stop. ``False`` if there is no such name.

    ``duration`` and ``reason``: as of ``pause()``.

    It is done when nobody holds any more: nobody is waited for here, and nothing is taken from anybody. This is not
    ``Semaphore.exclusive()``, by which a program has the semaphore for itself.
    """
    name = validate_name(name)
    backend = get_backend(database_for(using))
    if not _pause(backend, "drain", name, by, duration, reason):
        return False
    holders = [holder for snapshot in backend.inspect([name]) for holder in snapshot.holders]
    _ask(backend, name, [(holder.slot, holder.token) for holder in holders if holder.recorded], by, reason)
    return True


def _ask(
    backend: BaseSemaphoreBackend, name: str, meant: list[tuple[int, int]], by: str, reason: str
) -> list[HolderSnapshot]:
    asked = []
    for number, shown in meant:
        holder = backend.request_stop(name, number, shown, by=by or SOMEBODY)
        if holder is not None:
            asked.append(holder)
            _acted(backend, "stop", name, by, holder=holder, reason=reason)
    return asked


def _meant(backend: BaseSemaphoreBackend, name: str, slot: int | None, token: int | None) -> list[tuple[int, int]]:
    """Return whom an operator means, by slot and token."""
    if token is not None and slot is None:
        raise ValueError("A token belongs to a slot: give the slot too.")
    if slot is not None and token is not None:
        return [(slot, token)]
    holders = [holder for snapshot in backend.inspect([name]) for holder in snapshot.holders]
    return [(holder.slot, holder.token) for holder in holders if slot is None or slot in holder.numbers]


def plan_purge(
    *,
    stale: bool = True,
    idle: Seconds | None = None,
    older_than: Seconds | None = None,
    name_glob: str | None = None,
    using: str | None = None,
) -> PurgePlan:
    """Return what a purge would do now.

    ``stale``: free slots whose lease has run out at least ``older_than`` ago, or, where there are no leases, that
    were taken so long ago by a session that has ended. ``idle``: also delete names that
    nobody holds or waits for, that were granted last at least ``idle`` (or ``older_than``, if that is longer) ago,
    and about which no operator has said anything. Lengths are seconds or ``timedelta``.
    """
    alias = database_for(using)
    least = to_seconds(older_than, what="older_than", allow_none=True) or 0.0
    rest = to_seconds(idle, what="idle", allow_none=True)
    found = queries.semaphores(name_glob, using=alias)
    gone = [holder for snapshot in found for holder in snapshot.holders if holder.state is SlotState.STALE]
    return PurgePlan(
        alias=alias,
        slots=tuple(holder for holder in gone if stale and holder.expired and _gone_for(holder) >= least),
        pending=tuple(holder for holder in gone if stale and not holder.expired),
        names=tuple(snapshot for snapshot in found if rest is not None and _is_idle(snapshot, max(rest, least))),
    )


def _gone_for(holder: HolderSnapshot) -> float:
    """Return how long ago the lease ran out; where there is none, when the slot was taken: the end leaves no trace."""
    return holder.age if holder.lease_left is None else -holder.lease_left


def _is_idle(snapshot: SemaphoreSnapshot, seconds: float) -> bool:
    touched = snapshot.paused or snapshot.operator_slots is not None
    # A counter that began above 0 would begin there anew.
    counts = snapshot.units is not None and (snapshot.units or snapshot.declared_slots)
    used = snapshot.held or snapshot.waiters or counts
    return not touched and not used and (snapshot.idle is None or snapshot.idle >= seconds)


def execute_purge(plan: PurgePlan, *, by: str, reason: str = "") -> PurgeResult:
    """Do what ``plan`` says, except where a slot or name has come to life since. Never touches a live holder."""
    backend = get_backend(plan.alias)
    freed, changed, deleted, in_use = [], [], [], []
    for holder in plan.slots:
        if backend.purge_slot(holder.name, holder.slot, holder.token):
            freed.append(holder)
            _acted(backend, "purge", holder.name, by, holder=holder, reason=reason)
        else:
            changed.append(holder)
    for snapshot in plan.names:
        if backend.purge_idle(snapshot.name):
            deleted.append(snapshot.name)
            _acted(backend, "purge", snapshot.name, by, "deleted: idle", reason=reason)
        else:
            in_use.append(snapshot.name)
    return PurgeResult(tuple(freed), tuple(deleted), tuple(changed), tuple(in_use))


def set_slots(
    name: Name,
    slots: int | None,
    *,
    by: str,
    using: str | None = None,
    duration: Seconds | None = None,
    reason: str = "",
) -> bool:
    """Set the number of slots, whatever the code says; ``None`` leaves it to the code again.

    No holder is interrupted: after a shrink nothing is granted until fewer are held. ``duration`` and ``reason``: as of
    ``pause()``; afterwards the code's number counts again by itself. Returns ``False`` if there is no such name. Raises
    ``ValueError`` for a number out of range, or for a mutex or an rlock and any number but 1.
    """
    name = validate_name(name)
    if slots is not None:
        validate_slots(slots)
    seconds = to_seconds(duration, what="duration", allow_none=True)
    if slots is None and seconds is not None:
        raise ValueError("duration: the number that the code declares has no end.")
    backend = get_backend(database_for(using))
    shown = printable(by, MAX_USER_LENGTH)
    done = backend.set_slots(name, slots, by=shown, seconds=seconds, reason=_reason(reason))
    if done:
        told = "as declared by the code" if slots is None else f"{slots} slots"
        if seconds is not None:
            told += f" for {duration_text(seconds)}"
        _acted(backend, "set slots", name, by, told, reason=reason)
    return done


def pause(name: Name, *, by: str, using: str | None = None, duration: Seconds | None = None, reason: str = "") -> bool:
    """Grant nothing more until ``resume``; holders keep what they have. ``False`` if there is no such name.

    ``duration``: seconds or ``timedelta`` after which it is resumed by itself, by the database's clock. ``reason`` is
    shown wherever the pause is, in 200 characters. Whoever pauses a name that is paused says anew until when and why.
    """
    name = validate_name(name)
    return _pause(get_backend(database_for(using)), "pause", name, by, duration, reason)


def resume(name: Name, *, by: str, using: str | None = None, reason: str = "") -> bool:
    """Grant again. ``False`` if there is no such name."""
    name = validate_name(name)
    backend = get_backend(database_for(using))
    done = backend.resume(name)
    if done:
        _acted(backend, "resume", name, by, reason=reason)
    return done


def procedures(*, drop: bool = False, using: str | None = None) -> tuple[str, ...]:
    """Return the batches that install, or remove, the stored procedures for programs without Django.

    Empty where semaphores are not SQL Server's application locks.
    """
    return get_backend(database_for(using)).procedures(drop=drop)


def change_procedures(*, drop: bool = False, by: str, using: str | None = None) -> None:
    """Install, or remove, these procedures: all of them or none. Raises ``BackendError``."""
    alias = database_for(using)
    try:
        with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
            for batch in procedures(drop=drop, using=alias):
                cursor.execute(batch)
    except DatabaseError as error:
        raise backend_error(alias, error) from error
    logger.info("stored procedures of %r %s by %s", alias, "removed" if drop else "installed", by or "somebody")


def _pause(
    backend: BaseSemaphoreBackend, action: str, name: str, by: str, duration: Seconds | None, reason: str
) -> bool:
    seconds = to_seconds(duration, what="duration", allow_none=True)
    done = backend.pause(name, by=printable(by, MAX_USER_LENGTH), seconds=seconds, reason=_reason(reason))
    if done:
        _acted(backend, action, name, by, "" if seconds is None else f"for {duration_text(seconds)}", reason=reason)
    return done


def _reason(text: str) -> str:
    return printable(" ".join(text.split()), MAX_REASON_LENGTH)


def _acted(
    backend: BaseSemaphoreBackend,
    action: str,
    name: str,
    by: str,
    detail: str = "",
    holder: HolderSnapshot | None = None,
    reason: str = "",
) -> None:
    why = _reason(reason)
    told = ": ".join(filter(None, (detail or str(holder or ""), why)))
    level = logging.WARNING if action == "revoke" else logging.INFO
    act = {"action": action, "by": by, "detail": told, "reason": why}
    extra = {"semaphore": name, "what": "acted", **act}
    logger.log(level, "%s of %r by %s%s", action, name, by or "somebody", told and f": {told}", extra=extra)
    if not backend.process_local:
        acts.record(backend.alias, action, name, by, ": ".join(filter(None, (detail, why))), holder)
    for receiver, result in operator_acted.send_robust(sender=None, name=name, **act):
        if isinstance(result, Exception):  # the act is done: a receiver's fault must not hide that
            extra = {"semaphore": name, "what": "receiver_failed"}
            logger.error("operator_acted receiver %r failed", receiver, exc_info=result, extra=extra)
