"""Claims on application locks: one batch that takes what is free, and what it says when nothing is."""

from __future__ import annotations

import contextlib
import random
import time
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends import applock_acquire_sql as acquiring
from django_sqlsem.backends import applock_quick_sql as quick
from django_sqlsem.backends import applock_sql as sql
from django_sqlsem.backends.applock_codes import ERRORS, Meaning, failure
from django_sqlsem.backends.applock_holding import ApplockHolding
from django_sqlsem.backends.applock_names import lock_names
from django_sqlsem.backends.applock_session import Holding, LockSession
from django_sqlsem.backends.base import Claim, Grant, Granted
from django_sqlsem.clocks import boot_now
from django_sqlsem.exceptions import BackendError, never_met, wrong_kind
from django_sqlsem.naming import MAX_SLOTS

if TYPE_CHECKING:
    from django_sqlsem.sessions import Session

#: How often a process says that its number of slots differs from the declared one, in seconds.
DECLARE_EVERY: Final = 60.0
#: How long a batch that lost a deadlock or found a row locked is repeated, in seconds.
PATIENCE: Final = 10.0
#: A free slot behind a closed gate, without any grant in between: so far apart must two looks be, in seconds, for the
#: head to count as stopped. Without rows nothing tells of grants in between, so more looks must agree.
STUCK_AFTER: Final = 0.15
STUCK_LOOKS: Final = {True: 3, False: 5}
#: For so long a name is not plain, in seconds, of which a slot was taken or about which an operator said something.
NOT_PLAIN_FOR: Final = 1.0
#: How many names are remembered for that.
REMEMBERED: Final = 10_000
#: Looks further apart than this prove nothing.
STUCK_WITHIN: Final = 5.0


class ApplockClaims(ApplockHolding):
    """Takes slots."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._declared: dict[str, float] = {}
        #: Names of which the short batch found something in the way: until when it is not tried again.
        self._not_plain: dict[str, float] = {}
        #: By name: the looks that found a free slot behind the gate, the time of the last one, and its mark.
        self._stuck: dict[str, tuple[int, float, int]] = {}

    def claim(self, session: Session, claim: Claim) -> Grant | None:
        """Take slots on a session that has none of this name, in one batch that does not wait."""
        granted, _status = self.try_claim(claim)
        return None if granted is None else granted.grant

    def try_claim(self, claim: Claim, ticket: str = "", waiting: int = 0) -> tuple[Granted | None, int]:
        """Claim on a session that has none of this name. Returns what was granted, and the batch's status."""
        key = claim.resource.key
        again = True
        while True:
            with self.pool.shared(key) as session:
                try:
                    granted, status = self.attempt(session, claim, fair=claim.fair, ticket=ticket, waiting=waiting)
                    if status == sql.GATED and self._head_is_stuck(key):
                        granted, status = self.attempt(session, claim, fair=False, ticket=ticket, waiting=waiting)
                    return granted, status
                except BackendError:
                    # One that was opened long ago may have died unnoticed; whatever it got is free.
                    if not session.ended:
                        raise
                    self.bury(session)
                    if not again:
                        raise
                    again = False

    def attempt(
        self, session: LockSession, claim: Claim, *, fair: bool, budget: int = 0, ticket: str = "", waiting: int = 0
    ) -> tuple[Granted | None, int]:
        """Claim on this session. Returns what was granted, and the batch's status."""
        names, record, key = lock_names(claim.resource.name), self.record, claim.resource.key
        batch = acquiring.acquire(record=record)
        values: dict[str, Any] = {
            "stamp": session.stamp,
            "base": names.base,
            "gate": names.gate,
            "slots": claim.slots or 0,
            "take": claim.take,
            "fair": int(fair),
            "start": random.randrange(MAX_SLOTS),  # noqa: S311
            "budget": budget,
            "step": acquiring.FIRST_STEP_MS,
            "ticket": ticket,
            "waiting": waiting,
            "session_id": session.session_id,
            "session_us": session.session_us,
        } | holder_values(claim)
        plain = fair and claim.take == 1 and not budget and not ticket
        if plain and (granted := self._attempt_quickly(session, claim, values)) is not None:
            return granted, sql.DONE
        give_up = time.monotonic() + PATIENCE
        while True:
            # If this is cut short, what it may have got is freed before anything else of the name is done here.
            session.unclear[key] = (names, self._most(claim))
            row = session.run(batch, values)
            status = int(row["status"])
            granted = None
            if status == sql.DONE:
                holding = Holding(claim.permit_id, names, key, numbers(row["slots"]), numbers(row["tokens"]))
                self.pool.note(session, holding)
                grant = holding.grant()
                granted = Granted(claim.permit_id, grant, claim.lease)
            session.unclear.pop(key, None)
            if status != sql.GATED:
                self._stuck.pop(key, None)
            if status == sql.NEW:
                slots = max(int(row["bound"] or 0), claim.slots or 1)
                kind = {"key": key, "name": claim.resource.name, "kind": claim.resource.kind, "slots": slots}
                session.run(sql.CREATE, kind, waits=True)  # thousands of rows take a while
                continue
            if status == sql.ROW_FAILED:
                if ERRORS.get(int(row["error"])) is Meaning.AGAIN and time.monotonic() < give_up:
                    continue
                raise BackendError(f"The database {self.alias!r} failed: {row['message']} ({row['error']})")
            break
        if status == sql.KIND:
            raise wrong_kind(claim.resource.name, str(row["message"]), claim.resource.kind)
        if status == sql.NEVER:
            raise never_met(claim.resource.name, int(row["bound"]), claim.take)
        if status < 0 or status == sql.OWN:
            session.unclear[key] = (names, self._most(claim))
            session.clean(key)
            raise failure(self.alias, status)
        if granted is not None:
            self._declare(session, claim, int(row["declared"] or 0))
        elif status == sql.GATED:
            self._note_gated(key, int(row["mark"] or 0))
        return granted, status

    def _attempt_quickly(self, session: LockSession, claim: Claim, values: dict[str, Any]) -> Granted | None:
        """Take the lowest slot that this process has not, if all is plain: then the batch is a short one."""
        key, names = claim.resource.key, lock_names(claim.resource.name)
        slot, bound = self.pool.lowest_slot(key), claim.slots or (MAX_SLOTS if self.record else 1)
        if time.monotonic() < self._not_plain.get(key, 0.0) or slot > bound:
            return None
        session.unclear[key] = (names, self._most(claim))
        batch = quick.acquire(record=self.record)
        row = session.run(batch, values | {"slot": slot, "resource": names.slot(slot)})
        granted = None
        if row["status"] == sql.DONE:
            tokens = (int(row["token"]),) if self.record else ()
            holding = Holding(claim.permit_id, names, key, (slot,), tokens)
            self.pool.note(session, holding)
            granted = Granted(claim.permit_id, holding.grant(), claim.lease)
        session.unclear.pop(key, None)
        if granted is not None:
            self._stuck.pop(key, None)
            self._declare(session, claim, int(row["declared"] or 0))
        else:
            if len(self._not_plain) > REMEMBERED:
                self._not_plain.clear()
            self._not_plain[key] = time.monotonic() + NOT_PLAIN_FOR
        return granted

    def _most(self, claim: Claim) -> int:
        """Return the highest slot that a claim may get; 0 if that is for the rows to say, as an operator may know."""
        return 0 if self.record else claim.slots or 1

    def _declare(self, session: LockSession, claim: Claim, declared: int) -> None:
        """Say if this process's number of slots differs; two processes that disagree say so once a minute."""
        key = claim.resource.key
        if claim.slots in (None, declared) or not self.record or time.monotonic() < self._declared.get(key, 0.0):
            return
        if len(self._declared) > REMEMBERED:
            self._declared.clear()
        self._declared[key] = time.monotonic() + DECLARE_EVERY
        with contextlib.suppress(BackendError):
            session.run(sql.DECLARE, {"key": key, "slots": claim.slots})

    def _note_gated(self, key: str, mark: int) -> None:
        now = boot_now()
        looks, at, before = self._stuck.get(key, (0, 0.0, mark))
        if before != mark or now - at > STUCK_WITHIN:
            looks = 0
        if looks == 0 or now - at >= STUCK_AFTER:
            self._stuck[key] = (looks + 1, now, mark)

    def _head_is_stuck(self, key: str) -> bool:
        return self._stuck.get(key, (0, 0.0, 0))[0] >= STUCK_LOOKS[self.record]


def holder_values(claim: Claim) -> dict[str, Any]:
    """Return what a batch writes of who asks."""
    who = claim.holder
    return {
        "key": claim.resource.key,
        "kind": claim.resource.kind,
        "permit": claim.permit_id,
        "lease": round(claim.lease * 1e6),
        "host": who.host,
        "pid": who.pid,
        "thread": who.thread,
        "label": who.label,
        "user": who.user,
        "process": who.process,
    }


def numbers(csv: str) -> tuple[int, ...]:
    """Return the numbers of a list such as ``,1,2,``."""
    return tuple(int(each) for each in csv.split(",") if each)
