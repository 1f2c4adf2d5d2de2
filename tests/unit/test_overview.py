"""The list of all locks: what it shows, in which order, and that its cost does not grow with the names."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models import F
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_sqlsem import queries
from django_sqlsem.admin import overview
from django_sqlsem.admin.display import KIND_WORDS, cells, drawn
from django_sqlsem.admin.overview import ranked
from django_sqlsem.backends import get_backend
from django_sqlsem.backends.base import BaseSemaphoreBackend
from django_sqlsem.core.names import resource_for
from django_sqlsem.locks import transaction_lock
from django_sqlsem.models import MinuteRow, SemaphoreRow, SlotRow
from django_sqlsem.snapshots import SURVEY_STATES
from tests.support.databases import without_tables
from tests.support.operators import hold, make_semaphore, now_us, wait
from tests.unit.test_admin import SEMAPHORES, login, rows_of, text

pytestmark = [pytest.mark.leaves_held, pytest.mark.process_side("postgres")]
#: Where databases differ: in what they find, and how they order it.
on_each_database = pytest.mark.process_side("postgres", "mariadb")

LOCKS = "admin:sqlsem_transactionlockrow_changelist"
FRAGMENT = {"X-Sqlsem-Fragment": "1"}


def names(response: Any) -> list[str]:
    return [row.name for row in response.context["cl"].result_list]


def listed(client: Client, **parameters: Any) -> list[str]:
    return names(client.get(reverse(SEMAPHORES), parameters))


def column(response: Any, title: str) -> int:
    """Return the number by which the list is ordered by a column, as a click on its header would do."""
    headers = re.findall(r"<th[^>]*column-(\w+)[^>]*>(.*?)</th>", response.content.decode(), re.DOTALL)
    link = dict(headers)[title]
    return int(re.findall(r"o=-?(\d+)", unescape(link))[0])


def minute(alias: str, name: str, **counts: int) -> None:
    """Write what a process counted a minute ago."""
    with connections[alias].cursor():
        clock = queries.history_clock(alias)
    at = int(clock.timestamp() * 1e6) - 60_000_000
    MinuteRow.objects.using(alias).create(
        key=resource_for(name, "").key, minute_us=at, until_us=at + 10**12, **counts
    )  # fmt: skip


def fill(alias: str) -> None:
    """Write one name of each state, in another order than they are shown."""
    for name in ("calm", "paused", "waited", "gone", "drains", "held"):
        make_semaphore(alias, name, slots=2, paused=name in ("paused", "drains"))
    hold(alias, "held", left=600)
    hold(alias, "waited", slot=1, left=600)
    hold(alias, "waited", slot=2, left=600)
    wait(alias, "waited", waiting=3, left=600)
    hold(alias, "gone", left=-5)
    hold(alias, "drains", left=600)


def test_trouble_stands_first(operator: Client, locks_alias: str) -> None:
    fill(locks_alias)
    assert listed(operator) == ["gone", "waited", "drains", "paused", "calm", "held"]


@on_each_database
def test_columns_order_the_list(operator: Client, locks_alias: str) -> None:
    fill(locks_alias)
    page = operator.get(reverse(SEMAPHORES))
    by = {title: column(page, title) for title in ("lock_name", "cells", "waiting")}
    assert listed(operator, o=by["lock_name"]) == ["calm", "drains", "gone", "held", "paused", "waited"]
    assert listed(operator, o=-by["lock_name"]) == ["waited", "paused", "held", "gone", "drains", "calm"]
    assert listed(operator, o=-by["cells"]) == ["waited", "drains", "held", "calm", "gone", "paused"]
    assert listed(operator, o=by["cells"]) == ["calm", "gone", "paused", "drains", "held", "waited"]
    assert listed(operator, o=-by["waiting"])[0] == listed(operator, o=by["waiting"])[-1] == "waited"
    assert sorted(listed(operator, o="77.-x")) == sorted(listed(operator))


@on_each_database
@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ({"state": "held"}, {"held", "waited", "drains"}),
        ({"state": "stale"}, {"gone"}),
        ({"state": "waiting"}, {"waited"}),
        ({"state": "paused"}, {"paused", "drains"}),
        ({"state": "draining"}, {"drains"}),
        ({"state": "held", "q": "WAIT"}, {"waited"}),
        ({"kind": "semaphore", "state": "paused"}, {"paused", "drains"}),
        ({"kind": "mutex"}, set()),
        ({"q": "a"}, {"calm", "paused", "waited", "drains"}),
        ({"q": "no such"}, set()),
        ({"q": "'AI' d"}, {"waited", "drains"}),
        ({"q": "% \\"}, set()),
        ({"state": "odd"}, {"calm", "paused", "waited", "gone", "drains", "held"}),
    ],
)
def test_filters_and_search(operator: Client, locks_alias: str, parameters: dict[str, str], found: set[str]) -> None:
    fill(locks_alias)
    response = operator.get(reverse(SEMAPHORES), parameters)
    assert set(names(response)) == found
    assert response.context["cl"].result_count == len(found)


@on_each_database
def test_the_survey_is_what_all_snapshots_amount_to(locks_alias: str) -> None:
    fill(locks_alias)
    make_semaphore(locks_alias, "shared", slots=4, kind="rwlock")
    hold(locks_alias, "shared", slot=1, left=600)
    backend = get_backend(locks_alias)
    seen, told = backend.survey(), BaseSemaphoreBackend.survey(backend)
    assert (seen.held, seen.stale, seen.waiting, seen.paused, seen.draining) == (5, 1, 3, 2, 1)
    assert (told.held, told.stale, told.waiting, told.paused, told.draining) == (5, 1, 3, 2, 1)
    rows = SemaphoreRow.objects.using(locks_alias)
    slots = SlotRow.objects.using(locks_alias)
    for state in SURVEY_STATES:
        assert seen.listed(state).counts == told.listed(state).counts, state
        wanted = set(seen.listed(state).counts)
        assert {row.pk for row in rows.filter(backend.in_state(state))} == wanted, state
        assert {row.pk for row in rows.filter(BaseSemaphoreBackend.in_state(backend, state))} == wanted, state
        mine, general = backend.slots_in_state(state), BaseSemaphoreBackend.slots_in_state(backend, state)
        assert {row.pk for row in slots.filter(mine)} == {row.pk for row in slots.filter(general)}, state


@pytest.mark.rows_only("lease")
def test_a_holder_that_is_late_is_stale(locks_alias: str) -> None:
    make_semaphore(locks_alias, slots=3)
    hold(locks_alias, slot=1, age=70, left=20)
    hold(locks_alias, slot=2, age=70, left=600)
    hold(locks_alias, slot=3, age=10, left=50, suspect_us=now_us(locks_alias))
    snapshot = queries.semaphore("reports", using=locks_alias)
    survey = queries.survey(using=locks_alias)
    assert snapshot is not None
    assert (survey.held, survey.stale) == (snapshot.held, snapshot.stale) == (3, 2)


@on_each_database
def test_more_than_a_survey_lists(locks_alias: str, operator: Client, monkeypatch: Any) -> None:
    fill(locks_alias)
    for module in ("backends.rows.reading", "admin.overview", "snapshots"):
        monkeypatch.setattr(f"django_sqlsem.{module}.MOST_NAMES", 1)
    monkeypatch.setattr(overview, "FEW_NAMES", 1)
    monkeypatch.setattr(overview, "SEARCHED", 3)
    survey = queries.survey(using=locks_alias)
    assert (survey.held, survey.stale, survey.waiting) == (4, 1, 3)
    assert set(listed(operator, state="held")) == {"held", "waited", "drains"}
    assert set(listed(operator, state="stale")) == {"gone"}
    assert set(listed(operator)) == {"calm", "paused", "waited", "gone", "drains", "held"}
    response = operator.get(reverse(SEMAPHORES), {"q": "e"})
    assert response.context["cl"].result_count == 3
    assert "More names match" in text(response)
    response = operator.get(reverse(SEMAPHORES), {"q": "s"})
    assert set(names(response)) == {"paused", "drains"}
    assert "More names match" not in text(response)


@on_each_database
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_pages_of_ranked_rows_fit_together(locks_alias: str, last: bool, known: bool) -> None:
    for number in range(11):
        make_semaphore(locks_alias, f"n{number:02}", slots=1)
    rows = SemaphoreRow.objects.using(locks_alias).order_by("name")
    key_of = {row.name: row.pk for row in rows}
    ranks = {key_of["n07"]: 0, key_of["n03"]: 1, key_of["n05"]: 1, "purged meanwhile": 0}
    all_names = {key: name for name, key in key_of.items()} if known else None
    first = ["n07", "n03", "n05"]
    others = [name for name in sorted(key_of) if name not in first]
    wanted = [*others, "n03", "n05", "n07"] if last else [*first, *others]
    for size in (1, 2, 3, 4, 11, 20):
        found = ranked(rows, ranks, last=last, names=all_names)
        assert found.count() == 11
        pages = [found[start : start + size] for start in range(0, 11, size)]
        assert [name for page in pages for name in page] == wanted, size


@on_each_database
def test_pages(operator: Client, locks_alias: str) -> None:
    for number in range(120):
        SemaphoreRow.objects.using(locks_alias).create(
            key=resource_for(f"n{number:03}", "").key, name=f"n{number:03}", declared_slots=1, paused=number == 119
        )
    pages = [listed(operator, p=page) for page in (1, 2, 3)]
    assert [len(page) for page in pages] == [50, 50, 20]
    assert pages[0][0] == "n119"
    assert len({name for page in pages for name in page}) == 120
    assert operator.get(reverse(SEMAPHORES), {"p": 99}).status_code == 302
    assert len(listed(operator, all="")) == 120


@pytest.mark.parametrize("parameters", [{}, {"o": "1"}, {"state": "held"}, {"q": "name"}, {"kind": "semaphore"}])
def test_the_number_of_queries_does_not_grow(operator: Client, locks_alias: str, parameters: dict[str, str]) -> None:
    def count() -> int:
        operator.get(reverse(SEMAPHORES), parameters)
        with CaptureQueriesContext(connections[locks_alias]) as captured:
            assert operator.get(reverse(SEMAPHORES), parameters).status_code == 200
        return len(captured)

    for number in range(2):
        make_semaphore(locks_alias, f"name-{number}", paused=number == 0)
        hold(locks_alias, f"name-{number}", left=600)
        wait(locks_alias, f"name-{number}", age=number, left=600)
    before = count()
    for number in range(2, 22):
        make_semaphore(locks_alias, f"name-{number}")
        hold(locks_alias, f"name-{number}", left=600)
        wait(locks_alias, f"name-{number}", age=number, left=600)
    assert count() == before
    assert before <= 12


def test_what_happened_in_the_range(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias, slots=2)
    hold(locks_alias, age=3600, left=600)
    minute(locks_alias, "reports", granted=4, released=4, turned_away=17, held_us=1_800_000_000,
           longest_hold_us=5_400_000_000, longest_wait_us=4_000_000)  # fmt: skip
    (row,) = rows_of(operator.get(reverse(SEMAPHORES)))
    assert row == ["reports semaphore", "1 of 2", "1 h 30 min", "17 refused"]
    html = operator.get(reverse(SEMAPHORES), {"range": "24h"}).content.decode()
    assert re.search(r'aria-label="0\.\d held on average, 17 refused"', html)
    assert 'class="sqlsem-spark-held"' in html
    assert 'class="sqlsem-spark-refused"' in html
    assert "Last 24 hours" in html
    # Older than this range.
    MinuteRow.objects.using(locks_alias).update(minute_us=F("minute_us") - 600_000_000)
    (row,) = rows_of(operator.get(reverse(SEMAPHORES), {"range": "5m"}))
    assert row == ["reports semaphore", "1 of 2", "1 h 00 min"]
    assert listed(operator, range="odd") == ["reports"]


def test_a_long_range_is_not_read_at_every_refresh(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)

    def read(name: str) -> int:
        with CaptureQueriesContext(connections[locks_alias]) as captured:
            assert operator.get(reverse(SEMAPHORES), {"range": name}).status_code == 200
        return sum("sqlsem_minute" in each["sql"] for each in captured)

    overview._drawn.clear()
    assert [read("7d"), read("7d"), read("24h"), read("7d"), read("24h")] == [1, 0, 1, 0, 0]
    assert [read("1h"), read("1h")] == [1, 1]
    make_semaphore(locks_alias, "another")
    assert read("7d") == 1


def test_without_a_history(operator: Client, locks_alias: str, settings: Any) -> None:
    settings.SQLSEM = {"DATABASE": locks_alias, "HISTORY": False}
    make_semaphore(locks_alias, slots=2)
    hold(locks_alias, age=12, left=600)
    response = operator.get(reverse(SEMAPHORES))
    (row,) = rows_of(response)
    assert row[:2] == ["reports semaphore", "1 of 2"]
    assert re.fullmatch(r"[1-3]\d s", row[2])
    assert "sqlsem-spark" not in response.content.decode()


def test_all_kinds_have_a_word(operator: Client, locks_alias: str) -> None:
    for kind, word in KIND_WORDS.items():
        make_semaphore(locks_alias, f"a {kind}", slots=1, kind=kind, units=7 if kind == "counter" else None)
        assert str(word) in text(operator.get(reverse(SEMAPHORES), {"kind": kind, "q": f"a {kind}"}))
    assert "7 units" in text(operator.get(reverse(SEMAPHORES), {"kind": "counter"}))


def test_cells(locks_alias: str) -> None:
    def states(name: str) -> list[tuple[int, str, int]]:
        snapshot = queries.semaphore(name, using=locks_alias)
        assert snapshot is not None
        return [(cell.slot, cell.state, cell.count) for cell in cells(snapshot)]

    fill(locks_alias)
    make_semaphore(locks_alias, "many", slots=60)
    hold(locks_alias, "many", slot=5, left=600)
    hold(locks_alias, "many", slot=9, left=-5)
    make_semaphore(locks_alias, "shrunk", slots=3, operator_slots=1)
    hold(locks_alias, "shrunk", slot=3, left=600)
    assert states("held") == [(1, "held", 1), (2, "free", 1)]
    assert states("gone") == [(1, "stale", 1), (2, "free", 1)]
    assert states("drains") == [(1, "draining", 1), (2, "paused", 1)]
    assert states("many") == [(9, "stale", 1), (5, "held", 1), (1, "free", 58)]
    assert states("shrunk") == [(1, "free", 1), (3, "held", 1)]
    hold(locks_alias, "held", label="<script>\u202e", left=600)
    snapshot = queries.semaphore("held", using=locks_alias)
    assert snapshot is not None
    html = drawn(snapshot)
    assert 'role="img" aria-label="Slots: 1 held, 1 free"' in html
    assert "&lt;script&gt;[U+202E]" in html
    assert "<script" not in html


def test_the_script_gets_the_changing_part_alone(operator: Client, locks_alias: str) -> None:
    fill(locks_alias)
    whole = operator.get(reverse(SEMAPHORES)).content.decode()
    assert whole.count('id="sqlsem-live"') == 1
    assert whole.count('name="action"') == 1
    part = operator.get(reverse(SEMAPHORES), headers=FRAGMENT)
    assert part.status_code == 200
    assert part["X-Sqlsem-Fragment"] == "1"
    html = part.content.decode()
    assert "<html" not in html
    assert 'id="sqlsem-live"' not in html
    for kept in ('id="result_list"', 'id="sqlsem-states"', "data-sqlsem-keep", "waited"):
        assert kept in html
        assert kept in whole


def test_totals_lead_to_the_names(operator: Client, locks_alias: str) -> None:
    fill(locks_alias)
    html = operator.get(reverse(SEMAPHORES), {"q": "a", "p": "1"}).content.decode()
    for state, count in (("held", 4), ("stale", 1), ("waiting", 3), ("paused", 2), ("draining", 1)):
        (link,) = re.findall(rf'href="([^"]*state={state}[^"]*)"><strong>{count}</strong>', html)
        assert "q=a" in link
        assert operator.get(reverse(SEMAPHORES) + unescape(link)).status_code == 200


def test_a_database_that_fails_is_said(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    with without_tables(locks_alias, "sqlsem_waiter"):
        assert operator.get(reverse(SEMAPHORES)).status_code == 503
        part = operator.get(reverse(SEMAPHORES), headers=FRAGMENT)
        assert part.status_code == 503
        assert part["Content-Type"].startswith("text/plain")


@on_each_database
def test_to_list_transaction_locks_takes_none(operator: Client, locks_alias: str, committed: None) -> None:
    if connections[locks_alias].vendor == "microsoft":
        pytest.skip("application locks of a transaction have no rows to list")
    with transaction.atomic(using=locks_alias):
        transaction_lock("a name", using=locks_alias)
    with CaptureQueriesContext(connections[locks_alias]) as captured:
        assert "a name" in text(operator.get(reverse(LOCKS)))
    assert not [each["sql"] for each in captured if re.search(r"\bFOR (UPDATE|SHARE)\b|SHARE MODE", each["sql"])]
    assert login("nobody").get(reverse(LOCKS)).status_code == 403


def test_a_template_has_tiles_of_what_is_counted_by_template(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias, "n1", template="n{pk}")
    page = operator.get(reverse(SEMAPHORES), {"template": "n{pk}"}).content.decode()
    tiles = dict(re.findall(r'<li class="sqlsem-(\w+)[^>]*><a [^>]*>(?:<strong>(\d*)</strong>)?', page))
    assert tiles == {"all": "", "held": "0", "stale": "0", "waiting": "0", "paused": "0"}


def test_the_entrance_keeps_what_an_address_asks_for(operator: Client, locks_alias: str) -> None:
    asked = reverse("admin:app_list", args=["sqlsem"]) + "?state=waiting&range=24h"
    assert operator.get(asked)["Location"] == reverse(SEMAPHORES) + "?state=waiting&range=24h"
