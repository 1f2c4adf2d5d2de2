"""System checks of settings: ``SQLSEM``, the alias that keeps the locks, Celery's limits, and greenlets."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.apps import AppConfig
from django.conf import settings as project
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router

from django_sqlsem.backends import database_for, get_backend
from django_sqlsem.checks import sqlserver
from django_sqlsem.checks.messages import error, warning
from django_sqlsem.conf import Config, config
from django_sqlsem.core import greenlets, testmode
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


# How leases and waits fit Celery's limits.

#: For how many seconds a busy task is put off at the most: that of ``contrib.celery``.
LONGEST_COUNTDOWN: Final = 300.0
#: Transports that deliver an unacknowledged message again, and after how many seconds by default.
REDELIVERING: Final = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}


@dataclass(frozen=True, slots=True)
class Limits:
    """What Celery is told, in seconds; ``None``: nothing."""

    soft: float | None = None
    hard: float | None = None
    #: After what time the broker delivers an unacknowledged message again.
    visibility: float | None = None
    acks_late: bool = False
    #: The library whose greenlets its workers use: ``gevent``, ``eventlet``, or none.
    pool: str = ""

    @property
    def shortest(self) -> float | None:
        """When a task is stopped at first."""
        return min((each for each in (self.soft, self.hard) if each), default=None)


def limits() -> Limits | None:
    """Return Celery's limits: of its app if one was made, else of settings that begin with ``CELERY_``.

    ``None`` if neither is there.
    """
    ours = {name[7:].lower(): getattr(project, name) for name in dir(project) if name[:7] == "CELERY_"}
    state: Any = sys.modules.get("celery._state")  # never imported for its own sake
    try:
        # Asking for the current app would make one, were there none.
        app = state and (state._tls.current_app or state.default_app)
        return _limits(app.conf if app else ours) if app or ours else None
    except Exception:  # noqa: BLE001 - of the project's own configuration: Celery says so when it starts
        return _limits(ours) if ours else None


def _limits(found: Mapping[str, Any]) -> Limits:
    scheme = str(found.get("broker_url") or "").partition("://")[0].partition("+")[0].lower()
    options = found.get("broker_transport_options") or {}
    visibility = options.get("visibility_timeout", REDELIVERING.get(scheme)) if isinstance(options, dict) else None
    pool = greenlets.library() or str(found.get("worker_pool") or "").rpartition(".")[2].lower()
    return Limits(
        _seconds(found.get("task_soft_time_limit")),
        _seconds(found.get("task_time_limit")),
        _seconds(visibility),
        bool(found.get("task_acks_late")),
        pool if pool in ("gevent", "eventlet") else "",
    )


def _seconds(value: object) -> float | None:
    try:
        return float(value) if value else None  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def check_celery(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> Iterable[CheckMessage]:
    """Report leases, waits and countdowns that do not fit Celery's limits."""
    try:
        alias = database_for(None)
        ours, tasks = config(alias), config()
    except ImproperlyConfigured:  # E001 says it
        return
    found = limits()
    if found is not None:
        yield from limit_messages(found, ours, tasks.task_timeout)
    yield from _of_greenlets(found.pool if found is not None else greenlets.library(), alias)


def _of_greenlets(pool: str, alias: str) -> Iterable[CheckMessage]:
    """Yield what does not suit greenlets: those of Celery's pool, or of this very interpreter."""
    try:
        connection = connections[alias]
    except ImproperlyConfigured:  # a driver that is not there: E003, or Django's own words
        return
    if why := greenlets.refusal(pool, connection.vendor, alias):
        yield error("E008", why)
    elif slow := greenlets.slowness(pool, connection):
        yield warning("W017", f"Locks of {alias!r} are taken under gevent: {slow}")


def limit_messages(found: Limits, ours: Config, task_timeout: float | None) -> Iterable[CheckMessage]:
    if found.visibility is not None:
        again = f"The broker delivers an unacknowledged message again after {found.visibility:g} s, and"
        if found.visibility <= LONGEST_COUNTDOWN:
            text = f"{again} a busy task is put off for up to {LONGEST_COUNTDOWN:g} s."
            yield warning("W007", text, "Raise visibility_timeout, or such tasks come twice.")
        elif found.acks_late and (found.hard or float("inf")) >= found.visibility:
            runs = "longer" if found.hard is None else f"for {found.hard:g} s"
            text = f"{again} a task may run {runs}, being acknowledged at its end."
            yield warning("W007", text, "Raise visibility_timeout above the tasks' time limit.")
    if found.shortest is not None and (task_timeout is None or task_timeout >= found.shortest):
        waits = "without a limit" if task_timeout is None else f"for up to {task_timeout:g} s"
        text = f"A task waits for a slot {waits}, and is stopped after {found.shortest:g} s, waiting or not."
        yield warning("W008", text, 'Lower SQLSEM["TASK_TIMEOUT"]: 0 sends it again for later.')
    if not ours.beacons and found.hard is not None and ours.lease > found.hard:
        text = f"A task is killed after {found.hard:g} s, and its slot stays taken for a lease of {ours.lease:g} s."
        yield warning("W009", text, 'Shorten SQLSEM["LEASE"], or leave BEACONS on.')
