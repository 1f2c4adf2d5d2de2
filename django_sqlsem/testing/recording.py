"""What a block of a test acquired, gave back or left; and what a busy call is told, made up."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from django import dispatch

from django_sqlsem.busy import Busy
from django_sqlsem.core import identity
from django_sqlsem.core.names import Name, validate_name
from django_sqlsem.core.text import numbers
from django_sqlsem.locks.semaphore import Semaphore
from django_sqlsem.runtime.acquisition import Acquisition, State
from django_sqlsem.runtime.keepers import all_acquisitions, all_keepers
from django_sqlsem.signals import acquire_timed_out, permit_acquired, permit_forgotten, permit_released
from django_sqlsem.snapshots import HolderSnapshot, SlotState, who
from django_sqlsem.testing.forcing import listening

#: How many lines of the program's own are told of each acquire.
LINES: Final = 3
#: For how long what is on its way back may take, in seconds.
COMING_BACK: Final = 5.0
#: The library's own files, and Django's that send signals: where in them a permit was made says nothing to users.
_BETWEEN: Final = (str(Path(__file__).parent.parent), str(Path(dispatch.__file__).parent))


@dataclass(slots=True)
class RecordedAcquisition:
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


class Recorded(list[RecordedAcquisition]):
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

    Yields a list of ``RecordedAcquisition``, which grows while the block runs. Names are those of calls:
    filled in, where a decorator has a template. Raises ``TypeError`` or ``ValueError`` for a bad name.
    """
    wanted = {target.name if isinstance(target, Semaphore) else validate_name(target) for target in targets}
    found, by_permit = Recorded(), dict[int, tuple[Any, RecordedAcquisition]]()

    def acquired(permit: Any, waited: float, **kwargs: Any) -> None:
        if not wanted or permit.name in wanted:
            found.append(RecordedAcquisition(permit.name, permit.slots, waited))
            by_permit[id(permit._acquisition)] = (permit._acquisition, found[-1])

    def released(permit: Any, held: float, **kwargs: Any) -> None:
        if id(permit._acquisition) in by_permit:
            by_permit[id(permit._acquisition)][1].held = held

    def refused(error: Any, **kwargs: Any) -> None:
        if not wanted or error.name in wanted:
            found.refused.append(error.name)

    with listening((permit_acquired, acquired), (permit_released, released), (acquire_timed_out, refused)):
        yield found


def make_busy(name: Name, *, holders: int = 1, waiting: int = 0, retry_after: int = 1) -> Busy:
    """Return what an ``on_busy`` callable gets, made up: for tests that call it themselves.

    ``holders``: how many hold a slot, each for a second so far, in this process's name; or give your own
    ``HolderSnapshot`` by ``dataclasses.replace()``. Raises ``TypeError`` or ``ValueError`` for a bad name.
    """
    name, now = validate_name(name), datetime.datetime.now(datetime.UTC)
    second = datetime.timedelta(seconds=1)

    def holder(slot: int) -> HolderSnapshot:
        return HolderSnapshot(
            name=name,
            slot=slot,
            state=SlotState.HELD,
            token=slot,
            **who(identity.current()),
            acquired_at=now - second,
            expires_at=now + 59 * second,
            age=1.0,
            lease_left=59.0,
        )

    return Busy(name, tuple(holder(slot) for slot in range(1, holders + 1)), waiting, retry_after)


# What was left.


def assert_nothing_held() -> None:
    """Raise ``AssertionError`` if this process holds a permit, or waits for one, on any database.

    The message tells names, slots, by whom and for how long.
    """
    __tracebackhide__ = True
    _refuse(_left(set()), {}, [])


@contextlib.contextmanager
def nothing_held() -> Iterator[None]:
    """Raise ``AssertionError`` at the end of the block if anything is left of what was taken inside it.

    That is what is still held or waited for, and what was forgotten: a permit that was garbage-collected, or whose
    thread or task has ended, or that passed ``max_hold``, comes back, but not because the program gave it back. The
    message tells the lines that took each. A block that raises is not looked at.
    """
    __tracebackhide__ = True
    with watched() as refuse:
        yield
        refuse()


@contextlib.contextmanager
def watched() -> Iterator[Callable[[], None]]:
    """Watch what is taken inside the block. Yields what raises, called at its end, if anything of it is left."""
    before = {id(acquisition) for acquisition in all_acquisitions()}
    places: dict[int, list[str]] = {}
    forgotten: list[str] = []

    def took(permit: Any, **kwargs: Any) -> None:
        places[id(permit._acquisition)] = _place()

    def forgot(name: str, loss: Any, held: float, **kwargs: Any) -> None:
        forgotten.append(f"{name!r}, which was held for {held:.3g} s: {loss}")

    def refuse() -> None:
        __tracebackhide__ = True
        left = _left(before)
        _told()
        _refuse(left, places, forgotten)

    with listening((permit_acquired, took), (permit_forgotten, forgot)):
        yield refuse


def _left(before: set[int]) -> list[Acquisition]:
    """Return what is still there after what is on its way back has come back."""
    give_up = time.monotonic() + COMING_BACK
    while True:
        for keeper in all_keepers():
            keeper.post(lambda: None)  # what finalisers have left to do
        found = [
            acquisition
            for acquisition in all_acquisitions()
            if id(acquisition) not in before and not acquisition.foreign
        ]
        left = [acquisition for acquisition in found if _is_left(acquisition)]
        ending = [
            acquisition
            for acquisition in found
            if acquisition.abandoned or (acquisition.grant is not None and acquisition.permit() is None)
        ]
        if not ending or time.monotonic() > give_up:
            return left
        time.sleep(0.01)


def _is_left(acquisition: Acquisition) -> bool:
    if acquisition.grant is None:
        return acquisition.state is State.QUEUED and not acquisition.abandoned
    return acquisition.kept and acquisition.has_slots


def _told() -> None:
    """Wait until it has been said which permits were forgotten."""
    for thread in threading.enumerate():
        if thread.name == "sqlsem-on-lost" and thread is not threading.current_thread():
            deadline = time.monotonic() + COMING_BACK
            while time.monotonic() < deadline:
                try:
                    thread.join(COMING_BACK)
                    break
                except RuntimeError:  # it is about to be started
                    time.sleep(0.001)


def _place() -> list[str]:
    """Return where the program is now, innermost line last; the library's own lines are left out."""
    frames = [frame for frame in traceback.extract_stack(limit=40) if not frame.filename.startswith(_BETWEEN)]
    return [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line or ''}" for frame in frames[-LINES:]]


def _refuse(left: list[Acquisition], places: dict[int, list[str]], forgotten: list[str]) -> None:
    __tracebackhide__ = True
    lines: list[str] = []
    for acquisition in left:
        lines.append(f"  {_described(acquisition)}")
        lines += [f"    {place}" for place in places.get(id(acquisition), [])]
    lines += [f"  forgotten: {each}" for each in forgotten]
    if not lines:
        return
    keepers = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("sqlsem-keeper"))
    if keepers:
        lines.append(f"  threads at work for it: {', '.join(keepers)}")
    raise AssertionError("\n".join(["Semaphores are not free as they should be:", *lines]))


def _described(acquisition: Acquisition) -> str:
    request = acquisition.request
    who = f"thread {request.holder.thread}" + (f", {request.holder.label}" if request.holder.label else "")
    if acquisition.grant is None:
        return f"waiting: {request.resource.name!r} on {acquisition.keeper.alias!r} by {who}"
    lost = f", lost ({acquisition.loss})" if acquisition.loss else ""
    slots = f"slot {numbers(acquisition.grant.slots)}"
    where = f"{request.resource.name!r} on {acquisition.keeper.alias!r}"
    return f"held: {where}, {slots}, for {acquisition.held_for:.3g} s by {who}{lost}"
