"""Processes that end in an orderly way: they leave nothing held and no place in a queue, whatever they were doing."""

from __future__ import annotations

import multiprocessing
import re
import textwrap
import threading
import time
from typing import Any

import django
import pytest
from django.apps import apps
from django.db import connections

from django_sqlsem import Permit, semaphore
from tests.support.children import listen, say
from tests.support.databases import held_rows, query
from tests.support.processes import Child
from tests.support.threads import wait_until

pytestmark = pytest.mark.process_side

BEGIN = """
import multiprocessing, os, sys, threading, time
from django_sqlsem import semaphore
lock = semaphore("ended", slots=2, timeout=None, using=args[0])
"""

HOLDING = {
    "a detached permit": """
        kept = lock.acquire()
        kept.detach()
        say("held")
        listen()
    """,
    "sys.exit with a permit": """
        kept = lock.acquire()
        say("held")
        listen()
        sys.exit(0)
    """,
    "a daemon thread in a block": """
        def run():
            with lock:
                say("held")
                time.sleep(3600)
        threading.Thread(target=run, daemon=True).start()
        listen()
    """,
    "a thread that ends after the main thread": """
        def run():
            kept.append(lock.acquire())
            kept[0].detach()
            taken.set()
            say("held")
            listen()
        kept, taken = [], threading.Event()
        threading.Thread(target=run).start()
        taken.wait()  # CPython 3.12.1 starts no thread, as the keeper's, when the main one has ended
    """,
    "an event loop's last task": """
        import asyncio
        async def main():
            kept.append(await lock.aacquire())
            say("held")
            await asyncio.to_thread(listen)
        kept = []
        asyncio.run(main())
    """,
}


def code_of(body):
    return BEGIN + textwrap.dedent(body)


def waiter_rows(database):
    return query(database, "SELECT COUNT(*) FROM sqlsem_waiter")[0][0]


@pytest.mark.parametrize("how", HOLDING)
def test_nothing_stays_held_by_a_process_that_ends(database, how):
    with Child(code_of(HOLDING[how]), database) as child:
        child.expect("held")
        assert [row.pid for row in held_rows(database)] == [child.pid]
        child.send("end")
        child.finish()
        assert held_rows(database) == []
        assert "Traceback" not in child.stderr


STUCK = """
    from django.db import connections
    from django_sqlsem.database import errors
    errors.LOCKED_PATIENCE = 2.0
    kept = [semaphore(f"ended {nth}", using=args[0]).acquire() for nth in range(16)]

    def write():
        with connections[args[0]].cursor() as cursor:
            cursor.execute("BEGIN IMMEDIATE")
        say("writing")
        time.sleep(3600)
    threading.Thread(target=write, daemon=True).start()
    listen()
"""


def test_what_cannot_be_given_back_to_sqlite_is_soon_free(database):
    """Its own writer keeps it out: it does not try for each of its permits, and is found dead as after a kill."""
    if connections[database].vendor != "sqlite":
        pytest.skip("others have more than one writer")
    with Child(code_of(STUCK), database) as child:
        child.expect("writing")
        started = time.monotonic()
        child.send("end")
        child.finish()
        assert time.monotonic() - started < 25  # each try takes two seconds
    assert len(held_rows(database)) == 16
    for nth in range(16):
        with semaphore(f"ended {nth}", using=database, timeout=15):
            pass


def test_nothing_stays_held_after_an_uncaught_error(database):
    with Child(code_of('kept = lock.acquire(); say("held"); listen(); raise ZeroDivisionError'), database) as child:
        child.expect("held")
        child.send()
        assert child.wait() == 1
        assert held_rows(database) == []


WAITING = """
    def run():
        say("waiting")
        lock.acquire()
        say("held")
    threading.Thread(target=run, daemon=True).start()
    listen()
"""
WAITING_TASK = """
    import asyncio
    async def main():
        say("waiting")
        task = asyncio.create_task(lock.aacquire())
        await asyncio.to_thread(listen)
    asyncio.run(main())
"""


@pytest.mark.parametrize("code", [WAITING, WAITING_TASK], ids=["daemon thread", "task"])
def test_no_place_in_the_queue_stays(database, code):
    lock = semaphore("ended", slots=2, using=database)
    permits = [lock.acquire()]
    permits[0].detach()
    permits.append(lock.acquire())
    with Child(code_of(code), database) as child:
        child.expect("waiting")
        from django_sqlsem import queries  # it needs the models, and spawned children import this module before them

        wait_until(lambda: queries.semaphore("ended", using=database).waiting == 1)
        child.send()
        child.finish()
        assert waiter_rows(database) == 0
        assert "held" not in child.lines
        assert "Traceback" not in child.stderr
    for permit in permits:
        permit.release()


UNANSWERED = """
    from django_sqlsem.backends.rows.backend import RowsBackend
    enrol = RowsBackend.enrol
    def enrol_and_dawdle(*args, **kwargs):
        enrol(*args, **kwargs)
        say("asked")
        time.sleep(3600)
    RowsBackend.enrol = enrol_and_dawdle
    threading.Thread(target=lock.acquire, daemon=True).start()
    listen()
"""


@pytest.mark.parametrize("others", [0, 2], ids=["granted", "in line"])
@pytest.mark.rows_only("row statements")
def test_nothing_stays_of_a_claim_whose_thread_has_not_heard_what_came_of_it(database, others):
    permits = []
    for _ in range(others):
        permits.append(semaphore("ended", slots=2, using=database).acquire())
        permits[-1].detach()
    with Child(code_of(UNANSWERED), database) as child:
        child.expect("asked")
        held = [row.pid for row in held_rows(database)]
        assert (held.count(child.pid), waiter_rows(database)) == ((0, 1) if others else (1, 0))
        child.send()
        child.finish()
        assert waiter_rows(database) == 0
        assert child.pid not in [row.pid for row in held_rows(database)]
    for permit in permits:
        permit.release()


class SetUpOnArrival:
    """Sets Django up when a spawned process reads its arguments: before multiprocessing has started there."""

    def __reduce__(self) -> Any:
        return django.setup, ()


def hold_in_child(alias: str, event: Any, arrived: object) -> None:
    """Hold, in a process of multiprocessing, a permit that outlives the function."""
    _set_up(arrived)
    _kept.append(semaphore("ended", slots=2, timeout=None, using=alias).acquire())
    say("held")
    event.wait()


def hold_in_daemon_thread_of_child(alias: str, event: Any, arrived: object) -> None:
    """Hold, in a daemon thread of a process of multiprocessing."""
    _set_up(arrived)

    def run() -> None:
        with semaphore("ended", slots=2, timeout=None, using=alias):
            say("held")
            time.sleep(3600)

    threading.Thread(target=run, daemon=True).start()
    event.wait()


def _set_up(arrived: object) -> None:
    if not apps.ready:  # not forked from a process that was set up
        assert arrived != "before the fork"
        django.setup()


_kept: list[Permit] = []


def start_child(alias: str, method: str, function: str, parent_holds: bool, set_up: str) -> None:
    """Run one of the two above in a child of this process, and tell when it has ended."""
    permit = semaphore("ended", slots=2, using=alias).acquire() if parent_holds else None
    context: Any = multiprocessing.get_context(method)
    if set_up == "before the fork":
        context.set_forkserver_preload(["tests.places.wsgi"])
    event = context.Event()
    arriving = SetUpOnArrival() if set_up == "on arrival" else set_up
    process = context.Process(target=globals()[function], args=(alias, event, arriving))
    process.start()
    listen()
    event.set()
    process.join(20)
    say(f"ended {process.exitcode}")
    listen()
    if permit is not None:
        permit.check()
        permit.release()


CASES = {
    "fork": ("fork", "hold_in_child", False, ""),
    "fork, a daemon thread, while the parent holds": ("fork", "hold_in_daemon_thread_of_child", True, ""),
    "spawn, while the parent holds": ("spawn", "hold_in_child", True, ""),
    "spawn, set up early, a daemon thread": ("spawn", "hold_in_daemon_thread_of_child", False, "on arrival"),
    # How CPython 3.14 starts a process on Linux unless told otherwise.
    "forkserver, while the parent holds": ("forkserver", "hold_in_child", True, ""),
    "forkserver, preloaded, a daemon thread": (
        "forkserver",
        "hold_in_daemon_thread_of_child",
        False,
        "before the fork",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_stays_held_by_a_child_of_multiprocessing(database, case):
    parent_holds = CASES[case][2]
    with Child("tests.contract.test_process_ends:start_child", database, *CASES[case]) as parent:
        parent.expect("held", timeout=30)
        parents = [parent.pid] if parent_holds else []
        assert len(held_rows(database)) == 1 + len(parents)
        parent.send()
        parent.expect("ended 0")
        assert [row.pid for row in held_rows(database)] == parents
        parent.send()
        parent.finish()
        assert "Traceback" not in parent.stderr


def test_nothing_is_left_unclosed_by_a_process_that_has_rung_another():
    """Nor by one in which many threads ring for the first time at once."""
    body = """
        import threading
        from django_sqlsem.database import bells
        heard = bells.Bell("of a test")
        ready = threading.Barrier(8)
        def ring():
            ready.wait()
            assert bells.ring(heard.channel, "x")
        threads = [threading.Thread(target=ring) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert heard.heard() == ["x"] * 8
        heard.close()
        say("rung")
    """
    with Child(textwrap.dedent(body), env={"PYTHONWARNINGS": "always::ResourceWarning"}, forked=False) as child:
        child.expect("rung")
        child.finish()
        assert "ResourceWarning" not in child.stderr


SHORT_OF_MEMORY = """
from django_sqlsem.core.threads import DaemonThread
DaemonThread._bootstrap = lambda thread: None  # as a thread ends that has no memory to begin with
try:
    lock.acquire()
except RuntimeError as error:
    say(error)
del DaemonThread._bootstrap
with lock:
    say("held")
    listen()
"""


def test_a_thread_that_ends_before_it_begins_is_not_waited_for(database):
    """Python's own start would wait for ever: https://github.com/python/cpython/issues/140746."""
    with Child(BEGIN + SHORT_OF_MEMORY, database) as child:
        assert re.fullmatch(r"can't start new thread: 'sqlsem-\S+' did not begin, as memory is short", child.expect())
        child.expect("held")
        assert [row.pid for row in held_rows(database)] == [child.pid]
        child.send()
        child.finish()
        assert held_rows(database) == []
