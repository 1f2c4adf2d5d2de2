"""What a block of a test acquired and gave back; and what a busy call is told, made up."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django_sqlsem import identity
from django_sqlsem.busy import Busy
from django_sqlsem.naming import Name, validate_name
from django_sqlsem.semaphores import Semaphore
from django_sqlsem.signals import acquire_timed_out, permit_acquired, permit_released
from django_sqlsem.snapshots import HolderSnapshot, SlotState


@dataclass(slots=True)
class Acquisition:
    """One permit that was granted inside the block."""

    name: str
    #: The numbers of its slots.
    slots: tuple[int, ...]
    #: Seconds that it was waited for.
    waited: float
    #: Seconds that it was held; ``None``: it was not given back inside the block.
    held: float | None = None

    @property
    def released(self) -> bool:
        """Whether it was given back inside the block."""
        return self.held is not None


class Recorded(list[Acquisition]):
    """The permits that were granted, in their order, and the names of which no slot was free in time."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []

    @property
    def names(self) -> list[str]:
        """The names of the permits, in the order of the grants."""
        return [each.name for each in self]


@contextlib.contextmanager
def recorded(*targets: Name | Semaphore) -> Iterator[Recorded]:
    """Record what any thread or task of this process acquires inside the block; given names: of these only.

    Yields a list of ``Acquisition``, which grows while the block runs. Names are those of calls: filled in, where a
    decorator has a template. Raises ``TypeError`` or ``ValueError`` for a bad name.
    """
    wanted = {target.name if isinstance(target, Semaphore) else validate_name(target) for target in targets}
    found, by_permit = Recorded(), dict[int, tuple[Any, Acquisition]]()

    def acquired(permit: Any, waited: float, **kwargs: Any) -> None:
        if not wanted or permit.name in wanted:
            found.append(Acquisition(permit.name, permit.slots, waited))
            by_permit[id(permit._hold)] = (permit._hold, found[-1])

    def released(permit: Any, held: float, **kwargs: Any) -> None:
        if id(permit._hold) in by_permit:
            by_permit[id(permit._hold)][1].held = held

    def refused(error: Any, **kwargs: Any) -> None:
        if not wanted or error.name in wanted:
            found.refused.append(error.name)

    listeners: list[tuple[Any, Any]] = [
        (permit_acquired, acquired),
        (permit_released, released),
        (acquire_timed_out, refused),
    ]
    for signal, listener in listeners:
        signal.inline.connect(listener, weak=False)
    try:
        yield found
    finally:
        for signal, listener in listeners:
            signal.inline.disconnect(listener)


def make_busy(name: Name, *, holders: int = 1, waiting: int = 0, retry_after: int = 1) -> Busy:
    """Return what an ``on_busy`` callable gets, made up: for tests that call it themselves.

    ``holders``: how many hold a slot, each for a second so far, in this process's name; or give your own
    ``HolderSnapshot`` by ``dataclasses.replace()``. Raises ``TypeError`` or ``ValueError`` for a bad name.
    """
    name, who, now = validate_name(name), identity.current(), datetime.datetime.now(datetime.UTC)
    second = datetime.timedelta(seconds=1)

    def holder(slot: int) -> HolderSnapshot:
        return HolderSnapshot(
            name=name,
            slot=slot,
            state=SlotState.HELD,
            token=slot,
            host=who.host,
            pid=who.pid,
            thread=who.thread,
            label=who.label,
            user=who.user,
            acquired_at=now - second,
            expires_at=now + 59 * second,
            age=1.0,
            lease_left=59.0,
        )

    return Busy(name, tuple(holder(slot) for slot in range(1, holders + 1)), waiting, retry_after)
