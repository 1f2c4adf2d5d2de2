"""How long a queue before several slots gets: the formulas of A. K. Erlang (1917) for calls that come at random.

``load`` is in erlangs: arrivals per second times the mean hold in seconds, the number of slots that are busy on average.
The formulas are those of R. B. Cooper, Introduction to Queueing Theory, 2nd edition (1981), sections 3.3 and 3.4: calls
arrive independently of each other, holds are spread exponentially, who finds all slots busy is lost (B), or waits in
order of arrival for as long as it takes (C).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def erlang_b(load: float, slots: int) -> float:
    """Return the part of calls that find all slots busy, if those are lost: from 0 to 1.

    It is built up slot by slot, which overflows for no number of slots.
    """
    lost = 1.0
    for number in range(1, slots + 1):
        lost = load * lost / (number + load * lost)
    return lost


def erlang_c(load: float, slots: int) -> float:
    """Return the part of calls that have to wait, if all wait until they are served; 1 if the slots cannot keep up."""
    if load >= slots:
        return 1.0
    lost = erlang_b(load, slots)
    return lost / (1 - load / slots * (1 - lost))


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is to be expected with a number of slots. Parts are from 0 to 1, lengths are seconds."""

    slots: int
    #: The part of the slots' time in which they would be held.
    used: float
    #: The part of the calls that would not get a slot at once.
    waits: float
    #: ``inf``: the queue grows for as long as calls come like that.
    mean_wait: float
    p95_wait: float
    #: The part of the calls that would give up: ``None`` if nobody is known to.
    refused: float | None


def forecast(load: float, hold: float, slots: int, patience: float | None) -> Forecast:
    """Return what is to be expected.

    ``hold``: the mean hold, in seconds. ``patience``: after so many seconds a call gives up; 0: at once, and nobody
    waits; ``None``: never.
    """
    used = min(1.0, load / slots)
    if patience == 0:
        lost = erlang_b(load, slots)
        return Forecast(slots, load * (1 - lost) / slots, lost, 0.0, 0.0, lost)
    waits, spare = erlang_c(load, slots), slots - load
    if spare <= 0:  # those who cannot be served give up, whatever they wait
        return Forecast(slots, used, waits, math.inf, math.inf, None if patience is None else 1 - slots / load)
    p95 = hold / spare * math.log(waits / 0.05) if waits > 0.05 else 0.0
    refused = None if patience is None else waits * math.exp(-spare * patience / hold)
    return Forecast(slots, used, waits, waits * hold / spare, p95, refused)
