"""Fixtures of the tests in real servers.

``alias``
    The alias that keeps the locks of the sites, real and committed: PostgreSQL if there is one, else SQLite. Nothing
    may be held in it after a test (unless that is marked ``leaves_held``).
``site``
    A function of a kind of server, and of what ``Site`` takes: it returns a running site, which is shared by the tests
    of a module that ask for the very same one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.places.site import Site
from tests.support import databases


@pytest.fixture
def alias(request: pytest.FixtureRequest, committed: None) -> Iterator[str]:
    """The alias that keeps the locks of the sites."""
    name = "postgres" if "postgres" in databases.covered() else "default"
    yield name
    if request.node.get_closest_marker("leaves_held") is None:
        databases.assert_nothing_held(name)


@pytest.fixture(scope="module")
def _sites(django_db_setup: None) -> Iterator[Callable[..., Site]]:
    with contextlib.ExitStack() as stack:
        known: dict[str, Site] = {}

        def site(kind: str, alias: str, *options: str, **rest: Any) -> Site:
            asked = repr((kind, alias, options, sorted(rest.items())))
            if asked not in known:
                known[asked] = stack.enter_context(Site(kind, alias, *options, **rest))
            return known[asked]

        yield site


@pytest.fixture
def site(alias: str, _sites: Callable[..., Site]) -> Callable[..., Site]:
    """A function that returns a running site."""
    return lambda kind, *options, **rest: _sites(kind, alias, *options, **rest)
