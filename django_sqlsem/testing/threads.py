"""Running what waits for the database on a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

from django.db import connections

T = TypeVar("T")


def blocking(function: Callable[[], T]) -> T:
    """Call what waits for the database a moment; in an async test, on another thread than the event loop's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    return elsewhere(function)


def elsewhere(function: Callable[[], T]) -> T:
    """Call it on another thread, outside of any transaction of this one; connections that it opens are closed."""

    def work() -> T:
        try:
            return function()
        finally:
            connections.close_all()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
