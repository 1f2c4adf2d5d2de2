"""Threads for tests: started together, their errors raised again, their connections closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from django.db import connections


def run_in_threads(count: int, function: Callable[[int], Any], *, timeout: float = 60.0) -> list[Any]:
    """Call ``function(0)`` to ``function(count - 1)``, each in a thread, all at once. Return the results in order.

    Raises the first thread's error, or ``AssertionError`` if some thread is not done after ``timeout`` seconds.
    """
    barrier = threading.Barrier(count)
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            barrier.wait(timeout)
            results[index] = function(index)
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(index,), name=f"test-{index}", daemon=True) for index in range(count)]
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    hung = [thread.name for thread in threads if thread.is_alive()]
    assert not hung, f"not done after {timeout} s: {', '.join(hung)}"
    return results


def run_beside(function: Callable[[], Any]) -> Future[Any]:
    """Call ``function`` in a thread of its own. Return what will have its result, or raise its error."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        finally:
            connections.close_all()

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_until(condition: Callable[[], Any], *, timeout: float = 30.0, what: str = "") -> Any:
    """Call ``condition`` until its result is true and return that. ``AssertionError`` after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {timeout} s: {what or condition}"
        time.sleep(0.01)
    return result
