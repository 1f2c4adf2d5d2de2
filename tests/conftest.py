"""Fixtures of all tests.

``database``
    The alias of one covered database after the other, real and committed: no transaction is around the test.
    Afterwards nothing may be held by a live permit (unless the test is marked ``leaves_held``), and all that the
    test wrote is deleted.
``world``
    The same, and ``default`` inside the transaction of a ``TestCase``, whose locks are this process's own.
``counter``
    An ``OutsideCounter`` on ``database``.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connections
from django.test.utils import setup_databases, teardown_databases

from django_sqlsem import testing
from django_sqlsem.backends import get_backend
from django_sqlsem.runtime import acquisition
from tests.support import applocks, citus, databases, few_rights, forks, processes, tds


def _repeats(item: pytest.Item) -> bool:
    """Whether a test of what happens in the process would run once more on a server whose slots are rows, too."""
    marker = item.get_closest_marker("process_side")
    if marker is None:
        return False
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    left_out = {"postgres", "mariadb"} - set(marker.args)
    return any(isinstance(each, str) and each in left_out for each in parameters.values())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if repeated := [item for item in items if _repeats(item)]:
        items[:] = [item for item in items if not _repeats(item)]
        config.hook.pytest_deselected(items=repeated)


def pytest_collection_finish() -> None:
    # What was collected lives to the end: no run of the garbage collector is to look through it.
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected
    missing = databases.required_but_missing()
    if missing:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in missing.items())
        raise pytest.UsageError(f"SQLSEM_TEST_REQUIRE asks for what is not there:\n{reasons}")


def _coverage() -> list[str]:
    lines = [f"covered: {', '.join(found.version for found in settings.FOUND.values())}"]
    lines += [few_rights.__doc__.partition("\n")[0].replace("``", "")] if few_rights.ASKED else []  # type: ignore[union-attr]
    lines += [f"not covered: {name} ({missing.reason.splitlines()[0]})" for name, missing in settings.MISSING.items()]
    return lines


def pytest_report_header(config: pytest.Config) -> list[str]:
    return _coverage()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("databases")
    for line in _coverage():
        terminalreporter.line(line)


@pytest.fixture(scope="module", autouse=True)
def _nothing_to_look_through() -> Iterator[None]:
    # What a module of tests has imported and kept lives to the end, too: each run of the garbage collector would look
    # through it, which takes seconds after a type checker and a T-SQL linter.
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_views_of_other_tests() -> None:
    """What the admin showed a moment ago was of another test."""
    if live := sys.modules.get("django_sqlsem.admin.live"):
        live.forget()
        sys.modules["django_sqlsem.admin.overview"]._drawn.clear()  # type: ignore[attr-defined]


@pytest.fixture(scope="session", autouse=True)
def _children_hear_signals() -> Iterator[None]:
    # A fixture, as only processes that run tests need it: workers of xdist are to be born with what nohup has set.
    with processes.children_hear_signals():
        yield
    forks.stop()


@pytest.fixture(scope="session")
def django_db_setup(django_test_environment: None, django_db_blocker: Any, request: Any) -> Iterator[None]:
    """Create the test databases of all covered aliases, and drop them at the end: a failure to drop is an error."""
    verbosity = request.config.option.verbose
    with django_db_blocker.unblock(), contextlib.ExitStack() as made:
        by_hand = {alias for alias in databases.covered() if tds.is_stand_in(alias)}
        for alias in by_hand:
            made.enter_context(tds.database(alias))
        others = set(databases.covered()) - by_hand
        with tds.one_at_a_time() if "mssql" in others else contextlib.nullcontext():
            created = setup_databases(verbosity=verbosity, interactive=False, aliases=others)
        made.callback(teardown_databases, created, verbosity=verbosity)
        if citus.ALIAS in others:
            made.enter_context(citus.joined(citus.ALIAS))
            citus.distribute(citus.ALIAS)
        for alias in others:
            databases.commit_without_waiting(alias)
            if few_rights.ASKED and databases.label(alias) in ("postgres", "mariadb"):
                made.enter_context(few_rights.granted(alias))
        made = made.pop_all()  # all went well, so they stay
    yield
    with django_db_blocker.unblock(), made:
        _stop_library()
        connections.close_all()


def _stop_library() -> None:
    from django_sqlsem import lifecycle

    lifecycle.stop_all()


@pytest.fixture
def committed(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """All covered databases, real and committed, cleaned after the test."""
    with django_db_blocker.unblock():
        try:
            yield
        finally:
            _stop_library()
            applocks.let_go()
            for alias in databases.covered():
                databases.delete_rows(alias)
            connections.close_all()


@pytest.fixture(params=[pytest.param(alias, id=databases.label(alias)) for alias in databases.covered()])
def database(request: Any, committed: None) -> Iterator[str]:
    """One covered alias after the other, real and committed, in which nothing may be held after the test."""
    alias = applocks.parameter(request)
    yield alias
    if request.node.get_closest_marker("leaves_held") is None:
        databases.assert_nothing_held(alias)


@pytest.fixture(
    params=[
        *(pytest.param(alias, id=databases.label(alias)) for alias in databases.covered()),
        pytest.param("local", id="process-local"),
    ]
)
def world(request: Any) -> Iterator[str]:
    """An alias with its real backend, or ``default`` inside the transaction that a ``TestCase`` has."""
    local = request.param == "local"
    request.getfixturevalue("db" if local else "committed")
    alias = "default" if local else request.param
    assert get_backend(alias).process_local is local
    yield alias
    if not local:
        databases.assert_nothing_held(alias)
    testing.assert_nothing_held()
    assert acquisition.jumper is None


@pytest.fixture
def counter(database: str) -> Iterator[databases.OutsideCounter]:
    """An independent counter on ``database``."""
    with databases.OutsideCounter(database) as counter:
        yield counter


@pytest.fixture
def make_project(tmp_path: Path, django_db_setup: None, django_db_blocker: Any) -> Iterator[Callable[..., Any]]:
    """A function that makes a user's project of a kind of database: see ``tests.support.projects``."""
    from tests.support.projects import projects

    with django_db_blocker.unblock(), projects(tmp_path) as make:
        yield make


@pytest.fixture
def redis_url() -> str:
    """The address of a Redis server. Skips the test without one."""
    return _where("redis")


@pytest.fixture
def rabbitmq_url() -> str:
    """The address of a RabbitMQ server. Skips the test without one."""
    return _where("rabbitmq")


@pytest.fixture
def chromium() -> str:
    """The path of a Chromium. Skips the test without one."""
    return _where("chromium")


@pytest.fixture
def wrong_clock() -> Callable[[str], dict[str, str]]:
    """A function of an offset (``"+1d"``) that returns the environment for a child whose wall clock is wrong."""
    _where("faketime")
    return lambda offset: databases.faketime_environment(offset) or {}


def _where(name: str) -> str:
    found = settings.FOUND.get(name)
    if found is None:
        pytest.skip(f"no {name}: {settings.MISSING[name].reason}")
    return str(found.where)
