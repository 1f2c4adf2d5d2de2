"""The types of a statement's parameters, as SQL Server's drivers are told them.

Drivers that are not told send each text as one that is as long as its value (``nvarchar(7)``). A server then prepares
the statement anew, and keeps one more plan of it, for each combination of lengths. And what a NULL is they ask it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

#: What ``Cursor.setinputsizes()`` takes of each parameter: type, length or digits, and 0; a length of 0 is ``max``.
Size: TypeAlias = tuple[int, int, int]

#: ODBC's numbers of these types.
_ODBC: Final = {"varchar": 12, "nvarchar": -9, "int": 4, "bigint": -5}
_DIGITS: Final = {"int": 10, "bigint": 19}
_TEXT: Final = re.compile(r"(n?varchar)\((max|[0-9]+)\)")
#: Any text of ours but the longest, in UTF-16 units, of which a character may take two.
TEXT: Final = "nvarchar(1000)"


@functools.cache
def size_of(declared: str) -> Size:
    """Return what a driver is told of a type: ``nvarchar(200)``, ``varchar(max)``, ``int``, ``bigint``."""
    text = _TEXT.fullmatch(declared)
    if text is None:
        return _ODBC[declared], _DIGITS[declared], 0
    kind, length = text.groups()
    return _ODBC[kind], 0 if length == "max" else int(length), 0


def sizes_for(values: Sequence[Any]) -> list[Size]:
    """Return what a driver is told of these values: nothing, if there is one of a type that it knows best itself."""
    sizes = []
    for value in values:
        if isinstance(value, int):
            sizes.append(size_of("int" if -(2**31) <= value < 2**31 else "bigint"))
        elif value is None or isinstance(value, str):
            # Not by its length in units, which takes longer to tell: each character may be two.
            sizes.append(size_of(TEXT if value is None or len(value) <= 500 else "nvarchar(max)"))
        else:
            return []
    return sizes
