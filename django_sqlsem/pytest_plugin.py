"""Fixtures for pytest. Nothing of Django is imported, and no setting read, before a test asks for one of them.

pytest finds the plugin by itself; ``-p no:django_sqlsem.pytest_plugin`` leaves it out. Each fixture does what the
function of ``django_sqlsem.testing`` does after which it is named, until the end of the test.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from django_sqlsem.locks.permit import Permit
    from django_sqlsem.testing import Clock, Recorded

#: What pytest-django gives a test its database by: theirs is the outer life.
_DATABASES = ("db", "transactional_db", "django_db_reset_sequences", "django_db_serialized_rollback", "live_server")
#: What is loaded by whoever takes a lock: before that there is nothing to watch.
_KEEPERS = "django_sqlsem.runtime.keepers"
_failed = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option of the ini file."""
    parser.addini("sqlsem_assert_nothing_held", "fail a test that leaves a semaphore held", type="bool", default=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Remember which tests failed: their tracebacks keep alive what they held."""
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


@pytest.fixture(autouse=True)
def _sqlsem_assert_nothing_held(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getini("sqlsem_assert_nothing_held"):
        yield
        return
    with _nothing_held(request):
        yield


@pytest.fixture
def sqlsem_nothing_held(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test at its end if it leaves a semaphore held or waited for; see ``testing.nothing_held()``."""
    _after_databases(request)
    with _nothing_held(request):
        yield


@pytest.fixture
def sqlsem_busy(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """A function that makes a name busy until the end of the test; see ``testing.busy()``."""
    yield from _until_the_end(request, "busy")


@pytest.fixture
def sqlsem_held(request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Permit]]]:
    """A function that holds slots as another process would until the end of the test; see ``testing.held()``."""
    yield from _until_the_end(request, "held")


@pytest.fixture
def sqlsem_lost(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """A function that makes permits lost until the end of the test; see ``testing.lost()``."""
    yield from _until_the_end(request, "lost")


@pytest.fixture
def sqlsem_stop_requested(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """A function that asks holders to stop until the end of the test; see ``testing.stop_requested()``."""
    yield from _until_the_end(request, "stop_requested")


@pytest.fixture
def sqlsem_recorded(request: pytest.FixtureRequest) -> Iterator[Recorded]:
    """What the test acquires; see ``testing.recorded()``."""
    _after_databases(request)
    with _testing().recorded() as found:
        yield found


@pytest.fixture
def sqlsem_clock(request: pytest.FixtureRequest) -> Iterator[Clock]:
    """The library's clock, which the test may move; see ``testing.clock()``."""
    _after_databases(request)
    with _testing().clock() as found:
        yield found


def _testing() -> Any:
    """Import what imports Django: only once a test asks for it."""
    return importlib.import_module("django_sqlsem.testing")


def _after_databases(request: pytest.FixtureRequest) -> None:
    """Begin after, and end before, the fixtures that give the test its database, in whatever order they are named."""
    for name in _DATABASES:
        if name in request.fixturenames:
            request.getfixturevalue(name)


def _until_the_end(request: pytest.FixtureRequest, name: str) -> Iterator[Callable[..., Any]]:
    _after_databases(request)
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(getattr(_testing(), name)(*args, **kwargs))


@contextlib.contextmanager
def _nothing_held(request: pytest.FixtureRequest) -> Iterator[None]:
    """Look at the end of a test that has not failed."""
    with contextlib.ExitStack() as stack:
        refuse = stack.enter_context(_testing().recording.watched()) if _KEEPERS in sys.modules else None
        yield
        if _KEEPERS in sys.modules and not request.node.stash.get(_failed, False):
            (refuse or _testing().assert_nothing_held)()
