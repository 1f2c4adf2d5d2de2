from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import subprocess
import sys
import textwrap
import threading
import time
import types
import uuid

import pytest
from asgiref.sync import async_to_sync, iscoroutinefunction, markcoroutinefunction
from django.contrib.auth.models import AnonymousUser, User
from django.db import connections
from django.http import HttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.utils.functional import SimpleLazyObject
from django.views import View

from django_sqlsem import AcquireTimeoutError, mutex, queries, semaphore
from django_sqlsem.busy import validate_on_busy
from django_sqlsem.core import identity
from django_sqlsem.signals import acquire_timed_out, permit_acquired, permit_released
from django_sqlsem.testing import busy, held
from tests.support import urls_decorators
from tests.support.databases import ROOT, held_rows
from tests.support.processes import Child
from tests.support.threads import run_in_threads, wait_until

pytestmark = pytest.mark.process_side

rf = RequestFactory()


def holds(name, using=None):
    """How many slots of ``name`` are held."""
    return semaphore(name, using=using).status().held


# Functions of every kind, on the process-local backend of a test case.


@pytest.mark.django_db
class TestFunctions:
    def test_a_call_holds_a_permit_and_gives_it_back(self):
        @semaphore("f")
        def f(a, b=2, *c, d, **e):
            return holds("f"), (a, b, c, d, e)

        assert f(1, d=4, x=5) == (1, (1, 2, (), 4, {"x": 5}))
        assert holds("f") == 0

    @pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_whatever_is_raised_gives_it_back(self, error):
        @semaphore("f")
        def f():
            raise error

        with pytest.raises(error):
            f()
        assert holds("f") == 0

    def test_each_call_has_a_permit_of_its_own(self):
        tokens = []
        barrier = threading.Barrier(8)

        def note(permit, **kwargs):
            tokens.append((permit.slot, permit.token))

        @semaphore("shared", slots=8)
        def f():
            barrier.wait(10)

        permit_acquired.connect(note)
        try:
            run_in_threads(8, lambda index: f())
        finally:
            permit_acquired.disconnect(note)
        assert sorted(slot for slot, _ in tokens) == list(range(1, 9))
        assert len(set(tokens)) == 8
        assert holds("shared") == 0

    def test_methods_of_all_kinds(self):
        class Thing:
            @semaphore("method:{self.pk}")
            def method(self, x):
                return "method", self.pk, x, holds("method:7")

            @semaphore("static:{x}")
            @staticmethod
            def static(x):
                return "static", x, holds("static:1")

            @staticmethod
            @semaphore("static:{x}")
            def static_below(x):
                return "static", x, holds("static:1")

            @semaphore("class")
            @classmethod
            def class_above(cls, x):
                return cls.__name__, x, holds("class")

            @classmethod
            @semaphore("class:{cls.kind}")
            def class_below(cls, x):
                return cls.__name__, x, holds("class:k")

            pk = 7
            kind = "k"

        assert Thing().method(1) == ("method", 7, 1, 1)
        assert Thing.static(1) == Thing().static(1) == Thing.static_below(1) == ("static", 1, 1)
        assert Thing.class_above(1) == Thing().class_below(1) == ("Thing", 1, 1)
        assert list(inspect.signature(Thing.method).parameters) == ["self", "x"]
        assert list(inspect.signature(Thing().method).parameters) == ["x"]

    def test_callable_objects_and_partials(self):
        class Adder:
            def __call__(self, a, b):
                return a + b, holds("callable")

        assert semaphore("callable")(Adder())(1, 2) == (3, 1)
        assert semaphore("callable")(functools.partial(Adder(), 1))(2) == (3, 1)
        assert semaphore("p:{b}")(functools.partial(lambda a, b: holds(f"p:{b}"), 1))(2) == 1

        class AsyncAdder:
            async def __call__(self, a):
                return a, await semaphore("callable").astatus()

        value, status = asyncio.run(semaphore("callable")(AsyncAdder())(1))
        assert (value, status.held) == (1, 1)

    def test_a_generator_holds_while_it_is_iterated(self):
        closed = []

        @semaphore("g")
        def g(count):
            """Counts."""
            try:
                for number in range(count):
                    received = yield number
                    if received:
                        yield received
            except ZeroDivisionError:
                yield "caught"
            finally:
                closed.append(True)
            return "result"

        assert inspect.isgeneratorfunction(g)
        assert g.__doc__ == "Counts."
        iterator = g(2)
        assert holds("g") == 0
        assert next(iterator) == 0
        assert holds("g") == 1
        assert iterator.send("hello") == "hello"
        assert iterator.throw(ZeroDivisionError) == "caught"
        with pytest.raises(StopIteration) as stop:
            next(iterator)
        assert stop.value.value == "result"
        assert holds("g") == 0
        iterator = g(2)
        next(iterator)
        iterator.close()
        assert (holds("g"), closed) == (0, [True, True])
        assert list(g(3)) == [0, 1, 2]

    def test_what_returns_a_generator_holds_while_it_is_iterated(self):
        class Counts:
            def __call__(self):
                yield holds("g")

        def plain(function):
            return lambda: function()

        for function in (Counts(), plain(Counts())):
            iterator = semaphore("g")(function)()
            assert [next(iterator), holds("g"), *iterator, holds("g")] == [1, 1, 0]
            iterator = semaphore("g")(function)()
            next(iterator)
            iterator.close()
            assert holds("g") == 0

    def test_a_generator_that_nobody_begins_holds_nothing_once_it_is_dropped(self):
        iterator = semaphore("g")(lambda: (number for number in range(3)))()
        assert holds("g") == 1
        del iterator
        wait_until(lambda: holds("g") == 0)

    def test_a_busy_generator(self):
        @semaphore("g", on_busy="skip")
        def g():
            yield 1

        @semaphore("g", timeout=0)
        def strict():
            yield 1

        with busy("g"):
            assert list(g()) == []
            with pytest.raises(AcquireTimeoutError):
                list(strict())

    def test_a_function_may_call_itself_through_another_semaphore(self):
        @semaphore("depth:{depth}")
        def f(depth):
            return [*f(depth - 1), holds(f"depth:{depth}")] if depth else []

        assert f(3) == [1, 1, 1]

    def test_release_on_commit(self):
        from django.db import transaction

        @semaphore("f", release="on_commit")
        def f():
            return holds("f")

        assert f() == 1
        assert holds("f") == 0
        with transaction.atomic():
            assert f() == 1
            assert holds("f") == 1
        assert holds("f") == 0

    def test_a_function_that_only_returns_a_coroutine(self):
        async def work():
            await asyncio.sleep(0)
            return (await semaphore("sneaky").astatus()).held

        wrapped = semaphore("sneaky")(lambda: work())
        coroutine = wrapped()
        assert holds("sneaky") == 1
        assert asyncio.run(coroutine) == 1
        assert holds("sneaky") == 0

        @semaphore("marked")
        @markcoroutinefunction
        def marked():
            return work()

        assert iscoroutinefunction(marked)
        assert asyncio.run(marked()) == 0


@pytest.mark.django_db
class TestCoroutines:
    def test_a_call_holds_a_permit_and_gives_it_back(self):
        @semaphore("c:{a}")
        async def c(a, *, b=1):
            await asyncio.sleep(0)
            return (await semaphore("c:1").astatus()).held, a, b

        assert inspect.iscoroutinefunction(c)
        assert asyncio.run(c(1, b=3)) == (1, 1, 3)
        assert holds("c:1") == 0

    def test_cancellation_gives_it_back(self):
        @semaphore("c")
        async def c():
            started.set()
            await asyncio.sleep(60)

        async def main():
            task = asyncio.create_task(c())
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return (await semaphore("c").astatus()).held

        started = asyncio.Event()
        assert asyncio.run(main()) == 0

    def test_an_async_generator_holds_while_it_is_iterated(self):
        closed = []

        @semaphore("g")
        async def g(count):
            try:
                for number in range(count):
                    received = yield number
                    if received:
                        yield received
            except ZeroDivisionError:
                yield "caught"
            finally:
                closed.append(await held_now())

        async def held_now():
            return (await semaphore("g").astatus()).held

        async def main():
            iterator = g(2)
            assert await held_now() == 0
            assert await anext(iterator) == 0
            assert await held_now() == 1
            assert await iterator.asend("hello") == "hello"
            assert await iterator.athrow(ZeroDivisionError()) == "caught"
            with pytest.raises(StopAsyncIteration):
                await anext(iterator)
            assert await held_now() == 0
            iterator = g(2)
            await anext(iterator)
            await iterator.aclose()
            assert await held_now() == 0
            assert [item async for item in g(3)] == [0, 1, 2]

        assert inspect.isasyncgenfunction(g)
        asyncio.run(main())
        assert closed == [1] * 3

        class Counts:
            async def __call__(self):
                yield await held_now()

        async def count():
            return [item async for item in semaphore("g")(Counts())()], await held_now()

        assert asyncio.run(count()) == ([1], 0)

    def test_a_busy_async_generator(self):
        @semaphore("g", on_busy="skip")
        async def g():
            yield 1

        async def main():
            return [item async for item in g()]

        with busy("g"):
            assert asyncio.run(main()) == []

    def test_tasks_share_one_decorated_function(self):
        @semaphore("shared", slots=3)
        async def c():
            inside.append(1)
            peak.append(len(inside))
            await asyncio.sleep(0.01)
            inside.pop()

        async def main():
            await asyncio.gather(*[c() for _ in range(12)])

        inside, peak = [], []
        asyncio.run(main())
        assert (len(peak), max(peak)) == (12, 3)


# What stays as it was.


def test_everything_visible_stays():
    def f(a: int, *, b: str = "x") -> bool:
        """Says something."""

    f.mark = [1]
    f.csrf_exempt = True
    wrapped = semaphore("f")(f)
    assert (wrapped.__name__, wrapped.__qualname__, wrapped.__module__) == (f.__name__, f.__qualname__, f.__module__)
    assert wrapped.__doc__ == "Says something."
    assert wrapped.mark is f.mark
    assert wrapped.csrf_exempt
    assert inspect.signature(wrapped) == inspect.signature(f, eval_str=True)
    assert inspect.getfullargspec(wrapped)[:-1] == inspect.getfullargspec(f)[:-1]
    assert wrapped.__wrapped__ is f
    assert not hasattr(f, "_non_atomic_requests")


def test_an_interrupt_in_an_annotation_that_was_caught_does_not_end_the_process_later():
    """As CPython has it for a ``KeyboardInterrupt`` in an ``eval()`` of text."""
    body = """
        from __future__ import annotations
        from django_sqlsem import mutex
        def interrupted():
            raise KeyboardInterrupt
        def f() -> interrupted():
            pass
        try:
            mutex("f")(f)
        except KeyboardInterrupt:
            say("caught")
    """
    with Child(textwrap.dedent(body), forked=False) as child:
        child.expect("caught")
        child.finish()


def test_decorating_touches_neither_settings_nor_databases():
    code = """
        from django_sqlsem import semaphore

        @semaphore("reports:{request.user.pk}", slots=3, timeout=1, on_busy=429)
        def view(request): ...

        @semaphore("reports")
        async def task(): ...

        from django.conf import settings
        assert not settings.configured
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, check=True)


# Names.


@pytest.mark.django_db
class TestNames:
    def test_arguments_defaults_and_keywords(self):
        @semaphore("n:{a}:{b}:{c}")
        def f(a, b="two", **kwargs):
            return [snapshot for snapshot in (a, b) if holds(f"n:{a}:{b}:{kwargs['c']}")]

        assert f(1, c=3) == [1, "two"]
        assert f(b=2, a=1, c=3) == [1, 2]
        with pytest.raises(ValueError, match=r"'c' .*'n:\{a\}:\{b\}:\{c\}' is missing"):
            f(1)
        with pytest.raises(TypeError, match=r"f\(\): missing a required argument: 'a'"):
            f()

    def test_a_request_among_the_arguments_is_called_request(self):
        @semaphore("n:{request.path}")
        def view(req, pk):
            return HttpResponse(holds("n:/x"))

        @semaphore("n:{request.path}")
        def anything(*args):
            return HttpResponse(holds("n:/x"))

        assert view(rf.get("/x"), 1).content == b"1"
        assert anything(rf.get("/x")).content == b"1"
        assert anything("self", rf.get("/x")).content == b"1"
        with pytest.raises(ValueError, match=r"'request\.path' .* is missing"):
            anything("no request")

    def test_a_field_that_no_call_can_fill_in_is_refused_at_decoration(self):
        with pytest.raises(
            ValueError, match=r"'x:\{reqest\.user\}'.*'reqest'.*view\(\) does not take; it takes request"
        ):

            @semaphore("x:{reqest.user}")
            def view(request): ...

        with pytest.raises(ValueError, match="takes none at all"):
            semaphore("x:{request}")(lambda: None)
        with pytest.raises(ValueError, match=r"leading underscore"):
            semaphore("x:{request._user}")(lambda request: None)
        with pytest.raises(ValueError, match=r"single '\{'"):
            semaphore("x:{")(lambda: None)

    def test_braces(self):
        @semaphore("n:{{a}}")
        def f(a):
            return queries.semaphore("n:{a}").held

        assert f(1) == 1
        lock = semaphore(("n{a}",))  # not a decorator: a part is literal
        with lock:
            assert lock.status().held == 1

    @pytest.mark.parametrize(
        ("key", "name"),
        [("eu", "k:eu"), (7, "k:7"), (uuid.UUID(int=5), f"k:{uuid.UUID(int=5)}"), (identity.process_id(), None)],
        ids=["text", "number", "uuid", "this process"],
    )
    def test_a_key(self, key, name):
        @semaphore("k", key=lambda a, b=1: key)
        def f(a, b=1):
            return holds(name or f"k:{key}")

        assert f(1) == 1
        assert f(1, b=3) == 1

    @pytest.mark.parametrize(("key", "error"), [(None, ValueError), ("", ValueError)])
    def test_a_key_that_would_be_shared(self, key, error):
        with pytest.raises(error, match=f"returned {key!r}"):
            semaphore("k", key=lambda: key)(lambda: None)()

    @pytest.mark.parametrize("key", [{1, 2}, ["a"], 1.5, True, b"a", object(), User()])
    def test_a_key_of_another_type(self, key):
        with pytest.raises(TypeError, match="must return a str, an int, a UUID or a tuple of parts"):
            semaphore("k", key=lambda: key)(lambda: None)()

    def test_a_key_after_a_template_and_in_a_coroutine(self):
        async def key(a):
            return f"<{a}>"

        @semaphore("k:{a}", key=key)
        async def c(a):
            return (await semaphore("k:1:<1>").astatus()).held

        assert asyncio.run(c(1)) == 1
        with pytest.raises(TypeError, match="asynchronous"):
            semaphore("k", key=key)(lambda a: None)(1)

    def test_the_final_name_must_be_legal(self):
        f = semaphore("n:{a}")(lambda a: None)
        with pytest.raises(ValueError, match="1 to 200 characters"):
            f("x" * 200)
        with pytest.raises(ValueError, match="NUL"):
            f("\x00")
        with pytest.raises(ValueError, match="lone surrogate"):
            f("\ud800")
        with pytest.raises(ValueError, match="1 to 200 characters"):
            semaphore("n", key=lambda: "x" * 199)(lambda: None)()

    def test_enumerations_are_named_by_their_values(self):
        import enum

        class Size(str, enum.Enum):  # noqa: UP042 - whose str() is not its value
            BIG = "big"

        class Number(enum.IntEnum):
            ONE = 1

        assert semaphore("k", key=lambda: Size.BIG)(lambda: holds("k:big"))() == 1
        assert semaphore("k", key=lambda: Number.ONE)(lambda: holds("k:1"))() == 1


# What can't be decorated.


class TestRefusals:
    def test_classes(self):
        with pytest.raises(TypeError, match=r'@method_decorator\(semaphore\(\'r\'\), name="dispatch"\)'):

            @semaphore("r")
            class Reports(View): ...

        with pytest.raises(TypeError, match=r"mutex\('r'\), name"):
            mutex("r")(View)
        with pytest.raises(TypeError, match=r"not the class .*Plain\."):

            @semaphore("r")
            class Plain: ...

    @pytest.mark.parametrize("target", [None, 3, "text", property(lambda self: 1), HttpResponse(), types])
    def test_what_is_not_callable(self, target):
        with pytest.raises(TypeError, match="can't be called"):
            semaphore("r")(target)

    def test_a_task_of_django(self, monkeypatch):
        base = types.ModuleType("django_tasks.base")
        base.Task = type("Task", (), {"func": staticmethod(lambda: None)})
        base.Task.func.__name__ = "report"
        monkeypatch.setitem(sys.modules, "django_tasks.base", base)
        with pytest.raises(TypeError, match=r"@task\n    @semaphore\('r'\)\n    def report"):
            semaphore("r")(base.Task())

    def test_a_view_must_not_skip(self):
        view = semaphore("r", on_busy="skip")(lambda request: HttpResponse())
        with pytest.raises(Exception, match=r'on_busy="skip" is for functions and tasks'):
            view(rf.get("/"))
        assert validate_on_busy("skip") == "skip"


# Views.


@pytest.fixture
def seen(settings):
    settings.ROOT_URLCONF = "tests.support.urls_decorators"
    urls_decorators.SEEN.clear()
    return urls_decorators.SEEN


@pytest.mark.django_db
class TestViews:
    @pytest.mark.parametrize(
        "where",
        [
            "plain",
            "plain_async",
            "class/dispatched",
            "class/dispatched_twice",
            "class/direct/word",
            "class/get_only",
            "class/async_dispatched",
            "class/async_dispatched_twice",
            "class/async_direct",
            "class/async_get",
        ],
    )
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_views_of_all_kinds(self, seen, where, asynchronous):
        names = []

        def note(permit, **kwargs):
            names.append(permit.name)

        permit_acquired.connect(note)
        released = []
        permit_released.connect(on_release := lambda permit, **kwargs: released.append(permit.name))
        try:
            response = _aget(f"/{where}") if asynchronous else Client().get(f"/{where}")
        finally:
            permit_acquired.disconnect(note)
            permit_released.disconnect(on_release)
        assert response.content == b"seen"
        assert seen[0]["label"] == f"GET /{where}"
        expected = ["outer", "inner"] if "twice" in where else [names[0]]
        assert names == expected
        assert released == expected[::-1]

    @pytest.mark.parametrize(
        ("headers", "known"),
        [
            ({"traceparent": f"00-{'4b' * 16}-{'f0' * 8}-01", "X-Request-ID": "r-1"}, f" [{'4b' * 16}]"),
            ({"X-Request-ID": "r-1"}, " [r-1]"),
            ({"X-Request-ID": "<b> ]", "traceparent": "none"}, ""),
            ({"X-Request-ID": "r" * 65}, ""),
        ],
    )
    def test_the_label_tells_the_trace_that_a_request_came_with(self, seen, headers, known):
        Client().get("/plain", headers=headers)
        assert seen[0]["label"] == f"GET /plain{known}"

    def test_the_name_is_filled_in_from_the_user(self, seen, client):
        client.force_login(User.objects.create(username="ann", pk=5))
        with held("user:5", total=1), pytest.raises(AssertionError):
            assert client.get("/per_user").status_code == 200
        assert client.get("/per_user").content == b"seen"
        assert seen[0]["user"] == "ann"

    def test_the_user_of_an_async_view(self, seen):
        user = User.objects.create(username="ann", pk=5)

        async def main():
            client = AsyncClient()
            await client.aforce_login(user)
            return await client.get("/per_user_async")

        assert async_to_sync(main)().content == b"seen"  # in this thread, whose transaction has the user
        assert seen[0]["user"] == "ann"

    def test_anonymous_visitors_are_an_error_that_names_the_field(self, seen, client):
        with pytest.raises(ValueError, match=r"request\.user\.pk"):
            client.get("/per_user_async")

    def test_the_user_is_never_asked_for(self):
        def forbidden():
            raise AssertionError("a query")

        @semaphore("v")
        def view(request):
            return HttpResponse(identity.current().user)

        request = rf.get("/")
        request.user = SimpleLazyObject(forbidden)
        assert view(request).content == b""
        request.user = AnonymousUser()
        assert view(request).content == b""
        request.user = SimpleLazyObject(lambda: User(username="bob"))
        request.user.username  # noqa: B018 - resolves it
        assert view(request).content == b"bob"

    def test_marks_survive(self, seen):
        strict = Client(enforce_csrf_checks=True)
        assert strict.post("/posted").content == b"seen"

    def test_a_deferred_response(self, seen, client):
        assert b"<h1>" in client.get("/class/page").content
        assert holds("page") == 0

    def test_a_streaming_response_holds_until_it_is_closed(self, seen, client):
        response = client.get("/streams")
        iterator = iter(response.streaming_content)
        assert next(iterator) == b"0\n"
        assert holds("stream") == 1
        with semaphore("stream", 2):  # this thread does not have it any more
            pass
        assert list(iterator) == [b"1\n", b"2\n"]
        assert holds("stream") == 0  # the test client closes what is exhausted

    def test_a_stream_that_is_given_up(self, seen):
        response = urls_decorators.streams(rf.get("/"))
        next(iter(response.streaming_content))
        assert holds("stream") == 1
        response.close()
        assert holds("stream") == 0

    def test_an_async_streaming_response(self, seen):
        async def main():
            response = await AsyncClient().get("/streams_async")
            states, content = [], b""
            async for part in response.streaming_content:
                states.append((await semaphore("stream").astatus()).held)
                content += part
            return states, content

        states, content = asyncio.run(main())
        assert content == b"0\n1\n2\n"
        assert states == [1, 1, 1]
        assert holds("stream") == 0

    def test_a_stream_that_is_open_outlives_the_end_of_another_request(self, seen):
        async def main():
            client = AsyncClient()
            response = await client.get("/streams_async")
            await client.get("/plain_async")  # in the same task, which a server's would not be
            held = (await semaphore("stream").astatus()).held
            return held, [part async for part in response.streaming_content]

        held, content = asyncio.run(main())
        assert (held, content) == (1, [b"0\n", b"1\n", b"2\n"])
        assert holds("stream") == 0

    def test_a_file(self, seen, client):
        response = client.get("/file")
        assert holds("file") == 1
        assert b"FileResponse" in b"".join(response.streaming_content)
        response.close()
        assert holds("file") == 0

    def test_a_rest_framework_request(self):
        class RestRequest:
            def __init__(self, request):
                self._request = request

            user = User(pk=9, username="eve")

        class Api:
            @semaphore("rest:{request.user.pk}", timeout=0)
            def get(self, request):
                return HttpResponse(f"{holds('rest:9')} {identity.current().label}")

        assert Api().get(RestRequest(rf.get("/api"))).content == b"1 GET /api"
        with busy("rest:9"):
            assert Api().get(RestRequest(rf.get("/api"))).status_code == 503


@async_to_sync
async def _aget(path):
    return await AsyncClient().get(path)


# Timeouts.


class Timeouts:
    """Notes what an acquire was given, by timing out at once."""


@pytest.mark.django_db
class TestTimeouts:
    @pytest.mark.parametrize(
        ("options", "expected"), [({}, 0.2), ({"timeout": 0.1}, 0.1), ({"timeout": 0}, 0)], ids=["setting", "own", "0"]
    )
    def test_a_view(self, settings, options, expected):
        settings.SQLSEM = {"VIEW_TIMEOUT": 0.2, "TIMEOUT": 30}
        view = semaphore("t", on_busy=lambda busy: HttpResponse("busy"), **options)(lambda request: HttpResponse())
        self.waits(expected, lambda: view(rf.get("/")))

    def test_a_plain_function(self, settings):
        settings.SQLSEM = {"VIEW_TIMEOUT": 30, "TIMEOUT": 0.2}
        f = semaphore("t", on_busy="skip")(lambda: None)
        self.waits(0.2, f)

    @pytest.mark.parametrize(("given", "expected"), [(0, 0.2), (0.3, 0.3)])
    def test_a_retry_without_a_worker_waits_for_the_longer_of_the_two(self, settings, given, expected):
        settings.SQLSEM = {"TIMEOUT": 0.2}
        f = semaphore("t", timeout=given, on_busy="retry")(lambda: None)

        def call():
            with pytest.raises(AcquireTimeoutError):
                f()

        self.waits(expected, call)

    def waits(self, expected, function):
        """Assert that it waits for this timeout and no other: by what the refusal says, and by the clock."""
        timeouts = []

        def note(sender, error, **kwargs):
            timeouts.append(error.timeout)

        acquire_timed_out.connect(note)
        try:
            with held("t", total=1):
                start = time.monotonic()
                function()
                took = time.monotonic() - start
        finally:
            acquire_timed_out.disconnect(note)
        assert timeouts == [expected]
        assert expected <= took < expected + 10  # the other timeout is 30 s; a busy machine adds what it likes


# ATOMIC_REQUESTS, on real databases.


@pytest.fixture
def atomic_requests(database, monkeypatch, settings, seen):
    """``ATOMIC_REQUESTS`` on ``database``, which keeps the locks too."""
    settings.SQLSEM = {"DATABASE": database}
    monkeypatch.setitem(connections.settings[database], "ATOMIC_REQUESTS", True)
    events = []

    def note(kind):
        def receiver(permit, **kwargs):
            connection = connections[database]
            events.append((kind, permit.name, connection.in_atomic_block))

        return receiver

    acquired, released = note("acquired"), note("released")
    permit_acquired.connect(acquired)
    permit_released.connect(released)
    yield events
    permit_acquired.disconnect(acquired)
    permit_released.disconnect(released)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("plain", ["plain"]),
        ("posted", ["post"]),
        ("stacked", ["outer", "inner"]),
        ("class/dispatched", ["dispatch"]),
        ("class/dispatched_twice", ["outer", "inner"]),
        ("class/direct/word", ["direct:word"]),
    ],
)
def test_the_permit_is_taken_before_the_begin_and_given_back_after_the_commit(
    database, atomic_requests, seen, where, names, asynchronous
):
    response = _aget(f"/{where}") if asynchronous else Client().get(f"/{where}")
    assert response.content == b"seen"
    assert seen[0]["blocks"][database] == 1
    assert atomic_requests == [
        *[("acquired", name, False) for name in names],
        *[("released", name, False) for name in reversed(names)],
    ]
    assert not held_rows(database)


@pytest.mark.parametrize(
    "where", ["opted_out_above", "opted_out_below", "class/opted_out_above", "class/opted_out_below"]
)
def test_opting_out_of_atomic_requests(database, atomic_requests, seen, where):
    if database != "default":
        pytest.skip("the views opt out on the default alias")
    for _ in range(2):
        assert Client().get(f"/{where}").content == b"seen"
    assert [state["blocks"][database] for state in seen] == [0, 0]
    assert [kind for kind, _, _ in atomic_requests] == ["acquired", "released"] * 2


def test_the_transaction_of_a_view_commits_and_rolls_back(database, atomic_requests, seen):
    if database != "default":
        pytest.skip("the view writes to the default alias")
    client = Client(raise_request_exception=False)
    assert client.get("/writes?fail=1").status_code == 500
    assert not User.objects.exists()
    assert client.get("/writes").status_code == 200
    assert User.objects.count() == 1
    assert all(not inside for _, _, inside in atomic_requests)


def test_a_decorated_handler_gives_its_permit_back_after_the_commit(database, atomic_requests, seen):
    if connections[database].vendor == "sqlite":
        pytest.skip("SQLite has one writer: its permit is part of the caller's transaction")
    assert Client().get("/class/get_only").content == b"seen"
    assert seen[0]["blocks"][database] == 1
    assert atomic_requests == [("acquired", "get", True), ("released", "get", False)]


def test_a_helper_that_gets_the_request_gives_its_permit_back_at_its_own_end(database, atomic_requests, seen):
    assert Client().get("/uses_helper").content == b'"done"'
    assert [kind for kind, _, _ in atomic_requests] == ["acquired", "released"] * 2


@pytest.mark.parametrize("where", ["plain_async", "class/async_dispatched", "class/async_direct", "class/async_get"])
def test_async_views_under_atomic_requests_fail_as_without_us(database, atomic_requests, where):
    with pytest.raises(RuntimeError, match="You cannot use ATOMIC_REQUESTS with async views"):
        _aget(f"/{where}")
    assert atomic_requests == []


def test_outside_a_handler_no_transaction_is_opened(database, atomic_requests, seen):
    urls_decorators.plain(rf.get("/"))
    assert seen[0]["blocks"][database] == 0


def test_a_view_in_many_threads_never_exceeds_its_slots(database, seen, settings):
    settings.SQLSEM = {"DATABASE": database}
    inside, peak = [], []
    full = threading.Event()

    @semaphore("many", slots=3, timeout=30)
    def view(request):
        inside.append(1)
        peak.append(len(inside))
        if len(inside) == 3:
            full.set()
        assert full.wait(30)  # however slowly the first three come
        time.sleep(0.02)
        inside.pop()
        return HttpResponse()

    run_in_threads(12, lambda index: view(rf.get("/")))
    assert (len(peak), max(peak)) == (12, 3)


def test_a_skipped_call_is_one_line_and_no_warning(db, caplog):
    @semaphore("w", on_busy="skip")
    def f():
        raise AssertionError

    with busy("w"), caplog.at_level(logging.DEBUG, "django_sqlsem"):
        assert f() is None
    [record] = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert record.levelno == logging.INFO
    assert "was skipped" in record.getMessage()
    assert "because 'w' was made busy by a test." in record.getMessage()


def test_a_skipped_command_is_called_as_its_holder_is(db, caplog):
    scope = {"__name__": "shop.management.commands.nightly", "semaphore": semaphore}
    exec("class Command:\n    @semaphore('w', on_busy='skip')\n    def handle(self): ...", scope)
    with busy("w"), caplog.at_level(logging.INFO, "django_sqlsem"):
        scope["Command"]().handle()
    assert caplog.messages == [f"Busy: {identity.current().label} was skipped, because 'w' was made busy by a test."]


# Whatever strikes, wherever.


class Strike:
    """Raises ``error`` at the ``nth`` line that the decorators run in this thread."""

    def __init__(self, nth, error):
        self.left, self.error, self.where = nth, error, "no line"

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *exc_info):
        sys.settrace(None)

    def trace(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith(("decorators/wrapper.py", "database/transactions.py")):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_qualname} line {frame.f_lineno}"
                raise self.error
        return self.trace


def walk(call, error, database):
    """Strike at every line in turn, until a call runs to its end; nothing may stay held, however it was struck."""
    for nth in range(1, 1000):
        with contextlib.suppress(error), Strike(nth, error()) as strike:
            call()
        # As at the end of a request: what was struck may be in the middle of a transaction.
        connections[database].close()
        del connections[database]
        wait_until(lambda: not held_rows(database), timeout=3, what=f"nothing held after a strike at {strike.where}")
        if strike.left > 0:
            return nth
    raise AssertionError("it never ends")


@pytest.mark.parametrize("release", ["on_exit", "on_commit"])
def test_an_interrupt_at_any_line_leaves_nothing_held(database, release):
    from django.db import transaction

    @semaphore("strike", using=database, release=release, on_lost=print)
    def f(x=1):
        return x

    def call():
        with transaction.atomic(using=database):
            f()

    assert walk(f, KeyboardInterrupt, database) > 20
    if connections[database].vendor != "sqlite":  # which has one writer
        assert walk(call, KeyboardInterrupt, database) > 20


def test_an_interrupt_at_any_line_of_a_generator_leaves_nothing_held(database):
    @semaphore("strike", using=database)
    def g():
        yield 1

    assert walk(lambda: list(g()), KeyboardInterrupt, database) > 10


def test_an_interrupt_at_any_line_of_a_view_leaves_nothing_held(database, settings):
    settings.SQLSEM = {"DATABASE": database}
    assert walk(lambda: urls_decorators.streams(rf.get("/")).close(), KeyboardInterrupt, database) > 20


@pytest.mark.filterwarnings("ignore:coroutine", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_cancellation_at_any_line_of_a_coroutine_leaves_nothing_held(database):
    @semaphore("strike", using=database)
    async def c():
        await asyncio.sleep(0)

    assert walk(lambda: asyncio.run(c()), asyncio.CancelledError, database) > 20
