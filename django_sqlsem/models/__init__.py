"""The lock tables. They hold state and its vocabulary; all locking logic is in the backends.

Instants are whole microseconds by the database's own clock (on SQLite, by the host's boot clock): exact,
without time zones, and the same on every database.
"""

from __future__ import annotations

from django_sqlsem.models.claims import ClaimRow
from django_sqlsem.models.fields import ExactCharField
from django_sqlsem.models.semaphores import HolderFields, SemaphoreRow, ServerRow, SlotRow, WaiterRow

__all__ = ["ClaimRow", "ExactCharField", "HolderFields", "SemaphoreRow", "ServerRow", "SlotRow", "WaiterRow"]
