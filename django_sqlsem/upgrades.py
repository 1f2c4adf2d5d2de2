"""The permit of an upgradable reader: while it has the writer's place, it may become the writer without deadlock."""

from __future__ import annotations

import dataclasses
import threading
import uuid
from functools import partial
from typing import TYPE_CHECKING, Self

from django_sqlsem import scopes
from django_sqlsem.exceptions import AlreadyHeldError, PermitLostError
from django_sqlsem.holds import Hold
from django_sqlsem.modes import UPGRADE
from django_sqlsem.permits import Permit
from django_sqlsem.refusals import refusal
from django_sqlsem.snapshots import LossReason
from django_sqlsem.timeouts import UNSET, Seconds, Unset

if TYPE_CHECKING:
    from django_sqlsem.snapshots import Loss

_beginning = threading.Lock()


def after_fork() -> None:
    """In a forked child: another thread of the parent may have had the lock."""
    global _beginning
    _beginning = threading.Lock()


class UpgradablePermit(Permit):
    """A reader beside readers, the only one of its kind. ``upgrade()`` makes it the writer, ``downgrade()`` undoes it.

    The upgrade is a second grant, of all the slots: if one of the two is lost, the permit is.
    """

    _upgrade: Permit | None = None
    #: The grants of its upgrades, and those that are waited for, which end with it.
    _parts: tuple[Hold, ...] = ()

    @property
    def upgraded(self) -> bool:
        """Whether it is the writer now."""
        upgrade = self._upgrade
        return upgrade is not None and upgrade._hold.grant is not None and not upgrade.released

    @property
    def lost(self) -> Loss | None:
        """How the permit was lost, or ``None`` while it is ours. Decided when read, and for good."""
        upgrade, loss = self._upgrade, self._hold.current_loss()
        if loss is None and upgrade is not None and not upgrade.released and (gone := upgrade.lost) is not None:
            self._hold.lose(gone)
            return gone
        return loss

    def upgrade(self, timeout: Seconds | Unset | None = UNSET) -> Self:
        """Become the writer: wait for the readers to leave, before everybody else who waits, and let none in.

        Takes the timeouts of ``acquire()``, and raises ``AcquireTimeoutError`` as that does: then it is an upgradable
        reader still. Raises ``AlreadyHeldError`` if it is the writer, or about to be, and ``PermitLostError``.
        """
        scopes.refuse_event_loop("A permit can't be upgraded synchronously here: use `await aupgrade()`.")
        seconds = self.semaphore._seconds(timeout)
        permit = self._prepare()
        hold = permit._hold
        try:
            self._begin(permit)
            granted = hold.keeper.acquire(hold, seconds)
            if granted:
                self.check()
                return self
            hold.keeper.drop(hold)
            self._upgrade = None
        except BaseException:
            self._give_up(permit)
            raise
        raise refusal(self.semaphore.status(), seconds, self.semaphore.kind, 0, UPGRADE)

    async def aupgrade(self, timeout: Seconds | Unset | None = UNSET) -> Self:
        """Become the writer, from a coroutine: see ``upgrade()``."""
        seconds = self.semaphore._seconds(timeout)
        permit = self._prepare()
        hold = permit._hold
        try:
            self._begin(permit)
            granted = await hold.keeper.aacquire(hold, seconds)
            if granted:
                self.check()
                return self
            hold.keeper.drop(hold)
            self._upgrade = None
        except BaseException:
            self._give_up(permit)
            raise
        raise refusal(await self.semaphore.astatus(), seconds, self.semaphore.kind, 0, UPGRADE)

    def downgrade(self) -> None:
        """Become a reader that is upgradable again: others may read. Idempotent.

        Raises ``BackendError``, and ``PermitLostError`` if it was lost meanwhile.
        """
        if self._upgrade is not None:
            self._step_down()
            if self.lost is not None:
                self.check()

    async def adowngrade(self) -> None:
        """Do what ``downgrade()`` does, from a coroutine."""
        if self._upgrade is not None:
            await self._astep_down()
            if self.lost is not None:
                self.check()

    def release(self) -> None:
        """Give it all back; see ``Permit.release()``."""
        try:
            self._step_down()
        finally:
            super().release()

    async def arelease(self) -> None:
        """Give it all back from a coroutine; see ``Permit.arelease()``."""
        try:
            await self._astep_down()
        finally:
            await super().arelease()

    def _step_down(self) -> None:
        upgrade, self._upgrade = self._upgrade, None
        if upgrade is not None:
            upgrade.release()

    async def _astep_down(self) -> None:
        upgrade, self._upgrade = self._upgrade, None
        if upgrade is not None:
            await upgrade.arelease()

    def detach(self) -> None:
        """Untie the permit from this thread or task; see ``Permit.detach()``."""
        super().detach()
        if self._upgrade is not None:
            self._upgrade.detach()

    def _abandon(self) -> None:
        if self._upgrade is not None:
            self._upgrade._abandon()
        super()._abandon()

    def _prepare(self) -> Permit:
        """Return a permit for an upgrade, of which nobody knows yet."""
        self.check()
        mine = self._hold
        claim = dataclasses.replace(
            mine.claim, permit_id=uuid.uuid4().hex, mode=UPGRADE, take=0, rank="", presence=mine.keeper.presence
        )
        hold = Hold(mine.keeper, claim, max_hold=None)
        hold.part_of = mine  # who is asked to stop, is asked once
        flow = {id(each): each for each in (*scopes.taken_here(), mine)}
        hold.beside = scopes.beside(scopes.current_owner(), flow.values())

        def lost_without_it(_permit: Permit) -> None:
            if hold.loss is not None:
                mine.lose(hold.loss)

        hold.callbacks.append(lost_without_it)
        return Permit(self.semaphore, hold)

    def _begin(self, permit: Permit) -> None:
        """Make it the permit of the upgrade, unless there is one; nothing has been asked for it yet."""
        mine = self._hold
        with _beginning:
            if self._upgrade is not None:
                raise AlreadyHeldError(f"The permit of {self.name!r} has been upgraded already, or is about to be.")
            self._upgrade = permit
            if _lose_parts not in mine.callbacks:
                mine.callbacks.append(_lose_parts)
            going = [part for part in self._parts if id(part) in part.keeper.holds]
            self._parts = (*going, permit._hold)

    def _give_up(self, permit: Permit) -> None:
        permit._hold.keeper.abandon(permit._hold)
        if self._upgrade is permit:
            self._upgrade = None


def _lose_parts(permit: Permit) -> None:
    """A permit was lost: so are its upgrades."""
    loss = permit._hold.loss
    for hold in permit._parts if isinstance(permit, UpgradablePermit) else ():
        if loss is None or hold.releasing.locked() or hold.abandoned:
            continue
        if hold.grant is None:  # it waits in vain
            hold.answer(PermitLostError(f"The permit of {permit.name!r} was lost: {loss}.", loss=loss))
            continue
        hold.lose(loss)
        if loss.reason is LossReason.FORGOTTEN:  # then nobody else gives it back
            hold.keeper.inbox_put(partial(hold.keeper.give_back, hold, hold.keeper.own))
