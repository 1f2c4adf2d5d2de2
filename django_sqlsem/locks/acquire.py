"""What every lock does to acquire: it finds its keeper, waits for a grant, or says why there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from django.db import connections

from django_sqlsem.backends import database_for
from django_sqlsem.conf import config
from django_sqlsem.core import testmode
from django_sqlsem.core.durations import Seconds, Unset, to_seconds
from django_sqlsem.core.modes import refused
from django_sqlsem.exceptions import AcquireTimeoutError, never_met, wrong_kind
from django_sqlsem.runtime.keepers import keeper_for
from django_sqlsem.snapshots import retry_after

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from django_sqlsem.backends.base import BaseSemaphoreBackend
    from django_sqlsem.core.names import Resource
    from django_sqlsem.runtime.acquisition import Acquisition
    from django_sqlsem.runtime.keeper import Keeper
    from django_sqlsem.snapshots import SemaphoreSnapshot

T = TypeVar("T")


class Forcing(Protocol):
    """What a test wants to happen: see ``testing``."""

    def refuses(self, name: str) -> bool:
        """Whether every acquire of this name is to be refused."""

    def granted(self, acquisition: Acquisition) -> None:
        """Have a new grant suffer what the test wants."""


#: Set while a test forces something.
forcing: Forcing | None = None


def is_refused_by_test(name: str) -> bool:
    """Whether a test wants this name to be busy."""
    return forcing is not None and forcing.refuses(name)


def force(acquisition: Acquisition) -> None:
    """Have a new grant suffer what a test wants."""
    if forcing is not None:
        forcing.granted(acquisition)


def keeper_of(backend: BaseSemaphoreBackend) -> Keeper:
    """Return the keeper of a backend. Raises what Django does if the running test may not use its database."""
    if not backend.process_local:
        testmode.refuse_forbidden(connections[backend.alias])
    return keeper_for(backend)


def seconds_to_wait(timeout: Seconds | Unset | None, usual: float | Unset | None, using: str | None) -> float | None:
    """Return for how long to wait: as the call says, or else the lock, or else the settings."""
    if isinstance(timeout, Unset):
        timeout = usual
    if isinstance(timeout, Unset):
        return config(database_for(using)).timeout
    return to_seconds(timeout, what="timeout", allow_none=True)


def read_status(keeper: Keeper, resource: Resource) -> SemaphoreSnapshot | None:
    """Return a snapshot of a name; ``None`` if it was never used."""
    found = keeper.backend.snapshot(keeper.session_here(), resource)
    keeper.post(lambda: None)  # its thread closes the connection that was opened for this, once it is idle
    return found


async def aread_status(keeper: Keeper, resource: Resource) -> SemaphoreSnapshot | None:
    """Return what ``read_status()`` does, without blocking the event loop."""
    return await keeper.call(lambda: keeper.backend.snapshot(keeper.own, resource))


def obtain(
    acquisition: Acquisition,
    take: Callable[[], T | None],
    timeout: float | None,
    give_up: Callable[[], object] | None = None,
) -> T | None:
    """Wait for a grant, and return what ``take()`` makes of it; ``None`` if there was none in time.

    If ``take()`` returns ``None``, the grant has come to nothing, and the wait goes on. ``give_up()`` undoes what an
    exception has interrupted, besides giving back what was granted. Callers must have the permit in no variable: an
    exception that interrupts them keeps their frames.
    """
    try:
        while acquisition.keeper.acquire(acquisition, timeout):
            if (taken := take()) is not None:
                return taken
            acquisition.ask_anew()
        acquisition.keeper.drop(acquisition)
    except BaseException:
        acquisition.keeper.abandon(acquisition)
        if give_up is not None:
            give_up()
        raise
    return None


async def aobtain(
    acquisition: Acquisition,
    take: Callable[[], Awaitable[T | None]],
    timeout: float | None,
    give_up: Callable[[], object] | None = None,
) -> T | None:
    """Do what ``obtain()`` does, from a coroutine."""
    try:
        while await acquisition.keeper.aacquire(acquisition, timeout):
            if (taken := await take()) is not None:
                return taken
            acquisition.ask_anew()
        acquisition.keeper.drop(acquisition)
    except BaseException:
        acquisition.keeper.abandon(acquisition)
        if give_up is not None:
            give_up()
        raise
    return None


def refusal(
    snapshot: SemaphoreSnapshot, timeout: float | None, kind: str, take: int, mode: str = ""
) -> AcquireTimeoutError:
    """Return the error for an acquire that timed out: its message names the holders.

    Raises ``ImproperlyConfigured`` or ``SemaphoreError`` if it could never have been met.
    """
    if snapshot.kind != kind:
        raise wrong_kind(snapshot.name, snapshot.kind, kind)
    if take > snapshot.slots:
        raise never_met(snapshot.name, snapshot.slots, take)
    wanted = "No slot" if take == 1 else f"No {take} slots"
    when = "is free" if timeout == 0 else f"became free within {timeout:g} s" if timeout else "became free"
    told = f"{wanted} of {snapshot.name!r} {when}"
    if mode:
        told = refused(snapshot.name, kind, mode, f"within {timeout:g} s" if timeout else "")
    message = f"{told} ({snapshot.held} of {snapshot.slots} held"
    message += f", {snapshot.waiting} waiting)" if snapshot.waiting else ")"
    if snapshot.paused:
        message += "; it is paused by an operator"
    shown = [str(holder) for holder in snapshot.holders[:5]]
    if len(snapshot.holders) > 5:
        shown.append(f"and {len(snapshot.holders) - 5} more")
    error = AcquireTimeoutError(
        f"{message}: {'; '.join(shown)}." if shown else f"{message}.",
        name=snapshot.name,
        timeout=timeout,
        holders=snapshot.holders,
        waiting=snapshot.waiting,
        retry_after=retry_after(snapshot),
    )
    error._snapshot = snapshot
    return error
