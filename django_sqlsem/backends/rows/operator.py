"""What operators do to the rows, with the ORM, on any database.

Every act is one short transaction that begins by writing to the semaphore's row. That locks the name on every
database, and on SQLite it means that no read lock is ever upgraded. What an act then changes is named by slot
and token in the statement's own WHERE, so that its row count decides.

Whoever deletes a name has its row locked, so that no slot is made meanwhile, and all slots, so that none is taken. A
claim that comes at that moment waits for the row, and makes the name anew. Who has just taken a place in line finds no
slots there any more, and comes anew.

A stop request is written beside the permit's token, for that grant alone. The holder's next renewal brings
it along; a process that a bell or NOTIFY reaches is woken, and renews at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from django.db import Error as DatabaseError
from django.db import connections, transaction
from django.db.models import F, Q, QuerySet

from django_sqlsem.backends.base import COUNTER, Forgotten, check_slots
from django_sqlsem.backends.clock import IN_LINE, LONGEST_DELETION, Idle, RowClock
from django_sqlsem.backends.rows import counters, handoff
from django_sqlsem.backends.rows.fences import unfenced
from django_sqlsem.core.identity import MAX_USER_LENGTH, printable
from django_sqlsem.core.modes import MUTEX, WHOLE, WRITER
from django_sqlsem.core.names import MAX_SLOTS, key_of, resource_for
from django_sqlsem.database import bells
from django_sqlsem.database.dialects import DatabaseNow, dialect_for
from django_sqlsem.database.errors import database_errors, repeated
from django_sqlsem.database.server import server_since
from django_sqlsem.database.sessions import CallerSession, briefly
from django_sqlsem.exceptions import BackendError, fenced
from django_sqlsem.models import FenceRow, SemaphoreRow, SlotRow, WaiterRow
from django_sqlsem.snapshots import HolderSnapshot

if TYPE_CHECKING:
    from collections.abc import Collection

    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session

logger = logging.getLogger("django_sqlsem")

#: How long a revocation waits for the end of a transaction that is fenced with the permit, in seconds.
FENCED_PATIENCE: Final = 5.0
#: Who looks for taken slots looks at those that were taken since then, in microseconds.
SET_ASIDE_AFTER_US: Final = 600_000_000
#: How many rows one statement names; every database takes as many parameters.
_AT_ONCE: Final = 500


@contextlib.contextmanager
def _act(alias: str, key: str) -> Iterator[RowClock]:
    with database_errors(alias):
        since = server_since(connections[alias])
        with transaction.atomic(using=alias):
            SemaphoreRow.objects.using(alias).filter(key=key).update(shrinking=F("shrinking"))
            # Read after the lock: the clock is never older than what the lock waited for.
            yield RowClock.of(alias, since=since)


def _taken(alias: str, name: str, slot: int, token: int) -> QuerySet[SlotRow]:
    held = SlotRow.objects.using(alias).filter(semaphore=key_of(name), expires_us__isnull=False)
    return held.filter(slot=slot, token=token)


def _companions(alias: str, row: SlotRow) -> QuerySet[SlotRow]:
    """The other taken rows of who has this one by its mode: they belong together, as nobody else can be there."""
    rows = SlotRow.objects.using(alias).filter(semaphore=row.semaphore_id, expires_us__isnull=False)
    return rows.exclude(mode="") if row.mode else rows.none()


@repeated
def revoke(alias: str, name: str, slot: int, token: int, by: str) -> HolderSnapshot | None:
    """Take a slot away from the holder with this token, live or expired, and note who did it."""
    give_up = time.monotonic() + FENCED_PATIENCE
    held = _taken(alias, name, slot, token)
    while True:
        with _act(alias, key_of(name)) as clock:
            row = held.first()
            if row is None:
                return None
            if unfenced(held, alias):
                taken = {"expires_us": None, "permit_id": None, "revoked_by": printable(by, MAX_USER_LENGTH)}
                held.update(revoked_token=token, **taken)
                # A part of it is nothing: who has the writer's place, or all slots, loses whatever it has.
                _companions(alias, row).update(revoked_token=F("token"), **taken)
                break
        # A transaction of its holder's is fenced with it, or it was just being renewed.
        if time.monotonic() > give_up:
            raise fenced(name, slot)
        time.sleep(0.02)
    _hand_out(alias, key_of(name))
    return clock.holder(name, row)


@repeated
def request_stop(alias: str, name: str, slot: int, token: int, by: str) -> HolderSnapshot | None:
    """Write the request beside the holder's token, and wake its process. Whoever asked first stays noted."""
    request = {"stop_token": F("token"), "stop_by": printable(by, MAX_USER_LENGTH)}
    with _act(alias, key_of(name)) as clock:
        held = _taken(alias, name, slot, token).exclude(clock.expired())
        row = held.first()
        if row is None:
            return None
        if row.stop_token != row.token:
            # Its holder may have left since it was read.
            if not held.update(**request):
                return None
            row.stop_token, row.stop_by = row.token, request["stop_by"]
        permit = SlotRow.objects.using(alias).filter(semaphore=row.semaphore_id, permit_id=row.permit_id)
        others = permit.filter(expires_us__isnull=False).exclude(pk=row.pk) | _companions(alias, row)
        others.exclude(stop_token=F("token")).update(**request)
        # Its processes as they are: what was handed over may have changed hands inside one.
        for channel, permit_id in {(row.channel, row.permit_id), *others.values_list("channel", "permit_id")}:
            transaction.on_commit(functools.partial(_wake, alias, channel, permit_id or ""), using=alias)
        return clock.holder(name, row)


def _wake(alias: str, channel: str, permit_id: str) -> None:
    """Have a holder's process renew its permit now; if it does not hear, its next renewal is soon enough."""
    connection = connections[alias]
    if bells.ring(channel, permit_id) or not channel or not dialect_for(connection).notifies:
        return
    if connection.in_atomic_block:
        return
    try:
        with connection.cursor() as cursor:
            cursor.execute(handoff.NOTIFY, {"channel": channel, "note": permit_id})
    except DatabaseError as error:
        logger.debug("A holder could not be woken: %s", error)


@repeated
def purge_slot(alias: str, name: str, slot: int, token: int) -> bool:
    """Free a slot whose lease has run out by the database's clock and that still carries this token."""
    freed = {"expires_us": None, "permit_id": None}
    with _act(alias, key_of(name)) as clock:
        expired = _taken(alias, name, slot, token).filter(clock.expired())
        row = expired.first()
        purged = bool(unfenced(expired, alias) and expired.update(**freed))
        if purged and row is not None:
            _companions(alias, row).filter(clock.expired()).update(**freed)
    _hand_out(alias, key_of(name))
    return purged


@repeated
def purge_idle(alias: str, name: str) -> bool:
    """Delete a name that nobody holds or waits for, unless an operator has set its slots or paused it."""
    key = key_of(name)
    with _act(alias, key) as clock:
        rows = SemaphoreRow.objects.using(alias).filter(key=key).exclude(clock.operated() | clock.paused())
        row = rows.first()
        if row is None:
            return False
        if row.kind == COUNTER:
            away = WaiterRow.objects.using(alias).filter(semaphore=key, away=True)
            # What has been handed out and not taken counts; and a new name would begin anew.
            if row.units or row.declared_slots or away.exists():
                return False
        unused = _unused(alias, [key], Q(expires_us=None) | clock.expired(), clock)
        _delete(alias, unused)
        return bool(unused)


def forget(session: Session, seconds: float, after: str) -> Forgotten:
    """Delete a few names that nobody has used for so long, of those whose keys follow ``after``.

    Raises ``BackendError`` and ``RefusedError``.
    """

    def delete(names: Collection[str], cursor: AnyCursor) -> int:
        # They may have been used since; and what somebody else has locked is used.
        named = idle.names().filter(pk__in=names).order_by("pk").values_list("pk", flat=True)
        keys = list(named.select_for_update(skip_locked=cursor.db.features.has_select_for_update_skip_locked))
        unused = _unused(idle.alias, keys, idle.free(), idle.clock)
        if not idle.drop(unused):
            return 0  # the rest of its history comes first, next time
        _delete(idle.alias, unused)
        return len(unused)

    idle, found = Idle.found(session, seconds, after)
    parts = [[each] for each in found.names] if session.dialect.sharded else [list(found.names)]
    count = sum(briefly(session, functools.partial(delete, part), LONGEST_DELETION, IN_LINE) for part in parts if part)
    return Forgotten(count, found.after, found.more)


def set_aside(session: Session) -> bool:
    """Note of some slots that nobody has used them for a while. Return whether there may be more of them."""

    def write(cursor: AnyCursor) -> int:
        slots = SlotRow.objects.using(cursor.db.alias).filter(lease_us__gt=0, expires_us=None)
        unused = slots.filter(token__lte=DatabaseNow(unix=True) - SET_ASIDE_AFTER_US)
        # Named by their keys: on MariaDB a statement locks what it looks at, and that would be the busy slots.
        some = list(unused.values_list("pk", flat=True)[:_AT_ONCE])
        slots.filter(pk__in=some).update(lease_us=0)
        return len(some)

    return briefly(session, write, LONGEST_DELETION, IN_LINE) == _AT_ONCE


def _unused(alias: str, keys: Collection[str], free: Q, clock: RowClock) -> dict[str, list[int]]:
    """Return those of these names, whose rows are locked, that nobody holds or waits for, each with its slots' rows.

    Their slots are locked from then on. ``free``: the condition that a slot is.
    """
    slots = SlotRow.objects.using(alias).filter(semaphore__in=keys)
    locked = set(unfenced(slots.filter(free), alias))
    waiters = WaiterRow.objects.using(alias).filter(clock.live(), semaphore__in=keys)
    found: dict[str, list[int]] = {key: [] for key in keys}
    used = set(waiters.values_list("semaphore_id", flat=True))
    for row, key in slots.values_list("pk", "semaphore_id"):
        found[key].append(row)
        if row not in locked:
            used.add(key)
    return {key: rows for key, rows in found.items() if key not in used}


def _delete(alias: str, names: dict[str, list[int]]) -> None:
    """Delete names by their keys, with their slots' rows."""
    rows = [row for slots in names.values() for row in slots]
    for start in range(0, len(rows), _AT_ONCE):
        some = rows[start : start + _AT_ONCE]
        _raw_delete(SlotRow.objects.using(alias).filter(semaphore__in=list(names), pk__in=some))
        _raw_delete(FenceRow.objects.using(alias).filter(pk__in=some))
    _raw_delete(WaiterRow.objects.using(alias).filter(semaphore__in=list(names)))
    _raw_delete(SemaphoreRow.objects.using(alias).filter(pk__in=list(names)))


def _raw_delete(rows: QuerySet[Any]) -> None:
    # Without Django's collector: it would read first, and cascade over rows that this act must not touch.
    rows._raw_delete(rows.db)


@repeated
def set_slots(alias: str, name: str, sizing: dict[str, Any]) -> bool:
    """Set the operator's number, and open and close slots to suit. ``ValueError`` for a lock with one slot.

    ``sizing``: what is written of it into the name's row.
    """
    key, slots = key_of(name), sizing["operator_slots"]
    with _act(alias, key) as clock:
        semaphore = SemaphoreRow.objects.using(alias).filter(key=key).first()
        if semaphore is None:
            return False
        check_slots(name, semaphore.kind, slots)
        if semaphore.kind == MUTEX:  # it has one slot in any case
            SemaphoreRow.objects.using(alias).filter(key=key).update(**sizing)
            return True
        rows = SlotRow.objects.using(alias).filter(semaphore=key).exclude(slot=WRITER)
        # While somebody has all slots, or may prove them again, no more of them are opened: that is done after it.
        whole = shrinking = rows.filter(mode=WHOLE, expires_us__isnull=False).exists()
        if slots is not None:
            _create_slots(alias, key, slots, closed=whole)
            rows.filter(slot__gt=slots, closed=False).update(closed=True)
            shrinking = whole or rows.filter(clock.live(), slot__gt=slots).exists()
        if not whole:
            rows.filter(slot__lte=MAX_SLOTS if slots is None else slots, closed=True).update(closed=False)
        SemaphoreRow.objects.using(alias).filter(key=key).update(**sizing, shrinking=shrinking)
    _hand_out(alias, key)
    return True


def _create_slots(alias: str, key: str, slots: int, *, closed: bool) -> None:
    rows = SlotRow.objects.using(alias)
    present = set(rows.filter(semaphore=key).values_list("slot", flat=True))
    numbers = [number for number in range(1, slots + 1) if number not in present]
    missing = [SlotRow(semaphore_id=key, slot=number, closed=closed) for number in numbers]
    # A claim may be creating the same rows at this moment.
    rows.bulk_create(
        missing, batch_size=_AT_ONCE, ignore_conflicts=connections[alias].features.supports_ignore_conflicts
    )


@repeated
def set_paused(alias: str, name: str, paused: bool) -> bool:
    """Stop or resume granting; holders are not disturbed."""
    with database_errors(alias):
        found = bool(SemaphoreRow.objects.using(alias).filter(key=key_of(name)).update(paused=paused))
    if not paused:
        _hand_out(alias, key_of(name))
    return found


def _hand_out(alias: str, key: str) -> None:
    """Give to waiters what an act has made free."""

    def hand_out() -> None:
        with contextlib.suppress(BackendError):  # the act itself is done, and those who wait will find it
            _serve(alias, key)

    # Not inside a transaction of the caller's, which may be rolled back.
    transaction.on_commit(hand_out, using=alias)


@repeated
def _serve(alias: str, key: str) -> None:
    connection = connections[alias]
    counted = SemaphoreRow.objects.using(alias).filter(key=key, kind=COUNTER).first()
    if counted is not None:
        counters.hand_out(CallerSession(connection), resource_for(counted.name, COUNTER))
    else:
        handoff.hand_out(CallerSession(connection), key, since=server_since(connection))
