"""The connection: the server's version, the round trip, the clocks, and what stands in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

from django.db import Error as DatabaseError
from django.db import connections

from django_sqlsem.backends.dialects import dialect_for
from django_sqlsem.backends.incarnation import several_writers
from django_sqlsem.doctor.findings import Finding, error, note, ok, warning
from django_sqlsem.doctor.patients import Patient, milliseconds

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
