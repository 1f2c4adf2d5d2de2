"""The drivers' own cursors: what a lock does takes two statements, and Django's wrappers would cost more than those.

The types of a statement's parameters, as SQL Server's drivers are told them.

Drivers that are not told send each text as one that is as long as its value (``nvarchar(7)``). A server then prepares
the statement anew, and keeps one more plan of it, for each combination of lengths. And what a NULL is they ask it.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from django.db import Error
from django.db.backends.utils import CursorWrapper

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


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


T = TypeVar("T")

_NAMED: Final = re.compile(r"%\((\w+)\)s")

#: How a transaction begins where the connection stays in autocommit for the driver. SQLite takes its only write lock.
BEGIN: Final = {"postgresql": "BEGIN ISOLATION LEVEL READ COMMITTED", "mysql": "BEGIN", "sqlite": "BEGIN IMMEDIATE"}


class Cursor:
    """A driver's cursor that takes ``%s`` and ``%(name)s``, as Django's do. It is used for one piece of work."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.db = connection
        #: The database's clock when its server was started or promoted, in microseconds: see ``incarnation``.
        self.since_us: int = getattr(connection, "sqlsem_since_us", 0)
        self._raw: Any = self._open(connection)

    def _open(self, connection: BaseDatabaseWrapper) -> Any:
        return connection.connection.cursor()

    def execute(self, sql: str, parameters: Mapping[str, Any] | Sequence[Any] | None = None) -> None:
        """Run one statement. Raises the driver's errors, which the session translates."""
        self._raw.execute(sql, parameters)

    def fetchone(self) -> Any:
        """Return the next row, or ``None``."""
        return self._raw.fetchone()

    def fetchall(self) -> list[Any]:
        """Return the rows that are left."""
        return list(self._raw.fetchall())

    @property
    def rowcount(self) -> int:
        """How many rows the statement changed."""
        return int(self._raw.rowcount)

    def close(self) -> None:
        """Let go of the statement."""
        self._raw.close()


class _PostgreSQLCursor(Cursor):
    _psycopg2 = False

    def _open(self, connection: BaseDatabaseWrapper) -> Any:
        if not hasattr(connection.connection, "pgconn"):
            self._psycopg2 = True
            return connection.connection.cursor()
        import psycopg

        # A prepared statement belongs to a session, and behind a pooler the next one may be another's.
        self._prepare = getattr(connection, "sqlsem_pooled", False) is False
        return psycopg.Cursor(connection.connection)

    def execute(self, sql: str, parameters: Mapping[str, Any] | Sequence[Any] | None = None) -> None:
        if self._psycopg2:
            self._raw.execute(sql, parameters)
        else:
            self._raw.execute(sql, parameters, prepare=self._prepare and parameters is not None)

    def close(self) -> None:
        pass  # it has fetched everything; closing it would only mark it


class _SQLiteCursor(Cursor):
    def execute(self, sql: str, parameters: Mapping[str, Any] | Sequence[Any] | None = None) -> None:
        if parameters is None:
            self._raw.execute(sql)
        else:
            self._raw.execute(_sqlite_style(sql), parameters)


class _DjangoCursor(Cursor):
    def _open(self, connection: BaseDatabaseWrapper) -> Any:
        return connection.cursor()


class SQLServerCursor(Cursor):
    """Django's, and its drivers are told the types of all parameters."""

    _declared: Sequence[str] = ()

    def _open(self, connection: BaseDatabaseWrapper) -> Any:
        return connection.cursor()

    def execute(self, sql: str, parameters: Mapping[str, Any] | Sequence[Any] | None = None) -> None:
        if isinstance(parameters, Mapping):
            raise TypeError("SQL Server's drivers know no parameters by name.")
        values = list(parameters or ())
        self._raw.setinputsizes([size_of(each) for each in self._declared] or sizes_for(values))
        self._raw.execute(sql, values or None)

    def execute_declared(self, sql: str, parameters: Sequence[Any], declared: Sequence[str]) -> None:
        """Run one statement with the types of its parameters, where their values do not tell."""
        self._declared = declared
        try:
            self.execute(sql, parameters)
        finally:
            self._declared = ()


#: What a statement may run on: a cursor of our own session, or of the caller's or the operator's connection.
AnyCursor: TypeAlias = Cursor | CursorWrapper

_CURSORS: Final[dict[str, type[Cursor]]] = {
    "postgresql": _PostgreSQLCursor,
    "sqlite": _SQLiteCursor,
    "mysql": Cursor,
    "microsoft": SQLServerCursor,
}


@functools.lru_cache(maxsize=512)
def _sqlite_style(sql: str) -> str:
    return _NAMED.sub(r":\1", sql).replace("%s", "?")


@contextlib.contextmanager
def cursor_of(connection: BaseDatabaseWrapper) -> Iterator[Cursor]:
    """Yield a cursor of an open connection. The driver's errors come out as Django's."""
    driver: Any = connection.Database  # type: ignore[attr-defined]  # each wrapper class has its driver's module
    with connection.wrap_database_errors:
        cursor = _CURSORS.get(connection.vendor, _DjangoCursor)(connection)
        try:
            yield cursor
        except BaseException:
            # The connection may be gone, and that is not what it died of. What interrupts the thread here is not lost.
            with contextlib.suppress(Error, driver.Error, OSError):
                cursor.close()
            raise
        cursor.close()


def padded(values: Sequence[T], counts: Sequence[int]) -> list[T]:
    """Return values with the last one repeated, up to the next of these counts: each count is a text, and a plan."""
    count = next(each for each in counts if each >= len(values))
    return [*values, *[values[-1]] * (count - len(values))]


@contextlib.contextmanager
def limited(cursor: AnyCursor, seconds: float) -> Iterator[AnyCursor]:
    """Yield a cursor whose statements take no longer than that, where only the driver limits them; else the same.

    SQL Server's drivers count in whole seconds: it is the next lower one, and at least one.
    """
    connection: Any = cursor.db
    if connection.vendor != "microsoft":
        yield cursor
        return
    raw = connection.connection
    usual = raw.timeout
    with contextlib.ExitStack() as stack:
        try:
            raw.timeout = max(1, int(seconds))
            made = stack.enter_context(cursor_of(connection))  # it has its limit from the beginning
        finally:
            raw.timeout = usual
        yield made
