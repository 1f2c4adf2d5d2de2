"""Upgrades on application locks: an upgradable reader's lock of the name is converted, on the session that has it.

That session is kept for its permit alone, so whoever waits may wait on it: in short steps, as it has to go on proving
that it stands, and can't be cut off without losing the permit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from django_sqlsem.backends.applock.acquire import NO_STAND, Answer, ApplockClaims, Stand, holder_values
from django_sqlsem.backends.applock.held import Holding
from django_sqlsem.backends.applock.queue import Claimant, Line
from django_sqlsem.backends.applock.tsql import parts, upgrades
from django_sqlsem.backends.base import Granted
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.modes import UPGRADE, WRITER, line_of
from django_sqlsem.database.sqlserver import failure
from django_sqlsem.exceptions import BackendError, PermitLostError
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django_sqlsem.backends.applock.sessions import LockSession
    from django_sqlsem.backends.base import Request
    from django_sqlsem.database.sqlserver import LockNames


#: One step of waiting for the readers to leave, in milliseconds.
STEP_MS: Final = 250
#: What others get of the session between two of them, in seconds.
BETWEEN: Final = 0.002
#: For how long its turn on the session is waited for, in seconds.
TURN: Final = 5.0


class ApplockUpgrades(ApplockClaims):
    """Makes upgradable readers writers."""

    def try_claim(self, request: Request, stand: Stand = NO_STAND) -> Answer:
        """Claim without waiting."""
        return self.try_upgrade(request, stand) if request.mode == UPGRADE else super().try_claim(request, stand)

    def try_upgrade(self, request: Request, stand: Stand) -> Answer:
        """Ask once for the upgrade, for ``stand.budget`` milliseconds.

        With a ticket, newcomers are kept out until there is a grant, or ``stop_upgrading`` is called. Raises
        ``PermitLostError`` if there is no upgradable reader.
        """
        found = self.pool.upgradable(request.resource.key)
        if found is None:
            loss = Loss(LossReason.SESSION_ENDED, "its database session has ended")
            raise PermitLostError(f"The permit of {request.resource.name!r} was lost: {loss}.", loss=loss)
        session, reader = found
        with self.pool.own(session, timeout=TURN) as had:
            if not had or session.ended:
                return Answer(None, parts.BUSY)
            if session.held.get(reader.line) is reader:
                return self._upgrade(session, reader, request, stand)
        return self.try_upgrade(request, stand)  # that one was just released

    def _upgrade(self, session: LockSession, reader: Holding, request: Request, stand: Stand) -> Answer:
        key, line, in_line = request.resource.key, request.line, bool(stand.ticket)
        if line_of(key, UPGRADE) in session.held:  # the keeper and the line have asked at the same moment
            return Answer(None, parts.BUSY)
        if line in session.unclear:
            self.settle(session, key, keep=True)
        # If this is cut short, it is settled before anything else is done here.
        session.unclear[line] = (reader.names, 0)
        try:
            batch = upgrades.upgrade(record=self.record, in_line=in_line)
            row = session.run(batch, _values(session, reader, request, stand))
        except BackendError:
            if session.ended:
                self.bury(session)
            else:
                self.settle(session, key, keep=True, ticket=stand.ticket)
            raise
        status = int(row["status"])
        if status == parts.DONE:
            whole = tuple(range(WRITER + 1, int(row["bound"]) + 1))
            holding = Holding(request.permit_id, reader.names, key, (WRITER,), reader.tokens, whole, UPGRADE)
            self.pool.note(session, holding)
            session.unclear.pop(line, None)
            return Answer(Granted(request.permit_id, holding.grant(), request.lease), status)
        if row["mode"] != "Update" and not (in_line and status in (parts.BUSY, parts.PAUSED)):
            self.settle(session, key, keep=True, ticket=stand.ticket)
        session.unclear.pop(line, None)
        if status not in (parts.BUSY, parts.PAUSED):
            raise failure(self.alias, status)
        return Answer(None, status)

    def stop_upgrading(self, key: str, ticket: str) -> None:
        """Let newcomers in again, as nobody waits for the upgrade any more. Raises ``BackendError``."""
        found = self.pool.upgradable(key)
        if found is not None:
            with self.pool.own(found[0]):
                if not found[0].ended and line_of(key, UPGRADE) not in found[0].held:
                    self.settle(found[0], key, keep=True, ticket=ticket)


class Upgrader(Claimant, Protocol):
    """What such a line needs of the backend."""

    def try_upgrade(self, request: Request, stand: Stand) -> Answer:
        """Ask once for the upgrade."""

    def stop_upgrading(self, key: str, ticket: str) -> None:
        """Let newcomers in again."""


class UpgradeLine(Line):
    """The thread that waits for an upgrade, on the session of the upgradable reader."""

    def __init__(self, claimant: Upgrader, names: LockNames, ended: Callable[[Line], bool]) -> None:
        super().__init__(claimant, names, ended)
        self.upgrader = claimant

    def stand(self) -> None:
        """Ask again and again, until there is a grant or nobody wants one."""
        key = ""
        try:
            while (request := self._wanted()) is not None:
                key = request.resource.key
                self.is_head = True
                if self._step(request):
                    self._in_line = False
                    return
                threading.Event().wait(BETWEEN)
        finally:
            self.is_head = False
            if self._in_line:
                self._in_line = False
                self.upgrader.stop_upgrading(key, self.ticket)

    def _step(self, request: Request) -> bool:
        with self._lock:
            if request.permit_id not in self._claims:
                return False
            _request, place = self._claims[request.permit_id]
        left = STEP_MS if place.patience is None else min(STEP_MS, 1 + int(place.patience * 1000))
        self._in_line = True
        answer = self.upgrader.try_upgrade(request, Stand(self.ticket, place.waiting, None, place.arrived, left))
        if answer.granted is None:
            if answer.status == parts.PAUSED:
                threading.Event().wait(STEP_MS / 1000)
            return False
        self._hand_over(None, request, answer.granted)
        return True


def _values(session: LockSession, reader: Holding, request: Request, stand: Stand) -> dict[str, Any]:
    return holder_values(request) | {
        "stamp": session.stamp,
        "base": reader.names.base,
        "gate": reader.names.gate,
        "slot": WRITER,
        "slots": request.slots or 0,
        "take": request.take,
        "budget": stand.budget,
        "permit": reader.permit_id,
        "ticket": stand.ticket,
        "waiting": stand.waiting,
        "age": max(0, int((boot_now() - stand.arrived) * 1e6)),
    }
