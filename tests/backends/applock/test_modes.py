"""Kinds of locks beside what T-SQL programs take themselves: the article's rlock, its semaphore, and plain modes."""

from __future__ import annotations

import threading

import pytest

from django_sqlsem import (
    AcquireTimeoutError,
    PermitLostError,
    queries,
    semaphore,
)
from django_sqlsem.backends.applock.backend import ApplockBackend
from django_sqlsem.locks import rlock, rwlock
from django_sqlsem.models import WaiterRow
from tests.backends.applock import counting_semaphore
from tests.backends.applock.plain import ALIAS, LONG, Request, Session, skip_unless_covered, works
from tests.support import tds
from tests.support.threads import run_in_threads, wait_until

skip_unless_covered()

#: The procedures of the article on monitors, as it prints them.
MONITOR_ENTER = """
create procedure dbo.MonitorEnter (@SyncObject nvarchar(255))
as
begin
    declare @ret int
    exec @ret = sp_getapplock @Resource = @SyncObject, @LockMode = 'Exclusive', @LockOwner = 'Session'
    return @ret
end
"""
MONITOR_EXIT = """
create procedure dbo.MonitorExit(@SyncObject nvarchar(255))
as
begin
    begin try
        exec sp_releaseapplock @Resource = @SyncObject, @LockOwner = 'Session'
    end try
    begin catch
        -- I don't care exceptions here
    end catch
end
"""
#: Of a thread or a server that may be slow, in seconds.
PATIENT = 60.0


@pytest.fixture
def one(committed):
    session = Session()
    yield session
    session.close()


@pytest.fixture
def two(committed):
    session = Session()
    yield session
    session.close()


@pytest.fixture
def window(one):
    """A query window in which the article's procedures are installed."""
    for name, text in (("MonitorEnter", MONITOR_ENTER), ("MonitorExit", MONITOR_EXIT)):
        if one.value(f"SELECT OBJECT_ID(N'dbo.{name}')") is None:
            one.do(text)
    return one


def in_a_thread(work):
    """Run it in a thread. Returns the thread, and the list that gets its permit, or its error."""
    found = []

    def body():
        try:
            permit = work()
            if permit is not None:
                permit.detach()
            found.append(permit)
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, found


def test_the_articles_monitor_and_ours_exclude_one_another(window, two):
    lock = rlock("Code 1", timeout=0, using=ALIAS)
    window.do("exec MonitorEnter 'Code 1'")
    with pytest.raises(AcquireTimeoutError):
        lock.acquire()
    thread, found = in_a_thread(lambda: lock.acquire(timeout=PATIENT))
    wait_until(lambda: lock.status().waiting == 1, timeout=PATIENT)
    assert found == []
    window.do("exec MonitorExit 'Code 1'")
    thread.join(PATIENT)
    (permit,) = found
    permit.check()
    # Now the other way: the window waits until we leave.
    request, entered = in_a_thread(lambda: window.do("exec MonitorEnter 'Code 1'"))
    wait_until(lambda: works(window.spid, two), timeout=PATIENT)
    request.join(0.1)
    assert entered == []
    assert lock.status().held == 1
    permit.release()
    request.join(PATIENT)
    assert entered == [None]
    with pytest.raises(AcquireTimeoutError):
        lock.acquire()
    window.do("exec MonitorExit 'Code 1'")
    with lock, lock:
        assert lock.depth() == 2


def test_who_drains_keeps_out_the_articles_semaphore(one):
    shared = semaphore("Code 2", 2, timeout=0, using=ALIAS)
    counting_semaphore.create(ALIAS)
    caller = counting_semaphore.Caller(ALIAS)
    slot = caller.acquire("Code 2", 2)
    shared.acquire().release()
    with pytest.raises(AcquireTimeoutError):
        shared.exclusive(timeout=0)
    thread, found = in_a_thread(lambda: shared.exclusive(timeout=PATIENT))
    wait_until(lambda: shared.status().waiting == 1, timeout=PATIENT)
    caller.release("Code 2", slot)
    thread.join(PATIENT)
    (permit,) = found
    assert permit.slots == (1, 2)
    assert one.get("Code 2", "IntentExclusive") == -1
    (holder,) = queries.semaphore("Code 2", using=ALIAS).holders
    assert holder.slots == (1, 2)
    permit.release()
    caller.release("Code 2", caller.acquire("Code 2", 2))
    caller.close()


def test_readers_share_the_name_with_plain_shared_locks_and_a_writer_does_not(one, two):
    lock = rwlock("prices", 3, using=ALIAS)
    assert one.get("prices", "Shared") == 0
    with lock.read(timeout=0):
        assert two.get("prices", "Shared") == 0
        assert two.release("prices") == 0
        assert two.get("prices", "IntentExclusive") == -1  # of a semaphore's holder
        assert run_in_threads(1, lambda _: lock.write(timeout=0).try_acquire()) == [None]
    thread, found = in_a_thread(lambda: lock.write(timeout=PATIENT).acquire())
    wait_until(lambda: [row.mode for row in WaiterRow.objects.using(ALIAS)] == ["whole"], timeout=PATIENT)
    assert lock.read(timeout=0).try_acquire() is None  # behind the writer
    assert one.release("prices") == 0
    thread.join(PATIENT)
    (permit,) = found
    assert permit.slots == (0, 1, 2, 3)
    assert lock.status().exclusive.slots == permit.slots
    assert lock.status().free == 0
    request = Request(two, "prices", "Shared", ms=LONG)
    permit.check()
    permit.release()
    assert request.result() >= 0
    assert two.release("prices") == 0
    assert tds.locked(ALIAS, ["prices", "0-prices"]) == [False, False]


def test_an_upgradable_reader_has_the_servers_update_mode(one, two):
    lock = rwlock("prices", 3, using=ALIAS)
    for mode in ("Update", "Exclusive"):
        assert one.get("prices", mode) == 0
        assert run_in_threads(1, lambda _: lock.upgradable(timeout=0).try_acquire()) == [None]
        assert one.release("prices") == 0
    permit = lock.upgradable(timeout=PATIENT).acquire()
    for mode, code in (("Shared", 0), ("Update", -1), ("Exclusive", -1), ("IntentExclusive", -1)):
        assert one.get("prices", mode) == code
    # A plain Shared lock is a reader as well: the upgrade waits for it.
    with pytest.raises(AcquireTimeoutError, match="have not left"):
        permit.upgrade(timeout=0)
    thread, found = in_a_thread(lambda: permit.upgrade(timeout=PATIENT))
    wait_until(lambda: [row.mode for row in WaiterRow.objects.using(ALIAS)] == ["upgrade"], timeout=PATIENT)
    wait_until(lambda: two.test("prices", "Shared") == 0, timeout=PATIENT)  # it would stand behind the upgrade
    assert one.release("prices") == 0
    thread.join(PATIENT)
    assert found == [permit]
    assert permit.upgraded
    assert one.get("prices", "Shared") == -1
    permit.downgrade()
    assert one.get("prices", "Shared") == 0
    assert one.get("prices", "Update") == -1
    assert one.release("prices") == 0
    permit.check()
    permit.release()
    assert tds.locked(ALIAS, ["prices", "0-prices"]) == [False, False]


def test_a_program_that_waits_to_write_takes_the_place_of_who_downgrades(one, two):
    """Between the two modes it comes first: whoever was the writer is told that it holds nothing any more."""
    lock = rwlock("prices", 3, using=ALIAS)
    lost = []
    for ends in ("downgrade", "release"):
        permit = lock.upgradable(timeout=PATIENT).acquire()
        permit.on_lost(lost.append)
        permit.upgrade(timeout=PATIENT)
        request = Request(one, "prices", "Exclusive").queued(two)
        if ends == "downgrade":
            with pytest.raises(PermitLostError, match="another program took the name"):
                permit.downgrade()
            permit.release()
            wait_until(lambda: lost == [permit], timeout=PATIENT)  # noqa: B023
        else:
            permit.release()
            assert permit.lost is None
        assert request.result() == 1
        assert one.release("prices") == 0
        assert tds.locked(ALIAS, ["prices", "0-prices"]) == [False, False]
        with lock.write(timeout=PATIENT):
            pass
    assert len(lost) == 1


def test_an_upgrade_that_has_given_up_keeps_no_reader_out(one, monkeypatch):
    """Not even for the moment in which its thread waits for somebody else who wants it."""
    lock = rwlock("given up", readers=5, using=ALIAS)
    reader = lock.read().acquire(timeout=PATIENT)
    reader.detach()

    def is_let_in(timeout):
        with pytest.raises(AcquireTimeoutError):
            permit.upgrade(timeout=0.5)
        run_in_threads(1, lambda _number: lock.read(timeout=timeout).acquire().release())

    with lock.upgradable() as permit:
        is_let_in(timeout=PATIENT)  # the first calls of a session are slow on a stand-in
        monkeypatch.setattr("django_sqlsem.backends.applock.line.SUCCESSION", 5.0)
        for _ in range(3):
            is_let_in(timeout=0)
    reader.release()


def test_who_tries_once_does_not_pass_an_upgrade_that_is_just_being_given_up(committed, monkeypatch):
    """The keeper is in the midst of it, however slow it is: whoever comes then sees to it as well."""
    lock = rwlock("being given up", readers=5, using=ALIAS)
    reader = lock.read().acquire(timeout=PATIENT)
    reader.detach()
    real = ApplockBackend.leave
    begun, go_on = threading.Event(), threading.Event()

    def leave(*args):
        if not begun.is_set():
            begun.set()
            assert go_on.wait(PATIENT)
        real(*args)

    monkeypatch.setattr("django_sqlsem.backends.applock.line.SUCCESSION", 2 * PATIENT)  # its thread does nothing
    with lock.upgradable(timeout=PATIENT) as permit:
        monkeypatch.setattr(ApplockBackend, "leave", leave)
        try:
            with pytest.raises(AcquireTimeoutError):
                permit.upgrade(timeout=0.5)
            assert begun.wait(PATIENT)
            run_in_threads(1, lambda _number: lock.read(timeout=0).acquire().release())
        finally:
            go_on.set()
    reader.release()


def test_a_killed_session_ends_an_upgrade_and_its_permit(one):
    lock = rwlock("prices", 3, using=ALIAS)
    permit = lock.upgradable(timeout=PATIENT).acquire()
    permit.upgrade(timeout=PATIENT)
    assert lock.status().exclusive.slots == (0, 1, 2, 3)
    (holder,) = queries.semaphore("prices", using=ALIAS).holders
    one.do(f"KILL {holder.session_id}")
    run_in_threads(1, lambda _: lock.read(timeout=PATIENT).acquire().release())
    wait_until(lambda: permit.lost, timeout=PATIENT)
    with pytest.raises(PermitLostError):
        permit.check()
    permit.release()
    assert tds.locked(ALIAS, ["prices", "0-prices"]) == [False, False]
