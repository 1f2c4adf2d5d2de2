"""Make a semaphore busy, held, lost or asked to stop, wherever it really lives."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from django.db import connections

from django_sqlsem.backends.base import check_slots
from django_sqlsem.core.modes import RWLOCK, SHARED, WHOLE
from django_sqlsem.core.names import Name, validate_name, validate_slots
from django_sqlsem.exceptions import AcquireTimeoutError
from django_sqlsem.locks.acquire import refused_by_tests
from django_sqlsem.locks.permit import Permit
from django_sqlsem.locks.semaphore import Semaphore, semaphore
from django_sqlsem.runtime import callers, events
from django_sqlsem.runtime.acquisition import Acquisition
from django_sqlsem.runtime.keepers import all_acquisitions
from django_sqlsem.signals import PermitSignal, permit_acquired
from django_sqlsem.snapshots import Loss, LossReason

T = TypeVar("T")


def _name(target: Name | Semaphore) -> str:
    return target.name if isinstance(target, Semaphore) else validate_name(target)


@contextlib.contextmanager
def busy(target: Name | Semaphore) -> Iterator[None]:
    """Refuse every acquire of this name in this process, at once and whatever its timeout, inside the block."""
    name = _name(target)
    refused_by_tests.append(name)
    try:
        yield
    finally:
        refused_by_tests.remove(name)


@contextlib.contextmanager
def listening(*listeners: tuple[PermitSignal, Callable[..., None]]) -> Iterator[None]:
    """Have signals of the library's heard at once, in the threads that send them, inside the block."""
    for signal, listener in listeners:
        signal.inline.connect(listener, weak=False)
    try:
        yield
    finally:
        for signal, listener in listeners:
            signal.inline.disconnect(listener)


@contextlib.contextmanager
def _done_to(target: Name | Semaphore | Permit, act: Callable[[Acquisition], object]) -> Iterator[None]:
    """Have something done to a permit, or to all that this process holds, or gets inside the block, of a name."""
    if isinstance(target, Permit):
        act(target._acquisition)
        yield
        return
    name = _name(target)

    def granted(permit: Permit, **kwargs: object) -> None:
        if permit.name == name:
            act(permit._acquisition)

    for acquisition in all_acquisitions():
        if acquisition.name == name and acquisition.grant is not None:
            act(acquisition)
    with listening((permit_acquired, granted)):
        yield


@contextlib.contextmanager
def held(target: Name | Semaphore, slots: int | None = None, *, total: int | None = None) -> Iterator[list[Permit]]:
    """Hold ``slots`` slots of a lock (all of them, if omitted) as another process would, inside the block.

    ``total`` is the semaphore's number of slots, where ``target`` is a name that is not in use yet. One that is in use
    is of its own kind, and any other a semaphore. The permits are yielded: release one to let a waiter in (in an async
    test by ``await permit.arelease()``). Raises ``AcquireTimeoutError`` if fewer are free, and ``ValueError`` for a
    counter.
    """
    found = target if isinstance(target, Semaphore) else semaphore(validate_name(target), total)
    if slots is not None:
        validate_slots(slots)
    status = blocking(found.status)
    if found is not target:
        # All of a lock of readers and writers is the writer's; some of it are readers'.
        found = found._as(status.kind, WHOLE if status.kind == RWLOCK and slots is None else SHARED)
        check_slots(found.name, found.kind, slots)
    wanted = slots or (1 if found.mode else status.slots)

    def take() -> Permit:
        with callers.as_stranger():
            permit = holder._as(found.kind, found.mode)._literal().acquire()
            permit.detach()
            return permit

    if found is not target and total is None and status.slots < wanted:
        raise AcquireTimeoutError(
            f"{found.name!r} has {status.slots} slots as far as is known, not {wanted}: say total=, or give the"
            " semaphore itself."
        )
    holder = semaphore(found.name, found.slots, timeout=0, lease=found.lease, fair=False, using=found.using)
    permits: list[Permit] = []
    try:
        permits.extend(blocking(take) for _nth in range(wanted))
        yield permits
    finally:
        for permit in permits:
            blocking(permit.release)


@contextlib.contextmanager
def lost(target: Name | Semaphore | Permit) -> Iterator[None]:
    """Make a permit, or every permit that this process holds or gets of this name inside the block, a lost one.

    Their ``lost`` is set, ``check()`` raises and ``on_lost`` runs. The slots themselves stay taken until the permits
    are released, as they would for a holder that was cut off.
    """
    loss = Loss(LossReason.EXPIRED, "django_sqlsem.testing.lost() says so")
    with _done_to(target, lambda acquisition: acquisition.lose(loss)):
        yield


@contextlib.contextmanager
def stop_requested(target: Name | Semaphore | Permit, by: str = "a test") -> Iterator[None]:
    """Ask the holder of a permit to stop, or every one that this process has or gets of this name inside the block.

    Their ``stop_requested`` is set for good, ``stop_requested_by`` is ``by``, and ``on_stop_requested`` runs. Nothing
    is written, and nothing is taken from them.
    """
    with _done_to(target, lambda acquisition: events.ask_to_stop(acquisition, by)):
        yield


def blocking(function: Callable[[], T]) -> T:
    """Call what waits for the database a moment; in an async test, on another thread than the event loop's."""
    return function() if callers.running_loop() is None else elsewhere(function)


def elsewhere(function: Callable[[], T]) -> T:
    """Call it on another thread, outside of any transaction of this one; connections that it opens are closed."""

    def work() -> T:
        try:
            return function()
        finally:
            connections.close_all()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
