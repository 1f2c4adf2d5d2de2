"""How each database tells the time and says a claim in SQL.

Since when a database server is known: after its start or promotion nothing runs out for one lease.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from django.db.models.constants import OnConflict

from django_sqlsem.core import clocks
from django_sqlsem.database.beacons import MySQLBeacon, PostgreSQLBeacon
from django_sqlsem.database.server import read

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.database.cursors import AnyCursor


_PARAMETER: Final = re.compile(r"%\((\w+)\)s")
#: A word that dialects spell each in their way: ``{now}``, or ``{w.live}`` of the table that is called ``w``.
_WORD: Final = re.compile(r"\{(\w\.)?(\w+)\}")
#: The words, by the attributes of ``Dialect`` that say them.
_WORDS: Final = {
    "now": "now_sql",
    "moment": "moment_sql",
    "token_now": "token_now",
    "free": "free",
    "live": "live",
    "live_now": "live_now",
    "waits": "waits",
    "alive": "alive",
    "lock": "for_update",
    "lock_hint": "lock_hint",
    "skip_locked": "lock_skipping",
    "pick": "skip_locked",
    "unflushed": "unflushed",
    "rebooted": "rebooted",
}

# What is looked for by the first column of an index that is not the table's own order: see ``_sought``.
_BY_KEY: Final = r"(?:\w+\.)?(?:semaphore_key|ticket|wait_id) (?:= |IN \(%)"
_READ: Final = re.compile(rf"(\bsqlsem_(?:slot|waiter|claim|wait)\b(?: \w)?)(?= (?:WHERE|ON) {_BY_KEY})")
_WRITTEN: Final = re.compile(
    rf"^((?:UPDATE|DELETE FROM) (sqlsem_(?:slot|waiter|claim|wait))\b(?:(?! WHERE ).)*)(?= WHERE {_BY_KEY})"
)


class Dialect:
    """Plain SQL that any database understands.

    A statement is a text with words in braces. ``{now}`` is the database's clock, in whole microseconds since 1970;
    the others are attributes of the dialect, where ``{t}`` stands for the table that a word is about.
    """

    #: An expression, stable within one statement.
    now_sql: ClassVar[str] = ""
    #: Does ``UPDATE ... RETURNING`` tell what was claimed in the same round trip?
    returning: ClassVar[bool] = False
    #: Follows a sub-select that picks a slot ``s``, so that two claims never wait for one row.
    skip_locked: ClassVar[str] = ""
    #: Follows a select that locks what it reads and passes over what is locked.
    lock_skipping: ClassVar[str] = ""
    #: Does a locking select with a limit leave alone what is beyond the limit, whatever its order?
    limits_locks: ClassVar[bool] = False
    #: Is a transaction that has written the only writer of the whole database?
    one_writer: ClassVar[bool] = False
    #: Can one statement write several tables and return what it wrote?
    writing_ctes: ClassVar[bool] = False
    #: One more column that makes the statement's own commit go without a flush.
    unflushed: ClassVar[str] = ""
    #: Does it take a list as one parameter?
    arrays: ClassVar[bool] = False
    #: Does the server wake sessions that listen?
    notifies: ClassVar[bool] = False
    #: Can an ``UPDATE`` pick its row by ``ORDER BY ... LIMIT 1`` itself?
    update_limit: ClassVar[bool] = False
    #: Begins and ends an insert of rows that may be there already; ``None``: a conflict is an IntegrityError.
    insert_ignore: ClassVar[tuple[str, str] | None] = None
    #: ``FROM`` of a query without a table.
    dual: ClassVar[str] = ""
    #: Two ways to lock the row that a query reads: after it, or after its table's name.
    for_update: ClassVar[str] = " FOR UPDATE"
    lock_hint: ClassVar[str] = ""
    #: Is a row to be written before it is read, so that it is surely locked?
    locks_by_writing: ClassVar[bool] = False
    # For one lease after the server's start nothing has run out.
    #: Nobody holds a slot: it is free, or its lease has run out.
    free: ClassVar[str] = "({t}expires_us IS NULL OR ({t}expires_us <= {now} AND {t}lease_us <= {now} - %(since)s))"
    #: The time of a slot or a waiter has not run out.
    live: ClassVar[str] = "{t}expires_us > {now}"
    #: A waiter may be granted: it is alive, and not away.
    waits: ClassVar[str] = "{{t}live} AND {t}away = %(no)s"
    #: One more condition, that a row is of an earlier boot of the host, where that tells.
    rebooted: ClassVar[str] = ""
    #: A condition on ``{process_id}``: see ``beacons``.
    dead: ClassVar[str | None] = None
    #: How a transaction keeps others from taking a slot: by a lock of its row that its renewals pass, by the lock of a
    #: row beside it, or as the database's only writer; empty: it cannot.
    fence: ClassVar[Literal["", "key share", "sibling", "writer"]] = ""
    #: The clock of this very moment, where ``now_sql`` says when the statement began.
    moment_sql: ClassVar[str] = "{now}"
    #: The clock that tokens follow.
    token_now: ClassVar[str] = "{now}"  # noqa: S105

    @property
    def boot_id(self) -> str:
        """This boot of the host, where the host's clock is the database's; else empty."""
        return ""

    def execute(self, cursor: AnyCursor, sql: str, parameters: Mapping[str, Any]) -> None:
        """Run a statement; only the parameters that its text names are sent."""
        text, names = _prepare(sql, self)
        values = {**self.parameters(), "since": getattr(cursor, "since_us", 0), "witness": False, **parameters}
        if "arrived_us" in parameters:
            # At this very moment: a statement may have stood in line for the database for a while.
            values["age_us"] = max(0, clocks.boot_now_us() - parameters["arrived_us"])
        self.send(cursor, text, {name: values[name] for name in names})

    def expand(self, sql: str) -> str:
        """Return a text with its words spelled out."""

        def spelled(word: re.Match[str]) -> str:
            if word[2] not in _WORDS:
                return word[0]
            text: str = getattr(self, _WORDS[word[2]])
            return self.expand(text.replace("{t}", word[1] or ""))

        return _WORD.sub(spelled, sql)

    def send(self, cursor: AnyCursor, text: str, values: Mapping[str, Any]) -> None:
        """Run a statement with its parameters, as the driver takes them."""
        cursor.execute(text, values or None)

    def now(self, cursor: AnyCursor) -> int:
        """Return the database's clock, in microseconds."""
        cursor.execute(f"SELECT {self.now_sql}{self.dual}")
        return int(cursor.fetchone()[0])

    def token_clock(self, now: int) -> int:
        """Return the clock that tokens follow, when the database's says ``now``."""
        return now

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that every statement may use."""
        return {"no": False, "boot_id": ""}

    def free_sql(self, table: str = "") -> str:
        """Return the condition that nobody holds a slot: free, or its lease has run out."""
        return self.free.replace("{t}", table)

    def waits_sql(self, table: str = "") -> str:
        """Return the condition that a waiter may be granted: alive, and not away."""
        return self.waits.replace("{t}", table)

    @property
    def live_now(self) -> str:
        """As ``live``, by the clock of this very moment."""
        return self.live.replace("{now}", self.moment_sql)

    @property
    def alive(self) -> str:
        """One more condition: that the process of a waiter is not known to be dead; or nothing."""
        dead = self.dead_sql("{t}")
        return f" AND (%(witness)s = %(no)s OR NOT ({dead}))" if dead else ""

    def dead_sql(self, table: str) -> str:
        """Return the condition that the beacon of a row's process is out; empty where SQL cannot tell."""
        if self.dead is None:
            return ""
        return f"{table}beacon AND {self.dead.replace('{process_id}', f'{table}process_id')}"

    def live_sql(self, table: str = "") -> str:
        """Return the condition that a slot's or a waiter's time has not run out."""
        return self.live.replace("{t}", table)


@functools.lru_cache(maxsize=512)
def _prepare(sql: str, dialect: Dialect) -> tuple[str, Sequence[str]]:
    text = " ".join(dialect.expand(sql).split())
    return text, tuple(dict.fromkeys(_PARAMETER.findall(text)))


@functools.lru_cache(maxsize=512)
def positional(text: str) -> tuple[str, Sequence[str]]:
    """Return a text with its parameters in order in place of names, and those names."""
    return _PARAMETER.sub("%s", text), tuple(_PARAMETER.findall(text))


@functools.lru_cache(maxsize=512)
def _sought(text: str) -> str:
    """Have SQL Server seek rows by an index: it would scan a small table, and wait for the rows of all other names."""
    text = _WRITTEN.sub(r"\1 FROM \2 WITH (ROWLOCK, FORCESEEK)", text)
    return _READ.sub(r"\1 WITH (FORCESEEK)", text)


class PostgreSQL(Dialect):
    """PostgreSQL: everything in one statement."""

    # Within a transaction now() is the time it began; a claim asks what time it is.
    # A float counts these microseconds exactly until the year 2255, and is faster than EXTRACT's numeric.
    now_sql = "(date_part('epoch', statement_timestamp()) * 1000000)::bigint"
    returning = True
    skip_locked = "FOR UPDATE OF s SKIP LOCKED"
    fence = "key share"
    moment_sql = "(date_part('epoch', clock_timestamp()) * 1000000)::bigint"
    lock_skipping = " FOR UPDATE SKIP LOCKED"
    limits_locks = True
    writing_ctes = True
    unflushed = ", set_config('synchronous_commit', 'off', true)"
    arrays = True
    dead = PostgreSQLBeacon.dead_sql
    notifies = True
    insert_ignore = ("INSERT INTO", " ON CONFLICT DO NOTHING")


class SQLite(Dialect):
    """SQLite: the host's boot clock is the database's clock, as all its users are on one host."""

    now_sql = "%(now)s"
    returning = True
    one_writer = True
    insert_ignore = ("INSERT INTO", " ON CONFLICT DO NOTHING")
    for_update = ""  # the transaction holds the only write lock
    fence = "writer"
    # A row from before the last boot belongs to a process that cannot have survived it.
    free = "({t}expires_us IS NULL OR {t}expires_us <= {now} OR {t}boot_id <> %(boot_id)s)"
    live = "({t}expires_us > {now} AND {t}boot_id = %(boot_id)s)"
    rebooted = " OR {t}boot_id <> %(boot_id)s"
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
            "now": clocks.host_now_us(),
            "wall": time.time_ns() // 1000,
            "boot_id": clocks.boot_id(),
        }

    def token_clock(self, now: int) -> int:
        """Return the wall clock: the boot clock starts anew."""
        return time.time_ns() // 1000

    def now(self, cursor: AnyCursor) -> int:
        """Return the host's boot clock, in microseconds."""
        return clocks.host_now_us()


class MySQL(Dialect):
    """MySQL and MariaDB: ``UPDATE ... ORDER BY ... LIMIT 1``, and a second statement to read what it took."""

    # UNIX_TIMESTAMP() would go through the session's time zone, where an autumn hour happens twice.
    now_sql = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    update_limit = True
    dead = MySQLBeacon.dead_sql
    lock_skipping = " FOR UPDATE SKIP LOCKED"
    fence = "sibling"
    # What was fenced is only taken after a look whether it still is: see ``backends.rows.fences``.
    free = (
        "({t}expires_us IS NULL OR ({t}expires_us <= {now} AND {t}lease_us <= {now} - %(since)s"
        " AND ({t}fenced IS NULL OR {t}fenced <> {t}token)))"
    )
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
    lock_hint = " WITH (UPDLOCK, ROWLOCK, FORCESEEK)"
    locks_by_writing = True  # whatever becomes of the hint

    def send(self, cursor: AnyCursor, text: str, values: Mapping[str, Any]) -> None:
        """Run a statement: its driver knows no parameters by name, and the session may have been told not to count."""
        statement, names = positional(_sought(text))
        if not statement.startswith("SELECT"):
            statement = f"SET NOCOUNT OFF; {statement}"
        cursor.execute(statement, [values[name] for name in names] or None)


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


_SEEN: Final = "SELECT seen_us FROM sqlsem_server WHERE identity = %s"


def _note(connection: BaseDatabaseWrapper) -> str:
    """Insert it unless it is there; no error, as that would break a transaction of the caller's."""
    insert = connection.ops.insert_statement(on_conflict=OnConflict.IGNORE)
    rest = connection.ops.on_conflict_suffix_sql([], OnConflict.IGNORE, [], [])
    return f"{insert} sqlsem_server (identity, seen_us) VALUES (%s, %s) {rest}"


def note_server(connection: BaseDatabaseWrapper) -> None:
    """Note, on a new connection, since when this life of the server is known, in microseconds of its own clock.

    For one lease after that nothing has run out: see ``Dialect.free``. Raises what the database raises.
    """
    with connection.cursor() as cursor:
        server = read(connection, cursor)
        if server is None:
            return
        cursor.execute(_SEEN, [server.identity])
        row = cursor.fetchone()
        if row is None:
            now = dialect_for(connection).now(cursor)
            # One that is new to a database with locks may have been promoted; the very first one has not.
            cursor.execute("SELECT COUNT(*) FROM sqlsem_server")
            seen = now if cursor.fetchone()[0] else server.started_us or now
            cursor.execute(_note(connection), [server.identity, seen])
            cursor.execute(_SEEN, [server.identity])  # another connection may have been first
            row = cursor.fetchone() or (seen,)
        connection.sqlsem_since_us = int(row[0])  # type: ignore[attr-defined]
        connection.sqlsem_since_of = connection.connection  # type: ignore[attr-defined]


def server_since(connection: BaseDatabaseWrapper) -> int:
    """Return the same of an ordinary connection, asking once after each connect."""
    connection.ensure_connection()
    if getattr(connection, "sqlsem_since_of", None) is not connection.connection:
        connection.sqlsem_since_us = 0  # type: ignore[attr-defined]
        note_server(connection)
        connection.sqlsem_since_of = connection.connection  # type: ignore[attr-defined]
    return int(getattr(connection, "sqlsem_since_us", 0))
