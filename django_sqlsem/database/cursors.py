"""The drivers' own cursors, for what no API of Django's gives: prepared statements, and SQLite's parameters by name.

And the types of parameters, as SQL Server's drivers are told them. Drivers that are not told send each text as one that
is as long as its value (``nvarchar(7)``): the server prepares the statement anew for each combination of lengths.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, TypeVar

from django.db import Error as DatabaseError
from django.db.backends.utils import CursorWrapper

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


T = TypeVar("T")

#: For how many texts a session keeps a cursor: as many statements psycopg keeps prepared.
_TEXTS: Final = 100
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


def declare_types(
    execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any, *, declared: Sequence[str] = ()
) -> Any:
    """Wrap the execution of a statement on SQL Server: its driver is told the ``declared`` types, or the values'."""
    if not many:
        context["cursor"].setinputsizes([size_of(each) for each in declared] or sizes_for(params or ()))
    return execute(sql, params, many, context)


def padded(values: Sequence[T], counts: Sequence[int]) -> list[T]:
    """Return values with the last one repeated, up to the next of these counts: each count is a text, and a plan."""
    count = next(each for each in counts if each >= len(values))
    return [*values, *[values[-1]] * (count - len(values))]


class Cursor:
    """A driver's cursor that takes ``%s`` and ``%(name)s``, as Django's do. It is a block around one piece of work."""

    def __init__(self, connection: BaseDatabaseWrapper, raw: Any = None) -> None:
        self.db = connection
        #: The database's clock when its server was started or promoted, in microseconds: see ``server``.
        self.since_us: int = getattr(connection, "sqlsem_since_us", 0)
        self._run_on(raw or connection.connection.cursor())

    def _run_on(self, raw: Any) -> None:
        self._raw = raw
        #: Returns the next row, or ``None``.
        self.fetchone: Callable[[], Any] = raw.fetchone

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc_info: object) -> None:
        if kind is None:
            self.close()
            return
        # SQLite keeps the write lock of a half-read statement until its cursor is closed, and the traceback of an
        # interrupted thread keeps the cursor. The connection may be gone: that is not what it died of.
        with contextlib.suppress(DatabaseError, driver_errors(self.db), OSError):
            self.close()

    def execute(self, sql: str, parameters: Mapping[str, Any] | Sequence[Any] | None = None) -> None:
        """Run one statement. Raises the driver's errors, which the session translates."""
        self._raw.execute(sql, parameters)

    def fetchall(self) -> list[Any]:
        """Return the rows that are left."""
        return list(self._raw.fetchall())

    @property
    def rowcount(self) -> int:
        """How many rows the statement changed."""
        return int(self._raw.rowcount)

    @property
    def lastrowid(self) -> int:
        """The argument of MySQL's ``LAST_INSERT_ID()`` in the statement; 0 if it had none."""
        return int(self._raw.lastrowid or 0)

    def close(self) -> None:
        """Let go of the statement."""
        self._raw.close()


class PostgreSQLCursor(Cursor):
    """One that has its statements prepared, which Django's does not."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._psycopg2 = not hasattr(connection.connection, "pgconn")
        if self._psycopg2:
            super().__init__(connection)
            return
        # A prepared statement belongs to a session, and behind a pooler the next one may be another's.
        self._prepare = getattr(connection, "sqlsem_pooled", False) is False
        self._cursor_for = _cursors_by_text(connection)
        super().__init__(connection, self._cursor_for(""))

    def execute(self, sql: str, parameters: Mapping[str, Any] | Sequence[Any] | None = None) -> None:
        """Run one statement, prepared."""
        if self._psycopg2:
            self._raw.execute(sql, parameters)
        else:
            self._run_on(self._cursor_for(sql))
            self._raw.execute(sql, parameters, prepare=self._prepare and parameters is not None)

    def close(self) -> None:
        """Do nothing: it has fetched everything, and closing it would only mark it."""


def _cursors_by_text(connection: BaseDatabaseWrapper) -> Callable[[str], Any]:
    """Return what finds the cursor of psycopg that ran a text before: it knows how to read and write its values."""
    known: Callable[[str], Any] | None = getattr(connection, "sqlsem_cursors", None)
    if known is None:
        import psycopg

        raw = connection.connection
        known = functools.lru_cache(maxsize=_TEXTS)(lambda _text: psycopg.Cursor(raw))
        connection.sqlsem_cursors = known  # type: ignore[attr-defined]
    return known


class SQLiteCursor(Cursor):
    """One that takes parameters by name in the style of all others."""

    def execute(self, sql: str, parameters: Mapping[str, Any] | Sequence[Any] | None = None) -> None:
        """Run one statement."""
        if parameters is None:
            self._raw.execute(sql)
        else:
            self._raw.execute(_sqlite_style(sql), parameters)


class DjangoCursor(Cursor):
    """Django's."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        super().__init__(connection, connection.cursor())


#: What a statement may run on: a cursor of our own session, or of the caller's or the operator's connection.
AnyCursor: TypeAlias = Cursor | CursorWrapper

_NAMED: Final = re.compile(r"%\((\w+)\)s")


def driver_errors(connection: BaseDatabaseWrapper) -> type[Exception]:
    """Return the class of a driver's own errors."""
    driver: Any = connection.Database  # type: ignore[attr-defined]
    found: type[Exception] = driver.Error
    return found


@functools.lru_cache(maxsize=512)
def _sqlite_style(sql: str) -> str:
    return _NAMED.sub(r":\1", sql).replace("%s", "?")
