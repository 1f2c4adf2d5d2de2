"""Threads of application locks that are struck, dropped or stopped half-way: what they leave to the others."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any

import pytest

from django_sqlsem.backends.applock import pool as applock_pool
from django_sqlsem.backends.applock.pool import LockPool
from django_sqlsem.backends.applock.sessions import INSIDE
from django_sqlsem.core.threads import Turn
from django_sqlsem.database import sockets
from tests.backends.applock.test_pieces import Silent
from tests.support.interruptions import SoftLimit
from tests.support.threads import run_in_threads, wait_until


def session() -> Any:
    return SimpleNamespace(
        ended="", waiting=False, kept=False, held={}, unclear={}, last_used=0.0, lock=Turn(lambda: None, INSIDE)
    )


def pool_of(*sessions: Any) -> LockPool:
    pool = LockPool("default")
    pool._sessions = list(sessions)
    return pool


@pytest.mark.parametrize("form", ["own", "shared"])
def test_a_use_that_was_dropped_does_not_end_the_use_of_another(form: str) -> None:
    """One that was struck on its way into the block leaves a generator, and that goes with the last traceback."""
    used = session()
    pool = pool_of(used)
    dropped: list[Any] = []

    def struck(_nth: int) -> None:
        use: Any = pool.own(used) if form == "own" else pool.shared("key")
        use.__enter__()
        dropped.append(use)

    run_in_threads(1, struck)
    assert used.lock.acquire(timeout=10), "the one who has left does not have it any more"
    dropped.clear()
    assert used.lock.locked()
    assert not run_in_threads(1, lambda _nth: used.lock.acquire(blocking=False))[0]
    used.lock.release()


def interrupted_after(nth: int, act: Callable[[], object]) -> bool:
    """Do it, interrupted after the nth call in the library, of a C function too. Return whether it was."""
    left = nth

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if event in ("return", "c_return") and frame.f_globals.get("__name__", "").startswith("django_sqlsem"):
            left -= 1
            if left == 0:
                raise SoftLimit("interrupted")

    sys.setprofile(interrupt)
    try:
        act()
    except SoftLimit:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_a_thread_that_is_interrupted_as_it_connects_lets_others_connect() -> None:
    def connect(_nth: int) -> bool:
        got = sockets.gate.acquire(timeout=10)
        sockets.gate.release()
        return got

    nth = 1
    while interrupted_after(nth, lambda: sockets.opening(object)):
        assert run_in_threads(1, connect) == [True], nth
        nth += 1
    assert nth > 20


@pytest.mark.parametrize("ends", [None, SoftLimit("struck")])
def test_a_use_that_ends_or_fails_is_over(ends: Exception | None) -> None:
    used = session()
    pool = pool_of(used)
    for use in (pool.own(used), pool.shared("key")):
        with contextlib.suppress(SoftLimit), use:
            assert used.lock.locked()
            if ends is not None:
                raise ends
        assert not used.lock.locked()


@pytest.mark.parametrize("kept", [False, True])
def test_a_turn_that_was_left_is_taken_and_one_that_is_used_is_not(kept: bool) -> None:
    """Whoever looks walks over no other thread's stack, which Python 3.11 does not survive at times."""
    turn, tracebacks, leave = Turn(lambda: None, INSIDE), list[BaseException](), threading.Event()

    def acquire() -> None:
        turn.acquire()
        leave.wait()
        raise SoftLimit("interrupted")

    # The same function as if it stood in the backend's own modules.
    in_backend = FunctionType(acquire.__code__, globals() | {"__name__": INSIDE[0]}, closure=acquire.__closure__)

    def use() -> None:
        try:
            in_backend()
        except SoftLimit as error:
            if kept:  # as an error reporter keeps it, with all frames
                tracebacks.append(error)

    user = threading.Thread(target=use)
    user.start()
    wait_until(turn.locked)
    assert not turn.acquire(timeout=0.3)
    leave.set()
    assert turn.acquire(timeout=10)
    user.join()


def test_what_a_struck_fork_had_taken_by_then_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork goes on all the same, and what is not known then is never released."""
    monkeypatch.setattr(applock_pool, "FORK_PATIENCE", 30.0)
    first, second = session(), session()
    pool = pool_of(first, second)

    def strike(*args: Any, **options: Any) -> bool:
        raise SoftLimit("struck")

    monkeypatch.setattr(second.lock, "acquire", strike)
    frozen: list[Any] = []
    with pytest.raises(SoftLimit):
        pool.freeze(frozen)
    assert frozen == [sockets.gate, first.lock]
    for each in frozen:
        each.release()


def test_the_watch_cuts_nothing_for_the_time_in_which_the_process_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer may have come meanwhile, and the thread that asked has not run either."""
    asked, watch, looks = Silent(), sockets.Watch(), []
    asked.asked = time.monotonic()
    late = threading.Event()

    def nap(_until: float) -> None:
        looks.append(clock.monotonic())
        if len(looks) == 1:
            clock.away = 60.0
        elif len(looks) == 3:
            late.set()
        time.sleep(0.01)

    clock: Any = SimpleNamespace(away=0.0)
    clock.monotonic = lambda: time.monotonic() + clock.away
    monkeypatch.setattr(sockets, "time", clock)
    monkeypatch.setattr(watch, "_take_steps", nap)
    real = watch._watched

    class Answered(dict[int, Any]):
        """By the second look the thread that asked has had time to read its answer."""

        def items(self) -> Any:
            if len(looks) > 1:
                asked.asked = 0.0
            return super().items()

    watch._watched = Answered(real)
    watch.add(asked)
    assert late.wait(30)
    assert not asked.was_cut.is_set()
    watch.remove(asked)
