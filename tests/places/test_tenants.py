"""django-tenants: the set-up of the documentation, in a real project with two tenants and two processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from tests.backends.test_database_setups import BASE, PAGE, block, on_postgres
from tests.e2e.test_docs import blocks
from tests.support.databases import ROOT, covered, query
from tests.support.servers import RUN

pytest.importorskip("django_tenants")

NAME = f"test_sqlsem_tenants_{RUN}"
FILES = {
    "customers/models.py": """
        from django.db import models
        from django_tenants.models import DomainMixin, TenantMixin

        class Client(TenantMixin):
            name = models.CharField(max_length=20)

        class Domain(DomainMixin):
            pass
        """,
    "reports/models.py": """
        from django.db import models

        class Report(models.Model):
            status = models.CharField(max_length=20, default="Not Started")
        """,
    "urls.py": """
        import os, psycopg
        from documented import export, report
        from django.db import connection, transaction
        from django.http import HttpResponse
        from django.urls import path
        from django_sqlsem import semaphore
        from django_sqlsem.locks import current_permit
        from reports.models import Report

        def count(sql):
            with psycopg.connect(os.environ["PROBE"], autocommit=True) as probe:
                probe.execute(sql)

        @semaphore("export", slots=2, timeout=120)
        def counted(request):
            count("UPDATE probe SET inside = inside + 1, entered = entered + 1, peak = GREATEST(peak, inside + 1)")
            with transaction.atomic():
                Report.objects.create(status=connection.schema_name)
                current_permit("export").fence()
            count("UPDATE probe SET inside = inside - 1")
            return HttpResponse(f"{Report.objects.exclude(status=connection.schema_name).count()}")

        urlpatterns = [path("export/", export), path("report/", report), path("counted/", counted)]
        """,
}
MAKE = """
call_command("makemigrations", "customers", "reports", verbosity=0)
call_command("migrate_schemas", shared=True, verbosity=0)
from customers.models import Client, Domain
for name in ("alpha", "beta"):
    client = Client.objects.create(schema_name=name, name=name)
    Domain.objects.create(domain=f"{name}.test", tenant=client, is_primary=True)
said["tables"] = {}
with connection.cursor() as cursor:
    cursor.execute("SELECT table_schema, count(*) FROM information_schema.tables"
                   " WHERE table_name LIKE 'sqlsem%' GROUP BY 1")
    said["tables"] = dict(cursor.fetchall())
    cursor.execute("CREATE TABLE probe (inside int, peak int, entered int)")
    cursor.execute("INSERT INTO probe VALUES (0, 0, 0)")
"""
NAMES = """
from django.test import Client as Browser
def get(path, tenant):
    return Browser(HTTP_HOST=f"{tenant}.test").get(path).status_code
said["free"] = [get(path, name) for path in ("/export/", "/report/") for name in ("alpha", "beta")]
permit = semaphore("report:alpha").acquire()
permit.detach()  # it is not this thread's, which asks for it again
said["alpha's"] = [get("/report/", "alpha"), get("/report/", "beta")]
permit.release()
permit = semaphore("export", slots=2, take=2, timeout=60).acquire()
permit.detach()
said["everybody's"] = [get("/export/", "alpha"), get("/export/", "beta")]
permit.release()
from django_tenants.utils import schema_context
from django.core.exceptions import ImproperlyConfigured
from django_sqlsem.claims import claim
from reports.models import Report
from django.conf import settings
from django.test import override_settings
connection.set_schema_to_public()  # as for manage.py check
found = lambda: sorted(each.id for each in checks.run_checks() if "sqlsem" in str(each.id))
with override_settings(TENANT_APPS=[*settings.TENANT_APPS, "django_sqlsem"]):
    said["in both"] = found()
    with override_settings(SHARED_APPS=[app for app in settings.SHARED_APPS if app != "django_sqlsem"]):
        said["in the tenants' alone"] = found()
with schema_context("alpha"):
    said["names"] = sorted(each.name for each in queries.semaphores())
    try:
        claim(Report.objects.all())
    except ImproperlyConfigured as error:
        said["claim"] = str(error)
"""
FIGHT = """
from django.test import Client as Browser
def visit(tenant):
    for _ in range(4):
        response = Browser(HTTP_HOST=f"{tenant}.test").get("/counted/")
        assert (response.status_code, response.content) == (200, b"0"), response.content
        done.append(tenant)
    connection.close()
done = []
threads = [threading.Thread(target=visit, args=[name]) for name in ("alpha", "beta", "alpha", "beta")]
for each in threads: each.start()
for each in threads: each.join()
said["done"] = len(done)
"""


@pytest.fixture
def project(committed: None, tmp_path: Path) -> Iterator[Path]:
    """A project with the documented settings, on a database of its own."""
    if "postgres" not in covered():
        pytest.skip("no PostgreSQL")
    settings = on_postgres(block(having="TenantSyncRouter"), "postgres")
    settings = settings.replace(connections["postgres"].settings_dict["NAME"], NAME)
    files = {name: textwrap.dedent(text) for name, text in FILES.items()}
    files["project_settings.py"] = BASE + settings + 'ROOT_URLCONF = "urls"\nSQLSEM = {"VIEW_TIMEOUT": 0}\n'
    (files["documented.py"],) = [each for each in blocks(PAGE, "python") if "def report(" in each]
    for name, text in files.items():
        path = tmp_path / name
        for directory in (path.parent, path.parent / "migrations") if path.parent != tmp_path else ():
            directory.mkdir(exist_ok=True)
            (directory / "__init__.py").touch()
        path.write_text(text, encoding="utf-8")
    query("postgres", f'CREATE DATABASE "{NAME}"')
    try:
        yield tmp_path
    finally:
        query("postgres", f'DROP DATABASE "{NAME}" WITH (FORCE)')


def start(project: Path, program: str) -> subprocess.Popen[str]:
    begin = """
import json, os, sys, threading
os.environ["DJANGO_SETTINGS_MODULE"] = "project_settings"
import django
django.setup()
from django.core import checks
from django.core.management import call_command
from django.db import connection
from django_sqlsem import queries, semaphore
said = {"checks": [each.id for each in checks.run_checks() if "sqlsem" in str(each.id)]}
"""
    raw = connections["postgres"].get_connection_params()
    probe = " ".join(f"{key}={raw[key]}" for key in ("host", "port", "user", "password") if raw.get(key))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "DJANGO_"))}
    environment |= {"PYTHONPATH": os.pathsep.join([str(project), str(ROOT)]), "PROBE": f"{probe} dbname={NAME}"}
    return subprocess.Popen(
        [sys.executable, "-c", f"{begin}{program}\nprint(json.dumps(said))"],
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> dict[str, Any]:
    with process:
        try:
            out, error = process.communicate(timeout=200)
        finally:
            process.kill()
    assert process.returncode == 0, error
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def outside(sql: str) -> list[tuple[Any, ...]]:
    """Ask the tenants' database on a plain connection."""
    import psycopg

    parameters = connections["postgres"].get_connection_params() | {"dbname": NAME}
    parameters.pop("cursor_factory", None)
    with contextlib.closing(psycopg.connect(**parameters, autocommit=True)) as connection:
        return connection.execute(sql).fetchall()


def test_two_tenants_share_what_is_shared(project: Path) -> None:
    made = end(start(project, MAKE))
    assert made == {"checks": [], "tables": {"public": 11}}
    said = end(start(project, NAMES))
    assert said["free"] == [200] * 4
    assert said["alpha's"] == [503, 200]
    assert said["everybody's"] == [503, 503]
    assert said["in both"] == ["sqlsem.W020"]
    assert said["in the tenants' alone"] == ["sqlsem.E007", "sqlsem.W020"]
    assert {"export", "report:alpha", "report:beta"} <= set(said["names"])
    assert "which each tenant has in a schema of its own" in said["claim"]
    assert [each["done"] for each in [end(each) for each in [start(project, FIGHT) for _ in range(2)]]] == [16, 16]
    ((inside, peak, entered),) = outside("SELECT inside, peak, entered FROM probe")
    assert (inside, entered) == (0, 32)
    assert 1 <= peak <= 2
    assert outside("SELECT count(*) FROM sqlsem_slot WHERE expires_us IS NOT NULL") == [(0,)]
    assert outside("SELECT count(*) FROM alpha.reports_report WHERE status <> 'alpha'") == [(0,)]
