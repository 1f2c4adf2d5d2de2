"""The statements that write and prune the history: small ones, each with limits of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django_sqlsem.backends.dialects import dialect_for
from django_sqlsem.cursors import SQLServerCursor, padded
from django_sqlsem.odbc_types import TEXT
from django_sqlsem.session_settings import LOCK_TIMEOUT_MS, STATEMENT_TIMEOUT_MS

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.cursors import AnyCursor

T = TypeVar("T")

EVENTS: Final = "sqlsem_event"
MINUTES: Final = "sqlsem_minute"
TABLES: Final = (EVENTS, MINUTES)
EVENT_COLUMNS: Final = {
    "semaphore_key": "text",
    "name": "text",
    "at_us": "bigint",
    "until_us": "bigint",
    "what": "text",
    "slot": "int",
    "token": "bigint",
    "waited_us": "bigint",
    "held_us": "bigint",
    "host": "text",
    "pid": "bigint",
    "thread": "text",
    "label": "text",
    "user_name": "text",
    "done_by": "text",
    "detail": "text",
}
MINUTE_COLUMNS: Final = {
    "semaphore_key": "text",
    "minute_us": "bigint",
    "writer": "bigint",
    "until_us": "bigint",
    "granted": "int",
    "released": "int",
    "turned_away": "int",
    "lost": "int",
    "held_us": "bigint",
    "longest_hold_us": "bigint",
    "longest_wait_us": "bigint",
    "holds": "text",
    "waits": "text",
}
_IDENTITY: Final = ("semaphore_key", "minute_us", "writer")
_COUNTS: Final = [column for column in MINUTE_COLUMNS if column not in (*_IDENTITY, "until_us")]
#: A transaction writes so many rows of a table; and so many where they take several statements.
BATCH: Final = 100
SMALL_BATCH: Final = 20
#: A statement deletes so many.
PRUNED: Final = 200
#: SQL Server compiles each text: one has so many rows, or keys, always.
AT_ONCE: Final = 10
_SQL_SERVER: Final = {"text": TEXT, "bigint": "bigint", "int": "int"}
#: A lock is waited for no longer, in seconds.
LOCK_PATIENCE: Final = 0.2

_AGAIN: Final = {
    "postgresql": f" ON CONFLICT ({', '.join(_IDENTITY)}) DO UPDATE SET "
    + ", ".join(f"{column} = EXCLUDED.{column}" for column in _COUNTS),
    "mysql": " ON DUPLICATE KEY UPDATE " + ", ".join(f"{column} = VALUES({column})" for column in _COUNTS),
}
_AGAIN["sqlite"] = _AGAIN["postgresql"]


def is_mysql(connection: BaseDatabaseWrapper) -> bool:
    """Whether it is MySQL itself, which counts in whole seconds, and only for a session."""
    return connection.vendor == "mysql" and not getattr(connection, "mysql_is_mariadb", False)


def batch_of(connection: BaseDatabaseWrapper) -> int:
    """Return how many rows of a table to write in one transaction."""
    return BATCH if connection.vendor in ("postgresql", "mysql", "sqlite") else SMALL_BATCH


def limit(cursor: AnyCursor, seconds: float) -> None:
    """Inside a transaction: have no statement of it take longer than ``seconds``, and none wait long for a lock."""
    vendor = cursor.db.vendor
    if vendor == "postgresql":
        # A loss of the last moments of history, when the server crashes, is nobody's loss.
        cursor.execute(
            "SELECT set_config('lock_timeout', %s, true), set_config('statement_timeout', %s, true),"
            " set_config('synchronous_commit', 'off', true)",
            [f"{min(seconds, LOCK_PATIENCE) * 1000:.0f}ms", f"{seconds * 1000:.0f}ms"],
        )
    elif is_mysql(cursor.db):
        cursor.execute("SET SESSION innodb_lock_wait_timeout = 1, SESSION lock_wait_timeout = 1")
    elif vendor == "microsoft":
        cursor.execute(f"SET LOCK_TIMEOUT {LOCK_PATIENCE * 1000:.0f}")


def unlimit(cursor: AnyCursor) -> None:
    """After the transaction: lift the limits that would outlive it."""
    if is_mysql(cursor.db):
        usual = STATEMENT_TIMEOUT_MS // 1000 - 1
        cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {usual}, SESSION lock_wait_timeout = {usual}")
    elif cursor.db.vendor == "microsoft":
        cursor.execute(f"SET LOCK_TIMEOUT {LOCK_TIMEOUT_MS}")


def write_events(cursor: AnyCursor, rows: Sequence[Sequence[Any]], seconds: float) -> None:
    """Insert events."""
    _insert(cursor, EVENTS, EVENT_COLUMNS, rows, "", seconds)


def write_minutes(cursor: AnyCursor, rows: Sequence[Sequence[Any]], seconds: float) -> None:
    """Insert the counts of minutes, or write them anew."""
    again = _AGAIN.get(cursor.db.vendor)
    if again is None:
        _forget(cursor, rows)
    _insert(cursor, MINUTES, MINUTE_COLUMNS, rows, again or "", seconds)


def prune(cursor: AnyCursor, table: str, now_us: int, seconds: float) -> int:
    """Delete some rows whose time is over, and that nobody else is deleting. Return how many."""
    cursor.execute(_limited(cursor.db, _oldest(cursor.db, table), seconds), [now_us])
    ids = sorted(int(row[0]) for row in cursor.fetchall())
    if ids and cursor.db.vendor == "mysql":
        # By the primary key: who locks by another index meets who deletes half-way, and one of them is refused.
        places = ", ".join(["%s"] * len(ids))
        text = f"SELECT id FROM {table} WHERE id IN ({places}) ORDER BY id{_skipping(cursor.db)}"
        cursor.execute(_limited(cursor.db, text, seconds), ids)
        ids = [int(row[0]) for row in cursor.fetchall()]
    if not ids:
        return 0
    if cursor.db.vendor == "postgresql":
        cursor.execute(f"DELETE FROM {table} WHERE id = ANY(%s::bigint[])", [ids])
    else:
        if cursor.db.vendor == "microsoft":
            ids = padded(ids, (AT_ONCE, PRUNED))
        places = ", ".join(["%s"] * len(ids))
        cursor.execute(_limited(cursor.db, f"DELETE FROM {table} WHERE id IN ({places})", seconds), ids)
    return max(0, int(cursor.rowcount))  # another may have been faster where no row is passed over


def _oldest(connection: BaseDatabaseWrapper, table: str) -> str:
    where = "WHERE until_us <= %s ORDER BY until_us"
    if connection.vendor == "microsoft":
        return f"SELECT TOP ({PRUNED}) id FROM {table} WITH (READPAST, UPDLOCK, ROWLOCK) {where}"
    if connection.vendor == "oracle":
        return f"SELECT id FROM {table} {where} FETCH FIRST {PRUNED} ROWS ONLY"
    locked = "" if connection.vendor == "mysql" else _skipping(connection)
    return f"SELECT id FROM {table} {where} LIMIT {PRUNED}{locked}"


def _skipping(connection: BaseDatabaseWrapper) -> str:
    skips = connection.features.has_select_for_update_skip_locked
    return dialect_for(connection).lock_skipping if skips else ""


def _limited(connection: BaseDatabaseWrapper, sql: str, seconds: float) -> str:
    """Return a statement with its time limit, where that is a part of it."""
    if connection.vendor == "mysql" and not is_mysql(connection):
        return f"SET STATEMENT max_statement_time = {seconds:.3f} FOR {sql}"
    return sql


def _insert(
    cursor: AnyCursor, table: str, columns: dict[str, str], rows: Sequence[Sequence[Any]], again: str, seconds: float
) -> None:
    if not rows:
        return
    connection = cursor.db
    insert = f"INSERT INTO {table} ({', '.join(columns)})"
    one = f"({', '.join(['%s'] * len(columns))})"
    if connection.vendor == "postgresql":
        # One text for any number of rows: others would push the claims' out of those that are prepared.
        lists = ", ".join(f"%s::{kind}[]" for kind in columns.values())
        cursor.execute(
            f"{insert} SELECT * FROM unnest({lists}){again}", [list(column) for column in zip(*rows, strict=True)]
        )
    elif connection.vendor == "mysql":
        text = f"{insert} VALUES {', '.join([one] * len(rows))}{again}"
        cursor.execute(_limited(connection, text, seconds), [value for row in rows for value in row])
    elif isinstance(cursor, SQLServerCursor):
        _insert_on_sql_server(cursor, insert, one, columns, rows)
    else:
        for row in rows:
            cursor.execute(f"{insert} VALUES {one}{again}", list(row))


def _insert_on_sql_server(
    cursor: SQLServerCursor, insert: str, one: str, columns: dict[str, str], rows: Sequence[Sequence[Any]]
) -> None:
    # Of each NULL pyodbc would ask the server what it is: nothing that is written is -1, and no key is empty.
    numbers = [kind != "text" for kind in columns.values()]
    picked = [f"NULLIF({name}, -1)" if number else name for name, number in zip(columns, numbers, strict=True)]
    given = f"(VALUES {', '.join([one] * AT_ONCE)}) AS given ({', '.join(columns)})"
    text = f"{insert} SELECT {', '.join(picked)} FROM {given} WHERE semaphore_key <> ''"
    declared = [_SQL_SERVER[kind] for kind in columns.values()] * AT_ONCE
    for some in _some(rows):
        values = [-1 if value is None else value for row in some for value in row]
        values += [0 if number else "" for number in numbers] * (AT_ONCE - len(some))
        cursor.execute_declared(text, values, declared)


def _forget(cursor: AnyCursor, rows: Sequence[Sequence[Any]]) -> None:
    by_minute: dict[tuple[int, int], list[str]] = {}
    for key, minute_us, writer, *_ in rows:
        by_minute.setdefault((minute_us, writer), []).append(key)
    # Else it would scan a small table, and wait for the rows that others write.
    sought = f" FROM {MINUTES} WITH (ROWLOCK, FORCESEEK)" if cursor.db.vendor == "microsoft" else ""
    places = ", ".join(["%s"] * AT_ONCE)
    text = f"DELETE FROM {MINUTES}{sought} WHERE minute_us = %s AND writer = %s AND semaphore_key IN ({places})"
    for (minute_us, writer), keys in by_minute.items():
        for some in _some(keys):
            cursor.execute(text, [minute_us, writer, *padded(some, (AT_ONCE,))])


def _some(all_: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(all_), AT_ONCE):
        yield all_[start : start + AT_ONCE]
