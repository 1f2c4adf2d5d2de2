"""Streams under gunicorn: the slot is held until the stream is closed or dropped, and no longer."""

from __future__ import annotations

import gzip
import os
import signal
from collections.abc import Callable

import pytest

from django_sqlsem import semaphore
from tests.places.site import Caller, Site
from tests.support.databases import OutsideCounter, assert_nothing_held, held_rows
from tests.support.threads import wait_until

URLS = "tests.places.stream_urls"
CHAIN = (
    "tests.places.middleware.mistreating",
    "django.middleware.gzip.GZipMiddleware",
    "django.middleware.http.ConditionalGetMiddleware",
)
#: The lease is 60 s: a slot that comes back after so many seconds at most has not merely run out.
SOON = 25.0
kinds = pytest.mark.parametrize("kind", ["sync", "gthread"])


@pytest.fixture
def streams(site: Callable[..., Site]) -> Callable[[str], Site]:
    """A function of the kind of gunicorn's workers that returns a site with streams."""
    return lambda kind: site(kind, urls=URLS, middleware=CHAIN)


def begun(site: Site, query: str, path: str = "stream", **options: object) -> Caller:
    """Ask for a stream, and wait until it has begun."""
    caller = site.call(f"/{path}?id={query}", **options)
    site.marks.wait(f"in-{query.partition('&')[0]}")
    return caller


def slots_are_two(site: Site, alias: str, one: str) -> None:
    """Both slots can be taken, and a third one can't."""
    with begun(site, f"{one}-first") as first, begun(site, f"{one}-second") as second:
        assert len(held_rows(alias)) == 2
        assert site.get("/refused").status == 503
        for name in ("first", "second"):
            site.marks.set(f"go-{one}-{name}")
        assert first.answer().body.endswith(b"\nend")
        assert second.answer().body.endswith(b"\nend")
    assert_nothing_held(alias, within=SOON)


@kinds
def test_the_slot_is_held_until_the_stream_ends(kind: str, streams: Callable[[str], Site], alias: str) -> None:
    running = streams(kind)
    with OutsideCounter(alias, "stream") as counter:
        slots_are_two(running, alias, f"whole-{kind}")
        assert (counter.entered, counter.peak, counter.current) == (2, 2, 0)


@kinds
def test_a_client_that_leaves_in_the_middle(kind: str, streams: Callable[[str], Site], alias: str) -> None:
    running = streams(kind)
    with begun(running, f"left-{kind}&big=1") as caller:
        assert len(held_rows(alias)) == 1
        assert caller.begin().read(6) == b"begin\n"
    running.marks.wait(f"ended-left-{kind}")  # its word was never given: the server has closed it
    assert_nothing_held(alias, within=SOON)


@kinds
def test_a_stream_that_fails_half_way(kind: str, streams: Callable[[str], Site], alias: str) -> None:
    running = streams(kind)
    began = len(running.log())
    with begun(running, f"fails-{kind}&fail=1"):
        assert len(held_rows(alias)) == 1
        running.marks.set(f"go-fails-{kind}")
        running.marks.wait(f"ended-fails-{kind}")
        assert_nothing_held(alias, within=SOON)
    wait_until(lambda: running.logged("the stream failed", since=began), what="the error")
    assert not running.logged("[django_sqlsem", since=began)


@kinds
def test_head(kind: str, streams: Callable[[str], Site], alias: str) -> None:
    running = streams(kind)
    running.marks.set(f"go-head-{kind}")
    answer = running.get(f"/stream?id=head-{kind}", method="HEAD")
    assert (answer.status, answer.body) == (200, b"")
    assert_nothing_held(alias, within=SOON)


@kinds
def test_gzip_wraps_the_stream(kind: str, streams: Callable[[str], Site], alias: str) -> None:
    running = streams(kind)
    with begun(running, f"zipped-{kind}", headers={"Accept-Encoding": "gzip"}) as caller:
        assert len(held_rows(alias)) == 1
        running.marks.set(f"go-zipped-{kind}")
        answer = caller.answer()
    assert answer.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(answer.body).endswith(b"\nend")
    assert_nothing_held(alias, within=SOON)


@kinds
@pytest.mark.parametrize("case", ["304", "replace", "fail"])
def test_a_response_that_is_thrown_away_without_being_closed(
    kind: str, case: str, streams: Callable[[str], Site], alias: str
) -> None:
    running = streams(kind)
    began = len(running.log())
    query, headers = f"id=thrown&treat={case}&etag=1", {"If-None-Match": '"known"'} if case == "304" else {}
    for _ in range(3):  # more often than there are slots
        answer = running.get(f"/stream?{query}", headers=headers)
        assert answer.status == {"304": 304, "replace": 200, "fail": 500}[case]
    assert_nothing_held(alias, within=SOON)
    assert not running.marks.named("in-thrown")  # nobody has ever begun to read it
    assert not running.logged("[django_sqlsem", since=began), running.log()[began:]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("sync", (), id="sync-sendfile"),
        pytest.param("gthread", ("--no-sendfile",), id="gthread-no-sendfile"),
        pytest.param("gthread", (), id="gthread-sendfile", marks=pytest.mark.soak),
        pytest.param("sync", ("--no-sendfile",), id="sync-no-sendfile", marks=pytest.mark.soak),
    ],
)
def test_files(kind: str, options: tuple[str, ...], site: Callable[..., Site], alias: str) -> None:
    running = site(kind, *options, urls=URLS)
    one = f"{kind}-{len(options)}"
    size = 16 << 20
    (running.marks.directory / f"file-{one}").write_bytes(b"x" * size)
    whole = running.get(f"/file?id={one}")
    assert (whole.status, len(whole.body)) == (200, size)
    assert_nothing_held(alias, within=SOON)
    with begun(running, one, "file") as caller:
        response = caller.begin()
        assert response.read(10) == b"x" * 10
        assert len(held_rows(alias)) == 1  # most of it is not sent yet
        response.close()
    assert_nothing_held(alias, within=SOON)
    assert running.get(f"/file?id={one}", method="HEAD").body == b""
    assert_nothing_held(alias, within=SOON)


@pytest.mark.leaves_held  # until somebody asks for it: then its holder is found dead
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("sync", "worker"),
        ("gthread", "worker"),
        ("gthread", "kindly"),
        pytest.param("sync", "all", marks=pytest.mark.soak),
    ],
)
def test_the_server_is_ended_while_it_streams(kind: str, case: str, alias: str) -> None:
    with Site(kind, alias, urls=URLS) as running, begun(running, "streaming&big=1") as caller:
        assert caller.begin().read(6) == b"begin\n"
        assert len(held_rows(alias)) == 1
        if case == "kindly":
            running.stop(signal.SIGTERM)  # after --graceful-timeout the worker is killed
        else:
            os.kill(int(running.marks.text("in-streaming")), signal.SIGKILL)
            if case == "all":
                running.stop(signal.SIGKILL)
        permits = []
        for _ in range(2):
            permits.append(semaphore("stream", slots=2, using=alias, timeout=SOON).acquire())
            permits[-1].detach()
        assert sorted(permit.slot for permit in permits) == [1, 2]
        for permit in permits:
            permit.release()
        if case == "worker":
            slots_are_two(running, alias, "after")
