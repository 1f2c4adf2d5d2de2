"""The portable statements, which Oracle and SQL Server use, on the databases at hand.

A dialect of each database that has its clock, and is plain in everything else, is put in the place of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from django.db import connections

from django_sqlsem import (
    AcquireTimeoutError,
    control,
    mutex,
    semaphore,
)
from django_sqlsem.database import dialects, sessions
from django_sqlsem.database.dialects import Dialect, dialect_for
from django_sqlsem.locks import counter
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow
from django_sqlsem.snapshots import LossReason
from tests.support.databases import held_rows, query
from tests.support.statements import CountedSession
from tests.support.threads import run_in_threads, wait_until

pytestmark = [pytest.mark.rows_only("row statements"), pytest.mark.one_server("portable")]

#: How each statement begins that takes a slot.
TAKES = "UPDATE sqlsem_slot SET suspect_us = NULL, token"
PLAIN = (
    "returning",
    "skip_locked",
    "lock_skipping",
    "limit",
    "update_limit",
    "insert_ignore",
    "writing_ctes",
    "inserting_ctes",
    "unflushed",
    "arrays",
    "notifies",
)


def portable(vendor: str) -> type[Dialect]:
    """Return a vendor's dialect with the portable statements."""
    real = dialects._DIALECTS[vendor]
    # On PostgreSQL a conflict would abort the transaction; Oracle and SQL Server go on after one.
    plain = tuple(name for name in PLAIN if not (vendor == "postgresql" and name == "insert_ignore"))
    return type(f"Portable{real.__name__}", (real,), {name: getattr(Dialect, name) for name in plain})


@contextlib.contextmanager
def installed(vendor: str, dialect: type[Dialect]):
    """Make ``dialect`` the one of all databases of a vendor."""
    real = dialects._DIALECTS[vendor]
    _replace(vendor, dialect)
    try:
        yield
    finally:
        _replace(vendor, real)


def _replace(vendor: str, dialect: type[Dialect]) -> None:
    dialects._DIALECTS[vendor] = dialect
    dialects._dialect.cache_clear()
    for session in list(sessions._sessions):  # of keepers that earlier tests have left
        if session.is_open:
            session._dialect = dialect_for(session.connection)


@pytest.fixture
def plain(database):
    """An alias whose dialect is plain but for its clock."""
    vendor = connections[database].vendor
    with installed(vendor, portable(vendor)):
        dialect = dialect_for(connections[database])
        assert type(dialect).__name__.startswith("Portable")
        assert not any(getattr(dialect, name) for name in ("returning", "skip_locked", "update_limit"))
        yield database
        _stop_library()


def _stop_library() -> None:
    # The keepers' last statements are to be of the dialect that made what they end.
    from django_sqlsem import lifecycle

    lifecycle.stop_all()


def _take(lock, **options):
    permit = lock.acquire(**options)
    permit.detach()
    return permit


def test_grants_distinct_slots_and_refuses_one_more(plain):
    lock = semaphore("reports", slots=3, timeout=0, using=plain)
    permits = [_take(lock) for _ in range(3)]
    assert [permit.slot for permit in permits] == [1, 2, 3]
    assert lock.try_acquire() is None
    with pytest.raises(AcquireTimeoutError, match=r"No slot of 'reports' is free \(3 of 3 held\): slot 1: "):
        lock.acquire()
    permits[1].release()
    again = _take(lock)
    assert (again.slot, again.waited) == (2, 0)
    assert again.token > permits[1].token
    for permit in permits:
        permit.release()
    again.check()
    assert len(held_rows(plain)) == 1
    again.release()
    assert held_rows(plain) == []


def test_a_name_is_created_once_by_many(plain):
    lock = semaphore("new", slots=4, timeout=30, using=plain)
    permits = run_in_threads(8, lambda _: lock.acquire().release())
    assert permits == [None] * 8
    assert SemaphoreRow.objects.using(plain).filter(name="new").count() == 1
    slots = SlotRow.objects.using(plain).filter(semaphore__name="new").values_list("slot", flat=True)
    assert sorted(slots) == [1, 2, 3, 4]


def test_a_larger_number_creates_the_missing_slots(plain):
    small = _take(semaphore("grows", slots=1, timeout=0, using=plain))
    large = semaphore("grows", slots=3, timeout=0, using=plain)
    permits = [_take(large), _take(large)]
    assert sorted(permit.slot for permit in permits) == [2, 3]
    assert large.try_acquire() is None
    for permit in (small, *permits):
        permit.release()


def test_take_is_all_or_nothing(plain):
    pair = semaphore("gpu", slots=3, take=2, timeout=0, using=plain)
    one = semaphore("gpu", slots=3, timeout=0, using=plain)
    first = _take(pair)
    assert first.slots == (1, 2)
    assert len(set(first.tokens)) == 2 or first.tokens[0] == first.tokens[1]
    assert pair.try_acquire() is None
    single = _take(one)
    assert single.slot == 3
    first.release()
    second = _take(pair)
    assert second.slots == (1, 2)
    assert all(new > old for new, old in zip(second.tokens, first.tokens, strict=True))
    single.release()
    second.release()
    assert held_rows(plain) == []


def test_many_slots_at_once_under_contention(plain):
    inside, peaks, guard = [0], [], threading.Lock()

    def body(number):
        lock = semaphore("mixed", slots=4, take=number % 3 + 1, timeout=60, using=plain)
        for _ in range(3):
            with lock as permit:
                assert len(set(permit.slots)) == lock.take
                with guard:
                    inside[0] += lock.take
                    peaks.append(inside[0])
                time.sleep(0.005)
                permit.check()
                with guard:
                    inside[0] -= lock.take

    run_in_threads(6, body)
    assert max(peaks) <= 4
    assert held_rows(plain) == []


def test_never_more_than_slots(plain):
    lock = semaphore("busy", slots=3, timeout=60, using=plain)
    inside, peaks, guard = [0], [], threading.Lock()

    def body(_):
        for _ in range(5):
            with lock as permit:
                with guard:
                    inside[0] += 1
                    peaks.append(inside[0])
                time.sleep(0.005)
                permit.check()
                with guard:
                    inside[0] -= 1

    run_in_threads(12, body)
    assert max(peaks) <= 3
    assert held_rows(plain) == []
    assert not WaiterRow.objects.using(plain).exists()


def test_a_waiter_gets_what_is_given_back_and_newcomers_yield_to_it(plain):
    lock = mutex("queue", timeout=20, using=plain)
    held = _take(lock)
    granted = []

    def wait():
        permit = lock.acquire()
        granted.append(permit.waited)
        permit.release()
        connections.close_all()

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_until(lambda: lock.status().waiting == 1)
    row = WaiterRow.objects.using(plain).get()
    held.release()
    waiter.join(10)
    assert len(granted) == 1
    assert granted[0] > 0
    wait_until(lambda: not WaiterRow.objects.using(plain).exists())
    # Somebody waits elsewhere: a newcomer takes nothing, though the slot is free; one that barges does.
    row.pk, row.expires_us, row.process_id, row.beacon = None, row.expires_us + 1_500_000, "f" * 32, False
    row.ticket = "e" * 32  # the keeper may be about to look after the old one
    row.save(using=plain)
    assert lock.try_acquire() is None
    mutex("queue", fair=False, using=plain).try_acquire().release()
    # It was handed to that waiter, who does not confirm.
    assert not WaiterRow.objects.using(plain).exists()
    assert lock.try_acquire() is None
    (handed,) = held_rows(plain)
    assert (handed.process_id, handed.permit_id) == ("f" * 32, row.ticket)
    lock.acquire(timeout=4).release()


def test_a_wait_that_ends_in_vain_leaves_no_place(plain):
    lock = mutex("in vain", using=plain)
    held = _take(lock)
    with pytest.raises(AcquireTimeoutError, match=r"became free within 0.3 s \(1 of 1 held"):
        lock.acquire(timeout=0.3)
    wait_until(lambda: not WaiterRow.objects.using(plain).exists())
    held.release()


def test_renews_one_and_several(plain):
    with mutex("long", lease=1, using=plain) as one, semaphore("wide", 3, take=2, lease=1, using=plain) as two:
        time.sleep(2.5)
        one.check()
        two.check()
        assert len(held_rows(plain)) == 3


@pytest.mark.parametrize("take", [1, 2])
def test_a_revoked_permit_is_told_by_the_renewal_and_spares_the_next_holder(plain, take):
    lock = semaphore("revoked", slots=2, take=take, lease=1, timeout=0, using=plain)
    with semaphore("kept", lease=1, using=plain) as kept:
        permit = _take(lock)
        control.revoke("revoked", slot=1, by="ann", using=plain)
        wait_until(lambda: permit.lost, timeout=20)
        assert permit.lost.reason is LossReason.REVOKED
        assert permit.lost.by == "ann"
        successor = _take(semaphore("revoked", slots=2, timeout=0, using=plain))
        permit.release()
        successor.check()
        assert [row.slot for row in held_rows(plain) if row.semaphore.name == "revoked"] == [1]
        successor.release()
        kept.check()


def test_an_expired_slot_is_taken_over(plain):
    lock = mutex("expired", timeout=0, using=plain)
    lock.acquire().release()
    past = held_until_before_now(plain)
    SlotRow.objects.using(plain).update(expires_us=past, permit_id="f" * 32, boot_id=boot_id(plain))
    lock.acquire().release()


def held_until_before_now(alias: str) -> int:
    """Return an instant that has just passed, by the database's clock."""
    with connections[alias].cursor() as cursor:
        return dialect_for(connections[alias]).now(cursor) - 1000


def boot_id(alias: str) -> str:
    """Return the boot that rows are stamped with."""
    return dialect_for(connections[alias]).boot_id


def test_after_a_shrink_nothing_is_granted_until_enough_came_back(plain):
    lock = semaphore("shrinks", slots=3, timeout=0, using=plain)
    permits = [_take(lock) for _ in range(3)]
    assert control.set_slots("shrinks", 1, by="ann", using=plain)
    permits[0].release()
    assert lock.try_acquire() is None  # two are held, one is allowed
    permits[1].release()
    assert lock.try_acquire() is None
    permits[2].check()
    permits[2].release()
    last = _take(lock)
    assert last.slot == 1
    assert lock.try_acquire() is None
    assert not SemaphoreRow.objects.using(plain).get().shrinking
    assert control.set_slots("shrinks", None, by="ann", using=plain)
    second = _take(lock)
    last.release()
    second.release()


def test_a_pause_holds_everything_back(plain):
    lock = semaphore("paused", slots=2, timeout=0, using=plain)
    permit = _take(lock)
    control.pause("paused", by="ann", using=plain)
    assert lock.try_acquire() is None
    assert semaphore("paused", slots=2, take=2, timeout=0, using=plain).try_acquire() is None
    control.resume("paused", by="ann", using=plain)
    _take(lock).release()
    permit.release()


def test_a_slot_freed_while_two_are_taken_is_not_taken_too(database):
    vendor = connections[database].vendor
    if vendor == "sqlite":
        pytest.skip("SQLite has one writer: nobody gives back in between")
    lowest, between = [], []

    class Interleaved(portable(vendor)):
        """Has slot 1 given back after the claim of two."""

        def execute(self, cursor, sql, parameters):
            super().execute(cursor, sql, parameters)
            if sql.startswith(TAKES) and parameters.get("take") == 2 and lowest:
                row_id = lowest.pop()
                query(database, f"UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL WHERE id = {row_id}")
                between.append(row_id)

    with installed(vendor, Interleaved):
        first = _take(semaphore("gpu", slots=4, timeout=0, using=database))
        lowest.append(first._acquisition.grant.row_ids[0])
        permit = _take(semaphore("gpu", slots=4, take=2, timeout=0, using=database))
        assert between
        assert permit.slots == (2, 3)
        assert sorted(row.slot for row in held_rows(database)) == [2, 3]
        permit.release()
        assert held_rows(database) == []
        first.release()
        _stop_library()


def test_a_slot_revoked_before_it_is_read_back_is_no_grant(plain):
    """An operator may be faster than the second statement of a claim."""
    vendor = connections[plain].vendor
    revoke = [True]

    class Revoked(dialects._DIALECTS[vendor]):
        """Has the slot revoked between the claim and the look at what it got."""

        def execute(self, cursor, sql, parameters):
            super().execute(cursor, sql, parameters)
            if sql.startswith(TAKES) and cursor.rowcount and revoke:
                revoke.clear()
                query(plain, "UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL")

    lock = mutex("quick", timeout=5, using=plain)
    lock.acquire().release()
    with installed(vendor, Revoked):
        with lock as permit:
            permit.check()
        assert not revoke
        _stop_library()


def test_tokens(plain):
    jobs = counter("jobs", 1, using=plain)

    def wait_or_give(index):
        return jobs.acquire(2, timeout=30) if index else jobs.release(4)

    assert [taken and taken.count for taken in run_in_threads(3, wait_or_give)] == [None, 2, 2]
    assert jobs.value() == 1
    assert jobs.try_acquire(2) is None
    with pytest.raises(AcquireTimeoutError):
        jobs.acquire(2, timeout=0.8)  # longer than a heartbeat
    assert jobs.acquire(timeout=30).count == 1
    assert WaiterRow.objects.using(plain).count() == 0


def test_a_holder_is_asked_to_stop_and_its_renewals_tell_of_it(plain):
    """Where a renewal only tells how many rows it extended, and no locking select goes before it."""
    with semaphore("asked", slots=3, take=2, using=plain).acquire() as pair, mutex("other", using=plain).acquire():
        control.request_stop("asked", by="ann", using=plain)
        keeper = pair._acquisition.keeper
        keeper.renew_now(pair._acquisition)
        wait_until(lambda: pair.stop_requested, timeout=20)
        assert pair.stop_requested_by == "ann"
        renewed = pair.expires_at
        keeper.renew_now(pair._acquisition)
        wait_until(lambda: pair.expires_at > renewed, timeout=20)
        assert pair.lost is None


def test_no_locking_select_tells_of_wishes_either(plain, monkeypatch):
    """Databases that cannot pass over locked rows: a renewal extends, and then reads what it has extended."""
    monkeypatch.setattr(type(dialect_for(connections[plain])), "for_update", "")
    with mutex("asked", using=plain).acquire() as permit, mutex("other", using=plain).acquire() as other:
        backend, session, usual = permit._acquisition.keeper.backend, CountedSession(plain), 2

        def renewal():
            found = backend.renew(session, [permit._acquisition.acquired, other._acquisition.acquired])
            return dict(found.asked), session.sent()

        try:
            wait_until(lambda: renewal() == ({}, usual), timeout=20)
            control.request_stop("asked", by="ann", using=plain)
            wait_until(lambda: permit.stop_requested, timeout=20)
            # While its keeper is busy with the row, it may take one more.
            wait_until(lambda: renewal() == ({permit._acquisition.permit_id: "ann"}, usual), timeout=20)
        finally:
            session.close()
