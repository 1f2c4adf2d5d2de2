"""The handle of claimed rows, for one block: it takes rows under a permit, and lets go of them under the same one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections
from django.db.models import Model, QuerySet

from django_sqlsem.claims.rows import (
    Outcome,
    StatusColumn,
    give_back_abandoned,
    is_due,
    let_go,
    looking,
    refuse_atomic,
    take,
)
from django_sqlsem.core.durations import UNSET, Unset
from django_sqlsem.core.text import shown
from django_sqlsem.database import transactions
from django_sqlsem.database.errors import database_errors
from django_sqlsem.exceptions import BackendError, PermitLostError, SemaphoreError
from django_sqlsem.locks.permit import Permit
from django_sqlsem.locks.semaphore import Semaphore
from django_sqlsem.models import ClaimRow
from django_sqlsem.runtime import callers

logger = logging.getLogger("django_sqlsem")

M = TypeVar("M", bound=Model)

_NEW: Final = "new"
_OPEN: Final = "open"
_OVER: Final = "over"


class Claim(Generic[M]):
    """The rows that one block has claimed: iterate over it, or take its only row as ``one``. Empty, it is false.

    Made by ``claim()``, for one ``with`` or ``async with`` block.
    """

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
        self._state = _NEW
        self._rows: list[M] = []
        #: What has not been let go of, by primary key.
        self._open: dict[str, M] = {}
        #: What was noted of the rows, by primary key.
        self._claimed: dict[str, ClaimRow] = {}
        #: What was let go of inside the caller's own transaction, which may still be rolled back.
        self._inside: dict[str, M] = {}

    @property
    def rows(self) -> tuple[M, ...]:
        """The rows that were claimed, in the queryset's order."""
        if self._state is _NEW:
            raise RuntimeError("Nothing is claimed before the block: write `with claim(...) as rows:`.")
        return tuple(self._rows)

    @property
    def one(self) -> M | None:
        """The only row, or ``None`` if there was none. Raises ``ValueError`` if there are several."""
        if len(self.rows) > 1:
            raise ValueError(f"{len(self.rows)} rows were claimed: iterate over them.")
        return self.rows[0] if self.rows else None

    def __iter__(self) -> Iterator[M]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> M:
        return self.rows[index]

    def __repr__(self) -> str:
        return f"<Claim of {self._column}: {self._state}, {len(self._rows)} rows>"

    def check(self) -> None:
        """Raise ``PermitLostError`` if the rows are no longer ours. No database access."""
        if self.permit is not None:
            self.permit.check()

    @property
    def stop_requested(self) -> bool:
        """Whether an operator asks this worker to stop. The rows are its own all the same. No database access."""
        return self.permit is not None and self.permit.stop_requested

    @property
    def stop_requested_by(self) -> str:
        """By whom it was asked; empty if by nobody."""
        return "" if self.permit is None else self.permit.stop_requested_by

    def on_stop_requested(self, callback: Callable[[Permit], object]) -> None:
        """Have ``callback(permit)`` called if an operator asks this worker to stop; see ``Permit``."""
        if self.permit is not None:
            self.permit.on_stop_requested(callback)

    def finish(self, row: M, status: Any = UNSET) -> bool:
        """Give one row its final status now: ``status``, else the claim's ``done``.

        Inside ``atomic()`` it is committed together with what else is written there. Returns ``False``, and writes
        nothing, if the status was changed by somebody else meanwhile. Raises ``PermitLostError``; ``ValueError`` if
        the row is not claimed here (any more), or the status is the claim's ``status`` or none that the field can take;
        ``BackendError``.
        """
        then = self.done if isinstance(status, Unset) else self._column.value(status, what="status")
        if self._column.text(then) == self._column.text(self.status):
            raise ValueError(f"finish() needs another status than {shown(then)}, that of rows which are worked on.")
        key = self._key(row)
        return self._finish({key: row}, then)[key] is Outcome.WRITTEN

    def give_back(self, row: M) -> bool:
        """Give one row back now, for others to take: see ``finish()``."""
        key = self._key(row)
        return self._let_go({key: row}, self.from_status)[key] is Outcome.WRITTEN

    async def afinish(self, row: M, status: Any = UNSET) -> bool:
        """Do what ``finish()`` does, from a coroutine."""
        return await sync_to_async(self.finish)(row, status)

    async def agive_back(self, row: M) -> bool:
        """Do what ``give_back()`` does, from a coroutine."""
        return await sync_to_async(self.give_back)(row)

    # The block.

    def __enter__(self) -> Claim[M]:
        if self._look():
            permit = self._semaphore.acquire()
            try:
                self._take(permit)
            finally:
                if self.permit is None:
                    permit._close()
        return self

    async def __aenter__(self) -> Claim[M]:
        if await sync_to_async(self._look)():
            permit, entered = await self._semaphore.aacquire(), False
            try:
                await callers.to_its_end(self._take, permit)
                entered = self.permit is not None
            except asyncio.CancelledError as error:
                await callers.to_its_end(self._end, error)  # there is no block that would give back what was taken
                raise
            finally:
                if not entered:
                    await permit._aclose()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state = _OVER
        if self.permit is None or self.permit._acquisition.foreign:  # in a forked child the rows are the parent's
            return
        try:
            self._end(exc)
        finally:
            self.permit._close()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state = _OVER
        if self.permit is None or self.permit._acquisition.foreign:  # in a forked child the rows are the parent's
            return
        try:
            await callers.to_its_end(self._end, exc)
        finally:
            await self.permit._aclose()

    # Its steps. They block: a coroutine runs them in a thread.

    def _look(self) -> bool:
        """Give back what was abandoned, if it is time to look, and tell whether there is anything to take."""
        if self._state is not _NEW:
            raise RuntimeError("A claim is for one block: call claim() anew for the next one.")
        alias = self._candidates.db
        refuse_atomic(connections[alias], "claim()")
        self._state = _OPEN
        keeper = self._semaphore._keeper()
        if is_due(keeper, self._column.resource.key):
            give_back_abandoned(keeper, self._column)
        with database_errors(alias), looking(alias):
            return self._candidates.exists()

    def _take(self, permit: Permit) -> None:
        """Take rows, and keep the permit if there are any."""
        permit.detach()  # it belongs to the rows: a block inside this one may claim others
        if permit.token is None:
            raise SemaphoreError(
                'claim() must know a worker\'s permit by its token, and here is none: set SQLSEM["RECORD"] to True.'
            )
        taken = take(
            self._candidates,
            self._column,
            permit.slot,
            permit.token,
            n=self._n,
            from_status=self.from_status,
            status=self.status,
        )
        self._rows = [row for row, _claimed in taken]
        self._claimed = {claimed.object_pk: claimed for _row, claimed in taken}
        self._open = dict(zip(self._claimed, self._rows, strict=True))
        self.permit = permit if taken else None

    def _must_stand(self) -> None:
        """Raise ``PermitLostError`` if the permit is lost, or is no longer there in the database."""
        permit = self.permit
        assert permit is not None  # noqa: S101
        permit.check()
        keeper = permit._acquisition.keeper
        if (permit.slot, permit.token) not in keeper.backend.standing(keeper.session_here(), self._column.resource):
            keeper.renew_now(permit._acquisition)  # it finds out why
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
        outcomes = let_go(column, alias, [(self._claimed[key], then) for key in rows])
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

    def _key(self, row: M) -> str:
        if not isinstance(row, self._column.model):
            raise TypeError(f"A claimed row is an instance of {self._column.model.__name__}, not {shown(row)}.")
        key = self._column.pk_text(row)
        if key not in self._open and not self._is_open_again(key):
            raise ValueError(f"{shown(row)} is not claimed by this block, or was finished or given back already.")
        return key

    def _is_open_again(self, key: str) -> bool:
        """Whether a row was let go of in a transaction, or behind a savepoint, that was rolled back."""
        if key not in self._inside:
            return False
        alias, claimed = self._candidates.db, self._claimed[key]
        owned = {name: getattr(claimed, name) for name in ("key", "object_pk", "slot", "token")}
        with database_errors(alias):
            return ClaimRow._default_manager.using(alias).filter(**owned).exists()
