"""The handle of claimed rows. All state of a claim lives here: it is made by ``claim()``, for one block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from asgiref.sync import sync_to_async
from django.db.models import Model

from django_sqlsem.claim_blocks import NEW, OVER, ClaimBlock
from django_sqlsem.claim_rows import Outcome
from django_sqlsem.timeouts import UNSET, Unset
from django_sqlsem.wording import shown

if TYPE_CHECKING:
    from django_sqlsem.permits import Permit

M = TypeVar("M", bound=Model)


class Claim(ClaimBlock[M]):
    """The rows that one block has claimed: iterate over it, or take its only row as ``one``. Empty, it is false.

    Made by ``claim()``, for one ``with`` or ``async with`` block.
    """

    @property
    def rows(self) -> tuple[M, ...]:
        """The rows that were claimed, in the queryset's order."""
        if self._state is NEW:
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
        the row is not claimed here (any more) or the field can't take the status; ``BackendError``.
        """
        then = self.done if isinstance(status, Unset) else self._column.value(status, what="status")
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
            self._keep(self._acquire())
            try:
                if self._take():
                    return self
                self._forget()._close()
            except BaseException:
                self._abandon()
                raise
        return self

    async def __aenter__(self) -> Claim[M]:
        if await sync_to_async(self._look)():
            self._keep(await self._aacquire())
            try:
                if await sync_to_async(self._take)():
                    return self
                await self._forget()._aclose()
            except BaseException:
                self._abandon()
                raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state = OVER
        if self.permit is None or self.permit._hold.foreign:  # in a forked child the rows are the parent's
            return
        try:
            try:
                self._end(exc)
            finally:
                self.permit._close()
        except BaseException:
            self._abandon()
            raise

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state = OVER
        if self.permit is None or self.permit._hold.foreign:  # in a forked child the rows are the parent's
            return
        try:
            try:
                await sync_to_async(self._end)(exc)
            finally:
                await self.permit._aclose()
        except BaseException:
            self._abandon()
            raise

    def _key(self, row: M) -> str:
        if not isinstance(row, self._column.model):
            raise TypeError(f"A claimed row is an instance of {self._column.model.__name__}, not {shown(row)}.")
        key = self._column.pk_text(row)
        if key not in self._open:
            raise ValueError(f"{shown(row)} is not claimed by this block, or was finished or given back already.")
        return key
