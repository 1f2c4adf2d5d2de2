"""Views that tests hold and let go: ``?id=x`` sets the mark ``in-x`` and waits for ``go-x``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

from django.db import connections
from django.http import HttpRequest, HttpResponse

from django_sqlsem import semaphore
from django_sqlsem.conf import config
from tests.places.marks import Marks
from tests.support.databases import OutsideCounter


def ping(request: HttpRequest) -> HttpResponse:
    """Answer without a lock."""
    return HttpResponse(f"{os.getpid()}")


async def waits(request: HttpRequest) -> HttpResponse:
    """Tell how many threads wait on this event loop: each hears from then on that its client has gone."""

    def steps(coroutine: Any) -> Iterator[str]:
        while (code := getattr(coroutine, "cr_code", None)) is not None:
            yield code.co_name
            coroutine = coroutine.cr_await

    return HttpResponse(f"{sum('wait_on_loop' in steps(task.get_coro()) for task in asyncio.all_tasks())}")


def held(request: HttpRequest) -> HttpResponse:
    """Tell that the view runs, count it from outside, and wait for the test's word."""
    one, marks = request.GET["id"], Marks()
    with OutsideCounter(config().database, request.GET.get("count", "places")) as counter, counter.inside():
        marks.set(
            f"in-{one}", f"{os.getpid()} {sum(c.in_atomic_block for c in connections.all(initialized_only=True))}"
        )
        if "go" not in request.GET:
            marks.wait(f"go-{one}")
    return HttpResponse(f"done {one}")


@semaphore("one")
def one(request: HttpRequest) -> HttpResponse:
    """One at a time; waits as long as the settings say."""
    return held(request)


@semaphore("resting")
def resting(request: HttpRequest) -> HttpResponse:
    """Another one at a time; waits as long as the settings say."""
    return held(request)


@semaphore("one", timeout=60)
def patient(request: HttpRequest) -> HttpResponse:
    """One at a time; waits for a minute."""
    return held(request)


@semaphore("one", timeout=60, on_busy="raise")
def raising(request: HttpRequest) -> HttpResponse:
    """One at a time; whoever gets none is not answered by the decorator."""
    return held(request)


@semaphore("one", timeout=None)
def for_ever(request: HttpRequest) -> HttpResponse:
    """One at a time; waits for ever."""
    return held(request)


@semaphore("two", slots=2, timeout=60)
def two(request: HttpRequest) -> HttpResponse:
    """Two at a time."""
    return held(request)


@semaphore("one", timeout=0)
def at_once(request: HttpRequest) -> HttpResponse:
    """One at a time; does not wait."""
    return held(request)
