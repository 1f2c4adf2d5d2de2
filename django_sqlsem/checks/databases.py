"""System checks of the alias that keeps the locks: tenants' schemas, read-only options, no autocommit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_sqlsem.backends import database_for
from django_sqlsem.database.server import is_per_tenant

if TYPE_CHECKING:
    from django.apps import AppConfig


_READ_ONLY: Final = re.compile(
    r"default_transaction_read_only\s*=\s*'?(on|true|yes|1)\b|\btransaction_read_only\s*=\s*'?(on|1)\b|\bREAD ONLY\b",
    re.IGNORECASE,
)
_STANDBY: Final = ("read-only", "standby", "prefer-standby")
_READ_ONLY_FILE: Final = re.compile(r"^file:.*[?&](mode=ro|immutable=1)\b")


def check_databases(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> Iterable[checks.CheckMessage]:
    """Report what the settings of the locks' alias say against it; nothing if there is no such alias."""
    try:
        alias = database_for(None)
        connection = connections[alias]
    except ImproperlyConfigured:
        return  # sqlsem.E001 says it
    settings: dict[str, Any] = connection.settings_dict
    if is_per_tenant(connection, "sqlsem"):
        yield checks.Warning(
            "TENANT_APPS has django_sqlsem: each tenant's schema gets lock tables that no acquire uses.",
            hint="Let SHARED_APPS alone have it: locks are in the schema public. See docs/checks.md#sqlsemw020.",
            id="sqlsem.W020",
        )
    if why := _read_only(settings):
        yield checks.Warning(
            f"The database {alias!r}, where locks are kept, is asked for as a read-only one: {why}.",
            hint='Name an alias that leads to the primary in SQLSEM["DATABASE"]. See docs/checks.md#sqlsemw021.',
            id="sqlsem.W021",
        )
    if not settings.get("AUTOCOMMIT", True):
        yield checks.Warning(
            f"AUTOCOMMIT is off for {alias!r}, where locks are kept: operators' acts are refused there.",
            hint='Name an alias with AUTOCOMMIT in SQLSEM["DATABASE"]. See docs/checks.md#sqlsemw022.',
            id="sqlsem.W022",
        )


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
