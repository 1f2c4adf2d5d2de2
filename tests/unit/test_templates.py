"""All names of one template are one line: in the overview, in ``locks list``, and as JSON; and the line opens."""

from __future__ import annotations

import csv
import json
import re
from html import unescape
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_sqlsem import mutex, queries, semaphore
from django_sqlsem.backends import get_backend
from django_sqlsem.backends.base import BaseSemaphoreBackend
from django_sqlsem.core.names import key_of
from django_sqlsem.models import MinuteRow, SemaphoreRow
from django_sqlsem.refresh import refresh_every
from django_sqlsem.snapshots import TemplateSnapshot
from tests.support.keepers import keeper_of
from tests.support.operators import hold, locks, make_semaphore, wait
from tests.unit.test_admin import SEMAPHORES, login, text
from tests.unit.test_overview import column

pytestmark = [pytest.mark.leaves_held]

SYNC = "sync:{request.user.pk}"
#: What is the same on every database.
everywhere_alike = pytest.mark.process_side("postgres")


def template_of(alias: str, name: str) -> str:
    found = queries.semaphore(name, using=alias)
    assert found is not None
    return found.template


def test_a_decorated_call_keeps_its_template(world: str) -> None:
    @semaphore("sync:{pk}", using=world)
    def by_field(pk: int) -> None: ...

    @mutex("import", key=lambda pk: pk, using=world)
    def by_key(pk: int) -> None: ...

    @semaphore(("a:b", "{pk}"), using=world)
    def by_parts(pk: int) -> None: ...

    @semaphore("{{braces}}", using=world)
    def fixed() -> None: ...

    for call in (by_field, by_key, by_parts):
        call(17)
        call(18)
    fixed()
    with semaphore("sync:19", using=world):
        pass
    assert template_of(world, "sync:17") == template_of(world, "sync:18") == "sync:{pk}"
    assert template_of(world, "import:17") == "import"
    assert template_of(world, "a\\:b:17") == "a\\:b:{pk}"
    assert template_of(world, "sync:19") == ""
    sums = {each.template: (each.names, each.kind) for each in queries.templates(world)}
    assert sums["sync:{pk}"] == (2, "semaphore")
    assert sums["import"] == (2, "mutex")


def test_a_refreshed_value_keeps_its_template(database: str) -> None:
    @refresh_every("best:{shop}", 60, cache="default", using=database)
    def best(shop: int) -> int:
        return shop

    assert best(17) == 17
    assert template_of(database, "best:17") == "best:{shop}"


def test_a_name_with_a_template_costs_no_statement_more(database: str) -> None:
    @semaphore("sync:{pk}", using=database)
    def call(pk: int) -> None: ...

    def plain() -> None:
        with semaphore("plain", using=database):
            pass

    def cost(work: Any, *arguments: Any) -> int:
        work(*arguments)
        counted = []
        for _ in range(3):
            before = keeper_of(database).work.attempts
            work(*arguments)
            counted.append(keeper_of(database).work.attempts - before)
        return min(counted)  # more than that asks again, as what is recorded of calls keeps SQLite's file now and then

    assert cost(call, 17) == cost(plain)


def minute(alias: str, name: str, template: str, **counts: int) -> None:
    at = int(queries.history_clock(alias).timestamp() * 1e6) - 60_000_000
    MinuteRow.objects.using(alias).create(
        key=key_of(name), template=template, minute_us=at, until_us=at + 10**12, **counts
    )


def fill(alias: str) -> None:
    """Write 5 names of one template, one of another, and a name that no template has made."""
    for number in range(5):
        make_semaphore(alias, f"sync:{number}", slots=2, template=SYNC, paused=number == 4)
    make_semaphore(alias, "import:1", slots=1, template="import:{pk}", kind="mutex")
    make_semaphore(alias, "plain", slots=1)
    hold(alias, "sync:0", slot=1, age=100, left=600)
    hold(alias, "sync:0", slot=2, left=600)
    hold(alias, "sync:1", slot=1, left=600)
    hold(alias, "sync:2", slot=1, left=-5)
    wait(alias, "sync:0", waiting=3, age=7, left=600)
    wait(alias, "sync:0", waiting=1, age=5, left=600)
    wait(alias, "sync:1", waiting=1, left=600)
    minute(alias, "sync:0", SYNC, turned_away=10, longest_hold_us=5_000_000, longest_wait_us=90_000_000)
    minute(alias, "sync:1", SYNC, turned_away=7)


def test_a_template_is_what_its_names_amount_to(database: str) -> None:
    fill(database)
    sync, other = queries.templates(database)
    assert other == TemplateSnapshot("import:{pk}", 1, "mutex", longest_hold=0.0, longest_wait=0.0, turned_away=0)
    counts = (sync.names, sync.held, sync.stale, sync.waiting, sync.queues, sync.paused, sync.turned_away)
    assert (sync.template, counts) == (SYNC, (5, 3, 1, 5, 2, 1, 17))
    assert 100 <= (sync.longest_hold or 0) < 200
    assert sync.longest_wait == 90.0
    assert list(sync.trouble.items()) == [("stale", 1), ("with a queue", 2), ("paused", 1)]
    backend = get_backend(database)
    general = BaseSemaphoreBackend.template_sums(backend)[SYNC]
    assert (general.held, general.stale, general.waiting, general.queues) == counts[1:5]
    assert [each.name for each in queries.semaphores(template=SYNC, using=database)] == [f"sync:{n}" for n in range(5)]
    assert [each.name for each in queries.semaphores(template="", using=database)] == ["plain"]
    assert [each.name for each in queries.semaphores("*:1", template=SYNC, using=database)] == ["sync:1"]


@pytest.mark.process_side
def test_without_a_history_refusals_are_not_told(database: str, settings: Any) -> None:
    settings.SQLSEM = {"HISTORY": False}
    fill(database)
    assert {each.turned_away for each in queries.templates(database)} == {None}


@everywhere_alike
def test_what_is_done_to_a_name_tells_what_a_template_is(database: str, capsys: Any) -> None:
    for number in range(12):
        make_semaphore(database, f"sync:{number:02}", template=SYNC, paused=True)
    told = f"'{SYNC}' is a template of 12 names: see `locks list --template '{SYNC}'`. Actions are for names."
    for verb in (["show"], ["set", "--pause"]):
        with pytest.raises(CommandError) as refused:
            locks(*verb, SYNC, "--database", database)
        assert str(refused.value) == told
    locks("list", "--database", database)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":0")[0] for line in lines if ", paused" in line] == ["sync"] * 10
    assert "2 more names are paused." in lines


@everywhere_alike
def test_list_prints_one_line_a_template_and_opens_it(database: str, capsys: Any) -> None:
    def listed(*arguments: str) -> str:
        locks("list", *arguments, "--database", database)
        return str(capsys.readouterr().out)

    fill(database)
    lines = listed().splitlines()
    assert lines[0].split() == ["TEMPLATE", "NAMES", "HELD", "WAITING", "REFUSED", "LONGEST", "HOLD", "TROUBLE"]
    told = rf"{re.escape(SYNC)} +5 +3 +5 +17 +1 min \d+ s +1 stale, 2 with a queue, 1 paused"
    assert re.fullmatch(told, lines[1])
    assert lines[2].split()[:2] == ["import:{pk}", "1"]
    assert "sync:0" not in "\n".join(lines)
    assert "sync:4: 0 of 2 slots held, 0 waiting, paused" in lines
    assert any(line.startswith("plain ") for line in lines)
    for opened in (listed("--template", SYNC), listed("--name", "sync:*"), listed("--busy")):
        assert "TEMPLATE" not in opened
        assert "sync:0" in opened
        assert "web1 pid 4711" in opened
    assert "import:1" not in listed("--template", SYNC)
    assert "among the names of 'no:{such}': 0 names known" in listed("--template", "no:{such}")
    assert "sync:2" in listed("--stale")
    rows = list(csv.DictReader(listed("--format", "csv").splitlines()))
    assert {row["name"] for row in rows} == {"sync:0", "sync:1", "sync:2"}


@everywhere_alike
def test_json_has_the_templates_and_their_names(database: str, capsys: Any) -> None:
    fill(database)
    locks("list", "--format", "json", "--database", database)
    found = json.loads(capsys.readouterr().out)
    sync, other, plain = found
    assert (sync["template"], sync["names"], sync["held"], sync["turned_away"]) == (SYNC, 5, 3, 17)
    assert (other["template"], plain["name"], plain["template"]) == ("import:{pk}", "plain", "")
    locks("list", "--format", "json", "--template", SYNC, "--database", database)
    found = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["template"]) for each in found] == [(f"sync:{number}", SYNC) for number in range(5)]


@pytest.fixture
def operator(database: str, settings: Any) -> Client:
    settings.SQLSEM = {"DATABASE": database}
    fill(database)
    return login("boss", is_superuser=True)


def listed(client: Client, **parameters: Any) -> list[str]:
    return [row.name for row in client.get(reverse(SEMAPHORES), parameters).context["cl"].result_list]


def test_the_overview_has_a_row_for_a_template_which_opens(operator: Client, database: str) -> None:
    page = operator.get(reverse(SEMAPHORES))
    assert [row.name for row in page.context["cl"].result_list] == [SYNC, "import:{pk}", "plain"]
    assert "5 names 1 stale 2 with a queue 1 paused" in text(page)
    assert page.content.decode().count("action-select") == 1
    (link,) = re.findall(r'href="([^"]*template=sync[^"]*)"', page.content.decode())
    opened = operator.get(unescape(link))
    assert [row.name for row in opened.context["cl"].result_list] == ["sync:2", "sync:0", "sync:1", "sync:4", "sync:3"]
    assert f"Names made by {SYNC}" in text(opened)
    assert re.search(r"<strong>3</strong> slots held", opened.content.decode())
    assert listed(operator, template=SYNC, state="held") == ["sync:0", "sync:1"]
    assert listed(operator, template=SYNC, q="0") == ["sync:0"]
    assert listed(operator, template="no:{such}") == listed(operator, template="\0") == []


@everywhere_alike
def test_templates_are_ordered_filtered_and_searched_like_names(operator: Client, database: str) -> None:
    page = operator.get(reverse(SEMAPHORES))
    by = {title: column(page, title) for title in ("lock_name", "cells", "waiting")}
    make_semaphore(database, "busy", slots=9)
    for slot in range(1, 6):
        hold(database, "busy", slot=slot, left=600)
    assert listed(operator, o=-by["cells"]) == ["busy", SYNC, "import:{pk}", "plain"]
    assert listed(operator, o=by["cells"]) == ["plain", "import:{pk}", SYNC, "busy"]
    assert listed(operator, o=-by["waiting"])[0] == SYNC
    assert listed(operator, o=by["lock_name"]) == ["import:{pk}", SYNC, "busy", "plain"]
    assert listed(operator, o=-by["lock_name"]) == [SYNC, "import:{pk}", "plain", "busy"]
    assert listed(operator, kind="mutex") == ["import:{pk}"]
    assert listed(operator, q="import") == ["import:1"]
    assert listed(operator, state="stale") == ["sync:2"]


@everywhere_alike
def test_pages_have_templates_and_names(operator: Client, database: str) -> None:
    rows = SemaphoreRow.objects.using(database)
    for number in range(60):
        rows.create(key=key_of(f"n{number:02}"), name=f"n{number:02}", declared_slots=1)
    first, second = listed(operator), listed(operator, p=2)
    assert (first[:2], len(first), len(second)) == ([SYNC, "import:{pk}"], 50, 13)
    assert len({*first, *second}) == 63
    found = operator.get(reverse("admin:sqlsem_semaphorerow_snapshots")).json()
    assert found["page"] == {"number": 1, "pages": 2, "per_page": 50, "names": 61, "templates": 2}
    assert [each["template"] for each in found["templates"]] == [SYNC, "import:{pk}"]
    assert len(found["semaphores"]) == 48
    # What is chosen over all pages is names, and never those behind a template.
    chosen = {"action": "pause", "select_across": "1", "index": "0", "_selected_action": key_of("plain")}
    assert "sync:0" not in text(operator.post(reverse(SEMAPHORES), chosen))


@everywhere_alike
def test_the_number_of_queries_does_not_grow_with_the_names_of_a_template(operator: Client, database: str) -> None:
    def cost(**parameters: str) -> int:
        with CaptureQueriesContext(connections[database]) as captured:
            listed(operator, **parameters)
        return len(captured)

    before = cost(), cost(template=SYNC)
    for number in range(10, 30):
        make_semaphore(database, f"sync:{number}", template=SYNC)
        hold(database, f"sync:{number}", left=600)
    assert (cost(), cost(template=SYNC)) == before
    assert max(before) <= 25


@pytest.mark.process_side
def test_a_template_is_an_option_with_a_value(database: str) -> None:
    with pytest.raises(CommandError, match="--template"):
        locks("list", "--template", "--database", database)
