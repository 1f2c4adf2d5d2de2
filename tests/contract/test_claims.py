"""Rows that several processes want: each is worked on by one of them, and comes back if that one dies."""

from __future__ import annotations

import contextlib
import re

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_sqlsem.claims import claim, recover
from django_sqlsem.models import ClaimRow
from tests.programs.claim_workers import PATIENT, Workers, count_up, rows
from tests.support import applocks, databases, tds
from tests.support.processes import Child
from tests.support.threads import wait_until
from tests.testapp.models import Inventory


@pytest.fixture(scope="module")
def pool():
    with contextlib.closing(Workers()) as pool:
        yield pool


@pytest.fixture
def workers(database, pool):
    yield pool
    pool.settle()


def make(database, count):
    """Create rows in order; returns their keys."""
    return [Inventory.objects.using(database).create().pk for _nth in range(count)]


def statuses(database):
    return list(rows(database).values_list("status", flat=True))


def owners(database):
    return [int(row.object_pk) for row in ClaimRow.objects.using(database).order_by("id")]


def entered(database, **options):
    """Enter a claim of one row and return it; ``None`` if there was none."""
    claimed = claim(rows(database), using=database, **options)
    claimed.__enter__()
    if claimed:
        return claimed
    claimed.__exit__(None, None, None)
    return None


def test_of_ten_processes_one_calculates_the_inventory(database, workers):
    make(database, 1)
    children = workers.together(*[["calculate", database]] * 10)
    said = sorted(child.expect(timeout=PATIENT) for child in children)
    assert said == ["calculated", *["left"] * 9]
    row = rows(database).get()
    assert (row.status, row.worked) == ("Calculated", 1)
    assert owners(database) == []
    for child in children:
        child.expect("idle")


def test_four_processes_drain_two_hundred_rows_each_of_them_once(database, workers):
    make(database, 200)
    children = workers.together(*(["drain", database, n] for n in (1, 3, 1, 7)))
    for child in children:
        child.expect("drained", timeout=PATIENT)
        child.expect("idle")
    assert set(rows(database).values_list("status", "worked")) == {("Calculated", 1)}
    assert owners(database) == []


@pytest.mark.one_server("beacons")
@pytest.mark.leaves_held
def test_the_row_of_a_killed_worker_comes_back_and_is_done_by_another(database, caplog):
    first, second = make(database, 2)
    with Child("tests.programs.claim_workers:hold", database, {}) as worker:
        assert worker.expect("claimed", timeout=PATIENT) == str(first)
        assert recover(Inventory.objects.using(database), using=database) == []  # it lives
        with claim(rows(database), using=database) as claimed:
            assert claimed.one.pk == second
        assert statuses(database) == ["Calculating", "Calculated"]
        worker.kill()
        # Its lease would run for a minute.
        successor = wait_until(lambda: entered(database), timeout=40, what="the row comes back")
        assert successor.one.pk == first
        with contextlib.closing(databases.raw_connection(database)) as outside:
            count_up(outside, first)
        successor.__exit__(None, None, None)
        assert f"pid {worker.pid}" in caplog.text
    assert list(rows(database).values_list("status", "worked")) == [("Calculated", 1), ("Calculated", 0)]
    assert owners(database) == []


@pytest.mark.rows_only("lease")
def test_stopped_workers_that_wake_late_change_nothing(database):
    one, two = make(database, 2)
    work = ("tests.programs.claim_workers:hold", database, {"lease": 2})
    with Child(*work) as first, Child(*work) as second:
        for worker in (first, second):
            worker.expect("claimed", timeout=PATIENT)
            worker.stop()
            worker.send("end")  # the first thing that it does when it wakes
        # Their leases run out one after the other.
        successors = [
            wait_until(lambda: entered(database, done="Other"), timeout=40, what="a lease has run out") for _nth in "12"
        ]
        assert {successor.one.pk for successor in successors} == {one, two}
        successors[0].__exit__(None, None, None)
        for worker in (first, second):
            worker.cont()
            worker.expect("lost", timeout=PATIENT)
        # One row was done by then, the other one is still worked on.
        assert sorted(statuses(database)) == ["Calculating", "Other"]
        assert owners(database) == [successors[1].one.pk]
        successors[1].__exit__(None, None, None)
    assert statuses(database) == ["Other"] * 2
    assert owners(database) == []


def test_a_worker_that_fails_gives_all_its_rows_back(database, workers):
    make(database, 3)
    (worker,) = workers.tell(["hold", database, {"n": 2}])
    worker.expect("claimed", timeout=PATIENT)
    assert statuses(database) == ["Calculating", "Calculating", "Not Started"]
    worker.send("fail")
    worker.expect("failed")
    assert statuses(database) == ["Not Started"] * 3
    assert owners(database) == []
    worker.expect("idle")


def open_transactions(database):
    """Return how many sessions of the test's database have a transaction open."""
    if connections[database].vendor == "postgresql":
        sql = (
            "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
        )
    elif applocks.are_at(database):
        sql = "SELECT COUNT(*) FROM sys.dm_exec_sessions WHERE database_id = DB_ID() AND open_transaction_count > 0"
    else:
        sql = (
            "SELECT COUNT(*) FROM information_schema.innodb_trx JOIN information_schema.processlist"
            " ON trx_mysql_thread_id = id WHERE db = DATABASE()"
        )
    return databases.query(database, sql)[0][0]


def test_no_transaction_is_open_while_the_work_goes_on(database, workers):
    (row,) = make(database, 1)
    (worker,) = workers.tell(["hold", database, {}])
    worker.expect("claimed", timeout=PATIENT)
    if connections[database].vendor != "sqlite":
        # A keeper's renewal may be under way at one look; a transaction around the work would be there at each.
        wait_until(lambda: open_transactions(database) == 0, timeout=20)
    with contextlib.closing(databases.raw_connection(database)) as outside:
        count_up(outside, row)  # on SQLite it needs the only write lock, elsewhere that of the claimed row
    assert Inventory.objects.using(database).get().worked == 1
    worker.send("end")
    worker.expect("ended")
    worker.expect("idle")
    assert statuses(database) == ["Calculated"]


def test_no_transaction_is_waited_for_to_look_for_rows(database):
    """SQL Server's readers wait for what is written, unless they read what is not committed; and that is over then."""
    if not applocks.are_at(database):
        pytest.skip("readers wait for nobody")
    make(database, 2)

    def level_now():
        with connections[database].cursor() as cursor:
            cursor.execute("SELECT transaction_isolation_level FROM sys.dm_exec_sessions WHERE session_id = @@SPID")
            return cursor.fetchone()

    before = level_now()
    with CaptureQueriesContext(connections[database]) as captured, claim(rows(database), using=database) as claimed:
        assert claimed
    assert level_now() == before
    level, at = "", []
    for text in (query["sql"] for query in captured):
        if found := re.search(r"SET TRANSACTION ISOLATION LEVEL ([A-Z ]+)", text):
            level = found[1]
        elif re.match(r"SELECT .*\btestapp_inventory\b", text.replace("[", "").replace("]", ""), re.DOTALL):
            at.append((level, "READPAST" in text))
    assert at[0] == ("READ UNCOMMITTED", False)  # whether there are any
    assert ("READ COMMITTED", True) in at  # the lock
    assert {each for each, locks in at if locks} == {"READ COMMITTED"}
    assert at.count(("READ UNCOMMITTED", False)) == 2


def test_a_row_that_a_transaction_has_locked_is_passed_over_at_once(database):
    if not connections[database].features.has_select_for_update_skip_locked:
        pytest.skip("the database can't pass over what is locked")
    if tds.is_stand_in(database):
        pytest.skip("the stand-in heeds no table hints")
    begin, lock = "BEGIN", "SELECT id FROM testapp_inventory WHERE id = {} FOR UPDATE"
    if applocks.are_at(database):  # readers wait for what is written there
        begin, lock = "BEGIN TRANSACTION", "UPDATE testapp_inventory SET worked = worked WHERE id = {}"
    first, second = make(database, 2)
    with contextlib.closing(databases.raw_connection(database)) as other:
        cursor = other.cursor()
        cursor.execute(begin)
        cursor.execute(lock.format(first))
        # In reverse order of the keys, for which every row has to be read before the first is known.
        with claim(rows(database).order_by("priority", "-worked", "pk"), using=database) as claimed:
            assert claimed.one.pk == second
        with claim(rows(database), using=database) as claimed:
            assert not claimed
        cursor.execute("ROLLBACK")
    with claim(rows(database), using=database) as claimed:
        assert claimed.one.pk == first
