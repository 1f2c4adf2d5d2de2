"""The types of a batch's parameters, as drivers are told them: always those that the batch itself declares.

Drivers that are not told send each text as one that is as long as its value (``nvarchar(7)``). A server then prepares
the batch anew, and keeps one more plan of it, for each combination of lengths: of names, threads, labels, users.
"""

from __future__ import annotations

import functools
from typing import Final

from django_sqlsem.odbc_types import size_of

#: Lengths are in UTF-16 units, of which a character may take two; what is longer is cut without a word.
TYPES: Final = {
    "stamp": "varchar(60)",
    "base": "nvarchar(255)",
    "gate": "nvarchar(255)",
    "mode": "varchar(32)",
    "lock_mode": "nvarchar(8)",
    "resource": "nvarchar(255)",
    "fence": "nvarchar(60)",
    "told": "nvarchar(60)",
    "csv": "nvarchar(max)",
    "key": "nvarchar(32)",
    "kind": "nvarchar(16)",
    "name": "nvarchar(400)",
    "permit": "nvarchar(32)",
    "before": "nvarchar(32)",
    "host": "nvarchar(510)",
    "thread": "nvarchar(200)",
    "label": "nvarchar(400)",
    "user": "nvarchar(300)",
    "process": "nvarchar(32)",
    "pid": "bigint",
    "lease": "bigint",
    "age": "bigint",
    "ticket": "nvarchar(32)",
    "session_id": "int",
    "session_us": "bigint",
}


def type_of(name: str) -> str:
    """Return the type of a parameter; one of several is numbered, as ``key0``."""
    return TYPES.get(name) or TYPES.get(name.rstrip("0123456789"), "int")


@functools.lru_cache(maxsize=1000)
def input_sizes(parameters: tuple[str, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return what ``Cursor.setinputsizes()`` takes: type, length or digits, and 0; a length of 0 is ``max``."""
    return tuple(size_of(type_of(name)) for name in parameters)
