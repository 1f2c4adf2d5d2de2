"""The re-entrant lock: its holder may enter again. Each entry has a permit, and all of one stay share a grant."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import itertools
import logging
import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from django_sqlsem.backends import database_for
from django_sqlsem.core.durations import UNSET, Seconds, Unset, to_seconds
from django_sqlsem.core.names import Name, key_of
from django_sqlsem.exceptions import AlreadyHeldError, BackendError, NotEnteredError, PermitLostError
from django_sqlsem.locks import permit as blocks
from django_sqlsem.locks.permit import Permit
from django_sqlsem.locks.semaphore import Options, Semaphore, one_slot
from django_sqlsem.runtime import callers
from django_sqlsem.runtime.acquisition import Acquisition, State

logger = logging.getLogger("django_sqlsem")

#: The permits by which this flow of control is inside: those of a task, and of what it calls in threads.
_flow: contextvars.ContextVar[tuple[weakref.ref[RLockPermit], ...]] = contextvars.ContextVar(
    "sqlsem_inside", default=()
)


class Stay:
    """One grant of an rlock, and all the permits by which its thread or task is inside. It lives in the permits."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._inside: weakref.WeakValueDictionary[int, RLockPermit] = weakref.WeakValueDictionary()

    def inside(self) -> list[RLockPermit]:
        """Return the permits that have not been given back, the outermost first."""
        return list(self._inside.values())

    def __call__(self) -> RLockPermit | None:
        """Return the permit by which everyone else is inside, or ``None`` if all have left."""
        return next(iter(self.inside()), None)

    def admit(self, permit: RLockPermit) -> None:
        """Count one in."""
        permit._number, permit._depth = next(self._numbers), len(self._inside) + 1
        self._inside[permit._number] = permit
        before = [ref for ref in _flow.get() if (other := ref()) is not None and not other.released]
        _flow.set((*before, weakref.ref(permit)))

    @callers.under_lock
    def leave(self, permit: RLockPermit) -> bool:
        """Count one out. Return whether it was the last one."""
        with self.lock:
            self._inside.pop(permit._number, None)
            last = not self.inside()
        if not last:
            self.untie(permit._acquisition)
        return last

    def untie(self, acquisition: Acquisition) -> None:
        """Count the thread or task as outside once it has handed all its permits over."""
        if all(permit._detached for permit in self.inside()):
            callers.leave(acquisition)

    @callers.under_lock
    def enter(self, lock: RLock, acquisition: Acquisition, caller: object) -> RLockPermit | None:
        """Enter once more; ``None`` if all have left, and no fenced transaction keeps the lock for them."""
        with self.lock:
            inside = self.inside()
            if not inside and not acquisition.fenced:
                return None
            if (loss := acquisition.current_loss()) is not None:
                raise PermitLostError(
                    f"The permit of {lock.name!r} was lost: {loss}. Leave it before entering again.", loss=loss
                )
            mine = {id(ref()) for ref in _flow.get()}
            if isinstance(caller, asyncio.Task) and not all(id(permit) in mine for permit in inside):
                raise AlreadyHeldError(
                    f"{lock.name!r} was entered by something else that works for this task side by side with this."
                )
            permit = RLockPermit(lock, acquisition, self)
            try:
                if lock.on_lost is not None and lock.on_lost not in acquisition.losing.callbacks:
                    permit.on_lost(lock.on_lost)
                self.admit(permit)
                if not inside:
                    acquisition.taken()  # its release was put off
                return permit
            except BaseException:
                self._inside.pop(permit._number, None)
                if not inside:
                    acquisition.put_off()
                raise

    def forget(self, acquisition: Acquisition) -> None:
        """A permit was garbage-collected: give the lock back if it was the last one."""
        if self.inside():
            name = acquisition.request.resource.name
            extra = {"semaphore": name, "what": "forgotten"}
            logger.error("An inner permit of %r was forgotten; use a with block.", name, extra=extra)
        elif not acquisition.fenced:  # else the keeper's first look after the transaction finds it
            acquisition.keeper.forget(acquisition, "it was garbage-collected")


class RLockPermit(Permit):
    """One entry into a lock. All entries of one stay share a slot and a token; the last to leave gives it back."""

    semaphore: RLock

    def __init__(self, lock: RLock, acquisition: Acquisition, stay: Stay) -> None:
        # Without Permit's, which would make this one the hold's only permit.
        self._number = 0
        self._depth = 0
        self._left = False
        self._detached = False
        self._stay = stay
        self.semaphore = lock
        self._acquisition = acquisition

    @property
    def depth(self) -> int:
        """How many times its thread or task was inside when it had entered: 1 for the outermost."""
        return self._depth

    @property
    def waited(self) -> float:
        """Seconds that the acquire waited for it; exactly 0 for an inner entry."""
        return self._acquisition.waited if self._number == 1 else 0.0

    @property
    def released(self) -> bool:
        """Whether this entry was left, or the lock given back."""
        return self._left or self._acquisition.given_back

    def release(self) -> None:
        """Leave. The last to leave gives the lock back: see ``Permit.release``. Idempotent.

        Raises ``NotEnteredError`` in another thread or task than entered, as long as that one lives.
        """
        try:
            self._refuse_strangers()
            if not self._leave_to_keeper():
                self._give_back()
        except (BackendError, NotEnteredError):
            raise
        except BaseException:
            self._abandon()
            raise

    async def arelease(self) -> None:
        """Leave, from a coroutine; see ``release()``."""
        self._refuse_strangers()
        await self._agive_back()

    def detach(self) -> None:
        """Untie this entry from its thread or task: its new holder must release it."""
        self._detached = True
        self._stay.untie(self._acquisition)

    def __enter__(self) -> RLockPermit:
        self._refuse_strangers()
        return self

    async def __aenter__(self) -> RLockPermit:
        self._refuse_strangers()
        return self

    def _refuse_strangers(self) -> None:
        caller = self._acquisition.caller
        itself = None if caller is None else caller.itself
        if itself is None or self._detached or self.released or callers.caller_is_gone(self._acquisition):
            return
        if itself is not callers.current_caller():
            raise NotEnteredError(f"Only the thread or task that entered {self.name!r} may leave it.")

    # What a block calls at its end does not ask who ends it: a generator may be closed by another thread.

    def _give_back(self) -> None:
        if self._leave():
            super()._give_back()

    async def _agive_back(self) -> None:
        if self._leave():
            await super()._agive_back()

    def _abandon(self) -> None:
        if self._leave():
            super()._abandon()

    def _leave(self) -> bool:
        """Count this entry out. Return whether it was the last one."""
        self._left = True
        return self._stay.leave(self)

    def __del__(self) -> None:
        acquisition = getattr(self, "_acquisition", None)
        if acquisition is None or self._left or acquisition.foreign:
            return
        # Only a note for the keeper, as a finaliser may run at any point.
        keeper, stay = acquisition.keeper, self._stay
        if acquisition.state in (State.HELD, State.PUT_OFF) and not self._goes_with_response:
            keeper.note(lambda: stay.forget(acquisition))
        elif acquisition.state in (State.NEW, State.QUEUED, State.GRANTED):
            keeper.note(lambda: keeper.abandon(acquisition))


@dataclass(frozen=True)
class RLock(Semaphore):
    """A named re-entrant lock. Make it with ``rlock()``.

    The async task or thread that is inside may enter again at once; each entry has a permit of its own,
    and the last to be given back frees the lock. The object itself holds no state.
    """

    kind: str = "rlock"

    _left_by_its_own: ClassVar[bool] = True

    if TYPE_CHECKING:

        def acquire(self, timeout: Seconds | Unset | None = UNSET) -> RLockPermit: ...
        def try_acquire(self) -> RLockPermit | None: ...
        async def aacquire(self, timeout: Seconds | Unset | None = UNSET) -> RLockPermit: ...
        async def atry_acquire(self) -> RLockPermit | None: ...
        def __enter__(self) -> RLockPermit: ...
        async def __aenter__(self) -> RLockPermit: ...

    def enter(self, timeout: Seconds | Unset | None = UNSET) -> RLockPermit:
        """Enter, as ``acquire()`` does, until ``exit()``: for code that no ``with`` block fits."""
        return self._waiting(timeout).__enter__()

    def exit(self) -> None:
        """Leave what this thread or task entered last by ``enter()``, with any object of this name.

        Raises ``NotEnteredError`` if it is not inside.
        """
        blocks.innermost(self, own=True)
        self.__exit__(None, None, None)

    async def aenter(self, timeout: Seconds | Unset | None = UNSET) -> RLockPermit:
        """Enter from a coroutine, until ``aexit()``."""
        return await self._waiting(timeout).__aenter__()

    async def aexit(self) -> None:
        """Leave from a coroutine: see ``exit()``."""
        blocks.innermost(self, own=True)
        await self.__aexit__(None, None, None)

    def _waiting(self, timeout: Seconds | Unset | None) -> RLock:
        if isinstance(timeout, Unset):
            return self
        return dataclasses.replace(self, timeout=to_seconds(timeout, what="timeout", allow_none=True))

    def depth(self) -> int:
        """Return how many times this thread or task is inside; 0 if it is not. No database access."""
        found = self._stay_of(callers.current_caller())
        return 0 if found is None else len(found[0].inside())

    @property
    def _blocks(self) -> Hashable:
        """Any object of this name may leave what another one entered."""
        return "rlock", database_for(self.using), self.name

    def _acquire(self, *args: Any, **kwargs: Any) -> Permit | None:
        callers.refuse_event_loop()
        return self._enter_again() or super()._acquire(*args, **kwargs)

    async def _aacquire(self, *args: Any, **kwargs: Any) -> Permit | None:
        return self._enter_again() or await super()._aacquire(*args, **kwargs)

    def _enter_again(self) -> RLockPermit | None:
        if self.key is not None:
            return None
        caller = callers.current_caller()
        found = self._stay_of(caller)
        return None if found is None else found[0].enter(self, found[1], caller)

    def _stay_of(self, caller: object) -> tuple[Stay, Acquisition] | None:
        """Return the stay of ``caller`` and its grant, a lost one too, also if all have left and its release waits."""
        key = key_of(self.name)
        for acquisition in callers.taken_by(caller, database_for(self.using), key):
            stay = acquisition.permit
            if isinstance(stay, Stay) and acquisition.has_slots and not acquisition.foreign:
                return stay, acquisition
        return None

    def _permit(self, acquisition: Acquisition) -> Permit:
        stay = Stay()
        permit = RLockPermit(self, acquisition, stay)
        stay.admit(permit)
        acquisition.permit = stay
        if self.on_lost is not None:
            permit.on_lost(self.on_lost)
        return permit


def rlock(name: Name, **options: Unpack[Options]) -> RLock:
    """Return the re-entrant lock ``name``: one slot, which its holder may enter again and again.

    Takes the options of ``semaphore()`` but ``slots`` and ``take``. Those of the outermost entry count for all;
    ``release`` and ``on_lost`` count for each.
    """
    lock = one_slot("rlock", name, {**options})
    values: dict[str, Any] = {field.name: getattr(lock, field.name) for field in dataclasses.fields(lock)}
    return RLock(**values)


#: The word of C# and of the T-SQL procedures ``MonitorEnter`` and ``MonitorExit`` for a re-entrant lock.
Monitor = RLock
monitor = rlock
