"""Semaphores on rows: one row per slot, claimed by one conditional UPDATE. For every database but SQL Server."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from django_sqlsem.backends.base import (
    COUNTER,
    Acquired,
    BaseSemaphoreBackend,
    Crowd,
    Forgotten,
    Grant,
    Granted,
    Place,
    Released,
    Request,
    Waited,
    sizing,
)
from django_sqlsem.backends.rows import (
    acquire,
    beacons,
    counters,
    fences,
    handoff,
    operator,
    queue,
    reading,
    renewal,
)
from django_sqlsem.core.identity import process_id
from django_sqlsem.core.modes import UPDATE, UPGRADE, WHOLE
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.server import note_server
from django_sqlsem.snapshots import templates_of

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models import Q

    from django_sqlsem.backends.base import Presence
    from django_sqlsem.backends.clock import RowClock
    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.sessions import Session
    from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot, Survey, SurveyState, TemplateSnapshot


class RowsBackend(BaseSemaphoreBackend):
    """The portable backend. The database's row locks keep the invariant; no counter can leak or over-admit.

    What it does is in the modules beside this one. A request for a counter is another's matter than one for slots.
    """

    end_dead = staticmethod(beacons.end_dead)
    held_by = staticmethod(beacons.held_by)
    keeps_ranks = True
    keeps_counters = True
    modes = frozenset({WHOLE, UPDATE, UPGRADE})

    # What needs nothing of the backend's own.
    opened = staticmethod(note_server)
    step_aside = staticmethod(queue.step_aside)
    keeps_place = staticmethod(queue.keeps_place)
    hand_rank_on = staticmethod(queue.hand_rank_on)
    renew = staticmethod(renewal.renew)
    fate = staticmethod(renewal.fate)
    standing = staticmethod(beacons.standing)
    snapshot = staticmethod(reading.read_snapshot)
    take = staticmethod(counters.take)
    fence = staticmethod(fences.fence)
    extend = staticmethod(fences.extend)
    fenced_sql = staticmethod(fences.fenced_sql)

    # The holder's side.

    def claim(self, session: Session, request: Request) -> Grant | None:
        if request.resource.kind == COUNTER:
            return counters.claim(session, request)
        return acquire.SlotRequest(session, request).take()

    def enrol(self, session: Session, request: Request, place: Place, *, first: bool) -> Waited:
        if request.resource.kind == COUNTER:
            return counters.enrol(session, request, place)
        return acquire.enrol(session, request, place, first=first)

    def crowd(self, session: Session, request: Request, here: int) -> Crowd | None:
        return acquire.SlotRequest(session, request).look_at_crowd(here)

    def wait(self, session: Session, request: Request, place: Place) -> Waited:
        if request.resource.kind == COUNTER:
            return counters.wait(session, request, place)
        return queue.wait(session, request, place)

    def granted(self, session: Session, request: Request) -> Granted | None:
        if request.resource.kind == COUNTER:
            return counters.granted(session, request)
        return queue.granted(session, request)

    def leave(self, session: Session, request: Request) -> None:
        if request.resource.kind == COUNTER:
            counters.discard(session, request.resource, request.permit_id)
        else:
            queue.leave(session, request)

    def release(self, session: Session, held: Acquired, *, wanted: bool = False, hand_on: bool = True) -> Released:
        if held.request.resource.kind == COUNTER:  # they were handed over, and nobody took them
            return Released(counters.discard(session, held.resource, held.permit_id))
        released = handoff.release(session, held, wanted=wanted, hand_on=hand_on)
        # A hand-over may have been told before this node of a cluster has it: its slot would be idle until it lapses.
        if not released.freed and session.run(session.dialect.catch_up):
            released = handoff.release(session, held, wanted=wanted, hand_on=hand_on)
        return released

    def discard(self, session: Session, resource: Resource, permit_id: str) -> bool:
        if resource.kind == COUNTER:
            return counters.discard(session, resource, permit_id)
        return queue.discard(session, resource, permit_id)

    def hand_out(self, session: Session, resource: Resource) -> None:
        if resource.kind == COUNTER:
            counters.hand_out(session, resource)
        else:
            handoff.hand_out(session, resource.key)

    def add(
        self,
        session: Session,
        resource: Resource,
        count: int,
        *,
        initial: int,
        presence: Presence,
        hand_on: bool = True,
    ) -> tuple[Granted, ...]:
        here, witness = process_id(), presence.beacon
        return counters.add(session, resource, count, initial=initial, witness=witness, here=here, hand_on=hand_on)

    def free_dead(self, session: Session, resource: Resource, *, witness: bool) -> None:
        if beacons.free_dead(session, resource, witness=witness):
            self.hand_out(session, resource)

    def keeps_renewals_out(self, caller: BaseDatabaseWrapper) -> bool:
        return dialect_for(caller).fence == "writer"

    # The operator's side.

    def inspect(
        self,
        names: Collection[str] | None = None,
        *,
        prefix: str = "",
        template: str | None = None,
        at: RowClock | None = None,
    ) -> list[SemaphoreSnapshot]:
        return reading.inspect(self.alias, names, prefix, template, at=at)

    def template_sums(
        self, *, at: RowClock | None = None, survey: Survey | None = None
    ) -> Mapping[str, TemplateSnapshot]:
        if survey is not None and survey.in_use is not None:
            return templates_of(survey.in_use.values())
        return reading.template_sums(self.alias, at=at)

    def survey(self, *, at: RowClock | None = None) -> Survey:
        return reading.survey(self.alias, at=at)

    def in_state(self, state: SurveyState, *, at: RowClock | None = None) -> Q:
        return reading.in_state(self.alias, state, at=at)

    def slots_in_state(self, state: SurveyState, *, at: RowClock | None = None) -> Q:
        return reading.slots_in_state(self.alias, state, at=at)

    def revoke(self, name: str, slot: int, token: int, *, by: str, kill: bool = False) -> HolderSnapshot | None:
        return operator.revoke(self.alias, name, slot, token, by)

    def request_stop(self, name: str, slot: int, token: int, *, by: str) -> HolderSnapshot | None:
        return operator.request_stop(self.alias, name, slot, token, by)

    def purge_slot(self, name: str, slot: int, token: int) -> bool:
        return operator.purge_slot(self.alias, name, slot, token)

    def purge_idle(self, name: str) -> bool:
        return operator.purge_idle(self.alias, name)

    def forget(self, session: Session, *, seconds: float, after: str) -> Forgotten:
        return operator.forget(session, seconds, after)

    def set_aside(self, session: Session) -> bool:
        return operator.set_aside(session)

    def set_slots(
        self, name: str, slots: int | None, *, by: str = "", seconds: float | None = None, reason: str = ""
    ) -> bool:
        return operator.set_slots(self.alias, name, sizing(slots, by, seconds, reason))

    def settle(self, session: Session, key: str) -> None:
        handoff.hand_out(session, key)

    def set_paused(self, name: str, paused: bool) -> bool:
        return operator.set_paused(self.alias, name, paused)
