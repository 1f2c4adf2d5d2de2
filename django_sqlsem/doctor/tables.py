"""The lock tables: whether they are there, up to date, and of a kind that keeps locks."""

from __future__ import annotations

from collections.abc import Iterator

from django.apps import apps
from django.db import router
from django.db.migrations.loader import MigrationLoader

from django_sqlsem.doctor.findings import Finding, error, ok
from django_sqlsem.doctor.patients import Patient


def examine(patient: Patient) -> Iterator[Finding]:
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
