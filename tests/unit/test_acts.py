"""The buttons on the page of one lock: they ask, act on whom they were shown beside, and come back to the page."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.messages import get_messages
from django.db import connections
from django.test import Client, RequestFactory
from django.urls import resolve, reverse

from django_sqlsem import control, queries, semaphore
from django_sqlsem.admin import SemaphoreAdmin
from django_sqlsem.admin.actions import ACTIONS, Buttons
from django_sqlsem.models import SemaphoreRow
from tests.support.operators import hold, locks, make_semaphore, slot_row
from tests.unit.test_admin import SEMAPHORES, SLOTS, ask, key, login, said, text

pytestmark = pytest.mark.leaves_held


@pytest.fixture
def alias(committed: None) -> str:
    """What acts do is the databases' own matter, and tested there: these are about pages."""
    return "default"


@pytest.fixture
def operator(alias: str) -> Client:
    return login("boss", is_superuser=True)


def url(view: str, name: str = "reports") -> str:
    return reverse(f"admin:sqlsem_semaphorerow_{view}", args=[key(name)])


def press(client: Client, value: str, name: str = "reports") -> Any:
    return client.post(url("act", name), {"do": value})


def confirm(client: Client, page: Any, **extra: str) -> Any:
    assert page.status_code == 200, page
    fields = re.findall(r'<input type="hidden" name="(\w+)" value="(.*?)">', page.content.decode())
    return client.post(page.request["PATH_INFO"], {name: unescape(value) for name, value in fields} | extra)


def buttons(client: Client, name: str = "reports", **permissions: bool) -> tuple[set[str], set[str]]:
    """Return what a user's buttons send: those of the lock, and those beside its holders."""
    from django.contrib import admin

    request = RequestFactory().get("/")
    request.user = client.get(reverse("admin:index")).wsgi_request.user
    snapshot = queries.semaphore(name)
    assert snapshot
    acts = Buttons(SemaphoreAdmin(SemaphoreRow, admin.site), request, snapshot)
    assert acts.url == url("act", name)
    beside = {button.value for holder in snapshot.holders for button in acts.beside(holder)}
    return {button.value for button in (*acts.lock, *acts.undo.values())}, beside


def test_buttons_go_by_permissions(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    hold(alias, slot=1)
    hold(alias, slot=2, token=8, left=-5)
    hold(alias, slot=3, token=9, stop_token=9, stop_by="ann")
    viewer = login("viewer", "view_semaphorerow")
    helper = login("helper", "view_semaphorerow", "stop_semaphorerow", "revoke_semaphorerow")
    asker = login("asker", "view_semaphorerow", "stop_semaphorerow")
    owner = login("owner", "view_semaphorerow", "configure_semaphorerow")
    beside = {"stop 1 7", "revoke 1 7", "purge_stale 2 8", "revoke 3 9"}
    assert buttons(viewer) == (set(), set())
    assert buttons(helper) == (set(), beside)  # one holder is left to be asked, and has a button of its own
    assert buttons(asker) == (set(), {"stop 1 7"})
    assert buttons(owner) == ({"set_slots", "pause"}, set())
    assert buttons(operator) == ({"set_slots", "pause", "drain"}, beside)
    SemaphoreRow.objects.update(paused=True, operator_slots=3)
    hold(alias, slot=2, token=10)
    assert buttons(operator)[0] == {"stop", "set_slots", "undo_slots", "resume", "drain"}


def test_a_lock_with_one_slot_has_no_button_for_more(operator: Client, alias: str) -> None:
    make_semaphore(alias, "one", slots=1, kind="mutex")
    assert buttons(operator, "one") == ({"pause", "drain"}, set())


def test_revoke_one_of_several(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    hold(alias, slot=1)
    hold(alias, slot=2, token=8, host="web9")
    page = press(operator, "revoke 2 8")
    shown = text(page)
    assert "web9 pid 4711" in shown
    assert "web1" not in shown
    assert "will lose their slots" in shown
    assert re.search(r" 1\d s \d\d:\d\d:\d\d .* 8 ", shown)
    assert f'href="{url("change")}"' in page.content.decode()
    response = confirm(operator, page)
    assert (response.status_code, response["Location"]) == (302, url("change"))
    assert said(response) == ["Revoked 1 permit."]
    assert slot_row(alias, slot=1).permit_id
    assert slot_row(alias, slot=2).revoked_by == "boss"
    assert "slot 2: web9" in LogEntry.objects.get().change_message
    event = queries.events("reports")[0]
    assert (event.what, event.by, event.slot, event.token) == ("revoked", "boss", 2, 8)


def test_stop_leaves_the_slot(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    hold(alias, slot=1)
    hold(alias, slot=2, token=8)
    response = confirm(operator, press(operator, "stop 1 7"))
    assert said(response) == ["Asked 1 holder to stop."]
    assert (slot_row(alias).stop_token, slot_row(alias).stop_by) == (7, "boss")
    assert slot_row(alias).permit_id
    assert "Asked slot 1" in LogEntry.objects.get().change_message
    page = press(operator, "stop")
    assert "Asked already" in text(page)
    assert said(confirm(operator, page)) == ["Asked 1 holder to stop."]
    assert said(press(operator, "stop")) == ["Nobody holds any of these who has not been asked already."]


def test_purge_one(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    hold(alias, slot=1, left=-5)
    hold(alias, slot=2, token=8, left=-5)
    assert said(confirm(operator, press(operator, "purge_stale 1 7"))) == ["Freed 1 slot."]
    assert (slot_row(alias, slot=1).expires_us is None, slot_row(alias, slot=2).expires_us is None) == (True, False)


def test_the_lock_as_a_whole(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    hold(alias)
    page = press(operator, "set_slots")
    again = confirm(operator, page, slots="0")
    assert "greater than or equal to 1" in text(again)
    assert said(confirm(operator, again, slots="5", reason=" too\n busy ")) == ["Slots of reports set to 5."]
    assert 'value="5"' in press(operator, "set_slots").content.decode()
    assert said(confirm(operator, press(operator, "undo_slots"))) == ["Slots of reports are as the code declares."]
    assert SemaphoreRow.objects.get().operator_slots is None
    assert said(confirm(operator, press(operator, "pause"), seconds="900", reason="INC-12")) == ["Paused: reports."]
    assert 14 * 60 < (queries.by_name(["reports"])["reports"].resumes_in or 0) <= 15 * 60
    assert said(confirm(operator, press(operator, "resume"), reason="over")) == ["Resumed: reports."]
    drained = confirm(operator, press(operator, "drain"), reason="deploy")
    assert said(drained) == ["Draining reports: holders are asked to stop."]
    assert SemaphoreRow.objects.get().paused
    assert slot_row(alias).stop_by == "boss"
    assert LogEntry.objects.count() == 5
    assert "Reason: INC-12" in LogEntry.objects.order_by("pk")[2].change_message
    told = {(event.what, event.by, event.detail) for event in queries.events("reports")}
    assert told == {
        ("resized", "boss", "5 slots: too busy"),
        ("resized", "boss", "as declared by the code"),
        ("paused", "boss", "for 15 min 00 s: INC-12"),
        ("resumed", "boss", "over"),
        ("drained", "boss", "deploy"),
        ("stop_asked", "boss", "deploy"),
    }


def test_what_has_changed_since_it_was_shown_is_refused_with_what_it_is_now(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    page = press(operator, "set_slots")
    control.pause("reports", by="bob")
    (message,) = said(confirm(operator, page, slots="5"))
    assert "has changed since it was shown, and nothing was done" in message
    assert message.endswith("0 of 3 held, paused by bob.")
    assert SemaphoreRow.objects.get().operator_slots is None
    (message,) = said(press(operator, "pause"))
    assert "done already, nothing was changed. Now: reports: 0 of 3 held, paused by bob." in message
    (message,) = said(press(operator, "undo_slots"))
    assert "done already" in message


def test_another_s_number_of_slots_is_a_change_too(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    page = press(operator, "pause")
    control.set_slots("reports", 7, by="bob")
    (message,) = said(confirm(operator, page))
    assert "has changed since it was shown" in message
    assert message.endswith("0 of 7 held, slots set by bob, not paused.")
    assert not SemaphoreRow.objects.get().paused


def test_of_several_locks_only_those_that_need_it_are_paused(operator: Client, alias: str) -> None:
    for name in ("reports", "mails"):
        make_semaphore(alias, name)
    control.pause("mails", by="bob", duration=60, reason="INC-1")
    page = ask(operator, SEMAPHORES, "pause", key(), key("mails"))
    assert said(confirm(operator, page, reason="INC-2")) == ["Paused: reports."]
    found = queries.by_name(["mails"])["mails"]
    assert (found.paused_by, found.paused_reason, found.resumes_in is None) == ("bob", "INC-1", False)


def test_any_row_of_who_has_all_slots_means_that_one(operator: Client, alias: str) -> None:
    permit = semaphore("reports", slots=2).exclusive()
    page = ask(operator, SLOTS, "revoke", slot_row(alias, slot=2).pk)
    assert said(confirm(operator, page)) == ["Revoked 1 permit."]
    assert queries.holders() == []
    permit.release()


def test_a_pause_is_for_a_time_that_is_offered(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    again = confirm(operator, press(operator, "pause"), seconds="17")
    assert "Select a valid choice" in text(again)
    assert not SemaphoreRow.objects.get().paused


def test_disorderly_text_is_spelt_out_in_djangos_log(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    hold(alias, label="GET /\u202egpj.exe")
    confirm(operator, press(operator, "revoke 1 7"), reason="a\x1b[2Jb\u200b")
    message = LogEntry.objects.get().change_message
    assert "GET /[U+202E]gpj.exe" in message
    assert "Reason: a[U+001B][2Jb[U+200B]" in message


def test_a_reason_never_passes_for_slots(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    hold(alias)
    confirm(operator, press(operator, "revoke 1 7"), reason="slots 1-3 are stuck")
    assert (queries.events("reports")[0].slots, queries.events("reports")[0].detail) == ((1,), "(slots 1-3 are stuck)")


def test_the_audit_log_has_what_the_command_did_too(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    hold(alias)
    locks("stop", "reports", "--reason", "INC-12 <b>")
    locks("set", "reports", "--slots", "2", "--reason", "calm down")
    confirm(operator, press(operator, "pause"), reason="INC-13")
    page = operator.get(url("history"))
    shown = text(page)
    assert "<b>" not in page.content.decode()
    for said_there in ("asked to stop", "INC-12 <b>", "2 slots: calm down", "paused", "INC-13", "kept for 30 days"):
        assert said_there in shown
    assert login("nobody").get(url("history")).status_code == 403
    assert operator.get(url("history", "gone")).status_code == 302


CHANGED = "The holder of reports slot 1 has changed since it was shown: nobody there was disturbed. Now: slot 1: "


@pytest.mark.parametrize("act", ["stop", "revoke"])
def test_a_stale_button_or_confirmation_acts_on_nobody(operator: Client, alias: str, act: str) -> None:
    make_semaphore(alias)
    hold(alias)
    page = press(operator, f"{act} 1 7")
    hold(alias, token=8, host="web9")
    for response in (confirm(operator, page), press(operator, f"{act} 1 7")):
        assert (response.status_code, response["Location"]) == (302, url("change"))
        (message,) = said(response)
        assert message.startswith(f"{CHANGED}web9 pid 4711")
    row = slot_row(alias)
    assert (row.permit_id is None, row.revoked_token, row.stop_token) == (False, None, None)
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize(("act", "needed"), [(act, ACTIONS[act].allowed_permissions[0]) for act in ACTIONS])
def test_the_server_checks_permissions_again(operator: Client, alias: str, act: str, needed: str) -> None:
    make_semaphore(alias)
    hold(alias)
    other = {"stop": "revoke", "revoke": "stop", "configure": "stop", "drain": "configure"}[needed]
    page = press(operator, act)
    for client in (login("viewer", "view_semaphorerow"), login("half", "view_semaphorerow", f"{other}_semaphorerow")):
        assert press(client, act).status_code == 403
        if page.status_code == 200:
            assert confirm(client, page, slots="9").status_code == 403
        assert client.post(reverse(SEMAPHORES), {"action": act, "_selected_action": key()}).status_code == 403
    blind = login("blind", "stop_semaphorerow", "revoke_semaphorerow", "configure_semaphorerow")
    assert press(blind, act).status_code == 403
    row = SemaphoreRow.objects.get()
    assert (row.paused, row.operator_slots, slot_row(alias).stop_token) == (False, None, None)
    assert slot_row(alias).permit_id


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"do": "delete"},
        {"do": "revoke 1"},
        {"do": "revoke 1 x"},
        {"do": "revoke -1 7"},
        {"do": f"revoke 1 {2**63}"},
        {"do": f"revoke {'9' * 5000} 7"},
        {"do": "revoke 1 \u0667"},
        {"do": "__class__"},
        {"action": "revoke", "confirmed": "yes", "targets": "[1]"},
    ],
)
def test_damaged_requests(operator: Client, alias: str, data: dict[str, str]) -> None:
    make_semaphore(alias)
    hold(alias)
    response = operator.post(url("act"), data)
    assert (response.status_code, response["Location"]) == (302, url("change"))
    assert said(response) == ["The form came back damaged: nothing was done."]
    assert slot_row(alias).permit_id


def test_a_lock_that_is_gone(operator: Client, alias: str) -> None:
    for act in ACTIONS:
        response = press(operator, act)
        assert response.status_code == 302
        assert len(said(response)) == 1, act
    assert not LogEntry.objects.exists()


def test_strange_addresses(operator: Client, alias: str) -> None:
    for odd in ("x", "a/b", "%2Fx", "\u0663", "_5F"):
        assert operator.post(reverse("admin:sqlsem_semaphorerow_act", args=[odd]), {"do": "pause"}).status_code == 302


def test_csrf_and_methods(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(operator.get(reverse("admin:index")).wsgi_request.user)
    assert strict.post(url("act"), {"do": "pause"}).status_code == 403
    assert operator.get(url("act"))["Location"] == url("change")
    assert Client().post(url("act"), {"do": "pause"})["Location"].startswith(reverse("admin:login"))
    assert set(resolve(url("act")).func._non_atomic_requests) >= set(connections)  # type: ignore[attr-defined]


def test_a_failing_database_is_said(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    page = press(operator, "pause")
    with connections[alias].cursor() as cursor:
        cursor.execute("ALTER TABLE sqlsem_slot RENAME TO sqlsem_slot_away")
    try:
        for response in (press(operator, "pause"), confirm(operator, page)):
            assert response.status_code == 302
            assert [str(message) for message in get_messages(response.wsgi_request)]
    finally:
        with connections[alias].cursor() as cursor:
            cursor.execute("ALTER TABLE sqlsem_slot_away RENAME TO sqlsem_slot")
