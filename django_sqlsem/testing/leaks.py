"""Whether anything is still held or waited for when it should not be."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from django_sqlsem.holds import Hold, State
from django_sqlsem.keepers import all_holds, all_keepers
from django_sqlsem.notices import held
from django_sqlsem.signals import permit_acquired, permit_forgotten
from django_sqlsem.wording import numbers

#: How many lines of the program's own are told of each acquire.
LINES: Final = 3
#: For how long what is on its way back may take, in seconds.
GRACE: Final = 5.0
#: The library's own files: where in them a permit was made says nothing to its users.
_OURS: Final = str(Path(__file__).parent.parent)


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
    before = {id(hold) for hold in all_holds()}
    places: dict[int, list[str]] = {}
    forgotten: list[str] = []

    def took(permit: Any, **kwargs: Any) -> None:
        places[id(permit._hold)] = _place()

    def forgot(name: str, loss: Any, held: float, **kwargs: Any) -> None:
        forgotten.append(f"{name!r}, which was held for {held:.3g} s: {loss}")

    permit_acquired.inline.connect(took, weak=False)
    permit_forgotten.inline.connect(forgot, weak=False)
    try:
        yield
        left = _left(before)
        _told()
    finally:
        permit_acquired.inline.disconnect(took)
        permit_forgotten.inline.disconnect(forgot)
    _refuse(left, places, forgotten)


def _left(before: set[int]) -> list[Hold]:
    """Return what is still there after what is on its way back has come back."""
    give_up = time.monotonic() + GRACE
    while True:
        for keeper in all_keepers():
            keeper.post(lambda: None)  # what finalisers have left to do
        found = [hold for hold in all_holds() if id(hold) not in before and not hold.foreign]
        left = [hold for hold in found if _is_left(hold)]
        ending = [hold for hold in found if hold.abandoned or (hold.grant is not None and hold.permit() is None)]
        if not ending or time.monotonic() > give_up:
            return left
        time.sleep(0.01)


def _is_left(hold: Hold) -> bool:
    if hold.grant is None:
        return hold.state is State.QUEUED and not hold.abandoned
    return hold.kept and not hold.releasing.locked() and not hold.released


def _told() -> None:
    """Wait until it has been said which permits were forgotten."""
    for thread in threading.enumerate():
        if thread.name == "sqlsem-on-lost" and thread is not threading.current_thread():
            deadline = time.monotonic() + GRACE
            while time.monotonic() < deadline:
                try:
                    thread.join(GRACE)
                    break
                except RuntimeError:  # it is about to be started
                    time.sleep(0.001)


def _place() -> list[str]:
    """Return where the program is now, innermost line last; the library's own lines are left out."""
    frames = [frame for frame in traceback.extract_stack(limit=40) if not frame.filename.startswith(_OURS)]
    frames = [frame for frame in frames if f"{'/'}django{'/'}dispatch{'/'}" not in frame.filename.replace("\\", "/")]
    return [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line or ''}" for frame in frames[-LINES:]]


def _refuse(left: list[Hold], places: dict[int, list[str]], forgotten: list[str]) -> None:
    __tracebackhide__ = True
    lines: list[str] = []
    for hold in left:
        lines.append(f"  {_described(hold)}")
        lines += [f"    {place}" for place in places.get(id(hold), [])]
    lines += [f"  forgotten: {each}" for each in forgotten]
    if not lines:
        return
    keepers = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("sqlsem-keeper"))
    if keepers:
        lines.append(f"  threads at work for it: {', '.join(keepers)}")
    raise AssertionError("\n".join(["Semaphores are not free as they should be:", *lines]))


def _described(hold: Hold) -> str:
    claim = hold.claim
    who = f"thread {claim.holder.thread}" + (f", {claim.holder.label}" if claim.holder.label else "")
    if hold.grant is None:
        return f"waiting: {claim.resource.name!r} on {hold.keeper.alias!r} by {who}"
    lost = f", lost ({hold.loss})" if hold.loss else ""
    slots = f"slot {numbers(hold.grant.slots)}"
    return f"held: {claim.resource.name!r} on {hold.keeper.alias!r}, {slots}, for {held(hold):.3g} s by {who}{lost}"
