"""Many readers or one writer, over processes; and a reader that becomes the writer without deadlock."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import threading
import time

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connections, transaction

from django_sqlsem import (
    AcquireTimeoutError,
    AlreadyHeldError,
    control,
    queries,
    semaphore,
)
from django_sqlsem.database.dialects import Dialect
from django_sqlsem.locks import rwlock
from django_sqlsem.models import SlotRow, WaiterRow
from django_sqlsem.runtime.keepers import keeper_at
from tests.programs.rwlock_clients import Sharing
from tests.support import applocks
from tests.support.databases import held_rows
from tests.support.processes import Child
from tests.support.threads import run_beside, run_in_threads, wait_until

LOCK = "prices"


@contextlib.contextmanager
def sharing(database, count=2, **options):
    """So many processes that read and write, with five readers at most unless said otherwise."""
    with contextlib.ExitStack() as stack:
        options = {"readers": 5} | options
        children = [stack.enter_context(Sharing(database, LOCK, **options)) for _ in range(count)]
        yield [child.ready() for child in children]
        for child in children:
            if child.process.poll() is None:
                child.end()


def wait_for_waiters(database, *modes):
    """Wait until those who wait have these modes, in the order in which they came."""
    rows = WaiterRow.objects.using(database).order_by("queued_us", "pk")
    wait_until(lambda: [row.mode for row in rows.all()] == list(modes), timeout=30, what=f"waiters: {modes}")


def refused(child, who, verb, **options):
    """Have a thread try once, and be refused."""
    child.asks(who, verb, timeout=0, **options)
    return child.word(who, "AcquireTimeoutError", timeout=40)


def test_readers_share_it_and_a_writer_is_alone(database):
    with sharing(database) as (here, there):
        for who in ("r1", "r2"):
            here.has(who, "read")
            there.has(who, "read")
        assert "could not be written" in refused(there, "w0", "write")
        here.asks("w", "write")
        wait_for_waiters(database, "whole")
        # A newcomer stands behind the writer, although a slot is free: a stream of readers starves nobody.
        refused(there, "r0", "read")
        there.asks("late", "read")
        wait_for_waiters(database, "whole", "")
        for who in ("r1", "r2"):
            assert here.is_silent("w")
            assert there.is_silent("late")
            here.release(who)
            there.release(who)
        assert here.held("w", timeout=40)["slots"] == [0, 1, 2, 3, 4, 5]
        refused(there, "w0", "write")
        refused(here, "r0", "read")
        assert there.is_silent("late")
        here.release("w")
        there.held("late", timeout=40)
        here.has("r3", "read")
        there.release("late")
        here.release("r3")
    wait_for_waiters(database)


def test_readers_writers_and_upgrades_at_random(database):
    """Counted from outside; nobody waits for ever, and none is refused."""
    seconds = 10 if applocks.are_at(database) else 2.5
    target = "tests.programs.rwlock_clients:churn"
    with contextlib.ExitStack() as stack:
        arguments = [(database, LOCK, {"readers": 3}, seconds, seed) for seed in range(2)]
        children = [stack.enter_context(Child(target, *each)) for each in arguments]
        for child in children:
            child.expect("ready", timeout=120)
        for child in children:
            child.send()
        found = [json.loads(child.expect("done", timeout=120)) for child in children]
        for child in children:
            child.finish(40)
    assert [errors for _, errors in found] == [[], []]
    assert all(sum(done[verb] for done, _ in found) > 0 for verb in found[0][0]), found
    wait_for_waiters(database)


def test_a_killed_writer_is_no_longer_in_the_way(database):
    """Nor is one that has been upgraded."""
    with sharing(database, 3, lease=20) as (here, there, third):
        here.has("w", "write")
        for number, (child, who, verb) in enumerate(
            ((third, "u", "upgradable"), (there, "u", "upgradable"), (there, "w", "write")), start=1
        ):
            child.asks(who, verb)
            wait_for_waiters(database, *("update", "update", "whole")[:number])
        here.does("w", "uncount", says="uncounted")
        here.kill()
        third.held("u", timeout=100)
        third.does("u", "upgrade", says="upgraded")
        third.does("u", "uncount", says="uncounted")
        assert there.is_silent("u")
        assert there.is_silent("w")
        third.kill()
        there.held("u", timeout=100)
        there.release("u")
        there.held("w", timeout=40)
        there.release("w")


def test_whoever_writes_and_is_killed_makes_way_for_the_next(database):
    with sharing(database) as (here, there):
        here.has("w", "write")
        there.asks("r", "read")
        wait_for_waiters(database, "")
        there.asks("w", "write")
        here.does("w", "uncount", says="uncounted")
        assert there.is_silent("r")
        here.kill()
        there.held("r", timeout=100)
        assert there.is_silent("w")
        there.release("r")
        there.held("w", timeout=40)
        there.release("w")
    assert held_rows(database) == []


def test_who_waits_to_write_and_gives_up_or_dies_leaves_nothing(database):
    with sharing(database, 3) as (here, there, third):
        here.has("r", "read")
        there.asks("w", "write", timeout=1)
        there.word("w", "AcquireTimeoutError", timeout=40)
        wait_for_waiters(database)
        there.has("r", "read")
        third.asks("w", "write")
        wait_for_waiters(database, "whole")
        refused(there, "r0", "read")
        there.asks("r2", "read")
        third.kill()
        there.held("r2", timeout=40)
        for child, who in ((here, "r"), (there, "r"), (there, "r2")):
            child.release(who)


def test_an_upgrade_comes_before_writers_that_wait_longer(database):
    with sharing(database) as (here, there):
        assert here.has("u", "upgradable")["slots"] == [0]
        there.has("r", "read")
        there.asks("u", "upgradable")
        wait_for_waiters(database, "update")
        for child in (here, there):
            child.has("r2", "read")  # beside one that is upgradable, and past one that waits to be
        there.asks("w", "write")
        wait_for_waiters(database, "update", "whole")
        here.orders("u", "upgrade")
        wait_for_waiters(database, "update", "whole", "upgrade")
        refused(here, "r0", "read")
        there.release("r")
        there.release("r2")
        assert here.is_silent("u")
        here.release("r2")
        here.word("u", "upgraded", timeout=40)
        refused(there, "r0", "read")
        assert there.is_silent("u")
        assert there.is_silent("w")
        here.does("u", "downgrade", says="downgraded")
        assert there.is_silent("u")
        here.release("u")
        there.held("u", timeout=40)
        assert there.is_silent("w")
        there.does("u", "upgrade", says="upgraded")
        there.release("u")
        there.held("w", timeout=40)
        there.release("w")


@pytest.mark.process_side
def test_after_an_upgrade_that_gave_up_a_reader_of_its_process_is_let_in_at_once(database, monkeypatch):
    """Its place in line is given up beside it, a moment later."""
    lock, leave = rwlock(LOCK, readers=5, using=database), keeper_at(database).backend.leave

    def slowly(*args):
        time.sleep(0.5)
        leave(*args)

    def reads():
        with lock.read(timeout=0):
            return True

    reader = lock.read().acquire()
    reader.detach()
    with lock.upgradable() as permit:
        monkeypatch.setattr(keeper_at(database).backend, "leave", slowly)
        with pytest.raises(AcquireTimeoutError):
            permit.upgrade(timeout=0.2)
        assert run_beside(reads).result(30)
    reader.release()


def test_an_upgrade_that_gives_up_leaves_an_upgradable_reader(database):
    with sharing(database) as (here, there):
        here.has("u", "upgradable")
        there.has("r", "read")
        here.does("u", "upgrade", 0, says="AcquireTimeoutError")
        here.does("u", "upgrade", 0.5, says="AcquireTimeoutError")
        wait_for_waiters(database)
        assert here.does("u", "lost", says="lost") is None
        there.has("r2", "read")
        refused(there, "u0", "upgradable")
        there.release("r")
        there.release("r2")
        here.does("u", "upgrade", says="upgraded")
        here.does("u", "upgrade", says="AlreadyHeldError")
        refused(there, "r0", "read")
        here.does("u", "downgrade", says="downgraded")
        there.has("r", "read")
        there.release("r")
        here.release("u")


def test_what_the_program_does_when_it_hears_of_a_loss_keeps_no_slots(database):
    """A callback that exits keeps no slots of the upgrade, and the other callbacks are called."""
    told, told_last = [], threading.Event()

    def end(permit):
        told.append(permit.name)
        sys.exit(3)

    lock = rwlock(LOCK, readers=5, lease=4, max_hold=1, on_lost=end, using=database)
    permit = lock.upgradable().acquire()
    permit.on_lost(lambda _: told_last.set())
    permit.upgrade()
    reader = rwlock(LOCK, readers=5, timeout=60, using=database).read()
    run_beside(lambda: reader.acquire().release()).result(60)
    assert permit.lost
    assert told_last.wait(30)
    assert told == [LOCK]
    permit.release()


def test_two_plain_readers_that_want_to_write_are_told_at_once(database):
    """The deadlock of a conversion: each would wait for the other to leave."""
    with sharing(database) as (here, there):
        for child in (here, there):
            child.has("r", "read")
        for child in (here, there):
            for verb in ("write", "upgradable", "read"):
                child.does("r", "again", verb, says="AlreadyHeldError")
        for child in (here, there):
            child.release("r")
        here.has("w", "write")
        here.does("w", "again", "read", says="AlreadyHeldError")
        here.release("w")
    wait_for_waiters(database)


def test_no_number_of_slots_lets_a_reader_beside_a_writer(database):
    with sharing(database) as (here, there):
        for verb in ("write", "upgradable"):
            here.has("w", verb)
            if verb == "upgradable":
                here.does("w", "upgrade", says="upgraded")
            for slots in (9, 2, 12, None):
                control.set_slots(LOCK, slots, by="test", using=database)
                refused(there, "r0", "read")
                refused(there, "r0", "read", readers=20)
                refused(there, "w0", "write", readers=30)
            assert here.does("w", "lost", says="lost") is None
            there.asks("r", "read", readers=40)
            wait_for_waiters(database, "")
            here.release("w")
            there.held("r", timeout=40)
            there.has("r2", "read", readers=40)
            there.release("r")
            control.set_slots(LOCK, 2, by="test", using=database)
            there.has("r3", "read", readers=40)
            refused(there, "r4", "read", readers=40)
            refused(there, "w0", "write")
            for who in ("r2", "r3"):
                there.release(who)
            control.set_slots(LOCK, None, by="test", using=database)


def test_operators_see_one_holder_and_take_all_of_it(database):
    kill = applocks.are_at(database)
    with sharing(database, 1, lease=8) as (here,):  # it hears of it at its next renewal
        for upgrade in (False, True):
            here.has("w", "upgradable" if upgrade else "write")
            if upgrade:
                assert queries.semaphore(LOCK, using=database).upgradable.place == "upgradable"
                here.does("w", "upgrade", says="upgraded")
            found = queries.semaphore(LOCK, using=database)
            (holder,) = found.holders
            assert (holder.slots, holder.place, found.role(holder)) == (tuple(range(6)), "1-5", "writer")
            assert (found.held, found.free, found.exclusive) == (5, 0, holder)
            assert rwlock(LOCK, 5, using=database).status().exclusive.slots == holder.slots
            out = io.StringIO()
            call_command("locks", "list", database=database, stdout=out)
            (line,) = [line for line in out.getvalue().splitlines() if " held" in line and "pid" in line]
            assert "1-5/5" in line
            assert "writer" in line
            # Any of its slots is as good as all of them.
            slot = 0 if upgrade else 3
            assert [each.slot for each in control.revoke(LOCK, slot, by="me", kill=kill, using=database)] == [0]
            assert held_rows(database) == []
            reader = rwlock(LOCK, 5, using=database).read(timeout=0).acquire()
            wait_until(lambda: here.does("w", "lost", says="lost") == "revoked", timeout=40)
            reader.release()
            here.release("w")


@pytest.mark.rows_only("row statements")
def test_few_statements_whatever_the_number(database, monkeypatch):
    lock = rwlock(LOCK, 400, using=database, timeout=0)
    lock.write().acquire().release()  # its rows are made
    texts = []
    real = Dialect.execute

    def execute(self, cursor, sql, parameters):
        texts.append(sql)
        real(self, cursor, sql, parameters)

    monkeypatch.setattr(Dialect, "execute", execute)
    permit = lock.write().acquire()
    assert len(permit.slots) == 401
    assert len(set(permit.tokens)) == 1
    permit.release()
    assert len(texts) < 30
    monkeypatch.undo()
    assert not SlotRow.objects.using(database).filter(expires_us__isnull=False).exists()
    assert lock.write().acquire().release() is None
    with pytest.raises(AcquireTimeoutError, match="held"), lock.read().acquire():
        run_in_threads(1, lambda _: lock.write().acquire())


def test_a_name_of_another_kind_is_refused(database):
    semaphore(LOCK, 2, using=database, timeout=0).acquire().release()
    for wanted in (rwlock(LOCK, using=database).write(timeout=0), rwlock(LOCK, using=database).read(timeout=5)):
        with pytest.raises(ImproperlyConfigured, match="rwlock"):
            wanted.acquire()


@pytest.mark.one_server("fences")
@pytest.mark.rows_only("lease")
def test_nobody_gets_a_slot_of_a_fenced_writer_whose_lease_has_run_out(database):
    if connections[database].vendor == "sqlite":
        pytest.skip("there nobody else can write now")
    lock = rwlock(LOCK, readers=2, timeout=0, using=database)

    def stranger(_number):
        upgrade = SlotRow.objects.using(database).filter(slot__gt=0, permit_id__isnull=False)
        assert upgrade.update(expires_us=1) == 2
        return [lock.read().try_acquire() for _ in range(2)]

    with lock.upgradable() as permit, transaction.atomic(using=database):
        permit.upgrade()
        permit.fence()
        assert run_in_threads(1, stranger) == [[None, None]]


@pytest.mark.one_server("fences")
@pytest.mark.rows_only("lease")
def test_a_downgrade_waits_for_the_end_of_a_fenced_transaction(database):
    lock = rwlock(LOCK, readers=2, timeout=0, using=database)
    with lock.upgradable() as permit:
        with transaction.atomic(using=database):
            permit.upgrade()
            permit.fence()
            permit.downgrade()
            assert not permit.upgraded
            with pytest.raises(AlreadyHeldError):
                permit.upgrade()
            assert len(held_rows(database)) == 3
            if connections[database].vendor != "sqlite":
                assert run_in_threads(1, lambda _number: lock.read().try_acquire()) == [None]
        run_in_threads(2, lambda _number: lock.read().acquire(timeout=30).release())
        permit.upgrade(timeout=30)
        permit.check()


@pytest.mark.one_server("fences")
@pytest.mark.parametrize("first", ["upgrade", "fence"])
def test_a_fenced_writer_is_alone_until_the_commit(database, first):
    """Of an upgraded permit, neither of its two parts is given back before."""
    lock = rwlock(LOCK, readers=2, timeout=0, using=database)
    with transaction.atomic(using=database):
        with lock.upgradable() as permit:
            for verb in ("upgrade", "fence") if first == "upgrade" else ("fence", "upgrade"):
                getattr(permit, verb)()
        assert permit.released
        if connections[database].vendor == "sqlite":  # there nobody else can write now
            assert len(held_rows(database)) == 3
        else:
            assert run_in_threads(1, lambda _number: lock.read().try_acquire()) == [None]
    wait_until(lambda: held_rows(database) == [], what="the release")
    run_in_threads(1, lambda _number: lock.write().acquire().release())
