"""``django_sqlsem.testing`` and the pytest plugin in the suites of users' projects, by all that runs such suites."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.support.databases import ROOT
from tests.support.projects import KINDS

PLUGIN = ["-p", "django_sqlsem.pytest_plugin"]

FIXTURES = """
    import time
    from unittest import mock
    import pytest
    from django.test import override_settings
    from hypothesis import HealthCheck, given, settings as examples, strategies
    from shop.tools import *
    from django_sqlsem.backends import get_backend
    from django_sqlsem.testing import recorded

    LONG = semaphore("reports", slots=2, timeout=900)
    BOTH = pytest.mark.parametrize("kind", [
        pytest.param(None, marks=pytest.mark.django_db, id="local"),
        pytest.param(None, marks=pytest.mark.django_db(transaction=True), id="real"),
    ])

    @BOTH
    def test_busy(sqlsem_busy, kind, client):
        assert client.get("/report/").status_code == 200
        sqlsem_busy("reports")
        assert client.get("/report/").status_code == 503

    @BOTH
    def test_held(sqlsem_held, kind, client):
        permits = sqlsem_held(REPORTS)
        assert client.get("/report/").status_code == 503
        permits[0].release()
        assert client.get("/report/").status_code == 200

    def test_held_before_db(sqlsem_held, transactional_db):
        assert len(sqlsem_held(REPORTS)) == 2

    @BOTH
    def test_lost(sqlsem_lost, sqlsem_stop_requested, kind):
        with REPORTS as permit:
            sqlsem_lost("reports")
            sqlsem_stop_requested(REPORTS, by="ann")
            assert permit.lost and permit.stop_requested_by == "ann"

    @BOTH
    def test_clock(sqlsem_clock, sqlsem_held, kind):
        with REPORTS as permit:
            sqlsem_clock.advance(61)
            assert permit.lost
        sqlsem_held(REPORTS)
        started = time.monotonic()
        with pytest.raises(AcquireTimeoutError, match="within 900 s"):
            LONG.acquire()
        assert time.monotonic() - started < 300

    @BOTH
    def test_clock_of_asynchronous_views(sqlsem_clock, sqlsem_held, kind, client, settings):
        from shop.slow import aslow
        sqlsem_held(REPORTS)
        settings.ROOT_URLCONF = "shop.slow"
        started = time.monotonic()
        assert client.get("/slow/").status_code == 503
        assert client.get("/aslow/").status_code == 503
        assert time.monotonic() - started < 300

    @BOTH
    def test_recorded(sqlsem_recorded, kind, client):
        client.get("/report/")
        assert sqlsem_recorded.names == ["reports"]
        assert sqlsem_recorded[0].released

    @BOTH
    def test_settings(kind, settings, sqlsem_held, sqlsem_clock):
        sqlsem_held(REPORTS)
        plain = semaphore("reports")
        for seconds in (700, 800):
            settings.SQLSEM = {"TIMEOUT": seconds}
            with pytest.raises(AcquireTimeoutError, match=f"within {seconds} s"):
                plain.acquire()
        with override_settings(SQLSEM={"LEASE": 500}), semaphore("others") as permit:
            sqlsem_clock.advance(400)
            permit.check()

    @BOTH
    @examples(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(number=strategies.integers(1, 50))
    def test_examples(kind, number):
        with recorded() as acquired:
            assert work(number) == number
        assert acquired.names == [f"work:{number}"]

    @pytest.mark.django_db
    def test_on_commit(django_capture_on_commit_callbacks):
        kept, told = semaphore("kept", release="on_commit"), []
        with django_capture_on_commit_callbacks(execute=True):
            with transaction.atomic():
                with kept:
                    transaction.on_commit(lambda: told.append(kept.status().held))
                assert kept.status().held == 1
        assert kept.status().held == 0 and len(told) == 1

    LEFT = []

    @pytest.mark.parametrize("nth", [1, 2])
    def test_a_flush_under_a_permit(transactional_db, nth):
        assert REPORTS.status().held == 0
        LEFT.append(REPORTS.acquire())
        assert all(permit.lost for permit in LEFT[:-1])
        LEFT[-1].check()
"""

SLOW = """
    from django.http import HttpResponse
    from django.urls import path
    from django_sqlsem import semaphore

    @semaphore("reports", slots=2, timeout=900)
    def slow(request):
        return HttpResponse("x")

    @semaphore("reports", slots=2, timeout=900)
    async def aslow(request):
        return HttpResponse("x")

    urlpatterns = [path("slow/", slow), path("aslow/", aslow)]
"""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "memory"])
def test_the_fixtures(make_project, kind):
    project = make_project(kind)
    project.write("shop/pytest_shop.py", FIXTURES)
    project.write("shop/slow.py", SLOW)
    assert "20 passed" in project.pytest(*PLUGIN, *(["-p", "xdist.plugin", "-n", "2"] if kind == "file" else []))
    assert project.left() == []


LEAKS = """
    import pytest
    from shop.tools import *

    LEFT = []

    @pytest.mark.parametrize("nth", [1, 2])
    def test_leak(db, nth):
        LEFT.append(REPORTS.acquire())

    def test_real_leak(transactional_db):
        LEFT.append(REPORTS.acquire())

    @pytest.mark.django_db
    def test_forgotten():
        REPORTS.acquire()

    @pytest.fixture
    def permit(transactional_db):
        with REPORTS as permit:
            yield permit

    def test_of_a_fixture(permit):
        permit.check()

    def test_that_fails(db):
        permit = REPORTS.acquire()
        assert not permit, "as it should"

    def test_without_a_database():
        pass
"""


def test_the_option(make_project):
    project = make_project("file")
    project.write("shop/pytest_shop.py", LEAKS)
    done = project.run_pytest(*PLUGIN, "-o", "sqlsem_assert_nothing_held=true")
    assert "1 failed, 6 passed, 4 errors" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("Semaphores are not free as they should be:") >= 4
    assert "pytest_shop.py:9 in test_leak: LEFT.append(REPORTS.acquire())" in done.stdout
    assert "forgotten: 'reports', which was held for" in done.stdout
    assert project.left() == []


def run(folder, *arguments, path=(), autoload=False):
    """Run Python in a folder that knows nothing of Django."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "DJANGO_", "SQLSEM_"))}
    if not autoload:
        kept["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    paths = os.pathsep.join([*map(str, path), str(ROOT)])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=kept | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_django(tmp_path):
    """The plugin is there in every run of pytest in the environment: also in those that have nothing to do with it."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nsqlsem_assert_nothing_held = true\n", encoding="utf-8")
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n\n"
        "def test_nothing():\n"
        "    assert not [name for name in sys.modules if name == 'django' or name.startswith('django.')]\n"
        "    assert 'django_sqlsem.pytest_plugin' in sys.modules\n",
        encoding="utf-8",
    )
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLUGIN)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_entry_point_and_the_option_are_one_plugin(tmp_path):
    """As installed: pytest finds the entry point of the distribution, and is told of the module by ``-p`` as well."""
    info = tmp_path / "installed" / "someone-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someone\nVersion: 1.0\n", encoding="utf-8")
    (info / "RECORD").write_text("", encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = project.partition("[project.entry-points.pytest11]\n")[2].splitlines()[:1]
    (info / "entry_points.txt").write_text(f"[pytest11]\n{line.replace(chr(34), '')}\n", encoding="utf-8")
    (tmp_path / "test_it.py").write_text(
        "def test_it(pytestconfig):\n    assert pytestconfig.pluginmanager.get_plugin('django_sqlsem.pytest_plugin')\n",
        encoding="utf-8",
    )
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLUGIN, path=[info.parent], autoload=True)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


WITHOUT_PYTEST_DJANGO = """
    import django, pytest
    from django.conf import settings
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        INSTALLED_APPS=["django_sqlsem"],
    )
    django.setup()
    from django_sqlsem import semaphore

    REPORTS = semaphore("reports", slots=2, timeout=900)

    def test_it(sqlsem_held, sqlsem_clock):
        sqlsem_held(REPORTS)
        with pytest.raises(TimeoutError):
            REPORTS.acquire()

    def test_next(sqlsem_nothing_held):
        assert REPORTS.status().held == 0
"""


def test_without_pytest_django(tmp_path):
    (tmp_path / "test_it.py").write_text(textwrap.dedent(WITHOUT_PYTEST_DJANGO), encoding="utf-8")
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLUGIN)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


UNITTESTS = """
    import time, unittest
    from celery import Celery
    from django.test import LiveServerTestCase, TestCase, TransactionTestCase, override_settings
    from shop.tools import *
    from django_sqlsem.testing import clock, make_busy, nothing_held, recorded

    SLOW = semaphore("reports", slots=2, timeout=900)
    LEFT = []
    app = Celery("shop")
    app.conf.task_always_eager = True
    app.conf.task_eager_propagates = True

    @app.task
    @semaphore("reports", slots=2, timeout=900)
    def digest():
        return "sent"

    class Common:
        def setUp(self):
            self.enterContext(nothing_held())
            self.started = time.monotonic()

        def tearDown(self):
            self.assertLess(time.monotonic() - self.started, 300)

        def test_wait(self):
            with clock(), held(REPORTS), self.assertRaises(AcquireTimeoutError):
                SLOW.acquire()

        def test_lease(self):
            with clock() as now, REPORTS as permit:
                now.advance(61)
                self.assertTrue(permit.lost)

        def test_recorded(self):
            with recorded("reports") as acquired:
                self.client.get("/report/")
            self.assertEqual(acquired.names, ["reports"])

        @override_settings(ROOT_URLCONF="shop.slow")
        def test_views(self):
            with clock(), held(REPORTS):
                self.assertEqual(self.client.get("/slow/").status_code, 503)
                self.assertEqual(self.client.get("/aslow/").status_code, 503)

        @override_settings(ROOT_URLCONF="shop.slow")
        async def test_async_views(self):
            with clock(), held(REPORTS):
                self.assertEqual((await self.async_client.get("/slow/")).status_code, 503)
                self.assertEqual((await self.async_client.get("/aslow/")).status_code, 503)
                with self.assertRaises(AcquireTimeoutError):
                    await SLOW.aacquire()

        async def test_async(self):
            with recorded() as acquired:
                async with REPORTS:
                    with clock() as now:
                        now.advance(10)
            self.assertTrue(acquired[0].released)

    class InTestCase(Common, TestCase):
        @classmethod
        def setUpTestData(cls):
            with REPORTS:
                Report.objects.create(title="x")

        def test_eager_tasks(self):
            with recorded() as acquired:
                self.assertEqual(digest.delay().get(), "sent")
            self.assertEqual(acquired.names, ["reports"])
            with clock(), held(REPORTS), self.assertRaises(AcquireTimeoutError):
                digest.delay()

        def test_on_commit(self):
            kept = semaphore("kept", release="on_commit")
            with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
                with kept:
                    transaction.on_commit(lambda: None)
                self.assertEqual(kept.status().held, 1)
            self.assertEqual(kept.status().held, 0)

    class InTransactionTestCase(Common, TransactionTestCase):
        serialized_rollback = True

    class LeavingThings(TransactionTestCase):
        serialized_rollback = True  # no signal tells of the flush at its end

        def leave(self):
            self.assertEqual(REPORTS.status().held, 0)
            self.assertTrue(all(permit.lost for permit in LEFT))
            LEFT.append(REPORTS.acquire())
            LEFT[-1].check()

        test_once = test_twice = leave

        @classmethod
        def tearDownClass(cls):
            LEFT.clear()
            super().tearDownClass()

    class InLiveServerTestCase(LiveServerTestCase):
        serialized_rollback = True

        def test_its_waits_jump(self):
            with clock(autojump=True), held(REPORTS), override_settings(ROOT_URLCONF="shop.slow"):
                self.assertEqual(get(self.live_server_url + "/slow/"), 503)
                self.assertEqual(get(self.live_server_url + "/aslow/"), 503)

        def test_its_acquisitions_are_recorded(self):
            with recorded() as acquired:
                self.assertEqual(get(self.live_server_url + "/report/"), 200)
            self.assertEqual(acquired.names, ["reports"])

    class Plain(unittest.TestCase):
        def test_a_callable(self):
            self.assertEqual(make_busy("x", retry_after=3).retry_after, 3)
"""


@pytest.mark.parametrize(("kind", "options"), [("file", ["--parallel", "2"]), ("postgres", [])])
def test_the_functions_by_djangos_runner(make_project, kind, options):
    if kind not in KINDS:
        pytest.skip("no PostgreSQL")
    project = make_project(kind)
    project.write("shop/tests.py", UNITTESTS)
    project.write("shop/slow.py", SLOW)
    assert "Ran 19 tests" in project.manage_test(*options)
    assert project.left() == []


SPAWN = """
    import multiprocessing, os, sys
    os.environ["DJANGO_SETTINGS_MODULE"] = "project.settings"
    if __name__ == "__main__":
        multiprocessing.set_start_method("spawn", force=True)
        from django.core.management import execute_from_command_line
        execute_from_command_line(sys.argv)
"""


@pytest.mark.soak  # forked workers run the same by default
def test_by_a_parallel_runner_that_spawns(make_project):
    project = make_project("memory")  # Django clones no other kind of SQLite database for workers that it spawns
    project.write("shop/tests.py", UNITTESTS)
    project.write("shop/slow.py", SLOW)
    project.write("manage.py", SPAWN)
    assert "Ran 19 tests" in project.manage_test("--parallel", "2")
    assert project.left() == []


PLAIN = """
    import os, unittest
    os.environ["DJANGO_SETTINGS_MODULE"] = "project.settings"
    import django
    django.setup()
    from django.test.utils import setup_test_environment
    from shop.tools import *
    from django_sqlsem.testing import assert_nothing_held, clock

    class Tests(unittest.TestCase):
        @classmethod
        def setUpClass(cls):
            from django.core.management import call_command
            call_command("migrate", run_syncdb=True, verbosity=0)

        def tearDown(self):
            assert_nothing_held()

        def test_busy(self):
            with busy("reports"):
                self.assertIsNone(REPORTS.try_acquire())

        def test_clock(self):
            with clock(), held(REPORTS), self.assertRaises(AcquireTimeoutError):
                REPORTS.acquire(timeout=900)

    if __name__ == "__main__":
        unittest.main()
"""


def test_unittest_without_djangos_runner(make_project):
    """No test environment is set up, and no test database: the locks are real ones."""
    project = make_project("file")
    project.write("plain.py", PLAIN)
    done = project.run("plain.py")
    assert "Ran 2 tests" in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


def test_the_examples_own_tests(tmp_path):
    environment = {
        key: value for key, value in os.environ.items() if key not in {"DATABASE_URL", "DJANGO_SETTINGS_MODULE"}
    }
    done = subprocess.run(
        [sys.executable, "manage.py", "test", "--noinput", "example_project"],
        cwd=ROOT,
        env=environment | {"EXAMPLE_VAR_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Ran 10 tests" in done.stderr
