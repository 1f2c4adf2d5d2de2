"""Mistakes that would lock the wrong thing, or nothing, say what is wrong and what to write instead."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from django.http import HttpResponse

from django_sqlsem import AcquireTimeoutError, AlreadyHeldError, mutex, semaphore
from django_sqlsem.locks import acquire_all, counter, rlock, rwlock, transaction_lock
from django_sqlsem.testing import busy, held
from tests.support.databases import ROOT

pytestmark = pytest.mark.django_db

USES = {
    "with": lambda lock: lock.__enter__(),
    "acquire": lambda lock: lock.acquire(),
    "try_acquire": lambda lock: lock.try_acquire(),
    "aacquire": lambda lock: asyncio.run(lock.aacquire()),
    "atry_acquire": lambda lock: asyncio.run(lock.atry_acquire()),
    "drain": lambda lock: lock.exclusive(),
    "status": lambda lock: lock.status(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["import:{pk}", "sync:{request.user.pk}", "{pk}", "{größe}"])
def test_a_field_outside_a_decorator_is_an_error_that_shows_the_f_string(name: str, use: str) -> None:
    for make in (semaphore, mutex, rlock):
        with pytest.raises(ValueError, match="only a decorator fills in") as caught:
            USES[use](make(name))
        assert f"Write an f-string: f{name!r}" in str(caught.value)


def test_a_field_is_an_error_in_other_locks_too() -> None:
    for use in (
        lambda: rwlock("a:{pk}").read().acquire(),
        lambda: counter("a:{pk}"),
        lambda: transaction_lock("a:{pk}"),
        lambda: acquire_all([semaphore("a:{pk}")]),
        lambda: held("a:{pk}").__enter__(),
    ):
        with pytest.raises(ValueError, match="only a decorator fills in"):
            use()


@pytest.mark.parametrize("name", ["{", "}", "{}", "{0}", "a{b", "{a b}", "{a!r}", "json{'a': 1}", ("file", "{pk}")])
def test_braces_that_are_no_field_are_part_of_a_name(name: Any) -> None:
    with semaphore(name) as permit:
        assert permit.lost is None


def test_a_decorated_functions_name_may_end_up_with_braces() -> None:
    @semaphore("file:{name}")
    def work(name: str) -> str:
        return name

    assert work("{pk}") == "{pk}"


@pytest.mark.parametrize("on_busy", ["skip", "raise", "retry", 429, print])
def test_on_busy_outside_a_decorator_is_a_type_error(on_busy: Any) -> None:
    lock = semaphore("a", on_busy=on_busy)
    for use in ("with", "acquire", "aacquire"):
        with pytest.raises(TypeError, match=r"on_busy=.* says what becomes of a decorated call"):
            USES[use](lock)
    permit = lock.try_acquire()  # says itself what it does when it is busy
    assert permit is not None
    permit.release()
    with lock.exclusive():
        pass
    with held(lock):
        assert lock.status().held == 1


def test_the_same_object_decorates_with_its_on_busy() -> None:
    lock = semaphore("a", on_busy="skip")

    @lock
    def work() -> str:
        return "done"

    assert work() == "done"
    with busy("a"):
        assert work() is None


def test_key_outside_a_decorator_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="put the key into 'a'"):
        semaphore("a", key=lambda: 1).acquire()


def test_a_nested_acquire_names_the_ways_out() -> None:
    with semaphore("a", 3), pytest.raises(AlreadyHeldError, match=r"Give it back first; .* take=; .* rlock\(\)"):
        semaphore("a", 3).acquire()


@pytest.mark.parametrize("make", [semaphore, mutex, rlock])
def test_a_decorator_without_its_name_says_so(make: Any) -> None:
    with pytest.raises(TypeError, match=r'must be given before it decorates a function: @semaphore\("reports"\)'):

        @make
        def view(request: Any) -> HttpResponse:
            raise AssertionError


def test_a_forgotten_app_is_named() -> None:
    program = """
        import django
        from django.conf import settings
        settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
        django.setup()
        from django_sqlsem import semaphore
        lock = semaphore("reports")  # modules may be imported in any order
        try:
            lock.acquire()
        except Exception as error:
            print(type(error).__name__, error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == (
        "ImproperlyConfigured Locks need tables: add 'django_sqlsem' to INSTALLED_APPS, and run manage.py migrate.\n"
    )


def test_hold_more_than_there_is_says_total() -> None:
    with pytest.raises(AcquireTimeoutError, match="total="), held("new-name", 2):
        pass
