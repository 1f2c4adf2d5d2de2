"""What gunicorn does to its workers while their views hold and wait: forks, time-outs, reloads, recycling."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable

import pytest

from tests.places.site import PATIENCE, Site, wait_for_waiters
from tests.support.databases import OutsideCounter, assert_nothing_held, held_rows
from tests.support.processes import is_alive, wait_for_end
from tests.support.threads import run_in_threads, wait_until

#: The lease is 60 s: a slot that comes back after so many seconds at most has not merely run out.
SOON = 25.0
#: Workers are forked from one that has loaded the project, so that they are not aborted while they do so.
ABORTED = ("--preload", "--timeout", "5")


def test_the_parent_holds_and_its_workers_disturb_nothing(alias: str) -> None:
    lease = 6.0
    with Site("preload", alias, env={"SQLSEM_TEST_BEFORE_FORK": "1"}, sqlsem={"LEASE": lease}) as running:
        (parents,) = held_rows(alias)
        assert parents.pid == running.process.pid
        wait_until(lambda: len(running.workers()) == 2, what="the workers")
        with OutsideCounter(alias, "places") as counter:
            # Every worker has used the library, and one of them is killed.
            pids = set()
            while len(pids) < 2:
                assert running.get("/two?id=child&go=1").status == 200
                pids.add(running.marks.text("in-child").split()[0])
            os.kill(int(pids.pop()), signal.SIGKILL)
            wait_until(lambda: len(running.workers()) == 2, timeout=PATIENCE, what="a new worker")
            expires = parents.expires_us
            wait_until(lambda: held_rows(alias)[0].expires_us > expires + lease * 1e6, what="renewals for a lease")
            with running.call("/two?id=second") as second:  # the one slot that the parent has left
                running.marks.wait("in-second")
                with running.call("/two?id=third&go=1") as third:
                    wait_for_waiters(alias, "two", 1)
                    assert not running.marks.is_set("in-third")
                    running.marks.set("go-second")
                    assert second.answer().status == third.answer().status == 200
            assert counter.peak == 1
        (still,) = held_rows(alias)
        assert (still.token, still.pid) == (parents.token, parents.pid)
        running.stop()
        assert_nothing_held(alias, within=SOON)
        assert not running.logged("[django_sqlsem"), running.log()


def test_a_worker_that_gunicorn_aborts_keeps_no_slot(alias: str) -> None:
    with Site("sync", alias, "-w", "1", *ABORTED) as running:
        with running.call("/patient?id=holds"):
            running.marks.wait("in-holds")
            wait_for_end(int(running.marks.text("in-holds").split()[0]), timeout=PATIENCE)
        assert_nothing_held(alias, within=SOON)
        assert running.get("/at-once?id=next&go=1").text == "done next"
        assert running.logged("WORKER TIMEOUT")


def test_a_waiting_worker_that_gunicorn_aborts_leaves_its_place(site: Callable[..., Site], alias: str) -> None:
    holding = site("sync")
    with Site("sync", alias, "-w", "1", *ABORTED) as running:
        with holding.call("/patient?id=holds") as holder:
            holding.marks.wait("in-holds")
            with running.call("/for-ever?id=waits&go=1"):
                wait_for_waiters(alias, "one", 1)
                wait_for_waiters(alias, "one", 0)
            assert len(held_rows(alias)) == 1
            holding.marks.set("go-holds")
            assert holder.answer().status == 200
        assert running.logged("WORKER TIMEOUT")
        assert not running.marks.is_set("in-waits")


@pytest.mark.parametrize("kind", ["gthread", pytest.param("sync", marks=pytest.mark.soak)])
def test_a_reload_lets_the_holder_finish(kind: str, alias: str) -> None:
    with Site(kind, alias, "--graceful-timeout", "100") as running, OutsideCounter(alias, "places") as counter:
        old = set(running.workers())
        with running.call("/patient?id=before") as before:
            running.marks.wait("in-before")
            holder = int(running.marks.text("in-before").split()[0])
            running.process.send_signal(signal.SIGHUP)
            others = [pid for pid in old if pid != holder]
            wait_until(lambda: not any(map(is_alive, others)), timeout=PATIENCE, what="the old workers' end")
            with running.call("/patient?id=after&go=1") as after:
                wait_for_waiters(alias, "one", 1)
                assert not running.marks.is_set("in-after")
                assert is_alive(holder)
                running.marks.set("go-before")
                assert before.answer().text == "done before"
                assert after.answer().text == "done after"
        wait_for_end(holder, timeout=PATIENCE)
        assert int(running.marks.text("in-after").split()[0]) not in old
        assert (counter.entered, counter.peak, counter.current) == (2, 1, 0)


@pytest.mark.parametrize("kind", ["sync", pytest.param("gthread", marks=pytest.mark.soak)])
def test_workers_that_are_recycled_under_load(kind: str, alias: str) -> None:
    with Site(kind, alias, "-w", "3", "--preload", "--max-requests", "4") as running:

        def visit(index: int) -> list[str]:
            for turn in range(3):
                answer = running.get(f"/two?id=recycled-{index}-{turn}&go=1")
                assert answer.status == 200, answer.text
            return [running.marks.text(f"in-recycled-{index}-{turn}").split()[0] for turn in range(3)]

        with OutsideCounter(alias, "places") as counter:
            pids = itertools.chain.from_iterable(run_in_threads(8, visit, timeout=2 * PATIENCE))
            assert (counter.entered, counter.current) == (24, 0)
            assert counter.peak <= 2
        assert len({*pids, *map(str, running.workers())}) > 3
        assert running.logged("Autorestarting worker")
        wait_for_waiters(alias, "two", 0, timeout=SOON)
        assert_nothing_held(alias, within=SOON)
