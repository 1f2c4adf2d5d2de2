"""Permits that pass between tasks and threads: ``sync_to_async``, ``async_to_sync``, task groups, other event loops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from asgiref.sync import ThreadSensitiveContext, async_to_sync, sync_to_async
from django.db import close_old_connections, connections

from django_sqlsem import (
    AlreadyHeldError,
    DeadlockError,
    Semaphore,
    mutex,
    semaphore,
)
from django_sqlsem.locks import rlock
from django_sqlsem.locks.permit import current_permit
from tests.support.databases import held_rows
from tests.support.threads import wait_until
from tests.testapp.models import Probe

#: Longer than the keeper takes to find a permit whose task or thread has ended.
LOOKED_AROUND = 1.5
#: Long enough for a wait that must end well, on a busy machine.
PATIENCE = 60

sensitive = pytest.mark.parametrize("thread_sensitive", [True, False], ids=["sensitive", "any thread"])


@pytest.fixture(autouse=True)
def without_a_word(caplog: pytest.LogCaptureFixture) -> Any:
    """Nothing is forgotten."""
    yield
    assert not [record for record in caplog.records if record.name == "django_sqlsem" and record.levelno > 20]


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 2 * PATIENCE))


async def as_a_request(function: Callable[[], Any]) -> Any:
    """Run a synchronous function as Django's ASGI handler runs a view."""
    async with ThreadSensitiveContext():
        try:
            return await sync_to_async(function)()
        finally:
            await sync_to_async(connections.close_all)()


def test_a_permit_that_a_coroutine_took_for_synchronous_code_is_kept(alias: str) -> None:
    lock = mutex("for-sync", using=alias)

    def work(pause: float = LOOKED_AROUND) -> None:
        permit = async_to_sync(lock.aacquire)()
        time.sleep(pause)
        permit.check()
        assert current_permit("for-sync", using=alias) is permit
        permit.release()
        permit = async_to_sync(lock.aacquire)()
        async_to_sync(permit.arelease)()
        assert not held_rows(alias)

    work()
    run(as_a_request(work))


@sensitive
def test_a_permit_that_a_thread_took_for_a_task_is_kept(alias: str, thread_sensitive: bool) -> None:
    one, two = mutex("for-async", using=alias), mutex("for-async-too", using=alias)

    async def work() -> None:
        async with ThreadSensitiveContext():
            first, second = [
                await sync_to_async(lock.acquire, thread_sensitive=thread_sensitive)() for lock in (one, two)
            ]
            await asyncio.sleep(LOOKED_AROUND)
            first.check()
            second.check()
            await first.arelease()
            await sync_to_async(second.release)()
            permit = await one.aacquire()
            await sync_to_async(permit.release, thread_sensitive=thread_sensitive)()

    run(work())


@sensitive
def test_one_thread_takes_for_several_tasks(alias: str, thread_sensitive: bool) -> None:
    lock = semaphore("several", 3, using=alias)

    async def one(together: asyncio.Barrier) -> int:
        permit = await sync_to_async(lock.acquire, thread_sensitive=thread_sensitive)()
        async with together:
            slot = permit.slot
        await sync_to_async(permit.release, thread_sensitive=thread_sensitive)()
        return slot

    async def main() -> list[int]:
        together = asyncio.Barrier(3)
        return await asyncio.gather(*(one(together) for _ in range(3)))

    assert sorted(run(main())) == [1, 2, 3]


def test_a_pool_of_threads_takes_for_several_tasks(alias: str) -> None:
    lock = semaphore("pooled", 3, using=alias)

    async def main() -> None:
        permits = [await asyncio.create_task(asyncio.to_thread(lock.acquire)) for _ in range(3)]
        assert sorted(permit.slot for permit in permits) == [1, 2, 3]
        for permit in permits:
            await permit.arelease()

    run(main())


def test_whoever_asks_again_is_told_at_once_through_every_bridge(alias: str) -> None:
    lock = mutex("again", timeout=PATIENCE, using=alias)
    told = []

    def ask() -> None:
        with pytest.raises(AlreadyHeldError):
            lock.acquire()
        told.append("sync")

    async def aask() -> None:
        with pytest.raises(AlreadyHeldError):
            await lock.aacquire()
        told.append("async")

    def both() -> None:
        ask()
        async_to_sync(aask)()

    async def aboth() -> None:
        await aask()
        await sync_to_async(both)()

    def work() -> None:
        with lock:
            both()
            async_to_sync(aboth)()

    async def awork() -> None:
        async with lock:
            await aboth()
            await sync_to_async(both, thread_sensitive=False)()

    started = time.monotonic()
    work()
    run(as_a_request(work))
    run(awork())
    assert time.monotonic() - started < PATIENCE
    assert (told.count("sync"), told.count("async")) == (6, 9)


def test_a_monitor_is_entered_again_through_every_bridge(alias: str) -> None:
    lock = rlock("again", timeout=PATIENCE, using=alias)

    async def aenter() -> int:
        async with lock:
            return lock.depth()

    def enter() -> int:
        with lock:
            return async_to_sync(aenter)()

    assert enter() == 2
    assert run(as_a_request(enter)) == 2

    async def main() -> int:
        async with lock:
            return await sync_to_async(enter)()

    assert run(main()) == 3


def test_child_tasks_do_not_inherit(alias: str) -> None:
    pair = semaphore("pair", 2, timeout=PATIENCE, using=alias)

    async def child() -> int:
        async with pair as permit:
            return permit.slot

    async def main() -> None:
        async with pair as permit, asyncio.TaskGroup() as group:
            tasks = [group.create_task(child()) for _ in range(4)]
        assert {task.result() for task in tasks} == {3 - permit.slot}

    run(main())

    def below_a_thread() -> None:
        async def gathered() -> list[int]:
            return await asyncio.gather(*(child() for _ in range(4)))

        with pair as permit:
            assert set(async_to_sync(gathered)()) == {3 - permit.slot}

    below_a_thread()
    run(as_a_request(below_a_thread))


@pytest.mark.parametrize("where", ["request", "program", "command"])
def test_a_holder_that_needs_the_thread_in_which_somebody_waits_for_it(alias: str, where: str) -> None:
    # Each request of Django has a thread of its own. Elsewhere all share one, and the waiter is told.
    lock = mutex("classic", timeout=None, using=alias)
    outcome = []

    async def holder(entered: asyncio.Event, waits: threading.Event) -> None:
        async with ThreadSensitiveContext() if where == "request" else contextlib.nullcontext(), lock:
            entered.set()
            await asyncio.to_thread(waits.wait, PATIENCE)
            await sync_to_async(outcome.append)("the holder's step")

    async def main() -> None:
        entered, waits = asyncio.Event(), threading.Event()

        def wait() -> None:
            waits.set()
            try:
                lock.acquire().release()
                outcome.append("got it")
            except DeadlockError as error:
                outcome.append(f"{error}".partition(",")[0])

        async with asyncio.TaskGroup() as group:
            group.create_task(holder(entered, waits))
            await entered.wait()
            group.create_task(as_a_request(wait) if where == "request" else sync_to_async(wait)())

    if where == "command":
        async_to_sync(main)()
    else:
        run(main())
    told = "Waiting for 'classic' was broken off"
    assert outcome == (["the holder's step", "got it"] if where == "request" else [told, "the holder's step"])


@pytest.mark.parametrize("slots", [1, 2])
def test_a_wait_in_the_shared_thread_that_can_end_is_not_broken_off(alias: str, slots: int) -> None:
    lock, got = semaphore("can-end", slots, timeout=PATIENCE, using=alias), threading.Event()

    async def needs_the_thread(held: asyncio.Barrier) -> None:
        async with lock:
            await held.wait()
            await sync_to_async(got.is_set)()

    async def needs_nothing(held: asyncio.Barrier) -> None:
        async with lock:
            await held.wait()
            await asyncio.sleep(2 * LOOKED_AROUND)

    def wait() -> None:
        with lock:
            got.set()

    async def main() -> None:
        held = asyncio.Barrier(slots + 1)
        async with asyncio.TaskGroup() as group:
            group.create_task(needs_nothing(held))
            if slots == 2:
                group.create_task(needs_the_thread(held))
            waits = sync_to_async(wait)()
            await held.wait()
            await waits

    run(main())
    assert got.is_set()


def test_timeouts_and_task_groups_that_end_waits(alias: str) -> None:
    lock = mutex("ended", timeout=PATIENCE, using=alias)

    async def wait() -> None:
        async with lock:
            raise AssertionError("it was never free")

    async def fail() -> None:
        await asyncio.sleep(0.05)
        raise ValueError

    async def in_a_group() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(wait())
            group.create_task(fail())

    async def main() -> None:
        async with lock:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await asyncio.gather(*(asyncio.create_task(wait()) for _ in range(5)))
            with pytest.raises(ExceptionGroup):
                await in_a_group()
            assert await asyncio.gather(
                *(asyncio.wait_for(lock.aacquire(), 0.05) for _ in range(5)), return_exceptions=True
            )
        permit = await asyncio.wait_for(lock.aacquire(), PATIENCE)
        await permit.arelease()

    run(main())


def test_cancelled_hundreds_of_times_on_every_bridge(alias: str) -> None:
    lock, chance, entered = semaphore("struck", 2, timeout=PATIENCE, using=alias), random.Random(3), []

    scale = 0.05

    async def direct() -> None:
        async with lock:
            entered.append("direct")
            await asyncio.sleep(0.002)

    @semaphore("struck", 2, timeout=PATIENCE, using=alias)
    async def decorated() -> None:
        entered.append("decorated")
        await asyncio.sleep(0.002)

    def in_a_thread() -> None:
        async_to_sync(direct)()

    async def bridged() -> None:
        async with ThreadSensitiveContext():
            await sync_to_async(in_a_thread)()

    async def one(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.uniform(0, scale)):
                await work()

    async def main() -> None:
        nonlocal scale
        for _ in range(40):
            before = len(entered)
            await asyncio.gather(*(one(work) for work in (direct, decorated, bridged) * 3))
            scale *= 0.8 if len(entered) - before > 5 else 1.25  # about as many in time as not, on any machine

    run(main())
    assert {"direct", "decorated"} <= set(entered)
    wait_until(lambda: not held_rows(alias))
    assert semaphore("struck", using=alias).status().waiting == 0


def test_asynchronous_queries_inside(alias: str) -> None:
    lock = mutex("queries", using=alias)

    async def main() -> None:
        async with lock as permit:
            await Probe.objects.using(alias).acreate(name="inside", inside=1, peak=1, entered=1)
            await sync_to_async(close_old_connections)()
            assert await Probe.objects.using(alias).filter(name="inside").acount() == 1
            permit.check()
            assert [probe.name async for probe in Probe.objects.using(alias).filter(name="inside")] == ["inside"]
        assert (await lock.astatus()).held == 0
        await sync_to_async(connections.close_all)()

    run(main())


@pytest.mark.parametrize(
    "call",
    [
        lambda lock: lock.aacquire(),
        lambda lock: lock.atry_acquire(),
        lambda lock: lock.astatus(),
        lambda lock: lock.__aenter__(),
        lambda lock: lock(_nothing)(),
    ],
    ids=["aacquire", "atry_acquire", "astatus", "async with", "decorated"],
)
def test_another_kind_of_event_loop_is_refused_with_advice(
    alias: str, call: Callable[[Semaphore], Coroutine[Any, Any, Any]]
) -> None:
    # As trio and others do it: they drive a coroutine, and no event loop of asyncio runs.
    with pytest.raises(RuntimeError, match=r"asyncio.*trio\.to_thread\.run_sync"):
        call(mutex("other-loop", using=alias)).send(None)
    assert not held_rows(alias)
    assert logging.getLogger("django_sqlsem").isEnabledFor(logging.WARNING)


async def _nothing() -> None: ...
