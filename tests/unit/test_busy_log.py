"""A flood of busy calls in the log: the first ones in full, the rest as numbers, nothing lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import RequestFactory

from django_sqlsem import lifecycle, semaphore
from django_sqlsem.busy import Busy
from django_sqlsem.core.names import resource_for
from django_sqlsem.decorators import answers
from django_sqlsem.decorators.answers import (
    IN_FULL,
    NAMES,
    SECONDS,
    log_busy,
    log_rest,
)
from django_sqlsem.models import MinuteRow
from tests.support.processes import Child
from tests.support.threads import run_in_threads

pytestmark = pytest.mark.process_side

rf = RequestFactory()


class Clock:
    """Of the log alone."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The log as in production, with a clock that stands still."""
    clock = Clock()
    monkeypatch.setattr(answers, "time", clock)
    monkeypatch.setattr(answers.testmode, "active", lambda: False)
    answers._forget()
    yield clock
    answers._forget()


def told(caplog: Any, what: str, level: int = logging.WARNING) -> list[Any]:
    return [each for each in caplog.records if getattr(each, "what", "") == what and each.levelno == level]


def test_a_flood_is_ten_records_and_a_number(clock: Clock, caplog: Any) -> None:
    with caplog.at_level(logging.DEBUG, "django_sqlsem"):
        run_in_threads(8, lambda index: [log_busy(Busy("flood", (), 0, 1), "GET /", "x") for _ in range(1250)])
        assert len(told(caplog, "busy")) == IN_FULL
        assert len(told(caplog, "busy", logging.DEBUG)) == 10_000 - IN_FULL
        log_rest()
        assert told(caplog, "busy_more") == []
        clock.now += SECONDS
        log_busy(Busy("flood", (), 0, 1), "GET /", "x")
        log_rest(everything=True)
    (more,) = told(caplog, "busy_more")
    assert (more.semaphore, more.count, more.seconds) == ("flood", 10_000 - IN_FULL, SECONDS)
    assert len(told(caplog, "busy")) == IN_FULL + 1


def test_the_number_comes_with_any_name_and_from_the_keeper(clock: Clock, caplog: Any) -> None:
    for name in ("one", "two"):
        for _ in range(IN_FULL + 5):
            log_busy(Busy(name, (), 0, 1), "GET /", "x")
        clock.now += SECONDS / 2
    log_busy(Busy("other", (), 0, 1), "GET /", "x")
    assert [each.semaphore for each in told(caplog, "busy_more")] == ["one"]
    clock.now += SECONDS / 2
    log_rest()
    assert [each.semaphore for each in told(caplog, "busy_more")] == ["one", "two"]
    assert [each.count for each in told(caplog, "busy_more")] == [5, 5]


def test_many_names_take_bounded_memory_and_lose_nothing(clock: Clock, caplog: Any) -> None:
    for number in range(NAMES + 50):
        for _ in range(IN_FULL + 1):
            log_busy(Busy(f"name-{number}", (), 0, 1), "GET /", "x")
        assert len(answers._spells) <= NAMES
    log_rest(everything=True)
    assert len(told(caplog, "busy")) == (NAMES + 50) * IN_FULL
    assert len(told(caplog, "busy_more")) == NAMES + 50
    assert not answers._spells


def test_in_tests_every_call_is_a_warning(caplog: Any) -> None:
    for _ in range(IN_FULL + 5):
        log_busy(Busy("tested", (), 0, 1), "GET /", "x")
    assert len(told(caplog, "busy")) == IN_FULL + 5


def test_the_history_counts_what_the_log_leaves_out(database: str, clock: Clock, caplog: Any) -> None:
    @semaphore("flooded", using=database, timeout=0)
    def view(request: Any) -> None:
        raise AssertionError

    calls = 3 * IN_FULL
    with semaphore("flooded", using=database):
        run_in_threads(1, lambda index: [view(rf.get("/")) for _ in range(calls)])
    assert len(told(caplog, "busy")) == IN_FULL
    refused = refusals_in_history(database)
    assert refused == calls


def refusals_in_history(database: str) -> int:
    lifecycle.stop_all()  # what is noted is written
    key = resource_for("flooded", "").key
    return sum(row.turned_away for row in MinuteRow.objects.using(database).filter(key=key))


def flood() -> None:
    """Be busy often, and end."""
    logging.basicConfig(level=logging.WARNING, format="%(what)s %(message)s")
    for _ in range(IN_FULL + 7):
        log_busy(Busy("short", (), 0, 1), "GET /", "x")


def test_a_process_that_ends_tells_the_rest() -> None:
    with Child("tests.unit.test_busy_log:flood") as child:
        child.wait()
        told = child.stderr
    assert told.count("busy Busy:") == IN_FULL, told
    assert "busy_more Busy: 7 more calls found no free slot of 'short'" in told
