"""What the server answers to pages that refresh themselves, and what it says when the database fails."""

from __future__ import annotations

import contextlib
import gzip
import logging
import re
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.contrib.sessions.models import Session
from django.contrib.staticfiles import finders
from django.db import DatabaseError, connections
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

import django_sqlsem
from django_sqlsem.admin import live
from django_sqlsem.models import SemaphoreRow, SlotRow
from tests.support.databases import without_tables
from tests.support.operators import hold, make_semaphore
from tests.unit.test_acts import confirm as confirm_act
from tests.unit.test_admin import SEMAPHORES, key, login
from tests.unit.test_lock_page import an_hour

pytestmark = pytest.mark.leaves_held

FRAGMENT = {live.HEADER: "1"}


@pytest.fixture
def alias(committed: None) -> str:
    """Pages are pages, whatever the database."""
    return "default"


@pytest.fixture
def operator(alias: str) -> Client:
    return login("boss", is_superuser=True)


@pytest.fixture
def broken(alias: str) -> Iterator[None]:
    """The locks cannot be read."""
    with connections[alias].cursor() as cursor:
        cursor.execute("ALTER TABLE sqlsem_waiter RENAME TO sqlsem_waiter_away")
    yield
    with connections[alias].cursor() as cursor:
        cursor.execute("ALTER TABLE sqlsem_waiter_away RENAME TO sqlsem_waiter")


def address(name: str = "reports") -> str:
    return reverse("admin:sqlsem_semaphorerow_change", args=[key(name)])


def page_of(which: str) -> str:
    return address() if which == "lock" else reverse(SEMAPHORES)


@pytest.mark.parametrize("which", ["overview", "lock"])
def test_the_script_gets_the_changing_part_alone(operator: Client, alias: str, which: str) -> None:
    make_semaphore(alias)
    hold(alias)
    whole = operator.get(page_of(which))
    html = whole.content.decode()
    assert f'data-sqlsem-refresh="{live.REFRESH_SECONDS}"' in html
    assert f'data-sqlsem-url="{page_of(which)}"' in html
    assert "data-sqlsem-bar" in html
    assert live.HEADER not in whole.headers
    assert live.HEADER in whole.headers["Vary"]
    part = operator.get(page_of(which), headers=FRAGMENT)
    assert part.status_code == 200
    assert part.headers[live.HEADER] == "1"
    assert "no-store" in part.headers["Cache-Control"]
    inside = part.content.decode()
    assert "sqlsem-held" in inside
    for outside in ("<html", "sqlsem-live", "data-sqlsem-bar", "csrfmiddlewaretoken"):
        assert outside not in inside


def ask(client: Client, which: str = "overview", **headers: str) -> Any:
    return client.get(
        page_of(which), headers=FRAGMENT | {name.replace("_", "-"): value for name, value in headers.items()}
    )


@pytest.mark.parametrize("which", ["overview", "lock"])
def test_what_has_not_changed_is_not_sent_again(operator: Client, alias: str, which: str) -> None:
    make_semaphore(alias)
    hold(alias, left=600)
    light = {live.LIGHT: "1"}  # what happened lately is told up to a second
    first = ask(operator, which, **light)
    live.forget()
    again = ask(operator, which, **light, If_None_Match=first["ETag"])
    assert (again.status_code, again.content, again[live.HEADER]) == (304, b"", "1")
    assert again["ETag"] == first["ETag"]
    assert "no-store" in again["Cache-Control"]
    assert re.search(r'data-sqlsem-ticks="1\d\.\d">1\d\W*s<', first.content.decode())  # which is no change
    hold(alias, slot=2, left=600)
    live.forget()
    changed = ask(operator, which, **light, If_None_Match=first["ETag"])
    assert changed.status_code == 200
    assert changed["ETag"] != first["ETag"]


def test_the_page_says_what_it_shows(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    (etag,) = re.findall(r'data-sqlsem-etag="(.*?)"', operator.get(page_of("overview")).content.decode())
    live.forget()
    assert ask(operator, If_None_Match=unescape(etag)).status_code == 304


def test_an_answer_is_small(operator: Client, alias: str) -> None:
    for number in range(50):
        make_semaphore(alias, f"customer:{number:02}:orders", slots=3)
        hold(alias, f"customer:{number:02}:orders", left=600)
    first = ask(operator)
    hold(alias, "customer:07:orders", slot=2, left=600)
    live.forget()
    answer = ask(operator, If_None_Match=first["ETag"], Accept_Encoding="gzip")
    assert answer["Content-Encoding"] == "gzip"
    assert {"Accept-Encoding", live.HEADER} <= {each.strip() for each in answer["Vary"].split(",")}
    assert len(answer.content) <= 5000
    html = gzip.decompress(answer.content).decode()
    assert len(re.findall("<tr [^>]*data-sqlsem-key", html)) == 50


def test_ten_dashboards_cost_the_database_little(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten operators look at the overview, every three seconds: as many statements as one makes, and who they are."""
    make_semaphore(alias)
    hold(alias, left=600)
    clients = [login(f"operator {number}", "view_semaphorerow") for number in range(10)]
    with CaptureQueriesContext(connections[alias]) as captured:
        for client in clients:
            assert ask(client).status_code == 200
    # A session, a user and two statements for permissions each; what is read once is read once.
    assert len(captured) <= 10 * 4 + 10
    with CaptureQueriesContext(connections[alias]) as captured:
        for client in clients:
            answer = ask(client)
            assert "reports" in answer.content.decode()
            assert float(answer[live.AGE]) >= 0
    assert len(captured) == 0
    # What is out of date is read anew by one of them; meanwhile the others are shown it once more.
    clock = time.monotonic
    monkeypatch.setattr(live.time, "monotonic", lambda: clock() + live.REFRESH_SECONDS)
    renewing = live._Views.keep
    monkeypatch.setattr(live._Views, "keep", lambda *_: None)
    with CaptureQueriesContext(connections[alias]) as captured:
        for client in clients:
            assert ask(client).status_code == 200
    assert len(captured) <= 4 + 10
    monkeypatch.setattr(live._Views, "keep", renewing)
    # In fifteen seconds each is looked up once, and the locks are read five times at the most.
    assert (10 * 4 + (live.TRUSTED / live.REFRESH_SECONDS) * 10) / live.TRUSTED <= 10


def test_ten_different_views_cost_the_database_little(locks_alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten operators have ten different pages open for half a minute, and their browsers ask as they do."""
    names = [f"lock {number}" for number in range(8)]
    for name in names:
        make_semaphore(locks_alias, name)
        hold(locks_alias, name, left=600)
        an_hour(locks_alias, name)
    SlotRow.objects.using(locks_alias).update(beacon=True, process_id="0a" * 16)  # who is dead is asked, too
    overview, locks = reverse(SEMAPHORES), [address(name) for name in names]
    views = [overview, f"{overview}?state=held", f"{overview}?q=lock", *locks[:6], f"{locks[6]}?range=24h"]
    rights = ("view_semaphorerow", "stop_semaphorerow", "configure_semaphorerow")
    clients = [login(f"operator {number}", *rights) for number in range(len(views))]
    waited, databases = 1000.0, {"default", locks_alias}
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: waited))
    seen: dict[Any, str] = {}
    sent, seconds = 0, 2 * int(live.TRUSTED)
    # A page of one lock asks for its drawings every fifth time; of a day, every twentieth.
    rounds = [20 if "24h" in view else 5 if "change" in view else 1 for view in views]
    for turn in range(2 * seconds // live.REFRESH_SECONDS):
        with contextlib.ExitStack() as stack:
            captured = [stack.enter_context(CaptureQueriesContext(connections[alias])) for alias in databases]
            for number, (client, view) in enumerate(zip(clients, views, strict=True)):
                waited += live.REFRESH_SECONDS / len(views)
                light = {live.LIGHT: "1"} if (turn + number) % rounds[number] else {}
                headers = FRAGMENT | light | {"If-None-Match": seen.get((view, bool(light)), "")}
                answer = client.get(view, headers=headers)
                assert answer.status_code in (200, 304)
                assert float(answer[live.AGE]) < 2 * live.REFRESH_SECONDS
                seen[view, bool(light)] = answer["ETag"]
        if turn >= seconds // live.REFRESH_SECONDS:  # by then all has begun
            sent += sum(map(len, captured))
    assert sent / seconds <= 10


def test_views_of_one_moment_draw_on_one_reading(operator: Client, alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown is never older than a refresh, and says how old it is."""
    make_semaphore(alias)
    ask(operator)
    ask(operator, "lock")
    clock, waited = time.monotonic, live.REFRESH_SECONDS
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: clock() + waited))
    with CaptureQueriesContext(connections[alias]) as captured:
        assert float(ask(operator)[live.AGE]) < 1
    read = len(captured)
    waited += 2
    with CaptureQueriesContext(connections[alias]) as captured:
        answer = ask(operator, "lock", X_Sqlsem_Light="1")
    assert 2 <= float(answer[live.AGE]) < 3
    assert len(captured) == 0 < read
    hold(alias, host="web9", left=600)
    waited += 1
    answer = ask(operator, "lock", X_Sqlsem_Light="1")
    assert "web9" in answer.content.decode()
    assert float(answer[live.AGE]) < 1


def test_hosts_share_no_reading(operator: Client, alias: str, settings: Any) -> None:
    """Each may have tables of its own, as tenants do."""
    settings.ALLOWED_HOSTS = ["*"]
    make_semaphore(alias)
    assert "web9" not in ask(operator, "lock", Host="one.example").content.decode()
    hold(alias, host="web9", left=600)
    assert "web9" not in ask(operator, "lock", Host="one.example", X_Sqlsem_Light="1").content.decode()
    assert "web9" in ask(operator, "lock", Host="two.example").content.decode()


def test_what_was_done_is_seen_at_once(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    assert "<strong>0</strong> names paused" in ask(operator).content.decode()
    page = operator.post(reverse("admin:sqlsem_semaphorerow_act", args=[key()]), {"do": "pause"})
    confirm_act(operator, page)
    assert "<strong>1</strong> name paused" in ask(operator).content.decode()


def test_a_lock_that_is_gone_is_not_shown_any_more(
    operator: Client, alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_semaphore(alias)
    assert ask(operator, "lock").status_code == 200
    SemaphoreRow.objects.using(alias).all().delete()
    clock = time.monotonic
    monkeypatch.setattr(live.time, "monotonic", lambda: clock() + live.REFRESH_SECONDS)
    assert ask(operator, "lock").status_code == 404


def test_a_view_is_not_older_than_a_refresh(operator: Client, alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_semaphore(alias)
    ask(operator)
    hold(alias, host="web9", left=600)
    assert "1 of 3" not in ask(operator).content.decode()
    clock = time.monotonic
    monkeypatch.setattr(live.time, "monotonic", lambda: clock() + live.REFRESH_SECONDS)
    assert "1 of 3" in ask(operator).content.decode()


@pytest.mark.parametrize("which", ["overview", "lock"])
def test_nobody_is_shown_what_another_may(operator: Client, alias: str, which: str) -> None:
    make_semaphore(alias)
    hold(alias, left=600)
    assert b"revoke 1 7" in ask(operator, "lock").content
    ask(operator, which)
    for stranger in (login("nobody"), Client()):
        for _ in range(2):
            assert ask(stranger, which).status_code in (302, 403)
    viewer = login("viewer", "view_semaphorerow")
    for _ in range(2):
        assert b"revoke 1 7" not in ask(viewer, "lock").content
    operator.logout()
    assert ask(operator, which).status_code == 302


def test_a_session_that_opens_a_page_is_looked_up(operator: Client, alias: str) -> None:
    """It may have become another user's, as tools do that let one act for another."""
    make_semaphore(alias)
    hold(alias, left=600)
    assert b"revoke 1 7" in ask(operator, "lock").content
    User.objects.update(is_superuser=False)
    User.objects.get().user_permissions.add(Permission.objects.get(codename="view_semaphorerow"))
    assert b"revoke 1 7" in ask(operator, "lock").content
    assert b"revoke 1 7" not in operator.get(page_of("lock")).content
    assert b"revoke 1 7" not in ask(operator, "lock").content


def test_a_session_is_trusted_for_a_while_only(operator: Client, alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_semaphore(alias)
    ask(operator)
    Session.objects.all().delete()
    assert ask(operator).status_code == 200
    clock = time.monotonic
    monkeypatch.setattr(live.time, "monotonic", lambda: clock() + live.TRUSTED)
    assert ask(operator).status_code == 302


def test_what_is_kept_is_bounded(alias: str, operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for kept in (live._views.found, live._views.trusted):
        monkeypatch.setattr(kept, "most", 3)
    make_semaphore(alias)
    for number in range(6):
        assert operator.get(page_of("overview"), {"q": f"r{number}"}, headers=FRAGMENT).status_code == 200
    assert len(live._views.found.standing()) == 3
    assert len(live._views.trusted.standing()) <= 3


def test_queries_and_forms_are_no_fragments() -> None:
    factory = RequestFactory()
    assert live.is_fragment(factory.get("/", headers=FRAGMENT))
    assert not live.is_fragment(factory.get("/"))
    assert not live.is_fragment(factory.post("/", headers=FRAGMENT))
    assert not live.is_light(factory.get("/", headers={live.LIGHT: "1"}))
    assert live.is_light(factory.get("/", headers=FRAGMENT | {live.LIGHT: "1"}))


def test_a_light_answer_leaves_the_last_hour_to_what_is_there(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    hold(alias)
    full = operator.get(address(), headers=FRAGMENT).content.decode()
    light = operator.get(address(), headers=FRAGMENT | {live.LIGHT: "1"}).content.decode()
    assert '<div id="sqlsem-recent">' in full
    assert "sqlsem-timeline" in full
    assert '<div id="sqlsem-recent" data-sqlsem-keep></div>' in light
    assert "sqlsem-timeline" not in light
    assert "web1" in light


@pytest.mark.parametrize("which", ["overview", "lock"])
def test_a_failing_database_is_a_line_for_the_script_and_a_page_for_people(
    operator: Client, alias: str, which: str, broken: None, caplog: pytest.LogCaptureFixture
) -> None:
    make_semaphore(alias)
    with caplog.at_level(logging.WARNING, "django_sqlsem"):
        part = operator.get(page_of(which), headers=FRAGMENT)
    assert part.status_code == 503
    assert part.headers["Content-Type"].startswith("text/plain")
    assert part.headers[live.HEADER] == "1"
    assert "no-store" in part.headers["Cache-Control"]
    said = part.content.decode()
    assert said.startswith("The locks could not be read: ")
    assert "\n" not in said
    assert "could not be shown" in caplog.text
    whole = operator.get(page_of(which))
    assert whole.status_code == 503
    html = whole.content.decode()
    assert 'role="alert"' in html
    assert "data-sqlsem-reload" in html  # the script goes on asking, and loads the page when there is an answer
    assert "The locks cannot be shown" in html


def test_a_stranger_is_not_told_what_a_database_says(operator: Client, alias: str) -> None:
    """Sessions and users may be what cannot be read."""
    make_semaphore(alias)
    with without_tables(alias, "django_session"), pytest.raises(DatabaseError):
        operator.get(address(), headers=FRAGMENT)


def test_a_lock_that_is_gone(operator: Client, alias: str) -> None:
    part = operator.get(address("gone"), headers=FRAGMENT)
    assert (part.status_code, part.content.decode()) == (404, "There is no such lock any more.")
    assert part.headers[live.HEADER] == "1"
    assert operator.get(address("gone")).status_code == 302


def test_permissions_and_sessions_count_for_fragments(operator: Client, alias: str) -> None:
    make_semaphore(alias)
    for which in ("overview", "lock"):
        assert login(f"nobody {which}").get(page_of(which), headers=FRAGMENT).status_code == 403
        ended = Client().get(page_of(which), headers=FRAGMENT)
        assert ended.status_code == 302  # to the page where one logs in, which is no fragment
        assert live.HEADER not in ended.headers
        assert login(f"viewer {which}", "view_semaphorerow").get(page_of(which), headers=FRAGMENT).status_code == 200


def test_a_strange_error_is_cut_to_a_line() -> None:
    assert live.first_line(ValueError("\n one\ntwo")) == "one"
    assert live.first_line(ValueError("x" * 1000)) == "x" * 300
    assert live.first_line(ValueError()) == "ValueError"


def test_the_script_and_the_styles_are_small_and_found() -> None:
    script = Path(str(finders.find("sqlsem/locks.js"))).read_text(encoding="utf-8")
    assert len(script.splitlines()) < 200
    assert '"use strict"' in script
    # What would need a weaker policy than 'self', or take users' text for HTML of the page.
    assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\b|new Function|\.style\b|document\.write", script)
    for name in ("locks.css", "acts.css", "overview.css"):
        assert "url(" not in Path(str(finders.find(f"sqlsem/{name}"))).read_text(encoding="utf-8")


def test_every_text_of_the_script_is_in_the_bar() -> None:
    """The script says nothing by itself: what it says is translated on the page."""
    folder = Path(django_sqlsem.__file__).parent
    script = (folder / "static/sqlsem/locks.js").read_text(encoding="utf-8")
    bar = (folder / "templates/admin/sqlsem/_live_bar.html").read_text(encoding="utf-8")
    wanted = {name.lower() for name in re.findall(r"text\.text([A-Z]\w+)", script)}
    given: set[Any] = set(re.findall(r"data-text-(\w+)=\"{% translate '", bar))
    assert wanted == given
    assert len(wanted) > 5
