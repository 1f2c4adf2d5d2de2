"""Small projects of users, each in a directory and with a test database of its own; their suites run for real."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from django.conf import settings
from django.db import connections

from tests.support.databases import ROOT

KINDS = ["memory", "file", *(["postgres"] if "postgres" in settings.DATABASES else [])]

MANAGE = """
    import os, sys
    os.environ["DJANGO_SETTINGS_MODULE"] = "project.settings"
    from django.core.management import execute_from_command_line
    execute_from_command_line(sys.argv)
"""

SETTINGS = """
    DATABASES = {databases!r}
    SQLSEM = {sqlsem!r}
    IN_MEMORY = {in_memory!r}
    INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_sqlsem", "shop"]
    ROOT_URLCONF = "shop.urls"
    SECRET_KEY = "x"
    USE_TZ = True
    STATIC_URL = "/static/"
    MIGRATION_MODULES = {{"auth": None, "contenttypes": None}}
    DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
    ALLOWED_HOSTS = ["*"]
    LOGGING = {{"version": 1, "loggers": {{"django_sqlsem": {{"level": "CRITICAL"}}}}}}
"""

PYTEST_INI = """
    [pytest]
    DJANGO_SETTINGS_MODULE = project.settings
    pythonpath = .
    python_files = pytest_*.py
"""

MODELS = """
    from django.db import models

    class Report(models.Model):
        title = models.CharField(max_length=20)
"""

URLS = """
    import asyncio
    from django.http import HttpResponse
    from django.urls import path
    from django_sqlsem import mutex, semaphore
    from shop.models import Report

    REPORTS = semaphore("reports", slots=2, timeout=5)

    @semaphore("reports", slots=2, timeout=0)
    def report(request):
        Report.objects.create(title="x")
        return HttpResponse(f"{Report.objects.count()}")

    @semaphore("reports", slots=2, timeout=0)
    async def areport(request):
        return HttpResponse(f"{await Report.objects.acount()}")

    @mutex("work:{number}", on_busy="skip")
    def work(number):
        return number

    urlpatterns = [path("report/", report), path("areport/", areport)]
"""

#: What both suites use.
TOOLS = """
    import asyncio, threading, time, urllib.error, urllib.request
    from django.conf import settings
    from django.db import connection, connections, transaction
    from django_sqlsem import AcquireTimeoutError, PermitLostError, mutex, queries, semaphore
    from django_sqlsem.backends import get_backend
    from django_sqlsem.models import SemaphoreRow, SlotRow
    from django_sqlsem.testing import busy, held, lost
    from shop.models import Report
    from shop.urls import REPORTS, work

    LEAKED = []

    def sessions():
        "How many others are connected to the test database."
        if connection.vendor != "postgresql":
            return 0
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                           " AND pid <> pg_backend_pid() AND backend_type = 'client backend'")
            return cursor.fetchone()[0]

    def threads():
        return [thread.name for thread in threading.enumerate() if "sqlsem" in thread.name]

    def fight(count=6):
        "Let threads fight for the slots; return the most that were in at once."
        inside, peaks, errors = [], [], []
        def body(number):
            try:
                with REPORTS as permit:
                    inside.append(number)
                    peaks.append(len(inside))
                    time.sleep(0.01)
                    permit.check()
                    inside.remove(number)
            except BaseException as error:
                errors.append(error)
            finally:
                connections.close_all()
        running = [threading.Thread(target=body, args=(number,)) for number in range(count)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert not errors, errors
        assert len(peaks) == count
        return max(peaks)

    def check_local():
        "Inside a TestCase."
        assert get_backend("default").process_local
        before = sessions()
        with REPORTS as permit:
            permit.check()
            assert REPORTS.status().held == 1
            assert SemaphoreRow.objects.count() == 0
            assert threads() == []
            assert sessions() == before == 0, (before, sessions())
        assert REPORTS.status().held == 0

    def check_real():
        "Inside a TransactionTestCase, or with a live server."
        assert get_backend("default").process_local is settings.IN_MEMORY
        with REPORTS as permit:
            live = SlotRow.objects.filter(expires_us__isnull=False)
            assert [row.slot for row in live] == ([] if settings.IN_MEMORY else [permit.slot])
            assert bool(threads()) is not settings.IN_MEMORY
        assert not live.all().exists()

    def check_helpers():
        with busy("reports"):
            assert REPORTS.try_acquire() is None
        with held(REPORTS) as permits:
            assert len(permits) == 2
            assert REPORTS.try_acquire() is None
        with REPORTS as permit, lost(permit):
            try:
                permit.check()
            except PermitLostError:
                pass
            else:
                raise AssertionError("it is not lost")
        assert REPORTS.status().held == 0

    def leak():
        "Leave a permit held, and alive."
        lock = mutex("leaked", timeout=0)
        assert lock.status().held == 0
        LEAKED.append(lock.acquire())
        assert lock.status().held == 1
        mutex("leaked and forgotten", timeout=5).acquire()

    async def tasks():
        peaks, inside = [], []
        async def body(number):
            async with REPORTS:
                inside.append(number)
                peaks.append(len(inside))
                await asyncio.sleep(0.005)
                inside.remove(number)
        await asyncio.gather(*(body(number) for number in range(6)))
        return max(peaks)

    def get(url):
        try:
            with urllib.request.urlopen(url, timeout=20) as response:
                return response.status
        except urllib.error.HTTPError as error:
            with error:
                assert error.headers["Retry-After"]
                return error.code
"""


class Project:
    """A small project in a directory of its own, with a test database of its own."""

    def __init__(self, directory: Path, kind: str, *, sqlsem: dict | None = None, extra: dict | None = None) -> None:
        self.directory = directory
        self.kind = kind
        self.name = f"test_users_{os.getpid()}_{secrets.token_hex(3)}"
        self.test_file = directory / f"{self.name}.sqlite3"
        if kind == "postgres":
            kept = ("ENGINE", "USER", "PASSWORD", "HOST", "PORT", "OPTIONS")
            default = {key: settings.DATABASES["postgres"][key] for key in kept}
            default |= {"NAME": "postgres", "TEST": {"NAME": self.name}}
        else:
            default = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(directory / "main.sqlite3")}
            default["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 20}
            if kind == "file":
                default["TEST"] = {"NAME": str(self.test_file)}
        values = {
            "databases": {"default": default} | (extra or {}),
            "sqlsem": sqlsem or {},
            "in_memory": kind == "memory",
        }
        for path, text in {
            "manage.py": MANAGE,
            "project/__init__.py": "",
            "project/settings.py": textwrap.dedent(SETTINGS).format(**values),
            "shop/__init__.py": "",
            "shop/models.py": MODELS,
            "shop/urls.py": URLS,
            "shop/tools.py": TOOLS,
            "pytest.ini": PYTEST_INI,
        }.items():
            self.write(path, text)

    def write(self, path: str, text: str) -> None:
        target = self.directory / path
        target.parent.mkdir(exist_ok=True)
        target.write_text(textwrap.dedent(text), encoding="utf-8")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("PYTEST_", "SQLSEM_", "DJANGO_", "COV_"))
        }
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.directory,
            env=environment
            | {
                "PYTHONPATH": str(ROOT),
                "PYTHONWARNINGS": "error::ResourceWarning",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def manage_test(self, *options: str) -> str:
        """Run ``manage.py test``, which must succeed; return what it said."""
        done = self.run("manage.py", "test", "--noinput", *options)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert re.search(r"^OK$", said, re.MULTILINE), said
        assert not re.search("Traceback|Exception|Error", said), said
        return said

    def run_pytest(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run ``pytest`` with pytest-django and what else the options name; other plugins take time to load."""
        return self.run("-m", "pytest", "-p", "no:cacheprovider", "-p", "pytest_django.plugin", *options)

    def pytest(self, *options: str) -> str:
        """Run ``pytest``, which must succeed; return what it said."""
        done = self.run_pytest("-W", "error", *options)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert not re.search("warning|Traceback|Exception", said), said
        return said

    def left(self) -> list[str]:
        """Return the test databases that are still there, seen from outside."""
        if self.kind == "postgres":
            with connections["postgres"]._nodb_cursor() as cursor:
                cursor.execute("SELECT datname FROM pg_database WHERE datname LIKE %s ORDER BY 1", [f"{self.name}%"])
                return [row[0] for row in cursor.fetchall()]
        return sorted(path.name for path in self.directory.glob(f"{self.name}*"))

    def kept(self) -> list[str]:
        """Return what ``left()`` must be after a run that kept the database."""
        return {"postgres": [self.name], "file": [self.test_file.name], "memory": []}[self.kind]

    def untouched(self) -> None:
        """Assert that the project's own database was left alone."""
        if self.kind != "postgres":
            assert not (self.directory / "main.sqlite3").exists()

    def clean(self) -> None:
        """Drop what a failed run has left."""
        if self.kind == "postgres":
            with connections["postgres"]._nodb_cursor() as cursor:
                for name in self.left():
                    cursor.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


@contextlib.contextmanager
def projects(directory: Path) -> Iterator[Callable[..., Project]]:
    """Yield a function that makes a project of a kind of database; what it leaves behind is dropped."""
    with contextlib.ExitStack() as stack:

        def make(kind: str, **options: dict) -> Project:
            project = Project(directory, kind, **options)
            stack.callback(project.clean)
            return project

        yield make
