"""A view whose client has gone leaves the queue: under each server that tells of it."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.places.site import PATIENCE, Caller, Site, wait_for_waiters, waiters
from tests.support.databases import OutsideCounter, assert_nothing_held, held_rows
from tests.support.threads import run_in_threads, wait_until

#: One process each in which all wait together, and gunicorn's synchronous workers, in which each waits alone.
GTHREAD = ("gthread", ("-w", "1"))
KINDS = [("sync", ()), GTHREAD, ("uvicorn", ()), ("daphne", ())]
kinds = pytest.mark.parametrize(("kind", "options"), KINDS, ids=[kind for kind, _ in KINDS])
soak = pytest.mark.soak
#: A waiter that has gone must have left after so many seconds: long before its own timeout, 60 s.
SOON = 30.0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate's file and its key's. Skips without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    folder: Path = tmp_path_factory.mktemp("tls")
    names = str(folder / "certificate.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-out", names[0], "-keyout", names[1]], check=True, capture_output=True)
    return names


@pytest.fixture
def calls() -> Iterator[contextlib.ExitStack]:
    """What closes the callers of a test at its end."""
    with contextlib.ExitStack() as stack:
        yield stack


def leave_in_turn(site: Site, alias: str, calls: contextlib.ExitStack, one: str) -> None:
    """Three wait behind a holder; the last but one leaves, then the first by a reset; the last gets the slot."""
    began = len(site.log())
    with OutsideCounter(alias, "places") as counter:
        callers: dict[str, Caller] = {}
        for number, who in enumerate("abcd"):
            callers[who] = calls.enter_context(site.call(f"/patient?id={who}-{one}"))
            if who == "a":
                site.marks.wait(f"in-a-{one}")
            wait_for_waiters(alias, "one", number)
        callers["c"].close()
        wait_for_waiters(alias, "one", 2, timeout=SOON)
        callers["b"].reset()
        wait_for_waiters(alias, "one", 1, timeout=SOON)
        site.marks.set(f"go-a-{one}")
        assert callers["a"].answer().text == f"done a-{one}"
        site.marks.wait(f"in-d-{one}")
        site.marks.set(f"go-d-{one}")
        assert callers["d"].answer().text == f"done d-{one}"
        assert (counter.entered, counter.peak, counter.current) == (2, 1, 0)
    assert not site.marks.named(f"in-b-{one}") + site.marks.named(f"in-c-{one}")
    assert waiters(alias, "one") == 0
    assert_nothing_held(alias)
    gone = wait_until(lambda: site.logged("client_gone", since=began), what="the log")
    wait_until(lambda: len(site.logged("client_gone", since=began)) == 2, what=f"two of {gone}")
    assert all("[django_sqlsem INFO client_gone] GET /patient" in line for line in gone)
    said = site.log()[began:]
    assert not [word for word in ("WARNING", "ERROR", "Traceback") if word in said], said


@kinds
def test_who_has_gone_leaves_the_queue_and_the_others_move_up(
    kind: str, options: tuple[str, ...], site: Callable[..., Site], alias: str, calls: contextlib.ExitStack
) -> None:
    leave_in_turn(site(kind, *options), alias, calls, kind)


def test_the_same_with_tls(
    certificate: tuple[str, str], site: Callable[..., Site], alias: str, calls: contextlib.ExitStack
) -> None:
    options = ("--certfile", certificate[0], "--keyfile", certificate[1])
    leave_in_turn(site("gthread", "-w", "1", *options), alias, calls, "tls")


def test_the_same_with_atomic_requests(site: Callable[..., Site], alias: str, calls: contextlib.ExitStack) -> None:
    if alias == "default":
        pytest.skip("SQLite has one writer: the counter would wait for the transaction of the view that counts")
    running = site("gthread", "-w", "1", atomic_requests=True)
    leave_in_turn(running, alias, calls, "atomic")
    assert int(running.marks.text("in-d-atomic").split()[1]) > 0  # the view ran inside its transactions


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(("in_a_thread", "on_the_loop", "in_a_thread"), id="thread-first"),
        pytest.param(("on_the_loop", "in_a_thread", "on_the_loop"), id="loop-first", marks=soak),
        pytest.param(("in_a_thread",), id="one", marks=soak),
    ],
)
def test_the_same_through_chains_of_middleware_under_asgi(
    chain: tuple[str, ...], site: Callable[..., Site], alias: str, calls: contextlib.ExitStack
) -> None:
    running = site("uvicorn", middleware=tuple(f"tests.places.middleware.{link}" for link in chain))
    leave_in_turn(running, alias, calls, "-".join(chain))


@pytest.mark.parametrize("kind", ["gthread", "uvicorn"])
def test_a_holder_whose_client_has_gone_finishes(
    kind: str, site: Callable[..., Site], alias: str, calls: contextlib.ExitStack
) -> None:
    running = site(*(("gthread", "-w", "1") if kind == "gthread" else ("uvicorn",)))
    server = psutil.Process(running.workers()[0])
    assert running.get("/ping").status == 200
    first = running.call(f"/patient?id=holder-{kind}")
    running.marks.wait(f"in-holder-{kind}")
    first.close()
    with running.call(f"/patient?id=leaver-{kind}"):  # its leaving shows that enough time has passed
        wait_for_waiters(alias, "one", 1)
        if kind == "uvicorn":  # a client that goes before its view waits is not heard of
            wait_until(lambda: running.get("/waits").text == "1")
    wait_for_waiters(alias, "one", 0, timeout=SOON)
    assert len(held_rows(alias)) == 1
    assert running.get(f"/at-once?id=refused-{kind}").status == 503
    running.marks.set(f"go-holder-{kind}")
    with running.call(f"/patient?id=next-{kind}&go=1") as caller:
        assert caller.answer().text == f"done next-{kind}"
    assert_nothing_held(alias)
    if kind == "uvicorn":  # the main one, the library's, and one of a pool, whatever became of the requests
        wait_until(lambda: server.num_threads() <= 3, what=f"3 threads, not {server.num_threads()}")


def test_a_next_request_on_the_same_connection_is_no_disconnect(
    site: Callable[..., Site], alias: str, calls: contextlib.ExitStack
) -> None:
    running = site("gthread", "-w", "1")
    holder = calls.enter_context(running.call("/patient?id=kept-a"))
    running.marks.wait("in-kept-a")
    eager = calls.enter_context(running.call("/patient?id=kept-b", keep=True))
    wait_for_waiters(alias, "one", 1)
    eager.send("/ping")  # before the first one is answered
    for _ in range(2):
        with running.call("/patient?id=kept-c"):
            wait_for_waiters(alias, "one", 2)
        wait_for_waiters(alias, "one", 1, timeout=SOON)  # all of this process were looked after meanwhile
    running.marks.set("go-kept-a")
    assert holder.answer().status == 200
    running.marks.wait("in-kept-b")
    running.marks.set("go-kept-b")
    assert eager.answer().text == "done kept-b"
    assert eager.answer().status == 200


@pytest.mark.parametrize(("path", "status"), [("patient", 499), ("raising", 400)])
def test_a_client_that_has_closed_its_own_direction_counts_as_gone(
    path: str, status: int, site: Callable[..., Site], alias: str, calls: contextlib.ExitStack
) -> None:
    running = site("gthread", "-w", "1")
    began = len(running.log())
    holder = calls.enter_context(running.call(f"/patient?id=half-a-{path}"))
    running.marks.wait(f"in-half-a-{path}")
    half = calls.enter_context(running.call(f"/{path}?id=half-b-{path}"))
    wait_for_waiters(alias, "one", 1)
    half.half_close()
    answer = half.answer()
    assert answer.status == status
    if status == 499:
        assert (answer.body, answer.headers["Cache-Control"]) == (b"", "no-store")
    wait_for_waiters(alias, "one", 0, timeout=SOON)
    running.marks.set(f"go-half-a-{path}")
    assert holder.answer().status == 200
    assert len(running.logged("client_gone", since=began)) == 1
    assert not running.logged("ERROR", since=began)
    assert not running.logged("busy", since=began)


@pytest.mark.parametrize("kind", ["gthread", "uvicorn"])
def test_leaving_at_the_moment_of_the_grant_keeps_nothing_held(
    kind: str, site: Callable[..., Site], alias: str, calls: contextlib.ExitStack
) -> None:
    running = site(*(("gthread", "-w", "1") if kind == "gthread" else ("uvicorn",)))
    with OutsideCounter(alias, "places") as counter:
        for turn in range(6):
            one = f"{kind}-{turn}"
            holder = calls.enter_context(running.call(f"/patient?id=a-{one}"))
            running.marks.wait(f"in-a-{one}")
            leaver = running.call(f"/patient?id=b-{one}&go=1")
            wait_for_waiters(alias, "one", 1)
            acts: list[Callable[[], Any]] = [lambda one=one: running.marks.set(f"go-a-{one}"), leaver.close]
            run_in_threads(2, lambda index, acts=acts: acts[index]())  # type: ignore[misc]
            assert holder.answer().status == 200
            assert running.get(f"/patient?id=c-{one}&go=1", timeout=SOON).text == f"done c-{one}"
            wait_for_waiters(alias, "one", 0, timeout=SOON)
            assert_nothing_held(alias)
        assert (counter.peak, counter.current) == (1, 0)


@pytest.mark.parametrize("kind", ["sync", "gthread", "uvicorn"])
def test_a_rush_of_whom_some_leave_never_exceeds_the_slots(
    kind: str, site: Callable[..., Site], alias: str, calls: contextlib.ExitStack
) -> None:
    running = site(kind, *(("-w", "1") if kind == "gthread" else ()))
    holders = [calls.enter_context(running.call(f"/two?id=rush-{kind}-{each}")) for each in range(2)]
    for each in range(2):
        running.marks.wait(f"in-rush-{kind}-{each}")

    def visit(index: int) -> int:
        leaves = index % 3 == 0
        with running.call(f"/two?id=rush-{kind}-x{index}&go=1") as caller:
            if leaves:
                caller.socket.settimeout(random.uniform(0.05, 1.5))
                with contextlib.suppress(TimeoutError):
                    return caller.answer().status
                return 0
            if index == 1:
                wait_until(lambda: waiters(alias, "two") >= 1, what="waiters")
                for each in range(2):
                    running.marks.set(f"go-rush-{kind}-{each}")
            return caller.answer().status

    with OutsideCounter(alias, "places") as counter:
        statuses = run_in_threads(24, visit, timeout=2 * PATIENCE)
        assert [holder.answer().status for holder in holders] == [200, 200]
        assert set(statuses) <= {0, 200}
        stayed = [status for index, status in enumerate(statuses) if index % 3]
        assert stayed == [200] * 16
        wait_for_waiters(alias, "two", 0, timeout=SOON)
        assert_nothing_held(alias)
        wait_until(lambda: counter.current == 0, what="the counter")
        assert counter.peak == 2
        assert counter.entered >= 18


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["gevent", "waitress"])
def test_under_other_servers(kind: str, site: Callable[..., Site], alias: str, calls: contextlib.ExitStack) -> None:
    pytest.importorskip(kind)
    leave_in_turn(site(kind), alias, calls, kind)
