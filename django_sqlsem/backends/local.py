"""Semaphores inside this one process: for ``TestCase`` and in-memory databases. No threads, connections or leases."""

from __future__ import annotations

import copy
import datetime
import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from django_sqlsem.backends.base import (
    COUNTER,
    Acquired,
    BaseSemaphoreBackend,
    Grant,
    Granted,
    Place,
    Presence,
    Queue,
    Released,
    Renewal,
    Request,
    Templates,
    Waited,
    check_slots,
    tell_of_two_kinds,
)
from django_sqlsem.backends.clock import RowClock
from django_sqlsem.core import testmode
from django_sqlsem.core.clocks import boot_now, stood_still
from django_sqlsem.core.modes import EXCLUSIVE, MUTEX, RWLOCK, UPDATE, UPGRADE, WHOLE, WRITER, interchangeable
from django_sqlsem.core.names import Resource
from django_sqlsem.database.sessions import Session
from django_sqlsem.exceptions import never_met, wrong_kind
from django_sqlsem.snapshots import (
    HolderSnapshot,
    InUse,
    Loss,
    LossReason,
    SemaphoreSnapshot,
    SlotState,
    Survey,
    grouped,
    templates_of,
    who,
)

_tokens = itertools.count(time.time_ns() // 1000)


@dataclass(frozen=True, slots=True)
class LocalSlot:
    """One taken slot."""

    request: Request
    token: int
    #: The boot clock at the grant.
    since: float
    #: For how long this process had stood still when the slot was granted or renewed last.
    renewed: float

    @property
    def left(self) -> float:
        """Seconds until its lease runs out: only standing still uses it up."""
        return self.request.lease - (stood_still() - self.renewed)


@dataclass(frozen=True, slots=True)
class LocalAct:
    """What an operator has said for a time: by whom, why, since when, and until when; by the boot clock."""

    by: str
    reason: str
    since: float
    until: float | None

    @classmethod
    def of(cls, by: str = "", seconds: float | None = None, reason: str = "") -> LocalAct:
        """Return one that begins now."""
        now = boot_now()
        return cls(by, reason, now, None if seconds is None else now + seconds)

    @property
    def over(self) -> bool:
        """Whether its time has passed."""
        return self.left is not None and self.left <= 0

    @property
    def left(self) -> float | None:
        """Seconds until its end."""
        return None if self.until is None else self.until - boot_now()


@dataclass
class LocalName:
    """One name, who holds it, and what an operator has said about it."""

    name: str
    kind: str
    declared: int
    template: str = ""
    #: An operator's number of slots, and what he has said of it.
    operator: int | None = None
    sizing: LocalAct | None = None
    #: What an operator has said that stops granting.
    pause: LocalAct | None = None
    #: The taken slots, by number.
    held: dict[int, LocalSlot] = field(default_factory=dict)
    #: Tokens of those whose leases ran out.
    expired: set[int] = field(default_factory=set)
    #: By whom permits were revoked, by token.
    revoked: dict[int, str] = field(default_factory=dict)
    #: By whom holders were asked to stop, by token.
    asked: dict[int, str] = field(default_factory=dict)
    #: Who waits, by permit id, and since when.
    waiting: dict[str, tuple[float, Request]] = field(default_factory=dict)
    units: int = 0
    #: Units that were granted and not taken yet, by permit id.
    handed: dict[str, int] = field(default_factory=dict)

    @property
    def operator_slots(self) -> int | None:
        """An operator's number, unless its time has passed."""
        return None if self.sizing is not None and self.sizing.over else self.operator

    @property
    def slots(self) -> int:
        """How many slots count now."""
        if self.kind == MUTEX:
            return 1
        return self.declared if self.operator_slots is None else self.operator_slots

    @property
    def paused(self) -> bool:
        """Whether nothing is granted. A pause whose time has passed is over."""
        return self.pause is not None and not self.pause.over

    def copy(self) -> LocalName:
        """Return one that can be changed without changing this one."""
        return replace(self, **{each.name: copy.copy(getattr(self, each.name)) for each in fields(self)})

    def expire(self) -> None:
        """Free what was not renewed for a lease, as a test had this process stand still."""
        for number, slot in list(self.held.items()):
            if slot.left <= 0:
                del self.held[number]
                self.expired.add(slot.token)

    def renew(self, permit_ids: Collection[str]) -> None:
        """Let the leases of these permits begin anew."""
        self.expire()
        for number, slot in self.held.items():
            if slot.request.permit_id in permit_ids:
                self.held[number] = replace(slot, renewed=stood_still())

    def bound(self, request: Request) -> int:
        """Return how many slots count for a request: an operator's number, else its own, else the declared one."""
        own = self.declared if request.slots is None else request.slots
        if request.resource.kind == MUTEX:
            return 1
        return own if self.operator_slots is None else self.operator_slots

    def adopt(self, kind: str) -> bool:
        """Become a mutex if nobody is in, or a semaphore if no mutex is. Return whether it is of this kind now."""
        if not self.held or (kind != MUTEX and all(slot.request.got != MUTEX for slot in self.held.values())):
            self.kind = kind
        return self.kind == kind

    def _before(self, request: Request) -> list[Request]:
        """Return who comes before a request: who has waited longer; for who barges, those that want all slots."""
        since, _ = self.waiting.get(request.permit_id, (math.inf, request))
        return [
            each
            for permit_id, (arrived, each) in self.waiting.items()
            if permit_id != request.permit_id
            and (arrived < since or each.mode == UPGRADE)
            and (request.fair or each.mode in EXCLUSIVE)
        ]

    def wanted(self, request: Request) -> list[int]:
        """Return the slots that the request would get now; none if it has to wait."""
        if self.paused or any(slot.request.got in (WHOLE, MUTEX) for slot in self.held.values()):
            return []
        if request.mode in EXCLUSIVE:
            slots = list(range(WRITER if self.kind == RWLOCK and request.mode == WHOLE else 1, self.slots + 1))
            return slots if self.held.keys() <= ({WRITER} if request.mode == UPGRADE else set()) else []
        before = self._before(request)
        if any(each.got in (WHOLE, MUTEX) for each in before):
            return []
        if request.mode == UPDATE:
            return [] if WRITER in self.held else [WRITER]
        # Those who wait keep others from the slots that they could use, and from no more.
        bounds = [self.bound(each) for each in before if each.mode != UPDATE and each.take <= self.bound(each)]
        taken = self.held.keys() - {WRITER}
        free = [each for each in range(max(bounds, default=0) + 1, self.bound(request) + 1) if each not in taken]
        crowded = self.operator_slots is not None and len(taken) + request.take > self.operator_slots
        return [] if crowded or len(free) < request.take else free[: request.take]

    def grant(self, request: Request) -> Grant | None:
        """Take the lowest free slots, or hand out units."""
        if self.kind == COUNTER:
            if self.paused or request.take > self.units:
                return None
            self.units -= request.take
            self.waiting.pop(request.permit_id, None)
            self.handed[request.permit_id] = request.take
            return Grant((request.take,), (0,), (0,))
        free = self.wanted(request)
        if not free:
            return None
        self.waiting.pop(request.permit_id, None)
        tokens = (next(_tokens),) * len(free) if request.mode else tuple(next(_tokens) for _ in free)
        for number, token in zip(free, tokens, strict=True):
            self.held[number] = LocalSlot(request, token, boot_now(), stood_still())
        return Grant(tuple(free), tokens, tuple(free))

    def discard(self, permit_id: str) -> bool:
        """Free whatever a permit has. Return whether it had anything."""
        self.waiting.pop(permit_id, None)
        handed = self.handed.pop(permit_id, 0)
        self.units += handed
        mine = [number for number, slot in self.held.items() if slot.request.permit_id == permit_id]
        for number in mine:
            del self.held[number]
        return bool(handed or mine)

    def snapshot(self) -> SemaphoreSnapshot:
        """Return what it is like now."""
        self.expire()
        wall, told = datetime.datetime.now(datetime.UTC), dict[str, Any]()
        operator_slots, paused = self.operator_slots, self.paused

        def at(seconds: float | None) -> datetime.datetime | None:
            return None if seconds is None else wall + datetime.timedelta(seconds=seconds)

        if operator_slots is not None and (act := self.sizing) is not None:
            told |= {"slots_by": act.by, "slots_reason": act.reason, "slots_until": at(act.left)}
            told |= {"slots_end_in": act.left}
        if paused and (act := self.pause) is not None:
            told |= {"paused_by": act.by, "paused_reason": act.reason, "paused_at": at(act.since - boot_now())}
            told |= {"paused_until": at(act.left), "resumes_in": act.left}
        return SemaphoreSnapshot(
            self.name,
            self.kind,
            self.slots,
            self.declared,
            operator_slots,
            paused,
            grouped(self.holder(number) for number in sorted(self.held)),
            units=self.units if self.kind == COUNTER else None,
            template=self.template,
            **told,
        )

    def holder(self, number: int) -> HolderSnapshot:
        """Return the snapshot of a taken slot."""
        slot = self.held[number]
        age, left, now = boot_now() - slot.since, slot.left, datetime.datetime.now(datetime.UTC)
        return HolderSnapshot(
            name=self.name,
            slot=number,
            state=SlotState.HELD,
            token=slot.token,
            **who(slot.request.holder),
            acquired_at=now - datetime.timedelta(seconds=age),
            expires_at=now + datetime.timedelta(seconds=left),
            age=age,
            lease_left=left,
            mode=slot.request.got,
            stop_by=self.asked.get(slot.token, ""),
        )


class LocalBackend(BaseSemaphoreBackend):
    """Grants from a dictionary.

    Inside a ``TestCase`` the dictionary is a copy, of which nothing stays when its transaction is rolled back: what
    one test leaves behind, the next one does not see; what was taken for the whole class, its tests do.
    """

    process_local = True
    keeps_counters = True
    released_on_disconnect = True
    supports_renewal = False
    modes = frozenset({WHOLE, UPDATE, UPGRADE})

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._lock = threading.RLock()
        #: The names that each open block of a ``TestCase`` sees, the innermost last.
        self._worlds: list[tuple[object, dict[str, LocalName]]] = [(None, {})]
        self._changed: Callable[[], object] = lambda: None

    def _world(self) -> dict[str, LocalName]:
        blocks = [None, *testmode.testcase_blocks(self.alias)]
        while len(self._worlds) > len(blocks) or self._worlds[-1][0] is not blocks[len(self._worlds) - 1]:
            self._worlds.pop()
        for block in blocks[len(self._worlds) :]:
            self._worlds.append((block, {name: known.copy() for name, known in self._worlds[-1][1].items()}))
        return self._worlds[-1][1]

    def _made(self, resource: Resource, declared: int, units: int = 0, template: str = "") -> LocalName:
        name, kind = resource.name, resource.kind
        known = self._world().setdefault(name, LocalName(name, kind, declared, template, units=units))
        known.expire()
        if not interchangeable(known.kind, kind):
            raise wrong_kind(name, known.kind, kind, self.alias, known.snapshot())
        return known

    # The holder's side. The queue inside the process is the whole queue: waiters claim for themselves.

    def claim(self, session: Session, request: Request) -> Grant | None:
        with self._lock:
            if request.resource.kind == COUNTER:
                return self._made(request.resource, request.slots or 0, request.slots or 0).grant(request)
            known = self._made(request.resource, request.slots or 1, template=request.template)
            if not known.adopt(request.resource.kind):
                tell_of_two_kinds(self.alias, request.resource)
                return None
            if request.slots is not None:
                known.declared = request.slots
            if request.take > known.bound(request):
                raise never_met(known.name, known.bound(request), request.take)
            return known.grant(request)

    def enrol(self, session: Session, request: Request, place: Place, *, first: bool) -> Waited:
        with self._lock:
            grant = self.claim(session, request)
            if grant is None and first and (crowd := self.crowd(session, request, 0)) is not None:
                return Waited(refused=crowd)
            if grant is None:
                self._world()[request.resource.name].waiting[request.permit_id] = (place.arrived, request)
        granted = (Granted(request.permit_id, grant, request.lease),) if grant else ()
        return Waited(granted, Queue(ahead=0), at_once=first and bool(granted))

    def wait(self, session: Session, request: Request, place: Place) -> Waited:
        return self.enrol(session, request, place, first=False)

    def granted(self, session: Session, request: Request) -> Granted | None:
        return None

    def leave(self, session: Session, request: Request) -> None:
        with self._lock:
            known = self._world().get(request.resource.name)
            left = known is not None and known.waiting.pop(request.permit_id, None) is not None and bool(known.waiting)
        if left:
            self._changed()

    def release(self, session: Session, held: Acquired, *, wanted: bool = False, hand_on: bool = True) -> Released:
        return Released(self.discard(session, held.resource, held.permit_id))

    def hand_out(self, session: Session, resource: Resource) -> None:
        """Waiters claim for themselves."""

    def discard(self, session: Session, resource: Resource, permit_id: str) -> bool:
        with self._lock:
            known = self._world().get(resource.name)
            return known is not None and known.discard(permit_id)

    def renew(self, session: Session, held: Sequence[Acquired]) -> Renewal:
        """Nothing runs out here, unless a test has the process stand still."""
        permit_ids = frozenset(each.permit_id for each in held)
        asked = {}
        with self._lock:
            for known in self._world().values():
                known.renew(permit_ids)
            for each in held:
                found = self._world().get(each.resource.name)
                token = each.grant.tokens[0] if each.grant.tokens else 0
                if found is not None and token in found.asked:
                    asked[each.permit_id] = found.asked[token]
        return Renewal(permit_ids, {}, asked)

    def snapshot(self, session: Session, resource: Resource) -> SemaphoreSnapshot | None:
        found = self.inspect([resource.name])
        return found[0] if found else None

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
        with self._lock:
            self._made(resource, initial, initial).units += count
        return ()

    def take(self, session: Session, resource: Resource, permit_id: str) -> bool:
        with self._lock:
            return any(known.handed.pop(permit_id, 0) for known in self._world().values())

    def fence(self, caller: BaseDatabaseWrapper, session: Session, held: Acquired) -> bool:
        """Look whether the permit still has its slots: there is no other process to keep out."""
        return self.taken_away(held) is None

    def fenced_sql(self, caller: BaseDatabaseWrapper, held: Acquired) -> tuple[str, list[Any]]:
        return "1 = 1" if self.taken_away(held) is None else "1 = 0", []

    def taken_away(self, held: Acquired) -> Loss | None:
        with self._lock:
            known = self._world().get(held.resource.name)
            if known is not None:
                known.expire()
                mine = [number for number, slot in known.held.items() if slot.request.permit_id == held.permit_id]
                if len(mine) == len(held.grant.slots):
                    return None
                for token in held.grant.tokens:
                    if token in known.revoked:
                        by = known.revoked[token]
                        return Loss(LossReason.REVOKED, f"revoked by {by or 'an operator'}", by)
                if not known.expired.isdisjoint(held.grant.tokens):
                    return Loss(LossReason.EXPIRED, "its lease ran out while this process did not run")
        return Loss(LossReason.SESSION_ENDED, "the test in which it was taken has ended")

    def listen(self, changed: Callable[[], object]) -> None:
        self._changed = changed

    def emptied(self) -> None:
        with self._lock:
            self._world().clear()

    # The operator's side.

    def inspect(
        self,
        names: Collection[str] | None = None,
        *,
        prefix: str = "",
        template: str | None = None,
        at: RowClock | None = None,
    ) -> list[SemaphoreSnapshot]:
        with self._lock:
            return [
                known.snapshot()
                for name, known in sorted(self._world().items())
                if name.startswith(prefix) and template in (None, known.template) and (names is None or name in names)
            ]

    def templates(self, *, at: RowClock | None = None, survey: Survey | None = None) -> Templates:
        return Templates(list(templates_of(map(InUse.of, self.inspect())).values()))

    def in_use(self, most: int) -> list[SemaphoreSnapshot]:
        return [each for each in self.inspect() if each.holders or each.waiters][:most]

    def _held_with(self, name: str, slot: int, token: int) -> LocalName | None:
        """Return the name if the slot is held with this token."""
        known = self._world().get(name)
        return known if known is not None and slot in known.held and known.held[slot].token == token else None

    def revoke(self, name: str, slot: int, token: int, *, by: str, kill: bool = False) -> HolderSnapshot | None:
        with self._lock:
            known = self._held_with(name, slot, token)
            if known is None:
                return None
            snapshot = known.holder(slot)
            # A permit with a mode owns its slots together: losing one of them loses all.
            together = [number for number, each in known.held.items() if each.request.got] if snapshot.mode else []
            for number in {slot, *together}:
                known.revoked[known.held.pop(number).token] = by
        self._changed()
        return snapshot

    def request_stop(self, name: str, slot: int, token: int, *, by: str) -> HolderSnapshot | None:
        with self._lock:
            known = self._held_with(name, slot, token)
            if known is None:
                return None
            request = known.held[slot].request
            by = known.asked.get(token, by)
            for each in known.held.values():
                if each.request.permit_id == request.permit_id or (each.request.got and request.got):  # all that it has
                    known.asked.setdefault(each.token, by)
            snapshot = known.holder(slot)
        self._changed()
        return snapshot

    def purge_slot(self, name: str, slot: int, token: int) -> bool:
        """No lease runs out here, so there is nothing to purge."""
        return False

    def purge_idle(self, name: str) -> bool:
        with self._lock:
            known = self._world().get(name)
            if known is None or known.held or known.units or known.handed:
                return False
            if known.kind == COUNTER and known.declared:  # a new name would begin with new units
                return False
            del self._world()[name]
            return True

    def set_slots(
        self, name: str, slots: int | None, *, by: str = "", seconds: float | None = None, reason: str = ""
    ) -> bool:
        with self._lock:
            known = self._world().get(name)
            if known is None:
                return False
            check_slots(name, known.kind, slots)
            known.operator, known.sizing = slots, LocalAct.of(by, seconds, reason)
        self._changed()
        return True

    def set_paused(self, name: str, paused: bool) -> bool:
        return self._set_pause(name, LocalAct.of() if paused else None)

    def pause(self, name: str, *, by: str, seconds: float | None = None, reason: str = "") -> bool:
        return self._set_pause(name, LocalAct.of(by, seconds, reason))

    def resume(self, name: str) -> bool:
        return self._set_pause(name, None)

    def _set_pause(self, name: str, pause: LocalAct | None) -> bool:
        with self._lock:
            known = self._world().get(name)
            if known is None:
                return False
            known.pause = pause
        self._changed()
        return True
