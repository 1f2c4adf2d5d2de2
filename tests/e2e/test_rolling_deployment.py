"""From ``mutex("billing")`` to ``semaphore("billing", slots=3)`` and back, one web server after the other, under load.

Two versions of a small project serve the same address. Who is in is counted in the database, not by the library.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from django_sqlsem import queries
from tests.places.site import Site
from tests.support.databases import OutsideCounter, covered, label
from tests.support.threads import run_beside, wait_until

CLIENTS = 8
#: So many servers are replaced, one after the other.
SERVERS = 2
#: So often must each server answer before the next step.
ANSWERS = 12
#: Longer than that nobody may wait, in seconds: on a quiet machine the longest wait is well below one.
STARVED = 20.0
#: How long a step may take on a busy machine.
SOON = 60.0
VERSIONS = {"before": "tests.places.billing_before", "after": "tests.places.billing_after"}


class Fleet:
    """The servers that stand behind one address, and the clients that come to it all the time."""

    def __init__(self, alias: str, stack: contextlib.ExitStack) -> None:
        self.alias, self.stack = alias, stack
        self.serving: list[tuple[str, Site]] = []
        self.busy: dict[Site, int] = {}
        self.answers: dict[Site, int] = {}
        self.faults: list[str] = []
        self.longest = 0.0
        self._turns = itertools.count()
        self._lock = threading.Lock()

    def start(self, version: str) -> tuple[str, Site]:
        """Start a server of a version, which nobody knows yet."""
        site = self.stack.enter_context(Site("gthread", self.alias, "-w", "1", urls=VERSIONS[version]))
        self.busy[site] = self.answers[site] = 0
        return version, site

    @contextlib.contextmanager
    def clients(self) -> Iterator[None]:
        """Have clients come again and again while the block runs."""
        over = threading.Event()

        def visit() -> None:
            while not over.is_set():
                self.visit()

        visitors = [run_beside(visit) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            over.set()
            for visitor in visitors:
                visitor.result(SOON)

    def visit(self) -> None:
        """Ask one of the servers, in turn."""
        with self._lock:
            _version, site = self.serving[next(self._turns) % len(self.serving)]
            self.busy[site] += 1
        asked = time.monotonic()
        found = site.get("/billing")
        with self._lock:
            self.busy[site] -= 1
            self.answers[site] += 1
            self.longest = max(self.longest, time.monotonic() - asked)
            if found.status != 200:
                self.faults.append(f"{found.status}: {found.text[:200]}")

    def go_on(self) -> None:
        """Wait until every server has answered some more times."""
        before = {site: self.answers[site] for _, site in self.serving}
        wait_until(
            lambda: all(self.answers[site] >= before[site] + ANSWERS for site in before),
            timeout=SOON,
            what="every server answers, whichever version it is of",
        )
        assert self.faults == []

    def replace(self, new: tuple[str, Site]) -> None:
        """Let a server come in; when all have served beside it, let the oldest go, as a kind deployment does."""
        with self._lock:
            self.serving.append(new)
        self.go_on()
        with self._lock:
            _version, old = self.serving.pop(0)
        wait_until(lambda: self.busy[old] == 0, timeout=SOON, what="the old server has answered all")
        old.stop()
        self.go_on()


@pytest.fixture(
    params=[pytest.param(each, id=label(each)) for each in covered() if label(each) in ("sqlite", "postgres")]
)
def alias(request, committed):
    return request.param


def test_a_deployment_rolls_from_a_mutex_to_a_semaphore_and_back_and_everybody_is_served(alias):
    with (
        OutsideCounter(alias, "readers") as together,
        OutsideCounter(alias, "writers") as alone,
        contextlib.ExitStack() as stack,
    ):
        fleet = Fleet(alias, stack)
        fleet.serving = [fleet.start("before") for _ in range(SERVERS)]
        coming = [run_beside(lambda version=version: fleet.start(version)) for version in ["after", "before"] * SERVERS]
        news = [each.result(2 * SOON) for each in coming]
        with fleet.clients():
            fleet.go_on()
            for version in ("after", "before"):
                for new in [each for each in news if each[0] == version]:
                    fleet.replace(new)
                if version == "after":
                    wait_until(lambda: together.current == 3, timeout=SOON, what="three at once")
                    assert queries.semaphore("billing", using=alias).kind == "semaphore"
        assert fleet.faults == []
        assert (alone.peak, together.peak) == (1, 3)
        assert (alone.current, together.current) == (0, 0)
        assert fleet.longest < STARVED, fleet.longest
    found = queries.semaphore("billing", using=alias)
    assert (found.kind, found.other_kind, found.slots, found.held, found.waiting) == ("mutex", "", 1, 0, 0)
