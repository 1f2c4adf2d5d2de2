"""``refresh_every()``: a value that is rebuilt once a period, by one caller, while the others get the old one."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, cast, overload

from asgiref.sync import sync_to_async

from django_sqlsem.conf import MIN_LEASE
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.durations import UNSET, Seconds, Unset, to_seconds
from django_sqlsem.core.names import validate_name
from django_sqlsem.core.templates import CallName, is_coroutine_function
from django_sqlsem.core.text import shown
from django_sqlsem.exceptions import AlreadyHeldError
from django_sqlsem.locks.permit import Permit
from django_sqlsem.locks.semaphore import Semaphore
from django_sqlsem.refresh.job import BuildFailedError, Found, Job
from django_sqlsem.refresh.values import MISSING, CacheValues, FieldValues, Values
from django_sqlsem.runtime.callers import refuse_event_loop, to_its_end

__all__ = ["BuildFailedError", "Refresh", "refresh_every"]

Build: TypeAlias = Callable[..., Any]
T = TypeVar("T")
#: The shortest period, in seconds.
SHORTEST: Final = 0.001


class Refresh(Generic[T]):
    """A value that is rebuilt once a period. Made by ``refresh_every()``; calling it returns the value.

    It holds no state, and may be shared by threads, tasks and processes. With an asynchronous build a call returns a
    coroutine; ``get()`` and ``aget()`` are what they say, whatever the build is.
    """

    def __init__(self, name: CallName, period: float, build: Build, values: Values, lock: Semaphore,
                 retry_after: float | None) -> None:  # fmt: skip
        self.period = period
        self.build = build
        self.retry_after = retry_after
        self.is_async = is_coroutine_function(inspect.unwrap(build))
        self._name = name
        self._values = values
        self._lock = lock
        functools.update_wrapper(self, build, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """Return the value; with an asynchronous build, a coroutine that does."""
        return cast("T", self.aget(*args, **kwargs)) if self.is_async else self.get(*args, **kwargs)

    def get(self, *args: Any, **kwargs: Any) -> T:
        """Return the value: the old one while somebody rebuilds it, else what this call has built.

        Without an old one, waits for the build. Raises what the build raises; ``AcquireTimeoutError``, which names
        the builder; ``BuildFailedError``; ``BackendError``.
        """
        self._refuse_async()
        job = self._job(self._name.name(args, kwargs))
        found = job.look()
        if found.settles(job):
            return cast("T", found.value)
        permit = self._take(job, found)
        if permit is None:
            return cast("T", found.value)
        with permit:
            return self._rebuild(job, permit, args, kwargs)

    async def aget(self, *args: Any, **kwargs: Any) -> T:
        """Return what ``get()`` does, without blocking the event loop."""
        job = self._job(await self._name.aname(args, kwargs))
        found = await job.alook()
        if found.settles(job):
            return cast("T", found.value)
        permit = await self._atake(job, found)
        if permit is None:
            return cast("T", found.value)
        async with permit:
            return await self._arebuild(job, permit, args, kwargs)

    def now(self, *args: Any, **kwargs: Any) -> T:
        """Build the value now, unless somebody else began to after this call, and return it. Waits for its turn."""
        self._refuse_async()
        job = self._job(self._name.name(args, kwargs))
        job.invalidate()
        with job.lock.acquire() as permit:
            return self._rebuild(job, permit, args, kwargs, forced=True)

    async def anow(self, *args: Any, **kwargs: Any) -> T:
        """Do as ``now()`` does, from a coroutine."""
        job = self._job(await self._name.aname(args, kwargs))
        await sync_to_async(job.invalidate)()
        async with await job.lock.aacquire() as permit:
            return await self._arebuild(job, permit, args, kwargs, forced=True)

    def invalidate(self, *args: Any, **kwargs: Any) -> None:
        """Have the next caller rebuild the value, which the others get until then. Counts for a running build too."""
        self._job(self._name.name(args, kwargs)).invalidate()

    async def ainvalidate(self, *args: Any, **kwargs: Any) -> None:
        """Do as ``invalidate()`` does, from a coroutine."""
        job = self._job(await self._name.aname(args, kwargs))
        await sync_to_async(job.invalidate)()

    def _job(self, name: str) -> Job:
        return Job(self._lock._named(name), self._values, self.period, self.retry_after)

    def _take(self, job: Job, found: Found) -> Permit | None:
        """Get the lock, waiting for it only if there is no old value. ``None``: be content with that."""
        if found.value is MISSING:
            return job.lock.acquire()
        with contextlib.suppress(AlreadyHeldError):  # a build asks for its own value, or its transaction goes on
            return job.lock.try_acquire()
        return None

    async def _atake(self, job: Job, found: Found) -> Permit | None:
        """Do as ``_take()`` does, from a coroutine."""
        if found.value is MISSING:
            return await job.lock.aacquire()
        with contextlib.suppress(AlreadyHeldError):
            return await job.lock.atry_acquire()
        return None

    def _rebuild(self, job: Job, permit: Permit, args: Any, kwargs: Any, *, forced: bool = False) -> T:
        found = job.look(again=True)  # the previous holder of the lock may have built it
        if found.settles(job, forced):
            return cast("T", found.value)
        job.refuse_without_token(permit)
        began = boot_now()
        try:
            value = self.build(*args, **kwargs)
        except Exception:
            job.note_failure(permit)
            raise
        return cast("T", job.store(permit, found, value, boot_now() - began))

    async def _arebuild(self, job: Job, permit: Permit, args: Any, kwargs: Any, *, forced: bool = False) -> T:
        if not self.is_async:  # no cancellation stops a thread: the lock is not given back while it builds
            rebuild = functools.partial(self._rebuild, job, permit, args, kwargs, forced=forced)
            return await to_its_end(rebuild)
        found = await sync_to_async(job.look)(again=True)
        if found.settles(job, forced):
            return cast("T", found.value)
        job.refuse_without_token(permit)
        began = boot_now()
        try:
            value = await self.build(*args, **kwargs)
        except Exception:
            await sync_to_async(job.note_failure)(permit)
            raise
        return cast("T", await to_its_end(job.store, permit, found, value, boot_now() - began))

    def _refuse_async(self) -> None:
        if self.is_async:
            raise TypeError(f"The build of {self._name.template.source!r} is asynchronous: await aget() or anow().")
        refuse_event_loop(
            f"{self._name.template.source!r} can't be read synchronously from an async context: await aget()."
        )

    def __repr__(self) -> str:
        return f"<Refresh of {self._name.template.source!r} every {self.period:g} s>"


class RefreshOptions(TypedDict, total=False):
    """The options of ``refresh_every()``, for type checkers."""

    key: Callable[..., Any] | None
    cache: str | None
    field: tuple[Any, str] | None
    using: str | None
    timeout: Seconds | Unset | None
    lease: Seconds | None
    retry_after: Seconds | None


if TYPE_CHECKING:

    class AsyncRefresh(Refresh[T]):
        """To type checkers, a value with an asynchronous build: a call returns a coroutine."""

        async def __call__(self, *args: Any, **kwargs: Any) -> T: ...  # type: ignore[override]

    class RefreshDecorator(Protocol):
        """To type checkers, what makes a function such a value."""

        @overload
        def __call__(self, func: Callable[..., Coroutine[Any, Any, T]]) -> AsyncRefresh[T]: ...
        @overload
        def __call__(self, func: Callable[..., T]) -> Refresh[T]: ...


@overload
def refresh_every(
    name: str,
    period: Seconds,
    build: Callable[..., Coroutine[Any, Any, T]],
    **options: Unpack[RefreshOptions],
) -> AsyncRefresh[T]: ...
@overload
def refresh_every(
    name: str, period: Seconds, build: Callable[..., T], **options: Unpack[RefreshOptions]
) -> Refresh[T]: ...
@overload
def refresh_every(
    name: str | Seconds, period: Seconds | None = None, **options: Unpack[RefreshOptions]
) -> RefreshDecorator: ...
def refresh_every(
    name: str | Seconds,
    period: Seconds | None = None,
    build: Build | None = None,
    *,
    key: Callable[..., Any] | None = None,
    cache: str | None = "default",
    field: tuple[Any, str] | None = None,
    using: str | None = None,
    timeout: Seconds | Unset | None = UNSET,
    lease: Seconds | None = None,
    retry_after: Seconds | None = None,
) -> Any:
    """Return the value ``name``, which ``build`` rebuilds once a ``period``; or decorate a function to be that.

    ``refresh_every(name, period, build)`` returns a ``Refresh``; ``@refresh_every(name, period)`` and
    ``@refresh_every(period)`` make the function one, the latter under its module's and its own name. ``period``:
    seconds or ``timedelta``. ``build``: a function, sync or async; what it is called with must be part of the name, by
    fields (``"best:{shop.pk}"``) or by ``key``, a callable that gets the arguments. ``cache``: alias of the cache that
    keeps the values, and that all processes share. ``field``: instead of a cache, ``(Model or queryset, "field")`` of
    one row in the database that keeps the locks. ``using``: alias of that. ``timeout``: seconds to wait for a build
    where there is no old value. ``lease``: seconds after which a builder that was stopped gives way. ``retry_after``:
    seconds for which nobody tries again after a build that raised.

    Nothing is looked up before the first call. Raises ``TypeError`` or ``ValueError`` for a bad argument.
    """
    if not isinstance(name, str):
        if period is not None or build is not None:
            raise TypeError(
                f"refresh_every takes a name, a period and a build, in this order; {shown(name)} is no name."
            )
        given, length = "", name
    elif period is None:
        raise TypeError(f"refresh_every needs a period: seconds or a timedelta after the name {shown(name)}.")
    else:
        given, length = validate_name(name), period
    seconds = to_seconds(length, what="period", minimum=SHORTEST) or SHORTEST
    if using is not None and not isinstance(using, str):
        raise TypeError(f"using must be the alias of a database or None, not {shown(using)}.")
    values = _values(cache, field)
    lock = Semaphore(
        given,
        1,
        timeout=timeout if isinstance(timeout, Unset) else to_seconds(timeout, what="timeout", allow_none=True),
        lease=None if lease is None else to_seconds(lease, what="lease", minimum=MIN_LEASE),
        release_policy=values.release_policy,
        using=using,
    )._as("refresh")
    rest = None if retry_after is None else to_seconds(retry_after, what="retry_after")

    def decorate(func: Build) -> Refresh[Any]:
        if not callable(func):
            raise TypeError(f"build must be a function, not {shown(func)}.")
        call_name = CallName(given or _name_of(func), key, func)
        if key is None and not call_name.template.fields and call_name.signature.parameters:
            raise TypeError(
                f"{_name_of(func)}() takes arguments ({', '.join(call_name.signature.parameters)}), and calls with "
                "different ones would share one value: give a name with fields, such as 'best:{shop.pk}', or key=."
            )
        if not call_name.template.fields:
            validate_name(call_name.template.expand({}))
        return Refresh(call_name, seconds, func, values, lock, rest)

    return decorate if build is None else decorate(build)


def _values(cache: object, field: object) -> Values:
    if field is not None:
        return FieldValues.of(field)
    if not isinstance(cache, str):
        raise TypeError(f"cache must be the alias of a cache, not {shown(cache)}; without one, give field=.")
    return CacheValues(cache)


def _name_of(func: Build) -> str:
    found = getattr(func, "__qualname__", None)
    if found is None:
        raise TypeError(f"{shown(func)} has no name of its own: give refresh_every one.")
    return f"{func.__module__}.{found}"
