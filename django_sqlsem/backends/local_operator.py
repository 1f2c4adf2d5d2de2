"""What the process-local backend knows of its names, and the operator's side of it."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from django_sqlsem import testmode
from django_sqlsem.backends.base import BaseSemaphoreBackend
from django_sqlsem.backends.counting import TOKENS
from django_sqlsem.clocks import boot_now, stood_still
from django_sqlsem.modes import EXCLUSIVE, RWLOCK, UPDATE, UPGRADE, WHOLE, WRITER
from django_sqlsem.naming import ONE_SLOT
from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot, SlotState, grouped

if TYPE_CHECKING:
    from django_sqlsem.backends.claiming import Claim


@dataclass
class LocalName:
    """One name, who holds it, and what an operator has said about it."""

    name: str
    kind: str
    declared: int
    operator_slots: int | None = None
    paused: bool = False
    #: Claim, token, the boot clock at the grant, and for how long this process had stood still at the last renewal.
    held: dict[int, tuple[Claim, int, float, float]] = field(default_factory=dict)
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
        for slot, (claim, token, _since, renewed) in list(self.held.items()):
            if stood_still() - renewed >= claim.lease:
                del self.held[slot]
                self.expired.add(token)

    def renew(self, permit_ids: Collection[str]) -> None:
        """Let the leases of these permits begin anew."""
        self.expire()
        for slot, (claim, token, since, _renewed) in self.held.items():
            if claim.permit_id in permit_ids:
                self.held[slot] = (claim, token, since, stood_still())

    def wanted(self, claim: Claim) -> list[int]:
        """Return the slots that the claim would get now; none if it has to wait."""
        others, whole = self.keeping_out - {claim.permit_id}, any(each[0].got == WHOLE for each in self.held.values())
        if self.paused or whole:
            return []
        if claim.mode in EXCLUSIVE:
            slots = list(range(WRITER if self.kind == RWLOCK and claim.mode == WHOLE else 1, self.slots + 1))
            return slots if self.held.keys() <= ({WRITER} if claim.mode == UPGRADE else set()) else []
        if others:
            return []
        if claim.mode == UPDATE:
            return [] if WRITER in self.held else [WRITER]
        taken = self.held.keys() - {WRITER}
        free = [slot for slot in range(1, self.slots + 1) if slot not in taken][: claim.take]
        return free if len(free) == claim.take and len(taken) + claim.take <= self.slots else []


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
        claim, token, since, renewed = known.held[slot]
        age, left = boot_now() - since, claim.lease - (stood_still() - renewed)
        now = datetime.datetime.now(datetime.UTC)
        who = claim.holder
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
            mode=claim.got,
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
                for each in [number for number, (claim, *_) in known.held.items() if claim.got]:
                    known.revoked[known.held.pop(each)[1]] = by
        self._changed()
        return snapshot

    def request_stop(self, name: str, slot: int, token: int, *, by: str) -> HolderSnapshot | None:
        """Note the wish for the holder with this token, and have its keeper look."""
        with self._lock:
            known = self._world().get(name)
            if known is None or slot not in known.held or known.held[slot][1] != token:
                return None
            claim = known.held[slot][0]
            by = known.asked.get(token, by)
            for each, number, *_ in known.held.values():
                if each.permit_id == claim.permit_id or (each.got and claim.got):  # all that it has
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
