"""Fixtures of the tests in a browser: Chromium, a server per kind of site, and visitors.

Whatever a page did that its content security policy refused, and any fault of a script, fails the test.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.conf import settings
from playwright.sync_api import Browser, sync_playwright

from tests.e2e.browser.site import Server, Visitor


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of this folder in this process. Skips without one."""
    found = settings.FOUND.get("chromium")
    if found is None:
        pytest.skip(f"no chromium: {settings.MISSING['chromium'].reason}")
    # Playwright leaves an event loop running in this thread, which is no reason for Django to refuse its queries.
    with pytest.MonkeyPatch.context() as patch, sync_playwright() as playwright:
        patch.setitem(os.environ, "DJANGO_ALLOW_ASYNC_UNSAFE", "true")  # type: ignore[arg-type]
        browser = playwright.chromium.launch(executable_path=found.where, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def _servers(django_db_setup: None) -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as stack:
        known: dict[Any, Server] = {}

        def server(alias: str, unfold: bool = False) -> Server:
            if (alias, unfold) not in known:
                known[alias, unfold] = made = Server(alias, unfold=unfold)
                stack.callback(made.close)
            return known[alias, unfold]

        yield server


@pytest.fixture
def server_for(browser: Browser, _servers: Callable[..., Server], committed: None) -> Callable[..., Server]:
    """A function of the alias that keeps the locks (and of ``unfold``) that returns a running server."""
    return _servers


@pytest.fixture
def server(server_for: Callable[..., Server]) -> Server:
    """A running server with the locks in SQLite."""
    return server_for("default")


@pytest.fixture
def unfold(server_for: Callable[..., Server]) -> Server:
    """The same with django-unfold. Skips without it."""
    if importlib.util.find_spec("unfold") is None:
        pytest.skip("no django-unfold")
    return server_for("default", unfold=True)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visitor]]:
    """A function of a server, permissions and options of a context: it returns a visitor, by default a superuser."""
    visitors: list[Visitor] = []

    def visit(server: Server, *codenames: str, **options: Any) -> Visitor:
        visitors.append(Visitor(browser, server, f"user{len(visitors)}", *codenames, **options))
        return visitors[-1]

    yield visit
    for visitor in visitors:
        visitor.context.close()
    assert [visitor.refused for visitor in visitors] == [[] for _ in visitors]
    assert [visitor.errors for visitor in visitors] == [[] for _ in visitors]


@pytest.fixture
def operator(server: Server, visit: Callable[..., Visitor]) -> Visitor:
    """Who may do everything."""
    return visit(server)
