"""What the program is told of an acquisition: the log, the signals, and callbacks on threads of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from django_sqlsem.core.text import numbers
from django_sqlsem.core.threads import DaemonThread
from django_sqlsem.exceptions import AcquireTimeoutError
from django_sqlsem.runtime.acquisition import Acquisition, Announcement
from django_sqlsem.signals import (
    acquire_timed_out,
    permit_acquired,
    permit_forgotten,
    permit_lost,
    permit_released,
    permit_stop_requested,
)
from django_sqlsem.snapshots import SOMEBODY, LossReason

logger = logging.getLogger("django_sqlsem")


P = TypeVar("P")


def granted(permit: P) -> P:
    """Tell that a permit was granted, and return it."""
    if logger.isEnabledFor(logging.DEBUG):
        _log_grant(permit)
    if permit_acquired.receivers or permit_acquired.inline.receivers:
        permit_acquired.send_robust(**_grant(permit))
    return permit


async def agranted(permit: P) -> P:
    """Tell that a permit was granted to a coroutine, and return it."""
    if logger.isEnabledFor(logging.DEBUG):
        _log_grant(permit)
    if permit_acquired.heard:
        await permit_acquired.asend_robust(**_grant(permit))
    return permit


def _grant(permit: Any) -> dict[str, Any]:
    lock = permit.semaphore
    return {"sender": type(lock), "semaphore": lock, "permit": permit, "waited": permit.waited}


def _log_grant(permit: Any) -> None:
    name, slots, waited = permit.name, permit.slots, permit.waited
    extra = {"semaphore": name, "what": "granted", "slots": slots, "token": permit.token, "waited": waited}
    logger.debug("Granted %r, slot %s, after %.3f s.", name, slots, waited, extra=extra)


def released(permit: Any) -> None:
    """Tell that a permit was given back by its holder."""
    if permit_released.receivers or permit_released.inline.receivers:
        permit_released.send_robust(**_release(permit))


async def areleased(permit: Any) -> None:
    """Tell that a permit was given back by a coroutine."""
    if permit_released.heard:
        await permit_released.asend_robust(**_release(permit))


def _release(permit: Any) -> dict[str, Any]:
    lock = permit.semaphore
    return {"sender": type(lock), "semaphore": lock, "permit": permit, "held": permit._acquisition.held_for}


def refused(semaphore: object, error: AcquireTimeoutError, waited: float) -> AcquireTimeoutError:
    """Tell that no slot was free in time. Return the error, to be raised."""
    acquire_timed_out.send_robust(type(semaphore), semaphore=semaphore, error=error, waited=waited)
    return error


async def arefused(semaphore: object, error: AcquireTimeoutError, waited: float) -> AcquireTimeoutError:
    """Tell that no slot was free in time for a coroutine. Return the error, to be raised."""
    await acquire_timed_out.asend_robust(type(semaphore), semaphore=semaphore, error=error, waited=waited)
    return error


def on_lost(permit: Any, callback: Callable[[Any], object]) -> None:
    """Have ``callback(permit)`` called on a thread of its own when the permit is lost, or now if it was."""
    acquisition = permit._acquisition
    acquisition.losing.callbacks.append(callback)
    if acquisition.loss is not None:
        _start("sqlsem-on-lost", _call_all, acquisition.losing, permit)


def tell_lost(acquisition: Acquisition) -> None:
    """Log the loss of a permit, then run its callbacks and the signal's receivers: never on the calling thread."""
    loss = acquisition.loss
    if loss is None or acquisition.foreign:
        return
    name = acquisition.name
    forgotten, lasted = loss.reason is LossReason.FORGOTTEN, acquisition.held_for
    if not forgotten:
        logger.error(
            "A permit of %r was lost: %s.",
            name,
            loss,
            extra={"semaphore": name, "what": "lost", "reason": loss.reason, "by": loss.by, "held": lasted},
        )
    permit = acquisition.permit()
    wanted = permit is not None and (acquisition.losing.callbacks or permit_lost.heard)
    if not wanted and not (forgotten and permit_forgotten.heard):
        return

    def run() -> None:
        if permit is not None:
            _call_all(acquisition.losing, permit)
            lock = permit.semaphore
            permit_lost.send_robust(type(lock), semaphore=lock, permit=permit, loss=loss, held=lasted)
        if forgotten:
            permit_forgotten.send_robust(None, name=name, using=acquisition.keeper.alias, loss=loss, held=lasted)

    _start("sqlsem-on-lost", run)


def log_forgotten(acquisition: Acquisition, why: str) -> None:
    """Log that the program forgot a permit, which is given back."""
    name = acquisition.name
    where = f"{name!r} slot {numbers(acquisition.grant.slots) if acquisition.grant else '-'}"
    held = acquisition.held_for
    extra = {"semaphore": name, "what": "forgotten", "reason": LossReason.FORGOTTEN, "held": held}
    logger.error("A permit of %s was forgotten (%s) and is given back; use a with block.", where, why, extra=extra)


def on_stop_requested(permit: Any, callback: Callable[[Any], object]) -> None:
    """Have ``callback(permit)`` called on a thread of its own when its holder is asked to stop, or now if it was."""
    acquisition = permit._acquisition
    acquisition.stopping.callbacks.append(callback)
    if acquisition.stop_by:
        _start("sqlsem-on-stop", _call_all, acquisition.stopping, permit)


def ask_to_stop(acquisition: Acquisition, by: str) -> None:
    """Note, once and for all, that ``by`` asks the holder to stop, and tell the program. Nothing is taken away.

    The request is for one grant: the next holder of the slot knows nothing of it.
    """
    whole = acquisition.part_of or acquisition
    if not whole.has_permit:
        return  # it is being made: the next renewal says so again
    acquisition.stop_by = acquisition.stop_by or by or SOMEBODY
    if whole.foreign or whole.given_back or not whole.stopping.once():
        return
    whole.stop_by = acquisition.stop_by
    name = whole.name
    extra = {"semaphore": name, "what": "stop_asked", "by": whole.stop_by}
    logger.warning("The holder of %r is asked to stop by %s.", name, whole.stop_by, extra=extra)
    permit = whole.permit()
    if permit is None or not (whole.stopping.callbacks or permit_stop_requested.heard):
        return

    def run() -> None:
        _call_all(whole.stopping, permit)
        lock = permit.semaphore
        permit_stop_requested.send_robust(type(lock), semaphore=lock, permit=permit, by=whole.stop_by)

    _start("sqlsem-on-stop", run)


def _start(name: str, run: Callable[..., None], *args: object) -> None:
    DaemonThread(name, run, *args).start()


def _call_all(notice: Announcement, permit: Any) -> None:
    """Call each callback once, whichever thread comes first; its exception is logged."""
    kind = "on_lost" if notice is permit._acquisition.losing else "on_stop_requested"
    while True:
        try:
            callback = notice.callbacks.popleft()
        except IndexError:
            return
        try:
            callback(permit)
        except (Exception, SystemExit):  # sys.exit() would end no more than this thread
            extra = {"semaphore": permit.name, "what": "callback_failed"}
            logger.exception(f"An {kind} callback failed.", extra=extra)
