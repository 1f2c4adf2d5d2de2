"""Whether a client is there, as servers tell it; and what a view does whose client has gone. See tests/places too."""

from __future__ import annotations

import logging
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from django.http import HttpResponse
from django.test import Client, RequestFactory

from django_sqlsem import semaphore
from django_sqlsem.decorators import clients
from django_sqlsem.decorators.calls import classify
from django_sqlsem.exceptions import AcquireTimeoutError
from tests.support.databases import ROOT, held_rows
from tests.support.threads import run_in_threads, wait_until

pytestmark = pytest.mark.process_side

Pair = tuple[socket.socket, socket.socket]


def tcp() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    return here, there


@pytest.fixture(params=[socket.socketpair, tcp], ids=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A server's end of a connection, and its client's."""
    here, there = request.param()
    with here, there:
        yield here, there


@pytest.fixture(params=["poll", "peek"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With POLLRDHUP and without it, as on macOS."""
    if request.param == "peek":
        monkeypatch.delattr("select.POLLRDHUP", raising=False)
    elif not hasattr(__import__("select"), "POLLRDHUP"):
        pytest.skip("no POLLRDHUP here")
    return str(request.param)


def test_a_connection_that_stands(pair: Pair, system: str) -> None:
    here, there = pair
    assert not clients.is_closed(here)
    there.sendall(b"GET / HTTP/1.1")
    wait_until(lambda: here.recv(3, socket.MSG_PEEK) == b"GET")
    assert not clients.is_closed(here)
    assert here.recv(100) == b"GET / HTTP/1.1"  # nothing was read from it


@pytest.mark.parametrize("how", ["close", "shutdown", "reset"])
def test_a_connection_that_the_client_has_closed(pair: Pair, system: str, how: str) -> None:
    here, there = pair
    if how == "shutdown":
        there.shutdown(socket.SHUT_WR)
    else:
        if how == "reset":
            there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        there.close()
    wait_until(lambda: clients.is_closed(here))


def test_bytes_before_the_end_hide_it_only_where_nothing_else_tells(pair: Pair, system: str) -> None:
    here, there = pair
    there.sendall(b"x")
    there.close()
    if system == "poll":
        wait_until(lambda: clients.is_closed(here))
    assert here.recv(1) == b"x"
    wait_until(lambda: clients.is_closed(here))


def test_a_socket_that_the_server_has_closed_tells_nothing(system: str) -> None:
    here, there = socket.socketpair()
    here.close()
    assert not clients.is_closed(here)
    assert not clients.is_closed(here.fileno())
    there.close()


def test_under_green_threads_the_system_is_asked() -> None:
    pytest.importorskip("gevent")
    code = """
from gevent import monkey; monkey.patch_all()
import socket
from django_sqlsem.decorators import clients
here, there = socket.socketpair()
there.sendall(b"x")
print(clients.is_closed(here))
there.close()
print(clients.is_closed(here))
"""
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert said.stdout.split() == ["False", "True"], said.stderr


@pytest.mark.parametrize("key", ["gunicorn.socket", "werkzeug.socket"])
def test_what_servers_put_into_environ(key: str, pair: Pair) -> None:
    here, there = pair
    client = clients.client_of(classify(lambda: None, (RequestFactory().get("/", **{key: here}),)))
    assert isinstance(client, clients.WatchedClient)
    client.check("name")
    there.close()
    wait_until(client._left)
    with pytest.raises(clients.ClientGoneError, match="gone"):
        client.check("name")


def test_uwsgi_is_asked_for_the_connection_only(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pair
    monkeypatch.setitem(sys.modules, "uwsgi", SimpleNamespace(connection_fd=here.fileno))
    client: Any = clients.client_of(classify(len, (RequestFactory().get("/", **{"uwsgi.version": b"2"}),)))
    assert not client._left()
    there.close()
    wait_until(client._left)


def test_the_test_client_and_other_calls_have_none() -> None:
    assert clients.client_of(classify(len, ())) is None
    assert clients.client_of(classify(len, (RequestFactory().get("/"),))) is None
    seen: list[Any] = []

    def view(request: Any) -> HttpResponse:
        seen.append(clients.client_of(classify(len, (request,))))
        return HttpResponse()

    urls = SimpleNamespace(urlpatterns=[__import__("django.urls").urls.path("", view)])
    sys.modules["tests.urls_without_clients"] = urls  # type: ignore[assignment]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("django.conf.settings.ROOT_URLCONF", "tests.urls_without_clients")
            Client().get("/")
    finally:
        del sys.modules["tests.urls_without_clients"]
    assert seen == [None]


def view_of(database: str, ran: list[str], timeout: float | None = 60, **options: Any) -> Callable[..., Any]:
    @semaphore("gone", using=database, timeout=timeout, **options)
    def view(request: Any) -> HttpResponse:
        ran.append(request.path)
        return HttpResponse("ran")

    return view


def asked(disconnected: Callable[[], bool], path: str = "/") -> Any:
    return RequestFactory().get(path, **{"waitress.client_disconnected": disconnected})


def test_a_slot_granted_at_the_moment_of_leaving_goes_back(database: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "django_sqlsem")
    holder = semaphore("gone", using=database).acquire()
    holder.detach()
    looks: list[int] = []

    def disconnected() -> bool:
        looks.append(1)
        if len(looks) == 2:  # it waits, and its place is known
            mine = holder.token
            holder.release()
            wait_until(lambda: [row for row in held_rows(database) if row.token != mine], what="the grant")
            return True
        return False

    ran: list[str] = []
    answer = view_of(database, ran)(asked(disconnected))
    assert (answer.status_code, ran) == (499, [])
    assert held_rows(database) == []
    with semaphore("gone", using=database, timeout=0):
        pass
    assert [(record.what, record.semaphore, record.levelname) for record in caplog.records] == [
        ("client_gone", "gone", "INFO")
    ]


def test_the_last_look_at_the_end_of_the_timeout_is_no_longer_needed(database: str) -> None:
    view = semaphore("gone", using=database, timeout=0.7)(lambda request: HttpResponse("ran"))
    looks: list[int] = []
    with semaphore("gone", using=database).acquire() as holder:
        holder.detach()
        answer = view(asked(lambda: bool(looks.append(1))))
    assert answer.status_code == 503
    assert len(looks) >= 2


@pytest.mark.parametrize("timeout", [60, None])
@pytest.mark.parametrize("policy", [None, "raise", 429, pytest.fail], ids=["omitted", "raise", "429", "callable"])
def test_whatever_on_busy_says(database: str, policy: Any, timeout: float | None) -> None:
    ran: list[str] = []
    view = view_of(database, ran, timeout, on_busy=policy)
    with semaphore("gone", using=database).acquire() as holder:
        holder.detach()
        if policy == "raise":
            with pytest.raises(AcquireTimeoutError, match="gone"):
                view(asked(lambda: True))
        else:
            assert view(asked(lambda: True)).status_code == 499
        status = semaphore("gone", using=database).status()
        wait_until(lambda: semaphore("gone", using=database).status().waiting == 0)
        assert status.held == 1
    assert ran == []


def test_one_of_many_threads_leaves_and_a_free_slot_asks_for_no_client(database: str) -> None:
    ran: list[str] = []
    view = view_of(database, ran)
    gone = threading.Event()
    holder = semaphore("gone", using=database).acquire()
    holder.detach()
    ended = threading.Semaphore(0)

    def visit(index: int) -> int:
        if index == 8:
            wait_until(lambda: semaphore("gone", using=database).status().waiting == 8, what="eight waiters")
            gone.set()
            for _ in range(4):
                assert ended.acquire(timeout=30)
            wait_until(lambda: semaphore("gone", using=database).status().waiting == 4, what="four waiters")
            assert ran == []
            holder.release()
            return 0
        leaves = index % 2 == 0
        answer = view(asked(gone.is_set if leaves else lambda: False, f"/{index}"))
        ended.release()
        return int(answer.status_code)

    assert run_in_threads(9, visit) == [499, 200, 499, 200, 499, 200, 499, 200, 0]
    assert sorted(ran) == ["/1", "/3", "/5", "/7"]

    def never() -> bool:
        raise AssertionError("nobody waits")

    assert view(asked(never)).status_code == 200
