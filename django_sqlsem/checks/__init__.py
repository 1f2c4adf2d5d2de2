"""System checks, by subject. Every id has a heading in ``docs/checks.md``; ``locks doctor`` asks more."""

from __future__ import annotations

from typing import Final

from django.core import checks

from django_sqlsem.checks import servers, settings, sqlserver, views

#: The checks that need no connection.
STATIC: Final = (
    settings.check_settings,
    settings.check_alias,
    sqlserver.check_sqlserver,
    settings.check_celery,
    views.check_views,
    views.check_declared,
)


def register() -> None:
    """Register the checks. Those that ask a server run with ``--database``, and most of them with ``--deploy`` only."""
    for check in STATIC:
        checks.register(check)
    checks.register(sqlserver.check_rights, checks.Tags.database)
    checks.register(servers.check_tables, checks.Tags.database)
    checks.register(servers.check_servers, checks.Tags.database, deploy=True)
