"""Requests that no page of the admin sends, texts that lie, and databases that fail where nobody looks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.contrib.staticfiles import finders
from django.core.exceptions import ValidationError
from django.db import connections
from django.test import Client
from django.urls import reverse

from django_sqlsem import control
from django_sqlsem.admin import live
from django_sqlsem.models import SemaphoreRow
from tests.support.operators import hold, make_semaphore, slot_row
from tests.unit.test_acts import CHANGED
from tests.unit.test_admin import SEMAPHORES, SLOTS, ask, confirm, key, login, said

pytestmark = [pytest.mark.leaves_held, pytest.mark.process_side]

FRAGMENT = {live.HEADER: "1"}
#: Text that reads backwards from here on, and a character that is not seen at all.
LIE = "pay\u202eroll\u00ad"
DAMAGED = "The form came back damaged: nothing was done."


@pytest.fixture
def alias(committed: None) -> str:
    return "default"


@pytest.fixture
def operator(alias: str) -> Client:
    return login("boss", is_superuser=True)


def of_lock(view: str, pk: str) -> str:
    return reverse(f"admin:sqlsem_semaphorerow_{view}", args=[pk])


@pytest.fixture
def broken(alias: str) -> Any:
    """What any page about a lock begins with cannot be read; return a function that says when."""
    names = []

    def away(table: str) -> None:
        with connections[alias].cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table} RENAME TO {table}_away")
        names.append(table)

    yield away
    for table in names:
        with connections[alias].cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table}_away RENAME TO {table}")


@pytest.mark.parametrize("url", [SEMAPHORES, SLOTS])
def test_what_a_button_sends_may_go_to_a_list(operator: Client, alias: str, url: str) -> None:
    make_semaphore(alias)
    row = hold(alias)
    chosen = key() if url == SEMAPHORES else row.pk
    response = operator.post(reverse(url), {"action": "revoke", "_selected_action": chosen, "do": "revoke 1 99"})
    assert response.status_code == 302
    (message,) = said(response)
    assert message.startswith(CHANGED)
    assert slot_row(alias).permit_id


def test_what_was_confirmed_for_one_act_counts_for_no_other(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    hold(alias)
    page = ask(operator, SEMAPHORES, "stop", key())
    assert said(confirm(operator, SEMAPHORES, page, action="revoke")) == [DAMAGED]
    assert slot_row(alias).permit_id
    assert said(confirm(operator, SEMAPHORES, page)) == ["Asked 1 holder to stop."]


@pytest.mark.parametrize("chosen", ["x", "\0", "9" * 40, "-1"])
def test_rows_that_cannot_be(operator: Client, alias: str, chosen: str) -> None:
    make_semaphore(alias)
    hold(alias)
    response = operator.post(reverse(SLOTS), {"action": "revoke", "_selected_action": chosen})
    assert said(response) == [DAMAGED]
    assert slot_row(alias).permit_id


def test_addresses_that_no_row_has(database: str, settings: Any) -> None:
    """PostgreSQL fails if it is asked for NUL at all."""
    settings.SQLSEM = {"DATABASE": database}
    operator = login("boss", is_superuser=True)
    for model in ("semaphorerow", "refreshrow", "transactionlockrow", "slotrow", "claimrow"):
        for view in ("change", "history"):
            assert operator.get(reverse(f"admin:sqlsem_{model}_{view}", args=["x\0y"])).status_code == 302, model
        assert operator.get(reverse(f"admin:sqlsem_{model}_delete", args=["x\0y"])).status_code in (302, 403)
    assert operator.get(of_lock("snapshot", "x\0y")).status_code == 404
    assert said(operator.post(of_lock("act", "x\0y"), {"do": "pause"})) == [DAMAGED]
    for url, parameters in ((SEMAPHORES, {"kind": "\0"}), ("admin:sqlsem_semaphorerow_snapshots", {"kind": "\0"})):
        assert operator.get(reverse(url), parameters).status_code == 200
    with pytest.raises(ValidationError):
        SemaphoreRow.objects.using(database).filter(name="\0").exists()


def test_a_page_that_is_gone_is_not_the_end_of_the_session(operator: Client, alias: str) -> None:
    for number in range(60):
        make_semaphore(alias, f"n{number}", slots=1)
    assert operator.get(reverse(SEMAPHORES), {"p": "2"}, headers=FRAGMENT).status_code == 200
    part = operator.get(reverse(SEMAPHORES), {"p": "3"}, headers=FRAGMENT)
    assert (part.status_code, part.content.decode()) == (404, "There is no such page any more.")
    assert part.headers[live.HEADER] == "1"
    assert operator.get(reverse(SEMAPHORES), {"p": "3"}).status_code == 302


def test_texts_that_lie_are_spelt_out_wherever_they_are(operator: Client, alias: str) -> None:
    """Most of all where somebody is about to confirm whom an act is about."""
    make_semaphore(alias, LIE, slots=1)
    row = hold(alias, LIE, label=LIE, user=LIE, host=LIE, thread=LIE)
    pages = [
        operator.get(reverse(SEMAPHORES)),
        operator.get(reverse(SLOTS)),
        operator.get(reverse("admin:sqlsem_slotrow_change", args=[row.pk])),
        ask(operator, SEMAPHORES, "revoke", key(LIE)),
        ask(operator, SLOTS, "stop", row.pk),
        operator.post(of_lock("act", key(LIE)), {"do": "set_slots"}),
    ]
    for page in pages:
        html = page.content.decode().partition('<div id="content"')[2]
        assert "[U+202E]" in html
        assert not set(html) & {"\u202e", "\u00ad"}, page.request["PATH_INFO"]
    stale = ask(operator, SEMAPHORES, "revoke", key(LIE))
    hold(alias, LIE, token=8)
    (message,) = said(confirm(operator, SEMAPHORES, stale))
    assert message.startswith("The holder of pay[U+202E]roll[U+00AD] slot 1 has changed")


@pytest.mark.parametrize("table", ["sqlsem_semaphore", "sqlsem_slot", "sqlsem_waiter"])
def test_a_database_that_fails_is_said_on_every_page(operator: Client, alias: str, broken: Any, table: str) -> None:
    make_semaphore(alias)
    row = hold(alias)
    page = ask(operator, SEMAPHORES, "revoke", key())
    broken(table)
    slot = [reverse(f"admin:sqlsem_slotrow_{view}", args=[row.pk]) for view in ("change", "history", "delete")]
    for url in (*slot, of_lock("history", key()), of_lock("delete", key()), of_lock("change", key())):
        assert operator.get(url).status_code in (200, 403, 503), url
    assert operator.get(slot[0]).status_code == 503
    response = operator.post(of_lock("act", key()), {"do": "revoke 1 7"})
    assert response.status_code == 302
    (message,) = said(response)
    assert "sqlsem_" in message
    assert confirm(operator, SEMAPHORES, page).status_code in (302, 503)


def test_times_are_the_sites_also_without_time_zones(operator: Client, alias: str, settings: Any) -> None:
    settings.USE_TZ = False
    settings.TIME_ZONE = "Asia/Kolkata"
    make_semaphore(alias)
    response = operator.get(of_lock("change", key()))
    assert response.context["recent"]["up_to"].utcoffset().total_seconds() == 5.5 * 3600
    assert f"up to {response.context['recent']['up_to']:%H:%M:%S} IST" in response.content.decode()


@pytest.mark.parametrize("zones", [True, False])
def test_pages_of_all_states_with_and_without_time_zones(
    operator: Client, alias: str, settings: Any, *, zones: bool
) -> None:
    settings.USE_TZ = zones
    settings.SQLSEM = settings.SQLSEM | {"LINKS": {"logs": "https://logs.example/?h={host}&f={since}&t={until}"}}
    for name in ("held", "paused", "set"):
        make_semaphore(alias, name, slots=2)
        hold(alias, name, label="GET /x [trace-1]")
    control.pause("paused", by="ann", reason="for a while", using=alias)
    control.set_slots("set", 1, by="ann", duration=600, using=alias)
    held, paused, fewer = (
        operator.get(of_lock("change", key(name))).content.decode() for name in ("held", "paused", "set")
    )
    everything = operator.get(reverse(SEMAPHORES)).content.decode()
    assert "https://logs.example/?h=" in held
    assert "for a while" in paused
    assert "1 slot" in fewer
    assert "for a while" in everything
    assert "1 slot until" in everything


def test_numbers_are_numbers_in_every_language(operator: Client, alias: str, settings: Any) -> None:
    """A decimal comma would break coordinates, and a separator of thousands what buttons send."""
    settings.LANGUAGE_CODE = "de"
    settings.USE_THOUSAND_SEPARATOR = True
    make_semaphore(alias, slots=1)
    hold(alias, token=1_763_677_312_004_417, age=1234.5)
    html = operator.get(of_lock("change", key())).content.decode()
    assert 'value="revoke 1 1763677312004417"' in html
    assert "<code>1763677312004417</code>" in html
    assert 'data-sqlsem-refresh="3"' in html
    svg = html.partition('class="sqlsem-drawing')[2].partition("<details")[0]
    assert "<rect" in svg
    assert not [part for part in svg.split('"') if part.replace(",", "").isdigit() and "," in part]
    assert operator.get(of_lock("snapshot", key())).json()["holders"][0]["token"] == 1_763_677_312_004_417


def test_drawings_run_to_the_right_on_pages_of_any_direction() -> None:
    style = Path(str(finders.find("sqlsem/locks.css"))).read_text(encoding="utf-8")
    assert "direction: ltr" in style.partition(".sqlsem-drawing {")[2].partition("}")[0]


def test_the_script_never_sends_a_form_again() -> None:
    """A page that failed may have been the answer to an act: loading it as it was asked for would do that once more."""
    assert ".reload(" not in Path(str(finders.find("sqlsem/locks.js"))).read_text(encoding="utf-8")
