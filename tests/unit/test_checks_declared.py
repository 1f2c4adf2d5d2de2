"""The checks of what the code declares: several numbers, unknown aliases, transactions around, forgotten migrations."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from django.core.management import call_command
from django.db import connections, transaction

from django_sqlsem import mutex, semaphore
from django_sqlsem.checks.servers import check_tables
from django_sqlsem.checks.views import check_declared
from django_sqlsem.locks import counter, rwlock


@pytest.fixture
def module(request: Any) -> Iterator[types.ModuleType]:
    """A module of a project."""
    name = f"declaring_{request.node.name}"
    made = sys.modules[name] = types.ModuleType(name)
    yield made
    del sys.modules[name]


def declare(module: types.ModuleType, source: str) -> None:
    names = {"semaphore": semaphore, "mutex": mutex, "rwlock": rwlock, "counter": counter}
    vars(module).update(names, transaction=transaction, functools=functools)
    exec(source, vars(module))


def found(module: types.ModuleType) -> list[Any]:
    return [each for each in check_declared(None) if module.__name__ in each.msg]


def test_two_numbers_for_one_name(module: types.ModuleType) -> None:
    declare(
        module,
        """
ONE = semaphore("dup-checked", slots=3)
OTHER = semaphore("dup-elsewhere", slots=3)
AGAIN = semaphore("dup-elsewhere", slots=3)
OPEN = semaphore("dup-checked")

@semaphore("dup-checked", 5)
def work(): ...
""",
    )
    [message] = found(module)
    assert message.id == "sqlsem.W023"
    assert f"'dup-checked': 3 in {module.__name__}.ONE, 5 in {module.__name__}.work" in message.msg
    assert "Two views that answer differently need two objects: give both the same number" in message.hint
    assert "/checks.html#sqlsem-w023" in message.hint


def test_two_kinds_of_one_name(module: types.ModuleType) -> None:
    declare(
        module,
        """
RUN = mutex("kinds-near")
@semaphore("kinds-near", 3)
def work(): ...

PAGES = rwlock("kinds-far")
COUNT = counter("kinds-far")
READ = rwlock("kinds-fine", 5).read()
WRITE = rwlock("kinds-fine", 5)
@mutex("kinds-also-fine")
def alone(): ...
ALONE = mutex("kinds-also-fine")
""",
    )
    messages = {each.msg.split("'")[1]: each for each in found(module)}
    assert {each.id for each in messages.values()} == {"sqlsem.W029"}
    near, far = messages.pop("kinds-near"), messages.pop("kinds-far")
    assert messages == {}
    name = module.__name__
    assert (
        f"'kinds-near' as several kinds of locks: mutex in {name}.RUN, semaphore in {name}.work. One is let" in near.msg
    )
    assert f"'kinds-far' as several kinds of locks: counter in {name}.COUNT, rwlock in {name}.PAGES. Which" in far.msg
    assert "/checks.html#sqlsem-w029" in near.hint


def test_an_alias_that_is_none(module: types.ModuleType) -> None:
    declare(module, 'LOCK = mutex("a", using="lokcs")\n@semaphore("b", using="locsk")\ndef work(): ...')
    assert [(each.id, each.msg.split(",")[0]) for each in found(module)] == [
        ("sqlsem.E009", f"{module.__name__}.LOCK: using is 'lokcs'"),
        ("sqlsem.E009", f"{module.__name__}.work: using is 'locsk'"),
    ]


def test_a_transaction_above_a_semaphore(module: types.ModuleType) -> None:
    declare(
        module,
        """
def plain(func):
    @functools.wraps(func)
    def wrapper():
        return func()
    return wrapper

@transaction.atomic
@semaphore("bad")
def bad(): ...

@transaction.atomic(using="default")
@plain
@semaphore("far")
def far(): ...

@transaction.atomic
@semaphore("late", release="on_commit")
def late(): ...

@semaphore("good")
@transaction.atomic
def good(): ...

class Worker:
    @transaction.atomic
    @semaphore("method")
    def method(self): ...

    @staticmethod
    @transaction.atomic
    @semaphore("static")
    def static(): ...
""",
    )
    app = Celery("checks", set_as_current=False)

    @app.task
    @transaction.atomic
    @module.semaphore("task")
    def task() -> None: ...

    task.run.__module__ = module.__name__
    vars(module)["task"] = task
    names = sorted(each.msg.split("'")[1] for each in found(module) if each.id == "sqlsem.W025")
    assert names == ["bad", "far", "method", "static"]


def test_nothing_is_said_of_code_that_declares_well(module: types.ModuleType) -> None:
    declare(module, 'LOCK = semaphore("well", 2, using="default")\n@LOCK\ndef work(): ...')
    assert found(module) == []


def test_a_forgotten_migrate(committed: None, monkeypatch: Any) -> None:
    def said() -> list[str]:
        return [f"{each.id} {each.msg}" for each in check_tables(None, ["default"])]

    assert said() == []
    with connections["default"].cursor() as cursor:
        cursor.execute("DELETE FROM django_migrations WHERE app = 'sqlsem' AND name = '0002_procedures'")
        try:
            [message] = said()
            assert message.startswith("sqlsem.W026 No lock can be had in the database 'default'. Migrations have not")
            assert "0002_procedures" in message
            assert list(check_tables(None, [])) == []
            monkeypatch.setattr(sys, "argv", ["manage.py", "migrate"])
            assert said() == []  # it is about to be done
        finally:
            call_command("migrate", "sqlsem", fake=True, verbosity=0)
