"""``python -m example_project.demo.bustle``: a busy site beside the demo's fight, for as long as it runs.

Threads of one process take locks of all kinds, hold them for some seconds, and wait for each other: so a busy site is
there to be looked at, at a small part of a core. ``... bustle victim`` takes one lock and is to be killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
from typing import TYPE_CHECKING

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
if __name__ == "__main__":
    django.setup()

from django.db import connection

from django_sqlsem import AcquireTimeoutError, DeadlockError, control, mutex, queries, semaphore
from django_sqlsem.core.identity import activity
from django_sqlsem.locks import rwlock
from example_project.demo import meter

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


USERS = ("ann", "bob", "chen", "dora", "emil", "faye", "gus", "hana", "ivan", "june")
VICTIM = "imports:prices"
PAUSED = "payments:refunds"
stopped = threading.Event()
#: Where the two meet who will get in each other's way.
met = threading.Barrier(2)


def work(lock: AbstractContextManager[object], label: str, seconds: tuple[float, float], user: str = "") -> None:
    """Take a lock for some work, or be refused."""
    with contextlib.suppress(AcquireTimeoutError), activity(label, user), lock:
        stopped.wait(random.uniform(*seconds))


def customers(name: str, slots: int, label: str, seconds: tuple[float, float], pause: float) -> Callable[[], None]:
    """Return a turn of somebody who wants a slot of a name, and of a pause between two turns."""

    def turn() -> None:
        work(semaphore(name, slots=slots, timeout=8), label, seconds, random.choice(USERS))
        stopped.wait(random.expovariate(1 / pause))

    return turn


@mutex("sync:{user}:{account}", timeout=1)
def sync(user: str, account: int) -> None:
    """Synchronise one account of a user: once at a time."""
    stopped.wait(random.uniform(1, 4))


def sync_somebody() -> None:
    """Take the lock of one of many accounts: all of these names are of one template."""
    user = random.choice(USERS)
    with activity("POST /sync/", user), contextlib.suppress(AcquireTimeoutError):
        sync(user, random.randint(1, 4))
    stopped.wait(random.expovariate(1 / 3))


def wait_for_reports() -> None:
    """Stand in the queue of the three slots that the visitors fight for, and be counted as they are."""
    with (
        contextlib.suppress(AcquireTimeoutError),
        activity("manage.py monthly_figures"),
        semaphore("reports", slots=3, timeout=20),
        meter.counted(),
    ):
        stopped.wait(random.uniform(1, 3))
    stopped.wait(random.expovariate(1))


PRICES = rwlock("price-list", readers=8)


def read_prices() -> None:
    """Read beside others."""
    work(PRICES.read(timeout=10), "GET /prices/", (1, 4), random.choice(USERS))
    stopped.wait(random.expovariate(1 / 2))


def write_prices() -> None:
    """Write alone."""
    work(PRICES.write(timeout=20), "task prices.import_list", (2, 4))
    stopped.wait(random.uniform(8, 15))


def cross(first: str, second: str, label: str) -> Callable[[], None]:
    """Return a turn of somebody who takes two locks in an order that another one takes the other way round."""

    def turn() -> None:
        # The settings say that a deadlock is broken: one of the two gives way.
        with contextlib.suppress(AcquireTimeoutError, DeadlockError, threading.BrokenBarrierError):
            met.wait(60)
            with activity(label), mutex(first, timeout=30):
                stopped.wait(0.3)  # the other one has its first lock by then
                with mutex(second, timeout=30):
                    stopped.wait(1)
        stopped.wait(40)

    return turn


def pause_payments() -> None:
    """Pause a name as an operator would who knows why, unless somebody has resumed it."""
    name = queries.semaphore(PAUSED)
    if name is None:
        work(semaphore(PAUSED, slots=6, timeout=1), "POST /refunds/", (0, 0))
        control.pause(PAUSED, by="ann", reason="The provider is down: INC-12")


def pay() -> None:
    """Come to a name that is paused."""
    work(semaphore(PAUSED, slots=6, timeout=4), "POST /refunds/", (1, 3), random.choice(USERS))
    stopped.wait(random.expovariate(1 / 4))


def turns() -> list[Callable[[], None]]:
    """Return what each thread does over and over again."""
    return [
        *[customers("exports:orders", 4, "GET /exports/orders.csv", (4, 9), 2)] * 9,
        *[customers("thumbnails:video", 6, "task media.thumbnail", (2, 5), 2)] * 7,
        *[sync_somebody] * 4,
        *[wait_for_reports] * 2,
        *[read_prices] * 4,
        write_prices,
        cross("stock", "ledger", "POST /orders/"),
        cross("ledger", "stock", "task ledger.close"),
        *[pay] * 2,
    ]


def over_and_over(turn: Callable[[], None]) -> None:
    """Take turns until the end."""
    try:
        stopped.wait(random.uniform(0, 3))
        while not stopped.is_set():
            turn()
    finally:
        connection.close()


def main(arguments: list[str]) -> None:
    """Run until SIGTERM; as a victim, hold one lock until SIGKILL."""
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    if arguments == ["victim"]:
        with activity("manage.py import_prices"), mutex(VICTIM, timeout=30, lease=30):
            stopped.wait()
        return
    pause_payments()
    threads = [threading.Thread(target=over_and_over, args=(turn,), name=f"{nth}") for nth, turn in enumerate(turns())]
    for thread in threads:
        thread.start()
    stopped.wait()
    met.abort()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
