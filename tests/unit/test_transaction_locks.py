"""Locks of the caller's transaction as one process sees them: arguments, forms, and the texts for SQL Server."""

from __future__ import annotations

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group, User
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import TestCase

from django_sqlsem import BackendError, DeadlockError
from django_sqlsem.core.names import resource_for
from django_sqlsem.locks import locked_atomic, table_lock, transaction_lock
from django_sqlsem.locks.transaction import sqlserver
from django_sqlsem.locks.transaction.base import Wanted
from django_sqlsem.models import HolderFields, TransactionLockRow
from tests.support import applocks, databases


def test_outside_a_transaction_it_is_refused(database):
    with pytest.raises(TransactionManagementError, match="'orders' can be locked inside a transaction only"):
        transaction_lock("orders", using=database)
    with pytest.raises(TransactionManagementError, match=r"'table auth_user' .* transaction\.atomic"):
        table_lock(User, using=database)
    others = [alias for alias in databases.covered() if alias != database]
    if others:
        hint = f"One is open on '{database}'"
        with transaction.atomic(using=database), pytest.raises(TransactionManagementError, match=hint):
            transaction_lock("orders", using=others[0])
    assert not TransactionLockRow.objects.using(database).exists()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"name": 3}, TypeError, "name must be a str"),
        ({"name": ""}, ValueError, "1 to 200"),
        ({"shared": 1}, TypeError, "shared must be True or False, not 1"),
        ({"timeout": -1}, ValueError, "timeout must be from 0"),
        ({"timeout": "5"}, TypeError, "timeout must be seconds"),
        ({"using": 5}, TypeError, "using must be the alias"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(arguments, error, text):
    for take in (transaction_lock, locked_atomic):
        with pytest.raises(error, match=text):
            take(**({"name": "x"} | arguments))
    if "name" not in arguments:
        with pytest.raises(error, match=text):
            table_lock(User, **arguments)


def test_a_table_lock_wants_a_model_with_a_table():
    with pytest.raises(TypeError, match="model must be a model class, not 'auth"):
        table_lock("auth.User")
    with pytest.raises(ValueError, match="HolderFields is abstract"):
        table_lock(HolderFields)


def test_in_a_coroutine_it_says_what_to_do(committed):
    async def ask():
        transaction_lock("orders")

    async def enter():
        with locked_atomic("orders"):
            pass

    for function in (ask, enter):
        with pytest.raises(SynchronousOnlyOperation, match="sync_to_async"):
            async_to_sync(function)()
    with pytest.raises(TypeError, match="synchronous functions"):
        locked_atomic("orders")(ask)


def test_a_generator_function_is_refused():
    """It would return before it begins, and so would the transaction."""

    def rows():
        yield 1

    class Rows:
        def __call__(self):
            yield 1

    for function in (rows, Rows()):
        with pytest.raises(TypeError, match="decorates no generators"):
            locked_atomic("orders")(function)


def test_a_block_and_a_decorator_open_the_transaction(database):
    @locked_atomic("orders", using=database)
    def work(fails):
        Group.objects.using(database).create(name=f"ann{fails}")
        assert connections[database].in_atomic_block
        if fails:
            raise ZeroDivisionError
        return "done"

    assert work(False) == "done"
    with pytest.raises(ZeroDivisionError):
        work(True)
    assert [group.name for group in Group.objects.using(database).all()] == ["annFalse"]
    assert not connections[database].in_atomic_block
    block = locked_atomic("orders", timeout=5, using=database)
    with block as permit, locked_atomic("orders", using=database) as again:
        assert (permit.name, permit.waited, permit.shared, permit.using) == ("orders", 0, False, database)
        assert again.waited == 0
    with pytest.raises(RuntimeError, match="entered once"), block:
        pass


def test_in_a_transaction_without_atomic(database):
    transaction.set_autocommit(False, using=database)
    try:
        assert transaction_lock("orders", using=database).waited == 0
    finally:
        transaction.rollback(using=database)
        transaction.set_autocommit(True, using=database)


class InsideATestCase(TestCase):
    """Its own transaction is one as well: locks are had until the test ends, and their rows go with its data."""

    databases = set(databases.covered())

    def test_it_works_and_leaves_nothing(self):
        for alias in databases.covered():
            with self.subTest(alias):
                assert transaction_lock("in a test", timeout=0, using=alias).waited == 0
                with transaction.atomic(using=alias), locked_atomic("in a test", using=alias) as permit:
                    assert permit.waited == 0
                assert table_lock(User, timeout=0, using=alias).waited == 0
                if applocks.are_at(alias):
                    continue  # without a row
                assert TransactionLockRow.objects.using(alias).filter(name="in a test").exists()
                assert databases.query(alias, "SELECT COUNT(*) FROM sqlsem_transaction_lock") == [(0,)]


class Answers:
    """A connection and its cursor, which give the answers of SQL Server that its documentation names."""

    alias, in_atomic_block, needs_rollback = "mssql", True, False

    def __init__(self, *answers):
        self.answers, self.sent = list(answers), []

    def cursor(self):
        return self

    def execute(self, sql, parameters=()):
        self.sent.append((sql, list(parameters)))

    def fetchone(self):
        return (self.answers.pop(0),)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass


def ask(*answers, table="", shared=False, timeout=30.0):
    server = Answers(*answers)
    wanted = Wanted(resource_for("orders", "transaction_lock"), shared, table)
    try:
        return sqlserver.ApplockLocking(server).lock(wanted, timeout), server
    except Exception as error:
        return error, server


def test_the_return_codes_of_application_locks():
    waited, server = ask(2, 0)
    assert waited == 0
    assert server.sent[1] == (sqlserver.GET, ["orders", "Exclusive", 30_000])
    assert "@LockOwner = 'Transaction'" in sqlserver.GET
    waited, server = ask(2, 1, shared=True, timeout=None)
    assert waited > 0
    assert server.sent[1][1] == ["orders", "Shared", -1]
    assert ask(2, -1, timeout=0)[0] is None
    error, server = ask(2, -3)
    assert isinstance(error, DeadlockError)
    assert server.needs_rollback
    assert isinstance(ask(2, -999)[0], BackendError)
    assert isinstance(ask(5)[0], TransactionManagementError)


def test_the_texts_of_table_locks_on_sql_server():
    waited, server = ask(2, 0, table="[app_order]")
    assert waited == 0
    assert "FROM [app_order] WITH (TABLOCKX, HOLDLOCK)" in server.sent[1][0]
    waited, server = ask(2, 1222, 0, table="[app_order]", shared=True)
    assert waited > 0
    assert "SET LOCK_TIMEOUT 30000" in server.sent[2][0]
    assert "WITH (TABLOCK, HOLDLOCK)" in server.sent[2][0]
    assert ask(2, 1222, table="[app_order]", timeout=0)[0] is None
