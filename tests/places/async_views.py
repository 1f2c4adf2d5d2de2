"""Asynchronous views that tests hold and let go: ``?id=x`` sets the mark ``in-x`` and waits for ``go-x``."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse
from django.utils.decorators import sync_and_async_middleware

from django_sqlsem import semaphore
from django_sqlsem.conf import config
from tests.places.marks import LONGEST, Marks
from tests.support.databases import OutsideCounter

#: More than the buffers between a server and a client that does not read.
BIG = 64 * 2**20


async def until(name: str) -> None:
    """Wait for a mark without blocking the loop."""
    deadline, marks = time.monotonic() + LONGEST, Marks()
    while not marks.is_set(name):
        assert time.monotonic() < deadline, f"the mark {name!r} was not set"
        await asyncio.sleep(0.01)


async def held(request: HttpRequest) -> HttpResponse:
    """Tell that the view runs, count it from outside, and wait for the test's word."""
    one, marks = request.GET["id"], Marks()
    with OutsideCounter(config().database, "async") as counter, counter.inside():
        marks.set(f"in-{one}")
        try:
            await until(f"go-{one}")
        except asyncio.CancelledError:
            marks.set(f"cancelled-{one}")
            raise
    return HttpResponse(f"done {one}")


@semaphore("async", timeout=60)
async def patient(request: HttpRequest) -> HttpResponse:
    """One at a time."""
    return await held(request)


async def free(request: HttpRequest) -> HttpResponse:
    """Hold an open request, and no lock."""
    Marks().set(f"in-{request.GET['id']}")
    await until(f"go-{request.GET['id']}")
    return HttpResponse("done")


@semaphore("async", timeout=60)
async def brief(request: HttpRequest) -> HttpResponse:
    """One at a time, for a moment."""
    Marks().set(f"in-{request.GET['id']}")
    with OutsideCounter(config().database, "async") as counter, counter.inside():
        await asyncio.sleep(0.005)
    return HttpResponse("done")


class Pieces:
    """An asynchronous iterator: a line at once, the others after the test's word."""

    def __init__(self, one: str, rest: int = 1, fails: bool = False) -> None:
        self.one, self.rest, self.fails, self.sent = one, rest, fails, 0

    def __aiter__(self) -> Pieces:
        return self

    async def __anext__(self) -> bytes:
        self.sent += 1
        if self.sent == 1:
            Marks().set(f"in-{self.one}")
            return b"first\n"
        if self.sent == 2:
            await until(f"go-{self.one}")
            if self.fails:
                raise RuntimeError("half-way")
        if self.sent > self.rest + 1:
            raise StopAsyncIteration
        return b"next\n"


@semaphore("stream", timeout=60)
async def stream(request: HttpRequest) -> StreamingHttpResponse:
    """A stream whose permit the decorator takes."""
    return StreamingHttpResponse(Pieces(request.GET["id"], fails="fails" in request.GET))


async def generated(request: HttpRequest) -> StreamingHttpResponse:
    """A stream whose generator takes the permit itself."""
    one = request.GET["id"]

    async def pieces() -> AsyncIterator[bytes]:
        async with semaphore("generated", timeout=60):
            Marks().set(f"in-{one}")
            yield b"first\n"
            await until(f"go-{one}")
            yield b"next\n"

    return StreamingHttpResponse(pieces())


@semaphore("decorated-generator", timeout=60)
async def decorated_pieces(one: str) -> AsyncIterator[bytes]:
    """A decorated asynchronous generator."""
    Marks().set(f"in-{one}")
    yield b"first\n"
    await until(f"go-{one}")
    yield b"next\n"


async def decorated_generator(request: HttpRequest) -> StreamingHttpResponse:
    """A stream from a decorated generator."""
    return StreamingHttpResponse(decorated_pieces(request.GET["id"]))


@semaphore("sync-stream", timeout=60)
async def sync_stream(request: HttpRequest) -> StreamingHttpResponse:
    """A stream of a synchronous iterator, which Django runs in a thread."""
    one, fails = request.GET["id"], "fails" in request.GET

    def pieces() -> Iterator[bytes]:
        Marks().set(f"in-{one}")
        Marks().wait(f"go-{one}")
        if fails:
            raise RuntimeError("half-way")
        yield b"all\n"

    return StreamingHttpResponse(pieces())


@semaphore("file", timeout=60)
async def file(request: HttpRequest) -> FileResponse:
    """A file that does not fit into the buffers on the way."""
    path = Path(os.environ["SQLSEM_TEST_MARKS"]) / "big"
    if not path.exists():
        with path.open("wb") as big:
            big.truncate(BIG)
    Marks().set(f"in-{request.GET['id']}")
    return FileResponse(path.open("rb"))


@semaphore("tagged", timeout=60)
async def tagged(request: HttpRequest) -> StreamingHttpResponse:
    """A stream which ConditionalGetMiddleware replaces by a 304 without closing it."""
    return StreamingHttpResponse(Pieces(request.GET["id"]), headers={"ETag": '"same"'})


@sync_and_async_middleware
def lingering(get_response: Callable[[HttpRequest], Awaitable[Any]]) -> Callable[[HttpRequest], Awaitable[Any]]:
    """Keep the view's response for a while: whoever leaves then, leaves between the view's return and its sending."""

    async def middleware(request: HttpRequest) -> Any:
        response = await get_response(request)
        if "linger" in request.GET:
            one = request.GET["id"]
            Marks().set(f"lingers-{one}")
            await until(f"send-{one}")
        return response

    return middleware
