"""A transaction, a statement and another system that only the live holder can write with."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import threading

import pytest
from django.db import connections, transaction
from django.test import TestCase

from django_sqlsem import (
    AcquireTimeoutError,
    PermitLostError,
    control,
    mutex,
    queries,
    semaphore,
)
from django_sqlsem.backends.applock import operator
from django_sqlsem.backends.rows import operator as rows_operator
from django_sqlsem.exceptions import FencedError
from django_sqlsem.locks import fenced
from django_sqlsem.models import SlotRow, WaiterRow
from tests.programs.fence_clients import Fencer, run_page, written
from tests.support import applocks, databases
from tests.support.databases import held_rows, query, raw_connection
from tests.support.threads import wait_until
from tests.testapp.models import Probe

#: The lease of those that are stopped past it as soon as they have the slot.
SHORT = 2
#: The lease of those that have something to do before they are stopped.
LONGER = 6
#: How long somebody may take on a busy machine.
SOON = 40.0

SERVERS = [alias for alias in databases.covered() if alias != "default"]


@pytest.fixture(params=SERVERS)
def server(request, committed):
    """The alias of one covered server after the other."""
    alias = applocks.parameter(request)
    yield alias
    databases.assert_nothing_held(alias)


@pytest.fixture
def impatient(monkeypatch):
    """A revocation gives up soon."""
    for module in (rows_operator, operator):
        monkeypatch.setattr(module, "FENCED_PATIENCE", 0.3)


@pytest.fixture
def probe():
    """A function that makes the row that is written to, and returns a queryset of it."""

    def make(alias, name):
        Probe.objects.using(alias).create(name=name)
        return Probe.objects.using(alias).filter(name=name)

    return make


def row_of(alias, name, slot=1):
    """Return token, permit id and expiry of a slot, as a raw connection sees them."""
    mark = {"sqlite": "?", "microsoft": "?"}.get(connections[alias].vendor, "%s")
    sql = (
        "SELECT s.token, s.permit_id, s.expires_us FROM sqlsem_slot s JOIN sqlsem_semaphore m"
        f" ON m.name_key = s.semaphore_key WHERE m.name = {mark} AND s.slot = {mark}"
    )
    return query(alias, sql, (name, slot))[0]


def revoke(*args, using, **options):
    """Revoke; where that takes it, by the end of the holder's session."""
    return control.revoke(*args, using=using, kill=applocks.are_at(using), **options)


def expired(alias):
    return wait_until(lambda: not held_rows(alias), timeout=SOON, what="no live permit")


def assert_locked(alias):
    """Assert that nobody can write to SQLite's file."""
    name = connections[alias].settings_dict["NAME"]
    connection = sqlite3.connect(name, timeout=0, isolation_level=None)
    with contextlib.closing(connection), pytest.raises(sqlite3.OperationalError, match="locked"):
        connection.execute("BEGIN IMMEDIATE")


def waiter_looked(alias):
    """Wait until whoever waits has looked for a slot twice, as its row tells."""

    def beat():
        row = WaiterRow.objects.using(alias).first()
        return row.expires_us if row is not None else None

    wait_until(beat, timeout=SOON, what="a waiter")
    for _ in range(2):
        seen = beat()
        wait_until(lambda seen=seen: beat() not in (None, seen), timeout=SOON, what="a heartbeat")


@pytest.mark.one_server("fences")
@pytest.mark.rows_only("lease")
def test_who_was_stopped_past_its_lease_cannot_write(database, probe, tmp_path):
    name = "stopped-past-its-lease"
    probe(database, name)
    archive = tmp_path / "archive"
    with Fencer(database, name, archive, lease=SHORT) as old, Fencer(database, name, archive) as new:
        old.holds()
        old.stop()
        new.holds()
        assert new.token > old.token
        assert new.tell("begin") == "begun"
        assert new.tell("fence") == "fenced"
        assert new.tell("write 2") == "written"
        assert new.tell("commit") == "committed"
        assert new.tell("archive second") == "archived"
        old.cont()
        assert old.tell("lost") in ("lost expired", "lost cut off")  # it may have been stopped in a renewal
        # Neither its own clock nor, when it does not look at that, the database lets it write.
        for believes in (False, True):
            if believes:
                assert old.tell("believe") == "believes"
            assert old.tell("fenced-write 1") == "rows 0"
            assert old.tell("begin") == "begun"
            assert old.tell("fence").startswith("lost ")
            assert old.tell("rollback") == "rolled-back"
        assert old.tell("archive first") == "stale"
        assert new.tell("fenced-write 3") == "rows 1"
        assert new.tell("archive third") == "archived"
        assert written(database, name) == (3, 2)
        assert '"third"' in archive.read_text()
        old.end()
        new.end()


@pytest.mark.one_server("fences")
@pytest.mark.rows_only("lease")
def test_nobody_takes_a_slot_while_a_fenced_transaction_is_open(database, probe, impatient):
    name = "fenced-and-stopped"
    probe(database, name)
    sqlite = connections[database].vendor == "sqlite"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Fencer(database, name, lease=LONGER)).holds()
        second = stack.enter_context(Fencer(database, name))
        if not sqlite:
            second.waits()
            waiter_looked(database)
        assert first.tell("begin") == "begun"
        assert first.tell("fence") == "fenced"
        assert first.tell("write 1") == "written"
        first.stop(anywhere=True)  # in its transaction
        expired(database)
        if sqlite:
            second.waits()
            assert_locked(database)
        else:
            waiter_looked(database)
            assert not control.execute_purge(control.plan_purge(using=database), by="test").freed
            with pytest.raises(FencedError):
                control.revoke(name, by="test", using=database)
        assert row_of(database, name)[0] == first.token
        assert second.lines in ([], ["ready"])
        first.cont()
        if sqlite:
            # Others kept out for so long could not have it either: it still is the first one's.
            assert first.tell("lost") == "lost"
        assert first.tell("write 2") == "written"
        assert row_of(database, name)[0] == first.token
        assert first.tell("commit") == "committed"
        if sqlite:
            assert first.tell("lost") == "lost"
            assert row_of(database, name)[0] == first.token
            assert first.tell("release") == "released"
        second.granted()
        assert second.token > first.token
        assert second.tell("fenced-write 3") == "rows 1"
        assert written(database, name) == (3, 3)
        first.end()
        second.end()


@pytest.mark.one_server("fences")
def test_a_killed_process_leaves_no_fence(database, probe):
    name = "fenced-and-killed"
    probe(database, name)
    with Fencer(database, name, lease=LONGER) as first, Fencer(database, name) as second:
        first.holds()
        for line, answer in (("begin", "begun"), ("fence", "fenced"), ("write 1", "written")):
            assert first.tell(line) == answer
        first.kill()
        second.waits().granted()
        assert second.token > first.token
        assert second.tell("fenced-write 2") == "rows 1"
        assert written(database, name) == (2, 1)
        second.end()


@pytest.mark.one_server("fences")
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_release_waits_for_the_end_of_the_transaction(database, ending):
    lock = mutex("released-inside", using=database)
    with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=database):
        with transaction.atomic(using=database), lock.acquire() if database != "default" else lock as permit:
            permit.fence()
            permit.fence()
        assert permit.released
        permit.release()
        token, permit_id, expires_us = row_of(database, lock.name) if database != "default" else (0, "", 1)
        assert permit_id is not None
        assert expires_us is not None
        if database != "default":
            assert token == permit.token
            assert not another_gets(lock)
        if ending == "rollback":
            raise ZeroDivisionError
    wait_until(lambda: not held_rows(database), timeout=SOON, what="the release")
    assert another_gets(lock)


class EndsMeanwhile:
    """A fence of another thread, whose transaction ends just after somebody has looked."""

    exclusive = False

    def __init__(self):
        self.looks = [True]

    @property
    def stands(self):
        return bool(self.looks and self.looks.pop())


def test_a_release_that_meets_the_end_of_the_transaction_is_not_put_off_for_ever(database):
    permit = mutex("at-the-end", using=database).acquire()
    permit._acquisition.fences = (EndsMeanwhile(),)
    permit.release()
    assert held_rows(database) == []
    assert another_gets(mutex("at-the-end", using=database))


def another_gets(lock):
    """Return whether another thread gets the lock at once."""
    got = []

    def take():
        permit = lock.try_acquire()
        got.append(permit is not None)
        if permit is not None:
            permit.release()
        connections.close_all()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(60)
    return got[0]


@pytest.mark.one_server("fences")
@pytest.mark.rows_only("lease")
def test_renewals_go_on_while_a_fenced_transaction_is_open(server):
    with mutex("renewed", using=server) as permit:
        hold = permit._acquisition
        with transaction.atomic(using=server):
            permit.fence()
            for _ in range(3):
                before = row_of(server, permit.name)[2]
                hold.keeper.renew_now(hold)
                wait_until(lambda before=before: row_of(server, permit.name)[2] > before, timeout=SOON, what="renewal")
            permit.check()
        permit.check()


@pytest.mark.one_server("fences")
def test_a_lost_permit_fails_the_transaction_even_if_that_is_caught(database, probe):
    name = "lost"
    rows = probe(database, name)
    for take, lost_slot in ((1, 1), (2, 2)):
        permit = semaphore(name, slots=3, take=take, using=database).acquire()
        with transaction.atomic(using=database):
            permit.fence()
        assert rows.filter(fenced(permit)).update(inside=1) == 1
        revoke(name, permit.slots[lost_slot - 1], by="an operator", using=database)
        assert rows.filter(fenced(permit)).update(inside=2) == 0
        assert rows.filter(fenced(permit)).delete()[0] == 0
        with transaction.atomic(using=database):
            rows.update(inside=3)
            with pytest.raises(PermitLostError, match="revoked by an operator"):
                permit.fence()
        assert permit.lost.by == "an operator"
        assert written(database, name) == (1, 0)
        permit.release()
    if applocks.are_at(database):
        return
    # One that was purged or has expired, and nobody has told it.
    permit = semaphore(name, slots=3, using=database).acquire()
    SlotRow.objects.using(database).filter(token=permit.token).update(expires_us=1, lease_us=1)
    with pytest.raises(PermitLostError, match="lease has run out"), transaction.atomic(using=database):
        permit.fence()
    assert rows.filter(fenced(permit)).update(inside=4) == 0
    permit.release()
    assert rows.filter(fenced(permit)).update(inside=4) == 0
    with pytest.raises(PermitLostError, match="released already"), transaction.atomic(using=database):
        permit.fence()


@pytest.mark.one_server("fences")
@pytest.mark.parametrize("caught", ["inside", "around", "two blocks up"])
def test_a_lost_permit_fails_the_outermost_transaction_from_inside_a_savepoint(database, probe, caught):
    rows = probe(database, "lost-inside")
    permit = mutex("lost-inside", using=database).acquire()
    revoke("lost-inside", by="an operator", using=database)

    def catches(where):
        return pytest.raises(PermitLostError) if caught == where else contextlib.nullcontext()

    def block():
        return transaction.atomic(using=database)

    with block():
        rows.update(inside=1)
        with catches("two blocks up"), block(), catches("around"), block(), catches("inside"):
            permit.fence()
        with pytest.raises(transaction.TransactionManagementError, match="until the end of the 'atomic' block"):
            rows.update(inside=2)
    assert written(database, "lost-inside") == (0, 0)
    with transaction.atomic(using=database):  # the next one is none of its business
        with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=database):
            raise ZeroDivisionError
        rows.update(inside=3)
    assert written(database, "lost-inside") == (3, 0)
    permit.release()


@pytest.mark.one_server("fences")
def test_all_slots_of_a_permit_are_fenced(server, impatient):
    permit = semaphore("several", slots=3, take=2, using=server).acquire()
    with transaction.atomic(using=server):
        permit.fence()
        for slot in permit.slots:
            with other_thread() as run, pytest.raises(FencedError, match="fenced"):
                run(lambda slot=slot: revoke("several", slot, by="test", using=server))
    with other_thread() as run:
        assert len(run(lambda: revoke("several", by="test", using=server))) == 2
    permit.release()


@pytest.mark.one_server("fences")
@pytest.mark.rows_only("lease")
def test_nobody_is_let_in_while_the_transaction_of_whoever_drained_it_is_open(server):
    """Not even into a slot that was made meanwhile, though the lease has run out."""
    lock = semaphore("drained", slots=2, using=server)
    permit = lock.exclusive()
    with transaction.atomic(using=server), other_thread() as run:
        permit.fence()
        run(lambda: control.set_slots("drained", 3, by="test", using=server))
        run(lambda: query(server, "UPDATE sqlsem_slot SET expires_us = expires_us - 3600000000"))
        assert run(lambda: lock.try_acquire()) is None
        with pytest.raises(AcquireTimeoutError):  # who waits also looks for the dead
            run(lambda: lock.acquire(timeout=2.5))
        assert {row.permit_id for row in SlotRow.objects.using(server).filter(slot__lte=2)} == {
            permit._acquisition.permit_id
        }
    with other_thread() as run:
        assert run(lambda: lock.acquire(timeout=SOON).release()) is None
    permit.release()


@contextlib.contextmanager
def other_thread():
    """A function that calls another one on a thread, and so on other connections; returns or raises what that does."""

    def run(function):
        outcome = []

        def call():
            try:
                outcome.append((function(), None))
            except BaseException as error:
                outcome.append((None, error))
            finally:
                connections.close_all()

        thread = threading.Thread(target=call)
        thread.start()
        thread.join(60)
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    yield run


@contextlib.contextmanager
def isolated(alias, level):
    """A transaction at an isolation level, whose snapshot is taken."""
    postgres = connections[alias].vendor == "postgresql"
    if postgres:
        with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
            cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            cursor.execute("SELECT COUNT(*) FROM testapp_probe")
            yield
        return
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")
    try:
        with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
            cursor.execute("SELECT COUNT(*) FROM sqlsem_slot")
            cursor.execute("SELECT COUNT(*) FROM testapp_probe")
            yield
    finally:
        connections[alias].close()


@pytest.mark.one_server("fences")
@pytest.mark.rows_only("lease")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_snapshot_older_than_the_renewals_is_told_the_truth(server, level, impatient):
    name = "old-snapshot"
    permit = mutex(name, using=server).acquire()
    with isolated(server, level):
        before = row_of(server, name)[2]
        if level != "SERIALIZABLE" or connections[server].vendor == "postgresql":
            # MariaDB locks all that a serializable transaction reads.
            permit._acquisition.keeper.renew_now(permit._acquisition)
            wait_until(lambda: row_of(server, name)[2] > before, timeout=SOON, what="a renewal")
        permit.fence()
        with other_thread() as run, pytest.raises(FencedError):
            run(lambda: revoke(name, by="test", using=server))
    if level == "REPEATABLE READ" or connections[server].vendor == "postgresql":
        with isolated(server, level):
            with other_thread() as run:
                run(lambda: revoke(name, by="test", using=server))
            with pytest.raises(PermitLostError, match="revoked by test"):
                permit.fence()
    permit.release()


@pytest.mark.one_server("fences")
def test_a_rollback_to_a_savepoint_does_not_open_the_fence(server, impatient):
    name = "savepoint"
    with mutex(name, using=server).acquire() as permit, transaction.atomic(using=server):
        with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=server):
            permit.fence()
            raise ZeroDivisionError
        with other_thread() as run, pytest.raises(FencedError):
            run(lambda: revoke(name, by="test", using=server))


def test_a_fence_that_cannot_be_set_up_again_fails_the_transaction(committed, probe):
    alias = need("postgres")
    name = "savepoint-lost"
    rows = probe(alias, name)
    permit = mutex(name, using=alias).acquire()
    with transaction.atomic(using=alias):
        with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=alias):
            permit.fence()
            rows.update(inside=1)
            # Stands for whoever takes it in the moment between the rollback and the new fence.
            query(alias, "UPDATE sqlsem_slot SET permit_id = %s WHERE token = %s", ("another", permit.token))
            raise ZeroDivisionError
        with pytest.raises(transaction.TransactionManagementError):
            rows.update(inside=2)
    assert written(alias, name) == (0, 0)
    permit.release()
    query(alias, "UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL")


def need(alias):
    if alias not in databases.covered():
        pytest.skip(f"no {alias}")
    return alias


def test_a_statement_that_waits_keeps_the_slot_on_postgresql(committed, probe):
    alias = need("postgres")
    name = "statement-waits"
    probe(alias, name)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Fencer(alias, name, lease=LONGER)).holds()
        second = stack.enter_context(Fencer(alias, name)).waits()
        blocker = stack.enter_context(contextlib.closing(raw_connection(alias)))
        blocker.execute("BEGIN")
        blocker.execute("UPDATE testapp_probe SET inside = 9 WHERE name = %s", (name,))
        first.send("fenced-write 1")
        wait_until(
            lambda: query(
                alias,
                "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s",
                ('UPDATE "testapp_probe"%',),
            ),
            timeout=SOON,
            what="the statement waits",
        )
        first.stop()
        expired(alias)
        waiter_looked(alias)
        assert row_of(alias, name)[0] == first.token
        blocker.execute("COMMIT")
        second.granted()
        assert written(alias, name) == (1, 1)
        first.cont()
        assert first.expect(timeout=SOON) == "rows 1"
        first.end()
        second.end()


@pytest.mark.one_server("fences")
def test_a_fenced_statement_in_a_transaction_puts_the_release_off(database, probe):
    rows = probe(database, "statement-inside")
    lock = semaphore("statement-inside", using=database)
    with contextlib.ExitStack() as stack:
        permit = lock.acquire()
        second = stack.enter_context(Fencer(database, lock.name))
        if database != "default":
            second.waits()
            waiter_looked(database)
        with transaction.atomic(using=database):
            assert rows.filter(fenced(permit)).update(inside=1) == 1
            permit.release()
            assert permit.released
            assert row_of(database, lock.name)[0] == permit.token
        if database == "default":
            second.waits()
        second.granted()
        assert second.tell("fenced-write 2") == "rows 1"
        second.end()
    assert written(database, lock.name) == (2, 1)


def test_what_cannot_be_fenced_is_an_error_that_says_why(database, probe):
    other = next((alias for alias in databases.covered() if alias != database), None)
    with mutex("errors", using=database) as permit:
        with pytest.raises(transaction.TransactionManagementError, match=r"call fence\(\) inside transaction.atomic"):
            permit.fence()
        with transaction.atomic(using=database), pytest.raises(ValueError, match="not in DATABASES"):
            permit.fence(using="nowhere")
        with pytest.raises(TypeError, match="fenced\\(\\) takes a permit, not 'permit'"):
            fenced("permit")
        if other is not None:
            with transaction.atomic(using=other):
                with pytest.raises(ValueError, match="another database"):
                    permit.fence(using=other)
                with pytest.raises(transaction.TransactionManagementError, match=f"only on '{other}'"):
                    permit.fence()
            with pytest.raises(ValueError, match="another database"):
                Probe.objects.using(other).filter(fenced(permit)).update(inside=1)


class FencesInTestCase(TestCase):
    """The locks of a ``TestCase`` are in its process alone."""

    databases = {"default"}

    def test_fences(self):
        Probe.objects.create(name="in-a-test")
        rows = Probe.objects.filter(name="in-a-test")
        with mutex("in-a-test") as permit:
            with pytest.raises(transaction.TransactionManagementError):
                permit.fence()
            with transaction.atomic():
                permit.fence()
                assert rows.filter(fenced(permit)).update(inside=1) == 1
                permit.release()
                assert queries.semaphore("in-a-test").held == 1
            assert queries.semaphore("in-a-test").held == 0
        permit = mutex("in-a-test").acquire()
        control.revoke("in-a-test", by="test")
        assert rows.filter(fenced(permit)).update(inside=2) == 0
        with pytest.raises(PermitLostError, match="revoked by test"), transaction.atomic():
            permit.fence()
        with transaction.atomic():
            rows.update(inside=3)
            with contextlib.suppress(PermitLostError), transaction.atomic():
                permit.fence()
            with pytest.raises(transaction.TransactionManagementError):
                rows.get()
        assert rows.get().inside == 1  # the test's own transaction goes on, and so do its next ones
        with transaction.atomic():
            with contextlib.suppress(ZeroDivisionError), transaction.atomic():
                raise ZeroDivisionError
            rows.update(inside=4)
        assert rows.get().inside == 4
        permit.release()


def test_the_example_compares_tokens_within_a_slot(tmp_path):
    page = run_page()
    archive = page["Archive"](tmp_path / "archive")
    for slot, token in itertools.product((1, 2), (5, 5, 7)):
        archive.write(f"{slot}-{token}", name="reports", slot=slot, token=token)
    with pytest.raises(page["StaleTokenError"], match="6 is older than 7"):
        archive.write("late", name="reports", slot=1, token=6)
    assert '"2-7"' in (tmp_path / "archive").read_text()
