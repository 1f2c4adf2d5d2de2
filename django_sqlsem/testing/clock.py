"""A clock that tests move: leases run out, waits end and periods pass without anybody sleeping.

The library reads the time inside the process in one place, ``clocks.boot_now()``: the host's boot clock and an offset,
which is 0 outside of tests. ``clock()`` lets a test add to it. Nothing is frozen: time goes on as always, from further
ahead. The offset stays when the block ends, since a clock that other threads read must never go back. It is not
``time.time()`` nor ``time.monotonic()``: nothing else in the process sees it, and what freezegun or time-machine do
to those is not seen here.

The databases' clocks can't be moved. The rows of what this process holds are moved instead, by as much into the past,
so that their leases run out for other processes too. Those of other processes' permits are left alone. Application
locks on SQL Server have no lease: the holder is told that it lost its permit, and the lock stays taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from django.apps import apps
from django.db import connections
from django.db.models import F

from django_sqlsem.core import clocks
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.durations import Seconds, to_seconds
from django_sqlsem.runtime import acquisition as acquisitions
from django_sqlsem.runtime import callers
from django_sqlsem.runtime.acquisition import Acquisition, State
from django_sqlsem.runtime.keeper import Keeper
from django_sqlsem.runtime.keepers import all_acquisitions, all_keepers
from django_sqlsem.runtime.loop import ThreadLoop
from django_sqlsem.testing.forcing import elsewhere

#: How often other tasks of an event loop may run before a wait jumps.
PASSES: Final = 20
#: For how long to wait for a keeper's thread to look around, in seconds.
KEEPER_ANSWERS_WITHIN: Final = 30.0
#: A step ends this many seconds after what it leads to.
AFTER: Final = 1e-6

_open: list[Clock] = []
_moving = threading.RLock()
_opened_here: contextvars.ContextVar[Clock | None] = contextvars.ContextVar("sqlsem_clock", default=None)


class Clock:
    """The library's clock in this process, as one block of a test may move it. Made by ``clock()``."""

    def __init__(self, *, autojump: bool | None) -> None:
        #: Which waits end at once: ``True``: all of this process; ``False``: none; ``None``: those of who opened it.
        self.autojump = autojump
        #: Seconds that this block has moved the clock ahead so far.
        self.elapsed = 0.0
        self._opener = callers.current_caller()
        self._closed = False

    def advance(self, seconds: Seconds, *, renewed: bool = False) -> None:
        """Move the clock ahead by ``seconds`` (a number or a ``timedelta``).

        As if the whole process had stood still: a permit whose lease was shorter is lost (``LossReason.EXPIRED``), and
        its slot is free for others. ``renewed=True``: as if it had gone on running, with its leases renewed all the
        time. Either way periods pass, what is held for longer than ``max_hold`` is given back, and waits end that
        would have. All of that is done when this returns.

        Raises ``TypeError`` or ``ValueError`` for a bad length, and ``RuntimeError`` after the block.
        """
        length = to_seconds(seconds, what="seconds")
        assert length is not None  # noqa: S101
        if self._closed:
            raise RuntimeError("This clock's block has ended: open another one with clock().")
        with _moving:
            if not renewed:
                self._move(length, still=True)
                return
            end = boot_now() + length
            while (left := end - boot_now()) > 0:
                self._move(min([left, *(at - boot_now() + AFTER for at in _ahead())]), still=False)

    def _move(self, seconds: float, *, still: bool) -> None:
        keepers = all_keepers()
        with _at_rest(keepers):
            if not still:
                for keeper in keepers:
                    _renew(keeper, seconds)
            clocks.move(max(0.0, seconds), still=still)
        self.elapsed += max(0.0, seconds)
        for keeper in keepers:
            _move_rows(keeper, seconds, still=still)
            _look_around(keeper)

    # Waits.

    def jumps(self, acquisition: Acquisition) -> bool:
        """Whether the wait that begins is one to jump over."""
        if self.autojump is not None:
            return self.autojump
        waiter = acquisition.caller.itself if acquisition.caller is not None else None
        if waiter is self._opener:
            return True
        # What a thread runs in an event loop keeps it from moving the clock.
        mine = threading.current_thread() is self._opener or _opened_here.get() is self
        return mine and isinstance(self._opener, threading.Thread) and isinstance(waiter, asyncio.Task)

    def jump_over(self, acquisition: Acquisition) -> None:
        """Let time pass, as if this process ran on, until a wait has been answered or is over."""
        with _moving:
            while not acquisition.answer.told:
                now, until = boot_now(), acquisition.patient_until
                ends = [at for at in [*_ahead(), until] if at is not None and at > now]
                if until is not None and until <= now:
                    ends.append(now)
                if not ends:
                    return  # for ever: another thread must end it
                self._move(min(ends) - now + AFTER, still=False)


@contextlib.contextmanager
def clock(*, autojump: bool | None = None) -> Iterator[Clock]:
    """Yield the library's clock, to be moved by ``advance()`` inside the block.

    A wait jumps to its end if nothing else could move the clock meanwhile: one of the thread or task that opened the
    block, or of what it calls. ``autojump=True`` has all waits of the process jump, ``autojump=False`` none. A wait
    with ``timeout=None`` only jumps to what ends it, if that is known. Blocks may be nested; they move the same clock.
    Waits of ``transaction_lock()`` and ``table_lock()`` are the database's own, and take their time.
    """
    mine = Clock(autojump=autojump)
    reset = _opened_here.set(mine)
    with _moving:
        _open.append(mine)
        acquisitions.jumper = _JUMPER
    try:
        yield mine
    finally:
        mine._closed = True
        with _moving:
            _open.remove(mine)
            if not _open:
                acquisitions.jumper = None
        with contextlib.suppress(ValueError):  # a fixture may end in another context than it began in
            _opened_here.reset(reset)


class _Jumper:
    """Asks the open clocks about waits."""

    def jump(self, acquisition: Acquisition) -> None:
        if (found := self._clock_for(acquisition)) is not None:
            found.jump_over(acquisition)

    async def ajump(self, acquisition: Acquisition, future: asyncio.Future[None]) -> None:
        """Jump over a task's wait, once its first try has failed and the other tasks had their turn."""
        while self._clock_for(acquisition) is not None and not future.done() and acquisition.state is State.NEW:  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # - a keeper's thread asks the database, and sets no event
        for _ in range(PASSES):
            if future.done():
                return
            await asyncio.sleep(0)
        if (found := self._clock_for(acquisition)) is not None:
            found.jump_over(acquisition)

    def _clock_for(self, acquisition: Acquisition) -> Clock | None:
        return next((each for each in reversed(list(_open)) if each.jumps(acquisition)), None)


_JUMPER: Final = _Jumper()


@contextlib.contextmanager
def _at_rest(keepers: list[Keeper]) -> Iterator[None]:
    """Have the keepers' threads wait for the block's end: a renewal under way would count from before the jump."""
    goes_on = threading.Event()

    def rest(begun: threading.Event) -> None:
        begun.set()
        goes_on.wait(KEEPER_ANSWERS_WITHIN)

    try:
        for keeper in keepers:
            if isinstance(keeper.loop, ThreadLoop) and keeper.acquisitions:
                _await(keeper, rest)
        yield
    finally:
        goes_on.set()


def _await(keeper: Keeper, step: Callable[[threading.Event], None]) -> None:
    """Have a keeper's thread take a step, and wait for the event that it sets."""
    event = threading.Event()
    keeper.post(lambda: step(event))
    if not event.wait(KEEPER_ANSWERS_WITHIN):
        raise RuntimeError(f"The keeper of {keeper.alias!r} does not answer.")


def _ahead() -> list[float]:
    """Return the instants to come at which something ends by itself: long holds, and waits."""
    now, found = boot_now(), []
    for acquisition in all_acquisitions():
        if acquisition.has_slots and acquisition.max_hold is not None:
            found.append(acquisition.granted_at + acquisition.max_hold)
        elif acquisition.state is State.QUEUED and acquisition.patient_until is not None:
            found.append(acquisition.patient_until)
    return [at for at in found if at > now]


def _live(keeper: Keeper) -> list[Acquisition]:
    found = list(keeper.acquisitions.values())
    return [each for each in found if each.has_slots and each.kept and each.loss is None]


def _renew(keeper: Keeper, seconds: float) -> None:
    """Do what renewals would do for this many seconds."""
    if not isinstance(keeper.loop, ThreadLoop):
        keeper.backend.renew(keeper.own, [acquisition.acquired for acquisition in _live(keeper)])
    for acquisition in _live(keeper):
        acquisition.lease.deadline += seconds
        acquisition.lease.renew_at += seconds


def _move_rows(keeper: Keeper, seconds: float, *, still: bool) -> None:
    """Have what this process holds be taken earlier in the database, and run out earlier unless it was renewed."""
    ids = [
        row
        for acquisition in list(keeper.acquisitions.values())
        if acquisition.grant is not None
        for row in acquisition.grant.row_ids
    ]
    if keeper.backend.process_local or keeper.backend.released_on_disconnect or not ids:
        return
    permits = [acquisition.permit_id for acquisition in list(keeper.acquisitions.values())]
    by = round(seconds * 1e6)
    changes: dict[str, Any] = {"acquired_us": F("acquired_us") - by}
    if still:
        changes["expires_us"] = F("expires_us") - by

    def update() -> None:
        rows = (
            apps.get_model("sqlsem", "SlotRow")
            .objects.using(keeper.alias)
            .filter(pk__in=ids, permit_id__in=permits, expires_us__isnull=False)
        )
        rows.update(**changes)

    connection = connections[keeper.alias]
    if connection.vendor == "sqlite" and connection.in_atomic_block:
        update()  # its one writer is this transaction
    else:
        elsewhere(update)


def _look_around(keeper: Keeper) -> None:
    """Have a keeper see what the new time means: what is lost, what is overdue, who gets what became free."""

    def look(done: threading.Event) -> None:
        keeper.look_at_all()
        done.set()

    for acquisition in _live(keeper):
        acquisition.current_loss()
    if isinstance(keeper.loop, ThreadLoop):
        if keeper.acquisitions:
            _await(keeper, look)
            _await(keeper, threading.Event.set)  # it works off its inbox before it looks
    else:
        for acquisition in _live(keeper):
            if acquisition.overdue and not acquisition.fenced:
                keeper.forget(acquisition, acquisition.overdue)
        keeper.look_at_all()
    waiting, now = [each for each in list(keeper.acquisitions.values()) if each.state is State.QUEUED], boot_now()
    for acquisition in waiting:
        if acquisition.patient_until is not None and acquisition.patient_until <= now:
            keeper.withdraw(acquisition)  # unless it was granted at this very moment
            if acquisition.state is State.OVER:
                acquisition.tell()
