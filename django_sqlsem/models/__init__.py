"""The lock tables. They hold state and its vocabulary; all locking logic is in the backends.

Instants are whole microseconds by the database's own clock (on SQLite, by the host's boot clock): exact,
without time zones, and the same on every database.
"""

from __future__ import annotations

from django_sqlsem.models.claims import ClaimRow
from django_sqlsem.models.fences import FenceRow
from django_sqlsem.models.fields import ExactCharField
from django_sqlsem.models.history import EventRow, MinuteRow
from django_sqlsem.models.refresh import RefreshRow
from django_sqlsem.models.semaphores import (
    HolderFields,
    SemaphoreRow,
    ServerRow,
    SlotRow,
    WaiterRow,
)
from django_sqlsem.models.transaction_locks import TransactionLockRow
from django_sqlsem.models.waits import WaitRow

__all__ = [
    "ClaimRow",
    "EventRow",
    "ExactCharField",
    "FenceRow",
    "HolderFields",
    "MinuteRow",
    "RefreshRow",
    "SemaphoreRow",
    "ServerRow",
    "SlotRow",
    "TransactionLockRow",
    "WaitRow",
    "WaiterRow",
]
