"""``HOSTS``: one that refuses, or is dead, means that the next one is asked. Here two proxies lead to one server."""

from __future__ import annotations

import contextlib
import json

import pytest

from tests.programs.outage_clients import Sufferer
from tests.support import applocks, databases
from tests.support.databases import held_rows
from tests.support.proxy import proxy_for, through
from tests.support.threads import wait_until

pytestmark = pytest.mark.rows_only("several hosts")

#: No call may take longer while one host is away, in seconds.
BOUND = 25.0


@pytest.fixture(params=[alias for alias in databases.covered() if alias == "mariadb"])
def server(request, committed):
    """The alias of the covered MariaDB or MySQL."""
    alias = applocks.parameter(request)
    yield alias
    databases.assert_nothing_held(alias)


@pytest.fixture
def ways(server):
    """Two ways to the server."""
    with proxy_for(server) as first, proxy_for(server) as second:
        yield first, second


@pytest.fixture
def sufferer(server, ways):
    """A function that starts a process which knows both ways, and neither by its alias's own ``HOST``."""
    env = through(ways[0], server, impatient=True)
    settings = json.loads(env["SQLSEM_TEST_DATABASES"])
    settings[server] |= {"HOST": "127.0.0.1", "PORT": "1"}
    hosts = [f"127.0.0.1:{each.port}" for each in ways]
    env = {
        "SQLSEM_TEST_DATABASES": json.dumps(settings),
        "SQLSEM_TEST_SETTINGS": json.dumps({"DATABASES": {server: {"HOSTS": hosts}}}),
    }
    with contextlib.ExitStack() as stack:
        yield lambda name: stack.enter_context(Sufferer(server, name, env=env))


@pytest.mark.parametrize("verb", ["acquire", "aacquire"])
@pytest.mark.parametrize("outage", ["refuse", "silence"])
def test_the_next_host_is_asked_and_kept(server, ways, sufferer, outage, verb):
    first, second = ways
    child = sufferer("next")
    child.does(f"{verb} 5", "held")
    child.does("release", "released")
    assert first.heard
    assert not second.heard, "the first host is asked first"
    getattr(first, outage)()
    child.does(f"{verb} 10", "held", within=BOUND)
    assert [row.pid for row in held_rows(server)] == [child.pid]
    child.does("release", "released")
    first.resume()
    heard = len(first.heard)
    for _ in range(3):
        child.does(f"{verb} 10", "held", within=BOUND)
        child.does("release", "released")
    if outage == "refuse":  # what was kept from it comes through late
        assert len(first.heard) == heard, "it stays with the one that answers"


def test_while_no_host_answers_callers_wait(server, ways, sufferer):
    first, second = ways
    child = sufferer("none")
    child.does("acquire 5", "held")
    child.does("release", "released")
    first.refuse()
    second.refuse()
    child.does("acquire 0", "failed", within=BOUND)
    child.send("acquire 60")
    child.silent(1.0)
    second.resume()
    child.answer("held", within=BOUND)
    child.does("release", "released")
    assert child.stderr.count("is away") == child.stderr.count("is back") == 1
    first.resume()
    second.refuse()
    wait_until(lambda: child.does_either("acquire 0", "held", "failed") == "held", timeout=BOUND)
    child.does("release", "released")
