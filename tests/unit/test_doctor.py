"""``manage.py locks doctor``: what it finds is provoked for real, wherever that can be had here."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.core.checks import ERROR, WARNING, CheckMessage
from django.core.management import call_command
from django.db import connections
from django.test import override_settings

from django_sqlsem.checks import doctor, messages, servers
from django_sqlsem.checks.doctor import examine
from django_sqlsem.management.verbs.setup import LEVEL_WORDS, as_dict
from django_sqlsem.models import SemaphoreRow
from tests.support import databases
from tests.support.operators import hold, locks, locks_command, make_semaphore, now_us
from tests.support.pgbouncer import pgbouncer
from tests.support.private_servers import ALIAS, galera_node, known, private_server

needs_postgres = pytest.mark.skipif("postgres" not in databases.covered(), reason="PostgreSQL is not covered")
FILE = {"ENGINE": "django.db.backends.sqlite3", "OPTIONS": {"transaction_mode": "IMMEDIATE"}}


@pytest.fixture(autouse=True)
def _children_find_the_databases(monkeypatch: Any) -> None:
    """The doctor's child loads the tests' settings, and gets the databases of the moment."""
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.settings")


def see(monkeypatch: Any, alias: str | None = None, **settings: Any) -> None:
    """Let children see the databases as they are known now."""
    environment = databases.child_environment()
    if alias:
        known_now = json.loads(environment["SQLSEM_TEST_DATABASES"])
        known_now[alias] = settings
        environment["SQLSEM_TEST_DATABASES"] = json.dumps(known_now)
    for key in ("SQLSEM_TEST_DATABASES", "SQLSEM_TEST_SETTINGS", "PYTHONPATH"):
        monkeypatch.setenv(key, environment[key])


def found(alias: str, **options: Any) -> list[CheckMessage]:
    return list(examine(alias, **{"acquire": False} | options))


def of(seen: list[CheckMessage], number: str) -> list[tuple[str, str]]:
    """Return the levels and texts of an id."""
    return [(LEVEL_WORDS[each.level], str(each.msg)) for each in seen if each.id == f"sqlsem.{number}"]


def levels(seen: list[CheckMessage], number: str) -> list[str]:
    return [level for level, _text in of(seen, number)]


def test_a_healthy_database(database: str, monkeypatch: Any) -> None:
    see(monkeypatch)
    monkeypatch.setattr(doctor, "LEASE", 60.0)
    monkeypatch.setattr(doctor, "EARLY", 45.0)  # on a busy machine too
    seen = found(database, acquire=True)
    bad = [each for each in seen if each.level >= WARNING]
    assert not bad
    assert {each.obj for each in seen} == {None, database}
    for number in ("D001", "D002", "D003", "D004", "D016", "D017"):
        assert of(seen, number), number
    (text,) = [text for _level, text in of(seen, "D017")]
    assert "came back after" in text
    assert not SemaphoreRow.objects.using(database).exists()


def test_nothing_is_written_without_the_trials(database: str) -> None:
    seen = found(database)
    assert not of(seen, "D016")
    assert not of(seen, "D017")


def test_the_command_prints_sentences(database: str, capsys: Any) -> None:
    locks("doctor", "--using", database, "--no-acquire")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Settings:"
    assert f"Database '{database}':" in lines
    assert any(line.startswith("ok       A round trip takes ") for line in lines)
    assert all(len(line) <= 100 for line in lines)
    # The test databases of PostgreSQL do not wait for the disk, which is worth a note.
    notes = [line for line in lines if line.startswith("note ")]
    assert all("synchronous_commit" in note for note in notes)
    assert lines[-1] == ("Found 1 note." if notes else "All is well.")
    assert bool(notes) == (connections[database].vendor == "postgresql")


def test_the_command_prints_json(database: str, capsys: Any) -> None:
    locks("doctor", "--database", database, "--no-acquire", "--format", "json")
    told = json.loads(capsys.readouterr().out)
    assert {tuple(each) for each in told} == {("id", "level", "database", "text", "advice", "docs")}
    assert {each["level"] for each in told} <= {"ok", "note"}
    assert (
        next(each for each in told if each["id"] == "sqlsem.D003")["docs"]
        == "https://django-sqlsem.readthedocs.io/page/checks.html#sqlsem-d003"
    )


def test_it_examines_every_alias_that_the_settings_name(committed: None, capsys: Any) -> None:
    named = {"DATABASE": "default", "DATABASES": {"other": {"TIMEOUT": 3}}}
    with known("other", dict(connections["default"].settings_dict)), override_settings(SQLSEM=named):
        locks("doctor", "--no-acquire")
    out = capsys.readouterr().out
    assert "Database 'default':" in out
    assert "Database 'other':" in out


def test_it_ends_with_1_if_something_is_wrong(committed: None, tmp_path: Path, capsys: Any) -> None:
    with known("locks", FILE | {"NAME": str(tmp_path / "empty.sqlite3")}), pytest.raises(SystemExit) as ended:
        locks("doctor", "--using", "locks")
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "error    Tables are missing: " in out
    unwrapped = out.replace("\n         ", " ")
    assert "migrate sqlsem --database locks" in unwrapped
    assert "See https://django-sqlsem.readthedocs.io/page/checks.html#sqlsem-d002\n" in unwrapped
    assert "A lock was taken" not in out
    assert out.splitlines()[-1].startswith("Found 1 error")


def test_as_a_program(committed: None) -> None:
    done = subprocess.run(**locks_command("doctor"), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The slot of a killed process came back" in done.stdout


def test_settings_that_are_wrong(committed: None) -> None:
    with override_settings(SQLSEM={"LEASE": "long"}):
        seen = list(examine(acquire=False))
    assert levels(seen, "E001") == ["error"]
    with override_settings(SQLSEM={"LEASE": 2}):
        seen = found("default")
        assert levels(seen, "W011") == ["warning"]
        with override_settings(SILENCED_SYSTEM_CHECKS=["sqlsem.W011"]):
            assert not levels(found("default"), "W011")


# Servers.


@pytest.mark.parametrize("engine", ["postgresql", "mysql"])
def test_a_server_that_does_not_answer(committed: None, engine: str) -> None:
    gone = {"ENGINE": f"django.db.backends.{engine}", "NAME": "x", "USER": "x", "HOST": "127.0.0.1", "PORT": "1"}
    with known("gone", gone):
        seen = found("gone", acquire=True)
    assert [(each.id, each.level) for each in seen if each.obj] == [("sqlsem.D001", ERROR)]


@needs_postgres
def test_pgbouncer(committed: None, monkeypatch: Any) -> None:
    with pgbouncer("postgres") as pooler, known("pooled", pooler.settings):
        see(monkeypatch, "pooled", **{key: pooler.settings[key] for key in databases._PASSED_ON})
        monkeypatch.setattr(doctor, "LEASE", 5.0)
        monkeypatch.setattr(doctor, "EARLY", 3.0)
        seen = found("pooled", acquire=True)
    assert levels(seen, "D005") == ["warning", "warning"]
    ((_level, text),) = of(seen, "D017")
    assert "with its lease only, as a pooler stands in between" in text
    assert levels(seen, "D017") == ["note"]


def test_galera(committed: None) -> None:
    with private_server("mariadb", **galera_node(), **{"max-connections": "10"}) as server:
        seen = found(ALIAS)
        assert levels(seen, "D006") == ["warning"]
        assert levels(seen, "D004") == ["ok"]
        assert levels(seen, "D002") == ["ok"]
        server.query("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
        server.query("ALTER TABLE sqlsem_waiter ENGINE=MyISAM")
        server.query("SET GLOBAL read_only = 1")
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(contextlib.closing(server._connect("")))
            seen = found(ALIAS)
    assert levels(seen, "D012") == ["note"]
    assert of(seen, "D002")[1] == (
        "error",
        "Tables are not of the engine InnoDB, and have no transactions: sqlsem_waiter (MYISAM).",
    )
    assert levels(seen, "D011") == ["warning"]
    assert levels(seen, "D007") == ["error"]


def test_a_postgresql_that_forgets_and_repeats(committed: None) -> None:
    options = {"synchronous_commit": "off", "default_transaction_isolation": "serializable", "max_connections": "10"}
    with private_server("postgres", **options) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(contextlib.closing(server._connect("sqlsem")))
            seen = found(ALIAS)
        assert levels(seen, "D012") == ["note"]
        ((level, text),) = of(seen, "D010")
        assert (level, "are serializable" in text) == ("note", True)
        assert levels(seen, "D011") == ["warning"]
        server.query("ALTER DATABASE sqlsem SET default_transaction_read_only = on")
        assert levels(found(ALIAS), "D007") == ["error"]


def clock_of(alias: str, **env: str) -> dict[str, Any]:
    """Return what a doctor with these variables says of the database's clock."""
    command = locks_command("doctor", "--using", alias, "--no-acquire", "--format", "json")
    command["env"] = command["env"] | env
    done = subprocess.run(**command, capture_output=True, text=True, timeout=120)
    (told,) = [each for each in json.loads(done.stdout) if each["id"] == "sqlsem.D004"]
    return dict(told)


@needs_postgres
def test_clocks_that_differ(committed: None, wrong_clock: Any) -> None:
    told = clock_of("postgres", **wrong_clock("+1d"))
    assert told["level"] == "note"
    assert "86" in told["text"]
    assert "behind this host's" in told["text"]
    assert clock_of("postgres", **wrong_clock("+0.8"))["level"] == "ok"


def test_clocks_of_a_cluster_that_differ(committed: None, wrong_clock: Any) -> None:
    with private_server("mariadb", **galera_node()) as server:
        told = clock_of(ALIAS, **server.env(), **wrong_clock("+0.8"))
        assert told["level"] == "error"
        assert "grants slots that others still hold" in told["text"]
        assert clock_of(ALIAS, **server.env(), **wrong_clock("+0.2"))["level"] == "ok"


@needs_postgres
def test_pools_and_persistent_connections(committed: None) -> None:
    settings = dict(connections["postgres"].settings_dict)
    with known("other", settings | {"OPTIONS": {"pool": True}, "CONN_MAX_AGE": 0}):
        seen = found("other")
        assert levels(seen, "D009") == ["note"]
        if importlib.util.find_spec("psycopg_pool") is None:
            assert "Error loading psycopg_pool" in of(seen, "D001")[-1][1]
        else:
            connections["other"].close()
            connections["other"].close_pool()
    with known("other", settings | {"CONN_MAX_AGE": None}):
        ((level, text),) = of(found("other"), "D009")
        assert (level, "persistent" in text) == ("ok", True)


def test_migrations_that_were_not_applied(committed: None) -> None:
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT app, name, applied FROM django_migrations WHERE app = 'sqlsem' ORDER BY id DESC LIMIT 1")
        row = cursor.fetchone()
        cursor.execute("DELETE FROM django_migrations WHERE app = 'sqlsem' AND name = %s", [row[1]])
    try:
        ((level, text),) = of(found("default", acquire=True), "D002")
    finally:
        with connections["default"].cursor() as cursor:
            cursor.execute("INSERT INTO django_migrations (app, name, applied) VALUES (%s, %s, %s)", row)
    assert (level, row[1] in text) == ("error", True)


# SQLite's file.


def copy_tables(name: Path) -> None:
    """Make a file with the tables in it, and the journal as SQLite has it by default."""
    with (
        contextlib.closing(databases.raw_connection("default")) as source,
        contextlib.closing(sqlite3.connect(name, isolation_level=None)) as target,
    ):
        source.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")


@contextlib.contextmanager
def a_file(tmp_path: Path, **settings: Any) -> Iterator[str]:
    """A file of its own with the tables in it, as the alias ``locks``."""
    name = tmp_path / "locks.sqlite3"
    copy_tables(name)
    with known("locks", FILE | {"NAME": str(name)} | settings):
        yield str(name)


def test_a_file_as_it_comes(committed: None, tmp_path: Path) -> None:
    options = {"transaction_mode": "IMMEDIATE", "timeout": 1}
    with a_file(tmp_path, OPTIONS=options):
        seen = found("locks")
        assert levels(seen, "D008") == ["note", "warning"]
        assert "'delete'" in of(seen, "D008")[0][1]
    options = {"transaction_mode": "IMMEDIATE", "init_command": "PRAGMA journal_mode = MEMORY"}
    with known("locks", FILE | {"NAME": str(tmp_path / "locks.sqlite3"), "OPTIONS": options}):
        assert levels(found("locks"), "D008") == ["warning"]


def test_a_file_in_memory(committed: None) -> None:
    with known("locks", FILE | {"NAME": ":memory:"}):
        assert levels(found("locks"), "D008") == ["error"]
        rows = {"DATABASES": {"locks": {"BACKEND": "django_sqlsem.backends.rows.RowsBackend"}}}
        with override_settings(SQLSEM=rows):
            assert levels(found("locks"), "D008") == ["error"]


def test_beacons_that_have_no_room(committed: None, tmp_path: Path) -> None:
    with a_file(tmp_path) as name:
        Path(f"{name}-sqlsem").write_text("in the way", encoding="utf-8")
        seen = found("locks")
    assert "warning" in levels(seen, "D008")
    assert any("-sqlsem' cannot be written to" in text for _level, text in of(seen, "D008"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_a_file_that_cannot_be_written(committed: None, tmp_path: Path) -> None:
    with a_file(tmp_path) as name:
        os.chmod(name, stat.S_IRUSR)
        assert levels(found("locks"), "D007") == ["error"]


def test_file_systems(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda1 / ext4 rw 0 0\nserver:/x /srv/shared\\040files nfs4 rw 0 0\n/dev/sdb1 /srv/shared xfs rw 0 0\n",
        encoding="utf-8",
    )
    for path, kind in (
        ("/var/db.sqlite3", "ext4"),
        ("/srv/shared files/db.sqlite3", "nfs4"),
        ("/srv/shared/db.sqlite3", "xfs"),
        ("/srv/sharedfiles/db", "ext4"),
    ):
        assert servers.file_system(path, str(mounts)) == kind
    assert servers.file_system("/x", str(tmp_path / "none")) == ""
    assert servers.file_system(str(tmp_path)) not in servers.NETWORK


# What the rows say.


@pytest.mark.leaves_held
def test_slots_names_and_holders(database: str) -> None:
    now = now_us(database)
    make_semaphore(database, "reports", other_slots=5, other_us=now)
    make_semaphore(database, "Reports")
    make_semaphore(database, "caf\u00e9")
    make_semaphore(database, "cafe ", paused=True)
    make_semaphore(database, "n" * 195)
    hold(database, "reports", left=-20)
    seen = found(database)
    assert of(seen, "D013")[0] == (
        "warning",
        "Programs disagree about the slots of 'reports' (3 and 5). The largest number is the bound.",
    )
    assert of(seen, "D013")[1] == ("note", "Operators have paused 'cafe ': nothing is granted.")
    alike, long = of(seen, "D014")
    assert "'reports'" in alike[1]
    assert "'Reports'" in alike[1]
    assert "caf\u00e9" in alike[1]
    assert "(195)" in long[1]
    assert levels(seen, "D014") == ["warning", "warning"]
    assert levels(seen, "D015") == ["note"]
    assert max(each.level for each in seen) == WARNING


def test_names_that_look_alike() -> None:
    assert servers.fold("Stra\u00dfe ") == servers.fold("STRASSE")
    assert servers.fold("a:1") != servers.fold("a:2")


# The trials.


def test_a_lock_that_cannot_be_taken(committed: None) -> None:
    with override_settings(SQLSEM={"DATABASE": "default"}), connections["default"].cursor() as cursor:
        cursor.execute("CREATE TRIGGER no_locks BEFORE UPDATE ON sqlsem_slot BEGIN SELECT RAISE(ABORT, 'no'); END")
        try:
            seen = found("default", acquire=True)
        finally:
            cursor.execute("DROP TRIGGER no_locks")
    assert levels(seen, "D016") == ["error"]
    assert levels(seen, "D017") == ["warning"]


def test_a_child_with_other_databases_is_noticed(committed: None, monkeypatch: Any, tmp_path: Path) -> None:
    elsewhere = FILE | {"NAME": str(tmp_path / "elsewhere.sqlite3")}
    copy_tables(tmp_path / "elsewhere.sqlite3")
    see(monkeypatch)
    monkeypatch.setenv("SQLSEM_TEST_DATABASES", json.dumps({"default": elsewhere}))
    seen = found("default", acquire=True)
    assert levels(seen, "D017") == ["error"]
    assert "nothing of it is seen here" in of(seen, "D017")[0][1]


def test_a_child_that_cannot_start(committed: None, monkeypatch: Any) -> None:
    see(monkeypatch)
    monkeypatch.setenv("SQLSEM_TEST_DATABASES", "nonsense")
    seen = found("default", acquire=True)
    assert levels(seen, "D017") == ["warning"]


def test_without_beacons_the_lease_is_waited_for(committed: None, monkeypatch: Any) -> None:
    with override_settings(SQLSEM={"DATABASE": "default", "BEACONS": False, "LEASE": 60}):
        see(monkeypatch)
        monkeypatch.setattr(doctor, "LEASE", 4.0)
        monkeypatch.setattr(doctor, "EARLY", 2.0)
        ((level, text),) = of(found("default", acquire=True), "D017")
    assert (level, "as BEACONS is off" in text, "up to 60 s" in text) == ("note", True, True)


def test_a_message_is_for_programs_too() -> None:
    message = messages.warning("D003", "slow", "move")
    message.obj = "x"
    assert as_dict(message) == {
        "id": "sqlsem.D003",
        "level": "warning",
        "database": "x",
        "text": "slow",
        "advice": "move",
        "docs": "https://django-sqlsem.readthedocs.io/page/checks.html#sqlsem-d003",
    }
    plain = as_dict(messages.ok("D016", "fine"))
    assert (plain["level"], plain["advice"], plain["docs"]) == (
        "ok",
        "",
        "https://django-sqlsem.readthedocs.io/page/checks.html#sqlsem-d016",
    )


# As system checks.


def test_a_check_of_the_deployment_says_the_same(committed: None, tmp_path: Path) -> None:
    options = {"transaction_mode": "IMMEDIATE", "init_command": "PRAGMA journal_mode = MEMORY"}
    with a_file(tmp_path, OPTIONS=options), override_settings(SQLSEM={"DATABASE": "locks"}):

        def ids(**kwargs: Any) -> list[str]:
            return [each.id for each in checks.run_checks(**kwargs) if each.id.startswith("sqlsem.D")]

        assert ids(databases=["locks"], include_deployment_checks=True) == ["sqlsem.D008"]
        assert ids(databases=["locks"]) == ids(include_deployment_checks=True) == []
        assert ids(databases=["default"], include_deployment_checks=True) == []
        with override_settings(SILENCED_SYSTEM_CHECKS=["sqlsem.D008"]):
            assert not of(found("locks"), "D008")


def test_missing_tables_are_no_matter_for_who_is_about_to_migrate(committed: None, tmp_path: Path) -> None:
    with (
        known("locks", FILE | {"NAME": str(tmp_path / "empty.sqlite3")}),
        override_settings(SQLSEM={"DATABASE": "locks"}),
    ):
        assert levels(found("locks"), "D002") == ["error"]
        call_command("check", databases=["locks"], deploy=True)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([], "No name is known yet."),
        (["a"], "The only name is short enough."),
        (["a", "b"], "The 2 names are well apart, and short enough."),
    ],
)
def test_few_names_are_told_in_words(names: list[str], told: str) -> None:
    assert [message.msg for message in servers._lookalikes(names)] == [told]
