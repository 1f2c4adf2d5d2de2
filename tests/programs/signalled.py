"""A process whose main thread is struck by signals at random moments of acquires and releases, in the driver too."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from django_sqlsem import Semaphore, semaphore
from tests.support.children import say
from tests.support.interruptions import SoftLimit

ERRORS = (KeyboardInterrupt, SoftLimit)

#: So many strikes tell something, and so many seconds more are given to them on a slow database.
ENOUGH = 20
PATIENCE = 90.0


class Alarm:
    """Raises an exception in the main thread after some seconds, unless the block has ended before."""

    def __init__(self) -> None:
        self.armed = False
        self.error: type[BaseException] = SoftLimit
        self.places: dict[str, int] = {}
        signal.signal(signal.SIGALRM, self._ring)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            module = str(frame.f_globals.get("__name__")).partition(".")[0] if frame else ""
            self.places[module] = self.places.get(module, 0) + 1
            raise self.error("struck by a signal")

    def interrupts(self, action: Callable[[], None], after: float, error: type[BaseException]) -> bool:
        """Run ``action`` with the alarm set. Return whether it was interrupted."""
        self.error = error
        try:
            self.armed = True
            signal.setitimer(signal.ITIMER_REAL, after)
            action()
            self.armed = False
        except ERRORS:
            return True
        finally:
            self.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        return False


def take_and_give_back(lock: Semaphore) -> None:
    """Acquire and release."""
    lock.acquire().release()


def decorated(lock: Semaphore) -> None:
    """Call a decorated function."""

    @lock
    def body() -> None:
        time.sleep(0.0002)

    body()


def run(alias: str, seconds: float, seed: int) -> None:
    """Be struck again and again, for so long and often enough to tell something.

    Say how often, and the longest that anything stayed held after it.
    """
    chance = random.Random(seed)
    alarm = Alarm()
    struck, longest, rounds = 0, 0.0, 0
    lock = semaphore("signalled", timeout=10, using=alias)
    lock.acquire().release()
    started = time.perf_counter()
    for _ in range(10):
        lock.acquire().release()
    usual = (time.perf_counter() - started) / 10
    end = time.monotonic() + seconds
    while time.monotonic() < end or (struck <= ENOUGH and time.monotonic() < end + PATIENCE):
        rounds += 1
        busy = chance.random() < 0.3
        # A name of its own now and then: its rows are created.
        lock = semaphore(f"signalled-{rounds // 4}", timeout=10, using=alias)
        timer = None
        if busy:
            other = lock.acquire()
            other.detach()
            timer = threading.Timer(0.01, other.release)
            timer.start()
        action = chance.choice((take_and_give_back, decorated))
        moment = chance.uniform(0.0001, usual * 1.3 + (0.012 if busy else 0))
        struck += alarm.interrupts(lambda action=action, lock=lock: action(lock), moment, chance.choice(ERRORS))
        if timer:
            timer.join()
        asked = time.monotonic()
        lock.acquire().release()
        longest = max(longest, time.monotonic() - asked)
    say(f"struck {struck} {rounds} {longest:.3f}")
    say(f"places {alarm.places}")
