"""The connection: the server's version, the round trip, the clocks, and what stands in between.

The lock tables: whether they are there, up to date, and of a kind that keeps locks.

SQLite: the file, what it lies on, and how the project's own connections use it.

What the rows say: slots that are declared differently, names that are easily taken for one another, stale slots.
"""

from __future__ import annotations

import os
import time
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, Final

from django.apps import apps
from django.db import Error as DatabaseError
from django.db import connections, router
from django.db.migrations.loader import MigrationLoader

from django_sqlsem import queries
from django_sqlsem.checks.doctor.findings import Finding, Patient, error, milliseconds, note, ok, warning
from django_sqlsem.core.names import MAX_NAME_LENGTH
from django_sqlsem.database.beacons import POSSIBLE, SUFFIX
from django_sqlsem.database.dialects import dialect_for, several_writers
from django_sqlsem.models import SemaphoreRow

#: A round trip that is felt in every acquire, and one that is felt by people, in seconds.
SLOW: Final = 0.01
VERY_SLOW: Final = 0.1
#: Clocks further apart than this show in logs, in seconds.
SKEW: Final = 1.0
#: The share of a server's connections from which on there may be none left for the library's own.
CROWDED: Final = 0.8

_LEASES: Final = "a killed process's slots come back with its lease"


def version(patient: Patient) -> Iterator[Finding]:
    """Say what answers, and whether Django still supports it."""
    connection: Any = patient.connection
    names = {"postgresql": "PostgreSQL", "mysql": "MySQL", "sqlite": "SQLite", "microsoft": "SQL Server"}
    name = "MariaDB" if getattr(connection, "mysql_is_mariadb", False) else names.get(patient.vendor, patient.vendor)
    try:
        number = ".".join(map(str, connection.get_database_version()))
    except Exception:  # noqa: BLE001 - some engines cannot tell
        number = ""
    told = f"{name} {number}".strip()
    lowest = connection.features.minimum_database_version
    if number and lowest and connection.get_database_version() < lowest:
        text = f"{told} answers, which is older than what Django supports: {'.'.join(map(str, lowest))}."
        yield warning("sqlsem.D001", text, "Upgrade the server, or use a Django that supports it.")
    else:
        yield ok("sqlsem.D001", f"{told} answers.")


def round_trip(patient: Patient) -> Iterator[Finding]:
    """Say how long one statement takes; an acquire and its release take two."""
    took = patient.measure()
    text = f"A round trip takes {milliseconds(took)} (the median of 20)."
    if took >= VERY_SLOW:
        advice = "An acquire and its release take two. Keep the locks in a database that is nearer."
        yield warning("sqlsem.D003", text, advice)
    elif took >= SLOW:
        yield note("sqlsem.D003", text, "An acquire and its release take two.")
    else:
        yield ok("sqlsem.D003", text)


def clock(patient: Patient) -> Iterator[Finding]:
    """Compare this host's clock with the database's."""
    if patient.vendor == "sqlite":
        yield ok("sqlsem.D004", "The database's clock is this host's.")
        return
    dialect = dialect_for(patient.connection)
    skews = []
    for _ in range(5):
        before = time.time()
        with patient.connection.cursor() as cursor:
            now = dialect.now(cursor)
        after = time.time()
        skews.append((after - before, now / 1e6 - (before + after) / 2))
    uncertainty, skew = min(skews, key=lambda each: each[0])
    ahead = "ahead of" if skew >= 0 else "behind"
    text = f"The database's clock is {milliseconds(abs(skew))} {ahead} this host's."
    if abs(skew) > SKEW + uncertainty:
        advice = "Leases are not touched by that, as they go by the database's clock. Compare logs with care."
        yield note("sqlsem.D004", text, advice)
    else:
        yield ok("sqlsem.D004", text)


def pooler(patient: Patient) -> Iterator[Finding]:
    """Find a pooler that lends its sessions, by their numbers: the server's and the driver's."""
    raw: Any = patient.connection.connection
    if patient.vendor == "postgresql":
        server, driver = patient.value("SELECT pg_backend_pid()"), raw.info.backend_pid
    elif patient.vendor == "mysql":
        server, driver = patient.value("SELECT CONNECTION_ID()"), raw.thread_id()
    else:
        return
    if server == driver:
        yield ok("sqlsem.D005", "No pooler stands in between: sessions are the library's own.")
        return
    patient.no_beacons.append("a pooler stands in between")
    text = (
        "A pooler such as PgBouncer stands in between, and lends its sessions to anybody: waiters look for slots at"
        f" intervals instead of being woken, and {_LEASES}."
    )
    advice = (
        f"Name an alias that leads to the server itself in SQLSEM['DATABASE']; or shorten LEASE ({_lease(patient)})."
    )
    yield warning("sqlsem.D005", text, advice)
    if patient.vendor == "postgresql" and not connections.settings[patient.alias].get("DISABLE_SERVER_SIDE_CURSORS"):
        text = "DISABLE_SERVER_SIDE_CURSORS is not set, which Django needs behind a pooler in transaction mode."
        yield warning("sqlsem.D005", text, "Set it for this alias, unless the pooler is in session mode.")


def cluster(patient: Patient) -> Iterator[Finding]:
    """Find a cluster with several writers, and a server that cannot be written to."""
    if patient.vendor == "mysql":
        with patient.connection.cursor() as cursor:
            several = several_writers(cursor)
        if several:
            patient.no_beacons.append("every node of a cluster has locks of its own")
            text = (
                "The server is a node of a cluster with several writers (Galera, or group replication): two claims of"
                f" one slot on two nodes are only told apart when they commit, and {_LEASES}."
            )
            advice = f"Send all writes to one node, and shorten LEASE ({_lease(patient)}) if crashes are frequent."
            yield warning("sqlsem.D006", text, advice)
        else:
            yield ok("sqlsem.D006", "The server is the only one that is written to.")
    if _read_only(patient):
        text = "The database cannot be written to: it is a standby or a replica, or it was set to read-only."
        yield error("sqlsem.D007", text, "Keep the locks under an alias that leads to the primary.")
    elif patient.vendor in ("postgresql", "mysql"):
        yield ok("sqlsem.D007", "The database can be written to.")


def _read_only(patient: Patient) -> bool:
    if patient.vendor == "postgresql":
        found = patient.row("SELECT pg_is_in_recovery(), current_setting('default_transaction_read_only')")
        return bool(found[0]) or found[1] == "on"
    if patient.vendor == "mysql":
        return patient.variables("read_only").get("read_only", "OFF") not in ("OFF", "0")
    return False


def isolation(patient: Patient) -> Iterator[Finding]:
    """Say what the project's own transactions see, after they have waited for a lock inside them."""
    if patient.vendor not in ("postgresql", "mysql"):
        return
    if patient.vendor == "postgresql":
        level = str(patient.options.get("isolation_level") or _own_default(patient))
        level = {"1": "read uncommitted", "2": "read committed", "3": "repeatable read", "4": "serializable"}.get(
            level, level
        )
    else:
        level = str(patient.options.get("isolation_level", "read committed") or "the server's default")
    level = level.rpartition(".")[2].replace("_", " ").lower()
    text = f"The project's transactions on this alias are {level}."
    if level in ("read committed", "read uncommitted"):
        yield ok("sqlsem.D010", text)
    else:
        text += " One that began before it got a lock goes on seeing the data as they were before."
        yield note("sqlsem.D010", text, "Take locks before the transaction begins; the library's own are not touched.")


def _own_default(patient: Patient) -> str:
    # The session's own was set by the library: what others get is said by the role, the database or the server.
    found = patient.value("SELECT reset_val FROM pg_settings WHERE name = 'default_transaction_isolation'")
    return str(found)


def limits(patient: Patient) -> Iterator[Finding]:
    """Compare the server's connections with those in use. Each process has up to two more for its locks."""
    if patient.vendor == "postgresql":
        most, used, own = patient.row(
            "SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,"
            " (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),"
            " (SELECT count(*) FROM pg_stat_activity WHERE application_name = 'sqlsem')"
        )
        mine = f", {own} of them for locks"
    elif patient.vendor == "mysql":
        most = int(patient.variables("max_connections")["max_connections"])
        with patient.connection.cursor() as cursor:
            cursor.execute("SHOW GLOBAL STATUS LIKE 'Threads_connected'")
            used = int(cursor.fetchone()[1])
        mine = ""
    else:
        return
    text = f"{used} of the server's {most} connections are in use{mine}; a process that uses locks has up to 2 more."
    if used >= CROWDED * most:
        yield warning("sqlsem.D011", text, "Raise max_connections, or have fewer processes or persistent connections.")
    else:
        yield ok("sqlsem.D011", text)


def durability(patient: Patient) -> Iterator[Finding]:
    """Say if a grant may not survive a crash of the server, although ``DURABLE`` wants that."""
    if not patient.config.durable or patient.vendor not in ("postgresql", "mysql"):
        return
    if patient.vendor == "postgresql":
        wanted = {"fsync": "on", "synchronous_commit": ""}
        found = {name: str(patient.value(f"SELECT current_setting('{name}')")) for name in wanted}
        loose = [f"{name} = {value}" for name, value in found.items() if value == "off"]
    else:
        value = patient.variables("innodb_flush_log_at_trx_commit").get("innodb_flush_log_at_trx_commit", "1")
        loose = [] if value in ("1", "3") else [f"innodb_flush_log_at_trx_commit = {value}"]
    if loose:
        text = f"The server may lose its last commits in a crash ({', '.join(loose)}), and with them grants."
        yield note("sqlsem.D012", text, "Two may then hold one slot for at most one lease. Tokens and fence() tell.")
    else:
        yield ok("sqlsem.D012", "Commits survive a crash of the server.")


def _lease(patient: Patient) -> str:
    return f"{patient.config.lease:g} s"


#: In this order; each is asked on its own, so that one that may not ask does not hide the others.
ALL: Final = (version, round_trip, clock, pooler, cluster, isolation, limits, durability)


def examine(patient: Patient) -> Iterator[Finding]:
    """Ask the server everything. What it refuses to tell is a note."""
    for part in ALL:
        try:
            yield from part(patient)
        except (DatabaseError, KeyError, TypeError, AttributeError) as refused:
            text = f"The server does not tell about: {part.__name__.replace('_', ' ')} ({str(refused).strip()})."
            yield note("sqlsem.D001", text, "The login may lack a right. Locks do not need it.")


def examine_tables(patient: Patient) -> Iterator[Finding]:
    """Compare the tables and the applied migrations with the models."""
    models = list(apps.get_app_config("sqlsem").get_models())
    with patient.connection.cursor() as cursor:
        there = set(patient.connection.introspection.table_names(cursor))
    wanted = {model._meta.db_table for model in models if router.allow_migrate_model(patient.alias, model)}
    missing = sorted(wanted - there)
    waiting = _unapplied(patient)
    command = f"Run manage.py migrate sqlsem --database {patient.alias}."
    if missing:
        patient.has_tables = False
        yield error("sqlsem.D002", f"Tables are missing: {', '.join(missing)}.", command)
    elif waiting:
        patient.has_tables = False
        yield error("sqlsem.D002", f"Migrations have not been applied: {', '.join(waiting)}.", command)
    else:
        yield ok("sqlsem.D002", f"The {len(wanted)} tables are there and up to date.")
    if patient.vendor == "mysql" and not missing:
        others = [
            f"{table} ({engine})" for table, engine in _engines(patient) if table in wanted and engine != "INNODB"
        ]
        if others:
            text = f"Tables are not of the engine InnoDB, and have no transactions: {', '.join(sorted(others))}."
            yield error("sqlsem.D002", text, "ALTER TABLE … ENGINE=InnoDB, for each of them.")


def _engines(patient: Patient) -> list[tuple[str, str]]:
    with patient.connection.cursor() as cursor:
        cursor.execute("SELECT table_name, engine FROM information_schema.tables WHERE table_schema = DATABASE()")
        return [(str(table), str(engine).upper()) for table, engine in cursor.fetchall()]


def _unapplied(patient: Patient) -> list[str]:
    """Return the names of the app's migrations that the database does not have."""
    loader = MigrationLoader(patient.connection)
    applied = set(loader.applied_migrations)
    known = loader.disk_migrations or {}
    return sorted(name for app, name in known if app == "sqlsem" and (app, name) not in applied)


#: File systems of other hosts: what locks of files and shared memory mean there is anybody's guess.
NETWORK: Final = frozenset(
    {"9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs", "lustre"}
    | {"ncpfs", "nfs", "nfs4", "ocfs2", "smb2", "smb3", "smbfs", "virtiofs"}
)
#: Seconds that the project's own statements should wait for the one writer.
PATIENT: Final = 5.0


def examine_files(patient: Patient) -> Iterator[Finding]:
    """Look at the file of an SQLite database."""
    path = str(patient.value("SELECT file FROM pragma_database_list WHERE name = 'main'", ""))
    if not path:
        text = "The database is in memory: its locks are this process's own, and keep no other process out."
        yield error("sqlsem.D008", text, "Keep the locks in a file, or on a server.")
        return
    yield from _where(patient, path)
    journal = str(patient.value("PRAGMA journal_mode", "")).lower()
    if journal == "wal":
        yield ok("sqlsem.D008", "The journal is WAL: readers do not hold up the writer.")
    elif journal in ("off", "memory"):
        text = f"The journal mode is {journal!r}: a crash in the middle of a write destroys the database."
        yield warning("sqlsem.D008", text, 'Set OPTIONS["init_command"] = "PRAGMA journal_mode = WAL".')
    else:
        text = f"The journal mode is {journal!r}: whoever reads holds up every acquire and release."
        yield note("sqlsem.D008", text, 'Set OPTIONS["init_command"] = "PRAGMA journal_mode = WAL".')
    timeout = float(patient.options.get("timeout", PATIENT))
    if timeout < PATIENT:
        text = f"The project's own statements wait {timeout:g} s for the writer, and then fail: 'database is locked'."
        yield warning("sqlsem.D008", text, 'Set OPTIONS["timeout"] to 5 or more.')


def _where(patient: Patient, path: str) -> Iterator[Finding]:
    kind = file_system(path)
    if kind in NETWORK:
        patient.no_beacons.append("the file is on another host")
        text = f"The file is on a network file system ({kind}): two hosts may both get one slot, and destroy the file."
        yield error("sqlsem.D008", text, "Keep the file on a disk of its own host, or the locks on a server.")
    directory = path + SUFFIX
    place = directory if os.path.exists(directory) else os.path.dirname(path)
    if not os.access(path, os.W_OK):
        yield error("sqlsem.D007", f"The file {path!r} cannot be written to.", "Give this user the right to write it.")
    elif not POSSIBLE:
        patient.no_beacons.append("this system has no locks of files")
        text = "This system has no locks of files: a killed process's slots come back with its lease."
        yield note("sqlsem.D008", text, f"Shorten LEASE ({patient.config.lease:g} s) if that is too long.")
    elif not (os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)):
        patient.no_beacons.append("the directory of the beacons cannot be written to")
        text = f"{place!r} cannot be written to, so that a killed process's slots come back with its lease."
        yield warning("sqlsem.D008", text, f"Let this user create {directory!r}, with a file for each process.")


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


#: How many names one sentence lists.
LISTED: Final = 5
#: Names longer than this will not stay below the limit for long, if a number in them grows.
LONG: Final = MAX_NAME_LENGTH - 10


def examine_names(patient: Patient) -> Iterator[Finding]:
    """Look through the names."""
    yield from _slots(patient)
    yield from _lookalikes(patient)
    yield from _stale(patient)


def _slots(patient: Patient) -> Iterator[Finding]:
    rows = SemaphoreRow.objects.using(patient.alias)
    candidates = list(rows.filter(other_slots__isnull=False).values_list("name", flat=True)[:500])
    found = [each for each in queries.by_name(candidates, using=patient.alias).values() if each.other_declared_slots]
    if found:
        told = [f"{each.name!r} ({each.declared_slots} and {each.other_declared_slots})" for each in found]
        text = f"Programs disagree about the slots of {_some(told)}. The largest number is the bound."
        yield warning("sqlsem.D013", text, "Say the same slots= everywhere, or set it by `locks set NAME --slots N`.")
    else:
        yield ok("sqlsem.D013", "Programs agree about the slots of every name.")
    paused = list(rows.filter(paused=True).order_by("name").values_list("name", flat=True)[: LISTED + 1])
    if paused:
        text = f"Operators have paused {_some(map(repr, paused))}: nothing is granted."
        yield note("sqlsem.D013", text, "`locks set NAME --resume` ends that.")


def _lookalikes(patient: Patient) -> Iterator[Finding]:
    folded: dict[str, str] = {}
    alike: list[str] = []
    long: list[str] = []
    for name in SemaphoreRow.objects.using(patient.alias).values_list("name", flat=True).iterator(chunk_size=2000):
        other = folded.setdefault(fold(name), name)
        if other != name and len(alike) <= LISTED:
            alike.append(f"{other!r} and {name!r}")
        if len(name) > LONG and len(long) <= LISTED:
            long.append(f"{name[:40] + '…'!r} ({len(name)})")
    if alike:
        text = f"Names differ in case, accents or blanks only: {_some(alike)}. They are different locks."
        yield warning("sqlsem.D014", text, "If they were meant to be one, spell them the same everywhere.")
    if long:
        text = f"Names are almost as long as they may be, {MAX_NAME_LENGTH} characters: {_some(long)}."
        yield warning("sqlsem.D014", text, "Shorten them: one that is too long is an error at the acquire.")
    if not alike and not long:
        yield ok("sqlsem.D014", f"The {len(folded)} names are well apart, and short enough.")


def fold(name: str) -> str:
    """Return what a name looks like to a database that heeds neither case nor accents nor blanks at the end."""
    plain = unicodedata.normalize("NFKD", name).casefold().strip()
    return "".join(char for char in plain if not unicodedata.combining(char))


def _stale(patient: Patient) -> Iterator[Finding]:
    in_use = queries.in_use(most=500, using=patient.alias)
    stale = [f"{each.name!r} ({each.stale})" for each in in_use if each.stale]
    if stale:
        text = f"Slots belong to holders that seem gone: {_some(stale)}."
        yield note("sqlsem.D015", text, "Whoever wants them takes them. `locks list --stale` shows them.")
    else:
        yield ok("sqlsem.D015", "No slot belongs to a holder that seems gone.")


def _some(told: Iterable[str]) -> str:
    shown = list(told)
    return ", ".join(shown[:LISTED]) + (", and more" if len(shown) > LISTED else "")
