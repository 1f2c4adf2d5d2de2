"""System checks, by subject. Every id has a heading in ``docs/checks.md``; ``locks doctor`` asks more."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, Final

from django.core import checks


def _loaded_when_run(module: str, name: str) -> Callable[..., Iterable[checks.CheckMessage]]:
    # A web server's processes run no checks, and loading them takes 1.5 MB.
    def check(app_configs: Any, **kwargs: Any) -> Iterable[checks.CheckMessage]:
        found: Iterable[checks.CheckMessage]
        found = getattr(importlib.import_module(f"{__name__}.{module}"), name)(app_configs, **kwargs)
        return found

    return check


#: The checks that need no connection.
STATIC: Final = (
    _loaded_when_run("settings", "check_settings"),
    _loaded_when_run("settings", "check_alias"),
    _loaded_when_run("sqlserver", "check_sqlserver"),
    _loaded_when_run("settings", "check_celery"),
    _loaded_when_run("views", "check_views"),
    _loaded_when_run("views", "check_declared"),
)


def register() -> None:
    """Register the checks. Those that ask a server run with ``--database``, and most of them with ``--deploy`` only."""
    for check in STATIC:
        checks.register(check)
    checks.register(_loaded_when_run("sqlserver", "check_rights"), checks.Tags.database)
    checks.register(_loaded_when_run("servers", "check_tables"), checks.Tags.database)
    checks.register(_loaded_when_run("servers", "check_servers"), checks.Tags.database, deploy=True)
