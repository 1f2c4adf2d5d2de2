"""What is read of the history, from rows as they are written; and what its texts hold."""

from __future__ import annotations

import datetime
import itertools
import random
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_sqlsem import queries
from django_sqlsem.core.names import resource_for
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.history import reading, recorder
from django_sqlsem.history.events import Totals, parse_slots, several
from django_sqlsem.models import EventRow, MinuteRow

pytestmark = pytest.mark.process_side

MINUTE = 60_000_000


def clock_us(alias: str) -> int:
    """The clock of the history: Unix time by the database's clock."""
    dialect = dialect_for(connections[alias])
    with connections[alias].cursor() as cursor:
        return dialect.token_clock(dialect.now(cursor))


def event(alias: str, what: str, *, ago: float = 1.0, name: str = "reports", **fields: Any) -> EventRow:
    at = clock_us(alias) - round(ago * 1e6)
    return EventRow.objects.using(alias).create(
        key=resource_for(name, "").key, name=name, at_us=at, until_us=at + 3600_000_000, what=what, **fields
    )


def minute(
    alias: str, *, ago: int = 0, name: str = "reports", writer: int = 1, now: int | None = None, **fields: Any
) -> MinuteRow:
    """One process's row of the minute that began ``ago`` whole minutes before this one, or that of ``now``."""
    at = ((clock_us(alias) if now is None else now) // MINUTE - ago) * MINUTE
    return MinuteRow.objects.using(alias).create(
        key=resource_for(name, "").key, minute_us=at, writer=writer, until_us=at + 3600_000_000, **fields
    )


def test_events_are_read_newest_first_with_all_they_say(database: str) -> None:
    event(
        database, "granted", ago=9, slot=2, token=5, waited_us=1_500_000, host="web1", pid=7, label="GET /x", user="a"
    )
    event(database, "lost", ago=3, slot=2, token=5, held_us=6_000_000, detail="slots 2, 4-5: expired")
    event(database, "paused", ago=1, by="ann")
    event(database, "paused", ago=1, name="Reports")
    paused, lost, granted = queries.events("reports", using=database)
    assert (paused.what, paused.by, paused.slot, paused.slots) == ("paused", "ann", None, ())
    assert (lost.what, lost.held, lost.waited, lost.slots) == ("lost", 6.0, None, (2, 4, 5))
    assert (granted.host, granted.pid, granted.label, granted.user) == ("web1", 7, "GET /x", "a")
    assert (granted.name, granted.slot, granted.token, granted.waited) == ("reports", 2, 5, 1.5)
    now = queries.history_clock(database)
    assert (now - granted.at).total_seconds() == pytest.approx(9, abs=5)
    assert abs(now - datetime.datetime.now(datetime.UTC)) < datetime.timedelta(seconds=60)
    assert [each.what for each in queries.events("reports", limit=2, using=database)] == ["paused", "lost"]
    assert queries.events("nobody", using=database) == []


def test_words_that_only_look_like_slots(database: str) -> None:
    event(database, "revoked", slot=3, detail="slots 9-1")
    (found,) = queries.events("reports", using=database)
    assert found.slots == (3,)


def test_spans_are_the_holds_of_each_slot(database: str) -> None:
    event(database, "granted", ago=200, slot=1, token=3)
    event(database, "released", ago=100, slot=1, token=3, held_us=100_000_000)
    event(database, "released", ago=50, slot=1, token=9, held_us=20_000_000, detail="slots 1, 3")
    # The operator and the holder both tell of one end.
    event(database, "revoked", ago=30, slot=2, token=4, held_us=10_000_000, by="ann")
    event(database, "lost", ago=28, slot=2, token=4, held_us=12_000_000)
    event(database, "released", ago=7200, slot=1, token=1, held_us=1_000_000)
    found = queries.spans("reports", using=database)
    assert [(span.slot, span.event.what, span.event.token) for span in found] == [
        (1, "released", 3),
        (1, "released", 9),
        (2, "revoked", 4),
        (3, "released", 9),
    ]
    assert (found[0].end - found[0].start).total_seconds() == 100
    now = queries.history_clock(database)
    assert (now - found[0].start).total_seconds() == pytest.approx(200, abs=5)
    assert [span.event.token for span in queries.spans("reports", window=60, using=database)] == [9, 4, 9]


def test_minutes_add_up_what_each_process_counted(database: str) -> None:
    waits = recorder.to_text({0: 9, recorder.bucket(1_000_000): 1})
    minute(database, ago=2, granted=10, released=8, turned_away=3, lost=1, held_us=5_000_000, waits=waits)
    minute(database, ago=2, writer=2, granted=10, longest_wait_us=2_000_000, waits=waits)
    minute(database, ago=1, released=1, longest_hold_us=500, holds=recorder.to_text({recorder.bucket(500): 1}))
    minute(database, ago=100, granted=1000)
    found = queries.minutes("reports", using=database)
    assert len(found) == 60
    steps = {(later.at - sooner.at).total_seconds() for sooner, later in itertools.pairwise(found)}
    assert steps == {60}
    busy = [each for each in found if each.granted or each.released]
    assert [(each.granted, each.released, each.turned_away, each.lost) for each in busy] == [
        (20, 8, 3, 1),
        (0, 1, 0, 0),
    ]
    first, second = busy
    assert first.held == 5.0
    assert first.holds is None
    assert first.waits is not None
    assert (first.waits.count, first.waits.p50, first.waits.longest) == (20, 0.0, 2.0)
    assert first.waits.p95 == pytest.approx(1.0, rel=0.1)
    assert second.holds is not None
    assert second.holds.p50 <= second.holds.longest == 0.0005
    assert all(each.waits is None and not each.granted for each in found if each not in busy)
    hours = queries.minutes("reports", window=7200, step=3600, using=database)
    assert len(hours) == 2
    assert sum(each.granted for each in queries.minutes("reports", window=4 * 3600, step=3600, using=database)) == 1020
    before = queries.history_clock(database) - datetime.timedelta(minutes=60)  # what came later does not count
    assert sum(each.granted for each in queries.minutes("reports", now=before, using=database)) == 1000


@pytest.mark.process_side("postgres", "mariadb")
def test_of_very_many_rows_counts_are_exact_and_a_sample_tells_the_spread(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_HISTOGRAMS", 10)
    holds = recorder.to_text({recorder.bucket(4_000_000): 2})
    for writer in range(1, 41):
        minute(database, ago=5, writer=writer, granted=2, released=2, holds=holds, longest_hold_us=4_000_000 + writer)
    (found,) = [each for each in queries.minutes("reports", using=database) if each.granted]
    assert (found.granted, found.released) == (80, 80)
    assert found.holds is not None
    assert 60 <= found.holds.count <= 100  # as many as there were, about
    assert found.holds.longest == pytest.approx(4.00004)
    assert found.holds.mean == pytest.approx(4.0, rel=0.1)


@pytest.mark.process_side("postgres", "mariadb")
def test_since_when_anything_is_known(database: str) -> None:
    assert queries.since("reports", using=database) is None
    minute(database, ago=5, granted=1)
    minute(database, ago=500, granted=1)
    minute(database, ago=900, name="other", granted=1)
    known = queries.since("reports", using=database)
    assert known is not None
    assert 499 * 60 <= (queries.history_clock(database) - known).total_seconds() <= 502 * 60


def test_totals_of_a_page_are_one_statement(database: str) -> None:
    for number in range(100):
        minute(database, ago=number % 50, name=f"sync:{number}", turned_away=number, longest_wait_us=number)
        minute(database, ago=5, name=f"sync:{number}", writer=9, granted=2, held_us=3_000_000, longest_hold_us=10**6)
        minute(database, ago=70, name=f"sync:{number}", granted=1000)
    names = [f"sync:{number}" for number in range(100)]
    connections[database].ensure_connection()
    with CaptureQueriesContext(connections[database]) as captured:
        found = queries.totals([*names, "never"], using=database)
    assert len(captured) == 1
    assert set(found) == set(names)
    assert found["sync:7"] == Totals(
        granted=2, released=0, turned_away=7, lost=0, held=3.0, longest_hold=1.0, longest_wait=7e-6
    )
    assert queries.totals([], using=database) == {}
    assert queries.totals(["sync:1"], window=2 * 3600, using=database)["sync:1"].granted == 1002


def test_a_histogram_survives_its_text() -> None:
    lengths = [0, 1, 2, 999, 10**6, 59_000_000, 86400 * 10**6, 10**18]
    counts: dict[int, int] = {}
    for length in lengths:
        number = recorder.bucket(length)
        counts[number] = counts.get(number, 0) + 1
        assert recorder.middle(number) == pytest.approx(length, rel=0.1)
    assert recorder.from_text(recorder.to_text(counts)) == counts
    assert recorder.add_up([recorder.to_text(counts), recorder.to_text(counts)]) == {
        key: 2 * n for key, n in counts.items()
    }
    assert recorder.from_text("3:4 x 5 :: 7:y") == {3: 4}
    assert recorder.percentiles({}, 0) is None


def test_a_histogram_of_everything_still_fits() -> None:
    counts = dict.fromkeys(range(250), 10_000_000)
    text = recorder.to_text(counts)
    assert len(text) <= recorder.MAX_TEXT
    merged = recorder.from_text(text)
    assert sum(merged.values()) == 250 * 10_000_000
    assert merged[0] == 10_000_000
    assert all(number < 256 for number in merged)


@pytest.mark.parametrize("shape", ["equal", "spread", "two humps"])
def test_percentiles_are_within_a_tenth(shape: str) -> None:
    chosen = random.Random(7)
    lengths = {
        "equal": [5_000] * 1000,
        "spread": [int(chosen.lognormvariate(9, 2)) + 1 for _ in range(5000)],
        "two humps": [200] * 900 + [3_000_000] * 100,
    }[shape]
    counts: dict[int, int] = {}
    for length in lengths:
        number = recorder.bucket(length)
        counts[number] = counts.get(number, 0) + 1
    found = recorder.percentiles(counts, max(lengths))
    assert found is not None
    ordered = sorted(lengths)
    assert found.count == len(lengths)
    assert found.p50 == pytest.approx(ordered[len(ordered) // 2] / 1e6, rel=0.11)
    assert found.p95 == pytest.approx(ordered[int(len(ordered) * 0.95)] / 1e6, rel=0.11)
    assert found.longest == max(lengths) / 1e6


def test_slots_are_told_and_read_back() -> None:
    assert several((4,)) == ""
    assert several((1, 2, 3, 7)) == "slots 1-3, 7"
    assert parse_slots("1-3, 7") == (1, 2, 3, 7)
    assert several(tuple(range(1, 10_001))) == "slots 1-10000"
    assert len(several(tuple(range(1, 10_001, 2)))) < 250
    assert parse_slots("nonsense") == ()


@pytest.mark.process_side("postgres", "mariadb")
def test_trends_of_names_and_templates_are_one_statement(database: str) -> None:
    now = clock_us(database) // MINUTE * MINUTE + MINUTE // 2
    for ago in (0, 1, 2, 7):
        for writer in (1, 2):
            minute(
                database, ago=ago, writer=writer, now=now, name="sync:1", template="sync:{pk}", granted=1,
                turned_away=ago, held_us=3_000_000, longest_hold_us=1_000_000 * (ago + 1), longest_wait_us=500_000,
            )  # fmt: skip
    minute(database, ago=1, now=now, name="sync:2", template="sync:{pk}", turned_away=5)
    minute(database, ago=1, now=now, name="plain", lost=1)
    at = datetime.datetime.fromtimestamp(now / 1e6, datetime.UTC)
    reader: Any = {"window": 300.0, "step": 60.0, "now": at, "using": database}
    with CaptureQueriesContext(connections[database]) as captured:
        names, templates = queries.trends(["sync:1", "plain", "never"], ["sync:{pk}", "no:{such}"], **reader)
    assert len(captured) == 1
    assert set(names) == {"sync:1", "plain"}
    assert set(templates) == {"sync:{pk}"}
    began = [datetime.datetime.fromtimestamp((now // MINUTE - ago) * 60, datetime.UTC) for ago in range(3)]
    assert names["sync:1"].steps == {began[0]: (6.0, 0), began[1]: (6.0, 2), began[2]: (6.0, 4)}
    assert names["sync:1"].totals == Totals(6, 0, 6, 0, 18.0, 3.0, 0.5)
    assert templates["sync:{pk}"].steps[began[1]] == (6.0, 7)
    assert names["plain"].totals.lost == 1
    names, templates = queries.trends(["sync:1"], [], **reader | {"window": 1200.0, "step": 600.0})
    assert templates == {}
    assert sum(refused for _held, refused in names["sync:1"].steps.values()) == 20
    assert all(each.minute % 10 == 0 for each in names["sync:1"].steps)
    assert queries.trends([], [], **reader) == ({}, {})


def test_what_operators_did_to_any_name(database: str, settings: Any) -> None:
    event(database, "granted", ago=1)
    event(database, "deadlock", ago=1)
    for ago, name in ((30.0, "reports"), (20.0, "sync"), (10.0, "reports")):
        made = event(database, "paused", ago=ago, name=name, by="ann")
        EventRow.objects.using(database).filter(pk=made.pk).update(until_us=made.at_us + 30 * 86400 * 1_000_000)
    assert [each.name for each in queries.acts(using=database)] == ["reports", "sync", "reports"]
    assert len(queries.acts(limit=2, using=database)) == 2
    settings.SQLSEM = {"HISTORY": {"GRANTS": 3600, "ACTS": 3600}}
    assert [each.name for each in queries.acts(using=database)] == ["reports", "sync", "reports"]
