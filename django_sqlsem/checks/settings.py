"""System checks of ``SQLSEM``, and of the alias that keeps the locks: SQLite's options, replicas, tenants."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from django.apps import AppConfig
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router

from django_sqlsem.backends import database_for, get_backend
from django_sqlsem.checks import sqlserver
from django_sqlsem.checks.messages import error, warning
from django_sqlsem.conf import config
from django_sqlsem.core import testmode
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.server import is_per_tenant
from django_sqlsem.models import SemaphoreRow

#: Below this many seconds a busy machine or a slow statement begins to cost permits.
SHORT_LEASE: Final = 10.0
_READ_ONLY: Final = re.compile(
    r"default_transaction_read_only\s*=\s*'?(on|true|yes|1)\b|\btransaction_read_only\s*=\s*'?(on|1)\b|\bREAD ONLY\b",
    re.IGNORECASE,
)
_STANDBY: Final = ("read-only", "standby", "prefer-standby")
_READ_ONLY_FILE: Final = re.compile(r"^file:.*[?&](mode=ro|immutable=1)\b")


def check_settings(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> Iterable[CheckMessage]:
    """Report a bad ``SQLSEM`` setting, and a lock database that there are no semaphores for."""
    try:
        config()
        alias = database_for(None)
        if list(sqlserver.driver_messages(alias, connections.settings[alias])):
            return  # E003 says more
        backend = get_backend(alias)
        if config(alias).backend is None:
            dialect_for(connections[alias])
    except ImproperlyConfigured as wrong:
        yield error("E001", str(wrong))
        return
    if not router.allow_migrate_model(alias, SemaphoreRow):
        text = f"The database routers do not let migrate create the lock tables in {alias!r}, where locks are kept."
        yield error("E007", text, "Let them allow the app 'sqlsem' there.")
    if backend.process_local and not testmode.active():
        text = f"The locks of {alias!r} are kept inside each process, and keep no other process out."
        yield warning("W010", text, "Keep them in a file or on a server.")
    lease = config(alias).lease
    if backend.supports_renewal and lease < SHORT_LEASE:
        text = f"A lease of {lease:g} s is short: a busy machine or a slow statement will cost permits."
        yield warning("W011", text, f'Let SQLSEM["LEASE"] be {SHORT_LEASE:g} or more.')


def check_alias(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> Iterable[CheckMessage]:
    """Report what the settings of the locks' alias say against it; nothing if there is no such alias."""
    try:
        alias = database_for(None)
        connection = connections[alias]
    except ImproperlyConfigured:
        return  # E001 says it
    options: dict[str, Any] = connection.settings_dict
    if connection.vendor == "sqlite":
        yield from _sqlite(alias, options)
    if is_per_tenant(connection, "sqlsem"):
        text = "TENANT_APPS has django_sqlsem: each tenant's schema gets lock tables that no acquire uses."
        yield warning("W020", text, "Let SHARED_APPS alone have it: locks are in the schema public.")
    if why := _read_only(options):
        text = f"The database {alias!r}, where locks are kept, is opened read-only: {why}."
        yield warning("W021", text, 'Name an alias that leads to the primary in SQLSEM["DATABASE"].')
    if not options.get("AUTOCOMMIT", True):
        text = f"AUTOCOMMIT is off for {alias!r}, where locks are kept: operators' acts are refused there."
        yield warning("W022", text, 'Name an alias with AUTOCOMMIT in SQLSEM["DATABASE"].')


def _sqlite(alias: str, settings: dict[str, Any]) -> Iterable[CheckMessage]:
    if settings.get("OPTIONS", {}).get("transaction_mode") is None:
        text = f"The SQLite database {alias!r} begins its transactions without the write lock."
        advice = (
            'Set OPTIONS["transaction_mode"] = "IMMEDIATE", or two transactions that read before they write fail with'
            " 'database is locked'."
        )
        yield warning("W001", text, advice)
    if settings.get("ATOMIC_REQUESTS"):
        text = f"ATOMIC_REQUESTS is on for the SQLite database {alias!r}, where locks are kept."
        advice = (
            "Inside a transaction a permit is refused instead of waited for, unless the view itself is decorated. "
            'Keep the locks in a file of their own: SQLSEM["DATABASE"].'
        )
        yield warning("W012", text, advice)


def _read_only(settings: dict[str, Any]) -> str:
    """Return the option that leads to a replica, or keeps every transaction from writing; empty without one."""
    options: dict[str, Any] = settings.get("OPTIONS") or {}
    if (wanted := str(options.get("target_session_attrs", ""))) in _STANDBY:
        return f"target_session_attrs is {wanted!r}"
    for name in ("options", "init_command"):
        if _READ_ONLY.search(str(options.get(name, ""))):
            return f"{name} is {options[name]!r}"
    if _READ_ONLY_FILE.search(str(settings.get("NAME", ""))):
        return f"NAME is {settings['NAME']!r}"
    return ""
