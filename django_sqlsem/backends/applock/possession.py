"""What is held on application locks: giving it back, proving it, fencing it, and what a session's end has cost."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends.applock import calls
from django_sqlsem.backends.base import Acquired, Renewal, Request
from django_sqlsem.conf import config
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.modes import UPDATE, UPGRADE, WRITER, line_of
from django_sqlsem.database import transactions
from django_sqlsem.database.raw import results_of
from django_sqlsem.database.sessions import CallerSession
from django_sqlsem.database.sqlserver import failure
from django_sqlsem.exceptions import BackendError, SemaphoreError
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.backends.applock.pool import LockPool
    from django_sqlsem.backends.applock.sessions import Holding, LockSession
    from django_sqlsem.core.names import Resource


logger = logging.getLogger("django_sqlsem")

#: A proof of possession that is older than this, in seconds, is asked for anew before anybody relies on it.
STALE_PROOF: Final = 10.0
#: For how many seconds a session is asked for whose turn it may not be.
BUSY_FOR: Final = 1.0
#: How many sessions are asked at once where the first one did not answer.
AT_A_TIME: Final = 32
#: What became of an upgradable reader that was the writer, and meant to be a reader again.
DISPLACED: Final = "another program took the name when it was downgraded"
#: How many permits' losses are remembered for those who ask later.
MOST_LOSSES: Final = 1000

#: How long a transaction waits for its fence, in milliseconds: for whoever has taken the slot by then.
PATIENCE_MS: Final = 2000
#: How long it waits for its turn on the permit's session, in seconds.
PROOF_WITHIN: Final = 10.0
_REFUSED: Final = -1

_ROW: Final = (
    "EXISTS (SELECT 1 FROM sqlsem_slot WITH (FORCESEEK) WHERE semaphore_key = %s AND slot = %s AND token = %s"
    " AND permit_id = %s) AND APPLOCK_TEST(N'public', %s, N'Exclusive', N'Session') = 0"
)


class Possession:
    """Keeps and frees what permits have."""

    def __init__(self, pool: LockPool) -> None:
        self.alias = pool.alias
        self.pool = pool
        #: How sessions that have ended cost their permits, by permit id.
        self._lost: dict[str, Loss] = {}
        #: Permits that were lost by their own downgrade: a release that follows at once has nothing to complain of.
        self._displaced: set[str] = set()

    @property
    def record(self) -> bool:
        """Whether a row is kept beside each lock."""
        return config(self.alias).record

    def release(self, permit_id: str) -> bool:
        """Free a permit's locks on the session that has them. Return whether they all still were there."""
        found = self.pool.holder(permit_id)
        if found is None:
            freed = permit_id in self._displaced
            self._displaced.discard(permit_id)
            return freed
        session, holding = found
        with self.pool.own(session):
            if session.held.get(holding.line) is not holding:
                return False
            if holding.mode == UPGRADE:
                return self.downgrade(session, holding.key)
            return self.let_go(session, holding) >= len(holding.slots)

    def let_go(self, session: LockSession, holding: Holding) -> int:
        """Free a permit's locks on this session, whose turn it is. Returns how many there were."""
        call = calls.RELEASE if self.record else calls.RELEASE_UNRECORDED
        if len(holding.slots) > 1 or holding.slots[0] == WRITER:  # whose upgrade may have closed the gate
            call = calls.RELEASE_SEVERAL
        values = self.names(holding) | {"slot": holding.slots[0], "last": holding.slots[-1]}
        row = self._give(session, call, values)
        if row is None:
            return 0
        line = line_of(holding.key, UPGRADE)  # it goes with the upgradable reader's
        session.unclear.pop(line, None)
        for each in filter(None, (holding, session.held.get(line))):
            self.pool.forget(session, each)
        if row["error"]:
            logger.warning("A row of %r could not be freed with its lock: %s", self.alias, row["why"])
            with contextlib.suppress(BackendError):
                self._forget(holding)
        return int(row["freed"])

    def _give(self, session: LockSession, call: calls.ProcedureCall, values: dict[str, Any]) -> dict[str, Any] | None:
        """Make a call that gives something back. ``None``: the session has surely ended, and so it was given back."""
        try:
            return session.run(call, values)
        except BackendError:
            if session.ended:  # the server frees the locks; the row is seen to when it can be
                self.bury(session)
            if session.surely_ended:
                return None
            raise

    def give_up(self, session: LockSession | None, request: Request) -> None:
        """Free what a claim has got that nobody wants any more: on its own session, or (``None``) on that of a reader.

        Raises ``BackendError``; then the session has ended, unless it is the reader's.
        """
        if session is None:
            self.release(request.permit_id)
            return
        with self.or_end(session):
            self.let_go(session, session.held[line_of(request.resource.key, request.mode)])

    @contextlib.contextmanager
    def or_end(self, session: LockSession) -> Iterator[None]:
        """End a session that is ours alone if the block fails: nobody would know of what it has."""
        try:
            yield
        except Exception as error:
            session.end(f"what it had got for nobody could not be given back: {error}")
            self.bury(session)
            raise

    def downgrade(self, session: LockSession, key: str) -> bool:
        """End the upgrade on this session, whose turn it is. Returns whether there was one."""
        reader = session.held.get(line_of(key, UPDATE))
        upgraded = session.held.get(line_of(key, UPGRADE))
        if reader is None:
            return False
        row = self._give(session, calls.BE_READER, self.names(reader))
        if row is None:
            return False
        session.unclear.pop(line_of(key, UPGRADE), None)
        if upgraded is not None:
            self.pool.forget(session, upgraded)
        if row["result"] < 0:
            self.pool.forget(session, reader)
            self._displaced.add(reader.permit_id)
            self._lose(reader, Loss(LossReason.CUT_OFF, DISPLACED))
        return upgraded is not None

    def discard(self, resource: Resource, permit_id: str) -> bool:
        """Free what a claim may have got: known locks by name, and those of claims that were cut short."""
        for line in (resource.key, line_of(resource.key, UPGRADE)):
            for session in self.pool.unclear(line):
                with self.pool.own(session, timeout=BUSY_FOR) as had:
                    if not had:  # by now somebody may wait on it, for long
                        raise BackendError(f"The database {self.alias!r} failed: a session is busy")
                    if line not in session.unclear or session.ended:
                        continue
                    if line == resource.key:
                        session.clean(line)
                    else:
                        self.downgrade(session, resource.key)
        return self.pool.holder(permit_id) is not None and self.release(permit_id)

    # Proofs.

    def renew(self, held: Sequence[Acquired]) -> Renewal:
        """Have each session prove that it stands and has its locks."""
        wanted = {each.permit_id for each in held}
        asked = {}
        for session in self.pool.sessions():
            if ids := {holding.permit_id for holding in list(session.held.values())} & wanted:
                asked[session] = ids
        standing = self._standing(list(asked))
        renewed = {permit_id for each in standing for permit_id in asked[each]}
        asked_by = {permit_id: by for each in standing for permit_id, by in each.asked_by.items()}
        self.pool.trim(config(self.alias).idle)
        lost = {each.permit_id: loss for each in held if (loss := self.taken_away(each.permit_id)) is not None}
        return Renewal(frozenset(renewed), lost, asked_by)

    def taken_away(self, permit_id: str) -> Loss | None:
        """Return how a permit's session ended, if it did."""
        found = self.pool.holder(permit_id)
        if found is not None and not found[0].ended and boot_now() - found[0].proved_at > STALE_PROOF:
            # The process did not run for a while: what happened meanwhile is for the server to say.
            with self.pool.own(found[0], timeout=BUSY_FOR) as had:
                if had and not found[0].ended:
                    self.stands(found[0])
        if found is not None and not found[0].ended:
            return None
        if found is not None and permit_id not in self._lost:
            with self.pool.own(found[0], timeout=BUSY_FOR) as had:
                if had and permit_id not in self._lost:  # else whoever has found that out has asked who did it
                    self.bury(found[0])
        return self._lost.get(permit_id) or Loss(LossReason.SESSION_ENDED, "its database session has ended")

    def _standing(self, sessions: list[LockSession]) -> list[LockSession]:
        """Return those that have proved that they stand."""
        standing = []
        for number, session in enumerate(sessions, 1):
            if self._stands_in_turn(session):
                standing.append(session)
            elif session.ended and not session.surely_ended:
                # A silent server: nobody waits for one answer after the other that does not come.
                rest = sessions[number:]
                with ThreadPoolExecutor(max_workers=AT_A_TIME) as crowd:
                    stands = list(crowd.map(self._stands_in_turn, rest))
                return standing + [each for each, stood in zip(rest, stands, strict=True) if stood]
        return standing

    def _stands_in_turn(self, session: LockSession) -> bool:
        with self.pool.own(session, timeout=BUSY_FOR) as had:
            return had and self.stands(session)

    def stands(self, session: LockSession) -> bool:
        """Have a session prove that it stands and has its locks; bury it if it does not."""
        with contextlib.suppress(BackendError):
            if session.prove(record=self.record):
                return True
        if session.ended:
            self.bury(session)
        return False

    def bury(self, session: LockSession) -> None:
        """Tell what a session that has ended cost."""
        reachable = True
        for holding in list(session.held.values()):
            by = None
            try:
                by = self._forget(holding) if reachable else None
            except BackendError:  # nobody waits for as many logins as there were permits
                reachable = False
            self._lose(
                holding,
                Loss(LossReason.SESSION_ENDED, f"its database session has ended: {session.ended}")
                if by is None
                else Loss(LossReason.REVOKED, f"revoked by {by or 'an operator'}", by),
            )
            self.pool.forget(session, holding)

    def _lose(self, holding: Holding, loss: Loss) -> None:
        if len(self._lost) > MOST_LOSSES:
            self._lost.clear()
        self._lost[holding.permit_id] = loss

    def _forget(self, holding: Holding) -> str | None:
        """Free the rows of locks that are gone. Returns who revoked the permit, if somebody did.

        Raises ``BackendError``.
        """
        if not self.record:
            return None
        with self.pool.shared(holding.key) as session:
            values = {"key": holding.key, "permit": holding.permit_id, "slot": holding.slots[0]}
            row = session.run(calls.FORGET, values | {"token": holding.tokens[0] if holding.tokens else 0})
        return None if row["revoked_by"] is None else str(row["revoked_by"])

    def names(self, holding: Holding) -> dict[str, Any]:
        """Return what calls are told of a holding: its name, and whose rows there are; ``None``: there are none."""
        permit = holding.permit_id if self.record else None
        return {"base": holding.names.base, "key": holding.key, "permit": permit}


class Fencing:
    """Fences: the caller's own transaction keeps a permit's slots from being taken until it ends.

    The transaction takes locks of its own (``internal_fence_1``), and then the permit's session proves that it still
    has its slots. Whoever gets one of those slots later looks for such locks, and stands behind them.
    """

    def __init__(self, pool: LockPool, possession: Possession) -> None:
        self.alias = pool.alias
        self.pool = pool
        self.possession = possession

    def fence(self, caller: BaseDatabaseWrapper, held: Acquired) -> bool:
        """Fence the caller's transaction. Return whether the permit is live, and stays untaken until that ends."""
        self._need_rows()
        found = self.pool.holder(held.permit_id)
        if found is None:
            return False
        own, holding = found
        whole = bool(holding.whole) or line_of(holding.key, UPGRADE) in own.held
        values: list[Any] = [holding.key, "" if whole else f",{','.join(map(str, holding.slots))},", PATIENCE_MS]
        result = CallerSession(caller).run(lambda cursor: _ask(cursor, values))
        if result < 0 and result != _REFUSED:
            raise failure(caller.alias, result)
        live = self._has(own, holding)
        if live and result < 0:
            raise BackendError(f"The database {self.alias!r} failed: {held.resource.name!r} could not be fenced")
        return live

    def fenced_sql(self, caller: BaseDatabaseWrapper, held: Acquired) -> tuple[str, list[Any]]:
        """Return a condition that the slots' rows are the permit's, and that their locks are taken.

        In a transaction it fences that first: else somebody might get the slot while the statement runs.
        """
        self._need_rows()
        if transactions.in_transaction(caller) and not self.fence(caller, held):
            return "1 = 0", []
        found = self.pool.holder(held.permit_id)
        if found is None:
            return "1 = 0", []
        holding, parameters = found[1], []
        for slot, token in zip(holding.slots, holding.tokens, strict=True):
            parameters += [holding.key, slot, token, holding.permit_id, holding.names.slot(slot)]
        return f"({' AND '.join([_ROW] * len(holding.slots))})", parameters

    def _need_rows(self) -> None:
        if not self.possession.record:
            raise SemaphoreError(
                f"Fences need lock rows, and SQLSEM['RECORD'] is off for {self.alias!r}: nothing tells who has a slot."
            )

    def _has(self, own: LockSession, holding: Holding) -> bool:
        """Have a session prove by a statement sent now that it still has a permit's locks."""
        with self.pool.own(own, timeout=PROOF_WITHIN) as had:
            if not had:
                raise BackendError(f"The database {self.alias!r} failed: a session is busy")
            if own.ended or own.held.get(holding.line) is not holding:
                return False
            try:
                if own.prove():
                    return True
            except BackendError:
                if not own.ended:
                    raise
            self.possession.bury(own)
            return False


def _ask(cursor: Any, values: list[Any]) -> int:
    cursor.execute(calls.FENCE_OFF.text.replace("?", "%s"), values)
    return int(results_of(cursor)[0][0]["rc"])
