"""Claims on application locks: one batch that takes what is free, and what it says when nothing is.

What claims remember for a while, by name or line: never more than so much.

Whether the first in a line has stopped: what claims that yield to it have seen.
"""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django_sqlsem.backends.applock.fences import ApplockFencing
from django_sqlsem.backends.applock.held import Holding
from django_sqlsem.backends.applock.sessions import LockSession
from django_sqlsem.backends.applock.tsql import acquire, parts, plain, quick
from django_sqlsem.backends.applock.tsql import line as tsql_line
from django_sqlsem.backends.base import Grant, Granted, Request
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.modes import RWLOCK, SHARED, UPDATE, UPGRADE, WHOLE
from django_sqlsem.core.names import MAX_SLOTS
from django_sqlsem.database.sqlserver import (
    NATIVE_ERRORS,
    OF_SLOTS,
    OWN,
    Meaning,
    failure,
    lock_names,
    meaning,
    mode_of,
    place_of,
)
from django_sqlsem.exceptions import BackendError, never_met, wrong_kind

if TYPE_CHECKING:
    from django_sqlsem.database.sessions import Session


#: How many names are remembered.
REMEMBERED: Final = 10_000


def remember(memory: dict[str, float], key: str, seconds: float) -> None:
    """Remember a key for so many seconds from now on."""
    if len(memory) > REMEMBERED:
        memory.clear()
    memory[key] = time.monotonic() + seconds


def is_remembered(memory: dict[str, float], key: str) -> bool:
    """Return whether a key's time is not over."""
    return time.monotonic() < memory.get(key, 0.0)


#: A free slot behind a closed gate, without any grant in between: so far apart must two looks be, in seconds, for the
#: head to count as stopped. Without rows nothing tells of grants in between, so more looks must agree.
STUCK_AFTER: Final = 0.15
STUCK_LOOKS: Final = {True: 3, False: 5}
#: Looks further apart than this prove nothing, in seconds.
STUCK_WITHIN: Final = 5.0


class Heads:
    """By line: the looks that found a free slot behind the gate, the time of the last one, and its mark."""

    def __init__(self) -> None:
        self._looks: dict[str, tuple[int, float, int]] = {}

    def note(self, line: str, mark: int) -> None:
        """Note such a look. ``mark``: the greatest token of the name's slots."""
        now = boot_now()
        looks, at, before = self._looks.get(line, (0, 0.0, mark))
        if before != mark or now - at > STUCK_WITHIN:
            looks = 0
        if looks == 0 or now - at >= STUCK_AFTER:
            if len(self._looks) > REMEMBERED:
                self._looks.clear()
            self._looks[line] = (looks + 1, now, mark)

    def moved(self, line: str) -> None:
        """Note that no such thing was seen."""
        self._looks.pop(line, None)

    def is_stuck(self, line: str, looks: int) -> bool:
        """Return whether so many looks have agreed."""
        return self._looks.get(line, (0, 0.0, 0))[0] >= looks


#: How often a process says that its number of slots differs from the declared one, in seconds.
DECLARE_EVERY: Final = 60.0
#: How long a batch that lost a deadlock or found a row locked is repeated, in seconds.
PATIENCE: Final = 10.0
#: For so long a name is not plain, in seconds, of which a slot was taken or about which an operator said something.
NOT_PLAIN_FOR: Final = 1.0
#: So long after a claim found others waiting, in seconds, the next one goes to the end of the line without a look.
CROWDED_FOR: Final = 1.0


@dataclass(frozen=True, slots=True)
class Stand:
    """How a claim waits in the server."""

    #: The name of its process's place in the line; empty: it has none.
    ticket: str = ""
    #: How many threads and tasks wait in the process.
    waiting: int = 0
    #: For how many seconds it stands in line, if it is not at the head already; ``None``: it does not.
    patience: float | None = None
    #: When its process came, by the boot clock.
    arrived: float = 0.0
    #: For how many milliseconds it waits for slots, at the head.
    budget: int = 0
    #: Whether it is the head: then a silent server is found out by its own batches, as nobody else looks.
    heads: bool = False
    #: Whether it stands in line else: then it does not ask where others are known to wait by the time of its turn.
    joins: bool = False


#: Of a claim that does not wait.
NO_STAND: Final = Stand()
#: Of the first try of one that does.
FIRST_TRY: Final = Stand(joins=True)


class Answer(NamedTuple):
    """What a claim was told."""

    granted: Granted | None
    status: int
    #: Whether its session is the head of the line now.
    head: bool = False
    #: Whether nothing was in the way of what it got.
    at_once: bool = False


class ApplockClaims(ApplockFencing):
    """Takes slots."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._declared: dict[str, float] = {}
        #: Names of which the short batch found something in the way: until when it is not tried again.
        self._not_plain: dict[str, float] = {}
        #: Lines in which others wait: until when that is taken for granted.
        self._crowded: dict[str, float] = {}
        self._heads = Heads()

    def claim(self, session: Session, request: Request) -> Grant | None:
        """Take slots on a session that has none of this name, in one batch that does not wait."""
        granted = self.try_claim(request).granted
        return None if granted is None else granted.grant

    def try_claim(self, request: Request, stand: Stand = NO_STAND) -> Answer:
        """Claim without waiting, on a session that has none of this name."""
        key = request.resource.key
        again = True
        while True:
            with self.pool.shared(key, empty=request.mode == UPDATE) as session:
                if stand.joins and request.fair and self.is_crowded(request.line):
                    return Answer(None, parts.BUSY)
                try:
                    answer = self.attempt(session, request, stand, fair=request.fair)
                    if answer.status == parts.GATED and self._heads.is_stuck(request.line, STUCK_LOOKS[self.record]):
                        answer = self.attempt(session, request, stand, fair=parts.PAST)
                    return answer
                except BackendError as error:
                    if meaning(error) is Meaning.NO_TABLES and not session.held:
                        session.end("the lock tables are not there")  # nor what would say what it may have got
                        raise
                    # One that was opened long ago may have died unnoticed; whatever it got is free.
                    if not session.ended:
                        raise
                    self.bury(session)
                    if not again:
                        raise
                    again = False

    def attempt(self, session: LockSession, request: Request, stand: Stand, *, fair: int) -> Answer:
        """Claim on this session. ``fair``: whether it yields to those who wait, or ``sql.PAST``."""
        names, record, key = lock_names(request.resource.name).line(request.mode), self.record, request.resource.key
        in_line, place = stand.patience is not None, place_of(request.resource.kind, request.mode)
        values: dict[str, Any] = {
            "stamp": session.stamp,
            "base": names.base,
            "gate": names.gate,
            "fence": names.fence,
            "told": names.told,
            "mode": mode_of(request.resource.kind, request.mode),
            "place": -1 if place is None else place,
            "slots": request.slots or 0,
            "take": request.take if place is None else 1,
            "fair": int(fair),
            "start": random.randrange(MAX_SLOTS),  # noqa: S311
            "budget": stand.budget,
            "step": acquire.FIRST_STEP_MS,
            "ticket": stand.ticket,
            "waiting": stand.waiting,
            "patience": int((stand.patience or 0) * 1000),
            "age": max(0, int((boot_now() - stand.arrived) * 1e6)),
            "session_id": session.session_id,
            "session_us": session.session_us,
        } | holder_values(request)
        if fair and request.take == 1 and request.mode == SHARED and not in_line and not stand.ticket:
            granted = self._attempt_quickly(session, request, values)
            if granted is not None:
                return Answer(granted, parts.DONE)
        simple = values["mode"] == OF_SLOTS and request.take == 1
        batch = (plain if simple else acquire).acquire(record=record, in_line=in_line)
        give_up = time.monotonic() + PATIENCE
        while True:
            try:
                if key in session.unclear:
                    session.clean(key)
                row, granted = self._ask(session, request, batch, values, waits=in_line and not stand.heads)
                if row["status"] == parts.NEW:
                    self._create(session, request, row)
            except BackendError as error:
                # A row that another transaction keeps locked: what the batch had taken by then is freed first.
                if session.ended or meaning(error) is not Meaning.AGAIN or time.monotonic() >= give_up:
                    raise
                continue
            status = int(row["status"])
            if status != parts.GATED:
                self._heads.moved(request.line)
            if status == parts.ODD:
                batch = acquire.acquire(record=record, in_line=in_line)
            elif status not in (parts.NEW, parts.ROW_FAILED):
                break
            elif status == parts.ROW_FAILED and (
                NATIVE_ERRORS.get(int(row["error"])) is not Meaning.AGAIN or time.monotonic() >= give_up
            ):
                raise BackendError(f"The database {self.alias!r} failed: {row['message']} ({row['error']})")
        if status == parts.KIND:
            raise wrong_kind(request.resource.name, str(row["message"]), request.resource.kind)
        if status == parts.NEVER:
            raise never_met(request.resource.name, int(row["bound"]), request.take)
        if status < 0 or status == OWN:
            session.unclear[key] = (names, self._most(request))
            session.clean(key)
            raise failure(self.alias, status)
        if status == parts.GATED:
            self._heads.note(request.line, int(row["mark"] or 0))
        if status in (parts.GATED, parts.BUSY):
            remember(self._crowded, request.line, CROWDED_FOR)
        elif granted is None and status == parts.DONE:
            status = parts.BUSY  # the claim has been served elsewhere
        return Answer(granted, status, bool(row["head"]), not row["waited"])

    def _attempt_quickly(self, session: LockSession, request: Request, values: dict[str, Any]) -> Granted | None:
        """Take the lowest slot that this process has not, if all is plain: then the batch is a short one."""
        key, names = request.resource.key, lock_names(request.resource.name)
        slot, bound = self.pool.lowest_slot(key), request.slots or (MAX_SLOTS if self.record else 1)
        if is_remembered(self._not_plain, key) or slot > bound:
            return None
        batch = quick.acquire(record=self.record, reads=request.resource.kind == RWLOCK)
        _row, granted = self._ask(session, request, batch, values | {"slot": slot, "resource": names.slot(slot)})
        if granted is None:
            remember(self._not_plain, key, NOT_PLAIN_FOR)
        else:
            self._heads.moved(key)
        return granted

    def _ask(
        self, session: LockSession, request: Request, batch: parts.Batch, values: dict[str, Any], *, waits: bool = False
    ) -> tuple[dict[str, Any], Granted | None]:
        """Run a batch that may take slots, and note what it took."""
        names, key = lock_names(request.resource.name), request.resource.key
        waits_as = names.line(request.mode)
        # If this is cut short, what it may have got is freed before anything else of the name is done here.
        session.unclear[key] = (waits_as, self._most(request))
        row = session.run(batch, values, waits=waits)
        if "status" not in row:
            row = quick.answer(row, values)
        granted = None
        if row["status"] == parts.DONE:
            slots = numbers(row["slots"])
            whole = tuple(range(slots[0], int(row["bound"]) + 1)) if request.mode == WHOLE else ()
            holding = Holding(request.permit_id, names, key, slots, numbers(row["tokens"]), whole, request.mode)
            if self.pool.note(session, holding):
                granted = Granted(request.permit_id, holding.grant(), request.lease)
            else:  # another session was served for it at the same moment
                self.let_go(session, holding)
        session.unclear.pop(key, None)
        if granted is not None:
            self._declare(session, request, int(row["declared"] or 0))
        return row, granted

    def pass_on(self, session: LockSession, request: Request, successor: Request) -> Granted | None:
        """Make what this session has got for a claim that was given up another one's, of the same process and name.

        ``None``: that one has been served on another session meanwhile, so this one has been let go.
        """
        holding = session.held[request.line]
        with self.or_end(session):
            if self.record and request.mode != UPGRADE:
                session.run(tsql_line.RENAME, holder_values(successor) | {"before": request.permit_id})
            renamed = replace(holding, permit_id=successor.permit_id)
            self.pool.forget(session, holding)
            if not self.pool.note(session, renamed):
                self.let_go(session, renamed)
                return None
        return Granted(successor.permit_id, renamed.grant(), successor.lease)

    def _create(self, session: LockSession, request: Request, row: dict[str, Any]) -> None:
        """Make the rows of a name that has none, or too few."""
        slots = max(int(row["bound"] or 0), request.slots or 1)
        kind = {
            "key": request.resource.key,
            "name": request.resource.name,
            "kind": request.resource.kind,
            "slots": slots,
        }
        session.run(parts.CREATE, kind, waits=True)  # thousands of rows take a while

    def _most(self, request: Request) -> int:
        """Return the highest slot that a claim may get; 0 if that is for the rows to say, as an operator may know."""
        return 0 if self.record else request.slots or 1

    def _declare(self, session: LockSession, request: Request, declared: int) -> None:
        """Say if this process's number of slots differs; two processes that disagree say so once a minute."""
        key = request.resource.key
        if request.slots in (None, declared) or not self.record or is_remembered(self._declared, key):
            return
        remember(self._declared, key, DECLARE_EVERY)
        with contextlib.suppress(BackendError):
            session.run(parts.DECLARE, {"key": key, "slots": request.slots})

    def is_crowded(self, line: str) -> bool:
        """Whether a claim found others waiting a moment ago."""
        return is_remembered(self._crowded, line)


def holder_values(request: Request) -> dict[str, Any]:
    """Return what a batch writes of who asks."""
    who = request.holder
    return {
        "key": request.resource.key,
        "kind": request.resource.kind,
        "lock_mode": request.mode,
        "permit": request.permit_id,
        "lease": round(request.lease * 1e6),
        "host": who.host,
        "pid": who.pid,
        "thread": who.thread,
        "label": who.label,
        "user": who.user,
        "process": who.process,
    }


def numbers(csv: str | int) -> tuple[int, ...]:
    """Return the numbers of a list such as ``,1,2,``, or the only one."""
    return tuple(int(each) for each in str(csv).split(",") if each)
