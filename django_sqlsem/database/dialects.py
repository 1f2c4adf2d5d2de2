"""What differs from database to database: its clock, its SQL, the settings and the limits of our own connections.

No other module asks which vendor it is: it asks the dialect, as Django asks its ``DatabaseFeatures``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError
from django.db import IntegrityError
from django.db.models import BigIntegerField, Func

from django_sqlsem.conf import config
from django_sqlsem.core import clocks
from django_sqlsem.database import cursors, sockets
from django_sqlsem.database.errors import WrongClockError

if TYPE_CHECKING:
    from collections.abc import Generator

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

    from django_sqlsem.database.cursors import AnyCursor

#: A statement of ours that takes longer is given up, in milliseconds: below one heartbeat of the default lease.
STATEMENT_TIMEOUT_MS: Final = 4000
#: So long a statement of ours waits for a row on SQL Server, in milliseconds: it is repeated, one too slow is not.
LOCK_TIMEOUT_MS: Final = STATEMENT_TIMEOUT_MS - 1000
#: A transaction of ours in which nothing happens for so long, in seconds, is the server's to end: its process has
#: stopped, or its host has gone, and others wait for its rows. Less than they wait for a statement.
IDLE_TRANSACTION: Final = 3
#: MySQL knows only how long a session may be idle, in seconds: longer than the time after which ours are closed.
IDLE_SESSION: Final = 600
#: A server that has not answered for so long, in seconds, does not answer: it has stopped, or something in between has.
_ANSWER_TIMEOUT: Final = STATEMENT_TIMEOUT_MS // 1000 + 2

_POSTGRESQL: Final = {
    "connect_timeout": 5,
    "application_name": "sqlsem",
    # A peer that vanished is noticed in seconds, not after the kernel's two hours.
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 1,
    "keepalives_count": 4,
    "tcp_user_timeout": 5000,
}
#: Packages whose engines take connections from a pool of their own, and the options of such.
_POOLS: Final = ("django_db_geventpool", "dj_db_conn_pool")
_POOL_OPTIONS: Final = ("pool", "MAX_CONNS", "REUSE_CONNS")
#: The drivers of SQL Server limit no login, and mssql-django tries one again for half a minute.
_SQL_SERVER: Final = {"connection_timeout": 5, "connection_retries": 0}
#: An alias may give its own statements more time, in seconds, but a silent server is to be found out.
LONGEST_ANSWER: Final = 30
_MYSQL: Final = {"connect_timeout": 5, "read_timeout": _ANSWER_TIMEOUT, "write_timeout": _ANSWER_TIMEOUT}
#: What is only for people waits for a lock no longer, in seconds.
LOCK_PATIENCE: Final = 0.2
#: The first key of the advisory locks of PostgreSQL's beacons, "sqls" in ASCII, so that an operator knows them. The
#: form with two keys has a space of its own, and most programs use the other. The second key is 32 bits of the process
#: id: of two of our processes with the same one, the later has no beacon. No collision makes anyone look dead.
BEACON_CLASS: Final = 0x73716C73
_BEACON_KEYS: Final = f"{BEACON_CLASS}, ('x' || substr({{process_id}}, 1, 8))::bit(32)::int"


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of a database server.

    ``identity`` is the same for every session of it, and changes with every start and every promotion. ``started_us``
    is when it was started, in microseconds since 1970 by its own clock, ``None`` if that cannot be known. A standby
    that was promoted may have been started long before: who meets an identity that is new must count from now.
    """

    identity: str
    started_us: int | None


class SessionLock(NamedTuple):
    """A lock that a server ties to a session."""

    #: Selects the session's number; and what its driver says it is.
    session: str
    driver: Callable[[Any], int]
    #: Selects the session's number, and that of the session that has the lock.
    look: str
    take: str
    #: Ends a session.
    end: str
    #: Whether there are several servers, each with locks of its own.
    several: Callable[[CursorWrapper], bool] = lambda cursor: False


class BriefLimits(NamedTuple):
    """Statements that limit one short transaction: before it begins, as its first, and after it has ended."""

    before: str = ""
    first: str = ""
    after: str = ""


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
    "unpaused": "unpaused",
    "operator": "operator",
    "settled": "settled",
    "lock": "for_update",
    "lock_hint": "lock_hint",
    "skip_locked": "lock_skipping",
    "limit": "limit",
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


#: How a transaction keeps others from taking a slot: see ``Dialect.fence``.
Fence: TypeAlias = Literal["", "key share", "sibling", "writer"]


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
    #: Can it insert, too?
    inserting_ctes: ClassVar[bool] = False
    #: One more column that makes the statement's own commit go without a flush.
    unflushed: ClassVar[str] = ""
    #: Does it take a list as one parameter?
    arrays: ClassVar[bool] = False
    #: Does the server wake sessions that listen?
    notifies: ClassVar[bool] = False
    #: Ends a select of slots that has no use for more than are wanted, where that may stand beside a lock.
    limit: ClassVar[str] = ""
    #: Can an ``UPDATE`` pick its row by ``ORDER BY ... LIMIT 1`` itself?
    update_limit: ClassVar[bool] = False
    #: Begins and ends an insert of rows that may be there already; ``None``: a conflict is an IntegrityError.
    insert_ignore: ClassVar[tuple[str, str] | None] = None
    #: ``FROM`` of a query without a table.
    dual: ClassVar[str] = ""
    #: Two ways to lock the row that a query reads: after it, or after its table's name.
    for_update: ClassVar[str] = " FOR UPDATE"
    lock_hint: ClassVar[str] = ""
    #: Does a plain read lock what it reads, in a transaction whose isolation level is SERIALIZABLE?
    reads_may_lock: ClassVar[bool] = False
    #: Is a row to be written before it is read, so that it is surely locked?
    locks_by_writing: ClassVar[bool] = False
    # For one lease after the server's start nothing has run out; nor for one before it, if the clock was set back.
    #: Nobody holds a slot: it is free, or its lease has run out.
    free: ClassVar[str] = (
        "({t}expires_us IS NULL OR ({t}expires_us <= {now} AND {t}lease_us <= ABS({now} - %(since)s)))"
    )
    #: The time of a slot or a waiter has not run out.
    live: ClassVar[str] = "{t}expires_us > {now}"
    #: A waiter may be granted: it is alive, and not away.
    waits: ClassVar[str] = "{{t}live} AND {t}away = %(no)s"
    #: A semaphore may grant: no operator has paused it, or the time of that has passed.
    unpaused: ClassVar[str] = "({t}paused = %(no)s OR {t}paused_until_us <= {token_now})"
    #: An operator's number of slots, unless its time has passed.
    operator: ClassVar[str] = "CASE WHEN {t}slots_until_us <= {token_now} THEN NULL ELSE {t}operator_slots END"
    #: A semaphore's slots are open and closed as they should be: see ``exclusive.settle``.
    settled: ClassVar[str] = (
        "({t}shrinking = %(no)s AND ({t}operator_slots IS NULL OR {t}slots_until_us IS NULL"
        " OR {t}slots_until_us > {token_now}))"
    )
    #: One more condition, that a row is of an earlier boot of the host, where that tells.
    rebooted: ClassVar[str] = ""
    #: A condition on ``{process_id}``: see ``beacons``.
    dead: ClassVar[str | None] = None
    #: How a transaction keeps others from taking a slot: by a lock of its row that its renewals pass, by the lock of a
    #: row beside it, or as the database's only writer; empty: it cannot.
    fence: ClassVar[Fence] = ""
    #: The clock of this very moment, where ``now_sql`` says when the statement began.
    moment_sql: ClassVar[str] = "{now}"
    #: The clock that tokens follow.
    token_now: ClassVar[str] = "{now}"  # noqa: S105
    #: How a transaction begins where the driver stays in autocommit; empty: it is Django's to begin.
    begin: ClassVar[str] = ""
    #: What its statements run on.
    cursor: ClassVar[type[cursors.Cursor]] = cursors.DjangoCursor
    #: Does the driver take parameters in order alone, not by name?
    positional: ClassVar[bool] = False
    #: Do names lie on several servers, so that a statement is about one name alone, and names it?
    sharded: ClassVar[bool] = False
    #: Does the server compile each text anew, so that there should be few of them?
    fixed_texts: ClassVar[bool] = False
    #: Is the database a file, which the processes of one host share?
    in_a_file: ClassVar[bool] = False
    #: By what others see that a session stands.
    session_lock: ClassVar[SessionLock | None] = None

    # Our own connections.

    def adapt(self, options: dict[str, Any]) -> None:
        """Change an alias's options into those of a connection that keeps locks; what the user chose is kept."""

    def connect(self, connect: Callable[[], Any], settings: Mapping[str, Any]) -> Any:
        """Return the driver's connection that ``connect`` makes, limited besides its settings."""
        return connect()

    def incarnation(self, cursor: CursorWrapper) -> Incarnation | None:
        """Ask a session which life of its server it is on; ``None`` for SQLite, and where that cannot be asked."""
        return None

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        """Set the limits of a fresh session. Raises what the database raises."""

    def among_writers(self, connection: BaseDatabaseWrapper) -> bool:
        """Whether other nodes of the server's cluster are written to as well: its row locks keep none of those out."""
        return False

    def catch_up(self, cursor: AnyCursor) -> bool:
        """Wait until the server knows what others of its cluster have committed. ``False``: there are none."""
        return False

    def limits(self, connection: BaseDatabaseWrapper, seconds: float) -> BriefLimits:
        """Return how no statement of one transaction takes longer than that, nor waits long for a lock."""
        return BriefLimits()

    @contextlib.contextmanager
    def limited(self, connection: BaseDatabaseWrapper, seconds: float) -> Iterator[None]:
        """Limit the statements that are sent meanwhile, where only the driver does so."""
        yield

    def shortest(self, connection: BaseDatabaseWrapper) -> float:
        """Return the shortest time that a statement can be limited to, in seconds."""
        return 0.15

    # Statements.

    @property
    def boot_id(self) -> str:
        """This boot of the host, where the host's clock is the database's; else empty."""
        return ""

    def execute(self, cursor: AnyCursor, sql: str, parameters: Mapping[str, Any]) -> None:
        """Run a statement; only the parameters that its text names are sent."""
        text, names = _prepare(sql, self)
        values = {**self.parameters(), "since": getattr(cursor, "since_us", 0), "witness": False, **parameters}
        if "age_us" in names and "arrived_us" in parameters:
            # At this very moment: a statement may have waited for the database.
            values["age_us"] = max(0, clocks.boot_now_us() - parameters["arrived_us"])
        if self.positional:
            cursor.execute(text, [values[name] for name in names] or None)
        else:
            cursor.execute(text, {name: values[name] for name in names} or None)

    def prepared(self, sql: str) -> tuple[str, Sequence[str]]:
        """Return a statement as it is sent, and the names of its parameters, each once."""
        text = " ".join(self.expand(sql).split())
        return text, tuple(dict.fromkeys(_PARAMETER.findall(text)))

    def expand(self, sql: str) -> str:
        """Return a text with its words spelled out."""

        def spelled(word: re.Match[str]) -> str:
            if word[2] not in _WORDS:
                return word[0]
            text: str = getattr(self, _WORDS[word[2]])
            return self.expand(text.replace("{t}", word[1] or ""))

        return _WORD.sub(spelled, sql)

    def insert_missing(self, cursor: AnyCursor, row: str, parameters: Mapping[str, Any]) -> bool:
        """Insert a row, ``table (columns) VALUES (...)``, unless it is there. Return whether it was inserted."""
        begin, end = self.insert_ignore or ("INSERT INTO", "")
        driver: Any = cursor.db
        try:
            self.execute(cursor, f"{begin} {row}{end}", parameters)
        except (IntegrityError, driver.Database.IntegrityError):
            if self.insert_ignore:
                raise
            return False
        return self.insert_ignore is None or cursor.rowcount > 0

    def clock(self, *, unix: bool) -> tuple[str, list[Any]]:
        """Return the clock as an expression of the ORM's, and its parameters; ``unix``: the one that tokens follow."""
        return self.now_sql, []

    def now(self, cursor: AnyCursor) -> int:
        """Return the database's clock, in microseconds."""
        cursor.execute(f"SELECT {self.now_sql}{self.dual}")
        return int(cursor.fetchone()[0])

    def skew(self, cursor: AnyCursor) -> tuple[float, float]:
        """Return by how many seconds the database's clock is ahead of this host's, and how long it took to ask."""
        before = time.time()
        now = self.now(cursor) / 1e6
        after = time.time()
        return now - (before + after) / 2, after - before

    @contextlib.contextmanager
    def isolated(self, connection: BaseDatabaseWrapper, level: str) -> Iterator[None]:
        """Use this isolation level within, where what others have changed keeps readers waiting at the usual one."""
        yield

    def token_clock(self, now: int) -> int:
        """Return the clock that tokens follow, when the database's says ``now``."""
        return now

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that every statement may use."""
        return {"no": False, "boot_id": ""}

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


@functools.lru_cache(maxsize=512)
def _prepare(sql: str, dialect: Dialect) -> tuple[str, Sequence[str]]:
    return dialect.prepared(sql)


@functools.lru_cache(maxsize=512)
def positional(text: str) -> tuple[str, Sequence[str]]:
    """Return a text with its parameters in order in place of names, and those names."""
    return _PARAMETER.sub("%s", text), tuple(_PARAMETER.findall(text))


def _sought(text: str) -> str:
    """Have SQL Server seek rows by an index: it would scan a small table, and wait for the rows of all other names."""
    text = _WRITTEN.sub(r"\1 FROM \2 WITH (ROWLOCK, FORCESEEK)", text)
    return _READ.sub(r"\1 WITH (FORCESEEK)", text)


#: Both may be called by any role. The clock is that of ``statement_timestamp()``.
_STARTED: Final = "(EXTRACT(EPOCH FROM pg_postmaster_start_time()) * 1000000)::bigint"
#: The timeline. A standby has no current position; promotion without a restart takes the server to a new timeline.
_TIMELINE: Final = (
    "CASE WHEN pg_is_in_recovery() THEN 'standby' ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END"
)


#: On Citus: for how long the clock's answer is good, how soon it should come, in microseconds, and how often it is
#: asked if it does not.
_CLOCK_FOR_US: Final = 10_000_000
_CLOCK_WITHIN_US: Final = 20_000
_CLOCK_TRIES: Final = 3


class OnPostgreSQL:
    """What its sessions are like, and its SQL, wherever the rows are."""

    begin: ClassVar[str] = "BEGIN ISOLATION LEVEL READ COMMITTED"
    cursor: ClassVar[type[cursors.Cursor]] = cursors.PostgreSQLCursor
    returning: ClassVar[bool] = True
    skip_locked: ClassVar[str] = "FOR UPDATE OF s SKIP LOCKED"
    lock_skipping: ClassVar[str] = " FOR UPDATE SKIP LOCKED"
    limit: ClassVar[str] = " LIMIT %(take)s"
    limits_locks: ClassVar[bool] = True
    writing_ctes: ClassVar[bool] = True
    arrays: ClassVar[bool] = True
    notifies: ClassVar[bool] = True
    insert_ignore: ClassVar[tuple[str, str] | None] = ("INSERT INTO", " ON CONFLICT DO NOTHING")
    #: Settings of how statements are planned.
    planning: ClassVar[Sequence[str]] = ()

    def adapt(self, options: dict[str, Any]) -> None:
        """Notice a peer that vanished, and be outside of any pool's count."""
        for name in _POOL_OPTIONS:
            options.pop(name, None)
        for name, value in _POSTGRESQL.items():
            options.setdefault(name, value)
        from django.db.backends.postgresql.psycopg_any import IsolationLevel

        options["isolation_level"] = IsolationLevel.READ_COMMITTED

    def connect(self, connect: Callable[[], Any], settings: Mapping[str, Any]) -> Any:
        """Have a driver that has no setting for it wait for ``_ANSWER_TIMEOUT`` at the most."""
        raw = connect()
        limit_waiting(raw)
        return raw

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        """Set limits, unless the session is a pooler's: another client may get it next, and would inherit them."""
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            if cursor.fetchone()[0] != connection.connection.info.backend_pid:
                connection.sqlsem_pooled = True  # type: ignore[attr-defined]
                return
            cursor.execute(f"SET statement_timeout = {STATEMENT_TIMEOUT_MS}")
            cursor.execute(f"SET idle_in_transaction_session_timeout = {IDLE_TRANSACTION * 1000}")
            cursor.execute("SET default_transaction_isolation = 'read committed'")
            if hasattr(connection.connection, "pgconn"):  # psycopg 3, where Django turns prepared statements off
                connection.connection.prepare_threshold = 5
            for setting in self.planning:
                cursor.execute(f"SET {setting}")

    def incarnation(self, cursor: CursorWrapper) -> Incarnation:
        """Return its start and its timeline; hosted servers without log positions start anew when promoted."""
        try:
            cursor.execute(f"SELECT {_STARTED}, {_TIMELINE}")
        except DatabaseError:
            cursor.execute(f"SELECT {_STARTED}, ''")
        started, timeline = cursor.fetchone()
        return Incarnation(f"{started}:{timeline}", int(started))

    def limits(self, connection: BaseDatabaseWrapper, seconds: float) -> BriefLimits:
        """Return limits of the transaction. What it writes is lost without harm when the server crashes."""
        return BriefLimits(
            first="SET LOCAL synchronous_commit = off;"
            f" SET LOCAL lock_timeout = {min(seconds, LOCK_PATIENCE) * 1000:.0f};"
            f" SET LOCAL statement_timeout = {seconds * 1000:.0f}"
        )


class PostgreSQL(OnPostgreSQL, Dialect):
    """PostgreSQL: everything in one statement."""

    # Within a transaction now() is the time it began; a claim asks what time it is.
    # A float counts these microseconds exactly until the year 2255, and is faster than EXTRACT's numeric.
    now_sql = "(date_part('epoch', statement_timestamp()) * 1000000)::bigint"
    moment_sql = "(date_part('epoch', clock_timestamp()) * 1000000)::bigint"
    fence = "key share"
    inserting_ctes = True
    unflushed = ", set_config('synchronous_commit', 'off', true)"
    #: Everything here is looked up by a key: planned once, by index, also while the tables are still empty. A scan by
    #: bitmap would read dead rows again at each look until they are vacuumed; an index scan marks them in the index.
    planning = ("plan_cache_mode = force_generic_plan", "enable_seqscan = off", "enable_bitmapscan = off")
    # A session's own lock never stands in its way, so it is told apart by a setting of the session.
    dead = (
        "(CASE WHEN length({process_id}) <> 32 OR translate({process_id}, '0123456789abcdef', '') <> '' THEN FALSE"
        " WHEN {process_id} = current_setting('sqlsem.beacon', TRUE) THEN FALSE"
        f" WHEN pg_try_advisory_lock_shared({_BEACON_KEYS}) THEN pg_advisory_unlock_shared({_BEACON_KEYS})"
        " ELSE FALSE END)"
    )
    # Asking takes it for an instant, shared, so that those who ask never see each other.
    session_lock = SessionLock(
        session="SELECT pg_backend_pid()",
        driver=lambda raw: int(raw.info.backend_pid),
        look="SELECT pg_backend_pid(), (SELECT min(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        " AND mode = 'ExclusiveLock' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        f" AND classid = {BEACON_CLASS} AND objid = %(unsigned)s AND objsubid = 2)",
        take=f"SELECT CASE WHEN pg_try_advisory_lock({BEACON_CLASS}, %(key)s)"
        " THEN set_config('sqlsem.beacon', %(process_id)s, FALSE) END",
        end="SELECT pg_terminate_backend(%(session)s)",
    )


class Citus(OnPostgreSQL, Dialect):
    """PostgreSQL with Citus: each name's rows are on one of several servers, and its statements are sent there.

    All clients connect to the coordinator. Its clock is a parameter: the servers' own clocks may differ, and Citus
    takes no clock in a CASE. There are no beacons, as other servers do not see the coordinator's sessions; no fences,
    as they commit before it does; and no plan is generic, as it leads to one server.
    """

    now_sql = moment_sql = "%(now)s"
    sharded = True

    def execute(self, cursor: AnyCursor, sql: str, parameters: Mapping[str, Any]) -> None:
        """Run a statement at the coordinator's time."""
        super().execute(cursor, sql, {"now": self.now(cursor), **parameters})

    def clock(self, *, unix: bool) -> tuple[str, list[Any]]:
        """Return the clock where the statement is one of the ORM's."""
        return PostgreSQL.now_sql, []

    def now(self, cursor: AnyCursor) -> int:
        """Return the coordinator's clock: as it was when it was asked last, and what has passed since.

        It is never ahead, and behind by no more than an answer takes, which a holder's margin covers.
        """
        db: Any = cursor.db
        session, there, here = getattr(db, "sqlsem_clock", (None, 0, 0))
        if session is not db.connection or clocks.boot_now_us() - here > _CLOCK_FOR_US:
            found: list[tuple[int, int, int]] = []
            while not found or (min(found)[0] > _CLOCK_WITHIN_US and len(found) < _CLOCK_TRIES):
                asked = clocks.boot_now_us()
                cursor.execute(f"SELECT {PostgreSQL.moment_sql}")
                there, here = int(cursor.fetchone()[0]), clocks.boot_now_us()
                found.append((here - asked, there, here))
            _took, there, here = min(found)
            db.sqlsem_clock = db.connection, there, here
        return there + clocks.boot_now_us() - here


class SQLite(Dialect):
    """SQLite: the host's boot clock is the database's clock, as all its users are on one host."""

    now_sql = "%(now)s"
    begin = "BEGIN IMMEDIATE"  # it takes the only write lock
    cursor = cursors.SQLiteCursor
    in_a_file = True
    limit = " LIMIT %(take)s"
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
        return clocks.boot_id()

    def parameters(self) -> dict[str, Any]:
        return {
            "no": False,
            "now": clocks.host_now_us(),
            "wall": time.time_ns() // 1000,
            "boot_id": clocks.boot_id(),
        }

    def token_clock(self, now: int) -> int:
        """Return the wall clock: the boot clock starts anew."""
        return time.time_ns() // 1000

    def clock(self, *, unix: bool) -> tuple[str, list[Any]]:
        return "%s", [time.time_ns() // 1000 if unix else clocks.host_now_us()]

    def now(self, cursor: AnyCursor) -> int:
        return clocks.host_now_us()

    def adapt(self, options: dict[str, Any]) -> None:
        """Wait for nothing: SQLite's own busy handler sleeps up to 100 ms, and we look again sooner."""
        options["transaction_mode"] = "IMMEDIATE"
        options["timeout"] = 0

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        """Spare the flush where a log keeps the file sound: a loss of power undoes commits of processes it ended."""
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA journal_mode")
            if cursor.fetchone()[0] == "wal":
                cursor.execute("PRAGMA synchronous = NORMAL")


#: For how many seconds an address is known to lead to a node of a cluster, or to none, and a node to have the time.
_KNOWN_FOR: Final = 60.0
#: By how many seconds a node's clock may differ from this host's, where each node judges leases by its own.
CLOCKS_AGREE: Final = 0.5
_among_writers: dict[tuple[Any, ...], tuple[bool, float]] = {}


#: What has a query wait until its node has caught up with the others: of Galera, and of group replication.
_WAITS_FOR_NODES: Final = {"wsrep_sync_wait": "1", "group_replication_consistency": "'BEFORE'"}


def several_writers(cursor: CursorWrapper) -> bool:
    """Whether a MySQL or MariaDB server is a node of a cluster whose other nodes are written to as well."""
    cursor.execute("SHOW GLOBAL VARIABLES WHERE Variable_name IN ('wsrep_on', 'group_replication_single_primary_mode')")
    found = {str(name).lower(): str(value).upper() in ("ON", "1") for name, value in cursor.fetchall()}
    return found.get("wsrep_on", False) or not found.get("group_replication_single_primary_mode", True)


def _shown(cursor: CursorWrapper, kind: str, name: str) -> Any:
    cursor.execute(f"SHOW GLOBAL {kind} LIKE '{name}'")
    row = cursor.fetchone()
    return row[1] if row else None


class MySQL(Dialect):
    """MySQL and MariaDB: ``UPDATE ... ORDER BY ... LIMIT 1``, which tells in one number what it took."""

    # UNIX_TIMESTAMP() would go through the session's time zone, where an autumn hour happens twice.
    now_sql = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    begin = "START TRANSACTION"  # in MariaDB's sql_mode ORACLE, BEGIN is a block
    cursor = cursors.Cursor
    limit = " LIMIT %(take)s"
    update_limit = True
    reads_may_lock = True
    dead = (
        "(CASE WHEN CHAR_LENGTH({process_id}) = 32 THEN IS_FREE_LOCK(CONCAT('sqlsem:', {process_id})) <=> 1"
        " ELSE FALSE END)"
    )
    lock_skipping = " FOR UPDATE SKIP LOCKED"
    fence = "sibling"
    # What was fenced is only taken after a look whether it still is: see ``backends.rows.fences``.
    free = (
        "({t}expires_us IS NULL OR ({t}expires_us <= {now} AND {t}lease_us <= ABS({now} - %(since)s)"
        " AND ({t}fenced IS NULL OR {t}fenced <> {t}token)))"
    )
    session_lock = SessionLock(
        session="SELECT CONNECTION_ID()",
        # The engine of MySQL's own driver gives it as an attribute.
        driver=lambda raw: int(raw.thread_id() if hasattr(raw, "thread_id") else raw.connection_id),
        look="SELECT CONNECTION_ID(), IS_USED_LOCK(%(name)s)",
        take="SELECT GET_LOCK(%(name)s, 0)",
        end="KILL %(session)s",
        several=several_writers,
    )
    insert_ignore = ("INSERT IGNORE INTO", "")

    def incarnation(self, cursor: CursorWrapper) -> Incarnation | None:
        """Return its start and its address. No commit is lost when a node of a cluster starts: they share a name."""
        if several_writers(cursor):
            self._compare_clocks(cursor)
            cursor.db.sqlsem_clustered = True
            cursor.db.sqlsem_ends_at = time.monotonic() + _KNOWN_FOR
            names = [_shown(cursor, "STATUS", "wsrep_cluster_state_uuid")]
            names.append(_shown(cursor, "VARIABLES", "group_replication_group_name"))
            return next((Incarnation(name, None) for name in names if name), None)
        for _ in range(10):
            cursor.execute("SELECT UNIX_TIMESTAMP()")
            before = int(cursor.fetchone()[0])
            uptime = int(_shown(cursor, "STATUS", "Uptime"))
            cursor.execute("SELECT UNIX_TIMESTAMP(), @@hostname, @@port, @@server_id")
            after, *address = cursor.fetchone()
            # Both count whole seconds of one clock: within one second of it the difference is always the same.
            if before == int(after):
                started = before - uptime
                return Incarnation(":".join(map(str, [*address, started])), started * 1_000_000)
        return None

    def _compare_clocks(self, cursor: CursorWrapper) -> None:
        skew, took = self.skew(cursor)
        if abs(skew) - took / 2 > CLOCKS_AGREE:
            raise WrongClockError(
                f"the clock of this node of a cluster is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this"
                f" host's, where {CLOCKS_AGREE} s are allowed. Each"
                " node judges leases by its own clock, so more may be let in than there are slots. Set the clocks of"
                " all nodes and hosts by NTP."
            )

    def among_writers(self, connection: BaseDatabaseWrapper) -> bool:
        """Ask on this connection, at most once a minute."""
        settings = connection.settings_dict
        address = (connection.alias, settings["HOST"], settings["PORT"])
        several, until = _among_writers.get(address, (False, 0.0))
        if time.monotonic() >= until:
            with connection.cursor() as cursor:
                several = several_writers(cursor)
            _among_writers[address] = several, time.monotonic() + _KNOWN_FOR
        return several

    def catch_up(self, cursor: AnyCursor) -> bool:
        """Have one query wait for what was committed on other nodes, as any would if the session said so all the time.

        That costs every query a round trip of the cluster.
        """
        if not getattr(cursor.db, "sqlsem_clustered", False):
            return False
        cursor.execute(f"SHOW SESSION VARIABLES WHERE Variable_name IN ({', '.join(map(repr, _WAITS_FOR_NODES))})")
        for name, usual in cursor.fetchall():
            cursor.execute(f"SET SESSION {name} = {_WAITS_FOR_NODES[name]}")
            cursor.execute("SELECT 1")
            cursor.execute(f"SET SESSION {name} = {usual if usual.isdigit() else repr(usual)}")
        return True

    def adapt(self, options: dict[str, Any]) -> None:
        for name, value in _MYSQL.items():
            options.setdefault(name, value)
        options["isolation_level"] = "read committed"

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        """Set limits. A lock wait that ends is repeated, a statement that takes too long is not: so it ends sooner."""
        seconds = STATEMENT_TIMEOUT_MS // 1000
        with connection.cursor() as cursor:
            cursor.execute(_row_locks(max(1, seconds - 1)))
            if _is_mariadb(connection):
                cursor.execute(
                    f"SET SESSION max_statement_time = {seconds}, idle_transaction_timeout = {IDLE_TRANSACTION}"
                )
            else:
                cursor.execute(f"SET SESSION wait_timeout = {IDLE_SESSION}")

    def limits(self, connection: BaseDatabaseWrapper, seconds: float) -> BriefLimits:
        """Return limits of the session, as there are no others; MySQL itself limits only waits for locks."""
        usual = STATEMENT_TIMEOUT_MS // 1000
        if _is_mariadb(connection):
            statements = "SET SESSION max_statement_time = "
            return BriefLimits(before=f"{statements}{seconds:.3f}", after=f"{statements}{usual}")
        return BriefLimits(before=_row_locks(1), after=_row_locks(max(1, usual - 1)))

    def shortest(self, connection: BaseDatabaseWrapper) -> float:
        """Return a little more than MySQL's shortest; it counts in whole seconds."""
        return super().shortest(connection) if _is_mariadb(connection) else 1.2


def _is_mariadb(connection: BaseDatabaseWrapper) -> bool:
    return bool(getattr(connection, "mysql_is_mariadb", False))


def _row_locks(seconds: int) -> str:
    return f"SET SESSION innodb_lock_wait_timeout = {seconds}, SESSION lock_wait_timeout = {seconds}"


class Oracle(Dialect):
    """Oracle: portable statements, and its own clock."""

    now_sql = (
        "ROUND((EXTRACT(DAY FROM (SYS_EXTRACT_UTC(SYSTIMESTAMP) - TIMESTAMP '1970-01-01 00:00:00')) * 86400"
        " + EXTRACT(HOUR FROM SYS_EXTRACT_UTC(SYSTIMESTAMP)) * 3600"
        " + EXTRACT(MINUTE FROM SYS_EXTRACT_UTC(SYSTIMESTAMP)) * 60"
        " + EXTRACT(SECOND FROM SYS_EXTRACT_UTC(SYSTIMESTAMP))) * 1000000)"
    )
    dual = " FROM DUAL"


#: SQL Server's isolation levels by their numbers in sys.dm_exec_sessions.
LEVELS: Final = {1: "READ UNCOMMITTED", 2: "READ COMMITTED", 3: "REPEATABLE READ", 4: "SERIALIZABLE", 5: "SNAPSHOT"}
#: Sets a level, and tells which was there. Without parameters: what a statement with some sets is undone at its end.
_ISOLATED: Final = (
    "DECLARE @before int = (SELECT transaction_isolation_level FROM sys.dm_exec_sessions WHERE session_id = @@SPID);"
    " SET TRANSACTION ISOLATION LEVEL {level}; SELECT @before"
)


class SQLServer(Dialect):
    """SQL Server, where ``SQLSEM`` asks for rows: portable statements, and its own clock."""

    now_sql = "DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME())"
    for_update = ""
    lock_hint = " WITH (UPDLOCK, ROWLOCK, FORCESEEK)"
    locks_by_writing = True  # whatever becomes of the hint
    reads_may_lock = True
    fixed_texts = True

    positional = True  # its driver knows no parameters by name

    def prepared(self, sql: str) -> tuple[str, Sequence[str]]:
        """Return a statement and the names of its parameters in order; the session may have been told not to count."""
        text, _ = super().prepared(sql)
        statement, names = positional(_sought(text))
        return statement if statement.startswith("SELECT") else f"SET NOCOUNT OFF; {statement}", names

    def adapt(self, options: dict[str, Any]) -> None:
        options["isolation_level"] = "READ COMMITTED"
        limit_logins(options)
        options["query_timeout"] = answer_limit(options, _ANSWER_TIMEOUT)

    def connect(self, connect: Callable[[], Any], settings: Mapping[str, Any]) -> Any:
        """Log in, one connection at a time, so that its socket is known, and a fork does not copy it."""
        options = settings["OPTIONS"]
        limit = int(options["connection_timeout"])
        raw, _ = sockets.opening(connect, sockets.port_in(settings), limit, patience=2 * limit)
        sockets.limit_reads(raw, options["query_timeout"])
        return raw

    def prepare(self, connection: BaseDatabaseWrapper) -> None:
        """Limit waits for rows, and have the driver told the types of parameters."""
        connection.execute_wrappers.append(cursors.declare_types)
        with connection.cursor() as cursor:
            cursor.execute(f"SET LOCK_TIMEOUT {LOCK_TIMEOUT_MS}")

    @contextlib.contextmanager
    def isolated(self, connection: BaseDatabaseWrapper, level: str) -> Iterator[None]:
        with connection.cursor() as cursor:
            cursor.execute(_ISOLATED.format(level=level))
            usual = LEVELS.get((cursor.fetchone() or (0,))[0], "READ COMMITTED")
        try:
            yield
        finally:
            # After an error the session may be gone, and its level with it; or the block around this one sets its own.
            with contextlib.suppress(DatabaseError), connection.cursor() as cursor:
                cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {usual}")

    def limits(self, connection: BaseDatabaseWrapper, seconds: float) -> BriefLimits:
        """Return limits of the session's waits for locks; statements are limited by the driver."""
        waits = "SET LOCK_TIMEOUT "
        return BriefLimits(before=f"{waits}{LOCK_PATIENCE * 1000:.0f}", after=f"{waits}{LOCK_TIMEOUT_MS}")

    @contextlib.contextmanager
    def limited(self, connection: BaseDatabaseWrapper, seconds: float) -> Iterator[None]:
        """Limit each cursor from its beginning. Drivers count in whole seconds: the next lower one, and at least one.

        ``create_cursor()`` is where Django gets its cursors from: if it did so elsewhere, this limit would be lost.
        """
        own: Any = connection
        create_cursor = own.create_cursor

        def create_limited(name: str | None = None) -> Any:
            raw = own.connection
            usual, raw.timeout = raw.timeout, max(1, int(seconds))
            try:
                return create_cursor(name)
            finally:
                raw.timeout = usual

        own.create_cursor = create_limited
        try:
            yield
        finally:
            del own.create_cursor

    def shortest(self, connection: BaseDatabaseWrapper) -> float:
        return 1.2


_DIALECTS: Final[dict[str, type[Dialect]]] = {
    "postgresql": PostgreSQL,
    "citus": Citus,
    "sqlite": SQLite,
    "mysql": MySQL,
    "oracle": Oracle,
    "microsoft": SQLServer,
}


@functools.cache
def _dialect(vendor: str) -> Dialect:
    if vendor not in _DIALECTS:
        raise ImproperlyConfigured(f"No semaphores on {vendor!r} databases; there are for {', '.join(_DIALECTS)}.")
    return _DIALECTS[vendor]()


def dialect_for(connection: BaseDatabaseWrapper | type[BaseDatabaseWrapper]) -> Dialect:
    """Return the dialect of a connection. Raises ``ImproperlyConfigured`` for an unknown vendor."""
    vendor = connection.vendor
    if vendor == "postgresql" and config(getattr(connection, "alias", None)).citus:
        vendor = "citus"
    return _dialect(vendor)


class DatabaseNow(Func):
    """The database's clock in whole microseconds, for the ORM; ``unix=True``: the one that tokens follow.

    ``was_us``: what it said when this host's boot clock said this many microseconds.
    """

    output_field = BigIntegerField()

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper, *args: Any, **context: Any) -> Any:
        """Return what the dialect has for it."""
        now, parameters = dialect_for(connection).clock(unix=self.extra.get("unix", False))
        if "was_us" not in self.extra:
            return now, parameters
        # How long ago that was is read as late as possible: whoever stops this process in between makes it wrong.
        return f"{now} - %s", [*parameters, max(0, clocks.boot_now_us() - self.extra["was_us"])]


def limit_logins(options: dict[str, Any]) -> None:
    """Have logins to SQL Server end, unless an alias's options say when they do."""
    for name, value in _SQL_SERVER.items():
        options[name] = options.get(name) or value


def answer_limit(options: Mapping[str, Any], least: int) -> int:
    """Return for how many seconds SQL Server may owe an answer: as ``query_timeout`` says, within reason."""
    return min(max(int(options.get("query_timeout") or 0), least), LONGEST_ANSWER)


def without_pool(engine: type[BaseDatabaseWrapper]) -> type[BaseDatabaseWrapper]:
    """Return the engine below one that pools: it would keep those waiting who want ours, and hand on our limits."""
    bases = engine.__mro__
    pooled = [index for index, each in enumerate(bases) if each.__module__.partition(".")[0] in _POOLS]
    below = bases[pooled[-1] + 1 :] if pooled else bases
    return next((each for each in below if hasattr(each, "get_new_connection") and hasattr(each, "vendor")), engine)


def limit_waiting(raw: Any) -> None:
    """Have a fresh driver connection wait for ``_ANSWER_TIMEOUT`` at the most; psycopg has no setting for it."""
    raw = inspect.unwrap(raw)  # Datadog, New Relic and others put a proxy around it
    if not hasattr(raw, "pgconn"):
        return
    from psycopg import OperationalError

    def limited(steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        deadline = time.monotonic() + _ANSWER_TIMEOUT
        try:
            wanted = next(steps)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:  # it says so several times a second
                    raise OperationalError(f"the server has not answered for {_ANSWER_TIMEOUT} s")
                wanted = steps.send(ready)
        except StopIteration as stop:
            return stop.value

    wait, itself = type(raw).wait, weakref.ref(raw)  # a cycle would keep a lost connection open
    raw.wait = lambda steps, *args, **kwargs: wait(itself(), limited(steps), *args, **kwargs)
