"""The operator's side on application locks: what is shown, and what ends, stays, or is refused."""

from __future__ import annotations

import contextlib
import getpass
import io
import json
import subprocess
import sys
import time
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import connections, transaction
from django.urls import reverse

from django_sqlsem import (
    BackendError,
    KillNeededError,
    control,
    queries,
    semaphore,
)
from django_sqlsem.backends import get_backend
from django_sqlsem.backends.applock import reading
from django_sqlsem.core.names import key_of
from django_sqlsem.models import SemaphoreRow, SlotRow
from django_sqlsem.snapshots import SlotState
from tests.backends.applock.plain import ALIAS, Session, skip_unless_covered
from tests.programs.lock_clients import Actor
from tests.support import tds
from tests.support.databases import OutsideCounter, held_rows, session_ids
from tests.support.operators import locks, locks_command
from tests.support.processes import Child
from tests.support.threads import wait_until
from tests.unit.test_admin import SEMAPHORES, SLOTS, ask, confirm, key, login, said, text

skip_unless_covered()

#: A process proves every 2 s that its sessions stand, and then asks by whom one was ended, on another one, which it may
#: have to open; the rest is for a busy machine.
HEARTBEAT = 5.0


@pytest.fixture
def alias(committed):
    yield ALIAS
    wait_until(lambda: held_rows(ALIAS) == [], timeout=2)


@pytest.fixture
def stranger(alias):
    """A plain session that runs what the well-known procedures run."""
    session = Session()
    yield session
    session.close()


def only(name="ops"):
    (holder,) = queries.semaphore(name, using=ALIAS).holders
    return holder


def waiting(name="ops", count=1):
    wait_until(lambda: queries.semaphore(name, using=ALIAS).waiting == count, timeout=30, what=f"{count} waiters")


def seen(name="ops"):
    """Return who holds it. Skips the test if the stand-in has lost sight of that session, as it does now and then."""
    holder = queries.semaphore(name, using=ALIAS).holders[0]
    if tds.is_stand_in(ALIAS):
        with connections[ALIAS].cursor() as cursor:
            cursor.execute("SELECT session_id FROM sys.dm_exec_sessions WHERE session_id = %s", [holder.session_id])
            known = cursor.fetchone() is not None
        if not (known and holder.session_us and holder.session_id in session_ids(ALIAS)):
            pytest.skip("the stand-in does not show this session in sys.dm_exec_sessions")
    return holder


def printed(capsys, *arguments):
    locks(*arguments, "--database", ALIAS)
    return str(capsys.readouterr().out)


# --- Shown ---


def test_a_holder_is_shown_with_its_session_and_without_a_lease(alias, capsys):
    with Actor(ALIAS, "ops", slots=2) as holder:
        holder.ready().acquire()
        shown = seen()
        assert (shown.state, shown.pid, shown.lease_left, shown.expires_at) == (SlotState.HELD, holder.pid, None, None)
        assert shown.session_id in session_ids(ALIAS)
        assert not shown.expired
        assert shown.needs_kill
        header, line, *_ = printed(capsys, "list").splitlines()
        assert header.split()[-2:] == ["AGE", "SESSION"]
        assert line.split()[:3] == ["ops", "1/2", "held"]
        assert line.split()[-1] == str(shown.session_id)
        out = printed(capsys, "show", "ops")
        assert f", session {shown.session_id}" in out
        assert "lease" not in out
        (found,) = json.loads(printed(capsys, "list", "--format", "json"))
        (plain,) = found["holders"]
        assert (plain["session_id"], plain["lease_left"], plain["expires_at"]) == (shown.session_id, None, None)
        first, second = printed(capsys, "list", "--format", "csv").splitlines()
        row = dict(zip(first.split(","), second.split(","), strict=True))
        assert (row["session"], row["lease_left_seconds"]) == (str(shown.session_id), "")
        holder.release()
        holder.end()


def test_a_lock_without_a_row_is_somebody_elses(alias, stranger, capsys):
    with semaphore("ops", slots=3, using=ALIAS) as permit:
        other = 2 if permit.slot == 1 else 1
        assert stranger.get("ops", "IntentExclusive") >= 0
        assert stranger.get(f"{other}-ops") >= 0
        found = queries.semaphore("ops", using=ALIAS)
        assert found.held == 2
        shown = next(holder for holder in found.holders if holder.slot == other)
        assert not shown.recorded
        out = printed(capsys, "list")
        notes = queries.notes(using=ALIAS)
        if not tds.shows_locks(ALIAS):
            assert notes == ["Only holders and waiters that keep a row are shown: this server does not show its locks."]
            assert out.endswith(f"ops: 2 of 3 slots held, 0 waiting\n{notes[0]}\n")
            assert (shown.label, shown.host, shown.pid, shown.session_id) == ("another program", "", 0, None)
            with pytest.raises(KillNeededError, match=r"a program that keeps no row: end its database session by hand"):
                control.revoke("ops", other, shown.token, by="ann", using=ALIAS, kill=True)
        else:
            assert notes == []
            assert shown.session_id == stranger.spid
            assert shown.login
            assert str(stranger.spid) in out
            assert control.revoke("ops", other, shown.token, by="ann", using=ALIAS, kill=True)
            assert [holder.slot for holder in queries.semaphore("ops", using=ALIAS).holders] == [permit.slot]


def test_the_query_of_the_views_runs_with_tables_in_their_place(alias, stranger):
    """The text itself, where the server lacks the views: with rows as they are documented, and real sessions.

    Text as bytes is UTF-16 on SQL Server, but not on the stand-in: so it is stored as such.
    """
    holder = Session()
    holder.do("DECLARE @stamp varbinary(128) = CAST('sqlsem:6f9619ff8b86d011b42d00c04fc964ff:0' AS varbinary(128));"
              " SET CONTEXT_INFO @stamp")  # fmt: skip
    stranger.do(
        "CREATE TABLE #locks (resource_type nvarchar(60), resource_database_id int,"
        " resource_description varbinary(512), request_mode nvarchar(60), request_status nvarchar(60),"
        " request_owner_type nvarchar(60), request_session_id int, lock_owner_address varbinary(8))"
    )
    stranger.do("CREATE TABLE #tasks (session_id int, resource_address varbinary(8), wait_duration_ms bigint)")
    for shown, status, session, address in (
        ("0:[1-ops]:(2579568b)          ", "GRANT", holder.spid, b"1"),
        ("0:[1-ops]:(2579568b)          ", "WAIT", stranger.spid, b"2"),
        ("0:[1-🔒]:(0badcafe)", "GRANT", holder.spid, b"3"),
    ):
        stranger.do(
            "INSERT INTO #locks VALUES (N'APPLICATION', DB_ID(), ?, N'X', ?, N'SESSION', ?, ?)",
            shown.encode("utf-16-le"), status, session, address,
        )  # fmt: skip
    for duration in (700, 800):
        stranger.do("INSERT INTO #tasks VALUES (?, ?, ?)", stranger.spid, b"2", duration)
    cursor = stranger.raw.cursor()
    cursor.execute(reading.QUERY.replace("sys.dm_tran_locks", "#locks").replace("sys.dm_os_waiting_tasks", "#tasks"))
    columns = [column[0] for column in cursor.description]
    found = reading.locks(dict(zip(columns, row, strict=True)) for row in cursor.fetchall())
    cursor.close()
    granted, waits = found.of("1-ops")
    if not granted.granted:
        granted, waits = waits, granted
    assert (granted.session_id, granted.process) == (holder.spid, "6f9619ff8b86d011b42d00c04fc964ff")
    assert granted.session_us > 0
    assert granted.login
    assert (waits.session_id, waits.granted, waits.waited, waits.process) == (stranger.spid, False, 0.8, "")
    assert found.holder("1-🔒")
    holder.close()


def test_a_look_inside_a_transaction_costs_nobody_the_transaction(alias):
    operator = get_backend(ALIAS)._operator
    operator._sees, operator._blind, operator._blind_until = False, "", 0.0
    with transaction.atomic(using=ALIAS):
        SemaphoreRow.objects.using(ALIAS).create(key="k" * 32, name="mine", declared_slots=1)
        queries.semaphores(using=ALIAS)
        assert queries.notes(using=ALIAS) == []
    assert SemaphoreRow.objects.using(ALIAS).filter(name="mine").exists()


# --- Revoked ---


def revoke(*arguments):
    """Run the command; again if it did not see the session, which the stand-in does not always show to everybody."""
    command = locks_command("revoke", *arguments, "--noinput", "--database", ALIAS)
    for _ in range(5):
        done = subprocess.run(**command, capture_output=True, text=True, timeout=60, check=False)
        if not tds.is_stand_in(ALIAS) or "has changed since" not in done.stderr:
            break
    return done


def test_revoke_without_kill_is_refused_before_it_asks(alias):
    with Actor(ALIAS, "ops") as holder:
        holder.ready().acquire()
        session = only().session_id
        done = revoke("ops")
        assert done.returncode == 1
        assert f"Slot 1 of 'ops' is held by database session {session}: only ending that session frees" in done.stderr
        assert "Nothing was changed." in done.stderr
        assert holder.check() is None
        with pytest.raises(KillNeededError):
            control.revoke("ops", by="ann", using=ALIAS)
        assert SlotRow.objects.using(ALIAS).filter(revoked_token__isnull=False).count() == 0
        holder.release()
        holder.end()


def test_revoke_with_kill_costs_the_permit_within_a_heartbeat(alias):
    with Actor(ALIAS, "ops", announce=True) as holder, Actor(ALIAS, "ops") as waiter:
        _, (old,) = holder.ready().acquire()
        seen()
        waiter.ready().ask_for()
        waiting()
        started = time.monotonic()
        done = revoke("ops", "--kill")
        assert done.returncode == 0, done.stderr
        assert "Revoked 1 slot." in done.stdout
        thread, reason = json.loads(holder.expect("on_lost", timeout=HEARTBEAT))
        print(f"\nlost {time.monotonic() - started:.2f} s after the command began")
        assert (thread, reason) == ("sqlsem-on-lost", "revoked")
        reason, message = holder.check()
        assert reason == "revoked"
        assert f"revoked by {getpass.getuser()}@" in message
        _, (token,) = waiter.granted()
        assert token > old
        holder.release()
        assert only().pid == waiter.pid
        waiter.release()
        waiter.end()
        holder.end()


def test_who_only_looks_and_finds_that_its_session_was_killed_leaves_it_to_be_told_by_whom(alias):
    made = semaphore("ops", using=ALIAS)
    permit = made.acquire()
    seen()
    control.revoke("ops", by="ann", kill=True, using=ALIAS)
    assert made.status().held == 0
    wait_until(lambda: permit.lost is not None, timeout=HEARTBEAT)
    assert (permit.lost.reason.value, permit.lost.by) == ("revoked", "ann")


MANY = """
import queue
from django_sqlsem import semaphore
told = queue.Queue()
permits = [semaphore(name, on_lost=told.put, using="mssql").acquire() for name in args]
say("held")
for _ in permits:
    permit = told.get(timeout=30)
    say(f"lost {permit.name} {permit.lost.reason.value} {permit.lost.by}")
"""


def test_what_the_session_holds_besides_is_named_and_lost_as_well(alias, capsys, monkeypatch):
    with Child(MANY, "ops", "beside", "also") as holder:
        holder.expect("held", timeout=60)
        seen()
        sessions = {each.name: each.session_id for each in queries.holders(using=ALIAS)}
        along = sorted(name for name, session in sessions.items() if session == sessions["ops"] and name != "ops")
        assert along, "the process used a session for each"
        monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
        out = printed(capsys, "revoke", "ops", "--kill")
        assert f"session {sessions['ops']}" in out
        assert f"To be lost as well, as the same sessions hold it ({len(along)} slot" in out
        assert all(f"  {name} slot 1 (held)" in out for name in along)
        assert out.endswith("Nothing was changed.\n")
        (gone,) = control.revoke("ops", by="ann", using=ALIAS, kill=True)
        assert gone.session_id == sessions["ops"]
        lost = {holder.expect("lost") for _ in ("ops", *along)}
        assert lost == {f"{name} revoked ann" for name in ("ops", *along)}
    wait_until(lambda: all(each.expired for each in queries.holders(using=ALIAS)))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_all_slots_of_one_permit_go_at_once(alias):
    with Actor(ALIAS, "ops", slots=3, take=2, announce=True) as holder:
        holder.ready().acquire()
        seen()
        done = revoke("ops", "--kill")
        assert done.returncode == 0, done.stderr
        assert "Revoked 2 slots." in done.stdout
        assert json.loads(holder.expect("on_lost", timeout=HEARTBEAT))[1] == "revoked"
        holder.end()


def test_the_second_slot_of_a_permit_is_enough(alias):
    with Actor(ALIAS, "ops", slots=3, take=2, announce=True) as holder:
        slots, _ = holder.ready().acquire()
        seen()
        assert revoke("ops", "--slot", str(slots[1]), "--kill").returncode == 0
        assert json.loads(holder.expect("on_lost", timeout=HEARTBEAT))[1] == "revoked"
        holder.end()


def test_a_session_that_got_the_number_of_another_is_spared(alias):
    with Actor(ALIAS, "ops") as holder:
        holder.ready().acquire()
        shown = seen()
        # As if the session of the row had ended, and another one had its number and, without a row, the slot.
        SlotRow.objects.using(ALIAS).filter(slot=1).update(session_us=shown.session_us - 3_333)
        before = session_ids(ALIAS)
        assert control.revoke("ops", 1, shown.token, by="ann", using=ALIAS, kill=True) == []
        assert set(before) <= set(session_ids(ALIAS))
        assert holder.check() is None
        assert SlotRow.objects.using(ALIAS).filter(revoked_token__isnull=False).count() == 0
        SlotRow.objects.using(ALIAS).filter(slot=1).update(session_us=shown.session_us)
        holder.release()
        holder.end()


def test_a_session_of_which_nothing_is_known_is_spared(alias):
    with Actor(ALIAS, "ops") as holder:
        holder.ready().acquire()
        SlotRow.objects.using(ALIAS).filter(slot=1).update(session_us=0)
        shown = only()
        if not shown.login:  # else the server has told when it began
            with pytest.raises(BackendError, match="was not ended: when it began is not known"):
                control.revoke("ops", 1, shown.token, by="ann", using=ALIAS, kill=True)
        assert holder.check() is None
        holder.release()
        holder.end()


def test_another_grant_of_the_slot_is_spared(alias):
    with Actor(ALIAS, "ops") as holder:
        holder.ready().acquire()
        token = only().token
        holder.release()
        holder.acquire()
        assert control.revoke("ops", 1, token, by="ann", using=ALIAS, kill=True) == []
        assert holder.check() is None
        holder.release()
        holder.end()


def test_a_server_that_does_not_let_us_kill_says_so(alias, monkeypatch):
    """The refusal itself needs a login without rights; here only how it reads."""
    with Actor(ALIAS, "ops") as holder:
        holder.ready().acquire()
        seen()
        operator = get_backend(ALIAS)._operator
        query = operator._query

        def refuse(text: str, parameters: Any) -> Any:
            if "KILL" in text:
                with connections[ALIAS].cursor() as cursor:
                    cursor.execute("RAISERROR('User does not have permission to use the KILL statement.', 14, 1)")
            return query(text, parameters)

        monkeypatch.setattr(operator, "_query", refuse)
        with pytest.raises(BackendError, match=r"may not end session \d+: that takes ALTER ANY CONNECTION"):
            control.revoke("ops", by="ann", using=ALIAS, kill=True)
        assert SlotRow.objects.using(ALIAS).filter(revoked_token__isnull=False).count() == 0
        assert holder.check() is None
        holder.release()
        holder.end()


# --- In the admin ---


def test_the_admin_shows_sessions_and_says_that_they_will_be_ended(alias, settings):
    settings.SQLSEM = {"DATABASE": ALIAS}
    boss = login("boss", is_superuser=True)
    with Child(MANY, "ops", "beside") as holder:
        holder.expect("held", timeout=60)
        session = seen().session_id
        along = only("beside").session_id == session
        lists = text(boss.get(reverse(SLOTS)))
        assert f", session {session}" in lists
        assert "ran out" not in lists
        page = ask(boss, SEMAPHORES, "revoke", key("ops"))
        shown = text(page)
        assert "The sessions will be ended, with whatever else they hold." in shown
        assert f"session {session}" in shown
        assert ("To be lost as well: the same sessions hold these" in shown) == along
        assert 'value="Yes, end the sessions"' in page.content.decode()
        assert said(confirm(boss, SEMAPHORES, page)) == ["Revoked 1 permit."]
        assert holder.expect("lost").endswith(" revoked boss")
    response = boss.get(reverse(SEMAPHORES))
    hidden = response.content.decode().count("Only holders and waiters that keep a row are shown")
    assert hidden == (not tds.shows_locks(ALIAS))


def test_the_admin_purges_the_row_of_a_killed_holder(alias, settings):
    settings.SQLSEM = {"DATABASE": ALIAS}
    boss = login("boss", is_superuser=True)
    with Actor(ALIAS, "ops") as dead:
        dead.ready().acquire()
    wait_until(lambda: only().expired)
    page = ask(boss, SEMAPHORES, "purge_stale", key("ops"))
    assert "or their sessions have ended" in text(page)
    assert said(confirm(boss, SEMAPHORES, page)) == ["Freed 1 slot."]


def test_the_admin_says_what_cannot_be_ended(alias, settings, stranger):
    settings.SQLSEM = {"DATABASE": ALIAS}
    boss = login("boss", is_superuser=True)
    with semaphore("ops", using=ALIAS):
        pass
    stranger.get("1-ops")
    page = ask(boss, SLOTS, "revoke", SlotRow.objects.using(ALIAS).get(slot=1).pk)
    (message,) = said(confirm(boss, SLOTS, page))
    if not tds.shows_locks(ALIAS):
        assert message.endswith("is held by a program that keeps no row: end its database session by hand.")
    else:
        assert message == "Revoked 1 permit."
    wrong = login("viewer", "view_slotrow")
    assert "revoke" not in wrong.get(reverse(SLOTS)).content.decode()


# --- Purged ---


def test_purge_frees_the_row_of_a_killed_holder_and_no_other(alias, capsys):
    with Actor(ALIAS, "ops", slots=2) as dead, Actor(ALIAS, "ops", slots=2) as holder:
        dead.ready().acquire()
        holder.ready().acquire()
        dead.kill()
        wait_until(lambda: queries.semaphore("ops", using=ALIAS).stale == 1)
        (stale,) = queries.holders(state="stale", using=ALIAS)
        out = printed(capsys, "purge", "--noinput")
        assert "To be freed, as the session has ended (1 slot):" in out
        assert f"its session {stale.session_id} has ended" in out
        assert "Freed 1 slot, deleted 0 names." in out
        assert only().pid == holder.pid
        assert holder.check() is None
        holder.release()
        holder.end()


def test_purge_spares_a_slot_that_was_taken_meanwhile(alias):
    with Actor(ALIAS, "ops") as dead:
        dead.ready().acquire()
        dead.kill()
    wait_until(lambda: queries.semaphore("ops", using=ALIAS).stale == 1)
    plan = control.plan_purge(using=ALIAS)
    assert len(plan.slots) == 1
    with semaphore("ops", using=ALIAS) as permit:
        result = control.execute_purge(plan, by="ann")
        assert (result.freed, len(result.changed)) == ((), 1)
        permit.check()


def test_an_idle_name_is_deleted_only_if_nobody_holds_or_waits(alias, stranger):
    def purge():
        plan = control.plan_purge(idle=0, name_glob="ops", using=ALIAS)
        return plan, control.execute_purge(plan, by="ann")

    with semaphore("ops", using=ALIAS):
        pass
    idle = control.plan_purge(idle=0, using=ALIAS)
    assert [each.name for each in idle.names] == ["ops"]
    with Actor(ALIAS, "ops") as holder, Actor(ALIAS, "ops") as waiter:
        holder.ready().acquire()
        assert control.execute_purge(idle, by="ann").in_use == ("ops",)
        assert not purge()[0].names
        waiter.ready().ask_for()
        waiting()
        assert control.execute_purge(idle, by="ann").in_use == ("ops",)
        holder.release()
        waiter.granted()
        waiter.release()
        holder.end()
        waiter.end()
    stranger.get("ops", "IntentExclusive")
    assert control.execute_purge(idle, by="ann").in_use == ("ops",)
    stranger.release("ops")
    assert control.execute_purge(idle, by="ann").deleted == ("ops",)
    assert queries.semaphore("ops", using=ALIAS) is None


# --- Set ---

CROWD = """
import threading, time
from django_sqlsem import semaphore
from tests.support.databases import OutsideCounter
lock = semaphore("crowd", slots=2, timeout=None, using="mssql")
stop = threading.Event()
with OutsideCounter("mssql") as counter:
    say("ready")
    listen()
    threading.Thread(target=lambda: (listen(), stop.set()), daemon=True).start()
    while not stop.is_set():
        with lock, counter.inside():
            time.sleep(0.2)
say("done")
"""


def test_growing_and_shrinking_are_exact_under_contention(alias):
    with OutsideCounter(ALIAS) as counter, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(Child(CROWD)) for _ in range(5)]
        for child in crowd:
            child.expect("ready", timeout=60)
        for child in crowd:
            child.send("go")
        wait_until(lambda: counter.peak == 2 and counter.entered > 10, timeout=30)
        assert peak_while(counter, 1.0) <= 2
        assert control.set_slots("crowd", 4, by="ann", using=ALIAS)
        wait_until(lambda: counter.peak == 4, timeout=30, what="4 at once")
        assert peak_while(counter, 1.0) <= 4
        assert control.set_slots("crowd", 1, by="ann", using=ALIAS)
        time.sleep(1)  # what was granted before is over
        entered = counter.entered
        assert peak_while(counter, 3.0) == 1
        assert counter.entered > entered
        assert control.set_slots("crowd", None, by="ann", using=ALIAS)
        wait_until(lambda: counter.peak == 2, timeout=30, what="2 at once, as the code declares")
        for child in crowd:
            child.send("stop")
        for child in crowd:
            child.expect("done", timeout=60)
        assert counter.peak == 2


def peak_while(counter, seconds):
    """Return the most that are in at once from now on: the counter's own peak, begun anew."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("UPDATE testapp_probe SET peak = inside WHERE name = %s", [counter.name])
    time.sleep(seconds)
    return counter.peak


def test_pause_and_resume(alias):
    with Actor(ALIAS, "ops", slots=2) as holder, Actor(ALIAS, "ops", slots=2) as waiter:
        holder.ready().acquire()
        assert control.pause("ops", by="ann", using=ALIAS)
        assert waiter.ready().try_acquire() is None
        assert holder.check() is None
        waiter.ask_for()
        waiter.silent(1.5)
        assert control.resume("ops", by="ann", using=ALIAS)
        waiter.granted()
        holder.release()
        waiter.release()
        holder.end()
        waiter.end()


def test_wrong_arguments_are_refused_here_too(alias):
    with semaphore("ops", using=ALIAS):
        pass
    with pytest.raises(CommandError, match="There is no semaphore"):
        locks("revoke", "op", "--kill", "--noinput", "--database", ALIAS)
    assert not control.set_slots("unknown", 2, by="ann", using=ALIAS)


def test_thousands_of_names_may_be_looked_for(alias):
    """Two lists in one statement have more keys than it may have parameters, or a temporary table one collation."""
    semaphore("one of them", slots=2, using=alias).acquire().release()
    keys = [key_of("one of them"), *(f"{number:032x}" for number in range(3000))]
    slots, names = SlotRow.objects.using(alias), SemaphoreRow.objects.using(alias)
    assert names.get(pk__in=keys).name == "one of them"
    assert slots.filter(semaphore__key__in=keys, semaphore__pk__in=keys).count() == 2
    assert not names.exclude(pk__in=keys).filter(pk__in=keys).exists()
    with semaphore("one", slots=2, using=alias), semaphore("two", slots=2, using=alias):
        assert len(get_backend(alias).in_use(1)) == 1
