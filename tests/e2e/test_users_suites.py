"""The test suites of projects that use semaphores: run for real, by Django's runner and by pytest-django."""

from __future__ import annotations

import pytest

from tests.support.projects import KINDS

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


#: A server's database takes long to make, and these make it twice.
KEPT = [pytest.param(kind, marks=pytest.mark.soak if kind == "postgres" else ()) for kind in KINDS if kind != "memory"]


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


@pytest.mark.parametrize("kind", KEPT)
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


@pytest.mark.parametrize("kind", KEPT)
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
    done = project.run_pytest("-q")
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
