"""The page of one lock: what it says of now and of the last hour, and that its cost is bounded."""

from __future__ import annotations

import random
import re
from html import unescape
from typing import Any

import pytest
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_sqlsem import control
from django_sqlsem.admin import drawing, live, tables
from django_sqlsem.core.names import resource_for
from django_sqlsem.history import recorder
from django_sqlsem.models import (
    EventRow,
    MinuteRow,
    SemaphoreRow,
    SlotRow,
    WaitRow,
)
from tests.support.operators import boot_id, hold, make_semaphore, now_us, wait
from tests.support.threads import wait_until
from tests.unit.test_admin import key, login, text
from tests.unit.test_history import clock_us, event, minute

pytestmark = [pytest.mark.leaves_held, pytest.mark.process_side]

SECOND = 1_000_000


@pytest.fixture
def alias(committed: None) -> str:
    """Pages are pages; what they read is tested on each database, and one test here too."""
    return "default"


@pytest.fixture
def operator(committed: None) -> Client:
    return login("boss", is_superuser=True)


def address(name: str = "reports") -> str:
    return reverse("admin:sqlsem_semaphorerow_change", args=[key(name)])


def part(html: str, name: str) -> str:
    """Return one table or drawing of the page as text."""
    found = re.search(rf'<(svg|table)[^>]*id="{name}".*?</\1>', html, re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", found.group().replace("<wbr>", ""))) if found else ""


def an_hour(alias: str, name: str = "reports", writer: int = 1) -> None:
    """Write a history: grants, ends, one loss, one who was turned away, and an operator's acts."""
    who = {"host": "web1", "pid": 7, "label": "GET /x", "user": "ann", "name": name}
    event(alias, "granted", ago=900, slot=1, token=5, waited_us=250_000, **who)
    event(alias, "released", ago=300, slot=1, token=5, held_us=600 * SECOND, **who)
    event(alias, "lost", ago=200, slot=2, token=6, held_us=60 * SECOND, detail="expired", **who)
    event(alias, "timed_out", ago=100, waited_us=5 * SECOND, **who)
    event(alias, "resized", ago=1200, by="ann", detail="3 slots", name=name)
    event(alias, "paused", ago=60, by="bob", name=name)
    waits, holds = recorder.to_text({recorder.bucket(250_000): 3}), recorder.to_text({recorder.bucket(600 * SECOND): 1})
    minute(alias, ago=10, name=name, writer=writer, granted=3, waits=waits, longest_wait_us=250_000)
    minute(
        alias, ago=4, name=name, writer=writer, granted=1, released=1, lost=1, turned_away=2, holds=holds,
        held_us=660 * SECOND, longest_hold_us=600 * SECOND,
    )  # fmt: skip


def test_everything_is_said(database: str, settings: Any) -> None:
    settings.SQLSEM = {"DATABASE": database}
    operator = login("boss", is_superuser=True)
    make_semaphore(database, slots=2, operator_slots=3)
    SlotRow.objects.using(database).create(semaphore_id=key(), slot=3)
    hold(database, slot=1)
    hold(database, slot=2, left=-5, age=65, token=8, host="web9", stop_token=8, stop_by="ann")
    wait(database)
    an_hour(database)
    html = operator.get(address()).content.decode()
    shown = text(operator.get(address()))
    assert "reports semaphore" in shown
    assert "1 slot is stale" in shown
    assert re.search(r"Slots set to 3 by ann, \d{4}-\d\d-\d\d \d\d:\d\d \w+; the code declares 2\.", shown)
    holders = part(html, "sqlsem-holders")
    assert re.search(r"1 held web1 pid 4711 · MainThread GET /reports/ ann 1\d s [\d:]+ (4|5)\d s 7", holders)
    assert re.search(r"2 stale asked to stop by ann web9 pid 4711 .* 1 min \d\d s [\d:]+ ran out \d.* 8", holders)
    assert re.search(r"1 \d\.\d s [\d.]+ s web2 pid 99 · worker GET /wait/ bob 2 1 slot", part(html, "sqlsem-waiters"))
    assert "granted 4 refused 2 lost 1" in shown
    drawn = part(html, "sqlsem-timeline")
    assert re.search(r"slot 1: web1 pid 7, GET /x, held 10 min from [\d:]+ to [\d:]+, released", drawn)
    assert "slot 2: web1 pid 7, GET /x, held 1 min" in drawn
    assert re.search(r"slot 1: web1 pid 4711, GET /reports/, held 1\d s up to now, held", drawn)
    assert re.search(r"[\d:]+ paused by bob", drawn)
    assert "2 refused" in part(html, "sqlsem-refused")
    assert "p50 240 ms, p95 240 ms, max 250 ms" in part(html, "sqlsem-waits")
    assert "max 10 min" in part(html, "sqlsem-holds")
    rare = part(html, "sqlsem-rare")
    lost = "lost 2 web1 pid 7 GET /x ann - 1 min expired"
    assert re.search(rf"paused - - - - - bob .* {lost} .* slots set - - - - - ann 3 slots", rare)
    assert "refused - web1 pid 7 GET /x ann 5 s - -" in part(html, "sqlsem-events")
    assert "web1 pid 7 GET /x ann released" in re.sub(r"\s+·\s+", " ", part(html, "sqlsem-spans")).replace("  ", " ")


@pytest.mark.parametrize(
    ("paused", "act", "held", "said"),
    [
        (False, None, True, ""),
        (True, "paused", True, "Paused by bob: nothing is granted"),
        (True, None, False, "Paused: nothing is granted"),
        (True, "drained", True, "Draining by bob: 1 holder has not left yet."),
        (True, "drained", False, "Drained by bob: nobody holds it"),
    ],
)
def test_pausing_and_draining(operator: Client, alias: str, paused: bool, act: str, held: bool, said: str) -> None:
    make_semaphore(alias, paused=paused)
    if held:
        hold(alias)
    if act:
        event(alias, act, by="bob")
    shown = text(operator.get(address()))
    assert said in shown
    assert ("resumed." in shown) is paused


def test_what_control_does_is_shown_with_who_did_it(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    hold(alias)
    control.revoke("reports", 1, 7, by="eve", using=alias)
    control.pause("reports", by="eve", using=alias)
    html = operator.get(address()).content.decode()
    assert "Paused by eve" in html
    assert re.search(r"revoked 1? ?.* eve", part(html, "sqlsem-rare"))
    assert "paused by eve" in part(html, "sqlsem-timeline")


def test_disagreements_are_shown(operator: Client, alias: str) -> None:
    make_semaphore(alias, other_slots=9, other_us=now_us(alias))
    assert "Processes disagree: some declare 3 slots, others 9." in text(operator.get(address()))


def test_two_kinds_are_shown(operator: Client, alias: str) -> None:
    make_semaphore(alias, kind="mutex")
    hold(alias, mode="mutex")
    assert "and as a semaphore" not in text(operator.get(address()))
    hold(alias, slot=2, token=8, mode="")
    shown = text(operator.get(address()))
    assert "It is in use as a mutex and as a semaphore: one is let in at a time" in shown
    assert "held (semaphore)" in shown
    assert "mutex, semaphore" in text(operator.get(reverse("admin:sqlsem_semaphorerow_changelist")))


@pytest.mark.parametrize(("kind", "word"), [("mutex", "mutex"), ("rlock", "rlock"), ("rwlock", "readers")])
def test_each_kind_has_its_word(operator: Client, alias: str, kind: str, word: str) -> None:
    make_semaphore(alias, slots=1, kind=kind)
    hold(alias, slot=1)
    shown = text(operator.get(address()))
    assert f"reports {word}" in shown
    assert ("reader" in shown.split("Holders")[1].split("Queue")[0]) is (kind == "rwlock")


def test_a_count_of_tokens_has_neither_slots_nor_a_timeline(operator: Client, alias: str) -> None:
    make_semaphore(alias, slots=0, kind="counter", units=5)
    wait(alias)
    html = operator.get(address()).content.decode()
    assert re.search(r"<dt>units</dt><dd>5", html)
    assert "1 unit" in part(html, "sqlsem-waiters")
    assert part(html, "sqlsem-timeline") == ""


def test_a_deadlock_is_shown_with_both_sides(operator: Client, alias: str) -> None:
    for name, permit, host in (("a", "1" * 32, "left"), ("b", "2" * 32, "right")):
        make_semaphore(alias, name, slots=1)
        hold(alias, name, permit_id=permit, host=host)
    make_semaphore(alias, "c")
    now = now_us(alias)
    for name, holds, host in (("a", f"{key('b')}/{'2' * 32}", "right"), ("b", f"{key('a')}/{'1' * 32}", "left")):
        WaitRow.objects.using(alias).create(
            wait_id=host, key=key(name), name=name, permits=holds, since_us=now - 5 * SECOND, host=host, pid=1,
            expires_us=now + 60 * SECOND, boot_id=boot_id(alias), label=f"GET /{host}/",
        )  # fmt: skip
    for name in ("a", "b"):
        shown = text(operator.get(address(name)))
        assert shown.index("Deadlock:") < shown.index("Holders")
        for side in ("left", "right"):
            assert side in shown[shown.index("Deadlock:") : shown.index("Holders")]
        edges = shown[shown.index("Who waits for whom") : shown.index("Last ")]
        assert re.search(
            r"left pid 1 \(GET /left/\) has waited \d\.\d s for 'b', held by right .*, and holds 'a'", edges
        )
        assert re.search(
            r"right pid 1 \(GET /right/\) has waited \d\.\d s for 'a', held by left .*, and holds 'b'", edges
        )
    shown = text(operator.get(address("c")))
    assert "Deadlock" not in shown.split("Losses")[0]
    assert "Who waits for whom" not in shown


def test_an_idle_lock(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    shown = text(operator.get(address()))
    for said in ("Nobody holds it.", "Nobody waits.", "None is recorded.", "Nothing is recorded."):
        assert said in shown


def test_without_a_history_the_page_says_so(operator: Client, alias: str, settings: Any) -> None:
    settings.SQLSEM = {"HISTORY": False}
    make_semaphore(alias)
    hold(alias)
    shown = text(operator.get(address()))
    assert "The history is turned off" in shown
    assert "longest wait" not in shown
    assert "up to now" in shown  # what is held now is drawn all the same


def test_strange_texts_do_no_harm(operator: Client, alias: str) -> None:
    name = "a\u202eb<script>alert(1)</script>\n'\""
    make_semaphore(alias, name, slots=1)
    hold(alias, name, label="</td>\u2066<img src=x onerror=alert(1)>\x07", user="\u202e<b>", thread="t\u200f")
    wait(alias, name)
    event(
        alias, "lost", name=name, slot=1, held_us=SECOND, host="<h>", pid=1, label="<i>\u202e", by="<u>", detail="\x1b"
    )
    html = operator.get(address(name)).content.decode()
    assert not re.search(r"<script>|<img src=x|<b>|<i>|<u>|<h>", html)
    assert not set(re.sub(r'data-sqlsem-url="[^"]*"', "", html)) & set("\u202e\u2066\u200f\x07\x1b")
    assert "a[U+202E]b&lt;script&gt;" in html
    assert "[U+001B]" in html


def test_the_cost_does_not_grow(operator: Client, alias: str) -> None:
    def count() -> int:
        with CaptureQueriesContext(connections[alias]) as captured:
            assert operator.get(address()).status_code == 200
        return len(captured)

    make_semaphore(alias, slots=30)
    hold(alias, slot=1)
    an_hour(alias)
    operator.get(address())
    before = count()
    for slot in range(2, 31):
        hold(alias, slot=slot, token=slot)
        wait(alias, age=slot)
        an_hour(alias, writer=slot)
    assert count() == before
    assert before < 35


def test_very_much_is_bounded(operator: Client, alias: str) -> None:
    make_semaphore(alias, slots=1000)
    now, clock = now_us(alias), clock_us(alias)
    label = "GET /a/rather/long/address/of/a/page/that/takes/a/while/?with=some&parameters=in+it"
    rows = SlotRow.objects.using(alias).filter(semaphore=key())
    rows.update(
        permit_id="p", acquired_us=now - 90 * SECOND, expires_us=now + 9 * SECOND, lease_us=10 * SECOND,
        host="a-host-with-a-long-name.example.invalid", pid=4711, thread="ThreadPoolExecutor-0_7", label=label,
        user="somebody@example.invalid", boot_id=boot_id(alias),
    )  # fmt: skip
    chance = random.Random(1)
    common: dict[str, Any] = {
        "key": resource_for("reports", "").key, "name": "reports", "until_us": clock + 10**12, "pid": 4711,
        "host": "a-host-with-a-long-name.example.invalid", "label": label, "user": "somebody@example.invalid",
    }  # fmt: skip
    ended = [
        EventRow(at_us=clock - chance.randrange(3600 * SECOND), what=chance.choice(["released"] * 9 + ["lost"]),
                 slot=chance.randrange(1, 1001), token=number, held_us=chance.randrange(90 * SECOND), **common)
        for number in range(1500)
    ]  # fmt: skip
    acts = [EventRow(at_us=clock - number * SECOND, what="stop_asked", by="ann", **common) for number in range(200)]
    EventRow.objects.using(alias).bulk_create(ended + acts)
    histogram = recorder.to_text(dict.fromkeys(range(0, 120, 3), 9))
    MinuteRow.objects.using(alias).bulk_create(
        MinuteRow(key=common["key"], minute_us=(clock // (60 * SECOND) - ago) * 60 * SECOND, until_us=clock + 10**12,
                  writer=writer, granted=900, released=900, turned_away=50, lost=3, held_us=6 * 10**9,
                  waits=histogram, holds=histogram, longest_wait_us=10**9, longest_hold_us=10**9)
        for ago in range(60) for writer in range(20)
    )  # fmt: skip
    answer = operator.get(address())
    html = answer.content.decode()
    assert len(answer.content) < 300_000
    assert len(operator.get(address(), headers={live.HEADER: "1", live.LIGHT: "1"}).content) < 60_000
    assert f"{tables.MAX_ROWS} of 1000" in text(answer)
    assert f"{drawing.MAX_LANES} of 1000 slots are drawn" in text(answer)
    assert "holds ended in this time" in text(answer)
    assert html.count('text-anchor="end" class="sqlsem-held"') == drawing.MAX_LANES
    assert html.count("<rect") < drawing.MAX_BARS + drawing.MAX_LANES + 500


def test_rows_can_be_told_apart_when_they_move(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    for slot in (1, 2, 3):
        hold(alias, slot=slot, token=slot + 4)
        wait(alias, age=slot)
    an_hour(alias)
    html = operator.get(address()).content.decode()
    assert 'data-sqlsem-key="holder 2 6"' in html
    for table in ("holders", "waiters", "events", "rare", "spans", "minutes"):
        found = re.search(rf'<table id="sqlsem-{table}".*?</table>', html, re.DOTALL)
        assert found, table
        keys = re.findall(r'<tr role="row" data-sqlsem-key="(.*?)"', found.group())
        assert len(keys) == len(set(keys)) > 0, table
    ids = re.findall(r'\bid="(.*?)"', html)
    assert len(ids) == len(set(ids))


def test_buttons_go_by_permissions(alias: str, committed: None) -> None:
    make_semaphore(alias)
    hold(alias)
    viewer = login("viewer", "view_semaphorerow").get(address()).content.decode()
    assert "sqlsem-act" not in viewer.replace("sqlsem-acts", "")
    helper = login("helper", "view_semaphorerow", "revoke_semaphorerow").get(address()).content.decode()
    assert 'value="revoke 1 7"' in helper
    assert 'value="pause"' not in helper
    assert SemaphoreRow.objects.using(alias).count() == 1


@pytest.mark.parametrize(
    ("chosen", "old", "title"),
    [
        ("", 120, "Last hour up to"),
        ("5m", 120, "Last 5 minutes up to"),
        ("24h", 5, "Last 5 min"),
        ("24h", 2000, "Last 24 hours up to"),
        ("7d", 3000, "Last 2 d 02 h"),
        ("a year", 120, "Last hour up to"),
    ],
)
def test_a_range_is_never_longer_than_what_is_known(
    operator: Client, alias: str, chosen: str, old: int, title: str
) -> None:
    make_semaphore(alias)
    wait_until(lambda: clock_us(alias) % (60 * SECOND) < 50 * SECOND)  # what is known is told in whole minutes
    minute(alias, ago=old, granted=1)
    minute(alias, ago=1, granted=3)
    shown = text(operator.get(address(), {"range": chosen} if chosen else {}))
    assert title in shown
    assert ("nothing older is known" in shown) is ("up to" not in title)
    granted = {"5m": 3}.get(chosen, 4 if old <= 60 or title.startswith(("Last 2 d", "Last 24 hours ")) else 3)
    if "24 hours" in title:
        granted = 3
    assert f"granted {granted} " in shown


def test_the_page_says_which_range_it_shows_and_keeps_to_it(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    html = operator.get(address(), {"range": "24h", "_changelist_filters": "state=held"}).content.decode()
    assert re.findall(r'aria-current="true">(.*?)<', html) == ["24 h"]
    assert "range=7d&amp;_changelist_filters=state%3Dheld#sqlsem-range" in html or (
        "_changelist_filters=state%3Dheld&amp;range=7d#sqlsem-range" in html
    )
    assert "?range=24h" in re.findall(r'data-sqlsem-url="(.*?)"', html)[0]
    assert re.findall(r'data-sqlsem-light="(\d+)"', html) == ["19"]


def test_a_week_of_many_processes_is_added_up_exactly_and_drawn_in_few_steps(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    clock = clock_us(alias) // (60 * SECOND) * 60 * SECOND
    holds = recorder.to_text({recorder.bucket(4 * SECOND): 2})
    MinuteRow.objects.using(alias).bulk_create(
        [
            MinuteRow(key=key(), minute_us=clock - ago * 60 * SECOND, until_us=clock + 10**12, writer=writer, granted=2,
                      released=2, held_us=8 * SECOND, longest_hold_us=5 * SECOND, holds=holds)
            for ago in range(0, 7 * 24 * 60 - 200, 2) for writer in (1, 2)
        ],
        batch_size=500,
    )  # fmt: skip
    minutes = (7 * 24 * 60 - 200) // 2
    answer = operator.get(address(), {"range": "7d"})
    assert f"granted {4 * minutes} " in text(answer)
    assert answer.content.count(b'class="sqlsem-column sqlsem-granted"') <= 100
    assert "max 5 s" in part(answer.content.decode(), "sqlsem-holds")
    assert len(answer.content) < 100_000


def test_runs_of_the_same_are_one_row(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    clock = clock_us(alias)
    minute_us = clock // (60 * SECOND) * 60 * SECOND - 120 * SECOND
    common: dict[str, Any] = {"key": key(), "name": "reports", "until_us": clock + 10**12}
    for number in range(14):
        EventRow.objects.using(alias).create(
            at_us=minute_us + SECOND + number * SECOND * 4 // 13, what="timed_out", host=f"web{number % 5}", pid=1,
            label="GET /x", waited_us=5 * SECOND, **common,
        )  # fmt: skip
    for number in range(3):  # an operator's are never folded
        EventRow.objects.using(alias).create(
            at_us=minute_us + 30 * SECOND + number, what="paused", by="ann", detail=f"INC-{number}", **common
        )
    shown = part(operator.get(address()).content.decode(), "sqlsem-events")
    assert re.search(r"\d\d:\d\d:01 to 05 refused × 14 - web3 , web2 , web1 and 2 others GET /x 5 s -", shown)
    assert shown.count("paused") == 3
    assert re.search(r"ann INC-2 .*ann INC-1 .*ann INC-0", shown)


LINKS = {
    "task": "https://flower.example/task/{task_id}?name={task}",
    "trace": "https://traces.example/{trace_id}",
    "logs": "https://logs.example/?q={name}+{host}+{user}&from={since_ms}&to={until_ms}",
}


def test_links_lead_to_the_task_the_trace_and_the_logs(operator: Client, alias: str, settings: Any) -> None:
    settings.SQLSEM = {"LINKS": LINKS}
    make_semaphore(alias, "a&b")
    hold(alias, "a&b", slot=1, label="shop.tasks.send[1f-2e]", user='"><b>')
    hold(alias, "a&b", slot=2, token=8, label="GET /x/ [4bf9]")
    hold(alias, "a&b", slot=3, token=9, label="GET /[x]")
    event(alias, "lost", name="a&b", slot=1, held_us=SECOND, host="w", pid=1, label="shop.tasks.send[33]")
    html = operator.get(address("a&b")).content.decode()
    addresses = [
        each.replace("&amp;", "&") for each in re.findall(r'href="(https://[^"]*)" target="_blank" rel=', html)
    ]
    assert "https://flower.example/task/1f-2e?name=shop.tasks.send" in addresses
    assert "https://flower.example/task/33?name=shop.tasks.send" in addresses
    assert addresses.count("https://traces.example/4bf9") == 1
    logs = [each for each in addresses if each.startswith("https://logs.example/?q=a%26b+web1+")]
    assert len(logs) == 3
    assert "%22%3E%3Cb%3E" in logs[0]
    since, until = (int(found) for found in re.findall(r"(?:from|to)=(\d{13})", logs[0]))
    assert 60_000 < until - since < 200_000
    assert not [each for each in addresses if "{" in each]


def test_without_links_there_are_none(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    hold(alias, label="shop.tasks.send[1f-2e]")
    assert "_blank" not in operator.get(address()).content.decode()


def test_how_many_slots_is_said_beside_what_happened(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    waits = recorder.to_text({0: 10, recorder.bucket(2 * SECOND): 10})
    holds = recorder.to_text({recorder.bucket(4 * SECOND): 20})
    for ago in range(1, 31):  # 21 calls a minute, 4 s each: 1.4 slots are busy
        minute(alias, ago=ago, granted=20, released=20, turned_away=1, held_us=80 * SECOND, waits=waits, holds=holds,
               longest_wait_us=5 * SECOND, longest_hold_us=4 * SECOND)  # fmt: skip
    event(alias, "timed_out", ago=100, waited_us=5 * SECOND, name="reports")
    html = operator.get(address()).content.decode()
    table = unescape(part(html, "sqlsem-sizing"))
    shown = re.findall(r"(\d \([+-]\d\)|3, [a-z ]+?) (\d+ %) ([\d.]+ m?s|< 1 ms) ((?:< )?\d+ %)", table)
    assert [row[0] for row in shown] == ["2 (-1)", "3, as computed", "3, what happened", "4 (+1)", "5 (+2)"]
    used, refused = ([int(row[place].strip("< %")) for row in shown] for place in (1, 3))
    assert used == sorted(used, reverse=True) or used[1] >= used[2]
    assert refused[0] > refused[1] >= refused[3] >= refused[4]
    assert refused[2] == 4
    assert "630 calls, held for 4 s on average" in text(operator.get(address()))
    assert "nobody waits longer than 5 s" in text(operator.get(address()))


@pytest.mark.parametrize(("kind", "granted"), [("semaphore", 1), ("mutex", 20), ("rwlock", 20)])
def test_how_many_slots_is_not_said_of_little_data_or_of_other_kinds(
    operator: Client, alias: str, kind: str, granted: int
) -> None:
    make_semaphore(alias, kind=kind)
    for ago in range(1, 31):
        minute(alias, ago=ago, granted=granted, released=granted, held_us=4 * SECOND * granted,
               holds=recorder.to_text({recorder.bucket(4 * SECOND): granted}))  # fmt: skip
    assert "How many slots" not in text(operator.get(address()))
