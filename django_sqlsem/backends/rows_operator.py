"""The operator's side of the rows backend: it shows the rows and acts on them, with the ORM, on any database.

Every act is one short transaction that begins by writing to the semaphore's row. That locks the name on every
database, and on SQLite it means that no read lock is ever upgraded. What an act then changes is named by slot
and token in the statement's own WHERE, so that its row count decides.
"""

from __future__ import annotations

import contextlib
import datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.db import connections, transaction
from django.db.models import BigIntegerField, Case, F, Max, Model, OuterRef, Q, QuerySet, Subquery, Value, When
from django.db.utils import Error

from django_sqlsem.backends.base import BaseSemaphoreBackend
from django_sqlsem.backends.dialects import dialect_for
from django_sqlsem.exceptions import BackendError
from django_sqlsem.identity import MAX_USER_LENGTH, printable
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow
from django_sqlsem.naming import resource_for, validate_slots
from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot, SlotState, WaiterSnapshot

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

ModelT = TypeVar("ModelT", bound=Model)

#: How many names one query asks for; every database takes as many parameters.
CHUNK: Final = 500
#: For how long another number of slots counts as declared lately.
DISAGREEMENT_US: Final = 3_600_000_000


class _KeepError(Exception):
    """Roll back: the name is in use."""


@contextlib.contextmanager
def database_errors(alias: str) -> Iterator[None]:
    """Turn whatever the database raises into ``BackendError``, with the driver's error as its cause."""
    try:
        yield
    except Error as error:
        raise BackendError(f"The database {alias!r} failed: {error}") from error


class RowsOperator(BaseSemaphoreBackend):
    """Shows and changes the rows of one alias, on its ordinary connection."""

    def inspect(self, names: Collection[str] | None = None, *, prefix: str = "") -> list[SemaphoreSnapshot]:
        """Return snapshots ordered by name, in three reads per 500 ``names``, or in three reads of a prefix."""
        with database_errors(self.alias):
            if names is None:
                clock = _Clock(self.alias)
                # Some databases fold case here, so the prefix is tested once more.
                found = self._read(clock, Q(name__startswith=prefix), Q(semaphore__name__startswith=prefix))
                found = [snapshot for snapshot in found if snapshot.name.startswith(prefix)]
            else:
                keys = sorted({_key(name) for name in names})
                found = []
                for start in range(0, len(keys), CHUNK):
                    chunk = keys[start : start + CHUNK]
                    found += self._read(_Clock(self.alias), Q(key__in=chunk), Q(semaphore__in=chunk))
        return sorted(found, key=lambda snapshot: snapshot.name)

    def _read(self, clock: _Clock, wanted: Q, related: Q) -> list[SemaphoreSnapshot]:
        last_grant = (
            self._rows(SlotRow)
            .filter(semaphore=OuterRef("pk"))
            .order_by()
            .values("semaphore")
            .annotate(at=Max(clock.grant_instant()))
            .values("at")
        )
        semaphores = list(
            self._rows(SemaphoreRow)
            .filter(wanted)
            .annotate(last_grant_us=Subquery(last_grant, output_field=BigIntegerField()))
        )
        names = {row.pk: row.name for row in semaphores}
        holders: dict[str, list[HolderSnapshot]] = {}
        for slot in self._rows(SlotRow).filter(related, expires_us__isnull=False).order_by("slot"):
            if slot.semaphore_id in names:
                holders.setdefault(slot.semaphore_id, []).append(clock.holder(names[slot.semaphore_id], slot))
        waiters: dict[str, list[WaiterSnapshot]] = {}
        for waiter in self._rows(WaiterRow).filter(related, clock.live()).order_by("queued_us", "pk"):
            if waiter.semaphore_id in names:
                waiters.setdefault(waiter.semaphore_id, []).append(clock.waiter(names[waiter.semaphore_id], waiter))
        return [
            clock.semaphore(row, tuple(holders.get(row.pk, ())), tuple(waiters.get(row.pk, ()))) for row in semaphores
        ]

    def revoke(self, name: str, slot: int, token: int, *, by: str) -> HolderSnapshot | None:
        """Take a slot away from the holder with this token, live or expired, and note who did it."""
        with self._act(_key(name)) as clock:
            held = self._rows(SlotRow).filter(semaphore=_key(name), slot=slot, token=token, expires_us__isnull=False)
            row = held.select_for_update().first()
            if row is None:
                return None
            revoked = held.update(
                expires_us=None, permit_id=None, revoked_token=token, revoked_by=printable(by, MAX_USER_LENGTH)
            )
            return clock.holder(name, row) if revoked else None

    def purge_slot(self, name: str, slot: int, token: int) -> bool:
        """Free a slot whose lease has run out by the database's clock and that still carries this token."""
        with self._act(_key(name)) as clock:
            expired = self._rows(SlotRow).filter(clock.expired(), semaphore=_key(name), slot=slot, token=token)
            return bool(expired.update(expires_us=None, permit_id=None))

    def purge_idle(self, name: str) -> bool:
        """Delete a name that nobody holds or waits for, unless an operator has set its slots or paused it."""
        key = _key(name)
        try:
            with self._act(key) as clock:
                slots = self._rows(SlotRow).filter(semaphore=key)
                self._delete(slots.filter(Q(expires_us=None) | clock.expired()))
                waiters = self._rows(WaiterRow).filter(semaphore=key)
                if slots.exists() or waiters.filter(clock.live()).exists():
                    raise _KeepError
                self._delete(waiters)
                if not self._delete(self._rows(SemaphoreRow).filter(key=key, operator_slots=None, paused=False)):
                    raise _KeepError
        except _KeepError:
            return False
        return True

    def set_slots(self, name: str, slots: int | None) -> bool:
        """Set the operator's number, and open and close slots to suit. Raises ``ValueError`` for a mutex."""
        key = _key(name)
        if slots is not None:
            validate_slots(slots)
        with self._act(key) as clock:
            semaphore = self._rows(SemaphoreRow).filter(key=key).first()
            if semaphore is None:
                return False
            if semaphore.kind == "mutex" and slots not in (None, 1):
                raise ValueError(f"{name!r} is a mutex: it has one slot, not {slots}.")
            rows = self._rows(SlotRow).filter(semaphore=key)
            shrinking = False
            if slots is None:
                rows.filter(closed=True).update(closed=False)
            else:
                self._create_slots(key, slots)
                rows.filter(slot__lte=slots, closed=True).update(closed=False)
                rows.filter(slot__gt=slots, closed=False).update(closed=True)
                shrinking = rows.filter(clock.live(), slot__gt=slots).exists()
            self._rows(SemaphoreRow).filter(key=key).update(operator_slots=slots, shrinking=shrinking)
        return True

    def set_paused(self, name: str, paused: bool) -> bool:
        """Stop or resume granting; holders are not disturbed."""
        with database_errors(self.alias):
            return bool(self._rows(SemaphoreRow).filter(key=_key(name)).update(paused=paused))

    def _create_slots(self, key: str, slots: int) -> None:
        present = set(self._rows(SlotRow).filter(semaphore=key).values_list("slot", flat=True))
        missing = [SlotRow(semaphore_id=key, slot=number) for number in range(1, slots + 1) if number not in present]
        # A claim may be creating the same rows at this moment.
        ignore = connections[self.alias].features.supports_ignore_conflicts
        self._rows(SlotRow).bulk_create(missing, batch_size=CHUNK, ignore_conflicts=ignore)

    @contextlib.contextmanager
    def _act(self, key: str) -> Iterator[_Clock]:
        with database_errors(self.alias), transaction.atomic(using=self.alias):
            self._rows(SemaphoreRow).filter(key=key).update(shrinking=F("shrinking"))
            # Read after the lock: the clock is never older than what the lock waited for.
            yield _Clock(self.alias)

    def _rows(self, model: type[ModelT]) -> QuerySet[ModelT]:
        return model._default_manager.using(self.alias)

    def _delete(self, rows: QuerySet[Any]) -> int:
        # Without Django's collector: it would read first, and cascade over rows that this act must not touch.
        return rows._raw_delete(self.alias)


def _key(name: str) -> str:
    return resource_for(name, "semaphore").key


class _Clock:
    """One instant of the database's clock, and everything that is told by it."""

    def __init__(self, alias: str) -> None:
        connection = connections[alias]
        dialect = dialect_for(connection)
        with connection.cursor() as cursor:
            self.now = dialect.now(cursor)
        self.boot_id = dialect.boot_id
        self.wall = datetime.datetime.now(datetime.UTC)

    def expired(self) -> Q:
        """Rows that are taken, and whose lease has run out or belongs to an earlier boot of the host."""
        expired = Q(expires_us__lte=self.now)
        if self.boot_id:
            expired |= Q(expires_us__isnull=False) & ~Q(boot_id=self.boot_id)
        return expired

    def live(self) -> Q:
        """Rows that are taken and have not expired."""
        live = Q(expires_us__gt=self.now)
        return live & Q(boot_id=self.boot_id) if self.boot_id else live

    def grant_instant(self) -> Case:
        """When a slot was granted last: at the latest by the boot, if that was before it."""
        here = (
            When(boot_id=self.boot_id, then=F("acquired_us")) if self.boot_id else When(then=F("acquired_us"), pk__gt=0)
        )
        return Case(here, When(acquired_us__isnull=False, then=Value(0)), output_field=BigIntegerField())

    def age(self, instant: int | None, boot_id: str) -> float:
        """Seconds since an instant; for one before the host's boot, seconds since the boot."""
        if instant is None:
            return 0.0
        if self.boot_id and boot_id != self.boot_id:
            instant = 0
        return (self.now - instant) / 1e6

    def at(self, age: float) -> datetime.datetime:
        """Return the wall time that was ``age`` seconds ago, for people to read."""
        try:
            return self.wall - datetime.timedelta(seconds=age)
        except OverflowError:
            return self.wall

    def holder(self, name: str, row: SlotRow) -> HolderSnapshot:
        """Return the snapshot of a taken slot."""
        left = -self.age(row.expires_us, row.boot_id)
        age = max(0.0, self.age(row.acquired_us, row.boot_id))
        gone = left <= 0 or left * 2 < row.lease_us / 1e6
        return HolderSnapshot(
            name=name,
            slot=row.slot,
            state=SlotState.STALE if gone else SlotState.HELD,
            token=row.token,
            host=row.host,
            pid=row.pid,
            thread=row.thread,
            label=row.label,
            user=row.user,
            acquired_at=self.at(age),
            expires_at=self.at(-left),
            age=age,
            lease_left=left,
        )

    def waiter(self, name: str, row: WaiterRow) -> WaiterSnapshot:
        """Return the snapshot of a waiting process."""
        age = max(0.0, self.age(row.queued_us, row.boot_id))
        return WaiterSnapshot(
            name=name,
            host=row.host,
            pid=row.pid,
            thread=row.thread,
            label=row.label,
            user=row.user,
            waiting_since=self.at(age),
            age=age,
            waiting=row.waiting,
            take=row.take,
        )

    def semaphore(
        self, row: SemaphoreRow, holders: tuple[HolderSnapshot, ...], waiters: tuple[WaiterSnapshot, ...]
    ) -> SemaphoreSnapshot:
        """Return the snapshot of a name."""
        last_grant: int | None = getattr(row, "last_grant_us", None)
        lately = row.other_us is not None and 0 <= self.now - row.other_us < DISAGREEMENT_US
        return SemaphoreSnapshot(
            name=row.name,
            kind=row.kind,
            slots=row.slots,
            declared_slots=row.declared_slots,
            operator_slots=row.operator_slots,
            paused=row.paused,
            holders=holders,
            waiters=waiters,
            other_declared_slots=row.other_slots if lately and row.other_slots != row.declared_slots else None,
            idle=None if last_grant is None else max(0.0, (self.now - last_grant) / 1e6),
        )
