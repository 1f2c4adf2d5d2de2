"""Backends by database alias: chosen by the database's vendor, or by ``SQLSEM["BACKEND"]``."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.utils.module_loading import import_string

from django_sqlsem.backends.base import BaseSemaphoreBackend
from django_sqlsem.conf import config
from django_sqlsem.core import forks, testmode
from django_sqlsem.core.text import shown
from django_sqlsem.exceptions import InvalidSemaphoreBackendError, not_installed

ROWS = "django_sqlsem.backends.rows.RowsBackend"
APPLOCK = "django_sqlsem.backends.applock.ApplockBackend"
LOCAL = "django_sqlsem.backends.local.LocalBackend"

_backends: dict[tuple[str, str], BaseSemaphoreBackend] = {}


def database_for(using: str | None = None) -> str:
    """Return the alias of the database that keeps the locks: always one for writing.

    ``using``, else ``SQLSEM["DATABASE"]``, else where the router writes the lock tables. Raises
    ``ImproperlyConfigured`` for an alias that is not in ``DATABASES``.
    """
    source = "using"
    if using is None:
        using = config().database
    if using is None:
        # By name: locks are defined in modules that Django imports before it knows the models.
        try:
            row = apps.get_model("sqlsem", "SemaphoreRow")
        except LookupError:
            raise not_installed() from None
        source, using = "The router's database for writing locks", router.db_for_write(row)
    if using not in connections.settings:
        aliases = ", ".join(sorted(connections.settings))
        raise ImproperlyConfigured(f"{source} is {shown(using)}, which is not in DATABASES: {aliases}.")
    return using


def get_backend(alias: str) -> BaseSemaphoreBackend:
    """Return the backend of a database alias.

    Inside ``TestCase``, and on an in-memory SQLite database, that is the process-local one: its locks are as
    private as the data they guard. Raises ``InvalidSemaphoreBackendError``.
    """
    path = config(alias).backend
    if path is None:
        connection = connections[alias]
        in_memory = connection.vendor == "sqlite" and connection.is_in_memory_db()  # type: ignore[attr-defined]
        real = APPLOCK if connection.vendor == "microsoft" else ROWS
        path = LOCAL if in_memory or testmode.in_testcase(alias) else real
    # Several threads may make it at once, and must all get the same one.
    return _backends.get((path, alias)) or _backends.setdefault((path, alias), _make(path, alias))


def get_counting_backend(alias: str) -> BaseSemaphoreBackend:
    """Return the backend that keeps the alias's counters: its own if it can, else rows."""
    backend = get_backend(alias)
    if backend.keeps_counters:
        return backend
    return _backends.get((ROWS, alias)) or _backends.setdefault((ROWS, alias), _make(ROWS, alias))


def _make(path: str, alias: str) -> BaseSemaphoreBackend:
    try:
        backend_class: Any = import_string(path)
    except (ImportError, TypeError, ValueError) as error:  # the latter two of a path with empty parts
        raise InvalidSemaphoreBackendError(f"Could not import the semaphore backend {path!r}: {error}") from error
    if not (isinstance(backend_class, type) and issubclass(backend_class, BaseSemaphoreBackend)):
        raise InvalidSemaphoreBackendError(
            f"The semaphore backend {path!r} must be a subclass of "
            f"django_sqlsem.backends.base.BaseSemaphoreBackend, not {shown(backend_class)}."
        )
    backend: BaseSemaphoreBackend = backend_class(alias)
    return backend


#: The locks that are kept while the process forks. Each is noted at once: a signal's exception does not stop a fork.
_frozen: list[Any] = []


def _before_fork() -> None:
    for backend in list(_backends.values()):
        backend.before_fork(_frozen)


def _after_fork_in_parent() -> None:
    while _frozen:
        _frozen.pop().release()


def _after_fork_in_child() -> None:
    _frozen.clear()
    for backend in _backends.values():
        backend.after_fork()
    _backends.clear()


forks.register(
    "backends",
    "a lock of theirs would stay locked for good, that a thread had which the fork left out",
    before=_before_fork,
    in_parent=_after_fork_in_parent,
    in_child=_after_fork_in_child,
)
