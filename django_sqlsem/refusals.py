"""What a caller is told when no slot was free, and tests that ask for just that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_sqlsem import stops
from django_sqlsem.estimates import retry_after
from django_sqlsem.exceptions import AcquireTimeoutError, never_met, wrong_kind
from django_sqlsem.modes import refused

if TYPE_CHECKING:
    from django_sqlsem.holds import Hold
    from django_sqlsem.snapshots import Loss, SemaphoreSnapshot

#: Names that ``testing.busy()`` makes busy, with the depth of its blocks.
forced: dict[str, int] = {}


#: Names whose new permits ``testing.lost()`` makes lost ones.
lost: dict[str, Loss] = {}
#: Names whose new holders ``testing.stop_requested()`` asks to stop, and in whose name.
asked: dict[str, str] = {}


def forced_refusal(name: str) -> bool:
    """Whether a test wants this name to be busy."""
    return bool(forced) and name in forced


def befall(hold: Hold) -> None:
    """Have a new grant suffer what a test wants."""
    name = hold.claim.resource.name
    if name in lost:
        hold.lose(lost[name])
    if name in asked:
        stops.ask(hold, asked[name])


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
