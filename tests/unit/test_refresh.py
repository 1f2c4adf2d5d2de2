"""``refresh_every()`` as an argument, a decorator, in tests, and for operators."""

from __future__ import annotations

import asyncio
import datetime
import json
import threading

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from django.test import Client
from django.urls import reverse

from django_sqlsem import AlreadyHeldError, control, queries, semaphore
from django_sqlsem.models import RefreshRow
from django_sqlsem.refresh import refresh_every
from tests.support.operators import locks
from tests.support.processes import Child
from tests.support.threads import run_in_threads
from tests.testapp.models import Probe

WEEK = datetime.timedelta(weeks=1)


def build():
    return "books"


def build_for(shop):
    return f"books of {shop}"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((build,), {}, TypeError, "period must be seconds"),
        (("best",), {}, TypeError, "needs a period: seconds or a timedelta after the name 'best'"),
        ((WEEK, "best", build), {}, TypeError, "takes a name, a period and a build, in this order"),
        (("best", 0, build), {}, ValueError, "period must be from 0.001 to"),
        (("best", "7d", build), {}, TypeError, "period must be seconds .a number. or a timedelta, not '7d'"),
        (("", WEEK, build), {}, ValueError, "must have 1 to 200 characters"),
        (("best", WEEK, "build"), {}, TypeError, "build must be a function, not 'build'"),
        (("best", WEEK, build_for), {}, TypeError, r"build_for\(\) takes arguments \(shop\)"),
        (("best:{city}", WEEK, build_for), {}, ValueError, "has a field of the argument 'city'"),
        (("best", WEEK, build), {"timeout": -1}, ValueError, "timeout must be from 0"),
        (("best", WEEK, build), {"retry_after": "1"}, TypeError, "retry_after must be seconds"),
        (("best", WEEK, build), {"lease": 0.1}, ValueError, "lease must be from 1 to"),
        (("best", WEEK, build), {"using": 1}, TypeError, "using must be the alias"),
        (("best", WEEK, build), {"cache": None}, TypeError, "cache must be the alias of a cache, not None"),
        (("best", WEEK, build), {"field": "peak"}, TypeError, "field must be"),
        (("best", WEEK, build), {"field": (Probe, "price")}, ValueError, "Probe has no column 'price'"),
        (("best", WEEK, build), {"key": "shop"}, TypeError, "key must be a callable"),
    ],
)
def test_bad_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message):
        refresh_every(*arguments, **options)


def test_where_values_cannot_be_kept(database):
    with pytest.raises(ImproperlyConfigured, match="cache is 'none', which is not in CACHES: default"):
        refresh_every("best", WEEK, build, cache="none", using=database)()
    other = "other" if database == "default" else "default"
    best = refresh_every("best", WEEK, build, field=(Probe.objects.using(other), "peak"), using=database)
    with pytest.raises(ImproperlyConfigured, match=f"in the database '{other}', and the locks are in '{database}'"):
        best()
    code = """
from django_sqlsem.refresh import refresh_every
try:
    refresh_every("best", 60, lambda: 1, using=args[0])()
except Exception as error:
    say(f"{type(error).__name__}: {error}")
"""
    with Child(code, database) as child:  # no test, and no DEBUG
        told = child.expect("ImproperlyConfigured:", timeout=90)
        assert told.startswith("refresh_every() can't keep values in CACHES['default']: with LocMemCache each process")


def test_decorated_functions(database):
    calls = []

    @refresh_every(WEEK, using=database, key=lambda shop, **_: shop)
    def best_sellers(shop, *, title="none"):
        """Say what sells."""
        calls.append(shop)
        return f"{shop} sells {title}"

    @refresh_every("new:{shop}", 60, using=database)
    async def new_releases(shop):
        calls.append(shop)

    assert best_sellers.__doc__ == "Say what sells."
    assert [best_sellers(1, title="Emma"), best_sellers(1), best_sellers(2)] == ["1 sells Emma"] * 2 + ["2 sells none"]
    assert asyncio.run(best_sellers.aget(1)) == "1 sells Emma"
    assert [asyncio.run(new_releases(shop)) for shop in ("a", "a", "b")] == [None] * 3
    assert calls == [1, 2, "a", "b"]
    best_sellers.invalidate(1)
    assert (best_sellers(1), best_sellers(2)) == ("1 sells none", "2 sells none")
    asyncio.run(new_releases.ainvalidate("b"))
    asyncio.run(new_releases("b"))
    asyncio.run(new_releases.anow("b"))
    assert calls == [1, 2, "a", "b", 1, "b", "b"]
    with pytest.raises(TypeError, match="is asynchronous: await aget"):
        new_releases.get("a")

    async def in_a_loop():
        best_sellers(1)

    with pytest.raises(SynchronousOnlyOperation, match="await aget"):
        asyncio.run(in_a_loop())
    name = f"{__name__}.test_decorated_functions.<locals>.best_sellers"
    assert [each.name for each in queries.refreshes(using=database)] == ["new:a", "new:b", f"{name}:1", f"{name}:2"]
    with pytest.raises(ImproperlyConfigured, match="refresh"):  # one name is one kind of lock
        semaphore("new:a", using=database).acquire()


def test_an_object_whose_call_is_a_coroutine(database):
    class Best:
        async def __call__(self):
            return "books"

    best = refresh_every("best", WEEK, Best(), using=database)
    assert [asyncio.run(best()), asyncio.run(best.aget())] == ["books"] * 2
    with pytest.raises(TypeError, match="is asynchronous: await aget"):
        best.get()


def test_a_build_may_read_its_own_old_value(database):
    olds = []

    def build():
        olds.append(best() if olds else None)
        return len(olds)

    async def abuild():
        olds.append(await abest() if olds else None)
        return len(olds)

    best = refresh_every("best", WEEK, build, using=database)
    abest = refresh_every("abest", WEEK, abuild, using=database)
    for read in (best, lambda: asyncio.run(abest())):
        olds.clear()
        assert read() == 1
        RefreshRow.objects.using(database).update(built_us=None)
        assert (read(), olds) == (2, [None, 1])
    endless = refresh_every("endless", WEEK, lambda: endless(), using=database)
    with pytest.raises(AlreadyHeldError, match="endless"):
        endless()


@pytest.mark.rows_only("lease")
def test_a_build_that_fails_late_says_nothing_of_the_newer_value(database):
    def build():
        if threading.current_thread() is not threading.main_thread():
            return "new"
        assert control.revoke("best", by="ann", using=database)
        assert run_in_threads(1, lambda _: best()) == ["new"]
        raise ZeroDivisionError

    best = refresh_every("best", WEEK, build, using=database, retry_after=1000)
    with pytest.raises(ZeroDivisionError):
        best()
    assert RefreshRow.objects.using(database).get().failed_us is None
    assert best() == "new"


@pytest.mark.parametrize("nth", [1, 2])
def test_in_a_testcase(db, nth):
    """In its transaction, of which nothing stays: neither in the tables nor in the cache."""
    calls = []
    best = refresh_every("best", WEEK, lambda: calls.append(0) or len(calls))
    assert (best(), best(), async_to_sync(best.aget)(), async_to_sync(best.anow)()) == (1, 1, 1, 2)
    assert RefreshRow.objects.get().name == "best"
    Probe.objects.create(name="shop")
    kept = refresh_every("kept", WEEK, lambda: 7, field=(Probe.objects.filter(name="shop"), "peak"))
    assert (kept(), async_to_sync(kept.aget)(), Probe.objects.get().peak) == (7, 7, 7)


def test_what_operators_see(database, settings, capsys):
    settings.SQLSEM = {"DATABASE": database}
    best = refresh_every("best-sellers", datetime.timedelta(days=30), build)
    assert best() == "books"
    RefreshRow.objects.using(database).update(took_us=12_000_000)
    locks("list")
    shown = capsys.readouterr().out
    assert "REFRESHED VALUE  BUILT" in shown
    assert "  12 s  30 d 00 h  in 29 d 2" in shown or "  12 s  30 d 00 h  in 30 d 00 h" in shown
    locks("list", "--format", "json")
    [told] = json.loads(capsys.readouterr().out)
    (value,) = queries.refreshes(using=database)
    assert told["kind"] == "refresh"
    assert (told["refresh"]["took"], told["refresh"]["period"], told["refresh"]["pid"]) == (12, 30 * 86400, value.pid)
    assert 0 < told["refresh"]["due_in"] <= 30 * 86400
    best.invalidate()
    locks("show", "best-sellers")
    assert capsys.readouterr().out.splitlines()[-1].endswith("  now")
    locks("purge", "--idle", "--noinput")
    capsys.readouterr()
    locks("list", "--format", "json")
    assert [each["refresh"]["due_in"] for each in json.loads(capsys.readouterr().out)] == [0]
    assert best() == "books"
    client = Client()
    client.force_login(User.objects.create(username="boss", is_staff=True, is_superuser=True))
    page = client.get(reverse("admin:sqlsem_refreshrow_changelist")).content.decode()
    assert f"pid {value.pid} " in page
    assert "30 d 00 h" in page
    pages = [reverse("admin:sqlsem_refreshrow_change", args=[RefreshRow.objects.using(database).get().pk])]
    assert [client.get(each).status_code for each in pages] == [200]
