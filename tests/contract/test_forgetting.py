"""Names come and go: those that nobody has used for long are forgotten, and nothing else ever is."""

from __future__ import annotations

import contextlib

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_sqlsem import queries, semaphore
from django_sqlsem.backends import clock, get_backend
from django_sqlsem.conf import config
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.names import key_of
from django_sqlsem.database.sessions import OwnSession, RefusedError
from django_sqlsem.locks import counter
from django_sqlsem.models import EventRow, MinuteRow, RefreshRow, SemaphoreRow, SlotRow, WaiterRow
from tests.support import applocks, citus
from tests.support.keepers import chore_of, keeper_of
from tests.support.operators import hold, make_semaphore, now_us, wait
from tests.support.processes import Child
from tests.support.threads import wait_until

DAY = 86_400.0
MONTH = 30 * DAY


def enough(alias):
    """How many names are deleted in a race: a stand-in for SQL Server compiles each call anew."""
    return 6 if applocks.are_at(alias) else 60


def unix_us(alias):
    return round(queries.history_clock(alias).timestamp() * 1e6)


def make_idle(alias, name, *, days=31.0, slots=2, **fields):
    """Write a name that was used last so many days ago."""
    at = unix_us(alias) - round(days * DAY * 1e6)
    row = make_semaphore(alias, name, slots, **fields)
    SlotRow.objects.using(alias).filter(semaphore=row, slot=1).update(token=at, acquired_us=1)
    return row


@pytest.fixture
def session(database):
    session = OwnSession(database)
    yield session
    session.close()


@pytest.fixture
def forget(database, session):
    """Go once through all names, as housekeeping does in its turns. Returns how many it has forgotten."""

    def forget(seconds=MONTH):
        deleted, after = 0, clock.FIRST
        while True:
            found = get_backend(database).forget(session, seconds=seconds, after=after)
            deleted += found.deleted
            after = found.after
            if after == clock.FIRST:
                return deleted

    return forget


def names(alias):
    return set(SemaphoreRow.objects.using(alias).values_list("name", flat=True))


def test_a_name_that_nobody_has_used_is_forgotten_with_its_rows_and_history(database, forget):
    key = make_idle(database, "sync:17", slots=3).pk
    make_idle(database, "sync:18", days=29)
    wait(database, "sync:17", left=-60)  # of a process that is gone
    past = unix_us(database) - round(40 * DAY * 1e6)
    MinuteRow.objects.using(database).create(key=key, minute_us=past, until_us=past + 10**15)
    EventRow.objects.using(database).create(key=key, name="sync:17", at_us=past, until_us=past + 10**15, what="pause")
    RefreshRow.objects.using(database).create(key=key, name="sync:17", token=past, period_us=10**6)
    assert forget() == 1
    assert names(database) == {"sync:18"}
    assert SlotRow.objects.using(database).count() == 2
    for model in (WaiterRow, MinuteRow, EventRow, RefreshRow):
        assert not model.objects.using(database).exists(), model


KEPT = {
    "held": lambda alias: hold(alias, "kept", age=31 * DAY, token=1),
    "held beyond its lease": lambda alias: hold(alias, "kept", age=31 * DAY, left=-5, token=1),
    "waited for": lambda alias: wait(alias, "kept", left=600),
    "paused": lambda alias: SemaphoreRow.objects.using(alias).update(paused=True),
    "set by an operator": lambda alias: SemaphoreRow.objects.using(alias).update(operator_slots=1),
    "used lately": lambda alias: SlotRow.objects.using(alias).filter(slot=2).update(token=unix_us(alias)),
    "released lately": lambda alias: MinuteRow.objects.using(alias).create(
        key=key_of("kept"), minute_us=unix_us(alias) - 10**9, until_us=unix_us(alias) + 10**9
    ),
    "resumed lately": lambda alias: EventRow.objects.using(alias).create(
        key=key_of("kept"), name="kept", at_us=unix_us(alias) - 10**9, until_us=unix_us(alias) + 10**9, what="resume"
    ),
    "a value that is not due": lambda alias: RefreshRow.objects.using(alias).create(
        key=key_of("kept"), name="kept", token=unix_us(alias) - round(40 * DAY * 1e6), period_us=round(90 * DAY * 1e6)
    ),
}


@pytest.mark.leaves_held
@pytest.mark.parametrize("why", KEPT)
def test_what_is_in_use_or_was_set_by_an_operator_is_never_forgotten(database, forget, why):
    make_idle(database, "kept")
    KEPT[why](database)
    assert forget() == 0
    assert names(database) == {"kept"}
    assert SlotRow.objects.using(database).count() == 2


def test_a_name_that_was_never_granted_is_forgotten_by_its_age(database, forget):
    make_semaphore(database, "young", 2)
    old = make_semaphore(database, "old", 2)
    SemaphoreRow.objects.using(database).filter(pk=old.pk).update(declared_us=now_us(database) - round(MONTH * 1e6) - 1)
    assert forget() == 1
    assert names(database) == {"young"}


def test_a_count_is_never_forgotten(database, forget):
    for initial in (0, 3):
        count = counter(f"count {initial}", initial, using=database)
        count.release()
        assert count.try_acquire(initial + 1)
    SemaphoreRow.objects.using(database).update(declared_us=1)
    assert forget(0.0) == 0
    assert names(database) == {"count 0", "count 3"}


def test_a_look_goes_through_a_few_names_whatever_their_number(database, session, monkeypatch):
    monkeypatch.setattr(clock, "LOOKED_AT", 8)
    monkeypatch.setattr(clock, "IDLE_AT_ONCE", 3)
    for number in range(20):
        make_idle(database, f"idle {number}", slots=1)
    after, deleted, sent = clock.FIRST, [], []
    session.run(lambda cursor: None)
    with session.connection.execute_wrapper(lambda execute, *args: sent.append(args[0]) or execute(*args)):
        while names(database):
            found = get_backend(database).forget(session, seconds=MONTH, after=after)
            deleted.append(found.deleted)
            after = found.after
            assert found.more is (found.deleted == 3)
    assert deleted == [3, 3, 3, 3, 3, 3, 2]
    # Application locks are taken one by one.
    each = 40 if database == citus.ALIAS else 16  # there each name is a transaction of its own
    assert len(sent) < (20 * 20 if applocks.are_at(database) else each * len(deleted))


def test_a_long_history_is_deleted_a_little_at_a_time_and_its_name_after_it(database, session, monkeypatch):
    monkeypatch.setattr(clock, "MOST_NOTES", 4)
    key = make_idle(database, "noted").pk
    past = unix_us(database) - round(40 * DAY * 1e6)
    rows = [MinuteRow(key=key, minute_us=past + nth, until_us=past + 10**15) for nth in range(10)]
    MinuteRow.objects.using(database).bulk_create(rows)
    left = []
    while names(database):
        get_backend(database).forget(session, seconds=MONTH, after=clock.FIRST)
        left.append(MinuteRow.objects.using(database).count())
    assert left == [6, 2, 0]


@pytest.mark.parametrize("seconds", [60, None])
def test_any_living_process_forgets_after_what_the_setting_says(database, settings, seconds):
    settings.SQLSEM = {"DATABASES": {database: {"FORGET_AFTER": seconds}}}
    make_idle(database, "idle", days=400)
    with semaphore("alive", using=database):
        housekeeping = chore_of(database, "housekeeping")
        for _ in range(2):  # from where it happens to begin to the end, and from there on
            housekeeping._forget_at = 0.0
            keeper_of(database).submit(lambda: housekeeping.run(boot_now())).result(30)
        assert names(database) == ({"alive"} if seconds else {"alive", "idle"})


@pytest.mark.parametrize("seconds", [59, -1, True, "30d"])
@pytest.mark.process_side
def test_a_time_after_which_names_cannot_be_forgotten_is_refused(settings, seconds):
    settings.SQLSEM = {"FORGET_AFTER": seconds}
    with pytest.raises(ImproperlyConfigured, match=r"SQLSEM\['FORGET_AFTER'\]"):
        config()


@contextlib.contextmanager
def passing_by(alias, *who):
    """Processes that take names again and again, whose permits are checked, while the block runs."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child("tests.programs.passers_by:pass_by", alias, own)) for own in who]
        wait_until(lambda: len(names(alias)) > len(children))
        yield
        for child in children:
            child.send("end")
            child.expect("done")


def test_who_comes_at_that_very_moment_is_served_and_keeps_what_it_gets(database, session):
    """Names are deleted the moment they are free, while two processes take them again and again."""
    deleted = 0
    with passing_by(database, "ann", "bob"):
        while deleted < enough(database):
            with contextlib.suppress(RefusedError):  # somebody was in the way
                deleted += get_backend(database).forget(session, seconds=0.0, after=clock.FIRST).deleted


def test_who_comes_while_an_operator_purges_is_served(database):
    purged = 0
    with passing_by(database, "ann"):
        while purged < enough(database):
            for name in names(database):
                purged += get_backend(database).purge_idle(name)
