"""A database that goes away while somebody waits, holds or gives back, and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sqlite3
import threading
import time

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import InterfaceError, OperationalError, connections, transaction

from django_sqlsem import (
    AcquireTimeoutError,
    BackendError,
    PermitLostError,
    semaphore,
)
from django_sqlsem.database import sockets
from django_sqlsem.database.sessions import OwnSession
from django_sqlsem.locks import counter
from django_sqlsem.snapshots import LossReason
from tests.programs.outage_clients import Sufferer
from tests.support import applocks, databases
from tests.support.databases import held_rows, kill_sessions, session_ids
from tests.support.keepers import keeper_of
from tests.support.processes import Child
from tests.support.proxy import proxy_for, through
from tests.support.threads import run_beside, wait_until

#: No call may take longer while the database is away, in seconds.
BOUND = 25.0
#: How soon a release that failed is made up for once the database is back: the keeper tries every second.
SOON = 20.0
#: How long one waits that gives up while the server is away, in seconds.
PATIENT = 3

SERVERS = [alias for alias in databases.covered() if alias != "default"]
OUTAGES = ["refuse", "silence"]


@pytest.fixture(params=SERVERS)
def server(request, committed):
    """The alias of one covered server after the other."""
    alias = applocks.parameter(request)
    yield alias
    databases.assert_nothing_held(alias)


@pytest.fixture
def proxy(server):
    with proxy_for(server) as proxy:
        yield proxy


@pytest.fixture
def sufferer(server, proxy):
    """A function that starts a process which reaches the server through the proxy."""
    with contextlib.ExitStack() as stack:
        yield lambda name, impatient=True, **options: stack.enter_context(
            Sufferer(server, name, env=through(proxy, server, impatient=impatient), **options)
        )


def is_of_the_driver(cause, alias):
    """Whether a BackendError's cause is what Django made of the driver's error."""
    return cause.startswith(("django.db.utils.OperationalError: ", "django.db.utils.InterfaceError: "))


def test_proxy_passes_everything_on(server, proxy, sufferer):
    child = sufferer("proxied")
    child.does("acquire 5", "held")
    assert [row.pid for row in held_rows(server)] == [child.pid]
    child.does("release", "released")


@pytest.mark.parametrize("when", ["at the login", "in a session", "in a transaction"])
def test_a_silent_server_is_found_out(server, proxy, when):
    """Without any limit in the alias's own settings."""
    settings = connections[server].settings_dict
    options = {name: value for name, value in settings["OPTIONS"].items() if not name.endswith("_timeout")}
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(OwnSession(server)) as session:
        for name, value in {"HOST": "127.0.0.1", "PORT": str(proxy.port), "OPTIONS": options}.items():
            patch.setitem(settings, name, value)
        if when != "at the login":
            session.run(lambda cursor: cursor.execute("SELECT 1"))

        def work(cursor):
            if when == "in a transaction":
                cursor.execute("SELECT 1")
            proxy.silence()
            cursor.execute("SELECT 1")

        if when == "at the login":
            proxy.silence()
        began = time.monotonic()
        with pytest.raises(BackendError) as caught:
            (session.transaction if when == "in a transaction" else session.run)(work, again=False)
        assert time.monotonic() - began < BOUND
    assert isinstance(caught.value.__cause__, OperationalError | InterfaceError), caught.value


@pytest.mark.parametrize("verb", ["acquire", "aacquire"])
@pytest.mark.parametrize("outage", OUTAGES)
def test_away_before_an_acquire(server, proxy, sufferer, outage, verb):
    child = sufferer("before", impatient=verb == "aacquire")  # the defaults, and once is enough
    child.does("acquire 5", "held")
    child.does("release", "released")
    getattr(proxy, outage)()
    for _ in range(2):
        cause = child.does(f"{verb} 0", "failed", within=BOUND)
        assert is_of_the_driver(cause, server), cause
    child.send(f"{verb} 60")
    if applocks.are_at(server):
        cause = child.answer("failed", within=BOUND)
        assert is_of_the_driver(cause, server), cause
    else:
        child.silent(2.0)
    proxy.resume()
    if applocks.are_at(server):
        child.send(f"{verb} 30")
    child.answer("held", within=2 * BOUND)
    assert len(held_rows(server)) == 1
    child.does("release", "released")


@pytest.mark.parametrize("verb", ["acquire", "aacquire"])
@pytest.mark.parametrize("outage", OUTAGES)
def test_away_while_waiting(server, proxy, sufferer, outage, verb):
    lock = semaphore("waiting", using=server)
    holder = lock.acquire()
    child = sufferer("waiting")
    child.send(f"{verb} 60")
    wait_until(lambda: lock.status().waiting == 1)
    getattr(proxy, outage)()
    if applocks.are_at(server):
        cause = child.answer("failed", within=BOUND + 5)
        assert is_of_the_driver(cause, server), cause
    else:
        wait_until(lambda: "is away" in child.stderr, timeout=BOUND, what="the outage is noticed")
        child.silent(2.0)
        wait_until(lambda: lock.status().waiting == 0, what="its place has lapsed")
    proxy.resume()
    if applocks.are_at(server):
        child.send(f"{verb} 60")
    wait_until(lambda: lock.status().waiting == 1, timeout=BOUND)
    holder.release()
    child.answer("held", within=BOUND)
    assert len(held_rows(server)) == 1
    child.does("release", "released")


@pytest.mark.parametrize("outage", OUTAGES)
def test_a_timeout_ends_in_time_while_the_server_is_away(server, proxy, sufferer, outage):
    lock = semaphore("in-time", using=server)
    holder = lock.acquire()
    child = sufferer("in-time")
    child.send(f"acquire {PATIENT}")
    wait_until(lambda: lock.status().waiting == 1)
    getattr(proxy, outage)()
    line = child.expect(timeout=BOUND)
    assert "failed" in line or "busy" in line, line
    proxy.resume()
    holder.release()
    child.does("acquire 30", "held")
    child.does("release", "released")


@pytest.mark.parametrize("outage", OUTAGES)
@pytest.mark.rows_only("lease")
def test_holding_through_an_outage_shorter_than_the_lease(server, proxy, sufferer, settings, outage):
    settings.SQLSEM = {"BEACONS": False}  # else a session that has ended costs the permit after a second
    child = sufferer("short", lease=8)
    child.does("acquire 5", "held")
    (row,) = held_rows(server)
    getattr(proxy, outage)()
    time.sleep(3.5)  # a renewal is due after two seconds
    child.does("check", "ours")
    proxy.resume()
    wait_until(lambda: held_rows(server)[0].expires_us > row.expires_us + 3_000_000, timeout=6, what="renewed")
    time.sleep(4)
    child.does("check", "ours")
    assert [each.token for each in held_rows(server)] == [row.token]
    child.does("release", "released")
    assert held_rows(server) == []


@pytest.mark.parametrize("outage", OUTAGES)
@pytest.mark.rows_only("lease")
def test_holding_through_an_outage_longer_than_the_lease(server, proxy, sufferer, outage):
    child = sufferer("long", lease=2)
    child.does("acquire 5", "held")
    getattr(proxy, outage)()
    lock = semaphore("long", using=server)
    next_holder = lock.acquire(timeout=5)
    # The old holder counts its lease as over before the database does.
    assert child.does("check", "lost", within=1.0) == "cut off"
    proxy.resume()
    child.does("release", "released", within=BOUND)
    next_holder.check()
    assert [row.token for row in held_rows(server)] == [next_holder.token]
    child.send("acquire 30")
    wait_until(lambda: lock.status().waiting == 1)
    next_holder.release()
    child.answer("held", within=BOUND)
    child.does("check", "ours")
    child.does("release", "released")


@pytest.mark.rows_only("row statements")
def test_who_is_cut_off_in_the_middle_of_a_transaction_does_not_keep_its_rows(server):
    lock = semaphore("rows-kept", using=server)
    lock.acquire().release()
    updated, go_on = threading.Event(), threading.Event()
    ended = []

    def work(cursor):
        cursor.execute("UPDATE sqlsem_slot SET host = ''")
        updated.set()
        go_on.wait(30)
        cursor.execute("SELECT 1")

    def transaction():
        session = OwnSession(server)
        try:
            session.transaction(work, again=False)
        except BackendError as error:
            ended.append(error)
        finally:
            session.close()

    thread = threading.Thread(target=transaction)
    thread.start()
    assert updated.wait(10)
    lock.acquire(timeout=20).release()
    go_on.set()
    thread.join(20)
    assert len(ended) == 1


@pytest.mark.parametrize("outage", OUTAGES)
def test_release_while_away_raises_and_is_made_up_for(server, proxy, sufferer, outage):
    child = sufferer("late")
    child.does("acquire 5", "held")
    getattr(proxy, outage)()
    if outage == "refuse" and applocks.are_at(server):  # the session has ended, and all that it had is free
        child.does_either("release", "released", "failed", within=BOUND)
    else:
        cause = child.does("release", "failed", within=BOUND)
        assert is_of_the_driver(cause, server), cause
        assert len(held_rows(server)) == 1
    proxy.resume()
    wait_until(lambda: not held_rows(server), timeout=SOON, what="given back by the keeper")
    child.does("acquire 5", "held")
    child.does("release", "released")


@pytest.mark.parametrize("outage", OUTAGES)
def test_a_block_that_ends_while_away_logs_and_is_made_up_for(server, proxy, sufferer, outage):
    child = sufferer("block")
    child.does("enter", "held")
    getattr(proxy, outage)()
    child.does("leave", "left", within=BOUND)
    if not applocks.are_at(server):
        assert f"The database '{server}' is away" in child.stderr
        assert "could not be given back" not in child.stderr  # one line is enough
        assert len(held_rows(server)) == 1
    elif outage == "silence":  # else the session has ended, and all that it had is free
        assert "The permit of 'block' could not be given back; the keeper goes on trying" in child.stderr
        assert len(held_rows(server)) == 1
    proxy.resume()
    wait_until(lambda: not held_rows(server), timeout=SOON, what="given back by the keeper")
    child.does("enter", "held")
    child.does("leave", "left")


@pytest.mark.rows_only("lease")
def test_the_lease_ends_what_an_outage_does_not_let_go(server, proxy, sufferer):
    child = sufferer("lease", lease=2)
    child.does("acquire 5", "held")
    proxy.refuse()
    child.does("release", "failed", within=BOUND)
    permit = semaphore("lease", using=server).acquire(timeout=2.5)
    proxy.resume()
    time.sleep(3.0)
    permit.check()
    assert [row.token for row in held_rows(server)] == [permit.token]
    permit.release()
    child.does("acquire 5", "held")
    child.does("release", "released")


# The server ends sessions, and is there.


@pytest.mark.rows_only("sessions")
def test_killed_idle_connections_are_replaced_unnoticed(server):
    lock = semaphore("idle", using=server)
    keeper = semaphore("keeps-the-connections-open", using=server).acquire()
    keeper.detach()
    for _ in range(3):
        lock.acquire().release()
        connections.close_all()
        assert kill_sessions(server, session_ids(server)) > 0
        with lock as permit:
            assert sorted(row.token for row in held_rows(server)) == sorted([permit.token, keeper.token])
            connections.close_all()
            kill_sessions(server, session_ids(server))
        assert [row.token for row in held_rows(server)] == [keeper.token]
    keeper.check()
    keeper.release()


@pytest.mark.rows_only("row statements")
def test_a_release_whose_answer_is_lost_is_no_loss(server, monkeypatch, caplog):
    """It is sent once more, and then there is nothing left to free."""
    lost = []
    lock = semaphore("dock", slots=2, lease=30, on_lost=lost.append, using=server)
    lock.acquire().release()
    permit = lock.acquire()
    dialect = type(keeper_of(server).work.dialect)
    execute = dialect.execute

    def executed_and_cut_off(itself, cursor, text, parameters):
        execute(itself, cursor, text, parameters)
        if text.startswith("UPDATE sqlsem_slot SET expires_us = NULL"):
            monkeypatch.undo()
            [descriptor] = sockets.descriptors(cursor.db.connection)
            with contextlib.closing(socket.socket(fileno=os.dup(descriptor))) as line:
                line.shutdown(socket.SHUT_RDWR)
            cursor.execute("SELECT 1")  # as if this had been the answer that was lost

    monkeypatch.setattr(dialect, "execute", executed_and_cut_off)
    permit.release()
    assert dialect.execute is execute
    assert held_rows(server) == []
    assert not permit.lost
    assert [record.levelname for record in caplog.records if record.levelname == "ERROR"] == lost == []


def test_killed_while_waiting_goes_on_waiting(server):
    lock = semaphore("goes-on", using=server)
    holder = lock.acquire()
    holder.detach()
    # Application locks end with their session.
    spared = set(session_ids(server)) if applocks.are_at(server) else set()
    with Sufferer(server, "goes-on") as child:
        child.send("acquire 60")
        wait_until(lambda: lock.status().waiting == 1)
        for _ in range(5):
            connections.close_all()
            kill_sessions(server, [each for each in session_ids(server) if each not in spared])
            time.sleep(0.3)
        wait_until(lambda: lock.status().waiting == 1, what="still waiting")
        holder.release()
        child.answer("held", within=BOUND)
        assert [row.pid for row in held_rows(server)] == [child.pid]
        child.does("release", "released")


@pytest.mark.rows_only("sessions")
def test_killed_while_holding_keeps_the_permit(server):
    with Sufferer(server, "keeps", lease=3) as child:
        child.does("acquire 5", "held")
        end = time.monotonic() + 6
        while time.monotonic() < end:
            connections.close_all()
            kill_sessions(server, session_ids(server))
            time.sleep(0.25)
            child.does("check", "ours")
        child.does("release", "released")
    assert held_rows(server) == []


# SQLite has no server: its file is locked by somebody, replaced, or not there.


@contextlib.contextmanager
def write_lock(alias="default"):
    """Keep SQLite's one write lock, as another program may."""
    with contextlib.closing(databases.raw_connection(alias)) as other:
        other.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            other.execute("ROLLBACK")


@pytest.fixture
def sqlite(committed):
    yield "default"
    databases.assert_nothing_held("default")


def is_locked(cause):
    return cause == "django.db.utils.OperationalError: database is locked"


@pytest.mark.parametrize("verb", ["acquire", "aacquire"])
def test_sqlite_locked_before_an_acquire(sqlite, verb):
    with Sufferer(sqlite, "before") as child:
        with write_lock():
            assert is_locked(child.does(f"{verb} 12", "failed", within=BOUND))
            child.send(f"{verb} 60")
            child.silent(12)
        child.answer("held", within=BOUND)
        assert len(held_rows(sqlite)) == 1
        child.does("release", "released")


def test_sqlite_locked_for_a_moment_goes_unnoticed(sqlite):
    with Sufferer(sqlite, "moment") as child:
        for line, outcome in (("acquire 30", "held"), ("release", "released")):
            with write_lock():
                child.send(line)
                child.silent(1.5)
            child.answer(outcome, within=5)


def test_sqlite_locked_while_waiting(sqlite):
    lock = semaphore("waiting", using=sqlite)
    holder = lock.acquire()
    with Sufferer(sqlite, "waiting") as child:
        child.send("acquire 60")
        wait_until(lambda: lock.status().waiting == 1)
        with write_lock():
            wait_until(lambda: "is away" in child.stderr, timeout=BOUND, what="it has tried for long")
        wait_until(lambda: lock.status().waiting == 1)
        holder.release()
        child.answer("held", within=2 * BOUND)
        child.does("release", "released")


def test_sqlite_locked_while_holding(sqlite):
    with Sufferer(sqlite, "short", lease=6) as patient, Sufferer(sqlite, "long", lease=2) as child:
        patient.does("acquire 5", "held")
        child.does("acquire 5", "held")
        with write_lock():
            time.sleep(3)
            assert child.does("check", "lost", within=1) == "cut off"
            patient.does("check", "ours")
        time.sleep(4)
        patient.does("check", "ours")
        assert [row.pid for row in held_rows(sqlite)] == [patient.pid]
        child.does("release", "released")
        patient.does("release", "released")


def test_sqlite_locked_while_a_renewal_waits_for_its_turn(sqlite):
    """The keeper waits for the answer to something that was sent before: the process did not sleep."""

    async def ask():
        async with semaphore("other", using=sqlite, timeout=60):
            pass

    with semaphore("mine", lease=2, using=sqlite) as permit, write_lock():
        other = run_beside(lambda: asyncio.run(ask()))
        assert wait_until(lambda: permit.lost).reason is LossReason.CUT_OFF
    other.result(60)


def test_sqlite_locked_while_giving_back(sqlite):
    with Sufferer(sqlite, "late") as child, Sufferer(sqlite, "block") as other:
        child.does("acquire 5", "held")
        other.does("enter", "held")
        with write_lock():
            child.send("release")
            other.send("leave")
            assert is_locked(child.answer("failed", within=BOUND))
            other.answer("left", within=BOUND)
            assert "The database 'default' is away: database is locked" in other.stderr
            assert len(held_rows(sqlite)) == 2
        wait_until(lambda: not held_rows(sqlite), timeout=SOON, what="given back by the keepers")
        child.does("acquire 5", "held")
        child.does("release", "released")


class OwnFile:
    """A database file of a test's own, a copy of the test database, and the children's way to it."""

    def __init__(self, directory):
        self.path = directory / "locks" / "own.sqlite3"
        self.path.parent.mkdir()
        self.fill(self.path)
        settings = json.loads(databases.child_environment()["SQLSEM_TEST_DATABASES"])
        settings["default"]["NAME"] = str(self.path)
        self.environment = {"SQLSEM_TEST_DATABASES": json.dumps(settings)}

    def fill(self, path):
        with (
            contextlib.closing(databases.raw_connection("default")) as source,
            contextlib.closing(sqlite3.connect(path)) as target,
        ):
            source.backup(target)

    def replace(self):
        new = self.path.with_name("new.sqlite3")
        self.fill(new)
        for end in ("-wal", "-shm"):
            self.path.with_name(self.path.name + end).unlink(missing_ok=True)
        new.replace(self.path)

    def held(self):
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            return connection.execute("SELECT COUNT(*) FROM sqlsem_slot WHERE expires_us IS NOT NULL").fetchone()[0]


@pytest.fixture
def own_file(committed, tmp_path):
    return OwnFile(tmp_path)


def test_a_replaced_file_is_noticed(own_file):
    with (
        Sufferer("default", "one", env=own_file.environment) as child,
        Sufferer("default", "one", env=own_file.environment) as other,
    ):
        child.does("acquire 5", "held")
        child.does("release", "released")
        own_file.replace()
        child.does("acquire 5", "held")
        assert own_file.held() == 1
        other.does("acquire 0", "busy")
        child.does("release", "released")
        other.does("acquire 0", "held")
        # Held in a file that is no more: the next renewal finds out.
        own_file.replace()
        child.does("acquire 0", "held")
        other.does("release", "released")
        assert own_file.held() == 1
        child.does("check", "ours")
        child.does("release", "released")


def test_a_file_that_is_not_there(own_file):
    away = own_file.path.parent.with_name("away")
    with Sufferer("default", "one", env=own_file.environment) as child:
        own_file.path.parent.rename(away)
        cause = child.does("acquire 5", "failed")
        assert cause == "django.db.utils.OperationalError: unable to open database file"
        away.rename(own_file.path.parent)
        child.does("acquire 5", "held")
        own_file.path.parent.rename(away)
        child.does("release", "failed")
        away.rename(own_file.path.parent)
        wait_until(lambda: own_file.held() == 0, timeout=SOON, what="given back by the keeper")
        child.does("acquire 5", "held")
        child.does("release", "released")


INHERITED = """
import os
from django.db import connection, connections
from django_sqlsem import AcquireTimeoutError, lifecycle, semaphore
lock = semaphore("inherited", timeout=1)
with connection.cursor() as cursor:  # the project's own connection is open at the fork, and so is the library's
    cursor.execute("SELECT 1")
lock.acquire().release()
ready, readers = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    lock.acquire().release()
    os.write(ready[1], b"1")
    os.read(readers[0], 1)
    try:
        lock.acquire()
    except AcquireTimeoutError:
        os._exit(7)
    os._exit(8)
os.read(ready[0], 1)
lifecycle.stop_all()
connections.close_all()
say("closed")
listen()
os.write(readers[1], b"1")
say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_keeps_its_hold_on_the_file(own_file):
    """Whoever closes the file last takes its write-ahead log away: a child must count among those that have it open."""
    with (
        Child(INHERITED, env=own_file.environment) as parent,
        Sufferer("default", "inherited", env=own_file.environment) as holder,
    ):
        parent.expect("closed")
        holder.does("acquire 5", "held")
        parent.send()
        parent.expect("7")
        holder.does("release", "released")


# Inside atomic(), SQLite's one writer is the caller.


def test_sqlite_atomic_uses_the_callers_connection(sqlite):
    lock = semaphore("atomic", using=sqlite)
    with transaction.atomic(using=sqlite):
        permit = lock.acquire()
        assert [row.token for row in held_rows(sqlite)] == [permit.token]
        with contextlib.closing(databases.raw_connection(sqlite)) as other:
            assert other.execute("SELECT COUNT(*) FROM sqlsem_slot WHERE expires_us IS NOT NULL").fetchone() == (0,)
            other.execute("PRAGMA busy_timeout = 0")
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")
    assert [row.token for row in held_rows(sqlite)] == [permit.token]
    permit.check()
    permit.release()
    assert held_rows(sqlite) == []


def test_sqlite_atomic_refuses_to_wait(sqlite):
    lock = semaphore("refused", using=sqlite)
    with Sufferer(sqlite, "refused") as holder:
        holder.does("acquire 5", "held")
        with transaction.atomic(using=sqlite):
            started = time.monotonic()
            with pytest.raises(AcquireTimeoutError, match=r"waiting inside atomic\(\) on SQLite could never end"):
                lock.acquire(timeout=30)
            with pytest.raises(AcquireTimeoutError, match="waiting inside"), lock:
                pass
            assert lock.try_acquire() is None
            assert time.monotonic() - started < 20  # not the 30 s
        holder.does("release", "released")
    with transaction.atomic(using=sqlite), lock:
        pass


def test_sqlite_rollback_undoes_the_claim(sqlite):
    lock = semaphore("undone", using=sqlite)
    lock.acquire().release()
    permit = None
    with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=sqlite):
        permit = lock.acquire()
        permit.check()
        raise ZeroDivisionError
    assert held_rows(sqlite) == []
    wait_until(lambda: permit.lost, timeout=20, what="its holder knows")
    with pytest.raises(PermitLostError):
        permit.check()
    again = lock.acquire(timeout=30)
    permit.release()
    again.check()
    assert [row.token for row in held_rows(sqlite)] == [again.token]
    again.release()


def test_sqlite_release_inside_and_after_atomic(sqlite):
    lock = semaphore("in-and-out", slots=3, using=sqlite)
    with transaction.atomic(using=sqlite):
        with lock:
            assert len(held_rows(sqlite)) == 1
        assert held_rows(sqlite) == []
        later = lock.acquire()
    assert [row.token for row in held_rows(sqlite)] == [later.token]
    later.release()
    before = lock.acquire()
    with transaction.atomic(using=sqlite):
        before.release()
    assert held_rows(sqlite) == []
    # A release that was rolled back is made up for.
    before = lock.acquire()
    with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=sqlite):
        before.release()
        raise ZeroDivisionError
    wait_until(lambda: not held_rows(sqlite), timeout=SOON, what="given back")
    with lock:
        pass


def test_sqlite_atomic_with_a_savepoint_that_is_rolled_back(sqlite):
    lock = semaphore("savepoint", using=sqlite)
    with transaction.atomic(using=sqlite):
        with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=sqlite):
            permit = lock.acquire()
            raise ZeroDivisionError
        assert held_rows(sqlite) == []
        permit.release()
        with lock:
            pass
    assert held_rows(sqlite) == []


def test_sqlite_atomic_of_the_thread_that_waits_for_a_coroutine(sqlite):
    """Its statements are the thread's: the library's own connections could write nothing until the end."""
    lock, jobs = semaphore("lent", using=sqlite), counter("lent jobs", using=sqlite)

    async def works():
        async with lock as permit:
            permit.check()
            assert (await lock.astatus()).held == 1
            assert [row.token for row in await sync_to_async(held_rows)(sqlite)] == [permit.token]
        assert (await lock.astatus()).held == 0
        await jobs.arelease(3)
        assert (await jobs.aacquire(2, timeout=0)).count == 2
        assert await jobs.atry_acquire(9) is None
        return await lock.aacquire(timeout=0)

    with transaction.atomic(using=sqlite):
        permit = async_to_sync(works)()
        assert jobs.value() == 1
    assert [row.token for row in held_rows(sqlite)] == [permit.token]
    permit.release()
    with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=sqlite):
        permit = async_to_sync(works)()
        raise ZeroDivisionError
    assert held_rows(sqlite) == []
    assert jobs.value() == 1
    wait_until(lambda: permit.lost, timeout=20, what="its holder knows")
    async_to_sync(works)().release()  # no transaction is open


def test_sqlite_atomic_of_the_thread_refuses_a_coroutine_that_would_wait(sqlite):
    lock = semaphore("refused", using=sqlite)

    async def waits(timeout):
        await lock.aacquire(timeout=timeout)

    with Sufferer(sqlite, "refused") as holder:
        holder.does("acquire 5", "held")
        with transaction.atomic(using=sqlite):
            with pytest.raises(AcquireTimeoutError, match=r"waiting inside atomic\(\) on SQLite could never end"):
                async_to_sync(waits)(None)
            with pytest.raises(AcquireTimeoutError, match="No slot of 'refused' is free"):
                async_to_sync(waits)(0)
        holder.does("release", "released")
