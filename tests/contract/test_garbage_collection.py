"""What is refused leaves nothing to the garbage collector: errors keep their frames, and no frame keeps its error."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import gc
import threading
import types

import pytest
from celery import Celery
from celery._state import _task_stack
from celery.exceptions import Reject, Retry
from django.db import DatabaseError, connections
from django.http import StreamingHttpResponse
from django.test import AsyncRequestFactory, RequestFactory

from django_sqlsem import AcquireTimeoutError, semaphore
from django_sqlsem.database.sessions import OwnSession, RefusedError, briefly
from django_sqlsem.runtime import chores
from django_sqlsem.testing import held
from tests.support.databases import held_rows, raw_connection
from tests.support.keepers import keeper_of
from tests.support.threads import run_beside, wait_until

pytestmark = pytest.mark.process_side

TIMES = 5
TASKS = Celery("garbage", broker="memory://", set_as_current=False)
UNREACHABLE = Celery("unreachable", broker="amqp://127.0.0.1:1//", set_as_current=False)
UNREACHABLE.conf.update(task_publish_retry=False)


def is_ours(thing):
    if isinstance(thing, types.FrameType):
        return thing.f_globals.get("__name__", "").startswith("django_sqlsem")
    if isinstance(thing, types.TracebackType):
        return is_ours(thing.tb_frame)
    return type(thing).__module__.startswith("django_sqlsem")


def named(thing):
    if isinstance(thing, types.TracebackType):
        thing = thing.tb_frame
    return f"frame of {thing.f_code.co_qualname}" if isinstance(thing, types.FrameType) else type(thing).__qualname__


def garbage(attempt):
    """What several attempts leave of ours that only the garbage collector finds, with how much of it there is."""
    attempt()  # what is made once is made
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(TIMES):
            attempt()
        gc.collect()
        return collections.Counter(named(thing) for thing in gc.garbage if is_ours(thing))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def tried(call):
    def attempt():
        with contextlib.suppress(AcquireTimeoutError):
            call()

    return attempt


def in_loop(make):
    async def attempt():
        with contextlib.suppress(AcquireTimeoutError):  # in here: what leaves it is kept by frames of asyncio's
            await make()

    return lambda: asyncio.run(attempt())


def block(lock):
    @tried
    def attempt():
        with lock:
            raise AssertionError("not reached")

    return attempt


def async_block(lock):
    async def attempt():
        async with lock:
            raise AssertionError("not reached")

    return in_loop(attempt)


def function(lock):
    return tried(lock(lambda: None))


def skipped(lock):
    return tried(dataclasses.replace(lock, on_busy="skip")(lambda: None))


def generator(lock):
    @lock
    def items():
        yield 1

    return tried(lambda: list(items()))


def async_function(lock):
    @lock
    async def work():
        raise AssertionError("not reached")

    return in_loop(work)


def async_generator(lock):
    @lock
    async def items():
        yield 1

    async def attempt():
        async for _ in items():
            raise AssertionError("not reached")

    return in_loop(attempt)


def view(lock, **options):
    def work(request):
        raise AssertionError("not reached")

    decorated = dataclasses.replace(lock, **options)(work)
    return tried(lambda: decorated(RequestFactory().get("/")))


def raising_view(lock):
    return view(lock, on_busy="raise")


def async_view(lock):
    @lock
    async def work(request):
        raise AssertionError("not reached")

    return in_loop(lambda: work(AsyncRequestFactory().get("/")))


def task(lock, app=TASKS, expected=Retry, **options):
    """A task's body, run as a worker does."""

    # A name is given once: an app that knows it returns the task that it knows.
    @app.task(name=f"{lock.name}-{lock.using}", **options)
    @lock
    def work():
        raise AssertionError("not reached")

    def attempt():
        work.push_request(id="1", retries=0, called_directly=False, args=(), kwargs={}, delivery_info={})
        _task_stack.push(work)
        try:
            work.run()
        except expected:
            return
        finally:
            _task_stack.pop()
            work.pop_request()
        raise AssertionError("not refused")

    return attempt


def unsent_task(lock):
    return task(lock, UNREACHABLE, AcquireTimeoutError)


def unsent_late_task(lock):
    return task(lock, UNREACHABLE, Reject, acks_late=True)


MAKERS = [
    block,
    async_block,
    function,
    skipped,
    generator,
    async_function,
    async_generator,
    view,
    raising_view,
    async_view,
    task,
    pytest.param(unsent_task, marks=pytest.mark.soak),
    pytest.param(unsent_late_task, marks=pytest.mark.soak),
]


@pytest.mark.rows_only("ranks")
@pytest.mark.parametrize("timeout", [0, 0.02], ids=["at once", "after a wait"])
@pytest.mark.parametrize("make", MAKERS)
def test_a_refusal_is_no_garbage(database, make, timeout, monkeypatch):
    monkeypatch.setattr("django_sqlsem.contrib.celery.PAUSE_BEFORE_REJECT", 0)
    lock = semaphore(f"garbage-{make.__name__}-{timeout}", 1, timeout=timeout, using=database)
    with held(lock):
        assert garbage(make(lock)) == {}


def test_a_locked_file_leaves_no_garbage(database):
    """What found SQLite locked is tried again: the errors under way have the caller's frames, and its permit."""
    if connections[database].vendor != "sqlite":
        pytest.skip("no other locks the whole database")
    lock = semaphore("garbage-locked", 1, timeout=0, using=database)
    work = keeper_of(database).work
    with contextlib.closing(raw_connection(database)) as raw:

        def attempt():
            raw.execute("BEGIN IMMEDIATE")
            before = work.attempts

            def let_go():
                wait_until(lambda: work.attempts > before + 1, timeout=60)
                raw.execute("COMMIT")

            gone = run_beside(let_go)
            with lock:
                gone.result()

        assert garbage(attempt) == {}


def test_what_is_refused_briefly_is_no_garbage(database):
    """Such as what the keeper writes of the history when somebody else has the file."""

    def refuse(cursor):
        raise DatabaseError("refused")

    with contextlib.closing(OwnSession(database)) as session:

        def attempt():
            with contextlib.suppress(RefusedError):
                briefly(session, refuse, 1.0)

        assert garbage(attempt) == {}


def test_what_is_refused_as_the_file_is_locked_is_no_garbage(database):
    """Django's own frames are on a cycle with the error that it raises."""
    if connections[database].vendor != "sqlite":
        pytest.skip("no other locks the whole database")
    with contextlib.closing(OwnSession(database)) as session, contextlib.closing(raw_connection(database)) as raw:
        raw.execute("BEGIN IMMEDIATE")

        def attempt():
            with contextlib.suppress(RefusedError):
                briefly(session, lambda cursor: pytest.fail("it is not locked"), 1.0, in_line=0.03)

        assert garbage(attempt) == {}
        raw.execute("ROLLBACK")


def test_a_response_that_is_thrown_away_is_no_mistake(database, caplog):
    """Also if the collector comes to its permit first."""

    @semaphore("thrown", using=database)
    def stream(request):
        return StreamingHttpResponse(iter([b"never read"]))

    for _ in range(TIMES):
        response = stream(RequestFactory().get("/"))
        response.itself = response
        assert len(held_rows(database)) == 1
        del response
        gc.collect()
        wait_until(lambda: held_rows(database) == [])
    assert "forgotten" not in caplog.text


def test_a_response_is_no_mistake_either_if_the_keeper_looks_before_the_finalisers_are_done(
    database, caplog, monkeypatch
):
    looked = threading.Event()
    forgotten = chores._forgotten

    def look(acquisition):
        why, dropped = forgotten(acquisition), acquisition.permit() is None
        if dropped:
            looked.set()
        return why

    class First:
        """Is finalised first of its cycle, when its weak references are gone."""

        def __del__(self):
            keeper_of(database).renewals.soon()
            assert looked.wait(30)

    @semaphore("thrown", using=database)
    def stream(request):
        return StreamingHttpResponse(iter([b"never read"]))

    monkeypatch.setattr(chores, "_forgotten", look)
    first = First()
    first.response = stream(RequestFactory().get("/"))
    first.response.itself = first
    assert len(held_rows(database)) == 1
    del first
    gc.collect()
    assert looked.is_set()
    wait_until(lambda: held_rows(database) == [])
    assert "forgotten" not in caplog.text
