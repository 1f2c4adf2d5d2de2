"""The system checks that need no connection, but for SQL Server's."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from django.core import checks
from django.core.management import call_command
from django.db import connections
from django.test import override_settings

from django_sqlsem.checks.settings import LONGEST_COUNTDOWN, Limits, limit_messages, limits
from django_sqlsem.conf import Config
from django_sqlsem.contrib.celery import MAX_COUNTDOWN
from django_sqlsem.core import greenlets, testmode
from tests.support.private_servers import known

FILE = {"ENGINE": "django.db.backends.sqlite3", "OPTIONS": {"transaction_mode": "IMMEDIATE"}}


@contextlib.contextmanager
def an_alias(tmp_path: Any, **settings: Any) -> Iterator[None]:
    """An SQLite file of its own that keeps the locks."""
    with (
        known("locks", {"NAME": str(tmp_path / "locks.sqlite3"), **FILE, **settings}),
        override_settings(SQLSEM={"DATABASE": "locks"}),
    ):
        yield


#: Of what other tests have declared in this process.
OF_TESTS = ("sqlsem.E009", "sqlsem.W023", "sqlsem.W025")


def found() -> list[str]:
    ids = [str(each.id) for each in checks.run_checks()]
    return [each for each in ids if each.startswith("sqlsem.") and each not in OF_TESTS]


def test_a_good_project_hears_nothing(tmp_path: Any) -> None:
    with an_alias(tmp_path):
        assert found() == []


def test_sqlite_without_the_write_lock(tmp_path: Any) -> None:
    with an_alias(tmp_path, OPTIONS={}):
        assert found() == ["sqlsem.W001"]


def test_sqlite_with_atomic_requests(tmp_path: Any) -> None:
    with an_alias(tmp_path, ATOMIC_REQUESTS=True):
        assert found() == ["sqlsem.W012"]


class NoLocks:
    """A router that forgets the lock tables."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return app_label != "sqlsem"


def test_routers_that_keep_the_tables_away(tmp_path: Any) -> None:
    with an_alias(tmp_path), override_settings(DATABASE_ROUTERS=["tests.unit.test_checks.NoLocks"]):
        assert found() == ["sqlsem.E007"]


def test_a_short_lease(tmp_path: Any) -> None:
    with an_alias(tmp_path), override_settings(SQLSEM={"DATABASE": "locks", "LEASE": 5}):
        assert found() == ["sqlsem.W011"]


def test_locks_inside_the_process(tmp_path: Any, monkeypatch: Any) -> None:
    local = {"DATABASE": "locks", "BACKEND": "django_sqlsem.backends.local.LocalBackend"}
    with an_alias(tmp_path), override_settings(SQLSEM=local):
        assert found() == []  # as in anybody's tests
        monkeypatch.setattr(testmode, "active", lambda: False)
        assert found() == ["sqlsem.W010"]
    with an_alias(tmp_path, NAME=":memory:"):
        assert found() == ["sqlsem.W010"]


@pytest.mark.parametrize(
    ("limits", "config", "task_timeout", "expected"),
    [
        (Limits(), Config(), 0.0, []),
        (Limits(visibility=3600), Config(), 0.0, []),
        (Limits(visibility=300), Config(), 0.0, ["sqlsem.W007"]),
        (Limits(visibility=3600, acks_late=True), Config(), 0.0, ["sqlsem.W007"]),
        (Limits(visibility=3600, acks_late=True, hard=1800), Config(), 0.0, []),
        (Limits(visibility=3600, acks_late=True, hard=3600), Config(), 0.0, ["sqlsem.W007"]),
        (Limits(visibility=3600, hard=7200), Config(), 0.0, []),
        (Limits(soft=20, hard=30), Config(), 10.0, []),
        (Limits(soft=20, hard=30), Config(), 20.0, ["sqlsem.W008"]),
        (Limits(hard=30), Config(), None, ["sqlsem.W008"]),
        (Limits(), Config(), None, []),
        (Limits(hard=30), Config(beacons=False), 0.0, ["sqlsem.W009"]),
        (Limits(hard=30), Config(), 0.0, []),
        (Limits(hard=60), Config(beacons=False), 0.0, []),
    ],
    ids=str,
)
def test_celerys_limits(limits: Limits, config: Config, task_timeout: float | None, expected: list[str]) -> None:
    assert [each.id for each in limit_messages(limits, config, task_timeout)] == expected


def test_the_longest_countdown_is_that_of_tasks() -> None:
    assert LONGEST_COUNTDOWN == MAX_COUNTDOWN


def test_limits_of_the_settings(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setitem(sys.modules, "celery._state", None)
    assert limits() is None
    celery = {
        "CELERY_BROKER_URL": "redis://localhost/0",
        "CELERY_TASK_TIME_LIMIT": 30,
        "CELERY_TASK_ACKS_LATE": True,
    }
    with override_settings(**celery):
        assert limits() == Limits(hard=30, visibility=3600, acks_late=True)
        with override_settings(CELERY_BROKER_TRANSPORT_OPTIONS={"visibility_timeout": 120}):
            assert limits() == Limits(hard=30, visibility=120, acks_late=True)
            with an_alias(tmp_path):
                assert found() == ["sqlsem.W007"]
    with override_settings(CELERY_BROKER_URL="amqp://localhost//", CELERY_TASK_SOFT_TIME_LIMIT="soon"):
        assert limits() == Limits()


def test_limits_of_an_app(monkeypatch: Any) -> None:
    celery = pytest.importorskip("celery")
    state = importlib.import_module("celery._state")
    # Put back at the end: shared tasks of later tests would look for themselves in this app, which is closed.
    monkeypatch.setattr(state._tls, "current_app", state._tls.current_app)
    monkeypatch.setattr(state, "default_app", state.default_app)
    with celery.Celery("limits", broker="sqs://", set_as_current=True) as app:
        app.conf.task_soft_time_limit = 7
        assert limits() == Limits(soft=7, visibility=1800)
    broken = types.SimpleNamespace(_tls=types.SimpleNamespace(current_app=1))
    monkeypatch.setitem(sys.modules, "celery._state", broken)
    assert limits() is None


def test_what_is_silenced_stays_so(tmp_path: Any, capsys: Any) -> None:
    with an_alias(tmp_path, ATOMIC_REQUESTS=True), override_settings(SILENCED_SYSTEM_CHECKS=["sqlsem.W012"]):
        call_command("check")
        assert "sqlsem.W012" not in capsys.readouterr().err
    assert "locks" not in connections.databases


class _Connection:
    """What the checks look at of a connection."""

    def __init__(self, vendor: str, driver: str, **attributes: Any) -> None:
        self.vendor, self.alias = vendor, "locks"
        self.Database = types.ModuleType(driver)
        vars(self.Database).update(attributes)


@pytest.mark.parametrize(
    ("pool", "connection", "refused", "slow"),
    [
        ("prefork", _Connection("microsoft", "pyodbc"), "", ""),
        ("gevent", _Connection("postgresql", "psycopg"), "", ""),
        ("gevent", _Connection("mysql", "pymysql", install_as_MySQLdb=1), "", ""),
        ("gevent", _Connection("mysql", "MySQLdb"), "", "MySQLdb stops all greenlets"),
        ("gevent", _Connection("microsoft", "pyodbc"), "can't be taken under gevent: on SQL Server", ""),
        ("eventlet", _Connection("postgresql", "psycopg"), "can't be taken under eventlet", ""),
    ],
)
def test_greenlets_and_drivers(pool: str, connection: Any, refused: str, slow: str) -> None:
    assert refused in greenlets.refusal(pool, connection.vendor, "locks")
    assert bool(greenlets.refusal(pool, connection.vendor, "locks")) == bool(refused)
    assert slow in greenlets.slowness(pool, connection)
    assert bool(greenlets.slowness(pool, connection)) == bool(slow)


def test_pools_of_the_settings(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setitem(sys.modules, "celery._state", None)
    with an_alias(tmp_path):
        for pool in ("eventlet", "celery.concurrency.eventlet"):
            with override_settings(CELERY_WORKER_POOL=pool):
                assert found() == ["sqlsem.E008"]
        for pool in ("gevent", "prefork", "threads", "solo"):
            with override_settings(CELERY_WORKER_POOL=pool):
                assert found() == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"AUTOCOMMIT": False}, ["sqlsem.W022"]),
        ({"NAME": "file:locks.sqlite3?mode=ro"}, ["sqlsem.W021"]),
        ({"NAME": "file:locks.sqlite3?mode=rwc"}, []),
        ({"OPTIONS": {"target_session_attrs": "standby"}}, ["sqlsem.W021"]),
        ({"OPTIONS": {"target_session_attrs": "read-write"}}, []),
        ({"OPTIONS": {"options": "-c statement_timeout=5 -c default_transaction_read_only=on"}}, ["sqlsem.W021"]),
        ({"OPTIONS": {"options": "-c default_transaction_read_only=off"}}, []),
        ({"OPTIONS": {"init_command": "SET SESSION TRANSACTION READ ONLY"}}, ["sqlsem.W021"]),
    ],
    ids=str,
)
def test_the_alias_of_the_locks(tmp_path: Any, settings: dict[str, Any], expected: list[str]) -> None:
    options = FILE["OPTIONS"] | settings.get("OPTIONS", {})
    with an_alias(tmp_path, **(settings | {"OPTIONS": options})):
        assert found() == expected
