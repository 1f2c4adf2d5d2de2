from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections, transaction

from django_sqlsem import control, queries, semaphore
from django_sqlsem.backends import get_backend
from django_sqlsem.exceptions import AcquireTimeoutError, BackendError, PermitLostError
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow
from django_sqlsem.signals import operator_acted
from django_sqlsem.snapshots import LossReason
from tests.support import applocks
from tests.support.operators import hold, make_semaphore, slot_row, wait

pytestmark = pytest.mark.leaves_held


@pytest.fixture
def acted() -> Iterator[list[tuple[str, str, str, str]]]:
    seen: list[tuple[str, str, str, str]] = []

    def receiver(*, action: str, name: str, by: str, detail: str, **kwargs: Any) -> None:
        seen.append((action, name, by, detail))

    operator_acted.connect(receiver)
    yield seen
    operator_acted.disconnect(receiver)


def test_revoke_takes_the_slot_from_this_holder(database: str, acted: list[Any], caplog: Any) -> None:
    make_semaphore(database)
    hold(database, slot=1)
    hold(database, slot=2, token=8)
    with caplog.at_level(logging.INFO, "django_sqlsem"):
        (revoked,) = control.revoke("reports", 1, 7, by="ann", kill=applocks.are_at(database), using=database)
    assert (revoked.name, revoked.slot, revoked.token, revoked.host) == ("reports", 1, 7, "web1")
    row = slot_row(database, slot=1)
    if applocks.are_at(database):  # the row is for the holder, or whoever is next, to see to
        assert (row.revoked_token, row.revoked_by) == (7, "ann")
    else:
        assert (row.expires_us, row.permit_id, row.revoked_token, row.revoked_by) == (None, None, 7, "ann")
    assert slot_row(database, slot=2).permit_id
    assert [action[:3] for action in acted] == [("revoke", "reports", "ann")]
    assert "web1 pid 4711" in acted[0][3]
    assert [(record.levelname, record.name) for record in caplog.records] == [("WARNING", "django_sqlsem")]


def test_revoke_disturbs_nobody_else(database: str, acted: list[Any]) -> None:
    make_semaphore(database)
    hold(database, slot=1, token=8)
    assert control.revoke("reports", 1, 7, by="ann", using=database) == []
    assert control.revoke("reports", 2, 7, by="ann", using=database) == []
    assert control.revoke("reports", 9, 7, by="ann", using=database) == []
    assert control.revoke("unknown", 1, 7, by="ann", using=database) == []
    row = slot_row(database)
    assert (row.token, row.revoked_token, row.revoked_by) == (8, None, "")
    assert row.permit_id
    assert acted == []


def test_revoke_all_and_expired_ones_too(database: str) -> None:
    make_semaphore(database)
    hold(database, slot=1)
    hold(database, slot=3, left=-5)
    revoked = control.revoke("reports", by="b" * 200, kill=applocks.are_at(database), using=database)
    assert [holder.slot for holder in revoked] == [1, 3]
    assert slot_row(database, slot=1).revoked_by == "b" * 150
    assert slot_row(database, slot=3).revoked_by == ("" if applocks.are_at(database) else "b" * 150)
    if applocks.are_at(database):  # the row of a session that was ended is stale
        assert [holder.slot for holder in control.revoke("reports", by="ann", using=database)] == [1]
    assert control.revoke("reports", by="ann", using=database) == []


def test_any_slot_of_who_has_them_all_means_that_one(database: str) -> None:
    permit = semaphore("reports", slots=2, using=database).exclusive()
    (asked,) = control.request_stop("reports", 2, by="ann", using=database)
    (revoked,) = control.revoke("reports", 2, by="ann", kill=applocks.are_at(database), using=database)
    assert asked.token == revoked.token == permit.token
    assert all(holder.expired for holder in queries.holders(using=database))
    permit.release()


def test_a_token_needs_its_slot() -> None:
    with pytest.raises(ValueError, match="give the slot too"):
        control.revoke("reports", token=7, by="ann")


@pytest.mark.rows_only("lease")
def test_purge_does_what_the_plan_says(database: str, acted: list[Any]) -> None:
    make_semaphore(database)
    hold(database, slot=1, left=-5, age=65)
    hold(database, slot=2, left=20)
    hold(database, slot=3, left=50)
    make_semaphore(database, "calm", slots=1)
    SlotRow.objects.using(database).filter(semaphore__name="calm").update(token=1)
    plan = control.plan_purge(using=database)
    assert [holder.slot for holder in plan.slots] == [1]
    assert [holder.slot for holder in plan.pending] == [2]
    assert plan.names == ()
    result = control.execute_purge(plan, by="ann")
    assert [holder.slot for holder in result.freed] == [1]
    assert result.changed == ()
    assert slot_row(database, slot=1).expires_us is None
    assert slot_row(database, slot=1).revoked_token is None
    assert slot_row(database, slot=2).expires_us is not None
    assert [action[:3] for action in acted] == [("purge", "reports", "ann")]
    assert not control.plan_purge(using=database)


def test_purge_leaves_who_came_back_alone(database: str) -> None:
    make_semaphore(database)
    for slot in (1, 2, 3):
        hold(database, slot=slot, left=-5)
    plan = control.plan_purge(using=database)
    assert len(plan.slots) == 3
    hold(database, slot=1, left=60)  # renewed late
    hold(database, slot=2, left=60, token=8)  # taken over
    result = control.execute_purge(plan, by="ann")
    assert [holder.slot for holder in result.changed] == [1, 2]
    assert [holder.slot for holder in result.freed] == [3]
    assert queries.semaphore("reports", using=database).held == 2  # type: ignore[union-attr]


@pytest.mark.rows_only("lease")
def test_purge_older_than(database: str) -> None:
    make_semaphore(database)
    hold(database, slot=1, left=-5)
    hold(database, slot=2, left=-7300)
    plan = control.plan_purge(older_than=datetime.timedelta(hours=2), using=database)
    assert [holder.slot for holder in plan.slots] == [2]
    plan = control.plan_purge(name_glob="other*", using=database)
    assert not plan
    assert not control.plan_purge(name_glob="\x00", using=database)
    with pytest.raises(ValueError, match="older_than must be"):
        control.plan_purge(older_than=-1, using=database)


def test_purge_idle_names(database: str) -> None:
    for name in ("calm", "gone", "held", "waited", "paused", "set", "fresh"):
        make_semaphore(database, name, slots=2, paused=name == "paused", operator_slots=4 if name == "set" else None)
        hold(database, name, slot=1, age=100)
    SlotRow.objects.using(database).exclude(semaphore__name="held").update(expires_us=None, permit_id=None)
    for name in ("calm", "gone", "waited", "paused", "set", "fresh"):
        applocks.let_go_of(database, name, 1)
    hold(database, "fresh", slot=2, age=1)
    SlotRow.objects.using(database).filter(semaphore__name="fresh").update(expires_us=None)
    applocks.let_go_of(database, "fresh", 2)
    hold(database, "gone", slot=2, age=100, left=-1)
    wait(database, "waited")
    wait(database, "calm", left=-1)
    plan = control.plan_purge(idle=60, using=database)
    assert [found.name for found in plan.names] == ["calm", "gone"]
    assert [holder.name for holder in plan.slots] == ["gone"]
    result = control.execute_purge(plan, by="ann")
    assert result.deleted == ("calm", "gone")
    left = {"held", "waited", "paused", "set", "fresh"}
    assert set(SemaphoreRow.objects.using(database).values_list("name", flat=True)) == left
    assert SlotRow.objects.using(database).count() == 2 * len(left)
    assert WaiterRow.objects.using(database).count() == 1


@pytest.mark.parametrize(
    "use", ["held", pytest.param("waited", marks=pytest.mark.rows_only("row queue")), "paused", "set"]
)
def test_an_idle_name_that_is_used_again_stays(database: str, use: str) -> None:
    make_semaphore(database)
    hold(database, slot=1, age=100, left=-1)
    plan = control.plan_purge(stale=False, idle=0, using=database)
    assert [found.name for found in plan.names] == ["reports"]
    if use == "held":
        hold(database, slot=2)
    elif use == "waited":
        wait(database)
    elif use == "paused":
        control.pause("reports", by="ann", using=database)
    else:
        control.set_slots("reports", 2, by="ann", using=database)
    result = control.execute_purge(plan, by="ann")
    assert result.in_use == ("reports",)
    assert SlotRow.objects.using(database).count() == 3
    assert slot_row(database).expires_us is not None


@pytest.mark.rows_only("slot rows")
def test_set_slots(database: str, acted: list[Any]) -> None:
    make_semaphore(database, slots=3)
    hold(database, slot=3)

    def state() -> tuple[Any, ...]:
        row = SemaphoreRow.objects.using(database).get()
        slots = SlotRow.objects.using(database).order_by("slot").values_list("slot", "closed")
        return row.operator_slots, row.shrinking, [slot for slot, closed in slots if not closed], len(slots)

    assert control.set_slots("reports", 5, by="ann", using=database)
    assert state() == (5, False, [1, 2, 3, 4, 5], 5)
    assert control.set_slots("reports", 2, by="ann", using=database)
    assert state() == (2, True, [1, 2], 5)
    found = queries.semaphore("reports", using=database)
    assert found is not None
    assert (found.slots, found.held, [holder.slot for holder in found.holders]) == (2, 1, [3])
    assert control.set_slots("reports", 4, by="ann", using=database)
    assert state() == (4, False, [1, 2, 3, 4], 5)
    assert control.set_slots("reports", None, by="ann", using=database)
    assert state() == (None, False, [1, 2, 3, 4, 5], 5)
    assert not control.set_slots("unknown", 2, by="ann", using=database)
    assert [action[3] for action in acted] == ["5 slots", "2 slots", "4 slots", "as declared by the code"]


def test_a_mutex_has_one_slot(database: str) -> None:
    make_semaphore(database, slots=1, kind="mutex")
    with pytest.raises(ValueError, match="'reports' is a mutex"):
        control.set_slots("reports", 2, by="ann", using=database)
    assert SemaphoreRow.objects.using(database).get().operator_slots is None
    assert control.set_slots("reports", 1, by="ann", using=database)
    assert control.set_slots("reports", None, by="ann", using=database)


@pytest.mark.parametrize("slots", [0, -1, 10_001, True, "3", 2.0])
def test_bad_numbers_of_slots(slots: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="slots must be"):
        control.set_slots("reports", slots, by="ann")


def test_pause_and_resume(database: str, acted: list[Any]) -> None:
    make_semaphore(database)
    hold(database)
    assert control.pause("reports", by="ann", using=database)
    found = queries.semaphore("reports", using=database)
    assert found is not None
    assert (found.paused, found.free, found.held) == (True, 0, 1)
    assert control.resume("reports", by="ann", using=database)
    assert not SemaphoreRow.objects.using(database).get().paused
    assert not control.pause("unknown", by="ann", using=database)
    assert [action[0] for action in acted] == ["pause", "resume"]


def test_who_acts_is_written_as_databases_take_it(database: str) -> None:
    make_semaphore(database)
    control.pause("reports", by="a\x00nn\ud800" + "n" * 200, using=database)
    control.set_slots("reports", 2, by="b\x00ob" + "b" * 200, using=database)
    row = SemaphoreRow.objects.using(database).get()
    assert (row.paused_by, row.slots_by) == ("ann?" + "n" * 146, "bob" + "b" * 147)
    assert [act.by for act in queries.events("reports", using=database)] == [row.slots_by, row.paused_by]


def test_a_failing_receiver_does_not_hide_the_act(database: str, caplog: Any) -> None:
    make_semaphore(database)

    def receiver(**kwargs: Any) -> None:
        raise RuntimeError("broken")

    operator_acted.connect(receiver)
    try:
        assert control.pause("reports", by="ann", using=database)
    finally:
        operator_acted.disconnect(receiver)
    assert any(record.exc_info and record.levelname == "ERROR" for record in caplog.records)


def test_a_database_error_is_a_backend_error(database: str) -> None:
    make_semaphore(database)
    backend = get_backend(database)
    with transaction.atomic(using=database):
        connections[database].needs_rollback = True
        with pytest.raises(BackendError, match="failed") as caught:
            backend.inspect()
    assert caught.value.__cause__ is not None


@pytest.mark.rows_only("slot rows")
def test_acts_wait_for_each_other(database: str) -> None:
    """Two operators shrink and grow at once, many times: what is closed always suits the number that won."""
    make_semaphore(database)
    errors: list[BaseException] = []

    def act(slots: int) -> None:
        try:
            for _ in range(15):
                control.set_slots("reports", slots, by="ann", using=database)
        except BaseException as error:
            errors.append(error)
        finally:
            connections[database].close()

    threads = [threading.Thread(target=act, args=(slots,)) for slots in (1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    slots = SemaphoreRow.objects.using(database).get().operator_slots
    opened = SlotRow.objects.using(database).filter(closed=False).values_list("slot", flat=True)
    assert sorted(opened) == list(range(1, slots + 1))


def test_revoking_one_permit_from_many_threads_happens_once(database: str) -> None:
    make_semaphore(database)
    hold(database)
    barrier = threading.Barrier(4)
    revoked: list[Any] = []

    def act() -> None:
        barrier.wait()
        try:
            kill = applocks.are_at(database)
            revoked.extend(control.revoke("reports", 1, 7, by="ann", kill=kill, using=database))
        finally:
            connections[database].close()

    threads = [threading.Thread(target=act) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(revoked) == 1


# With real holders.


def test_a_revoked_permit_is_lost_and_disturbs_nobody(database: str) -> None:
    reports = semaphore("reports", slots=1, lease=2.0, using=database)
    lost: list[Any] = []
    permit = reports.acquire()
    permit.on_lost(lost.append)
    kill = applocks.are_at(database)
    (revoked,) = control.revoke("reports", 1, permit.token, by="ann", kill=kill, using=database)
    assert revoked.token == permit.token
    deadline = time.monotonic() + (5.0 if kill else 1.0)  # by a renewal, or by a heartbeat
    while permit.lost is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert permit.lost is not None
    assert (permit.lost.reason, permit.lost.by) == (LossReason.REVOKED, "ann")
    with pytest.raises(PermitLostError):
        permit.check()
    permit.release()
    with reports.acquire(timeout=2) as second:
        permit.release()
        second.check()
        (holder,) = queries.holders(using=database)
        assert holder.token == second.token
    assert queries.holders(using=database) == []
    assert len(lost) == 1


def test_slots_and_pauses_count_at_once(database: str) -> None:
    reports = semaphore("reports", slots=1, using=database)

    def can_acquire() -> bool:
        permits = []

        def acquire() -> None:
            permit = reports.try_acquire()
            if permit:
                permits.append(permit)

        thread = threading.Thread(target=acquire)
        thread.start()
        thread.join()
        for permit in permits:
            permit.release()
        return bool(permits)

    with reports.acquire():
        assert not can_acquire()
        control.set_slots("reports", 2, by="ann", using=database)
        assert can_acquire()
        control.pause("reports", by="ann", using=database)
        assert not can_acquire()
        control.resume("reports", by="ann", using=database)
        assert can_acquire()
        control.set_slots("reports", 1, by="ann", using=database)
        assert not can_acquire()
    assert can_acquire()
    control.pause("reports", by="ann", using=database)
    with pytest.raises(AcquireTimeoutError):
        reports.acquire(timeout=0)


def test_a_purged_name_is_made_again(database: str) -> None:
    reports = semaphore("reports", slots=2, using=database)
    with reports.acquire():
        assert not control.plan_purge(idle=0, using=database)
    plan = control.plan_purge(idle=0, using=database)
    assert control.execute_purge(plan, by="ann").deleted == ("reports",)
    assert SlotRow.objects.using(database).count() == 0
    with reports.acquire() as permit:
        assert permit.slot == 1


def test_operators_and_holders_at_once(database: str) -> None:
    """Everything an operator can do, amid contention: no error, never too many, and nothing held at the end."""
    stop = threading.Event()
    errors: list[BaseException] = []
    granted = []

    def keep(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                while not stop.is_set():
                    work()
            except BaseException as error:
                errors.append(error)
                stop.set()
            finally:
                connections[database].close()

        return run

    def use() -> None:
        permit = semaphore("reports", slots=3, using=database).try_acquire()
        if permit:
            time.sleep(0.002)
            granted.append(permit.token)
            permit.release()

    def operate() -> None:
        by, using = "ann", database
        control.set_slots("reports", 1, by=by, using=using)
        control.revoke("reports", by=by, using=using)
        control.set_slots("reports", None, by=by, using=using)
        control.execute_purge(control.plan_purge(idle=0, using=using), by=by)
        control.pause("reports", by=by, using=using)
        control.resume("reports", by=by, using=using)
        found = queries.semaphore("reports", using=using)
        assert found is None or found.held <= 3

    threads = [threading.Thread(target=keep(work)) for work in (use, use, use, operate, operate)]
    for thread in threads:
        thread.start()
    stop.wait(3)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert granted
    assert queries.holders(using=database) == []
