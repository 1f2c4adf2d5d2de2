"""``manage.py screenshots``: pictures of the admin's pages for the documentation, in a real browser, under load."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import contextmanager
from importlib.util import find_spec
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
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from playwright.sync_api import Browser, Page

OVERVIEW = reverse("admin:sqlsem_semaphorerow_changelist")
LOCK = reverse("admin:sqlsem_semaphorerow_change", args=[resource_for("reports", "semaphore").key])
WIDE, TALL, TABLET, NARROW = (
    {"width": width, "height": height} for width, height in ((1400, 1000), (1400, 1300), (1024, 1000), (390, 844))
)
AUDIT = reverse("admin:sqlsem_semaphorerow_audit")
#: What the pages look like elsewhere than on a wide screen.
LOOKS: dict[str, dict[str, Any]] = {
    "tablet": {"viewport": TABLET},
    "narrow": {"viewport": NARROW, "is_mobile": True, "device_scale_factor": 2},
    "narrow-dark": {"viewport": NARROW, "is_mobile": True, "device_scale_factor": 2, "color_scheme": "dark"},
    "forced": {"viewport": TABLET, "forced_colors": "active"},
}
PATIENCE = 60
#: After this many seconds the demo's fight is over, and its busy site goes on.
CALM = 50


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
        with self._server("demo", "--port") as site:
            time.sleep(CALM)
            for scheme in ("light", "dark"):
                with self._page(browser, site, color_scheme=scheme) as page:
                    self._take(page, OVERVIEW, f"overview-{scheme}")
                    page.set_viewport_size(TALL)
                    self._take(page, LOCK, f"lock-{scheme}")
            for name, options in LOOKS.items():
                with self._page(browser, site, **options) as page:
                    self._take(page, OVERVIEW, f"overview-{name}")
                    self._take(page, LOCK, f"lock-{name}")
            with self._page(browser, site) as page:
                self._take(page, AUDIT, "audit")
                self._open(page, LOCK)
                page.locator("button[value=pause]").click()
                page.locator("input[name=confirmed]").wait_for(state="attached")
                self._shoot(page, "confirm")
        with self._web() as site, self._page(browser, site) as page:
            self._error(page)
        if find_spec("unfold"):
            unfold = {"DJANGO_SETTINGS_MODULE": "example_project.demo.unfold_settings"}
            with self._web(unfold) as site, self._page(browser, site, color_scheme="dark") as page:
                self._take(page, OVERVIEW, "overview-unfold")
                self._take(page, LOCK, "lock-unfold")

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
            with self._web() as site, self._page(browser, site) as page:
                self._take(page, OVERVIEW, f"overview-{count}")

    def _web(self, environment: Mapping[str, str] | None = None) -> AbstractContextManager[str]:
        """Run a web server alone."""
        program = ("uvicorn", "example_project.asgi:application", "--lifespan", "off", "--port")
        return self._server(*program, environment=environment)

    @contextmanager
    def _server(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
        """Run the demo, or a web server alone, and return its address."""
        port = free_port()
        program = [*(["django"] if arguments[0] == "demo" else []), *arguments, str(port)]
        log = settings.VAR_DIR / "site.log"
        child = Child("The site", program, folder=settings.BASE_DIR, log=log, environment=environment)

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
        if path != AUDIT:
            page.locator("[data-sqlsem-age]", has_text="s ago").wait_for()
        self._shoot(page, name)

    def _open(self, page: Page, path: str) -> None:
        page.goto(path)

    def _shoot(self, page: Page, name: str) -> None:
        path = self.folder / f"{name}.png"
        page.screenshot(path=path, animations="disabled")
        self.stdout.write(f"{path} ({path.stat().st_size // 1024} kB)")


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
