"""System checks. Every id has a heading in ``docs/checks.md``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections

from django_sqlsem.backends import database_for, get_backend
from django_sqlsem.backends.dialects import dialect_for
from django_sqlsem.conf import config
from django_sqlsem.models import SemaphoreRow


def register() -> None:
    """Register the checks; called once the apps are ready."""
    checks.register(check_settings)
    checks.register(check_database, checks.Tags.database)


def check_settings(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> Iterable[checks.CheckMessage]:
    """Report a bad ``SQLSEM`` setting, and a lock database that there are no semaphores for."""
    try:
        config()
        alias = database_for(None)
        get_backend(alias)
        if config(alias).backend is None:
            dialect_for(connections[alias])
    except ImproperlyConfigured as error:
        hint = "See docs/checks.md#sqlseme001."
        yield checks.Error(str(error), hint=hint, id="sqlsem.E001")
        return
    connection = connections[alias]
    if connection.vendor == "sqlite" and connection.settings_dict.get("OPTIONS", {}).get("transaction_mode") is None:
        yield checks.Warning(
            f"The SQLite database {alias!r} begins its transactions without the write lock.",
            hint=(
                'Set OPTIONS["transaction_mode"] = "IMMEDIATE", or two transactions that read before they write '
                "fail with 'database is locked'. See docs/checks.md#sqlsemw001."
            ),
            id="sqlsem.W001",
        )


def check_database(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> Iterable[checks.CheckMessage]:
    """Report lock tables that are not there. Runs with ``check --database`` and with ``migrate``."""
    try:
        alias = database_for(None)
    except ImproperlyConfigured:
        return
    if alias not in (databases or ()):
        return
    connection = connections[alias]
    try:
        with connection.cursor() as cursor:
            missing = SemaphoreRow._meta.db_table not in connection.introspection.table_names(cursor)
    except Error as error:
        yield checks.Warning(
            f"The lock database {alias!r} could not be reached: {error}",
            hint="See docs/checks.md#sqlsemw002.",
            id="sqlsem.W002",
        )
        return
    if missing:
        yield checks.Warning(
            f"The lock tables are missing in the database {alias!r}.",
            hint=f"Run manage.py migrate --database {alias}. See docs/checks.md#sqlsemw003.",
            id="sqlsem.W003",
        )
