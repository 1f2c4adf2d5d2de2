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

from django_sqlsem.admin.display import users, visible
from django_sqlsem.core.durations import duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from django.utils.safestring import SafeString

    from django_sqlsem.history.events import Minute, Percentiles


__all__ = ["drawing", "element", "svg_number", "text", "users", "visible"]

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


def drawing(
    *content: str, key: str, width: float, height: float, title: str, description: str, class_: str = ""
) -> SafeString:
    """Return a whole drawing, which screen readers announce by its title and description. ``key``: part of its ids."""
    return element(
        "svg",
        element("title", visible(title), id=f"{key}-title"),
        element("desc", visible(description), id=f"{key}-about"),
        *content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {svg_number(width)} {svg_number(height)}",
        class_=f"sqlsem-drawing {class_}".strip(),
        role="img",
        aria_labelledby=f"{key}-title",
        aria_describedby=f"{key}-about",
        id=key,
    )


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
            parts.append(element("line", x1=x, x2=x, y1=top, y2=bottom + 4, class_="sqlsem-grid"))
            if WIDTH - RIGHT - x > 40:
                parts.append(text(f"{tick:%H:%M}", x, bottom + 16, "sqlsem-tick", "middle"))
        right = WIDTH - RIGHT
        parts.append(element("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="sqlsem-axis"))
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
            parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="sqlsem-grid"))
            parts.append(text(length(step), LEFT - 6, y + 4, "sqlsem-tick", "end"))
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


_HEIGHT: Final = 150.0
_TOP, _BOTTOM = 14.0, 124.0
#: The lines of a chart of lengths, with their words.
_LINES: Final = (("longest", "max"), ("p95", "p95"), ("p50", "p50"))
#: The middle line of the chart of numbers: granted above, turned away below.
_MIDDLE: Final = 96.0


def lengths(
    key: str, title: str, steps: Sequence[tuple[datetime.datetime, Percentiles | None]], scale: TimeScale, step: float
) -> SafeString | None:
    """Return the chart of one kind of lengths, each step as a level line; ``None`` if there is nothing to draw.

    ``step`` is the length of one step in seconds. Steps in which nothing was counted are gaps.
    """
    known = [(at, found) for at, found in steps if found is not None and found.count]
    if not known:
        return None
    heights = LengthScale.of([value for _at, each in known for value in (each.p50, each.longest)], _TOP, _BOTTOM)
    last = known[-1][1]
    lines = [_line(name, known, scale, heights, step) for name, _word in _LINES]
    words = [f"{word} {length(getattr(last, name))}" for name, word in _LINES]
    places = spread([heights.y(getattr(last, name)) for name, _word in _LINES], 14, _TOP, _BOTTOM)
    labels = [
        text(word, WIDTH - RIGHT + 8, y + 4, f"sqlsem-label sqlsem-{name}")
        for (name, _word), word, y in zip(_LINES, words, places, strict=True)
    ]
    hovers = [
        _hover(
            at, scale, step, f"{_clock(at)}: {', '.join(_said(each))}, {_('%(count)d counted') % {'count': each.count}}"
        )
        for at, each in known
    ]
    most = max(each.longest for _at, each in known)
    about = _("Each minute of the last hour. The latest: %(latest)s. The longest of all: %(longest)s.") % {
        "latest": ", ".join(_said(last)),
        "longest": length(most),
    }
    return drawing(
        *heights.axis(),
        *scale.axis(_TOP, _BOTTOM),
        *lines,
        *labels,
        *hovers,
        key=key,
        width=WIDTH,
        height=_HEIGHT,
        title=title,
        description=about,
    )


def numbers(key: str, title: str, minutes: Sequence[Minute], scale: TimeScale, step: float) -> SafeString | None:
    """Return the chart of how many were granted, upwards, and turned away, downwards; ``None`` if there were none."""
    granted, away = [each.granted for each in minutes], [each.turned_away for each in minutes]
    most = max([*granted, *away], default=0)
    if not most:
        return None
    up = (_MIDDLE - _TOP) / most
    # Downwards there is less room: what would not fit is drawn smaller, but to the same scale while it can be.
    down = min(up, (_BOTTOM - _MIDDLE) / max(away)) if any(away) else up
    parts = []
    for each in minutes:
        if each.granted:
            parts.append(_column(each, scale, step, _MIDDLE - max(1.5, each.granted * up), _MIDDLE, "granted"))
        if each.turned_away:
            parts.append(_column(each, scale, step, _MIDDLE, _MIDDLE + max(1.5, each.turned_away * down), "away"))
    totals = {"granted": sum(granted), "away": sum(away), "lost": sum(each.lost for each in minutes)}
    words = [(_("%(granted)d granted"), _MIDDLE - 26, "granted"), (_("%(away)d turned away"), _MIDDLE + 14, "away")]
    if totals["lost"]:
        words.append((_("%(lost)d lost"), _MIDDLE + 28, "lost"))
    labels = [text(word % totals, WIDTH - RIGHT + 8, y, f"sqlsem-label sqlsem-{name}") for word, y, name in words]
    hovers = [
        _hover(each.at, scale, step, _("%(time)s: %(granted)d granted, %(away)d turned away, %(lost)d lost") % {
            "time": _clock(each.at), "granted": each.granted, "away": each.turned_away, "lost": each.lost,
        })
        for each in minutes
        if each.granted or each.turned_away or each.lost
    ]  # fmt: skip
    return drawing(
        text(str(most), LEFT - 6, _TOP + 4, "sqlsem-tick", "end"),
        element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=_TOP, y2=_TOP, class_="sqlsem-grid"),
        text("0", LEFT - 6, _MIDDLE + 4, "sqlsem-tick", "end"),
        *scale.axis(_TOP, _BOTTOM),
        element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=_MIDDLE, y2=_MIDDLE, class_="sqlsem-axis"),
        *parts,
        *labels,
        *hovers,
        key=key,
        width=WIDTH,
        height=_HEIGHT,
        title=title,
        description=_("In the last hour: %(granted)d granted, %(away)d turned away, %(lost)d lost.") % totals,
    )


def _line(
    name: str,
    known: Sequence[tuple[datetime.datetime, Percentiles]],
    scale: TimeScale,
    heights: LengthScale,
    step: float,
) -> SafeString:
    path: list[str] = []
    before: datetime.datetime | None = None
    for at, each in known:
        left, right = _edges(at, scale, step)
        y = svg_number(heights.y(getattr(each, name)))
        joined = before is not None and abs((at - before).total_seconds() - step) < 1
        path.append(f"V{y}" if joined else f"M{svg_number(left)} {y}")
        path.append(f"H{svg_number(right)}")
        before = at
    return element("path", d="".join(path), class_=f"sqlsem-line sqlsem-{name}")


def _column(each: Minute, scale: TimeScale, step: float, top: float, bottom: float, name: str) -> SafeString:
    left, right = _edges(each.at, scale, step)
    wide = max(1.0, right - left - 2)
    return element("rect", x=left + 1, y=top, width=wide, height=bottom - top, class_=f"sqlsem-column sqlsem-{name}")


def _hover(at: datetime.datetime, scale: TimeScale, step: float, words: str) -> SafeString:
    left, right = _edges(at, scale, step)
    title = element("title", visible(words))
    wide = max(1.0, right - left)
    return element("rect", title, x=left, y=_TOP, width=wide, height=_BOTTOM - _TOP, class_="sqlsem-hover")


def _edges(at: datetime.datetime, scale: TimeScale, step: float) -> tuple[float, float]:
    left = scale.x(at)
    return left, min(WIDTH - RIGHT, scale.x(at) + step * scale.pixels)


def _said(each: Percentiles) -> list[str]:
    return [f"{word} {length(getattr(each, name))}" for name, word in reversed(_LINES)]


def _clock(at: datetime.datetime) -> str:
    return f"{timezone.localtime(at):%H:%M}"


#: So many lanes are drawn, and so many bars: what a page of reasonable size has room for.
MAX_LANES: Final = 40
MAX_BARS: Final = 400
MAX_MARKS: Final = 30
#: Past bars that are narrower are merged, in pixels.
_LEAST: Final = 1.5
_LANE, _BAR, _LANES_TOP = 22.0, 14.0, 34.0
_RIGHT_EDGE: Final = WIDTH - RIGHT
#: The words over the marks: so many rows of them, each character about so wide.
_ROWS, _CHARACTER = 2, 6.2

PAST, HELD, STALE, LOST, DENSE = "past", "held", "stale", "lost", "dense"


@dataclass(frozen=True, slots=True)
class Bar:
    """One hold of one slot; ``kind`` is one of the words above."""

    slot: int
    start: datetime.datetime
    end: datetime.datetime
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that concerns the whole lock: an operator's act, a deadlock."""

    at: datetime.datetime
    word: str
    title: str


@dataclass(frozen=True, slots=True)
class Average:
    """How much all slots were held in a while of which single holds are not drawn: ``part`` is 0 to 1."""

    start: datetime.datetime
    end: datetime.datetime
    part: float
    title: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One slot, with its word on the left and what is to be said of it now on the right."""

    slot: int
    word: str
    now: str
    kind: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of the drawing. ``density`` is 1 to 4 where it stands for several holds."""

    slot: int
    x: float
    width: float
    kind: str
    title: str
    density: int = 0
    count: int = 1


def pieces(bars: Iterable[Bar], scale: TimeScale, most: int = MAX_BARS) -> list[Piece]:
    """Return what to draw: at most about ``most`` rectangles; narrow past holds become denser and lighter ones.

    What is held now is never merged, nor are the latest losses.
    """
    whole = [_piece(bar, scale) for bar in bars]
    kept = [piece for piece in whole if piece.kind in (HELD, STALE)]
    lost = [piece for piece in whole if piece.kind == LOST]
    kept += lost[-most // 4 :]
    past = [piece for piece in whole if piece.kind == PAST] + [replace(each, kind=PAST) for each in lost[: -most // 4]]
    least = _LEAST
    while True:
        wide = [piece for piece in past if piece.width >= least]
        narrow = _merged([piece for piece in past if piece.width < least], max(4.0, least))
        if len(kept) + len(wide) + len(narrow) <= most or least > _RIGHT_EDGE:
            return [*narrow, *wide, *kept]
        least *= 2


def _piece(bar: Bar, scale: TimeScale) -> Piece:
    left, right = scale.x(bar.start), scale.x(bar.end)
    return Piece(bar.slot, left, right - left, bar.kind, bar.title)


def _merged(narrow: Iterable[Piece], wide: float) -> list[Piece]:
    """Return one piece for all that begin in the same ``wide`` pixels of a lane: the denser, the more they fill it."""
    bins: dict[tuple[int, int], list[Piece]] = {}
    for piece in narrow:
        bins.setdefault((piece.slot, math.floor((piece.x - LEFT) / wide)), []).append(piece)
    found = []
    for (slot, number), parts in bins.items():
        if len(parts) == 1:
            found.append(replace(parts[0], width=max(1.0, parts[0].width)))
            continue
        filled = min(1.0, sum(part.width for part in parts) / wide)
        title = ngettext("slot %(slot)s: %(count)d hold", "slot %(slot)s: %(count)d short holds", len(parts))
        title %= {"slot": slot, "count": len(parts)}
        left = LEFT + number * wide
        width = min(wide, _RIGHT_EDGE - left)
        found.append(Piece(slot, left, width, DENSE, title, max(1, math.ceil(filled * 4)), len(parts)))
    return found


def draw(
    lanes: Sequence[Lane],
    bars: Sequence[Bar],
    marks: Sequence[Mark],
    averages: Sequence[Average],
    scale: TimeScale,
    *,
    title: str,
    description: str,
) -> SafeString:
    """Return the timeline as SVG."""
    place = {lane.slot: _LANES_TOP + number * _LANE for number, lane in enumerate(lanes)}
    bottom = _LANES_TOP + len(lanes) * _LANE
    drawn = pieces([bar for bar in bars if bar.slot in place], scale)
    return drawing(
        _hatch(),
        *scale.axis(_LANES_TOP - 4, bottom),
        *(_average(each, scale, bottom) for each in averages if each.part > 0),
        *(part for lane in lanes for part in _lane(lane, place[lane.slot])),
        *(part for piece in drawn for part in _bar(piece, place[piece.slot])),
        *_marks(marks, scale, bottom),
        key="sqlsem-timeline",
        width=WIDTH,
        height=bottom + 24,
        title=title,
        description=description,
    )


def _hatch() -> SafeString:
    line = element("line", x1=0, x2=0, y1=0, y2=6, class_="sqlsem-hatch")
    pattern = element(
        "pattern",
        line,
        id="sqlsem-hatched",
        width=5,
        height=6,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )
    return element("defs", pattern)


def _average(each: Average, scale: TimeScale, bottom: float) -> SafeString:
    left, right = scale.x(each.start), scale.x(each.end)
    words = element("title", visible(each.title))
    density = min(4, max(1, math.ceil(each.part * 4)))
    wide = max(1.0, right - left - 1)
    kind = f"sqlsem-bar-dense sqlsem-d{density}"
    return element("rect", words, x=left, y=_LANES_TOP, width=wide, height=bottom - _LANES_TOP, class_=kind)


def _lane(lane: Lane, y: float) -> list[SafeString]:
    middle = y + _LANE / 2
    return [
        element("line", x1=LEFT, x2=_RIGHT_EDGE, y1=middle, y2=middle, class_="sqlsem-lane"),
        text(lane.word, LEFT - 8, middle + 4, "sqlsem-word", "end"),
        text(lane.now, _RIGHT_EDGE + 8, middle + 4, f"sqlsem-label sqlsem-{lane.kind}"),
    ]


def _bar(piece: Piece, y: float) -> list[SafeString]:
    top = y + (_LANE - _BAR) / 2
    words = element("title", visible(piece.title))
    density = f" sqlsem-d{piece.density}" if piece.density else ""
    # Neighbours keep a hair's breadth apart.
    width = piece.width - 0.6 if piece.width > 3 else max(1.0, piece.width)
    rectangle = element(
        "rect",
        words,
        x=piece.x,
        y=top,
        width=width,
        height=_BAR,
        rx=1.5 if width > 4 else None,
        class_=f"sqlsem-bar-{piece.kind}{density}",
        fill="url(#sqlsem-hatched)" if piece.kind == STALE else None,
    )
    if piece.kind != LOST:
        return [rectangle]
    x, y = min(piece.x + width, _RIGHT_EDGE - 4), top + _BAR / 2
    cross = "".join(
        f"M{svg_number(x - 4)} {svg_number(y + s)}L{svg_number(x + 4)} {svg_number(y - s)}" for s in (4, -4)
    )
    return [rectangle, element("path", words, d=cross, class_="sqlsem-cross")]


def _marks(marks: Sequence[Mark], scale: TimeScale, bottom: float) -> list[SafeString]:
    """Return the marks, the newest last; a word that has no room is left to the line's own title."""
    parts = []
    free = [LEFT] * _ROWS  # where the next word of each row may begin
    for mark in sorted(marks, key=lambda each: each.at)[-MAX_MARKS:]:
        x = scale.x(mark.at)
        words = element("title", visible(mark.title))
        wide = len(mark.word) * _CHARACTER
        left = min(x, WIDTH - wide)
        row = next((number for number, least in enumerate(free) if left >= least), None)
        top = _LANES_TOP - 6 if row is None else 4.0 + row * 13
        parts.append(element("line", words, x1=x, x2=x, y1=top, y2=bottom, class_="sqlsem-mark"))
        if row is not None:
            free[row] = left + wide + 6
            parts.append(text(mark.word, left + 3, top + 8, "sqlsem-mark-word"))
    return parts
