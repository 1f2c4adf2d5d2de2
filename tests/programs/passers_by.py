"""A process that takes names for a moment, again and again, while another one deletes idle names."""

from __future__ import annotations

import threading

from django_sqlsem import mutex, semaphore
from django_sqlsem.locks import monitor, rwlock
from tests.support.children import listen, say


def pass_by(alias: str, own: str) -> None:
    """Until it is told to end, take names that nobody else uses without waiting, and one in turn with others."""
    told = threading.Thread(target=listen, daemon=True)
    told.start()
    alone = [
        semaphore(f"{own}:one", using=alias),
        semaphore(f"{own}:of three", 3, using=alias),
        semaphore(f"{own}:two of three", 3, take=2, using=alias),
        mutex(f"{own}:mutex", using=alias),
        monitor(f"{own}:monitor", using=alias),
        rwlock(f"{own}:read", using=alias).read(),
    ]
    # MariaDB scans a small table: who wants all slots of a name is refused while others have theirs locked.
    waiting = [semaphore("shared", 1, timeout=30, using=alias), rwlock(f"{own}:written", using=alias).write(30)]
    while told.is_alive():
        for lock in alone:
            permit = lock.try_acquire()
            assert permit is not None, f"{lock.name} was busy"
            permit.check()
            permit.release()
        for lock in waiting:
            with lock as permit:
                permit.check()
    say("done")
