"""System checks. Every id has a heading in ``docs/checks.md``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_sqlsem import checks_mssql
from django_sqlsem.backends import database_for, get_backend
from django_sqlsem.backends.dialects import dialect_for
from django_sqlsem.conf import config


def register() -> None:
    """Register the checks; called once the apps are ready."""
    checks.register(check_settings)
    checks.register(checks_mssql.check_settings)
    checks.register(checks_mssql.check_databases, checks.Tags.database)


def check_settings(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> Iterable[checks.CheckMessage]:
    """Report a bad ``SQLSEM`` setting, and a lock database that there are no semaphores for."""
    try:
        config()
        alias = database_for(None)
        if list(checks_mssql.driver_messages(alias, connections.settings[alias])):
            return  # sqlsem.E003 says more
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
