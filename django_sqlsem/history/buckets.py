"""Histograms of lengths of time: buckets that grow by a fifth, kept as a short text, added up by whoever reads them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from django_sqlsem.history.events import Percentiles

#: So many buckets for each doubling.
PER_DOUBLING: Final = 4
#: The longest text that a row takes.
MAX_TEXT: Final = 1000
_LAST: Final = 63 * PER_DOUBLING


def bucket(microseconds: int) -> int:
    """Return the number of the bucket of a length of time: 0 is for none at all."""
    if microseconds <= 0:
        return 0
    return min(_LAST, 1 + int(PER_DOUBLING * math.log2(microseconds)))


def middle(number: int) -> float:
    """Return the middle of a bucket, in microseconds."""
    return 2.0 ** ((number - 0.5) / PER_DOUBLING) if number else 0.0


def to_text(counts: Mapping[int, int]) -> str:
    """Return ``"0:12 41:3"``; where that would be too long, with neighbours put together."""
    width = 1
    while True:
        merged: dict[int, int] = {}
        for number, count in counts.items():
            # Into the upper one, and what took no time stays apart.
            into = min(_LAST, -(-number // width) * width)
            merged[into] = merged.get(into, 0) + count
        text = " ".join(f"{number}:{merged[number]}" for number in sorted(merged))
        if len(text) <= MAX_TEXT:
            return text
        width *= 2


def from_text(text: str) -> dict[int, int]:
    """Return the counts of each bucket. What is not a histogram counts as none."""
    counts: dict[int, int] = {}
    for part in text.split():
        number, _, count = part.partition(":")
        if number.isdigit() and count.isdigit():
            counts[int(number)] = counts.get(int(number), 0) + int(count)
    return counts


def add_up(texts: Iterable[str]) -> dict[int, int]:
    """Return the sum of several histograms."""
    total: dict[int, int] = {}
    for text in texts:
        for number, count in from_text(text).items():
            total[number] = total.get(number, 0) + count
    return total


def percentiles(counts: Mapping[int, int], longest_us: int) -> Percentiles | None:
    """Return what a histogram says, in seconds; ``None`` if it is empty. ``longest_us``: the longest, exactly."""
    count = sum(counts.values())
    if not count:
        return None
    return Percentiles(
        count=count,
        p50=_at(counts, 0.50 * count, longest_us) / 1e6,
        p95=_at(counts, 0.95 * count, longest_us) / 1e6,
        longest=longest_us / 1e6,
    )


def _at(counts: Mapping[int, int], rank: float, longest_us: int) -> float:
    seen = 0
    for number in sorted(counts):
        seen += counts[number]
        if seen >= rank:
            break
    return min(middle(number), float(longest_us))
