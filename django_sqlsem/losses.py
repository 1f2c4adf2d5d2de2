"""Telling the program that a permit was lost: the log, the signal, and the callbacks on a thread of their own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django_sqlsem.signals import permit_lost
from django_sqlsem.snapshots import LossReason

if TYPE_CHECKING:
    from django_sqlsem.holds import Hold

logger = logging.getLogger("django_sqlsem")


def tell(hold: Hold) -> None:
    """Log the loss of a hold, then run its callbacks and the signal's receivers: never on the calling thread."""
    loss = hold.loss
    if loss is None or hold.foreign:
        return
    name = hold.claim.resource.name
    if loss.reason is not LossReason.FORGOTTEN:
        logger.error("A permit of %r was lost: %s.", name, loss, extra={"semaphore": name, "reason": loss.reason})
    permit: Any = hold.permit()
    if permit is None or not (hold.callbacks or permit_lost.receivers):
        return

    def run() -> None:
        for callback in list(hold.callbacks):
            call_back(callback, permit)
        permit_lost.send_robust(type(permit.semaphore), semaphore=permit.semaphore, permit=permit, loss=loss)

    threading.Thread(target=run, name="sqlsem-on-lost", daemon=True).start()


def call_back_soon(callback: Callable[[Any], object], permit: object) -> None:
    """Run one callback on a thread of its own."""
    threading.Thread(target=call_back, args=(callback, permit), name="sqlsem-on-lost", daemon=True).start()


def call_back(callback: Callable[[Any], object], permit: object) -> None:
    """Run one callback; its exception is logged."""
    try:
        callback(permit)
    except Exception:
        logger.exception("An on_lost callback failed.")
