"""For the tests of projects that use semaphores: make one busy, held or lost, wherever it really lives."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from django_sqlsem import refusals, scopes, stops
from django_sqlsem.factories import semaphore
from django_sqlsem.keepers import all_holds
from django_sqlsem.naming import Name, validate_name, validate_slots
from django_sqlsem.permits import Permit
from django_sqlsem.semaphores import Semaphore
from django_sqlsem.snapshots import Loss, LossReason

__all__ = ["busy", "held", "lost", "stop_requested"]

T = TypeVar("T")


def _name(target: Name | Semaphore) -> str:
    return target.name if isinstance(target, Semaphore) else validate_name(target)


def _blocking(function: Callable[[], T]) -> T:
    """Call what waits for the database a moment; in an async test, on another thread than the event loop's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@contextlib.contextmanager
def busy(target: Name | Semaphore) -> Iterator[None]:
    """Refuse every acquire of this name in this process, at once and whatever its timeout, inside the block."""
    name = _name(target)
    refusals.forced[name] = refusals.forced.get(name, 0) + 1
    try:
        yield
    finally:
        refusals.forced[name] -= 1
        if not refusals.forced[name]:
            del refusals.forced[name]


@contextlib.contextmanager
def held(target: Name | Semaphore, slots: int | None = None, *, total: int | None = None) -> Iterator[list[Permit]]:
    """Hold ``slots`` slots of a semaphore (all of them, if omitted) as somebody else, inside the block.

    ``total`` is the semaphore's number of slots, where ``target`` is a name that is not in use yet. The permits
    are yielded: release one to let a waiter in (in an async test by ``await permit.arelease()``). Raises
    ``AcquireTimeoutError`` if so many are not free.
    """
    found = target if isinstance(target, Semaphore) else semaphore(validate_name(target), total)
    wanted = validate_slots(slots) if slots is not None else 1 if found.mode else _blocking(found.status).slots

    def take() -> Permit:
        with scopes.as_stranger():
            permit = holder._as(found.kind, found.mode).acquire()
            permit.detach()
            return permit

    holder = semaphore(found.name, found.slots, timeout=0, lease=found.lease, fair=False, using=found.using)
    permits: list[Permit] = []
    try:
        permits.extend(_blocking(take) for _nth in range(wanted))
        yield permits
    finally:
        for permit in permits:
            _blocking(permit.release)


@contextlib.contextmanager
def lost(target: Name | Semaphore | Permit) -> Iterator[None]:
    """Make a permit, or every permit that this process holds or gets of this name inside the block, a lost one.

    Their ``lost`` is set, ``check()`` raises and ``on_lost`` runs. The slots themselves stay taken until the permits
    are released, as they would for a holder that was cut off.
    """
    loss = Loss(LossReason.EXPIRED, "django_sqlsem.testing.lost() says so")
    if isinstance(target, Permit):
        target._hold.lose(loss)
        yield
        return
    name = _name(target)
    for hold in all_holds():
        if hold.claim.resource.name == name and hold.grant is not None:
            hold.lose(loss)
    outer = refusals.lost.get(name)
    refusals.lost[name] = loss
    try:
        yield
    finally:
        if outer is None:
            del refusals.lost[name]
        else:
            refusals.lost[name] = outer


@contextlib.contextmanager
def stop_requested(target: Name | Semaphore | Permit, by: str = "a test") -> Iterator[None]:
    """Ask the holder of a permit to stop, or every one that this process has or gets of this name inside the block.

    Their ``stop_requested`` is set for good, ``stop_requested_by`` is ``by``, and ``on_stop_requested`` runs. Nothing
    is written, and nothing is taken from them.
    """
    if isinstance(target, Permit):
        stops.ask(target._hold, by)
        yield
        return
    name = _name(target)
    for hold in all_holds():
        if hold.claim.resource.name == name and hold.grant is not None:
            stops.ask(hold, by)
    outer = refusals.asked.get(name)
    refusals.asked[name] = by
    try:
        yield
    finally:
        if outer is None:
            del refusals.asked[name]
        else:
            refusals.asked[name] = outer
