"""The drawings of the dashboard: that they are safe, where things stand, and how much is drawn of very much."""

from __future__ import annotations

import datetime
import random
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from django.utils import timezone

from django_sqlsem.admin import (
    drawing as admin_drawing,
)
from django_sqlsem.admin.display import length, users, visible
from django_sqlsem.admin.drawing import (
    PLOT_LEFT,
    PLOT_RIGHT,
    Bar,
    Lane,
    LengthScale,
    Mark,
    TimeScale,
)
from django_sqlsem.history.events import Minute, Percentiles

NOW = datetime.datetime(2026, 3, 14, 10, 35, 20, tzinfo=datetime.UTC)
SCALE = TimeScale(NOW, 3600.0)
SECOND = datetime.timedelta(seconds=1)
NS = "{http://www.w3.org/2000/svg}"


def ago(seconds: float) -> datetime.datetime:
    return NOW - seconds * SECOND


def parsed(drawing: str | None) -> ElementTree.Element:
    """Read a drawing as XML: it must be well formed, and have neither styles nor scripts."""
    assert drawing is not None
    root = ElementTree.fromstring(str(drawing))  # noqa: S314 - our own
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
    assert SCALE.x(NOW) == PLOT_RIGHT
    assert SCALE.x(ago(3600)) == pytest.approx(PLOT_LEFT)
    assert SCALE.x(ago(1800)) == pytest.approx((PLOT_LEFT + PLOT_RIGHT) / 2)
    assert SCALE.x(ago(9999)) == pytest.approx(PLOT_LEFT)
    assert SCALE.x(NOW + SECOND) == PLOT_RIGHT


@pytest.mark.parametrize(
    ("zone", "first"), [("UTC", "09:40"), ("Asia/Kolkata", "15:10"), ("America/St_Johns", "07:10")]
)
def test_ticks_are_round_in_the_sites_time_zone(zone: str, first: str) -> None:
    with timezone.override(zone):
        ticks = SCALE.ticks()
    assert [f"{tick:%M}"[1] for tick in ticks] == ["0"] * 6
    assert f"{ticks[0]:%H:%M}" == first
    assert {after - before for before, after in pairwise(ticks)} == {datetime.timedelta(minutes=10)}


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
    assert [f"{tick:%H:%M}" for tick in ticks] == shown
    assert [scale.x(after) - scale.x(before) for before, after in pairwise(ticks)] == [
        pytest.approx(600 * scale.pixels)
    ] * 5


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


def test_labels_do_not_stand_on_each_other() -> None:
    assert admin_drawing.spread([50, 20, 80], 10, 0, 100) == [50, 20, 80]
    placed = admin_drawing.spread([98, 97, 99], 14, 0, 100)
    assert sorted(placed) == [72, 86, 100]
    assert placed[1] < placed[0] < placed[2]


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
    assert pieces[0].width == pytest.approx(1000 * SCALE.pixels)


def test_short_holds_become_denser_pieces_and_none_is_forgotten() -> None:
    chance = random.Random(5)
    bars = [past(1, at := chance.uniform(1, 3600), at - 1) for _ in range(2000)]
    pieces = admin_drawing.fewer(bars, most=300)
    assert len(pieces) <= 300
    assert sum(piece.count for piece in pieces) == 2000
    dense = [piece for piece in pieces if piece.kind == admin_drawing.DENSE]
    assert {piece.density for piece in dense} <= {1, 2, 3, 4}
    for piece in pieces:
        assert piece.x >= PLOT_LEFT - 0.1
        assert piece.x + piece.width <= PLOT_RIGHT + 1.1
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
    lanes = [Lane(1, "1", "12 s", "held"), Lane(2, "2", "stale, 3 s", "stale")]
    return parsed(admin_drawing.draw(lanes, bars, marks, SCALE, title="T", description="D"))


def test_the_timeline_says_what_it_is_and_names_each_bar() -> None:
    with timezone.override("UTC"):
        root = draw([past(1, 600, 300), past(2, 60, 0, admin_drawing.STALE), past(1, 200, 100, admin_drawing.LOST)], [])
    assert root.get("role") == "img"
    named = {each.get("id"): "".join(each.itertext()) for each in root.iter() if each.get("id")}
    assert named[root.get("aria-labelledby")] == "T"
    assert named[root.get("aria-describedby")] == "D"
    assert texts(root, "title")[1:] == ["slot 1", "slot 2", "slot 1", "slot 1"]  # a loss has a cross, too
    assert [each.get("fill") for each in root.iter(f"{NS}rect")] == [None, "url(#sqlsem-hatched)", None]
    assert {"1", "2", "12 s", "stale, 3 s", "now", "10:00"} <= set(texts(root))


def test_texts_are_escaped_and_spelt_out() -> None:
    bar = Bar(1, PLOT_LEFT, 10.0, admin_drawing.LOST, "<script>&\u202e")
    root = draw([bar], [Mark(ago(60), "<b>", "</title>")])
    assert texts(root, "title")[1:] == ["<script>&[U+202E]"] * 2 + ["</title>"]
    assert "<b>" in texts(root)


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


def minute(number: int, waits: Percentiles | None = None, **counts: int) -> Minute:
    at = NOW.replace(second=0) - datetime.timedelta(minutes=60 - number)
    numbers = {"granted": 0, "released": 0, "turned_away": 0, "lost": 0} | counts
    return Minute(at=at, **numbers, held=0.0, waits=waits, holds=None)


def test_a_chart_of_lengths_has_gaps_and_names_the_latest() -> None:
    steps = {10: Percentiles(4, 0.01, 0.1, 2.0), 11: Percentiles(4, 0.02, 0.2, 1.0), 20: Percentiles(1, 0.5, 0.5, 0.5)}
    minutes = [minute(number, steps.get(number)) for number in range(60)]
    root = parsed(admin_drawing.lengths("w", "Waits", [(each.at, each.waits) for each in minutes], SCALE))
    paths = {each.get("class", ""): each.get("d", "") for each in root.iter(f"{NS}path")}
    assert set(paths) == {"sqlsem-line sqlsem-p50", "sqlsem-line sqlsem-p95", "sqlsem-line sqlsem-longest"}
    for path in paths.values():
        assert re.sub(r"[\d. ]+", "", path) == "MHVHMH"
    assert {"p50 500 ms", "p95 500 ms", "max 500 ms"} <= set(texts(root))
    assert "longest of all: 2 s" in texts(root, "desc")[0]
    assert admin_drawing.lengths("w", "Waits", [(each.at, None) for each in minutes], SCALE) is None


def test_a_chart_of_numbers_shows_even_a_single_one() -> None:
    minutes = [minute(number, granted=5000 if number == 3 else 0, turned_away=number == 4) for number in range(60)]
    root = parsed(admin_drawing.numbers("n", "Numbers", minutes, SCALE))
    columns = [each for each in root.iter(f"{NS}rect") if "sqlsem-column" in (each.get("class") or "")]
    assert [float(each.get("height", "")) >= 1.5 for each in columns] == [True, True]
    assert {"5000 granted", "1 turned away"} <= set(texts(root))
    assert texts(root, "desc") == ["In the last hour: 5000 granted, 1 turned away, 0 lost."]
    assert admin_drawing.numbers("n", "Numbers", [minute(number) for number in range(60)], SCALE) is None
