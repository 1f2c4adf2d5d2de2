from __future__ import annotations

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_sqlsem import queries
from django_sqlsem.core import names as core_names
from django_sqlsem.models import SemaphoreRow, SlotRow
from django_sqlsem.snapshots import SlotState
from tests.support import applocks
from tests.support.operators import hold, make_semaphore, now_us, wait

pytestmark = pytest.mark.leaves_held


@pytest.mark.rows_only("lease")
def test_snapshot_of_a_semaphore(database: str) -> None:
    make_semaphore(database)
    hold(database, slot=1, age=10, left=50)
    hold(database, slot=2, age=100, left=-5, host="web9", token=8)
    hold(database, slot=3, age=70, left=20)
    wait(database, age=9, waiting=2)
    wait(database, age=3, waiting=1)
    wait(database, age=30, left=-1)
    found = queries.semaphore("reports", using=database)
    assert found is not None
    assert (found.name, found.kind, found.slots, found.declared_slots) == ("reports", "semaphore", 3, 3)
    assert (found.held, found.stale, found.free, found.waiting) == (2, 2, 1, 3)
    assert [holder.state for holder in found.holders] == [SlotState.HELD, SlotState.STALE, SlotState.STALE]
    first = found.holders[0]
    assert (first.slot, first.token, first.host, first.pid) == (1, 7, "web1", 4711)
    assert (first.thread, first.label, first.user) == ("MainThread", "GET /reports/", "ann")
    assert first.age == pytest.approx(10, abs=1)
    assert first.lease_left == pytest.approx(50, abs=1)
    assert (first.expires_at - first.acquired_at).total_seconds() == pytest.approx(60, abs=0.01)
    assert found.holders[1].expired
    assert not found.holders[2].expired
    assert [waiter.age for waiter in found.waiters] == pytest.approx([9, 3], abs=1)
    assert found.idle == pytest.approx(10, abs=1)


def test_names_are_exact(database: str) -> None:
    names = ["a", "A", "a ", " a", "ä", "a\u0308", "ß", "ss", "a\n", "İ", "𝔞", "a%", "a_"]
    for name in names:
        make_semaphore(database, name, slots=1)
    assert [found.name for found in queries.semaphores(using=database)] == sorted(names)
    for name in names:
        found = queries.semaphore(name, using=database)
        assert found is not None
        assert found.name == name
        prefixed = [each.name for each in queries.semaphores(f"{name}*", using=database)]
        assert prefixed == sorted(each for each in names if each.startswith(name))


def test_globs_are_case_sensitive(database: str) -> None:
    for name in ("sync:1", "sync:2", "Sync:1", "sync:10", "sync*", "other"):
        make_semaphore(database, name, slots=1)

    def names(glob: str) -> list[str]:
        return [found.name for found in queries.semaphores(glob, using=database)]

    assert names("sync:*") == ["sync:1", "sync:10", "sync:2"]
    assert names("sync:?") == ["sync:1", "sync:2"]
    assert names("*:1") == ["Sync:1", "sync:1"]
    assert names("[sS]ync:1") == ["Sync:1", "sync:1"]
    assert names("sync[*]") == ["sync*"]
    assert names("other") == ["other"]
    assert names("nothing*") == []
    assert names("\x00*") == []
    assert names("\ud800*") == []


def test_states(database: str) -> None:
    for name in ("held", "gone", "busy", "calm", "stopped"):
        make_semaphore(database, name, slots=1, paused=name == "stopped")
    hold(database, "held")
    hold(database, "gone", left=-1)
    hold(database, "busy")
    wait(database, "busy")

    def names(state: queries.State) -> list[str]:
        return [found.name for found in queries.semaphores(state=state, using=database)]

    assert names("held") == ["busy", "held"]
    assert names("stale") == ["gone"]
    assert names("waiting") == ["busy"]
    assert names("free") == ["calm", "gone"]
    assert names("paused") == ["stopped"]
    with pytest.raises(ValueError, match="state must be one of held, stale"):
        queries.semaphores(state="odd", using=database)  # type: ignore[arg-type]


def test_holders(database: str) -> None:
    make_semaphore(database)
    make_semaphore(database, "other", slots=1)
    hold(database, slot=2)
    hold(database, slot=1, left=-1)
    hold(database, "other")
    assert [(h.name, h.slot) for h in queries.holders(using=database)] == [("other", 1), ("reports", 1), ("reports", 2)]
    assert [(h.name, h.slot) for h in queries.holders("r*", state="held", using=database)] == [("reports", 2)]
    assert [(h.name, h.slot) for h in queries.holders(state="stale", using=database)] == [("reports", 1)]


def test_the_number_of_queries_does_not_grow(database: str) -> None:
    for number in range(40):
        make_semaphore(database, f"name-{number}", slots=2)
        hold(database, f"name-{number}", left=-5 if applocks.are_at(database) else 5)

    def count(*names: str) -> int:
        with CaptureQueriesContext(connections[database]) as captured:
            found = queries.by_name(names, using=database) if names else queries.semaphores(using=database)
        assert found
        return len(captured)

    clock = 0 if connections[database].vendor in ("sqlite", "microsoft") else 1
    count("name-1")  # who may see the server's views has found out by now
    assert count("name-1") == 3 + clock
    assert count(*[f"name-{number}" for number in range(40)]) == 3 + clock
    assert count() == 3 + clock


def test_many_names_at_once(database: str) -> None:
    make_semaphore(database, "known", slots=1)
    found = queries.by_name(["known", *(f"unknown-{number}" for number in range(1200))], using=database)
    assert list(found) == ["known"]
    assert queries.by_name([], using=database) == {}
    assert queries.semaphore("unknown", using=database) is None


@pytest.mark.parametrize("name", ["", "x" * 201, "a\x00b", "\ud800"])
def test_impossible_names(name: str) -> None:
    with pytest.raises(ValueError, match="A semaphore's name must"):
        queries.semaphore(name)


def test_an_operators_number_and_a_disagreement(database: str) -> None:
    make_semaphore(database, operator_slots=5, other_slots=4, other_us=now_us(database) - 1_000_000)
    found = queries.semaphore("reports", using=database)
    assert found is not None
    assert (found.slots, found.declared_slots, found.operator_slots, found.other_declared_slots) == (5, 3, 5, 4)
    SemaphoreRow.objects.using(database).update(other_us=now_us(database) - 7_200_000_000)
    found = queries.semaphore("reports", using=database)
    assert found is not None
    assert found.other_declared_slots is None


def test_never_granted_is_never_idle(database: str) -> None:
    make_semaphore(database)
    found = queries.semaphore("reports", using=database)
    assert found is not None
    assert found.idle is None


def test_rows_of_an_earlier_boot_are_stale(committed: None) -> None:
    make_semaphore("default")
    hold("default", slot=1, left=50, boot_id="another boot")
    SlotRow.objects.using("default").filter(slot=2).update(
        acquired_us=now_us("default") + 10**9, boot_id="another boot"
    )
    found = queries.semaphore("reports", using="default")
    assert found is not None
    (holder,) = found.holders
    assert holder.expired
    assert holder.state is SlotState.STALE
    assert holder.age == pytest.approx(now_us("default") / 1e6, abs=5)
    assert found.idle == pytest.approx(now_us("default") / 1e6, abs=5)


def test_literal_prefix() -> None:
    assert core_names.literal_prefix(None) == ""
    assert core_names.literal_prefix("sync:*") == "sync:"
    assert core_names.literal_prefix("a?b*") == "a"
    assert core_names.literal_prefix("[ab]") == ""
    assert core_names.literal_prefix("plain") == "plain"
