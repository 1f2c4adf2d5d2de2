"""Installing the stored procedures: again, in another version while calls wait, and for a login with few rights."""

from __future__ import annotations

import contextlib
import json
import os
import re

import pytest
from django.core.management import call_command
from django.db import connections

from django_sqlsem import BackendError, semaphore
from django_sqlsem.backends.applock import calls, install
from django_sqlsem.checks import sqlserver
from django_sqlsem.database.sqlserver import lock_names
from django_sqlsem.models import SlotRow
from tests.backends.applock import procedures
from tests.backends.applock.plain import ALIAS, Session, skip_unless_covered
from tests.backends.applock.procedures import Program, changed
from tests.programs.lock_clients import Actor
from tests.support import tds
from tests.support.databases import child_environment, held_rows
from tests.support.threads import run_beside, wait_until

skip_unless_covered()

NAME = "upgraded"
#: A login that may execute the procedures, and nothing else.
GUEST, PASSWORD = f"sqlsem_guest_{os.getpid()}", "Guest_pw1!x"


@pytest.fixture(autouse=True)
def installed(committed):
    yield
    procedures.see_that_they_are_there()
    wait_until(lambda: held_rows(ALIAS) == [], timeout=5)


@pytest.fixture
def program():
    with contextlib.closing(Program()) as made:
        procedures.warm_up(made)
        yield made


@pytest.fixture
def another():
    with contextlib.closing(Program()) as made:
        procedures.warm_up(made)
        yield made


def altered():
    """Install, and return which procedures were altered for that."""
    sent = []

    def note(execute, sql, params, many, context):
        sent.append(sql)
        return execute(sql, params, many, context)

    with connections[ALIAS].execute_wrapper(note):
        install.install(connections[ALIAS])
    return [found[1] for text in sent if (found := re.search(r"^ALTER PROCEDURE sqlsem\.(\w+)", text, re.MULTILINE))]


def test_what_is_there_already_is_left_alone():
    assert install.installed(connections[ALIAS]) == install.version()
    assert altered() == []
    with changed("release", "internal_release_1"):
        assert install.installed(connections[ALIAS]) != install.version()
        assert altered() == ["internal_release_1", "release", "version"]
        assert install.installed(connections[ALIAS]) == install.version()
        assert altered() == []
    assert install.installed(connections[ALIAS]) != install.version()
    assert altered() == ["internal_release_1", "release", "version"]


def test_what_another_version_has_is_left_alone(program):
    """Its processes may still run, and wait."""
    program.do("CREATE PROCEDURE sqlsem.internal_acquire_0 AS RETURN 7;")
    try:
        install.remove(connections[ALIAS])
        assert install.installed(connections[ALIAS]) is None
        assert len(altered()) == len(calls.files()) + 1
        rc = "DECLARE @rc int; EXEC @rc = sqlsem.internal_acquire_0; SELECT @rc"
        assert program.value(rc) == 7
        assert program.acquire(NAME, 1)[0] == 0
        program.give(NAME)
    finally:
        program.do("DROP PROCEDURE sqlsem.internal_acquire_0")


def test_calls_that_wait_while_another_version_is_installed_end_well(program, another):
    """T-SQL programs and Django alike; and so does who calls in the new version meanwhile."""
    program.acquire(NAME, 1)
    another.raw.timeout = 0  # a stand-in takes long to install them
    with Actor(ALIAS, NAME, slots=1) as actor, contextlib.closing(Session()) as observer:
        actor.ready()
        waits = run_beside(lambda: another.acquire(NAME, 1, 60_000))
        wait_until(lambda: observer.test(lock_names(NAME).gate) == 0)
        actor.ask_for()
        wait_until(lambda: observer.value("SELECT COUNT(*) FROM sqlsem_waiter") == 1)
        with changed(*calls.files()):
            assert len(altered()) == len(calls.files()) + 1
            with contextlib.closing(Program()) as newcomer:
                assert newcomer.acquire(NAME, 1, timeout_ms=300)[0] == -1
                assert not waits.done()
                program.give(NAME)
                assert waits.result(30)[:2] == (1, 1)
                assert another.prove(NAME, 1) == (0, None)
                another.give(NAME)
                actor.granted()
                actor.release()
                assert newcomer.acquire(NAME, 1)[:2] == (0, 1)
                newcomer.give(NAME)
            actor.end()


def test_the_check_names_the_command_that_brings_them_up_to_date():
    def told():
        return [each.hint for each in sqlserver.database_messages(ALIAS) if each.id == "sqlsem.W027"]

    assert told() == []
    with changed("release"):
        (hint,) = told()
        assert hint.startswith(f"Run manage.py locks sql --apply --database {ALIAS}. (migrate installs them only")
        call_command("locks", "sql", "--apply", "--noinput", "--database", ALIAS)
        assert told() == []


def test_an_acquire_without_them_names_the_command_that_installs_them():
    if tds.is_stand_in(ALIAS):
        pytest.skip("the stand-in has no number for a procedure that is not there")
    install.remove(connections[ALIAS])
    with pytest.raises(BackendError, match=f"Run 'manage.py locks sql --apply --database {ALIAS}'"):
        semaphore(NAME, using=ALIAS).acquire(timeout=0)


def test_a_schema_of_the_tables_that_is_not_dbo_is_put_in():
    texts = install.batches(tables="app", owner="app_owner")
    assert not [text for text in texts if "dbo.sqlsem_" in text]
    assert [text for text in texts if "[app].sqlsem_slot" in text]
    assert [text for text in texts if "EXEC (N'CREATE SCHEMA sqlsem AUTHORIZATION [app_owner];')" in text]


def test_names_of_schemas_and_owners_may_be_any():
    texts = install.batches(tables=r"a]p\1", owner=r"CORP\o'neill")
    assert [text for text in texts if r"FROM [a]]p\1].sqlsem_slot " in text]
    assert [text for text in texts if r"EXEC (N'CREATE SCHEMA sqlsem AUTHORIZATION [CORP\o''neill];')" in text]


# --- A login that may execute the procedures, and nothing else ---


@pytest.fixture
def guest(committed):
    """A database user with few rights: what a connection of its own is changed by."""
    if tds.is_stand_in(ALIAS):
        pytest.skip("the stand-in differs: who executes a procedure needs rights on what it reads")
    with contextlib.closing(Session()) as owner:
        owner.do(f"CREATE LOGIN {GUEST} WITH PASSWORD = '{PASSWORD}'")
        try:
            owner.do(f"CREATE USER {GUEST} FOR LOGIN {GUEST}")
            owner.do(f"GRANT EXECUTE ON SCHEMA::sqlsem TO {GUEST}")
            yield {"USER": GUEST, "PASSWORD": PASSWORD}
        finally:
            drop_guest(owner)


def drop_guest(owner):
    revoke = f"REVOKE EXECUTE ON SCHEMA::sqlsem FROM {GUEST}"
    for sql in (revoke, f"DROP USER {GUEST}", f"DROP LOGIN {GUEST}"):
        with contextlib.suppress(owner.error_class):  # it is not there
            owner.do(sql)


def test_a_program_needs_no_right_but_to_execute_the_procedures(guest, program):
    with contextlib.closing(Program(**guest)) as made:
        for table in ("sqlsem_slot", "sqlsem_semaphore", "sqlsem_waiter"):
            with pytest.raises(made.error_class):
                made.value(f"SELECT COUNT(*) FROM dbo.{table}")
        rc, slot, token, _waited = made.acquire(NAME, 1)
        assert (rc, slot) == (0, 1)
        assert SlotRow.objects.using(ALIAS).get().token == token
        assert made.prove(NAME, 1) == (0, None)
        assert [(row[1], row[4]) for row in made.rows("EXEC sqlsem.status @name = ?", NAME)] == [(1, "held")]
        assert made.give(NAME) == 0
        program.acquire(NAME, 1)
        waits = run_beside(lambda: made.acquire(NAME, 1))
        wait_until(lambda: program.test(lock_names(NAME).gate) == 0)
        program.give(NAME)
        assert waits.result(30)[:2] == (1, 1)
        assert made.give(NAME) == 0


def test_django_needs_no_other_right_to_take_and_give_back(guest, program):
    databases = json.loads(child_environment()["SQLSEM_TEST_DATABASES"])
    databases[ALIAS] |= guest
    program.acquire(NAME, 1)
    env = {"SQLSEM_TEST_DATABASES": json.dumps(databases)}
    with Actor(ALIAS, NAME, slots=1, env=env) as actor:
        actor.ready().ask_for()
        wait_until(lambda: program.test(lock_names(NAME).gate) == 0)
        program.give(NAME)
        assert actor.granted()[0] == [1]
        assert actor.check() is None
        actor.release()
        actor.end()


def test_a_login_that_may_not_install_is_told_what_a_dba_has_to_do(guest):
    connection = connections[ALIAS].copy()
    connection.settings_dict = connection.settings_dict | guest
    with changed("release"), contextlib.closing(connection), pytest.raises(BackendError, match=r"manage\.py locks sql"):
        install.install(connection)
    assert install.installed(connections[ALIAS]) == install.version()
