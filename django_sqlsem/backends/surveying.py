"""How a backend tells of all its names at once. By itself it reads every snapshot; tables know a shorter way."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from django.db.models import Q

from django_sqlsem.naming import key_of
from django_sqlsem.snapshots import SlotState
from django_sqlsem.surveys import Survey, SurveyState, survey_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from django_sqlsem.snapshots import SemaphoreSnapshot


class Surveying(abc.ABC):
    """The part of the operator's side that is about all names. It runs on the alias's ordinary connection."""

    alias: str

    @abc.abstractmethod
    def inspect(self, names: Collection[str] | None = None, *, prefix: str = "") -> list[SemaphoreSnapshot]:
        """Return snapshots, ordered by name: of ``names`` if given, else of all names that begin with ``prefix``."""

    def survey(self) -> Survey:
        """Return how all names stand."""
        return survey_of(self.inspect())

    def in_state(self, state: SurveyState) -> Q:
        """Return the condition on ``SemaphoreRow`` that a name is in a state at this moment."""
        return Q(pk__in=[_key(snapshot) for snapshot in self.inspect() if _is(snapshot, state)])

    def slots_in_state(self, state: SurveyState) -> Q:
        """Return the condition on ``SlotRow`` that a slot is held or stale, or that its name is in another state."""
        from django_sqlsem.models import SlotRow  # this module must not need the models

        found = {_key(snapshot): snapshot for snapshot in self.inspect() if _is(snapshot, state)}
        if state not in ("held", "stale"):
            return Q(semaphore__in=list(found))
        wanted = {
            (key, slot)
            for key, snapshot in found.items()
            for holder in snapshot.holders
            for slot in holder.numbers
            if (holder.state is SlotState.STALE if state == "stale" else not holder.expired)
        }
        # A lock that other programs took has no holder in its row.
        taken = SlotRow._default_manager.using(self.alias).filter(semaphore__in=list(found))
        rows = taken.values_list("pk", "semaphore", "slot")
        return Q(pk__in=[pk for pk, key, slot in rows if (key, slot) in wanted])


def _key(snapshot: SemaphoreSnapshot) -> str:
    return key_of(snapshot.name)


def _is(snapshot: SemaphoreSnapshot, state: SurveyState) -> bool:
    return bool(getattr(snapshot, state))
