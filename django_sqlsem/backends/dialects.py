"""How each database tells the time and says a claim in SQL."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django_sqlsem import clocks

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

_PARAMETER: Final = re.compile(r"%\((\w+)\)s")


class Dialect:
    """Plain SQL that any database understands; ``{now}`` stands for its clock, in whole microseconds since 1970."""

    #: An expression, stable within one statement.
    now_sql: ClassVar[str] = ""
    #: Does ``UPDATE ... RETURNING`` tell what was claimed in the same round trip?
    returning: ClassVar[bool] = False
    #: Follows a sub-select that picks a slot, so that two claims never wait for one row.
    skip_locked: ClassVar[str] = ""
    #: Can an ``UPDATE`` pick its row by ``ORDER BY ... LIMIT 1`` itself?
    update_limit: ClassVar[bool] = False
    #: Begins and ends an insert of rows that may be there already; ``None``: a conflict is an IntegrityError.
    insert_ignore: ClassVar[tuple[str, str] | None] = None
    #: ``FROM`` of a query without a table.
    dual: ClassVar[str] = ""
    #: Two ways to lock the row that a query reads: after it, or after its table's name.
    for_update: ClassVar[str] = " FOR UPDATE"
    lock_hint: ClassVar[str] = ""
    free: ClassVar[str] = "({t}expires_us IS NULL OR {t}expires_us <= {{now}})"
    live: ClassVar[str] = "{t}expires_us > {{now}}"
    #: The clock that tokens follow.
    token_now: ClassVar[str] = "{now}"  # noqa: S105

    @property
    def boot_id(self) -> str:
        """This boot of the host, where the host's clock is the database's; else empty."""
        return ""

    def execute(self, cursor: CursorWrapper, sql: str, parameters: Mapping[str, Any]) -> None:
        """Run a statement; only the parameters that its text names are sent."""
        values = self.parameters() | dict(parameters)
        text, names = self._text(sql)
        cursor.execute(text, {name: values[name] for name in names} or None)

    def now(self, cursor: CursorWrapper) -> int:
        """Return the database's clock, in microseconds."""
        cursor.execute(f"SELECT {self.now_sql}{self.dual}")
        return int(cursor.fetchone()[0])

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that every statement may use."""
        return {"no": False, "boot_id": ""}

    def free_sql(self, table: str = "") -> str:
        """Return the condition that nobody holds a slot: free, or its lease has run out."""
        return self.free.format(t=table)

    def live_sql(self, table: str = "") -> str:
        """Return the condition that a slot's or a waiter's time has not run out."""
        return self.live.format(t=table)

    def _text(self, sql: str) -> tuple[str, Sequence[str]]:
        return _prepare(sql, self.now_sql)


@functools.lru_cache(maxsize=512)
def _prepare(sql: str, now: str) -> tuple[str, Sequence[str]]:
    text = sql.replace("{now}", now)
    return text, tuple(dict.fromkeys(_PARAMETER.findall(text)))


class PostgreSQL(Dialect):
    """PostgreSQL: everything in one statement."""

    # Within a transaction now() is the time it began; a claim asks what time it is.
    now_sql = "(EXTRACT(EPOCH FROM statement_timestamp()) * 1000000)::bigint"
    returning = True
    skip_locked = "FOR UPDATE OF s SKIP LOCKED"
    insert_ignore = ("INSERT INTO", " ON CONFLICT DO NOTHING")


class SQLite(Dialect):
    """SQLite: the host's boot clock is the database's clock, as all its users are on one host."""

    now_sql = "%(now)s"
    returning = True
    insert_ignore = ("INSERT INTO", " ON CONFLICT DO NOTHING")
    for_update = ""  # the transaction holds the only write lock
    # A row from before the last boot belongs to a process that cannot have survived it.
    free = "({t}expires_us IS NULL OR {t}expires_us <= {{now}} OR {t}boot_id <> %(boot_id)s)"
    live = "({t}expires_us > {{now}} AND {t}boot_id = %(boot_id)s)"
    # The boot clock starts anew; tokens must not.
    token_now = "%(wall)s"  # noqa: S105

    @property
    def boot_id(self) -> str:
        """This boot of this host."""
        return clocks.boot_id()

    def parameters(self) -> dict[str, Any]:
        """Return the boot clock and the boot's name."""
        return {
            "no": False,
            "now": clocks.boot_now_us(),
            "wall": time.time_ns() // 1000,
            "boot_id": clocks.boot_id(),
        }

    def now(self, cursor: CursorWrapper) -> int:
        """Return the host's boot clock, in microseconds."""
        return clocks.boot_now_us()


class MySQL(Dialect):
    """MySQL and MariaDB: ``UPDATE ... ORDER BY ... LIMIT 1``, and a second statement to read what it took."""

    # UNIX_TIMESTAMP() would go through the session's time zone, where an autumn hour happens twice.
    now_sql = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    update_limit = True
    insert_ignore = ("INSERT IGNORE INTO", "")


class Oracle(Dialect):
    """Oracle: portable statements, and its own clock."""

    now_sql = (
        "ROUND((EXTRACT(DAY FROM (SYS_EXTRACT_UTC(SYSTIMESTAMP) - TIMESTAMP '1970-01-01 00:00:00')) * 86400"
        " + EXTRACT(HOUR FROM SYS_EXTRACT_UTC(SYSTIMESTAMP)) * 3600"
        " + EXTRACT(MINUTE FROM SYS_EXTRACT_UTC(SYSTIMESTAMP)) * 60"
        " + EXTRACT(SECOND FROM SYS_EXTRACT_UTC(SYSTIMESTAMP))) * 1000000)"
    )
    dual = " FROM DUAL"


class SQLServer(Dialect):
    """SQL Server, where ``SQLSEM`` asks for rows: portable statements, and its own clock."""

    now_sql = "DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME())"
    for_update = ""
    lock_hint = " WITH (UPDLOCK, ROWLOCK)"


_DIALECTS: Final[dict[str, type[Dialect]]] = {
    "postgresql": PostgreSQL,
    "sqlite": SQLite,
    "mysql": MySQL,
    "oracle": Oracle,
    "microsoft": SQLServer,
}


@functools.cache
def _dialect(vendor: str) -> Dialect:
    from django.core.exceptions import ImproperlyConfigured

    if vendor not in _DIALECTS:
        raise ImproperlyConfigured(f"No semaphores on {vendor!r} databases; there are for {', '.join(_DIALECTS)}.")
    return _DIALECTS[vendor]()


def dialect_for(connection: BaseDatabaseWrapper) -> Dialect:
    """Return the dialect of a connection. Raises ``ImproperlyConfigured`` for an unknown vendor."""
    return _dialect(connection.vendor)
