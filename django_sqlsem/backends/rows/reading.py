"""The survey of the rows backend: one pass over the slots, whatever the number of names.

No index helps there: whether a slot is taken changes with every claim, and an index on it would end the updates in
place that make claims cheap on PostgreSQL.

What one name's rows say, read on a connection of our own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.db.models import Count, Model, Q, QuerySet, Sum

from django_sqlsem.backends.base import BaseSemaphoreBackend
from django_sqlsem.backends.clock import RowClock
from django_sqlsem.backends.rows.renewal import asking
from django_sqlsem.core.modes import UPDATE, WRITER
from django_sqlsem.database.dialects import Dialect
from django_sqlsem.database.errors import database_errors
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow
from django_sqlsem.snapshots import MOST_NAMES, Listed, SemaphoreSnapshot, Survey

if TYPE_CHECKING:
    from django.db.models import Model

    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session
    from django_sqlsem.snapshots import SurveyState


ModelT = TypeVar("ModelT", bound=Model)


class RowsSurvey(BaseSemaphoreBackend):
    """Reads the tables of one alias as a whole."""

    def survey(self, *, at: RowClock | None = None) -> Survey:
        """Return how all names stand, in five reads; in six if more names are taken than are listed."""
        with database_errors(self.alias):
            clock = at or RowClock.of(self.alias)
            # A writer or an upgradable reader has its place, slot 0, besides slots that count.
            live = clock.live() & (~Q(slot=WRITER) | Q(mode=UPDATE))
            counts = {"held": Count("pk", filter=live), "stale": Count("pk", filter=clock.stale())}
            taken = self._rows(SlotRow).filter(expires_us__isnull=False)
            by_name: QuerySet[Any, Any] = taken.order_by().values("semaphore").annotate(**counts)
            found = list(
                by_name.order_by("-stale", "-held").values_list("semaphore", "held", "stale")[: MOST_NAMES + 1]
            )
            complete = len(found) <= MOST_NAMES
            totals = (
                {"held": sum(each[1] for each in found), "stale": sum(each[2] for each in found)}
                if complete
                else taken.aggregate(**counts)
            )
            held = Listed(dict(sorted(((k, n) for k, n, _s in found if n), key=lambda pair: -pair[1])), complete)
            stale = Listed(
                {key: count for key, _held, count in found[:MOST_NAMES] if count}, complete or not found[-1][2]
            )
            waiting, threads = self._waiting(clock)
            paused = Listed.of((key, 1) for key in self._paused().values_list("pk", flat=True)[: MOST_NAMES + 1])
            of_paused = taken.filter(live, semaphore__in=self._paused().order_by().values("pk"))
            draining = of_paused.order_by().values("semaphore").annotate(held=Count("pk"))
            drained = Listed.of(draining.values_list("semaphore", "held")) if paused.counts else Listed()
            return Survey(
                held=totals["held"],
                stale=totals["stale"],
                waiting=threads,
                paused=len(paused.counts) if paused.complete else self._paused().count(),
                draining=len(drained.counts),
                names={"held": held, "stale": stale, "waiting": waiting, "paused": paused, "draining": drained},
            )

    def in_state(self, state: SurveyState, *, at: RowClock | None = None) -> Q:
        """Return the condition on ``SemaphoreRow`` that a name is in a state, by the database's clock."""
        with database_errors(self.alias):
            clock = at or RowClock.of(self.alias)
        if state == "paused":
            return Q(paused=True)
        if state == "waiting":
            return Q(pk__in=self._waiters(clock).values("semaphore"))
        of_state = clock.stale() if state == "stale" else clock.live()
        found = Q(pk__in=self._rows(SlotRow).filter(of_state, expires_us__isnull=False).order_by().values("semaphore"))
        return found & Q(paused=True) if state == "draining" else found

    def slots_in_state(self, state: SurveyState, *, at: RowClock | None = None) -> Q:
        """Return the condition on ``SlotRow``, by the database's clock."""
        with database_errors(self.alias):
            clock = at or RowClock.of(self.alias)
        if state == "held":
            return clock.live()
        if state == "stale":
            return clock.stale()
        return Q(semaphore__in=self._rows(SemaphoreRow).filter(self.in_state(state, at=clock)).order_by().values("pk"))

    def _waiting(self, clock: RowClock) -> tuple[Listed, int]:
        waiters = self._waiters(clock)
        by_name = waiters.values("semaphore").annotate(count=Sum("waiting")).order_by("-count")
        found = list(by_name.values_list("semaphore", "count")[: MOST_NAMES + 1])
        listed = Listed.of(found)
        if listed.complete:
            return listed, sum(count for _key, count in found)
        return listed, waiters.aggregate(count=Sum("waiting"))["count"]

    def _waiters(self, clock: RowClock) -> QuerySet[WaiterRow]:
        return self._rows(WaiterRow).filter(clock.live(), away=False).order_by()

    def _paused(self) -> QuerySet[SemaphoreRow]:
        return self._rows(SemaphoreRow).filter(paused=True)

    def _rows(self, model: type[ModelT]) -> QuerySet[ModelT]:
        return model._default_manager.using(self.alias)


_WHO: Final = ("host", "pid", "thread", "label", "user", "boot_id")
_SEMAPHORE: Final = (
    "name", "kind", "declared_slots", "declared_us", "operator_slots", "paused", "other_slots", "other_us", "tokens",
)  # fmt: skip
_SLOT: Final = ("slot", "token", "acquired_us", "expires_us", "lease_us", "suspect_us", "mode", *_WHO)
_ASKED: Final = ("stop_token", "stop_by")
_WAITER: Final = ("queued_us", "waiting", "take", "mode", *_WHO)
_USUAL: Final = (
    "SELECT (SELECT AVG(held_us) FROM sqlsem_slot WHERE semaphore_key = %(key)s AND held_us > 0),"
    " (SELECT COUNT(*) FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND {live} AND away = %(yes)s),"
    " (SELECT SUM(take) FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND NOT ({live}) AND away = %(yes)s)"
)


def read_snapshot(session: Session, dialect: Dialect, resource: Resource) -> SemaphoreSnapshot | None:
    """Return the snapshot of one name, or ``None`` if it has no rows. Raises ``BackendError``."""

    def read(cursor: AnyCursor) -> SemaphoreSnapshot | None:
        clock = RowClock(dialect.now(cursor), dialect.boot_id)
        found = _select(cursor, dialect, SemaphoreRow, _SEMAPHORE, "name_key = %(key)s", resource)
        if not found:
            return None
        semaphore = SemaphoreRow(**found[0])
        dialect.execute(cursor, _USUAL.replace("{live}", dialect.live_sql()), {"key": resource.key, "yes": True})
        usual, away, overdue = cursor.fetchone()
        taken = "semaphore_key = %(key)s AND expires_us IS NOT NULL ORDER BY slot"
        slots = asking(
            cursor,
            lambda asks: _select(cursor, dialect, SlotRow, (*_SLOT, *(_ASKED if asks else ())), taken, resource),
        )
        waiters = _select(
            cursor,
            dialect,
            WaiterRow,
            _WAITER,
            f"semaphore_key = %(key)s AND {dialect.waits_sql()} ORDER BY queued_us, id",
            resource,
        )
        return clock.semaphore(
            semaphore,
            tuple(clock.holder(resource.name, SlotRow(**values)) for values in slots),
            tuple(clock.waiter(resource.name, WaiterRow(**values)) for values in waiters),
            usual_hold=float(usual) / 1e6 if usual else None,
            away=int(away),
            overdue=int(overdue or 0),
        )

    return session.run(read)


def _select(
    cursor: AnyCursor,
    dialect: Dialect,
    model: type[Model],
    names: tuple[str, ...],
    where: str,
    resource: Resource,
) -> list[dict[str, Any]]:
    fields: dict[str, Any] = {field.name: field for field in model._meta.concrete_fields}
    columns = ", ".join(fields[name].column for name in names)
    dialect.execute(cursor, f"SELECT {columns} FROM {model._meta.db_table} WHERE {where}", {"key": resource.key})
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
