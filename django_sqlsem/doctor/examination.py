"""The order of the examination: the settings, and then each database that keeps locks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError

from django_sqlsem import queries
from django_sqlsem.backends import get_backend
from django_sqlsem.checks_mssql import keeps_applocks, named
from django_sqlsem.doctor import configuration, files, names, servers, tables, trials
from django_sqlsem.doctor.findings import Finding, error, note
from django_sqlsem.doctor.patients import Patient
from django_sqlsem.exceptions import BackendError
from django_sqlsem.own_connections import open_connection


def examine(using: str | None = None, *, acquire: bool = True) -> Iterator[Finding]:
    """Yield what is found, as it is found: about the settings, and about ``using`` or all aliases that keep locks.

    ``acquire``: whether locks are taken, and a child process is killed, for the sake of it. Nothing else is written.
    """
    yield from configuration.examine()
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
        yield configuration.unreachable(alias, reason)
        return
    try:
        patient = Patient(alias, connection)
        yield from servers.examine(patient)
        yield from configuration.examine_connections(patient)
        yield from _looked(patient)
        if acquire and patient.has_tables:
            yield from trials.acquire(patient)
            yield from trials.crash(patient)
    finally:
        connection.close()


def _looked(patient: Patient) -> Iterator[Finding]:
    try:
        if patient.vendor == "sqlite":
            yield from files.examine(patient)
        yield from tables.examine(patient)
        if keeps_applocks(patient.alias):
            yield from configuration.examine_mssql(patient)
        if patient.has_tables:
            yield from names.examine(patient)
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
