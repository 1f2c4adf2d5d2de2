"""Every page of the locks: what a strict policy, a screen reader, a narrow screen and another theme make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from django.urls import reverse
from playwright.sync_api import Page, expect

from django_sqlsem.models import SemaphoreRow
from tests.e2e.browser.site import OVERVIEW, Server, Visitor, address
from tests.support.operators import hold, make_semaphore, slot_row, wait
from tests.unit.test_admin import key

pytestmark = pytest.mark.leaves_held

GRAVE = ("serious", "critical")


@pytest.fixture
def scene(server: Server) -> None:
    """Locks in all states."""
    make_semaphore("default")
    hold("default", slot=1, left=600)
    hold("default", slot=2, token=8, left=-5, label="<b>&quot;</b>", user="o'neill")
    hold("default", slot=3, token=9, left=600, stop_token=9, stop_by="ann")
    wait("default")
    make_semaphore("default", "calm", slots=60, paused=True)
    hold("default", "calm", slot=60, token=3)
    make_semaphore("default", "one", slots=1, kind="mutex")


#: What leads to each page from an operator's first.
PAGES: dict[str, Callable[[Visitor], Any]] = {
    "overview": lambda visitor: visitor.overview(),
    "search": lambda visitor: visitor.overview("?q=rep&state=held"),
    "nothing": lambda visitor: visitor.overview("?q=nothing-of-the-kind"),
    "lock": lambda visitor: visitor.lock(),
    "paused": lambda visitor: visitor.lock("calm"),
    "idle": lambda visitor: visitor.lock("one"),
    "revoke": lambda visitor: (visitor.lock(), visitor.press("revoke 1 7")),
    "pause": lambda visitor: (visitor.lock(), visitor.press("pause")),
    "set slots": lambda visitor: (visitor.lock(), visitor.press("set_slots")),
    "slots": lambda visitor: visitor.open(reverse("admin:sqlsem_slotrow_changelist")),
    "history": lambda visitor: visitor.open(address(view="history")),
}


def findings(page: Page) -> list[str]:
    """Return what axe-core finds that is serious, but for what Django's own frame around the page has."""
    found = Axe().run(page, context={"include": [["#content"]]}).response["violations"]
    return [
        f"{each['id']} ({each['impact']}): {node['html'][:200]} {node['failureSummary'][:300]}"
        for each in found
        if each["impact"] in GRAVE
        for node in each["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(server: Server, visit: Callable[..., Visitor], scene: None, scheme: str) -> None:
    visitor = visit(server, color_scheme=scheme)
    found = {}
    for name, open_page in PAGES.items():
        open_page(visitor)
        found[name] = findings(visitor.page)
    assert {name: each for name, each in found.items() if each} == {}


def test_axe_would_find_something(operator: Visitor, scene: None) -> None:
    page = operator.overview()
    page.evaluate("document.querySelector('#content').append(document.createElement('button'))")
    assert any("button-name" in finding for finding in findings(page))


def test_the_policy_would_be_seen_to_refuse(operator: Visitor, scene: None) -> None:
    page = operator.overview()
    assert operator.refused == []
    page.evaluate("document.body.append(Object.assign(document.createElement('style'), {textContent: 'p {}'}))")
    page.wait_for_function("() => true")
    assert operator.refused
    operator.refused.clear()


WIDTHS = (1400, 1024, 390)
#: Nothing of a page's content ends beyond the screen, unless it scrolls in a box of its own.
BEYOND = """
() => [...document.querySelectorAll("#content *")].filter((each) => {
  const box = each.getBoundingClientRect();
  if (!box.width || !box.height || each.closest(".sqlsem-over, .sqlsem-left, .sqlsem-plot, thead")) return false;
  const scrolls = each.closest(".sqlsem-scroll, .sqlsem-tabs");
  const fits = !scrolls || scrolls.scrollWidth <= scrolls.clientWidth;
  return box.right > innerWidth + 1 && (fits || each === scrolls);
}).map((each) => each.outerHTML.slice(0, 200))
"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("which", ["overview", "lock", "revoke", "history", "pause"])
def test_no_page_scrolls_sideways(
    server: Server, visit: Callable[..., Visitor], scene: None, which: str, width: int
) -> None:
    visitor = visit(server, viewport={"width": width, "height": 900})
    PAGES[which](visitor)
    assert visitor.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_all_of_a_lock_is_on_the_screen(server: Server, visit: Callable[..., Visitor], scene: None, width: int) -> None:
    """Holders, their buttons and the drawings fit, whatever the names; what scrolls is tables of figures alone."""
    hostile = "<img src=x onerror=alert(1)>\u202e" + "x" * 160
    make_semaphore("default", hostile, slots=2)
    hold("default", hostile, label="</td><script>\u2066" + "w" * 170, user="u" * 150, thread="t" * 100)
    wait("default", hostile)
    visitor = visit(server, viewport={"width": width, "height": 900})
    for name in ("reports", hostile):
        page = visitor.lock(name)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert page.evaluate(BEYOND) == [], name
        for button in page.locator("button[name=do]").all():
            box = button.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width, name
        plot = page.locator("#sqlsem-timeline").bounding_box()
        assert plot is not None
        assert plot["x"] + plot["width"] <= width  # where "now" is
    expect(page.locator("h1")).to_contain_text("[U+202E]")


@pytest.mark.parametrize("width", WIDTHS)
def test_all_of_the_overview_is_on_the_screen(
    server: Server, visit: Callable[..., Visitor], scene: None, width: int
) -> None:
    """No column is cut off, whatever the names, and also with the menu of the admin beside it."""
    hostile = "<img src=x onerror=alert(1)>\u202e" + "x" * 160
    make_semaphore("default", hostile, slots=9)
    for slot in range(1, 10):
        hold("default", hostile, slot=slot, token=slot, left=600, label="</td><script>\u2066" + "w" * 170)
    wait("default", hostile, age=4000, left=600, waiting=12)
    visitor = visit(server, viewport={"width": width, "height": 900})
    page = visitor.overview()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(BEYOND) == []
    table = page.locator("#sqlsem-table")
    assert table.evaluate("(each) => each.scrollWidth - each.clientWidth") <= 0
    row = page.locator("#result_list tbody tr").first
    assert row.evaluate("(row) => getComputedStyle(row).display") == ("grid" if width == 390 else "table-row")
    expect(page.locator("#sqlsem-glance")).to_contain_text("12 wait, the first for 1 h 0")


def test_holders_are_cards_on_a_phone(server: Server, visit: Callable[..., Visitor], scene: None) -> None:
    wide, phone = (
        visit(server, viewport={"width": 1400, "height": 900}),
        visit(server, viewport={"width": 390, "height": 844}),
    )
    assert (
        wide.lock().locator("#sqlsem-holders tbody tr").first.evaluate("(row) => getComputedStyle(row).display")
        == "table-row"
    )
    page = phone.lock()
    row = page.locator("#sqlsem-holders tbody tr").first
    assert row.evaluate("(row) => getComputedStyle(row).display") == "block"
    revoke = page.locator('button[value="revoke 1 7"]')
    box, card = revoke.bounding_box(), row.bounding_box()
    assert box is not None
    assert card is not None
    assert card["y"] < box["y"] < card["y"] + card["height"]
    assert box["height"] >= 44, "a finger is no mouse"
    phone.press("revoke 1 7")


@pytest.mark.parametrize("javascript", [True, False])
def test_ranges_by_address(server: Server, visit: Callable[..., Visitor], scene: None, javascript: bool) -> None:
    visitor = visit(server, java_script_enabled=javascript)
    page = visitor.lock()
    for words, name in (("24 h", "24h"), ("7 d", "7d"), ("5 min", "5m"), ("1 h", "1h")):
        page.locator(".sqlsem-ranges").get_by_role("link", name=words, exact=True).click()
        page.wait_for_url(f"**?range={name}#sqlsem-range")
        expect(page.locator(".sqlsem-ranges [aria-current]")).to_have_text(words)


def test_json_for_scripts(server: Server, visit: Callable[..., Visitor], scene: None) -> None:
    operator, nobody = visit(server), visit(server, "view_slotrow")
    path = reverse(OVERVIEW) + "snapshot.json"
    answer = operator.page.request.get(path)
    assert answer.status == 200
    shown = {each["name"]: each for each in answer.json()["semaphores"]}
    assert set(shown) == {"reports", "calm", "one"}
    assert {holder["pid"] for holder in shown["reports"]["holders"]} == {4711}
    assert nobody.page.request.get(path).status == 403


def test_under_unfold(unfold: Server, visit: Callable[..., Visitor], scene: None) -> None:
    """Both pages are whole there, refresh themselves, and lead to acts."""
    visitor = visit(unfold)
    page = visitor.overview()
    expect(page.locator("#sqlsem-live .sqlsem-cell").first).to_be_visible()
    expect(page.get_by_role("columnheader", name="Queue")).to_be_visible()
    expect(page.locator("[data-sqlsem-age]")).to_contain_text("s ago")
    page.locator(f'input[name=_selected_action][value="{key("calm")}"]').check()
    page.locator("select[name=action]").first.select_option("resume")
    page.locator("button[name=index]").first.click()
    visitor.confirm("Resumed: calm.")
    page.get_by_role("table", name="Locks").get_by_role("link", name="reports", exact=True).click()
    expect(page.locator("#sqlsem-live")).to_contain_text("4711")
    visitor.press("pause")
    visitor.confirm("Paused: reports.")
    assert dict(SemaphoreRow.objects.values_list("name", "paused")) == {"reports": True, "calm": False, "one": False}
    page = visitor.open(reverse("admin:sqlsem_slotrow_changelist"))
    page.locator(f'input[name=_selected_action][value="{slot_row("default").pk}"]').check()
    page.locator("select[name=action]").first.select_option("revoke")
    page.locator("button[name=index]").first.click()
    visitor.confirm("Revoked 1 permit.")
