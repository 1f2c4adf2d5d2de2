"""The survey of the rows backend: one pass over the slots, whatever the number of names.

No index helps there: whether a slot is taken changes with every claim, and an index on it would end the updates in
place that make claims cheap on PostgreSQL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from django.db.models import Count, Model, Q, QuerySet, Sum

from django_sqlsem.backends.base import BaseSemaphoreBackend
from django_sqlsem.backends.row_clock import RowClock
from django_sqlsem.backends.rows_acts import database_errors
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow
from django_sqlsem.modes import UPDATE, WRITER
from django_sqlsem.surveys import MOST, Listed, Survey

if TYPE_CHECKING:
    from django_sqlsem.surveys import SurveyState

ModelT = TypeVar("ModelT", bound=Model)


class RowsSurvey(BaseSemaphoreBackend):
    """Reads the tables of one alias as a whole."""

    def survey(self) -> Survey:
        """Return how all names stand, in five reads; in six if more names are taken than are listed."""
        with database_errors(self.alias):
            clock = RowClock.of(self.alias)
            # A writer or an upgradable reader has its place, slot 0, besides slots that count.
            live = clock.live() & (~Q(slot=WRITER) | Q(mode=UPDATE))
            counts = {"held": Count("pk", filter=live), "stale": Count("pk", filter=clock.stale())}
            taken = self._rows(SlotRow).filter(expires_us__isnull=False)
            by_name: QuerySet[Any, Any] = taken.order_by().values("semaphore").annotate(**counts)
            found = list(by_name.order_by("-stale", "-held").values_list("semaphore", "held", "stale")[: MOST + 1])
            complete = len(found) <= MOST
            totals = (
                {"held": sum(each[1] for each in found), "stale": sum(each[2] for each in found)}
                if complete
                else taken.aggregate(**counts)
            )
            held = Listed(dict(sorted(((k, n) for k, n, _s in found if n), key=lambda pair: -pair[1])), complete)
            stale = Listed({key: count for key, _held, count in found[:MOST] if count}, complete or not found[-1][2])
            waiting, threads = self._waiting(clock)
            paused = Listed.of((key, 1) for key in self._paused().values_list("pk", flat=True)[: MOST + 1])
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

    def in_state(self, state: SurveyState) -> Q:
        """Return the condition on ``SemaphoreRow`` that a name is in a state, by the database's clock."""
        with database_errors(self.alias):
            clock = RowClock.of(self.alias)
        if state == "paused":
            return Q(paused=True)
        if state == "waiting":
            return Q(pk__in=self._waiters(clock).values("semaphore"))
        of_state = clock.stale() if state == "stale" else clock.live()
        found = Q(pk__in=self._rows(SlotRow).filter(of_state, expires_us__isnull=False).order_by().values("semaphore"))
        return found & Q(paused=True) if state == "draining" else found

    def slots_in_state(self, state: SurveyState) -> Q:
        """Return the condition on ``SlotRow``, by the database's clock."""
        with database_errors(self.alias):
            clock = RowClock.of(self.alias)
        if state == "held":
            return clock.live()
        if state == "stale":
            return clock.stale()
        return Q(semaphore__in=self._rows(SemaphoreRow).filter(self.in_state(state)).order_by().values("pk"))

    def _waiting(self, clock: RowClock) -> tuple[Listed, int]:
        waiters = self._waiters(clock)
        by_name = waiters.values("semaphore").annotate(count=Sum("waiting")).order_by("-count")
        found = list(by_name.values_list("semaphore", "count")[: MOST + 1])
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
