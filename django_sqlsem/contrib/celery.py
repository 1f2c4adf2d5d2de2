"""Celery: a busy task is sent again for later, without spending its retries."""

from __future__ import annotations

import functools
import logging
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.core.clocks import chance
from django_sqlsem.decorators.tasks import SentAgain, entered, is_below, is_entered

if TYPE_CHECKING:
    from celery.exceptions import Reject, Retry

logger = logging.getLogger("django_sqlsem")

#: Seconds. Brokers such as Redis deliver a message twice if it is put off for longer than their visibility timeout.
MAX_COUNTDOWN: Final = 300.0
#: Seconds. RabbitMQ's quorum queues have delays of whole seconds, and none of 0.
MIN_COUNTDOWN: Final = 1.0
#: For how long a worker pauses before it gives a message back that it could not send again, in seconds.
PAUSE_BEFORE_REJECT: Final = 1.0


@dataclass(frozen=True, slots=True)
class CeleryTask:
    """A task that a Celery worker is running."""

    task: Any
    body: Any = None
    #: What ``retry()`` sends goes to the broker.
    makes_queries = False

    @property
    def label(self) -> str:
        return f"{self.task.name}[{self.task.request.id}]"

    @property
    def id(self) -> str:
        """The task's id, which it keeps when it is sent again."""
        return str(self.task.request.id or "")

    def entered(self) -> AbstractContextManager[None]:
        """Celery itself says whether a task was called directly, but not that ``self.run()`` was."""
        return entered(self.id, self.body)

    def retry(self, retry_after: int, error: Exception) -> SentAgain:
        try:
            return SentAgain(exception=retry(self.task, retry_after, error))
        finally:
            del error  # if it is raised, its traceback keeps this frame


def running(wrapper: Callable[..., Any], args: tuple[Any, ...]) -> CeleryTask | None:
    """Return the Celery task whose body is ``wrapper``, if a worker is running it right now, else ``None``."""
    task = _current()
    if not task or not is_body(task, wrapper) or task.request.called_directly or task.request.is_eager:
        return None
    found = CeleryTask(task._get_current_object(), wrapper)
    return None if is_entered(found.id, wrapper) or _is_broadcast(task) else found


def runs_at_once(wrapper: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether it is the body of a task that was called by ``apply()``, or with ``task_always_eager``."""
    task = _current()
    return bool(task and is_body(task, wrapper) and task.request.is_eager and not task.request.called_directly)


def label() -> str:
    """Return what operators are shown about the running task, if there is one, else an empty string."""
    task = _current()
    return CeleryTask(task).label if task and getattr(task.request, "id", None) else ""


def _current() -> Any:
    return getattr(sys.modules.get("celery"), "current_task", None)  # never imported for its own sake


def _is_broadcast(task: Any) -> bool:
    """Whether the message is for every worker, or for several queues: sent again it would come to all of them again.

    Each copy that is busy then makes as many more, without end.
    """
    delivery = task.request.delivery_info or {}
    exchange, key = delivery.get("exchange"), str(delivery.get("routing_key") or "")
    got_by = 0
    for queue in task.app.amqp.queues.values() if exchange else ():
        # A queue has an exchange of its own, or is bound to some besides.
        bound = [
            each for each in (queue, *queue.bindings) if each.exchange is not None and each.exchange.name == exchange
        ]
        if any(each.exchange.type == "fanout" for each in bound):
            return True
        got_by += any(_gets(each.exchange.type, str(each.routing_key or ""), key) for each in bound)
    return got_by > 1


def _gets(kind: str, binding: str, key: str) -> bool:
    """Whether a queue that is bound by ``binding`` gets the messages with this routing key."""
    if kind != "topic":
        return kind == "direct" and binding == key
    # A star is one word, and a hash any number of them; here each word is followed by a dot.
    words = ({"*": r"[^.]*\.", "#": r"(?:[^.]*\.)*"}.get(word, re.escape(word + ".")) for word in binding.split("."))
    return re.fullmatch("".join(words), key + ".") is not None


def is_body(task: Any, wrapper: Callable[..., Any]) -> bool:
    """Is ``wrapper`` what the task runs, below whatever else decorates its ``run``?"""
    return is_below(wrapper, getattr(task, "_orig_run", None), task.run)


def retry(task: Any, retry_after: int, error: Exception) -> Retry:
    """Send the running task again, and return the exception to raise.

    The countdown is ``retry_after`` seconds, give or take a half, so that tasks refused together don't come back
    together; at least one second. The attempt does not count: the message carries the number of retries that it came
    with, and ``task.max_retries``, which all of the task's calls share, is neither asked nor touched.

    If the broker does not take the message, the task must not vanish. With ``acks_late`` the worker gives back the
    message that it has: raises ``celery.exceptions.Reject``. Else the task fails: raises ``error``.
    """
    from celery.app.task import Task
    from celery.exceptions import Retry, SoftTimeLimitExceeded

    request = task.request
    countdown = chance.uniform(max(0.5 * retry_after, MIN_COUNTDOWN), max(1.5 * retry_after, MIN_COUNTDOWN))
    countdown = min(countdown, MAX_COUNTDOWN)
    # What the sender has hidden from logs and events stays hidden.
    hidden = {name: text for name in ("argsrepr", "kwargsrepr") if (text := getattr(request, name, None)) is not None}
    # Not task.retry(), which counts, and fails a task whose own retries were given a limit of their own.
    message = task.signature_from_request(request, countdown=countdown, retries=request.retries, **hidden)
    try:
        # Not the task's own apply_async(), which the message has passed: one that sends nothing twice would lose it.
        Task.apply_async(task, message.args, message.kwargs, **message.options)
    except SoftTimeLimitExceeded:  # it may have been sent
        raise
    except Exception as unsent:
        outcome = "is given back to the broker" if task.acks_late else "fails"
        logger.error(
            "%s[%s] is busy, could not be sent again, and %s: %s",
            task.name,
            request.id,
            outcome,
            unsent,
            extra={"semaphore": getattr(error, "name", ""), "what": "retry_not_sent", "task_id": request.id},
        )
        if not task.acks_late:
            try:
                raise error from unsent
            finally:
                del error  # its traceback keeps this frame
        time.sleep(PAUSE_BEFORE_REJECT)  # the broker will deliver it at once
        raise _given_back()(unsent, requeue=True) from unsent
    when: Any = countdown
    again = Retry(exc=error.with_traceback(None), when=when, sig=message)
    again.args = again.args[1:]  # the first is itself: it would be garbage, with all the frames in its traceback
    return again


@functools.cache
def _given_back() -> type[Reject]:
    from celery.exceptions import Ignore, Reject

    class GivenBack(Reject, Ignore):
        """The worker gives the message back. ``autoretry_for`` leaves it alone only as it is an ``Ignore`` too."""

    GivenBack.__qualname__ = "GivenBack"
    return GivenBack


def __getattr__(name: str) -> Any:
    """Return the class that needs Celery: a worker's parent process unpickles it by its name."""
    if name == "GivenBack":
        return _given_back()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
