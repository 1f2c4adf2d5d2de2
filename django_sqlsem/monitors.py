"""The re-entrant lock: who is inside may enter again, and the last one out gives it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from django_sqlsem import entries, scopes
from django_sqlsem.backends import database_for
from django_sqlsem.exceptions import NotEnteredError
from django_sqlsem.factories import one_slot
from django_sqlsem.monitor_permits import MonitorPermit, Stay
from django_sqlsem.naming import Name, key_of
from django_sqlsem.permits import Permit
from django_sqlsem.semaphores import Semaphore
from django_sqlsem.timeouts import UNSET, Seconds, Unset

if TYPE_CHECKING:
    from django_sqlsem.holds import Hold


@dataclass(frozen=True)
class Monitor(Semaphore):
    """A named re-entrant lock. Make it with ``monitor()``.

    Whoever is inside, an async task or else a thread, may enter again at once; each entry has a permit of its own,
    and the last to be given back frees the monitor. The object itself holds no state.
    """

    kind: str = "monitor"

    _left_by_its_own: ClassVar[bool] = True

    if TYPE_CHECKING:

        def acquire(self, timeout: Seconds | Unset | None = UNSET) -> MonitorPermit: ...
        def try_acquire(self) -> MonitorPermit | None: ...
        async def aacquire(self, timeout: Seconds | Unset | None = UNSET) -> MonitorPermit: ...
        async def atry_acquire(self) -> MonitorPermit | None: ...
        def __enter__(self) -> MonitorPermit: ...
        async def __aenter__(self) -> MonitorPermit: ...

    def enter(self, timeout: Seconds | Unset | None = UNSET) -> MonitorPermit:
        """Enter, as ``acquire()`` does, until ``exit()``: for code that no ``with`` block fits."""
        permit = self.acquire(timeout)
        try:
            entries.push(self, permit)
            return permit
        except BaseException:
            entries.give_up(self, permit)
            raise

    def exit(self) -> None:
        """Leave what this thread or task entered last by ``enter()``, with any object of this name.

        Raises ``NotEnteredError`` if it is not inside.
        """
        try:
            permit = entries.innermost(self, own=True)
            permit._finish()
            entries.remove(self, permit)
        except NotEnteredError:
            raise
        except BaseException:
            entries.give_up(self, locals().get("permit"))
            raise

    async def aenter(self, timeout: Seconds | Unset | None = UNSET) -> MonitorPermit:
        """Enter from a coroutine, until ``aexit()``."""
        permit = await self.aacquire(timeout)
        try:
            entries.push(self, permit)
            return permit
        except BaseException:
            entries.give_up(self, permit)
            raise

    async def aexit(self) -> None:
        """Leave from a coroutine: see ``exit()``."""
        try:
            permit = entries.innermost(self, own=True)
            await permit._afinish()
            entries.remove(self, permit)
        except NotEnteredError:
            raise
        except BaseException:
            entries.give_up(self, locals().get("permit"))
            raise

    def depth(self) -> int:
        """Return how many times this thread or task is inside; 0 if it is not. No database access."""
        permit = self._inside(scopes.current_owner())
        return 0 if permit is None else len(permit._stay.inside())

    @property
    def _blocks(self) -> Hashable:
        """Any object of this name may leave what another one entered."""
        return "monitor", database_for(self.using), self.name

    def _acquire(self, timeout: float | None) -> Permit | None:
        scopes.refuse_event_loop()
        return self._enter_again() or super()._acquire(timeout)

    async def _aacquire(self, timeout: float | None) -> Permit | None:
        return self._enter_again() or await super()._aacquire(timeout)

    def _enter_again(self) -> MonitorPermit | None:
        owner = scopes.current_owner()
        outermost = None if self.key is not None else self._inside(owner)
        return None if outermost is None else outermost._stay.enter(self, outermost._hold, owner)

    def _inside(self, owner: object) -> MonitorPermit | None:
        """Return the permit by which ``owner`` is inside, the outermost one; a lost one too."""
        key = key_of(self.name)
        for hold in scopes.taken_by(owner, database_for(self.using), key):
            permit = hold.permit()
            gone = hold.grant is None or hold.foreign or hold.abandoned or hold.releasing.locked()
            if isinstance(permit, MonitorPermit) and not gone:
                return permit
        return None

    def _permit(self, hold: Hold) -> Permit:
        stay = Stay()
        permit = MonitorPermit(self, hold, stay)
        stay.admit(permit)
        hold.permit = stay.outermost
        return permit


def monitor(name: Name, **options: Any) -> Monitor:
    """Return the monitor ``name``: one slot, which its holder may enter again and again.

    Takes the options of ``semaphore()`` but ``slots`` and ``take``. Those of the outermost entry count for all;
    ``release`` and ``on_lost`` count for each.
    """
    lock = one_slot("monitor", name, options)
    values: dict[str, Any] = {field.name: getattr(lock, field.name) for field in dataclasses.fields(lock)}
    return Monitor(**values)
