"""The work itself: it takes a little time."""

from __future__ import annotations

import asyncio
import random
import time

LONGEST = 10.0


def make_report(seconds: str | None = None) -> None:
    """Work for as long as a visitor wants (``?seconds=5``), else for a moment."""
    time.sleep(_length(seconds))


async def amake_report(seconds: str | None = None) -> None:
    """Do the same in asynchronous code."""
    await asyncio.sleep(_length(seconds))


def _length(seconds: str | None) -> float:
    try:
        return max(0.0, min(float(seconds or ""), LONGEST))
    except ValueError:
        return random.uniform(0.03, 0.08)
