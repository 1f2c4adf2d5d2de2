"""``manage.py screenshots``: pictures of the admin's pages for the documentation, in a real browser, under load."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connection, transaction
from django.test import Client
from django.urls import reverse

from django_sqlsem.core.names import resource_for
from example_project.demo import scenery
from example_project.demo.children import HOST, Child, free_port
from example_project.demo.load import get

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

OVERVIEW = reverse("admin:sqlsem_semaphorerow_changelist")
LOCK = reverse("admin:sqlsem_semaphorerow_change", args=[resource_for("reports", "semaphore").key])
WIDE, TALL, NARROW = ({"width": width, "height": height} for width, height in ((1280, 860), (1280, 1180), (390, 844)))
PATIENCE = 60


class Command(BaseCommand):
    help = (
        "Writes pictures of the admin's pages. Needs Chromium, and a database of its own: EXAMPLE_VAR_DIR says where."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--to", type=Path, default=settings.BASE_DIR / "docs" / "images", help="a folder")
        parser.add_argument("--chromium", default=os.environ.get("SQLSEM_TEST_CHROMIUM"), help="the program")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            from playwright.sync_api import sync_playwright
        except ImportError as error:
            raise CommandError("Playwright is needed: make deps.") from error
        names = ("chromium", "chromium-browser", "google-chrome")
        program = options["chromium"] or next(filter(None, map(shutil.which, names)), None)
        if program is None:
            raise CommandError("Chromium is needed: --chromium says where it is.")
        if connection.vendor != "sqlite":
            raise CommandError("The pictures are taken on SQLite, in a database that is thrown away.")
        self.folder: Path = options["to"]
        self.folder.mkdir(parents=True, exist_ok=True)
        call_command("migrate", verbosity=0, interactive=False)
        users = get_user_model()
        ann, _made = users.objects.get_or_create(username="ann", defaults={"is_staff": True, "is_superuser": True})
        client = Client()
        client.force_login(ann)
        self.session = client.cookies["sessionid"].value
        # Playwright leaves an event loop running in this thread, which is no reason to refuse queries.
        os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            try:
                self._town(browser)
                self._sizes(browser)
            finally:
                browser.close()

    def _town(self, browser: Browser) -> None:
        """The demo under load, beside locks with an hour behind them."""
        scenery.town()
        scenery.hour("reports", 3, 12, 0.85, "GET /reports/monthly/", seed=99)
        with self._server("demo", "--seconds", "600", "--port") as site:
            for scheme in ("light", "dark"):
                with self._page(browser, site, color_scheme=scheme) as page:
                    self._take(page, OVERVIEW, f"overview-{scheme}")
                    page.set_viewport_size(TALL)
                    self._take(page, LOCK, f"lock-{scheme}")
            with self._page(browser, site, viewport=NARROW) as page:
                self._take(page, OVERVIEW, "overview-narrow")
                self._take(page, LOCK, "lock-narrow")
            with self._page(browser, site) as page:
                self._error(page)

    def _error(self, page: Page) -> None:
        self._open(page, OVERVIEW)
        try:
            self._rename("sqlsem_slot", "sqlsem_slot_away")
            page.locator("[data-sqlsem-error]:not(:empty)").wait_for()
            page.locator(".sqlsem-old").first.wait_for()
            self._shoot(page, "error")
        finally:
            self._rename("sqlsem_slot_away", "sqlsem_slot")

    def _rename(self, old: str, new: str) -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {old} RENAME TO {new}")

    def _sizes(self, browser: Browser) -> None:
        """Few locks and many."""
        for count in (3, 1000):
            scenery.clear()
            with transaction.atomic():
                if count == 3:
                    for number, (name, slots, hold, used, special) in enumerate(scenery.LOCKS[:3]):
                        scenery.lock(name, slots, hold, used, seed=number, **special)
                        scenery.hour(name, slots, hold, used, special["work"], seed=number)
                else:
                    scenery.crowd(count)
            with (
                self._server("uvicorn", "example_project.asgi:application", "--lifespan", "off", "--port") as site,
                self._page(browser, site) as page,
            ):
                self._take(page, OVERVIEW, f"overview-{count}")

    @contextmanager
    def _server(self, *arguments: str) -> Iterator[str]:
        """Run the demo, or a web server alone, and return its address."""
        port = free_port()
        program = ["django", *arguments] if arguments[0] == "demo" else [*arguments]
        child = Child("The site", [*program, str(port)], folder=settings.BASE_DIR, log=settings.VAR_DIR / "site.log")

        def answers() -> bool:
            try:
                return get(port, "/", timeout=5) == 200
            except OSError:
                return False

        try:
            child.wait_until(answers, _sleep, PATIENCE)
            yield f"http://{HOST}:{port}"
        finally:
            child.terminate()
            child.wait(30)

    @contextmanager
    def _page(self, browser: Browser, site: str, **options: Any) -> Iterator[Page]:
        context = browser.new_context(base_url=site, **{"viewport": WIDE, "timezone_id": "UTC"} | options)
        context.set_default_timeout(PATIENCE * 1000)
        context.add_cookies([{"name": "sessionid", "value": self.session, "url": site}])
        try:
            yield context.new_page()
        finally:
            context.close()

    def _take(self, page: Page, path: str, name: str) -> None:
        self._open(page, path)
        page.locator("[data-sqlsem-age]", has_text="s ago").wait_for()
        self._shoot(page, name)

    def _open(self, page: Page, path: str) -> None:
        page.goto(path)
        toggle = page.locator("#toggle-nav-sidebar")
        if toggle.is_visible() and page.locator(".main.shifted").count():
            toggle.click()  # the list of all models tells nothing about locks
            page.evaluate("() => { document.activeElement.blur(); scrollTo(0, 0); }")

    def _shoot(self, page: Page, name: str) -> None:
        path = self.folder / f"{name}.png"
        page.screenshot(path=path, animations="disabled")
        self.stdout.write(f"{path} ({path.stat().st_size // 1024} kB)")


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
