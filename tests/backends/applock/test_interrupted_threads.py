"""Threads of application locks that are struck, dropped or stopped half-way: what they leave to the others."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from django_sqlsem.backends.applock import pool as applock_pool
from django_sqlsem.backends.applock.pool import LockPool
from django_sqlsem.backends.applock.sessions import INSIDE
from django_sqlsem.core.turns import Turn
from django_sqlsem.database import sockets
from tests.backends.applock.test_pieces import Silent
from tests.support.interruptions import SoftLimit
from tests.support.threads import run_in_threads


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
        next(use.gen)
        dropped.append(use)

    run_in_threads(1, struck)
    assert used.lock.acquire(timeout=10), "the one who has left does not have it any more"
    dropped.clear()
    assert used.lock.locked()
    assert not run_in_threads(1, lambda _nth: used.lock.acquire(blocking=False))[0]
    used.lock.release()


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


def test_a_module_that_changed_nothing_does_not_keep_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others import gevent wherever it is installed, for what they would do under it."""
    for name in ("gevent", "eventlet"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    turn = Turn(lambda: None, INSIDE)
    run_in_threads(1, lambda _nth: turn.acquire())
    assert turn.acquire(timeout=10)


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

    def sleep(_seconds: float) -> None:
        looks.append(clock.monotonic())
        if len(looks) == 1:
            clock.away = 60.0
        elif len(looks) == 3:
            late.set()
        time.sleep(0.01)

    clock: Any = SimpleNamespace(sleep=sleep, away=0.0)
    clock.monotonic = lambda: time.monotonic() + clock.away
    monkeypatch.setattr(sockets, "time", clock)
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
