"""For the tests of projects that use semaphores: busy, held and lost ones, a clock to move, and what was left held."""

from __future__ import annotations

from django_sqlsem.testing.clock import Clock, clock
from django_sqlsem.testing.forcing import busy, held, lost, stop_requested
from django_sqlsem.testing.recording import (
    Recorded,
    RecordedAcquisition,
    assert_nothing_held,
    make_busy,
    nothing_held,
    recorded,
)

#: The name by which tests may know it.
Acquisition = RecordedAcquisition

__all__ = [
    "Acquisition",
    "Clock",
    "Recorded",
    "RecordedAcquisition",
    "assert_nothing_held",
    "busy",
    "clock",
    "held",
    "lost",
    "make_busy",
    "nothing_held",
    "recorded",
    "stop_requested",
]
