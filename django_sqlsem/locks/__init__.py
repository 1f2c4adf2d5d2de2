"""The locks besides the semaphore and the mutex, each made of the same pieces."""

from __future__ import annotations

from django_sqlsem.locks.counter import Counter, Taken, counter
from django_sqlsem.locks.fences import fenced
from django_sqlsem.locks.permit import current_permit
from django_sqlsem.locks.rlock import Monitor, RLock, RLockPermit, monitor, rlock
from django_sqlsem.locks.rwlock import RwLock, rwlock
from django_sqlsem.locks.several import PendingPermits, Permits, aacquire_all, acquire_all
from django_sqlsem.locks.transaction.locks import (
    TransactionPermit,
    locked_atomic,
    purge_transaction_locks,
    table_lock,
    transaction_lock,
)

__all__ = [
    "Counter",
    "Monitor",
    "PendingPermits",
    "Permits",
    "RLock",
    "RLockPermit",
    "RwLock",
    "Taken",
    "TransactionPermit",
    "aacquire_all",
    "acquire_all",
    "counter",
    "current_permit",
    "fenced",
    "locked_atomic",
    "monitor",
    "purge_transaction_locks",
    "rlock",
    "rwlock",
    "table_lock",
    "transaction_lock",
]
