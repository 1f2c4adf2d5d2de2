"""A bound on waiting: who may not wait is refused at once, over all processes, and is told why."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import types

import pytest
from django.http import HttpResponse

from django_sqlsem import AcquireTimeoutError, control, queries, semaphore
from django_sqlsem.database.dialects import Dialect
from django_sqlsem.decorators.calls import Call
from django_sqlsem.locks import rlock, rwlock
from tests.programs.queue_clients import Queuer
from tests.support.threads import run_in_threads, wait_until

FAR = 3600


@pytest.fixture
def statements(monkeypatch):
    """The statements that this thread sends."""
    sent, here, execute = [], threading.get_ident(), Dialect.execute

    def noted(self, cursor, sql, parameters):
        if threading.get_ident() == here:
            sent.append(sql)
        return execute(self, cursor, sql, parameters)

    monkeypatch.setattr(Dialect, "execute", noted)
    return sent


@pytest.fixture
def taken(database):
    """The only slot of ``bounded`` is held, as by somebody else."""
    permit = semaphore("bounded", using=database).acquire()
    permit.detach()
    yield permit
    permit.release()


def bounded(database, **options):
    return semaphore("bounded", **{"using": database, "timeout": FAR, **options})


def waiting(database):
    found = queries.semaphore("bounded", using=database)
    return 0 if found is None else found.waiting


def wait_for_waiters(database, count):
    wait_until(lambda: waiting(database) == count, what=f"{count} waiters")


@pytest.fixture
def elsewhere(database, taken):
    """Another process waits for ``bounded``."""
    with Queuer(database, "bounded", counted=False) as other:
        other.ready().ask()
        wait_for_waiters(database, 1)
        yield other
        other.kill()


def why(act):
    with pytest.raises(AcquireTimeoutError) as caught:
        act()
    return caught.value.reason, caught.value.waiting


def test_the_next_one_is_refused_at_once_whatever_process_waits(database, elsewhere):
    assert why(bounded(database, max_waiting=1).acquire) == ("queue full", 1)
    assert why(lambda: asyncio.run(bounded(database, max_waiting=1).aacquire())) == ("queue full", 1)
    assert waiting(database) == 1


def test_waiters_of_this_process_count(database, taken):
    lock, got = bounded(database, max_waiting=2), []
    threads = [threading.Thread(target=lambda: got.append(lock.acquire().release())) for _ in range(2)]
    for nth, thread in enumerate(threads, start=1):
        thread.start()
        wait_for_waiters(database, nth)
    assert why(lock.acquire) == ("queue full", 2)
    taken.release()
    for thread in threads:
        thread.join(30)
    assert len(got) == 2


def test_waiters_of_this_process_and_of_others_count_together(database, taken, elsewhere):
    lock, got = bounded(database, max_waiting=2), []
    thread = threading.Thread(target=lambda: got.append(lock.acquire().release()))
    thread.start()
    wait_for_waiters(database, 2)
    assert why(lock.acquire) == ("queue full", 2)
    assert why(lambda: asyncio.run(lock.aacquire())) == ("queue full", 2)
    elsewhere.kill()
    taken.release()
    thread.join(30)
    assert len(got) == 1


async def _take(lock):
    await (await lock.aacquire()).arelease()


def test_with_a_bound_of_nothing_nobody_waits_and_who_finds_a_slot_has_it(database, taken):
    lock = bounded(database, max_waiting=0)
    assert why(lock.acquire) == ("full", 0)
    assert why(lambda: asyncio.run(lock.aacquire())) == ("full", 0)
    taken.release()
    lock.acquire().release()
    asyncio.run(_take(lock))


@pytest.mark.parametrize("kind", ["reader", "writer", "rlock", "several"])
def test_every_lock_has_the_bound(database, kind):
    options = {"using": database, "timeout": FAR, "max_waiting": 0}
    held, lock = {
        "reader": lambda: (rwlock("b", 2, **options).write(), rwlock("b", 2, **options).read()),
        "writer": lambda: (rwlock("b", 2, **options).read(), rwlock("b", 2, **options).write()),
        "rlock": lambda: (rlock("b", **options), rlock("b", **options)),
        "several": lambda: (semaphore("b", 3, **options), semaphore("b", 3, take=3, **options)),
    }[kind]()
    permit = held.acquire()
    assert run_in_threads(1, lambda _: why(lock.acquire)) == [("full", 0)]
    permit.release()
    lock.acquire().release()


def test_of_many_at_once_no_more_wait_than_may(database, taken):
    lock, barrier, refused, served = bounded(database, max_waiting=2), threading.Barrier(12), [], []

    def come():
        barrier.wait()
        try:
            with lock:
                served.append(True)
        except AcquireTimeoutError as error:
            refused.append(error.reason)

    threads = [threading.Thread(target=come) for _ in range(12)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(refused) == 10)
    taken.release()
    for thread in threads:
        thread.join(30)
    assert (len(served), set(refused)) == (2, {"queue full"})


def test_an_uncontended_acquire_costs_no_statement_more(database, statements):
    counts = []
    for most in (None, 1):
        lock = semaphore(f"costs-{most}", using=database, timeout=FAR, max_waiting=most)
        lock.acquire().release()
        statements.clear()
        permit = lock.acquire()
        counts.append(len(statements))
        permit.release()
    assert counts[0] == counts[1]


@pytest.mark.rows_only("row statements")
def test_to_refuse_at_once_because_others_wait_takes_two_statements(database, elsewhere, statements, rf):
    view = bounded(database, max_waiting=1)(lambda request: HttpResponse())
    statements.clear()
    assert view(rf.get("/")).status_code == 503
    assert len(statements) <= 2, statements


@pytest.mark.rows_only("row statements")
def test_to_refuse_at_once_because_it_is_paused_takes_two_statements(database, taken, statements, rf):
    view = bounded(database)(lambda request: HttpResponse())
    control.pause("bounded", by="ann", using=database)
    statements.clear()
    assert view(rf.get("/")).status_code == 503
    assert len(statements) <= 2, statements


def test_a_decorated_view_is_refused_at_once_while_paused_or_drained(database, rf):
    view = bounded(database)(lambda request: HttpResponse("done"))
    assert view(rf.get("/")).content == b"done"
    for pause in (control.pause, control.drain):
        pause("bounded", by="ann", using=database)
        answer = view(rf.get("/"))
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "30")
        pause("bounded", by="ann", duration=FAR, using=database)
        assert FAR - 60 <= int(view(rf.get("/")).headers["Retry-After"]) <= FAR
        control.resume("bounded", by="ann", using=database)
    assert view(rf.get("/")).content == b"done"


def test_an_asynchronous_view_is_refused_at_once_while_paused(database, async_rf):
    @bounded(database)
    async def view(request):
        return HttpResponse("done")

    assert asyncio.run(view(async_rf.get("/"))).content == b"done"
    control.pause("bounded", by="ann", using=database)
    assert asyncio.run(view(async_rf.get("/"))).headers["Retry-After"] == "30"


def test_who_waits_for_ever_and_plain_blocks_wait_for_a_paused_name(database, rf):
    view = bounded(database, timeout=None)(lambda request: HttpResponse("done"))
    lock, done = bounded(database), []
    lock.acquire().release()
    control.pause("bounded", by="ann", using=database)
    threads = [
        threading.Thread(target=lambda: done.append(view(rf.get("/")).status_code)),
        threading.Thread(target=lambda: done.append(lock.acquire().release())),
    ]
    for thread in threads:
        thread.start()
    wait_for_waiters(database, 2)
    control.resume("bounded", by="ann", using=database)
    for thread in threads:
        thread.join(30)
    assert sorted(map(str, done)) == ["200", "None"]


def test_paused_full_and_queue_full_are_told_apart(database, taken, rf, caplog):
    seen = []

    def told(**options):
        lock = bounded(database, **options)
        bounded(database, on_busy=lambda busy: seen.append(busy.reason) or HttpResponse(), **options)(print)(
            rf.get("/")
        )
        caplog.clear()
        plain = lock(lambda request: HttpResponse())
        body = json.loads(plain(rf.get("/", headers={"Accept": "application/json"})).content)
        page = plain(rf.get("/", headers={"Accept": "text/html"})).content.decode()
        record = caplog.records[-1]
        assert seen[-1] == body["reason"] == record.reason
        return seen[-1], page, record.getMessage()

    reason, page, message = told(timeout=0)
    assert reason == "full"
    assert "This is busy right now" in page
    assert "because no slot of 'bounded' was free; 1 held, 0 waiting." in message
    reason, page, message = told(max_waiting=0)
    assert reason == "full"
    assert "others are waiting" not in page
    assert message.endswith("because no slot of 'bounded' was free.")
    with Queuer(database, "bounded", counted=False) as other:
        other.ready().ask()
        wait_for_waiters(database, 1)
        reason, page, message = told(max_waiting=1)
        assert reason == "queue full"
        assert "others are waiting already" in page
        assert "because no slot of 'bounded' was free, and 1 waits for one already." in message
        other.kill()
    control.pause("bounded", by="ann", using=database)
    for options in ({}, {"timeout": 0}, {"max_waiting": 0}):
        reason, page, message = told(**options)
        assert reason == "paused"
        assert "<h1>Paused</h1>" in page
        assert "because 'bounded' is paused by an operator." in message


@pytest.mark.parametrize(
    ("setting", "options", "main", "thread", "coroutine"),
    [
        ("auto", {}, 0, 1, None),
        ("auto", {"timeout": 5}, None, None, None),
        ("auto", {"max_waiting": 7}, 7, 7, 7),
        ("auto", {"max_waiting": None}, None, None, None),
        (3, {}, 3, 3, 3),
        (3, {"timeout": 5}, None, None, None),
        (None, {}, None, None, None),
        ("VIEW_TIMEOUT", {}, None, None, None),
    ],
)
def test_how_many_views_wait_unless_they_say(settings, rf, setting, options, main, thread, coroutine):
    """A synchronous view that waits occupies a worker, or a thread: few do. Who says how long it waits does wait."""
    settings.SQLSEM = {"VIEW_TIMEOUT": 9} if setting == "VIEW_TIMEOUT" else {"VIEW_MAX_WAITING": setting}
    call, lock = Call(request=rf.get("/")), semaphore("a", **options)
    assert call.bound(lock, call.timeout(lock)).max_waiting == main
    assert run_in_threads(1, lambda _: call.bound(lock, call.timeout(lock)).max_waiting) == [thread]
    assert call.bound(lock, call.timeout(lock), waits_in_thread=False).max_waiting == coroutine


@pytest.mark.parametrize(("cores", "most"), [(1, 0), (6, 1)])
def test_uwsgi_serves_one_of_its_threads_in_the_main_one(rf, monkeypatch, cores, most):
    monkeypatch.setitem(sys.modules, "uwsgi", types.SimpleNamespace(cores=cores))
    call, lock = Call(request=rf.get("/")), semaphore("a")
    assert call.bound(lock, call.timeout(lock)).max_waiting == most
    assert run_in_threads(1, lambda _: call.bound(lock, call.timeout(lock)).max_waiting) == [1]


def test_a_bound_in_a_test_case(world, rf):
    lock = bounded(world, max_waiting=0)
    permit = lock.acquire()
    permit.detach()
    assert why(lock.acquire) == ("full", 0)
    permit.release()
    control.pause("bounded", by="ann", using=world)
    assert bounded(world)(lambda request: HttpResponse())(rf.get("/")).headers["Retry-After"] == "30"


@pytest.mark.parametrize("value", [-1, 1.0, "1", True])
def test_a_bound_that_means_nothing_is_refused(value):
    with pytest.raises((TypeError, ValueError), match="max_waiting must be"):
        semaphore("a", max_waiting=value)
