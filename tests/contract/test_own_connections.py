"""The library's own connections: their limits, their isolation, and that none is left behind half open."""

from __future__ import annotations

import contextlib
import gc
import threading
import time

import pytest
from django.db import close_old_connections, connections, transaction

from django_sqlsem import BackendError, semaphore
from django_sqlsem.database import dialects, errors, sessions
from django_sqlsem.database.sessions import OwnSession, RefusedError, briefly, open_connection, passes, used_by_orm
from django_sqlsem.locks import rwlock
from django_sqlsem.models import SemaphoreRow
from tests.support.databases import query, raw_connection, session_ids
from tests.support.interruptions import SoftLimit, Striking
from tests.support.processes import Child
from tests.support.threads import run_in_threads, wait_until
from tests.unit.test_history import minute


@pytest.mark.rows_only("row statements")
def test_an_opening_struck_at_every_statement_leaves_no_session(database):
    """A signal strikes at every line of the library under way to a connection, and after each call."""
    before = session_ids(database)
    struck = set()
    for nth in range(1, 1000):
        session = OwnSession(database)
        session.opened = lambda connection: None
        try:
            with Striking(nth, SoftLimit("struck")) as striking:
                session.run(lambda cursor: None)
        except SoftLimit as error:
            error.__traceback__ = None
            del error
        finally:
            session.close()
        if striking.struck is None:
            break
        struck.add(striking.struck.function)
    gc.collect()  # a connection that is still open says so when it is finalised: an error in these tests
    assert {"open_connection", "_connection.<locals>.get_limited", "OwnSession._open"} <= struck
    wait_until(lambda: session_ids(database) == before, timeout=20)


def test_a_connection_that_its_driver_had_made_is_closed(database):
    """The signal strikes in Django, which had not yet kept it: only a frame knows of it."""
    if connections[database].vendor == "microsoft":
        pytest.skip("its sessions are opened elsewhere")
    made = []

    def interrupted(connection):
        real = connection.get_new_connection

        def get_new_connection(parameters):
            raw = real(parameters)
            made.append(raw)
            raise KeyboardInterrupt

        connection.get_new_connection = get_new_connection
        return connection

    with pytest.MonkeyPatch.context() as patch:
        from django_sqlsem.database import sessions as opening

        real = opening._connection
        patch.setattr(opening, "_connection", lambda *settings: interrupted(real(*settings)))
        with pytest.raises(KeyboardInterrupt):
            open_connection(database)
    with pytest.raises(Exception, match=r"(?i)closed|2006|gone|interface|0, "):
        made[0].cursor().execute("SELECT 1")


def test_a_statement_that_was_interrupted_costs_the_connection(database):
    """The signal may have struck in the driver, and left the protocol at an unknown point."""

    def interrupted(cursor):
        raise KeyboardInterrupt

    with contextlib.closing(OwnSession(database)) as session:
        session.run(lambda cursor: None)
        with pytest.raises(KeyboardInterrupt):
            session.run(interrupted)
        assert not session.is_open


def test_the_end_of_a_request_closes_no_connection_of_ours(database):
    """A finaliser may send the signal in the middle of what the keeper writes."""

    def work(cursor):
        with used_by_orm(cursor.db):
            cursor.db.close_at = 0.0
            close_old_connections()  # a receiver of request_finished
            return SemaphoreRow.objects.using(database).count()

    with contextlib.closing(OwnSession(database)) as session:
        assert session.run(work) == 0


@pytest.mark.rows_only("row statements")
def test_a_wait_for_a_row_ends_before_the_statement_may_be_cut_off(database, monkeypatch):
    """Else it is chance whether the statement is repeated, which it is after the one and not after the other."""
    if connections[database].vendor != "mysql":
        pytest.skip("a limit of MySQL's sessions")
    monkeypatch.setattr(dialects, "STATEMENT_TIMEOUT_MS", 3000)
    monkeypatch.setattr(errors, "LOCKED_PATIENCE", 0.0)
    semaphore("locked", using=database).acquire().release()
    session = OwnSession(database)
    with contextlib.closing(raw_connection(database)) as raw, contextlib.closing(session):
        raw.cursor().execute("BEGIN")
        raw.cursor().execute("SELECT id FROM sqlsem_slot FOR UPDATE")
        with pytest.raises(BackendError) as caught:
            session.run(lambda cursor: cursor.execute("UPDATE sqlsem_slot SET host = 'waits'"))
        assert errors.is_transient(caught.value.__cause__), caught.value
        raw.cursor().execute("ROLLBACK")


def test_a_wait_for_a_row_ends_on_sql_server(database, monkeypatch):
    if connections[database].vendor != "microsoft":
        pytest.skip("a limit of SQL Server's sessions")
    monkeypatch.setattr(dialects, "LOCK_TIMEOUT_MS", 300)
    monkeypatch.setattr(errors, "LOCKED_PATIENCE", 0.0)
    update = f"UPDATE sqlsem_minute SET granted = granted + 1 WHERE id = {minute(database, name='a').pk}"
    with contextlib.closing(OwnSession(database)) as one, contextlib.closing(OwnSession(database)) as other:

        def waits(cursor):
            cursor.execute(update)
            with pytest.raises(BackendError) as caught:
                other.run(lambda cursor: cursor.execute(update))
            return caught.value

        refused = one.transaction(waits).__cause__
        assert errors.is_transient(refused), refused
        assert not errors.is_disconnect(refused), refused
        other.run(lambda cursor: cursor.execute(update))
    assert query(database, "SELECT granted FROM sqlsem_minute") == [(2,)]


def test_what_is_written_beside_locks_ends_after_a_second_on_sql_server(database):
    """And costs no connection, whose other statements may take longer."""
    if connections[database].vendor != "microsoft":
        pytest.skip("a limit that only its drivers have")

    def ask(cursor, patience_ms=30_000):
        cursor.execute(f"EXEC sp_getapplock 'slow', 'Exclusive', 'Session', {patience_ms}")

    def spid(cursor):
        cursor.execute("SELECT @@SPID")
        return cursor.fetchone()[0]

    with contextlib.closing(raw_connection(database)) as raw, contextlib.closing(OwnSession(database)) as session:
        ask(raw.cursor())
        number, usual = session.run(spid), session.connection.connection.timeout
        began = time.monotonic()
        with pytest.raises(RefusedError) as caught:
            briefly(session, ask, 1.3)
        assert passes(caught.value)
        assert errors.is_timeout_of_sql_server(caught.value.__cause__), caught.value
        assert time.monotonic() - began < 20
        assert session.run(spid) == number
        assert session.connection.connection.timeout == usual
        session.run(lambda cursor: ask(cursor, 1500))
        assert briefly(session, spid, 1.3) == number


@pytest.mark.rows_only("row statements")
def test_a_statement_waits_for_a_row_longer_than_one_lock_wait(database, monkeypatch):
    if connections[database].vendor != "mysql":
        pytest.skip("a limit of MySQL's sessions")
    monkeypatch.setattr(dialects, "STATEMENT_TIMEOUT_MS", 2000)
    monkeypatch.setattr(errors, "LOCKED_PATIENCE", 60.0)
    semaphore("locked", using=database).acquire().release()
    session = OwnSession(database)
    attempts = []

    def update(cursor):
        attempts.append(1)
        cursor.execute("UPDATE sqlsem_slot SET host = 'waited'")

    with contextlib.closing(raw_connection(database)) as raw, contextlib.closing(session):
        raw.cursor().execute("BEGIN")
        raw.cursor().execute("SELECT id FROM sqlsem_slot FOR UPDATE")
        waiting = threading.Thread(target=session.run, args=(update,))
        waiting.start()
        wait_until(lambda: len(attempts) > 2, timeout=30)
        raw.cursor().execute("ROLLBACK")
        waiting.join(30)
    assert query(database, "SELECT host FROM sqlsem_slot") == [("waited",)]


def test_in_the_callers_transaction_another_writer_is_waited_for(database, monkeypatch):
    """SQLite refuses a transaction at once that has read before it writes. So nothing is read first."""
    if connections[database].vendor != "sqlite":
        pytest.skip("others have more than one writer")
    monkeypatch.setattr(connections[database], "transaction_mode", None)  # Django's default
    begun, first = threading.Event(), threading.Event()

    def write():
        with contextlib.closing(raw_connection(database)) as raw:
            raw.execute("BEGIN IMMEDIATE")
            raw.execute("INSERT INTO sqlsem_transaction_lock (name_key, name, grants) VALUES ('k', 'k', 0)")
            begun.set()
            first.wait(1)
            raw.execute("COMMIT")

    def note(execute, sql, *args):
        result = execute(sql, *args)
        if not sql.startswith("SAVEPOINT"):
            first.set()
            time.sleep(0.2)
        return result

    thread = threading.Thread(target=write)
    thread.start()
    assert begun.wait(30)
    with transaction.atomic(using=database), connections[database].execute_wrapper(note):
        rwlock("files", readers=2, using=database).write().try_acquire().release()
    thread.join(30)


def test_a_transaction_that_lost_a_deadlock_is_done_again(database):
    """Both get through: the victim by doing all of it once more."""
    if connections[database].vendor == "sqlite":
        pytest.skip("one writer at a time has nobody to cross")
    rows = [minute(database, name="a").pk, minute(database, name="b").pk]
    both, attempts = threading.Barrier(2), []

    def cross(index):
        session = OwnSession(database)
        first = [True]

        def count(cursor):
            attempts.append(index)
            for nth in (index, 1 - index):
                cursor.execute("UPDATE sqlsem_minute SET granted = granted + 1 WHERE id = %s", [rows[nth]])
                if first:
                    first.clear()
                    both.wait(60)
            return True

        with contextlib.closing(session):
            session.transaction(count)

    run_in_threads(2, cross, timeout=60)
    assert len(attempts) > 2, "they did not cross"
    assert query(database, "SELECT granted FROM sqlsem_minute") == [(2,), (2,)]


SERIALIZABLE = """
import threading
from django.db import connections
from django_sqlsem import semaphore
from django_sqlsem.database.sessions import open_connection
from tests.support.threads import run_in_threads
alias = args[0]
with connections[alias].cursor() as cursor:
    cursor.execute("SHOW transaction_isolation")
    say(cursor.fetchone()[0])
connections[alias].close()
say("ready")
listen()
lock = semaphore("serializable", slots=2, timeout=60, using=alias)
def work(index):
    for _ in range(8):
        with lock:
            pass
        semaphore(f"serializable {index}", slots=3, take=2, using=alias).acquire().release()
run_in_threads(3, work, timeout=100)
say("done")
"""


@pytest.mark.parametrize("how", ["of the project", "of the role", "of the role, behind a pooler"])
def test_a_serializable_project_meets_no_serialization_failures(database, how):
    """``OPTIONS["isolation_level"]``, or ``default_transaction_isolation``, is the caller's own affair."""
    if connections[database].vendor != "postgresql":
        pytest.skip("where isolation levels refuse what runs side by side")
    import json

    from psycopg import IsolationLevel

    from tests.support.databases import child_environment
    from tests.support.pgbouncer import pgbouncer

    name = connections[database].settings_dict["NAME"]
    with contextlib.ExitStack() as stack:
        databases = json.loads(child_environment()["SQLSEM_TEST_DATABASES"])
        if how == "of the project":
            databases[database]["OPTIONS"] = {"isolation_level": int(IsolationLevel.SERIALIZABLE)}
        else:
            stack.callback(query, database, f'ALTER DATABASE "{name}" RESET default_transaction_isolation')
            query(database, f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = 'serializable'")
        environment = {"SQLSEM_TEST_DATABASES": json.dumps(databases)}
        if "pooler" in how:
            environment = stack.enter_context(pgbouncer(database)).env()
        workers = [stack.enter_context(Child(SERIALIZABLE, database, env=environment)) for _ in range(2)]
        for each in workers:
            assert each.expect(timeout=60) == ("read committed" if how == "of the project" else "serializable")
            each.expect("ready")
        for each in workers:
            each.send()
        for each in workers:
            each.expect("done", timeout=120)
            each.finish()
            assert "Traceback" not in each.stderr


LEVELS = {
    "postgresql": ({"options": "-c default_transaction_isolation=serializable"}, "SHOW transaction_isolation"),
    "microsoft": (
        {"isolation_level": "SERIALIZABLE"},
        "SELECT CASE transaction_isolation_level WHEN 2 THEN 'read committed' END FROM sys.dm_exec_sessions"
        " WHERE session_id = @@SPID",
    ),
}


def test_own_connections_have_read_committed_whatever_the_projects(database):
    connection = connections[database]
    if connection.vendor not in LEVELS:
        pytest.skip("where isolation levels refuse what runs side by side")
    serializable, show = LEVELS[connection.vendor]
    with pytest.MonkeyPatch.context() as patch:
        options = dict(connection.settings_dict.get("OPTIONS") or {})
        patch.setitem(connection.settings_dict, "OPTIONS", options | serializable)
        session = OwnSession(database)
        with contextlib.closing(session):

            def level(cursor):
                cursor.execute(show)
                return cursor.fetchone()[0]

            assert session.run(level) == "read committed"
            assert session.transaction(level) == "read committed"


def test_a_hold_that_was_abandoned_is_not_reported_as_forgotten(database, caplog):
    """Its acquire was interrupted after the grant: a step that gives it back is on its way, and nobody forgot it."""
    permit = semaphore("abandoned", using=database).acquire()
    hold = permit._acquisition
    hold.abandon()
    hold.keeper.forget(hold, "it was garbage-collected")
    assert hold.loss is None
    assert "forgotten" not in caplog.text
    hold.keeper.abandon(hold)
    wait_until(lambda: not hold.keeper.acquisitions)


def test_no_session_is_made_while_a_fork_goes_through_all_of_them():
    """What changes under way would break that off, and no session would be kept from opening a connection."""
    making = threading.Thread(target=OwnSession, args=("default",))
    sessions.before_fork()
    try:
        known = len(sessions._sessions)
        making.start()
        making.join(0.2)
        assert making.is_alive()
        assert len(sessions._sessions) <= known
    finally:
        sessions.after_fork_in_parent()
    making.join(60)
    assert not making.is_alive()
