"""Asynchronous views in real servers: many wait without threads, and whoever leaves at any moment leaves nothing."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from django_sqlsem import semaphore
from tests.places.site import Caller, Site, wait_for_waiters
from tests.support.databases import OutsideCounter, assert_nothing_held, held_rows
from tests.support.threads import wait_until

KINDS = [
    "uvicorn",
    "daphne",
    pytest.param("gunicorn-uvicorn", marks=pytest.mark.soak),
    pytest.param("gunicorn-asgi", marks=pytest.mark.soak),
]
MIDDLEWARE = (
    "tests.places.async_views.lingering",
    "django.middleware.http.ConditionalGetMiddleware",
    "django.middleware.gzip.GZipMiddleware",
)
URLS = "tests.places.async_urls"
#: What the library logs of a permit that nobody gave back, and of a busy view; and Django, of an error.
COMPLAINTS = ("sqlsem ERROR", "sqlsem WARNING", "django.request ERROR", "Traceback")
_ids = itertools.count(1)

kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def running(kind: str, site: Callable[..., Site]) -> Site:
    return site(kind, urls=URLS, middleware=MIDDLEWARE)


@contextlib.contextmanager
def without_complaints(site: Site) -> Iterator[None]:
    """Nothing is logged inside the block as a fault."""
    since = size_at_rest(site)
    yield
    found = [line for word in COMPLAINTS for line in site.logged(word, since=since)]
    assert not found, site.log()[since:]


def size_at_rest(site: Site) -> int:
    """How long the log is once nothing more comes of what was done before: the server is shared by many tests."""
    deadline, since = time.monotonic() + 10.0, -1
    while since != (since := len(site.log())) and time.monotonic() < deadline:
        time.sleep(0.3)
    return since


@contextlib.contextmanager
def holder(site: Site, path: str = "/patient", **options: object) -> Iterator[tuple[str, Caller]]:
    """Somebody is in the view: their id, and the connection."""
    one = f"h{next(_ids)}"
    with site.call(f"{path}?id={one}", **options) as caller:  # type: ignore[arg-type]
        site.marks.wait(f"in-{one}")
        yield one, caller


def leave(caller: Caller, how: str) -> None:
    """Hang up, or reset the connection."""
    caller.reset() if how == "reset" else caller.close()


def threads(pid: int) -> int:
    """Return how many threads a process has."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Threads:")]
    return int(line.split()[1])


def wait_until_free(alias: str) -> None:
    """Nobody holds a slot, with time enough for a slow machine, but less than a lease."""
    assert_nothing_held(alias, within=40)


@kinds
def test_waiters_hold_no_threads_and_leave_when_their_clients_do(running: Site, alias: str) -> None:
    (pid,) = running.workers()
    with OutsideCounter(alias, "async") as counter, without_complaints(running), holder(running) as (first, one):
        with contextlib.ExitStack() as crowd:  # Django has a thread for each open request, whatever its view does
            for _ in range(60):
                crowd.enter_context(running.call(f"/free?id=f{next(_ids)}"))
            wait_until(lambda: len(running.marks.named("in-f")) >= 60)
            without_waiting = threads(pid)
        with contextlib.ExitStack() as crowd:
            waiting = [crowd.enter_context(running.call(f"/patient?id=w{next(_ids)}")) for _ in range(60)]
            wait_for_waiters(alias, "async", 60)
            # Those of the first crowd may not have ended yet.
            wait_until(lambda: threads(pid) < without_waiting + 10, what="no more threads than that")
            for number, caller in enumerate(waiting):
                leave(caller, ("close", "reset")[number % 2])
            wait_for_waiters(alias, "async", 0)
        last = f"w{next(_ids)}"
        with running.call(f"/patient?id={last}") as next_one:
            wait_for_waiters(alias, "async", 1)
            running.marks.set(f"go-{first}")
            assert one.answer().text == f"done {first}"
            running.marks.wait(f"in-{last}")
            running.marks.set(f"go-{last}")
            assert next_one.answer().text == f"done {last}"
        assert (counter.entered, counter.peak, counter.current) == (2, 1, 0)
    wait_until_free(alias)


@kinds
def test_the_next_one_moves_up_when_the_first_in_line_leaves(running: Site, alias: str) -> None:
    with without_complaints(running), holder(running) as (first, _one):
        goes, stays = f"w{next(_ids)}", f"w{next(_ids)}"
        with running.call(f"/patient?id={goes}") as impatient, contextlib.ExitStack() as later:
            wait_for_waiters(alias, "async", 1)
            patient = later.enter_context(running.call(f"/patient?id={stays}"))
            wait_for_waiters(alias, "async", 2)
            impatient.close()
            wait_for_waiters(alias, "async", 1)
            running.marks.set(f"go-{first}")
            running.marks.wait(f"in-{stays}")
            assert not running.marks.is_set(f"in-{goes}")
            running.marks.set(f"go-{stays}")
            assert patient.answer().text == f"done {stays}"
    wait_until_free(alias)


@kinds
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_holder_whose_client_leaves_is_cancelled_and_gives_back(running: Site, alias: str, how: str) -> None:
    with OutsideCounter(alias, "async") as counter, without_complaints(running), holder(running) as (first, one):
        second = f"w{next(_ids)}"
        with running.call(f"/patient?id={second}") as waits:
            wait_for_waiters(alias, "async", 1)
            leave(one, how)
            running.marks.wait(f"cancelled-{first}")
            running.marks.wait(f"in-{second}")
            running.marks.set(f"go-{second}")
            assert waits.answer().text == f"done {second}"
        assert (counter.peak, counter.current) == (1, 0)
    wait_until_free(alias)


@kinds
def test_clients_that_leave_at_the_moment_of_the_grant_leave_nothing(running: Site, alias: str) -> None:
    chance, rounds, scale, fates = random.Random(6), 0, 0.02, set()
    with OutsideCounter(alias, "async") as counter, without_complaints(running):
        while rounds < 20 or (len(fates) < 2 and rounds < 200):
            rounds += 1
            with holder(running) as (first, one), contextlib.ExitStack() as crowd:
                leaving = [f"b{next(_ids)}" for _ in range(3)]
                callers = [crowd.enter_context(running.call(f"/brief?id={each}")) for each in leaving]
                wait_for_waiters(alias, "async", 3)
                running.marks.set(f"go-{first}")
                for caller in callers:
                    time.sleep(chance.uniform(0, scale))
                    leave(caller, chance.choice(["close", "reset"]))
                assert one.answer().status == 200
            wait_for_waiters(alias, "async", 0)
            granted = running.marks.is_set(f"in-{leaving[0]}")
            fates.add(granted)
            scale *= 0.7 if granted else 1.4  # around the moment itself, however fast the machine is
        wait_until_free(alias)
        assert running.get(f"/brief?id=b{next(_ids)}").status == 200
        wait_until(lambda: counter.current == 0)
        assert counter.peak == 1
    assert fates == {True, False}


STREAMS = [
    ("/stream", "stream"),
    ("/generated", "generated"),
    ("/decorated-generator", "decorated-generator"),
]
FAILING = [("/stream", "stream"), ("/sync-stream", "sync-stream")]


def held_of(alias: str, name: str) -> int:
    return sum(row.semaphore.name == name for row in held_rows(alias))


@kinds
@pytest.mark.parametrize(("path", "name"), STREAMS)
@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_a_stream_holds_until_its_end(running: Site, alias: str, path: str, name: str, encoding: str) -> None:
    with (
        without_complaints(running),
        holder(running, path, headers={"Accept-Encoding": encoding}) as (one, caller),
    ):
        response = caller.begin()
        assert response.status == 200
        assert response.headers.get("Content-Encoding", "identity") == encoding
        assert held_of(alias, name) == 1
        running.marks.set(f"go-{one}")
        assert response.read()
    wait_until_free(alias)


@kinds
@pytest.mark.parametrize(("path", "name"), STREAMS)
def test_a_stream_whose_client_leaves_in_the_middle(running: Site, alias: str, path: str, name: str) -> None:
    with without_complaints(running):
        with holder(running, path) as (_one, caller):
            assert caller.begin().status == 200
            assert held_of(alias, name) == 1
        wait_until_free(alias)


@kinds
def test_a_stream_of_a_synchronous_iterator(running: Site, alias: str) -> None:
    with holder(running, "/sync-stream") as (one, caller):
        assert held_of(alias, "sync-stream") == 1
        running.marks.set(f"go-{one}")
        assert caller.answer().text == "all\n"
    wait_until_free(alias)
    with holder(running, "/sync-stream") as (one, caller):
        caller.close()
        running.marks.set(f"go-{one}")
    wait_until_free(alias)
    assert not running.logged("sqlsem ERROR")


@kinds
def test_a_file_that_is_read_and_one_that_is_not(running: Site, alias: str) -> None:
    with without_complaints(running):
        with holder(running, "/file") as (_one, caller):
            assert caller.begin().status == 200
            # The rest does not fit into the buffers; but daphne takes all at once, however large.
            assert running.kind == "daphne" or held_of(alias, "file") == 1
        wait_until_free(alias)
        with holder(running, "/file") as (_one, caller):
            assert len(caller.answer().body) == 64 * 2**20
        wait_until_free(alias)


@kinds
def test_a_stream_that_a_304_replaces(running: Site, alias: str) -> None:
    with without_complaints(running):
        one = f"t{next(_ids)}"
        assert running.get(f"/tagged?id={one}", headers={"If-None-Match": '"same"'}).status == 304
        wait_until_free(alias)


@kinds
@pytest.mark.parametrize(("path", "name"), FAILING)
def test_a_stream_that_fails_half_way(running: Site, alias: str, path: str, name: str) -> None:
    one, since = f"f{next(_ids)}", len(running.log())
    with running.call(f"{path}?fails=1&id={one}"):
        running.marks.wait(f"in-{one}")
        assert held_of(alias, name) == 1
        running.marks.set(f"go-{one}")
        wait_until_free(alias)
    assert not running.logged("sqlsem ERROR", since=since)


@kinds
def test_a_client_that_leaves_between_the_return_of_the_view_and_the_sending(running: Site, alias: str) -> None:
    with without_complaints(running):
        one = f"l{next(_ids)}"
        with running.call(f"/stream?linger=1&id={one}"):
            running.marks.wait(f"lingers-{one}")
            assert held_of(alias, "stream") == 1
        wait_until_free(alias)
        assert not running.marks.is_set(f"in-{one}")  # the stream never began


#: Servers that wait for open requests at their end are told not to.
IMPATIENT = {
    "uvicorn": ("--timeout-graceful-shutdown", "1"),
    "gunicorn-uvicorn": ("--graceful-timeout", "1"),
    "gunicorn-asgi": ("--graceful-timeout", "1"),
}


#: Each has a server of its own; two of these are enough for every run.
ENDS = [
    pytest.param(
        kind,
        number,
        id=f"{kind}-{number.name}",
        marks=() if (kind, number.name) in {("uvicorn", "SIGTERM"), ("daphne", "SIGKILL")} else pytest.mark.soak,
    )
    for kind in ("uvicorn", "daphne", "gunicorn-uvicorn", "gunicorn-asgi")
    for number in (signal.SIGTERM, signal.SIGKILL)
]


@pytest.mark.parametrize(("kind", "number"), ENDS)
def test_a_server_that_ends_with_holders_waiters_and_streams(kind: str, number: int, alias: str) -> None:
    # uvicorn ends itself by the signal as soon as it has cancelled what runs, and daphne runs no cleaning up either.
    with Site(kind, alias, *IMPATIENT.get(kind, ()), urls=URLS, middleware=MIDDLEWARE) as site:
        with (
            holder(site) as (_first, _one),
            holder(site, "/stream") as (_second, _other),
            site.call("/patient?id=waits"),
        ):
            wait_for_waiters(alias, "async", 1)
            assert len(held_rows(alias)) == 2
            site.stop(number)
        # What a dead process held goes to whoever wants it, and nobody is before them.
        for name in ("async", "stream"):
            with semaphore(name, using=alias).acquire(timeout=40):
                pass
        assert not site.logged("forgotten")
    wait_until_free(alias)
