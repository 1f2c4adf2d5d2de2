"""The tests' own tools: what they say about the library must be true."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import time

import pytest
from django.db import OperationalError, connections

from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.models import SemaphoreRow, SlotRow
from tests.support import applocks, databases, forks, servers, tds
from tests.support.processes import Child, children_hear_signals, is_alive, sqlite_locks, wait_for_end
from tests.support.threads import run_in_threads, wait_until
from tests.testapp.models import Probe

THREADS = 8
ROUNDS = 40


def test_every_reason_for_rows_alone_is_one_that_is_known():
    """A server must be at hand to find out otherwise."""
    said = {
        (path.name, why)
        for path in (databases.ROOT / "tests").rglob("test_*.py")
        for why in re.findall(r"mark\.rows_only\(\"([^\"]*)\"\)", path.read_text())
    }
    assert len(said) > 5
    assert not {each for each in said if each[1] not in applocks.ROWS_ONLY}


def test_the_counter_counts_threads(counter, database):
    def work(index):
        for _ in range(ROUNDS):
            with counter.inside():
                time.sleep(0.001)

    run_in_threads(THREADS, work)
    assert counter.current == 0
    assert counter.entered == THREADS * ROUNDS
    assert 2 <= counter.peak <= THREADS
    assert Probe.objects.using(database).get().peak == counter.peak


def test_the_counter_sees_everyone_who_is_in_at_once(counter):
    counter.enter()
    counter.enter()
    counter.leave()
    counter.enter()
    assert (counter.current, counter.peak, counter.entered) == (2, 2, 3)


@pytest.mark.soak
def test_the_counter_serves_32_processes_and_threads(counter, database):
    code = """
from tests.support.databases import OutsideCounter
from tests.support.threads import run_in_threads
alias, rounds = args
with OutsideCounter(alias) as counter:
    def work(index):
        for _ in range(rounds):
            with counter.inside():
                pass
    say("ready")
    listen()
    run_in_threads(4, work)
say("done")
"""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(code, database, ROUNDS)) for _ in range(8)]
        for child in children:
            child.expect("ready")
        for child in children:
            child.send()
        for child in children:
            child.expect("done", timeout=60)
            child.finish()
    assert counter.current == 0
    assert counter.entered == 8 * 4 * ROUNDS


def test_rows_of_a_test_are_committed(database):
    Probe.objects.using(database).create(name="seen from outside")
    assert databases.query(database, "SELECT name FROM testapp_probe") == [("seen from outside",)]


def test_the_next_test_starts_empty(database):
    assert not Probe.objects.using(database).exists()


def test_a_child_sees_the_databases_of_its_parent(database):
    Probe.objects.using(database).create(name="from the parent")
    code = "from tests.testapp.models import Probe; say(Probe.objects.using(args[0]).get().name)\n"
    with Child(code, database) as child:
        child.expect("from the parent")
        child.finish()


def test_a_child_that_says_something_else_fails_with_its_story():
    with Child("import sys; print('the reason', file=sys.stderr, flush=True); say('nonsense'); listen()\n") as child:
        with pytest.raises(AssertionError, match=r"(?s)said 'nonsense' instead of 'sense'.*the reason"):
            child.expect("sense")
        child.send("go")
        with pytest.raises(AssertionError, match="ended with 0"):
            child.expect("more")


def test_a_child_can_be_stopped_and_killed():
    code = "import time\nwhile True:\n    say('tick')\n    time.sleep(0.01)\n"
    with Child(code) as child:
        child.expect("tick")
        child.stop()
        time.sleep(0.1)
        seen = len(child.lines)
        time.sleep(0.2)
        assert len(child.lines) == seen
        child.cont()
        wait_until(lambda: len(child.lines) > seen)
        child.kill()
        assert child.wait() == -9


@pytest.mark.skipif(not os.path.exists("/proc/self/fdinfo"), reason="Linux alone tells who has locked what")
def test_a_child_is_not_stopped_while_it_keeps_an_sqlite_file_locked(tmp_path):
    path = str(tmp_path / "written.sqlite3")
    code = (
        "import sqlite3, time\n"
        "connection = sqlite3.connect(args[0], isolation_level=None, timeout=60)\n"
        "connection.execute('PRAGMA journal_mode = WAL')\n"
        "connection.execute('CREATE TABLE written (number)')\n"
        "say('ready')\n"
        "while True:\n"
        "    connection.execute('BEGIN IMMEDIATE')\n"
        "    connection.execute('INSERT INTO written VALUES (1)')\n"
        "    time.sleep(0.03)\n"
        "    connection.execute('COMMIT')\n"
        "    time.sleep(0.01)\n"
    )
    with Child(code, path) as child, contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as mine:
        child.expect("ready")
        for _ in range(20):
            child.stop()
            mine.execute("BEGIN IMMEDIATE")
            mine.execute("ROLLBACK")
            child.cont()
            time.sleep(0.02)
        found = []
        while not found:  # stopped wherever it is, it keeps everybody out now and then
            child.stop(anywhere=True)
            found = sqlite_locks(child.pid)
            if found:
                with pytest.raises(sqlite3.OperationalError, match="locked"):
                    mine.execute("BEGIN IMMEDIATE")
            child.cont()


ITSELF = """
import atexit, json, os, random, sys, threading, time, uuid
from django.conf import settings
from django.db import OperationalError, connections
from django_sqlsem import conf
from django_sqlsem.core import identity
def later():
    threading.main_thread().join()
    print("the thread", file=sys.stderr)
atexit.register(print, "the exit handler", file=sys.stderr)
threading.Thread(target=later).start()
where = identity.current()
say(json.dumps({
    "same": [where.label, sys.argv[1:], sys.orig_argv[1:3], os.getcwd(), sorted(os.listdir("/proc/self/fd")),
             os.getppid(), dict(os.environ), connections.settings, conf.config().lease, settings.SQLSEM,
             [f"{signal}" for signal in map(__import__("signal").getsignal, range(1, 32))],
             [sys.stdin.encoding, sys.stdout.errors, sys.stdout.line_buffering, sys.stdout.seekable()],
             sys.warnoptions, threading.active_count(), sorted(name for name in sys.modules if "celery" in name)],
    "own": [os.getpid(), os.getpgid(0), os.getsid(0), where.process, uuid.uuid4().hex, random.random(), where.pid],
}))
listen()
sys.exit(7)
"""


def test_a_forked_child_is_as_one_that_was_started(committed, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("COLUMNS", "79")
        forks.stop()
        Child("pass").close()  # the template is there, and has another environment, databases and settings than these
    known = json.loads(databases.child_environment()["SQLSEM_TEST_DATABASES"])
    moved = known | {"default": known["default"] | {"NAME": "elsewhere"}, "another": known["default"]}
    environment = {"SQLSEM_TEST_SETTINGS": '{"LEASE": 17.5}', "SQLSEM_TEST_DATABASES": json.dumps(moved)}
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(Child(ITSELF, env=environment, forked=False))
        children = [started, *(stack.enter_context(Child(ITSELF, env=environment)) for _ in range(2))]
        assert [type(each.process) is subprocess.Popen for each in children] == [True, False, False]
        told = [json.loads(child.expect(timeout=60)) for child in children]
        for child in children:
            child.send()
            assert child.wait() == 7
            assert child.stderr == "the thread\nthe exit handler\n"
    assert told[0]["same"] == told[1]["same"] == told[2]["same"]
    assert told[1]["same"][8] == 17.5
    assert told[1]["same"][7]["default"]["NAME"] == "elsewhere"
    assert set(told[1]["same"][7]) == set(moved)
    for mine in zip(*(each["own"] for each in told), strict=True):
        assert len(set(mine)) == 3, mine
    for child, each in zip(children, told, strict=True):
        assert each["own"][:3] == [child.pid] * 3


@pytest.mark.parametrize("forked", [True, False])
def test_how_a_child_ends(forked):
    with Child("1 / 0", forked=forked) as child:
        assert child.wait() == 1
        assert "ZeroDivisionError" in child.stderr
    with Child("listen()", forked=forked) as child:
        with pytest.raises(AssertionError, match="goes on"):
            child.wait(0.01)
        child.process.terminate()
        assert child.wait() == -15


def test_the_template_of_children_may_end():
    forks.stop()
    with Child("listen()") as child:
        forks.stop()
        child.send()
        child.finish()
    with Child("say('another')") as child:
        child.expect("another", timeout=60)
        child.finish()


def test_a_child_takes_its_own_children_along():
    with Child("import subprocess; say(subprocess.Popen(['sleep', '60']).pid); listen()\n") as child:
        grandchild = int(child.expect())
        child.kill()
        assert is_alive(grandchild)
    wait_for_end(grandchild)


OWN_SESSION = {
    "postgresql": "SELECT pg_backend_pid()",
    "mysql": "SELECT CONNECTION_ID()",
    "microsoft": "SELECT @@SPID",
}


def test_sessions_can_be_killed(database):
    if connections[database].vendor == "sqlite":
        assert databases.session_ids(database) == []
        return
    with contextlib.closing(databases.raw_connection(database)) as raw:
        cursor = raw.cursor()
        cursor.execute(OWN_SESSION[connections[database].vendor])
        (session,) = cursor.fetchone()
        # A server shows for a moment what has ended, the session of the last such question too: no number is certain.
        assert session in databases.session_ids(database)
        assert databases.kill_sessions(database) >= 1
        wait_until(lambda: session not in databases.session_ids(database))
        said: str | None = r"(?i)terminat|lost|gone|closed|kill|connection"
        if connections[database].vendor == "microsoft":
            said = None  # of its drivers each says something else, or nothing
        with pytest.raises(Exception, match=said):
            raw.cursor().execute("SELECT 1")


def test_a_childs_wall_clock_can_be_wrong(wrong_clock):
    code = """
import time
from django_sqlsem.core import clocks
say(f'{time.time()} {clocks.boot_now()} {time.monotonic()}')
"""
    with Child(code, env=wrong_clock("+1d")) as child:
        wall, boot, monotonic = map(float, child.expect().split())
    from django_sqlsem.core import clocks

    assert 86_000 < wall - time.time() < 87_000
    assert abs(boot - clocks.boot_now() + clocks.ahead_us() / 1e6) < 60  # a test may have moved this process ahead
    assert abs(monotonic - time.monotonic()) < 60


@pytest.mark.leaves_held
def test_a_held_slot_is_noticed(database):
    semaphore = SemaphoreRow.objects.using(database).create(key="0" * 32, name="left", declared_slots=1)
    with connections[database].cursor() as cursor:
        now = dialect_for(connections[database]).now(cursor)
    row = SlotRow.objects.using(database).create(semaphore=semaphore, slot=1, expires_us=now + 60_000_000, pid=7)
    with locked_outside(database, "1-left"):
        with pytest.raises(AssertionError, match="still held: 'left' slot 1 by pid 7"):
            databases.assert_nothing_held(database, within=0.1)
        row.expires_us = None if connections[database].vendor == "microsoft" else now
        row.save()
        databases.assert_nothing_held(database, within=0.1)


@pytest.mark.leaves_held
def test_a_row_whose_lock_is_free_is_not_held(database):
    if connections[database].vendor != "microsoft":
        pytest.skip("a lease says it there")
    semaphore = SemaphoreRow.objects.using(database).create(key="0" * 32, name="1-left", declared_slots=1)
    SlotRow.objects.using(database).create(semaphore=semaphore, slot=2, expires_us=1, pid=7)
    with locked_outside(database, "2-1-left"):  # as a slot of another name would be
        databases.assert_nothing_held(database, within=0.1)
    with locked_outside(database, f"2-{tds.lock_base('1-left')}"), pytest.raises(AssertionError, match="still held"):
        databases.assert_nothing_held(database, within=0.1)


@contextlib.contextmanager
def locked_outside(alias, resource):
    """Where slots are application locks, hold one without the library."""
    if connections[alias].vendor != "microsoft":
        yield
        return
    with contextlib.closing(databases.raw_connection(alias)) as raw:
        options = "@LockMode = 'Exclusive', @LockOwner = 'Session', @LockTimeout = 0"
        raw.cursor().execute(f"EXEC sp_getapplock @Resource = N'{resource}', {options}")
        yield


URL = "mssql://sa:p%40ss@db.example:1444/master"


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        ("freetds", {"driver": "FreeTDS", "host_is_server": True, "extra_params": "Encrypt=no"}),
        ("mssql-python", {"python_driver": "mssql_python", "extra_params": "Encrypt=no"}),
        ("", {"driver": "Mine", "extra_params": "Encrypt=no"}),
    ],
)
def test_the_settings_of_a_tds_server(driver, expected, monkeypatch):
    monkeypatch.setenv("SQLSEM_TEST_MSSQL_DRIVER", driver)
    own = "&driver=Mine" if not driver else ""
    settings = tds.settings_for(f"{URL}?extra_params=Encrypt%3Dno{own}")
    assert settings["OPTIONS"] == expected | tds.PATIENCE
    shown = {key: settings[key] for key in ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")}
    assert shown == {
        "ENGINE": "mssql",
        "NAME": "master",
        "USER": "sa",
        "PASSWORD": "p@ss",
        "HOST": "db.example",
        "PORT": "1444",
    }


def test_an_unknown_driver_of_a_tds_server_is_refused(monkeypatch):
    monkeypatch.setenv("SQLSEM_TEST_MSSQL_DRIVER", "jdbc")
    monkeypatch.setenv("SQLSEM_TEST_MSSQL_URL", URL)
    missing = servers.find("mssql")
    assert isinstance(missing, servers.Missing)
    assert "odbc, freetds, mssql-python" in missing.reason
    assert "p%40ss" not in missing.reason


def test_a_tds_server_is_looked_for_only_where_it_is_named(monkeypatch):
    for variable in ("SQLSEM_TEST_MSSQL_URL", "SQLSEM_TEST_REQUIRE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(servers, "find", lambda name: servers.Missing(name))
    assert "mssql" not in servers.survey()[1]
    monkeypatch.setenv("SQLSEM_TEST_REQUIRE", "mssql")
    assert "mssql" in servers.survey()[1]


def test_the_drivers_name_is_the_same_each_time():
    """Installed as ``MySQLdb``, PyMySQL is still PyMySQL: else each connection reads all certificates."""
    name = servers.install_mysql_driver()
    assert servers.install_mysql_driver() == name
    assert servers.without_tls("127.0.0.1") == ({"ssl_disabled": True} if name.startswith("PyMySQL") else {})


def test_what_a_killed_child_keeps_locked_is_deleted_all_the_same(database, monkeypatch):
    """One statement after the other, if all at once end in a deadlock."""
    Probe.objects.using(database).create(name="left")
    real, tried = databases._execute, []

    def execute(alias, *statements):
        at_once = connections[alias].in_atomic_block or len(statements) == 1
        tried.append(at_once)
        if at_once:
            raise OperationalError(1213, "Deadlock found when trying to get lock")
        real(alias, *statements)

    monkeypatch.setattr(databases, "_execute", execute)
    databases.delete_rows(database)
    assert tried == ([True, False] if connections[database].vendor in ("mysql", "postgresql") else [False])
    assert not Probe.objects.using(database).exists()


def test_the_marks_of_parameters_on_a_tds_server():
    assert tds.marks("SELECT name FROM t WHERE a = %s AND b LIKE '%%x' AND c = %s") == (
        "SELECT name FROM t WHERE a = ? AND b LIKE '%x' AND c = ?"
    )


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT])
def test_children_hear_what_the_run_of_tests_ignores(number):
    """Under ``nohup``, or in the background of a script."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with children_hear_signals():
            os.kill(os.getpid(), number)
            child = subprocess.run(["sh", "-c", f"kill -{number:d} $$; sleep 1"], check=False)
        assert child.returncode == -number
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_an_environment_of_its_own_is_for_a_program(wrong_clock):
    """Even the first child of all: no template may have a wrong clock."""
    forks.stop()
    with Child("import time; say(time.time())", env=wrong_clock("+1d")) as odd:
        assert isinstance(odd.process, subprocess.Popen)
        assert float(odd.expect()) > time.time() + 80_000
    with Child("import time; say(time.time())") as usual:
        assert isinstance(usual.process, forks.ForkedProcess)
        assert abs(float(usual.expect()) - time.time()) < 3_600
