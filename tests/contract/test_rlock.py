"""Monitors: re-entrant in one thread or task, one lock for everybody else, and given back by the last one out."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import threading
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connections, transaction

from django_sqlsem import (
    AlreadyHeldError,
    NotEnteredError,
    PermitLostError,
    control,
    mutex,
)
from django_sqlsem.locks import RLock, rlock
from tests.support import applocks, databases
from tests.support.databases import OutsideCounter, held_rows
from tests.support.interruptions import SoftLimit, Striking, StrikingAwait, without_tracer
from tests.support.processes import Child
from tests.support.threads import run_beside, run_in_threads, wait_until

pytestmark = pytest.mark.process_side

#: The keeper and other processes may be slow to get a turn, in seconds.
PATIENT = 30.0

#: Another process: tries, enters and leaves when it is told to.
OTHER = """
from django_sqlsem.locks import rlock
lock, held = rlock(args[1], timeout=60, using=args[0]), []
say("ready")
while (order := listen()) != "end":
    if order == "try":
        permit = lock.try_acquire()
        if permit is not None:
            permit.release()
        say("refused" if permit is None else f"got {permit.token}")
    elif order == "enter":
        lock.enter()
        say(f"in {lock.depth()}")
    elif order == "exit":
        lock.exit()
        say(f"out {lock.depth()}")
"""


def other(database: str, name: str) -> Child:
    return Child(OTHER, database, name)


def ask(child: Child, order: str) -> str:
    child.send(order)
    return child.expect(timeout=PATIENT)


@pytest.mark.process_side("postgres")
def test_the_articles_two_windows(database):
    """Its two procedures' scenario, from two processes: enter, print, and the second window waits for the exit."""
    with other(database, "Code 1") as first, other(database, "Code 1") as second:
        first.expect("ready", timeout=PATIENT)
        second.expect("ready", timeout=PATIENT)
        assert ask(first, "enter") == "in 1"
        assert ask(first, "enter") == "in 2"
        second.send("enter")
        status = rlock("Code 1", using=database).status
        wait_until(lambda: status().waiting == 1, timeout=PATIENT)
        assert ask(first, "exit") == "out 1"
        assert (status().held, status().waiting) == (1, 1)  # one exit for two entries is not enough
        assert ask(first, "exit") == "out 0"
        second.expect("in 1", timeout=PATIENT)
        assert ask(first, "try") == "refused"
        assert ask(second, "exit") == "out 0"
        assert ask(first, "try").startswith("got ")


@pytest.mark.process_side("postgres")
def test_all_entries_share_one_grant_and_the_last_one_out_gives_it_back(database):
    """In any order of leaving, by any mixture of forms, and without a statement for the inner ones."""
    lock = rlock("m", using=database)
    with other(database, "m") as stranger:
        stranger.expect("ready", timeout=PATIENT)
        outer = lock.acquire()
        work = outer._acquisition.keeper.work
        before = work.attempts
        inner = rlock("m", using=database).try_acquire()  # any object of this name
        with lock as third:
            lock.enter(timeout=0)
            assert lock.depth() == 4
            assert (outer.depth, inner.depth, third.depth) == (1, 2, 3)
            assert {permit.token for permit in (outer, inner, third)} == {outer.token}
            assert inner.waited == 0.0
            lock.exit()
        assert work.attempts == before
        assert lock.depth() == 2
        outer.release()
        assert outer.released
        assert not inner.released
        with pytest.raises(PermitLostError, match="released already"):
            outer.check()
        outer.release()  # idempotent: it cannot take the inner one's place away
        inner.check()
        assert ask(stranger, "try") == "refused"
        assert lock.status().held == 1
        inner.release()
        assert lock.depth() == 0
        assert ask(stranger, "try").startswith("got ")


CROWD = """
import threading
from django_sqlsem.locks import rlock
from tests.support.databases import OutsideCounter
from tests.support.threads import run_in_threads

alias, rounds = args
lock = rlock("crowd", timeout=120, using=alias)

@lock
def dig(depth, work):
    if depth:
        dig(depth - 1, work)
    else:
        work()

with OutsideCounter(alias) as counter:
    def body(number):
        for _ in range(rounds):
            with lock, counter.inside():
                dig(3, lambda: lock.acquire().release())
    say("ready")
    listen()
    run_in_threads(3, body, timeout=150)
say("done")
"""


@pytest.mark.process_side("postgres")
def test_one_thread_of_all_processes_is_inside(database, counter):
    rounds = 8
    children = [Child(CROWD, database, rounds) for _ in range(2)]
    try:
        for child in children:
            child.expect("ready", timeout=PATIENT)
        for child in children:
            child.send()
        for child in children:
            child.expect("done", timeout=150)
    finally:
        for child in children:
            child.close()
    assert (counter.peak, counter.entered, counter.current) == (1, 2 * 3 * rounds, 0)


@pytest.mark.one_server("beacons")
@pytest.mark.process_side("postgres")
def test_a_killed_process_leaves_however_deep_it_was(database):
    with other(database, "deep") as victim, other(database, "deep") as heir:
        victim.expect("ready", timeout=PATIENT)
        heir.expect("ready", timeout=PATIENT)
        for depth in (1, 2, 3):
            assert ask(victim, "enter") == f"in {depth}"
        heir.send("enter")
        status = rlock("deep", using=database).status
        wait_until(lambda: status().waiting == 1, timeout=PATIENT)
        victim.kill()
        heir.expect("in 1", timeout=PATIENT)
        assert ask(heir, "exit") == "out 0"


def test_a_task_is_inside_where_its_threads_are_and_its_child_tasks_are_not(database):
    lock = rlock("m", timeout=0, using=database)

    def in_a_thread(depth: int) -> int:
        with lock as permit:
            assert lock.depth() == permit.depth == depth
        return permit.token

    async def child_task() -> Any:
        assert lock.depth() == 0
        return await lock.atry_acquire()

    async def side_by_side() -> list[Any]:
        """Two threads work for one task at once: that is not one inside the other."""
        barrier = threading.Barrier(2, timeout=PATIENT)

        def body() -> str:
            try:
                with lock:
                    barrier.wait()
                    return "in"
            except AlreadyHeldError:
                barrier.wait()  # while the other one is inside
                return "refused"

        work = sync_to_async(body, thread_sensitive=False)
        return sorted(await asyncio.gather(work(), work()))

    async def main() -> None:
        async with lock as permit:
            assert await sync_to_async(in_a_thread)(2) == permit.token
            assert await asyncio.to_thread(in_a_thread, 2) == permit.token
            async with lock, await lock.aacquire():
                assert await sync_to_async(in_a_thread)(4) == permit.token
            assert await asyncio.create_task(child_task()) is None
            assert await side_by_side() == ["in", "refused"]
            await lock.aenter()
            await lock.aexit()
            assert lock.depth() == 1
            permit.check()
        assert lock.depth() == 0
        with pytest.raises(NotEnteredError):
            await lock.aexit()
        assert (await asyncio.create_task(child_task())).detach() is None  # free by then

    async def and_give_back() -> None:
        await main()
        gc.collect()  # the last task's permit, which nobody kept

    asyncio.run(and_give_back())
    wait_until(lambda: lock.status().held == 0, timeout=PATIENT)


def test_whoever_is_not_inside_cannot_leave(database):
    """The article's MonitorExit swallows every error, so that a missing enter, or a second exit, goes unnoticed."""
    lock = rlock("m", timeout=0, using=database)
    with pytest.raises(NotEnteredError, match="No open block of 'm' to leave"):
        lock.exit()
    permit = lock.enter()

    def stranger(_number: int) -> None:
        assert lock.depth() == 0
        assert lock.try_acquire() is None
        for leave in (lock.exit, permit.release, lambda: lock.__exit__(None, None, None), permit.__enter__):
            with pytest.raises(NotEnteredError, match="Only the thread or task that entered 'm' may leave it"):
                leave()

    run_in_threads(1, stranger, timeout=PATIENT)
    permit.check()
    assert lock.depth() == 1
    lock.exit()
    with pytest.raises(NotEnteredError):
        lock.exit()
    with pytest.raises(NotEnteredError), lock:
        lock.exit()
    assert lock.status().held == 0
    # Handed over, it belongs to whoever has the permit; the entries that stay are not concerned.
    with lock:
        handed = lock.acquire()
        handed.detach()
        assert lock.depth() == 2
    assert lock.status().held == 1
    assert lock.try_acquire() is None
    run_in_threads(1, lambda _number: handed.release(), timeout=PATIENT)
    assert lock.status().held == 0


def test_what_its_dead_thread_has_left_and_what_was_handed_over_may_be_released(database):
    lock = rlock("m", timeout=0, using=database)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(lock.acquire()))
    thread.start()
    thread.join(PATIENT)
    [left] = taken
    left.release()
    assert left.released
    wait_until(lambda: lock.status().held == 0, timeout=PATIENT)
    outer, handed = lock.acquire(), lock.acquire()
    handed.detach()
    run_in_threads(1, lambda _number: handed.release(), timeout=PATIENT)  # while the other entry stays
    assert (handed.released, lock.depth()) == (True, 1)
    outer.release()
    assert lock.status().held == 0


def test_only_the_outermost_entry_has_waited(database):
    lock = rlock("m", timeout=PATIENT, using=database)
    first = lock.acquire()
    first.detach()

    def let_go():
        wait_until(lambda: lock.status().waiting == 1, timeout=PATIENT)
        first.release()

    helper = run_beside(let_go)
    with lock as outer, lock as inner:
        helper.result(PATIENT)
        assert outer.waited > 0
        assert inner.waited == 0


def test_a_child_task_cannot_enter_with_its_parents_permit(database):
    lock = rlock("m", timeout=0, using=database)

    async def enter(permit):
        async with permit:
            pass

    async def main():
        permit = await lock.aacquire()
        with pytest.raises(NotEnteredError, match="Only the thread or task that entered 'm'"):
            await asyncio.create_task(enter(permit))
        permit.check()
        await enter(permit)
        assert permit.released

    asyncio.run(main())
    assert lock.status().held == 0


def test_one_name_in_two_databases_is_two_locks(committed):
    aliases = databases.covered()[:2]
    if len(aliases) < 2:
        pytest.skip("one database")
    first, second = (rlock("m", timeout=0, using=alias) for alias in aliases)
    first.enter()
    second.enter()
    first.exit()
    assert (first.status().held, second.status().held) == (0, 1)
    second.exit()
    assert second.status().held == 0


@pytest.mark.process_side("postgres")
def test_losing_it_in_the_middle(database):
    lost: list[Any] = []
    # A slow server may tell that the session has ended before it tells by whom.
    why = "revoked by ann|session has ended" if applocks.are_at(database) else "revoked by ann"
    lock = rlock("m", timeout=0, on_lost=lost.append, using=database)
    with lock as outer, lock as inner:
        control.revoke("m", by="ann", kill=applocks.are_at(database), using=database)
        outer._acquisition.keeper.renew_now(outer._acquisition)
        wait_until(lambda: outer.lost, timeout=PATIENT, what="the news of the revocation")
        for permit in (outer, inner):
            with pytest.raises(PermitLostError, match=why):
                permit.check()
        for again in (lock.acquire, lock.try_acquire):
            with pytest.raises(PermitLostError, match="Leave it before entering again"):
                again()
        with other(database, "m") as stranger:
            stranger.expect("ready", timeout=PATIENT)
            assert ask(stranger, "try").startswith("got ")
    wait_until(lambda: lost, timeout=PATIENT)
    assert lost == [outer]  # once for the grant, not for each entry
    with lock as anew:
        assert anew.token > outer.token
        anew.check()


def test_struck_at_every_statement_of_an_inner_entry(database):
    """The outer entry stays whatever strikes the inner one, of which nothing stays; kept exceptions change nothing."""
    lock = rlock("m", timeout=0, using=database)
    kept = []

    def block() -> None:
        with lock as permit:
            permit.check()

    def by_hand() -> None:
        lock.enter()
        lock.exit()

    def verbs() -> None:
        permit = lock.try_acquire()
        assert permit is not None
        permit.release()

    @lock
    def decorated() -> None:
        pass

    with lock as outer:
        for action, kind in itertools.product((block, by_hand, verbs, decorated), (KeyboardInterrupt, SoftLimit)):
            for nth in itertools.count(1):
                strikes = Striking(nth, kind("struck"))
                try:
                    with strikes:
                        action()
                except kind as error:
                    kept.append(without_tracer(error))
                outer.check()
                if strikes.struck is None:
                    break
                if lock.depth() != 1 and action is by_hand:
                    lock.exit()  # it was struck between the two: its caller is inside, and knows of it
                assert lock.depth() == 1, f"{action.__name__}: after {strikes.struck} it is inside {lock.depth()} times"
            assert nth > 20
        assert run_in_threads(1, lambda _number: lock.try_acquire(), timeout=PATIENT) == [None]
    assert kept
    assert lock.status().held == 0


def test_cancelled_at_every_await(database):
    lock = rlock("m", timeout=0, using=database)

    async def twice() -> None:
        async with lock, lock as inner:
            inner.check()

    async def strike(nth: int) -> bool:
        striking = StrikingAwait(twice(), nth, asyncio.CancelledError())

        async def run() -> None:
            await striking

        task = asyncio.create_task(run())
        await asyncio.wait({task})
        assert task.cancelled() == striking.struck
        for _ in range(3000):
            if (permit := await lock.atry_acquire()) is not None:
                await permit.arelease()
                return striking.struck
            await asyncio.sleep(0.01)
        raise AssertionError(f"struck at await {nth}: still held")

    async def main() -> int:
        nth = 1
        while await strike(nth):
            nth += 1
        return nth

    assert asyncio.run(main()) > 2


def test_decorated_functions_of_every_kind_may_call_themselves(database):
    lock = rlock("m{which}", timeout=0, using=database)
    seen: list[int] = []

    def inside(name: str) -> int:
        return rlock(name, using=database).depth()

    @lock
    def factorial(n: int, which: str = "1") -> int:
        seen.append(inside("m1"))
        return 1 if n < 2 else n * factorial(n - 1)

    @lock
    async def afactorial(n: int, which: str = "1") -> int:
        seen.append(inside("m1"))
        return 1 if n < 2 else n * await afactorial(n - 1)

    @lock
    def countdown(n: int, which: str = "1") -> Any:
        yield inside("m1")
        if n > 1:
            yield from countdown(n - 1)

    @lock
    async def acountdown(n: int, which: str = "1") -> Any:
        yield inside("m1")
        if n > 1:
            async for depth in acountdown(n - 1):
                yield depth

    async def amain() -> None:
        assert await afactorial(4) == 24
        assert [depth async for depth in acountdown(3)] == [1, 2, 3]

    assert factorial(4) == 24
    asyncio.run(amain())
    assert seen == [1, 2, 3, 4] * 2
    assert list(countdown(3)) == [1, 2, 3]
    unfinished = countdown(3)
    assert (next(unfinished), next(unfinished)) == (1, 2)
    with rlock("m1", timeout=0, using=database):
        unfinished.close()
        assert inside("m1") == 1
    assert inside("m1") == 0
    assert rlock("m1", using=database).status().held == 0


def test_kinds_and_the_operators_side(database, capsys):
    lock = rlock(("m", 1), timeout=0, using=database)
    for wrong in ({"slots": 2}, {"take": 1}):
        with pytest.raises(TypeError, match="is not for an rlock, which has one slot"):
            rlock("m", **wrong)
    with lock, lock:
        with pytest.raises(ImproperlyConfigured, match=r"'m:1' is an rlock already and can't be used as a mutex"):
            run_in_threads(1, lambda _n: mutex("m:1", timeout=0, using=database).acquire(), timeout=PATIENT)
        with pytest.raises(AlreadyHeldError):
            mutex("m:1", timeout=0, using=database).acquire()
        with pytest.raises(ValueError, match="'m:1' is an rlock: it has one slot, not 2"):
            control.set_slots(("m", 1), 2, by="ann", using=database)
        call_command("locks", "list", "--format", "json", "--database", database)
        [shown] = json.loads(capsys.readouterr().out)
        assert (shown["name"], shown["kind"], shown["slots"]) == ("m:1", "rlock", 1)
        assert len(shown["holders"]) == 1
    call_command("locks", "run", "m:1", "--database", database, "--", "true")
    assert isinstance(lock, RLock)
    assert lock.status().kind == "rlock"


@pytest.mark.process_side("postgres")
def test_an_inner_entry_that_stays_until_the_commit_or_is_forgotten(database, caplog):
    lock = rlock("m", timeout=0, using=database)
    late = rlock("m", timeout=0, release="on_commit", using=database)
    if connections[database].vendor != "sqlite":  # there the caller's transaction is the only writer
        with transaction.atomic(using=database):
            with lock, late:
                pass
            assert lock.depth() == 1
            assert lock.status().held == 1
        assert lock.depth() == 0
        assert lock.status().held == 0
    with lock:
        lock.acquire()
        gc.collect()
        wait_until(lambda: "An inner permit of 'm' was forgotten" in caplog.text, timeout=PATIENT)
        assert lock.depth() == 1
    wait_until(lambda: lock.status().held == 0, timeout=PATIENT)
    caplog.clear()
    lock.acquire()
    gc.collect()
    wait_until(lambda: lock.status().held == 0, timeout=PATIENT)
    assert "was forgotten (it was garbage-collected)" in caplog.text


def refused_elsewhere(lock, database):
    """Whether another thread is refused; on SQLite nobody else may write now, so that its row tells."""
    if connections[database].vendor == "sqlite":
        return len(held_rows(database)) == 1
    return run_in_threads(1, lambda _number: lock.try_acquire(), timeout=PATIENT) == [None]


@pytest.mark.one_server("fences")
@pytest.mark.process_side("postgres")
def test_a_fence_counts_no_exit_twice_and_none_too_few(database):
    """Whoever is inside stays inside, whatever is fenced; and the end of the transaction gives it back once."""
    lock = rlock("m", timeout=0, using=database)

    @lock
    def inner() -> None:
        assert lock.depth() == 2

    with lock as outer:
        with transaction.atomic(using=database):
            outer.fence()
            inner()
            with lock as kept:
                kept.fence()
            assert not outer.released
            assert lock.depth() == 1
            outer.check()
        assert refused_elsewhere(lock, database)
        outer.check()
    assert (lock.depth(), kept.released) == (0, True)
    assert held_rows(database) == []


@pytest.mark.one_server("fences")
@pytest.mark.process_side("postgres")
@pytest.mark.parametrize("ending", ["inside", "after"])
def test_after_the_last_exit_a_fenced_transaction_may_enter_again(database, ending):
    lock = rlock("m", timeout=0, using=database)
    with transaction.atomic(using=database):
        with lock as first:
            first.fence()
        assert (lock.depth(), first.released) == (0, True)
        assert refused_elsewhere(lock, database)
        again = lock.acquire()
        assert (lock.depth(), again.depth, again.token) == (1, 1, first.token)
        with lock:
            assert lock.depth() == 2
        first.release()
        again.check()
        if ending == "inside":
            again.release()
            with lock:  # and once more
                pass
            assert lock.depth() == 0
        assert refused_elsewhere(lock, database)
    if ending == "after":  # the commit takes nothing away from whoever is inside
        again.check()
        assert refused_elsewhere(lock, database)
        again.release()
    assert held_rows(database) == []
    assert run_in_threads(1, lambda _number: lock.acquire().release(), timeout=PATIENT) == [None]


@pytest.mark.one_server("fences")
@pytest.mark.process_side("postgres")
def test_who_enters_again_and_forgets_its_permit_keeps_the_lock_until_the_commit(database):
    lock = rlock("m", timeout=0, using=database)
    with transaction.atomic(using=database):
        with lock as first:
            first.fence()
        keeper = first._acquisition.keeper
        lock.acquire()
        gc.collect()
        noted = threading.Event()
        keeper.note(noted.set)  # after what the finaliser has noted
        assert noted.wait(PATIENT)
        assert refused_elsewhere(lock, database)
    wait_until(lambda: held_rows(database) == [], timeout=PATIENT)


@pytest.mark.django_db
def test_inside_a_testcase():
    lock = rlock("m", timeout=0)
    with lock as outer, lock as inner:
        assert (outer.depth, inner.depth, outer.token) == (1, 2, inner.token)
        run_in_threads(1, lambda _number: lock.depth() == 0 or pytest.fail("inherited"), timeout=PATIENT)
        assert lock.status().held == 1
    assert lock.status().held == 0


def test_the_counter_would_notice(database):
    """What testifies against two at once does so."""
    with OutsideCounter(database) as counter, counter.inside(), counter.inside():
        pass
    with OutsideCounter(database) as counter:
        assert counter.peak == 2
