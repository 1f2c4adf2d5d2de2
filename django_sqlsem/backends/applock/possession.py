"""What is held on application locks: giving it back, proving it, and telling what a session's end has cost."""

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
from django_sqlsem.core.modes import UPDATE, UPGRADE, line_of
from django_sqlsem.exceptions import BackendError
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django_sqlsem.backends.applock.held import Holding
    from django_sqlsem.backends.applock.pool import LockPool
    from django_sqlsem.backends.applock.sessions import LockSession
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
            if holding.mode in (UPDATE, UPGRADE):
                return self.downgrade(session, holding.key, keep=holding.mode == UPGRADE)
            return self.let_go(session, holding) >= len(holding.slots)

    def let_go(self, session: LockSession, holding: Holding) -> int:
        """Free a permit's locks on this session, whose turn it is. Returns how many there were."""
        call = calls.RELEASE if len(holding.slots) == 1 else calls.RELEASE_SEVERAL
        given = {"slot": holding.slots[0], "taken": holding.csv, "permit": holding.permit_id if self.record else None}
        row = self._give(session, call, _names(holding) | given)
        if row is None:
            return 0
        self.pool.forget(session, holding)
        self._see_to_row(holding, row)
        return int(row["freed"])

    def _give(self, session: LockSession, call: calls.ProcedureCall, values: dict[str, Any]) -> dict[str, Any] | None:
        """Make a call that gives something back. ``None``: the session has surely ended, and so it was given back."""
        try:
            return session.run(call, values | {"record": self.record})
        except BackendError:
            if session.ended:  # the server frees the locks; the row is seen to when it can be
                self.bury(session)
            if session.surely_ended:
                return None
            raise

    def _see_to_row(self, holding: Holding, row: dict[str, Any]) -> None:
        """After a call whose locks are free: if a row could not be written, free it now."""
        if row["error"]:
            logger.warning("A row of %r could not be freed with its lock: %s", self.alias, row["why"])
            with contextlib.suppress(BackendError):
                self._forget(holding)

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

    def downgrade(self, session: LockSession, key: str, *, keep: bool) -> bool:
        """End the upgrade on this session, whose turn it is, and unless it is to ``keep`` that, its permit.

        Returns whether there was what ends.
        """
        reader = session.held.get(line_of(key, UPDATE))
        upgraded = session.held.get(line_of(key, UPGRADE))
        if reader is None:
            return False
        values = _names(reader) | {"keep": keep, "permit": reader.permit_id}
        row = self._give(session, calls.BE_READER, values)
        if row is None:
            return False
        session.unclear.pop(line_of(key, UPGRADE), None)
        if upgraded is not None:
            self.pool.forget(session, upgraded)
        if not keep or row["freed"]:
            self.pool.forget(session, reader)
        if keep and row["freed"]:
            self._displaced.add(reader.permit_id)
            self._lose(reader, Loss(LossReason.CUT_OFF, DISPLACED))
        if not keep:
            self._see_to_row(reader, row)
        return upgraded is not None if keep else bool(row["freed"])

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
                        self.downgrade(session, resource.key, keep=True)
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


def _names(holding: Holding) -> dict[str, Any]:
    return {"base": holding.names.base, "key": holding.key}
