"""Telling the program that an operator asks it to stop: the log, the signal, and the callbacks on their own thread.

A wish takes nothing away. It is for one grant: whoever gets the slot next knows nothing of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django_sqlsem.signals import permit_stop_requested
from django_sqlsem.snapshots import SOMEBODY

if TYPE_CHECKING:
    from django_sqlsem.holds import Hold

logger = logging.getLogger("django_sqlsem")


def ask(hold: Hold, by: str) -> None:
    """Note, once and for all, that ``by`` asks the holder to stop, and tell the program."""
    whole = hold.part_of or hold
    hold.stop_by = hold.stop_by or by or SOMEBODY
    if whole.foreign or whole.releasing.locked() or not whole.stop_told.acquire(blocking=False):
        return
    whole.stop_by = hold.stop_by
    name = whole.claim.resource.name
    extra = {"semaphore": name, "what": "stop_asked", "by": whole.stop_by}
    logger.warning("The holder of %r is asked to stop by %s.", name, whole.stop_by, extra=extra)
    if whole.stop_callbacks or permit_stop_requested.heard:
        threading.Thread(target=_tell, args=(whole, True), name="sqlsem-on-stop", daemon=True).start()


def call_back(hold: Hold, callback: Callable[[Any], object]) -> None:
    """Have ``callback(permit)`` called on a thread of its own when the holder is asked to stop, or now if it was."""
    hold.stop_callbacks.append(callback)
    if hold.stop_by:  # then whichever thread takes it out of the list calls it
        threading.Thread(target=_tell, args=(hold, False), name="sqlsem-on-stop", daemon=True).start()


def _tell(hold: Hold, signal: bool) -> None:
    permit: Any = hold.permit()
    if permit is None:
        return
    while hold.stop_callbacks:
        try:
            callback = hold.stop_callbacks.popleft()
        except IndexError:  # the other thread was faster
            break
        try:
            callback(permit)
        except Exception:
            extra = {"semaphore": permit.name, "what": "callback_failed"}
            logger.exception("An on_stop_requested callback failed.", extra=extra)
    if signal:
        lock = permit.semaphore
        permit_stop_requested.send_robust(type(lock), semaphore=lock, permit=permit, by=hold.stop_by)
