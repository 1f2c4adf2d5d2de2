"""Who may see and do what: every address and every act of the admin, for everybody who may come to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import get_resolver, reverse

from django_sqlsem.admin import live
from django_sqlsem.admin.actions import ACTIONS
from django_sqlsem.models import SemaphoreRow, SlotRow
from tests.support.operators import hold, make_semaphore
from tests.unit.test_admin import SEMAPHORES, key, login

pytestmark = [pytest.mark.leaves_held, pytest.mark.process_side]

SECRET = "payroll of ann"
VIEW = {model: f"view_{model}" for model in ("semaphorerow", "slotrow", "claimrow", "refreshrow", "transactionlockrow")}
#: Nobody may come there, superusers included.
NOBODY = "nobody"
#: What each address of a model's pages needs.
PAGES = {"changelist": "view", "change": "view", "history": "view", "add": NOBODY, "delete": NOBODY}
#: And those that only locks have.
OF_LOCKS = {"audit": "view", "snapshots": "view", "snapshot": "view", "act": "view"}
#: What each act needs besides the right to see locks.
ACTS = {
    "stop": {"stop"},
    "revoke": {"revoke"},
    "purge_stale": {"revoke"},
    "set_slots": {"configure"},
    "undo_slots": {"configure"},
    "pause": {"configure"},
    "resume": {"configure"},
    "drain": {"configure", "stop"},
}
ROWS = [(model, page, needed) for model in VIEW for page, needed in PAGES.items()]
ROWS += [("semaphorerow", page, needed) for page, needed in OF_LOCKS.items()]


def address(model: str, page: str, pk: str = "1") -> str:
    plain = page in ("changelist", "add", "audit", "snapshots")
    return reverse(f"admin:sqlsem_{model}_{page}", args=[] if plain else [pk])


def addresses() -> Iterator[str]:
    """Yield the names of all addresses of the app in the admin."""
    for model_admin in admin.site._registry.values():
        if model_admin.opts.app_label == "sqlsem":
            for pattern in model_admin.urls:
                if name := getattr(pattern, "name", None):
                    yield name.removeprefix("sqlsem_")


def test_the_matrix_is_whole() -> None:
    """A new address, or a new act, needs a row here that says who may come to it."""
    assert {f"{model}_{page}" for model, page, _needed in ROWS} == set(addresses())
    assert set(ACTS) == set(ACTIONS)
    granted = {codename for codename, _label in SemaphoreRow._meta.permissions}
    assert {f"{each}_semaphorerow" for needed in ACTS.values() for each in needed} == granted
    elsewhere = [str(each.pattern) for each in get_resolver().url_patterns if "sqlsem" in str(each.pattern)]
    assert elsewhere == []


@pytest.fixture
def lock(committed: None) -> str:
    make_semaphore("default", SECRET)
    hold("default", SECRET, label="GET /payroll/ann/")
    return key(SECRET)


def is_login(response: Any) -> bool:
    return response.status_code == 302 and response["Location"].startswith(reverse("admin:login"))


def tells(response: Any) -> bool:
    return b"payroll" in response.content


def member() -> Client:
    client = Client()
    client.force_login(User.objects.create(username="member"))
    return client


@pytest.mark.parametrize(("model", "page", "needed"), ROWS)
def test_each_page_is_seen_by_who_may_and_by_nobody_else(lock: str, model: str, page: str, needed: str) -> None:
    others = [name for name in VIEW.values() if name != VIEW[model]]
    powers = ["stop_semaphorerow", "revoke_semaphorerow", "configure_semaphorerow"]
    strangers = [login("staff"), login("sees all else", *others), login("acts blindly", *powers)]
    pk = lock if model == "semaphorerow" else str(SlotRow.objects.get(slot=1).pk)
    url = address(model, page, pk)
    for client in (Client(), member()):
        for headers in ({}, {live.HEADER: "1"}):
            response = client.get(url, headers=headers)
            assert is_login(response), (url, response.status_code)
            assert not tells(response)
        assert is_login(client.post(url, {"do": "pause", "action": "pause"}))
        refused = client.get(url, headers={"Accept": "application/json"})
        assert is_login(refused) or refused.status_code == 403
        assert not tells(refused)
    for client in strangers:
        for response in (client.get(url), client.get(url, headers={live.HEADER: "1"}), client.post(url, {})):
            assert response.status_code in (403, 405), url
            assert not tells(response)
    viewer, boss = login("viewer", VIEW[model]), login("boss", is_superuser=True)
    for client in (viewer, boss):
        response = client.get(url)
        if needed == NOBODY:
            assert response.status_code == 403
        else:
            assert response.status_code in (200, 302), url
            assert not is_login(response)
            assert response.headers.get("X-Frame-Options", "DENY") == "DENY"
        assert client.post(url, {"name": "x", "post": "yes"}).status_code in (200, 302, 403, 405)
    assert list(SemaphoreRow.objects.values_list("name", "paused", "operator_slots")) == [(SECRET, False, None)]
    assert SlotRow.objects.get(slot=1).permit_id


@pytest.mark.parametrize("act", ACTS)
def test_each_act_is_done_by_who_may_and_by_nobody_else(lock: str, act: str) -> None:
    """From the page of a lock and from the list alike, with every set of rights that lacks one."""
    powers = ("stop", "revoke", "configure")
    for mask in range(2 ** len(powers)):
        rights = {power for bit, power in enumerate(powers) if mask >> bit & 1}
        codes = [f"{right}_semaphorerow" for right in rights]
        blind, seeing = login(f"blind {mask}", *codes), login(f"seeing {mask}", "view_semaphorerow", *codes)
        url, chosen = address("semaphorerow", "act", lock), {"action": act, "_selected_action": lock}
        assert blind.post(url, {"do": act}).status_code == 403
        assert blind.post(reverse(SEMAPHORES), chosen).status_code == 403
        for response in (seeing.post(url, {"do": act}), seeing.post(reverse(SEMAPHORES), chosen)):
            # One that may act is asked first, or told that there is nothing to do.
            assert response.status_code in ((200, 302) if ACTS[act] <= rights else (403,)), (rights, response)
    row = SemaphoreRow.objects.get()
    assert (row.paused, row.operator_slots, SlotRow.objects.get(slot=1).stop_token) == (False, None, None)


@pytest.mark.parametrize(("model", "page", "needed"), ROWS)
def test_no_post_counts_without_its_csrf_token(lock: str, model: str, page: str, needed: str) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(User.objects.create(username="boss", is_staff=True, is_superuser=True))
    pk = lock if model == "semaphorerow" else str(SlotRow.objects.get(slot=1).pk)
    answer = strict.post(address(model, page, pk), {"do": "pause", "action": "pause", "_selected_action": pk})
    assert answer.status_code in (403, 405)
    assert not SemaphoreRow.objects.get().paused


def test_a_stranger_learns_nothing_from_what_a_refusal_costs(lock: str) -> None:
    """A lock that is there is refused by the same statements, and in the same words, as one that is not."""
    stranger = login("staff")
    for page in ("change", "snapshot", "history"):
        seen = []
        for pk in (lock, key("no such lock")):
            stranger.get(address("semaphorerow", page, pk))  # what is read once per process is read
            with CaptureQueriesContext(connections["default"]) as sent:
                response = stranger.get(address("semaphorerow", page, pk))
            texts = [re.sub(r"'[^']*'", "?", each["sql"]) for each in sent.captured_queries]
            seen.append((response.status_code, response.content.replace(pk.encode(), b""), texts))
        assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "name",
    [
        "'; DROP TABLE sqlsem_slot; --",
        '" OR 1=1 --',
        "%s %(key)s %% %",
        "{{ 7|add:7 }}{% load nothing %}",
        "a\r\nSet-Cookie: stolen=1\r\n\r\n<script>alert(1)</script>",
        "${jndi:ldap://x/a}",
        "=HYPERLINK(1)",
    ],
)
def test_a_name_is_data_wherever_it_goes(committed: None, name: str) -> None:
    """To SQL, to a page, to JSON and into headers."""
    make_semaphore("default", name)
    hold("default", name, label=name, user=name)
    boss, pk = login("boss", is_superuser=True), key(name)
    for url in (
        reverse(SEMAPHORES),
        reverse(SEMAPHORES) + "?q=" + "%27%20OR%201%3D1",
        *(address("semaphorerow", page, pk) for page in ("change", "snapshot", "history")),
        address("slotrow", "changelist"),
        address("semaphorerow", "audit"),
    ):
        response = boss.get(url)
        assert response.status_code == 200, url
        assert "stolen" not in str(response.headers) + str(response.cookies)
        if "html" in response["Content-Type"]:
            assert b"<script>alert" not in response.content
            assert b"DROP TABLE" in response.content or "DROP" not in name or "q=" in url or "audit" in url
    assert boss.get(address("semaphorerow", "snapshot", pk)).json()["name"] == name
    assert SlotRow.objects.count() == 3
