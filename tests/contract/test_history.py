"""What happens to locks is recorded, in batches and beside the work; and no failure of that is a permit's."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connections, transaction

from django_sqlsem import (
    control,
    lifecycle,
    locks,
    queries,
    semaphore,
)
from django_sqlsem.backends import get_backend
from django_sqlsem.backends.base import Grant, Request
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.identity import current
from django_sqlsem.core.names import resource_for
from django_sqlsem.database.sessions import OwnSession, briefly
from django_sqlsem.history import (
    recorder,
)
from django_sqlsem.history import (
    writer as history_writer,
)
from django_sqlsem.history.events import Event
from django_sqlsem.models import EventRow, MinuteRow
from django_sqlsem.snapshots import Loss, LossReason
from tests.support import applocks, databases, tds
from tests.support.keepers import chore_of
from tests.support.operators import hold, make_semaphore
from tests.support.processes import Child
from tests.unit.test_history import clock_us, event, minute

PATIENT = 20.0
TABLES = ("sqlsem_event", "sqlsem_minute")


def wait_until(condition: Callable[[], Any], *, within: float = PATIENT) -> Any:
    """Wait for a condition, and return what it says."""
    deadline = time.monotonic() + within
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def whats(alias: str, name: str = "reports") -> list[str]:
    """The kinds of events of a name, the oldest first."""
    return [event.what for event in reversed(queries.events(name, using=alias))]


def only(alias: str, what: str, name: str = "reports") -> Event:
    """The one event of this kind."""
    assert wait_until(lambda: what in whats(alias, name)), f"no {what!r} but {whats(alias, name)}"
    [found] = [event for event in queries.events(name, using=alias) if event.what == what]
    return found


@pytest.fixture(autouse=True)
def anew(request: pytest.FixtureRequest) -> None:
    """This process knows nothing of the minute that goes on: what it wrote in the test before has been deleted."""
    if "database" in request.fixturenames:
        chore_of(request.getfixturevalue("database"), "history").writer.begin_anew()


@pytest.fixture
def sooner(monkeypatch: pytest.MonkeyPatch, database: str) -> None:
    """This process writes what has happened several times a second."""
    monkeypatch.setattr(history_writer, "EVERY", 0.2)
    chore_of(database, "history").writer._write_at = 0.0


def test_a_grant_and_its_end_are_seen_from_another_process(database: str) -> None:
    with Child("hold", database, "reports", 3) as child:
        slot, token = (int(each) for each in child.expect("held").split())
        assert wait_until(lambda: whats(database) == ["granted"])  # while it is held
        child.send()
        child.expect("released")
        child.finish()
    assert whats(database) == ["granted", "released"]  # the end of a process leaves nothing unwritten
    released, granted = queries.events("reports", using=database)
    assert (granted.slot, granted.token, granted.waited) == (slot, token, 0.0)
    assert granted.pid == released.pid == child.pid
    assert granted.host
    assert released.token == token
    assert released.held is not None
    assert 0 < released.held < 60
    [span] = queries.spans("reports", using=database)
    assert (span.slot, span.event) == (slot, released)
    assert abs((span.start - granted.at).total_seconds()) < 0.01
    total = queries.totals(["reports"], using=database)["reports"]
    assert (total.granted, total.released, total.turned_away, total.lost) == (1, 1, 0, 0)
    assert total.held == pytest.approx(released.held, abs=0.001)
    minutes = queries.minutes("reports", using=database)
    assert sum(minute.granted for minute in minutes) == 1
    assert sum(minute.holds.count for minute in minutes if minute.holds is not None) == 1


@pytest.mark.leaves_held
def test_a_killed_process_leaves_what_it_had_written(database: str) -> None:
    with Child("hold", database, "reports", 3) as child:
        child.expect("held")
        assert wait_until(lambda: whats(database) == ["granted"])
        child.kill()
    with semaphore("reports", slots=3, using=database):
        pass
    # Whoever notices the death first writes that the slot was lost.
    assert wait_until(
        lambda: [what for what in whats(database) if what != "lost"] == ["granted", "granted", "released"]
    )
    # Its own hold has an end if somebody has noticed the death by then.
    assert len(queries.spans("reports", using=database)) in (1, 2)


@pytest.mark.usefixtures("sooner")
def test_who_waited_and_who_was_turned_away(database: str) -> None:
    lock = semaphore("reports", using=database)
    with lock, Child("hold", database, "reports") as child:
        assert wait_until(lambda: (found := queries.semaphore("reports", using=database)) and found.waiting)
        with Child(
            "from django_sqlsem import semaphore\n"
            "lock = semaphore('reports', using=args[0])\n"
            "assert lock.try_acquire() is None\n"
            "try:\n"
            "    lock.acquire(timeout=0.2)\n"
            "except TimeoutError:\n"
            "    say('turned away')\n",
            database,
        ) as other:
            other.expect("turned away")
            other.finish()
        lock_held_by_us = [event for event in queries.events("reports", using=database) if event.what == "timed_out"]
        assert len(lock_held_by_us) == 2
        at_once, later = sorted(lock_held_by_us, key=lambda event: event.at)
        assert (at_once.waited, at_once.slot, at_once.pid) == (None, None, other.pid)
        assert later.waited is not None
        assert 0.2 <= later.waited < PATIENT
        lifecycle.stop_all()  # gives it back, and notes why
        child.expect("held")
        child.send()
        child.expect("released")
        child.finish()
    waited = max(event.waited or 0.0 for event in queries.events("reports", using=database) if event.pid == child.pid)
    assert waited > 0.2
    ended = [event for event in queries.events("reports", using=database) if event.what == "released"]
    assert "the process is ending" in {event.detail for event in ended}
    total = queries.totals(["reports"], using=database)["reports"]
    assert (total.granted, total.released, total.turned_away, total.lost) == (2, 2, 2, 0)
    assert total.longest_wait == pytest.approx(max(waited, later.waited), abs=0.01)


@pytest.mark.usefixtures("sooner")
def test_a_loss_is_told_once_with_its_reason(database: str) -> None:
    with semaphore("reports", slots=2, lease=2.0, using=database) as permit:
        [holder] = control.revoke("reports", by="ann", kill=applocks.are_at(database), using=database)
        assert wait_until(lambda: permit.lost)
    lost = only(database, "lost")
    assert (lost.slot, lost.token) == (permit.slot, permit.token)
    assert lost.detail.startswith("revoked")
    assert lost.by == "ann"
    assert lost.held is not None
    revoked = only(database, "revoked")
    assert (revoked.by, revoked.slot, revoked.token) == ("ann", holder.slot, holder.token)
    assert revoked.held is not None
    assert sorted(whats(database)) == ["granted", "lost", "revoked"]
    assert len(queries.spans("reports", using=database)) == 1
    lifecycle.stop_all()
    assert sorted(whats(database)) == ["granted", "lost", "revoked"]


def test_a_loss_is_one_also_if_the_permit_is_given_back_before_it_is_told(database: str) -> None:
    lock = semaphore("reports", slots=2, using=database)
    permit = lock.acquire()
    hold = permit._acquisition
    assert hold is not None
    hold.loss = Loss(LossReason.REVOKED, "by ann", "ann")  # as the keeper notes it; and is passed by another thread
    permit.release()
    hold.lose(hold.loss)
    lost = only(database, "lost")
    assert (lost.detail, lost.by, lost.slot, lost.token) == ("revoked: by ann", "ann", permit.slot, permit.token)
    assert sorted(whats(database)) == ["granted", "lost"]


def test_acts_are_there_at_once_and_say_who(database: str) -> None:
    semaphore("reports", slots=3, using=database).acquire().release()
    control.pause("reports", by="ann", using=database)
    control.resume("reports", by="bob", using=database)
    control.set_slots("reports", 5, by="cid", using=database)
    acts = [each for each in queries.events("reports", using=database) if each.what not in ("granted", "released")]
    assert [(act.what, act.by, act.detail) for act in reversed(acts)] == [
        ("paused", "ann", ""),
        ("resumed", "bob", ""),
        ("resized", "cid", "5 slots"),
    ]
    month = 30 * 86400 * 1_000_000
    kept = EventRow.objects.using(database).filter(what="paused").get()
    assert kept.until_us - kept.at_us == month


@pytest.mark.leaves_held
def test_an_act_that_ends_a_hold_tells_how_long_it_was(database: str) -> None:
    make_semaphore(database)
    hold(database, age=30.0)
    control.request_stop("reports", by="ann", using=database)
    control.revoke("reports", by="bob", reason="it hung", kill=applocks.are_at(database), using=database)
    asked, ended = only(database, "stop_asked"), only(database, "revoked")
    assert asked.held is None, "it went on"
    assert ended.held is not None
    assert 29.0 < ended.held < 30.0 + PATIENT
    assert (ended.by, ended.detail) == ("bob", "it hung")


def test_an_act_stands_without_its_entry(database: str, caplog: pytest.LogCaptureFixture) -> None:
    if tds.is_stand_in(database):
        pytest.skip("it rolls the whole transaction back when a table is missing, without a word")
    semaphore("reports", slots=3, using=database).acquire().release()
    lifecycle.stop_all()
    with (
        databases.without_tables(database, *TABLES),
        transaction.atomic(using=database),
    ):
        assert control.pause("reports", by="ann", using=database)
    found = queries.semaphore("reports", using=database)
    assert found is not None
    assert found.paused
    assert "missing in the history" in caplog.text


@pytest.mark.usefixtures("sooner")
def test_permits_go_on_without_the_tables(database: str, caplog: pytest.LogCaptureFixture) -> None:
    lock = semaphore("reports", slots=3, lease=1.0, using=database)
    with caplog.at_level(logging.WARNING, "django_sqlsem"), lock as permit:
        with databases.without_tables(database, *TABLES):

            def use() -> bool:
                with semaphore("others", slots=1, using=database):
                    permit.check()
                return "cannot be written" in caplog.text

            assert wait_until(use)
            ends = time.monotonic() + 2.5
            while time.monotonic() < ends:
                use()
                time.sleep(0.02)
        told = [record for record in caplog.records if "cannot be written" in record.getMessage()]
        assert len(told) == 1
        chore_of(database, "history").writer._write_at = 0.0  # it rests longer after each failure
        assert wait_until(lambda: "written again" in caplog.text)
        permit.check()
    assert "are missing" in caplog.text
    lifecycle.stop_all()
    assert whats(database)[-1] == "released"


@pytest.mark.rows_only("lease")
@pytest.mark.usefixtures("sooner")
def test_a_locked_table_delays_no_renewal(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written while something is held takes at most a third of the time that this lasts without a renewal."""
    vendor = connections[database].vendor
    if vendor == "sqlite":
        pytest.skip("a lock of one table locks the database")
    limits, took = [], []

    def noted(session: Any, work: Any, seconds: float, in_line: float = 0.0) -> Any:
        limits.append(seconds)
        started = time.monotonic()
        try:
            return briefly(session, work, seconds, in_line)
        finally:
            took.append(time.monotonic() - started)

    monkeypatch.setattr(history_writer, "briefly", noted)
    lock = semaphore("reports", slots=3, lease=3.0, using=database)
    with contextlib.closing(databases.raw_connection(database)) as raw, lock as permit:
        limits.clear()  # of what was written while nothing was held
        cursor = raw.cursor()
        if vendor == "postgresql":
            cursor.execute("BEGIN")
            cursor.execute("LOCK TABLE sqlsem_event, sqlsem_minute IN ACCESS EXCLUSIVE MODE")
        else:
            cursor.execute("LOCK TABLES sqlsem_event WRITE, sqlsem_minute WRITE")
        ends = time.monotonic() + 4.0
        while time.monotonic() < ends:
            permit.check()
            with semaphore("others", slots=1, using=database):
                time.sleep(0.02)
        assert chore_of(database, "history").writer._refusals
        assert max(limits) <= permit._acquisition.request.lease / 3
        assert min(took) < 2 * max(limits)  # the server keeps to the limit; a busy machine may be slow to say so
        cursor.execute("ROLLBACK" if vendor == "postgresql" else "UNLOCK TABLES")
        chore_of(database, "history").writer._write_at = 0.0
        assert wait_until(lambda: "granted" in whats(database))  # nothing of it was dropped
        permit.check()


@pytest.mark.usefixtures("sooner")
def test_what_a_locked_table_refused_is_written_later(database: str, caplog: pytest.LogCaptureFixture) -> None:
    if connections[database].vendor != "microsoft":
        pytest.skip("of a driver whose errors have no numbers")
    with caplog.at_level(logging.WARNING, "django_sqlsem"):
        with contextlib.closing(databases.raw_connection(database)) as raw:
            cursor = raw.cursor()
            cursor.execute("BEGIN TRANSACTION")
            cursor.execute("ALTER TABLE sqlsem_event ADD passing int NULL")
            with semaphore("reports", slots=3, using=database):
                assert wait_until(lambda: chore_of(database, "history").writer._refusals)
            cursor.execute("ROLLBACK TRANSACTION")
        chore_of(database, "history").writer._write_at = 0.0
        assert wait_until(lambda: whats(database) == ["granted", "released"])
    assert "are missing" not in caplog.text


def test_a_clock_that_is_right_as_far_as_can_be_told_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written later would else be told as earlier, whenever an answer took less time than the one before."""
    writer = history_writer.Writer(recorder.Recorder("default"), OwnSession("default"))
    host, there = [0], [0]
    monkeypatch.setattr(history_writer, "boot_now_us", lambda: host[0])

    def ask(took_us: int, ahead_us: int) -> int:
        def now(cursor: Any) -> int:
            host[0] += took_us
            return there[0]

        host[0] += 1_000_000
        there[0] = host[0] + took_us // 2 + ahead_us
        monkeypatch.setattr(
            history_writer, "dialect_for", lambda db: SimpleNamespace(now=now, token_clock=lambda found: found)
        )
        writer._compare_at = 0.0
        told: int = writer._clock(SimpleNamespace(db=None))  # type: ignore[arg-type]
        return told - host[0]

    assert ask(20_000, 7_000) == 7_000
    assert ask(20_000, 16_000) == 7_000  # within half of the time that it took
    assert ask(1_000, 7_400) == 7_000
    assert ask(1_000, 7_600) == 7_600
    assert ask(1_000, 3_000) == 3_000


def test_sql_server_compiles_one_text_whatever_there_is_to_write(database: str) -> None:
    if connections[database].vendor != "microsoft":
        pytest.skip("others take any number of rows in one text, or one at a time")
    texts: set[str] = set()
    counts = (1, 2, 9, 10, 11, 100)

    def noting(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        texts.add(sql)
        return execute(sql, params, many, context)

    def write(cursor: Any) -> bool:
        with cursor.db.execute_wrapper(noting):
            for count in counts:
                events = [as_row(an_event(f"{count}/{nth}")) for nth in range(count)]
                history_writer.write_events(cursor, events)
                for again in (1, 2):  # the second time it takes the place of the first
                    minutes = [
                        MinuteRow(
                            key=f"{count}/{nth}", minute_us=60, writer=7, until_us=2**40, granted=again, holds="x" * nth
                        )
                        for nth in range(count)
                    ]
                    history_writer.write_minutes(cursor, minutes)
        return True

    with contextlib.closing(OwnSession(database)) as session:
        session.transaction(write)
    assert len([text for text in texts if "INSERT" in text]) == 2
    assert len([text for text in texts if "DELETE" in text]) == 1
    wanted = sorted(f"{count}/{nth}" for count in counts for nth in range(count))
    found = {row.key: row for row in EventRow.objects.using(database)}
    assert sorted(found) == wanted
    assert [[getattr(found[key], name) for name in EVENT_FIELDS] for key in wanted] == [an_event(key) for key in wanted]
    minutes = MinuteRow.objects.using(database).values_list("key", "granted", "holds")
    assert sorted(minutes) == [(key, 2, "x" * int(key.partition("/")[2])) for key in wanted]


def as_row(values: list[Any]) -> EventRow:
    return EventRow(**dict(zip(EVENT_FIELDS, values, strict=True)))


def an_event(key: str) -> list[Any]:
    """Return what is written of an event: NULL here and there, any number of characters, and such of two units."""
    nth = int(key.partition("/")[2])
    slot, waited = (nth, None) if nth % 2 else (None, 2**40 + nth)
    texts = ["h" * nth, "\U0001f512" * nth, "", "ü" * nth, "\U0001f512" * 500]
    host, thread, label, user, detail = texts
    return [key, "n", 2**50, 2**51, "granted", slot, None, waited, 0, host, nth, thread, label, user, "", detail]


EVENT_FIELDS = [field.name for field in EventRow._meta.fields if field.name != "id"]


def test_off_means_that_nothing_is_written(database: str, settings: Any) -> None:
    settings.SQLSEM = settings.SQLSEM | {"HISTORY": False}
    with semaphore("reports", lease=2.0, using=database) as permit:
        control.revoke("reports", by="ann", kill=applocks.are_at(database), using=database)
        assert wait_until(lambda: permit.lost)
    lifecycle.stop_all()
    assert not chore_of(database, "history").writer.pending
    for model in (EventRow, MinuteRow):
        assert not model.objects.using(database).exists()


@pytest.mark.parametrize(
    ("kept", "events", "minutes"),
    [
        ({"GRANTS": 0}, {"paused": 30 * 86400}, 7 * 86400),
        ({"ACTS": 0, "MINUTES": 0}, {"granted": 3600, "released": 3600}, None),
        ({"GRANTS": 60, "ACTS": 50, "MINUTES": 600}, {"granted": 60, "released": 60, "paused": 50}, 600),
    ],
)
def test_each_kind_is_kept_for_as_long_as_settings_say(
    database: str, settings: Any, kept: dict[str, int], events: dict[str, int], minutes: int | None
) -> None:
    settings.SQLSEM = settings.SQLSEM | {"HISTORY": kept}
    with semaphore("reports", using=database):
        pass
    control.pause("reports", by="ann", using=database)
    lifecycle.stop_all()
    rows = EventRow.objects.using(database).all()
    assert {row.what: round((row.until_us - row.at_us) / 1e6) for row in rows} == events
    found = {round((row.until_us - row.minute_us) / 1e6) - 60 for row in MinuteRow.objects.using(database).all()}
    assert found == {minutes} - {None}
    assert [act.what for act in queries.acts(using=database)] == [what for what in events if what == "paused"]


@pytest.mark.django_db(databases="__all__")
def test_the_locks_of_a_test_case_are_not_recorded() -> None:
    with semaphore("reports"):
        pass
    control.pause("reports", by="ann")
    assert not EventRow.objects.exists()
    assert not MinuteRow.objects.exists()
    assert queries.events("reports") == []


def test_all_slots_of_a_permit_are_told(database: str) -> None:
    with semaphore("gpu", slots=4, take=3, using=database) as permit:
        slots = permit.slots
        time.sleep(0.05)
    lifecycle.stop_all()
    [span, *others] = queries.spans("gpu", using=database)
    assert (span.slot, *(each.slot for each in others)) == slots
    assert span.event.slots == slots
    total = queries.totals(["gpu"], using=database)["gpu"]
    assert span.event.held is not None
    assert total.held == pytest.approx(3 * span.event.held, abs=0.001)
    assert total.longest_hold == pytest.approx(span.event.held, abs=0.001)


def test_tokens_are_granted_and_never_come_back(database: str) -> None:
    jobs = locks.counter("jobs", 2, using=database)
    jobs.acquire(timeout=PATIENT)
    assert jobs.try_acquire(5) is None
    lifecycle.stop_all()
    assert sorted(whats(database, "jobs")) == ["granted", "timed_out"]
    assert queries.spans("jobs", using=database) == []


def test_a_minute_is_one_row_however_often_it_is_written(database: str) -> None:
    writer = chore_of(database, "history").writer
    lock = semaphore("reports", slots=3, using=database)
    with lock:
        for _ in range(4):
            with semaphore("others", slots=3, using=database):
                pass
            assert wait_until(lambda: not writer.recorder.notes or written(writer))
    lifecycle.stop_all()
    rows = list(MinuteRow.objects.using(database).filter(writer=MinuteRow.objects.using(database).first().writer))
    by_minute = {(row.key, row.minute_us) for row in rows}
    assert len(by_minute) == len(rows)
    assert queries.totals(["others"], using=database)["others"].granted == 4


def written(writer: history_writer.Writer) -> bool:
    """Have the keeper write now; return whether it has written everything."""
    writer._write_at = 0.0
    return not writer.pending


def test_nothing_is_counted_twice_or_forgotten_by_many_threads(database: str) -> None:
    lock = semaphore("reports", slots=4, using=database)

    def work() -> None:
        for _ in range(30):
            with lock:
                pass
        connections.close_all()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    lifecycle.stop_all()
    total = queries.totals(["reports"], using=database)["reports"]
    assert (total.granted, total.released, total.turned_away, total.lost) == (240, 240, 0, 0)
    # Of a busy name not everything is listed.
    assert 0 < len(queries.events("reports", limit=1000, using=database)) <= 480


def test_a_forked_child_tells_only_its_own(database: str) -> None:
    code = (
        "import os\n"
        "from django_sqlsem import semaphore\n"
        "lock = semaphore('reports', slots=2, using=args[0])\n"
        "with lock:\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        with semaphore('childs', using=args[0]):\n"
        "            pass\n"
        "        from django_sqlsem import lifecycle\n"
        "        lifecycle.stop_all()\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "say('done')\n"
    )
    with Child(code, database) as child:
        child.expect("done")
        child.finish()
    assert whats(database) == ["granted", "released"]
    assert whats(database, "childs") == ["granted", "released"]
    assert {each.pid for each in queries.events("reports", using=database)} == {child.pid}
    assert child.pid not in {each.pid for each in queries.events("childs", using=database)}


def test_pruning_takes_what_has_run_out_and_nothing_else(database: str) -> None:
    now = clock_us(database)  # a minute may end while they are written
    for number in range(history_writer.PRUNED + 50):
        event(database, "granted", ago=7200 + number, name=f"old:{number % 7}")
        minute(database, ago=120 + number, name="old", now=now)
    EventRow.objects.using(database).update(until_us=clock_us(database) - 1)
    MinuteRow.objects.using(database).update(until_us=clock_us(database) - 1)
    kept = [event(database, "lost", ago=60).pk, event(database, "granted", ago=60).pk]
    stays = minute(database, ago=5).pk
    writer = chore_of(database, "history").writer
    with semaphore("others", using=database):

        def prune() -> bool:
            writer._prune_at = writer._write_at = 0.0
            with semaphore("more", using=database):
                old = EventRow.objects.using(database).filter(name__startswith="old:").exists()
            return not old and not MinuteRow.objects.using(database).filter(until_us__lt=clock_us(database)).exists()

        assert wait_until(prune)
    assert EventRow.objects.using(database).filter(pk__in=kept).count() == 2
    assert MinuteRow.objects.using(database).filter(pk=stays).exists()


def test_many_who_prune_at_once_do_not_meet(database: str) -> None:
    for number in range(600):
        event(database, "granted", ago=7200 + number)
    EventRow.objects.using(database).update(until_us=1)
    barrier, failures, deleted = threading.Barrier(3), [], []

    def prune() -> None:
        session = get_backend(database).session() if connections[database].vendor != "microsoft" else None
        session = session or OwnSession(database)
        barrier.wait(60)
        deadline = time.monotonic() + 50  # one turn ends in time, whatever is left
        while EventRow.objects.using(database).exists() and time.monotonic() < deadline:
            try:
                deleted.append(
                    briefly(session, lambda cursor: history_writer.delete_old(cursor, EventRow, 2), 1.0, 5.0)
                )
            except Exception as error:
                failures.append(error)
        session.close()
        connections.close_all()

    threads = [threading.Thread(target=prune) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert not EventRow.objects.using(database).exists()
    assert sum(deleted) == 600


def test_the_queue_is_bounded_and_counts_what_it_drops(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "MAX_NOTES", 10)
    chore = chore_of(database, "history")
    monkeypatch.setattr(chore, "next_at", lambda: math.inf)  # as if the keeper never had time
    monkeypatch.setattr(chore, "finish", lambda since: None)
    for _ in range(20):
        with semaphore("reports", using=database):
            pass
    assert len(chore.recorder.notes) == 10
    assert chore.recorder.dropped == 30
    monkeypatch.undo()
    lifecycle.stop_all()
    assert len(whats(database)) == 10
    assert "30 entries are missing" in caplog.text
    assert queries.totals(["reports"], using=database)["reports"].granted == 5


def test_a_busy_name_does_not_drown_a_quiet_one() -> None:
    noted = recorder.Recorder("default")
    now = float(int(boot_now()))

    def note(name: str) -> None:
        resource = resource_for(name, "semaphore")
        claim = Request(resource, "0" * 32, 1, 1, 60.0, True, current())
        noted.note("granted", claim, Grant((1,), (5,), (1,)), at=now, waited=0.0)

    for _ in range(1000):
        note("busy")
    note("quiet")
    counted = recorder.Tallies()
    while counted.gather(noted, 0):
        pass
    listed = [entry.request.resource.name for _, entry in counted.listed]
    assert listed.count("busy") == recorder.LISTED
    assert listed.count("quiet") == 1
    assert sorted(tally.granted for tally in counted.minutes.values()) == [1, 1000]


def test_a_loss_is_listed_however_much_happens_and_a_deadlock_is_no_wait() -> None:
    request = Request(resource_for("busy", "semaphore"), "0" * 32, 1, 1, 60.0, True, current())
    noted, counted, now = recorder.Recorder("default"), recorder.Tallies(), float(int(boot_now()) // 60 * 60 + 60)
    for _ in range(100):
        noted.note("granted", request, at=now, waited=0.0)
    noted.note("lost", request, at=now, held=1.0)
    noted.note("deadlock", request, at=now, waited=9.0)
    counted.gather(noted, 0)
    assert [entry.what for _, entry in counted.listed][-2:] == ["lost", "deadlock"]
    [tally] = counted.minutes.values()
    assert (tally.longest_wait_us, sum(tally.waits.values())) == (0, 100)
    # What is told late, of a minute that is written for good, counts in the one that goes on.
    tally.changed = False
    closed = int(now + 60) * 1_000_000
    counted.close(closed)
    noted.note("granted", request, at=now, waited=0.0)
    counted.gather(noted, 0)
    assert [at for _, at in counted.minutes] == [closed]


@pytest.mark.usefixtures("sooner")
def test_a_fault_of_the_history_is_no_permits_and_no_busy_loop(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[float] = []

    def broken(*args: Any) -> None:
        asked.append(time.monotonic())
        raise KeyError("something that nobody has thought of")

    monkeypatch.setattr(history_writer, "event_row", broken)
    with semaphore("reports", lease=1.0, using=database) as permit:
        assert wait_until(lambda: "cannot be written just now" in caplog.text)
        ends = time.monotonic() + 1.5
        while time.monotonic() < ends:
            permit.check()
            time.sleep(0.05)
        assert len(asked) < 8  # it rests longer each time
    lifecycle.stop_all()
    assert "met an error" not in caplog.text


def test_at_the_end_everything_is_given_back_before_it_is_written_down(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, held = chore_of(database, "history").writer, []
    real = writer.finish

    def finish(*args: Any) -> None:
        held.append(len(databases.held_rows(database)))
        real(*args)

    monkeypatch.setattr(writer, "finish", finish)
    permit = semaphore("reports", using=database).acquire()
    lifecycle.stop_all()
    assert held == [0]
    assert whats(database) == ["granted", "released"]
    assert permit.lost is not None


def test_a_thread_that_ends_leaves_its_history_for_who_comes_then(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chore, there, asked = chore_of(database, "history"), [], []
    monkeypatch.setattr(chore, "run", lambda now: None)
    lock = semaphore("reports", lease=2.0, using=database)

    def attempt(seconds: float, in_line: float) -> bool:
        asked.append(seconds)  # a server so busy that it takes all the time there is
        if not there:
            there.append(lock.acquire())
            there[0].detach()
        time.sleep(1.2)  # twice would be longer than the lease
        return False

    monkeypatch.setattr(chore.writer, "_attempt", attempt)
    with lock:
        pass
    assert wait_until(lambda: there)
    ends = time.monotonic() + 3.0
    while time.monotonic() < ends:
        there[0].check()  # it is renewed
        time.sleep(0.05)
    monkeypatch.undo()
    there[0].release()
    assert len(asked) == 1


@pytest.mark.usefixtures("sooner")
def test_what_has_run_out_is_deleted_in_a_turn_of_its_own(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, turns = chore_of(database, "history").writer, []
    for name in ("_attempt", "_prune"):
        real = getattr(writer, name)
        monkeypatch.setattr(writer, name, lambda *args, n=name, r=real: (turns[-1].append(n), r(*args))[1])
    write = writer.write

    def turn(seconds: float) -> None:
        turns.append([])
        write(seconds)

    monkeypatch.setattr(writer, "write", turn)
    with semaphore("reports", using=database):
        assert wait_until(lambda: ["_prune"] in turns)
    assert all(each in (["_attempt"], ["_prune"]) for each in turns)
