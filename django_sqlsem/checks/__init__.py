"""System checks. Every id has a heading in ``docs/checks.md``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from django.apps import AppConfig
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router

from django_sqlsem.backends import database_for, get_backend
from django_sqlsem.checks import celery, databases, sqlserver, views
from django_sqlsem.conf import config
from django_sqlsem.core import testmode
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.models import SemaphoreRow

#: Below this many seconds a busy machine or a slow statement begins to cost permits.
SHORT_LEASE: Final = 10.0


def register() -> None:
    """Register the checks; called once the apps are ready."""
    for check in _STATIC:
        checks.register(check)
    checks.register(sqlserver.check_databases, checks.Tags.database)


def static_messages() -> Iterable[checks.CheckMessage]:
    """Run all checks that need no connection."""
    for check in _STATIC:
        yield from check(None)


def check_settings(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> Iterable[checks.CheckMessage]:
    """Report a bad ``SQLSEM`` setting, and a lock database that there are no semaphores for."""
    try:
        config()
        alias = database_for(None)
        if list(sqlserver.driver_messages(alias, connections.settings[alias])):
            return  # sqlsem.E003 says more
        backend = get_backend(alias)
        if config(alias).backend is None:
            dialect_for(connections[alias])
    except ImproperlyConfigured as error:
        hint = "See docs/checks.md#sqlseme001."
        yield checks.Error(str(error), hint=hint, id="sqlsem.E001")
        return
    if connections[alias].vendor == "sqlite":
        yield from _sqlite(alias)
    if not router.allow_migrate_model(alias, SemaphoreRow):
        yield checks.Error(
            f"The database routers do not let migrate create the lock tables in {alias!r}, where locks are kept.",
            hint="Let them allow the app 'sqlsem' there. See docs/checks.md#sqlseme007.",
            id="sqlsem.E007",
        )
    if backend.process_local and not testmode.active():
        yield checks.Warning(
            f"The locks of {alias!r} are kept inside each process, and keep no other process out.",
            hint="Keep them in a file or on a server. See docs/checks.md#sqlsemw010.",
            id="sqlsem.W010",
        )
    if backend.supports_renewal and config(alias).lease < SHORT_LEASE:
        yield checks.Warning(
            f"A lease of {config(alias).lease:g} s is short: a busy machine or a slow statement will cost permits.",
            hint=f'Let SQLSEM["LEASE"] be {SHORT_LEASE:g} or more. See docs/checks.md#sqlsemw011.',
            id="sqlsem.W011",
        )


def _sqlite(alias: str) -> Iterable[checks.CheckMessage]:
    settings: dict[str, Any] = connections[alias].settings_dict
    if settings.get("OPTIONS", {}).get("transaction_mode") is None:
        yield checks.Warning(
            f"The SQLite database {alias!r} begins its transactions without the write lock.",
            hint=(
                'Set OPTIONS["transaction_mode"] = "IMMEDIATE", or two transactions that read before they write '
                "fail with 'database is locked'. See docs/checks.md#sqlsemw001."
            ),
            id="sqlsem.W001",
        )
    if settings.get("ATOMIC_REQUESTS"):
        yield checks.Warning(
            f"ATOMIC_REQUESTS is on for the SQLite database {alias!r}, where locks are kept.",
            hint=(
                "Inside a transaction a permit is refused instead of waited for, unless the view itself is decorated. "
                'Keep the locks in a file of their own: SQLSEM["DATABASE"]. See docs/checks.md#sqlsemw012.'
            ),
            id="sqlsem.W012",
        )


_STATIC: Final = (
    check_settings,
    databases.check_databases,
    sqlserver.check_settings,
    celery.check_celery,
    views.check_views,
)
