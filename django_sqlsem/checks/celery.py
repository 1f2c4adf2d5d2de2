"""System checks of how leases and waits fit Celery's limits. Every id has a heading in ``docs/checks.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_sqlsem.backends import database_for
from django_sqlsem.conf import Config, config
from django_sqlsem.core import greenlets

#: For how many seconds a busy task is put off at the most: that of ``contrib.celery``.
LONGEST_COUNTDOWN: Final = 300.0
#: Transports that deliver a message again which nobody acknowledges, and after how many seconds by default.
REDELIVERING: Final = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}


@dataclass(frozen=True, slots=True)
class Limits:
    """What Celery is told, in seconds; ``None``: nothing."""

    soft: float | None = None
    hard: float | None = None
    #: After what time the broker delivers again what nobody has acknowledged.
    visibility: float | None = None
    acks_late: bool = False
    #: Whose greenlets its workers use: ``gevent``, ``eventlet``, or nobody's.
    pool: str = ""

    @property
    def shortest(self) -> float | None:
        """When a task is stopped at first."""
        return min((each for each in (self.soft, self.hard) if each), default=None)


def limits() -> Limits | None:
    """Return Celery's limits: of its app if one was made, else of settings that begin with ``CELERY_``.

    ``None`` if neither is there.
    """
    found = _of_app() or {name[7:].lower(): getattr(settings, name) for name in dir(settings) if name[:7] == "CELERY_"}
    if not found:
        return None
    scheme = str(found.get("broker_url") or "").partition("://")[0].partition("+")[0].lower()
    options = found.get("broker_transport_options") or {}
    visibility = options.get("visibility_timeout", REDELIVERING.get(scheme)) if isinstance(options, dict) else None
    return Limits(
        _seconds(found.get("task_soft_time_limit")),
        _seconds(found.get("task_time_limit")),
        _seconds(visibility),
        bool(found.get("task_acks_late")),
        _pool(found),
    )


_KEYS: Final = (
    "broker_url",
    "broker_transport_options",
    "task_soft_time_limit",
    "task_time_limit",
    "task_acks_late",
    "worker_pool",
)


def _pool(found: dict[str, Any]) -> str:
    pool = greenlets.library() or str(found.get("worker_pool") or "").rpartition(".")[2].lower()
    return pool if pool in ("gevent", "eventlet") else ""


def _of_app() -> dict[str, Any]:
    state: Any = sys.modules.get("celery._state")  # never imported for its own sake
    try:
        # Asking for the current app would make one, were there none.
        app = None if state is None else state._tls.current_app or state.default_app
        return {} if app is None else {key: app.conf.get(key) for key in _KEYS}
    except Exception:  # noqa: BLE001 - of the project's own configuration: Celery says so when it starts
        return {}


def _seconds(value: object) -> float | None:
    try:
        return float(value) if value else None  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def check_celery(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> Iterable[checks.CheckMessage]:
    """Report leases, waits and countdowns that do not fit Celery's limits."""
    try:
        ours, tasks = config(database_for(None)), config()
    except ImproperlyConfigured:  # sqlsem.E001
        return
    found = limits()
    if found is not None:
        yield from messages(found, ours, tasks.task_timeout)
    yield from pool_messages(found.pool if found is not None else greenlets.library(), database_for(None))


def pool_messages(pool: str, alias: str) -> Iterable[checks.CheckMessage]:
    """Yield what does not suit greenlets: those of Celery's pool, or of this very interpreter."""
    try:
        connection = connections[alias]
    except ImproperlyConfigured:  # a driver that is not there: sqlsem.E003, or Django's own words
        return
    if why := greenlets.refusal(pool, connection.vendor, alias):
        yield checks.Error(why, hint="See docs/checks.md#sqlseme008.", id="sqlsem.E008")
    elif slow := greenlets.reproach(pool, connection):
        yield checks.Warning(
            f"Locks of {alias!r} are taken under gevent: {slow}",
            hint="See docs/checks.md#sqlsemw017.",
            id="sqlsem.W017",
        )


def messages(found: Limits, ours: Config, task_timeout: float | None) -> Iterable[checks.CheckMessage]:
    """Yield what does not fit."""
    if found.visibility is not None and found.visibility <= LONGEST_COUNTDOWN:
        yield checks.Warning(
            f"The broker delivers again after {found.visibility:g} s what nobody has acknowledged, and a busy task is"
            f" put off for up to {LONGEST_COUNTDOWN:g} s.",
            hint="Raise visibility_timeout, or such tasks come twice. See docs/checks.md#sqlsemw007.",
            id="sqlsem.W007",
        )
    elif found.visibility is not None and found.acks_late and (found.hard or float("inf")) >= found.visibility:
        yield checks.Warning(
            f"The broker delivers again after {found.visibility:g} s what nobody has acknowledged, and a task may run"
            f" {'longer' if found.hard is None else f'for {found.hard:g} s'}, being acknowledged at its end.",
            hint="Raise visibility_timeout above the tasks' time limit. See docs/checks.md#sqlsemw007.",
            id="sqlsem.W007",
        )
    if found.shortest is not None and (task_timeout is None or task_timeout >= found.shortest):
        waits = "without a limit" if task_timeout is None else f"for up to {task_timeout:g} s"
        yield checks.Warning(
            f"A task waits for a slot {waits}, and is stopped after {found.shortest:g} s, waiting or not.",
            hint='Lower SQLSEM["TASK_TIMEOUT"]: 0 sends it again for later. See docs/checks.md#sqlsemw008.',
            id="sqlsem.W008",
        )
    if not ours.beacons and found.hard is not None and ours.lease > found.hard:
        yield checks.Warning(
            f"A task is killed after {found.hard:g} s, and its slot stays taken for a lease of {ours.lease:g} s.",
            hint='Shorten SQLSEM["LEASE"], or leave BEACONS on. See docs/checks.md#sqlsemw009.',
            id="sqlsem.W009",
        )
