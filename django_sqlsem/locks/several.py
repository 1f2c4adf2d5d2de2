"""``acquire_all()``: several locks of any kinds, all or none, taken in one order whatever order the caller names.

All callers take them in the same order, so that no two ever wait for one another.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

from django_sqlsem.backends import database_for
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.durations import UNSET, Seconds, Unset
from django_sqlsem.core.text import shown
from django_sqlsem.exceptions import BackendError
from django_sqlsem.locks.acquire import seconds_to_wait
from django_sqlsem.locks.counter import Taken

logger = logging.getLogger("django_sqlsem")


class _Wanted(NamedTuple):
    """One lock: its place in the common order (alias and name), and where the caller named it."""

    alias: str
    name: str
    nth: int
    lock: Any


class Permits(Sequence[Any]):
    """What ``acquire_all()`` took: one permit for each lock, in the caller's order.

    It is a context manager, and an asynchronous one, that gives everything back at its end, what was taken last first.
    Units of a counter are used up: of those nothing is given back.
    """

    def __init__(self) -> None:
        self._taken: list[tuple[int, Any]] = []

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return [permit for _, permit in sorted(self._taken, key=lambda each: each[0])][index]

    def __len__(self) -> int:
        return len(self._taken)

    def check(self) -> None:
        """Raise ``PermitLostError`` if any of the permits is no longer ours. No database access."""
        for permit in self._held():
            permit.check()

    @property
    def stop_requested(self) -> bool:
        """Whether an operator asks the holder of any of the permits to stop. No database access."""
        return any(permit.stop_requested for permit in self._held())

    @property
    def stop_requested_by(self) -> str:
        """By whom it was asked; empty if it was not."""
        return next((permit.stop_requested_by for permit in self._held() if permit.stop_requested), "")

    def on_stop_requested(self, callback: Callable[[Any], object]) -> None:
        """Have ``callback(permit)`` called for each of the permits whose holder is asked to stop; see ``Permit``."""
        for permit in self._held():
            permit.on_stop_requested(callback)

    def release(self) -> None:
        """Give everything back, what was taken last first. Idempotent.

        Raises ``BackendError`` if a database failed, after all have been tried; the keepers go on trying.
        """
        with contextlib.ExitStack() as stack:
            for permit in self._held():
                stack.callback(permit.release)

    async def arelease(self) -> None:
        """Give everything back from a coroutine; see ``release()``."""
        async with contextlib.AsyncExitStack() as stack:
            for permit in self._held():
                stack.push_async_callback(permit.arelease)

    def _held(self) -> list[Any]:
        return [permit for _, permit in self._taken if not isinstance(permit, Taken)]

    def __enter__(self) -> Permits:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.ExitStack() as stack:
            for permit in self._held():
                stack.callback(permit.__exit__, *exc_info)

    async def __aenter__(self) -> Permits:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for permit in self._held():
                stack.push_async_callback(permit.__aexit__, *exc_info)

    # While it is filled.

    def _add(self, wanted: _Wanted, permit: Any) -> None:
        self._taken.append((wanted.nth, permit))

    def _undo(self) -> None:
        with contextlib.ExitStack() as stack:
            for _, permit in self._taken:
                stack.enter_context(_failures_logged(permit.name))
                stack.callback(permit.put_back if isinstance(permit, Taken) else permit.release)
            self._taken = []

    async def _aundo(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _, permit in self._taken:
                stack.enter_context(_failures_logged(permit.name))
                stack.push_async_callback(permit.aput_back if isinstance(permit, Taken) else permit.arelease)
            self._taken = []


class PendingPermits:
    """What ``aacquire_all()`` returns: to be awaited, or entered by ``async with``, once; then ``RuntimeError``."""

    def __init__(self, wanted: list[_Wanted], timeout: float | None) -> None:
        self._wanted: list[_Wanted] | None = wanted
        self._timeout = timeout
        self._permits = Permits()

    def __await__(self) -> Generator[Any, None, Permits]:
        return self._acquire().__await__()

    async def __aenter__(self) -> Permits:
        return await self._acquire()

    async def __aexit__(self, *exc_info: object) -> None:
        await self._permits.__aexit__(*exc_info)

    async def _acquire(self) -> Permits:
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            raise RuntimeError("What aacquire_all() returns can be awaited or entered once: call it again.")
        left = _time_left(self._timeout)
        async with contextlib.AsyncExitStack() as all_or_none:
            all_or_none.push_async_callback(self._permits._aundo)
            for each in wanted:
                self._permits._add(each, await each.lock.aacquire(timeout=left()))
            all_or_none.pop_all()
        return self._permits


def acquire_all(locks: Iterable[Any], *, timeout: Seconds | Unset | None = UNSET) -> Permits:
    """Take several locks, all or none, and return their permits in the order of ``locks``.

    ``locks``: semaphores, mutexes, counters, and whatever else has ``acquire``; no name twice. ``timeout``: seconds or
    ``timedelta`` for all of them together, ``None`` for ever, 0 not at all; omitted, ``SQLSEM["TIMEOUT"]``. The
    locks' own timeouts do not count. They are taken in the order of their databases and names. If one cannot be had
    in time, or anything else is raised, those that were taken are given back first.

    Raises ``TypeError`` or ``ValueError`` for a bad argument, and what ``acquire`` of the locks raises.
    """
    wanted, left = _in_order(locks), _time_left(seconds_to_wait(timeout))
    permits = Permits()
    with contextlib.ExitStack() as all_or_none:
        all_or_none.callback(permits._undo)
        for each in wanted:
            permits._add(each, each.lock.acquire(timeout=left()))
        all_or_none.pop_all()
    return permits


def aacquire_all(locks: Iterable[Any], *, timeout: Seconds | Unset | None = UNSET) -> PendingPermits:
    """Take several locks from a coroutine: ``async with aacquire_all(...)``, or ``await`` it; see ``acquire_all()``."""
    return PendingPermits(_in_order(locks), seconds_to_wait(timeout))


def _in_order(locks: Iterable[Any]) -> list[_Wanted]:
    """Return the locks in the common order."""
    if isinstance(locks, str) or not isinstance(locks, Iterable):
        raise TypeError(f"locks must be several locks, as in acquire_all([a, b]), not {shown(locks)}.")
    wanted: list[_Wanted] = []
    for nth, lock in enumerate(locks):
        name = getattr(lock, "name", None)
        if not isinstance(name, str) or not callable(getattr(lock, "acquire", None)):
            raise TypeError(f"locks must be locks, like semaphore('a'), not {shown(lock)}.")
        wanted.append(_Wanted(database_for(getattr(lock, "using", None)), name, nth, lock))
    wanted.sort(key=lambda each: each[:2])
    for one, other in itertools.pairwise(wanted):
        if one[:2] == other[:2]:
            raise ValueError(f"locks names {one.name!r} twice: it would wait for itself. Use take= for more of one.")
    return wanted


def _time_left(timeout: float | None) -> Callable[[], float | None]:
    deadline = None if timeout is None else boot_now() + timeout
    return lambda: None if deadline is None else max(0.0, deadline - boot_now())


@contextlib.contextmanager
def _failures_logged(name: str) -> Iterator[None]:
    """Log that something could not be given back yet: what went wrong before is raised, and the keeper goes on."""
    try:
        yield
    except BackendError as error:
        extra = {"semaphore": name, "what": "release_failed"}
        level = logging.DEBUG if error.outage else logging.WARNING  # while the database is away, that was said once
        logger.log(level, "What acquire_all() had taken could not be given back yet: %s", error, extra=extra)
