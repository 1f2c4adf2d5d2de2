"""Scales of the drawings: instants to pixels, lengths of time to pixels on a logarithmic scale, and their axes."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from django.utils import timezone
from django.utils.translation import gettext as _

from django_sqlsem.dashboard import svg
from django_sqlsem.durations import duration

if TYPE_CHECKING:
    from django.utils.safestring import SafeString

#: All drawings are as wide, so that one minute stands above the same minute of the others.
WIDTH: Final = 960.0
LEFT: Final = 56.0
RIGHT: Final = 130.0
TICK: Final = datetime.timedelta(minutes=10)
#: What a logarithmic axis may be marked with, in seconds.
_STEPS: Final = (0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 36000.0, 360000.0, 3600000.0)


@dataclass(frozen=True, slots=True)
class TimeScale:
    """From an instant to its place on the time axis. ``now`` is the right end, ``window`` seconds the whole."""

    now: datetime.datetime
    window: float

    @property
    def pixels(self) -> float:
        """How many pixels a second has."""
        return (WIDTH - LEFT - RIGHT) / self.window

    def x(self, at: datetime.datetime) -> float:
        """Return where an instant is; what is outside is at the edge."""
        before = (self.now - at).total_seconds()
        return WIDTH - RIGHT - min(self.window, max(0.0, before)) * self.pixels

    def ticks(self) -> list[datetime.datetime]:
        """Return the round instants within, in the current time zone."""
        local = timezone.localtime(self.now)
        # Counted in UTC: hours on the wall are missing or come twice when the clocks are changed.
        at = local.replace(minute=local.minute // 10 * 10, second=0, microsecond=0).astimezone(datetime.UTC)
        found = []
        while (self.now - at).total_seconds() < self.window:
            found.append(timezone.localtime(at))
            at -= TICK
        return found[::-1]

    def axis(self, top: float, bottom: float) -> list[SafeString]:
        """Return the lines and words of the time axis, for a plot from ``top`` to ``bottom``."""
        parts = []
        for tick in self.ticks():
            x = self.x(tick)
            parts.append(svg.element("line", x1=x, x2=x, y1=top, y2=bottom + 4, class_="sqlsem-grid"))
            if WIDTH - RIGHT - x > 40:
                parts.append(svg.text(f"{tick:%H:%M}", x, bottom + 16, "sqlsem-tick", "middle"))
        right = WIDTH - RIGHT
        parts.append(svg.element("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="sqlsem-axis"))
        parts.append(svg.text(_("now"), right, bottom + 16, "sqlsem-tick", "end"))
        return parts


@dataclass(frozen=True, slots=True)
class LengthScale:
    """From a length of time to its height: each step is several times the one below."""

    steps: tuple[float, ...]
    top: float
    bottom: float

    @classmethod
    def of(cls, lengths: Sequence[float], top: float, bottom: float) -> LengthScale:
        """Return a scale that has room for all these."""
        least, most = min(lengths, default=0.0), max(lengths, default=0.0)
        first = max((number for number, step in enumerate(_STEPS) if step <= least), default=0)
        last = next((number for number, step in enumerate(_STEPS) if step >= most), len(_STEPS) - 1)
        first = min(first, len(_STEPS) - 2)
        return cls(_STEPS[first : max(last, first + 1) + 1], top, bottom)

    def y(self, seconds: float) -> float:
        """Return where a length is; what is off the scale is at its edge."""
        low, high = math.log(self.steps[0]), math.log(self.steps[-1])
        share = (math.log(max(seconds, self.steps[0])) - low) / (high - low)
        return self.bottom - min(1.0, share) * (self.bottom - self.top)

    def axis(self) -> list[SafeString]:
        """Return its lines and words."""
        parts = []
        for step in self.steps:
            y = self.y(step)
            parts.append(svg.element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="sqlsem-grid"))
            parts.append(svg.text(length(step), LEFT - 6, y + 4, "sqlsem-tick", "end"))
        return parts


def length(seconds: float) -> str:
    """Return a length of time; below a second in milliseconds, and round ones without a fraction."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.00095 or not seconds else "< 1 ms"
    for size, unit in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size and seconds % size == 0 and seconds < size * 60:
            return f"{seconds / size:.0f} {unit}"
    return duration(seconds)


def spread(wanted: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """Return heights near the ``wanted`` ones, in their order, at least ``gap`` apart if there is room."""
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    placed: dict[int, float] = {}
    least = top
    for number in order:
        placed[number] = max(wanted[number], least)
        least = placed[number] + gap
    most = bottom
    for number in reversed(order):
        placed[number] = min(placed[number], most)
        most = placed[number] - gap
    return [placed[number] for number in range(len(wanted))]
