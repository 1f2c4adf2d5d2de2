"""Make a semaphore busy, held, lost or asked to stop, wherever it really lives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from django_sqlsem import refusals, scopes, stops
from django_sqlsem.factories import semaphore
from django_sqlsem.keepers import all_holds
from django_sqlsem.naming import Name, validate_name, validate_slots
from django_sqlsem.permits import Permit
from django_sqlsem.semaphores import Semaphore
from django_sqlsem.snapshots import Loss, LossReason
from django_sqlsem.testing.threads import blocking


def _name(target: Name | Semaphore) -> str:
    return target.name if isinstance(target, Semaphore) else validate_name(target)


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
    wanted = validate_slots(slots) if slots is not None else 1 if found.mode else blocking(found.status).slots

    def take() -> Permit:
        with scopes.as_stranger():
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
