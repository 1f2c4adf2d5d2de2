"""What both versions of a small project do under their lock, counted from outside."""

from __future__ import annotations

import functools
import time

from django.http import HttpResponse

from django_sqlsem.conf import config
from tests.programs.rwlock_clients import Counters


@functools.cache
def counters() -> Counters:
    """Return this process's counters of who is in, by connections of their own."""
    alias = config().database
    assert alias is not None
    return Counters(alias)


def bill(*, alone: bool) -> HttpResponse:
    """Be in for a moment. Fails if somebody else is in with one that is alone."""
    counters().enter(alone)
    try:
        time.sleep(0.005)
    finally:
        counters().leave(alone)
    return HttpResponse("billed")
