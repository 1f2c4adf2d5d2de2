from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

import django_sqlsem
from django_sqlsem import queries
from django_sqlsem.core.names import resource_for
from django_sqlsem.models import SemaphoreRow, SlotRow
from tests.support import applocks
from tests.support.operators import ON_ONE_DATABASE, hold, make_semaphore, slot_row, wait

pytestmark = [pytest.mark.leaves_held, pytest.mark.process_side("postgres")]
#: Where databases differ: in what they find, and how they order it.
on_each_database = pytest.mark.process_side("postgres", "mariadb")

SEMAPHORES = "admin:sqlsem_semaphorerow_changelist"
SLOTS = "admin:sqlsem_slotrow_changelist"


def login(name: str, *codenames: str, is_superuser: bool = False) -> Client:
    user = User.objects.create(username=name, is_staff=True, is_superuser=is_superuser)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client = Client()
    client.force_login(user)
    return client


def key(name: str = "reports") -> str:
    return resource_for(name, "semaphore").key


def text(response: Any) -> str:
    """Return what a person sees of a page's content."""
    main = re.search(r'<div id="content".*?<footer', response.content.decode(), re.DOTALL)
    assert main
    words = re.sub(r"<[^>]+>", " ", main.group().replace("<wbr>", ""))
    return re.sub(r"\s+", " ", unescape(words))


def is_free(alias: str, slot: int = 1) -> bool:
    """Whether nobody holds a slot of ``reports``; where a session had it, its process still reads in the row why."""
    snapshot = queries.semaphore("reports", using=alias)
    assert snapshot is not None
    return not any(slot in holder.numbers and not holder.expired for holder in snapshot.holders)


def said(response: Any) -> list[str]:
    """Return the messages of this very request, not those that an earlier one has left to be shown."""
    return [str(message) for message in get_messages(response.wsgi_request)._queued_messages]  # type: ignore[attr-defined]


def ask(client: Client, url: str, action: str, *pks: Any, query: str = "") -> Any:
    """Choose an action, and return the confirmation page."""
    data = {"action": action, "_selected_action": [str(pk) for pk in pks], "index": "0"}
    return client.post(reverse(url) + query, data)


def confirm(client: Client, url: str, page: Any, **extra: str) -> Any:
    """Send the confirmation page's own form."""
    assert page.status_code == 200, page
    html = page.content.decode()
    assert 'name="confirmed"' in html
    fields = re.findall(r'<input type="hidden" name="(\w+)" value="(.*?)">', html)
    data = {name: unescape(value) for name, value in fields} | extra
    return client.post(reverse(url), data)


def test_semaphore_list(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    make_semaphore(locks_alias, "calm", slots=1, paused=True, operator_slots=4)
    hold(locks_alias, slot=1)
    hold(locks_alias, slot=2, left=-5)
    wait(locks_alias)
    response = operator.get(reverse(SEMAPHORES))
    shown = rows_of(response)
    assert re.fullmatch(r"2 for 1?\d(\.\d)? s", shown[0].pop(2))
    assert re.fullmatch(r"[12]\d s", shown[0].pop(2))  # the longest hold
    assert shown == [
        ["reports semaphore 1 stale", "1 of 3"],
        ["calm semaphore paused set by operator", "0 of 4"],
    ]


def rows_of(response: Any) -> list[list[str]]:
    """Return what a person reads in the rows of the overview; cells in which nothing is said are left out."""
    html = response.content.decode().replace("<wbr>", "")
    rows = re.findall(r'<tr role="row" data-sqlsem-key="[^"]*"[^>]*>(.*?)</tr>', html, re.DOTALL)
    cells = [re.findall(r'class="field-[^>]*>(.*?)</t[hd]>', row, re.DOTALL) for row in rows]
    words = [[unescape(re.sub(r"<[^>]+>", " ", cell)) for cell in row] for row in cells]
    said = [[" ".join(cell.split()) for cell in row] for row in words]
    return [[cell for cell in row if cell not in ("", "·")] for row in said]


def test_slot_list(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    hold(locks_alias, slot=1, age=3600)
    hold(locks_alias, slot=2, left=-5, host="web9")
    shown = text(operator.get(reverse(SLOTS)))
    # Application locks have a session, and no lease.
    left, session, ran_out = r"\d\d s", "", r"ran out 1?\d(\.\d)? s ago"
    if applocks.are_at(locks_alias):
        left, session, ran_out = "-", r", session \d+", "-"
    assert re.search(rf"reports 1 held 1 h 00 min {left} web1 pid 4711 MainThread{session} GET /reports/ ann", shown)
    assert re.search(rf"reports 2 stale [12]\d s {ran_out} web9 pid 4711 MainThread GET /reports/ ann", shown)
    assert "reports 3 free - - - - -" in shown


def test_one_snapshot_per_page(operator: Client, locks_alias: str) -> None:
    def count(url: str) -> int:
        operator.get(reverse(url))
        with CaptureQueriesContext(connections[locks_alias]) as captured:
            assert operator.get(reverse(url)).status_code == 200
        return len(captured)

    make_semaphore(locks_alias, "first")
    before = count(SEMAPHORES), count(SLOTS)
    for number in range(20):
        make_semaphore(locks_alias, f"name-{number}")
        hold(locks_alias, f"name-{number}")
    assert (count(SEMAPHORES), count(SLOTS)) == before


@on_each_database
@pytest.mark.parametrize(
    ("state", "names", "slots"),
    [
        ("held", ["busy", "held"], [("busy", 1), ("held", 2)]),
        ("stale", ["gone", "held"], [("gone", 1), ("held", 1)]),
        ("waiting", ["busy"], [("busy", 1), ("busy", 2)]),
        ("paused", ["calm"], None),
    ],
)
def test_filters(operator: Client, locks_alias: str, state: str, names: list[str], slots: list[Any] | None) -> None:
    for name in ("held", "gone", "busy", "calm"):
        make_semaphore(locks_alias, name, slots=2, paused=name == "calm")
    hold(locks_alias, "held", 2)
    hold(locks_alias, "held", 1, left=-5)
    hold(locks_alias, "gone", 1, left=-5)
    hold(locks_alias, "busy", 1)
    wait(locks_alias, "busy")
    response = operator.get(reverse(SEMAPHORES), {"state": state})
    assert sorted(row.name for row in response.context["cl"].result_list) == names
    if slots is not None:
        response = operator.get(reverse(SLOTS), {"state": state})
        assert [(row.semaphore.name, row.slot) for row in response.context["cl"].result_list] == slots


@on_each_database
def test_search(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    make_semaphore(locks_alias, "other")
    hold(locks_alias)
    assert "other" not in text(operator.get(reverse(SEMAPHORES), {"q": "repo"}))
    for page in (SEMAPHORES, SLOTS):  # where all are shown, there is nothing more to show
        assert "Show all" not in text(operator.get(reverse(page)))
        assert "Show all" in text(operator.get(reverse(page), {"q": "repo"}))
    response = operator.get(reverse(SLOTS), {"q": "web1"})
    assert [(row.semaphore.name, row.slot) for row in response.context["cl"].result_list] == [("reports", 1)]


def test_one_semaphore_with_holders_and_waiters(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    url = reverse("admin:sqlsem_semaphorerow_change", args=[key()])
    shown = text(operator.get(url))
    assert "Nobody holds it." in shown
    assert "Nobody waits." in shown
    hold(locks_alias, label="<script>alert(1)</script>")
    wait(locks_alias)
    response = operator.get(url)
    assert "<script>alert" not in response.content.decode()
    shown = text(response)
    session, left = (r" · session \d+", "-") if applocks.are_at(locks_alias) else ("", r"[45]\d s")
    holder = rf"1 held web1 pid 4711 · MainThread{session} <script>alert\(1\)</script> ann [12]\d s [\d:]+ {left} 7"
    assert re.search(holder, shown)
    assert re.search(r"1 \d\.\d s [\d.]+ s web2 pid 99 · worker GET /wait/ bob 2 1 slot", shown)
    assert "Save" not in shown
    assert operator.get(reverse("admin:sqlsem_slotrow_change", args=[slot_row(locks_alias).pk])).status_code == 200


@pytest.mark.parametrize("model", ["semaphorerow", "slotrow"])
def test_read_only(operator: Client, locks_alias: str, model: str) -> None:
    make_semaphore(locks_alias)
    pk = key() if model == "semaphorerow" else slot_row(locks_alias).pk
    assert operator.get(reverse(f"admin:sqlsem_{model}_add")).status_code == 403
    assert operator.post(reverse(f"admin:sqlsem_{model}_delete", args=[pk]), {"post": "yes"}).status_code == 403
    assert operator.post(reverse(f"admin:sqlsem_{model}_change", args=[pk]), {"name": "x"}).status_code == 403
    page = operator.get(reverse(f"admin:sqlsem_{model}_changelist")).content.decode()
    assert "delete_selected" not in page
    assert SemaphoreRow.objects.using(locks_alias).get().name == "reports"


def test_revoke_names_the_holder_asks_and_logs(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    hold(locks_alias, slot=1)
    hold(locks_alias, slot=2, token=8, host="web9")
    page = ask(operator, SEMAPHORES, "revoke", key())
    shown = text(page)
    assert re.search(r"reports 1 held web1 pid 4711 · MainThread( · session \d+)? GET /reports/ ann", shown)
    assert "web9" in shown
    assert slot_row(locks_alias).permit_id
    response = confirm(operator, SEMAPHORES, page)
    assert response.status_code == 302
    assert said(response) == ["Revoked 2 permits."]
    assert is_free(locks_alias)
    assert (slot_row(locks_alias).revoked_token, slot_row(locks_alias).revoked_by) == (7, "boss")
    entries = LogEntry.objects.order_by("pk")
    assert [(entry.object_id, entry.object_repr, entry.user.username) for entry in entries] == [
        (key(), "reports", "boss")
    ] * 2
    assert "slot 1: web1 pid 4711, GET /reports/" in entries[0].change_message
    assert "Revoked" in text(operator.get(reverse("admin:sqlsem_semaphorerow_history", args=[key()])))


def test_revoke_one_slot(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    hold(locks_alias, slot=1)
    hold(locks_alias, slot=2, token=8)
    page = ask(operator, SLOTS, "revoke", slot_row(locks_alias, slot=2).pk, slot_row(locks_alias, slot=3).pk)
    assert said(confirm(operator, SLOTS, page)) == ["Revoked 1 permit."]
    assert slot_row(locks_alias, slot=1).permit_id
    assert is_free(locks_alias, slot=2)
    response = ask(operator, SLOTS, "revoke", slot_row(locks_alias, slot=3).pk)
    assert said(response) == ["Nobody holds any of these: nothing to revoke."]


def test_revoke_acts_on_nobody_if_the_holder_has_changed(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    hold(locks_alias, slot=1)
    page = ask(operator, SEMAPHORES, "revoke", key())
    hold(locks_alias, slot=1, token=8, host="web9")
    hold(locks_alias, slot=2)
    response = confirm(operator, SEMAPHORES, page)
    (message,) = said(response)
    assert message.startswith(
        "The holder of reports slot 1 has changed since it was shown: nobody there was disturbed."
    )
    assert re.search(r"Now: slot 1: web9 pid 4711, GET /reports/, for 1\d\.\d s\.$", message)
    assert slot_row(locks_alias, slot=1).permit_id
    assert slot_row(locks_alias, slot=2).permit_id
    assert not LogEntry.objects.exists()


def test_revoke_behind_a_filter_that_no_longer_matches(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    hold(locks_alias, left=-5)
    page = ask(operator, SLOTS, "revoke", slot_row(locks_alias).pk, query="?state=stale")
    hold(locks_alias, left=60)
    data = {name: unescape(value) for name, value in re.findall(
        r'<input type="hidden" name="(\w+)" value="(.*?)">', page.content.decode()
    )}  # fmt: skip
    response = operator.post(reverse(SLOTS) + "?state=stale", data)
    assert said(response) == ["Revoked 1 permit."]


@on_each_database
def test_purge_stale(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    hold(locks_alias, slot=1, left=-5, age=65)
    hold(locks_alias, slot=2, left=-5, token=8)
    hold(locks_alias, slot=3, left=20)
    page = ask(operator, SEMAPHORES, "purge_stale", key())
    late = not applocks.are_at(locks_alias)  # a session stands or has ended
    assert ("Left alone" in text(page)) is late
    hold(locks_alias, slot=2, left=60, token=8)  # renewed late
    response = confirm(operator, SEMAPHORES, page)
    assert said(response)[0] == "Freed 1 slot."
    assert said(response)[1].startswith("The holder of reports slot 2 has changed since it was shown: nobody there")
    assert [slot_row(locks_alias, slot=slot).expires_us is None for slot in (1, 2, 3)] == [True, False, False]
    assert "Purged slot 1" in LogEntry.objects.get().change_message
    response = ask(operator, SEMAPHORES, "purge_stale", key())
    assert "nothing to purge" in said(response)[0]
    assert ("reports slot 3 seems gone" in said(response)[0]) is late


def test_set_slots(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    make_semaphore(locks_alias, "one", slots=1, kind="mutex")
    hold(locks_alias)
    page = ask(operator, SEMAPHORES, "set_slots", key(), key("one"))
    assert "Holders, who keep their slots" in text(page)
    again = confirm(operator, SEMAPHORES, page, slots="0")
    assert "greater than or equal to 1" in text(again)
    response = confirm(operator, SEMAPHORES, again, slots="2", reason="INC-7")
    assert said(response) == ["'one' is a mutex: it has one slot, not 2.", "Slots of reports set to 2."]
    assert SemaphoreRow.objects.using(locks_alias).get(name="reports").operator_slots == 2
    assert [(e.object_repr, e.change_message) for e in LogEntry.objects.all()] == [
        ("reports", "Slots of reports set to 2. Reason: INC-7")
    ]
    page = ask(operator, SEMAPHORES, "set_slots", key())
    confirm(operator, SEMAPHORES, page, slots="")
    assert SemaphoreRow.objects.using(locks_alias).get(name="reports").operator_slots is None


def test_pause_and_resume(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    page = ask(operator, SEMAPHORES, "pause", key())
    assert "new calls of views and tasks are refused at once" in page.content.decode()
    assert not SemaphoreRow.objects.using(locks_alias).get().paused
    assert said(confirm(operator, SEMAPHORES, page)) == ["Paused: reports."]
    assert SemaphoreRow.objects.using(locks_alias).get().paused
    page = ask(operator, SEMAPHORES, "resume", key())
    SemaphoreRow.objects.using(locks_alias).filter(name="reports").update(name="renamed", key="x" * 32)
    assert said(confirm(operator, SEMAPHORES, page)) == ["There is no semaphore reports any more."]


def test_permissions(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    hold(locks_alias)

    def actions(client: Client, url: str) -> set[str]:
        page = client.get(reverse(url)).content.decode()
        return set(re.findall(r'<option value="(\w+)"', page))

    viewer = login("viewer", "view_semaphorerow", "view_slotrow")
    helper = login("helper", "view_semaphorerow", "view_slotrow", "stop_semaphorerow", "revoke_semaphorerow")
    asker = login("asker", "view_semaphorerow", "view_slotrow", "stop_semaphorerow")
    owner = login("owner", "view_semaphorerow", "configure_semaphorerow")
    assert actions(viewer, SEMAPHORES) == set()
    assert actions(helper, SEMAPHORES) == actions(helper, SLOTS) == {"stop", "revoke", "purge_stale"}
    assert actions(operator, SEMAPHORES) >= {"drain"}
    assert actions(asker, SEMAPHORES) == actions(asker, SLOTS) == {"stop"}
    assert actions(owner, SEMAPHORES) == {"set_slots", "undo_slots", "pause", "resume"}
    assert owner.get(reverse(SLOTS)).status_code == 403
    assert login("nobody").get(reverse(SEMAPHORES)).status_code == 403
    assert login("staff", "revoke_semaphorerow").post(reverse(SEMAPHORES)).status_code == 403

    page = ask(operator, SEMAPHORES, "revoke", key())
    for client in (viewer, asker, owner):  # the confirmation alone is no permission
        assert confirm(client, SEMAPHORES, page).status_code == 403
        assert slot_row(locks_alias).permit_id
    confirm(helper, SEMAPHORES, page)
    assert slot_row(locks_alias).revoked_by == "helper"


@pytest.mark.parametrize(
    ("action", "targets"),
    [
        ("revoke", ""),
        ("revoke", "{}"),
        ("revoke", "[1]"),
        ("revoke", "[" * 100_000),
        ("revoke", '[["reports", "1", 7]]'),
        ("revoke", '[["reports", 1, 1e3]]'),
        ("revoke", f'[["reports", 1, {2**64}]]'),
        ("revoke", f'[["reports", {2**64}, 7]]'),
        ("revoke", '[["", 1, 7]]'),
        ("purge_stale", '[["a\\u0000", 1, 7]]'),
        ("pause", '[["reports"]]'),
        ("pause", '["\\ud800"]'),
        ("set_slots", "null"),
    ],
)
@ON_ONE_DATABASE
def test_damaged_confirmations(operator: Client, locks_alias: str, action: str, targets: str) -> None:
    make_semaphore(locks_alias)
    hold(locks_alias)
    data = {"action": action, "_selected_action": key(), "confirmed": "yes", "targets": targets, "slots": "2"}
    response = operator.post(reverse(SEMAPHORES), data)
    assert said(response) == ["The form came back damaged: nothing was done."]
    assert slot_row(locks_alias).permit_id


@on_each_database
def test_acts_are_not_undone_with_the_request(operator: Client, locks_alias: str, settings: Any) -> None:
    """The views stay out of ATOMIC_REQUESTS."""
    from django.urls import resolve

    match = resolve(reverse(SEMAPHORES))
    assert set(match.func._non_atomic_requests) >= set(connections)  # type: ignore[attr-defined]


@on_each_database
def test_strange_names(operator: Client, locks_alias: str) -> None:
    name = "a\r\n\"'<b>&amp;\u2028𝔞"
    make_semaphore(locks_alias, name, slots=1)
    hold(locks_alias, name)
    page = ask(operator, SEMAPHORES, "revoke", key(name))
    assert "<b>" not in re.sub(r"(?s)^.*?<h1>", "", page.content.decode()).replace("<br>", "")
    assert said(confirm(operator, SEMAPHORES, page)) == ["Revoked 1 permit."]
    assert operator.get(reverse(SEMAPHORES)).status_code == 200


def test_templates_have_no_inline_style_or_script() -> None:
    templates = list(Path(django_sqlsem.__file__).parent.rglob("templates/**/*.html"))
    assert templates
    for template in templates:
        source = template.read_text(encoding="utf-8")
        assert not re.search(r"<style|\bstyle=|<script(?![^>]*\bsrc=)|\bon\w+=|javascript:", source), template


def test_free_slots_have_no_holder(operator: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    row = hold(locks_alias)
    SlotRow.objects.using(locks_alias).update(expires_us=None)
    shown = text(operator.get(reverse("admin:sqlsem_slotrow_change", args=[row.pk])))
    assert "web1" not in shown


LOCK = "admin:sqlsem_semaphorerow_change"


@pytest.mark.parametrize(
    ("view", "parameters", "most"),
    [
        # One of them asks the beacons which holders are dead.
        (SEMAPHORES, {}, 13),
        (SEMAPHORES, {"o": "1"}, 13),
        (SEMAPHORES, {"state": "stale"}, 12),
        (SEMAPHORES, {"q": "rep"}, 12),
        ("admin:sqlsem_semaphorerow_snapshots", {}, 13),
        (LOCK, {}, 12),
        (LOCK, {"range": "7d"}, 12),
        ("admin:sqlsem_semaphorerow_snapshot", {}, 7),
        (SLOTS, {"state": "held"}, 6),
        ("admin:sqlsem_refreshrow_changelist", {}, 3),
        ("admin:sqlsem_claimrow_changelist", {}, 4),
        ("admin:sqlsem_transactionlockrow_changelist", {}, 2),
    ],
)
@pytest.mark.parametrize("headers", [{}, {"X-Sqlsem-Fragment": "1"}])
def test_a_request_asks_nothing_twice(
    operator: Client, locks_alias: str, view: str, parameters: dict[str, str], most: int, headers: dict[str, str]
) -> None:
    """All of a page is as of one instant, and read once; ``most``: so many statements, one of them about the clock."""
    make_semaphore(locks_alias, operator_slots=2, paused=True)
    hold(locks_alias)
    wait(locks_alias)
    one = view == LOCK or view.endswith("snapshot")
    url = reverse(view, args=[key()] if one else [])
    operator.get(url, parameters, headers=headers)
    with CaptureQueriesContext(connections[locks_alias]) as captured:
        assert operator.get(url, parameters, headers=headers).status_code == 200
    statements = [
        each["sql"] for each in captured if "django_session" not in each["sql"] and "auth_" not in each["sql"]
    ]
    assert len(statements) == len(set(statements)), statements
    assert len(statements) <= most, statements
