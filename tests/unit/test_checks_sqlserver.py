"""The system checks of SQL Server: those of settings need no server, those of rights ask one."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys

import django
import pytest
from django.conf import settings as django_settings
from django.core import checks
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections
from django.test import override_settings

from django_sqlsem import lifecycle, semaphore
from django_sqlsem.checks import sqlserver
from django_sqlsem.checks.doctor import examine
from django_sqlsem.checks.servers import Server
from tests.support import databases, tds
from tests.support.databases import ROOT
from tests.support.private_servers import known
from tests.support.threads import wait_until

ALIAS = "locks"
SETTINGS = {"ENGINE": "mssql", "NAME": "app", "HOST": "127.0.0.1", "PORT": "1", "USER": "sa", "PASSWORD": "x"}
WINDOWS_DEFAULT = ["sqlsem.W003"] if os.name == "nt" else []
needs_server = pytest.mark.skipif("mssql" not in databases.covered(), reason="no server that speaks TDS")


@pytest.fixture
def driver(monkeypatch):
    """pyodbc as mssql-django leaves it: with pooling off."""
    pyodbc = pytest.importorskip("pyodbc", exc_type=ImportError)  # without unixODBC it cannot be imported
    monkeypatch.setattr(pyodbc, "pooling", False)
    monkeypatch.setattr(pyodbc, "drivers", lambda: ["FreeTDS", "ODBC Driver 18 for SQL Server"])
    return pyodbc


@contextlib.contextmanager
def an_alias(name=ALIAS, **options):
    """An alias of SQL Server beside those of the tests, which keeps the locks. Nothing connects to it."""
    entry = SETTINGS | {"OPTIONS": options}
    connections.settings[name] = connections.configure_settings({"default": entry})["default"]
    try:
        with override_settings(SQLSEM={"DATABASE": name}):
            yield
    finally:
        with contextlib.suppress(AttributeError):
            del connections[name]
        del connections.settings[name]


#: Of what other tests have declared in this process.
OF_TESTS = ("sqlsem.E009", "sqlsem.W023", "sqlsem.W025")


def found(**kwargs):
    """What the check framework says about us: ids and whole messages."""
    told = [each for each in checks.run_checks(**kwargs) if each.id.startswith("sqlsem.")]
    ours = [each for each in told if each.id not in OF_TESTS]
    return [each.id for each in ours], " ".join(str(each) for each in ours)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, WINDOWS_DEFAULT),
        ({"extra_params": "MARS_Connection=no"}, []),
        ({"extra_params": "MARS_Connection=yes"}, ["sqlsem.W003"]),
        ({"extra_params": "Encrypt=yes; mars_connection = {YES} ;"}, ["sqlsem.W003"]),
        ({"extra_params": "MARS_Connection=no;MARS_Connection=yes"}, []),
        ({"extra_params": "PWD={;MARS_Connection=yes;}"}, WINDOWS_DEFAULT),
        ({"extra_params": "MARS_Connection=no;ApplicationIntent=ReadOnly"}, ["sqlsem.E002"]),
        ({"extra_params": "MARS_Connection=no;applicationintent=READONLY"}, ["sqlsem.E002"]),
        ({"extra_params": "MARS_Connection=no;ApplicationIntent=ReadWrite"}, []),
        ({"extra_params": "MARS_Connection=no;KeepAlive=30"}, []),
        ({"extra_params": "MARS_Connection=no;KeepAlive=600"}, ["sqlsem.W004"]),
        ({"extra_params": "MARS_Connection=no;KeepAlive=often"}, []),
        ({"driver": "FreeTDS", "extra_params": "Timeout=4"}, ["sqlsem.W004"]),
        ({"driver": "FreeTDS", "extra_params": "Timeout=0"}, []),
        ({"extra_params": "MARS_Connection=no;Timeout=4"}, []),  # Microsoft's driver does not know it
        ({"extra_params": "MARS_Connection=no", "query_timeout": 1}, []),  # lock sessions have limits of their own
        ({"extra_params": "MARS_Connection=no;ConnectRetryCount=3"}, []),  # and do not reconnect
        ({"extra_params": "MARS_Connection=no;RetryExec={1205:3,1+1:;}"}, ["sqlsem.W005"]),
        ({"extra_params": None}, WINDOWS_DEFAULT),
        ({"extra_params": "ApplicationIntent=ReadOnly;MARS_Connection=yes"}, ["sqlsem.W003", "sqlsem.E002"]),
    ],
    ids=str,
)
def test_settings_that_lock_sessions_must_not_have(driver, options, expected):
    with an_alias(**options):
        ids, text = found()
    assert ids == expected
    assert not ids or repr(ALIAS) in text


def test_pooling_that_the_driver_will_do(driver, monkeypatch):
    with an_alias(extra_params="MARS_Connection=no"):
        assert found()[0] == []
        assert connections[ALIAS].vendor == "microsoft"  # its module is imported now, and has read the setting
        monkeypatch.setattr(driver, "pooling", True)
        assert found()[0] == ["sqlsem.W002"]


def test_a_project_without_the_setting_is_told_of_pooling():
    pytest.importorskip("pyodbc", exc_type=ImportError)
    for setting, expected in ((None, True), (True, True), (False, False)):
        said = run_check(pooling=setting)
        assert "Traceback" not in said, said
        assert ("sqlsem.W002" in said) is expected


@pytest.mark.parametrize(("setting", "expected"), [(None, ["sqlsem.W002"]), (True, ["sqlsem.W002"]), (False, [])])
def test_pooling_of_the_python_driver(driver, monkeypatch, setting, expected):
    pooling = pytest.importorskip("mssql_python.pooling", exc_type=ImportError)
    for name in ("_enabled", "_initialized"):  # as in a process that has not connected yet
        monkeypatch.setattr(pooling.PoolingManager, name, False)
    with an_alias(python_driver="mssql_python"), override_settings():
        if setting is None:
            del django_settings.DATABASE_CONNECTION_POOLING
        else:
            django_settings.DATABASE_CONNECTION_POOLING = setting
        assert found()[0] == expected
        monkeypatch.setattr(pooling.PoolingManager, "_initialized", True)  # it has been turned off by hand
        assert found()[0] == []
        monkeypatch.setattr(pooling.PoolingManager, "_enabled", True)
        assert found()[0] == ["sqlsem.W002"]


@pytest.mark.parametrize(
    ("sqlsem", "expected"),
    [
        ({"DATABASE": ALIAS}, ["sqlsem.E002"]),
        ({"DATABASE": "default"}, []),
        ({"DATABASE": "default", "DATABASES": {ALIAS: {"TIMEOUT": 3}}}, ["sqlsem.E002"]),
        ({"DATABASE": ALIAS, "BACKEND": "django_sqlsem.backends.rows.RowsBackend"}, []),
        ({"DATABASE": "nowhere"}, ["sqlsem.E001"]),
        ({"DATABASES": {ALIAS: {"TIMEOUT": "soon"}}}, ["sqlsem.E001"]),
        ([], ["sqlsem.E001"]),
    ],
    ids=str,
)
def test_only_aliases_with_application_locks_are_looked_at(driver, sqlsem, expected):
    with an_alias(extra_params="MARS_Connection=no;ApplicationIntent=ReadOnly"), override_settings(SQLSEM=sqlsem):
        assert found()[0] == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"driver": "odbc driver 18 for sql server"}, ""),
        ({"dsn": "app"}, ""),
        ({"driver": "ODBC Driver 17 for SQL Server"}, "but not 'ODBC Driver 17 for SQL Server'"),
        ({"driver": "/no/such/libtdsodbc.so"}, "but not '/no/such/libtdsodbc.so'"),
        ({"driver": sys.executable}, ""),
    ],
    ids=str,
)
def test_the_odbc_driver_must_be_there(driver, options, reason):
    messages = list(sqlserver.driver_messages(ALIAS, SETTINGS | {"OPTIONS": options}))
    assert [each.id for each in messages] == (["sqlsem.E003"] if reason else [])
    if reason:
        assert reason in messages[0].msg
        assert "(not by pip)" in messages[0].hint
        assert '"python_driver": "mssql_python"' in messages[0].hint


def test_a_missing_driver_is_reported_beside_what_is_wrong_with_the_settings(driver, monkeypatch):
    with an_alias(driver="ODBC Driver 17 for SQL Server", extra_params="MARS_Connection=no"):
        assert connections[ALIAS].vendor == "microsoft"  # its module is imported now, and has read the setting
        monkeypatch.setattr(driver, "pooling", True)
        assert found()[0] == ["sqlsem.E003", "sqlsem.W002"]


def test_microsofts_driver_18_is_not_needed_where_17_is(driver, monkeypatch):
    monkeypatch.setattr(driver, "drivers", lambda: ["ODBC Driver 17 for SQL Server"])
    assert list(sqlserver.driver_messages(ALIAS, SETTINGS)) == []
    monkeypatch.setattr(driver, "drivers", list)
    assert "knows no driver, but not 'ODBC Driver 18" in next(sqlserver.driver_messages(ALIAS, SETTINGS)).msg


def test_nobody_asks_for_the_drivers_of_another_database():
    assert list(sqlserver.driver_messages("default", {"ENGINE": "django.db.backends.sqlite3"})) == []


def run_check(*, pooling=False, before="pass", **options):
    """Run ``manage.py check`` in a process of its own, on a project with a lock database; return what it says."""
    sqlite = {"ENGINE": "django.db.backends.sqlite3"}  # Django itself does not start without the default's driver
    configured = {
        "DATABASES": {"default": sqlite, ALIAS: SETTINGS | {"OPTIONS": options}},
        "SQLSEM": {"DATABASE": ALIAS},
    }
    if pooling is not None:
        configured["DATABASE_CONNECTION_POOLING"] = pooling
    code = f"""
import sys
{before}
from django.conf import settings
settings.configure(INSTALLED_APPS=["django_sqlsem"], **{configured!r})
from django.core.management import execute_from_command_line
execute_from_command_line(["manage.py", "check"])
"""
    environment = {key: value for key, value in os.environ.items() if key != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("before", "options", "words"),
    [
        ("sys.modules['mssql'] = None", {}, ["sqlsem.E003", "'locks'", "mssql"]),
        ("sys.modules['pyodbc'] = None", {}, ["sqlsem.E003", "Error loading pyodbc module"]),
        ("sys.modules['mssql_python'] = None", {"python_driver": "mssql_python"}, ["sqlsem.E003", "mssql_python"]),
    ],
    ids=["no mssql-django", "no pyodbc", "no mssql-python"],
)
def test_a_missing_package_is_named(before, options, words):
    if "pyodbc" not in before:
        pytest.importorskip("pyodbc", exc_type=ImportError)
    said = run_check(before=before, **options)
    if django.VERSION >= (6, 1) and not options:  # Django loads the drivers of all aliases before any check of ours
        assert "ImproperlyConfigured" in said
        assert words[-1] in said
        return
    assert "Traceback" not in said, said
    for word in [*words, "Install django-sqlsem with its extra mssql.", "/checks.html#sqlsem-e003"]:
        assert word in said
    assert said.count("sqlsem.E") == 1


# --- With a server ---


def test_a_server_that_cannot_be_reached_is_an_error(committed, driver, monkeypatch):
    monkeypatch.undo()  # the real list of drivers
    driver.pooling = False
    with an_alias(connection_timeout=1, connection_retries=0, extra_params="MARS_Connection=no"):
        ids, text = found(databases=[ALIAS], tags=[checks.Tags.database])
        with pytest.raises(CommandError, match=r"sqlsem\.E010"):
            call_command("check", "--database", ALIAS)
    assert ids == ["sqlsem.E010"]
    assert "could not be asked" in text
    assert "No lock can be had until it answers." in text


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("SSL Provider: certificate verify failed: self-signed certificate", "TrustServerCertificate=yes"),
        ("Login failed for user 'sa'.", "No lock can be had until it answers."),
    ],
    ids=["certificate", "password"],
)
def test_what_the_driver_says_of_a_login_has_its_advice(committed, driver, monkeypatch, said, advice):
    with an_alias():

        def refuse(*args):
            raise OperationalError(said)

        with monkeypatch.context() as patch:
            patch.setattr(type(connections[ALIAS]), "get_new_connection", refuse)
            (message,) = sqlserver.database_messages(ALIAS)
    assert (message.id, message.level) == ("sqlsem.E010", checks.ERROR)
    assert said in message.msg
    assert advice in message.hint


def test_the_doctor_counts_the_sessions_of_permits_and_waits(driver):
    def told():
        (message,) = Server(ALIAS, connections[ALIAS]).connections()
        return message.msg

    more = "2 a process, and one more for each further permit of one name and each wait, come"
    with an_alias():
        assert more in told()
        with override_settings(SQLSEM={"DATABASE": ALIAS, "BACKEND": "django_sqlsem.backends.rows.RowsBackend"}):
            assert more not in told()


def test_no_server_is_asked_unless_it_is_named(driver):
    with an_alias(extra_params="MARS_Connection=no"):
        assert found()[0] == []
        assert found(databases=["default"])[0] == []
        assert found(databases=[], tags=[checks.Tags.database])[0] == []


@pytest.fixture
def server(committed):
    """The alias of the covered server, which keeps the locks."""
    with override_settings(SQLSEM={"DATABASE": "mssql"}):
        yield "mssql"


@needs_server
def test_an_administrator_may_do_everything(server, capsys):
    assert found(databases=[server], tags=[checks.Tags.database]) == ([], "")
    call_command("check", "--database", server)
    assert "no issues" in capsys.readouterr().out


@needs_server
def test_the_probe_leaves_no_lock_behind(server):
    with contextlib.closing(tds.raw_connection(server)) as raw:
        cursor = raw.cursor()
        cursor.execute(sqlserver.PROBE.replace("CAST(NEWID() AS nvarchar(36))", "N'known'"))
        assert [row[0] for row in tds.rows(cursor)] == [0]
        assert tds.locked(server, ["sqlsem:check:known"]) == [False]


@contextlib.contextmanager
def a_plain_user(alias, *grants):
    """A login that may connect to the alias's database and nothing else; the alias is used under its name."""
    entry, name = connections[alias].settings_dict, f"sqlsem_plain_{os.getpid()}"
    with contextlib.ExitStack() as undo:
        cursor = undo.enter_context(contextlib.closing(tds.raw_connection(alias))).cursor()

        def dropped():  # not before the server has seen the end of the login's last session
            with contextlib.suppress(Exception):
                cursor.execute(f"DROP LOGIN [{name}]")
                return True

        cursor.execute(f"CREATE LOGIN [{name}] WITH PASSWORD = 'Plain-1-Password'")
        undo.callback(wait_until, dropped)
        cursor.execute(f"CREATE USER [{name}] FOR LOGIN [{name}]")
        undo.callback(cursor.execute, f"DROP USER [{name}]")
        for grant in grants:
            cursor.execute(f"GRANT {grant} TO [{name}]")
            undo.callback(cursor.execute, f"REVOKE {grant} FROM [{name}]")
        undo.callback(entry.update, {key: entry[key] for key in ("USER", "PASSWORD")})
        entry.update(USER=name, PASSWORD="Plain-1-Password")
        connections[alias].close()
        undo.callback(connections[alias].close)
        undo.callback(lifecycle.stop_all)  # the login's other sessions
        yield


@needs_server
def test_a_plain_user_lacks_rights_that_are_named(server):
    with a_plain_user(server):
        ids, text = found(databases=[server], tags=[checks.Tags.database])
    # Without any right on the tables the server does not even say that they are there: it is asked for a row.
    assert set(ids) == {"sqlsem.E006", "sqlsem.W013", "sqlsem.I001", "sqlsem.I002"}
    assert "SELECT on sqlsem_semaphore" in text
    assert "sqlsem_plain_" in text


@needs_server
def test_a_user_who_may_only_read_takes_no_lock(server):
    reads = [f"SELECT ON {table}" for table in ("sqlsem_semaphore", "sqlsem_slot", "sqlsem_waiter")]
    with a_plain_user(server, *reads):
        ids, text = found(databases=[server], tags=[checks.Tags.database])
        assert "sqlsem.E006" in ids
        assert "UPDATE on sqlsem_slot" in text
        assert not re.search(r"SELECT on sqlsem_(semaphore|slot|waiter\b)", text)
        with pytest.raises(CommandError, match=r"sqlsem\.E006"):
            call_command("check", "--database", server)


@needs_server
def test_rights_that_only_some_features_need(server):
    others = [*sqlserver.HISTORY_RIGHTS, *sqlserver.DEADLOCK_RIGHTS, *sqlserver.KIND_RIGHTS]
    with a_plain_user(server, "EXECUTE ON SCHEMA::sqlsem", *(f"SELECT ON {table}" for table in others)):
        ids, text = found(databases=[server], tags=[checks.Tags.database])
        assert set(ids) - {"sqlsem.I001"} == {"sqlsem.W013", "sqlsem.I002"}
        for right in ("INSERT on sqlsem_event", "DELETE on sqlsem_minute", "UPDATE on sqlsem_wait"):
            assert right in text
        assert "DELETE on sqlsem_claim" in text
        with override_settings(SQLSEM={"DATABASE": server, "HISTORY": False, "DEADLOCKS": "ignore"}):
            assert "sqlsem.W013" not in found(databases=[server], tags=[checks.Tags.database])[0]


@needs_server
def test_the_grants_of_the_documentation_are_enough(server):
    page = (ROOT / "docs" / "backends" / "sqlserver.md").read_text(encoding="utf-8")
    grants = re.findall(r"^GRANT (.+) TO app_user;$", page, re.MULTILINE)
    tables = sqlserver.HISTORY_RIGHTS | sqlserver.DEADLOCK_RIGHTS | sqlserver.KIND_RIGHTS
    assert len(grants) == 1 + len(tables)
    with a_plain_user(server, *grants):
        ids, text = found(databases=[server], tags=[checks.Tags.database])
        assert set(ids) <= {"sqlsem.I001", "sqlsem.I002"}
        assert set(re.findall(r"(\w+) on (sqlsem_\w+)", text)) == {  # what only operators need
            ("UPDATE", "sqlsem_semaphore"),
            ("UPDATE", "sqlsem_slot"),
        }
        if not tds.is_stand_in(server):  # there, who executes a procedure needs rights on what it reads
            with semaphore("granted", slots=2, using=server) as permit:
                assert permit.token


@needs_server
@pytest.mark.parametrize("grants", [(), ("SELECT ON sqlsem_event", "INSERT ON sqlsem_claim")], ids=["none", "two"])
def test_tables_that_a_login_may_not_see_are_not_called_missing(server, grants, monkeypatch):
    with a_plain_user(server, "EXECUTE ON SCHEMA::sqlsem", *grants):
        for key, value in databases.child_environment().items():  # the doctor's child is the plain user too
            monkeypatch.setenv(key, value)
        assert "sqlsem.W026" not in found(databases=[server], tags=[checks.Tags.database])[0]
        takes = not tds.is_stand_in(server)  # there, who executes a procedure needs rights on what it reads
        seen = list(examine(server, acquire=takes))
    assert [each.msg for each in seen if each.level >= checks.ERROR] == []
    levels = {each.id: each.level for each in seen}
    for number in ("D002", "D016", "D017")[: 3 if takes else 1]:
        assert f"sqlsem.{number}" in levels


@needs_server
def test_a_database_without_tables_is_told_of_that_alone(server):
    name = f"sqlsem_bare_{os.getpid()}"
    with contextlib.closing(tds.raw_connection(server)) as raw:
        cursor = raw.cursor()

        def dropped():  # not before the server has seen the end of the last session
            with contextlib.suppress(Exception):
                cursor.execute(f"DROP DATABASE [{name}]")
                return True

        with tds.one_at_a_time():
            cursor.execute(f"CREATE DATABASE [{name}]")
        try:
            bare = connections[server].settings_dict | {"NAME": name}
            with known(ALIAS, bare), override_settings(SQLSEM={"DATABASE": ALIAS}):
                ids, text = found(databases=[ALIAS], tags=[checks.Tags.database])
        finally:
            wait_until(dropped)
    assert ids == ["sqlsem.W026"]
    assert "sqlsem_slot" in text
