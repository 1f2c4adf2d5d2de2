"""What a database says when it is asked: each kind of server answers in a class of its own.

The lock tables, and what their rows say: slots that are declared differently, names that look alike, stale slots.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final, TypeAlias

from django.apps import AppConfig, apps
from django.core.checks import DEBUG, CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError
from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from django_sqlsem import queries
from django_sqlsem.backends import get_backend
from django_sqlsem.checks import sqlserver
from django_sqlsem.checks.messages import error, note, ok, warning
from django_sqlsem.conf import config
from django_sqlsem.core.names import MAX_NAME_LENGTH
from django_sqlsem.database.beacons import POSSIBLE, SUFFIX
from django_sqlsem.database.dialects import CLOCKS_AGREE, dialect_for, several_writers
from django_sqlsem.database.sessions import close_all, connected, open_connection
from django_sqlsem.exceptions import BackendError
from django_sqlsem.models import SemaphoreRow

#: How many round trips are measured; the median counts.
ROUND_TRIPS: Final = 20
#: A round trip that is felt in every acquire, and one that is felt by people, in seconds.
SLOW: Final = 0.01
VERY_SLOW: Final = 0.1
#: Clocks further apart than this show in logs, in seconds.
SKEW: Final = 1.0
#: The share of a server's connections from which on there may be none left for the library's own.
CROWDED: Final = 0.8
#: Seconds that the project's own statements should wait for SQLite's one writer.
PATIENT: Final = 5.0
#: File systems of other hosts, where locks of files and shared memory cannot be relied on.
NETWORK: Final = frozenset(
    {"9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs", "lustre"}
    | {"ncpfs", "nfs", "nfs4", "ocfs2", "smb2", "smb3", "smbfs", "virtiofs"}
)
#: How many names one sentence lists.
NAMES_LISTED: Final = 5
#: Names longer than this will not stay below the limit for long, if a number in them grows.
LONG_NAME: Final = MAX_NAME_LENGTH - 10


class Server:
    """A database over a connection of the library's kind; of one that it knows nothing more of, little is asked."""

    #: What it is asked, by the names of the methods.
    questions: ClassVar[tuple[str, ...]] = ("version", "round_trip", "clock", "connections")

    def __init__(self, alias: str, connection: BaseDatabaseWrapper) -> None:
        self.alias, self.connection, self.config = alias, connection, config(alias)
        self.settings: dict[str, Any] = connections.settings[alias]
        self.options: dict[str, Any] = dict(self.settings.get("OPTIONS") or {})
        #: What keeps beacons from working, so that a dead process's slots come back with its lease.
        self.no_beacons: list[str] = []
        #: Whether the tables are there, so that more can be looked at.
        self.has_tables = True

    def row(self, sql: str) -> tuple[Any, ...]:
        """Return the first row of a query."""
        with self.connection.cursor() as cursor:
            cursor.execute(sql)
            return tuple(cursor.fetchone())

    def wrong_engines(self, tables: set[str]) -> list[str]:
        """Return those of the tables that have no transactions."""
        return []

    def examine(self) -> Iterator[CheckMessage]:
        """Ask the server everything, each on its own. What it refuses to tell is a note."""
        for question in self.questions:
            try:
                yield from getattr(self, question)()
            except (DatabaseError, KeyError, TypeError, AttributeError) as refused:
                text = f"The server does not tell about: {question.replace('_', ' ')} ({str(refused).strip()})."
                yield note("D001", text, "The login may lack a right. Locks do not need it.")

    def version(self) -> Iterator[CheckMessage]:
        """Say what answers. Django itself refuses one that is too old."""
        connection: Any = self.connection
        try:
            number = ".".join(map(str, connection.get_database_version()))
        except Exception:  # noqa: BLE001 - some engines cannot tell
            number = ""
        yield ok("D001", f"{f'{connection.display_name} {number}'.strip()} answers.")

    def round_trip(self) -> Iterator[CheckMessage]:
        """Say how long one statement takes."""
        took = []
        for _ in range(ROUND_TRIPS):
            started = time.perf_counter()
            self.row(f"SELECT 1{dialect_for(self.connection).dual}")
            took.append(time.perf_counter() - started)
        median = statistics.median(took)
        text = f"A round trip takes {milliseconds(median)} (the median of {ROUND_TRIPS})."
        advice = "An acquire and its release take two."
        if median >= VERY_SLOW:
            yield warning("D003", text, f"{advice} Keep the locks in a database that is nearer.")
        else:
            yield note("D003", text, advice) if median >= SLOW else ok("D003", text)

    def clock(self) -> Iterator[CheckMessage]:
        """Compare this host's clock with the database's."""
        with self.connection.cursor() as cursor:
            skews = [dialect_for(self.connection).skew(cursor) for _ in range(5)]
        skew, uncertainty = min(skews, key=lambda each: each[1])
        ahead = "ahead of" if skew >= 0 else "behind"
        text = f"The database's clock is {milliseconds(abs(skew))} {ahead} this host's."
        yield self.judged(text, abs(skew) - uncertainty)

    def judged(self, text: str, apart: float) -> CheckMessage:
        """Say what it means that clocks are at least so far apart, in seconds."""
        if apart > SKEW:
            return note("D004", text, "Leases go by the database's clock, and are right. Compare logs with care.")
        return ok("D004", text)

    def connections(self) -> Iterator[CheckMessage]:
        """Say how pools and persistent connections stand to the library's own connections."""
        many = "up to 2 a process"
        if sqlserver.keeps_applocks(self.alias):
            many += ", and one more for each further permit of one name and each wait"
        beside = f"Those for locks, {many}, come beside them."
        age = self.settings.get("CONN_MAX_AGE", 0)
        if self.options.get("pool"):
            text = f"The alias has a pool of connections. {beside}"
            yield note("D009", text, "Count them in: no lock is ever kept on a connection of the pool.")
        elif age is None or age > 0:
            yield ok("D009", f"The alias has persistent connections. {beside}")
        else:
            yield ok("D009", f"The alias's connections are closed after each request. {beside}")


class PostgreSQLServer(Server):
    """PostgreSQL, and what speaks like it."""

    questions = (
        "version", "round_trip", "clock", "pooler", "cluster", "writable", "isolation", "limits", "durability",
        "connections",
    )  # fmt: skip

    def pooler(self) -> Iterator[CheckMessage]:
        """Find a pooler by the number of the session's process."""
        connection: Any = self.connection
        pooled = self.row("SELECT pg_backend_pid()")[0] != connection.connection.info.backend_pid
        yield _pooler(self, pooled)
        if pooled and not self.settings.get("DISABLE_SERVER_SIDE_CURSORS"):
            text = "DISABLE_SERVER_SIDE_CURSORS is not set, which Django needs behind a pooler in transaction mode."
            yield warning("D005", text, "Set it for this alias, unless the pooler is in session mode.")

    def cluster(self) -> Iterator[CheckMessage]:
        """Look whether Citus has distributed the tables, and the settings say so."""
        there = self.row(
            "SELECT to_regclass('pg_dist_partition') IS NOT NULL AND to_regclass('sqlsem_slot') IS NOT NULL"
        )
        tables = (
            "SELECT COUNT(*) FROM pg_dist_partition WHERE logicalrelid = 'sqlsem_slot'::regclass AND partmethod = 'h'"
        )
        distributed = there[0] and self.row(tables)[0]
        if self.config.citus:
            self.no_beacons.append("Citus has names on several servers")
            text = "A killed process's slots come back with its lease, and transactions cannot be fenced."
            if distributed:
                yield ok("D006", f"Citus has each name on one of several servers. {text}")
            else:
                text = f"CITUS is set, but the lock tables are not distributed. {text}"
                yield note("D006", text, "Distribute them, or leave CITUS out.")
        elif distributed:
            text = "Citus has distributed the lock tables, but CITUS is not set: most of what locks do is refused."
            yield error("D006", text, f"Set SQLSEM['DATABASES']['{self.alias}']['CITUS'] to True in all processes.")

    def writable(self) -> Iterator[CheckMessage]:
        """Find a standby, and a database that writes nothing by default."""
        recovers, read_only = self.row("SELECT pg_is_in_recovery(), current_setting('default_transaction_read_only')")
        yield _writable(not recovers and read_only != "on")

    def isolation(self) -> Iterator[CheckMessage]:
        """Look into the options, else ask the role, the database or the server: the session's own is the library's."""
        sql = "SELECT reset_val FROM pg_settings WHERE name = 'default_transaction_isolation'"
        level = str(self.options.get("isolation_level") or self.row(sql)[0])
        numbers = {"1": "read uncommitted", "2": "read committed", "3": "repeatable read", "4": "serializable"}
        yield _isolation(numbers.get(level, level.rpartition(".")[2].replace("_", " ").lower()))

    def limits(self) -> Iterator[CheckMessage]:
        """Count the connections of clients, and those for locks."""
        most, used, own = self.row(
            "SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,"
            # A role without pg_monitor sees of other roles' sessions only which database they are in.
            " (SELECT count(*) FROM pg_stat_activity WHERE datid IS NOT NULL AND COALESCE(backend_type, '') NOT IN"
            " ('autovacuum worker', 'parallel worker', 'background worker')),"
            " (SELECT count(*) FROM pg_stat_activity"
            " WHERE application_name = 'sqlsem' AND datname = current_database())"
        )
        yield _limits(most, used, f", {own} of them for locks")

    def durability(self) -> Iterator[CheckMessage]:
        """Look whether ``fsync`` and ``synchronous_commit`` are on."""
        if self.config.durable:
            names = ("fsync", "synchronous_commit")
            found = self.row("SELECT current_setting('fsync'), current_setting('synchronous_commit')")
            yield _durability([f"{name} = {value}" for name, value in zip(names, found, strict=True) if value == "off"])


class MySQLServer(Server):
    """MySQL and MariaDB."""

    questions = (
        "version", "round_trip", "clock", "pooler", "cluster", "writable", "isolation", "limits", "durability",
        "connections",
    )  # fmt: skip

    def _variable(self, name: str, default: str) -> str:
        with self.connection.cursor() as cursor:
            cursor.execute(f"SHOW GLOBAL VARIABLES LIKE '{name}'")
            row = cursor.fetchone()
        return str(row[1]).upper() if row else default

    def pooler(self) -> Iterator[CheckMessage]:
        """Find a pooler by the number of the connection."""
        lock = dialect_for(self.connection).session_lock
        assert lock is not None  # noqa: S101 - MySQL's has one
        yield _pooler(self, self.row("SELECT CONNECTION_ID()")[0] != lock.driver(self.connection.connection))

    def judged(self, text: str, apart: float) -> CheckMessage:
        """Refuse what is too far where each node of a cluster judges leases by a clock of its own."""
        if apart <= CLOCKS_AGREE or not self._among_writers():
            return super().judged(text, apart)
        text += (
            " The server is a node of a cluster with several writers, each of which judges leases by its own clock: one"
            " that is ahead grants slots that others still hold."
        )
        return error("D004", text, "Set the clocks of all nodes and hosts by NTP, or send all writes to one node.")

    def _among_writers(self) -> bool:
        with self.connection.cursor() as cursor:
            return several_writers(cursor)

    def cluster(self) -> Iterator[CheckMessage]:
        """Find a cluster with several writers."""
        if not self._among_writers():
            yield ok("D006", "The server is the only one that is written to.")
            return
        self.no_beacons.append("every node of a cluster has locks of its own")
        text = (
            "The server is a node of a cluster with several writers (Galera, or group replication). Two that ask for"
            " one lock on two nodes are only told apart when they commit: a transaction with transaction_lock() or"
            " fence() may then be rolled back (1213), and must be repeated. A killed process's slots come back with"
            " its lease."
        )
        advice = "Send all writes to one node, and shorten LEASE"
        yield warning("D006", text, f"{advice} ({self.config.lease:g} s) if crashes are frequent.")

    def writable(self) -> Iterator[CheckMessage]:
        """Find a server that was set to read-only."""
        yield _writable(self._variable("read_only", "OFF") in ("OFF", "0"))

    def isolation(self) -> Iterator[CheckMessage]:
        """Look into the options; without one it is Django's own."""
        yield _isolation(str(self.options.get("isolation_level", "read committed") or "the server's default").lower())

    def limits(self) -> Iterator[CheckMessage]:
        """Count the connections."""
        used = int(self.row("SHOW GLOBAL STATUS LIKE 'Threads_connected'")[1])
        yield _limits(int(self._variable("max_connections", "")), used)

    def durability(self) -> Iterator[CheckMessage]:
        """Look whether InnoDB's log is flushed at each commit."""
        name = "innodb_flush_log_at_trx_commit"
        if self.config.durable:
            value = self._variable(name, "1")
            yield _durability([] if value in ("1", "3") else [f"{name} = {value}"])

    def wrong_engines(self, tables: set[str]) -> list[str]:
        """Return the tables that are not of InnoDB, with their engines."""
        with self.connection.cursor() as cursor:
            cursor.execute("SELECT table_name, engine FROM information_schema.tables WHERE table_schema = DATABASE()")
            found = [(str(table), str(engine).upper()) for table, engine in cursor.fetchall()]
        return sorted(f"{table} ({engine})" for table, engine in found if table in tables and engine != "INNODB")


class SQLiteFile(Server):
    """SQLite: the file, what it lies on, and how the project's own connections use it."""

    questions = ("version", "round_trip", "clock", "connections", "file")

    def clock(self) -> Iterator[CheckMessage]:
        """Say whose the clock is."""
        yield ok("D004", "The database's clock is this host's.")

    def file(self) -> Iterator[CheckMessage]:
        """Look at the file, its journal, and the place of the beacons beside it."""
        path = str(self.row("SELECT file FROM pragma_database_list WHERE name = 'main'")[0] or "")
        if not path:
            text = "The database is in memory: its locks are this process's own, and keep no other process out."
            yield error("D008", text, "Keep the locks in a file, or on a server.")
            return
        yield from self._place(path)
        journal = str(self.row("PRAGMA journal_mode")[0]).lower()
        advice = 'Set OPTIONS["init_command"] = "PRAGMA journal_mode = WAL".'
        if journal == "wal":
            yield ok("D008", "The journal is WAL: readers do not hold up the writer.")
        elif journal in ("off", "memory"):
            text = f"The journal mode is {journal!r}: a crash in the middle of a write destroys the database."
            yield warning("D008", text, advice)
        else:
            yield note("D008", f"The journal mode is {journal!r}: readers hold up every acquire and release.", advice)
        timeout = float(self.options.get("timeout", PATIENT))
        if timeout < PATIENT:
            text = (
                f"The project's own statements wait {timeout:g} s for the writer, and then fail: 'database is locked'."
            )
            yield warning("D008", text, f'Set OPTIONS["timeout"] to {PATIENT:g} or more.')

    def _place(self, path: str) -> Iterator[CheckMessage]:
        kind = file_system(path)
        if kind in NETWORK:
            self.no_beacons.append("the file is on another host")
            text = (
                f"The file is on a network file system ({kind}): two hosts may both get one slot, and destroy the file."
            )
            yield error("D008", text, "Keep the file on a disk of its own host, or the locks on a server.")
        directory = path + SUFFIX
        place = directory if os.path.exists(directory) else os.path.dirname(path)
        if not os.access(path, os.W_OK):
            yield error("D007", f"The file {path!r} cannot be written to.", "Give this user the right to write it.")
        elif not POSSIBLE:
            self.no_beacons.append("this system has no locks of files")
            text = "This system has no locks of files: a killed process's slots come back with its lease."
            yield note("D008", text, f"Shorten LEASE ({self.config.lease:g} s) if that is too long.")
        elif not (os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)):
            self.no_beacons.append("the directory of the beacons cannot be written to")
            text = f"{place!r} cannot be written to, so that a killed process's slots come back with its lease."
            yield warning("D008", text, f"Let this user create {directory!r}, with a file for each process.")


# What is said of answers that PostgreSQL and MySQL both give.


def _pooler(server: Server, pooled: bool) -> CheckMessage:
    if not pooled:
        return ok("D005", "No pooler stands in between: sessions are the library's own.")
    server.no_beacons.append("a pooler stands in between")
    text = (
        "A pooler such as PgBouncer stands in between, and shares its sessions between clients: waiters look for slots"
        " at intervals instead of being woken, and a killed process's slots come back with its lease."
    )
    advice = "Name an alias that leads to the server itself in SQLSEM['DATABASE']; or shorten LEASE"
    return warning("D005", text, f"{advice} ({server.config.lease:g} s).")


def _writable(writable: bool) -> CheckMessage:
    if writable:
        return ok("D007", "The database can be written to.")
    text = "The database cannot be written to: it is a standby or a replica, or it was set to read-only."
    return error("D007", text, "Keep the locks under an alias that leads to the primary.")


def _isolation(level: str) -> CheckMessage:
    text = f"The project's transactions on this alias are {level}."
    if level in ("read committed", "read uncommitted"):
        return ok("D010", text)
    text += " One that began before it got a lock goes on seeing the data as they were before."
    advice = "Take locks before the transaction begins. The library's own transactions are not affected."
    return note("D010", text, advice)


def _limits(most: int, used: int, more: str = "") -> CheckMessage:
    text = f"{used} of the server's {most} connections are in use{more}; a process that uses locks has up to 2 more."
    if used >= CROWDED * most:
        return warning("D011", text, "Raise max_connections, or have fewer processes or persistent connections.")
    return ok("D011", text)


def _durability(loose: list[str]) -> CheckMessage:
    if not loose:
        return ok("D012", "Commits survive a crash of the server.")
    text = f"The server may lose its last commits in a crash ({', '.join(loose)}), and with them grants."
    return note("D012", text, "Two may then hold one slot for at most one lease. Tokens and fence() tell.")


_SERVERS: Final = {"postgresql": PostgreSQLServer, "mysql": MySQLServer, "sqlite": SQLiteFile}


#: Tries something with a server, and says how it went.
Trial: TypeAlias = Callable[[Server], Iterator[CheckMessage]]


def check_servers(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> Iterable[CheckMessage]:
    """Report what the doctor finds in these databases, but for missing tables: ``migrate`` may be about to run."""
    for alias in sqlserver.named(databases or ()):
        for message in examine(alias, before_migrate=True):
            message.obj = alias
            if message.level > DEBUG:
                yield message


def examine(alias: str, *, before_migrate: bool = False, trials: Sequence[Trial] = ()) -> Iterator[CheckMessage]:
    """Yield what one database has to say; of one that can't be connected to, why. The trials come last."""
    try:
        backend = get_backend(queries.locks_database(alias))
    except ImproperlyConfigured as wrong:
        yield error("E001", str(wrong))
        return
    if backend.process_local:
        text = "Locks are kept inside each process, and keep no other process out."
        yield error("D008", text, "Keep them in a file or on a server, and leave BACKEND at None.")
        return
    made: list[Any] = []
    try:
        connection = open_connection(alias, made)
    except (DatabaseError, ImproperlyConfigured, OSError) as reason:
        text = f"The database cannot be reached: {str(reason).strip() or type(reason).__name__}"
        yield error("D001", text, "No lock can be had until it answers. Look at HOST, PORT, USER and the network.")
        return
    try:
        server = _SERVERS.get(connection.vendor, Server)(alias, connection)
        yield from server.examine()
        try:
            found = list(_tables(server))
            if not before_migrate:
                yield from found
                yield from _rights(alias)
            if server.has_tables:
                yield from _names(alias)
        except ImproperlyConfigured as wrong:
            text = f"The project's own connection cannot be opened: {wrong}"
            yield error("D001", text, "Nothing works without it.")
        except (DatabaseError, BackendError) as failed:
            text = f"The database could not be examined: {str(failed).strip()}"
            yield note("D002", text, "Look at the login's rights.")
        for trial in trials if server.has_tables else ():
            yield from trial(server)
    finally:
        close_all(made)


def _rights(alias: str) -> Iterator[CheckMessage]:
    """Ask SQL Server for the rights that application locks need; a system check of its own with ``--database``."""
    if sqlserver.keeps_applocks(alias):
        found = [each for each in sqlserver.database_messages(alias) if not each.is_silenced()]
        yield from found or [ok("D000", "The login has the rights that application locks need.")]


def file_system(path: str, mounts: str = "/proc/self/mounts") -> str:
    """Return the kind of file system that a path is on; empty where the system does not tell."""
    try:
        with open(mounts, encoding="utf-8", errors="replace") as lines:
            found = [line.split()[1:3] for line in lines if len(line.split()) > 2]
    except OSError:
        return ""
    real = os.path.realpath(path)
    best, kind = "", ""
    for raw, type_ in found:
        place = raw.encode().decode("unicode_escape")  # a blank in a path is \040
        inside = place == "/" or real == place or real.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, kind = place, type_
    return kind


def milliseconds(seconds: float) -> str:
    """Return ``0.34 ms``, ``12 ms`` or ``1.5 s``."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.2f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"


# The tables, and what their rows say.


def check_tables(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> Iterable[CheckMessage]:
    """Report that ``migrate`` was forgotten, unless it is what runs now."""
    if "".join(sys.argv[1:2]).startswith("migrate"):  # or django-tenants' migrate_schemas
        return
    for alias in sqlserver.named(databases or ()):
        try:
            with connected(alias) as connection:
                wrong = _unmigrated(connection)[1]
        except Exception:  # noqa: BLE001, S112 - Django says it, or whoever uses the database
            continue
        if wrong:
            text = f"No lock can be had in the database {alias!r}. {wrong}"
            found = warning("W026", text, f"Run manage.py migrate sqlsem --database {alias}.")
            found.obj = alias
            yield found


def _unmigrated(connection: BaseDatabaseWrapper) -> tuple[set[str], str]:
    """Return the tables that belong into a database, and in a sentence what of them is not there."""
    models = apps.get_app_config("sqlsem").get_models()
    wanted = {model._meta.db_table for model in models if router.allow_migrate_model(connection.alias, model)}
    there = set(connection.introspection.table_names())
    missing = sorted(wanted - there)
    if connection.vendor == "microsoft":
        missing = sqlserver.absent_tables(connection, missing)
    if missing:
        return wanted, f"Tables are missing: {', '.join(missing)}."
    if MigrationRecorder.Migration._meta.db_table not in there:  # a role without rights on it does not see it
        return wanted, ""
    loader = MigrationLoader(connection)
    unapplied = set(loader.disk_migrations or ()) - set(loader.applied_migrations)
    waiting = sorted(name for app, name in unapplied if app == "sqlsem")
    return wanted, f"Migrations have not been applied: {', '.join(waiting)}." if wanted and waiting else ""


def _tables(server: Server) -> Iterator[CheckMessage]:
    """Compare the tables and the applied migrations with the models."""
    wanted, wrong = _unmigrated(server.connection)
    server.has_tables = not wrong
    if server.has_tables:
        yield ok("D002", f"The {len(wanted)} tables are there and up to date.")
    else:
        yield error("D002", wrong, f"Run manage.py migrate sqlsem --database {server.alias}.")
    if others := server.wrong_engines(wanted):
        text = f"Tables are not of the engine InnoDB, and have no transactions: {', '.join(others)}."
        yield error("D002", text, "ALTER TABLE … ENGINE=InnoDB, for each of them.")


def _names(alias: str) -> Iterator[CheckMessage]:
    """Look through the names: how many slots they have, what they look like, and whose slots are stale."""
    rows = SemaphoreRow.objects.using(alias)
    yield from _slots(alias, rows)
    yield from _lookalikes(rows.values_list("name", flat=True).iterator(chunk_size=2000))
    stale = [f"{each.name!r} ({each.stale})" for each in queries.in_use(most=500, using=alias) if each.stale]
    if stale:
        text = f"Slots belong to holders that seem gone: {_some(stale)}."
        yield note("D015", text, "The next acquire takes them. `locks list --stale` shows them.")
    else:
        yield ok("D015", "No slot belongs to a holder that seems gone.")


def _slots(alias: str, rows: Any) -> Iterator[CheckMessage]:
    candidates = list(rows.filter(other_slots__isnull=False).values_list("name", flat=True)[:500])
    found = [each for each in queries.by_name(candidates, using=alias).values() if each.other_declared_slots]
    if found:
        told = [f"{each.name!r} ({each.declared_slots} and {each.other_declared_slots})" for each in found]
        text = f"Programs disagree about the slots of {_some(told)}. The largest number is the bound."
        yield warning("D013", text, "Say the same slots= everywhere, or set it by `locks set NAME --slots N`.")
    else:
        yield ok("D013", "Programs agree about the slots of every name.")
    candidates = list(rows.filter(paused=True).order_by("name").values_list("name", flat=True)[:500])
    paused = [each.name for each in queries.by_name(candidates, using=alias).values() if each.paused]
    if paused:
        text = f"Operators have paused {_some(map(repr, paused))}: nothing is granted."
        yield note("D013", text, "`locks set NAME --resume` ends that.")


def _lookalikes(names: Iterable[str]) -> Iterator[CheckMessage]:
    folded: dict[str, str] = {}
    alike: list[str] = []
    long: list[str] = []
    for name in names:
        other = folded.setdefault(fold(name), name)
        if other != name and len(alike) <= NAMES_LISTED:
            alike.append(f"{other!r} and {name!r}")
        if len(name) > LONG_NAME and len(long) <= NAMES_LISTED:
            long.append(f"{name[:40] + '…'!r} ({len(name)})")
    if alike:
        text = f"Names differ in case, accents or blanks only: {_some(alike)}. They are different locks."
        yield warning("D014", text, "If they were meant to be one, spell them the same everywhere.")
    if long:
        text = f"Names are almost as long as they may be, {MAX_NAME_LENGTH} characters: {_some(long)}."
        yield warning("D014", text, "Shorten them: one that is too long is an error at the acquire.")
    if not alike and not long:
        many = f"The {len(folded)} names are well apart, and short enough."
        yield ok("D014", {0: "No name is known yet.", 1: "The only name is short enough."}.get(len(folded), many))


def fold(name: str) -> str:
    """Return what a name looks like to a database that ignores case, accents and blanks at the end."""
    plain = unicodedata.normalize("NFKD", name).casefold().strip()
    return "".join(char for char in plain if not unicodedata.combining(char))


def _some(told: Iterable[str]) -> str:
    shown = list(told)
    return ", ".join(shown[:NAMES_LISTED]) + (", and more" if len(shown) > NAMES_LISTED else "")
