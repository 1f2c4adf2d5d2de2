"""The permit: the handle of one grant. All state of an acquisition lives here, never on the semaphore."""

from __future__ import annotations

import datetime
import logging
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from django_sqlsem import fences, losses, notices, scopes, stops, transactions
from django_sqlsem.backends import database_for
from django_sqlsem.clocks import boot_now
from django_sqlsem.exceptions import BackendError, PermitLostError
from django_sqlsem.holds import Hold, State
from django_sqlsem.naming import Name, key_of, validate_name
from django_sqlsem.snapshots import Loss
from django_sqlsem.wording import numbers, shown

if TYPE_CHECKING:
    from django_sqlsem.backends.base import Grant
    from django_sqlsem.semaphores import Semaphore

logger = logging.getLogger("django_sqlsem")


class Permit:
    """One grant of one or more slots. Made by ``Semaphore.acquire`` and its kin only.

    A permit is also a context manager that releases at its end. One that is garbage-collected while it is held is
    given back, and logged as an ERROR.
    """

    def __init__(self, semaphore: Semaphore, hold: Hold) -> None:
        self.semaphore = semaphore
        self._hold = hold
        hold.permit = weakref.ref(self)

    @property
    def name(self) -> str:
        """The semaphore's name."""
        return self._hold.claim.resource.name

    @property
    def slot(self) -> int:
        """The number of the slot, from 1; of several, the lowest."""
        return self._grant.slots[0]

    @property
    def slots(self) -> tuple[int, ...]:
        """The numbers of all its slots, ascending."""
        return self._grant.slots

    @property
    def token(self) -> int | None:
        """The fencing token: it grows with every grant of one slot. Of several slots, the lowest slot's.

        ``None`` where no rows are kept: ``SQLSEM["RECORD"]`` on SQL Server.
        """
        return self._grant.tokens[0] if self._grant.tokens else None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The fencing tokens of ``slots``, in their order."""
        return self._grant.tokens

    @property
    def waited(self) -> float:
        """Seconds that the acquire waited for it.

        Exactly 0 if its own claim was granted at once; more if it was granted after somebody else had held or stood
        before it.
        """
        return self._hold.waited

    @property
    def expires_at(self) -> datetime.datetime:
        """When it will be lost unless it is renewed before: an aware instant on this host's clock, for display."""
        left = self._hold.deadline - boot_now()
        return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=left)

    @property
    def lost(self) -> Loss | None:
        """How the permit was lost, or ``None`` while it is ours. Decided when read, and for good."""
        return self._hold.current_loss()

    @property
    def released(self) -> bool:
        """Whether it has been given back, or will be when the transaction that is fenced with it ends."""
        return self._hold.releasing.locked() or self._hold.release_wanted

    def check(self) -> None:
        """Raise ``PermitLostError`` if the permit is no longer ours: lost, or released already. No database access."""
        loss = self.lost
        if loss is not None:
            raise PermitLostError(f"The permit of {self.name!r} was lost: {loss}.", loss=loss)
        if self.released:
            raise PermitLostError(f"The permit of {self.name!r} was released already.")

    def fence(self, using: str | None = None) -> None:
        """Make the calling thread's transaction fail unless the permit is live by the database's clock at this moment.

        Until that transaction ends, nobody can take any of the slots over, revoke or purge them, and a release of the
        permit waits for its end. ``using`` is the alias of the transaction's database, which must be the one that
        keeps the locks (else ``ValueError``). Outside a transaction it raises ``TransactionManagementError``, and
        ``PermitLostError`` when the permit is not live: the transaction is then rolled back even if that is caught.
        Raises ``BackendError`` if the database failed, and ``SemaphoreError`` where nothing is recorded.
        """
        fences.fence(self, using)

    def on_lost(self, callback: Callable[[Permit], object]) -> None:
        """Have ``callback(permit)`` called, on a thread of its own, if the permit is lost; at once if it already is."""
        if not callable(callback):
            raise TypeError(f"on_lost takes a callable, not {shown(callback)}.")
        self._hold.callbacks.append(callback)
        if self._hold.loss is not None:
            losses.call_back_soon(callback, self)

    @property
    def stop_requested(self) -> bool:
        """Whether an operator asks its holder to stop. The permit is its own all the same. No database access."""
        return bool(self._hold.stop_by)

    @property
    def stop_requested_by(self) -> str:
        """By whom its holder was asked to stop first; empty if by nobody."""
        return self._hold.stop_by

    def on_stop_requested(self, callback: Callable[[Permit], object]) -> None:
        """Have ``callback(permit)`` called once, on a thread of its own, if an operator asks its holder to stop.

        At once if one has asked already. Its exception is logged. Raises ``TypeError`` for what can't be called.
        """
        if not callable(callback):
            raise TypeError(f"on_stop_requested takes a callable, not {shown(callback)}.")
        stops.call_back(self._hold, callback)

    def release(self) -> None:
        """Give the slots back. Idempotent; removes only what this very permit holds.

        Raises ``BackendError`` if the database failed. The permit counts as released all the same: the keeper goes
        on trying, and the lease ends it at the latest. In a coroutine it leaves all of that to the keeper, and
        returns at once: ``arelease()`` waits for it. While a transaction that is fenced with it is open, it is only
        given back when that ends.
        """
        if self._hold.fenced:
            self._hold.release_wanted = True
            return
        try:
            if self._leave() and self._hold.keeper.release(self._hold):
                notices.released(self)
        except BackendError:
            raise
        except BaseException:
            self._abandon()
            raise

    async def arelease(self) -> None:
        """Give the slots back from a coroutine. Raises ``BackendError`` like ``release()``."""
        if self._hold.fenced:
            self._hold.release_wanted = True
            return
        try:
            if self._leave() and await self._hold.keeper.arelease(self._hold):
                await notices.areleased(self)
        except BackendError:
            raise
        except BaseException:
            self._abandon()
            raise

    def detach(self) -> None:
        """Untie the permit from this thread or task: whoever has it now must release it.

        The thread or task may then take the semaphore again, and may end without the permit being given back.
        """
        scopes.leave(self._hold)

    @property
    def _grant(self) -> Grant:
        grant = self._hold.grant
        if grant is None:
            raise PermitLostError(f"The permit of {self.name!r} was never granted.")
        return grant

    def _leave(self) -> bool:
        """Take one out of those who are inside by this grant. Return whether it must be given back now."""
        return not self.released

    def _abandon(self) -> None:
        """Leave it to the keeper to give back what is held: the program was struck in the middle of doing so."""
        if not self._hold.foreign:
            self._hold.keeper.abandon(self._hold)

    def _finish(self) -> None:
        """End a block: release now, or at the end of the caller's transaction if the semaphore says so."""
        if self.semaphore.release_policy == "on_commit":
            transactions.at_transaction_end(None, self._close)
        else:
            self._close()

    async def _afinish(self) -> None:
        """End an async block. Django's transactions are synchronous, so that none of them can be open here."""
        await self._aclose()

    def _close(self) -> None:
        """Release at the end of a block: its work is done, so a database error is logged instead of raised."""
        try:
            self.release()
        except BackendError as error:
            self._log_failed_release(error)

    async def _aclose(self) -> None:
        """Release at the end of an async block; see ``_close``."""
        try:
            await self.arelease()
        except BackendError as error:
            self._log_failed_release(error)

    def _log_failed_release(self, error: BackendError) -> None:
        message = "The permit of %r could not be given back; the keeper goes on trying: %s"
        extra = {"semaphore": self.name, "what": "release_failed"}
        logger.error(message, self.name, error, exc_info=error, extra=extra)

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._finish()

    async def __aenter__(self) -> Permit:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._afinish()

    def __repr__(self) -> str:
        hold = self._hold
        state = "released" if self.released else "lost" if hold.loss else hold.state.value
        slots = numbers(hold.grant.slots) if hold.grant else "-"
        return f"<Permit of {self.name!r}: slot {slots}, {state}>"

    def __del__(self) -> None:
        hold = getattr(self, "_hold", None)
        if hold is None:  # struck while it was made
            return
        # Only a note for the keeper: a finaliser may run at any point, in the keeper's own critical sections too.
        if hold.foreign or hold.abandoned or hold.releasing.locked() or hold.state is State.OVER:
            return
        if hold.state is State.HELD:
            hold.keeper.inbox_put(lambda: hold.keeper.forget(hold, "it was garbage-collected"))
        else:
            hold.keeper.abandon(hold)


def current_permit(name: Name, *, using: str | None = None) -> Permit | None:
    """Return the permit by which the calling thread or task holds ``name``; ``None`` if it does not.

    It is for the body of a decorated function, which is not handed its permit: under which name it was called is up to
    the caller to know. One that was detached is nobody's. No database access. Raises ``TypeError`` or ``ValueError``
    for a bad name.
    """
    key = key_of(validate_name(name))
    for hold in scopes.taken_by(scopes.current_owner(), database_for(using), key):
        permit = hold.permit()
        if permit is not None and hold.grant is not None and not permit.released:
            return permit
    return None
