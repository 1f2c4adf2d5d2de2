"""What the log says of busy calls: the first ones of each name in full, and of a flood how many more there were."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import Final

from django.http import HttpRequest
from django.http.response import HttpResponseBase

from django_sqlsem.busy import Busy
from django_sqlsem.core import forks, testmode
from django_sqlsem.runtime.chores import Chore

logger = logging.getLogger("django_sqlsem")

#: So many busy calls of one name are logged in full within ``SECONDS``, in each process.
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
        """Return when to look: now, or not while nothing is left."""
        return 0.0 if _spells else math.inf

    def run(self, now: float) -> None:
        """Log what is over."""
        log_rest()


def log_busy(busy: Busy, work: str, outcome: str, **extra: object) -> None:
    """Log that a piece of work found no free slot, and what came of it.

    A WARNING; in a flood of one name only DEBUG, and one WARNING a minute with their number.
    """
    logger.log(
        _level(busy.name),
        "Busy: %s %s, because no slot of %r was free; %d held, %d waiting.",
        work.encode("unicode_escape").decode("ascii"),  # as Django does: a path may hold line breaks
        outcome,
        busy.name,
        len(busy.holders),
        busy.waiting,
        extra={
            "semaphore": busy.name,
            "what": "busy",
            "holders": len(busy.holders),
            "waiting": busy.waiting,
            "retry_after": busy.retry_after,
            **extra,
        },
    )


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


def _level(name: str) -> int:
    """Count a busy call. The first ones of a name are WARNINGs, and every one in a test."""
    if testmode.active():
        return logging.WARNING
    now = time.monotonic()
    with _lock:
        over = _over(now)
        spell = _spells.setdefault(name, _Spell(now))
        spell.calls += 1
        level = logging.WARNING if spell.calls <= IN_FULL else logging.DEBUG
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
            logger.warning(
                "Busy: %d more calls found no free slot of %r, within %d s.",
                count,
                name,
                seconds,
                extra={"semaphore": name, "what": "busy_more", "count": count, "seconds": seconds},
            )
