"""``ATOMIC_REQUESTS``, and transactions of one's own: who gets the slot next sees what was written, in any style.

The proof is a second holder in another thread, in line while the view works, that counts the rows on a connection of
its own as soon as it has the slot. It might be slower than a commit that comes too late: so the first one's connection
looks, just before its transaction ends, whether the permit is held still.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import User
from django.db import connections, transaction
from django.test import Client, TestCase, override_settings

from django_sqlsem import semaphore
from tests.places import atomic_views
from tests.places.atomic_views import AHEAD, INSIDE, Stage
from tests.support import databases
from tests.support.keepers import keeper_of
from tests.support.threads import wait_until

NINJA = ["ninja/operation", "ninja/wrapped-operation"]


@pytest.fixture
def stage(database: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """``ATOMIC_REQUESTS`` on ``database``, which keeps the locks too, and the views of ``atomic_views``."""
    settings.ROOT_URLCONF = "tests.places.atomic_views"
    settings.SQLSEM = {"DATABASE": database}
    settings.MIDDLEWARE = []
    monkeypatch.setitem(connections.settings[database], "ATOMIC_REQUESTS", True)
    set_the_stage(database)
    yield database
    Stage.go.set()


def set_the_stage(alias: str) -> None:
    """Begin anew."""
    Stage.alias = alias
    Stage.depths.clear()
    Stage.inside.clear()
    Stage.go.clear()


def first_has_it(alias: str) -> bool:
    """Whether the table says that ``first``, or a coroutine of its, has ``place``, on another connection."""

    def look() -> bool:
        try:
            return any(row.semaphore.name == "place" and row.thread != "second" for row in databases.held_rows(alias))
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as apart:
        return apart.submit(look).result(60)


def what_the_next_one_sees(alias: str, work: Callable[[], Any]) -> tuple[Any, int]:
    """Call ``work`` in a thread; return its result, and how many users the next holder of ``place`` sees."""
    results: dict[str, Any] = {}
    held: list[bool] = []

    def noted(end: Callable[[], Any]) -> Callable[[], Any]:
        def wrapper() -> Any:
            if Stage.inside.is_set():  # not those that end before the view begins
                held.append(first_has_it(alias))
            return end()

        return wrapper

    def first() -> None:
        for name in ("_commit", "_rollback"):
            setattr(connections[alias], name, noted(getattr(connections[alias], name)))
        try:
            results["result"] = work()
        finally:
            Stage.inside.set()  # it will be seen that there is no result
            connections.close_all()

    def second() -> None:
        try:
            with semaphore("place", using=alias, timeout=60):
                results["seen"] = User.objects.using(alias).count()
        finally:
            connections.close_all()

    threads = [threading.Thread(target=each, name=each.__name__, daemon=True) for each in (first, second)]
    threads[0].start()
    assert Stage.inside.wait(60)
    threads[1].start()
    if connections[alias].vendor != "sqlite":  # where nobody can stand in line while the view may write
        wait_until(lambda: not threads[0].is_alive() or semaphore("place", using=alias).status().waiting)
    Stage.go.set()
    for thread in threads:
        thread.join(60)
    assert set(results) == {"result", "seen"}, results
    assert held, "no transaction has ended"
    assert all(held), "the permit went back before the end of the transaction"
    return results["result"], results["seen"]


def skip_inside_on_sqlite(alias: str) -> None:
    if connections[alias].vendor == "sqlite":
        pytest.skip("SQLite has one writer: nobody waits inside its transaction, and the permit is part of it")


@pytest.mark.parametrize("fails", [False, True], ids=["commits", "raises"])
def test_the_next_holder_sees_the_row(stage: str, fails: bool) -> None:
    client = Client(raise_request_exception=False)
    styles = AHEAD if connections[stage].vendor == "sqlite" else [*AHEAD, *INSIDE, *NINJA]
    for where in styles:  # in one test, as a database is emptied after each
        set_the_stage(stage)
        address = f"/{where}{'?fail=1' if fails else ''}"
        response, seen = what_the_next_one_sees(stage, functools.partial(client.get, address))
        assert (where, response.status_code) == (where, 500 if fails else 200)
        assert (where, Stage.depths[0] >= 1) == (where, True)
        assert (where, seen) == (where, User.objects.using(stage).count()) == (where, 0 if fails else 1)
        User.objects.using(stage).all().delete()


class OneTransaction:
    """A middleware that keeps a transaction open around everything."""

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self.get_response = get_response

    def __call__(self, request: Any) -> Any:
        with transaction.atomic(using=Stage.alias):
            return self.get_response(request)


def test_a_middleware_that_is_in_a_transaction_keeps_the_views_own_apart(stage: str, settings: Any) -> None:
    """What a view that fails has written is undone, and the middleware's transaction goes on."""
    skip_inside_on_sqlite(stage)
    settings.MIDDLEWARE = ["tests.places.test_atomic_requests.OneTransaction"]
    Stage.go.set()
    client = Client(raise_request_exception=False)
    for where in ("plain", "below-another", "handler", "copies-nothing"):
        assert client.get(f"/{where}?fail=1").status_code == 500
        assert User.objects.using(stage).count() == 0
        assert client.get(f"/{where}").status_code == 200
        assert User.objects.using(stage).count() == 1
        User.objects.using(stage).all().delete()
    assert Stage.depths == [2] * 8
    databases.assert_nothing_held(stage)


def test_every_alias_has_its_transaction_but_those_that_opted_out(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [alias for alias in databases.covered() if alias != stage]
    if not others:
        pytest.skip("one database only")
    monkeypatch.setitem(connections.settings[others[0]], "ATOMIC_REQUESTS", True)
    blocks: list[dict[str, int]] = []

    def look(request: Any) -> Any:
        from django.http import HttpResponse

        blocks.append(
            {
                each: len(connections[each].atomic_blocks) if connections[each].in_atomic_block else 0
                for each in (stage, others[0])
            }
        )
        return HttpResponse()

    apart = transaction.non_atomic_requests(using=others[0])
    both = semaphore("place")(look)
    above, below = apart(semaphore("place")(look)), semaphore("place")(apart(look))
    nothing = apart(atomic_views.copies_nothing(semaphore("place")(look)))
    from django.urls import path

    class Urls:
        urlpatterns = [path("both", both), path("above", above), path("below", below), path("nothing", nothing)]

    names = ["both", "above", "below"] + ["nothing"] * (connections[stage].vendor != "sqlite")
    with override_settings(ROOT_URLCONF=Urls):
        for name in names:
            assert Client().get(f"/{name}").status_code == 200
    assert blocks[0] == {stage: 1, others[0]: 1}
    assert blocks[1:] == [{stage: 1, others[0]: 0}] * (len(names) - 1)


def test_a_helper_inside_a_decorated_view_opens_no_transaction_and_ends_with_itself(stage: str) -> None:
    from django.http import HttpResponse
    from django.urls import path

    seen: list[Any] = []

    @semaphore("helper")
    def helper(request: Any) -> None:
        seen.append(len(connections[stage].atomic_blocks))

    @semaphore("view")
    def view(request: Any) -> Any:
        helper(request)
        helper(request)
        return HttpResponse()

    if connections[stage].vendor == "sqlite":
        pytest.skip("SQLite has one writer: what is taken inside is held until its end")

    class Urls:
        urlpatterns = [path("view", view)]

    with override_settings(ROOT_URLCONF=Urls):
        assert Client().get("/view").status_code == 200
    assert seen == [1, 1]


# release="on_commit" inside transactions of one's own.


def nested_rolled_back(alias: str) -> None:
    with transaction.atomic(using=alias):
        work(alias)
        try:
            with transaction.atomic(using=alias):
                User.objects.using(alias).create(username="gone")
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass


def taken_in_a_savepoint_that_is_rolled_back(alias: str) -> None:
    with transaction.atomic(using=alias):
        try:
            with transaction.atomic(using=alias), semaphore("place", using=alias, release="on_commit"):
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        stay(alias)


def between_siblings(alias: str) -> None:
    with transaction.atomic(using=alias):
        with transaction.atomic(using=alias):
            work(alias)
        with transaction.atomic(using=alias):
            transaction.set_rollback(True, using=alias)


def durable(alias: str) -> None:
    with transaction.atomic(using=alias, durable=True):
        work(alias)


def with_a_hook_that_raises(alias: str) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    try:
        with transaction.atomic(using=alias):
            transaction.on_commit(fail, using=alias)
            work(alias)
    except ZeroDivisionError:
        pass


def with_a_robust_hook_that_raises(alias: str) -> None:
    with transaction.atomic(using=alias):
        transaction.on_commit(lambda: 1 / 0, using=alias, robust=True)
        work(alias)


def below_a_decorated_function(alias: str) -> None:
    @transaction.atomic(using=alias)
    @semaphore("place", using=alias, release="on_commit")
    def decorated() -> None:
        stay(alias)

    decorated()


def around_a_coroutine(alias: str) -> None:
    async def block() -> None:
        async with semaphore("place", using=alias, release="on_commit"):
            await User.objects.using(alias).acreate(username="ann")

    with transaction.atomic(using=alias):
        async_to_sync(block)()
        stay(alias, write=False)


def around_a_decorated_coroutine_and_its_tasks(alias: str) -> None:
    @semaphore("place", using=alias, release="on_commit")
    async def decorated() -> None:
        await User.objects.using(alias).acreate(username="ann")

    async def both() -> None:
        await asyncio.gather(decorated(), asyncio.sleep(0))

    with transaction.atomic(using=alias):
        async_to_sync(both)()
        keeper = keeper_of(alias)
        looked = threading.Event()  # for what the ended have forgotten, as it does at intervals
        keeper.post(lambda: (keeper.look_at_all(), looked.set()))
        assert looked.wait(60)
        stay(alias, write=False)


def rolled_back(alias: str) -> None:
    with transaction.atomic(using=alias):
        work(alias)
        transaction.set_rollback(True, using=alias)


def work(alias: str) -> None:
    with semaphore("place", using=alias, release="on_commit"):
        User.objects.using(alias).create(username="ann")
    stay(alias, write=False)


def stay(alias: str, write: bool = True) -> None:
    if write:
        User.objects.using(alias).create(username="ann")
    Stage.inside.set()
    assert Stage.go.wait(60)


WAYS = [
    nested_rolled_back,
    taken_in_a_savepoint_that_is_rolled_back,
    between_siblings,
    durable,
    with_a_hook_that_raises,
    with_a_robust_hook_that_raises,
    below_a_decorated_function,
    around_a_coroutine,
    around_a_decorated_coroutine_and_its_tasks,
    rolled_back,
]


def test_on_commit_outlasts_the_outermost_transaction(stage: str) -> None:
    skip_inside_on_sqlite(stage)
    for way in WAYS:
        set_the_stage(stage)
        _, seen = what_the_next_one_sees(stage, functools.partial(way, stage))
        expected = 0 if way is rolled_back else 1
        assert (way, seen, User.objects.using(stage).count()) == (way, expected, expected)
        User.objects.using(stage).all().delete()


def test_a_task_that_outlives_the_call_that_started_it_gives_its_permit_back(stage: str) -> None:
    """No thread waits for it any more, in which a transaction could be open."""
    lock = semaphore("place", using=stage, timeout=0, release="on_commit")
    started: list[asyncio.Task[None]] = []

    async def outlives(gone: asyncio.Event) -> None:
        async with lock:
            await gone.wait()

    async def main() -> None:
        gone = asyncio.Event()

        async def start() -> None:
            started.append(asyncio.ensure_future(outlives(gone)))
            await asyncio.sleep(0)

        await sync_to_async(async_to_sync(start))()
        gone.set()
        await started[0]

    asyncio.run(main())
    lock.acquire().release()


def test_on_commit_waits_for_the_transactions_of_all_databases(stage: str) -> None:
    skip_inside_on_sqlite(stage)
    others = [alias for alias in databases.covered() if alias != stage and connections[alias].vendor != "sqlite"]
    if not others:
        pytest.skip("one server only")

    def both() -> None:
        with transaction.atomic(using=stage), transaction.atomic(using=others[0]):
            work(stage)

    assert what_the_next_one_sees(stage, both)[1] == 1


class InsideATestCase(TestCase):
    """There the handler's transactions are savepoints of the test's own."""

    @override_settings(ROOT_URLCONF="tests.places.atomic_views", MIDDLEWARE=[])
    def test_views_of_all_styles(self) -> None:
        Stage.alias = "default"
        Stage.go.set()
        connections.settings["default"]["ATOMIC_REQUESTS"] = True
        try:
            for where in [*AHEAD, *INSIDE, *NINJA]:
                for _ in range(2):
                    with self.subTest(where=where):
                        assert self.client.get(f"/{where}").status_code == 200
                        assert semaphore("place").status().held == 0
                        assert User.objects.count() == 1
                        User.objects.all().delete()
        finally:
            connections.settings["default"]["ATOMIC_REQUESTS"] = False
