"""A child that counts its own connections and statements, for tests of what waiting and holding cost."""

from __future__ import annotations

import asyncio
import json
import threading

from django_sqlsem import semaphore
from tests.support.children import listen, say


def hold_many(alias: str, count: int) -> None:
    """Hold ``count`` permits: a fifth of them of names of their own, the rest of one name."""
    others = count // 5
    many = semaphore("many", slots=count - others, using=alias)
    decorated = semaphore("other", using=alias)(lambda: None)
    say("ready")
    listen()
    permits = []
    for number in range(count - others):
        permits.append(many.acquire(timeout=0))
        permits[-1].detach()
        if number < others:
            permits.append(semaphore(f"many:{number}", using=alias).acquire(timeout=0))
    say("held")
    listen()
    for permit in permits:
        permit.check()
        permit.release()
    decorated()
    say("released")
    listen()
    with many:
        say("again")
        listen()


def wait_in_crowds(alias: str, threads: int, tasks: int) -> None:
    """Wait in so many threads and async tasks for one name; tell how many threads the tasks alone have cost."""
    lock = semaphore("busy", slots=8, timeout=None, using=alias)
    errors: list[str] = []

    def wait() -> None:
        try:
            with lock:
                pass
        except BaseException as error:
            errors.append(repr(error))

    async def wait_as_task() -> None:
        async with lock:
            pass

    async def main() -> None:
        listening = asyncio.create_task(asyncio.to_thread(listen))
        await asyncio.sleep(0.1)
        before = threading.active_count()
        waiting = [asyncio.create_task(wait_as_task()) for _ in range(tasks)]
        await asyncio.sleep(0)
        say("waiting")
        await listening
        say(f"threads {threading.active_count() - before}")
        crowd = [threading.Thread(target=wait) for _ in range(threads)]
        for thread in crowd:
            thread.start()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        errors.extend(repr(result) for result in results if result is not None)
        for thread in crowd:
            await asyncio.to_thread(thread.join)
        say(f"done {json.dumps(errors)}")
        await asyncio.to_thread(listen)

    asyncio.run(main())
