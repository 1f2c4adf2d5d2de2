"""A child that counts its own connections and statements, for tests of what waiting and holding cost."""

from __future__ import annotations

import asyncio
import json
import threading

from django_sqlsem import semaphore
from tests.children import listen, say


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


def wait_with_threads(alias: str, count: int) -> None:
    """Wait in ``count`` threads for one name."""
    lock = semaphore("busy", slots=8, timeout=None, using=alias)
    errors = []

    def run() -> None:
        try:
            with lock:
                pass
        except BaseException as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    say("waiting")
    for thread in threads:
        thread.join()
    say(f"done {json.dumps(errors)}")
    listen()


def wait_with_tasks(alias: str, count: int) -> None:
    """Wait in ``count`` async tasks for one name."""
    lock = semaphore("busy", slots=8, timeout=None, using=alias)

    async def run() -> None:
        async with lock:
            pass

    async def main() -> None:
        before = threading.active_count()
        tasks = [asyncio.create_task(run()) for _ in range(count)]
        await asyncio.sleep(0)
        say("waiting")
        await asyncio.to_thread(listen)
        say(f"threads {threading.active_count() - before}")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        say(f"done {json.dumps([repr(result) for result in results if result is not None])}")
        await asyncio.to_thread(listen)

    asyncio.run(main())
