"""Drawings as SVG text: elements, scales and axes, the charts of the last hour, and the timeline of one lock.

All text is escaped, and looks come from classes: a strict Content-Security-Policy allows no inline style.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from django.utils import timezone
from django.utils.html import conditional_escape
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_sqlsem.admin.display import length, visible

if TYPE_CHECKING:
    from django_sqlsem.history.events import Minute, Percentiles


#: The only attributes that a drawing needs; none of them runs or styles anything.
_ATTRIBUTES: Final = frozenset(
    {
        "aria-describedby", "aria-hidden", "aria-labelledby", "class", "d", "fill", "height", "id",
        "patternTransform", "patternUnits", "role", "rx", "text-anchor", "viewBox", "width",
        "x", "x1", "x2", "xmlns", "y", "y1", "y2",
    }
)  # fmt: skip


def svg_number(value: float) -> str:
    """Return a coordinate, in as few characters as a tenth of a pixel needs."""
    return f"{value:.1f}".removesuffix(".0")


def element(tag: str, *content: str, **attributes: object) -> SafeString:
    """Return one element. A trailing ``_`` of an attribute is dropped, another one is a hyphen; ``None`` leaves it out.

    Raises ``ValueError`` for an attribute that drawings do not need, such as ``style`` or ``onclick``.
    """
    parts = []
    for key, value in attributes.items():
        name = key.removesuffix("_").replace("_", "-")
        if name not in _ATTRIBUTES:
            raise ValueError(f"{name!r} is no attribute of a drawing.")
        if value is not None:
            text = svg_number(value) if isinstance(value, float) else str(value)
            parts.append(f' {name}="{conditional_escape(text)}"')
    inner = "".join(conditional_escape(each) for each in content)
    return mark_safe(f"<{tag}{''.join(parts)}>{inner}</{tag}>")  # noqa: S308 - every part is escaped above


def text(words: str, x: float, y: float, class_: str = "", anchor: str | None = None) -> SafeString:
    """Return a line of text."""
    return element("text", visible(words), x=float(x), y=float(y), class_=class_ or None, text_anchor=anchor)


def drawing(*content: str, key: str, height: float, title: str, description: str) -> SafeString:
    """Return a whole drawing, which screen readers announce by its title and description. ``key``: part of its ids."""
    return element(
        "svg",
        element("title", visible(title), id=f"{key}-title"),
        element("desc", visible(description), id=f"{key}-about"),
        *content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {svg_number(DRAWING_WIDTH)} {svg_number(height)}",
        class_="sqlsem-drawing",
        role="img",
        aria_labelledby=f"{key}-title",
        aria_describedby=f"{key}-about",
        id=key,
    )


#: All drawings are as wide, so that one minute stands above the same minute of the others.
DRAWING_WIDTH: Final = 960.0
PLOT_LEFT: Final = 56.0
PLOT_RIGHT: Final = 130.0
TICK: Final = datetime.timedelta(minutes=10)
#: One step of the charts, in seconds.
MINUTE: Final = 60.0
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
        return (DRAWING_WIDTH - PLOT_LEFT - PLOT_RIGHT) / self.window

    def x(self, at: datetime.datetime) -> float:
        """Return where an instant is; what is outside is at the edge."""
        before = (self.now - at).total_seconds()
        return DRAWING_WIDTH - PLOT_RIGHT - min(self.window, max(0.0, before)) * self.pixels

    def minute(self, at: datetime.datetime) -> tuple[float, float]:
        """Return where the minute that begins at an instant stands, and its width; it ends now at the latest."""
        left = self.x(at)
        return left, min(DRAWING_WIDTH - PLOT_RIGHT - left, MINUTE * self.pixels)

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
            parts.append(element("line", x1=x, x2=x, y1=top, y2=bottom + 4, class_="sqlsem-grid"))
            if DRAWING_WIDTH - PLOT_RIGHT - x > 40:
                parts.append(text(f"{tick:%H:%M}", x, bottom + 16, "sqlsem-tick", "middle"))
        right = DRAWING_WIDTH - PLOT_RIGHT
        parts.append(element("line", x1=PLOT_LEFT, x2=right, y1=bottom, y2=bottom, class_="sqlsem-axis"))
        parts.append(text(_("now"), right, bottom + 16, "sqlsem-tick", "end"))
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
            parts.append(element("line", x1=PLOT_LEFT, x2=DRAWING_WIDTH - PLOT_RIGHT, y1=y, y2=y, class_="sqlsem-grid"))
            parts.append(text(length(step), PLOT_LEFT - 6, y + 4, "sqlsem-tick", "end"))
        return parts


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


_HEIGHT: Final = 150.0
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
    labels = [
        _label(f"{word} {length(getattr(last, name))}", y + 4, name)
        for (name, word), y in zip(_LINES, places, strict=True)
    ]
    hovers = [_hover(at, scale, [*_said(each), _("%(count)d counted") % {"count": each.count}]) for at, each in known]
    about = _("Each minute of the last hour. The latest: %(latest)s. The longest of all: %(longest)s.") % {
        "latest": ", ".join(_said(last)),
        "longest": length(max(each.longest for _at, each in known)),
    }
    lines = [_line(name, known, scale, heights) for name, _word in _LINES]
    return _chart(key, title, about, *heights.axis(), *scale.axis(_TOP, _BOTTOM), *lines, *labels, *hovers)


def numbers(key: str, title: str, minutes: Sequence[Minute], scale: TimeScale) -> SafeString | None:
    """Return the chart of how many were granted, upwards, and turned away, downwards; ``None`` if there were none."""
    granted, away = [each.granted for each in minutes], [each.turned_away for each in minutes]
    most = max([*granted, *away], default=0)
    if not most:
        return None
    up = (_MIDDLE - _TOP) / most
    # Downwards there is less room: what would not fit is drawn smaller, but to the same scale while it can be.
    down = min(up, (_BOTTOM - _MIDDLE) / max(away)) if any(away) else up
    parts, hovers = [], []
    said = _("%(granted)d granted"), _("%(away)d turned away"), _("%(lost)d lost")
    for each in minutes:
        if each.granted:
            high = max(1.5, each.granted * up)
            parts.append(_column(each.at, scale, _MIDDLE - high, high, "granted"))
        if each.turned_away:
            parts.append(_column(each.at, scale, _MIDDLE, max(1.5, each.turned_away * down), "away"))
        if each.granted or each.turned_away or each.lost:
            counts = {"granted": each.granted, "away": each.turned_away, "lost": each.lost}
            hovers.append(_hover(each.at, scale, [word % counts for word in said]))
    totals = {"granted": sum(granted), "away": sum(away), "lost": sum(each.lost for each in minutes)}
    places = zip(said, (_MIDDLE - 26, _MIDDLE + 14, _MIDDLE + 28), totals, strict=True)
    labels = [_label(word % totals, y, name) for word, y, name in places if name != "lost" or totals["lost"]]
    return _chart(
        key,
        title,
        _("In the last hour: %(granted)d granted, %(away)d turned away, %(lost)d lost.") % totals,
        text(str(most), PLOT_LEFT - 6, _TOP + 4, "sqlsem-tick", "end"),
        element("line", x1=PLOT_LEFT, x2=DRAWING_WIDTH - PLOT_RIGHT, y1=_TOP, y2=_TOP, class_="sqlsem-grid"),
        text("0", PLOT_LEFT - 6, _MIDDLE + 4, "sqlsem-tick", "end"),
        *scale.axis(_TOP, _BOTTOM),
        element("line", x1=PLOT_LEFT, x2=DRAWING_WIDTH - PLOT_RIGHT, y1=_MIDDLE, y2=_MIDDLE, class_="sqlsem-axis"),
        *parts,
        *labels,
        *hovers,
    )


def _chart(key: str, title: str, about: str, *content: str) -> SafeString:
    return drawing(*content, key=key, height=_HEIGHT, title=title, description=about)


def _label(words: str, y: float, kind: str) -> SafeString:
    return text(words, DRAWING_WIDTH - PLOT_RIGHT + 8, y, f"sqlsem-label sqlsem-{kind}")


def _line(
    name: str, known: Sequence[tuple[datetime.datetime, Percentiles]], scale: TimeScale, heights: LengthScale
) -> SafeString:
    path: list[str] = []
    before: datetime.datetime | None = None
    for at, each in known:
        left, wide = scale.minute(at)
        y = svg_number(heights.y(getattr(each, name)))
        joined = before is not None and abs((at - before).total_seconds() - MINUTE) < 1
        path.append(f"V{y}" if joined else f"M{svg_number(left)} {y}")
        path.append(f"H{svg_number(left + wide)}")
        before = at
    return element("path", d="".join(path), class_=f"sqlsem-line sqlsem-{name}")


def _column(at: datetime.datetime, scale: TimeScale, top: float, high: float, name: str) -> SafeString:
    left, wide = scale.minute(at)
    kind = f"sqlsem-column sqlsem-{name}"
    return element("rect", x=left + 1, y=top, width=max(1.0, wide - 2), height=high, class_=kind)


def _hover(at: datetime.datetime, scale: TimeScale, said: Sequence[str]) -> SafeString:
    left, wide = scale.minute(at)
    title = element("title", visible(f"{timezone.localtime(at):%H:%M}: {', '.join(said)}"))
    high = _BOTTOM - _TOP
    return element("rect", title, x=left, y=_TOP, width=max(1.0, wide), height=high, class_="sqlsem-hover")


def _said(each: Percentiles) -> list[str]:
    return [f"{word} {length(getattr(each, name))}" for name, word in reversed(_LINES)]


#: So many lanes are drawn, and so many bars: what a page of reasonable size has room for.
MAX_LANES: Final = 40
MAX_BARS: Final = 400
MAX_MARKS: Final = 30
#: Past bars that are narrower are merged, in pixels.
_LEAST: Final = 1.5
_LANE, _BAR, _LANES_TOP = 22.0, 14.0, 34.0
_RIGHT_EDGE: Final = DRAWING_WIDTH - PLOT_RIGHT
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
        if len(kept) + len(wide) + len(narrow) <= most or least > _RIGHT_EDGE:
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
        found.append(Bar(slot, left, min(wide, _RIGHT_EDGE - left), DENSE, title, filled, len(parts)))
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
    drawn = fewer([bar for bar in bars if bar.slot in place])
    return drawing(
        _hatch(),
        *scale.axis(_LANES_TOP - 4, bottom),
        *(_rectangle(bar, _LANES_TOP, bottom - _LANES_TOP) for bar in bars if bar.slot is None),
        *(part for lane in lanes for part in _lane(lane, place[lane.slot])),
        *(part for bar in drawn if bar.slot is not None for part in _bar(bar, place[bar.slot])),
        *_marks(marks, scale, bottom),
        key="sqlsem-timeline",
        height=bottom + 24,
        title=title,
        description=description,
    )


def _hatch() -> SafeString:
    line = element("line", x1=0, x2=0, y1=0, y2=6, class_="sqlsem-hatch")
    sizes: dict[str, object] = {"width": 5, "height": 6, "patternUnits": "userSpaceOnUse"}
    return element("defs", element("pattern", line, id="sqlsem-hatched", patternTransform="rotate(45)", **sizes))


def _lane(lane: Lane, y: float) -> list[SafeString]:
    middle = y + _LANE / 2
    return [
        element("line", x1=PLOT_LEFT, x2=_RIGHT_EDGE, y1=middle, y2=middle, class_="sqlsem-lane"),
        text(lane.word, PLOT_LEFT - 8, middle + 4, "sqlsem-word", "end"),
        _label(lane.now, middle + 4, lane.kind),
    ]


def _rectangle(bar: Bar, top: float, high: float) -> SafeString:
    # Neighbours keep a hair's breadth apart.
    width = bar.width - 0.6 if bar.width > 3 else max(1.0, bar.width)
    return element(
        "rect",
        element("title", visible(bar.title)),
        x=bar.x,
        y=top,
        width=width,
        height=high,
        rx=1.5 if width > 4 and bar.slot is not None else None,
        class_=f"sqlsem-bar-{bar.kind}" + (f" sqlsem-d{bar.density}" if bar.density else ""),
        fill="url(#sqlsem-hatched)" if bar.kind == STALE else None,
    )


def _bar(bar: Bar, y: float) -> list[SafeString]:
    top = y + (_LANE - _BAR) / 2
    rectangle = _rectangle(bar, top, _BAR)
    if bar.kind != LOST:
        return [rectangle]
    x, y = min(bar.x + bar.width, _RIGHT_EDGE - 4), top + _BAR / 2
    cross = "".join(
        f"M{svg_number(x - 4)} {svg_number(y + s)}L{svg_number(x + 4)} {svg_number(y - s)}" for s in (4, -4)
    )
    return [rectangle, element("path", element("title", visible(bar.title)), d=cross, class_="sqlsem-cross")]


def _marks(marks: Sequence[Mark], scale: TimeScale, bottom: float) -> list[SafeString]:
    """Return the marks, the newest last; a word that has no room is left to the line's own title."""
    parts = []
    free = [PLOT_LEFT] * _ROWS  # where the next word of each row may begin
    for mark in sorted(marks, key=lambda each: each.at)[-MAX_MARKS:]:
        x = scale.x(mark.at)
        words = element("title", visible(mark.title))
        wide = len(mark.word) * _CHARACTER
        left = min(x, DRAWING_WIDTH - wide)
        row = next((number for number, least in enumerate(free) if left >= least), None)
        top = _LANES_TOP - 6 if row is None else 4.0 + row * 13
        parts.append(element("line", words, x1=x, x2=x, y1=top, y2=bottom, class_="sqlsem-mark"))
        if row is not None:
            free[row] = left + wide + 6
            parts.append(text(mark.word, left + 3, top + 8, "sqlsem-mark-word"))
    return parts
