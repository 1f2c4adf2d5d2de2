"""What every lock has in common as it is acquired: how long it waits, its status, and why it got nothing."""

from __future__ import annotations

from typing import NamedTuple

from django_sqlsem.backends.base import Crowd
from django_sqlsem.conf import config
from django_sqlsem.core.durations import UNSET, Seconds, Unset, to_seconds
from django_sqlsem.core.modes import refused
from django_sqlsem.core.names import Resource
from django_sqlsem.core.text import wait
from django_sqlsem.exceptions import AcquireTimeoutError, never_met
from django_sqlsem.runtime.keeper import Keeper
from django_sqlsem.snapshots import LEAST, LONGEST_ESTIMATE, PAUSED_ESTIMATE, SemaphoreSnapshot, retry_after

#: The names of which a test wants every acquire to be refused: see ``testing.busy()``.
refused_by_tests: list[str] = []


def seconds_to_wait(
    timeout: Seconds | Unset | None, usual: float | Unset | None = UNSET, alias: str | None = None
) -> float | None:
    """Return for how long to wait: as the call says, or else the lock, or else the settings."""
    if timeout is not usual and not isinstance(timeout, Unset):
        return to_seconds(timeout, what="timeout", allow_none=True)
    return config(alias).timeout if isinstance(usual, Unset) else usual


def read_status(keeper: Keeper, resource: Resource) -> SemaphoreSnapshot | None:
    """Return a snapshot of a name; ``None`` if it was never used."""
    found = keeper.backend.snapshot(keeper.session_here(), resource)
    keeper.post(_nothing)  # its thread closes the connection that was opened for this, once it is idle
    return found


async def aread_status(keeper: Keeper, resource: Resource) -> SemaphoreSnapshot | None:
    """Return what ``read_status()`` does, without blocking the event loop."""
    return await keeper.call(lambda session: keeper.backend.snapshot(session, resource))


def _nothing() -> None:
    return None


class Bound(NamedTuple):
    """Beyond what an acquire does not wait."""

    #: How many may wait already; ``None``: any number.
    max_waiting: int | None = None
    #: Whether it does not wait for a name that is paused.
    refused_if_paused: bool = False


def turned_away(name: str, timeout: float | None, crowd: Crowd) -> AcquireTimeoutError:
    """Return the error for an acquire that was refused instead of waiting. It does not say who holds."""
    if crowd.paused:
        told, reason = f"{name!r} is paused by an operator", "paused"
        seconds = PAUSED_ESTIMATE if crowd.resumes_in is None else max(LEAST, crowd.resumes_in)
    else:
        told, reason = f"No slot of {name!r} is free", "full"
        if crowd.waiting:  # else nobody may wait
            told, reason = f"{told}, and {wait(crowd.waiting)} already", "queue full"
        turns = (crowd.waiting + 1) * (crowd.usual_hold or 0.0) / max(1, crowd.slots)
        seconds = min(LONGEST_ESTIMATE, max(LEAST, turns))
    return AcquireTimeoutError(
        f"{told}: it was not waited for.",
        name=name,
        timeout=timeout,
        waiting=crowd.waiting,
        retry_after=seconds,
        reason=reason,
    )


def refusal(
    snapshot: SemaphoreSnapshot, timeout: float | None, kind: str, take: int, mode: str = "", *, by_name: bool = False
) -> AcquireTimeoutError:
    """Return the error for an acquire that timed out: its message names the holders.

    ``by_name``: whoever knows a name can lock it, without a row.
    Raises ``SemaphoreError`` if it could never have been met.
    """
    other = snapshot.kind != kind  # it is a mutex that is used as a semaphore, or the other way round
    if take > snapshot.slots and not other:
        raise never_met(snapshot.name, snapshot.slots, take)
    wanted = "No slot" if take == 1 else f"No {take} slots"
    is_free = "is free" if take == 1 else "are free"
    when = is_free if timeout == 0 else f"became free within {timeout:g} s" if timeout else "became free"
    told = f"{wanted} of {snapshot.name!r} {when}"
    if mode:
        told = refused(snapshot.name, kind, mode, f"within {timeout:g} s" if timeout else "")
    message = f"{told} ({snapshot.held} of {snapshot.slots} held"
    message += f", {snapshot.waiting} waiting)" if snapshot.waiting else ")"
    if snapshot.paused:
        message += "; it is paused by an operator"
        message += f" ({snapshot.paused_reason})" if snapshot.paused_reason else ""
    if other:
        message += f"; it is in use as a {snapshot.kind}"
    if by_name and timeout and not (snapshot.held or snapshot.paused):
        message += "; something else has the lock of this name, perhaps a transaction_lock()"
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
        reason="paused" if snapshot.paused else "full",
    )
    error._snapshot = snapshot
    return error
