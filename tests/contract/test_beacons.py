"""Beacons: nobody who lives is taken for dead, and who was killed is known to be dead at once."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time

import pytest
from django.db import connections
from hypothesis import given
from hypothesis import strategies as st

from django_sqlsem.database import (
    beacons,
    dialects,
)
from django_sqlsem.database import (
    server as database_server,
)
from django_sqlsem.database.dialects import dialect_for
from tests.programs.beacon_holders import Burning, Lamp
from tests.support import applocks, databases
from tests.support.pgbouncer import pgbouncer
from tests.support.private_servers import ALIAS, KINDS, galera_node, private_server
from tests.support.processes import Child, is_alive, wait_for_end
from tests.support.threads import run_in_threads, wait_until

pytestmark = pytest.mark.rows_only("beacons")

SERVERS = [alias for alias in databases.covered() if alias != "default"]
NOBODY = "0123456789abcdef" * 2


@pytest.fixture
def lamp(database):
    """A lit beacon of this process."""
    with Lamp(database) as lamp:
        yield lamp


@pytest.fixture(params=SERVERS)
def server(request, committed):
    """The alias of one covered server after the other."""
    return applocks.parameter(request)


def other_session(alias, work):
    """Run ``work`` with a cursor on a session that has no beacon."""
    with connections[alias].cursor() as cursor:
        return work(cursor)


def kill_holder(alias, process_id):
    """Have the server end the session that has a beacon."""
    if connections[alias].vendor == "postgresql":
        sql = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND classid = %s AND objid = %s AND objsubid = 2"
        parameters = (dialects.BEACON_CLASS, beacons.lock_key(process_id) % 2**32)
    else:
        sql, parameters = "SELECT IS_USED_LOCK(%s)", (beacons.lock_name(process_id),)
    ((session,),) = databases.query(alias, sql, parameters)
    databases.kill_sessions(alias, [session])


def locks_in(alias):
    """Return the keys of all beacons in a PostgreSQL database."""
    ours = "database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND classid = %s"
    sql = f"SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND {ours}"
    return [row[0] for row in databases.query(alias, sql, (dialects.BEACON_CLASS,))]


# A process that lives is never dead.


def test_a_living_process_is_never_dead_however_often_it_is_asked_about(database):
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Burning(database)) for _ in range(3)]
        for child in children:
            child.ready().ask("hammer", "hammering")
        asked = [child.process_id for child in children]
        barrier = threading.Barrier(4)

        def hammer(index):
            with Lamp(database) as prober:
                asked.append(prober.process_id)
                barrier.wait(20)
                for _ in range(300):
                    assert prober.dead(*asked) == set()
                    assert prober.light()
                barrier.wait(60)

        run_in_threads(4, hammer)
        for child in children:
            assert int(child.ask("stop it", "lit")) > 0
            child.send("end")
            child.finish()


def test_lighting_is_idempotent(database, lamp):
    for _ in range(3):
        assert lamp.light()
    assert lamp.dead(lamp.process_id) == set()


def test_a_stopped_process_is_not_dead(database, lamp):
    with Burning(database) as child:
        child.ready().stop()
        for _ in range(50):
            assert lamp.dead(child.process_id) == set()
        child.cont()
        assert child.ask("light", "lit") == ""


def test_a_killed_process_is_dead_at_once(database, lamp):
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Burning(database)).ready() for _ in range(3)]
        killed, *others = (child.process_id for child in children)
        children[0].kill()
        assert wait_until(lambda: lamp.dead(killed, *others), timeout=20) == {killed}
        # On a session that has no beacon as well.
        assert other_session(database, lambda cursor: lamp.ask(cursor, killed, *others)) == {killed}


def test_a_process_that_ends_in_order_puts_it_out(database, lamp):
    with Burning(database) as child:
        child.ready().send("end")
        child.finish()
        if connections[database].vendor == "sqlite":  # no file says nothing: its process may have lost it
            assert child.process_id not in os.listdir(lamp.beacon._file.directory)
            assert lamp.dead(child.process_id) == set()
        else:
            assert wait_until(lambda: lamp.dead(child.process_id), timeout=20) == {child.process_id}


def test_two_processes_never_share_one(database, lamp):
    with Burning(database) as first, Burning(database, process_id=first.process_id) as second:
        lit, dark = sorted([first, second], key=lambda child: child.expect(timeout=60) == "dark")
        assert (lit.lines, dark.lines) == (["lit"], ["dark"])
        assert dark.ask("light", "dark") == ""
        assert lit.ask("light", "lit") == ""
        lit.kill()
        wait_until(lambda: lamp.dead(lit.process_id), timeout=20)
        assert dark.ask("light", "lit") == ""
        assert lamp.dead(lit.process_id) == set()


# Forks.


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_does_not_keep_its_killed_parent_alive(database, lamp):
    with Burning(database) as parent:
        child = int(parent.ready().ask("fork", "forked"))
        assert lamp.dead(parent.process_id) == set()
        parent.kill()
        assert wait_until(lambda: lamp.dead(parent.process_id), timeout=20) == {parent.process_id}
        assert is_alive(child)
    wait_for_end(child)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_forks_that_end_leave_their_parent_lit(database, lamp):
    with Burning(database) as parent:
        parent.ready()
        for _ in range(3):
            parent.ask("fork and end", "forked")
            assert lamp.dead(parent.process_id) == set()
        assert parent.ask("light", "lit") == ""


# Sessions.


def test_a_beacon_ends_with_its_session_and_is_lit_again(server):
    with Lamp(server) as lamp, Burning(server) as child:
        child.ready()
        for _ in range(3):
            kill_holder(server, child.process_id)
            assert wait_until(lambda: lamp.dead(child.process_id), timeout=20) == {child.process_id}
            assert child.ask("light", "lit") == ""
            assert lamp.dead(child.process_id) == set()


def test_a_session_that_was_left_does_not_keep_the_beacon(server):
    """As after a cut of the network: the server still knows the old session, and the keeper has a new one."""
    with Lamp(server) as lamp, Lamp(server) as prober:
        (old,) = other_sessions(server, lamp)
        left, lamp.session._connection = lamp.session._connection, None
        assert lamp.light()
        assert prober.dead(lamp.process_id) == set()
        assert old not in databases.session_ids(server)
        with contextlib.suppress(Exception):
            left.close()


def other_sessions(alias, lamp):
    """Return the number of a lamp's session."""
    sql = "SELECT pg_backend_pid()" if connections[alias].vendor == "postgresql" else "SELECT CONNECTION_ID()"

    def ask(cursor):
        cursor.execute(sql)
        return cursor.fetchone()

    return lamp.run(ask)


def test_who_lost_its_own_beacon_learns_nothing(server):
    with Lamp(server) as lamp, Lamp(server) as prober:
        with Lamp(server) as gone:
            pass
        wait_until(lambda: prober.dead(gone.process_id), timeout=20)
        kill_holder(server, prober.process_id)
        wait_until(lambda: lamp.dead(prober.process_id), timeout=20)
        assert other_session(server, lambda cursor: prober.ask(cursor, gone.process_id)) == set()
        assert prober.light()
        assert prober.dead(gone.process_id) == {gone.process_id}


def test_who_lit_none_learns_nothing(database):
    with Burning(database) as child:
        child.ready().kill()
        prober = Lamp(database)
        assert prober.dead(child.process_id) == set()
        assert prober.light()
        wait_until(lambda: prober.dead(child.process_id), timeout=20)
        prober.close()
        assert prober.dead(child.process_id) == set()
        prober.session.close()


# Asking.


def test_asking_leaves_no_locks_behind(database, lamp):
    with Burning(database) as child:
        child.ready().kill()
        wait_until(lambda: lamp.dead(child.process_id), timeout=20)
    connection = connections[database]
    everybody = [child.process_id, lamp.process_id, NOBODY]
    files = sorted(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert lamp.dead(*everybody) >= {child.process_id}
    assert sorted(os.listdir("/proc/self/fd")) == files
    connection.ensure_connection()
    connection.set_autocommit(False)
    try:
        for _ in range(20):
            lamp.ask(connection.cursor(), *everybody)
        if connection.vendor == "postgresql":
            assert locks_in(database) == [beacons.lock_key(lamp.process_id) % 2**32]
        elif connection.vendor == "mysql":
            names = [beacons.lock_name(each) for each in everybody]
            (used,) = databases.query(database, "SELECT IS_USED_LOCK(%s), IS_USED_LOCK(%s), IS_USED_LOCK(%s)", names)
            assert used == (None, used[1], None)
            assert used[1]
        else:
            again = beacons.LockFile(lamp.beacon._file.database, child.process_id)  # it can be locked
            again.remove()
    finally:
        connection.rollback()
        connection.set_autocommit(True)


def test_expressions_say_the_same_inside_statements(server):
    with Lamp(server) as lamp, Burning(server) as living, Burning(server) as killed:
        living.ready()
        killed.ready().kill()
        wait_until(lambda: lamp.dead(killed.process_id), timeout=20)
        expected = {
            lamp.process_id: False,
            living.process_id: False,
            killed.process_id: True,
            "": False,
            "no process id": False,
            None: False,
        }
        if connections[server].vendor == "postgresql":
            expected["g" * 32] = False
        dead = dialect_for(connections[server]).dead.format(process_id="asked.id")
        rows = " UNION ALL ".join(["SELECT %s AS id"] * len(expected))
        if connections[server].vendor == "postgresql":
            rows = rows.replace("%s", "%s::text")

        def ask(cursor):
            cursor.execute(f"SELECT id, {dead} FROM ({rows}) asked", list(expected))
            return {row[0]: bool(row[1]) for row in cursor.fetchall() if row[1] is not None}

        assert lamp.run(ask) == expected
        assert other_session(server, ask) == expected


@pytest.mark.skipif("postgres" not in SERVERS, reason="PostgreSQL is not covered")
def test_keys_are_the_same_in_python_and_in_sql(committed):
    with connections["postgres"].cursor() as cursor:

        @given(st.binary(min_size=16, max_size=16))
        def check(raw):
            key = dialects._BEACON_KEYS.format(process_id="%(id)s::text").partition(", ")[2]
            cursor.execute(f"SELECT {key}", {"id": raw.hex()})
            assert cursor.fetchone() == (beacons.lock_key(raw.hex()),)

        check()


# Where there are none.


@pytest.mark.skipif("postgres" not in SERVERS, reason="PostgreSQL is not covered")
@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_there_are_none_behind_pgbouncer(committed, caplog, monkeypatch, mode):
    monkeypatch.setattr(beacons, "_said", set())
    with pgbouncer("postgres", pool_mode=mode, default_pool_size="1") as pooler:
        with Burning("postgres", env=pooler.env()) as child:
            child.expect("dark", timeout=60)
        assert "auto-database" in pooler.log
    assert locks_in("postgres") == []


def test_there_are_none_on_galera(committed, caplog, monkeypatch):
    monkeypatch.setattr(beacons, "_said", set())
    with private_server("mariadb", **galera_node()):
        lamp = Lamp(ALIAS)
        with caplog.at_level(logging.INFO, "django_sqlsem"):
            for _ in range(2):
                assert not lamp.light()
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert "every node of the cluster has locks of its own" in caplog.text
        found = [lamp.run(lambda cursor: database_server.read(connections[ALIAS], cursor)) for _ in range(3)]
        assert found[0].started_us is None
        assert found == [found[0]] * 3
        lamp.session.close()


def test_there_are_none_in_memory():
    from django.db.backends.sqlite3.base import DatabaseWrapper

    for name in (":memory:", "file:memorydb_default?mode=memory&cache=shared"):
        assert beacons.beacon_for(DatabaseWrapper({"NAME": name}, "memory")) is None


def test_there_are_none_without_file_locks(committed, monkeypatch):
    monkeypatch.setattr(beacons, "POSSIBLE", False)
    assert beacons.beacon_for(connections["default"]) is None


def test_a_directory_that_cannot_be_written_is_said_once(directory, caplog, monkeypatch):
    monkeypatch.setattr(beacons, "_said", set())
    lamp = Lamp("default")
    with open(directory, "w", encoding="utf-8"):  # in its place there is something else
        pass
    try:
        for _ in range(3):
            assert not lamp.light()
    finally:
        os.unlink(directory)
    assert [(record.levelname, record.name) for record in caplog.records] == [("WARNING", "django_sqlsem")]
    assert directory in caplog.text
    assert "come back when their leases run out" in caplog.text
    assert lamp.light()
    lamp.close()


def test_locks_that_the_file_system_does_not_keep_are_not_trusted(committed, caplog, monkeypatch):
    monkeypatch.setattr(beacons, "_said", set())
    monkeypatch.setattr(beacons.fcntl, "flock", lambda file, how: None)
    lamp = Lamp("default")
    assert not lamp.light()
    assert "does not keep locks of files" in caplog.text
    lamp.session.close()


# SQLite's files.


@pytest.fixture
def directory(committed):
    """The directory of the beacons of ``default``, empty."""
    path = os.path.realpath(connections["default"].settings_dict["NAME"]) + beacons.SUFFIX
    shutil.rmtree(path, ignore_errors=True)
    return path


def test_a_file_that_was_cleaned_away_kills_nobody(directory):
    with Lamp("default") as lamp, Burning("default") as child:
        child.ready()
        os.unlink(os.path.join(directory, child.process_id))
        assert lamp.dead(child.process_id) == set()
        assert child.ask("light", "lit") == ""
        assert sorted(os.listdir(directory)) == sorted([lamp.process_id, child.process_id])
        os.unlink(os.path.join(directory, lamp.process_id))
        child.kill()
        assert lamp.light()
        assert lamp.dead(child.process_id) == {child.process_id}


def test_the_dead_can_be_asked_about_until_they_are_swept(directory, monkeypatch):
    with Lamp("default") as lamp:
        stray = os.path.join(directory, "not ours")
        with open(stray, "w", encoding="utf-8"):
            pass
        with Burning("default") as child:
            child.ready().kill()
        for _ in range(3):
            with Lamp("default"):  # sweeps
                assert lamp.dead(child.process_id) == {child.process_id}
        monkeypatch.setattr(beacons, "KEEP", 0.0)
        with Lamp("default"):
            pass
        assert sorted(os.listdir(directory)) == sorted([lamp.process_id, "not ours"])
        os.unlink(stray)
    assert not os.path.exists(directory)


def test_sweeping_never_removes_a_living_one(directory):
    with Lamp("default") as lamp, contextlib.ExitStack() as stack:
        database = directory.removesuffix(beacons.SUFFIX)
        living = [stack.enter_context(Burning("default")).ready() for _ in range(2)]
        ids = [lamp.process_id, *(child.process_id for child in living)]
        swarms = [
            stack.enter_context(Child("tests.programs.beacon_holders:swarm", database, ids, 150, 6)) for _ in range(3)
        ]
        for swarm in swarms:
            swarm.expect("done", timeout=120)
            swarm.finish()
        assert lamp.dead(*ids) == set()
        assert lamp.beacon._file.stands
        for child in living:
            assert child.ask("light", "lit") == ""
        assert set(os.listdir(directory)) >= set(ids)
        beacons.sweep(directory)  # marks the last ones
        assert len(lamp.dead(*os.listdir(directory))) == len(os.listdir(directory)) - len(ids)


# Which life of the server it is.


def incarnation_of(alias):
    return other_session(alias, lambda cursor: database_server.read(connections[alias], cursor))


def test_an_incarnation_is_the_same_for_every_session(server):
    now = other_session(server, dialect_for(connections[server]).now)

    def ask(index):
        return {incarnation_of(server) for _ in range(100)}

    (found,) = set.union(*run_in_threads(4, ask))
    assert found.identity
    assert 0 < found.started_us < now


def test_connections_that_note_a_server_together_agree_since_when_it_is_known(server, monkeypatch):
    """The second one has found nothing, and now counts what the first one has written."""
    databases.query(server, "DELETE FROM sqlsem_server")
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(contextlib.closing(connections[server].copy())) for _ in range(2))

        real = type(dialect_for(second)).now

        def now(dialect, cursor):
            if cursor.db is second:
                database_server.note_server(first)
            return real(dialect, cursor)

        monkeypatch.setattr(type(dialect_for(second)), "now", now)
        database_server.note_server(second)
        assert first.sqlsem_since_us == second.sqlsem_since_us == incarnation_of(server).started_us
    assert databases.query(server, "SELECT COUNT(*) FROM sqlsem_server") == [(1,)]


def test_sqlite_has_no_incarnation(committed):
    assert incarnation_of("default") is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_was_started_again_has_another_incarnation(committed, kind):
    with private_server(kind) as private:
        before = incarnation_of(ALIAS)
        connections[ALIAS].close()
        wait_until(lambda: private.query("SELECT 1"))
        private.kill()
        # MariaDB tells its start to the second.
        wait_until(lambda: int(time.time()) > before.started_us // 1_000_000)
        private.start()
        after = incarnation_of(ALIAS)
        assert after.identity != before.identity
        assert after.started_us > before.started_us
        assert incarnation_of(ALIAS) == after


def test_a_promoted_standby_has_another_incarnation(committed):
    with private_server("postgres") as private:
        primary = incarnation_of(ALIAS)
        assert primary.identity.endswith(":00000001")
        connections[ALIAS].close()
        private.stop()
        (private.directory / "data" / "standby.signal").touch()
        private.start()
        with Lamp(ALIAS) as lamp, Lamp(ALIAS) as prober:  # those who may only read can have beacons
            assert prober.dead(lamp.process_id) == set()
            standby = incarnation_of(ALIAS)
            assert standby.identity == f"{standby.started_us}:standby"
            assert standby.started_us > primary.started_us
            assert private.query("SELECT pg_promote()") == [(True,)]
            promoted = incarnation_of(ALIAS)  # on the same session
            assert promoted.identity == f"{standby.started_us}:00000002"
            assert promoted.started_us == standby.started_us
            assert prober.dead(lamp.process_id) == set()


def test_an_ordinary_role_may_have_both(committed):
    """Neither a beacon nor an incarnation needs a privilege."""
    with private_server("postgres") as private:
        private.query("CREATE ROLE plain LOGIN")
        private.query("GRANT ALL ON SCHEMA public TO plain")
        with role("plain"):
            lamp = Lamp(ALIAS)
            assert lamp.light()
            assert incarnation_of(ALIAS).identity.endswith(":00000001")
            left, lamp.session._connection = lamp.session._connection, None
            assert lamp.light()  # it may end its own session
            lamp.close()
            left.close()


@contextlib.contextmanager
def role(name):
    connections[ALIAS].close()
    before = connections[ALIAS].settings_dict["USER"]
    connections[ALIAS].settings_dict["USER"] = name
    try:
        yield
    finally:
        connections[ALIAS].close()
        connections[ALIAS].settings_dict["USER"] = before
