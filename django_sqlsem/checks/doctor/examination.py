"""The order of the examination: the settings, and then each database that keeps locks.

The settings: what the system checks say, and how the project's connections stand to locks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Final

from django.core import checks as django_checks
from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError
from django.db import connections

from django_sqlsem import checks, queries
from django_sqlsem.backends import get_backend
from django_sqlsem.checks import sqlserver
from django_sqlsem.checks.doctor import servers, trials
from django_sqlsem.checks.doctor.findings import Finding, Level, Patient, error, note, ok
from django_sqlsem.checks.sqlserver import keeps_applocks, named
from django_sqlsem.database.sessions import open_connection
from django_sqlsem.exceptions import BackendError

_LEVELS: Final = (
    (django_checks.ERROR, Level.ERROR),
    (django_checks.WARNING, Level.WARNING),
    (django_checks.INFO, Level.NOTE),
)


def examine_configuration() -> Iterator[Finding]:
    """Run the system checks that need no connection. They may be silenced, as in ``check``."""
    found = [each for each in checks.static_messages() if not each.is_silenced()]
    yield from map(_finding, found)
    if not found:
        yield ok("sqlsem.D000", "The system checks have nothing to say about the settings.")


def examine_mssql(patient: Patient) -> Iterator[Finding]:
    """Ask SQL Server for the rights that application locks need."""
    found = [each for each in sqlserver.database_messages(patient.alias) if not each.is_silenced()]
    yield from map(_finding, found)
    if not found:
        yield ok("sqlsem.D000", "The login has the rights that application locks need.")


def _finding(message: django_checks.CheckMessage) -> Finding:
    level = next((level for lowest, level in _LEVELS if message.level >= lowest), Level.NOTE)
    return Finding(message.id or "", level, str(message.msg), str(message.hint or ""))


def examine_connections(patient: Patient) -> Iterator[Finding]:
    """Say how pools and persistent connections stand to the library's own connections."""
    settings = connections.settings[patient.alias]
    beside = "Those for locks, up to 2 a process, come beside them."
    if patient.vendor == "postgresql" and patient.options.get("pool"):
        text = f"The alias has a pool of connections. {beside}"
        yield note("sqlsem.D009", text, "Count them in: no lock is ever kept on a connection of the pool.")
    elif settings.get("CONN_MAX_AGE") is None or settings.get("CONN_MAX_AGE", 0) > 0:
        yield ok("sqlsem.D009", f"The alias has persistent connections. {beside}")
    else:
        yield ok("sqlsem.D009", f"The alias's connections are closed after each request. {beside}")


def unreachable(alias: str, reason: object) -> Finding:
    """Return the finding for a database that cannot be connected to."""
    text = f"The database cannot be reached: {str(reason).strip() or type(reason).__name__}"
    return error("sqlsem.D001", text, "No lock can be had until it answers. Look at HOST, PORT, USER and the network.")


def examine(using: str | None = None, *, acquire: bool = True) -> Iterator[Finding]:
    """Yield what is found, as it is found: about the settings, and about ``using`` or all aliases that keep locks.

    ``acquire``: whether locks are taken, and a child process is killed, for the sake of it. Nothing else is written.
    """
    yield from examine_configuration()
    for alias in [using] if using else named():
        for finding in _examine(alias, acquire=acquire):
            yield dataclasses.replace(finding, database=alias)


def _examine(alias: str, *, acquire: bool) -> Iterator[Finding]:
    try:
        backend = get_backend(queries.locks_database(alias))
    except ImproperlyConfigured as wrong:
        yield error("sqlsem.E001", str(wrong), "See the settings.")
        return
    if backend.process_local:
        text = "Locks are kept inside each process, and keep no other process out."
        yield error("sqlsem.D008", text, "Keep them in a file or on a server, and leave BACKEND at None.")
        return
    try:
        connection = open_connection(alias)
    except (DatabaseError, ImproperlyConfigured, OSError) as reason:
        yield unreachable(alias, reason)
        return
    try:
        patient = Patient(alias, connection)
        yield from servers.examine(patient)
        yield from examine_connections(patient)
        yield from _looked(patient)
        if acquire and patient.has_tables:
            yield from trials.acquire(patient)
            yield from trials.crash(patient)
    finally:
        connection.close()


def _looked(patient: Patient) -> Iterator[Finding]:
    try:
        if patient.vendor == "sqlite":
            yield from servers.examine_files(patient)
        yield from servers.examine_tables(patient)
        if keeps_applocks(patient.alias):
            yield from examine_mssql(patient)
        if patient.has_tables:
            yield from servers.examine_names(patient)
    except ImproperlyConfigured as wrong:
        yield error(
            "sqlsem.D001", f"The project's own connection cannot be opened: {wrong}", "Nothing works without it."
        )
    except (DatabaseError, BackendError) as failed:
        text = f"The database could not be examined: {str(failed).strip()}"
        yield note("sqlsem.D002", text, "Look at the login's rights.")


def worst(findings: Iterable[Finding]) -> int:
    """Return the rank of the worst level among the findings."""
    return max((finding.level.rank for finding in findings), default=0)
