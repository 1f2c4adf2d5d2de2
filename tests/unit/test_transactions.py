from __future__ import annotations

import logging

import pytest
from django.contrib.auth.models import User
from django.db import DatabaseError, connection, connections, transaction
from django.test import TestCase

from django_sqlsem.database.transactions import at_transaction_end, must_fail, open_transactions
from tests.support import databases
from tests.support.threads import run_in_threads


class Seen(list):
    """A callback that notes when it ran."""

    def __call__(self):
        self.append("ended")


def untouched(alias):
    patched = {"commit", "rollback", "close", "set_autocommit", "_sqlsem_watch"} & set(vars(connections[alias]))
    return not patched and type(connections[alias].atomic_blocks) is list


def test_without_a_transaction_it_runs_at_once(database):
    seen = Seen()
    at_transaction_end(database, seen)
    at_transaction_end(None, seen)
    assert seen == ["ended", "ended"]
    assert untouched(database)


def test_after_a_commit(database):
    seen = Seen()
    with transaction.atomic(using=database):
        at_transaction_end(database, seen)
        User.objects.using(database).create(username="ann")
        assert seen == []
        assert open_transactions() == [database]
    assert seen == ["ended"]
    assert untouched(database)
    with transaction.atomic(using=database):
        pass
    assert seen == ["ended"]


def test_the_commit_is_visible_and_before_the_hooks_of_on_commit(database):
    order = []

    def look():
        order.append(databases.query(database, "SELECT count(*) FROM auth_user")[0][0])

    with transaction.atomic(using=database):
        User.objects.using(database).create(username="ann")
        transaction.on_commit(lambda: order.append("hook"), using=database)
        at_transaction_end(database, look)
    assert order == [1, "hook"]


def test_after_a_rollback(database):
    seen = Seen()

    @transaction.atomic(using=database)
    def work():
        at_transaction_end(database, seen)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert seen == ["ended"]
    assert untouched(database)


def test_what_must_fail_fails_as_a_whole_and_leaves_nothing_behind(database):
    users = User.objects.using(database)
    with transaction.atomic(using=database):
        users.create(username="ann")
        with transaction.atomic(using=database):
            must_fail(database)
    assert untouched(database)
    with transaction.atomic(using=database):
        with pytest.raises(ZeroDivisionError), transaction.atomic(using=database):
            raise ZeroDivisionError
        users.create(username="ben")
    assert databases.query(database, "SELECT username FROM auth_user") == [("ben",)]


def test_after_a_rollback_that_was_asked_for(database):
    seen = Seen()
    with transaction.atomic(using=database):
        at_transaction_end(database, seen)
        transaction.set_rollback(True, using=database)
    assert seen == ["ended"]


@pytest.mark.parametrize("savepoint", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_outermost_transaction_counts(database, savepoint, fails):
    seen = Seen()
    with transaction.atomic(using=database):
        try:
            with transaction.atomic(using=database, savepoint=savepoint):
                at_transaction_end(database, seen)
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert seen == []
    assert seen == ["ended"]
    assert untouched(database)


def test_a_commit_that_fails_counts_once(database):
    if connections[database].vendor == "mysql":
        pytest.skip("MariaDB checks every constraint at once")
    seen = Seen()

    @transaction.atomic(using=database)
    def work():
        at_transaction_end(database, seen)
        User.groups.through.objects.using(database).create(user_id=4711, group_id=4711)

    with pytest.raises(DatabaseError):
        work()
    assert seen == ["ended"]
    assert untouched(database)


def test_manual_transactions(database):
    seen = Seen()
    transaction.set_autocommit(False, using=database)
    try:
        for end in (transaction.commit, transaction.rollback):
            at_transaction_end(database, seen)
            with transaction.atomic(using=database):
                at_transaction_end(database, seen)
            assert seen == []
            end(using=database)
            assert seen == ["ended", "ended"]
            seen.clear()
        at_transaction_end(database, seen)
        assert seen == []
    finally:
        transaction.rollback(using=database)
        transaction.set_autocommit(True, using=database)
    assert seen == ["ended"]
    assert untouched(database)


def test_a_connection_that_is_closed_inside_its_transaction(database):
    seen = Seen()
    with transaction.atomic(using=database):
        at_transaction_end(database, seen)
        connections[database].close()
        assert seen == ["ended"]
        at_transaction_end(database, seen)
        assert seen == ["ended", "ended"]
    assert untouched(database)


def test_a_session_that_the_server_ends(database):
    seen = Seen()

    @transaction.atomic(using=database)
    def work():
        at_transaction_end(database, seen)
        User.objects.using(database).create(username="ann")
        if not databases.kill_sessions(database):
            pytest.skip("SQLite has no sessions")
        User.objects.using(database).create(username="bob")

    with pytest.raises(DatabaseError):
        work()
    assert seen == ["ended"]
    assert untouched(database)


def test_a_hook_that_fails_does_not_keep_it(database):
    seen = Seen()

    def fail():
        raise ZeroDivisionError

    @transaction.atomic(using=database)
    def work():
        transaction.on_commit(fail, using=database)
        at_transaction_end(database, seen)

    with pytest.raises(ZeroDivisionError):
        work()
    assert seen == ["ended"]


def test_a_callback_that_fails_is_logged_and_the_commit_stands(database, caplog):
    seen = Seen()

    def fail():
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR, "django_sqlsem"), transaction.atomic(using=database):
        at_transaction_end(database, fail)
        at_transaction_end(database, seen)
        User.objects.using(database).create(username="ann")
    assert seen == ["ended"]
    assert "ZeroDivisionError" in caplog.text
    assert User.objects.using(database).exists()


def test_an_interrupt_in_a_callback_leaves_none_out(database):
    seen = Seen()

    def interrupt():
        raise KeyboardInterrupt

    @transaction.atomic(using=database)
    def work():
        at_transaction_end(database, interrupt)
        at_transaction_end(database, seen)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["ended"]
    assert untouched(database)


def test_a_callback_may_begin_the_next_transaction(database):
    seen = Seen()

    def follow():
        at_transaction_end(database, seen)

    with transaction.atomic(using=database):
        at_transaction_end(database, follow)
    assert seen == ["ended"]


def test_someone_elses_wrapper_around_ours_stays(database):
    seen = Seen()
    wrapped = connections[database]
    with transaction.atomic(using=database):
        at_transaction_end(database, seen)
        ours = wrapped.commit
        wrapped.commit = theirs = lambda: ours()
    try:
        assert seen == ["ended"]
        assert wrapped.commit is theirs
        with transaction.atomic(using=database):
            User.objects.using(database).create(username="ann")
        assert User.objects.using(database).exists()
    finally:
        del wrapped.commit


def test_the_last_of_several_databases_counts(committed):
    if len(databases.covered()) < 2:
        pytest.skip("one database only")
    first, second, *_ = databases.covered()
    seen = Seen()
    with transaction.atomic(using=first):
        with transaction.atomic(using=second):
            at_transaction_end(None, seen)
        assert seen == []
    assert seen == ["ended"]
    with transaction.atomic(using=first):
        at_transaction_end(second, seen)
        assert seen == ["ended", "ended"]


def test_the_transactions_of_other_threads_do_not_matter(database):
    seen = Seen()
    with transaction.atomic(using=database):
        run_in_threads(2, lambda index: at_transaction_end(None, seen))
        assert seen == ["ended", "ended"]


class InsideATestCase(TestCase):
    """Its own transactions never end within a test: the outermost one inside them counts."""

    def test_without_a_transaction(self):
        seen = Seen()
        at_transaction_end(None, seen)
        assert seen == ["ended"]
        assert untouched("default")

    def test_commits_and_rollbacks(self):
        for savepoint in (True, False):
            for fails in (True, False):
                with self.subTest(savepoint=savepoint, fails=fails):
                    seen = Seen()
                    try:
                        with transaction.atomic(savepoint=True), transaction.atomic(savepoint=savepoint):
                            with transaction.atomic():
                                at_transaction_end(None, seen)
                            assert seen == []
                            if fails:
                                raise ZeroDivisionError
                    except ZeroDivisionError:
                        pass
                    assert seen == ["ended"]
                    assert untouched("default")
                    assert connection.in_atomic_block

    def test_a_transaction_without_a_savepoint(self):
        seen = Seen()
        with transaction.atomic(savepoint=False):
            at_transaction_end(None, seen)
            assert seen == []
        assert seen == ["ended"]

    def test_a_durable_transaction_with_hooks(self):
        seen = Seen()
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic(durable=True):
            transaction.on_commit(lambda: seen.append("hook"))
            at_transaction_end(None, seen)
        assert seen == ["ended", "hook"]

    def test_the_data_of_the_test_is_rolled_back(self):
        assert not User.objects.exists()
        with transaction.atomic():
            at_transaction_end(None, Seen())
            User.objects.create(username="ann")
