"""A fenced transaction outlives the session that has the permit's locks: nobody comes in before it has ended."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
from django.db import Error, connections, transaction

from django_sqlsem import (
    PermitLostError,
    SemaphoreError,
    control,
    mutex,
    semaphore,
)
from django_sqlsem.database.sqlserver import lock_names
from django_sqlsem.locks import fenced, rwlock
from tests.backends.applock.plain import ALIAS, Session, is_there, skip_unless_covered
from tests.support import tds
from tests.support.threads import run_in_threads, wait_until
from tests.testapp.models import Probe

skip_unless_covered()
pytestmark = pytest.mark.usefixtures("committed")

PATIENT = 60.0
LOCK = "fenced"


@pytest.fixture
def plain():
    session = Session()
    yield session
    session.close()


def locks() -> dict[str, Any]:
    """The ways to take what has three slots at the most."""
    shared, rw = semaphore(LOCK, 2, using=ALIAS), rwlock(LOCK, 3, using=ALIAS)
    return {
        "slot": shared.acquire,
        "both": semaphore(LOCK, 2, take=2, using=ALIAS).acquire,
        "drain": shared.exclusive,
        "read": rw.read().acquire,
        "write": rw.write().acquire,
        "upgradable": rw.upgradable().acquire,
    }


def kill_session_of(permit: Any, plain: Session, *, wanted: bool = False) -> None:
    """End the session that has its locks, and wait until they are free, unless they are ``wanted`` by others."""
    session, holding = permit._acquisition.keeper.backend.pool.holder(permit._acquisition.permit_id)
    plain.do(f"KILL {session.session_id}")
    wait_until(lambda: not is_there(session.session_id, plain), timeout=PATIENT)
    resources = [] if wanted else [holding.names.slot(slot) for slot in holding.slots]
    wait_until(lambda: not any(tds.locked(ALIAS, resources)), timeout=PATIENT)


class Taker:
    """A thread that takes it, and keeps it until it is told."""

    def __init__(self, take: Any) -> None:
        self.got, self.done = threading.Event(), threading.Event()
        self.found: list[Any] = []
        self.thread = threading.Thread(target=self._run, args=(take,), daemon=True)
        self.thread.start()

    def _run(self, take: Any) -> None:
        try:
            with take(timeout=PATIENT) as permit:
                self.found.append(permit)
                self.got.set()
                self.done.wait(PATIENT)
        except Exception as error:
            self.found.append(error)
            self.got.set()
        finally:
            connections.close_all()

    def end(self) -> Any:
        """Return the permit that it got, once it has given it back."""
        assert self.got.wait(PATIENT)
        self.done.set()
        self.thread.join(PATIENT)
        (permit,) = self.found
        assert not isinstance(permit, Exception), permit
        return permit


#: Who was fenced, who waits, and who wants it at once: each of the two takes what the first one had, or all.
PAIRS = [
    ("slot", "both"),
    ("slot", "drain"),
    ("drain", "slot"),
    ("read", "write"),
    ("write", "read"),
    ("write", "upgradable"),
    ("upgradable", "upgradable"),
    ("upgradable", "write"),
]


@pytest.mark.parametrize(("first", "next_one"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_nobody_comes_in_before_the_commit_of_whose_session_was_killed(first, next_one, plain):
    taken = locks()
    permit = taken[first](timeout=PATIENT)
    taker = None
    try:
        with transaction.atomic(using=ALIAS):
            permit.fence()
            taker = Taker(taken[next_one])
            waiting = semaphore(LOCK, 2, using=ALIAS)
            wait_until(lambda: waiting.status().waiting == 1, timeout=PATIENT)
            kill_session_of(permit, plain, wanted=True)  # who waits may have the writer's lock, and wait for the fence
            assert wait_until(lambda: permit.lost, timeout=PATIENT).reason.value == "session ended"
            # Neither who stands in line nor a newcomer.
            assert not taker.got.wait(1.5)
            for way in (first, next_one):
                assert run_in_threads(1, lambda _, way=way: _refused(taken[way])) == [True]
            Probe.objects.using(ALIAS).create(name=LOCK)
        assert taker.end().token > permit.token
        assert Probe.objects.using(ALIAS).filter(name=LOCK).exists()
    finally:
        permit.release()
        if taker is not None:
            taker.done.set()
            taker.thread.join(PATIENT)


def _refused(take: Any) -> bool:
    with contextlib.suppress(SemaphoreError):
        take(timeout=0).release()
        return False
    return True


def test_an_upgraded_permit_keeps_readers_out_of_its_transaction(plain):
    lock = rwlock(LOCK, 3, using=ALIAS)
    permit = lock.upgradable().acquire(timeout=PATIENT)
    permit.upgrade(timeout=PATIENT)
    with transaction.atomic(using=ALIAS):
        permit.fence()
        kill_session_of(permit, plain)
        assert run_in_threads(1, lambda _: lock.read(timeout=0).try_acquire()) == [None]
    permit.release()
    with lock.read(timeout=PATIENT):
        pass


def test_an_upgrade_waits_for_the_transaction_of_a_reader_that_is_gone(plain):
    lock = rwlock(LOCK, 3, using=ALIAS)
    reader = lock.read().acquire(timeout=PATIENT)
    taker = Taker(lock.upgradable().acquire)
    assert taker.got.wait(PATIENT)
    upgradable = taker.found[0]
    upgraded = threading.Event()

    def upgrade() -> None:
        upgradable.upgrade(timeout=PATIENT)
        upgraded.set()

    with transaction.atomic(using=ALIAS):
        reader.fence()
        thread = threading.Thread(target=upgrade, daemon=True)
        thread.start()
        kill_session_of(reader, plain)
        assert not upgraded.wait(1.5)
        assert run_in_threads(1, lambda _: lock.read(timeout=0).try_acquire()) == [None]
    assert upgraded.wait(PATIENT)
    upgradable.downgrade()
    reader.release()
    with lock.read(timeout=PATIENT):
        pass
    taker.end()


def test_the_other_slots_are_as_free_as_before(plain):
    shared = semaphore(LOCK, 3, using=ALIAS)
    permit = shared.acquire(timeout=PATIENT)
    with transaction.atomic(using=ALIAS):
        permit.fence()
        for _ in range(2):
            taker = Taker(shared.acquire)
            assert permit.slot not in taker.end().slots
        kill_session_of(permit, plain)
        one, two = Taker(shared.acquire), Taker(shared.acquire)
        assert one.got.wait(PATIENT)
        assert two.got.wait(PATIENT)
        third = Taker(shared.acquire)
        assert not third.got.wait(1.0)
    slots = {third.end().slot, one.end().slot, two.end().slot}
    assert slots == {1, 2, 3}
    permit.release()


LEVELS = ("READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE", "SNAPSHOT")


@pytest.mark.parametrize("level", LEVELS)
def test_a_permit_whose_session_has_ended_fences_nothing_at_any_level(level, plain):
    """Also in a transaction whose snapshot is older than the loss."""
    with contextlib.suppress(plain.error_class):
        plain.do("ALTER DATABASE CURRENT SET ALLOW_SNAPSHOT_ISOLATION ON")
    rows = Probe.objects.using(ALIAS).filter(name=LOCK)
    Probe.objects.using(ALIAS).create(name=LOCK)
    lock = mutex(LOCK, using=ALIAS)
    permit = lock.acquire(timeout=PATIENT)
    try:
        try:
            with connections[ALIAS].cursor() as cursor:
                cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        except Error as error:  # of a stand-in
            pytest.skip(f"the server has no such level: {error}")
        with transaction.atomic(using=ALIAS):
            assert list(rows.values_list("inside", flat=True)) == [0]
            permit.fence()
            assert rows.filter(fenced(permit)).update(inside=1) == 1
        with pytest.raises(PermitLostError), transaction.atomic(using=ALIAS):  # noqa: PT012
            assert list(rows.values_list("inside", flat=True)) == [1]
            kill_session_of(permit, plain)
            assert rows.filter(fenced(permit)).update(inside=2) == 0
            rows.update(inside=3)
            permit.fence()
        assert rows.filter(fenced(permit)).update(inside=4) == 0
        taker = Taker(lock.acquire)
        assert taker.end().token > permit.token
        assert rows.get().inside == 1
    finally:
        permit.release()
        connections[ALIAS].close()


def test_whether_the_fence_or_the_end_of_the_session_comes_first(plain):
    """Either the fence is refused, or the next one has to wait for the transaction."""
    lock = mutex(LOCK, using=ALIAS)
    outcomes = set()
    for delay in (0.0, 0.02, 0.1, PATIENT):
        permit = lock.acquire(timeout=PATIENT)
        session, _holding = permit._acquisition.keeper.backend.pool.holder(permit._acquisition.permit_id)
        taker = Taker(lock.acquire)
        wait_until(lambda: lock.status().waiting == 1, timeout=PATIENT)
        killer = threading.Timer(delay, lambda session=session: plain.do(f"KILL {session.session_id}"))
        killer.start()
        with contextlib.suppress(PermitLostError), transaction.atomic(using=ALIAS):
            permit.fence()
            if delay == PATIENT:  # at the latest now
                killer.cancel()
                killer.function()
            killer.join()
            outcomes.add(taker.got.wait(0.5))
        killer.join()
        permit.release()
        taker.end()
    assert outcomes == {False}


def test_operators_leave_a_fenced_slot_alone(plain, monkeypatch):
    monkeypatch.setattr("django_sqlsem.backends.applock.operator.FENCED_PATIENCE", 0.3)
    permit = mutex(LOCK, using=ALIAS).acquire(timeout=PATIENT)
    with transaction.atomic(using=ALIAS):
        permit.fence()
        kill_session_of(permit, plain)

        def purge(_: int) -> Any:
            return control.execute_purge(control.plan_purge(using=ALIAS), by="test").freed

        assert not run_in_threads(1, purge)[0]
    assert (
        wait_until(lambda: run_in_threads(1, lambda _: mutex(LOCK, using=ALIAS).try_acquire())[0]).token > permit.token
    )
    permit.release()


def test_nothing_is_left_of_a_fence(plain):
    names = lock_names(LOCK)
    with semaphore(LOCK, 2, take=2, using=ALIAS).acquire(timeout=PATIENT) as permit:
        resources = [names.fence, *(f"{names.fence}:{slot}" for slot in permit.slots)]
        with transaction.atomic(using=ALIAS):
            permit.fence()
            assert tds.locked(ALIAS, resources) == [True] * 3
        assert tds.locked(ALIAS, resources) == [False] * 3


def test_without_rows_there_are_no_fences(settings, plain):
    settings.SQLSEM = {"RECORD": False}
    with mutex(LOCK, using=ALIAS).acquire(timeout=PATIENT) as permit, transaction.atomic(using=ALIAS):
        with pytest.raises(SemaphoreError, match="RECORD"):
            permit.fence()
        with pytest.raises(SemaphoreError, match="RECORD"):
            Probe.objects.using(ALIAS).filter(fenced(permit)).update(inside=1)
