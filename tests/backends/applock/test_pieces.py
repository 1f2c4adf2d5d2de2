"""The pieces of application locks that need no server: the line, its sessions' sockets, what errors mean."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from django_sqlsem import BackendError
from django_sqlsem.backends.applock import calls
from django_sqlsem.backends.applock import line as applock_line
from django_sqlsem.backends.applock import pool as applock_pool
from django_sqlsem.backends.applock import sessions as applock_sessions
from django_sqlsem.backends.applock.acquire import FAIR, Answer
from django_sqlsem.backends.applock.line import Line
from django_sqlsem.backends.applock.pool import LockPool
from django_sqlsem.backends.applock.sessions import INSIDE, Holding, LockSession
from django_sqlsem.backends.base import (
    Grant,
    Granted,
    Place,
    Request,
)
from django_sqlsem.core import identity
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.names import resource_for
from django_sqlsem.core.threads import Turn
from django_sqlsem.database import errors
from django_sqlsem.database import sockets as database_sockets
from django_sqlsem.database.sqlserver import Meaning, lock_names, meaning
from tests.support.databases import ROOT
from tests.support.threads import wait_until


def claim(permit_id: str) -> Request:
    return Request(resource_for("line", "semaphore"), permit_id, 1, 1, 60.0, True, identity.current())


def place() -> Place:
    return Place(boot_now(), waiting=1)


class Server:
    """What a line asks for: a gate that opens at once, and slots that are granted when ``free`` says so."""

    def __init__(self) -> None:
        self.pool: Any = SimpleNamespace(
            alias="default",
            alone=lambda: SimpleNamespace(can_be_cut=False, ended="", cut=lambda: None),
            give_back=self.given_back.append,
        )
        self.free = threading.Event()
        self.patience = 0.3
        self.asked: list[str] = []
        self.delivered: list[str] = []
        self.given_up: list[str] = []
        self.passed_on: list[tuple[str, str]] = []
        self.served_elsewhere: set[str] = set()
        #: Its parts are itself.
        self.possession: Any = self
        self.record = True
        #: What it answers when it grants nothing.
        self.refusal = Answer(None, calls.BUSY)
        self.heads: list[bool] = []
        self.looks: list[tuple[int, int | None]] = []

    @property
    def given_back(self) -> list[Any]:
        return self.__dict__.setdefault("_given_back", [])

    def attempt(self, session: Any, asking: Request, timeout: int, *, fair: int, head: bool) -> Answer:
        assert fair == FAIR
        self.asked.append(asking.permit_id)
        self.heads.append(head)
        if not self.free.wait(self.patience):
            return self.refusal
        return Answer(Granted(asking.permit_id, Grant((1,), (), (1,)), 60.0), calls.WAITED)

    def try_claim(self, asking: Request, *, fair: int, mark: int | None) -> Answer:
        self.looks.append((fair, mark))
        return Answer(None, calls.BUSY, mark=len(self.looks))

    def pass_on(self, session: Any, asked: Request, successor: Request) -> Granted | None:
        self.passed_on.append((asked.permit_id, successor.permit_id))
        if successor.permit_id in self.served_elsewhere:
            self.free.clear()
            self.patience = 0.3
            return None
        return Granted(successor.permit_id, Grant((1,), (), (1,)), 60.0)

    def deliver(self, granted: Granted, sent: float, resource: Any, *, at_once: bool) -> None:
        self.delivered.append(granted.permit_id)

    def give_up(self, session: Any, asked: Request) -> None:
        assert session not in self.given_back, "others may use it already"
        self.given_up.append(asked.permit_id)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def line(server: Server) -> Line:
    return Line(server, lambda line: not line.wanted)


def test_one_of_two_that_asked_at_the_same_moment_leaves_the_other_in_line(server: Server, line: Line) -> None:
    for each in "ab":
        line.enrol(claim(each), place())
    line.leave("b")
    line.start()
    server.free.set()
    wait_until(lambda: server.delivered == ["a"])


def test_what_was_granted_to_one_that_had_left_is_given_back(server: Server, line: Line) -> None:
    line.enrol(claim("a"), place())
    line.start()
    wait_until(lambda: server.asked)
    line.leave("a")
    server.free.set()
    wait_until(lambda: server.given_up == ["a"] or "a" not in server.asked[:1])
    assert server.delivered == []


def grant_too_late(server: Server, line: Line) -> None:
    """Grant a slot to ``a`` when it has left, and ``b`` waits in its place."""
    server.patience = 10.0
    line.enrol(claim("a"), place())
    line.start()
    wait_until(lambda: server.asked)
    line.enrol(claim("b"), place())
    line.leave("a")
    server.free.set()


def test_what_was_granted_to_one_that_had_left_goes_to_the_next_one_here(server: Server, line: Line) -> None:
    grant_too_late(server, line)
    wait_until(lambda: server.delivered)
    assert server.delivered == ["b"]
    assert server.passed_on == [("a", "b")]
    assert not server.given_up


class Cuttable:
    """A session in the middle of a call."""

    can_be_cut = True
    ended = ""
    asked = 0.0
    limit = 0

    def __init__(self) -> None:
        self.is_cut = threading.Event()

    def cut(self) -> None:
        self.is_cut.set()


def test_who_wants_another_number_does_not_wait_for_what_the_one_before_it_wanted(
    server: Server, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have no end: the call goes on for as long as anybody here has time."""
    monkeypatch.setattr(database_sockets, "watch", database_sockets.Watch())
    session = Cuttable()
    server.pool.alone = lambda: session
    attempt = server.attempt

    def until_it_is_cut(session: Any, asking: Request, timeout: int, **options: Any) -> Answer:
        if asking.permit_id == "a":
            assert session.is_cut.wait(60)
            session.ended = "it was cut"
            raise BackendError("the session has ended")
        return attempt(session, asking, timeout, **options)

    server.attempt = until_it_is_cut  # type: ignore[method-assign]
    database_sockets.watch.add(session)  # so that the watch runs
    server.free.set()
    line.enrol(dataclasses.replace(claim("a"), take=2), place())
    line.start()
    wait_until(lambda: line._blocked is not None)
    line.enrol(claim("b"), place())
    line.leave("a")
    wait_until(lambda: server.delivered == ["b"])
    assert line.error is None


def test_what_the_next_one_here_has_got_elsewhere_is_left_alone(server: Server, line: Line) -> None:
    server.served_elsewhere = {"b"}
    grant_too_late(server, line)
    wait_until(lambda: server.passed_on)
    line.leave("b")
    wait_until(lambda: server.given_back)
    line.end(60)
    assert (server.delivered, server.given_up) == ([], [])


def test_who_waits_for_the_end_of_a_pause_keeps_the_gate_and_is_granted_by_the_same_session(
    server: Server, line: Line
) -> None:
    server.patience, server.refusal = 0.01, Answer(None, calls.ON_HOLD, head=True)
    line.enrol(claim("a"), place())
    line.start()
    wait_until(lambda: len(server.asked) == 3)
    assert line.is_head
    server.patience = 10.0
    server.free.set()
    wait_until(lambda: server.delivered == ["a"])
    line.end(60)
    assert server.heads[:3] == [False, True, True]
    assert len(server.given_back) == 1


def test_a_row_that_is_written_while_its_wait_ends_is_deleted_after_that(
    server: Server, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would show somebody who waits no longer."""
    told: list[int] = []
    writes, written = threading.Event(), threading.Event()

    def tell(_line: Line, _request: Request, waiting: int, _age: float) -> None:
        if waiting:
            writes.set()
            assert written.wait(60)
        told.append(waiting)

    monkeypatch.setattr(Line, "_tell", tell)
    monkeypatch.setattr(applock_line, "SHOWN_ANYHOW", 0.0)
    ends = threading.Event()
    hide = Line.hide
    monkeypatch.setattr(Line, "hide", lambda self: (ends.set(), hide(self)))
    request = claim("a")
    line.enrol(request, place())
    keeper = threading.Thread(target=line.show, args=(request, place()))
    keeper.start()
    assert writes.wait(60)
    line.start()
    server.free.set()
    wait_until(lambda: server.delivered == ["a"])
    assert ends.wait(60)
    line.end(0.2)  # what would not wait for the other has come to its end
    written.set()
    keeper.join(60)
    wait_until(lambda: len(told) == 2)
    assert told == [1, 0]


def test_a_gate_behind_which_nothing_moves_is_looked_past_seldom(
    server: Server, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First after five seconds, to see a ``mark``; then again, and after twice as long each time."""
    now = [1000.0]
    monkeypatch.setattr(applock_line, "boot_now", lambda: now[0])
    request = claim("a")
    line.enrol(request, place())
    looked: list[float] = []
    while now[0] < 1200:
        if line.look_past(request) is not None or len(server.looks) > len(looked):
            looked.append(now[0] - 1000)
        now[0] += 0.5
    assert looked == [5, 10, 20, 40, 80, 140]
    assert server.looks == [(2, None), *((2, nth) for nth in range(1, 6))]
    line.enrol(claim("b"), place())
    assert line.look_past(request) is None
    now[0] += 5
    line.look_past(request)
    assert server.looks[-1] == (2, None)  # another wait, another mark


def test_who_waits_is_shown_after_a_while_and_then_every_two_seconds(
    server: Server, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[float, int, int]] = []
    now = [1000.0]

    def run(call: Any, values: dict[str, Any]) -> dict[str, Any]:
        assert call is calls.WAITING
        assert set(values) >= set(call.parameters)
        told.append((now[0] - 1000, values["waiting"], values["age"]))
        return {}

    server.pool.shared = lambda key: contextlib.nullcontext(SimpleNamespace(run=run, session_us=0))
    monkeypatch.setattr(applock_line, "boot_now", lambda: now[0])
    request, waits = claim("a"), Place(1000.0, waiting=2)
    line.enrol(request, waits)
    line._stood_at = 1000.0
    while now[0] < 1004.4:
        line.show(request, waits)
        now[0] += 0.125
    line.leave("a")
    line.hide()
    line.hide()
    assert told == [(0.25, 2, 250_000), (2.25, 2, 2_250_000), (4.25, 2, 4_250_000), (4.5, 0, 0)]
    server.record = False
    line.enrol(request, waits)
    now[0] += 1
    line.show(request, waits)
    line.hide()
    assert len(told) == 4


def test_who_waits_is_shown_once_its_thread_stands_in_line(
    server: Server, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes after the row was seen comes after this one. One whose login takes long is shown all the same."""
    opens, told = threading.Event(), list[int]()
    alone = server.pool.alone
    server.pool.alone = lambda: (opens.wait(60), alone())[1]
    monkeypatch.setattr(Line, "_tell", lambda _line, _request, waiting, _age: told.append(waiting))
    monkeypatch.setattr(applock_line, "SHOWN_AFTER", 0.0)
    request = claim("a")
    line.enrol(request, place())
    line.start()
    line.show(request, place())
    assert told == []
    line.show(request, Place(boot_now() - 5, waiting=1))
    assert told == [1]
    line.hide()
    opens.set()
    wait_until(lambda: server.asked == ["a"])
    line.show(request, place())
    assert told == [1, 0]
    line._show_at = 0.0
    line.show(request, place())
    assert told == [1, 0, 1]
    line.leave("a")
    line.end(10)


def test_of_two_sessions_that_were_served_for_one_permit_only_the_first_one_has_it() -> None:
    pool = LockPool("default")
    first, second = (cast("LockSession", SimpleNamespace(held={}, ended="", kept=False)) for _ in range(2))
    holdings = [Holding("a", lock_names("line"), "key", (slot,)) for slot in (1, 2)]
    assert [pool.note(session, each) for session, each in zip((first, second), holdings, strict=True)] == [True, False]
    pool.forget(second, holdings[1])
    assert pool.holder("a") == (first, holdings[0])
    assert not second.held


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_connection_that_the_other_side_has_ended_is_known_by_its_socket(how: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        other, _ = listener.accept()
        found = [(sock.fileno(), os.fstat(sock.fileno()).st_ino)]
        assert not database_sockets.are_closed(found)
        if how == "reset":
            other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()
        wait_until(lambda: database_sockets.are_closed(found))
        assert not database_sockets.are_closed([(sock.fileno(), 0)])
    assert not database_sockets.are_closed(found)


def test_a_line_whose_thread_could_not_start_starts_later(
    server: Server, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    line.enrol(claim("a"), place())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more)
        with pytest.raises(RuntimeError):
            line.start()
    server.free.set()
    line.start()
    wait_until(lambda: server.delivered == ["a"])


KILLED = [
    ("08S01", "[08S01] [Microsoft]TCP Provider: Error code 0x2746 (10054) (SQLExecDirectW)"),
    ("08S01", "[08S01] [FreeTDS][SQL Server]Read from the server failed (20004) (SQLExecDirectW)"),
    ("Driver Error: Communication link failure; DDBC Error: [Microsoft]TCP Provider: Error code 0x2746",),
]
NEVER_THERE = [
    ("08001", "[08001] [Microsoft]TCP Provider: Error code 0x2749 (10061) (SQLDriverConnect)"),
    ("08001", "[08001] [FreeTDS][SQL Server]Unable to connect to data source (0) (SQLDriverConnect)"),
    ("Driver Error: Client unable to establish connection; DDBC Error: [Microsoft]TCP Provider: Error code 0x2749",),
    ("HYT00", "[HYT00] [Microsoft]Login timeout expired (0) (SQLDriverConnect)"),
    ("28000", "[28000] [Microsoft]Login failed for user 'sa'. (18456) (SQLDriverConnect)"),
]


def failing_logins(server: Server, said: tuple[str, ...], count: int) -> list[int]:
    """Have so many logins fail, and return a list that gets a number for each one that is tried."""
    real, tried = server.pool.alone, []

    def alone() -> Any:
        tried.append(len(tried))
        if len(tried) <= count:
            raise BackendError("The database 'default' failed") from Exception(*said)
        return real()

    server.pool.alone = alone
    return tried


@pytest.mark.parametrize("said", KILLED)
def test_who_waits_goes_on_when_a_session_is_killed_in_its_login(
    server: Server, line: Line, said: tuple[str, ...]
) -> None:
    tried = failing_logins(server, said, 3)
    server.free.set()
    line.enrol(claim("a"), place())
    line.start()
    wait_until(lambda: server.delivered == ["a"])
    assert len(tried) == 4
    assert line.error is None


@pytest.mark.parametrize(("said", "logins"), [(KILLED[0], applock_line.ENDS), *[(each, 1) for each in NEVER_THERE]])
def test_who_waits_hears_of_a_server_that_is_not_there(
    server: Server, line: Line, said: tuple[str, ...], logins: int
) -> None:
    tried = failing_logins(server, said, 1000)
    line.enrol(claim("a"), place())
    line.start()
    wait_until(lambda: line.error is not None)
    assert len(tried) == logins
    line.leave("a")


def test_a_socket_that_took_over_a_descriptor_is_not_cut() -> None:
    ours, theirs = socket.socketpair()
    sockets = [(ours.fileno(), os.fstat(ours.fileno()).st_ino)]
    stranger, peer = socket.socketpair()
    with theirs, peer:
        number = ours.detach()
        os.dup2(stranger.fileno(), number)  # as if the driver had closed it, and somebody had opened another
        stranger.close()
        database_sockets.cut(sockets)
        peer.sendall(b"x")
        assert os.read(number, 1) == b"x"
        os.close(number)


def test_a_fork_lets_go_of_sockets_from_the_connect_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_sockets, "_opened", [])
    monkeypatch.setattr(database_sockets, "gate", threading.Lock())
    listener = socket.create_server(("127.0.0.1", 0))
    raw, sockets = database_sockets.opening(lambda: socket.create_connection(listener.getsockname()))
    server_side, _ = listener.accept()
    with listener, raw, server_side:
        assert [descriptor for descriptor, _inode in sockets] == [raw.fileno()]
        database_sockets.after_fork()
        server_side.settimeout(5)
        assert server_side.recv(1) == b""  # nobody has it open any more


def test_a_login_that_hears_nothing_is_cut_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_sockets, "gate", threading.Lock())
    silent, talking = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    port = silent.getsockname()[1]
    others = []

    def connect() -> socket.socket:
        raw = socket.create_connection(("127.0.0.1", port))
        others.extend(socket.create_connection(server.getsockname()) for server in (silent, talking))
        _ours, theirs, elsewhere = silent.accept()[0], silent.accept()[0], talking.accept()[0]
        with _ours, theirs, elsewhere:
            talker = threading.Thread(target=talk, args=(theirs,))
            talker.start()
            raw.settimeout(30)
            said = raw.recv(1)  # a driver that waits for ever
            over.set()
            talker.join()
            for each in (theirs, elsewhere):
                each.sendall(b"end")
        raw.close()
        raise ConnectionError(said)

    def talk(sock: socket.socket) -> None:
        while not over.wait(0.1):
            sock.sendall(b"x")

    over = threading.Event()
    with silent, talking, contextlib.ExitStack() as stack:
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="b''"):
            database_sockets.opening(connect, port, limit=1)
        assert time.monotonic() - began > 1
        for each in others:
            stack.enter_context(each)
            each.settimeout(5)
            assert b"".join(iter(lambda each=each: each.recv(1024), b"")).endswith(b"end")


def test_who_has_stood_in_line_for_a_login_long_enough_goes_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Lock()
    monkeypatch.setattr(database_sockets, "gate", gate)
    with gate, socket.create_server(("127.0.0.1", 0)) as listener:
        raw, known = database_sockets.opening(lambda: socket.create_connection(listener.getsockname()), patience=0.01)
        raw.close()
    assert known == []
    assert not gate.locked()


def test_a_connection_to_elsewhere_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that took its own from a pool opened none, and another thread did at that moment."""
    monkeypatch.setattr(database_sockets, "gate", threading.Lock())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for wanted, count in ((port, 1), (port + 1, 0), (None, 1)):
            raw, known = database_sockets.opening(lambda: socket.create_connection(("127.0.0.1", port)), wanted)
            raw.close()
            assert len(known) == count


@pytest.mark.parametrize(
    ("settings", "port"),
    [
        ({}, 1433),
        ({"HOST": "db", "PORT": ""}, 1433),
        ({"HOST": "db", "PORT": "14330"}, 14330),
        ({"HOST": "db", "PORT": 14330}, 14330),
        ({"HOST": "tcp:db,14331"}, 14331),
        ({"HOST": "db, 14331"}, 14331),
        ({"HOST": "db\\SQLEXPRESS"}, None),
        ({"HOST": "db\\SQLEXPRESS", "PORT": "14330"}, 14330),
        ({"HOST": "db", "PORT": "14330", "OPTIONS": {"dsn": "reports"}}, None),
        ({"HOST": "db", "PORT": "14330", "OPTIONS": {"driver": "FreeTDS"}}, None),
        ({"HOST": "db", "PORT": "14330", "OPTIONS": {"driver": "FreeTDS", "host_is_server": True}}, 14330),
        ({"HOST": "db", "OPTIONS": {"driver": "ODBC Driver 17 for SQL Server"}}, 1433),
        ({"HOST": "db", "OPTIONS": {"python_driver": "mssql-python"}}, 1433),
    ],
)
def test_where_a_server_listens(settings: dict[str, Any], port: int | None) -> None:
    assert database_sockets.port_in(settings) == port


def test_a_server_that_sends_on_is_found_by_where_it_sends_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Azure SQL does within Azure: the gateway's connection has gone by then, and the database's is elsewhere."""
    monkeypatch.setattr(database_sockets, "gate", threading.Lock())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = listener.getsockname()[1]
        monkeypatch.setattr(database_sockets, "_REDIRECTED", (there,))
        raw, known = database_sockets.opening(lambda: socket.create_connection(("127.0.0.1", there)), 1433)
        assert [descriptor for descriptor, _inode in known] == [raw.fileno()]
        raw.close()


def test_sessions_that_somebody_waits_on_are_not_waited_for() -> None:
    pool = LockPool("default")
    waiting: Any = SimpleNamespace(ended="", unclear={"key": None}, waiting=True)
    left: Any = SimpleNamespace(ended="", unclear={"key": None}, waiting=False)
    pool._sessions = [waiting, left]
    assert pool.unclear("key") == [left]


def test_a_crowd_opens_few_sessions_however_slow_logins_are(monkeypatch: pytest.MonkeyPatch) -> None:
    logged_in, opened = threading.Event(), []

    class Slow:
        def __init__(self, alias: str, in_turn: Any) -> None:
            opened.append(self)
            assert logged_in.wait(30)
            self.lock, self.held, self.unclear = Turn(lambda: None, INSIDE), dict[str, Holding](), dict[str, Any]()
            self.ended, self.waiting, self.kept, self.last_used = "", False, False, 0.0

    monkeypatch.setattr(applock_pool, "LockSession", Slow)
    monkeypatch.setattr(applock_pool, "TURN", 0.05)
    monkeypatch.setattr(applock_pool, "LOOK_AGAIN", 0.05)
    pool = LockPool("default")
    served: list[LockSession] = []

    def claim_once() -> None:
        with pool.shared("key") as session:
            served.append(session)

    crowd = [threading.Thread(target=claim_once, daemon=True) for _ in range(50)]
    for each in crowd:
        each.start()
    wait_until(lambda: pool.attempts == len(crowd))
    time.sleep(0.2)  # all of them have waited for longer than their turn takes
    logged_in.set()
    for each in crowd:
        each.join(30)
    assert len(served) == len(crowd)
    assert len(opened) == applock_pool.ENOUGH


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            Exception("Driver Error: Timeout expired; DDBC Error: [Microsoft]Query timeout expired"),
            Meaning.SILENT,
        ),
        (Exception("HYT00", "[HYT00] [Microsoft]Query timeout expired (0) (SQLExecDirectW)"), Meaning.SLOW),
        (
            Exception(
                "Driver Error: Communication link failure; DDBC Error: [Microsoft]TCP Provider: Error code 0x2746"
            ),
            Meaning.OTHER,
        ),
        (
            Exception("01000", "[01000] [FreeTDS][SQL Server]Unexpected EOF from the server (20017) (SQLExecDirectW)"),
            Meaning.SESSION_ENDED,
        ),
        (Exception("22012", "[22012] Divide by zero error encountered. (8134)"), Meaning.OTHER),
    ],
)
def test_what_an_error_means_whatever_the_driver(error: Exception, expected: Meaning) -> None:
    assert meaning(error) is expected


class Silent:
    """A session whose server owes an answer."""

    def __init__(self) -> None:
        self.asked, self.limit = 0.0, 5
        self.was_cut = threading.Event()

    def cut(self) -> None:
        self.was_cut.set()


def test_a_statement_that_is_not_answered_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_sockets, "_LOOK", 0.01)
    watch, silent, at_rest = database_sockets.Watch(), Silent(), Silent()
    for each in (silent, at_rest):
        watch.add(each)
    silent.asked = time.monotonic() - silent.limit - database_sockets._GRACE - 1
    assert silent.was_cut.wait(10)
    assert not at_rest.was_cut.is_set()
    for each in (silent, at_rest):
        watch.remove(each)
    wait_until(lambda: watch._thread is None, what="no thread for nothing")


def test_a_step_is_taken_soon_by_the_thread_that_watches() -> None:
    watch, watched, taken = database_sockets.Watch(), Silent(), queue.SimpleQueue[threading.Thread]()
    watch.add(watched)
    called = time.monotonic()
    for _ in range(2):
        watch.call_soon(lambda: taken.put(threading.current_thread()))
    assert taken.get(timeout=10) is taken.get(timeout=10) is watch._thread
    assert time.monotonic() - called >= database_sockets.SOON
    watch.remove(watched)


def opened(monkeypatch: pytest.MonkeyPatch, **said: Any) -> LockSession:
    """Open a session whose server answers as one that is fit for locks does, but for what is ``said``."""

    class Cursor:
        description: Any = None
        answer: tuple[Any, ...] = ()

        def setinputsizes(self, sizes: Any) -> None:
            pass

        def execute(self, text: str, parameters: Any = ()) -> None:
            if text.startswith(applock_sessions.OPEN[:80]):
                row = {"session_id": 57, "used": 0, "read_only": 0, "session_us": 1_763_677_312_003_333} | said
                self.description, self.answer = [(name,) for name in row], tuple(row.values())

        def fetchall(self) -> list[tuple[Any, ...]]:
            return [self.answer]

        def nextset(self) -> bool:
            return False

        def close(self) -> None:
            pass

    closed = []
    raw: Any = SimpleNamespace(cursor=Cursor, timeout=0, close=lambda: closed.append(True))
    wrapper: Any = SimpleNamespace(
        wrap_database_errors=contextlib.nullcontext(), Database=SimpleNamespace(Error=OSError)
    )
    monkeypatch.setattr(applock_sessions, "connect", lambda alias, in_turn: (raw, wrapper, []))
    try:
        return LockSession("default")
    except BackendError:
        assert closed, "a session that is refused is closed"
        raise


def test_a_session_of_a_database_that_is_read_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A readable secondary has a lock manager of its own: its locks would exclude nobody on the primary."""
    with pytest.raises(BackendError, match="read-only, or a readable secondary"):
        opened(monkeypatch, read_only=1)


def test_a_session_that_has_been_another_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="came out of a pool, with the locks of its last user"):
        opened(monkeypatch, used=1)


def test_a_session_that_is_fit_for_locks_is_known_by_number_and_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(monkeypatch)
    assert (session.session_id, session.session_us) == (57, 1_763_677_312_003_333)
    session.end("done")


def test_a_proof_tells_each_slot_as_the_procedure_takes_it_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By UTF-16 units, as ``SUBSTRING`` counts: see ``internal_prove_1``."""
    sent: list[dict[str, Any]] = []

    def run(call: Any, values: dict[str, Any]) -> dict[str, Any]:
        assert call is calls.PROVE
        sent.append(values)
        return {"missing": 0, "asked": f"{'b' * 32}ann\n{'p':32}o' two\n"}

    session = opened(monkeypatch)
    monkeypatch.setattr(session, "run", run)
    names = {"a" * 32: "short", "b" * 32: "\U0001f512 and \u540d", "c" * 32: "n" * 200}
    for nth, (permit, name) in enumerate(names.items(), 1):
        resource = resource_for(name, "semaphore")
        slots = tuple(range(nth, 2 * nth))
        session.held[resource.key] = Holding(permit, lock_names(name), resource.key, slots)
    assert session.prove(record=True)
    assert sent[0]["record"] is True
    text = sent[0]["held"].encode("utf-16-le")

    def part(start: int, length: int) -> str:
        return text[2 * start : 2 * (start + length)].decode("utf-16-le")

    found, at = [], 0
    while 2 * at < len(text):
        length = int(part(at + 70, 4))
        found.append((part(at, 32), part(at + 32, 32), int(part(at + 64, 6)), part(at + 74, length)))
        at += 74 + length
    assert found == [
        (resource_for(name, "semaphore").key, permit, slot, lock_names(name).base)
        for nth, (permit, name) in enumerate(names.items(), 1)
        for slot in range(nth, 2 * nth)
    ]
    assert session.asked_by == {"b" * 32: "ann", "p": "o' two"}
    session.held.clear()
    session.end("done")


@pytest.mark.parametrize("used", [True, False])
def test_locks_are_given_back_before_a_driver_closes_all_connections(tmp_path: Path, used: bool) -> None:
    (tmp_path / "mssql_python.py").write_text("import atexit; atexit.register(lambda: print('the driver', flush=True))")
    code = """
import json, sys
import django
from django.conf import settings
options = {"python_driver": "mssql_python"} if json.loads(sys.argv[1]) else {}
other = {"ENGINE": "django.db.backends.dummy", "OPTIONS": options}
default = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
settings.configure(INSTALLED_APPS=["django_sqlsem"], DATABASES={"default": default, "other": other})
django.setup()
from django_sqlsem.runtime import keepers
keepers.stop_all = lambda **_: print("the locks", flush=True)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", code, json.dumps(used)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["the locks", "the driver"][: 1 + used]


@pytest.mark.parametrize("said", ["Unexpected EOF from the server (20017)", "Unknown error (0)"])
def test_what_freetds_says_of_a_connection_that_is_gone(said: str) -> None:
    pyodbc = pytest.importorskip("pyodbc", exc_type=ImportError)  # without unixODBC it cannot be loaded
    text = f"[HY000] [FreeTDS][SQL Server]{said} (SQLExecDirectW)"
    assert errors.is_disconnect(pyodbc.Error("HY000", text))
    assert not errors.is_disconnect(pyodbc.Error("HY000", text.replace("(0", "(50").replace("(2", "(5")))


@pytest.mark.parametrize(
    ("driver", "arguments", "deadlock"),
    [
        ("pyodbc", ("40001", "[40001] [Microsoft][ODBC Driver 18 for SQL Server][SQL Server]Was victim (1205)"), True),
        ("pyodbc", ("42000", "[42000] [FreeTDS][SQL Server]Transaction was the victim (1205) (SQLExecute)"), True),
        (
            "mssql_python",
            ("Serialization failure", "Transaction (Process ID 52) was deadlocked on lock resources"),
            True,
        ),
        ("pyodbc", ("42000", "[42000] [FreeTDS][SQL Server]Lock request time out period exceeded. (1222)"), False),
        ("mssql_python", ("Syntax error or access violation", "Lock request time out period exceeded."), False),
        ("pyodbc", ("42000", "[42000] [Microsoft]Update conflict (3960)"), False),
    ],
)
def test_what_drivers_of_sql_server_say_of_what_passes(driver: str, arguments: tuple[str, ...], deadlock: bool) -> None:
    """As captured from the drivers; an operational error is no dead connection for that."""
    error = type("OperationalError", (Exception,), {"__module__": driver})(*arguments)
    assert errors.is_transient(error)
    assert errors.is_deadlock_of_sql_server(error) is deadlock
    assert not errors.is_disconnect(error)
    assert meaning(error) is Meaning.AGAIN
    assert not errors.is_transient(type(error)("42000", "Incorrect syntax near 'x'. (102)"))
