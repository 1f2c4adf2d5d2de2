"""The ``SQLSEM`` setting: optional, flat, with ``DATABASES`` to override a value per alias."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from string import Formatter
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import connections
from django.dispatch import receiver

from django_sqlsem.core.durations import to_seconds
from django_sqlsem.core.names import validate_max_waiting
from django_sqlsem.core.text import shown

#: As many waiting views as leave a site answering.
AUTO: Final = "auto"
#: The shortest lease: below it, a slow statement or a busy machine would cost a permit.
MIN_LEASE: Final = 1.0
#: The shortest time after which names are forgotten: below it, they would come and go while they are in use.
MIN_FORGET: Final = 60.0


@dataclass(frozen=True, slots=True)
class Config:
    """What ``SQLSEM`` says for one database. Lengths are seconds."""

    #: Alias of the database that keeps the locks; ``None``: where the router writes the lock tables.
    database: str | None = None
    #: Dotted path of a backend class; ``None``: chosen by the database's vendor.
    backend: str | None = None
    #: How long a plain acquire waits; ``None`` waits without a limit.
    timeout: float | None = 30.0
    #: How long a decorated view waits.
    view_timeout: float | None = 5.0
    #: How many may wait for a name already if a decorated view is to wait too; ``None``: any number. ``AUTO``: none in
    #: a process's main thread, as that serves one request at a time, one in another thread, any number of coroutines.
    view_max_waiting: int | str | None = "auto"
    #: How long a decorated Celery task waits before it is retried.
    task_timeout: float | None = 0.0
    #: How long a grant lasts unless it is renewed. It is renewed four times as often.
    lease: float = 60.0
    #: Whether a grant must survive a crash of the database's server.
    durable: bool = True
    #: Whether a dead process's slots come back at once, and a process that is cut off loses its own as soon.
    beacons: bool = True
    #: Whether a row is kept beside each application lock; without it no holder is named and no permit has a token.
    record: bool = True
    #: Where the database is, in the order in which they are asked, perhaps with ``:port``; none: as the alias says.
    hosts: tuple[str, ...] = ()
    #: Whether the lock tables are, or are to be, distributed over several servers by Citus.
    citus: bool = False
    #: How long an unused connection stays open.
    idle: float = 60.0
    #: The status of a busy view.
    busy_status: int = 503
    #: Whether what happens is recorded, for the dashboard.
    history: bool = True
    #: How long grants and their ends are kept.
    history_grants: float = 3600.0
    #: How long losses, deadlocks and operators' acts are kept.
    history_acts: float = 30 * 86400.0
    #: How long the statistics of each minute are kept.
    history_minutes: float = 7 * 86400.0
    #: How long names are kept that nobody uses; ``None``: for ever.
    forget_after: float | None = 30 * 86400.0
    #: What is done about deadlocks: ``"report"``, ``"break"``, or ``"ignore"``.
    deadlocks: str = "report"
    #: Templates of the addresses that the admin's pages lead to, by the keys of ``LINKS``.
    links: Mapping[str, str] = field(default_factory=dict)


DEADLOCKS: Final = ("report", "break", "ignore")
#: What ``HISTORY`` may hold: how long each is kept.
HISTORY: Final = ("GRANTS", "ACTS", "MINUTES")

#: What ``LINKS`` may hold: which fields each template may have; one of the first group it must have.
LINKS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "task": (("task_id",), ("task",)),
    "trace": (("trace_id",), ()),
    "logs": (
        ("name", "host", "pid", "thread", "user", "task_id", "trace_id"),
        ("task", "since", "until", "since_ms", "until_ms"),
    ),
}

#: The type of each key's values, as ``Config`` writes it: a float is a number of seconds.
_TYPES: Final = {each.name.upper(): each.type for each in fields(Config) if not each.name.startswith("history_")}
_NOT_PER_ALIAS = ("DATABASE", "VIEW_TIMEOUT", "VIEW_MAX_WAITING", "TASK_TIMEOUT", "BUSY_STATUS", "DATABASES", "LINKS")
KEYS: Final = (*sorted(_TYPES), "DATABASES")


def _read(raw: dict[str, Any], where: str, allowed: tuple[str, ...], alias: str | None = None) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in allowed:
            raise ImproperlyConfigured(f"{where} has an unknown key {shown(key)}; allowed are {', '.join(allowed)}.")
        name = f"{where}[{key!r}]"
        try:
            if key == "HISTORY" and isinstance(value, dict):
                values |= _history(value, name)
            elif key == "LINKS":
                values["links"] = _links(value, name)
            elif key == "HOSTS":
                values["hosts"] = _hosts(value, name, alias)
            elif key == "CITUS" and value is True and alias and connections[alias].vendor != "postgresql":
                raise ValueError(f"{name} is for PostgreSQL: Citus is an extension of it.")
            else:
                values[str(key).lower()] = _value(key, value, name)
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(str(error)) from error
    return values


def _history(kept: dict[Any, Any], name: str) -> dict[str, Any]:
    """Return a history that is recorded, and how long what is kept."""
    values: dict[str, Any] = {"history": True}
    for key, value in kept.items():
        if key not in HISTORY:
            raise ValueError(f"{name} has an unknown key {shown(key)}; allowed are {', '.join(HISTORY)}.")
        values[f"history_{key.lower()}"] = to_seconds(value, what=f"{name}[{key!r}]")
    return values


def _links(templates: object, name: str) -> dict[str, str]:
    """Return the templates, each of an address with fields that can be filled in."""
    if not isinstance(templates, dict):
        raise TypeError(f"{name} must be a dict of {', '.join(LINKS)}, not {shown(templates)}.")
    for key, template in templates.items():
        if key not in LINKS:
            raise ValueError(f"{name} has an unknown key {shown(key)}; allowed are {', '.join(LINKS)}.")
        what, (needed, others) = f"{name}[{key!r}]", LINKS[key]
        if not isinstance(template, str) or not re.fullmatch(r"https?://[^\s\x00-\x1f]+", template):
            raise ValueError(f"{what} must be an address that begins with http:// or https://, not {shown(template)}.")
        try:
            parts = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
        except ValueError as error:
            raise ValueError(f"{what} is {shown(template)}: {error}. Write {{{{ and }}}} for braces.") from None
        for field_name, spec, conversion in parts:
            if field_name not in (*needed, *others) or spec or conversion:
                allowed = ", ".join(f"{{{each}}}" for each in (*needed, *others))
                raise ValueError(f"{what} has a field {shown(field_name)}; allowed are {allowed}, as they are.")
        if not {field_name for field_name, *_ in parts} & set(needed):
            raise ValueError(
                f"{what} needs {' or '.join(f'{{{each}}}' for each in needed)}: {shown(template)} has none."
            )
    return templates


def _hosts(value: object, name: str, alias: str | None) -> tuple[str, ...]:
    """Return the hosts of an alias; ``None``: of all of them, which cannot be."""
    if alias is None:
        raise ValueError(f"{name} is about one database: it must be in SQLSEM['DATABASES'].")
    if not isinstance(value, list | tuple) or not value or not all(isinstance(each, str) and each for each in value):
        raise TypeError(f"{name} must be a list of hosts, like ['db1', 'db2:3307'], not {shown(value)}.")
    if connections[alias].vendor != "mysql":
        raise ValueError(
            f"{name} is for MySQL and MariaDB: PostgreSQL takes several in HOST, other databases have one."
        )
    return tuple(value)


def _value(key: str, value: object, name: str) -> object:
    if _TYPES[key] in ("float", "float | None"):
        minimum = {"LEASE": MIN_LEASE, "FORGET_AFTER": MIN_FORGET}.get(key, 0.0)
        return to_seconds(value, what=name, minimum=minimum, allow_none=_TYPES[key] == "float | None")
    if key == "VIEW_MAX_WAITING":
        return value if value == AUTO else validate_max_waiting(value, what=name)
    if key == "DEADLOCKS":
        if value not in DEADLOCKS:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, DEADLOCKS))}, not {shown(value)}.")
        return value
    if _TYPES[key] == "bool":
        if not isinstance(value, bool):
            also = f", or a dict of {', '.join(HISTORY)} in seconds" if key == "HISTORY" else ""
            raise TypeError(f"{name} must be True or False{also}, not {shown(value)}.")
        return value
    if key == "BUSY_STATUS":
        if isinstance(value, bool) or not isinstance(value, int) or not 400 <= value <= 599:
            raise ValueError(f"{name} must be an HTTP error status from 400 to 599, not {shown(value)}.")
        return value
    if value is not None and (not isinstance(value, str) or not value):
        raise TypeError(f"{name} must be a non-empty str or None, not {shown(value)}.")
    if key == "DATABASE" and value is not None and value not in connections.settings:
        aliases = ", ".join(sorted(connections.settings))
        raise ValueError(f"{name} is {value!r}, which is not in DATABASES: {aliases}.")
    return value


@functools.cache
def config(alias: str | None = None) -> Config:
    """Return the settings in force for a database alias, or the general ones.

    Raises ``ImproperlyConfigured`` that names the key, its value and what is allowed.
    """
    raw = getattr(settings, "SQLSEM", {})
    if not isinstance(raw, dict):
        raise ImproperlyConfigured(f"SQLSEM must be a dict, not {shown(raw)}.")
    values = _read({key: value for key, value in raw.items() if key != "DATABASES"}, "SQLSEM", KEYS)
    if "view_timeout" in values:  # who says how long views wait wants them to wait
        values.setdefault("view_max_waiting", None)
    per_alias = raw.get("DATABASES", {})
    if not isinstance(per_alias, dict) or not all(isinstance(part, dict) for part in per_alias.values()):
        raise ImproperlyConfigured(f"SQLSEM['DATABASES'] must map aliases to dicts, not {shown(per_alias)}.")
    for name, part in per_alias.items():
        if name not in connections.settings:
            aliases = ", ".join(sorted(connections.settings))
            raise ImproperlyConfigured(
                f"SQLSEM['DATABASES'] names {shown(name)}, which is not in DATABASES: {aliases}."
            )
        allowed = tuple(key for key in KEYS if key not in _NOT_PER_ALIAS)
        overrides = _read(part, f"SQLSEM['DATABASES'][{name!r}]", allowed, name)
        if name == alias:
            values |= overrides
    return Config(**values)


@receiver(setting_changed, dispatch_uid="sqlsem_conf")
def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting in ("SQLSEM", "DATABASES"):
        config.cache_clear()
