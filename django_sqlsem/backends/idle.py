"""Names that nobody has used for long: which they are, and what is deleted with them but their slots and waiters.

Backends delete those, each under its own locks. A look goes through a few names and a deletion takes a few, so that
neither grows with the number of names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from django.db.models import Count, Exists, F, IntegerField, OuterRef, Q, Subquery, Value

from django_sqlsem.backends.base import TOKENS
from django_sqlsem.backends.clock import RowClock
from django_sqlsem.database.errors import database_errors
from django_sqlsem.models import EventRow, MinuteRow, RefreshRow, SemaphoreRow, SlotRow, WaiterRow

if TYPE_CHECKING:
    from collections.abc import Collection

    from django.db.models import QuerySet

#: A look goes through so many names, and finds so many of them with so many slots; one name may have more.
LOOKED_AT: Final = 500
AT_ONCE: Final = 100
MOST_SLOTS: Final = 1000
#: So many rows of a name's history are deleted at once.
MOST_NOTES: Final = 500
#: A transaction of a deletion takes no longer, in seconds; and waits so long for SQLite's one writer.
LONGEST: Final = 1.0
IN_LINE: Final = 0.1
#: Before all keys.
FIRST: Final = "0"


class Look(NamedTuple):
    """What a look has found: names by their keys, and the key after which to look next."""

    names: dict[str, str]
    after: str
    #: Whether it stopped because it had found enough.
    more: bool


class Idle:
    """What is idle at one instant: what was used last before ``seconds`` ago."""

    def __init__(self, alias: str, seconds: float) -> None:
        self.alias = alias
        self.clock = RowClock.of(alias)
        self._us = round(seconds * 1e6)
        # By the clock of tokens, which goes on when the host is started anew.
        self._before_us = self.clock.unix - self._us

    def names(self) -> QuerySet[SemaphoreRow]:
        """Return the names that may be forgotten once they are unused: no operator has set them, they are no counts."""
        rows = SemaphoreRow.objects.using(self.alias).filter(operator_slots=None, paused=False)
        return rows.exclude(kind=TOKENS)

    def free(self) -> Q:
        """Return the condition that a slot is free, and has been for long: each grant has a token of its time."""
        return Q(expires_us=None, token__lte=self._before_us)

    def look(self, after: str) -> Look:
        """Look for idle names among the next few whose keys follow ``after``."""
        with database_errors(self.alias):
            rows = SemaphoreRow.objects.using(self.alias).filter(pk__gt=after).order_by("pk")
            last = next(iter(rows.values_list("pk", flat=True)[LOOKED_AT - 1 : LOOKED_AT]), None)
            among = self.names().filter(Q(pk__gt=after) & (Q(pk__lte=last) if last else Q()))
            slots = SlotRow.objects.using(self.alias).filter(semaphore=OuterRef("pk")).order_by().values("semaphore")
            number = Subquery(slots.annotate(number=Count("pk")).values("number"), output_field=IntegerField())
            found = among.filter(self._unused()).order_by("pk").values_list("pk", "name", number)
            names: dict[str, str] = {}
            total = 0
            for key, name, count in found[:AT_ONCE]:
                total += count or 0
                if names and total > MOST_SLOTS:
                    break
                names[key] = name
                after = key
        more = len(names) == AT_ONCE or total > MOST_SLOTS
        return Look(names, after if more else last or FIRST, more)

    def _unused(self) -> Q:
        """Return the condition on names that nobody has used one, or waits for it."""
        alias, before_us = self.alias, self._before_us
        slots = SlotRow.objects.using(alias).filter(semaphore=OuterRef("pk"))
        waiters = WaiterRow.objects.using(alias).filter(self.clock.live(), semaphore=OuterRef("pk"))
        # The end of a hold that was longer than that, and what operators did, are in the history.
        minutes = MinuteRow._default_manager.using(alias).filter(key=OuterRef("pk"), minute_us__gt=before_us)
        events = EventRow._default_manager.using(alias).filter(key=OuterRef("pk"), at_us__gt=before_us)
        values = RefreshRow._default_manager.using(alias).filter(key=OuterRef("pk"))
        not_due = Q(token__gt=before_us) | Q(token__gt=Value(self.clock.unix) - F("period_us"))
        never = ~Exists(slots.filter(token__gt=0)) & Q(declared_us__gt=self.clock.now - self._us)
        return ~(
            Exists(slots.exclude(self.free()))
            | Exists(waiters)
            | Exists(minutes)
            | Exists(events)
            | Exists(values.filter(not_due))
            | never
        )

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
