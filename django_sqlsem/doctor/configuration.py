"""The settings: what the system checks say, and how the project's connections stand to locks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from django.core import checks as django_checks
from django.db import connections

from django_sqlsem import checks, checks_mssql
from django_sqlsem.doctor.findings import Finding, Level, error, note, ok
from django_sqlsem.doctor.patients import Patient

_LEVELS: Final = (
    (django_checks.ERROR, Level.ERROR),
    (django_checks.WARNING, Level.WARNING),
    (django_checks.INFO, Level.NOTE),
)


def examine() -> Iterator[Finding]:
    """Run the system checks that need no connection. They may be silenced, as in ``check``."""
    found = [each for each in checks.static_messages() if not each.is_silenced()]
    yield from map(_finding, found)
    if not found:
        yield ok("sqlsem.D000", "The system checks have nothing to say about the settings.")


def examine_mssql(patient: Patient) -> Iterator[Finding]:
    """Ask SQL Server for the rights that application locks need."""
    found = [each for each in checks_mssql.database_messages(patient.alias) if not each.is_silenced()]
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
