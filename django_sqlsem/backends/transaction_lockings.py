"""Which database takes transaction locks in which way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from django.core.exceptions import ImproperlyConfigured

from django_sqlsem.backends.transaction_applock import ApplockLocking
from django_sqlsem.backends.transaction_base import TransactionLocking
from django_sqlsem.backends.transaction_mysql import MySQLLocking
from django_sqlsem.backends.transaction_postgresql import PostgreSQLLocking
from django_sqlsem.backends.transaction_sqlite import SQLiteLocking

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_LOCKINGS: Final[dict[str, type[TransactionLocking]]] = {
    "postgresql": PostgreSQLLocking,
    "sqlite": SQLiteLocking,
    "mysql": MySQLLocking,
    "microsoft": ApplockLocking,
}


def locking_for(connection: BaseDatabaseWrapper) -> TransactionLocking:
    """Return what takes locks in a connection's transaction. Raises ``ImproperlyConfigured`` for an unknown vendor."""
    if connection.vendor not in _LOCKINGS:
        raise ImproperlyConfigured(
            f"No transaction locks on {connection.vendor!r} databases; there are for {', '.join(_LOCKINGS)}."
        )
    return _LOCKINGS[connection.vendor](connection)
