"""Greenlets in place of threads: Celery's gevent pool and gunicorn's gevent workers work, eventlet is refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_sqlsem import queries, semaphore
from django_sqlsem.testing import held
from tests.places.celery_workers import Broker, Worker, alias, lines, name, of, path, peak
from tests.support.databases import ROOT, OutsideCounter, assert_nothing_held, child_environment, held_rows, session_ids
from tests.support.threads import run_in_threads, wait_until

__all__ = ["alias", "name", "path"]  # fixtures


@pytest.fixture(scope="module")
def worker(alias: str) -> Iterator[Worker]:
    """A worker of fifty greenlets."""
    with Broker("redis") as broker, Worker(broker, pool="gevent", concurrency=50) as worker:
        yield worker.ready()
        worker.stop()


def waiting(name: str) -> int:
    found = queries.semaphore(name)
    return found.waiting if found else 0


def test_greenlets_wait_in_line_and_others_go_on_meanwhile(worker, name, path, alias):
    before = set(session_ids(alias))
    with held(name, total=1) as [permit]:
        results = [worker.broker.send("patient", path, name, f"{nth}", 0.05) for nth in range(20)]
        wait_until(lambda: waiting(name) == 20, timeout=90, what="twenty greenlets wait")
        assert worker.broker.send("pid").get(timeout=30) == worker.pid  # the hub is free
        assert len([row for row in queries.waits(alias) if row.name == name]) <= 20
        # The library's own two, and each greenlet's Django connection, if its task used one.
        assert len(set(session_ids(alias)) - before) <= 6
        permit.release()
        assert sorted(int(result.get(timeout=90)) for result in results) == list(range(20))
    assert peak(path) == 1
    assert len({line["thread"] for line in of(path, "begin")}) > 1


def test_a_waiting_greenlet_is_woken_every_time(worker, name, path):
    for nth in range(3):
        with held(name, total=1) as [permit]:
            result = worker.broker.send("patient", path, name, f"{nth}")
            wait_until(lambda: waiting(name) == 1, timeout=60, what="it waits")
            permit.release()
            assert result.get(timeout=30) == f"{nth}"


def test_never_more_than_slots_among_greenlets(worker, name, path):
    results = [worker.broker.send("two", path, name, f"{nth}", 0.1) for nth in range(12)]
    for result in results:
        result.get(timeout=150)
    assert len(of(path, "begin")) == 12
    assert 1 <= peak(path) <= 2


def test_a_greenlet_that_is_killed_gives_its_slot_and_its_place_back(worker, name, path, alias):
    result = worker.broker.send("work", path, name, "slow", 60)
    wait_until(lambda: of(path, "begin"), timeout=60, what="it holds")
    waits = worker.broker.send("patient", path, name)
    wait_until(lambda: waiting(name) == 1, timeout=60, what="it waits")
    worker.broker.app.control.revoke(waits.id, terminate=True)  # under gevent no result tells of it
    wait_until(lambda: waiting(name) == 0, what="nobody waits")
    worker.broker.app.control.revoke(result.id, terminate=True)
    wait_until(lambda: not held_rows(alias), what="nobody holds")
    assert worker.broker.send("work", path, name).get(timeout=60) == "work"


@pytest.mark.soak
def test_a_killed_worker_s_slots_come_back(alias, name, path):
    with Broker("redis") as broker:
        with Worker(broker, pool="gevent") as worker:
            worker.ready()
            broker.send("work", path, name, "slow", 600)
            wait_until(lambda: of(path, "begin"), timeout=60, what="it holds")
            worker.process.kill()
            worker.wait()
        with semaphore(name, timeout=45):  # a lease is 60 s
            pass


@pytest.mark.soak
def test_a_greenlet_that_keeps_the_processor_loses_its_permit_and_is_told(alias, name, path, settings):
    settings.SQLSEM = {"DATABASE": alias, "LEASE": 6, "BEACONS": False}
    with Broker("redis") as broker, Worker(broker, pool="gevent") as worker:
        worker.ready()
        result = broker.send("spin", path, name, 12)
        wait_until(lambda: of(path, "begin"), timeout=60, what="it holds")
        with semaphore(name, timeout=30):  # once its lease has run out
            assert of(path, "end") == []
        assert result.get(timeout=60) == "spun"
        wait_until(lambda: "was lost" in worker.log, timeout=30, what="it is told")
        worker.stop()


@pytest.mark.soak
def test_gunicorn_s_gevent_worker(alias, committed_counter):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "gunicorn", "--worker-class=gevent", "--workers=1", "--timeout=90"]
    env = child_environment(DJANGO_SETTINGS_MODULE="tests.places.gevent_settings")

    def get(what: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{what}", timeout=90) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""

    with tempfile.TemporaryFile() as log:
        site = subprocess.Popen(
            [*command, f"--bind=127.0.0.1:{port}", "tests.places.gevent_site"],
            cwd=ROOT,
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait_until(lambda: _answers(port), timeout=90, what="gunicorn answers")
            (pid,) = {int(get("alive")[1])}

            def visit(nth: int) -> tuple[int, str]:
                if nth < 12:
                    return get("hold?seconds=0.5")
                wait_until(lambda: waiting("gevent-site") >= 1, timeout=60, what="somebody waits")
                return get("refused" if nth == 12 else "alive")

            *visits, refused, alive = run_in_threads(14, visit, timeout=150)
            assert {status for status, _ in visits} == {200}
            assert {body.split()[0] for _, body in visits} == {f"{pid}"}
            assert len({body for _, body in visits}) > 1
            assert (refused[0], alive) == (503, (200, f"{pid}"))
            assert committed_counter.entered == 12
            assert committed_counter.peak == 2
            site.send_signal(signal.SIGTERM)
            assert site.wait(60) == 0
        finally:
            if site.poll() is None:
                os.killpg(site.pid, signal.SIGKILL)
                site.wait(60)
    assert_nothing_held(alias)


@pytest.fixture
def committed_counter(alias: str) -> Iterator[OutsideCounter]:
    with OutsideCounter(alias, "gevent-site") as counter:
        yield counter


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# What is refused, and what is said of it.


@pytest.mark.soak
def test_a_task_in_an_eventlet_pool_fails_with_words_that_say_why(alias, name, path):
    with Broker("redis") as broker, Worker(broker, pool="eventlet") as worker:
        worker.ready()
        with pytest.raises(ImproperlyConfigured, match="can't be taken under eventlet"):
            broker.send("work", path, name).get(timeout=60)
    assert lines(path) == []


_PATCHED = """
import {library}
{patch}
import django
django.setup()
from django_sqlsem import semaphore
try:
    with semaphore("patched", using={alias!r}):
        say("held")
except Exception as error:
    say(f"{{type(error).__name__}} {{error}}")
from django.core import checks
say(" ".join(sorted(each.id for each in checks.run_checks() if each.id in ("sqlsem.E008", "sqlsem.W017"))) or "none")
"""


def told_by(program: str) -> list[str]:
    """Run a program of its own, and return what it says."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"def say(line): print(line, flush=True)\n{program}"],
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


_TIMED_OUT = """
import gevent.monkey
gevent.monkey.patch_all()
import gevent, threading, django
django.setup()
from django_sqlsem import semaphore

def keepers():
    return [thread for thread in threading.enumerate() if "keeper" in thread.name]

with semaphore("kept", using={alias!r}):
    while not keepers():
        gevent.sleep(0.01)
    before = keepers()
    for nth in range(20):
        acquiring = gevent.spawn(semaphore(f"timed out {{nth}}", using={alias!r}).acquire)
        gevent.get_hub().loop.run_callback(lambda: acquiring.throw(gevent.Timeout(0)))
        acquiring.join()
    semaphore("another", using={alias!r}).acquire().release()
    say(keepers() == before)
"""

_FORKED = """
import gevent.monkey
gevent.monkey.patch_all()
import gevent, logging, os, sys, django
django.setup()
from django_sqlsem import semaphore
logging.getLogger("django_sqlsem").addHandler(logging.StreamHandler(sys.stdout))
with semaphore("held", using={alias!r}):
    waits = gevent.spawn(semaphore("held", using={alias!r}).try_acquire, timeout=1)
    gevent.sleep(0.3)
    child = os.fork()
    if not child:
        gevent.sleep(2)
        with semaphore("the child's", using={alias!r}):
            say("held by the child")
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_timeout_at_the_first_switch_starts_no_second_keeper(alias):
    """An acquire switches greenlets first where it asks whether the keeper's runs."""
    assert told_by(_TIMED_OUT.format(alias=alias)) == ["True"]


def test_a_keepers_greenlet_ends_in_a_forked_child(alias):
    """Threads do not survive a fork, and greenlets do: it would fail over and over on what is the parent's."""
    assert told_by(_FORKED.format(alias=alias)) == ["held by the child"]


@pytest.mark.parametrize(
    ("library", "patch", "said", "checks"),
    [
        pytest.param("gevent.monkey", "gevent.monkey.patch_all()", "held", "none", marks=pytest.mark.soak),
        pytest.param(
            "gevent.monkey",
            "gevent.monkey.patch_socket()",
            "ImproperlyConfigured Locks can't be taken here: gevent has patched only a part",
            "sqlsem.E008",
            marks=pytest.mark.soak,
        ),
        ("eventlet", "eventlet.monkey_patch()", "ImproperlyConfigured Locks can't be taken under ev", "sqlsem.E008"),
    ],
)
def test_patched_interpreters(alias, library, patch, said, checks):
    told = told_by(_PATCHED.format(library=library, patch=patch, alias=alias))
    assert len(told) == 2
    assert told[0].startswith(said)
    assert told[1] == checks
