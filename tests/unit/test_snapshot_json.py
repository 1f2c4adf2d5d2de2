"""The overview and one lock as JSON: the numbers of the pages and of the command, under the same permissions."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client
from django.urls import reverse

from tests.support.databases import without_tables
from tests.support.operators import hold, make_semaphore, wait
from tests.unit.test_admin import key, login

pytestmark = [pytest.mark.leaves_held, pytest.mark.process_side]

ALL = "admin:sqlsem_semaphorerow_snapshots"
ONE = "admin:sqlsem_semaphorerow_snapshot"
JSON = {"Accept": "application/json"}
#: What changes from one moment to the next.
MOVING = {"age", "idle", "lease_left", "acquired_at", "expires_at", "waiting_since", "longest_hold", "longest_wait",
          "utilisation"}  # fmt: skip


@pytest.fixture
def viewer(locks_alias: str) -> Client:
    return login("viewer", "view_semaphorerow")


def still(data: Any) -> Any:
    """Return the data without what changes by itself."""
    if isinstance(data, dict):
        return {name: still(value) for name, value in data.items() if name not in MOVING}
    return [still(each) for each in data] if isinstance(data, list) else data


def test_a_page(viewer: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    make_semaphore(locks_alias, "calm", slots=1, paused=True)
    hold(locks_alias, left=600)
    wait(locks_alias, left=600)
    response = viewer.get(reverse(ALL), headers=JSON)
    assert (response.status_code, response["Content-Type"]) == (200, "application/json")
    assert "no-store" in response["Cache-Control"]
    found = response.json()
    assert found["database"] == locks_alias
    assert found["page"] == {"number": 1, "pages": 1, "per_page": 50, "names": 2, "templates": 0}
    assert found["totals"] == {"held": 1, "stale": 0, "waiting": 2, "paused": 1, "draining": 0}
    assert found["deadlocks"] == []
    first, second = found["semaphores"]
    assert (first["name"], first["held"], first["waiting"], first["draining"]) == ("reports", 1, 2, False)
    assert (first["holders"][0]["token"], first["deadlocked"]) == (7, False)
    assert set(first["last_hour"]) == {
        "granted", "released", "turned_away", "lost", "utilisation", "longest_hold", "longest_wait",
    }  # fmt: skip
    assert (second["name"], second["paused"]) == ("calm", True)
    only = viewer.get(reverse(ALL), {"state": "paused"}).json()
    assert [each["name"] for each in only["semaphores"]] == ["calm"]
    assert viewer.get(reverse(ALL), {"no_such": "1"}, headers=JSON).status_code == 400


def test_one_lock_and_the_command_say_the_same(viewer: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    hold(locks_alias, left=600)
    wait(locks_alias, left=600)
    one = viewer.get(reverse(ONE, args=[key()]), headers=JSON).json()
    (listed,) = viewer.get(reverse(ALL), headers=JSON).json()["semaphores"]
    out = io.StringIO()
    call_command("locks", "list", "--format", "json", "--database", locks_alias, stdout=out)
    (told,) = json.loads(out.getvalue())
    out = io.StringIO()
    call_command("locks", "show", "reports", "--format", "json", "--database", locks_alias, stdout=out)
    assert still(one) == still(listed) == still(told) == still(json.loads(out.getvalue()))
    assert list(one) == list(listed) == list(told)
    assert viewer.get(reverse(ONE, args=["x" * 32]), headers=JSON).status_code == 404


def test_permissions(viewer: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    for url in (reverse(ALL), reverse(ONE, args=[key()])):
        for client in (Client(), login(f"customer of {len(url)}")):
            refused = client.get(url, headers=JSON)
            assert refused.status_code == 403
            assert "error" in refused.json()
            assert "no-store" in refused["Cache-Control"]
        anonymous = Client().get(url)
        assert anonymous.status_code == 302
        assert anonymous["Location"].startswith(reverse("admin:login"))
        posted = viewer.post(url, headers=JSON)
        assert (posted.status_code, posted["Allow"]) == (405, "GET, HEAD")


def test_a_failing_database(viewer: Client, locks_alias: str) -> None:
    make_semaphore(locks_alias)
    with without_tables(locks_alias, "sqlsem_waiter"):
        for url in (reverse(ALL), reverse(ONE, args=[key()])):
            response = viewer.get(url, headers=JSON)
            assert response.status_code == 503
            assert "could not be read" in response.json()["error"]
