"""Application locks for long, by many processes, beside others' procedures and beside processes that stop or die."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time

import pytest

from benchmarks.stats import Turn, jain, longest_wait, most_overtaken
from django_sqlsem import queries, semaphore
from django_sqlsem.backends.applock.sessions import LockSession
from django_sqlsem.database.sqlserver import lock_names
from tests.backends.applock import counting_semaphore
from tests.backends.applock.plain import ALIAS, Session, free, skip_unless_covered
from tests.programs.lock_clients import Actor
from tests.support.children import listen, say
from tests.support.databases import OutsideCounter, held_rows, kill_sessions, session_ids
from tests.support.processes import Child
from tests.support.threads import wait_until

skip_unless_covered()
pytestmark = [
    pytest.mark.soak,
]

PROCESSES, SLOTS = 8, 3
SECONDS = float(os.environ.get("SOAK_SECONDS", "20"))
#: How long one stays inside, in seconds.
WORK = 0.005
#: From 1 ms to 3 s, each process its own.
HOLDS = [round(0.001 * 3000 ** (each / (PROCESSES - 1)), 4) for each in range(PROCESSES)]
#: How long processes fight before they are watched, in seconds: a login takes long.
WARM_UP = 6.0
#: As long as any login takes, in seconds: a process waits on a session of its own.
LOGIN = 3.0
#: For the machine, in seconds.
MARGIN = 0.5
#: How often a process proves that its sessions stand, in seconds.
HEARTBEAT = 2.0


# What child processes run.


def run(use, name, hold):
    """Warm up, then use the lock from one instant to another, both named by the parent, and tell all turns.

    A turn is told as (asked, in line or null, granted, released), by the clock that all processes share.
    """
    say("ready")
    end, turns = float(listen()), []
    while time.monotonic() < end:  # the warm-up
        use(lambda: time.sleep(WORK))
    say("warm")
    start, end = map(float, listen().split())
    with OutsideCounter(ALIAS, name) as counter:
        counter.current  # noqa: B018 - connects
        time.sleep(max(0.0, start - time.monotonic()))

        def work():
            with counter.inside():
                time.sleep(hold)

        while time.monotonic() < end:
            turns.append(use(work))
    say("turns " + json.dumps(turns))


def ours(name, slots, hold):
    """Use it through the library."""
    shared = semaphore(name, slots=slots, timeout=None, using=ALIAS)
    lined_up = []
    call = LockSession.run

    def noting(session, called, values, *, waits=False):
        if waits and "timeout" in called.parameters:
            lined_up.append(time.monotonic())
        return call(session, called, values, waits=waits)

    LockSession.run = noting

    def use(work):
        lined_up.clear()
        asked = time.monotonic()
        with shared as permit:
            granted, place = time.monotonic(), lined_up[0] if lined_up else None
            work()
            permit.check()
            released = time.monotonic()
        return asked, place, granted, released

    run(use, name, hold)


def theirs(name, slots, hold):
    """Use it through the procedures that spin."""
    caller = counting_semaphore.Caller(ALIAS)

    def use(work):
        asked = time.monotonic()
        slot = caller.acquire(name, slots)
        granted = time.monotonic()
        work()
        released = time.monotonic()
        caller.release(name, slot)
        return asked, None, granted, released

    run(use, name, hold)
    caller.close()


# What the tests do with them.


def fight(users, holds, record):
    """Have processes fight for three slots. Returns each one's turns, the counter's peak, and when it ended."""
    name = "soak"
    env = {"SQLSEM_TEST_SETTINGS": json.dumps({"RECORD": record})}
    with contextlib.ExitStack() as stack:
        counter = stack.enter_context(OutsideCounter(ALIAS, name))
        team = [
            stack.enter_context(Child(f"tests.backends.applock.test_soak:{user}", name, SLOTS, hold, env=env))
            for user, hold in zip(users, holds, strict=True)
        ]
        for child in team:
            child.expect("ready", timeout=60)
        for child in team:
            child.send(str(time.monotonic() + WARM_UP))
        for child in team:
            child.expect("warm", timeout=WARM_UP + 60)
        start = time.monotonic() + 3  # the counters connect
        for child in team:
            child.send(f"{start} {start + SECONDS}")
        found = [json.loads(child.expect("turns", timeout=SECONDS + 90)) for child in team]
        for child in team:
            child.finish()
            assert "Traceback" not in child.stderr, child.stderr
        assert counter.current == 0
        assert counter.entered == sum(map(len, found))
        return found, counter.peak, start


def tell(label, found, start, peak):
    """Print the figures, and return the turns."""
    turns = [
        Turn(who, asked, granted, released) for who, its in enumerate(found) for asked, _, granted, released in its
    ]
    end = start + SECONDS
    each = "/".join(str(len(its)) for its in found)
    print(
        f"\n{label}: peak {peak}, {len(turns) / SECONDS:.0f} grants/s, per process {each}, Jain"
        f" {jain([len(its) for its in found]):.3f}, longest wait {longest_wait(turns, end):.3f} s,"
        f" most overtaken {most_overtaken(turns, end)}"
    )
    return turns


def overtaken(found):
    """Return by how many later arrivals a process that waited was overtaken, at the most.

    A process is in line from the moment at which it sends the call that queues on the gate; what it does before, it
    tries without waiting. A later arrival is a call of ``acquire()``, by any process, that begins after that moment; it
    overtakes if it returns before the call that was in line does. Both instants are taken outside of the server's
    work, by one clock, in the processes themselves; so a process that the machine does not let run after its grant
    counts as overtaken by all who get the others' slots meanwhile.
    """
    calls = [(asked, granted) for its in found for asked, _, granted, _ in its]
    lines = [(place, granted) for its in found for _, place, granted, _ in its if place is not None]
    assert lines, "nobody waited"
    return max(sum(place < asked and done < granted for asked, done in calls) for place, granted in lines)


@pytest.fixture
def database(committed):
    yield ALIAS
    assert held_rows(ALIAS) == []


@pytest.fixture
def observer(database):
    with contextlib.closing(Session()) as session:
        yield session


@pytest.fixture(params=[True, False], ids=["recorded", "unrecorded"])
def record(request):
    return request.param


def test_eight_processes_on_three_slots(database, record):
    found, peak, start = fight(["ours"] * PROCESSES, [WORK] * PROCESSES, record)
    tell("ours", found, start, peak)
    assert peak == SLOTS
    assert all(found)


def test_half_of_them_call_the_procedures_that_spin(database, record):
    counting_semaphore.create(ALIAS)
    found, peak, start = fight(["ours", "theirs"] * (PROCESSES // 2), [WORK] * PROCESSES, record)
    tell("ours and procedures in turn", found, start, peak)
    assert peak == SLOTS
    assert all(found)


def test_nobody_is_overtaken_by_more_than_there_are_slots(database, record):
    found, peak, start = fight(["ours"] * PROCESSES, HOLDS, record)
    tell("holds of 1 ms to 3 s", found, start, peak)
    worst = overtaken(found)
    print(f"overtaken by {worst} later arrivals at the most")
    assert peak == SLOTS
    assert worst <= SLOTS


def in_line(name, count, observer, record):
    """Wait until so many wait. Without rows, all that is seen is that somebody does."""
    if record:
        wait_until(lambda: queries.semaphore(name, using=ALIAS).waiting == count, timeout=30, what=f"{count} waiters")
    else:
        wait_until(lambda: not free(lock_names(name).gate, observer)(), timeout=30, what="a waiter")
        time.sleep(LOGIN)


def actors(stack, name, count, slots, record):
    """Return processes that have used the name before, so that they are connected."""
    env = {"SQLSEM_TEST_SETTINGS": json.dumps({"RECORD": record})}
    team = [stack.enter_context(Actor(ALIAS, name, env=env, slots=slots, announce=True)) for _ in range(count)]
    for actor in team:
        actor.ready().acquire()
        actor.release()
    return team


def test_a_stopped_head_of_the_queue_gets_one_slot_and_stalls_nobody_for_the_others(observer, record):
    """The server goes on with its wait: it is a holder that has stopped, until it goes on or is killed."""
    with contextlib.ExitStack() as stack:
        one, two, head, *others = team = actors(stack, "stalled", 5, 2, record)
        for actor in (one, two):
            actor.acquire()
        for count, actor in enumerate([head, *others], 1):
            actor.ask_for()
            in_line("stalled", count, observer, record)
        time.sleep(LOGIN)
        head.stop()
        one.release()
        waits, giver = [], two
        for actor in others:
            began = time.monotonic()
            giver.release()
            actor.granted(timeout=30)
            waits.append(time.monotonic() - began)
            giver = actor
        print(f"\nnext grants {', '.join(f'{wait:.2f}' for wait in waits)} s after a release")
        names = lock_names("stalled")
        assert [free(names.slot(slot), observer)() for slot in (1, 2)] == [False, False]
        head.cont()
        head.granted()
        head.release()
        giver.release()
        for actor in team:
            actor.end()
        assert max(waits) <= 2 * MARGIN


def test_a_stopped_head_of_the_queue_is_killed_and_the_next_one_granted(observer, record):
    with contextlib.ExitStack() as stack:
        holder, head, last = actors(stack, "granted", 3, 1, record)
        holder.acquire()
        for count, actor in enumerate([head, last], 1):
            actor.ask_for()
            in_line("granted", count, observer, record)
        time.sleep(LOGIN)
        head.stop()
        holder.release()
        last.silent(1)
        began = time.monotonic()
        head.kill()
        last.granted(timeout=30)
        wait = time.monotonic() - began
        print(f"\nnext grant {wait:.2f} s after a kill -9 of the one that had stopped")
        last.release()
        for actor in (holder, last):
            actor.end()
        assert wait <= 2 * MARGIN


def test_kill_9_of_a_holder_to_the_next_grant(observer, record):
    with contextlib.ExitStack() as stack:
        holder, *waiters = actors(stack, "killed", 6, 1, record)
        holder.acquire()
        for count, actor in enumerate(waiters, 1):
            actor.ask_for()
            in_line("killed", count, observer, record)
        waits = []
        for waiter in waiters:
            killed = time.monotonic()
            holder.kill()
            waiter.granted(timeout=30)
            waits.append(time.monotonic() - killed)
            holder = waiter
            time.sleep(0.5)
        print(f"\nnext grants {', '.join(f'{1000 * wait:.0f}' for wait in waits)} ms after a kill -9")
        holder.release()
        holder.end()
        assert sorted(waits)[len(waits) // 2] <= 0.2


def test_kill_of_a_holders_session_is_told_within_one_heartbeat(database, record):
    delays = []
    for _ in range(3):
        before = set(session_ids(ALIAS))
        with contextlib.ExitStack() as stack:
            (actor,) = actors(stack, "cut", 1, 1, record)
            actor.acquire()
            time.sleep(random.uniform(0, HEARTBEAT))  # anywhere between two proofs
            sessions = sorted(set(session_ids(ALIAS)) - before)
            assert sessions
            killed = time.monotonic()
            kill_sessions(ALIAS, sessions)
            actor.expect("on_lost", timeout=30)
            delays.append(time.monotonic() - killed)
            assert actor.check() is not None
            actor.release()
            actor.end()
    print(f"\nlost {', '.join(f'{delay:.2f}' for delay in delays)} s after a KILL")
    assert max(delays) <= HEARTBEAT + MARGIN
