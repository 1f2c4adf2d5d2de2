"""The test suites of projects that use semaphores: run for real, by Django's runner and by pytest-django."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from django.conf import settings
from django.db import connections

from tests.databases import ROOT

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

TESTS = """
    from django.test import LiveServerTestCase, SimpleTestCase, TestCase, TransactionTestCase
    from shop.tools import *

    class InTestCase(TestCase):
        @classmethod
        def setUpTestData(cls):
            Report.objects.create(title="for all")

        @classmethod
        def setUpClass(cls):
            super().setUpClass()
            cls.permit = mutex("for the class").acquire()
            cls.addClassCleanup(cls.permit.release)

        def test_local(self):
            check_local()

        def test_for_the_class(self):
            self.permit.check()
            self.assertEqual(mutex("for the class").status().held, 1)

        def test_helpers(self):
            check_helpers()

        def test_view(self):
            self.assertEqual(self.client.get("/report/").content, b"2")
            with held(REPORTS):
                self.assertEqual(self.client.get("/report/").status_code, 503)
            self.assertEqual(work(7), 7)
            with busy("work:7"):
                self.assertIsNone(work(7))

        async def test_async(self):
            self.assertEqual((await self.async_client.get("/areport/")).content, b"1")
            self.assertEqual(await tasks(), 2)
            with held(REPORTS):
                self.assertEqual((await self.async_client.get("/areport/")).status_code, 503)

        def test_threads(self):
            self.assertEqual(fight(), 2)
            self.assertEqual(threads(), [])

        def test_rollback(self):
            with REPORTS as permit:
                with self.assertRaises(ZeroDivisionError), transaction.atomic():
                    1 / 0
                permit.check()

        def test_leak(self):
            leak()

        def test_leak_again(self):
            leak()

    class InTransactionTestCase(TransactionTestCase):
        def test_real(self):
            check_real()

        def test_helpers(self):
            check_helpers()

        def test_view(self):
            self.assertEqual(self.client.get("/report/").content, b"1")
            with held(REPORTS):
                self.assertEqual(self.client.get("/report/").status_code, 503)

        async def test_async(self):
            self.assertEqual((await self.async_client.get("/areport/")).content, b"0")
            self.assertLessEqual(await tasks(), 2)

        def test_threads(self):
            self.assertLessEqual(fight(), 2)

        def test_leak(self):
            leak()

        def test_leak_again(self):
            leak()

    class InLiveServerTestCase(LiveServerTestCase):
        def test_real(self):
            check_real()
            self.assertEqual(get(self.live_server_url + "/report/"), 200)
            self.assertEqual(get(self.live_server_url + "/areport/"), 200)
            with held(REPORTS):
                self.assertEqual(get(self.live_server_url + "/report/"), 503)
                self.assertEqual(get(self.live_server_url + "/areport/"), 503)
            self.assertEqual(REPORTS.status().held, 0)

    class InSimpleTestCase(SimpleTestCase):
        def test_what_needs_no_database(self):
            self.assertEqual(work.__wrapped__(7), 7)

        def test_the_database_is_forbidden(self):
            if settings.IN_MEMORY:
                self.assertEqual(work(7), 7)
                return
            for call in (work, lambda _: REPORTS.acquire(), lambda _: REPORTS.status()):
                with self.assertRaisesMessage(AssertionError, "to 'default' are not allowed in SimpleTestCase"):
                    call(7)
"""

PYTESTS = """
    import pytest
    from shop.tools import *

    def test_local(db):
        check_local()

    def test_helpers(db):
        check_helpers()

    @pytest.mark.django_db
    def test_view(client):
        assert client.get("/report/").content == b"1"
        with held(REPORTS):
            assert client.get("/report/").status_code == 503

    @pytest.mark.django_db
    def test_async(async_client):
        async def main():
            assert await tasks() == 2
            with held(REPORTS):
                assert (await async_client.get("/areport/")).status_code == 503
        asyncio.run(main())

    def test_threads(db):
        assert fight() == 2
        assert threads() == []

    @pytest.mark.parametrize("nth", [1, 2])
    def test_leak(db, nth):
        leak()

    def test_real(transactional_db):
        check_real()

    @pytest.mark.django_db(transaction=True)
    def test_real_helpers():
        check_helpers()

    def test_real_threads(transactional_db):
        assert fight() <= 2

    @pytest.mark.parametrize("nth", [1, 2])
    def test_real_leak(transactional_db, nth):
        leak()

    def test_live_server(live_server):
        check_real()
        assert get(live_server.url + "/report/") == 200
        with held(REPORTS):
            assert get(live_server.url + "/report/") == 503

    def test_without_the_database():
        assert work.__wrapped__(7) == 7
        if settings.IN_MEMORY:
            assert work(7) == 7
        else:
            with pytest.raises(RuntimeError, match="Database access not allowed"):
                work(7)
"""

FAILING = """
    import pytest
    from shop.tools import *

    @pytest.mark.parametrize("nth", [1, 2])
    def test_fails(db, nth):
        permit = REPORTS.acquire()
        assert nth == 2, f"{permit} is kept alive by this traceback"
        assert REPORTS.status().held == 1

    @pytest.mark.parametrize("nth", [1, 2])
    def test_fails_for_real(transactional_db, nth):
        permit = REPORTS.acquire()
        assert nth == 2, f"{permit} is kept alive by this traceback"
        assert REPORTS.status().held == 1
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
            env=environment | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::ResourceWarning"},
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

    def pytest(self, *options: str) -> str:
        """Run ``pytest``, which must succeed; return what it said."""
        done = self.run("-m", "pytest", "-p", "no:cacheprovider", "-W", "error", *options)
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


@pytest.fixture
def make_project(tmp_path, django_db_setup, django_db_blocker):
    """A function that makes a project of a kind of database; what it leaves behind is dropped."""
    with django_db_blocker.unblock(), contextlib.ExitStack() as stack:

        def make(kind: str, **options: dict) -> Project:
            project = Project(tmp_path, kind, **options)
            stack.callback(project.clean)
            return project

        yield make


@pytest.mark.parametrize("kind", KINDS)
def test_djangos_runner(make_project, kind):
    project = make_project(kind)
    project.write("shop/tests.py", TESTS)
    for options in ([], ["--reverse"]):
        assert "Ran 19 tests" in project.manage_test(*options)
        assert project.left() == []
    project.untouched()


@pytest.mark.parametrize("kind", KINDS)
def test_djangos_runner_in_parallel(make_project, kind):
    project = make_project(kind)
    project.write("shop/tests.py", TESTS)
    assert "Ran 19 tests" in project.manage_test("--parallel", "2")
    assert project.left() == []
    project.untouched()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "memory"])
def test_djangos_runner_keeps_the_database(make_project, kind):
    project = make_project(kind)
    project.write("shop/tests.py", TESTS)
    for _ in range(2):
        project.manage_test("--keepdb")
        assert project.left() == project.kept()
    project.manage_test()
    assert project.left() == []


@pytest.mark.parametrize("kind", KINDS)
def test_pytest_django(make_project, kind):
    project = make_project(kind)
    project.write("shop/pytest_shop.py", PYTESTS)
    assert "14 passed" in project.pytest()
    assert project.left() == []
    project.untouched()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "memory"])
def test_pytest_django_reuses_the_database(make_project, kind):
    project = make_project(kind)
    project.write("shop/pytest_shop.py", PYTESTS)
    for _ in range(2):
        assert "14 passed" in project.pytest("--reuse-db")
        assert project.left() == project.kept()
    assert "14 passed" in project.pytest("--create-db")
    assert project.left() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_test_that_fails_with_a_permit_fails_alone(make_project, kind):
    project = make_project(kind)
    project.write("shop/pytest_shop.py", FAILING)
    done = project.run("-m", "pytest", "-p", "no:cacheprovider", "-q")
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert project.left() == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "memory"])
def test_nothing_is_locked_in_the_projects_own_database(make_project, kind):
    """Without a test that needs a database, Django makes no test database: the settings name the project's own."""
    project = make_project(kind)
    project.write(
        "shop/tests.py",
        """
        from django.test import SimpleTestCase
        from shop.tools import *

        class Alone(SimpleTestCase):
            def test_the_database_is_forbidden(self):
                for call in (work, lambda _: REPORTS.try_acquire(), lambda _: REPORTS.status()):
                    with self.assertRaisesMessage(AssertionError, "to 'default' are not allowed in SimpleTestCase"):
                        call(7)
        """,
    )
    assert "Ran 1 test" in project.manage_test()
    project.untouched()


def test_locks_in_a_database_of_their_own(make_project, tmp_path):
    """A ``TestCase`` need not name the lock database; one that commits must, as for any other use of it."""
    locks = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "locks.sqlite3")}
    locks["TEST"] = {"NAME": str(tmp_path / "test_locks.sqlite3")}
    project = make_project("file", sqlsem={"DATABASE": "locks"}, extra={"locks": locks})
    project.write(
        "shop/tests.py",
        """
        from django.test import TestCase, TransactionTestCase
        from shop.tools import *

        class WithoutIt(TestCase):
            def test_local(self):
                assert get_backend("locks").process_local
                with REPORTS:
                    self.assertEqual(REPORTS.status().held, 1)
                    self.assertEqual(threads(), [])

            def test_leak(self):
                leak()

            def test_leak_again(self):
                leak()

        class WithIt(TestCase):
            databases = {"default", "locks"}

            def test_local(self):
                assert get_backend("locks").process_local
                with REPORTS:
                    self.assertEqual(SlotRow.objects.using("locks").count(), 0)

            def test_leak(self):
                leak()

            def test_leak_again(self):
                leak()

        class Committing(TransactionTestCase):
            databases = {"default", "locks"}

            def test_real(self):
                assert not get_backend("locks").process_local
                with REPORTS:
                    self.assertEqual(SlotRow.objects.using("locks").count(), 2)

            def test_leak(self):
                leak()

            def test_leak_again(self):
                leak()

        class CommittingWithoutIt(TransactionTestCase):
            def test_forbidden(self):
                with self.assertRaisesMessage(AssertionError, "Add 'locks' to"):
                    REPORTS.acquire()
        """,
    )
    assert "Ran 10 tests" in project.manage_test()
    assert project.left() == []
    assert list(tmp_path.glob("*locks*")) == []
