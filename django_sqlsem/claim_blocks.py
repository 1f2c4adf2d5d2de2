"""What one block of a claim does: it looks, takes rows under a permit, and lets go of them under the same permit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from django.db import Error as DatabaseError
from django.db import connections
from django.db.models import Model, QuerySet

from django_sqlsem import transactions
from django_sqlsem.backends.owners import standing
from django_sqlsem.claim_recovery import give_back_abandoned, is_due
from django_sqlsem.claim_rows import Ending, Outcome, Owner, let_go, refuse_atomic, take
from django_sqlsem.exceptions import AcquireTimeoutError, BackendError, PermitLostError, SemaphoreError
from django_sqlsem.sessions import backend_error
from django_sqlsem.wording import shown

if TYPE_CHECKING:
    from django_sqlsem.claim_columns import StatusColumn
    from django_sqlsem.permits import Permit
    from django_sqlsem.semaphores import Semaphore

logger = logging.getLogger("django_sqlsem")

M = TypeVar("M", bound=Model)

NEW: Final = "new"
OPEN: Final = "open"
OVER: Final = "over"
#: How often a worker asks again for a slot that it was refused although some are free.
TRIES: Final = 10


class ClaimBlock(Generic[M]):
    """The state of one block, and its steps. They block: a coroutine runs them in a thread."""

    def __init__(
        self,
        candidates: QuerySet[M],
        column: StatusColumn,
        semaphore: Semaphore,
        *,
        n: int,
        from_status: Any,
        status: Any,
        done: Any,
    ) -> None:
        self.from_status = from_status
        self.status = status
        self.done = done
        #: The permit under which the rows are worked on; ``None`` if there are none.
        self.permit: Permit | None = None
        self._candidates = candidates
        self._column = column
        self._semaphore = semaphore
        self._n = n
        self._state = NEW
        self._rows: list[M] = []
        #: What has not been let go of, by primary key.
        self._open: dict[str, M] = {}
        #: What was let go of inside the caller's own transaction, which may still be rolled back.
        self._inside: dict[str, M] = {}

    def _look(self) -> bool:
        """Give back what was abandoned, if it is time to look, and tell whether there is anything to take."""
        if self._state is not NEW:
            raise RuntimeError("A claim is for one block: call claim() anew for the next one.")
        alias = self._candidates.db
        refuse_atomic(connections[alias], "claim()")
        self._state = OPEN
        keeper = self._semaphore._keeper()
        if is_due(keeper, self._column.resource.key):
            give_back_abandoned(keeper, self._column)
        try:
            return self._candidates.exists()
        except DatabaseError as error:
            raise backend_error(alias, error) from error

    def _acquire(self) -> Permit:
        for _nth in range(TRIES):
            try:
                return self._semaphore.acquire()
            except AcquireTimeoutError as error:
                if not _is_passing(error):
                    raise
        return self._semaphore.acquire()

    async def _aacquire(self) -> Permit:
        for _nth in range(TRIES):
            try:
                return await self._semaphore.aacquire()
            except AcquireTimeoutError as error:
                if not _is_passing(error):
                    raise
        return await self._semaphore.aacquire()

    def _keep(self, permit: Permit) -> None:
        self.permit = permit
        permit.detach()  # it belongs to the rows: a block inside this one may claim others

    def _forget(self) -> Permit:
        """Let go of the permit: there was nothing to take."""
        assert self.permit is not None  # noqa: S101
        permit, self.permit = self.permit, None
        return permit

    def _abandon(self) -> None:
        """Something struck: have the permit given back. Whoever comes next finds the rows without a worker."""
        if self.permit is not None:
            self.permit._abandon()

    def _take(self) -> bool:
        self._rows = take(
            self._candidates,
            self._column,
            self._owner(),
            n=self._n,
            from_status=self.from_status,
            status=self.status,
        )
        self._open = {self._column.pk_text(row): row for row in self._rows}
        return bool(self._rows)

    def _owner(self) -> Owner:
        permit = self.permit
        assert permit is not None  # noqa: S101
        if permit.token is None:
            raise SemaphoreError(
                'claim() must know a worker\'s permit by its token, and here is none: set SQLSEM["RECORD"] to True.'
            )
        return Owner(self._column.resource.key, permit.slot, permit.token)

    def _must_stand(self) -> None:
        """Raise ``PermitLostError`` if the permit is lost, or is no longer there in the database."""
        permit = self.permit
        assert permit is not None  # noqa: S101
        permit.check()
        keeper = permit._hold.keeper
        if (permit.slot, permit.token) not in standing(keeper.backend, keeper.session_here(), self._column.resource):
            keeper.renew_now(permit._hold)  # it finds out why
            raise PermitLostError(f"The permit of {permit.name!r} was lost: its slot was revoked or taken.")

    def _end(self, exc: BaseException | None) -> None:
        """Set the final status if all went well; else give back what is left."""
        if exc is None and self._open:
            try:
                self._finish(dict(self._open), self.done)
            except PermitLostError:
                self._give_back(self._open)
                raise
        elif self._open:
            self._give_back(self._open)
        if self._inside and not transactions.in_transaction(connections[self._candidates.db]):
            self._give_back(self._inside, quiet=True)  # which does nothing to what was committed

    def _give_back(self, rows: dict[str, M], *, quiet: bool = False) -> None:
        """Give rows back. The caller's own error must not be hidden by one that the next worker will mend."""
        try:
            self._let_go(dict(rows), self.from_status, quiet=quiet)
        except BackendError as error:
            extra = {"semaphore": self._semaphore.name, "what": "release_failed"}
            logger.error(
                "Rows of %s are left to the next worker to be given back: %s", self._column, error, extra=extra
            )

    def _let_go(self, rows: dict[str, M], then: Any, *, quiet: bool = False) -> dict[str, Outcome]:
        alias, column = self._candidates.db, self._column
        inside = transactions.in_transaction(connections[alias])
        owner = self._owner()
        outcomes = let_go(column, alias, [Ending(owner, key, column.pk_from(key), self.status, then) for key in rows])
        for key, outcome in outcomes.items():
            row = rows[key]
            self._open.pop(key, None)
            if outcome is Outcome.WRITTEN:
                column.set(row, then)
                if inside:
                    self._inside[key] = row
            elif not quiet:
                why = "somebody else has it" if outcome is Outcome.NOT_OURS else "its status was changed meanwhile"
                extra = {"semaphore": self._semaphore.name, "what": "claim_left", "object": key}
                logger.warning("%s of %s was left alone: %s.", shown(row), column, why, extra=extra)
        return outcomes

    def _finish(self, rows: dict[str, M], then: Any) -> dict[str, Outcome]:
        """Let go of rows whose work is done. Raises ``PermitLostError``."""
        self._must_stand()
        outcomes = self._let_go(rows, then)
        if Outcome.NOT_OURS in outcomes.values():
            # Its status was set back by hand, or the process was stopped since it looked: the caller must be told.
            self._must_stand()
        return outcomes


def _is_passing(error: AcquireTimeoutError) -> bool:
    """Whether slots are free all the same: who comes while another process makes them may see none."""
    found = error._snapshot
    return found is not None and not found.paused and not found.waiting and found.held < found.slots
