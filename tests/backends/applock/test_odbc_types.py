"""What SQL Server's drivers are told of parameters: the same of all texts, so that it compiles a statement once."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from django_sqlsem.backends.applock import calls
from django_sqlsem.database.cursors import size_of, sizes_for

#: ODBC's numbers (sql.h, sqlucode.h).
SQL_VARCHAR, SQL_WVARCHAR, SQL_INTEGER, SQL_BIGINT = 12, -9, 4, -5
TEXT = (SQL_WVARCHAR, 1000, 0)


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ("nvarchar(400)", (SQL_WVARCHAR, 400, 0)),
        ("varchar(60)", (SQL_VARCHAR, 60, 0)),
        ("nvarchar(max)", (SQL_WVARCHAR, 0, 0)),
        ("int", (SQL_INTEGER, 10, 0)),
        ("bigint", (SQL_BIGINT, 19, 0)),
    ],
)
def test_a_type_has_a_number_and_a_length(declared: str, told: tuple[int, int, int]) -> None:
    assert size_of(declared) == told


@pytest.mark.parametrize(
    "declared", sorted({each for call in calls.CALLS.values() for each in calls.types(call.procedure).values()})
)
def test_every_type_of_a_call_can_be_told(declared: str) -> None:
    assert size_of(declared)[0] in (SQL_VARCHAR, SQL_WVARCHAR, SQL_INTEGER, SQL_BIGINT)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("", TEXT),
        ("a", TEXT),
        ("\U0001f512" * 500, TEXT),
        ("a" * 501, (SQL_WVARCHAR, 0, 0)),
        (None, TEXT),
        (True, (SQL_INTEGER, 10, 0)),
        (-(2**31), (SQL_INTEGER, 10, 0)),
        (2**31 - 1, (SQL_INTEGER, 10, 0)),
        (2**31, (SQL_BIGINT, 19, 0)),
        (-(2**31) - 1, (SQL_BIGINT, 19, 0)),
    ],
)
def test_a_value_says_what_it_is_and_no_text_how_long(value: Any, told: tuple[int, int, int]) -> None:
    assert sizes_for([value]) == [told]
    assert sizes_for([1, value]) == [(SQL_INTEGER, 10, 0), told]


def test_of_a_value_that_a_driver_knows_best_nothing_is_said() -> None:
    assert sizes_for([]) == []
    assert sizes_for(["a", datetime.date(2026, 1, 1)]) == []
