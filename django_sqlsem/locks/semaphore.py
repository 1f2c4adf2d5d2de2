"""The public object: an immutable, shareable description of a semaphore, and its verbs.

``semaphore()`` and ``mutex()`` make it: every argument is checked there, at the call that gives it.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, ParamSpec, TypedDict, TypeVar, Unpack, overload

from django_sqlsem.backends.base import Request
from django_sqlsem.busy import OnBusy, validate_on_busy
from django_sqlsem.conf import MIN_LEASE, config
from django_sqlsem.core import hooks, identity
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.durations import UNSET, Seconds, Unset, to_seconds
from django_sqlsem.core.modes import EXCLUSIVE, SHARED, UPDATE, WHOLE, interchangeable
from django_sqlsem.core.names import (
    Name,
    part_texts,
    refuse_fields,
    resource_for,
    validate_max_waiting,
    validate_name,
    validate_slots,
)
from django_sqlsem.core.text import a_kind, shown
from django_sqlsem.exceptions import AcquireTimeoutError, SemaphoreError, wrong_kind
from django_sqlsem.locks import permit as blocks
from django_sqlsem.locks.acquire import (
    Bound,
    aread_status,
    read_status,
    refusal,
    refused_by_tests,
    seconds_to_wait,
    turned_away,
)
from django_sqlsem.locks.permit import Permit, UpgradablePermit
from django_sqlsem.runtime import callers, events
from django_sqlsem.runtime.acquisition import Acquisition, Client, TurnedAwayError
from django_sqlsem.runtime.keeper import Keeper
from django_sqlsem.runtime.keepers import keeper_at
from django_sqlsem.snapshots import SemaphoreSnapshot

F = TypeVar("F", bound=Callable[..., Any])
G = TypeVar("G", bound="Callable[..., Generator[Any, Any, Any] | AsyncGenerator[Any, Any]]")
P = ParamSpec("P")
T = TypeVar("T")

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
    max_waiting: int | Unset | None = UNSET
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
    #: The decorator's name before a call's arguments filled it in: ``sync:{request.user.pk}``. Empty for any other.
    template: str = dataclasses.field(default="", repr=False, compare=False)

    #: Whether only the thread or task that entered a block may leave it, as long as it lives.
    _left_by_its_own: ClassVar[bool] = False

    @property
    def _blocks(self) -> Hashable:
        """Which open blocks are this one's: those that were entered by this very object."""
        return id(self)

    def acquire(self, timeout: Seconds | Unset | None = UNSET) -> Permit:
        """Take a permit, waiting up to ``timeout`` seconds (``None``: for ever; 0: not at all).

        An omitted timeout is the semaphore's own, else ``SQLSEM["TIMEOUT"]``. Raises ``AcquireTimeoutError``, which
        names the holders; ``AlreadyHeldError`` if this thread or task has it; ``BackendError``. ``ValueError`` and
        ``TypeError``: its name has fields, or it has an ``on_busy`` or a ``key``, which are a decorator's.
        """
        if self.on_busy is not None:
            self._refuse_on_busy()
        return self._take(timeout)

    def try_acquire(self) -> Permit | None:
        """Take a permit if one is free, without waiting; else return ``None``."""
        return self._acquire(self._keeper(to_acquire=True), 0.0)

    async def aacquire(self, timeout: Seconds | Unset | None = UNSET) -> Permit:
        """Take a permit from a coroutine: see ``acquire()``. Waiting holds no thread."""
        if self.on_busy is not None:
            self._refuse_on_busy()
        return await self._atake(timeout)

    async def atry_acquire(self) -> Permit | None:
        """Take a permit if one is free; else return ``None``."""
        return await self._aacquire(self._keeper(to_acquire=True), 0.0)

    def exclusive(self, timeout: Seconds | Unset | None = UNSET) -> Permit:
        """Keep newcomers out, wait for the holders to leave, and return the permit of the drained semaphore.

        From the moment that it waits, no later caller is let in, not even one that barges. The semaphore stays empty
        until the permit is released, or its ``with`` block or its process ends. Takes the timeouts of ``acquire()``,
        and raises what that does; then those that were kept out go on.
        """
        return self._whole(None if self._has_whole_mode else self.status().slots).acquire(timeout)

    async def aexclusive(self, timeout: Seconds | Unset | None = UNSET) -> Permit:
        """Do what ``exclusive()`` does, from a coroutine."""
        return await self._whole(None if self._has_whole_mode else (await self.astatus()).slots).aacquire(timeout)

    def status(self) -> SemaphoreSnapshot:
        """Return a frozen snapshot: slots, holders, waiters. A name never used has its declared slots, all free."""
        keeper = self._keeper()
        if not keeper.backend.process_local:
            callers.refuse_event_loop(
                "A status can't be read synchronously from an async context: use `await astatus()`."
            )
        return self._snapshot(read_status(keeper, resource_for(self.name, self.kind)))

    async def astatus(self) -> SemaphoreSnapshot:
        """Return what ``status()`` does, without blocking the event loop."""
        return self._snapshot(await aread_status(self._keeper(), resource_for(self.name, self.kind)))

    def __call__(self, func: F) -> F:
        """Decorate a function, a view, a coroutine or the body of a task; its signature and type stay."""
        decorated: F = hooks.decorate(self, func)
        return decorated

    def __enter__(self) -> Permit:
        permit = self.acquire()
        try:
            return blocks.push(self._blocks, permit, blocks.statement())
        except BaseException:
            blocks.give_up(self, permit)
            raise

    def __exit__(self, *exc_info: object) -> None:
        try:  # before all else: whatever interrupts this, the permit goes back
            by = blocks.statement()
            permit = blocks.innermost(self, by)
            if callers.interrupts():
                permit._acquisition.keeper.note(lambda: self._leave(permit))
            else:
                permit._finish(waits=True)
                blocks.remove(self._blocks, permit)
        except BaseException:
            blocks.give_up(self, locals().get("permit"), locals().get("by"))
            raise

    def _leave(self, permit: Permit) -> None:
        permit._close(waits=True)
        blocks.remove(self._blocks, permit)

    async def __aenter__(self) -> Permit:
        return blocks.push(self._blocks, await self.aacquire(), blocks.statement())

    async def __aexit__(self, *exc_info: object) -> None:
        permit = blocks.innermost(self, blocks.statement())
        try:
            await permit._afinish()
        finally:
            blocks.remove(self._blocks, permit)

    def _named(self, name: str) -> Semaphore:
        """Return this semaphore under another name, which was validated: a decorator's template, filled in."""
        return dataclasses.replace(self, name=name, template=self.template or self.name, key=None, parts=None)

    def _as(self, kind: str, mode: str = SHARED) -> Semaphore:
        """Return this semaphore as another kind of lock."""
        return dataclasses.replace(self, kind=kind, mode=mode)

    @property
    def _has_whole_mode(self) -> bool:
        """Whether one permit may be of all slots, however many there are."""
        return WHOLE in self._keeper().backend.modes

    def _whole(self, slots: int | None) -> Semaphore:
        """Return the semaphore whose permits drain this one. ``slots``: how many, where no mode says *all*."""
        mode = SHARED if slots else WHOLE
        return dataclasses.replace(
            self,
            take=slots or 1,
            mode=mode,
            fair=True,
            release_policy="on_exit",
            max_hold=None,
            on_lost=None,
            on_busy=None,
            max_waiting=UNSET,
        )

    # Acquiring. A decorator gives the ``rank`` of a task that was refused before, and the ``client`` of a view.

    def _take(
        self,
        timeout: Seconds | Unset | None,
        rank: str = "",
        client: Client | None = None,
        bound: Bound | None = None,
    ) -> Permit:
        """Do what ``acquire()`` does. The wait ends when the client goes, and does not begin beyond ``bound``."""
        keeper, asked = self._keeper(to_acquire=True), boot_now()
        seconds = seconds_to_wait(timeout, self.timeout, keeper.alias)
        try:
            # Returned by the statement that gets it: if an exception came between, this frame would keep the permit.
            return self._acquire(keeper, seconds, rank, client, bound) or self._refuse(
                boot_now() - asked, self.status(), seconds
            )
        except TurnedAwayError as away:
            crowd = away.crowd
        raise events.refused(self, turned_away(self.name, seconds, crowd), boot_now() - asked)

    async def _atake(self, timeout: Seconds | Unset | None, rank: str = "", bound: Bound | None = None) -> Permit:
        """Do what ``aacquire()`` does."""
        keeper, asked = self._keeper(to_acquire=True), boot_now()
        seconds = seconds_to_wait(timeout, self.timeout, keeper.alias)
        try:
            return await self._aacquire(keeper, seconds, rank, bound) or await self._arefuse(
                boot_now() - asked, await self.astatus(), seconds
            )
        except TurnedAwayError as away:
            crowd = away.crowd
        raise await events.arefused(self, turned_away(self.name, seconds, crowd), boot_now() - asked)

    def _acquire(
        self,
        keeper: Keeper,
        timeout: float | None,
        rank: str = "",
        client: Client | None = None,
        bound: Bound | None = None,
    ) -> Permit | None:
        if callers.running_loop() is not None:
            callers.refuse_event_loop()
        if self.name in refused_by_tests:
            return None
        acquisition = self._asks(keeper, rank, bound)
        acquisition.client = client
        with acquisition as _asking:
            if keeper.acquire(acquisition, timeout):
                return events.granted(self._permit(acquisition))
            keeper.drop(acquisition)
        if client is not None:
            client.check(self.name)
        return None

    async def _aacquire(
        self, keeper: Keeper, timeout: float | None, rank: str = "", bound: Bound | None = None
    ) -> Permit | None:
        callers.refuse_other_loops()
        if self.name in refused_by_tests:
            return None
        acquisition = self._asks(keeper, rank, bound)
        with acquisition as _asking:
            if await keeper.aacquire(acquisition, timeout):
                return await events.agranted(self._permit(acquisition))
            keeper.drop(acquisition)
        return None

    def _asks(self, keeper: Keeper, rank: str, bound: Bound | None) -> Acquisition:
        """Return the record of an acquire that begins."""
        acquisition = Acquisition(keeper, self._request(keeper, rank, bound), max_hold=self.max_hold)
        callers.enter(keeper.alias, acquisition)
        return acquisition

    def _permit(self, acquisition: Acquisition) -> Permit:
        """Return the permit of a grant."""
        permit = (UpgradablePermit if self.mode == UPDATE else Permit)(self, acquisition)
        if self.on_lost is not None:
            permit.on_lost(self.on_lost)
        return permit

    def _keeper(self, *, to_acquire: bool = False) -> Keeper:
        if to_acquire and self.key is not None:
            raise TypeError(
                f"key= gets a decorated function's arguments, and here is none: put the key into {self.name!r}."
            )
        if "{" in self.name and not self.template and self.parts is None:
            refuse_fields(self.name)
        return keeper_at(self.using)

    def _refuse_on_busy(self) -> NoReturn:
        raise TypeError(
            f"on_busy={self.on_busy!r} says what becomes of a decorated call of {self.name!r} that is busy, and here is"
            " none: use try_acquire(), or catch AcquireTimeoutError, and give on_busy to the decorator."
        )

    def _literal(self) -> Semaphore:
        """Return this semaphore, whose name is meant as it is, braces and all."""
        return dataclasses.replace(self, parts=(self.name,))

    def _request(self, keeper: Keeper, rank: str, bound: Bound | None = None) -> Request:
        if bound is None:
            bound = Bound(None if isinstance(self.max_waiting, Unset) else self.max_waiting)
        mode, take, settings = self.mode, self.take, config(keeper.alias)
        if mode:
            if mode in EXCLUSIVE:
                take = 0
            if mode not in keeper.backend.modes:
                if mode != WHOLE:
                    raise SemaphoreError(f"The locks of {keeper.alias!r} have no readers that may become the writer.")
                mode, take = SHARED, self.slots or 1
        return Request(
            resource=resource_for(self.name, self.kind),
            permit_id=secrets.token_hex(16),
            slots=self.slots,
            take=take,
            mode=mode,
            lease=settings.lease if self.lease is None else self.lease,
            fair=self.fair,
            holder=identity.current(),
            presence=keeper.reach.presence,
            rank=rank if keeper.backend.keeps_ranks else "",
            durable=settings.durable if self.durable is None else self.durable,
            max_waiting=bound.max_waiting,
            refused_if_paused=bound.refused_if_paused,
            template=self.template if self.template != self.name else "",
        )

    def _refuse(self, waited: float, snapshot: SemaphoreSnapshot, timeout: float | None) -> NoReturn:
        # In no variable: the error's traceback keeps the frames, which would keep the error.
        raise events.refused(self, self._refusal(snapshot, timeout), waited)

    async def _arefuse(self, waited: float, snapshot: SemaphoreSnapshot, timeout: float | None) -> NoReturn:
        raise await events.arefused(self, self._refusal(snapshot, timeout), waited)

    def _refusal(self, snapshot: SemaphoreSnapshot, timeout: float | None) -> AcquireTimeoutError:
        if not interchangeable(snapshot.kind, self.kind):  # it was refused by the queue of this process, unasked
            raise wrong_kind(self.name, snapshot.kind, self.kind, self._keeper().alias, snapshot)
        backend = self._keeper().backend
        by_name = not (backend.supports_renewal or backend.process_local)
        if snapshot.operator_slots is None and snapshot.kind == self.kind:  # others may have declared another number
            snapshot = dataclasses.replace(snapshot, slots=self.slots or snapshot.slots)
        return refusal(snapshot, timeout, self.kind, self.take, self.mode, by_name=by_name)

    def _snapshot(self, found: SemaphoreSnapshot | None) -> SemaphoreSnapshot:
        slots = self.slots or 1
        return found or SemaphoreSnapshot(self.name, self.kind, slots, slots, None, False)

    # The rank of a task that was refused.

    def _step_aside(self, rank: str, estimate: Callable[[int], float]) -> float:
        """Keep a rank while its task is away; ``estimate`` says when to come back if this many are before it."""
        keeper = self._keeper()
        return keeper.backend.step_aside(keeper.session_here(), self._request(keeper, rank), estimate)

    def _hand_rank_on(self, rank: str, next_rank: str) -> None:
        """Let ``next_rank`` have the place that was kept for ``rank``."""
        keeper = self._keeper()
        keeper.backend.hand_rank_on(keeper.session_here(), self._request(keeper, rank), next_rank)


class SharedOptions(TypedDict, total=False):
    """The options of ``semaphore()`` that every lock made of one takes."""

    timeout: Seconds | Unset | None
    max_waiting: int | Unset | None
    lease: Seconds | None
    key: Callable[..., Any] | None
    release: Literal["on_exit", "on_commit"]
    fair: bool
    max_hold: Seconds | None
    durable: bool | None
    on_lost: Callable[[Permit], object] | None
    using: str | None


class Options(SharedOptions, total=False):
    """Those, and what a decorator does when no slot is free."""

    on_busy: OnBusy | None


if TYPE_CHECKING:

    class SkippingSemaphore(Semaphore):
        """To type checkers, a semaphore with ``on_busy="skip"``: a decorated call may return ``None``."""

        @overload
        def __call__(self, func: G) -> G: ...
        @overload
        def __call__(self, func: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T | None]]: ...
        @overload
        def __call__(self, func: Callable[P, T]) -> Callable[P, T | None]: ...
        def __call__(self, func: Any) -> Any: ...


@overload
def semaphore(
    name: Name,
    slots: int | None = None,
    *,
    on_busy: Literal["skip"],
    take: int = 1,
    **options: Unpack[SharedOptions],
) -> SkippingSemaphore: ...
@overload
def semaphore(name: Name, slots: int | None = None, *, take: int = 1, **options: Unpack[Options]) -> Semaphore: ...
def semaphore(
    name: Name,
    slots: int | None = None,
    *,
    take: int = 1,
    timeout: Seconds | Unset | None = UNSET,
    max_waiting: int | Unset | None = UNSET,
    lease: Seconds | None = None,
    on_busy: OnBusy | None = None,
    key: Callable[..., Any] | None = None,
    release: Literal["on_exit", "on_commit"] = "on_exit",
    fair: bool = True,
    max_hold: Seconds | None = None,
    durable: bool | None = None,
    on_lost: Callable[[Permit], object] | None = None,
    using: str | None = None,
) -> Semaphore:
    """Return the semaphore ``name``: a decorator, a context manager and its verbs in one.

    ``name``: 1 to 200 characters, or a tuple of parts. ``slots``: how many may hold at once (1 to 10,000); omitted, as
    declared elsewhere, else 1. ``take``: how many slots one permit takes, all or nothing. ``timeout``: seconds or
    ``timedelta`` to wait, ``None`` for ever, 0 not at all; omitted, a view waits 5 s, a Celery task 0 s, anything else
    30 s. ``max_waiting``: how many may wait already, over all processes, if a caller is to wait too; else it is refused
    at once. ``None``: any number; omitted, so too, but of a view whose timeout is omitted, as
    ``SQLSEM["VIEW_MAX_WAITING"]`` says. ``lease``: seconds that a grant outlives its process. ``on_busy``: what a
    decorator does when no slot is free: a status from 400 to 599, ``"raise"``, ``"skip"``, ``"retry"`` or a callable
    that gets a ``Busy``. ``key``: a callable that gets the decorated function's arguments and returns what is appended
    to the name. ``release``: ``"on_exit"`` or ``"on_commit"``. ``fair``: first come, first served; ``False`` barges.
    ``max_hold``: seconds after which the permit is taken for forgotten. ``durable``: whether a grant must survive a
    crash of the database's server, or is faster; omitted, as ``SQLSEM["DURABLE"]`` says. ``on_lost``: called with a
    permit that was lost. ``using``: alias of the database that keeps the locks.

    Nothing is looked up before the first acquire. Raises ``TypeError`` or ``ValueError`` for a bad argument.
    """
    if callable(name):
        raise TypeError('A semaphore\'s name must be given before it decorates a function: @semaphore("reports").')
    found = Semaphore(
        validate_name(name),
        None if slots is None else validate_slots(slots),
        take=validate_slots(take, what="take"),
        timeout=timeout if isinstance(timeout, Unset) else to_seconds(timeout, what="timeout", allow_none=True),
        max_waiting=max_waiting if isinstance(max_waiting, Unset) else validate_max_waiting(max_waiting),
        lease=None if lease is None else to_seconds(lease, what="lease", minimum=MIN_LEASE),
        on_busy=validate_on_busy(on_busy),
        key=key,
        release_policy=release,
        fair=fair,
        max_hold=None if max_hold is None else to_seconds(max_hold, what="max_hold", minimum=MIN_LEASE),
        durable=durable,
        on_lost=on_lost,
        using=using,
        parts=part_texts(name) if isinstance(name, tuple) else None,
    )
    _refuse_bad(found)
    return found


def _refuse_bad(given: Semaphore) -> None:
    """Raise ``TypeError`` or ``ValueError`` for arguments that are checked as they are."""
    if given.slots is not None and given.take > given.slots:
        raise ValueError(f"take must be at most slots={given.slots}, not {given.take}: it could never be met.")
    for what, function in (("key", given.key), ("on_lost", given.on_lost)):
        if function is not None and not callable(function):
            raise TypeError(f"{what} must be a callable or None, not {shown(function)}.")
    if given.release_policy not in RELEASE_POLICIES:
        allowed = " or ".join(map(repr, RELEASE_POLICIES))
        raise ValueError(f"release must be {allowed}, not {shown(given.release_policy)}.")
    if not isinstance(given.fair, bool):
        raise TypeError(f"fair must be True or False, not {shown(given.fair)}.")
    if given.durable is not None and not isinstance(given.durable, bool):
        raise TypeError(f"durable must be True, False or None, not {shown(given.durable)}.")
    if given.using is not None and not isinstance(given.using, str):
        raise TypeError(f"using must be the alias of a database or None, not {shown(given.using)}.")


@overload
def mutex(name: Name, *, on_busy: Literal["skip"], **options: Unpack[SharedOptions]) -> SkippingSemaphore: ...
@overload
def mutex(name: Name, **options: Unpack[Options]) -> Semaphore: ...
def mutex(name: Name, **options: Any) -> Semaphore:
    """Return the mutex ``name``: a semaphore with one slot, and a kind of its own.

    Takes the options of ``semaphore()`` but ``slots`` and ``take``.
    """
    return one_slot("mutex", name, options)


def one_slot(kind: str, name: Name, options: dict[str, Any]) -> Semaphore:
    """Return a semaphore with one slot, of its own kind. Raises ``TypeError`` for options that would say otherwise."""
    for option in ("slots", "take"):
        if option in options:
            raise TypeError(
                f"{option}={shown(options[option])} is not for {a_kind(kind)}, which has one slot: use semaphore()."
            )
    found: Semaphore = semaphore(name, 1, **options)
    return found._as(kind)
