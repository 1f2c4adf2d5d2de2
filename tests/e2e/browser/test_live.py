"""Pages that refresh themselves: what they show, when they ask, and what they say when there is no answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from django.contrib.sessions.models import Session
from playwright.sync_api import Page, Request, expect

from django_sqlsem import control
from django_sqlsem.admin.live import HEADER
from django_sqlsem.core.durations import duration
from tests.e2e.browser.site import PATIENCE, Server, Visitor, address
from tests.support import databases
from tests.support.operators import hold, make_semaphore
from tests.support.processes import Child

pytestmark = pytest.mark.leaves_held

#: Longer than the longest pause after errors.
RECOVERY = 1000 * (PATIENCE + 45)
TABS = """
(hidden) => {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event("visibilitychange"));
}
"""


def stays(page: Page) -> None:
    """Note that this very page is to stay."""
    page.evaluate("window.stayed = true")


def assert_stayed(page: Page) -> None:
    assert page.evaluate("window.stayed === true"), "the page was loaded anew"


def asked(page: Page) -> list[Request]:
    """Return a list that grows with each request for a fragment."""
    found: list[Request] = []
    page.on("request", lambda request: found.append(request) if "x-sqlsem-fragment" in request.headers else None)
    return found


@pytest.mark.parametrize("alias", [alias for alias in databases.covered() if alias in ("default", "postgres")])
def test_a_new_holder_appears_by_itself(
    server_for: Callable[..., Server], visit: Callable[..., Visitor], alias: str
) -> None:
    make_semaphore(alias)
    operator = visit(server_for(alias))
    page = operator.lock()
    stays(page)
    overview = operator.context.new_page()
    overview.goto("/admin/sqlsem/semaphorerow/")
    stays(overview)
    held = overview.locator("#sqlsem-live .sqlsem-cell.sqlsem-held")
    expect(held).to_have_count(0)
    with Child("hold", alias, "reports", 3) as child:
        child.expect("held")
        expect(page.locator("#sqlsem-live")).to_contain_text(str(child.pid))
        expect(held).to_have_count(1)
        child.send()
        child.expect("released")
        expect(held).to_have_count(0)
    assert_stayed(page)
    assert_stayed(overview)


@pytest.fixture(params=["overview", "lock"])
def page(request: pytest.FixtureRequest, operator: Visitor) -> Page:
    """Each of the two pages, with a clock that goes on when a test says so."""
    make_semaphore("default")
    hold("default")
    operator.page.clock.install()
    return operator.overview() if request.param == "overview" else operator.lock()


def test_a_hidden_tab_stops_asking(page: Page) -> None:
    requests = asked(page)
    with page.expect_response(lambda answer: "x-sqlsem-fragment" in answer.request.headers):
        page.clock.run_for(3500)
    page.evaluate(TABS, True)
    before = len(requests)
    for _ in range(6):
        page.clock.run_for(10_000)
    assert len(requests) == before
    with page.expect_response(lambda answer: "x-sqlsem-fragment" in answer.request.headers):
        page.evaluate(TABS, False)
    assert len(requests) == before + 1


def test_what_has_not_changed_is_not_sent_again_and_time_goes_on(operator: Visitor) -> None:
    make_semaphore("default")
    hold("default", left=600)
    page = operator.overview()
    requests = asked(page)
    age = page.locator("#result_list .field-longest_hold [data-sqlsem-ticks]")
    before = age.inner_text()
    with page.expect_response(lambda answer: answer.status == 304):
        pass
    expect(age).not_to_have_text(before)
    with page.expect_response(lambda answer: answer.status == 200 and HEADER.lower() in answer.request.headers) as told:
        hold("default", slot=2, left=600)
    expect(page.locator("#result_list .field-cells")).to_contain_text("2 of 3")
    assert int(told.value.headers["content-length"]) <= 5000
    assert all("if-none-match" in request.headers for request in requests)


def test_the_script_writes_lengths_of_time_as_the_pages_do(operator: Visitor) -> None:
    lengths = [0.44, 4.93, 4.96, 53.9, 55.4, 180.0, 3592.7, 3595.0, 7800.0, 86_392.4, 89_995.0, 199_995.0]
    # What the page shows stays as old as the page, which is five seconds old from now on.
    operator.page.route(
        "**/*", lambda route: route.abort() if HEADER.lower() in route.request.headers else route.continue_()
    )
    page = operator.overview()
    page.evaluate("() => { performance.now = () => 5000; }")
    add = """(live, all) => all.forEach((ticks) => {
      const each = document.createElement("p");
      each.dataset.sqlsemTicks = ticks;
      live.append(each);
    })"""
    page.locator("#sqlsem-live").evaluate(add, [*lengths, -15.2, -3.0])
    added = page.locator("#sqlsem-live > p[data-sqlsem-ticks]")
    expect(added.first).to_have_text("5.4 s")
    shown = [text.replace("\xa0", " ") for text in added.all_inner_texts()]
    assert shown == [*(duration(seconds + 5) for seconds in lengths), "10 s", "0.0 s"]


def test_an_operator_can_stop_it_and_sees_how_old_the_view_is(page: Page) -> None:
    expect(page.locator("[data-sqlsem-age]")).to_contain_text("s ago")
    page.get_by_role("button", name="Pause refreshing").press("Enter")
    requests = asked(page)
    for _ in range(3):
        page.clock.run_for(10_000)
    assert not requests
    expect(page.locator("[data-sqlsem-age]")).to_have_text(re.compile(r"Paused: updated \d\d s ago"))
    with page.expect_response(lambda answer: answer.status == 200):
        page.get_by_role("button", name="Go on refreshing").press("Enter")
    expect(page.locator("[data-sqlsem-age]")).to_have_text(re.compile(r"Updated \d s ago"))


@pytest.fixture
def broken(server: Server) -> Iterator[Callable[[bool], None]]:
    """A function that takes a table of the locks away from the server, or gives it back."""
    away = False

    def take(wanted: bool) -> None:
        nonlocal away
        if wanted != away:
            tables = ("sqlsem_slot", "sqlsem_slot_away") if wanted else ("sqlsem_slot_away", "sqlsem_slot")
            databases.query("default", "ALTER TABLE {} RENAME TO {}".format(*tables))
            away = wanted

    yield take
    take(False)


@pytest.mark.parametrize("which", ["overview", "lock"])
def test_a_failing_database_is_said_and_the_view_stays(
    operator: Visitor, broken: Callable[[bool], None], which: str
) -> None:
    make_semaphore("default")
    hold("default")
    page = operator.overview() if which == "overview" else operator.lock()
    stays(page)
    before = page.locator("#sqlsem-live").inner_text()
    assert "reports" in before or "web1" in before
    broken(True)
    message = page.locator("[data-sqlsem-error]")
    expect(message).to_contain_text("could not be read")
    assert len(page.locator("#sqlsem-live").inner_text()) > len(before) // 2
    expect(page.locator("[data-sqlsem-age]")).to_contain_text("Stale")
    broken(False)
    expect(message).to_be_empty(timeout=RECOVERY)
    assert_stayed(page)


def test_a_page_that_is_opened_while_the_database_fails(operator: Visitor, broken: Callable[[bool], None]) -> None:
    make_semaphore("default")
    broken(True)
    answer = operator.page.goto("/admin/sqlsem/semaphorerow/")
    assert answer is not None
    assert answer.status == 503
    expect(operator.page.get_by_role("alert")).to_contain_text("could not be read")
    broken(False)
    expect(operator.page.locator("#sqlsem-live").get_by_role("link", name="reports", exact=True)).to_be_visible(
        timeout=RECOVERY
    )


def test_a_server_that_is_gone_and_comes_back(visit: Callable[..., Visitor], server: Server) -> None:
    make_semaphore("default")
    hold("default")
    own = Server("default")
    try:
        page = visit(own).lock()
        stays(page)
        own.stop()
        expect(page.locator("[data-sqlsem-error]")).to_contain_text("cannot be reached")
        expect(page.locator("#sqlsem-live")).to_contain_text("4711")
        own.start()
        expect(page.locator("[data-sqlsem-error]")).to_be_empty(timeout=RECOVERY)
        assert_stayed(page)
    finally:
        own.close()


def test_a_session_that_has_ended(operator: Visitor) -> None:
    make_semaphore("default")
    page = operator.overview()
    Session.objects.all().delete()
    message = page.locator("[data-sqlsem-error]")
    expect(message).to_contain_text("session has ended")
    message.get_by_role("link").click()
    expect(page.locator("input[name=username]")).to_be_visible()


def test_nothing_moves_under_the_pointer(operator: Visitor, server: Server) -> None:
    """A row that is pointed at stays where it is, and what is pressed is what was read."""
    make_semaphore("default")
    hold("default", slot=2, token=8)
    page = operator.lock()
    button = page.locator('button[value="revoke 2 8"]')
    button.hover()
    place = button.bounding_box()
    requests = asked(page)
    hold("default", slot=1)  # would stand above it
    expect(page.locator("[data-sqlsem-age]")).to_contain_text("Held still under the pointer")
    page.wait_for_function("() => /updated [4-9] s/.test(document.querySelector('[data-sqlsem-age]').textContent)")
    assert button.bounding_box() == place
    assert not requests
    page.mouse.move(2, 2)
    expect(page.locator('button[value="revoke 1 7"]')).to_be_visible()
    moved = button.bounding_box()
    assert moved is not None
    assert place is not None
    assert moved["y"] > place["y"]
    operator.press("revoke 2 8")


def test_a_click_on_what_has_changed_is_refused_with_what_it_is_now(operator: Visitor) -> None:
    make_semaphore("default")
    hold("default")
    page = operator.lock()
    page.locator('button[value="stop 1 7"]').hover()
    hold("default", token=8, host="web9", label="GET /other/")
    page.mouse.down()
    page.mouse.up()
    expect(page.get_by_text("nobody there was disturbed. Now: slot 1: web9 pid 4711, GET /other/")).to_be_visible()
    control.pause("reports", by="bob", reason="INC-12")
    cookie = next(each["value"] for each in operator.context.cookies() if each["name"] == "csrftoken")
    answer = page.request.post(address(view="act"), form={"do": "pause", "csrfmiddlewaretoken": cookie})
    assert "done already, nothing was changed. Now: reports: 1 of 3 held, paused by bob." in answer.text()
