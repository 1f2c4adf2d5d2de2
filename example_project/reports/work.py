"""The work itself: it takes a little time."""

from __future__ import annotations

import random

LONGEST = 10.0


def seconds_of_work(wanted: str | None = None) -> float:
    """Return how long to work, in seconds: as long as a visitor wants (``?seconds=5``), else 0.03 to 0.08."""
    try:
        return max(0.0, min(float(wanted or ""), LONGEST))
    except ValueError:
        return random.uniform(0.03, 0.08)
