"""Telling the rest of the program what became of an acquire or a permit: the log at DEBUG, and the signals.

Telling the program that a permit was lost: the log, the signal, and the callbacks on a thread of their own.

Telling the program that an operator asks it to stop: the log, the signal, and the callbacks on their own thread.

A wish takes nothing away. It is for one grant: whoever gets the slot next knows nothing of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.text import numbers
from django_sqlsem.signals import (
    acquire_timed_out,
    permit_acquired,
    permit_forgotten,
    permit_lost,
    permit_released,
    permit_stop_requested,
)
from django_sqlsem.snapshots import SOMEBODY, LossReason

if TYPE_CHECKING:
    from django_sqlsem.exceptions import AcquireTimeoutError
    from django_sqlsem.locks.permit import Permit
    from django_sqlsem.locks.semaphore import Semaphore
    from django_sqlsem.runtime.acquisition import Acquisition


logger = logging.getLogger("django_sqlsem")


def held(acquisition: Acquisition) -> float:
    """Return for how many seconds a permit was held, until its release began; 0 if it never was."""
    return (
        max(0.0, (acquisition.releasing_since or boot_now()) - acquisition.granted_at)
        if acquisition.granted_at
        else 0.0
    )


def granted(permit: Permit) -> None:
    """A permit was granted."""
    _log_grant(permit)
    if permit_acquired.heard:
        semaphore = permit.semaphore
        permit_acquired.send_robust(type(semaphore), semaphore=semaphore, permit=permit, waited=permit.waited)


async def agranted(permit: Permit) -> None:
    """A permit was granted to a coroutine."""
    _log_grant(permit)
    if permit_acquired.heard:
        semaphore = permit.semaphore
        await permit_acquired.asend_robust(type(semaphore), semaphore=semaphore, permit=permit, waited=permit.waited)


def _log_grant(permit: Permit) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "Granted %r, slot %s, after %.3f s.",
            permit.name,
            permit.slots,
            permit.waited,
            extra={
                "semaphore": permit.name,
                "what": "granted",
                "slots": permit.slots,
                "token": permit.token,
                "waited": permit.waited,
            },
        )


def released(permit: Permit) -> None:
    """A permit was given back by its holder."""
    if permit_released.heard:
        semaphore = permit.semaphore
        permit_released.send_robust(type(semaphore), semaphore=semaphore, permit=permit, held=held(permit._acquisition))


async def areleased(permit: Permit) -> None:
    """A permit was given back by a coroutine."""
    if permit_released.heard:
        semaphore = permit.semaphore
        await permit_released.asend_robust(
            type(semaphore), semaphore=semaphore, permit=permit, held=held(permit._acquisition)
        )


def refused(semaphore: Semaphore, error: AcquireTimeoutError, waited: float) -> AcquireTimeoutError:
    """No slot was free in time. Return the error, to be raised."""
    if acquire_timed_out.heard:
        acquire_timed_out.send_robust(type(semaphore), semaphore=semaphore, error=error, waited=waited)
    return error


async def arefused(semaphore: Semaphore, error: AcquireTimeoutError, waited: float) -> AcquireTimeoutError:
    """No slot was free in time for a coroutine. Return the error, to be raised."""
    if acquire_timed_out.heard:
        await acquire_timed_out.asend_robust(type(semaphore), semaphore=semaphore, error=error, waited=waited)
    return error


def tell(acquisition: Acquisition) -> None:
    """Log the loss of a hold, then run its callbacks and the signal's receivers: never on the calling thread."""
    loss = acquisition.loss
    if loss is None or acquisition.foreign:
        return
    name = acquisition.request.resource.name
    forgotten, lasted = loss.reason is LossReason.FORGOTTEN, held(acquisition)
    if not forgotten:
        logger.error(
            "A permit of %r was lost: %s.",
            name,
            loss,
            extra={"semaphore": name, "what": "lost", "reason": loss.reason, "by": loss.by, "held": lasted},
        )
    permit: Any = acquisition.permit()
    wanted = permit is not None and (acquisition.callbacks or permit_lost.heard)
    if not wanted and not (forgotten and permit_forgotten.heard):
        return

    def run() -> None:
        if permit is not None:
            for callback in list(acquisition.callbacks):
                call_back(callback, permit)
            semaphore = permit.semaphore
            permit_lost.send_robust(type(semaphore), semaphore=semaphore, permit=permit, loss=loss, held=lasted)
        if forgotten:
            permit_forgotten.send_robust(None, name=name, using=acquisition.keeper.alias, loss=loss, held=lasted)

    threading.Thread(target=run, name="sqlsem-on-lost", daemon=True).start()


def log_forgotten(acquisition: Acquisition, why: str) -> None:
    """Log that the program forgot a permit, which is given back."""
    name = acquisition.request.resource.name
    who = f"{name!r} slot {numbers(acquisition.grant.slots) if acquisition.grant else '-'}"
    extra = {"semaphore": name, "what": "forgotten", "reason": LossReason.FORGOTTEN, "held": held(acquisition)}
    logger.error("A permit of %s was forgotten (%s) and is given back; use a with block.", who, why, extra=extra)


def call_back_soon(callback: Callable[[Any], object], permit: object) -> None:
    """Run one callback on a thread of its own."""
    threading.Thread(target=call_back, args=(callback, permit), name="sqlsem-on-lost", daemon=True).start()


def call_back(callback: Callable[[Any], object], permit: object) -> None:
    """Run one callback; its exception is logged."""
    try:
        callback(permit)
    except Exception:
        name = getattr(permit, "name", "")
        logger.exception("An on_lost callback failed.", extra={"semaphore": name, "what": "callback_failed"})


def ask(acquisition: Acquisition, by: str) -> None:
    """Note, once and for all, that ``by`` asks the holder to stop, and tell the program."""
    whole = acquisition.part_of or acquisition
    acquisition.stop_by = acquisition.stop_by or by or SOMEBODY
    if whole.foreign or whole.releasing.locked() or not whole.stop_told.acquire(blocking=False):
        return
    whole.stop_by = acquisition.stop_by
    name = whole.request.resource.name
    extra = {"semaphore": name, "what": "stop_asked", "by": whole.stop_by}
    logger.warning("The holder of %r is asked to stop by %s.", name, whole.stop_by, extra=extra)
    if whole.stop_callbacks or permit_stop_requested.heard:
        threading.Thread(target=_tell, args=(whole, True), name="sqlsem-on-stop", daemon=True).start()


def call_back_stop(acquisition: Acquisition, callback: Callable[[Any], object]) -> None:
    """Have ``callback(permit)`` called on a thread of its own when the holder is asked to stop, or now if it was."""
    acquisition.stop_callbacks.append(callback)
    if acquisition.stop_by:  # then whichever thread takes it out of the list calls it
        threading.Thread(target=_tell, args=(acquisition, False), name="sqlsem-on-stop", daemon=True).start()


def _tell(acquisition: Acquisition, signal: bool) -> None:
    permit: Any = acquisition.permit()
    if permit is None:
        return
    while acquisition.stop_callbacks:
        try:
            callback = acquisition.stop_callbacks.popleft()
        except IndexError:  # the other thread was faster
            break
        try:
            callback(permit)
        except Exception:
            extra = {"semaphore": permit.name, "what": "callback_failed"}
            logger.exception("An on_stop_requested callback failed.", extra=extra)
    if signal:
        lock = permit.semaphore
        permit_stop_requested.send_robust(type(lock), semaphore=lock, permit=permit, by=acquisition.stop_by)
