"""SQL Server finds rows by seeks: it scans a small table, where each statement would wait for the rows of all names.

``FORCESEEK`` is an error where no index can serve: so it stands where a row is named by the first column of one.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.db import models

from django_sqlsem.backends.applock import calls, possession
from django_sqlsem.claims import rows
from django_sqlsem.database.dialects import Dialect, _dialect
from django_sqlsem.deadlocks import reading as deadlocks_reading
from django_sqlsem.deadlocks import watch
from django_sqlsem.history import writer
from django_sqlsem.models import (
    ClaimRow,
    MinuteRow,
    SemaphoreRow,
    SlotRow,
    WaiterRow,
    WaitRow,
)
from tests.golden.statements import VENDORS, row_texts

MODELS: dict[str, type[models.Model]] = {
    model._meta.db_table: model for model in (SemaphoreRow, SlotRow, WaiterRow, ClaimRow, WaitRow, MinuteRow)
}
TABLE = "|".join(MODELS)
#: A table that is read, its alias, and its hints.
READ = re.compile(rf"(?:(?<!DELETE )\bFROM|\bJOIN|,) ({TABLE})\b(?: (?:AS )?(\w)\b)?(?: WITH \(([\w, ]+)\))?")
#: A table is ordered by these: naming a row by them is a seek anyway, whatever the table's size.
ORDER = {"id", "name_key"}
#: Of whole tables, or of one name if one is given: an OR that no seek can serve. Housekeeping looks at all names.
WHOLE_TABLES = {"internal_read_1", "beacons.TAKEN", "beacons.HELD_BY", "taken"}
#: It only begins a transaction: whatever it finds, it waits for nobody.
UNLOCKED = {"internal_fence_1"}
#: The tables of many rows.
SOUGHT = r"sqlsem_(?:slot|waiter)\b"


class Said:
    """A cursor that notes what SQL Server is told."""

    def __init__(self) -> None:
        self.text = ""

    def execute(self, text: str, values: Any = None) -> None:
        self.text = text


class Noting(Said):
    """One that notes all of it."""

    rowcount = 0

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def execute(self, text: str, values: Any = None) -> None:
        self.texts.append(text)

    def fetchall(self) -> list[Any]:
        return []


def told(dialect: Dialect, text: str) -> str:
    """Return a row statement as SQL Server gets it."""
    cursor: Any = Said()
    names = re.findall(r"%\((\w+)\)s", text)
    dialect.execute(cursor, text, dict.fromkeys(names, 0))
    return re.sub(r"\s+", " ", cursor.text)


def row_statements() -> dict[str, str]:
    """Return the row statements of the dialect that name slots, waiters or claims, by what makes them."""
    dialect = _dialect("microsoft")
    texts = {name: text for name, text in row_texts("microsoft").items() if re.search(SOUGHT, text)}
    texts |= {"claimed own": rows._OWN, "claimed forget": rows._FORGET}
    return {name: told(dialect, text) for name, text in texts.items()}


def statements_about_waits() -> dict[str, str]:
    """Return those that name rows; one looks at all waits."""
    dialect = _dialect("microsoft")
    cursor: Any = Noting()
    watch.refresh(cursor, dialect, ["a"], 1)
    watch.delete(cursor, dialect, ["a", "b"])
    for some, parameters in deadlocks_reading.at_once({"a"}):
        deadlocks_reading._look_at(cursor, dialect, deadlocks_reading.Look(1), some, parameters, leases=False)
    return {f"waits {nth}": re.sub(r"\s+", " ", text) for nth, text in enumerate(cursor.texts)}


def statements_of_the_history() -> dict[str, str]:
    """Return those that name rows of the history."""
    cursor: Any = Noting()
    writer._delete_same(cursor, [MinuteRow(key="a", minute_us=1, writer=1)])
    return {f"history {nth}": text for nth, text in enumerate(cursor.texts)}


ROWS = row_statements() | statements_about_waits()
PROCEDURES = {
    name: re.sub(r"\s+", " ", re.sub(r"--[^\n]*", "", text).replace("dbo.sqlsem_", "sqlsem_"))
    for name, text in calls.files().items()
}
CALLERS = {"fenced": possession._ROW} | statements_of_the_history()
TEXTS = ROWS | PROCEDURES | CALLERS

everywhere = pytest.mark.parametrize("name", TEXTS)


def leading(table: str) -> set[str]:
    """Return the first columns of a table's indexes; a unique one of what may be NULL is filtered on SQL Server."""
    meta = MODELS[table]._meta
    unique = [each for each in meta.constraints if isinstance(each, models.UniqueConstraint) and not each.condition]
    named: list[list[str]] = [list(each.fields) for each in unique]
    named = [names for names in named if not any(meta.get_field(name).null for name in names)]
    named += [list(each.fields) for each in meta.indexes if not each.condition]
    named += [[field.name] for field in meta.local_fields if (field.unique or field.db_index) and not field.null]
    return {str(meta.get_field(names[0]).column) for names in named}


def own(text: str) -> str:
    """Return what is left of the query that a text begins in, without what stands in parentheses."""
    found, depth = "", 0
    for letter in text.partition(";")[0]:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        found += letter if depth == 0 else ""
    return found


def reads(text: str) -> list[tuple[str, str, str, str]]:
    """Return each table that a text reads, what it is called there, its hints, and the rest of the query."""
    return [(each[1], each[2] or each[1], each[3] or "", own(text[each.end() :])) for each in READ.finditer(text)]


def is_named(name: str, columns: set[str], query: str) -> bool:
    """Whether a query wants one of these columns of a table to be equal to something."""
    return bool(re.search(rf"\b(?:WHERE|ON|AND) (?:{name}\.)?(?:{'|'.join(sorted(columns))}) (?:=|IN) ?", query))


def test_the_columns_that_rows_are_named_by_are_the_first_of_an_index() -> None:
    assert {"semaphore_key"} < leading("sqlsem_slot")
    assert {"semaphore_key", "ticket"} < leading("sqlsem_waiter")
    assert {"semaphore_key"} < leading("sqlsem_claim")
    assert {"name_key"} < leading("sqlsem_semaphore")
    assert {"wait_id"} <= leading("sqlsem_wait")
    assert {"semaphore_key"} < leading("sqlsem_minute")


@everywhere
def test_no_table_is_overlooked(name: str) -> None:
    known = [*READ.findall(TEXTS[name]), *re.findall(rf"(?:INSERT INTO|UPDATE|DELETE FROM) (?:{TABLE})\b", TEXTS[name])]
    assert len(re.findall(rf"\b(?:{TABLE})\b(?!\.)", TEXTS[name])) == len(known)


@everywhere
def test_rows_are_sought(name: str) -> None:
    if name in WHOLE_TABLES | UNLOCKED:
        return
    for table, called, hints, query in reads(TEXTS[name]):
        assert "FORCESEEK" in hints or is_named(called, ORDER, query), f"{table} {called}: {query}"


@everywhere
def test_what_is_written_is_sought_too(name: str) -> None:
    """The hint stands in a FROM of its own: it may not follow the table that is written."""
    text = TEXTS[name]
    for target in re.finditer(rf"\b(?:UPDATE|DELETE FROM) ({TABLE})\b([^;]*)", text):
        table, rest = target.groups()
        sought = f" FROM {table} WITH (ROWLOCK, FORCESEEK) WHERE " in rest
        assert sought or is_named(table, ORDER, own(rest)), target[0]
    for target in re.finditer(r"\b(?:UPDATE (\w) SET|DELETE (\w) FROM)([^;]*)", text):
        alias = target[1] or target[2]
        assert re.search(rf"({TABLE}) AS {alias} WITH \(ROWLOCK, FORCESEEK\)", target[0]), target[0]


@everywhere
def test_an_index_serves_where_a_seek_is_forced(name: str) -> None:
    for table, called, hints, query in reads(TEXTS[name]):
        if "FORCESEEK" in hints:
            assert is_named(called, leading(table), query), f"{table} {called}: {query}"
            assert " OR " not in query


@everywhere
def test_no_seek_is_forced_on_what_is_written(name: str) -> None:
    """Error 10724: the hint may only stand in a FROM."""
    assert not re.search(r"\b(?:UPDATE|INTO|DELETE FROM|DELETE) \w+ WITH \([^)]*FORCESEEK", TEXTS[name])


def test_only_sql_server_is_told_so() -> None:
    assert not [text for vendor in VENDORS for text in row_texts(vendor).values() if "FORCESEEK" in text]


def test_the_look_that_begins_a_transaction_waits_for_nobody() -> None:
    for name in UNLOCKED:
        assert "FROM sqlsem_semaphore WITH (NOLOCK);" in PROCEDURES[name]
