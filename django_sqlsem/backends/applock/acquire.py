"""Acquiring application locks: one call that takes what is free, or waits for it in the server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django_sqlsem.backends.applock import calls, reading
from django_sqlsem.backends.applock.sessions import Holding
from django_sqlsem.backends.base import Granted, Request, tell_of_two_kinds
from django_sqlsem.conf import config
from django_sqlsem.core.modes import RWLOCK, SHARED, UPDATE, UPGRADE, WHOLE, WRITER, line_of
from django_sqlsem.database.raw import OTHER_PROCEDURES
from django_sqlsem.database.sqlserver import NATIVE_ERRORS, Meaning, failure, lock_names, meaning
from django_sqlsem.exceptions import BackendError, PermitLostError, never_met, wrong_kind
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django_sqlsem.backends.applock.pool import LockPool
    from django_sqlsem.backends.applock.possession import Possession
    from django_sqlsem.backends.applock.sessions import LockSession

#: How long a call that found a row locked is repeated, in seconds.
PATIENCE: Final = 10.0
#: So long after a claim found others waiting, in seconds, the next one waits in line without a look.
CROWDED_FOR: Final = 1.0
#: How many queues are remembered.
MOST_REMEMBERED: Final = 10_000
#: For how long an upgrade waits for its turn on the upgradable reader's session, in seconds.
ITS_TURN: Final = 5.0
#: The largest number of slots for which the short call is used, as that tries one slot after the other.
FEW: Final = 16
RLOCK: Final = "rlock"
#: By whether a claim is of the usual kind, and whether rows are kept.
_CALLS: Final = {
    (True, True): calls.TRY,
    (True, False): calls.TRY_UNRECORDED,
    (False, True): calls.ACQUIRE,
    (False, False): calls.ACQUIRE_UNRECORDED,
}

# Whom a call may pass that finds others waiting: nobody, or only those who seem stuck. See ``internal_acquire_1``.
FAIR, PASSES_THE_STUCK = 1, 2


class Answer(NamedTuple):
    """What a call was told."""

    granted: Granted | None
    result: int
    #: Whether its session is the first in line.
    head: bool = False
    #: The newest token of the name: it changes with every grant.
    mark: int | None = None


class Claims:
    """Takes slots for requests."""

    def __init__(self, pool: LockPool, possession: Possession) -> None:
        self.alias = pool.alias
        self.pool = pool
        self.possession = possession
        #: To be called with what was granted, when it was asked for, its name, and ``at_once``.
        self.deliver: Callable[..., object] = lambda granted, sent, resource, *, at_once: None
        #: Queues in which others wait: until when that is taken for granted.
        self._crowded: dict[str, float] = {}

    def is_crowded(self, line: str) -> bool:
        """Whether a claim found others waiting a moment ago."""
        return time.monotonic() < self._crowded.get(line, 0.0)

    def try_claim(self, request: Request, *, fair: int | None = None, mark: int | None = None) -> Answer:
        """Claim without waiting, on a session that has none of this name."""
        fair = int(request.fair) if fair is None else fair
        again = True
        while True:
            with self.pool.shared(request.resource.key, empty=request.mode == UPDATE) as session:
                try:
                    answer = self.attempt(session, request, 0, fair=fair, mark=mark)
                except BackendError as error:
                    if meaning(error) is Meaning.NO_TABLES and not session.held:
                        session.end("the lock tables are not there")  # nor what would say what it may have got
                        raise
                    # One that was opened long ago may have died unnoticed; whatever it got is free.
                    if not session.ended:
                        raise
                    self.possession.bury(session)
                    if not again:
                        raise
                    again = False
                else:
                    if answer.granted is None and fair == FAIR:
                        if len(self._crowded) > MOST_REMEMBERED:
                            self._crowded.clear()
                        self._crowded[request.line] = time.monotonic() + CROWDED_FOR
                    return answer

    def attempt(
        self,
        session: LockSession,
        request: Request,
        timeout: int | None,
        *,
        fair: int,
        head: bool = False,
        mark: int | None = None,
    ) -> Answer:
        """Claim on this session; ``timeout``: for how many milliseconds it may wait. ``head``: it has the gate."""
        values = self._values(session, request) | {"timeout": timeout, "fair": fair, "mark": mark}
        record = config(self.alias).record
        usual = timeout == 0 and fair == FAIR and request.mode == SHARED and request.take == 1
        usual = usual and 0 < (request.slots or 0) <= FEW and request.resource.kind not in (RLOCK, RWLOCK)
        give_up = math.inf  # the time counts from what is to be repeated: before that it may wait for long
        while True:
            try:
                call = _CALLS[usual, record]
                answer, row = self._ask(session, request, call, values | {"head": head}, waits=timeout != 0)
                if answer.result == calls.NEW:
                    self._declare(session, request, max(int(row["bound"] or 0), request.slots or 1), give_up)
            except BackendError as error:
                # What the call had taken by then is freed first.
                if session.ended or meaning(error) is not Meaning.AGAIN or time.monotonic() >= give_up:
                    raise
            else:
                if answer.result not in (calls.NEW, calls.ROW_FAILED):
                    break
                again = answer.result == calls.NEW or NATIVE_ERRORS.get(int(row["error"])) is Meaning.AGAIN
                if not again or (answer.result == calls.ROW_FAILED and time.monotonic() >= give_up):
                    raise BackendError(f"The database {self.alias!r} failed: {row['why']} ({row['error']})")
            give_up = min(give_up, time.monotonic() + PATIENCE)
        if answer.result == calls.OTHER_KIND:
            name, kind = request.resource.name, request.resource.kind
            known = reading.read_one(session, request.resource)
            raise wrong_kind(name, str(row["why"]), kind, self.alias, known)
        if row.get("why") and answer.result in (calls.WAITED, calls.BUSY):  # it is in use as the other kind
            tell_of_two_kinds(self.alias, request.resource)
        if answer.result == calls.NEVER:
            raise never_met(request.resource.name, int(row["bound"]), request.take)
        if answer.result not in (calls.TAKEN_AT_ONCE, calls.WAITED, calls.BUSY, calls.ON_HOLD, calls.TOO_FEW):
            raise failure(self.alias, answer.result)
        return answer

    def _values(self, session: LockSession, request: Request) -> dict[str, Any]:
        return holder_values(request, session) | {
            "base": lock_names(request.resource.name).base,
            "key": request.resource.key,
            "kind": request.resource.kind,
            "slots": request.slots or 0,
            "take": request.take if request.mode == SHARED else 1,
        }

    def _ask(
        self, session: LockSession, request: Request, call: calls.ProcedureCall, values: dict[str, Any], *, waits: bool
    ) -> tuple[Answer, dict[str, Any]]:
        """Make the call, and note what it took."""
        names, key = lock_names(request.resource.name), request.resource.key
        if key in session.unclear:
            session.clean(key)
        record = "permit" in call.parameters
        # If this is cut short, what it may have got is freed before anything else of the name is done here.
        session.unclear[key] = (names, None if record else request.slots or 1, record)
        row = session.run(call, values, waits=waits)
        result = int(row["result"])
        granted = None
        if result in (calls.TAKEN_AT_ONCE, calls.WAITED):
            slots = tuple(sorted(map(int, filter(None, str(row["taken"]).split(",")))))
            tokens = (int(row["token"]),) * len(slots) if record else ()
            whole = tuple(range(slots[0], int(row["bound"]) + 1)) if request.mode == WHOLE else ()
            holding = Holding(request.permit_id, names, key, slots, tokens, whole, request.mode)
            if self.pool.note(session, holding):
                granted = Granted(request.permit_id, holding.grant(), request.lease)
            else:  # another session was served for it at the same moment
                self.possession.let_go(session, holding)
                result = calls.BUSY
        session.unclear.pop(key, None)
        mark = row.get("mark")
        return Answer(granted, result, bool(row.get("head")), None if mark is None else int(mark)), row

    def pass_on(self, session: LockSession, request: Request, successor: Request) -> Granted | None:
        """Make what this session has got for a claim that was given up another one's, of the same process and name.

        ``None``: that one has been served on another session meanwhile, so this one has been let go.
        """
        holding = session.held[line_of(request.resource.key, request.mode)]
        with self.possession.or_end(session):
            if config(self.alias).record and request.mode != UPGRADE:
                session.run(
                    calls.RENAME, holder_values(successor, session) | {"key": holding.key, "before": request.permit_id}
                )
            renamed = replace(holding, permit_id=successor.permit_id)
            self.pool.forget(session, holding)
            if not self.pool.note(session, renamed):
                self.possession.let_go(session, renamed)
                return None
        return Granted(successor.permit_id, renamed.grant(), successor.lease)

    def _declare(self, session: LockSession, request: Request, slots: int, give_up: float) -> None:
        """Make the rows of a name that has none, or too few; say how many slots it has here.

        ``give_up``: from then on, by ``time.monotonic()``, what was made and is not there is an error.
        """
        if time.monotonic() >= give_up:
            raise BackendError(f"The database made no rows of {request.resource.name!r}: {OTHER_PROCEDURES}")
        name = {"key": request.resource.key, "name": request.resource.name, "kind": request.resource.kind}
        values = name | {"slots": slots, "template": request.template}
        session.run(calls.DECLARE, values, waits=True)  # thousands of rows take a while


class Upgrades:
    """Makes upgradable readers writers: their lock of the name is converted, on the session that has it.

    That session is kept for its permit alone, so whoever waits may wait on it: in short steps, as it has to go on
    proving that it stands, and can't be cut off without losing the permit.
    """

    def __init__(self, pool: LockPool, possession: Possession) -> None:
        self.pool = pool
        self.possession = possession

    def ask(
        self, request: Request, timeout: int = 0, *, close: bool = False, wanted: Callable[[], bool] = lambda: True
    ) -> Answer:
        """Ask once for the upgrade, and wait ``timeout`` milliseconds for the readers to leave.

        ``close``: newcomers are kept out until there is a grant, or ``stop`` is called. ``wanted``: asked in the turn
        on the session, as it may have been left meanwhile. Raises ``PermitLostError`` if there is no upgradable reader.
        """
        found = self.pool.upgradable(request.resource.key)
        if found is None:
            loss = Loss(LossReason.SESSION_ENDED, "its database session has ended")
            raise PermitLostError(f"The permit of {request.resource.name!r} was lost: {loss}.", loss=loss)
        session, reader = found
        with self.pool.own(session, timeout=ITS_TURN) as had:
            if not had or session.ended or not wanted():
                return Answer(None, calls.BUSY)
            if session.held.get(reader.line) is reader:
                return self._ask(session, reader, request, timeout, close=close)
        return self.ask(request, timeout, close=close, wanted=wanted)  # that one was just released

    def _ask(self, session: LockSession, reader: Holding, request: Request, timeout: int, *, close: bool) -> Answer:
        key = request.resource.key
        line = line_of(key, UPGRADE)
        if line in session.held:  # the keeper and the line have asked at the same moment
            return Answer(None, calls.BUSY)
        if line in session.unclear:
            self.possession.downgrade(session, key)
        # If this is cut short, it is ended before anything else is done here.
        session.unclear[line] = (reader.names, None, self.possession.record)
        values = self.possession.names(reader) | {"slots": request.slots or 0, "timeout": timeout, "close": close}
        try:
            row = session.run(calls.BE_WRITER, values)
        except BackendError:
            if session.ended:
                self.possession.bury(session)
            else:
                self.possession.downgrade(session, key)
            raise
        result = int(row["result"])
        if result == calls.TAKEN_AT_ONCE:
            whole = tuple(range(WRITER + 1, int(row["bound"]) + 1))
            holding = Holding(request.permit_id, reader.names, key, (WRITER,), reader.tokens, whole, UPGRADE)
            self.pool.note(session, holding)
            session.unclear.pop(line, None)
            return Answer(Granted(request.permit_id, holding.grant(), request.lease), result)
        if not close or result not in (calls.BUSY, calls.ON_HOLD):
            self.possession.downgrade(session, key)  # it may have been converted, and not be alone yet
        session.unclear.pop(line, None)
        if result not in (calls.BUSY, calls.ON_HOLD):
            raise failure(self.pool.alias, result)
        return Answer(None, result)

    def stop(self, key: str, timeout: float = -1) -> None:
        """Let newcomers in again, as nobody waits for the upgrade any more. Raises ``BackendError``.

        ``timeout``: for this many seconds its turn on the session is waited for; -1: for ever.
        """
        found = self.pool.upgradable(key)
        if found is not None:
            with self.pool.own(found[0], timeout=timeout) as had:
                if had and not found[0].ended and line_of(key, UPGRADE) not in found[0].held:
                    self.possession.downgrade(found[0], key)


def holder_values(request: Request, session: LockSession) -> dict[str, Any]:
    """Return what rows say of who asks."""
    who = request.holder
    return {
        "permit": request.permit_id,
        "lock_mode": request.mode,
        "thread": who.thread,
        "label": who.label,
        "user": who.user,
        "session": f"{session.session_us:<20}{who.pid:<20}{who.process:32}{who.host}",
    }


def same_wish(one: Request, other: Request) -> bool:
    """Whether what was granted to one request serves another one of the same name."""
    wishes = [(each.take, each.slots, each.mode, each.resource.kind) for each in (one, other)]
    return wishes[0] == wishes[1] and one.mode in (SHARED, WHOLE)
