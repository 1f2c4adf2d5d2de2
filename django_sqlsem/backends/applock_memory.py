"""What claims remember for a while, by name or line: never more than so much."""

from __future__ import annotations

import time
from typing import Final

#: How many names are remembered.
REMEMBERED: Final = 10_000


def remember(memory: dict[str, float], key: str, seconds: float) -> None:
    """Remember a key for so many seconds from now on."""
    if len(memory) > REMEMBERED:
        memory.clear()
    memory[key] = time.monotonic() + seconds


def is_remembered(memory: dict[str, float], key: str) -> bool:
    """Return whether a key's time is not over."""
    return time.monotonic() < memory.get(key, 0.0)
