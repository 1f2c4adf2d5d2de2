"""The tests' own tools: what they say about the library must be true."""

from __future__ import annotations

import contextlib
import time

import pytest
from django.db import connections

from django_sqlsem.backends.dialects import dialect_for
from django_sqlsem.models import SemaphoreRow, SlotRow
from tests import databases
from tests.processes import Child, is_alive, wait_for_end
from tests.testapp.models import Probe
from tests.threads import run_in_threads, wait_until

THREADS = 8
ROUNDS = 40


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
from tests.databases import OutsideCounter
from tests.threads import run_in_threads
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


def test_a_child_takes_its_own_children_along():
    with Child("import subprocess; say(subprocess.Popen(['sleep', '60']).pid); listen()\n") as child:
        grandchild = int(child.expect())
        child.kill()
        assert is_alive(grandchild)
    wait_for_end(grandchild)


def test_sessions_can_be_killed(database):
    if connections[database].vendor == "sqlite":
        assert databases.session_ids(database) == []
        return
    with contextlib.closing(databases.raw_connection(database)) as raw:
        assert len(databases.session_ids(database)) == 1
        assert databases.kill_sessions(database) == 1
        wait_until(lambda: not databases.session_ids(database))
        with pytest.raises(Exception, match=r"(?i)terminat|lost|gone|closed|kill|connection"):
            raw.cursor().execute("SELECT 1")


def test_a_childs_wall_clock_can_be_wrong(wrong_clock):
    code = (
        "import time; from django_sqlsem import clocks; say(f'{time.time()} {clocks.boot_now()} {time.monotonic()}')\n"
    )
    with Child(code, env=wrong_clock("+1d")) as child:
        wall, boot, monotonic = map(float, child.expect().split())
    from django_sqlsem import clocks

    assert 86_000 < wall - time.time() < 87_000
    assert abs(boot - clocks.boot_now()) < 60
    assert abs(monotonic - time.monotonic()) < 60


@pytest.mark.leaves_held
def test_a_held_slot_is_noticed(database):
    semaphore = SemaphoreRow.objects.using(database).create(key="0" * 32, name="left", declared_slots=1)
    with connections[database].cursor() as cursor:
        now = dialect_for(connections[database]).now(cursor)
    row = SlotRow.objects.using(database).create(semaphore=semaphore, slot=1, expires_us=now + 60_000_000, pid=7)
    with pytest.raises(AssertionError, match="still held: 'left' slot 1 by pid 7"):
        databases.assert_nothing_held(database, within=0.1)
    row.expires_us = now
    row.save()
    databases.assert_nothing_held(database, within=0.1)
