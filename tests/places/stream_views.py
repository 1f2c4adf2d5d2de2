"""Streaming views: ``?id=x`` sets ``in-x`` with the worker's pid at the first part, and ends after ``go-x``."""

from __future__ import annotations

import os
from collections.abc import Iterator

from django.db import close_old_connections
from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse

from django_sqlsem import semaphore
from django_sqlsem.conf import config
from tests.places.marks import Marks
from tests.support.databases import OutsideCounter

#: More than the buffers of a connection hold, so that a client that has gone is noticed.
PART = b"." * 65536


def parts(request: HttpRequest) -> Iterator[bytes]:
    """Yield parts until the test's word; ``?fail`` fails then."""
    one, marks = request.GET["id"], Marks()
    try:
        with OutsideCounter(config().database, "stream") as counter, counter.inside():
            marks.set(f"in-{one}", str(os.getpid()))
            yield b"begin\n"
            while not marks.is_set(f"go-{one}"):
                yield PART if "big" in request.GET else b"."
                marks.wait_a_little()
            if "fail" in request.GET:
                raise RuntimeError("the stream failed")
            yield b"\nend"
    finally:
        close_old_connections()
        marks.set(f"ended-{one}")


@semaphore("stream", slots=2, timeout=60)
def stream(request: HttpRequest) -> StreamingHttpResponse:
    """Two streams at a time."""
    response = StreamingHttpResponse(parts(request))
    if "etag" in request.GET:
        response["ETag"] = '"known"'
    return response


@semaphore("stream", slots=2, timeout=0)
def refused(request: HttpRequest) -> HttpResponse:
    """Tell whether a slot is free, without waiting for one."""
    return HttpResponse("free")


@semaphore("stream", slots=2, timeout=60)
def file(request: HttpRequest) -> FileResponse:
    """Send the file ``?id=``, which the test has made."""
    marks = Marks()
    marks.set(f"in-{request.GET['id']}", str(os.getpid()))
    return FileResponse((marks.directory / f"file-{request.GET['id']}").open("rb"))
