"""A real web server with the admin, and visits to it in a real browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from django.urls import reverse
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.support.databases import ROOT, child_environment
from tests.unit.test_admin import key, login

#: Seconds for what takes a moment, on a machine that has much else to do.
PATIENCE = 30
OVERVIEW = "admin:sqlsem_semaphorerow_changelist"
#: Keeps in the page whatever its policy refused.
LISTEN = (
    "document.addEventListener('securitypolicyviolation', (e) => refused(`${e.violatedDirective} ${e.blockedURI}`))"
)

expect.set_options(timeout=PATIENCE * 1000)


class Server:
    """gunicorn with the tests' databases, whose locks are in ``alias``."""

    def __init__(self, alias: str, *, unfold: bool = False) -> None:
        self.alias, self.unfold = alias, unfold
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "gunicorn", "--threads", "8", "--graceful-timeout", "1", "--keep-alive", "60"]
        environment = child_environment(
            DJANGO_SETTINGS_MODULE="tests.e2e.browser.settings",
            SQLSEM_TEST_SETTINGS=json.dumps({"DATABASE": self.alias}),
            SQLSEM_TEST_UNFOLD="1" if self.unfold else "",
        )
        self._process = subprocess.Popen(
            [*command, "--bind", f"127.0.0.1:{self.port}", "tests.e2e.browser.wsgi"],
            cwd=ROOT,
            env=environment,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        deadline = time.monotonic() + 2 * PATIENCE
        while not self._answers():
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def log(self) -> str:
        """Return what it has written."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def stop(self) -> None:
        """End it; ``start()`` begins anew at the same address."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End it for good."""
        self.stop()
        self._log.close()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/admin/login/")
            return connection.getresponse().status == 200
        return False


class Visitor:
    """One user in a browser: ``refused`` is what the page's policy did not allow, ``errors`` are faults of scripts."""

    def __init__(self, browser: Browser, server: Server, user: str, *codenames: str, **options: Any) -> None:
        self.server, self.refused, self.errors = server, [], []  # type: tuple[Server, list[str], list[str]]
        client = login(user, *codenames, is_superuser=not codenames)
        self.context: BrowserContext = browser.new_context(
            base_url=server.url, **{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"} | options
        )
        self.context.set_default_timeout(PATIENCE * 1000)
        self.context.add_cookies([{"name": "sessionid", "value": client.cookies["sessionid"].value, "url": server.url}])
        self.context.expose_function("refused", lambda what: self.refused.append(what))
        self.context.add_init_script(LISTEN)
        self.page: Page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(f"{error}\n{error.stack}"))

    def overview(self, query: str = "") -> Page:
        """Open the list of all locks."""
        return self.open(reverse(OVERVIEW) + query)

    def lock(self, name: str = "reports") -> Page:
        """Open the page of one lock."""
        return self.open(address(name))

    def open(self, path: str) -> Page:
        """Open a page, which must be there."""
        answer = self.page.goto(path)
        assert answer is not None
        assert answer.status == 200, f"{path}: {answer.status}\n{self.server.log()[-4000:]}"
        return self.page

    def press(self, act: str) -> None:
        """Press a button of the page of one lock (``revoke 1 7``), which leads to the confirmation."""
        self.page.locator(f'button[name=do][value="{act}"]').click()
        expect(self.page.locator("input[name=confirmed]")).to_have_count(1)

    def confirm(self, *said: str) -> None:
        """Confirm, and read these messages on the page that follows."""
        self.page.locator("form input[type=submit].default, form button[type=submit].default").click()
        for text in said:
            expect(self.page.get_by_text(text).first).to_be_visible()


def address(name: str = "reports", view: str = "change") -> str:
    """Return the path of a page about one lock."""
    return reverse(f"admin:sqlsem_semaphorerow_{view}", args=[key(name)])


def words(text: str) -> re.Pattern[str]:
    """Return a pattern of these words, whatever the spaces between them."""
    return re.compile(r"\s+".join(map(re.escape, text.split())))
