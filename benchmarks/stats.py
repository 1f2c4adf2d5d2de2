"""The statistics: pure functions of numbers."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Turn(NamedTuple):
    """One acquisition: who asked, and when it asked, was granted and gave back. Instants in seconds of one clock.

    ``granted`` is ``None`` for one that was still waiting at the end.
    """

    who: int
    asked: float
    granted: float | None
    released: float | None


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` (0 to 1) of the values lie, interpolated between its neighbours.

    Raises ``ValueError`` for no values, or a share that is not from 0 to 1.
    """
    if not values:
        raise ValueError("A percentile needs at least one value.")
    if not 0 <= share <= 1:
        raise ValueError(f"share must be from 0 to 1, not {share!r}.")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    if low == high:  # also if both are infinite
        return low
    return low + (high - low) * (place - math.floor(place))


def median(values: Sequence[float]) -> float:
    """Return the value in the middle. Raises ``ValueError`` for no values."""
    return percentile(values, 0.5)


def jain(shares: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 if all shares are equal, 1/n if one has everything; 1 if there is nothing.

    Raises ``ValueError`` for no shares or a negative one.
    """
    if not shares or min(shares) < 0:
        raise ValueError(f"Jain's index needs shares of 0 or more, not {list(shares)!r}.")
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def most_overtaken(turns: Iterable[Turn], end: float) -> int:
    """Return how many that asked later were granted before a waiter, at the most; ``end`` is when watching ended."""
    turns = list(turns)
    granted = sorted((turn.granted, turn.asked) for turn in turns if turn.granted is not None and turn.granted <= end)
    instants = [instant for instant, _ in granted]
    worst = 0
    for turn in turns:
        until = end if turn.granted is None else min(turn.granted, end)
        first, last = bisect.bisect_right(instants, turn.asked), bisect.bisect_left(instants, until)
        worst = max(worst, sum(asked > turn.asked for _, asked in granted[first:last]))
    return worst


def longest_wait(turns: Iterable[Turn], end: float) -> float:
    """Return the longest wait in seconds, also of those that still waited at ``end``; 0 if nobody asked."""
    waits = (min(end, math.inf if turn.granted is None else turn.granted) - turn.asked for turn in turns)
    return max((wait for wait in waits if wait > 0), default=0.0)


def most_at_once(turns: Iterable[Turn]) -> int:
    """Return how many were in at the same time, at the most."""
    changes = []
    for turn in turns:
        if turn.granted is not None:
            changes.append((turn.granted, 1))
            changes.append((math.inf if turn.released is None else turn.released, -1))
    inside = most = 0
    for _, change in sorted(changes):  # at one instant, who leaves goes before who enters
        inside += change
        most = max(most, inside)
    return most
