"""Semaphores inside this one process: for ``TestCase`` and in-memory databases. No threads, connections or leases."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from django_sqlsem.backends.base import (
    Claim,
    Grant,
    Granted,
    Held,
    Place,
    Queue,
    Released,
    Renewal,
    Waited,
)
from django_sqlsem.backends.counting import TOKENS, Counting
from django_sqlsem.backends.local_operator import LocalName, LocalOperator
from django_sqlsem.clocks import boot_now, stood_still
from django_sqlsem.exceptions import never_met, wrong_kind
from django_sqlsem.modes import EXCLUSIVE, UPDATE, UPGRADE, WHOLE
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.backends.base import Presence
    from django_sqlsem.naming import Resource
    from django_sqlsem.sessions import Session
    from django_sqlsem.snapshots import SemaphoreSnapshot

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

    def claim(self, session: Session, claim: Claim) -> Grant | None:
        """Take the lowest free slots."""
        name, kind = claim.resource.name, claim.resource.kind
        if kind == TOKENS:
            return self._claim_tokens(claim)
        with self._lock:
            known = self._world().setdefault(name, LocalName(name, kind, claim.slots or 1))
            known.expire()
            if known.kind != kind:
                raise wrong_kind(name, known.kind, kind)
            if claim.slots is not None:
                known.declared = claim.slots
            if claim.take > known.slots:
                raise never_met(name, known.slots, claim.take)
            free = known.wanted(claim)
            if not free:
                return None
            known.keeping_out.discard(claim.permit_id)
            tokens = (next(_tokens),) * len(free) if claim.mode else tuple(next(_tokens) for _ in free)
            for slot, token in zip(free, tokens, strict=True):
                known.held[slot] = (claim, token, boot_now(), stood_still())
            return Grant(tuple(free), tokens, tuple(free))

    def _claim_tokens(self, claim: Claim) -> Grant | None:
        with self._lock:
            known = self._count(claim.resource, claim.slots or 0)
            if known.paused or claim.take > known.tokens:
                return None
            known.tokens -= claim.take
            known.handed[claim.permit_id] = claim.take
            return Grant((claim.take,), (0,), (0,))

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

    def enrol(self, session: Session, claim: Claim, place: Place, *, first: bool) -> Waited:
        """Claim; the queue inside the process is the whole queue."""
        grant = self.claim(session, claim)
        if grant is None and claim.mode in EXCLUSIVE:
            with self._lock:
                self._world()[claim.resource.name].keeping_out.add(claim.permit_id)
        granted = (Granted(claim.permit_id, grant, claim.lease),) if grant else ()
        return Waited(granted, Queue(ahead=0), at_once=first and bool(granted))

    def wait(self, session: Session, claim: Claim, place: Place) -> Waited:
        """Claim once more."""
        return self.enrol(session, claim, place, first=False)

    def granted(self, session: Session, claim: Claim) -> Granted | None:
        """Nothing is ever handed to a waiter here: it claims."""
        return None

    def leave(self, session: Session, claim: Claim) -> None:
        """Let others in again."""
        with self._lock:
            known = self._world().get(claim.resource.name)
            waited = known is not None and claim.permit_id in known.keeping_out
            if known is not None:
                known.keeping_out.discard(claim.permit_id)
        if waited:
            self._changed()

    def release(self, session: Session, held: Held, *, wanted: bool = False, hand_on: bool = True) -> Released:
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
            mine = [slot for slot, (claim, *_) in known.held.items() if claim.permit_id == permit_id] if known else []
            for slot in mine:
                assert known is not None  # noqa: S101
                del known.held[slot]
            if known is not None:
                known.keeping_out.discard(permit_id)
            return bool(mine)

    def renew(self, session: Session, held: Sequence[Held]) -> Renewal:
        """Nothing runs out here, unless a test has the process stand still."""
        with self._lock:
            for known in self._world().values():
                known.renew({each.permit_id for each in held})
        return Renewal(frozenset(each.permit_id for each in held), dict[str, Loss](), dict(self._asked(held)))

    def _asked(self, held: Sequence[Held]) -> Iterator[tuple[str, str]]:
        with self._lock:
            for each in held:
                known = self._world().get(each.resource.name)
                token = each.grant.tokens[0] if each.grant.tokens else 0
                if known is not None and token in known.asked:
                    yield each.permit_id, known.asked[token]

    def taken_away(self, held: Held) -> Loss | None:
        """Look whether all the slots are still the permit's."""
        with self._lock:
            known = self._world().get(held.resource.name)
            if known is not None:
                known.expire()
            mine = [claim.permit_id for claim, *_ in known.held.values()] if known else []
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

    def fence(self, caller: BaseDatabaseWrapper, session: Session, held: Held) -> bool:
        """Look whether the permit still has its slots: there is no other process to keep out."""
        return self.taken_away(held) is None

    def fate(self, session: Session, held: Held) -> Loss | None:
        """Return how it was taken away."""
        return self.taken_away(held)

    def fenced_sql(self, caller: BaseDatabaseWrapper, held: Held) -> tuple[str, list[Any]]:
        """Return a condition that says what is so now."""
        return "1 = 1" if self.taken_away(held) is None else "1 = 0", []
