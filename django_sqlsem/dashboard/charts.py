"""The charts of the last hour: how long people waited and held, and how many were granted and turned away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from django.utils import timezone
from django.utils.translation import gettext as _

from django_sqlsem.dashboard import scales, svg
from django_sqlsem.dashboard.scales import LEFT, RIGHT, WIDTH, LengthScale, length

if TYPE_CHECKING:
    import datetime
    from collections.abc import Sequence

    from django.utils.safestring import SafeString

    from django_sqlsem.dashboard.scales import TimeScale
    from django_sqlsem.history.events import Minute, Percentiles

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
    places = scales.spread([heights.y(getattr(last, name)) for name, _word in _LINES], 14, _TOP, _BOTTOM)
    labels = [
        svg.text(word, WIDTH - RIGHT + 8, y + 4, f"sqlsem-label sqlsem-{name}")
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
    return svg.drawing(
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
    labels = [svg.text(word % totals, WIDTH - RIGHT + 8, y, f"sqlsem-label sqlsem-{name}") for word, y, name in words]
    hovers = [
        _hover(each.at, scale, step, _("%(time)s: %(granted)d granted, %(away)d turned away, %(lost)d lost") % {
            "time": _clock(each.at), "granted": each.granted, "away": each.turned_away, "lost": each.lost,
        })
        for each in minutes
        if each.granted or each.turned_away or each.lost
    ]  # fmt: skip
    return svg.drawing(
        svg.text(str(most), LEFT - 6, _TOP + 4, "sqlsem-tick", "end"),
        svg.element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=_TOP, y2=_TOP, class_="sqlsem-grid"),
        svg.text("0", LEFT - 6, _MIDDLE + 4, "sqlsem-tick", "end"),
        *scale.axis(_TOP, _BOTTOM),
        svg.element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=_MIDDLE, y2=_MIDDLE, class_="sqlsem-axis"),
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
        y = svg.number(heights.y(getattr(each, name)))
        joined = before is not None and abs((at - before).total_seconds() - step) < 1
        path.append(f"V{y}" if joined else f"M{svg.number(left)} {y}")
        path.append(f"H{svg.number(right)}")
        before = at
    return svg.element("path", d="".join(path), class_=f"sqlsem-line sqlsem-{name}")


def _column(each: Minute, scale: TimeScale, step: float, top: float, bottom: float, name: str) -> SafeString:
    left, right = _edges(each.at, scale, step)
    wide = max(1.0, right - left - 2)
    return svg.element(
        "rect", x=left + 1, y=top, width=wide, height=bottom - top, class_=f"sqlsem-column sqlsem-{name}"
    )


def _hover(at: datetime.datetime, scale: TimeScale, step: float, words: str) -> SafeString:
    left, right = _edges(at, scale, step)
    title = svg.element("title", svg.visible(words))
    wide = max(1.0, right - left)
    return svg.element("rect", title, x=left, y=_TOP, width=wide, height=_BOTTOM - _TOP, class_="sqlsem-hover")


def _edges(at: datetime.datetime, scale: TimeScale, step: float) -> tuple[float, float]:
    left = scale.x(at)
    return left, min(WIDTH - RIGHT, scale.x(at) + step * scale.pixels)


def _said(each: Percentiles) -> list[str]:
    return [f"{word} {length(getattr(each, name))}" for name, word in reversed(_LINES)]


def _clock(at: datetime.datetime) -> str:
    return f"{timezone.localtime(at):%H:%M}"
