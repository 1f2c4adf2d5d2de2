"""Telling the rest of the program what became of an acquire or a permit: the log at DEBUG, and the signals."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from django_sqlsem.clocks import boot_now
from django_sqlsem.signals import acquire_timed_out, permit_acquired, permit_released

if TYPE_CHECKING:
    from django_sqlsem.exceptions import AcquireTimeoutError
    from django_sqlsem.holds import Hold
    from django_sqlsem.permits import Permit
    from django_sqlsem.semaphores import Semaphore

logger = logging.getLogger("django_sqlsem")


def held(hold: Hold) -> float:
    """Return for how many seconds a permit was held, until its release began; 0 if it never was."""
    return max(0.0, (hold.releasing_since or boot_now()) - hold.granted_at) if hold.granted_at else 0.0


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
        permit_released.send_robust(type(semaphore), semaphore=semaphore, permit=permit, held=held(permit._hold))


async def areleased(permit: Permit) -> None:
    """A permit was given back by a coroutine."""
    if permit_released.heard:
        semaphore = permit.semaphore
        await permit_released.asend_robust(type(semaphore), semaphore=semaphore, permit=permit, held=held(permit._hold))


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
