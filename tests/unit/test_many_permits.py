"""One thread that holds thousands of permits: neither its next acquire nor its next release looks through them."""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import django_sqlsem
from django_sqlsem import AlreadyHeldError, current_permit, semaphore
from django_sqlsem.locks import rlock, rwlock
from django_sqlsem.runtime import callers

pytestmark = pytest.mark.process_side

PACKAGE = os.path.dirname(django_sqlsem.__file__)
FEW, MANY = 10, 600
#: So often is each act repeated, as now and then what has been given back is left out of a trail.
TIMES = 24


def steps(act: Callable[[], object]) -> int:
    """Return how many instructions of the package's own code an act takes in this thread."""
    counted = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal counted
        if event == "call" and not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # CPython 3.12 tells no instructions unless a frame has asked by now
    sys.settrace(trace)
    try:
        for _ in range(TIMES):
            act()
    finally:
        sys.settrace(before)
    return counted


@contextlib.contextmanager
def holding(world: str, count: int) -> Iterator[None]:
    """Hold so many permits of other names; half as many more have been given back in between."""
    with contextlib.ExitStack() as stack:
        for number in range(count):
            stack.enter_context(semaphore(f"other {number}", using=world).acquire())
            if number % 2:
                semaphore("passing", using=world).acquire().release()
        yield


def pair(world: str) -> None:
    semaphore("name", using=world).acquire().release()


def block(world: str) -> None:
    with semaphore("name", using=world) as permit:
        assert current_permit() is current_permit("name", using=world) is permit


def reentry(world: str) -> None:
    with rlock("name", using=world), rlock("name", using=world):
        pass


def refused(world: str) -> None:
    assert semaphore("name", using=world).try_acquire() is None


def mistaken(world: str) -> None:
    with semaphore("name", slots=2, using=world), pytest.raises(AlreadyHeldError):
        semaphore("name", slots=2, using=world).acquire()


def upgrade(world: str) -> None:
    with rwlock("name", using=world).upgradable() as permit:
        permit.upgrade()


def asked(world: str) -> None:
    assert current_permit("name", using=world) is None


ACTS = (pair, block, reentry, refused, mistaken, upgrade, asked)


@pytest.mark.parametrize("act", ACTS)
def test_what_a_thread_holds_costs_its_next_acquire_nothing(database, act):
    with contextlib.ExitStack() as stack:
        if act is refused:
            permit = stack.enter_context(semaphore("name", using=database).acquire())
            permit.detach()
        act(database)  # whatever is done once for a name is done
        with holding(database, FEW):
            few = steps(lambda: act(database))
        with holding(database, MANY):
            many = steps(lambda: act(database))
    # Now and then what has been given back is left out. A look at all, each time, takes thirty times so many steps.
    assert few > 0, "nothing was counted"
    assert many < 1.5 * few + TIMES * MANY, (few, many)


def test_nothing_is_left_of_what_was_given_back(database):
    """In a context of its own, in which nothing was taken before."""
    contextvars.Context().run(_take_and_give_back, database)


def _take_and_give_back(database):
    asked = set(callers._asked)
    kept = semaphore("kept", using=database).acquire()
    try:
        for number in range(200):
            semaphore(f"passing {number % 7}", using=database).acquire().release()
        trail = callers._trail.get()
        assert trail is not None
        assert trail.length <= 2 * callers._SHORT
        detached = [semaphore("detached", slots=20, using=database).acquire() for _ in range(20) if _detach_last()]
        assert [*callers.taken_by(callers.current_caller(), database, "")] == []
    finally:
        kept.release()
    for permit in detached:
        permit.release()
    assert set(callers._asked) <= asked


def _detach_last() -> bool:
    if (permit := current_permit("detached")) is not None:
        permit.detach()
    return True
