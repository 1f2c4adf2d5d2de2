"""The operator's side of the rows backend: it shows the rows and acts on them, with the ORM, on any database.

Every act is one short transaction that begins by writing to the semaphore's row. That locks the name on every
database, and on SQLite it means that no read lock is ever upgraded. What an act then changes is named by slot
and token in the statement's own WHERE, so that its row count decides.

An operator's wish that a holder stop, in the rows: written beside the permit's token, for that grant alone.

The holder's next renewal brings it along. A process that a bell or NOTIFY reaches is woken, and renews at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from django.db import Error as DatabaseError
from django.db import connections, transaction
from django.db.models import Avg, BigIntegerField, F, FloatField, Max, OuterRef, Q, QuerySet, Subquery

from django_sqlsem.backends.base import TOKENS
from django_sqlsem.backends.clock import RowClock
from django_sqlsem.backends.rows import handoff, ledger
from django_sqlsem.backends.rows.fences import unfenced
from django_sqlsem.backends.rows.reading import RowsSurvey
from django_sqlsem.core.identity import MAX_USER_LENGTH, printable
from django_sqlsem.core.modes import WHOLE, WRITER
from django_sqlsem.core.names import MAX_SLOTS, ONE_SLOT, key_of, resource_for, validate_slots
from django_sqlsem.database import bells
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.errors import database_errors, repeated
from django_sqlsem.database.server import server_since
from django_sqlsem.database.sessions import CallerSession
from django_sqlsem.exceptions import BackendError, fenced
from django_sqlsem.models import FenceRow, SemaphoreRow, SlotRow, WaiterRow
from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot, WaiterSnapshot

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from django.db.models import QuerySet


logger = logging.getLogger("django_sqlsem")


def ask(held: QuerySet[SlotRow], companions: Callable[[SlotRow], QuerySet[SlotRow]], by: str) -> SlotRow | None:
    """Write the wish into a slot (``held``), and into whatever else its holder has of the name, in this transaction.

    ``companions``: the other taken slots that belong to one by its mode. Whoever asked first stays noted. Returns the
    slot as it is now, or ``None`` if it is not held any more.
    """
    row = held.first()
    if row is None:
        return None
    wish = {"stop_token": F("token"), "stop_by": by}
    if row.stop_token != row.token:
        # Its holder may have left since it was read.
        if not held.update(**wish):
            return None
        row.stop_token, row.stop_by = row.token, by
    alias, others = held.db, _others(row, held) | companions(row)
    others.exclude(stop_token=F("token")).update(**wish)
    # Its processes as they are: what was handed over may have changed hands inside one.
    for channel, permit_id in {(row.channel, row.permit_id), *others.values_list("channel", "permit_id")}:
        transaction.on_commit(functools.partial(_wake, alias, channel, permit_id or ""), using=alias)
    return row


def _others(row: SlotRow, held: QuerySet[SlotRow]) -> QuerySet[SlotRow]:
    """The other slots of the same permit."""
    rows = type(row)._default_manager.using(held.db)
    same = Q(semaphore=row.semaphore_id, permit_id=row.permit_id, expires_us__isnull=False)
    return rows.filter(same).exclude(pk=row.pk)


def _wake(alias: str, channel: str, permit_id: str) -> None:
    """Have a holder's process renew its permit now; if it does not hear, its next renewal is soon enough."""
    if bells.ring(channel, permit_id) or not channel:
        return
    connection = connections[alias]
    if not dialect_for(connection).notifies or connection.in_atomic_block:
        return
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", (channel, permit_id))
    except DatabaseError as error:
        logger.debug("A holder could not be woken: %s", error)


#: How long a revocation waits for the end of a transaction that is fenced with the permit, in seconds.
FENCED_PATIENCE: Final = 5.0
#: How many names one query asks for; every database takes as many parameters.
CHUNK: Final = 500


class _KeepError(Exception):
    """Roll back: the name is in use."""


class RowsOperator(RowsSurvey):
    """Shows and changes the rows of one alias, on its ordinary connection."""

    def inspect(
        self, names: Collection[str] | None = None, *, prefix: str = "", at: RowClock | None = None
    ) -> list[SemaphoreSnapshot]:
        """Return snapshots ordered by name, in three reads per 500 ``names``, or in three reads of a prefix."""
        with database_errors(self.alias):
            clock = at or RowClock.of(self.alias)
            if names is None:
                # Some databases fold case here, so the prefix is tested once more.
                found = self._read(clock, Q(name__startswith=prefix), Q(semaphore__name__startswith=prefix))
                found = [snapshot for snapshot in found if snapshot.name.startswith(prefix)]
            else:
                keys = sorted({key_of(name) for name in names})
                found = []
                for start in range(0, len(keys), CHUNK):
                    chunk = keys[start : start + CHUNK]
                    found += self._read(clock, Q(key__in=chunk), Q(semaphore__in=chunk))
        return sorted(found, key=lambda snapshot: snapshot.name)

    def _read(self, clock: RowClock, wanted: Q, related: Q) -> list[SemaphoreSnapshot]:
        last_grant = (
            self._rows(SlotRow)
            .filter(semaphore=OuterRef("pk"))
            .order_by()
            .values("semaphore")
            .annotate(at=Max(clock.grant_instant()))
            .values("at")
        )
        slots = self._rows(SlotRow).filter(semaphore=OuterRef("pk"), held_us__gt=0).order_by()
        usual = slots.values("semaphore").annotate(mean=Avg("held_us")).values("mean")
        semaphores = list(
            self._rows(SemaphoreRow)
            .filter(wanted)
            .annotate(
                last_grant_us=Subquery(last_grant, output_field=BigIntegerField()),
                usual_us=Subquery(usual, output_field=FloatField()),
            )
        )
        names = {row.pk: row.name for row in semaphores}
        holders: dict[str, list[HolderSnapshot]] = {}
        for slot in self._rows(SlotRow).filter(related, expires_us__isnull=False).order_by("slot"):
            if slot.semaphore_id in names:
                holders.setdefault(slot.semaphore_id, []).append(clock.holder(names[slot.semaphore_id], slot))
        waiters: dict[str, list[WaiterSnapshot]] = {}
        away: Counter[str] = Counter()
        for waiter in self._rows(WaiterRow).filter(related, clock.live()).order_by("queued_us", "pk"):
            if waiter.away:
                away[waiter.semaphore_id] += 1
            elif waiter.semaphore_id in names:
                waiters.setdefault(waiter.semaphore_id, []).append(clock.waiter(names[waiter.semaphore_id], waiter))
        overdue: Counter[str] = Counter()
        if any(row.tokens is not None for row in semaphores):
            handed = self._rows(WaiterRow).filter(related, ~clock.live(), away=True)
            for key, take in handed.values_list("semaphore_id", "take"):
                overdue[key] += take
        return [
            clock.semaphore(
                row,
                tuple(holders.get(row.pk, ())),
                tuple(waiters.get(row.pk, ())),
                usual_hold=mean / 1e6 if (mean := getattr(row, "usual_us", None)) else None,
                away=away[row.pk],
                overdue=overdue[row.pk],
            )
            for row in semaphores
        ]

    @repeated
    def revoke(self, name: str, slot: int, token: int, *, by: str, kill: bool = False) -> HolderSnapshot | None:
        """Take a slot away from the holder with this token, live or expired, and note who did it."""
        give_up = time.monotonic() + FENCED_PATIENCE
        held = self._rows(SlotRow).filter(semaphore=key_of(name), slot=slot, token=token, expires_us__isnull=False)
        while True:
            with self._act(key_of(name)) as clock:
                row = held.first()
                if row is None:
                    return None
                if unfenced(held, self.alias):
                    taken = {"expires_us": None, "permit_id": None, "revoked_by": printable(by, MAX_USER_LENGTH)}
                    held.update(revoked_token=token, **taken)
                    # A part of it is nothing: who has the writer's place, or all slots, loses whatever it has.
                    self._companions(row).update(revoked_token=F("token"), **taken)
                    break
            # A transaction of its holder's is fenced with it, or it was just being renewed.
            if time.monotonic() > give_up:
                raise fenced(name, slot)
            time.sleep(0.02)
        self._hand_out(key_of(name))
        return clock.holder(name, row)

    @repeated
    def request_stop(self, name: str, slot: int, token: int, *, by: str) -> HolderSnapshot | None:
        """Write the wish beside the holder's token, and wake its process where a bell or NOTIFY reaches it."""
        held = self._rows(SlotRow).filter(semaphore=key_of(name), slot=slot, token=token, expires_us__isnull=False)
        with self._act(key_of(name)) as clock:
            live = held.exclude(clock.expired())
            row = ask(live, self._companions, printable(by, MAX_USER_LENGTH))
            return None if row is None else clock.holder(name, row)

    @repeated
    def purge_slot(self, name: str, slot: int, token: int) -> bool:
        """Free a slot whose lease has run out by the database's clock and that still carries this token."""
        with self._act(key_of(name)) as clock:
            expired = self._rows(SlotRow).filter(clock.expired(), semaphore=key_of(name), slot=slot, token=token)
            row = expired.first()
            purged = bool(unfenced(expired, self.alias) and expired.update(expires_us=None, permit_id=None))
            if purged and row is not None:
                self._companions(row).filter(clock.expired()).update(expires_us=None, permit_id=None)
        self._hand_out(key_of(name))
        return purged

    def _companions(self, row: SlotRow) -> QuerySet[SlotRow]:
        """The other taken rows of who has this one by its mode: they belong together, as nobody else can be there."""
        rows = self._rows(SlotRow).filter(semaphore=row.semaphore_id, expires_us__isnull=False)
        return rows.exclude(mode="") if row.mode else rows.none()

    @repeated
    def purge_idle(self, name: str) -> bool:
        """Delete a name that nobody holds or waits for, unless an operator has set its slots or paused it."""
        key = key_of(name)
        try:
            with self._act(key) as clock:
                slots = self._rows(SlotRow).filter(semaphore=key)
                idle = unfenced(slots.filter(Q(expires_us=None) | clock.expired()), self.alias)
                for start in range(0, len(idle), CHUNK):
                    self._delete(slots.filter(pk__in=idle[start : start + CHUNK]))
                    self._delete(self._rows(FenceRow).filter(pk__in=idle[start : start + CHUNK]))
                waiters = self._rows(WaiterRow).filter(semaphore=key)
                if slots.exists() or waiters.filter(clock.live()).exists():
                    raise _KeepError
                counted = self._rows(SemaphoreRow).filter(key=key, kind=TOKENS)
                # What has been handed out and not taken counts; and a new name would begin with new tokens.
                if counted.exclude(tokens=0, declared_slots=0).exists() or (
                    counted.exists() and waiters.filter(away=True).exists()
                ):
                    raise _KeepError
                self._delete(waiters)
                if not self._delete(self._rows(SemaphoreRow).filter(key=key, operator_slots=None, paused=False)):
                    raise _KeepError
        except _KeepError:
            return False
        return True

    @repeated
    def set_slots(self, name: str, slots: int | None) -> bool:
        """Set the operator's number, and open and close slots to suit. ``ValueError`` for a lock with one slot."""
        key = key_of(name)
        if slots is not None:
            validate_slots(slots)
        with self._act(key) as clock:
            semaphore = self._rows(SemaphoreRow).filter(key=key).first()
            if semaphore is None:
                return False
            if semaphore.kind == TOKENS:
                raise ValueError(f"{name!r} is a count of tokens: it has no slots.")
            if semaphore.kind in ONE_SLOT and slots not in (None, 1):
                raise ValueError(f"{name!r} is a {semaphore.kind}: it has one slot, not {slots}.")
            rows = self._rows(SlotRow).filter(semaphore=key).exclude(slot=WRITER)
            # While somebody has all slots, or may prove them again, no more of them are opened: that is done after it.
            whole = shrinking = rows.filter(mode=WHOLE, expires_us__isnull=False).exists()
            if slots is not None:
                self._create_slots(key, slots, closed=whole)
                rows.filter(slot__gt=slots, closed=False).update(closed=True)
                shrinking = whole or rows.filter(clock.live(), slot__gt=slots).exists()
            if not whole:
                rows.filter(slot__lte=MAX_SLOTS if slots is None else slots, closed=True).update(closed=False)
            self._rows(SemaphoreRow).filter(key=key).update(operator_slots=slots, shrinking=shrinking)
        self._hand_out(key)
        return True

    @repeated
    def set_paused(self, name: str, paused: bool) -> bool:
        """Stop or resume granting; holders are not disturbed."""
        with database_errors(self.alias):
            found = bool(self._rows(SemaphoreRow).filter(key=key_of(name)).update(paused=paused))
        if not paused:
            self._hand_out(key_of(name))
        return found

    def _hand_out(self, key: str) -> None:
        """Give to waiters what an act has made free."""

        def hand_out() -> None:
            with contextlib.suppress(BackendError):  # the act itself is done, and those who wait will find it
                self._serve(key)

        # Not inside a transaction of the caller's, which may be rolled back.
        transaction.on_commit(hand_out, using=self.alias)

    @repeated
    def _serve(self, key: str) -> None:
        connection = connections[self.alias]
        session, dialect = CallerSession(connection), dialect_for(connection)
        counted = self._rows(SemaphoreRow).filter(key=key, kind=TOKENS).first()
        if counted is not None:
            resource = resource_for(counted.name, TOKENS)
            ledger.transact(session, dialect, resource, {}, ledger.Ledger.serve)
            return
        since = server_since(connection)
        parameters = {"key": key, "process_id": "", "durable": True, "since": since, "by_steps": True}
        handoff.grant(session, dialect, parameters)

    def _create_slots(self, key: str, slots: int, *, closed: bool) -> None:
        present = set(self._rows(SlotRow).filter(semaphore=key).values_list("slot", flat=True))
        numbers = [number for number in range(1, slots + 1) if number not in present]
        missing = [SlotRow(semaphore_id=key, slot=number, closed=closed) for number in numbers]
        # A claim may be creating the same rows at this moment.
        ignore = connections[self.alias].features.supports_ignore_conflicts
        self._rows(SlotRow).bulk_create(missing, batch_size=CHUNK, ignore_conflicts=ignore)

    @contextlib.contextmanager
    def _act(self, key: str) -> Iterator[RowClock]:
        with database_errors(self.alias):
            since = server_since(connections[self.alias])
            with transaction.atomic(using=self.alias):
                self._rows(SemaphoreRow).filter(key=key).update(shrinking=F("shrinking"))
                # Read after the lock: the clock is never older than what the lock waited for.
                yield RowClock.of(self.alias, since=since)

    def _delete(self, rows: QuerySet[Any]) -> int:
        # Without Django's collector: it would read first, and cascade over rows that this act must not touch.
        return rows._raw_delete(self.alias)
