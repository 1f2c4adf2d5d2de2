"""The set-ups of docs/databases.md, each pasted into a project of its own; and drivers and pools beside the usual."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from tests.e2e.test_docs import blocks
from tests.support.databases import ROOT, OutsideCounter, child_environment, covered, query, session_ids
from tests.support.pgbouncer import pgbouncer
from tests.support.private_servers import free_port
from tests.support.processes import Child
from tests.support.threads import wait_until

PAGE = ROOT / "docs" / "databases.md"
BASE = """
SECRET_KEY = "x"
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_sqlsem"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
ALLOWED_HOSTS = ["*"]
"""
BEGIN = """
import json, os, sys, threading
os.environ["DJANGO_SETTINGS_MODULE"] = "project_settings"
import django
django.setup()
from django.core import checks
from django.core.management import call_command
from django.db import connection, connections, transaction
from django_sqlsem import semaphore, queries
assert [str(each) for each in checks.run_checks() if "sqlsem" in str(each.id)] == []
"""


@pytest.fixture
def postgres(committed: None) -> str:
    if "postgres" not in covered():
        pytest.skip("no PostgreSQL")
    return "postgres"


def block(*, having: str) -> str:
    """Return the one example of settings that has this text."""
    (found,) = [each for each in blocks(PAGE, "python") if having in each and "DATABASES" in each]
    return found


def on_postgres(settings: str, alias: str, **addresses: int) -> str:
    """Return an example with the hosts of it replaced by the address of an alias, or by ports of this host."""
    current = connections[alias].settings_dict
    settings = settings.replace('"NAME": "shop"', f'"NAME": {current["NAME"]!r}')
    settings = settings.replace('"USER": "shop"', f'"USER": {current["USER"]!r}, "PASSWORD": {current["PASSWORD"]!r}')
    for host, port in {"primary": current["PORT"] or 5432, **addresses}.items():
        there = current["HOST"] or "127.0.0.1" if host == "primary" else "127.0.0.1"
        settings = re.sub(
            rf'"HOST": "{host}\.example\.com"(,\s*"PORT": "\d+")?', f'"HOST": {there!r}, "PORT": "{port}"', settings
        )
    assert "example.com" not in settings
    return settings


def run(directory: Path, settings: str, program: str) -> dict[str, Any]:
    """Run a program in a project with these settings. Return what it leaves in ``said``."""
    (directory / "project_settings.py").write_text(BASE + settings, encoding="utf-8")
    code = f"{BEGIN}\nsaid = {{}}\n{textwrap.dedent(program)}\nprint(json.dumps(said))\n"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "DJANGO_"))}
    environment |= {"PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_second_file_for_the_locks(tmp_path: Path) -> None:
    """What SQLite refuses inside atomic() is no matter there: waiting, keeping a grant through a rollback."""
    said = run(
        tmp_path,
        block(having='"locks.sqlite3"'),
        """
        call_command("migrate", verbosity=0)
        call_command("migrate", "sqlsem", database="locks", verbosity=0)
        said["tables"] = sorted(connections["locks"].introspection.table_names())
        from django.contrib.contenttypes.models import ContentType
        holder = semaphore("second file").acquire()
        holder.detach()
        try:
            with transaction.atomic():
                ContentType.objects.create(app_label="a", model="b")  # the one writer of the first file
                threading.Timer(0.3, holder.release).start()
                permit = semaphore("second file", timeout=60).acquire()
                said["waited"] = permit.waited > 0
                try:
                    permit.fence(using="default")
                except ValueError as error:
                    said["fence"] = str(error)
                raise KeyError
        except KeyError:
            permit.check()
            said["held"] = semaphore("second file").status().held
        with transaction.atomic(using="locks"):
            permit.fence()
        permit.release()
        from django_sqlsem.models import SlotRow
        said["in default"] = SlotRow.objects.using("default").count()
        """,
    )
    assert [name for name in said["tables"] if not name.startswith("sqlsem_")] == ["django_migrations"]
    assert (said["waited"], said["held"], said["in default"]) == (True, 1, 0)
    assert "'locks', another database than 'default'" in said["fence"]


def test_no_default_at_all(tmp_path: Path) -> None:
    settings = block(having='"locks.sqlite3"') + 'DATABASES["default"] = {}\n'
    said = run(
        tmp_path,
        settings,
        """
        call_command("migrate", "sqlsem", database="locks", verbosity=0)
        with semaphore("no default", slots=2) as permit:
            said["held"] = queries.semaphore("no default").held
        call_command("locks", "list", stdout=open(os.devnull, "w"))
        """,
    )
    assert said == {"held": 1}


#: One lock after the other under the alias of the locks, and a fence on the project's own.
USE = """
with semaphore("documented", slots=2, timeout=60) as permit:
    with transaction.atomic():
        permit.fence(using="default")
    said["held"] = queries.semaphore("documented").held
    with connection.cursor() as cursor:
        cursor.execute("SELECT beacon FROM sqlsem_slot WHERE expires_us IS NOT NULL")
        said["beacons"] = [row[0] for row in cursor.fetchall()]
        cursor.execute("SHOW statement_timeout")
        said["limit"] = cursor.fetchone()[0]
"""


def test_the_server_itself_beside_pgbouncer(postgres: str, tmp_path: Path) -> None:
    with pgbouncer(postgres) as pooler:
        settings = on_postgres(block(having="pgbouncer.example.com"), postgres, pgbouncer=pooler.port)
        settings += 'DATABASES["default"]["OPTIONS"] = {"prepare_threshold": None}\n'
        assert run(tmp_path, settings, USE) == {"held": 1, "beacons": [True], "limit": "0"}


def test_a_replica_that_is_down(postgres: str, tmp_path: Path) -> None:
    settings = on_postgres(block(having="replica.example.com"), postgres, replica=free_port())
    settings += 'DATABASE_ROUTERS = ["router.Reads"]\n'
    (tmp_path / "router.py").write_text(
        "class Reads:\n    def db_for_read(self, model, **hints):\n        return 'replica'\n", encoding="utf-8"
    )
    assert run(tmp_path, settings, USE) == {"held": 1, "beacons": [True], "limit": "0"}


def test_a_pool_of_one_is_not_drained(postgres: str, tmp_path: Path) -> None:
    """The pool's only connection is in a view's transaction, which waits for a lock that another thread gives back."""
    pytest.importorskip("psycopg_pool")
    settings = on_postgres(block(having='"pool"'), postgres).replace('"max_size": 4', '"max_size": 1')
    said = run(
        tmp_path,
        settings,
        """
        gone = threading.Event()
        def hold():
            with semaphore("pool"):
                gone.set()
                threading.Event().wait(0.5)
        holder = threading.Thread(target=hold)
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            holder.start()
            gone.wait(60)
            with semaphore("pool", timeout=60) as permit:
                permit.fence()
                said["waited"] = permit.waited > 0
        holder.join()
        said["pool"] = connection.pool.get_stats()["pool_max"]
        connection.close()
        connection.close_pool()
        """,
    )
    assert said == {"waited": True, "pool": 1}


#: A child in which a driver or an engine is another one; counts by its own connection of the project's.
FIGHT = """
from django.db import connections
from django_sqlsem import semaphore
from tests.support.threads import run_in_threads
alias = args[0]
def execute(sql):
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall() if cursor.description else None
say(connections[alias].Database.__name__)
connections[alias].close()
listen()
lock = semaphore("fight", slots=2, timeout=120, using=alias)
where = "WHERE name = 'probe'"
def work(index):
    for _ in range(3):
        with lock as permit:
            execute(f"UPDATE testapp_probe SET inside = inside + 1, entered = entered + 1,"
                    f" peak = GREATEST(peak, inside + 1) {where}")
            permit.check()
            execute(f"UPDATE testapp_probe SET inside = inside - 1 {where}")
        connections[alias].close()
run_in_threads(3, work, timeout=200)
semaphore("several", slots=3, take=2, using=alias).acquire().release()
say("limit " + execute("SHOW statement_timeout")[0][0])
connections[alias].close()
"""


#: What a keeper does to be woken, without its thread.
DEAF = """
from django_sqlsem.runtime import presence
from django_sqlsem.database.sessions import open_connection
import select
connection = open_connection(args[0])
ears = presence.Reach(args[0])
ears.opened(connection)
assert ears.listens and ears.presence.beacon
with connection.cursor() as cursor:
    cursor.execute("SELECT pg_backend_pid(), (SELECT * FROM pg_listening_channels())")
    pid, channel = cursor.fetchone()
say(f"listens {channel} {pid}")
listen()
select.select(ears.descriptors(connection), [], [], 30)
say(f"heard {ears.heard()} ended {ears.ended}")
listen()
while not ears.ended:  # the last words come first, and then the end
    assert select.select(ears.descriptors(connection), [], [], 30)[0]
    ears.heard()
say("ended")
ears.close()
connection.close()
"""


def fight(alias: str, *children: Child) -> None:
    with OutsideCounter(alias) as counter:
        for child in children:
            child.send()
        for child in children:
            assert child.expect("limit", timeout=250) == "0"
            child.finish()
            assert "Traceback" not in child.stderr
        assert (counter.entered, counter.current) == (9 * len(children), 0)
        assert 1 <= counter.peak <= 2


def with_settings(alias: str, **changed: Any) -> dict[str, str]:
    databases = json.loads(child_environment()["SQLSEM_TEST_DATABASES"])
    databases[alias] |= changed
    return {"SQLSEM_TEST_DATABASES": json.dumps(databases)}


def test_psycopg2_and_psycopg_3_share_a_semaphore(postgres: str, tmp_path: Path) -> None:
    pytest.importorskip("psycopg2")
    (tmp_path / "psycopg.py").write_text("raise ImportError('not here')\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), child_environment()["PYTHONPATH"]])
    with Child(FIGHT, postgres, env={"PYTHONPATH": path}) as old, Child(FIGHT, postgres) as new:
        assert old.expect(timeout=60) == "psycopg2"
        assert new.expect(timeout=60) == "psycopg"
        fight(postgres, old, new)


def test_a_psycopg2_waiter_is_woken_by_the_server(postgres: str, tmp_path: Path) -> None:
    """It hears what the server says while no statement is under way, and notices the end of its session."""
    pytest.importorskip("psycopg2")
    (tmp_path / "psycopg.py").write_text("raise ImportError('not here')\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), child_environment()["PYTHONPATH"]])
    with Child(DEAF, postgres, env={"PYTHONPATH": path}) as child:
        channel, pid = child.expect("listens").split()
        query(postgres, f"SELECT pg_notify('{channel}', 'abc')")
        child.send()
        assert child.expect("heard") == "['abc'] ended False"
        query(postgres, f"SELECT pg_terminate_backend({pid})")
        wait_until(lambda: int(pid) not in session_ids(postgres))
        child.send()
        child.expect("ended")
        child.finish()


#: An engine whose connections are proxies, as Datadog, New Relic, Elastic APM and AWS X-Ray make them.
TRACED = """
from django.db.backends.postgresql import base

class Proxy:
    def __init__(self, wrapped):
        object.__setattr__(self, "__wrapped__", wrapped)

    def __getattr__(self, name):
        return getattr(self.__wrapped__, name)

    def __setattr__(self, name, value):
        setattr(self.__wrapped__, name, value)

class DatabaseWrapper(base.DatabaseWrapper):
    def get_new_connection(self, conn_params):
        return Proxy(Proxy(super().get_new_connection(conn_params)))
"""


def test_a_tracers_proxies_are_seen_through(postgres: str, tmp_path: Path) -> None:
    (tmp_path / "traced").mkdir()
    (tmp_path / "traced" / "base.py").write_text(TRACED, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), child_environment()["PYTHONPATH"]])
    environment = with_settings(postgres, ENGINE="traced") | {"PYTHONPATH": path}
    with Child(FIGHT, postgres, env=environment, forked=False) as child:
        assert child.expect(timeout=60) == "psycopg"
        fight(postgres, child)


@pytest.mark.parametrize("engine", ["postgresql_psycopg3"])
def test_the_pool_of_an_engine_is_left_alone(postgres: str, engine: str) -> None:
    """With a pool of one per process, a lock's own connection would wait for itself for ever."""
    pytest.importorskip("django_db_geventpool")
    options = {**(connections[postgres].settings_dict.get("OPTIONS") or {}), "MAX_CONNS": 3}
    changed = {"ENGINE": f"django_db_geventpool.backends.{engine}", "OPTIONS": options}
    with Child(FIGHT, postgres, env=with_settings(postgres, **changed), forked=False) as child:
        assert child.expect(timeout=60) == "psycopg"
        fight(postgres, child)
