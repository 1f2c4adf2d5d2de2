"""Fences of application locks: the caller's own transaction keeps a permit's slots from being taken until it ends.

The transaction takes locks of its own (``internal_fence_1``), and then the permit's session proves that it still has
its slots. Whoever gets one of those slots later looks for such locks, and stands behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends.applock import calls
from django_sqlsem.core.modes import UPGRADE, line_of
from django_sqlsem.database import transactions
from django_sqlsem.database.raw import results_of
from django_sqlsem.database.sessions import CallerSession
from django_sqlsem.database.sqlserver import failure
from django_sqlsem.exceptions import BackendError, SemaphoreError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.backends.applock.held import Holding
    from django_sqlsem.backends.applock.pool import LockPool
    from django_sqlsem.backends.applock.possession import Possession
    from django_sqlsem.backends.applock.sessions import LockSession
    from django_sqlsem.backends.base import Acquired


#: How long a transaction waits for its fence, in milliseconds: for whoever has taken the slot by then.
PATIENCE_MS: Final = 2000
#: How long it waits for its turn on the permit's session, in seconds.
PROOF_WITHIN: Final = 10.0
_REFUSED: Final = -1

_ROW: Final = (
    "EXISTS (SELECT 1 FROM sqlsem_slot WITH (FORCESEEK) WHERE semaphore_key = %s AND slot = %s AND token = %s"
    " AND permit_id = %s) AND APPLOCK_TEST(N'public', %s, N'Exclusive', N'Session') = 0"
)


class Fencing:
    """Fences the caller's transactions and statements."""

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
        values: list[Any] = [holding.key, "" if whole else holding.csv, PATIENCE_MS]
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
