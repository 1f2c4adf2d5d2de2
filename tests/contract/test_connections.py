"""What holding and waiting cost: connections per process, and statements per acquire and release."""

from __future__ import annotations

import contextlib
import json
import os
import threading

import pytest
from django.db import connections

from django_sqlsem import queries, semaphore
from django_sqlsem.backends import get_backend
from django_sqlsem.backends.applock.sessions import LockSession
from django_sqlsem.database import cursors
from django_sqlsem.runtime.keepers import keeper_for
from tests.support import applocks
from tests.support.databases import held_rows, query, session_ids
from tests.support.processes import Child
from tests.support.threads import wait_until

MANY = 1000
THREADS = 200
TASKS = 500
#: In a child whose idle connections are closed soon, in seconds.
IDLE = 1.0


class Connections:
    """Counts the connections of one process to a database, from outside."""

    def __init__(self, alias):
        self.alias = alias
        self.vendor = connections[alias].vendor
        connections[alias].ensure_connection()
        self.before = set(session_ids(alias))

    def of(self, child):
        """How many there are now."""
        if self.vendor != "sqlite":
            return len(set(session_ids(self.alias, child.pid)) - self.before)
        path = os.path.realpath(connections[self.alias].settings_dict["NAME"])
        links, found = f"/proc/{child.pid}/fd", 0
        for number in os.listdir(links):
            with contextlib.suppress(FileNotFoundError):  # it was closed at this moment
                found += os.readlink(os.path.join(links, number)) == path
        return found


@pytest.fixture
def counted(database):
    return Connections(database)


def patient(**settings):
    return {"SQLSEM_TEST_SETTINGS": json.dumps({"IDLE": IDLE} | settings)}


@pytest.mark.rows_only("one of a name")
def test_two_connections_hold_a_thousand_permits(database, counted):
    where = "tests.programs.counting_clients:hold_many"
    with Child(where, database, MANY, env=patient()) as child:
        child.expect("ready")
        assert counted.of(child) == 0
        child.send()
        child.expect("held", timeout=90)
        assert 1 <= counted.of(child) <= 2
        assert len(held_rows(database)) == MANY
        child.send()
        child.expect("released", timeout=60)
        assert counted.of(child) <= 2
        assert held_rows(database) == []
        wait_until(lambda: counted.of(child) == 0, timeout=IDLE + 30, what="no connections")
        child.send()
        child.expect("again")
        assert 1 <= counted.of(child) <= 2
        child.send()
        child.finish()
        assert child.stderr == ""


def test_two_connections_wait_for_hundreds_of_threads_and_tasks(database):
    busy = semaphore("busy", slots=8, using=database)
    permits = []
    for _ in range(8):
        permits.append(busy.acquire())
        permits[-1].detach()
    counted = Connections(database)
    # Application locks: one session waits, and holders of one name have one each.
    most, holding = (3, 8 + 3) if applocks.are_at(database) else (2, 2)
    with Child("tests.programs.counting_clients:wait_in_crowds", database, THREADS, TASKS, env=patient()) as child:
        child.expect("waiting")
        wait_until(lambda: queries.semaphore("busy", using=database).waiting == TASKS)
        assert 1 <= counted.of(child) <= most
        child.send()
        # The keeper's; with application locks also one that waits in the server, and one that watches its silence.
        assert int(child.expect("threads")) <= (3 if applocks.are_at(database) else 1)
        wait_until(lambda: queries.semaphore("busy", using=database).waiting == THREADS + TASKS)
        assert query(database, "SELECT COUNT(*) FROM sqlsem_waiter") == [(1,)]
        assert 1 <= counted.of(child) <= most
        for permit in permits:
            permit.release()
        # A stand-in for SQL Server parses every batch anew: a hand-over takes it a tenth of a second.
        assert json.loads(child.expect("done", timeout=180 if applocks.are_at(database) else 60)) == []
        assert counted.of(child) <= holding
        assert held_rows(database) == []
        wait_until(lambda: counted.of(child) == 0, timeout=IDLE + 30, what="no connections")
        child.send()
        child.finish()
        assert child.stderr == ""
    assert query(database, "SELECT COUNT(*) FROM sqlsem_waiter") == [(0,)]


#: Statements of an acquire that finds a free slot, and of a release.
ROUND_TRIPS = {"sqlite": (1, 1), "postgresql": (1, 1), "mysql": (1, 1), "microsoft": (1, 1)}


@pytest.fixture
def statements(monkeypatch):
    """Every statement of the library's own sessions, in this thread."""
    noted = []
    mine = threading.get_ident()
    for kind in (cursors.Cursor, *cursors.Cursor.__subclasses__()):
        if "execute" not in vars(kind):
            continue

        def execute(self, sql, parameters=None, *, real=kind.execute):
            if threading.get_ident() == mine:
                noted.append(sql)
            return real(self, sql, parameters)

        monkeypatch.setattr(kind, "execute", execute)
    monkeypatch.setattr(LockSession, "_execute", LockSession._execute)  # put back afterwards
    applocks.note_statements(lambda sql: threading.get_ident() == mine and noted.append(sql))
    return noted


@pytest.fixture
def kept(database):
    """A permit that is held all the time: a keeper in tests that has nothing to keep closes its connections at once."""
    with semaphore("kept", using=database) as permit:
        yield permit


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("timeout", [0, 5])
def test_round_trips(database, statements, timeout):
    lock = semaphore("counted", slots=3, timeout=timeout, using=database)
    for _ in range(10):  # past the driver's own preparations
        with lock:
            pass
    rounds = []
    for _ in range(5):  # SQLite's file may be locked for a moment by our own keeper, which costs a second try
        statements.clear()
        permit = lock.acquire()
        acquire = len(statements)
        permit.release()
        rounds.append((acquire, len(statements) - acquire))
    print(f"\n{connections[database].vendor}: round trips of acquire and release: {rounds}")
    # A server's statements are never sent twice.
    found = {min(rounds)} if connections[database].vendor == "sqlite" else set(rounds)
    assert found == {ROUND_TRIPS[connections[database].vendor]}, statements


@pytest.mark.usefixtures("kept")
def test_round_trips_as_the_server_counts_them(database):
    if connections[database].vendor != "mysql":
        pytest.skip("only MySQL and MariaDB count the statements of a session")
    lock = semaphore("counted", slots=3, using=database)
    keeper = keeper_for(get_backend(database))

    def questions():
        def read(cursor):
            cursor.execute("SHOW SESSION STATUS LIKE 'Questions'")
            return int(cursor.fetchone()[1])

        return keeper.work.run(read)

    for _ in range(2):  # made, and looked at
        lock.acquire().release()
    before = questions()
    lock.acquire().release()
    assert questions() - before - 1 == sum(ROUND_TRIPS["mysql"])
