"""The history's statements for SQL Server, which the ORM's cannot replace.

The server compiles each text anew, and pyodbc asks it of each NULL what it is: with the ORM each number of rows would
be another text, and each event several round trips. So here a table has one text, of ten rows always, without NULL.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

from django.db.models import Field, Model

from django_sqlsem.database.cursors import TEXT, AnyCursor, declare_types, padded
from django_sqlsem.models import MinuteRow

#: How many rows, or keys.
AT_ONCE: Final = 10
_TYPES: Final = {"BigIntegerField": "bigint", "PositiveIntegerField": "int"}


def insert(cursor: AnyCursor, rows: Sequence[Model]) -> None:
    """Insert rows of one table. Nothing that is written is -1, and no key is empty: they stand for NULL and no row."""
    if not rows:
        return
    fields: list[Field[Any, Any]] = [each for each in rows[0]._meta.local_fields if not each.primary_key]
    types = [_TYPES.get(each.get_internal_type(), TEXT) for each in fields]
    columns = [str(each.column) for each in fields]
    picked = [name if kind == TEXT else f"NULLIF({name}, -1)" for name, kind in zip(columns, types, strict=True)]
    one = f"({', '.join(['%s'] * len(columns))})"
    given = f"(VALUES {', '.join([one] * AT_ONCE)}) AS given ({', '.join(columns)})"
    text = (
        f"INSERT INTO {rows[0]._meta.db_table} ({', '.join(columns)})"
        f" SELECT {', '.join(picked)} FROM {given} WHERE semaphore_key <> ''"
    )
    filler = ["" if kind == TEXT else 0 for kind in types]
    with cursor.db.execute_wrapper(functools.partial(declare_types, declared=types * AT_ONCE)):
        for some in _some(rows):
            values = [getattr(row, each.attname) for row in some for each in fields]
            filled = [-1 if value is None else value for value in values] + filler * (AT_ONCE - len(some))
            cursor.execute(text, filled)


def delete_same(cursor: AnyCursor, rows: Sequence[MinuteRow]) -> None:
    """Delete what was written before of the same minutes."""
    # Without a seek it would scan a small table, and wait for the rows that others write.
    text = (
        "DELETE FROM sqlsem_minute WITH (ROWLOCK, FORCESEEK) WHERE minute_us = %s AND writer = %s"
        f" AND semaphore_key IN ({', '.join(['%s'] * AT_ONCE)})"
    )
    for (minute_us, writer), same in groupby(sorted(rows, key=_of), _of):
        for some in _some([row.key for row in same]):
            cursor.execute(text, [minute_us, writer, *padded(some, (AT_ONCE,))])


def delete_old(cursor: AnyCursor, model: type[Model], now_us: int, count: int) -> int:
    """Delete some rows whose time is over, and that nobody else is deleting. Return how many."""
    hints = "WITH (READPAST, ROWLOCK)"
    cursor.execute(f"DELETE TOP ({count}) FROM {model._meta.db_table} {hints} WHERE until_us <= %s", [now_us])
    return max(0, int(cursor.rowcount))


def _of(row: MinuteRow) -> tuple[int, int]:
    return row.minute_us, row.writer


def _some(all_: Sequence[Any]) -> list[Sequence[Any]]:
    return [all_[start : start + AT_ONCE] for start in range(0, len(all_), AT_ONCE)]
