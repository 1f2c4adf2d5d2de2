"""Consumers of Channels in real servers: blocks, decorated methods, permits for a connection's lifetime."""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
from collections.abc import Callable, Iterator

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from django_sqlsem import semaphore
from tests.places.site import PATIENCE, Site, wait_for_waiters
from tests.support.databases import assert_nothing_held, held_rows

ASGI = {"SQLSEM_TEST_ASGI": "tests.places.consumers.application"}
_ids = itertools.count(1)


@pytest.fixture(params=["uvicorn", "daphne"])
def running(request: pytest.FixtureRequest, site: Callable[..., Site]) -> Site:
    return site(request.param, env=ASGI)


@contextlib.contextmanager
def socket_to(site: Site, path: str) -> Iterator[ClientConnection]:
    """A websocket, which is dropped at the end of the block."""
    there = f"ws://127.0.0.1:{site.port}/{path}"
    with connect(there, proxy=None, open_timeout=PATIENCE, ping_interval=None, close_timeout=1) as opened:
        try:
            yield opened
        finally:
            drop(opened)


def drop(opened: ClientConnection) -> None:
    """Vanish without a closing handshake."""
    with contextlib.suppress(OSError):
        opened.socket.shutdown(socket.SHUT_RDWR)


def free(alias: str) -> None:
    assert_nothing_held(alias, within=40)


@pytest.mark.parametrize("path", ["block", "room/1"])
def test_a_message_at_a_time(running: Site, alias: str, path: str) -> None:
    one, two = f"a{next(_ids)}", f"b{next(_ids)}"
    name = "channels" if path == "block" else "room:1"
    with socket_to(running, path) as first, socket_to(running, path) as second:
        first.send(one)
        running.marks.wait(f"in-{one}")
        second.send(two)
        wait_for_waiters(alias, name, 1)
        assert [row.semaphore.name for row in held_rows(alias)] == [name]
        running.marks.set(f"go-{one}")
        assert first.recv(PATIENCE) == f"done {one}"
        running.marks.wait(f"in-{two}")
        running.marks.set(f"go-{two}")
        assert second.recv(PATIENCE) == f"done {two}"
    free(alias)


def test_methods_that_are_busy(running: Site, alias: str) -> None:
    # Of no request: they are functions like any other, whose first argument is the consumer.
    with semaphore("channels", using=alias), socket_to(running, "busily") as asked:
        answers = {}
        for how in ("skip", "callable", "omitted"):
            asked.send(how)
            answers[how] = asked.recv(PATIENCE)
    assert answers["skip"] == "None"
    assert str(answers["callable"]).startswith("busy ")
    assert answers["omitted"] == "raised channels"
    with semaphore("channels:busily", using=alias), socket_to(running, "busily") as asked:
        asked.send("key")
        assert asked.recv(PATIENCE) == "raised channels:busily"
        asked.send("omitted")
        assert asked.recv(PATIENCE) == "ran"


def test_a_permit_for_a_lifetime_moves_on_when_its_visitor_or_a_waiter_vanishes(running: Site, alias: str) -> None:
    with (
        socket_to(running, "life") as first,
        socket_to(running, "life") as second,
    ):
        assert first.recv(PATIENCE) == "yours"
        wait_for_waiters(alias, "life", 1)
        with socket_to(running, "life"):
            wait_for_waiters(alias, "life", 2)
        wait_for_waiters(alias, "life", 1)  # the one that vanished while it waited
        drop(first)
        assert second.recv(PATIENCE) == "yours"
        assert len(held_rows(alias)) == 1
    free(alias)
    assert not running.logged("sqlsem ERROR")


def test_who_waits_in_a_handler_does_not_see_its_visitor_leave(running: Site, alias: str) -> None:
    with socket_to(running, "life") as first:
        assert first.recv(PATIENCE) == "yours"
        with socket_to(running, "naive"):
            wait_for_waiters(alias, "life", 1)
        wait_for_waiters(alias, "life", 0)  # after its timeout
    free(alias)


def test_a_synchronous_consumer(running: Site, alias: str) -> None:
    with socket_to(running, "synchronous") as first, socket_to(running, "synchronous") as second:
        assert {first.recv(PATIENCE), second.recv(PATIENCE)} == {"yours", "busy"}
        assert len(held_rows(alias)) == 1
    free(alias)
    with socket_to(running, "synchronous") as first:
        assert first.recv(PATIENCE) == "yours"
    free(alias)
    assert not running.logged("sqlsem ERROR")


def test_an_http_consumer(running: Site, alias: str) -> None:
    one = f"p{next(_ids)}"
    with running.call(f"/page?{one}") as caller:
        running.marks.wait(f"in-{one}")
        assert [row.semaphore.name for row in held_rows(alias)] == ["page"]
        running.marks.set(f"go-{one}")
        assert caller.answer().text == "first\nnext\n"
    free(alias)


@pytest.mark.parametrize("kind", ["uvicorn", pytest.param("daphne", marks=pytest.mark.soak)])
def test_a_server_that_ends_with_consumers_that_hold_and_wait(kind: str, alias: str) -> None:
    with Site(kind, alias, env=ASGI) as site:
        with socket_to(site, "life") as first, socket_to(site, "life") as second:
            assert first.recv(PATIENCE) == "yours"
            wait_for_waiters(alias, "life", 1)
            site.stop(signal.SIGTERM)
            with pytest.raises(ConnectionClosed):
                second.recv(PATIENCE)
        with semaphore("life", using=alias).acquire(timeout=40):
            pass
        site.start()
        with socket_to(site, "life") as newcomer:
            assert newcomer.recv(PATIENCE) == "yours"
            site.stop(signal.SIGKILL)
        with semaphore("life", using=alias).acquire(timeout=40):
            pass
    free(alias)
