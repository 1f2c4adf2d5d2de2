"""Telling people of a deadlock: the log, the history of each name, and the error of the wait that is broken off."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from django_sqlsem.exceptions import DeadlockError
from django_sqlsem.identity import HolderIdentity
from django_sqlsem.naming import resource_for

if TYPE_CHECKING:
    from django_sqlsem.deadlocks.snapshots import DeadlockSnapshot
    from django_sqlsem.holds import Hold
    from django_sqlsem.keeper import Keeper

logger = logging.getLogger("django_sqlsem")


def error(hold: Hold, deadlock: DeadlockSnapshot) -> DeadlockError:
    """Return the error that breaks a wait off."""
    name = hold.claim.resource.name
    return DeadlockError(f"Waiting for {name!r} was broken off, as it could not have ended: {deadlock}.", deadlock)


def tell(keeper: Keeper, deadlock: DeadlockSnapshot, youngest: Hold, *, broken: bool) -> None:
    """Log a deadlock, and note it in the history of each name."""
    claim = youngest.claim
    name = claim.resource.name
    end = f" The last wait, for {name!r}, was broken off." if broken else ""
    logger.error("Deadlock: %s.%s", deadlock, end, extra={"semaphores": deadlock.names, "broken": broken})
    if keeper.history is None:
        return
    for wait in {each.name: each for each in deadlock.waits}.values():
        who = HolderIdentity(wait.host, wait.pid, wait.thread, wait.label, wait.user, "")
        theirs = dataclasses.replace(claim, resource=resource_for(wait.name, claim.resource.kind), holder=who)
        keeper.history.deadlock(theirs, wait.age, f"{deadlock}.{end}")
