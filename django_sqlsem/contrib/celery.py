"""Celery: a busy task is sent again for later, without spending its retries."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from celery.exceptions import Retry

#: Seconds. Brokers such as Redis deliver a message twice if it is put off for longer than their visibility timeout.
MAX_COUNTDOWN: Final = 300.0


def retry(task: Any, retry_after: int, error: Exception) -> Retry:
    """Send the running task again, and return the exception to raise.

    The countdown is ``retry_after`` seconds, give or take a half, so that tasks refused together don't come back
    together. The attempt does not count: ``request.retries`` is one less while the message is made, and
    ``task.max_retries``, which all of the task's calls share, is not touched. Raises ``celery.exceptions.Reject`` if
    the broker can't be reached.
    """
    request = task.request
    countdown = min(retry_after * random.uniform(0.5, 1.5), MAX_COUNTDOWN)  # noqa: S311 - nothing is secret
    counted = request.retries
    request.retries = counted - 1
    try:
        result: Retry = task.retry(exc=error.with_traceback(None), countdown=countdown, throw=False)
    finally:
        request.retries = counted  # handlers of the retry see the true number
    return result
