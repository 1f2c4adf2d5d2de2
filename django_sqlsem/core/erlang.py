"""How long a queue before several slots gets: the formulas of A. K. Erlang (1917) for calls that come at random.

``load`` is in erlangs: arrivals per second times the mean hold in seconds, which is how many slots are busy on average.
The formulas are those of R. B. Cooper, Introduction to Queueing Theory, 2nd edition (1981), chapter 3: calls arrive
independently of each other, holds are spread exponentially, who finds all slots busy is lost (B), or waits in order of
arrival for as long as it takes (C). Between these two is who gives up after some time: D. Y. Barrer, Queuing with
Impatient Customers and Ordered Service, Operations Research 5 (1957).
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
    #: Of all calls, those that give up too. ``inf``: the queue grows for as long as calls come like that.
    mean_wait: float
    #: The part of the calls that would give up.
    refused: float


#: Beyond this power of e nothing changes any more, and within this one its powers are lost in rounding.
_MOST, _LEAST = 700.0, 1e-5


def forecast(load: float, hold: float, slots: int, patience: float | None) -> Forecast:
    """Return what is to be expected.

    ``hold``: the mean hold, in seconds. ``patience``: after this many seconds a call gives up; ``None``: never.
    """
    rate, serves = load / hold, slots / hold  # calls that come, and at most are served, in a second
    spare = serves - rate
    if patience is None:
        if spare <= 0:
            return Forecast(slots, 1.0, 1.0, math.inf, 0.0)
        waits = erlang_c(load, slots)
        return Forecast(slots, load / slots, waits, waits / spare, 0.0)
    # By the chance that a call finds one slot free: that it waits at all, its mean wait, and that it gives up.
    end = math.exp(min(_MOST, -spare * patience))
    if abs(spare * patience) < _LEAST:
        waits, mean = patience, patience * patience / 2
    else:
        waits, mean = (1 - end) / spare, (1 - end * (1 + spare * patience)) / spare**2
    waits, mean, refused = rate * (waits + end / serves), rate * (mean + patience * end / serves), rate * end / serves
    one_free = 1 / (1 / erlang_b(load, slots - 1) + waits)
    used = load * (1 - one_free * refused) / slots
    return Forecast(slots, used, one_free * waits, one_free * mean, one_free * refused)
