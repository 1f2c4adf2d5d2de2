"""The timeline of one lock: a lane per slot, with past and present holds as bars, and what operators did as marks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from django.utils.translation import ngettext

from django_sqlsem.dashboard import svg
from django_sqlsem.dashboard.scales import LEFT, RIGHT, WIDTH

if TYPE_CHECKING:
    import datetime
    from collections.abc import Iterable, Sequence

    from django.utils.safestring import SafeString

    from django_sqlsem.dashboard.scales import TimeScale

#: So many lanes are drawn, and so many bars: what a page of reasonable size has room for.
MAX_LANES: Final = 40
MAX_BARS: Final = 400
MAX_MARKS: Final = 30
#: Past bars that are narrower are merged, in pixels.
_LEAST: Final = 1.5
_LANE, _BAR, _TOP = 22.0, 14.0, 34.0
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
    place = {lane.slot: _TOP + number * _LANE for number, lane in enumerate(lanes)}
    bottom = _TOP + len(lanes) * _LANE
    drawn = pieces([bar for bar in bars if bar.slot in place], scale)
    return svg.drawing(
        _hatch(),
        *scale.axis(_TOP - 4, bottom),
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
    line = svg.element("line", x1=0, x2=0, y1=0, y2=6, class_="sqlsem-hatch")
    pattern = svg.element(
        "pattern",
        line,
        id="sqlsem-hatched",
        width=5,
        height=6,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )
    return svg.element("defs", pattern)


def _average(each: Average, scale: TimeScale, bottom: float) -> SafeString:
    left, right = scale.x(each.start), scale.x(each.end)
    words = svg.element("title", svg.visible(each.title))
    density = min(4, max(1, math.ceil(each.part * 4)))
    wide = max(1.0, right - left - 1)
    kind = f"sqlsem-bar-dense sqlsem-d{density}"
    return svg.element("rect", words, x=left, y=_TOP, width=wide, height=bottom - _TOP, class_=kind)


def _lane(lane: Lane, y: float) -> list[SafeString]:
    middle = y + _LANE / 2
    return [
        svg.element("line", x1=LEFT, x2=_RIGHT_EDGE, y1=middle, y2=middle, class_="sqlsem-lane"),
        svg.text(lane.word, LEFT - 8, middle + 4, "sqlsem-word", "end"),
        svg.text(lane.now, _RIGHT_EDGE + 8, middle + 4, f"sqlsem-label sqlsem-{lane.kind}"),
    ]


def _bar(piece: Piece, y: float) -> list[SafeString]:
    top = y + (_LANE - _BAR) / 2
    words = svg.element("title", svg.visible(piece.title))
    density = f" sqlsem-d{piece.density}" if piece.density else ""
    # Neighbours keep a hair's breadth apart.
    width = piece.width - 0.6 if piece.width > 3 else max(1.0, piece.width)
    rectangle = svg.element(
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
        f"M{svg.number(x - 4)} {svg.number(y + s)}L{svg.number(x + 4)} {svg.number(y - s)}" for s in (4, -4)
    )
    return [rectangle, svg.element("path", words, d=cross, class_="sqlsem-cross")]


def _marks(marks: Sequence[Mark], scale: TimeScale, bottom: float) -> list[SafeString]:
    """Return the marks, the newest last; a word that has no room is left to the line's own title."""
    parts = []
    free = [LEFT] * _ROWS  # where the next word of each row may begin
    for mark in sorted(marks, key=lambda each: each.at)[-MAX_MARKS:]:
        x = scale.x(mark.at)
        words = svg.element("title", svg.visible(mark.title))
        wide = len(mark.word) * _CHARACTER
        left = min(x, WIDTH - wide)
        row = next((number for number, least in enumerate(free) if left >= least), None)
        top = _TOP - 6 if row is None else 4.0 + row * 13
        parts.append(svg.element("line", words, x1=x, x2=x, y1=top, y2=bottom, class_="sqlsem-mark"))
        if row is not None:
            free[row] = left + wide + 6
            parts.append(svg.text(mark.word, left + 3, top + 8, "sqlsem-mark-word"))
    return parts
