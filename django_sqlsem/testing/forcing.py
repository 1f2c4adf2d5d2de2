"""Make a semaphore busy, held, lost or asked to stop, wherever it really lives."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from django.db import connections

from django_sqlsem.core.names import Name, validate_name, validate_slots
from django_sqlsem.locks import acquire
from django_sqlsem.locks.permit import Permit
from django_sqlsem.locks.semaphore import Semaphore, semaphore
from django_sqlsem.runtime import callers, events
from django_sqlsem.runtime.keepers import all_acquisitions
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django_sqlsem.runtime.acquisition import Acquisition

T = TypeVar("T")


def _name(target: Name | Semaphore) -> str:
    return target.name if isinstance(target, Semaphore) else validate_name(target)


@dataclass(eq=False)
class _Block:
    """An open block, and what it wants of a name."""

    name: str
    busy: bool = False
    loss: Loss | None = None
    stop_by: str = ""


class _OpenBlocks(list[_Block]):
    """The open blocks. Locks ask them only while there are any."""

    def refuses(self, name: str) -> bool:
        """Whether every acquire of this name is to be refused."""
        return any(block.busy and block.name == name for block in self)

    def granted(self, acquisition: Acquisition) -> None:
        """Have a new grant suffer what the blocks of its name want, the innermost first."""
        for block in reversed(self):
            if block.name == acquisition.request.resource.name:
                if block.loss is not None:
                    acquisition.lose(block.loss)
                if block.stop_by:
                    events.ask_to_stop(acquisition, block.stop_by)


_blocks = _OpenBlocks()
_lock = threading.Lock()


@contextlib.contextmanager
def _open(block: _Block) -> Iterator[None]:
    with _lock:
        _blocks.append(block)
        acquire.forcing = _blocks
    try:
        yield
    finally:
        with _lock:
            _blocks.remove(block)
            if not _blocks:
                acquire.forcing = None


def busy(target: Name | Semaphore) -> contextlib.AbstractContextManager[None]:
    """Refuse every acquire of this name in this process, at once and whatever its timeout, inside the block."""
    return _open(_Block(_name(target), busy=True))


@contextlib.contextmanager
def held(target: Name | Semaphore, slots: int | None = None, *, total: int | None = None) -> Iterator[list[Permit]]:
    """Hold ``slots`` slots of a semaphore (all of them, if omitted) as another process would, inside the block.

    ``total`` is the semaphore's number of slots, where ``target`` is a name that is not in use yet. The permits
    are yielded: release one to let a waiter in (in an async test by ``await permit.arelease()``). Raises
    ``AcquireTimeoutError`` if so many are not free.
    """
    found = target if isinstance(target, Semaphore) else semaphore(validate_name(target), total)
    wanted = validate_slots(slots) if slots is not None else 1 if found.mode else blocking(found.status).slots

    def take() -> Permit:
        with callers.as_stranger():
            permit = holder._as(found.kind, found.mode).acquire()
            permit.detach()
            return permit

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
    if isinstance(target, Permit):
        target._acquisition.lose(loss)
        yield
        return
    name = _name(target)
    for acquisition in all_acquisitions():
        if acquisition.request.resource.name == name and acquisition.grant is not None:
            acquisition.lose(loss)
    with _open(_Block(name, loss=loss)):
        yield


@contextlib.contextmanager
def stop_requested(target: Name | Semaphore | Permit, by: str = "a test") -> Iterator[None]:
    """Ask the holder of a permit to stop, or every one that this process has or gets of this name inside the block.

    Their ``stop_requested`` is set for good, ``stop_requested_by`` is ``by``, and ``on_stop_requested`` runs. Nothing
    is written, and nothing is taken from them.
    """
    if isinstance(target, Permit):
        events.ask_to_stop(target._acquisition, by)
        yield
        return
    name = _name(target)
    for acquisition in all_acquisitions():
        if acquisition.request.resource.name == name and acquisition.grant is not None:
            events.ask_to_stop(acquisition, by)
    with _open(_Block(name, stop_by=by)):
        yield


def blocking(function: Callable[[], T]) -> T:
    """Call what waits for the database a moment; in an async test, on another thread than the event loop's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    return elsewhere(function)


def elsewhere(function: Callable[[], T]) -> T:
    """Call it on another thread, outside of any transaction of this one; connections that it opens are closed."""

    def work() -> T:
        try:
            return function()
        finally:
            connections.close_all()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
