"""Rows as holders and waiters leave them, for tests of the operator's side."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections

from django_sqlsem.core.names import resource_for
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow
from tests.support import applocks
from tests.support.databases import ROOT, child_environment

#: For a test in which no database has a part: its fixture ``database`` is SQLite alone.
ON_ONE_DATABASE = pytest.mark.parametrize("database", ["default"], indirect=True, ids=["sqlite"])


def now_us(alias: str) -> int:
    """Return the database's clock."""
    connection = connections[alias]
    with connection.cursor() as cursor:
        return dialect_for(connection).now(cursor)


def boot_id(alias: str) -> str:
    """Return the boot that the rows of an alias are stamped with."""
    return dialect_for(connections[alias]).boot_id


def make_semaphore(alias: str, name: str = "reports", slots: int = 3, **fields: Any) -> SemaphoreRow:
    """Write a semaphore with its free slots."""
    row = SemaphoreRow.objects.using(alias).create(
        key=resource_for(name, "semaphore").key, name=name, declared_slots=slots, declared_us=now_us(alias), **fields
    )
    made = [SlotRow(semaphore=row, slot=slot) for slot in range(1, slots + 1)]
    for start in range(0, slots, 30):  # of several statements in one call a stand-in keeps the last
        SlotRow.objects.using(alias).bulk_create(made[start : start + 30])
    return row


def hold(
    alias: str,
    name: str = "reports",
    slot: int = 1,
    *,
    age: float = 10.0,
    left: float = 50.0,
    lease: float = 60.0,
    token: int = 7,
    **fields: Any,
) -> SlotRow:
    """Write a holder into a slot: taken ``age`` seconds ago, with ``left`` seconds of its lease left.

    Where locks are application locks, one whose lease has not run out has the lock too, in a session of its own.
    """
    played: dict[str, Any] = {}
    if applocks.are_at(alias):
        played = {"session_id": None, "session_us": None} | applocks.lock(alias, name, slot, held=left > 0)
    now = now_us(alias)  # after the login, which may take a while
    rows = SlotRow.objects.using(alias).filter(semaphore__name=name, slot=slot)
    values = {
        "token": token,
        "permit_id": f"{slot:032x}",
        "acquired_us": now - round(age * 1e6),
        "expires_us": now + round(left * 1e6),
        "lease_us": round(lease * 1e6),
        "host": "web1",
        "pid": 4711,
        "thread": "MainThread",
        "label": "GET /reports/",
        "user": "ann",
        "process_id": "p",
        "boot_id": boot_id(alias),
        "mode": "mutex" if SemaphoreRow.objects.using(alias).get(name=name).kind == "mutex" else "",
    }
    values |= fields | played
    assert rows.update(**values) == 1
    return rows.get()


def wait(alias: str, name: str = "reports", *, age: float = 3.0, left: float = 2.0, waiting: int = 2) -> WaiterRow:
    """Write a waiting process."""
    now = now_us(alias)
    if left > 0 and applocks.are_at(alias):
        left += 20  # to play holders, with a login for each, takes a while
    return WaiterRow.objects.using(alias).create(
        ticket=f"{name}-{age}"[:32],
        semaphore_id=resource_for(name, "semaphore").key,
        queued_us=now - round(age * 1e6),
        expires_us=now + round(left * 1e6),
        waiting=waiting,
        host="web2",
        pid=99,
        thread="worker",
        label="GET /wait/",
        user="bob",
        boot_id=boot_id(alias),
    )


def slot_row(alias: str, name: str = "reports", slot: int = 1) -> SlotRow:
    """Read a slot."""
    return SlotRow.objects.using(alias).get(semaphore__name=name, slot=slot)


def locks(*arguments: str, **options: Any) -> None:
    """Call ``manage.py locks`` in this process."""
    call_command("locks", *arguments, **options)


def locks_command(*arguments: str) -> dict[str, Any]:
    """Return what ``subprocess`` needs to run ``manage.py locks`` on the test databases."""
    return {
        "args": [sys.executable, "-m", "django", "locks", *arguments],
        "cwd": ROOT,
        "env": child_environment(PYTHONUNBUFFERED="1"),
    }


def process_exists(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
    except OSError:
        os.kill(pid, 0)
        return True
