"""The stored procedures for programs without Django, called by plain sessions of the driver."""

from __future__ import annotations

import contextlib
import io
import random
import sys
import threading
import time

import pytest
from django.core.management import CommandError
from django.db import connections

from django_sqlsem import (
    AcquireTimeoutError,
    control,
    mutex,
    queries,
    semaphore,
)
from django_sqlsem.backends.applock import install
from django_sqlsem.core.names import resource_for
from django_sqlsem.database.sqlserver import lock_names
from django_sqlsem.locks import rwlock
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow
from django_sqlsem.snapshots import SlotState
from tests.backends.applock import counting_semaphore, procedures
from tests.backends.applock.plain import ALIAS, Request, Session, skip_unless_covered
from tests.backends.applock.procedures import Program
from tests.programs.lock_clients import Actor
from tests.support.databases import OutsideCounter, held_rows
from tests.support.operators import locks, make_semaphore
from tests.support.processes import Child
from tests.support.threads import run_beside, wait_until

skip_unless_covered()

NAME = "nightly"
#: Each has something that goes wrong if resources or keys are computed otherwise than in Python.
NAMES = [
    NAME,
    "12-x",
    "12x-",
    "-1",
    "7",
    "sqlsem:z",
    " b ",
    "Nightly",
    "größe",
    "名前",
    "x😀y",
    "ÿĀ߿ࠀ￿𐀀",
    "n" * 200,
    "a'b%c_d[e",
]
CHILD = "tests.backends.applock.procedures"
#: So long a gate is waited for before somebody looks past it, in seconds; and then twice as long.
LOOK = 5.0


@pytest.fixture(autouse=True)
def installed(committed):
    yield
    procedures.see_that_they_are_there()
    wait_until(lambda: held_rows(ALIAS) == [], timeout=5)


@pytest.fixture
def program():
    made = Program()
    procedures.warm_up(made)
    SemaphoreRow.objects.using(ALIAS).filter(name="warm").delete()
    yield made
    made.close()


@pytest.fixture
def another():
    made = Program()
    procedures.warm_up(made)
    SemaphoreRow.objects.using(ALIAS).filter(name="warm").delete()
    yield made
    made.close()


def holders(name=NAME):
    found = queries.semaphore(name, using=ALIAS)
    return found.holders if found else ()


def message(call, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever the driver raises
        call(*args)
    return str(caught.value)


# --- What they do ---


def test_a_slot_is_taken_shown_and_given_back(program):
    rc, slot, token, waited = program.acquire(NAME, 2, label="load the cube")
    assert (rc, slot, waited) == (0, 1, 0)
    (holder,) = holders()
    sql = "SELECT host_name, host_process_id, login_name FROM sys.dm_exec_sessions WHERE session_id = @@SPID"
    host, pid, login = program.rows(sql)[0]
    assert (holder.state, holder.slot, holder.token) == (SlotState.HELD, 1, token)
    assert (holder.host, holder.pid, holder.user) == (host, pid, login)
    assert (holder.label, holder.session_id) == ("load the cube", program.spid)
    assert holder.age < 60
    assert program.give(NAME) == 0
    assert holders() == ()
    assert program.give(NAME) == -1
    assert program.acquire(NAME)[2] > token
    assert program.give(NAME, 1) == 0


def test_the_short_form(program):
    """As in the documentation: the name alone, and the program's own name as the work."""
    program.do("SET NOCOUNT ON; EXEC sqlsem.acquire N'nightly';")
    (holder,) = holders()
    assert holder.label == program.value("SELECT APP_NAME()")
    assert SemaphoreRow.objects.using(ALIAS).get().declared_slots == 1
    assert program.give(NAME, 2) == -1
    assert len(holders()) == 1
    program.do("EXEC sqlsem.release N'nightly';")
    assert holders() == ()


def test_names_are_those_of_django(program, another):
    for name in NAMES:
        lock, mine = lock_names(name), semaphore(name, slots=2, timeout=0, using=ALIAS)
        assert program.acquire(name, 2)[:2] == (0, 1)
        assert program.mode(lock.slot(1)) == "Exclusive"
        assert program.mode(lock.base) == "IntentExclusive"
        row = SemaphoreRow.objects.using(ALIAS).get(name=name)
        assert (row.key, row.kind) == (resource_for(name, "semaphore").key, "semaphore")
        with mine as permit:
            assert permit.slot == 2
            shown = another.rows("EXEC sqlsem.status @name = ?", name)
            assert [(each[0], each[1], each[4]) for each in shown] == [(name, 1, "held"), (name, 2, "held")]
        # The gate is the same too.
        assert program.give(name) == 0
        assert program.get(lock.gate) == 0
        assert another.acquire(name, 2, timeout_ms=0)[0] == -1
        assert mine.try_acquire() is None
        assert program.release(lock.gate) == 0


def test_who_begins_to_wait_passes_nobody(program):
    """The first in line waits for another slot at this moment."""
    gate = lock_names(NAME).gate
    assert program.get(gate) == 0
    with pytest.raises(AcquireTimeoutError):
        semaphore(NAME, slots=2, timeout=1, using=ALIAS).acquire()
    assert program.release(gate) == 0


@contextlib.contextmanager
def waiting(program, **options):
    """Have a session wait for a slot, and be the first in line; yields a list that gets what it is answered."""
    got: list[tuple[object, ...]] = []

    def wait() -> None:
        got.append((*program.acquire(NAME, **options), time.monotonic()))

    thread = threading.Thread(target=wait)
    thread.start()
    observer = Session()
    try:
        wait_until(lambda: observer.test(lock_names(NAME).gate) == 0, timeout=20)
        yield got
        thread.join(30)
        assert got, "no answer"
    finally:
        observer.close()


def test_who_waits_is_granted_in_the_end(program, another):
    for timeout_ms in (20_000, None):
        program.acquire(NAME)
        with waiting(another, timeout_ms=timeout_ms) as got:
            program.give(NAME)
        rc, slot, token, waited, _at = got[0]
        assert (rc, slot) == (1, 1)
        assert token
        assert 0 < waited < 20_000
        assert another.mode(lock_names(NAME).gate) == "NoLock"
        another.give(NAME)


def test_the_end_of_the_time(program, another):
    program.acquire(NAME)
    assert another.acquire(NAME, timeout_ms=0)[:3] == (-1, None, None)
    began = time.monotonic()
    rc, slot, token, waited = another.acquire(NAME, timeout_ms=700)
    assert (rc, slot, token) == (-1, None, None)
    assert 0.6 < time.monotonic() - began < 3
    assert waited >= 600
    names = lock_names(NAME)
    assert {another.mode(each) for each in (names.gate, names.base, names.slot(1))} == {"NoLock"}
    program.give(NAME)


def test_the_number_of_slots(program, another):
    """As declared elsewhere, else 1; an operator's governs; a disagreement is shown."""
    assert program.acquire(NAME, 3)[0] == 0
    assert another.acquire(NAME)[:2] == (0, 2)
    another.give(NAME)
    control.set_slots(NAME, 1, by="ops", using=ALIAS)
    assert another.acquire(NAME, 3, timeout_ms=0)[0] == -1
    control.set_slots(NAME, 2, by="ops", using=ALIAS)
    assert another.acquire(NAME, 1, timeout_ms=0)[0] == 0
    another.give(NAME)
    row = SemaphoreRow.objects.using(ALIAS).get()
    assert (row.declared_slots, row.other_slots) == (1, 3)
    program.give(NAME)


def test_who_goes_by_fewer_slots_has_a_gate_of_its_own(program, another):
    """So it keeps the others from no slot but its own."""
    gate, narrow, third, fourth = lock_names(NAME).gate, f"{lock_names(NAME).gate}:1", Program(), Program()
    program.acquire(NAME, 1)
    with waiting(another, slots=1) as got:
        assert third.acquire(NAME, 3, timeout_ms=0)[:2] == (0, 2)
        wait_until(lambda: third.test(narrow) == 0 and third.test(gate) == 1)
        assert fourth.acquire(NAME, 3)[:2] == (0, 3)
        program.give(NAME)
    assert got[0][:2] == (1, 1)
    wait_until(lambda: third.test(narrow) == 1)
    for each in (another, third, fourth):
        each.give(NAME)
    # A cancelled call may have left it closed.
    for again in (lambda: another.acquire(NAME, 1)[0], lambda: another.give(NAME) + 1):
        another.get(narrow)
        assert again() == 0
        another.give(NAME)
        assert third.test(narrow) == 1


def test_after_a_shrink_nothing_is_granted_until_fewer_are_held(program, another):
    third = Program()
    program.acquire(NAME, 3)
    another.acquire(NAME, 3)
    control.set_slots(NAME, 1, by="ops", using=ALIAS)
    with waiting(third) as got:
        program.give(NAME)  # slot 1, while slot 2 is still held
        time.sleep(1)
        assert got == []
        another.give(NAME)
    assert got[0][:2] == (1, 1)
    third.give(NAME)
    third.close()


def test_a_pause_is_told_at_once(program):
    make_semaphore(ALIAS, NAME, paused=True)
    assert program.acquire(NAME, timeout_ms=5000)[:2] == (-4, None)
    control.resume(NAME, by="ops", using=ALIAS)
    assert program.acquire(NAME)[0] == 0
    program.give(NAME)


def test_status(program, another):
    make_semaphore(ALIAS, "other", slots=1)
    program.acquire(NAME, 3, label="a")
    stale = SlotRow.objects.using(ALIAS).filter(semaphore__name=NAME, slot=3)
    stale.update(expires_us=1, acquired_us=1, permit_id="x", label="dead")
    another.get(lock_names(NAME).slot(2))
    rows = another.rows("EXEC sqlsem.status N'nightly'")
    assert [(each[1], each[2], each[4], each[7]) for each in rows] == [
        (1, 3, "held", "a"), (2, 3, "held", "another program"), (3, 3, "stale", "dead"),
    ]  # fmt: skip
    first = dict(zip(COLUMNS, rows[0], strict=True))
    assert (first["session_id"], first["paused"]) == (program.spid, False)
    assert 0 <= first["held_ms"] < 60_000
    assert first["since"].year > 2020
    rows = another.rows("EXEC sqlsem.status")
    assert [(each[0], each[4]) for each in rows] == [(NAME, "held"), (NAME, "held"), (NAME, "stale"), ("other", "free")]
    another.release(lock_names(NAME).slot(2))
    program.give(NAME)


COLUMNS = (
    "name",
    "slot",
    "slots",
    "paused",
    "state",
    "host",
    "pid",
    "label",
    "user",
    "session_id",
    "since",
    "held_ms",
    "token",
)


# --- Misuse ---


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("NULL", "@name must have 1 to 200 characters, not NULL"),
        ("N''", "@name must have 1 to 200 characters, not 0"),
        (f"N'{'x' * 201}'", f"@name must have 1 to 200 characters, not 201: {'x' * 40}"),
        (f"N'{'名' * 201}'", f"@name must have 1 to 200 characters, not 201: {'名' * 40}"),
        ("N'nightly', @slots = 0", "@slots is 0: it must be from 1 to 10000"),
        ("N'nightly', @slots = 10001", "@slots is 10001: it must be from 1 to 10000"),
        ("N'nightly', @take = NULL", "@take is NULL: it must be from 1 to @slots"),
        ("N'nightly', @timeout_ms = -1", "@timeout_ms is -1: it must be 0 or more, or NULL"),
    ],
)
def test_arguments_that_make_no_sense(program, arguments, told):
    assert told in message(program.do, f"EXEC sqlsem.acquire {arguments};")
    assert program.caught(f"EXEC sqlsem.acquire {arguments};") == 59301
    assert not SemaphoreRow.objects.using(ALIAS).exists()


@pytest.mark.parametrize("slot", [0, -1, 10_001])
def test_slots_that_cannot_be(program, slot):
    """With slot 0 a release would let go of the name, and not of the slots."""
    program.acquire(NAME, 2)
    for procedure in ("release", "prove"):
        call = f"EXEC sqlsem.{procedure} N'nightly', @slot = {slot};"
        assert f"@slot is {slot}: it must be from 1 to 10000" in message(program.do, call)
        assert program.caught(call) == 59301
    assert program.prove(NAME, 1) == (0, None)
    program.give(NAME)


def test_a_session_that_has_it_already(program):
    program.acquire(NAME, 2)
    assert "You have acquired this semaphore already" in message(program.acquire, NAME, 2)
    assert program.caught("EXEC sqlsem.acquire N'nightly';") == 59303
    assert len(holders()) == 1
    assert program.give(NAME) == 0


def test_locks_of_other_kinds(program):
    make_semaphore(ALIAS, NAME, slots=1, kind="rlock")
    assert "another kind, rlock" in message(program.acquire, NAME, 1)
    assert program.caught("EXEC sqlsem.acquire N'nightly', @slots = 2;") == 59302
    assert program.mode(lock_names(NAME).base) == "NoLock"


def test_a_mutex_is_alone_among_programs_too(program, another):
    lock = mutex(NAME, timeout=0, using=ALIAS)
    with lock as permit:
        permit.detach()
        assert (queries.semaphore(NAME, using=ALIAS).kind, holders()[0].mode) == ("mutex", "mutex")
        assert program.acquire(NAME, 3, timeout_ms=0)[0] == -1
        assert program.mode(lock_names(NAME).base) == "NoLock"
    assert [each.acquire(NAME, 3)[:2] for each in (program, another)] == [(0, 1), (0, 2)]
    assert queries.semaphore(NAME, using=ALIAS).kind == "semaphore"
    assert lock.try_acquire() is None
    program.give(NAME)
    assert lock.try_acquire() is None
    another.give(NAME)
    lock.acquire().release()


def test_a_gate_that_a_cancelled_call_has_left_closed(program, another):
    program.get(lock_names(NAME).gate)
    assert program.acquire(NAME)[0] == 0
    assert another.test(lock_names(NAME).gate) == 1
    program.get(lock_names(NAME).gate)
    assert program.give(NAME) == 0
    assert another.test(lock_names(NAME).gate) == 1


def test_the_victim_of_a_deadlock(program, another):
    names = lock_names(NAME)
    program.get("outside")
    for resource in (names.gate, names.slot(1)):
        another.get(resource)
    with contextlib.suppress(Exception):  # a stand-in may not know it, and chooses who comes last
        another.do("SET DEADLOCK_PRIORITY HIGH")
    request = Request(another, "outside").queued(program)
    time.sleep(2)
    assert program.acquire(NAME, 1)[:3] == (-3, None, None)
    assert program.mode("outside") == "Exclusive"
    assert program.mode(names.base) == "NoLock"
    assert not request.done
    program.release("outside")
    assert request.result() == 1
    for resource in (names.gate, names.slot(1)):
        another.release(resource)


# --- Transactions ---


def test_inside_a_transaction_of_the_callers(program):
    """The lock stands whatever becomes of the transaction; nothing is written, so that nobody is blocked by rows."""
    make_semaphore(ALIAS, NAME, slots=2)
    program.do("BEGIN TRANSACTION")
    rc, slot, token, _waited = program.acquire(NAME)
    assert (rc, slot, token) == (0, 1, None)
    with semaphore(NAME, slots=2, timeout=0, using=ALIAS) as permit:
        assert permit.slot == 2
    program.do("ROLLBACK")
    assert program.mode(lock_names(NAME).slot(1)) == "Exclusive"
    assert program.give(NAME) == 0
    program.do("BEGIN TRANSACTION")
    assert program.acquire("other", 1)[:2] == (0, 1)  # a name without rows stays so
    assert program.give("other") == 0
    program.do("COMMIT")
    assert not SemaphoreRow.objects.using(ALIAS).filter(name="other").exists()


def test_implicit_transactions_stay_out_of_it(program):
    program.do("SET IMPLICIT_TRANSACTIONS ON")
    assert program.acquire(NAME)[2] is not None
    (holder,) = holders()  # nothing blocks the reader
    assert holder.session_id == program.spid
    assert program.value("SELECT @@TRANCOUNT") == 0
    assert program.give(NAME) == 0
    assert holders() == ()
    program.do("SET IMPLICIT_TRANSACTIONS OFF")


# --- With other processes ---


# The second one works for longer, so that three are in at once on a slow machine too.
@pytest.mark.parametrize("old", [2, 0], ids=["and the old procedures", "in one line"])
def test_programs_of_all_kinds_share_three_slots(old):
    """Callers, Django's processes, and sessions that run the well-known procedures, which keep to no line."""
    counting_semaphore.create(ALIAS)
    seconds, work = 8.0, 0.005 if old else 0.1
    functions = ["call_procedures"] * 3 + ["call_the_old_ones"] * old + ["use_django"] * 3
    with contextlib.ExitStack() as stack, OutsideCounter(ALIAS, NAME) as counter:
        children = [stack.enter_context(Child(f"{CHILD}:{function}", NAME, 3, seconds, work)) for function in functions]
        for child in children:
            child.expect("ready", 60)
        for child in children:
            child.send()
        times = [int(child.expect("done", seconds + 40)) for child in children]
        print(list(zip(functions, times, strict=True)))
        assert (counter.current, counter.peak) == (0, 3)
        assert min(times) > 0
        assert counter.entered == sum(times)


def test_first_come_first_served(program):
    """Callers and Django's waiters stand in one line."""

    def works(session):
        rows = program.rows("SELECT status FROM sys.dm_exec_sessions WHERE session_id = ?", session)
        return bool(rows) and rows[0][0].strip().lower() in ("running", "active")  # a stand-in's word is the second

    program.acquire(NAME, 1)
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(Child(f"{CHILD}:queue_up", NAME)) for _ in range(3)]
        actors = [stack.enter_context(Actor(ALIAS, NAME, slots=1)) for _ in range(2)]
        sessions = {caller: int(caller.expect("ready", 60)) for caller in callers}
        for actor in actors:
            assert actor.ready().acquire(2) is None  # the first wait of a process is slow
        for number, each in enumerate((callers[0], actors[0], callers[1], actors[1], callers[2])):
            if isinstance(each, Actor):
                each.ask_for()
                wanted = number // 2 + 1
                wait_until(lambda wanted=wanted: WaiterRow.objects.using(ALIAS).count() >= wanted, timeout=30)
            else:
                each.send()
                wait_until(lambda one=sessions[each]: works(one))
            time.sleep(0.5)  # from there it is not far to the gate
        program.give(NAME)
        for caller, actor in zip(callers, [*actors, None], strict=True):
            caller.expect("held", 20)
            later = callers[callers.index(caller) + 1 :]
            for other in later:
                other.silent(0.1)
            caller.send()
            if actor is not None:
                actor.granted()
                for other in later:
                    other.silent(0.1)
                actor.release()
        for actor in actors:
            actor.end()
        for caller in callers:
            caller.finish()


def test_the_slot_of_a_killed_caller_is_free_at_once(program):
    with Child(f"{CHILD}:hold", NAME, 1) as child:
        child.expect("held 1", 30)
        with pytest.raises(AcquireTimeoutError, match="job"):
            semaphore(NAME, slots=1, timeout=0, using=ALIAS).acquire()
        with waiting(program, slots=1) as got:
            time.sleep(0.3)
            began = time.monotonic()
            child.kill()
        print(f"kill -9 of a caller to the next grant: {got[0][-1] - began:.3f} s")
        assert got[0][-1] - began < 2
        assert got[0][:2] == (1, 1)
    (holder,) = holders()
    assert (holder.session_id, holder.state) == (program.spid, SlotState.HELD)
    assert program.give(NAME) == 0


def test_a_head_that_has_stopped_is_granted_the_slot_like_anybody_else(program, another):
    """The whole wait is one call, with which the server goes on: the process is a holder that has stopped."""
    names = lock_names(NAME)
    program.acquire(NAME, 1)
    with Actor(ALIAS, NAME, slots=1) as head:
        head.ready().ask_for()
        wait_until(lambda: program.test(names.gate) == 0)
        with waiting(another) as got:
            head.stop()
            program.give(NAME)
            wait_until(lambda: [holder.pid for holder in holders()] == [head.pid])
            time.sleep(1)
            assert got == []
            head.cont()
            head.granted()
            head.release()
        assert got[0][:2] == (1, 1)
        another.give(NAME)
        head.end()


def test_a_head_that_has_stopped_is_passed_once_it_is_killed(program, another):
    names = lock_names(NAME)
    program.acquire(NAME, 1)
    with Actor(ALIAS, NAME, slots=1) as head:
        head.ready().ask_for()
        wait_until(lambda: program.test(names.gate) == 0)
        with waiting(another) as got:
            head.stop()
            time.sleep(0.5)
            began = time.monotonic()
            head.kill()
            program.give(NAME)
        assert got[0][:2] == (1, 1)
        print(f"kill -9 of a stopped head to the next grant: {got[0][-1] - began:.3f} s")
        assert got[0][-1] - began < 3
        another.give(NAME)


# --- Several slots ---


def test_all_that_are_wanted_or_none(program, another):
    names = lock_names(NAME)
    assert program.take(NAME, 5, 3) == (0, (1, 2, 3))
    assert [program.mode(names.slot(nth)) for nth in range(1, 6)] == ["Exclusive"] * 3 + ["NoLock"] * 2
    assert len({holder.token for holder in holders()}) == 1
    assert another.take(NAME, 5, 3, timeout_ms=0) == (-1, ())
    assert another.take(NAME, 5, 3, timeout_ms=300) == (-1, ())
    assert {another.mode(each) for each in (names.gate, names.base, *map(names.slot, range(1, 6)))} == {"NoLock"}
    assert another.take(NAME, 5, 2) == (0, (4, 5))
    assert program.give(NAME) == 0
    assert [(holder.slot, holder.session_id) for holder in holders()] == [(4, another.spid), (5, another.spid)]
    assert another.give(NAME, 5) == 0
    assert [holder.slot for holder in holders()] == [4]
    assert another.give(NAME) == 0
    assert program.caught("EXEC sqlsem.acquire N'nightly', @slots = 5, @take = 6;") == 59301
    assert program.caught("EXEC sqlsem.acquire N'nightly', @slots = 5, @take = 0;") == 59301
    control.set_slots(NAME, 2, by="ops", using=ALIAS)
    assert program.take(NAME, 5, 3) == (-5, ())
    assert program.mode(names.base) == "NoLock"


def test_who_takes_several_and_who_takes_one_share_five_slots():
    """Neither is starved, and never are more than five taken."""
    seconds = 8.0
    with contextlib.ExitStack() as stack, OutsideCounter(ALIAS, NAME) as counter:
        team = [("take_several", (NAME, 5, 3, seconds, 0.05))] * 2
        team += [("call_procedures", (NAME, 5, seconds, 0.05))] * 2 + [("use_django", (NAME, 5, seconds, 0.05))] * 2
        children = [stack.enter_context(Child(f"{CHILD}:{function}", *given)) for function, given in team]
        for child in children:
            child.expect("ready", 60)
        for child in children:
            child.send()
        times = [int(child.expect("done", seconds + 40)) for child in children]
        print(list(zip([function for function, _given in team], times, strict=True)))
        assert counter.current == 0
        assert counter.peak <= 5
        assert min(times) > 0
        assert counter.entered == 3 * sum(times[:2]) + sum(times[2:])


# --- Calls that are cancelled ---


def left_of(session, name=NAME, slots=3):
    """Return what a session has of a name."""
    names = lock_names(name)
    resources = {"gate": names.gate, "name": names.base} | {nth: names.slot(nth) for nth in range(slots + 1)}
    return {what for what, resource in resources.items() if session.mode(resource) != "NoLock"}


def test_what_a_cancelled_call_has_left_goes_with_the_next_release(program, another):
    """Cancelled anywhere in its wait: no ``CATCH`` runs, and the locks that it had by then stay with its session."""
    draw, found = random.Random(7), []
    program.acquire(NAME, 3)
    for nth in range(12):
        with another.cancelled_after(draw.randint(1, 700)):
            another.take(NAME, 3, 3, timeout_ms=2000)
        found.append(left_of(another))
        if nth % 3 == 2:
            # Another call finds that out as well.
            assert another.caught("EXEC sqlsem.acquire N'nightly', @slots = 3;") in (0, 59303)
        assert another.give(NAME) in (0, -1)
        assert left_of(another) == set()
        assert program.test(lock_names(NAME).gate) == 1
        assert another.value("SELECT @@TRANCOUNT") == 0
    print(found)
    assert {"gate", "name", 2, 3} in found, "none of them was the first in line"
    assert left_of(program) == {"name", 1}
    assert [holder.session_id for holder in holders()] == [program.spid]
    assert another.take(NAME, 3, 2) == (0, (2, 3))
    another.give(NAME)
    program.give(NAME)


def test_what_a_cancelled_call_had_for_a_moment_goes_too(program):
    """Fences that it waited behind, and the lock that tells whether the name is deleted."""
    digits = resource_for(NAME, "semaphore").key[:20]
    moments = [f"sqlsem:f:{digits}", *(f"sqlsem:f:{digits}:{slot}" for slot in (0, 1, 2)), f"sqlsem:d:{digits}"]
    make_semaphore(ALIAS, NAME, slots=2)
    for each in moments:
        program.do(f"EXEC sp_getapplock N'{each}', 'Exclusive', 'Session', 0, 'public';")
    program.give(NAME)
    modes = [program.value(f"SELECT APPLOCK_MODE(N'public', N'{each}', N'Session')") for each in moments]
    assert modes == ["NoLock"] * len(moments)


def test_a_session_whose_wait_was_cancelled_goes_on_with_the_next_acquire(program, another):
    program.acquire(NAME, 1)
    cancel_the_first_in_line(another, 1)
    assert left_of(another) == {"gate", "name"}
    assert "a call that was cancelled has: call sqlsem.release" in message(another.acquire, NAME, 1)
    another.release(lock_names(NAME).base)
    program.give(NAME)
    assert another.acquire(NAME, 1)[:2] == (0, 1)  # it was the first in line, and still is
    assert left_of(another) == {"name", 1}
    another.give(NAME)


def cancel_the_first_in_line(session, slots):
    """Have a call be cancelled that waits for any of these slots, on a session that does nothing more."""
    for _ in range(10):
        with session.cancelled_after(600):
            session.acquire(NAME, slots, timeout_ms=2000)
        if "gate" in left_of(session):
            return
    raise AssertionError("it never was the first in line")


def close_a_gate(program, another, slots):
    """Leave a gate closed, and all slots free."""
    program.take(NAME, slots, slots)
    cancel_the_first_in_line(another, slots)
    program.give(NAME)


def test_nobody_waits_for_ever_behind_a_call_that_was_cancelled(program, another):
    """Where nothing at all was granted for a while, those behind the gate look past it, callers and Django alike."""
    third = Program()
    procedures.warm_up(third)
    close_a_gate(program, another, 2)
    began = time.monotonic()
    rc, slot, _token, waited = third.acquire(NAME, 2)
    assert (rc, slot) == (1, 1)
    assert 1000 * LOOK <= waited < 1000 * (LOOK + 3)
    with Actor(ALIAS, NAME, slots=2) as actor:
        actor.ready().ask_for()
        assert actor.granted(timeout=3 * LOOK)[0] == [2]
        print(f"past a cancelled call: {waited} ms, and Django {time.monotonic() - began:.1f} s later")
        actor.release()
        third.give(NAME)
        assert another.give(NAME) == -1  # it had no slot, and has no gate any more
        assert left_of(another) == set()
        assert third.acquire(NAME, 2)[0] == 0
        third.give(NAME)
        actor.end()
    third.close()


def test_a_name_that_a_cancelled_call_has_left_ends_with_its_session(program, another):
    """A session that goes away frees whatever it has."""
    close_a_gate(program, another, 1)
    with waiting(program, slots=1) as got:
        another.close()
    assert got[0][:2] == (1, 1)
    program.give(NAME)


# --- Also as a row, and asking ---


def test_answers_as_a_row(program):
    """For drivers that read no output parameters."""
    row = program.rows("EXEC sqlsem.acquire @name = N'nightly', @slots = 3, @take = 2, @answer = 1")[0]
    assert (row[0], row[1], row[2], row[4]) == (0, 1, ",1,2,", 0)
    assert [holder.token for holder in holders()] == [row[3]] * 2
    assert program.rows("EXEC sqlsem.prove @name = N'nightly', @slot = 2, @answer = 1") == [(0, None)]
    assert program.rows("EXEC sqlsem.release @name = N'nightly', @answer = 1")[0][0] == 2
    assert program.rows("EXEC sqlsem.release @name = N'nightly', @answer = 1")[0][0] == 0


def test_a_session_can_prove_that_it_has_a_slot_and_hear_who_asks_it_to_stop(program, another):
    program.acquire(NAME, 2)
    assert program.prove(NAME, 1) == (0, None)
    assert program.prove(NAME, 2) == (-1, None)
    assert another.prove(NAME, 1) == (-1, None)
    control.request_stop(NAME, 1, by="ann", using=ALIAS)
    assert program.prove(NAME, 1) == (0, "ann")
    assert another.prove(NAME, 1) == (-1, None)
    program.give(NAME)
    assert program.prove(NAME, 1) == (-1, None)
    program.acquire(NAME, 2)
    assert program.prove(NAME, 1) == (0, None)  # the next grant is nobody's business
    program.give(NAME)


# --- The command ---


def printed(capsys, *arguments):
    locks("sql", *arguments)
    return str(capsys.readouterr().out)


def names_of_procedures():
    session = Session()
    try:
        sql = "SELECT name FROM sys.objects WHERE schema_id = SCHEMA_ID(N'sqlsem') AND type = 'P' ORDER BY name"
        return [str(row[0]) for row in session.rows(sql)]
    finally:
        session.close()


def test_the_command_prints_a_script_that_installs(capsys, program):
    script = printed(capsys, "--database", ALIAS)
    printed(capsys, "--drop", "--noinput", "--database", ALIAS)
    assert names_of_procedures() == []
    for batch in script.split("\nGO\n"):
        if batch.strip():
            program.do(batch)
    assert program.acquire(NAME)[0] == 0
    program.give(NAME)
    assert "--   GRANT EXECUTE ON SCHEMA::sqlsem TO" in script


def test_the_command_installs_and_removes_again_and_again(capsys, monkeypatch, program):
    drop = ("--drop", "--database", ALIAS)
    assert printed(capsys, *drop, "--noinput").splitlines()[-1] == "Removed."
    assert printed(capsys, *drop, "--no-input").splitlines()[-1] == "Removed."
    assert program.value("SELECT SCHEMA_ID(N'sqlsem')") is None
    for _ in range(2):
        out = printed(capsys, "--apply", "--noinput", "--database", ALIAS)
        assert out.splitlines() == [
            "To be installed in the database: sqlsem.acquire, sqlsem.prove, sqlsem.release, sqlsem.status,"
            " sqlsem.version, and what Django itself uses.",
            "Installed.",
        ]
        assert {"acquire", "release", "status"} < set(names_of_procedures())
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(CommandError, match="no terminal to ask"):
        locks("sql", *drop)
    assert names_of_procedures()


def test_what_is_not_ours_stays_in_the_schema(capsys, program):
    program.do("CREATE PROCEDURE sqlsem.mine AS RETURN 0;")
    printed(capsys, "--drop", "--noinput", "--database", ALIAS)
    assert names_of_procedures() == ["mine"]
    program.do("DROP PROCEDURE sqlsem.mine")


def test_other_databases_have_none():
    with pytest.raises(CommandError, match="SQL Server"):
        locks("sql", "--database", "default")


# --- Names that are deleted ---


@pytest.mark.parametrize("kind", ["semaphore", "mutex", "reader", "writer"])
def test_who_is_refused_by_a_deletion_that_is_given_up_is_served(kind):
    """It has found the name in use, and has let go of it by the time at which the refused call looks for it."""
    lock = {
        "semaphore": semaphore(NAME, 2, using=ALIAS),
        "mutex": mutex(NAME, using=ALIAS),
        "reader": rwlock(NAME, using=ALIAS).read(),
        "writer": rwlock(NAME, using=ALIAS).write(),
    }[kind]
    lock.acquire(timeout=20).release()  # so that there are rows
    names = lock_names(NAME)
    held_up = "\n".join(
        f"EXEC sys.sp_{act}applock @Resource = N'{resource}', @LockOwner = 'Session'{more};"
        for act, resource, more in (
            ("get", "arrived", ", @LockMode = 'Exclusive'"),
            ("get", "go on", ", @LockMode = 'Exclusive', @LockTimeout = 20000"),
            ("release", "go on", ""),
            ("release", "arrived", ""),
        )
    )

    def claim():
        with contextlib.suppress(AcquireTimeoutError), lock.acquire(timeout=0):
            return True

    with (
        contextlib.closing(Session()) as deleter,
        contextlib.closing(Session()) as usher,
        procedures.changed("internal_gone_1", by=held_up),
    ):
        install.install(connections[ALIAS])
        for resource in (names.deletion, names.gate, names.base):
            assert deleter.get(resource) == 0
        assert usher.get("go on") == 0
        claimed = run_beside(claim)
        wait_until(lambda: usher.test("arrived") == 0)
        deleter.close()
        wait_until(lambda: usher.test(names.base) == 1)
        usher.close()
        assert claimed.result(30)
