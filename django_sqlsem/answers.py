"""How the caller of an acquisition waits for the keeper's answer: its thread, or its task."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING, Final, Protocol, cast

if TYPE_CHECKING:
    from django_sqlsem.clients import Client
    from django_sqlsem.holds import Hold
    from django_sqlsem.keeper import Keeper


class Jumper(Protocol):
    """What tests do instead of waiting: see ``testing.clock()``."""

    def jump(self, hold: Hold) -> None:
        """Let time pass until the wait is over, if this one is not to be waited for."""

    async def ajump(self, hold: Hold, future: asyncio.Future[None]) -> None:
        """Do the same for a task."""


jumper: Jumper | None = None

#: For how long a thread blocks at a time, in seconds.
_AT_A_TIME: Final = 1.0


class _TakenLock:
    """A lock to wait for: unlike an Event, a signal that raises in the waiter leaves it as it was.

    A thread that blocks hears nothing of what another raises in it (``PyThreadState_SetAsyncExc``), as the time limits
    of some workers do. So only the main thread blocks for long, which signals interrupt.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.release = self._lock.release
        self.woken = False

    def acquire(self, timeout: float) -> bool:
        """Wait until it is released, for so many seconds, or for ever if they are negative."""
        if threading.current_thread() is threading.main_thread():
            return self._lock.acquire(timeout=timeout)
        deadline = math.inf if timeout < 0 else time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if self._lock.acquire(timeout=max(0.0, min(left, _AT_A_TIME))):
                return True
            if left <= _AT_A_TIME:
                return False


class Awaited:
    """The part of an acquisition that its caller waits for."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.error: BaseException | None = None
        #: Whom a view that asks would answer, if it can be told whether they are there.
        self.client: Client | None = None
        self._future: asyncio.Future[None] | None = None
        self.await_anew()

    def await_anew(self) -> None:
        """Forget that there was an answer."""
        self.told = False
        self._unanswered = _TakenLock()

    @property
    def woken(self) -> bool:
        """Whether the answer has reached whoever waits: a messenger may be struck after it is ``told``."""
        return self._unanswered.woken

    def take_error(self) -> BaseException:
        """Return the error and forget it: its traceback keeps what its callers hold, and must be on no cycle."""
        error, self.error = self.error, None
        assert error is not None  # noqa: S101
        return error

    def prepare_future(self) -> asyncio.Future[None]:
        """Let the running event loop be told; returns the future to wait for."""
        self._future = asyncio.get_running_loop().create_future()
        return self._future

    def wait(self, timeout: float | None) -> bool:
        """Block this thread until there is an answer. Return whether there is one; not if its client has gone."""
        if jumper is not None:
            jumper.jump(cast("Hold", self))
        return self.wait_here(timeout) if self.client is None else self.client.wait(cast("Hold", self), timeout)

    async def wait_on_loop(self, timeout: float | None) -> bool:
        """Wait for the answer on the running event loop, in place of a thread that has asked."""
        future = self.prepare_future()
        try:
            if not self.told:  # else the answer came before the future
                await asyncio.wait({future}, timeout=timeout)
            return self.told
        finally:
            self._future = None

    def wait_here(self, timeout: float | None) -> bool:
        """Block this thread until there is an answer, whatever becomes of the client."""
        return self._unanswered.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))

    async def answered(self, future: asyncio.Future[None], timeout: float | None) -> None:
        """Wait for the future of an answer, or until the timeout."""
        if jumper is not None:
            await jumper.ajump(cast("Hold", self), future)
        await asyncio.wait({future}, timeout=timeout)

    def answer(self, error: BaseException | None = None) -> None:
        """Wake whoever waits: it was granted, or ``error`` happened. Called from any thread."""
        unanswered = self._unanswered  # whoever has slept through it waits for another one soon
        self.error = error
        self.told = True
        with contextlib.suppress(RuntimeError):  # it was answered before
            unanswered.release()
        if self._future is not None:
            self._resolve(self._future)
        unanswered.woken = True

    def _resolve(self, future: asyncio.Future[None]) -> None:
        def resolve() -> None:
            if not future.done():
                future.set_result(None)

        try:
            future.get_loop().call_soon_threadsafe(resolve)
        except RuntimeError:  # the loop was closed under its waiters: nobody will take the permit
            self.keeper.abandon(cast("Hold", self))
