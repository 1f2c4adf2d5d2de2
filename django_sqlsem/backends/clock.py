"""One instant of a lock database's clock, what the rows mean at that instant, and which names are idle by then."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from django.db import connections
from django.db.models import BigIntegerField, Case, Exists, F, OuterRef, Q, Subquery, Value, When
from django.db.models.lookups import LessThan

from django_sqlsem.backends.base import COUNTER
from django_sqlsem.core.modes import MUTEX
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.errors import database_errors
from django_sqlsem.database.sessions import used_by_orm
from django_sqlsem.models import EventRow, MinuteRow, RefreshRow, SemaphoreRow, SlotRow, WaiterRow
from django_sqlsem.snapshots import SOMEBODY, HolderSnapshot, SemaphoreSnapshot, SlotState, WaiterSnapshot, grouped

if TYPE_CHECKING:
    from collections.abc import Collection

    from django.db.models import QuerySet

    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session


#: For how long another number of slots counts as declared lately.
DISAGREEMENT_US: Final = 3_600_000_000
#: Within this many seconds a grant that was handed over has been confirmed.
CONFIRMED: Final = 2.0
#: How many names a look goes through, how many of them it finds, and how many slots; one name may have more.
LOOKED_AT: Final = 500
IDLE_AT_ONCE: Final = 100
MOST_SLOTS: Final = 1000
#: How many rows of a name's history are deleted at once.
MOST_NOTES: Final = 500
#: A transaction of a deletion takes no longer, in seconds; and waits so long for SQLite's one writer.
LONGEST_DELETION: Final = 1.0
IN_LINE: Final = 0.1
#: Before all keys.
FIRST: Final = "0"


class RowClock:
    """One instant of the database's clock, and everything that is told by it."""

    def __init__(self, now: int, boot_id: str, since: int = 0) -> None:
        self.now = now
        self.boot_id = boot_id
        #: For one lease after this instant nothing has run out.
        self.since = since
        #: Processes that are known to be dead, and whether all were asked about that hold something.
        self.dead: frozenset[str] = frozenset()
        self.asked_of_all = False
        self.wall = datetime.datetime.now(datetime.UTC)
        #: The clock that tokens and pauses follow: it goes on where the host's boot clock starts anew.
        self.unix = round(self.wall.timestamp() * 1e6) if boot_id else now

    @classmethod
    def of(cls, alias: str, *, since: int = 0) -> RowClock:
        """Ask the database of an alias, on its ordinary connection."""
        connection = connections[alias]
        dialect = dialect_for(connection)
        with connection.cursor() as cursor:
            return cls(dialect.now(cursor), dialect.boot_id, since)

    def expired(self) -> Q:
        """Rows that are taken, and whose lease has run out or belongs to an earlier boot of the host."""
        expired = Q(expires_us__lte=self.now, lease_us__lte=abs(self.now - self.since))
        if self.boot_id:
            expired |= Q(expires_us__isnull=False) & ~Q(boot_id=self.boot_id)
        return expired

    def live(self) -> Q:
        """Rows that are taken and have not expired."""
        live = Q(expires_us__gt=self.now)
        return live & Q(boot_id=self.boot_id) if self.boot_id else live

    def stale(self) -> Q:
        """Taken rows whose holder we judge gone: what ``holder()`` says of one row, for all of them."""
        late = LessThan(F("expires_us") * 2 - F("lease_us"), Value(2 * self.now, output_field=BigIntegerField()))
        overdue = Q(late, acquired_us__lt=self.now - round(CONFIRMED * 1e6))
        gone = Q(suspect_us__isnull=False) | self.expired() | overdue
        if self.dead:
            gone |= Q(beacon=True, process_id__in=sorted(self.dead))
        return Q(expires_us__isnull=False) & gone

    def paused(self) -> Q:
        """Semaphores that grant nothing by an operator's word, whose time has not passed."""
        return Q(paused=True) & (Q(paused_until_us__isnull=True) | Q(paused_until_us__gt=self.unix))

    def pauses(self, paused: bool, until_us: int | None) -> bool:
        """Return what ``paused()`` says of one row."""
        return bool(paused) and (until_us is None or until_us > self.unix)

    def operated(self) -> Q:
        """Semaphores whose number of slots is an operator's, whose time has not passed."""
        return Q(operator_slots__isnull=False) & (Q(slots_until_us__isnull=True) | Q(slots_until_us__gt=self.unix))

    def operates(self, operator_slots: int | None, until_us: int | None) -> int | None:
        """Return an operator's number if ``operated()`` is true of its row."""
        return operator_slots if until_us is None or until_us > self.unix else None

    def disputed(self) -> Q:
        """Names of which processes declare different numbers of slots: what ``semaphore()`` says of one row."""
        lately = Q(other_us__gt=self.now - DISAGREEMENT_US, other_us__lte=self.now)
        return lately & ~Q(other_slots=F("declared_slots")) & ~Q(kind=MUTEX)

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
        # One that was just handed over is confirmed only after a moment.
        late = left * 2 < row.lease_us / 1e6 and age > CONFIRMED
        dead = row.beacon and row.process_id in self.dead
        gone = left <= 0 or late or row.suspect_us is not None or dead
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
            mode=row.mode,
            stop_by=stop_by(row),
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
            mode=row.mode,
        )

    def semaphore(
        self,
        row: SemaphoreRow,
        holders: tuple[HolderSnapshot, ...],
        waiters: tuple[WaiterSnapshot, ...],
        *,
        usual_hold: float | None = None,
        away: int = 0,
        overdue: int = 0,
    ) -> SemaphoreSnapshot:
        """Return the snapshot of a name. ``overdue``: units that were handed out, and go back into the count."""
        last_grant: int | None = getattr(row, "last_grant_us", None)
        counted = row.units is not None
        if counted:  # its last change; one from before the host's boot may seem to lie ahead
            last_grant = row.declared_us
        paused = self.pauses(row.paused, row.paused_until_us)
        until = row.paused_until_us if paused else None
        since = row.paused_us if paused else None
        operator = self.operates(row.operator_slots, row.slots_until_us)
        ends = row.slots_until_us if operator is not None else None
        lately = row.other_us is not None and 0 <= self.now - row.other_us < DISAGREEMENT_US
        return SemaphoreSnapshot(
            name=row.name,
            kind=row.kind,
            slots=1 if row.kind == MUTEX else row.declared_slots if operator is None else operator,
            declared_slots=row.declared_slots,
            operator_slots=operator,
            slots_by=row.slots_by if operator is not None else "",
            slots_reason=row.slots_reason if operator is not None else "",
            slots_until=None if ends is None else self.at((self.unix - ends) / 1e6),
            slots_end_in=None if ends is None else (ends - self.unix) / 1e6,
            paused=paused,
            paused_by=row.paused_by if paused else "",
            paused_reason=row.paused_reason if paused else "",
            paused_at=None if since is None else self.at((self.unix - since) / 1e6),
            paused_until=None if until is None else self.at((self.unix - until) / 1e6),
            resumes_in=None if until is None else (until - self.unix) / 1e6,
            holders=grouped(holders),
            waiters=waiters,
            other_declared_slots=row.other_slots if lately and row.other_slots != row.declared_slots else None,
            idle=None if last_grant is None else max(0.0, (self.now - last_grant) / 1e6),
            usual_hold=usual_hold,
            away=0 if counted else away,
            units=None if row.units is None else row.units + overdue,
            template=row.template or "",
        )


def stop_by(row: SlotRow) -> str:
    """Return by whom the holder of a slot was asked to stop; a request to another grant of the slot is none to it."""
    return (row.stop_by or SOMEBODY) if row.stop_token == row.token else ""


class IdleNames(NamedTuple):
    """Names that are idle, by their keys, and the key after which to look next."""

    names: dict[str, str]
    after: str
    #: Whether it stopped because it had found enough.
    more: bool


class Idle:
    """What is idle at one instant: names that were used last before ``seconds`` ago. Backends delete their rows.

    A look goes through a few names and finds a few, so that its cost does not grow with their number.
    """

    def __init__(self, alias: str, seconds: float) -> None:
        self.alias = alias
        self.clock = RowClock.of(alias)
        self._us = round(seconds * 1e6)
        # By the clock of tokens, which goes on when the host is started anew.
        self._before_us = self.clock.unix - self._us

    @classmethod
    def found(cls, session: Session, seconds: float, after: str) -> tuple[Idle, IdleNames]:
        """Look on a session: see ``look()``. Raises ``BackendError``."""

        def look(cursor: AnyCursor) -> tuple[Idle, IdleNames]:
            with used_by_orm(cursor.db):
                idle = cls(cursor.db.alias, seconds)
                return idle, idle.look(after)

        return session.run(look)

    def names(self) -> QuerySet[SemaphoreRow]:
        """Return the names that may be forgotten once they are unused: no operator has set them, they are no counts."""
        rows = SemaphoreRow.objects.using(self.alias).filter(operator_slots=None, paused=False)
        return rows.exclude(kind=COUNTER)

    def free(self) -> Q:
        """Return the condition that a slot is free, and has been for long: each grant has a token of its time."""
        return Q(expires_us=None, token__lte=self._before_us)

    def look(self, after: str) -> IdleNames:
        """Look for idle names among the next few whose keys follow ``after``."""
        with database_errors(self.alias):
            rows = SemaphoreRow.objects.using(self.alias).filter(pk__gt=after).order_by("pk")
            last = next(iter(rows.values_list("pk", flat=True)[LOOKED_AT - 1 : LOOKED_AT]), None)
            slots = SlotRow.objects.using(self.alias).filter(semaphore=OuterRef("pk"))
            highest = [Subquery(slots.order_by(f"-{each}").values(each)[:1]) for each in ("slot", "token")]
            among = self._unused(after, last).order_by("pk").values_list("pk", "name", "declared_us", *highest)
            found = list(among[:IDLE_AT_ONCE])
        names: dict[str, str] = {}
        noted = self._noted([key for key, *_ in found]) if found else set()
        total = 0
        for key, name, declared_us, slot, token in found:
            total += slot or 0
            if names and total > MOST_SLOTS:
                return IdleNames(names, after, True)
            after = key
            # One that was never granted may be new.
            if key not in noted and (token or declared_us <= self.clock.now - self._us):
                names[key] = name
        return IdleNames(names, after, True) if len(found) == IDLE_AT_ONCE else IdleNames(names, last or FIRST, False)

    def _unused(self, after: str, last: str | None) -> QuerySet[SemaphoreRow]:
        """Return the names after one key, up to another one, that nobody has used, or waits for."""
        rows, alias = self.names().filter(pk__gt=after), self.alias
        for used in (
            SlotRow.objects.using(alias).filter(semaphore=OuterRef("pk")).exclude(self.free()),
            WaiterRow.objects.using(alias).filter(self.clock.live(), semaphore=OuterRef("pk")),
        ):
            rows = rows.filter(~Exists(used))
        return rows.filter(pk__lte=last) if last else rows

    def _noted(self, keys: Collection[str]) -> set[str]:
        """Return which of these names have been used by what their history and values say."""
        alias, before_us = self.alias, self._before_us
        due = Q(token__gt=before_us) | Q(token__gt=Value(self.clock.unix) - F("period_us"))
        # The end of a hold that was longer than that, and what operators did, are in the history.
        minutes = MinuteRow._default_manager.using(alias).filter(key__in=keys, minute_us__gt=before_us)
        events = EventRow._default_manager.using(alias).filter(key__in=keys, at_us__gt=before_us)
        values = RefreshRow._default_manager.using(alias).filter(due, key__in=keys)
        of_key = [rows.values_list("key", flat=True) for rows in (minutes, events, values)]
        return set(of_key[0].union(*of_key[1:]))

    def drop(self, keys: Collection[str]) -> bool:
        """Delete what is known of names but the rows of the locks. Return whether that is all of it."""
        for model in (MinuteRow, EventRow):
            rows = model._default_manager.using(self.alias)
            ids = list(rows.filter(key__in=keys).values_list("pk", flat=True)[:MOST_NOTES])
            rows.filter(pk__in=ids)._raw_delete(self.alias)
            if len(ids) == MOST_NOTES:
                return False
        RefreshRow._default_manager.using(self.alias).filter(key__in=keys)._raw_delete(self.alias)
        return True
