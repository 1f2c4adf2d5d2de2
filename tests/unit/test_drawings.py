"""The drawings of the dashboard: that they are safe, where things stand, and how much is drawn of very much."""

from __future__ import annotations

import datetime
import random
import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from django.utils import timezone

from django_sqlsem.admin import (
    drawing as admin_drawing,
)
from django_sqlsem.admin.display import length, users, visible
from django_sqlsem.admin.drawing import WIDTH, Bar, Lane, LengthScale, Mark, Panel, TimeScale
from django_sqlsem.history.events import Percentiles
from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot, SlotState, TemplateSnapshot

NOW = datetime.datetime(2026, 3, 14, 10, 35, 20, tzinfo=datetime.UTC)
SCALE = TimeScale(NOW, 3600.0)
SECOND = datetime.timedelta(seconds=1)
NS = "{http://www.w3.org/2000/svg}"


def ago(seconds: float) -> datetime.datetime:
    return NOW - seconds * SECOND


def parsed(*panels: Panel, marks: list[Mark] | None = None) -> ElementTree.Element:
    """Read a drawing as XML: it must be well formed, and have neither styles nor scripts."""
    html = str(admin_drawing.together(panels, marks or [], SCALE)).replace(
        "<svg", '<svg xmlns="http://www.w3.org/2000/svg"'
    )
    root = ElementTree.fromstring(html)  # noqa: S314 - our own
    for each in root.iter():
        assert each.tag != f"{NS}script"
        assert not [name for name in each.attrib if name == "style" or name.startswith("on")]
    return root


def texts(root: ElementTree.Element, tag: str = "text") -> list[str]:
    return ["".join(each.itertext()) for each in root.iter(NS + tag)]


def test_users_text_cannot_reorder_or_hide() -> None:
    assert visible("a\u202eb\x00c\nd\u2067é漢") == "a[U+202E]b[U+0000]c[U+000A]d[U+2067]é漢"
    assert users("<b>\u202e") == "<bdi>&lt;b&gt;[U+202E]</bdi>"
    assert users("") == ""


def test_instants_stand_where_they_should() -> None:
    assert SCALE.x(NOW) == WIDTH
    assert SCALE.x(ago(3600)) == pytest.approx(0)
    assert SCALE.x(ago(1800)) == pytest.approx(WIDTH / 2)
    assert SCALE.x(ago(9999)) == pytest.approx(0)
    assert SCALE.x(NOW + SECOND) == WIDTH


@pytest.mark.parametrize(
    ("zone", "first"),
    [("UTC", "09:40"), ("Asia/Kolkata", "15:10"), ("Asia/Kathmandu", "15:30"), ("America/St_Johns", "07:10")],
)
def test_ticks_are_round_in_the_sites_time_zone(zone: str, first: str) -> None:
    with timezone.override(zone):
        ticks = SCALE.ticks()
    assert [word[-1] for _x, word in ticks] == ["0"] * 6
    assert ticks[0][1] == first
    assert [after - before for (before, _), (after, _) in pairwise(ticks)] == [pytest.approx(600 * SCALE.units)] * 5


@pytest.mark.parametrize(
    ("window", "words"),
    [
        (60, ["10:34:30", "10:34:40", "10:34:50", "10:35:00", "10:35:10", "10:35:20"]),
        (300, ["10:31", "10:32", "10:33", "10:34", "10:35"]),
        (86400, ["12:00", "15:00", "18:00", "21:00", "00:00", "03:00", "06:00", "09:00"]),
        (7 * 86400, ["08.03.", "09.03.", "10.03.", "11.03.", "12.03.", "13.03.", "14.03."]),
    ],
)
def test_ticks_of_each_range(window: float, words: list[str]) -> None:
    with timezone.override("UTC"):
        found = [word for _x, word in TimeScale(NOW, window).ticks()]
    assert found[-len(words) :] == words
    assert len(found) <= len(words) + 1


@pytest.mark.parametrize(
    ("now", "shown"),
    [
        ("2026-03-29T01:15", ["01:20", "01:30", "01:40", "01:50", "03:00", "03:10"]),  # there was no hour from 2 on
        ("2026-10-25T01:15", ["02:20", "02:30", "02:40", "02:50", "02:00", "02:10"]),  # it came twice
    ],
)
def test_ticks_when_the_clocks_are_changed(now: str, shown: list[str]) -> None:
    scale = TimeScale(datetime.datetime.fromisoformat(now).replace(tzinfo=datetime.UTC), 3600)
    with timezone.override("Europe/Berlin"):
        ticks = scale.ticks()
    assert [word for _x, word in ticks] == shown
    assert [after - before for (before, _), (after, _) in pairwise(ticks)] == [pytest.approx(600 * scale.units)] * 5


@pytest.mark.parametrize("lengths", [[], [0.0], [0.0004, 0.2], [3.0], [0.5, 7200.0], [1e9]])
def test_lengths_stand_in_order_and_within(lengths: list[float]) -> None:
    scale = LengthScale.of(lengths, 10, 110)
    assert len(scale.steps) >= 2
    heights = [scale.y(each) for each in sorted(lengths)]
    assert heights == sorted(heights, reverse=True)
    assert all(10 <= each <= 110 for each in heights)
    assert (scale.y(scale.steps[0]), scale.y(scale.steps[-1])) == (110, pytest.approx(10))


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 ms"), (0.0001, "< 1 ms"), (0.0123, "12 ms"), (0.9999, "1.0 s"), (1, "1 s"), (1.5, "1.5 s"), (60, "1 min"),
     (90, "1 min 30 s"), (600, "10 min"), (3600, "1 h"), (100000, "1 d 03 h")],
)  # fmt: skip
def test_lengths_in_words(seconds: float, shown: str) -> None:
    assert length(seconds) == shown


def past(slot: int, start: float, end: float, kind: str = admin_drawing.PAST) -> Bar:
    left = SCALE.x(ago(start))
    return Bar(slot, left, SCALE.x(ago(end)) - left, kind, f"slot {slot}")


def test_few_holds_are_drawn_one_by_one() -> None:
    bars = [past(1, 3000, 2000), past(1, 2000, 1000), past(2, 100, 0, admin_drawing.HELD)]
    pieces = admin_drawing.fewer(bars)
    assert [(piece.slot, piece.kind, piece.count) for piece in pieces] == [
        (1, "past", 1),
        (1, "past", 1),
        (2, "held", 1),
    ]
    assert pieces[0].x == pytest.approx(SCALE.x(ago(3000)))
    assert pieces[0].width == pytest.approx(1000 * SCALE.units)


def test_short_holds_become_denser_pieces_and_none_is_forgotten() -> None:
    chance = random.Random(5)
    bars = [past(1, at := chance.uniform(1, 3600), at - 1) for _ in range(2000)]
    pieces = admin_drawing.fewer(bars, most=300)
    assert len(pieces) <= 300
    assert sum(piece.count for piece in pieces) == 2000
    dense = [piece for piece in pieces if piece.kind == admin_drawing.DENSE]
    assert {piece.density for piece in dense} <= {1, 2, 3, 4}
    for piece in pieces:
        assert piece.x >= -0.1
        assert piece.x + piece.width <= WIDTH + 1.1
    busy = admin_drawing.fewer([past(1, 100 - at / 10, 99.9 - at / 10) for at in range(200)])
    assert max(piece.density for piece in busy) == 4


def test_what_is_held_now_and_the_latest_losses_are_never_merged() -> None:
    bars = [past(slot, at + 1, at) for slot in range(1, 41) for at in range(0, 3600, 30)]
    bars += [past(slot, 1, 0, admin_drawing.HELD) for slot in range(1, 40)] + [past(40, 1, 0, admin_drawing.STALE)]
    bars += [past(3, at + 1, at, admin_drawing.LOST) for at in range(3000, 0, -10)]
    pieces = admin_drawing.fewer(bars)
    kinds = [piece.kind for piece in pieces]
    assert len(pieces) <= admin_drawing.MAX_BARS
    assert (kinds.count("held"), kinds.count("stale"), kinds.count("lost")) == (39, 1, admin_drawing.MAX_BARS // 4)


def draw(bars: list[Bar], marks: list[Mark]) -> ElementTree.Element:
    lanes = [Lane(1, "1", "held"), Lane(2, "2", "stale")]
    return parsed(admin_drawing.timeline(lanes, bars, title="T", description="D"), marks=marks)


def test_the_timeline_says_what_it_is_and_names_each_bar() -> None:
    with timezone.override("UTC"):
        root = draw([past(1, 600, 300), past(2, 60, 0, admin_drawing.STALE), past(1, 200, 100, admin_drawing.LOST)], [])
    (plot,) = [each for each in root.iter(f"{NS}svg") if each.get("role") == "img"]
    named = {each.get("id"): "".join(each.itertext()) for each in root.iter() if each.get("id")}
    assert named[plot.get("aria-labelledby")] == "T"
    assert named[plot.get("aria-describedby")] == "D"
    assert texts(root, "title") == ["slot 1", "slot 2", "slot 1", "slot 1"]  # a loss has its end, too
    assert [each.get("fill") for each in root.iter(f"{NS}rect")] == [None, "url(#sqlsem-hatched)", None]
    assert {"1", "2", "now", "10:00"} <= set(texts(root))


def test_texts_are_escaped_and_spelt_out() -> None:
    bar = Bar(1, 0.0, 10.0, admin_drawing.LOST, "<script>&\u202e")
    root = draw([bar], [Mark(ago(60), "<b>", "</title>")])
    assert texts(root, "title") == ["</title>", *["<script>&[U+202E]"] * 2, "</title>"]
    assert any(text.startswith("<b>") for text in texts(root))


def test_bars_of_slots_without_a_lane_are_left_out() -> None:
    assert not list(draw([past(7, 600, 300)], []).iter(f"{NS}rect"))


def test_words_of_marks_do_not_stand_on_each_other() -> None:
    root = draw([], [Mark(ago(1800 + at), "asked to stop", f"at {at}") for at in range(20)])
    marks = [each for each in root.iter(f"{NS}line") if each.get("class") == "sqlsem-mark"]
    words = [each for each in root.iter(f"{NS}text") if each.get("class") == "sqlsem-mark-word"]
    assert (len(marks), len(words)) == (20, 2)
    assert len({each.get("y") for each in words}) == 2
    assert len([each for each in draw([], [Mark(ago(at), "x", "x") for at in range(99)]).iter(f"{NS}line")
                if each.get("class") == "sqlsem-mark"]) == admin_drawing.MAX_MARKS  # fmt: skip


def test_a_panel_of_lengths_has_gaps_and_names_the_latest() -> None:
    steps = {10: Percentiles(4, 0.01, 0.1, 2.0), 11: Percentiles(4, 0.02, 0.2, 1.0), 20: Percentiles(1, 0.5, 0.5, 0.5)}
    at = [NOW.replace(second=0) - datetime.timedelta(minutes=60 - number) for number in range(60)]
    panel = admin_drawing.lengths("w", "Waits", [(each, steps.get(number)) for number, each in enumerate(at)], SCALE)
    root = parsed(panel)
    paths = {each.get("class", ""): each.get("d", "") for each in root.iter(f"{NS}path")}
    assert set(paths) == {"sqlsem-line sqlsem-p50", "sqlsem-line sqlsem-p95", "sqlsem-line sqlsem-longest"}
    for path in paths.values():
        assert re.sub(r"[\d. ]+", "", path) == "MHVHMH"
    assert [word for word, _kind in panel.beside] == ["latest:", "p50 500 ms", "p95 500 ms", "max 500 ms"]
    assert "longest of all: 2 s" in texts(root, "desc")[0]
    assert not admin_drawing.lengths("w", "Waits", [(each, None) for each in at], SCALE).height


def test_a_panel_of_amounts_shows_even_a_single_one() -> None:
    at = [NOW.replace(second=0) - datetime.timedelta(minutes=60 - number) for number in range(60)]
    found = [(each, {3: 5000.0, 4: 1.0}.get(number, 0.0)) for number, each in enumerate(at)]
    panel = admin_drawing.amounts(
        "n", "Numbers", found, SCALE, kind="away", said="{:g} refused".format, beside=[("5001", "away")]
    )
    root = parsed(panel)
    columns = [each for each in root.iter(f"{NS}rect") if "sqlsem-column" in (each.get("class") or "")]
    assert [float(each.get("height", "")) >= 1.5 for each in columns] == [True, True]
    assert [text.partition(": ")[2] for text in texts(root, "title")] == ["5000 refused", "1 refused"]
    assert [word for _y, word, _kind in panel.words] == ["5000", "0"]


@pytest.mark.parametrize(
    ("value", "top"), [(0.03, 0.03), (0.31, 0.4), (1, 1), (7, 8), (9, 10), (8.0001, 10), (81, 100)]
)
def test_axes_end_at_round_numbers(value: float, top: float) -> None:
    assert admin_drawing._round_up(value) == pytest.approx(top)


def test_all_panels_have_one_time_axis() -> None:
    mark = Mark(ago(1800), "paused", "paused by ann")
    panel = admin_drawing.amounts("a", "A", [(ago(1800), 1.0)], SCALE, kind="away", said=str, beside=[])
    root = parsed(
        panel, admin_drawing.lengths("b", "B", [(ago(1800), Percentiles(1, 1.0, 1.0, 1.0))], SCALE), marks=[mark]
    )
    plots = [each for each in root.iter(f"{NS}svg") if each.get("role") == "img"]
    assert [each.get("viewBox", "").split()[2] for each in plots] == ["1000", "1000"]
    for plot in plots:
        (line,) = [each for each in plot.iter(f"{NS}line") if each.get("class") == "sqlsem-mark"]
        assert line.get("x1") == "500"
    assert plots[0].find(f"{NS}rect[@class='sqlsem-column sqlsem-away']").get("x") == "500.6"  # type: ignore[union-attr]


def holder(age: float, slot: int = 1) -> HolderSnapshot:
    return HolderSnapshot(
        "reports", slot, SlotState.HELD, 7, "web1", 1, "t", "", "", ago(age), ago(-60), age, 60.0, slots=()
    )


def test_what_was_held_in_each_step() -> None:
    """A hold is counted when it ends: what is more than all slots could have been held was held before."""
    known = SemaphoreSnapshot("reports", "semaphore", 2, 2, None, paused=False)
    now = datetime.datetime.fromtimestamp(60 * (NOW.timestamp() // 60), datetime.UTC)  # the last step has just begun
    assert admin_drawing.held_by_step({}, known, now, 60.0, 5) == {}
    assert admin_drawing.held_by_step({3: 60.0}, known, now, 60.0, 5) == {3: 1.0}
    assert admin_drawing.held_by_step({3: 300.0}, known, now, 60.0, 5) == {3: 2.0, 2: 2.0, 1: 1.0}
    going_on = replace(known, holders=(holder(90.0), holder(30.0, 2)))
    assert admin_drawing.held_by_step({}, going_on, NOW, 60.0, 1) == {0: 2.0}
    found = admin_drawing.held_by_step({}, going_on, now, 60.0, 5)
    assert found == {4: 2.0, 3: pytest.approx(1.5), 2: pytest.approx(0.5)}
    group = TemplateSnapshot("sync:{pk}", 3, held=2)
    assert admin_drawing.held_by_step({1: 600.0}, group, now, 60.0, 5) == {1: 10.0, 4: 2.0}
    units = replace(known, units=7)
    assert admin_drawing.held_by_step({1: 600.0}, units, now, 60.0, 5) == {1: 10.0}


def test_a_small_drawing() -> None:
    held, refused = {0: 1.0, 1: 3.0, 3: 0.5}, {1: 4, 4: 1}
    html = str(admin_drawing.sparkline(held, refused, count=5, most=3.0, about='3 held "on average"'))
    root = ElementTree.fromstring(html)  # noqa: S314 - our own
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == '3 held "on average"'
    area, drops = (each.attrib["d"] for each in root)
    # Each run of steps is an area of its own, and what is held by all slots is highest.
    assert re.findall(r"M([\d.]+) 24", area) == ["0", "72"]
    heights = [24 - float(each) for each in re.findall(r"V([\d.]+)H", area)]
    assert heights == [6.0, 18.0, 3.0]
    assert re.findall(r"M([\d.]+) 0v([\d.]+)", drops) == [("36", "18"), ("108", "4.5")]
    assert "path" not in str(admin_drawing.sparkline({}, {}, count=5, most=0.0, about=""))
