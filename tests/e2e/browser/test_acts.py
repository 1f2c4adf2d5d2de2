"""Operators' acts, by mouse, by keyboard and without JavaScript, on holders in processes of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from django.contrib.admin.models import LogEntry
from playwright.sync_api import Page, expect

from django_sqlsem.models import SemaphoreRow
from tests.e2e.browser.site import Server, Visitor, address, words
from tests.support.operators import hold, make_semaphore, slot_row
from tests.support.processes import Child
from tests.unit.test_admin import key

pytestmark = pytest.mark.leaves_held


@pytest.fixture
def holder(server: Server) -> Iterator[tuple[Child, int, int]]:
    """A process that holds one of three slots, and its slot and token."""
    with Child("hold", server.alias, "reports", 3) as child:
        slot, token = map(int, child.expect("held").split())
        yield child, slot, token


def lock() -> SemaphoreRow:
    return SemaphoreRow.objects.get(name="reports")


def test_a_holder_is_asked_to_stop_and_then_revoked(operator: Visitor, holder: tuple[Child, int, int]) -> None:
    child, slot, token = holder
    page = operator.lock()
    operator.press(f"stop {slot} {token}")
    for text in (f"pid {child.pid}", "They keep their slots", str(token)):
        expect(page.locator("#content")).to_contain_text(text)
    operator.confirm("Asked 1 holder to stop.")
    assert page.url.endswith(address())
    assert (slot_row("default", slot=slot).stop_token, slot_row("default", slot=slot).stop_by) == (token, "user0")
    expect(page.locator(f'button[value="stop {slot} {token}"]')).to_have_count(0)
    operator.press(f"revoke {slot} {token}")
    expect(page.locator("#content")).to_contain_text("will lose their slots")
    operator.confirm("Revoked 1 permit.")
    row = slot_row("default", slot=slot)
    assert (row.expires_us, row.revoked_token, row.revoked_by) == (None, token, "user0")
    assert [entry.object_repr for entry in LogEntry.objects.all()] == ["reports"] * 2


def test_the_lock_as_a_whole(operator: Visitor, holder: tuple[Child, int, int]) -> None:
    page = operator.lock()
    operator.press("set_slots")
    page.get_by_role("spinbutton", name="Slots").fill("5")
    page.get_by_label("Reason").fill("INC-7")
    operator.confirm("Slots of reports set to 5.", "Slots set to 5 by user0", "Reason: INC-7")
    assert lock().operator_slots == 5
    operator.press("undo_slots")
    operator.confirm("Slots of reports are as the code declares.")
    assert lock().operator_slots is None
    operator.press("pause")
    page.get_by_label("For", exact=False).select_option("15 minutes")
    page.get_by_label("Reason").fill("provider down, INC-12")
    operator.confirm("Paused: reports.", "It is resumed by itself at", "Reason: provider down, INC-12")
    assert lock().paused
    operator.press("resume")
    operator.confirm("Resumed: reports.")
    assert not lock().paused
    operator.press("drain")
    operator.confirm("Draining reports")
    assert lock().paused
    assert slot_row("default", slot=holder[1]).stop_by == "user0"


def test_slots_for_a_time(operator: Visitor, holder: tuple[Child, int, int]) -> None:
    page = operator.lock()
    operator.press("set_slots")
    page.get_by_label("For", exact=False).select_option("30 minutes")
    page.locator("input[type=submit]").click()
    expect(page.locator("#content")).to_contain_text("The number that the code declares has no end.")
    page.get_by_role("spinbutton", name="Slots").fill("5")
    page.get_by_label("Reason").fill("month end")
    ends = "That ends by itself at"
    operator.confirm("Slots of reports set to 5.", "Slots set to 5 by user0", ends, "Reason: month end")
    assert (lock().operator_slots, lock().slots_by, lock().slots_reason) == (5, "user0", "month end")
    page = operator.overview()
    badge = page.locator(".sqlsem-badge.sqlsem-operator")
    expect(badge).to_have_text(re.compile(r"^5 slots until .*\d\d:\d\d, by user0: month end$"))
    operator.lock()
    operator.press("undo_slots")
    operator.confirm("Slots of reports are as the code declares.")
    expect(page.get_by_text(ends)).to_have_count(0)
    assert (lock().operator_slots, lock().slots_until_us, lock().slots_by) == (None, None, "")
    operator.press("set_slots")
    page.get_by_role("spinbutton", name="Slots").fill("5")
    page.get_by_label("For", exact=False).select_option("5 minutes")
    operator.confirm("Slots of reports set to 5.", ends)
    SemaphoreRow.objects.update(slots_until_us=1)  # the time passes
    page = operator.lock()
    expect(page.locator("#sqlsem-acts")).to_have_count(1)
    expect(page.get_by_text(ends)).to_have_count(0)
    expect(page.locator('button[value="undo_slots"]')).to_have_count(0)


def test_purge_and_the_actions_of_the_list(operator: Visitor) -> None:
    make_semaphore("default")
    hold("default", slot=1, left=-5)
    hold("default", slot=2, token=8)
    operator.lock()
    operator.press("purge_stale 1 7")
    operator.confirm("Freed 1 slot.")
    assert slot_row("default", slot=1).expires_us is None
    page = operator.overview()
    page.locator(f'input[name=_selected_action][value="{key()}"]').check()
    page.locator("select[name=action]").first.select_option("revoke")
    page.locator("button[name=index]").first.click()
    expect(page.locator("#content")).to_contain_text(words("web1 pid 4711 · MainThread"))
    operator.confirm("Revoked 1 permit.")
    assert slot_row("default", slot=2).revoked_by == "user0"


def test_a_stale_confirmation_acts_on_nobody(operator: Visitor, server: Server, holder: tuple[Child, int, int]) -> None:
    child, slot, token = holder
    operator.lock()
    operator.press(f"revoke {slot} {token}")
    child.send()
    child.expect("released")
    with Child("hold", server.alias, "reports", 3) as other:
        assert other.expect("held").split()[0] == str(slot)
        operator.confirm(f"The holder of reports slot {slot} has changed since it was shown", f"pid {other.pid}")
        row = slot_row("default", slot=slot)
        assert (row.pid, row.revoked_token) == (other.pid, None)
        other.send()
        other.expect("released")


@pytest.mark.parametrize(
    ("codenames", "buttons", "actions"),
    [
        ((), [], []),
        (("stop_semaphorerow",), ["stop 1 7"], ["stop"]),
        (("revoke_semaphorerow",), ["revoke 1 7"], ["revoke", "purge_stale"]),
        (("configure_semaphorerow",), ["set_slots", "pause"], ["set_slots", "undo_slots", "pause", "resume"]),
    ],
    ids=["view", "stop", "revoke", "configure"],
)
def test_permissions(
    server: Server, visit: Callable[..., Visitor], codenames: tuple[str, ...], buttons: list[str], actions: list[str]
) -> None:
    """What is not allowed has no button, and is refused to who sends it all the same."""
    make_semaphore("default")
    hold("default")
    visitor = visit(server, "view_semaphorerow", *codenames)
    page = visitor.lock()
    shown = [button.get_attribute("value") for button in page.locator("button[name=do]").all()]
    assert sorted(shown) == sorted(buttons)  # type: ignore[type-var]
    cookie = next(each["value"] for each in visitor.context.cookies() if each["name"] == "csrftoken") if shown else ""
    page = visitor.overview()
    offered = [option.get_attribute("value") for option in page.locator("select[name=action] option").all()]
    assert sorted(filter(None, offered)) == sorted(actions)
    forbidden = {"stop 1 7", "revoke 1 7", "purge_stale", "set_slots", "pause", "drain"} - {*buttons, *actions}
    for act in sorted(forbidden):
        sent = {"do": act, "csrfmiddlewaretoken": cookie}
        assert page.request.post(address(view="act"), form=sent).status == 403, act
    row = slot_row("default")
    assert (lock().paused, lock().operator_slots, row.stop_token, row.revoked_token) == (False, None, None, None)


def reach(page: Page, selector: str, *, backwards: bool = False) -> None:
    """Press Tab until the focus is on it."""
    for _ in range(200):
        page.keyboard.press("Shift+Tab" if backwards else "Tab")
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{selector} cannot be reached by the keyboard")


def test_by_keyboard_alone(operator: Visitor, holder: tuple[Child, int, int]) -> None:
    _child, slot, token = holder
    page = operator.overview()
    reach(page, f'#sqlsem-live a[href*="{key()}"]')
    page.keyboard.press("Enter")
    expect(page.locator("#sqlsem-acts")).to_have_count(1)
    button = f'button[value="revoke {slot} {token}"]'
    reach(page, button)
    outline = page.locator(button).evaluate("(button) => getComputedStyle(button).outlineStyle")
    assert outline != "none", "the focus cannot be seen"
    page.keyboard.press("Enter")
    expect(page.locator("input[name=confirmed]")).to_have_count(1)
    reach(page, "input[type=submit]")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Revoked 1 permit.").first).to_be_visible()
    assert slot_row("default", slot=slot).revoked_token == token


def test_without_javascript(server: Server, visit: Callable[..., Visitor], holder: tuple[Child, int, int]) -> None:
    child, slot, token = holder
    visitor = visit(server, java_script_enabled=False)
    page = visitor.overview()
    page.locator("#sqlsem-live").get_by_role("link", name="reports", exact=True).click()
    expect(page.locator("#content")).to_contain_text(str(child.pid))
    page.get_by_role("link", name="Refresh").click()
    visitor.press(f"stop {slot} {token}")
    visitor.confirm("Asked 1 holder to stop.")
    visitor.press("pause")
    visitor.confirm("Paused: reports.")
    assert lock().paused


def test_the_way_back(operator: Visitor) -> None:
    make_semaphore("default")
    page = operator.lock()
    operator.press("pause")
    page.get_by_role("link", name="No, take me back").click()
    page.wait_for_url(f"**{address()}")
    assert not lock().paused
