"""Locks of the caller's transaction, from several processes: who is in, who waits, and what ends it."""

from __future__ import annotations

import contextlib
import threading

import pytest
from django.contrib.auth.models import User
from django.db import connections

from django_sqlsem.locks import purge_transaction_locks
from tests.programs.transaction_clients import Transactor, deferred
from tests.support import databases, tds
from tests.support.pgbouncer import pgbouncer
from tests.support.private_servers import private_server
from tests.support.processes import Child
from tests.support.threads import wait_until

SETTINGS = {
    "postgresql": (
        ["SET statement_timeout = '71s'", "SET lock_timeout = '72s'"],
        ["SHOW statement_timeout", "SHOW lock_timeout"],
    ),
    "mysql": (
        ["SET SESSION innodb_lock_wait_timeout = 71"],
        ["SELECT @@innodb_lock_wait_timeout"],
    ),
    "microsoft": (["SET LOCK_TIMEOUT 7100"], ["SELECT @@LOCK_TIMEOUT"]),
    "sqlite": (["PRAGMA busy_timeout = 7100"], ["PRAGMA busy_timeout"]),
}


def vendor(database):
    return connections[database].vendor


def rows_of(database):
    return databases.query(database, "SELECT name FROM sqlsem_transaction_lock ORDER BY name")


@pytest.mark.parametrize("form", ["call", "block"])
def test_of_ten_identical_requests_for_a_new_name_one_does_the_work(database, tmp_path, form):
    names = [f"new:{number}" for number in range(4)]
    arguments = (database, str(tmp_path / "room"), form, names, 5)
    # Where a begin waits for the one writer, a lock can only be asked for before it.
    env = None if form == "block" else deferred(database)
    asked = ("marked", 10) if form == "block" and vendor(database) == "sqlite" else ("waits", 9)
    target = "tests.programs.transaction_clients:crowd"
    with Child(target, *arguments, env=env) as one, Child(target, *arguments, env=env) as other:
        both = (one, other)
        for number, _ in enumerate(names, start=1):
            for child in both:
                wait_until(lambda child=child, number=number: child.lines.count("ready") == number, timeout=60)
            for child in both:
                child.send("go")

            def count(line):
                return sum(child.lines.count(line) for child in both)

            def failed():
                return [line for child in both for line in child.lines if line.startswith("failed")]

            def all_have_asked(number=number, count=count, failed=failed):
                return failed() or (count("works") >= number and count(asked[0]) >= asked[1] * number)

            wait_until(all_have_asked, timeout=60, what="all have asked")
            assert not failed()
            for child in both:
                child.send("finish")
            for child in both:
                wait_until(lambda child=child, number=number: child.lines.count("done") == number, timeout=60)
            assert not failed()
            assert count("left") == 10 * number
            assert count("works") == number, "someone else did the work again, or nobody did it"
        for child in both:
            child.finish()
    assert rows_of(database) == ([] if vendor(database) == "microsoft" else [(name,) for name in names])


@pytest.mark.parametrize("end", ["commit", "rollback", "kill"])
def test_it_dies_with_its_transaction(database, end):
    with Transactor(database) as first, Transactor(database) as second:
        first.begin()
        assert first.lock("order") == 0
        second.begin()
        second.busy("order")
        second.wait_for("order")
        if end == "kill":
            first.kill()
        else:
            first.tell(end, "ended")
        waited = second.locked()
        # SQLite has one writer: of those it waited for, only who has committed is known to have had this name.
        assert waited > 0 or (vendor(database) == "sqlite" and end != "commit")
        if end == "commit":
            assert second.lock("order") == 0, "its own"
        second.tell("commit", "ended")


def test_shared_goes_with_shared_only(database):
    one_writer = vendor(database) == "sqlite"
    with Transactor(database) as reader, Transactor(database) as other, Transactor(database) as writer:
        for each in (reader, other, writer):
            each.begin()
        assert reader.lock("book", shared=True) == 0
        if one_writer:
            other.busy("book")
        else:
            assert other.lock("book", shared=True, timeout=0) == 0
        writer.wait_for("book")
        reader.tell("commit", "ended")
        if not one_writer:
            reader.begin()
            reader.busy("book")  # the other reader, or the writer behind it
            reader.tell("commit", "ended")
        other.tell("commit", "ended")
        assert writer.locked() > 0
        other.begin()
        other.ask("book", shared=True, timeout=0)
        other.expect("busy")
        writer.tell("commit", "ended")
        assert other.lock("book", shared=True, timeout=0) == 0


def test_a_timeout_leaves_the_transaction_and_the_settings_of_the_session_as_they_were(database):
    change, show = SETTINGS[vendor(database)]
    writes = vendor(database) != "sqlite"  # there, who writes has the lock
    with Transactor(database) as holder, Transactor(database) as asker:
        for statement in change:
            asker.sql(statement)
        before = [asker.sql(statement) for statement in show]
        holder.begin()
        holder.lock("slow")
        asker.begin()
        if writes:
            asker.sql("INSERT INTO sqlsem_server (identity, seen_us) VALUES ('before', 1)")
        for timeout in (0, 0.3):
            asker.ask("slow", timeout=timeout)
            asker.expect("busy")
            assert [asker.sql(statement) for statement in show] == before
        asker.wait_for("slow", timeout=60.5)
        holder.tell("commit", "ended")
        assert asker.locked() > 0
        assert [asker.sql(statement) for statement in show] == before
        asker.sql("INSERT INTO sqlsem_server (identity, seen_us) VALUES ('after', 1)")
        asker.tell("commit", "ended")
        asker.begin()
        assert asker.lock("", "table") == 0
        asker.tell("commit", "ended")
        assert [asker.sql(statement) for statement in show] == before
    written = databases.query(database, "SELECT identity FROM sqlsem_server WHERE seen_us = 1 ORDER BY identity")
    databases.query(database, "DELETE FROM sqlsem_server WHERE seen_us = 1")
    assert written == ([("after",), ("before",)] if writes else [("after",)])


def test_a_rolled_back_savepoint(database):
    if tds.is_stand_in(database):
        pytest.skip("the stand-in has no savepoints")
    with Transactor(database) as holder, Transactor(database) as asker:
        holder.begin()
        holder.lock("outer")
        holder.begin()
        holder.lock("nested")
        holder.tell("rollback", "ended")
        asker.begin()
        if vendor(database) == "postgresql":
            assert asker.lock("nested", timeout=0) == 0
        else:
            asker.busy("nested")
        holder.tell("commit", "ended")
        assert asker.lock("nested") == 0


def test_a_deadlock_ends_one_transaction_and_the_other_goes_on(database):
    if vendor(database) == "sqlite":
        pytest.skip("SQLite has one writer, which waits for nobody")
    with Transactor(database) as one, Transactor(database) as other:
        one.begin()
        other.begin()
        one.lock("x")
        other.lock("y")
        one.wait_for("y")
        other.ask("x")
        other.expect("waits")
        both = (one, other)
        wait_until(lambda: any(child.lines[-1].startswith("deadlock") for child in both), timeout=30)
        victim, winner = both if one.lines[-1].startswith("deadlock") else (other, one)
        assert "rolled back as a whole" in victim.expect("deadlock")
        victim.send("sql SELECT 1")
        assert victim.expect("error").startswith("TransactionManagementError")
        victim.tell("rollback", "ended")
        assert winner.locked() > 0
        winner.tell("commit", "ended")
        victim.begin()
        assert victim.lock("x") == 0
        assert victim.lock("y") == 0


def test_reads_that_would_stay_old_are_refused(database):
    with Transactor(database) as asker:
        if vendor(database) == "mysql":
            asker.sql("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        elif vendor(database) == "microsoft":
            asker.sql("SET TRANSACTION ISOLATION LEVEL SNAPSHOT")
        asker.begin()
        if vendor(database) == "postgresql":
            asker.sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        elif vendor(database) == "sqlite":
            asker.sql("SELECT COUNT(*) FROM auth_user")
            User.objects.using(database).create(username="ann")
        for verb in ("lock", "table"):
            asker.ask("late", verb)
            answer = asker.expect("error")
            assert answer.startswith("TransactionManagementError")
            assert "Take the lock before" in answer or "READ COMMITTED" in answer
        asker.tell("rollback", "ended")
        if vendor(database) == "mysql":
            asker.sql("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        elif vendor(database) == "microsoft":
            asker.sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        asker.begin()
        assert asker.lock("late") == 0


@pytest.mark.rows_only("key rows")
def test_ten_waiters_of_a_name_that_is_deleted_under_way(database, tmp_path):
    if vendor(database) == "sqlite":
        pytest.skip("SQLite makes the row as it locks it")
    waiters = "tests.programs.transaction_clients:waiters"
    with Transactor(database) as holder, contextlib.closing(databases.raw_connection(database)) as raw:
        holder.begin()
        holder.lock("purged")
        delete = "DELETE FROM sqlsem_transaction_lock WHERE name = 'purged'"
        deleting = threading.Thread(target=lambda: raw.cursor().execute(delete), daemon=True)
        deleting.start()
        with Child(waiters, database, str(tmp_path / "room"), "purged", 10) as crowd:  # no sooner: the name is held
            wait_until(lambda: len(crowd.lines) == 10, timeout=90, what="each waits, or has failed")
            assert crowd.lines == ["waits"] * 10
            holder.tell("commit", "ended")
            deleting.join(30)
            assert not deleting.is_alive()
            crowd.finish(90)
            assert crowd.lines.count("left") == 10, crowd.lines


@pytest.mark.rows_only("key rows")
def test_a_purge_deletes_what_nobody_has_locked(database):
    with Transactor(database) as holder:
        for name in ("idle", "held"):
            holder.begin()
            holder.lock(name)
            holder.tell("commit", "ended")
        if vendor(database) != "sqlite":
            holder.begin()
            holder.lock("held")
            assert purge_transaction_locks(using=database) == 1
            assert rows_of(database) == [("held",)]
            holder.tell("commit", "ended")
        assert purge_transaction_locks(using=database) == (2 if vendor(database) == "sqlite" else 1)
        assert rows_of(database) == []
        holder.begin()
        assert holder.lock("held") == 0


def test_a_table_is_locked_until_the_transaction_ends(database):
    if tds.is_stand_in(database):
        pytest.skip("the stand-in heeds no table hints")
    with Transactor(database) as holder, Transactor(database) as asker:
        holder.begin()
        assert holder.lock("", "table") == 0
        if vendor(database) != "microsoft":  # there even who reads waits, unless its database keeps snapshots
            assert asker.sql("SELECT COUNT(*) FROM auth_user") == [[0]]
        asker.begin()
        asker.busy("", "table")
        if vendor(database) == "postgresql":
            asker.sql("SET LOCAL lock_timeout = '50ms'")
            asker.send("sql DELETE FROM auth_user")
            assert asker.expect("error").startswith("OperationalError canceling statement due to lock timeout")
            asker.tell("rollback", "ended")
            asker.begin()
        asker.wait_for("", "table", shared=True)
        holder.tell("commit", "ended")
        assert asker.locked() > 0
        holder.begin()
        holder.busy("", "table")
        if vendor(database) != "sqlite":
            assert holder.lock("", "table", shared=True) == 0


def test_behind_a_pooler_the_next_client_inherits_no_timeout(committed):
    if "postgres" not in databases.covered():
        pytest.skip("no PostgreSQL")
    with pgbouncer("postgres", default_pool_size="2") as pooler:
        env = pooler.env()
        with Transactor("postgres", env) as holder, Transactor("postgres", env) as asker:
            holder.begin()
            holder.lock("pooled")
            asker.begin()
            asker.ask("pooled", timeout=0.2)
            asker.expect("busy")
            asker.wait_for("pooled", timeout=50)
            holder.tell("commit", "ended")
            asker.locked()
            asker.tell("commit", "ended")
            holder.begin()
            asker.begin()
            for each in (holder, asker):  # the pool's two sessions
                assert each.sql("SHOW statement_timeout") == [["0"]]
                assert each.sql("SHOW lock_timeout") == [["0"]]


def test_a_server_that_rolls_back_on_timeouts_does_not_here(committed):
    with private_server("mariadb", innodb_rollback_on_timeout="ON") as server:
        env = server.env()
        with Transactor("private", env) as holder, Transactor("private", env) as asker:
            assert asker.sql("SELECT @@innodb_rollback_on_timeout") == [[1]]
            holder.begin()
            holder.lock("slow")
            asker.begin()
            asker.sql("INSERT INTO sqlsem_server (identity, seen_us) VALUES ('before', 1)")
            asker.ask("slow", timeout=1.2)
            asker.expect("busy")
            asker.tell("commit", "ended")
            assert asker.sql("SELECT identity FROM sqlsem_server WHERE seen_us = 1") == [["before"]]
