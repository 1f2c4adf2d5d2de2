"""The permits of a monitor: one for each entry, and all of one stay share what was granted."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import threading
import weakref
from typing import TYPE_CHECKING

from django_sqlsem import scopes
from django_sqlsem.exceptions import AlreadyHeldError, BackendError, NotEnteredError, PermitLostError
from django_sqlsem.holds import State
from django_sqlsem.permits import Permit

if TYPE_CHECKING:
    from django_sqlsem.holds import Hold
    from django_sqlsem.monitors import Monitor

logger = logging.getLogger("django_sqlsem")

#: By which permits this flow of control is inside of monitors: those of a task, and of what it calls in threads.
_flow: contextvars.ContextVar[tuple[weakref.ref[MonitorPermit], ...]] = contextvars.ContextVar(
    "sqlsem_inside", default=()
)


class Stay:
    """One grant of a monitor, and all the permits by which its thread or task is inside. It lives in the permits."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._inside: dict[int, weakref.ref[MonitorPermit]] = {}

    def inside(self) -> list[MonitorPermit]:
        """Return the permits that have not been given back, the outermost first."""
        return [permit for ref in list(self._inside.values()) if (permit := ref()) is not None]

    def outermost(self) -> Permit | None:
        """Return the permit by which everyone else is inside, or ``None`` if all have left."""
        return next((permit for ref in list(self._inside.values()) if (permit := ref()) is not None), None)

    def admit(self, permit: MonitorPermit) -> None:
        """Count one in."""
        number = next(self._numbers)
        permit._number, permit._depth = number, len(self._inside) + 1
        self._inside[number] = weakref.ref(permit)
        before = [ref for ref in _flow.get() if (other := ref()) is not None and not other.released]
        _flow.set((*before, self._inside[number]))

    def leave(self, permit: MonitorPermit) -> bool:
        """Count one out. Return whether it was the last one."""
        with self.lock:
            self._inside.pop(permit._number, None)
            outermost = self.outermost()
        if outermost is not None:
            self.untie(permit._hold)
        return outermost is None

    def untie(self, hold: Hold) -> None:
        """Whose permits were all handed to somebody else is not inside any more."""
        if all(permit._detached for permit in self.inside()):
            scopes.leave(hold)

    def enter(self, monitor: Monitor, hold: Hold, owner: object) -> MonitorPermit | None:
        """Enter once more; ``None`` if all have left meanwhile."""
        with self.lock:
            inside = self.inside()
            if not inside:
                return None
            if (loss := hold.current_loss()) is not None:
                raise PermitLostError(
                    f"The permit of {monitor.name!r} was lost: {loss}. Leave it before entering again.", loss=loss
                )
            mine = {id(ref()) for ref in _flow.get()}
            if isinstance(owner, asyncio.Task) and not all(id(permit) in mine for permit in inside):
                raise AlreadyHeldError(
                    f"{monitor.name!r} was entered by something else that works for this task side by side with this."
                )
            permit = MonitorPermit(monitor, hold, self)
            try:
                if monitor.on_lost is not None and monitor.on_lost not in hold.callbacks:
                    permit.on_lost(monitor.on_lost)
                self.admit(permit)
                return permit
            except BaseException:
                self._inside.pop(permit._number, None)
                raise

    def forget(self, hold: Hold) -> None:
        """One of the permits was garbage-collected: if it was the last, nobody will give the monitor back."""
        for number, ref in list(self._inside.items()):
            if ref() is None:
                self._inside.pop(number, None)
        if self.outermost() is None:
            hold.keeper.forget(hold, "it was garbage-collected")
        else:
            name = hold.claim.resource.name
            extra = {"semaphore": name, "what": "forgotten"}
            logger.error("An inner permit of %r was forgotten; use a with block.", name, extra=extra)


class MonitorPermit(Permit):
    """One entry into a monitor. All entries of one stay share a slot and a token; the last to leave gives it back."""

    semaphore: Monitor

    def __init__(self, monitor: Monitor, hold: Hold, stay: Stay) -> None:
        # Without Permit's, which would make this one the hold's only permit.
        self._number = 0
        self._depth = 0
        self._left = False
        self._detached = False
        self._stay = stay
        self.semaphore = monitor
        self._hold = hold

    @property
    def depth(self) -> int:
        """How many times its thread or task was inside when it had entered: 1 for the outermost."""
        return self._depth

    @property
    def waited(self) -> float:
        """Seconds that the acquire waited for it; exactly 0 for whoever was inside already."""
        return self._hold.waited if self._number == 1 else 0.0

    @property
    def released(self) -> bool:
        """Whether this entry was left, or the monitor given back."""
        return self._left or self._hold.releasing.locked()

    def release(self) -> None:
        """Leave. Whoever leaves last gives the monitor back: see ``Permit.release``. Idempotent.

        Raises ``NotEnteredError`` in another thread or task than entered, as long as that one lives.
        """
        try:
            self._refuse_strangers()
            super().release()
        except (BackendError, NotEnteredError):
            raise
        except BaseException:
            self._abandon()
            raise

    async def arelease(self) -> None:
        """Leave, from a coroutine; see ``release()``."""
        try:
            self._refuse_strangers()
            await super().arelease()
        except (BackendError, NotEnteredError):
            raise
        except BaseException:
            self._abandon()
            raise

    def detach(self) -> None:
        """Untie this entry from its thread or task: whoever has the permit now must release it."""
        self._detached = True
        self._stay.untie(self._hold)

    def __enter__(self) -> MonitorPermit:
        self._refuse_strangers()
        return self

    async def __aenter__(self) -> MonitorPermit:
        self._refuse_strangers()
        return self

    def _refuse_strangers(self) -> None:
        owner = self._hold.owner() if self._hold.owner is not None else None
        if owner is None or self._detached or self.released or scopes.owner_is_gone(self._hold):
            return
        if owner is not scopes.current_owner():
            raise NotEnteredError(f"Only the thread or task that entered {self.name!r} may leave it.")

    def _leave(self) -> bool:
        self._left = True
        return self._stay.leave(self) and not self._hold.releasing.locked()

    def _abandon(self) -> None:
        self._left = True
        if self._stay.leave(self):
            super()._abandon()

    def _close(self) -> None:
        # A block ends where it ends: a generator may be closed by another thread.
        try:
            super().release()
        except BackendError as error:
            self._log_failed_release(error)

    async def _aclose(self) -> None:
        try:
            await super().arelease()
        except BackendError as error:
            self._log_failed_release(error)

    def __del__(self) -> None:
        hold = getattr(self, "_hold", None)
        if hold is None or self._left or hold.foreign or hold.abandoned or hold.releasing.locked():
            return
        # Only a note for the keeper, as a finaliser may run at any point.
        if hold.state is State.HELD:
            stay = self._stay
            hold.keeper.inbox_put(lambda: stay.forget(hold))
        elif hold.state is not State.OVER:
            hold.keeper.abandon(hold)
