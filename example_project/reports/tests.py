"""Tests of what the semaphore does: `python manage.py test example_project`."""

from __future__ import annotations

from django.test import TestCase, TransactionTestCase

from django_sqlsem import AcquireTimeoutError, PermitLostError, semaphore
from django_sqlsem.testing import busy, clock, held, nothing_held, recorded
from example_project.reports import tasks

REPORTS = semaphore("reports", slots=3)


class ReportTests(TestCase):
    def setUp(self) -> None:
        self.enterContext(nothing_held())

    def test_a_visitor_is_told_when_all_slots_are_taken(self) -> None:
        with busy("reports"):
            response = self.client.get("/reports/monthly/")
        self.assertEqual(response.status_code, 503)
        self.assertIn("Retry-After", response.headers)

    def test_a_report_takes_one_of_three_slots(self) -> None:
        with recorded() as acquired:
            self.assertContains(self.client.get("/reports/monthly/?seconds=0"), "Monthly report")
        self.assertEqual(acquired.names, ["reports"])
        self.assertTrue(acquired[0].released)

    def test_both_views_share_the_slots(self) -> None:
        with held(REPORTS, 2):
            self.assertEqual(self.client.get("/reports/yearly/?seconds=0").status_code, 200)
        with clock() as now, held(REPORTS):
            for path in ("/reports/monthly/", "/reports/yearly/"):
                response = self.client.get(path, headers={"accept": "application/json"})
                self.assertEqual(response.status_code, 503)
                self.assertEqual(response.json()["error"], "busy")
            self.assertLess(0.5, now.elapsed)  # each would have waited for 0.3 s


class TaskTests(TransactionTestCase):
    """On the real rows of the test database."""

    def setUp(self) -> None:
        self.enterContext(nothing_held())

    def test_a_task_takes_a_slot(self) -> None:
        with recorded(REPORTS) as acquired:
            tasks.send_report("ann@example.com")
        self.assertEqual(len(acquired), 1)

    def test_a_task_that_is_called_raises_when_busy(self) -> None:
        with busy("reports"), self.assertRaises(AcquireTimeoutError):
            tasks.send_report("ann@example.com")
        with clock(), held(REPORTS), self.assertRaises(AcquireTimeoutError):
            tasks.rebuild_figures()

    def test_a_lost_permit(self) -> None:  # what hears of it writes to the database, on a thread of its own
        with clock() as now, REPORTS as permit:
            now.advance(30)
            permit.check()
            now.advance(61)
            with self.assertRaises(PermitLostError):
                permit.check()
