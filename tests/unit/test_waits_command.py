"""``manage.py locks waits``, on rows that say who waits for whom."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from django.db import connections

from django_sqlsem import queries
from django_sqlsem.core.modes import WHOLE
from django_sqlsem.core.names import resource_for
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.management.verbs import reading
from django_sqlsem.models import WaitRow
from tests.support.operators import hold, locks, make_semaphore, now_us

pytestmark = [pytest.mark.leaves_held, pytest.mark.rows_only("slot rows"), pytest.mark.process_side]


def key(name: str) -> str:
    return resource_for(name, "semaphore").key


def make_wait(database: str, name: str, holds: dict[str, str], age: float = 5.0, **values: Any) -> WaitRow:
    """Have a thread wait for a name while it holds permits of others."""
    now = now_us(database)
    who = {"host": "web1", "pid": 4711, "thread": "MainThread", "label": "GET /reports/", "user": "ann"}
    return WaitRow.objects.using(database).create(
        **who
        | {
            "wait_id": f"wait for {name}",
            "key": key(name),
            "name": name,
            "permits": " ".join(f"{key(held)}/{permit}" for held, permit in holds.items()),
            "since_us": now - round(age * 1e6),
            "expires_us": now + 60_000_000,
            "boot_id": dialect_for(connections[database]).boot_id,
        }
        | values
    )


@pytest.fixture
def crossed(database: str) -> str:
    """Two names, each held by who waits for the other."""
    for name, pid in (("a", 4711), ("b", 4712)):
        make_semaphore(database, name, slots=1)
        hold(database, name, slot=1, permit_id=f"permit-of-{name}", pid=pid)
    make_wait(database, "b", {"a": "permit-of-a"}, age=65)
    make_wait(database, "a", {"b": "permit-of-b"}, pid=4712, thread="worker", label="", user="")
    return database


def test_nobody_waits(database: str, capsys: Any) -> None:
    locks("waits", "--database", database)
    assert capsys.readouterr().out == "Nobody waits while holding something else.\n"


def test_a_wait_is_no_deadlock(database: str, capsys: Any) -> None:
    make_semaphore(database, "a", slots=1)
    hold(database, "a", slot=1, pid=7, permit_id="some-permit")
    make_semaphore(database, "b", slots=3)
    hold(database, "b", slot=2, permit_id="permit-of-b")
    make_wait(database, "a", {"b": "permit-of-b"}, take=0, mode=WHOLE)
    locks("waits", "--database", database)
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["WAITS", "FOR", "AS", "SINCE", "PROCESS", "WORK", "USER", "HOLDS", "HELD", "BY"]
    parts = ("a  ", "all of it", "5.", " s ago", "web1 pid 4711 MainThread", "GET /reports/", "ann", "'b' (slot 2)")
    for part in parts:
        assert part in line
    assert "web1 pid 7 MainThread (GET /reports/) (slot 1)" in line
    assert queries.deadlocks(database) == []


def test_a_deadlock_is_told_and_ends_the_command_with_1(crossed: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        locks("waits", "--database", crossed)
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert re.sub(r"[0-9.]+ s\b", "N s", lines[-1]) == (
        "Deadlock: web1 pid 4711 MainThread (GET /reports/) has waited 1 min N s for 'b', held by web1 pid 4712"
        " MainThread (GET /reports/); web1 pid 4712 worker has waited N s for 'a', held by web1 pid 4711 MainThread"
        " (GET /reports/)."
    )


def test_the_same_as_json(crossed: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        locks("waits", "--format", "json", "--database", crossed)
    assert ended.value.code == 1
    told = json.loads(capsys.readouterr().out)
    assert [wait["name"] for wait in told["waits"]] == ["b", "a"]
    [deadlock] = told["deadlocks"]
    assert deadlock["names"] == ["b", "a"]
    first, second = deadlock["waits"]
    assert (first["pid"], first["take"], first["waits_for"]) == (4711, 1, [second["wait_id"]])
    assert [holder["name"] for holder in first["holds"]] == ["a"]
    assert [(holder["name"], holder["pid"], holder["slot"]) for holder in first["held_by"]] == [("b", 4712, 1)]
    assert set(first["held_by"][0]) == set(reading.HOLDER_FIELDS)


def test_rows_of_the_dead_and_of_those_who_were_served_do_not_count(crossed: str) -> None:
    rows = WaitRow.objects.using(crossed)
    assert len(queries.deadlocks(crossed)) == 1
    rows.filter(name="a").update(wait_id="permit-of-a")  # it has the slot by now
    assert queries.deadlocks(crossed) == []
    assert [wait.name for wait in queries.waits(crossed)] == ["b"]
    rows.filter(name="a").update(wait_id="another", expires_us=now_us(crossed) - 1)
    assert queries.deadlocks(crossed) == []
    assert [wait.name for wait in queries.waits(crossed)] == ["b"]


def test_how_many_queries(crossed: str, django_assert_num_queries: Any) -> None:
    """One for who waits; three more where names make a circle possible, and as many to see it twice."""
    clock = 0 if connections[crossed].vendor == "sqlite" else 1
    with django_assert_num_queries(2 * (4 + clock), connection=connections[crossed]):
        assert queries.deadlocks(crossed)
    WaitRow.objects.using(crossed).filter(name="a").delete()
    with django_assert_num_queries(1 + clock, connection=connections[crossed]):
        assert not queries.deadlocks(crossed)
