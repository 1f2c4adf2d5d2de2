"""Waits in a thread that a holder needs, but which end all the same: nobody may be told of a deadlock."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from django_sqlsem import (
    Semaphore,
    control,
    mutex,
    semaphore,
)
from tests.support.processes import Child

#: Longer than the keeper takes to look around twice.
LOOKED_AROUND = 2.5
PATIENCE = 60


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 2 * PATIENCE))


async def hold_and_need_the_thread(lock: Semaphore, entered: asyncio.Event, waits: threading.Event) -> None:
    async with lock:
        entered.set()
        await asyncio.to_thread(waits.wait, PATIENCE)
        await sync_to_async(int)()


def test_somebody_elsewhere_may_give_back_one_of_the_operators_slots(alias: str) -> None:
    lock, waits = semaphore("lent-operator", timeout=PATIENCE, using=alias), threading.Event()
    with lock:
        pass
    control.set_slots("lent-operator", 2, by="a test", using=alias)

    def wait() -> str:
        waits.set()
        with lock as permit:
            return f"got {permit.slot}"

    async def main() -> None:
        with Child("hold", alias, "lent-operator") as child:
            slot = (await asyncio.to_thread(child.expect, "held")).split()[0]
            entered = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(hold_and_need_the_thread(lock, entered, waits))
                await entered.wait()
                waiter = group.create_task(sync_to_async(wait)())
                await asyncio.to_thread(waits.wait, PATIENCE)
                await asyncio.sleep(LOOKED_AROUND)
                assert not waiter.done()
                child.send("go on")
                assert await waiter == f"got {slot}"
                await asyncio.to_thread(child.expect, "released")

    run(main())


def test_a_holder_whose_step_is_done_goes_on_when_its_loop_does(alias: str) -> None:
    lock, waits = mutex("lent-done", timeout=PATIENCE, using=alias), threading.Event()
    go = threading.Event()

    def wait() -> str:
        waits.set()
        with lock:
            return "got it"

    async def holder(entered: asyncio.Event) -> None:
        async with lock:
            entered.set()
            assert await sync_to_async(go.wait)(PATIENCE)

    async def main() -> None:
        entered = asyncio.Event()
        took = asyncio.ensure_future(holder(entered))
        await entered.wait()
        waiter = asyncio.ensure_future(sync_to_async(wait)())
        await asyncio.sleep(0)  # now both have asked for the thread
        go.set()
        assert waits.wait(PATIENCE)
        time.sleep(LOOKED_AROUND)  # noqa: ASYNC251 - the loop is busy, and hears of nothing that is done
        assert await waiter == "got it"
        await took

    run(main())


def test_a_permit_that_ends_by_max_hold_keeps_nobody_waiting_for_ever(
    alias: str, caplog: pytest.LogCaptureFixture
) -> None:
    lock, waits = semaphore("lent-max", timeout=PATIENCE, using=alias), threading.Event()
    short = semaphore("lent-max", max_hold=LOOKED_AROUND, timeout=PATIENCE, using=alias)

    def wait() -> str:
        waits.set()
        with lock:
            return "got it"

    async def main() -> None:
        entered = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(hold_and_need_the_thread(short, entered, waits))
            await entered.wait()
            assert await sync_to_async(wait)() == "got it"

    run(main())
    assert [record.what for record in caplog.records if record.levelname == "ERROR"] == ["forgotten"]  # type: ignore[attr-defined]
