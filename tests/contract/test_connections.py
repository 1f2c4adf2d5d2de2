"""What holding and waiting cost: connections per process, and statements per acquire and release."""

from __future__ import annotations

import json
import os

import pytest
from django.db import connections

from django_sqlsem import queries, semaphore
from django_sqlsem.backends import get_backend
from django_sqlsem.keepers import keeper_for
from tests.databases import held_rows, query, session_ids
from tests.processes import Child
from tests.threads import wait_until

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
            return len(set(session_ids(self.alias)) - self.before)
        path = os.path.realpath(connections[self.alias].settings_dict["NAME"])
        links = f"/proc/{child.pid}/fd"
        return sum(os.path.realpath(os.path.join(links, number)) == path for number in os.listdir(links))


@pytest.fixture
def counted(database):
    return Connections(database)


def patient(**settings):
    return {"SQLSEM_TEST_SETTINGS": json.dumps({"IDLE": IDLE} | settings)}


def test_two_connections_hold_a_thousand_permits(database, counted):
    where = "tests.contract.connected:hold_many"
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
        wait_until(lambda: counted.of(child) == 0, timeout=IDLE + 2, what="no connections")
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
    with Child("tests.contract.connected:wait_in_crowds", database, THREADS, TASKS, env=patient()) as child:
        child.expect("waiting")
        wait_until(lambda: queries.semaphore("busy", using=database).waiting == TASKS)
        assert 1 <= counted.of(child) <= 2
        child.send()
        assert int(child.expect("threads")) <= 1  # the keeper's
        wait_until(lambda: queries.semaphore("busy", using=database).waiting == THREADS + TASKS)
        assert query(database, "SELECT COUNT(*) FROM sqlsem_waiter") == [(1,)]
        assert 1 <= counted.of(child) <= 2
        for permit in permits:
            permit.release()
        assert json.loads(child.expect("done", timeout=60)) == []
        assert counted.of(child) <= 2
        assert held_rows(database) == []
        wait_until(lambda: counted.of(child) == 0, timeout=IDLE + 2, what="no connections")
        child.send()
        child.finish()
        assert child.stderr == ""
    assert query(database, "SELECT COUNT(*) FROM sqlsem_waiter") == [(0,)]


#: Statements of an acquire that finds a free slot, and of a release.
ROUND_TRIPS = {"sqlite": (1, 1), "postgresql": (1, 1), "mysql": (2, 1)}


def statements_of(session):
    """Note every statement of a session."""
    noted = []

    def note(execute, sql, parameters, many, context):
        noted.append(sql)
        return execute(sql, parameters, many, context)

    return noted, session.connection.execute_wrapper(note)


def test_round_trips(database):
    lock = semaphore("counted", slots=3, using=database)
    keeper = keeper_for(get_backend(database))
    for _ in range(10):  # past the driver's own preparations
        with lock:
            pass
        keeper.work.run(lambda cursor: None)
    noted, noting = statements_of(keeper.work)
    with noting:
        permit = lock.acquire()
        acquire = list(noted)
        permit.release()
        release = noted[len(acquire) :]
    print(f"\n{connections[database].vendor}: acquire {len(acquire)}, release {len(release)} round trips")
    assert (len(acquire), len(release)) == ROUND_TRIPS[connections[database].vendor], noted


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

    lock.acquire().release()
    before = questions()
    lock.acquire().release()
    assert questions() - before - 1 == sum(ROUND_TRIPS["mysql"])
