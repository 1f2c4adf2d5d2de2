"""One name as a mutex and as a semaphore at once, as in a rolling deployment; and kinds that refuse one another."""

from __future__ import annotations

import contextlib
import json
import logging
import re

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connections

from django_sqlsem import AcquireTimeoutError, control, mutex, queries, semaphore
from django_sqlsem.backends import base, get_backend
from django_sqlsem.backends.rows import acquire, queue
from django_sqlsem.backends.rows.statements import Statements, request_parameters
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.text import a_kind
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.sessions import OwnSession
from django_sqlsem.locks import counter, rlock, rwlock
from django_sqlsem.models import SlotRow
from django_sqlsem.runtime.keepers import keeper_for
from tests.contract.test_rwlock import refused, wait_for_waiters
from tests.programs.fence_clients import Fencer
from tests.programs.rwlock_clients import Sharing
from tests.support import applocks
from tests.support.databases import OutsideCounter, held_rows, label, query, raw_connection
from tests.support.processes import Child
from tests.support.statements import CountedSession
from tests.support.threads import run_beside, wait_until

NAME = "billing"
#: How long somebody may take on a busy machine, in seconds.
SOON = 40.0
#: So many processes of one kind are replaced by as many of the other.
PROCESSES = 2


@contextlib.contextmanager
def sharing(database, count=2):
    """So many processes that use one name as a semaphore of three slots (``slot``), or as a mutex."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Sharing(database, NAME, slots=3)) for _ in range(count)]
        yield [child.ready() for child in children]
        for child in children:
            if child.process.poll() is None:
                child.end()


def taken(lock):
    """Return a permit that is not tied to this thread."""
    permit = lock.acquire()
    permit.detach()
    return permit


def kind(database):
    return queries.semaphore(NAME, using=database).kind


def test_the_kind_that_comes_adopts_a_name_that_nobody_uses(world):
    one, three = mutex(NAME, timeout=0, using=world), semaphore(NAME, 3, timeout=0, using=world)

    def all_of(lock):
        with contextlib.ExitStack() as stack:
            while (permit := lock.try_acquire()) is not None:
                permit.detach()
                stack.callback(permit.release)
                assert (lock.status().kind, lock.status().other_kind) == (lock.kind, "")
                assert lock.status().slots == lock.slots
            return lock.status().held

    assert [all_of(lock) for lock in (one, three, one, one, three, three, one)] == [1, 3, 1, 1, 3, 3, 1]


def test_a_mutex_is_alone_and_a_semaphore_has_its_slots_without_one(world):
    one, three = mutex(NAME, timeout=0, using=world), semaphore(NAME, 3, timeout=0, using=world)
    held = [taken(three) for _ in range(3)]
    for permit in held:
        assert one.try_acquire() is None
        permit.release()
    alone = taken(one)
    assert alone.slot == 1
    with pytest.raises(AcquireTimeoutError, match=r"1 of 1 held.*it is in use as a mutex"):
        three.acquire()
    assert semaphore(NAME, 3, take=2, timeout=0, using=world).try_acquire() is None
    assert semaphore(NAME, 3, timeout=0, fair=False, using=world).try_acquire() is None
    alone.release()
    for permit in [taken(three) for _ in range(3)]:
        permit.release()
    if world != "default":
        assert held_rows(world) == []


def test_while_a_mutex_waits_newcomers_wait_behind_it_and_nobody_starves(database):
    with sharing(database) as (here, there):
        here.has("a", "slot")
        there.has("b", "slot")
        here.asks("m", "mutex")
        wait_for_waiters(database, "mutex")
        refused(there, "no", "slot")
        if not applocks.are_at(database):
            wait_until(lambda: kind(database) == "mutex", timeout=SOON)
            refused(there, "no", "slot", fair=False)
        there.asks("c", "slot")
        wait_for_waiters(database, "mutex", "")
        here.release("a")
        assert here.is_silent("m")
        refused(there, "no", "slot")
        there.release("b")
        here.held("m", timeout=SOON)
        assert there.is_silent("c")
        there.asks("d", "slot")
        there.asks("e", "slot", fair=False)
        here.release("m")
        for who in ("c", "d", "e"):  # all three at once, without another mutex
            there.held(who, timeout=SOON)
        assert kind(database) == "semaphore"
        for who in ("c", "d", "e"):
            there.release(who)
    assert held_rows(database) == []


def test_a_mutex_that_gives_up_leaves_the_slots_to_the_semaphore(database):
    with sharing(database, 3) as (here, there, third):
        here.has("a", "slot")
        there.asks("m", "mutex", timeout=6)  # so long that it is seen to wait on a busy machine
        wait_for_waiters(database, "mutex")
        third.asks("b", "slot")
        there.word("m", "AcquireTimeoutError", timeout=SOON)
        third.held("b", timeout=SOON)
        there.asks("m", "mutex")
        wait_for_waiters(database, "mutex")
        third.asks("c", "slot")
        there.kill()  # while it waits
        third.held("c", timeout=SOON)
        third.release("c")
        third.release("b")
        here.release("a")


@pytest.mark.one_server("beacons")
def test_holders_that_die_are_no_longer_in_the_way(database):
    with sharing(database, 3) as (here, there, third):
        here.has("m", "mutex")
        there.asks("a", "slot")
        wait_for_waiters(database, "")
        here.does("m", "uncount", says="uncounted")
        here.kill()
        there.held("a", timeout=SOON)
        there.has("b", "slot")
        third.asks("m", "mutex")
        wait_for_waiters(database, "mutex")
        for who in ("a", "b"):
            there.does(who, "uncount", says="uncounted")
        there.kill()
        third.held("m", timeout=SOON)
        third.release("m")


@pytest.mark.rows_only("lease")
@pytest.mark.parametrize("verb", ["slot", "mutex"])
def test_a_holder_that_slept_past_its_lease_has_lost_it_to_the_other_kind(database, verb):
    """Whatever slot it had: it can't renew what it had for as long as somebody else is in."""
    other = {"slot": "mutex", "mutex": "slot"}[verb]
    with contextlib.ExitStack() as stack:
        here, there = (stack.enter_context(Sharing(database, NAME, slots=3, lease=2)).ready() for _ in range(2))
        if verb == "slot":
            here.has("first", verb)  # so that it has the second slot
        here.has("a", verb)
        if verb == "slot":
            here.release("first")
        here.does("a", "uncount", says="uncounted")
        here.stop()
        there.has("b", other)
        if other == "slot":
            there.has("c", other)
        here.cont()
        assert here.does("a", "lost", says="lost") is not None
        there.release("b")
        if other == "slot":
            there.release("c")


@pytest.mark.one_server("fences")
@pytest.mark.rows_only("lease")
@pytest.mark.parametrize("kind", ["semaphore", "mutex"])
def test_a_fenced_transaction_keeps_the_other_kind_out_after_its_lease(database, kind):
    if connections[database].vendor == "sqlite":
        pytest.skip("a fenced transaction is SQLite's only writer: nobody else can do anything")
    one, three = mutex(NAME, timeout=0, using=database), semaphore(NAME, 3, timeout=0, using=database)
    below = [] if kind == "mutex" else [three.acquire()]
    with Fencer(database, NAME, lease=4, **{"kind": kind} if kind == "mutex" else {"slots": 3}) as first:
        first.holds()
        for permit in below:  # the slot that a mutex would have is free
            permit.release()
        assert first.tell("begin") == "begun"
        assert first.tell("fence") == "fenced"
        first.stop(anywhere=True)
        wait_until(lambda: not held_rows(database), timeout=SOON, what="no live permit")
        other = {"mutex": three, "semaphore": one}[kind]
        assert other.try_acquire() is None
        first.cont()
        assert first.tell("commit") == "committed"
        wait_until(other.try_acquire, timeout=SOON).release()
        first.end()


@pytest.mark.rows_only("row statements")
def test_an_uncontended_acquire_costs_nothing_more(database):
    """On a name that was the other kind before, as on one that never was."""
    session, backend = CountedSession(database), get_backend(database)

    def claimed(lock):
        lock.acquire().release()
        session.sent()
        request = lock._request(keeper_for(backend), "")
        backend.release(session, base.Acquired(request, backend.claim(session, request)))
        return session.sent()

    def sent(lock):
        return min(claimed(lock) for _ in range(3))  # SQLite's file may be locked by what writes the history

    one, three = mutex(NAME, using=database), semaphore(NAME, 3, using=database)
    usual = sent(mutex("other", using=database))
    assert usual == sent(semaphore("another", 3, using=database))
    assert [sent(lock) for lock in (one, three, one, three)] == [usual] * 4
    session.close()


#: A second, to be waited in a statement after it has read what kind the name is.
SLEEPS = {"postgresql": "(SELECT pg_sleep(1.5)) IS NOT NULL", "mysql": "SLEEP(1.5) = 0"}


@pytest.mark.one_server("own statements")
@pytest.mark.rows_only("row statements")
@pytest.mark.parametrize("kind", ["semaphore", "mutex"])
def test_a_claim_that_has_seen_the_name_as_it_was_takes_nothing(database, kind):
    """The row of the slot itself says whether it may be taken, as no statement locks the row of the name."""
    if (sleep := SLEEPS.get(connections[database].vendor)) is None:
        pytest.skip("no statement sees there what has changed meanwhile")
    one, three = mutex(NAME, timeout=0, using=database), semaphore(NAME, 3, timeout=0, using=database)
    late, other = (one, three) if kind == "mutex" else (three, one)
    late.acquire().release()
    request = late._request(keeper_for(get_backend(database)), "")
    session = OwnSession(database)
    text = acquire.take_sql(dialect_for(session.connection), "newcomer", durable=True, mutex=kind == "mutex").replace(
        "m.kind = %(kind)s", f"m.kind = %(kind)s AND {sleep}"
    )

    def claim():
        parameters = request_parameters(request) | {"gap": None, "years_ago": 0}
        session.run(lambda cursor: Statements(cursor, parameters).change(text))
        session.close()

    claimed = run_beside(claim)
    wait_until(lambda: sleeping(database), timeout=SOON, what="a claim that sleeps")
    permits = [taken(other) for _ in range(other.slots)]
    permits[0].release()
    if kind == "semaphore":
        permits = [taken(other)]
    claimed.result(SOON)
    assert not SlotRow.objects.using(database).filter(permit_id=request.permit_id).exists()
    for permit in permits:
        permit.release()


@pytest.mark.one_server("own statements")
@pytest.mark.rows_only("row statements")
def test_a_mutex_that_takes_or_stands_by_what_it_has_seen_takes_nothing(database, monkeypatch):
    """The same where one statement takes a slot, or else a place."""
    if not dialect_for(connections[database]).inserting_ctes:
        pytest.skip("a claim and a place are two statements there")
    one, three = mutex(NAME, timeout=0, using=database), semaphore(NAME, 3, timeout=0, using=database)
    one.acquire().release()
    request, session = one._request(keeper_for(get_backend(database)), ""), OwnSession(database)
    text, seen = acquire.take_or_stand, "m.kind = %(kind)s"

    def and_wait(*args, **more):
        return text(*args, **more).replace(seen, f"{seen} AND (SELECT pg_advisory_xact_lock_shared(7, 7)) IS NOT NULL")

    monkeypatch.setattr(acquire, "take_or_stand", and_wait)
    claim = acquire.SlotRequest(session, request, base.Place(boot_now(), waiting=1))
    waiting = "SELECT COUNT(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 7 AND NOT granted"
    with contextlib.closing(raw_connection(database)) as guard:
        guard.execute("SELECT pg_advisory_lock(7, 7)")
        claimed = run_beside(claim.take_or_stand)
        wait_until(lambda: query(database, waiting)[0][0], timeout=SOON, what="a claim that waits")
        permits = [taken(three) for _ in range(3)]
        permits[0].release()
    waited = claimed.result(SOON)
    queue.leave(session, request)
    session.close()
    assert waited.granted == ()
    for permit in permits:
        permit.release()


def sleeping(alias):
    views = {
        "postgresql": "pg_stat_activity WHERE query LIKE '%%pg_sleep(1.5)%%' AND wait_event = 'PgSleep'",
        "mysql": "information_schema.processlist WHERE info LIKE '%%SLEEP(1.5)%%' AND state = 'User sleep'",
    }
    return query(alias, f"SELECT COUNT(*) FROM {views[connections[alias].vendor]}")[0][0]


def test_a_rolling_deployment_from_a_mutex_to_a_semaphore_and_back_under_load(database):
    """Processes of both kinds contend all the time; whoever is in with a mutex is alone. Nobody waits for long."""
    with contextlib.ExitStack() as stack:
        inside = {
            verb: stack.enter_context(OutsideCounter(database, who))
            for verb, who in (("slot", "readers"), ("mutex", "writers"))
        }

        def start(verb):
            child = stack.enter_context(Child("tests.programs.rwlock_clients:roll", database, NAME, verb, 3))
            child.expect("ready")
            return verb, child

        def go_on():
            """Wait until all kinds that are there have been let in some more times."""
            for verb in {verb for verb, _ in running}:
                before = inside[verb].entered
                wait_until(lambda: inside[verb].entered > before + 10, timeout=SOON, what=verb)  # noqa: B023

        running = [start("mutex") for _ in range(PROCESSES)]
        told = []
        for verb in ("slot", "mutex"):
            for _ in range(PROCESSES):
                running.append(start(verb))
                go_on()
                old, child = running.pop(0)
                child.send()
                told.append((old, *json.loads(child.expect("done", timeout=SOON))))
                child.finish()
                go_on()
            if verb == "slot":
                wait_until(lambda: inside["slot"].current == 3, timeout=SOON, what="three at once, under load")
        for verb, child in running:
            child.send()
            told.append((verb, *json.loads(child.expect("done", timeout=SOON))))
        print(f"\n{label(database)}: kind, grants, longest turn: {[each[:3] for each in told]}")
        assert [errors for *_, errors in told] == [[]] * len(told)
        assert all(grants for _, grants, *_ in told)
        assert (inside["slot"].peak, inside["mutex"].peak) == (3, 1)
        assert (inside["slot"].current, inside["mutex"].current) == (0, 0)
    assert held_rows(database) == []
    wait_for_waiters(database)
    assert kind(database) == "mutex"


def test_two_kinds_are_logged_once(world, caplog, monkeypatch):
    monkeypatch.setattr(base, "_told", set())
    one, three = mutex(NAME, timeout=0, using=world), semaphore(NAME, 3, timeout=0, using=world)
    with caplog.at_level(logging.INFO, "django_sqlsem"):
        three.acquire().release()
        one.acquire().release()
        assert caplog.records == []
        held = taken(three)
        assert [one.try_acquire() for _ in range(3)] == [None] * 3
        held.release()
        with one as permit:
            permit.detach()
            assert three.try_acquire() is None
    [record] = caplog.records
    assert (record.levelname, record.semaphore, record.what) == ("WARNING", NAME, "two_kinds")
    assert "in use as a mutex and as a semaphore: one is let in at a time" in record.getMessage()


def test_operators_are_shown_two_kinds(database, capsys):
    with sharing(database) as (here, there):
        here.has("a", "slot")
        here.has("b", "slot")
        there.asks("m", "mutex")
        wait_for_waiters(database, "mutex")
        kinds = {"mutex", "semaphore"}
        if not applocks.are_at(database):  # there the kind of the last grant is told
            wait_until(lambda: kind(database) == "mutex")
        call_command("locks", "list", "--format", "json", "--database", database)
        [shown] = json.loads(capsys.readouterr().out)
        assert {shown["kind"], shown["other_kind"]} == kinds
        assert [each.get("mode", "") for each in shown["waiters"]] == ["mutex"]
        call_command("locks", "show", NAME, "--database", database)
        assert f"in use as a {shown['other_kind']} too" in capsys.readouterr().out
        call_command("locks", "list", "--database", database)
        table = capsys.readouterr().out
        assert ("waiting mutex" in table) or table.count("held semaphore") == 2
        control.set_slots(NAME, 1, by="ann", using=database)
        here.release("a")
        here.release("b")
        there.held("m", timeout=SOON)
        control.set_slots(NAME, None, by="ann", using=database)
        with pytest.raises(ValueError, match="is a mutex: it has one slot, not 2"):
            control.set_slots(NAME, 2, by="ann", using=database)
        there.release("m")


def test_an_operators_number_is_the_semaphores_and_never_a_mutexs(database):
    with sharing(database) as (here, there):
        here.has("a", "slot")
        control.set_slots(NAME, 2, by="ann", using=database)
        here.has("b", "slot")
        refused(there, "no", "slot")
        here.release("a")
        here.release("b")
        there.has("m", "mutex")
        refused(here, "no", "mutex")
        refused(here, "no", "slot")
        assert queries.semaphore(NAME, using=database).slots == 1
        there.release("m")
        here.has("a", "slot")
        here.has("b", "slot")
        refused(there, "no", "slot")
        assert queries.semaphore(NAME, using=database).slots == 2
        here.release("a")
        here.release("b")
        control.set_slots(NAME, None, by="ann", using=database)


def test_a_command_runs_under_the_lock_that_the_code_calls_a_mutex(database):
    """As the README has it, in either order."""
    call_command("locks", "run", "nightly", "--timeout", "0", "--database", database, "--", "true")
    nightly = mutex("nightly", timeout=0, using=database)
    held = taken(nightly)
    with pytest.raises(CommandError, match="No slot of 'nightly' is free"):
        call_command("locks", "run", "nightly", "--timeout", "0", "--database", database, "--", "true")
    held.release()
    call_command("locks", "run", "nightly", "--timeout", "0", "--database", database, "--", "true")
    nightly.acquire().release()


OTHERS = {
    "rlock": rlock,
    "rwlock": lambda name, **options: rwlock(name, **options).read(),
    "mutex": mutex,
    "semaphore": semaphore,
}


@pytest.mark.parametrize("there", ["rlock", "rwlock"])
def test_other_kinds_refuse_and_name_the_way_out(world, there):
    locks = {kind: make(NAME, timeout=0, using=world) for kind, make in OTHERS.items()}

    def refusal(kind):
        with pytest.raises(ImproperlyConfigured) as caught:
            locks[kind].acquire()
        return str(caught.value)

    option = "" if world == "default" else f" --database {world}"
    purge = f"`manage.py locks purge --idle --name 'billing'{option}` frees the name."
    locks[there].acquire().release()
    for kind in OTHERS.keys() - {there}:
        told = f"'billing' is an {there} already and can't be used as {a_kind(kind)}."
        since = "" if get_backend(world).process_local else ", and nobody has taken it since 20..-..-.. ..:.. UTC"
        assert re.fullmatch(rf"{re.escape(told)} Nobody holds it{since}: {re.escape(purge)}", refusal(kind))
        held = taken(locks[there])
        assert refusal(kind) == (
            f"{told} It is in use now: give one of the two another name; or, once nobody uses it, {purge}"
        )
        held.release()
    call_command("locks", "purge", "--idle", "--name", "billing", "--noinput", "--database", world)
    locks["mutex"].acquire().release()
    assert refusal(there).startswith(f"'billing' is a mutex already and can't be used as an {there}. Nobody holds it")


def test_a_counter_refuses_to_be_a_lock_and_the_other_way_round(database):
    if not get_backend(database).keeps_counters:
        pytest.skip("counts are kept elsewhere")
    count = counter(NAME, 0, using=database)
    count.release()
    with pytest.raises(ImproperlyConfigured, match="is a counter already and can't be used as a mutex"):
        mutex(NAME, timeout=0, using=database).acquire()
    assert count.try_acquire() is not None
    mutex("other", timeout=0, using=database).acquire().release()
    with pytest.raises(ImproperlyConfigured, match="is a mutex already and can't be used as a counter"):
        counter("other", using=database).release()
