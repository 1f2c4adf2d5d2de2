"""Telling the program that a permit was lost: the log, the signal, and the callbacks on a thread of their own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django_sqlsem.notices import held
from django_sqlsem.signals import permit_forgotten, permit_lost
from django_sqlsem.snapshots import LossReason
from django_sqlsem.wording import numbers

if TYPE_CHECKING:
    from django_sqlsem.holds import Hold

logger = logging.getLogger("django_sqlsem")


def tell(hold: Hold) -> None:
    """Log the loss of a hold, then run its callbacks and the signal's receivers: never on the calling thread."""
    loss = hold.loss
    if loss is None or hold.foreign:
        return
    name = hold.claim.resource.name
    forgotten, lasted = loss.reason is LossReason.FORGOTTEN, held(hold)
    if not forgotten:
        logger.error(
            "A permit of %r was lost: %s.",
            name,
            loss,
            extra={"semaphore": name, "what": "lost", "reason": loss.reason, "by": loss.by, "held": lasted},
        )
    permit: Any = hold.permit()
    wanted = permit is not None and (hold.callbacks or permit_lost.heard)
    if not wanted and not (forgotten and permit_forgotten.heard):
        return

    def run() -> None:
        if permit is not None:
            for callback in list(hold.callbacks):
                call_back(callback, permit)
            semaphore = permit.semaphore
            permit_lost.send_robust(type(semaphore), semaphore=semaphore, permit=permit, loss=loss, held=lasted)
        if forgotten:
            permit_forgotten.send_robust(None, name=name, using=hold.keeper.alias, loss=loss, held=lasted)

    threading.Thread(target=run, name="sqlsem-on-lost", daemon=True).start()


def log_forgotten(hold: Hold, why: str) -> None:
    """Log that the program forgot a permit, which is given back."""
    name = hold.claim.resource.name
    who = f"{name!r} slot {numbers(hold.grant.slots) if hold.grant else '-'}"
    extra = {"semaphore": name, "what": "forgotten", "reason": LossReason.FORGOTTEN, "held": held(hold)}
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
