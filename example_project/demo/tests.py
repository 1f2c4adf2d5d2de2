"""The demo's start page, and its counter, which must see what the locks do."""

from __future__ import annotations

from django.test import TestCase, TransactionTestCase

from django_sqlsem import AcquireTimeoutError, semaphore
from django_sqlsem.testing import busy, clock, held, nothing_held
from example_project.demo import meter
from example_project.reports import tasks


class StartPageTests(TestCase):
    def test_it_shows_who_holds(self) -> None:
        with held(semaphore("reports", slots=3), 1):
            self.assertEqual(len(self.client.get("/").context["status"].holders), 1)


class MeterTests(TransactionTestCase):
    def setUp(self) -> None:
        self.enterContext(nothing_held())
        meter.reset()

    def figures(self) -> tuple[int, int]:
        now = meter.read()
        return now.peak, now.inside

    def test_work_is_counted_in_and_out(self) -> None:
        tasks.send_report("ann@example.com")
        self.assertEqual(self.figures(), (1, 0))

    def test_a_view_of_either_kind_is_counted(self) -> None:
        for path in ("/reports/monthly/?seconds=0", "/reports/yearly/?seconds=0"):
            meter.reset()
            self.assertEqual(self.client.get(path).status_code, 200)
            self.assertEqual(self.figures(), (1, 0))

    def test_a_refused_call_is_not_counted(self) -> None:
        with busy("reports"), self.assertRaises(AcquireTimeoutError):
            tasks.send_report("ann@example.com")
        with clock(), held(semaphore("reports", slots=3)), self.assertRaises(AcquireTimeoutError):
            tasks.rebuild_figures()
        self.assertEqual(self.figures(), (0, 0))
