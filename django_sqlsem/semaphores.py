"""The public object: an immutable, shareable description of a semaphore, and its verbs."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from django.db import connections

from django_sqlsem import drains, entries, identity, notices, refusals, scopes, testmode
from django_sqlsem.backends import database_for, get_backend
from django_sqlsem.backends.base import Claim
from django_sqlsem.clocks import boot_now
from django_sqlsem.conf import config
from django_sqlsem.exceptions import SemaphoreError
from django_sqlsem.holds import Hold
from django_sqlsem.keepers import keeper_for
from django_sqlsem.modes import EXCLUSIVE, SHARED, UPDATE, WHOLE
from django_sqlsem.naming import resource_for, validate_name
from django_sqlsem.permits import Permit
from django_sqlsem.snapshots import SemaphoreSnapshot
from django_sqlsem.timeouts import UNSET, Seconds, Unset, to_seconds
from django_sqlsem.upgrades import UpgradablePermit

if TYPE_CHECKING:
    from django_sqlsem.busy import OnBusy
    from django_sqlsem.clients import Client
    from django_sqlsem.keeper import Keeper

F = TypeVar("F", bound=Callable[..., Any])

RELEASE_POLICIES = ("on_exit", "on_commit")


@dataclass(frozen=True)
class Semaphore:
    """A named semaphore. Make it with ``semaphore()`` or ``mutex()``.

    It holds no state and touches nothing before the first acquire: one object at module level may be used by any
    number of threads and tasks at once, as a decorator, in ``with`` and ``async with``, or by its verbs.
    """

    name: str
    slots: int | None = None
    _: dataclasses.KW_ONLY
    kind: str = "semaphore"
    take: int = 1
    #: How its permits share the name with others: see ``modes``.
    mode: str = SHARED
    timeout: float | Unset | None = UNSET
    lease: float | None = None
    on_busy: OnBusy | None = None
    key: Callable[..., Any] | None = None
    release_policy: str = "on_exit"
    fair: bool = True
    max_hold: float | None = None
    durable: bool | None = None
    on_lost: Callable[[Permit], object] | None = None
    using: str | None = None
    #: The texts of a name made of several parts, in which a decorator fills in the fields one by one.
    parts: tuple[str, ...] | None = dataclasses.field(default=None, repr=False)
    #: In whose name a task asks that was refused before; set by the decorator.
    rank: str = dataclasses.field(default="", repr=False)
    #: The decorator's name before a call's arguments filled it in: ``sync:{request.user.pk}``. Empty for any other.
    template: str = dataclasses.field(default="", repr=False, compare=False)
    #: Whom the view would answer that asks; set by the decorator. Once they have gone, nobody waits.
    client: Client | None = dataclasses.field(default=None, repr=False, compare=False)

    #: Whether nobody else may leave a block than who entered it, as long as they are there.
    _left_by_its_own: ClassVar[bool] = False

    @property
    def _blocks(self) -> Hashable:
        """Which open blocks are this one's: those that were entered by this very object."""
        return id(self)

    def acquire(self, timeout: Seconds | Unset | None = UNSET) -> Permit:
        """Take a permit, waiting up to ``timeout`` seconds (``None``: for ever; 0: not at all).

        An omitted timeout is the semaphore's own, else ``SQLSEM["TIMEOUT"]``. Raises ``AcquireTimeoutError``, which
        names the holders; ``AlreadyHeldError`` if this thread or task has it; ``BackendError``.
        """
        seconds, asked = self._seconds(timeout), boot_now()
        # Returned in the very statement that gets it: nothing can strike between, and leave it to this frame.
        return self._acquire(seconds) or self._refuse(boot_now() - asked, self.status(), seconds)

    def try_acquire(self) -> Permit | None:
        """Take a permit if one is free, without waiting; else return ``None``."""
        return self._acquire(0.0)

    async def aacquire(self, timeout: Seconds | Unset | None = UNSET) -> Permit:
        """Take a permit from a coroutine: see ``acquire()``. Waiting holds no thread."""
        seconds, asked = self._seconds(timeout), boot_now()
        return await self._aacquire(seconds) or await self._arefuse(boot_now() - asked, await self.astatus(), seconds)

    async def atry_acquire(self) -> Permit | None:
        """Take a permit if one is free; else return ``None``."""
        return await self._aacquire(0.0)

    def drain(self, timeout: Seconds | Unset | None = UNSET) -> Permit:
        """Keep newcomers out, wait for the holders to leave, and return the permit of the drained semaphore.

        From the moment that it waits, nobody who comes later is let in, not even who barges. The semaphore stays empty
        until the permit is released, or its ``with`` block or its process ends. Takes the timeouts of ``acquire()``,
        and raises what that does; who is kept out then goes on.
        """
        return drains.of(self, self.status).acquire(timeout)

    async def adrain(self, timeout: Seconds | Unset | None = UNSET) -> Permit:
        """Do what ``drain()`` does, from a coroutine."""
        return await (await drains.aof(self, self.astatus)).aacquire(timeout)

    def status(self) -> SemaphoreSnapshot:
        """Return a frozen snapshot: slots, holders, waiters. A name never used has its declared slots, all free."""
        keeper, resource = self._keeper(), resource_for(self.name, self.kind)
        found = keeper.backend.snapshot(keeper.session_here(), resource)
        keeper.post(lambda: None)  # its thread closes the connection that was opened for this, once it is idle
        return self._snapshot(found)

    async def astatus(self) -> SemaphoreSnapshot:
        """Return what ``status()`` does, without blocking the event loop."""
        keeper, resource = self._keeper(), resource_for(self.name, self.kind)
        return self._snapshot(await keeper.call(lambda: keeper.backend.snapshot(keeper.own, resource)))

    def _keeper(self) -> Keeper:
        alias = database_for(self.using)
        backend = get_backend(alias)
        if not backend.process_local:
            testmode.refuse_forbidden(connections[alias])
        return keeper_for(backend)

    def _snapshot(self, found: SemaphoreSnapshot | None) -> SemaphoreSnapshot:
        slots = self.slots or 1
        return found or SemaphoreSnapshot(self.name, self.kind, slots, slots, None, False)

    def __call__(self, func: F) -> F:
        """Decorate a function, a view, a coroutine or the body of a task; its signature and type stay."""
        from django_sqlsem.decorators import decorate

        return decorate(self, func)

    def __enter__(self) -> Permit:
        permit = self.acquire()
        try:
            entries.push(self, permit)
            return permit
        except BaseException:
            entries.give_up(self, permit)
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:  # with no statement before it: whatever strikes in here, the permit goes back
            permit = entries.innermost(self)
            permit._finish()
            entries.remove(self, permit)
        except BaseException:
            entries.give_up(self, locals().get("permit"))
            raise

    async def __aenter__(self) -> Permit:
        permit = await self.aacquire()
        try:
            entries.push(self, permit)
            return permit
        except BaseException:
            entries.give_up(self, permit)
            raise

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:  # with no statement before it: whatever strikes in here, the permit goes back
            permit = entries.innermost(self)
            await permit._afinish()
            entries.remove(self, permit)
        except BaseException:
            entries.give_up(self, locals().get("permit"))
            raise

    def _named(self, name: str) -> Semaphore:
        """Return this semaphore under another name: a decorator's template, filled in."""
        return dataclasses.replace(
            self, name=validate_name(name), template=self.template or self.name, key=None, parts=None
        )

    def _as(self, kind: str, mode: str = SHARED) -> Semaphore:
        """Return this semaphore as another kind of lock."""
        return dataclasses.replace(self, kind=kind, mode=mode)

    def _step_aside(self, estimate: Callable[[int], float]) -> float:
        """Keep the rank of a task that was refused; ``estimate`` says when to come back if so many are before it."""
        keeper = self._keeper()
        return keeper.backend.step_aside(keeper.session_here(), self._claim(keeper), estimate)

    def _hand_rank_on(self, heir: str) -> None:
        """Let ``heir`` have the rank that was kept for a task that was refused."""
        keeper = self._keeper()
        keeper.backend.hand_rank_on(keeper.session_here(), self._claim(keeper), heir)

    def _seconds(self, timeout: Seconds | Unset | None) -> float | None:
        if isinstance(timeout, Unset):
            timeout = self.timeout
        if isinstance(timeout, Unset):
            return config(database_for(self.using)).timeout
        return to_seconds(timeout, what="timeout", allow_none=True)

    def _prepare(self) -> tuple[Keeper, Hold, Permit]:
        if self.key is not None:
            raise TypeError(
                f"key= gets a decorated function's arguments, and here is none: put the key into {self.name!r}."
            )
        keeper = self._keeper()
        claim = self._claim(keeper)
        hold = Hold(keeper, claim, max_hold=self.max_hold)
        hold.client = self.client
        if self.on_lost is not None:
            hold.callbacks.append(self.on_lost)
        scopes.enter(scopes.current_owner(), keeper.alias, hold)
        # From here on the end of the permit, however it comes, gives back what was granted.
        return keeper, hold, self._permit(hold)

    def _permit(self, hold: Hold) -> Permit:
        return (UpgradablePermit if self.mode == UPDATE else Permit)(self, hold)

    def _claim(self, keeper: Keeper) -> Claim:
        alias = keeper.alias
        mode, take = self.mode, 0 if self.mode in EXCLUSIVE else self.take
        if mode and mode not in keeper.backend.modes:
            if mode != WHOLE:
                raise SemaphoreError(f"The locks of {alias!r} have no readers that may become the writer.")
            mode, take = SHARED, self.slots or 1
        return Claim(
            resource=resource_for(self.name, self.kind),
            permit_id=uuid.uuid4().hex,
            slots=self.slots,
            take=take,
            mode=mode,
            lease=config(alias).lease if self.lease is None else self.lease,
            fair=self.fair,
            holder=identity.current(),
            presence=keeper.presence,
            rank=self.rank if keeper.backend.keeps_ranks else "",
            durable=self.durable if self.durable is not None else config(alias).durable,
        )

    def _acquire(self, timeout: float | None) -> Permit | None:
        scopes.refuse_event_loop()
        if refusals.forced_refusal(self.name):
            return None
        keeper, hold, permit = self._prepare()
        try:
            if keeper.acquire(hold, timeout):
                return self._granted(permit)
            keeper.drop(hold)
        except BaseException:
            keeper.abandon(hold)
            raise
        if self.client is not None:
            self.client.check(self.name)
        return None

    async def _aacquire(self, timeout: float | None) -> Permit | None:
        scopes.refuse_other_loops()
        if refusals.forced_refusal(self.name):
            return None
        keeper, hold, permit = self._prepare()
        try:
            if await keeper.aacquire(hold, timeout):
                return await self._agranted(permit)
            keeper.drop(hold)
        except BaseException:
            keeper.abandon(hold)
            raise
        return None

    def _granted(self, permit: Permit) -> Permit:
        refusals.befall(permit._hold)
        notices.granted(permit)
        return permit

    async def _agranted(self, permit: Permit) -> Permit:
        refusals.befall(permit._hold)
        await notices.agranted(permit)
        return permit

    def _refuse(self, waited: float, snapshot: SemaphoreSnapshot, timeout: float | None) -> NoReturn:
        # In no variable: the error's traceback keeps the frames, which would keep the error.
        raise notices.refused(self, refusals.refusal(snapshot, timeout, self.kind, self.take, self.mode), waited)

    async def _arefuse(self, waited: float, snapshot: SemaphoreSnapshot, timeout: float | None) -> NoReturn:
        make = refusals.refusal
        raise await notices.arefused(self, make(snapshot, timeout, self.kind, self.take, self.mode), waited)
