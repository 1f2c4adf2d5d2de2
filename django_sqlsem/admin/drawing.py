"""The drawings of one lock: panels above each other on one time axis. Templates draw them.

A plot is as wide as there is room, and stretched sideways: so nothing in it is text, which stands beside or above it.
Looks come from classes: a strict Content-Security-Policy allows no inline style.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from django.http import HttpRequest
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.functional import Promise
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_sqlsem.admin.display import length, visible
from django_sqlsem.history.events import Percentiles
from django_sqlsem.snapshots import SemaphoreSnapshot, TemplateSnapshot

#: How far back a page looks: ``?range=24h`` in its address.
RANGE_PARAMETER: Final = "range"


@dataclass(frozen=True, slots=True)
class Range:
    """How far back the page looks. ``light``: how many answers to the script leave it out."""

    name: str
    words: Promise
    title: Promise
    seconds: float
    light: int


RANGES: Final = (
    Range("5m", gettext_lazy("5 min"), gettext_lazy("Last 5 minutes"), 300.0, 4),
    Range("1h", gettext_lazy("1 h"), gettext_lazy("Last hour"), 3600.0, 4),
    Range("24h", gettext_lazy("24 h"), gettext_lazy("Last 24 hours"), 86400.0, 19),
    Range("7d", gettext_lazy("7 d"), gettext_lazy("Last 7 days"), 7 * 86400.0, 99),
)
USUAL_RANGE: Final = RANGES[1]
#: The seconds that one figure of a range may be about.
_STEPS_OF_RANGES: Final = (60.0, 120.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 6 * 3600.0)


def chosen_range(request: HttpRequest) -> Range:
    """Return what the address says; the usual one for what is none."""
    wanted = request.GET.get(RANGE_PARAMETER)
    return next((each for each in RANGES if each.name == wanted), USUAL_RANGE)


def range_links(request: HttpRequest, chosen: Range) -> list[tuple[Promise, str, bool]]:
    """Return the ranges as links: words, address, and whether it is the one that is shown."""
    found = []
    for each in RANGES:
        parameters = request.GET.copy()
        parameters[RANGE_PARAMETER] = each.name
        found.append((each.words, f"?{parameters.urlencode()}", each is chosen))
    return found


def step_of(window: float, most: int) -> float:
    """Return the seconds that one figure is about, so that there are ``most`` of them at the most."""
    return next((each for each in _STEPS_OF_RANGES if window / each <= most), _STEPS_OF_RANGES[-1])


#: All plots are so wide, in units of their own: one instant stands above the same instant of the others.
WIDTH: Final = 1000.0
#: The most labels along the time axis.
_MOST_TICKS: Final = 8
#: How far apart these may be, in seconds.
_APART: Final = (10, 60, 120, 300, 600, 1800, 3600, 3 * 3600, 6 * 3600, 86400)
#: What a logarithmic axis may be marked with, in seconds.
_STEPS: Final = (0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 36000.0, 360000.0, 3600000.0)


def svg_number(value: float) -> str:
    """Return a coordinate, in as few characters as a tenth of a unit needs, whatever the language."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True, slots=True)
class TimeScale:
    """From an instant to its place on the time axis.

    ``now`` is the right end, ``window`` seconds the whole, and ``step`` the seconds that one figure is about.
    """

    now: datetime.datetime
    window: float
    step: float = 60.0

    @property
    def units(self) -> float:
        """How many units of a plot a second has."""
        return WIDTH / self.window

    def x(self, at: datetime.datetime) -> float:
        """Return where an instant is; what is outside is at the edge."""
        before = (self.now - at).total_seconds()
        return WIDTH - min(self.window, max(0.0, before)) * self.units

    def of_step(self, at: datetime.datetime) -> tuple[float, float]:
        """Return where the step that begins at an instant stands, and its width within the plot."""
        left = self.x(at)
        return left, self.x(at + datetime.timedelta(seconds=self.step)) - left

    def words(self, at: datetime.datetime) -> str:
        """Return an instant as a short text: with the day, if the axis is longer than one."""
        local = timezone.localtime(at)
        return f"{local:%d.%m. %H:%M}" if self.window > 86400 else f"{local:%H:%M}"

    def ticks(self) -> list[tuple[float, str]]:
        """Return where the round instants within are, in the current time zone, and their words."""
        apart = next((each for each in _APART if self.window / each <= _MOST_TICKS), _APART[-1])
        # Looked for in UTC: hours on the wall are missing or come twice when the clocks are changed.
        fine = math.gcd(apart, 900)
        at = int(self.now.timestamp()) // fine * fine
        found = []
        while (before := self.now.timestamp() - at) < self.window:
            local = timezone.localtime(datetime.datetime.fromtimestamp(at, datetime.UTC))
            if (local.hour * 3600 + local.minute * 60 + local.second) % apart == 0:
                word = f"{local:%d.%m.}" if apart >= 86400 else f"{local:%H:%M:%S}" if apart < 60 else f"{local:%H:%M}"
                found.append((WIDTH - before * self.units, word))
            at -= fine
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


#: The height of a plot, and of one with lines.
_HIGH, _HIGHER = 44.0, 66.0
#: The lines of a plot of lengths, with their words.
_LINES: Final = (("longest", "max"), ("p95", "p95"), ("p50", "p50"))


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot with its heading; without a ``height`` the heading says that there is nothing to draw."""

    key: str
    title: str
    #: What stands beside the title, each with a class.
    beside: Sequence[tuple[str, str]] = ()
    about: str = ""
    height: str = ""
    #: The words left of the plot, each with its height and a class.
    words: Sequence[tuple[str, str, str]] = ()
    grid: Sequence[str] = ()
    #: Whatever is drawn, as the template wants it.
    bars: Sequence[dict[str, Any]] = ()
    columns: Sequence[tuple[str, ...]] = ()
    lines: Sequence[tuple[str, str]] = ()
    hovers: Sequence[tuple[str, str, str]] = ()


def together(panels: Sequence[Panel], marks: Sequence[Mark], scale: TimeScale) -> SafeString:
    """Return the panels as HTML, above one time axis, with the marks across all of them."""
    shown = []
    for x, word in scale.ticks():
        beside_an_end = x < 0.03 * WIDTH or x > 0.92 * WIDTH
        shown.append((svg_number(x), f"{x / WIDTH:.2%}", "" if beside_an_end else word))
    placed = _placed(marks, scale)
    context = {"panels": panels, "ticks": shown, "marks": placed, "width": svg_number(WIDTH)}
    return render_to_string("admin/sqlsem/_drawing.html", context)


def lengths(
    key: str, title: str, minutes: Sequence[tuple[datetime.datetime, Percentiles | None]], scale: TimeScale
) -> Panel:
    """Return the panel of one kind of lengths, each step as a level line. Steps in which none ended are gaps."""
    known = [(at, found) for at, found in minutes if found is not None and found.count]
    if not known:
        return Panel(key, title, [(_("none ended"), "none")])
    top, bottom = 6.0, _HIGHER - 2
    heights = LengthScale.of([value for _at, each in known for value in (each.p50, each.longest)], top, bottom)
    last = known[-1][1]
    about = _("The latest: %(latest)s. The longest of all: %(longest)s.") % {
        "latest": ", ".join(_said(last)),
        "longest": length(max(each.longest for _at, each in known)),
    }
    steps = heights.steps if len(heights.steps) <= 4 else heights.steps[:: -(-len(heights.steps) // 4)]
    hovers = [(at, [*_said(each), _("%(count)d counted") % {"count": each.count}]) for at, each in known]
    return Panel(
        key,
        title,
        [(_("latest:"), "none"), *((f"{word} {length(getattr(last, name))}", name) for name, word in reversed(_LINES))],
        about,
        svg_number(_HIGHER),
        [(svg_number(min(heights.y(step) + 3, _HIGHER - 1)), length(step), "tick") for step in steps],
        [svg_number(heights.y(step)) for step in steps],
        lines=[(name, _path(name, known, scale, heights)) for name, _word in _LINES],
        hovers=_hovers(hovers, scale),
    )


def amounts(
    key: str,
    title: str,
    found: Sequence[tuple[datetime.datetime, float]],
    scale: TimeScale,
    *,
    kind: str,
    said: Callable[[float], str],
    beside: Sequence[tuple[str, str]],
    most: float = 0.0,
) -> Panel:
    """Return the panel of one figure, each step as a column; ``most``: what has to have room at least."""
    highest = max([most, *(value for _at, value in found)], default=0.0)
    if not any(value for _at, value in found):
        return Panel(key, title, beside)
    top = _round_up(highest)
    columns = []
    for at, value in found:
        left, wide = scale.of_step(at)
        high = max(1.5, value / top * (_HIGH - 4))
        if value and wide > 0:
            place = (left + min(0.6, wide / 8), _HIGH - high, max(0.5, wide - min(1.2, wide / 4)), high)
            columns.append((*map(svg_number, place), kind))
    return Panel(
        key,
        title,
        beside,
        ", ".join(word for word, _kind in beside),
        svg_number(_HIGH),
        [(svg_number(9.0), f"{top:g}", "tick"), (svg_number(_HIGH - 1), "0", "tick")],
        [svg_number(4.0)],
        columns=columns,
        hovers=_hovers([(at, [said(value)]) for at, value in found if value], scale),
    )


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 3, 4, 5, 6, 8, 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(each * power for each in (1, 2, 3, 4, 5, 6, 8, 10) if each * power >= value * 0.999999)


def _hovers(found: Sequence[tuple[datetime.datetime, Sequence[str]]], scale: TimeScale) -> list[tuple[str, str, str]]:
    return [
        (*(svg_number(each) for each in scale.of_step(at)), f"{scale.words(at)}: {', '.join(said)}")  # type: ignore[misc]
        for at, said in found
    ]


def _path(
    name: str, known: Sequence[tuple[datetime.datetime, Percentiles]], scale: TimeScale, heights: LengthScale
) -> str:
    path: list[str] = []
    before: datetime.datetime | None = None
    for at, each in known:
        left, wide = scale.of_step(at)
        y = svg_number(heights.y(getattr(each, name)))
        joined = before is not None and abs((at - before).total_seconds() - scale.step) < 1
        path.append(f"V{y}" if joined else f"M{svg_number(left)} {y}")
        path.append(f"H{svg_number(left + wide)}")
        before = at
    return "".join(path)


def _said(each: Percentiles) -> list[str]:
    return [f"{word} {length(getattr(each, name))}" for name, word in reversed(_LINES)]


def held_by_step(
    ended: Mapping[int, float],
    known: SemaphoreSnapshot | TemplateSnapshot,
    now: datetime.datetime,
    step: float,
    count: int,
) -> dict[int, float]:
    """Return how many slots were held on average in each of ``count`` steps up to ``now``, by the step's number.

    ``ended``: slots times seconds of the holds that ended in a step. What is more than all slots could have been held
    there was held before. Of the last step, which goes on, it is how many are held now: it does not change by itself.
    """
    over = now.timestamp() % step
    slots, ages = 0, []
    if isinstance(known, SemaphoreSnapshot):
        slots = known.slots if known.units is None else 0
        ages = [(each.age, len(each.slots) or 1) for each in known.holders if each.recorded]
    found, rest = {}, 0.0
    for nth in range(count - 1, -1, -1):
        rest += ended.get(nth, 0.0)
        used = min(slots * step, rest) if slots else rest
        rest -= used
        if nth == count - 1:
            used = max(used, known.held * step)
        else:
            begun = over + step * (count - 1 - nth)
            used += sum(max(0.0, min(age, begun) - (begun - step)) * slot for age, slot in ages)
        if used > 0:
            found[nth] = used / step
    return found


#: The size of a small drawing in a row of a list, in units of its own.
_SMALL_WIDTH, _SMALL_HIGH = 120.0, 24.0


def sparkline(
    held: Mapping[int, float], refused: Mapping[int, int], *, count: int, most: float, about: str
) -> SafeString:
    """Return two figures of each of ``count`` steps in small: held from below, and refused hanging from above.

    ``held``, ``refused``: by the number of the step, the oldest is 0. ``most``: what is held if all is.
    """
    wide, top = _SMALL_WIDTH / count, max([most, *held.values()], default=0.0) or 1.0
    last, worst = -2, max(refused.values(), default=0)
    area: list[str] = []
    for step in sorted(each for each, value in held.items() if value > 0):
        high = max(1.0, held[step] / top * (_SMALL_HIGH - 6))
        if step != last + 1:
            area += [f"V{svg_number(_SMALL_HIGH)}z"] if area else []
            area.append(f"M{svg_number(step * wide)} {svg_number(_SMALL_HIGH)}")
        area.append(f"V{svg_number(_SMALL_HIGH - high)}H{svg_number((step + 1) * wide)}")
        last = step
    drops = "".join(
        f"M{svg_number((step + 0.5) * wide)} 0v{svg_number(max(3.0, number / worst * (_SMALL_HIGH - 6)))}"
        for step, number in sorted(refused.items())
        if number
    )
    shape = f'<path class="sqlsem-spark-held" d="{"".join(area)}V{svg_number(_SMALL_HIGH)}z"/>' if area else ""
    shape += f'<path class="sqlsem-spark-refused" d="{drops}"/>' if drops else ""
    return format_html(
        '<svg class="sqlsem-spark" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>',
        svg_number(_SMALL_WIDTH), svg_number(_SMALL_HIGH), about, mark_safe(shape),  # noqa: S308 - numbers
    )  # fmt: skip


#: How many lanes are drawn, and how many bars: what a page of reasonable size has room for.
MAX_LANES: Final = 40
MAX_BARS: Final = 400
MAX_MARKS: Final = 30
#: Past bars that are narrower are merged, in pixels.
_LEAST: Final = 1.5
_LANE, _BAR = 18.0, 12.0
#: The words over the marks: how many rows of them, and about how wide a character is.
_ROWS, _CHARACTER = 2, 11.0

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
    """One slot, with its word on the left, and its state now."""

    slot: int
    word: str
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
        if len(kept) + len(wide) + len(narrow) <= most or least > WIDTH:
            return [*narrow, *wide, *kept]
        least *= 2


def _merged(narrow: Sequence[Bar], wide: float) -> list[Bar]:
    """Return one bar for all that begin in the same ``wide`` pixels of a lane: the denser, the more they fill it."""
    bins: dict[tuple[int | None, int], list[Bar]] = {}
    for bar in narrow:
        bins.setdefault((bar.slot, math.floor(bar.x / wide)), []).append(bar)
    found = []
    for (slot, number), parts in bins.items():
        if len(parts) == 1:
            found.append(replace(parts[0], width=max(1.0, parts[0].width)))
            continue
        title = ngettext("slot %(slot)s: %(count)d hold", "slot %(slot)s: %(count)d short holds", len(parts))
        title %= {"slot": slot, "count": len(parts)}
        left = number * wide
        filled = density(sum(part.width for part in parts) / wide)
        found.append(Bar(slot, left, min(wide, WIDTH - left), DENSE, title, filled, len(parts)))
    return found


def timeline(lanes: Sequence[Lane], bars: Sequence[Bar], *, title: str, description: str) -> Panel:
    """Return the panel of who held which slot, with a lane for each slot."""
    place = {lane.slot: 2 + number * _LANE for number, lane in enumerate(lanes)}
    height = 4 + len(lanes) * _LANE
    drawn = [_drawn(bar, 2, height - 4) for bar in bars if bar.slot is None]
    shown = fewer([bar for bar in bars if bar.slot in place])
    drawn += [_drawn(bar, place[cast("int", bar.slot)] + (_LANE - _BAR) / 2, _BAR) for bar in shown]
    middles = [y + _LANE / 2 for y in place.values()]
    words = [(svg_number(y + 4), lane.word, lane.kind) for lane, y in zip(lanes, middles, strict=True)]
    grid = [svg_number(y) for y in middles]
    return Panel("sqlsem-timeline", title, (), description, svg_number(height), words, grid, bars=drawn)


def _drawn(bar: Bar, top: float, high: float) -> dict[str, Any]:
    # Neighbours keep a hair's breadth apart.
    width = bar.width - 0.6 if bar.width > 3 else max(1.0, bar.width)
    found: dict[str, Any] = {"kind": bar.kind, "title": visible(bar.title), "density": bar.density}
    found |= {"x": svg_number(bar.x), "y": svg_number(top), "width": svg_number(width), "height": svg_number(high)}
    if bar.kind == LOST:
        found |= {"end": svg_number(min(bar.x + width, WIDTH - 1)), "foot": svg_number(top + high)}
    return found


def _placed(marks: Sequence[Mark], scale: TimeScale) -> list[dict[str, Any]]:
    """Return the marks, the newest last; a word that has no room is left to the line's own title."""
    found = []
    free = [0.0] * _ROWS  # where the next word of each row may begin
    for mark in sorted(marks, key=lambda each: each.at)[-MAX_MARKS:]:
        x = scale.x(mark.at)
        wide = len(mark.word) * _CHARACTER
        left = min(x, WIDTH - wide)
        row = next((number for number, least in enumerate(free) if left >= least), None)
        shown = {"x": svg_number(x), "left": f"{left / WIDTH:.2%}", "title": visible(mark.title), "word": ""}
        if row is not None:
            shown |= {"word": visible(mark.word), "y": svg_number(10.0 + row * 13)}
            free[row] = left + wide + 6
        found.append(shown)
    return found
