"""Upgrades on application locks: an upgradable reader's lock of the name is converted, on the session that has it.

That session is kept for its permit alone, so whoever waits may wait on it: in short steps, as it has to go on proving
that it stands, and can't be cut off without losing the permit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from django_sqlsem.backends.applock import calls
from django_sqlsem.backends.applock.acquire import Answer
from django_sqlsem.backends.applock.held import Holding
from django_sqlsem.backends.applock.line import Line, LineParts
from django_sqlsem.backends.base import Granted
from django_sqlsem.core.modes import UPGRADE, WRITER, line_of
from django_sqlsem.database.sqlserver import failure
from django_sqlsem.exceptions import BackendError, PermitLostError
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django_sqlsem.backends.applock.pool import LockPool
    from django_sqlsem.backends.applock.possession import Possession
    from django_sqlsem.backends.applock.sessions import LockSession
    from django_sqlsem.backends.base import Request


#: One step of waiting for the readers to leave, in milliseconds.
STEP_MS: Final = 250
#: What others get of the session between two of them, in seconds.
BETWEEN: Final = 0.002
#: For how long its turn on the session is waited for, in seconds.
ITS_TURN: Final = 5.0


class Upgrades:
    """Makes upgradable readers writers."""

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
            self.possession.downgrade(session, key, keep=True)
        record = self.possession.record
        # If this is cut short, it is ended before anything else is done here.
        session.unclear[line] = (reader.names, None, record)
        values: dict[str, Any] = {"base": reader.names.base, "key": key, "record": record}
        values |= {"slots": request.slots or 0, "timeout": timeout, "close": close, "permit": reader.permit_id}
        try:
            row = session.run(calls.BE_WRITER, values)
        except BackendError:
            if session.ended:
                self.possession.bury(session)
            else:
                self.possession.downgrade(session, key, keep=True)
            raise
        result = int(row["result"])
        if result == calls.TAKEN_AT_ONCE:
            whole = tuple(range(WRITER + 1, int(row["bound"]) + 1))
            holding = Holding(request.permit_id, reader.names, key, (WRITER,), reader.tokens, whole, UPGRADE)
            self.pool.note(session, holding)
            session.unclear.pop(line, None)
            return Answer(Granted(request.permit_id, holding.grant(), request.lease), result)
        if not close or result not in (calls.BUSY, calls.ON_HOLD):
            self.possession.downgrade(session, key, keep=True)  # it may have been converted, and not be alone yet
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
                    self.possession.downgrade(found[0], key, keep=True)


class UpgradeParts(LineParts, Protocol):
    """What such a line needs of the backend."""

    upgrades: Upgrades


class UpgradeLine(Line):
    """The thread that waits for an upgrade, on the session of the upgradable reader."""

    def __init__(self, server: UpgradeParts, ended: Callable[[Line], bool]) -> None:
        super().__init__(server, ended)
        self.upgrades = server.upgrades

    def stand(self) -> None:
        """Ask again and again, until there is a grant or nobody wants one."""
        key = ""
        try:
            while (request := self._wanted()) is not None:
                key = request.resource.key
                self.is_head = True
                if self._step(request):
                    key = ""
                    return
                threading.Event().wait(BETWEEN)
        finally:
            self.is_head = False
            if key:
                self.upgrades.stop(key)

    def _step(self, request: Request) -> bool:
        with self._lock:
            if request.permit_id not in self._claims:
                return False
            _request, place = self._claims[request.permit_id]
        left = STEP_MS if place.patience is None else min(STEP_MS, 1 + int(place.patience * 1000))
        answer = self.upgrades.ask(request, left, close=True, wanted=lambda: self.waits_for(request.permit_id))
        if answer.granted is None:
            if answer.result == calls.ON_HOLD:
                threading.Event().wait(STEP_MS / 1000)
            return False
        self._hand_over(None, request, answer)
        return True
