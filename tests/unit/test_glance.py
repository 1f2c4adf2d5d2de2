"""The one entrance to the locks in the admin, and what it says at a glance."""

from __future__ import annotations

import re
from html import unescape

import pytest
from django.test import Client
from django.urls import reverse

from django_sqlsem import control, queries
from django_sqlsem.admin import overview
from django_sqlsem.models import SemaphoreRow
from tests.support.operators import hold, make_semaphore, now_us, wait
from tests.unit.test_admin import SEMAPHORES, SLOTS, login, text

pytestmark = [pytest.mark.leaves_held, pytest.mark.process_side("postgres")]

AUDIT = "admin:sqlsem_semaphorerow_audit"
ENTRANCE = "/admin/sqlsem/"


def sentences(client: Client, **parameters: str) -> list[str]:
    """Return what the overview says is wrong."""
    html = client.get(reverse(SEMAPHORES), parameters).content.decode()
    found = re.findall(r'<li class="sqlsem-wrong[^>]*>(.*?)</li>', html, re.DOTALL)
    words = [unescape(re.sub(r"<[^>]+>", "", each.replace("<wbr>", ""))) for each in found]
    return [re.sub(r"\s+", " ", each) for each in words]


def test_the_index_of_the_app_is_the_overview(operator: Client, locks_alias: str) -> None:
    answer = operator.get(ENTRANCE, follow=True)
    assert answer.redirect_chain == [(reverse(SEMAPHORES), 302)]
    assert "<h1>Locks</h1>" in answer.content.decode()
    menu = operator.get("/admin/").content.decode()
    assert re.findall(r'<tr class="model-(\w+row)[^"]*">', menu) == ["semaphorerow"]
    assert operator.get("/admin/auth/").status_code == 200
    only_slots = login("slots", "view_slotrow")
    index = only_slots.get(ENTRANCE)
    assert index.status_code == 200
    assert reverse(SLOTS) in index.content.decode()


def test_the_other_lists_are_tabs_with_a_trail_back(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    html = operator.get(reverse(SEMAPHORES)).content.decode()
    (tabs,) = re.findall(r'<nav class="sqlsem-tabs".*?</nav>', html, re.DOTALL)
    links = dict(re.findall(r'<a href="([^"]*)"[^>]*>([^<]*)</a>', tabs))
    assert list(links.values()) == [
        "Locks", "Slots", "Claimed rows", "Refreshed values", "Transaction locks", "Audit log",
    ]  # fmt: skip
    for address, words in links.items():
        page = operator.get(address).content.decode()
        assert re.search(rf'aria-current="page">{words}</a>', page)
        (trail,) = re.findall(r'<div class="breadcrumbs">.*?</div>', page, re.DOTALL)
        assert "All locks" in trail
        assert (ENTRANCE in trail) == (words != "Locks")
    viewer = login("viewer", "view_semaphorerow").get(reverse(SEMAPHORES)).content.decode()
    (tabs,) = re.findall(r'<nav class="sqlsem-tabs".*?</nav>', viewer, re.DOTALL)
    assert re.findall(r">([^<]+)</a>", tabs) == ["Locks", "Audit log"]


def test_the_audit_log_of_all_locks(operator: Client, locks_alias: str) -> None:
    for name in ("reports", "sync:<b>"):
        make_semaphore(locks_alias, name)
        control.pause(name, by="ann", reason="INC-12", using=locks_alias)
    control.resume("reports", by="root@web1", using=locks_alias)
    response = operator.get(reverse(AUDIT))
    shown = text(response)
    assert re.search(r"resumed reports .*root@web1.* paused sync:<b> .*ann INC-12 .*paused reports .*ann INC-12", shown)
    assert "sync:<wbr>&lt;b&gt;" in response.content.decode()
    assert login("nobody").get(reverse(AUDIT)).status_code == 403
    assert Client().get(reverse(AUDIT)).status_code == 302


def test_nothing_is_wrong(operator: Client, locks_alias: str) -> None:
    assert "Nothing is wrong" not in text(operator.get(reverse(SEMAPHORES)))  # nothing is known
    make_semaphore(locks_alias)
    hold(locks_alias, left=600)
    assert sentences(operator) == []
    assert "Nothing is wrong: no slot is stale" in text(operator.get(reverse(SEMAPHORES)))


def test_what_is_wrong_since_when_and_why(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias, "imports:nightly", slots=1)
    hold(locks_alias, "imports:nightly", left=-20, age=100, host="worker-1", label="manage.py import_prices")
    make_semaphore(locks_alias, "exports", slots=2)
    hold(locks_alias, "exports", slot=1, age=90, left=600, label="GET /exports/")
    hold(locks_alias, "exports", slot=2, left=600)
    wait(locks_alias, "exports", waiting=3, age=40, left=600)
    make_semaphore(locks_alias, "payments")
    control.pause("payments", by="ann", reason="Provider is down", duration=600, using=locks_alias)
    stale, queue, paused = sentences(operator)
    assert re.fullmatch(
        r"imports:nightly: 1 slot is stale: worker-1 pid 4711 MainThread, manage.py import_prices seems gone,"
        r" its lease ran out 2\d s ago. It comes back by itself.", stale,
    )  # fmt: skip
    assert re.fullmatch(
        r"exports: full, 2 of 2; 3 wait, the first for 4\d s. Longest hold: 1 min 3\d s.*, by GET /exports/.", queue
    )
    assert re.fullmatch(
        r"payments: paused for \d(\.\d)? s by ann: Provider is down. Resumes in (10|9) min \d\d s.", paused
    )
    # They are for who comes in, and not for who looks for something.
    assert sentences(operator, q="reports") == sentences(operator, state="held") == []


def test_processes_that_disagree(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias, "reports", slots=3)
    now = now_us(locks_alias)
    SemaphoreRow.objects.using(locks_alias).update(other_slots=5, other_us=now)
    text = "reports: processes declare different numbers of slots; the larger one is the bound."
    assert sentences(operator) == [text]
    make_semaphore(locks_alias, "later", slots=3)
    SemaphoreRow.objects.using(locks_alias).filter(name="later").update(other_slots=5, other_us=now)
    assert sentences(operator) == [text.replace("reports:", "later, and 1 others:")]
    SemaphoreRow.objects.using(locks_alias).update(other_slots=3)
    assert sentences(operator) == []


def test_of_very_many_some_are_named(operator: Client, locks_alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(7):
        make_semaphore(locks_alias, f"n{number}", slots=1, template="n{pk}" if number % 2 else "")
        hold(locks_alias, f"n{number}", left=600)
        wait(locks_alias, f"n{number}", age=10 * number + 10, left=600)
    found = sentences(operator)
    assert [each[:2] for each in found[:-1]] == ["n6", "n5", "n4", "n3"]  # those that have waited longest
    assert found[-1] == "and 3 others"
    monkeypatch.setattr("django_sqlsem.backends.rows.reading.MOST_NAMES", 1)
    reading = queries.Reading(locks_alias)
    assert reading.survey.in_use is None
    assert set(overview.worst(reading)["waiting"][0]) <= {f"n{number}" for number in range(7)}
