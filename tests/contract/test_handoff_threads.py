"""Several threads of one process wait, and what befalls one of them strikes between the keeper's statements."""

from __future__ import annotations

import time

import pytest

from django_sqlsem.models import SlotRow, WaiterRow
from tests.programs.queue_clients import Queuer
from tests.support.databases import held_rows
from tests.support.threads import wait_until

pytestmark = pytest.mark.rows_only("row statements")

#: See ``test_handoff``.
HEARTBEAT = 20.0


@pytest.fixture
def process(database):
    with Queuer(database, "threads", slots=2) as process:
        yield process.ready()


def queue_up(process, timeout):
    """``first`` has given up, ``a`` is the first in line by now, and ``b`` comes next.

    The keeper is held up as it takes back the place of ``first``: whatever it knows of ``a`` will be old.
    """
    process.do("joining")
    process.ask("a", timeout=timeout)
    process.reached()  # it is in the queue, and its process does not know
    process.ask("first", timeout=1.5)
    process.do("queued", 1)
    process.gate("before", "UPDATE sqlsem_waiter SET expires_us", "heartbeat")
    process.reached()
    process.word("first", "busy")
    process.tell("open", "joining")
    process.do("queued", 1)
    process.ask("b")
    process.do("queued", 2)
    assert process.do("order") == ["a", "b"]
    process.gate("before", "DELETE FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND ticket", "leave")
    process.tell("open", "heartbeat")
    process.reached()


def test_the_first_thread_gives_up_while_the_keeper_is_busy(database, counter, process):
    process.takes("x", take=2)
    queue_up(process, 4)
    process.word("a", "busy")
    process.tell("open", "leave")
    wait_until(lambda: WaiterRow.objects.using(database).count() == 1, timeout=HEARTBEAT)
    released = process.release("x")
    assert process.held("b")["at"] - released < HEARTBEAT
    process.release("b")
    assert counter.peak == 2
    wait_until(lambda: not WaiterRow.objects.using(database).exists(), timeout=HEARTBEAT)
    process.end()


def test_the_first_thread_is_served_while_the_keeper_is_busy(database, counter, process):
    """It has a slot, and must not stay in the queue: the next grant in its name would be taken back with its own."""
    with Queuer(database, "threads", slots=2) as other:
        other.ready()
        other.takes("y")
        process.takes("x")
        queue_up(process, 20)
        process.release("x")  # handed over inside the process, without a word of the keeper's
        mine = process.held("a")
        process.tell("open", "leave")
        time.sleep(0.3)
        assert WaiterRow.objects.using(database).count() == 1  # ``b`` alone
        released = other.release("y")
        assert process.held("b")["at"] - released < HEARTBEAT
        time.sleep(0.3)  # whatever is still to be taken back
        [row] = SlotRow.objects.using(database).filter(semaphore__name="threads", slot=mine["slots"][0])
        assert row.token == mine["tokens"][0]
        assert len(held_rows(database)) == 2
        other.ask("z", timeout=0)
        other.word("z", "busy")
        for who in "ab":
            assert process.check(who) == "ours"
            process.release(who)
        other.end()
    assert counter.peak == 2
    process.end()
