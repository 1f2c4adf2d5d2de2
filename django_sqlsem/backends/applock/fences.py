"""Fences of application locks: the caller's own transaction keeps a permit's slots from being taken until it ends.

The transaction takes locks of its own (``applock_fence_sql``), and then the permit's session proves that it still has
its slots. Whoever gets one of those slots later looks for such locks, and stands behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends.applock.possession import ApplockHolding
from django_sqlsem.backends.applock.tsql.fences import HOLD
from django_sqlsem.backends.applock.tsql.parts import SEEK
from django_sqlsem.core.modes import UPGRADE, line_of
from django_sqlsem.database import transactions
from django_sqlsem.database.sessions import CallerSession
from django_sqlsem.database.sqlserver import failure
from django_sqlsem.exceptions import BackendError, SemaphoreError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.backends.applock.held import Holding
    from django_sqlsem.backends.applock.sessions import LockSession
    from django_sqlsem.backends.base import Acquired
    from django_sqlsem.database.sessions import Session
    from django_sqlsem.snapshots import Loss


#: How long a transaction waits for its fence, in milliseconds: for whoever has taken the slot by then.
PATIENCE_MS: Final = 2000
#: How long it waits for its turn on the permit's session, in seconds.
TURN: Final = 10.0
_REFUSED: Final = -1

_ROW: Final = (
    f"EXISTS (SELECT 1 FROM sqlsem_slot {SEEK} WHERE semaphore_key = %s AND slot = %s AND token = %s"
    " AND permit_id = %s) AND APPLOCK_TEST(N'public', %s, N'Exclusive', N'Session') = 0"
)


class ApplockFencing(ApplockHolding):
    """Fences the caller's transactions and statements."""

    def fence(self, caller: BaseDatabaseWrapper, session: Session, held: Acquired) -> bool:
        """Fence the caller's transaction. Return whether the permit is live, and stays untaken until that ends."""
        self._need_rows()
        found = self.pool.holder(held.permit_id)
        if found is None:
            return False
        own, holding = found
        whole = bool(holding.whole) or line_of(holding.key, UPGRADE) in own.held
        values: list[Any] = [holding.names.fence, "Shared" if whole else "IntentShared"]
        values += ["" if whole else f"{','.join(map(str, holding.slots))},", PATIENCE_MS]
        status = CallerSession(caller).run(lambda cursor: _ask(cursor, HOLD, values))
        if status < 0 and status != _REFUSED:
            raise failure(caller.alias, status)
        live = self._has(own, holding)
        if live and status < 0:
            raise BackendError(f"The database {self.alias!r} failed: {held.resource.name!r} could not be fenced")
        return live

    def fate(self, session: Session, held: Acquired) -> Loss | None:
        """Return how a grant was lost."""
        return self.taken_away(held)

    def fenced_sql(self, caller: BaseDatabaseWrapper, held: Acquired) -> tuple[str, list[Any]]:
        """Return a condition that the slots' rows are the permit's, and that their locks are taken.

        In a transaction it fences that first: else somebody might get the slot while the statement runs.
        """
        self._need_rows()
        if transactions.in_transaction(caller) and not self.fence(caller, self.pool, held):
            return "1 = 0", []
        found = self.pool.holder(held.permit_id)
        if found is None:
            return "1 = 0", []
        holding, parameters = found[1], []
        for slot, token in zip(holding.slots, holding.tokens, strict=True):
            parameters += [holding.key, slot, token, holding.permit_id, holding.names.slot(slot)]
        return f"({' AND '.join([_ROW] * len(holding.slots))})", parameters

    def _need_rows(self) -> None:
        if not self.record:
            raise SemaphoreError(
                f"Fences need lock rows, and SQLSEM['RECORD'] is off for {self.alias!r}: nothing tells who has a slot."
            )

    def _has(self, own: LockSession, holding: Holding) -> bool:
        """Have a session prove by a statement sent now that it still has a permit's locks."""
        with self.pool.own(own, timeout=TURN) as had:
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
            self.bury(own)
            return False


def _ask(cursor: Any, text: str, values: list[Any]) -> int:
    cursor.execute(text, values)
    while cursor.description is None:  # some servers send a word about each refused lock
        if not cursor.nextset():
            raise RuntimeError("the server sent no result")
    return int(cursor.fetchone()[0])
