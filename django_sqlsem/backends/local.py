"""Semaphores inside this one process: for ``TestCase`` and in-memory databases. No threads, connections or leases.

What the process-local backend knows of its names, and the operator's side of it.
"""

from __future__ import annotations

import datetime
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from django_sqlsem.backends.base import (
    TOKENS,
    Acquired,
    BaseSemaphoreBackend,
    Counting,
    Grant,
    Granted,
    Place,
    Queue,
    Released,
    Renewal,
    Request,
    Waited,
)
from django_sqlsem.core import testmode
from django_sqlsem.core.clocks import boot_now, stood_still
from django_sqlsem.core.modes import EXCLUSIVE, RWLOCK, UPDATE, UPGRADE, WHOLE, WRITER
from django_sqlsem.core.names import ONE_SLOT
from django_sqlsem.exceptions import never_met, wrong_kind
from django_sqlsem.snapshots import HolderSnapshot, Loss, LossReason, SemaphoreSnapshot, SlotState, grouped

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.backends.base import Presence
    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.sessions import Session


@dataclass
class LocalName:
    """One name, who holds it, and what an operator has said about it."""

    name: str
    kind: str
    declared: int
    operator_slots: int | None = None
    paused: bool = False
    #: Claim, token, the boot clock at the grant, and for how long this process had stood still at the last renewal.
    held: dict[int, tuple[Request, int, float, float]] = field(default_factory=dict)
    #: Tokens of those whose leases ran out.
    expired: set[int] = field(default_factory=set)
    #: By whom permits were revoked, by token.
    revoked: dict[int, str] = field(default_factory=dict)
    #: By whom holders were asked to stop, by token.
    asked: dict[int, str] = field(default_factory=dict)
    #: Who waits for everybody else to leave, by permit id.
    keeping_out: set[str] = field(default_factory=set)
    tokens: int = 0
    #: Tokens that were granted and not taken yet, by permit id.
    handed: dict[str, int] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        """How many slots count now."""
        return self.declared if self.operator_slots is None else self.operator_slots

    def copy(self) -> LocalName:
        """Return one that can be changed without changing this one."""
        return replace(
            self,
            held=dict(self.held),
            expired=set(self.expired),
            revoked=dict(self.revoked),
            asked=dict(self.asked),
            handed=dict(self.handed),
            keeping_out=set(self.keeping_out),
        )

    def expire(self) -> None:
        """Free what was not renewed for a lease, as a test had this process stand still."""
        for slot, (request, token, _since, renewed) in list(self.held.items()):
            if stood_still() - renewed >= request.lease:
                del self.held[slot]
                self.expired.add(token)

    def renew(self, permit_ids: Collection[str]) -> None:
        """Let the leases of these permits begin anew."""
        self.expire()
        for slot, (request, token, since, _renewed) in self.held.items():
            if request.permit_id in permit_ids:
                self.held[slot] = (request, token, since, stood_still())

    def wanted(self, request: Request) -> list[int]:
        """Return the slots that the claim would get now; none if it has to wait."""
        others, whole = self.keeping_out - {request.permit_id}, any(each[0].got == WHOLE for each in self.held.values())
        if self.paused or whole:
            return []
        if request.mode in EXCLUSIVE:
            slots = list(range(WRITER if self.kind == RWLOCK and request.mode == WHOLE else 1, self.slots + 1))
            return slots if self.held.keys() <= ({WRITER} if request.mode == UPGRADE else set()) else []
        if others:
            return []
        if request.mode == UPDATE:
            return [] if WRITER in self.held else [WRITER]
        taken = self.held.keys() - {WRITER}
        free = [slot for slot in range(1, self.slots + 1) if slot not in taken][: request.take]
        return free if len(free) == request.take and len(taken) + request.take <= self.slots else []


class LocalOperator(BaseSemaphoreBackend):
    """Shows and changes the names of one alias."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._lock = threading.RLock()
        self._worlds: list[tuple[object, dict[str, LocalName]]] = [(None, {})]
        self._changed: Callable[[], object] = lambda: None

    def _world(self) -> dict[str, LocalName]:
        blocks = [None, *testmode.testcase_blocks(self.alias)]
        while len(self._worlds) > len(blocks) or self._worlds[-1][0] is not blocks[len(self._worlds) - 1]:
            self._worlds.pop()
        for block in blocks[len(self._worlds) :]:
            self._worlds.append((block, {name: known.copy() for name, known in self._worlds[-1][1].items()}))
        return self._worlds[-1][1]

    def inspect(self, names: Collection[str] | None = None, *, prefix: str = "") -> list[SemaphoreSnapshot]:
        """Return snapshots ordered by name."""
        with self._lock:
            for known in self._world().values():
                known.expire()
            return [
                SemaphoreSnapshot(
                    name,
                    known.kind,
                    known.slots,
                    known.declared,
                    known.operator_slots,
                    known.paused,
                    grouped(self._holder(known, slot) for slot in sorted(known.held)),
                    tokens=known.tokens if known.kind == TOKENS else None,
                )
                for name, known in sorted(self._world().items())
                if name.startswith(prefix) and (names is None or name in names)
            ]

    def _holder(self, known: LocalName, slot: int) -> HolderSnapshot:
        request, token, since, renewed = known.held[slot]
        age, left = boot_now() - since, request.lease - (stood_still() - renewed)
        now = datetime.datetime.now(datetime.UTC)
        who = request.holder
        return HolderSnapshot(
            name=known.name,
            slot=slot,
            state=SlotState.HELD,
            token=token,
            host=who.host,
            pid=who.pid,
            thread=who.thread,
            label=who.label,
            user=who.user,
            acquired_at=now - datetime.timedelta(seconds=age),
            expires_at=now + datetime.timedelta(seconds=left),
            age=age,
            lease_left=left,
            mode=request.got,
            stop_by=known.asked.get(token, ""),
        )

    def revoke(self, name: str, slot: int, token: int, *, by: str, kill: bool = False) -> HolderSnapshot | None:
        """Take a slot away from the holder with this token."""
        with self._lock:
            known = self._world().get(name)
            if known is None or slot not in known.held or known.held[slot][1] != token:
                return None
            snapshot = self._holder(known, slot)
            del known.held[slot]
            known.revoked[token] = by
            if snapshot.mode:  # a part of it is nothing
                for each in [number for number, (request, *_) in known.held.items() if request.got]:
                    known.revoked[known.held.pop(each)[1]] = by
        self._changed()
        return snapshot

    def request_stop(self, name: str, slot: int, token: int, *, by: str) -> HolderSnapshot | None:
        """Note the wish for the holder with this token, and have its keeper look."""
        with self._lock:
            known = self._world().get(name)
            if known is None or slot not in known.held or known.held[slot][1] != token:
                return None
            request = known.held[slot][0]
            by = known.asked.get(token, by)
            for each, number, *_ in known.held.values():
                if each.permit_id == request.permit_id or (each.got and request.got):  # all that it has
                    known.asked.setdefault(number, by)
            snapshot = self._holder(known, slot)
        self._changed()
        return snapshot

    def purge_slot(self, name: str, slot: int, token: int) -> bool:
        """No lease runs out here, so nothing is ever purged."""
        return False

    def purge_idle(self, name: str) -> bool:
        """Forget a name that nobody holds."""
        with self._lock:
            known = self._world().get(name)
            if known is None or known.held or known.tokens or known.handed:
                return False
            if known.kind == TOKENS and known.declared:  # a new name would begin with new tokens
                return False
            del self._world()[name]
            return True

    def set_slots(self, name: str, slots: int | None) -> bool:
        """Set the operator's number."""
        with self._lock:
            known = self._world().get(name)
            if known is None:
                return False
            if known.kind == TOKENS:
                raise ValueError(f"{name!r} is a count of tokens: it has no slots.")
            if known.kind in ONE_SLOT and slots not in (None, 1):
                raise ValueError(f"{name!r} is a {known.kind}: it has one slot, not {slots}.")
            known.operator_slots = slots
        self._changed()
        return True

    def set_paused(self, name: str, paused: bool) -> bool:
        """Stop or resume granting."""
        with self._lock:
            known = self._world().get(name)
            if known is None:
                return False
            known.paused = paused
        self._changed()
        return True


_tokens = itertools.count(time.time_ns() // 1000)


class LocalBackend(LocalOperator, Counting):
    """Grants from a dictionary.

    Inside a ``TestCase`` the dictionary is a copy, of which nothing stays when its transaction is rolled back: what
    one test leaves behind, the next one does not see; what was taken for the whole class, its tests do.
    """

    process_local = True
    released_on_disconnect = True
    supports_renewal = False
    reports_waiters = False
    modes = frozenset({WHOLE, UPDATE, UPGRADE})

    def claim(self, session: Session, request: Request) -> Grant | None:
        """Take the lowest free slots."""
        name, kind = request.resource.name, request.resource.kind
        if kind == TOKENS:
            return self._claim_tokens(request)
        with self._lock:
            known = self._world().setdefault(name, LocalName(name, kind, request.slots or 1))
            known.expire()
            if known.kind != kind:
                raise wrong_kind(name, known.kind, kind)
            if request.slots is not None:
                known.declared = request.slots
            if request.take > known.slots:
                raise never_met(name, known.slots, request.take)
            free = known.wanted(request)
            if not free:
                return None
            known.keeping_out.discard(request.permit_id)
            tokens = (next(_tokens),) * len(free) if request.mode else tuple(next(_tokens) for _ in free)
            for slot, token in zip(free, tokens, strict=True):
                known.held[slot] = (request, token, boot_now(), stood_still())
            return Grant(tuple(free), tokens, tuple(free))

    def _claim_tokens(self, request: Request) -> Grant | None:
        with self._lock:
            known = self._count(request.resource, request.slots or 0)
            if known.paused or request.take > known.tokens:
                return None
            known.tokens -= request.take
            known.handed[request.permit_id] = request.take
            return Grant((request.take,), (0,), (0,))

    def _count(self, resource: Resource, initial: int) -> LocalName:
        name, kind = resource.name, resource.kind
        known = self._world().setdefault(name, LocalName(name, kind, initial, tokens=initial))
        if known.kind != kind:
            raise wrong_kind(name, known.kind, kind)
        return known

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
        """Add tokens; waiters claim for themselves."""
        with self._lock:
            self._count(resource, initial).tokens += count
        return ()

    def take(self, session: Session, permit_id: str) -> bool:
        """Forget what was handed to a claim: it is used up."""
        with self._lock:
            return any(known.handed.pop(permit_id, 0) for known in self._world().values())

    def enrol(self, session: Session, request: Request, place: Place, *, first: bool) -> Waited:
        """Claim; the queue inside the process is the whole queue."""
        grant = self.claim(session, request)
        if grant is None and request.mode in EXCLUSIVE:
            with self._lock:
                self._world()[request.resource.name].keeping_out.add(request.permit_id)
        granted = (Granted(request.permit_id, grant, request.lease),) if grant else ()
        return Waited(granted, Queue(ahead=0), at_once=first and bool(granted))

    def wait(self, session: Session, request: Request, place: Place) -> Waited:
        """Claim once more."""
        return self.enrol(session, request, place, first=False)

    def granted(self, session: Session, request: Request) -> Granted | None:
        """Nothing is ever handed to a waiter here: it claims."""
        return None

    def leave(self, session: Session, request: Request) -> None:
        """Let others in again."""
        with self._lock:
            known = self._world().get(request.resource.name)
            waited = known is not None and request.permit_id in known.keeping_out
            if known is not None:
                known.keeping_out.discard(request.permit_id)
        if waited:
            self._changed()

    def release(self, session: Session, held: Acquired, *, wanted: bool = False, hand_on: bool = True) -> Released:
        """Free the permit's slots."""
        return Released(self.discard(session, held.resource, held.permit_id))

    def hand_out(self, session: Session, resource: Resource) -> None:
        """Waiters claim for themselves."""

    def discard(self, session: Session, resource: Resource, permit_id: str) -> bool:
        """Free whatever the permit has."""
        with self._lock:
            known = self._world().get(resource.name)
            if known is not None and permit_id in known.handed:
                known.tokens += known.handed.pop(permit_id)
                return True
            mine = (
                [slot for slot, (request, *_) in known.held.items() if request.permit_id == permit_id] if known else []
            )
            for slot in mine:
                assert known is not None  # noqa: S101
                del known.held[slot]
            if known is not None:
                known.keeping_out.discard(permit_id)
            return bool(mine)

    def renew(self, session: Session, held: Sequence[Acquired]) -> Renewal:
        """Nothing runs out here, unless a test has the process stand still."""
        with self._lock:
            for known in self._world().values():
                known.renew({each.permit_id for each in held})
        return Renewal(frozenset(each.permit_id for each in held), dict[str, Loss](), dict(self._asked(held)))

    def _asked(self, held: Sequence[Acquired]) -> Iterator[tuple[str, str]]:
        with self._lock:
            for each in held:
                known = self._world().get(each.resource.name)
                token = each.grant.tokens[0] if each.grant.tokens else 0
                if known is not None and token in known.asked:
                    yield each.permit_id, known.asked[token]

    def taken_away(self, held: Acquired) -> Loss | None:
        """Look whether all the slots are still the permit's."""
        with self._lock:
            known = self._world().get(held.resource.name)
            if known is not None:
                known.expire()
            mine = [request.permit_id for request, *_ in known.held.values()] if known else []
            if mine.count(held.permit_id) == len(held.grant.slots):
                return None
            by = (
                next((known.revoked[token] for token in held.grant.tokens if token in known.revoked), None)
                if known
                else None
            )
            expired = known is not None and not known.expired.isdisjoint(held.grant.tokens)
        if by is not None:
            return Loss(LossReason.REVOKED, f"revoked by {by or 'an operator'}", by)
        if expired:
            return Loss(LossReason.EXPIRED, "its lease ran out while this process did not run")
        return Loss(LossReason.SESSION_ENDED, "the test in which it was taken has ended")

    def listen(self, changed: Callable[[], object]) -> None:
        """Call ``changed`` after each act of an operator."""
        self._changed = changed

    def emptied(self) -> None:
        """Forget all locks."""
        with self._lock:
            self._world().clear()

    def snapshot(self, session: Session, resource: Resource) -> SemaphoreSnapshot | None:
        """Return what one name is like now."""
        found = self.inspect([resource.name])
        return found[0] if found else None

    def fence(self, caller: BaseDatabaseWrapper, session: Session, held: Acquired) -> bool:
        """Look whether the permit still has its slots: there is no other process to keep out."""
        return self.taken_away(held) is None

    def fate(self, session: Session, held: Acquired) -> Loss | None:
        """Return how it was taken away."""
        return self.taken_away(held)

    def fenced_sql(self, caller: BaseDatabaseWrapper, held: Acquired) -> tuple[str, list[Any]]:
        """Return a condition that says what is so now."""
        return "1 = 1" if self.taken_away(held) is None else "1 = 0", []
