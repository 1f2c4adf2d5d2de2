"""A busy call: what a view answers, what ``on_busy`` may not answer, and what the log says of it.

The log has the first busy calls of each name in full, and of a flood how many more there were.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from django_sqlsem.busy import Busy, busy_response, of_ninja
from django_sqlsem.core import forks, testmode
from django_sqlsem.core.text import wait
from django_sqlsem.decorators.calls import Call
from django_sqlsem.decorators.views import leads_to
from django_sqlsem.locks.acquire import refused_by_tests
from django_sqlsem.runtime.chores import Chore

logger = logging.getLogger("django_sqlsem")

#: What ``contrib`` has registered: each returns a framework's own answer, or ``None`` for views that are not its own.
frameworks: list[Callable[[Busy, Call, int], HttpResponse | None]] = []


def answer_view(busy: Busy, call: Call, status: int) -> HttpResponse:
    """Return the answer of a busy view: by Django REST framework if the view is its, else JSON or a page."""
    for framework in frameworks:
        if (response := framework(busy, call, status)) is not None:
            return response
    assert call.request is not None  # noqa: S101
    return busy_response(busy, call.request, status)


def refuse_answer(answer: object, on_busy: object, call: Call, wrapper: Callable[..., Any]) -> None:
    """Raise ``TypeError`` if a view can't answer what its ``on_busy`` has returned.

    ``None`` and awaitables of synchronous views never can. What else is no response may suit a framework that makes
    one of it, or a function that only gets the request.
    """
    if isinstance(answer, HttpResponseBase):
        return
    refuse_coroutine(answer, on_busy, wrapper, "the view ")
    name = getattr(wrapper, "__qualname__", repr(wrapper))
    view = getattr(call.request and call.request.resolver_match, "func", None)
    if answer is None or (view is not None and leads_to(view, wrapper) and not of_ninja(view)):
        raise TypeError(f"on_busy {on_busy!r} of the view {name} must return an HttpResponse, not {answer!r}.")


def refuse_coroutine(answer: object, on_busy: object, wrapper: Callable[..., Any], what: str = "") -> None:
    """Raise ``TypeError`` if the ``on_busy`` of a synchronous function is asynchronous."""
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        name = getattr(wrapper, "__qualname__", repr(wrapper))
        raise TypeError(f"on_busy {on_busy!r} is asynchronous, but {what}{name} is not.")


#: How many busy calls of one name are logged in full within ``SECONDS``, in each process.
IN_FULL: Final = 10
#: After this many seconds the rest are logged as one record, and the next ones in full again.
SECONDS: Final = 60.0
#: Names that are kept in mind. Of the oldest of more, the rest are logged early.
NAMES: Final = 1000


@dataclass(slots=True)
class _Spell:
    """The busy calls of one name since the first of them."""

    began: float
    calls: int = 0
    #: The level of the rest: that of the worst of them.
    level: int = logging.INFO


_lock = threading.Lock()
#: By name; the oldest first.
_spells: dict[str, _Spell] = {}


class LogRest(Chore):
    """Logs the rest of a flood from a keeper's thread, if no busy call comes that does."""

    name = "log of busy calls"
    wakes = False

    def __init__(self, keeper: object) -> None:
        """It is the same for every keeper."""

    def next_at(self) -> float:
        return 0.0 if _spells else math.inf

    def run(self, now: float) -> None:
        log_rest()


def log_busy(busy: Busy, work: str, outcome: str, *, level: int = logging.WARNING, **extra: object) -> None:
    """Log that a piece of work found no free slot, and what came of it.

    ``level``: INFO where that is as it was designed. In a flood of one name it is DEBUG, and one record a minute tells
    their number.
    """
    logger.log(
        _level(busy.name, level),
        "Busy: %s %s, because %s",
        work.encode("unicode_escape").decode("ascii"),  # as Django does: a path may hold line breaks
        outcome,
        _because(busy),
        extra={
            "semaphore": busy.name,
            "what": "busy",
            "reason": busy.reason,
            "holders": len(busy.holders),
            "waiting": busy.waiting,
            "retry_after": busy.retry_after,
            **extra,
        },
    )


def _because(busy: Busy) -> str:
    """Say why. A call that was refused at once has not asked for the holders."""
    if busy.name in refused_by_tests:
        return f"{busy.name!r} was made busy by a test."
    if busy.reason == "paused":
        return f"{busy.name!r} is paused by an operator."
    if busy.reason == "queue full":
        return f"no slot of {busy.name!r} was free, and {wait(busy.waiting)} for one already."
    if not (busy.holders or busy.waiting):
        return f"no slot of {busy.name!r} was free."
    return f"no slot of {busy.name!r} was free; {len(busy.holders)} held, {busy.waiting} waiting."


def log_busy_response(busy: Busy, request: HttpRequest, response: HttpResponseBase) -> None:
    """Log a busy view's answer, instead of the ERROR with which Django would mail the admins."""
    status = response.status_code
    outcome = f"was answered {status}"
    log_busy(busy, f"{request.method} {request.path}", outcome, status_code=status, request=request)
    response._has_been_logged = True  # type: ignore[attr-defined]  # what Django's log_response() looks at


def log_rest(*, everything: bool = False) -> None:
    """Log what is over and was not logged in full; at the process's end ``everything``. Costs nothing otherwise."""
    if not _spells:
        return
    now = time.monotonic()
    with _lock:
        over = _over(now, everything=everything)
    _tell(over, now)


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _spells.clear()


forks.register("log of busy calls", "the child would tell again what the parent has counted", in_child=_forget)


def _level(name: str, usual: int) -> int:
    """Count a busy call. The first ones of a name have their usual level, and every one in a test."""
    if testmode.active():
        return usual
    now = time.monotonic()
    with _lock:
        over = _over(now)
        spell = _spells.setdefault(name, _Spell(now))
        spell.calls += 1
        spell.level = max(spell.level, usual)
        level = usual if spell.calls <= IN_FULL else logging.DEBUG
        if len(_spells) > NAMES:
            oldest = next(iter(_spells))
            over.append((oldest, _spells.pop(oldest)))
    _tell(over, now)
    return level


def _over(now: float, *, everything: bool = False) -> list[tuple[str, _Spell]]:
    over = []
    while _spells:
        name, spell = next(iter(_spells.items()))
        if not everything and now - spell.began < SECONDS:
            break
        over.append((name, _spells.pop(name)))
    return over


def _tell(over: list[tuple[str, _Spell]], now: float) -> None:
    for name, spell in over:
        if (count := spell.calls - IN_FULL) > 0:
            seconds = max(1, round(now - spell.began))
            logger.log(
                spell.level,
                "Busy: %d more calls found no free slot of %r, within %d s.",
                count,
                name,
                seconds,
                extra={"semaphore": name, "what": "busy_more", "count": count, "seconds": seconds},
            )
