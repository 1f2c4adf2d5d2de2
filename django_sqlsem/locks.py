"""The locks besides the semaphore and the mutex, each made of the same pieces."""

from __future__ import annotations

from django_sqlsem.table_locks import table_lock
from django_sqlsem.transaction_locks import (
    TransactionPermit,
    locked_atomic,
    purge_transaction_locks,
    transaction_lock,
)

__all__ = [
    "TransactionPermit",
    "locked_atomic",
    "purge_transaction_locks",
    "table_lock",
    "transaction_lock",
]
