"""Where things stand in the drawings of the last hour: scales, charts, and the timeline. Templates draw them.

Looks come from classes: a strict Content-Security-Policy allows no inline style.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast

from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_sqlsem.admin.display import length, visible

if TYPE_CHECKING:
    from django.utils.safestring import SafeString

    from django_sqlsem.history.events import Minute, Percentiles


#: All drawings are as wide, so that one minute stands above the same minute of the others.
DRAWING_WIDTH: Final = 960.0
PLOT_LEFT: Final = 56.0
PLOT_RIGHT: Final = DRAWING_WIDTH - 130.0
TICK: Final = datetime.timedelta(minutes=10)
#: One step of the charts, in seconds.
MINUTE: Final = 60.0
#: What a logarithmic axis may be marked with, in seconds.
_STEPS: Final = (0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 36000.0, 360000.0, 3600000.0)


def svg_number(value: float) -> str:
    """Return a coordinate, in as few characters as a tenth of a pixel needs, whatever the language."""
    return f"{value:.1f}".removesuffix(".0")


def _drawing(
    template: str, scale: TimeScale, *, key: str, title: str, about: str, top: float, bottom: float, **parts: Any
) -> SafeString:
    """Return a whole drawing with its time axis; ``key`` is part of its ids, ``top`` and ``bottom`` bound the plot."""
    places = {"left": PLOT_LEFT, "right": PLOT_RIGHT, "beside": PLOT_RIGHT + 8, "before": PLOT_LEFT - 6}
    places |= {"top": top, "bottom": bottom, "foot": bottom + 4, "words": bottom + 16}
    places |= {"width": DRAWING_WIDTH, "height": bottom + 26}
    ticks = [(scale.x(tick), tick) for tick in scale.ticks()]
    shown = {name: svg_number(place) for name, place in places.items()} | {
        "key": key,
        "title": visible(title),
        "about": visible(about),
        "ticks": [(svg_number(x), f"{tick:%H:%M}" if PLOT_RIGHT - x > 40 else "") for x, tick in ticks],
    }
    return render_to_string(f"admin/sqlsem/{template}", shown | parts)


@dataclass(frozen=True, slots=True)
class TimeScale:
    """From an instant to its place on the time axis. ``now`` is the right end, ``window`` seconds the whole."""

    now: datetime.datetime
    window: float

    @property
    def pixels(self) -> float:
        """How many pixels a second has."""
        return (PLOT_RIGHT - PLOT_LEFT) / self.window

    def x(self, at: datetime.datetime) -> float:
        """Return where an instant is; what is outside is at the edge."""
        before = (self.now - at).total_seconds()
        return PLOT_RIGHT - min(self.window, max(0.0, before)) * self.pixels

    def minute(self, at: datetime.datetime) -> tuple[float, float]:
        """Return where the minute that begins at an instant stands, and its width; it ends now at the latest."""
        left = self.x(at)
        return left, min(PLOT_RIGHT - left, MINUTE * self.pixels)

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


_TOP, _BOTTOM = 14.0, 124.0
#: The lines of a chart of lengths, with their words.
_LINES: Final = (("longest", "max"), ("p95", "p95"), ("p50", "p50"))
#: The middle line of the chart of numbers: granted above, turned away below.
_MIDDLE: Final = 96.0


def lengths(
    key: str, title: str, minutes: Sequence[tuple[datetime.datetime, Percentiles | None]], scale: TimeScale
) -> SafeString | None:
    """Return the chart of one kind of lengths, each minute as a level line; ``None`` if there is nothing to draw.

    Minutes in which nothing was counted are gaps.
    """
    known = [(at, found) for at, found in minutes if found is not None and found.count]
    if not known:
        return None
    heights = LengthScale.of([value for _at, each in known for value in (each.p50, each.longest)], _TOP, _BOTTOM)
    last = known[-1][1]
    places = spread([heights.y(getattr(last, name)) for name, _word in _LINES], 14, _TOP, _BOTTOM)
    about = _("Each minute of the last hour. The latest: %(latest)s. The longest of all: %(longest)s.") % {
        "latest": ", ".join(_said(last)),
        "longest": length(max(each.longest for _at, each in known)),
    }
    return _chart(
        key,
        title,
        about,
        scale,
        grid=[(heights.y(step), length(step), "grid") for step in heights.steps],
        lines=[(name, _path(name, known, scale, heights)) for name, _word in _LINES],
        labels=[
            (y + 4, f"{word} {length(getattr(last, name))}", name)
            for (name, word), y in zip(_LINES, places, strict=True)
        ],
        hovers=[(at, [*_said(each), _("%(count)d counted") % {"count": each.count}]) for at, each in known],
    )


def numbers(key: str, title: str, minutes: Sequence[Minute], scale: TimeScale) -> SafeString | None:
    """Return the chart of how many were granted, upwards, and turned away, downwards; ``None`` if there were none."""
    granted, away = [each.granted for each in minutes], [each.turned_away for each in minutes]
    most = max([*granted, *away], default=0)
    if not most:
        return None
    up = (_MIDDLE - _TOP) / most
    # Downwards there is less room: what would not fit is drawn smaller, but to the same scale while it can be.
    down = min(up, (_BOTTOM - _MIDDLE) / max(away)) if any(away) else up
    columns, hovers = [], []
    said = _("%(granted)d granted"), _("%(away)d turned away"), _("%(lost)d lost")
    for each in minutes:
        left, wide = scale.minute(each.at)
        bars = ("granted", -each.granted * up), ("away", each.turned_away * down)
        for name, high in ((name, high) for name, high in bars if high):
            high = math.copysign(max(1.5, abs(high)), high)
            columns.append((left + 1, min(_MIDDLE, _MIDDLE + high), max(1.0, wide - 2), abs(high), name))
        if each.granted or each.turned_away or each.lost:
            counts = {"granted": each.granted, "away": each.turned_away, "lost": each.lost}
            hovers.append((each.at, [word % counts for word in said]))
    totals = {"granted": sum(granted), "away": sum(away), "lost": sum(each.lost for each in minutes)}
    places = zip((_MIDDLE - 26, _MIDDLE + 14, _MIDDLE + 28), said, totals, strict=True)
    return _chart(
        key,
        title,
        _("In the last hour: %(granted)d granted, %(away)d turned away, %(lost)d lost.") % totals,
        scale,
        grid=[(_TOP, str(most), "grid"), (_MIDDLE, "0", "axis")],
        columns=[(*map(svg_number, place), name) for *place, name in columns],
        labels=[(y, word % totals, name) for y, word, name in places if name != "lost" or totals["lost"]],
        hovers=hovers,
    )


def _chart(
    key: str,
    title: str,
    about: str,
    scale: TimeScale,
    *,
    grid: Sequence[tuple[float, str, str]],
    labels: Sequence[tuple[float, str, str]],
    hovers: Sequence[tuple[datetime.datetime, Sequence[str]]],
    **parts: Any,
) -> SafeString:
    return _drawing(
        "_chart.html",
        scale,
        key=key,
        title=title,
        about=about,
        top=_TOP,
        bottom=_BOTTOM,
        high=svg_number(_BOTTOM - _TOP),
        grid=[(svg_number(y), svg_number(y + 4), word, kind) for y, word, kind in grid],
        labels=[(svg_number(y), word, kind) for y, word, kind in labels],
        hovers=[
            (*map(svg_number, scale.minute(at)), f"{timezone.localtime(at):%H:%M}: {', '.join(said)}")
            for at, said in hovers
        ],
        **parts,
    )


def _path(
    name: str, known: Sequence[tuple[datetime.datetime, Percentiles]], scale: TimeScale, heights: LengthScale
) -> str:
    path: list[str] = []
    before: datetime.datetime | None = None
    for at, each in known:
        left, wide = scale.minute(at)
        y = svg_number(heights.y(getattr(each, name)))
        joined = before is not None and abs((at - before).total_seconds() - MINUTE) < 1
        path.append(f"V{y}" if joined else f"M{svg_number(left)} {y}")
        path.append(f"H{svg_number(left + wide)}")
        before = at
    return "".join(path)


def _said(each: Percentiles) -> list[str]:
    return [f"{word} {length(getattr(each, name))}" for name, word in reversed(_LINES)]


#: So many lanes are drawn, and so many bars: what a page of reasonable size has room for.
MAX_LANES: Final = 40
MAX_BARS: Final = 400
MAX_MARKS: Final = 30
#: Past bars that are narrower are merged, in pixels.
_LEAST: Final = 1.5
_LANE, _BAR, _LANES_TOP = 22.0, 14.0, 34.0
#: The words over the marks: so many rows of them, each character about so wide.
_ROWS, _CHARACTER = 2, 6.2

PAST, HELD, STALE, LOST, DENSE = "past", "held", "stale", "lost", "dense"


@dataclass(frozen=True, slots=True)
class Bar:
    """One hold of one slot, or where ``count`` is more, several of them. ``kind`` is one of the words above."""

    #: ``None``: all slots, of which ``density`` says how much they were held.
    slot: int | None
    x: float
    width: float
    kind: str
    title: str
    #: 1 to 4 where the bar stands for several holds.
    density: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that concerns the whole lock: an operator's act, a deadlock."""

    at: datetime.datetime
    word: str
    title: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One slot, with its word on the left and what is to be said of it now on the right."""

    slot: int
    word: str
    now: str
    kind: str


def density(part: float) -> int:
    """Return by how much darker a bar is of which so large a part was held."""
    return min(4, max(1, math.ceil(part * 4)))


def fewer(bars: Sequence[Bar], most: int = MAX_BARS) -> list[Bar]:
    """Return at most about ``most`` bars: narrow past holds become denser and lighter ones.

    What is held now is never merged, nor are the latest losses.
    """
    lost = [bar for bar in bars if bar.kind == LOST]
    kept = [bar for bar in bars if bar.kind in (HELD, STALE)] + lost[-most // 4 :]
    past = [bar for bar in bars if bar.kind == PAST] + [replace(each, kind=PAST) for each in lost[: -most // 4]]
    least = _LEAST
    while True:
        wide = [bar for bar in past if bar.width >= least]
        narrow = _merged([bar for bar in past if bar.width < least], max(4.0, least))
        if len(kept) + len(wide) + len(narrow) <= most or least > PLOT_RIGHT:
            return [*narrow, *wide, *kept]
        least *= 2


def _merged(narrow: Sequence[Bar], wide: float) -> list[Bar]:
    """Return one bar for all that begin in the same ``wide`` pixels of a lane: the denser, the more they fill it."""
    bins: dict[tuple[int | None, int], list[Bar]] = {}
    for bar in narrow:
        bins.setdefault((bar.slot, math.floor((bar.x - PLOT_LEFT) / wide)), []).append(bar)
    found = []
    for (slot, number), parts in bins.items():
        if len(parts) == 1:
            found.append(replace(parts[0], width=max(1.0, parts[0].width)))
            continue
        title = ngettext("slot %(slot)s: %(count)d hold", "slot %(slot)s: %(count)d short holds", len(parts))
        title %= {"slot": slot, "count": len(parts)}
        left = PLOT_LEFT + number * wide
        filled = density(sum(part.width for part in parts) / wide)
        found.append(Bar(slot, left, min(wide, PLOT_RIGHT - left), DENSE, title, filled, len(parts)))
    return found


def draw(
    lanes: Sequence[Lane],
    bars: Sequence[Bar],
    marks: Sequence[Mark],
    scale: TimeScale,
    *,
    title: str,
    description: str,
) -> SafeString:
    """Return the timeline as SVG."""
    place = {lane.slot: _LANES_TOP + number * _LANE for number, lane in enumerate(lanes)}
    bottom = _LANES_TOP + len(lanes) * _LANE
    drawn = [_drawn(bar, _LANES_TOP, bottom - _LANES_TOP) for bar in bars if bar.slot is None]
    shown = fewer([bar for bar in bars if bar.slot in place])
    drawn += [_drawn(bar, place[cast("int", bar.slot)] + (_LANE - _BAR) / 2, _BAR) for bar in shown]
    return _drawing(
        "_timeline.html",
        scale,
        key="sqlsem-timeline",
        title=title,
        about=description,
        top=_LANES_TOP - 4,
        bottom=bottom,
        lanes=[
            {"y": svg_number(y + _LANE / 2), "words": svg_number(y + _LANE / 2 + 4), "lane": lane}
            for lane, y in zip(lanes, place.values(), strict=True)
        ],
        bars=drawn,
        marks=_marks(marks, scale),
    )


def _drawn(bar: Bar, top: float, high: float) -> dict[str, Any]:
    # Neighbours keep a hair's breadth apart.
    width = bar.width - 0.6 if bar.width > 3 else max(1.0, bar.width)
    found: dict[str, Any] = {"kind": bar.kind, "title": visible(bar.title), "density": bar.density}
    found |= {"x": svg_number(bar.x), "y": svg_number(top), "width": svg_number(width), "height": svg_number(high)}
    found["round"] = width > 4 and bar.slot is not None
    if bar.kind == LOST:
        x, y = min(bar.x + width, PLOT_RIGHT - 4), top + high / 2
        ends = ((x - 4, y + 4), (x + 4, y - 4)), ((x - 4, y - 4), (x + 4, y + 4))
        found["cross"] = "".join("M{} {}L{} {}".format(*map(svg_number, (*one, *two))) for one, two in ends)
    return found


def _marks(marks: Sequence[Mark], scale: TimeScale) -> list[dict[str, Any]]:
    """Return the marks, the newest last; a word that has no room is left to the line's own title."""
    found = []
    free = [PLOT_LEFT] * _ROWS  # where the next word of each row may begin
    for mark in sorted(marks, key=lambda each: each.at)[-MAX_MARKS:]:
        x = scale.x(mark.at)
        wide = len(mark.word) * _CHARACTER
        left = min(x, DRAWING_WIDTH - wide)
        row = next((number for number, least in enumerate(free) if left >= least), None)
        top = _LANES_TOP - 6 if row is None else 4.0 + row * 13
        places = {"x": x, "top": top, "word_x": left + 3, "word_y": top + 8}
        shown = {name: svg_number(place) for name, place in places.items()}
        found.append({**shown, "title": visible(mark.title), "word": "" if row is None else visible(mark.word)})
        if row is not None:
            free[row] = left + wide + 6
    return found
