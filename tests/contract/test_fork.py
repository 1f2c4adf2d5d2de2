"""Forks of a process that holds: the child has nothing of its parent's, and does the parent no harm."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request

import pytest

from django_sqlsem import semaphore
from tests.support import applocks
from tests.support.databases import ROOT, child_environment, held_rows, query, session_ids
from tests.support.processes import Child, is_alive
from tests.support.threads import wait_until

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.process_side("postgres"),
]

BEGIN = """
import os, signal, sys, threading, time
from django_sqlsem import AlreadyHeldError, PermitLostError, semaphore
lock = semaphore("forked", slots=2, lease=4, timeout=10, using=args[0])
"""


def code_of(body):
    return BEGIN + textwrap.dedent(body)


CHILD_HOLDS_NOTHING = """
    with lock as permit:
        token = permit.token
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert permit.lost.reason == "forked", permit.lost
                try:
                    permit.check()
                except PermitLostError:
                    permit.release()
                    with lock as own:
                        assert own.slot == 2, own
                        assert lock.status().held == 2
                    code = 0
            finally:
                LEAVE
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        permit.check()
        say(f"parent {permit.slot} {token}")
        listen()
        permit.check()
    say("released")
"""


@pytest.mark.parametrize("leave", ["os._exit(code)", "sys.exit(code)"])
def test_the_child_neither_holds_nor_releases_the_parents_permit(database, leave):
    with Child(code_of(CHILD_HOLDS_NOTHING.replace("LEAVE", leave)), database) as parent:
        slot, token = parent.expect("parent").split()
        rows = held_rows(database)
        assert [(row.slot, row.token, row.pid) for row in rows] == [(int(slot), int(token), parent.pid)]
        parent.send("go")
        parent.expect("released")
    assert held_rows(database) == []


def test_leaving_the_parents_block_in_the_child_releases_nothing(database):
    body = """
        block = lock.__enter__()
        child = os.fork()
        if child == 0:
            lock.__exit__(None, None, None)
            say("left")
            os._exit(0)
        os.waitpid(child, 0)
        listen()
        block.check()
        lock.__exit__(None, None, None)
        say("released")
    """
    with Child(code_of(body), database) as parent:
        parent.expect("left")
        assert [row.pid for row in held_rows(database)] == [parent.pid]
        parent.send("go")
        parent.expect("released")
    assert held_rows(database) == []


def test_the_parent_goes_on_renewing_and_the_child_does_not(database):
    """The child outlives the parent's lease twice over, and only the parent's process id is ever renewed."""
    body = """
        permit = lock.acquire()
        child = os.fork()
        if child == 0:
            with lock as own:  # the child's keeper runs, and has only this to renew
                say(f"child {own.token}")
                time.sleep(9)
                own.check()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0
        permit.check()
        permit.release()
        say("both lived")
    """
    with Child(code_of(body), database) as parent:
        parent.expect("child")
        assert len(held_rows(database)) == 2
        parent.expect("both lived", timeout=30)


@pytest.mark.leaves_held
def test_a_killed_parents_session_ends_although_its_child_lives(database):
    body = """
        permit = lock.acquire()
        lock.status()
        child = os.fork()
        if child == 0:
            say(f"child {os.getpid()}")
            time.sleep(3600)
        listen()
    """
    others = set(session_ids(database))  # of this very process, if anything of an earlier test still stands
    with Child(code_of(body), database) as parent:
        child = int(parent.expect("child"))
        before = set(session_ids(database)) - others
        os.kill(parent.pid, signal.SIGKILL)  # the parent alone, not its group
        parent.process.wait(10)
        assert is_alive(child)
        if before:  # SQLite has no sessions
            wait_until(lambda: not before & set(session_ids(database)), timeout=60)
        assert is_alive(child)
        # Nobody renews for the dead: the slot comes back with the end of the lease.
        wait_until(lambda: held_rows(database) == [], timeout=6)
        os.kill(child, signal.SIGKILL)


def test_a_killed_parents_session_for_statements_ends_although_its_child_lives(database):
    """Whoever keeps it alive keeps the rows locked that its last transaction had changed."""
    body = """
        from django_sqlsem.database.sessions import OwnSession
        session = OwnSession(args[0])
        session.run(lambda cursor: cursor.execute("SELECT 1"))
        child = os.fork()
        if child == 0:
            say(f"child {os.getpid()}")
            time.sleep(3600)
        listen()
    """
    others = set(session_ids(database))
    with Child(code_of(body), database) as parent:
        child = int(parent.expect("child"))
        before = set(session_ids(database)) - others
        assert before or database == "default"  # SQLite has no sessions
        os.kill(parent.pid, signal.SIGKILL)  # the parent alone, not its group
        parent.process.wait(10)
        wait_until(lambda: not before & set(session_ids(database)), timeout=60)
        assert is_alive(child)
        os.kill(child, signal.SIGKILL)


def test_forks_in_the_middle_of_other_threads_acquires(database):
    body = """
        with lock:
            pass  # all is imported by now: a fork while another thread imports is beyond anybody's help
        stop = threading.Event()
        count = [0]
        def work(number):
            mine = semaphore("busy forks", slots=2, timeout=30, using=args[0])
            while not stop.is_set():
                with mine:
                    count[0] += 1
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                try:
                    with semaphore("of the child", timeout=20, using=args[0]):
                        pass
                    os._exit(0)
                finally:
                    os._exit(1)
            _, status = os.waitpid(child, 0)
            assert status == 0, status
        stop.set()
        for thread in threads:
            thread.join()
        say(f"done {count[0]}")
    """
    with Child(code_of(body), database) as parent:
        assert int(parent.expect("done", timeout=60)) > 20
    assert held_rows(database) == []


def test_multiprocessing_by_fork_while_holding(database):
    body = """
        import multiprocessing
        context = multiprocessing.get_context("fork")
        def run(queue, permit):
            with lock as own:
                queue.put((str(permit.lost.reason), own.slot))
        queue = context.Queue()
        with lock as permit:
            children = [context.Process(target=run, args=(queue, permit)) for _ in range(3)]
            for child in children:
                child.start()
            for child in children:
                child.join()
            assert [child.exitcode for child in children] == [0, 0, 0]
            assert [queue.get() for _ in children] == [("forked", 2)] * 3
            permit.check()
        say("done")
    """
    with Child(code_of(body), database) as parent:
        parent.expect("done", timeout=30)
    assert held_rows(database) == []


GUNICORN_APP = """
import os, sys
import django
from django.conf import settings
django.setup()
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpResponse
from django.urls import path
from django_sqlsem import semaphore

settings.ROOT_URLCONF = __name__
LOCK = semaphore("preloaded", slots=2, lease=4, using=os.environ["LOCK_ALIAS"])
HELD = LOCK.acquire()  # by the master, before it forks its workers
HELD.detach()
MASTER = os.getpid()

@semaphore("preloaded", slots=2, timeout=10, using=os.environ["LOCK_ALIAS"])
def view(request):
    assert os.getpid() != MASTER
    assert HELD.lost.reason == "forked"
    HELD.release()
    return HttpResponse(f"{os.getpid()}")

urlpatterns = [path("", view)]
application = WSGIHandler()
"""


@pytest.mark.leaves_held
def test_gunicorn_with_preload(database, tmp_path):
    """The master holds a slot through a preloaded app; its workers serve requests, and end, without touching it."""
    (tmp_path / "preloaded_app.py").write_text(GUNICORN_APP, encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = child_environment(LOCK_ALIAS=database)
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "gunicorn", "--preload", "-w", "2", "-b", f"127.0.0.1:{port}"]
    log = tmp_path / "gunicorn.log"
    with log.open("wb") as output:
        master = subprocess.Popen(
            [*command, "--max-requests", "3", "--graceful-timeout", "5", "preloaded_app:application"],
            cwd=tmp_path,
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:

        def get():
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20) as response:
                return response.read().decode()

        def served():
            with contextlib.suppress(OSError):
                return bool(get())
            return False

        wait_until(served, timeout=30)
        workers = {get() for _ in range(12)}  # they are replaced after three requests each
        assert len(workers) > 2
        deadline = time.monotonic() + 6  # longer than the lease
        while time.monotonic() < deadline:
            assert [row.pid for row in held_rows(database)].count(master.pid) == 1
            get()
        master.send_signal(signal.SIGTERM)
        assert master.wait(20) == 0, log.read_text()
    except BaseException as error:
        error.add_note(log.read_text())
        raise
    finally:
        if master.poll() is None:
            master.kill()
            master.wait()
    wait_until(lambda: held_rows(database) == [], timeout=20)


def test_nothing_of_the_parent_is_finalised_in_the_child(database):
    """A child that ends by the interpreter's own end says not a word on the parent's connections."""
    body = """
        permit = lock.acquire()
        lock.status()
        for _ in range(5):
            child = os.fork()
            if child == 0:
                sys.exit(0)
            os.waitpid(child, 0)
        permit.check()
        assert lock.status().held == 1  # on the very connection that the children inherited
        permit.release()
        say("whole")
    """
    with Child(code_of(body), database) as parent:
        parent.expect("whole")
    assert query(database, "SELECT COUNT(*) FROM sqlsem_waiter")[0][0] == 0


def test_a_child_may_take_what_its_parent_has(database):
    """It is another holder: it waits for its parent's slot, instead of being told that it has it."""
    body = """
        one = semaphore("one", slots=1, lease=4, timeout=0.3, using=args[0])
        permit = one.acquire()
        child = os.fork()
        if child == 0:
            from django_sqlsem import AcquireTimeoutError
            try:
                one.acquire()
            except AcquireTimeoutError:
                os._exit(0)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        permit.check()
        permit.release()
        say("done")
    """
    with Child(code_of(body), database) as parent:
        parent.expect("done")
    with semaphore("one", slots=1, timeout=5, using=database):
        pass


def test_a_lock_that_another_thread_had_at_the_fork(database):
    body = """
        from django_sqlsem.contrib import metrics
        from django_sqlsem.locks import permit, rwlock
        taken, done = threading.Event(), threading.Event()
        def keep():
            with permit._lock:
                taken.set()
                done.wait(60)
        with lock:
            pass
        thread = threading.Thread(target=keep)
        thread.start()
        taken.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            assert metrics.Labels().of_name("a") == "a"
            with rwlock("of the child", timeout=20, using=args[0]).upgradable() as permit:
                permit.upgrade()
                assert permit.upgraded
            os._exit(0)
        _, status = os.waitpid(child, 0)
        done.set()
        thread.join()
        assert status == 0, status
        say("done")
    """
    with Child(code_of(body), database) as parent:
        parent.expect("done", timeout=60)
    assert held_rows(database) == []


FORKED_IN_C = """
import ctypes, traceback
from tests.programs.contenders import SharedCounter

served = []

def run(counter, deadline):
    while time.monotonic() < deadline:
        with lock as permit:
            with counter.inside():
                time.sleep(0.01)
            permit.check()
            served.append(permit.token)

def work():
    failed = []
    threading.excepthook = lambda hook: failed.append(hook) or traceback.print_exception(hook.exc_value)
    with SharedCounter(args[0]) as counter:
        threads = [threading.Thread(target=run, args=(counter, time.monotonic() + 2)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return len(failed) if served else 98

lock = semaphore("forked", slots=2, timeout=None, using=args[0])
if args[1] == "used":
    with lock:
        pass
children = []
for _ in range(3):
    child = ctypes.PyDLL(None).fork()  # as uWSGI does, by default: no hook of Python's runs
    if child == 0:
        code = 99
        try:
            signal.alarm(60)
            code = work()
        finally:
            os._exit(code)
    children.append(child)
say(str([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
"""


@pytest.mark.parametrize("before", ["new", "used"])
def test_a_server_that_forks_its_workers_in_c(database, counter, before):
    """The workers are processes of their own, also if their master has used the library."""
    if before == "used" and applocks.are_at(database):
        pytest.skip("a thread of the master may be in the ODBC driver, whose locks such a fork leaves locked")
    with Child(code_of(FORKED_IN_C), database, before) as master:
        assert master.expect(timeout=90) == "[0, 0, 0]", master.stderr
    assert counter.peak == 2
    assert held_rows(database) == []
