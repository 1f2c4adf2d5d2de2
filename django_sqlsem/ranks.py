"""The rank of a task that was refused: it keeps its place in the queue until it comes back.

A task that is away is never granted, so that no slot is idle for its sake. When it comes back it goes before all who
came after its first try, and how soon it should come back follows from how many are before it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from typing import TYPE_CHECKING

from django_sqlsem import scopes
from django_sqlsem.calls import Call, policy_for
from django_sqlsem.estimates import retry_after
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from django_sqlsem.exceptions import AcquireTimeoutError
    from django_sqlsem.semaphores import Semaphore

logger = logging.getLogger("django_sqlsem")


def ranked(semaphore: Semaphore, call: Call) -> Semaphore:
    """Return the semaphore as this very task asks for it, if it would be sent again when it is busy."""
    task_id = _task_id(call)
    if not task_id or policy_for(semaphore, call) != "retry":
        return semaphore
    return dataclasses.replace(semaphore, rank=_ticket(task_id))


def step_aside(semaphore: Semaphore, call: Call, refusal: AcquireTimeoutError) -> float:
    """Keep the rank of a task that will be sent again. Returns in how many seconds that should be."""
    snapshot, task_id = refusal._snapshot, _task_id(call)
    if snapshot is None or not task_id or scopes.in_event_loop():
        return refusal.retry_after
    twin = next((holder for holder in snapshot.holders if holder.label.endswith(f"[{task_id}]")), None)
    if twin is not None:
        # The broker took the first copy for lost: visibility timeout, or a connection that broke.
        logger.warning(
            "%s was delivered twice: its other copy holds slot %d of %r, on %s pid %d.",
            twin.label,
            twin.slot,
            snapshot.name,
            twin.host,
            twin.pid,
            extra={"semaphore": snapshot.name, "what": "delivered_twice", "task_id": task_id},
        )
        return refusal.retry_after
    try:
        return ranked(semaphore._named(snapshot.name), call)._step_aside(lambda before: retry_after(snapshot, before))
    except BackendError as error:  # the rank is a courtesy; the task comes back without it
        _not_kept(call, snapshot.name, task_id, error)
        return refusal.retry_after


def hand_on(semaphore: Semaphore, call: Call, refusal: AcquireTimeoutError, task_id: str) -> None:
    """Let a task that comes back under another id have the rank that was kept for this one."""
    if refusal._snapshot is None or not task_id or not _task_id(call) or scopes.in_event_loop():
        return
    try:
        ranked(semaphore._named(refusal.name), call)._hand_rank_on(_ticket(task_id))
    except BackendError as error:
        _not_kept(call, refusal.name, task_id, error)


def _ticket(task_id: str) -> str:
    return hashlib.sha256(task_id.encode()).hexdigest()[:32]


def _not_kept(call: Call, name: str, task_id: str, error: BackendError) -> None:
    extra = {"semaphore": name, "what": "rank_not_kept", "task_id": task_id}
    logger.debug("The rank of %s could not be kept: %s", call.label, error, extra=extra)


def _task_id(call: Call) -> str:
    return call.task.id if call.task is not None else ""
