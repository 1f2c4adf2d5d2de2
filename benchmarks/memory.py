"""The memory of a process that has the package: loaded, used once and idle, and with thousands of tasks that wait.

``python -m benchmarks.memory --database postgres``. Each figure says how much more memory of its own a process
has than one with Django and the same database alone: the median of three each.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.cli import migrate, number, one_of, say

#: What a child does; the first two are what the others are compared with.
PLAIN, TASKS = "Django alone", "tasks that wait for an event"
LOADED, USED, WAITING = "the package is loaded", "a lock was used once", "tasks that wait for a lock"


def main(arguments: list[str] | None = None) -> int:
    """Measure and print. Returns 1 if the server does not answer."""
    from benchmarks import servers as server_side

    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    add = parser.add_argument
    add("--database", default="postgres", type=one_of(["sqlite", "postgres", "mariadb"], "database"))
    add("--tasks", default=10_000, type=number(int, 1), metavar="N", help="how many tasks wait")
    add("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        say(str(child(*options.child, int(options.tasks))))
        return 0
    with server_side.one(options.database, "benchmarks.settings") as entries:
        if not entries:
            return 1
        migrate({options.database: entries[options.database]})
        kb = {
            what: measured(what, options.database, int(options.tasks)) for what in (PLAIN, TASKS, LOADED, USED, WAITING)
        }
    for what in (LOADED, USED):
        say(f"{what}: {(kb[what] - kb[PLAIN]) / 1024:.1f} MB over {PLAIN}")
    each = (kb[WAITING] - kb[USED] - kb[TASKS] + kb[PLAIN]) / options.tasks
    beside = (kb[TASKS] - kb[PLAIN]) / options.tasks
    say(f"{options.tasks:,} {WAITING}: {each:.1f} kB each, over {beside:.1f} kB of a task")
    return 0


def measured(what: str, database: str, tasks: int) -> float:
    """Return the memory of such a process, in kB."""
    command = [sys.executable, "-m", "benchmarks.memory", "--tasks", str(tasks), "--child", what, database]
    run = functools.partial(subprocess.run, command, check=True, capture_output=True, text=True)
    runs = [run().stdout for _ in range(3)]
    return median(int(run.split()[-1]) for run in runs)


def child(what: str, alias: str, tasks: int) -> int:
    """Be one of the processes. Return its private memory, in kB."""
    import django
    from django.conf import settings

    if what in (PLAIN, TASKS):
        settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app != "django_sqlsem"]
    django.setup()
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT 1")
    if what in (PLAIN, LOADED):
        return private()
    if what == TASKS:
        return asyncio.run(events(tasks))
    from django_sqlsem import semaphore

    one = semaphore("measured", 1, timeout=None, using=alias)
    one.acquire().release()
    if what == USED:
        time.sleep(2)
        return private()
    with one:
        return asyncio.run(waiting(alias, tasks))


async def events(count: int) -> int:
    """Have tasks wait for an event."""
    event = asyncio.Event()
    tasks = [asyncio.create_task(event.wait()) for _ in range(count)]
    await asyncio.sleep(1)
    found = private()
    event.set()
    await asyncio.gather(*tasks)
    return found


async def waiting(alias: str, count: int) -> int:
    """Have tasks wait for a lock that somebody else holds."""
    from django_sqlsem import semaphore

    async def wait() -> None:
        async with semaphore("measured", 1, timeout=None, using=alias):
            pass

    tasks = [asyncio.create_task(wait()) for _ in range(count)]
    status = semaphore("measured", 1, using=alias)
    async with asyncio.timeout(120):
        while (await status.astatus()).waiting < count:  # noqa: ASYNC110 - the database says it
            await asyncio.sleep(0.5)
    found = private()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


def private() -> int:
    """Return the memory that this process shares with no other, in kB."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


if __name__ == "__main__":
    sys.exit(main())
