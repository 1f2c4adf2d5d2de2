"""The locks besides the semaphore and the mutex, each made of the same pieces."""

from __future__ import annotations

from django_sqlsem.fences import fenced
from django_sqlsem.monitor_permits import MonitorPermit
from django_sqlsem.monitors import Monitor, monitor
from django_sqlsem.permits import current_permit
from django_sqlsem.rwlocks import RwLock, rwlock
from django_sqlsem.several import PendingPermits, Permits, aacquire_all, acquire_all
from django_sqlsem.table_locks import table_lock
from django_sqlsem.tokens import TakenTokens, Tokens, tokens
from django_sqlsem.transaction_locks import (
    TransactionPermit,
    locked_atomic,
    purge_transaction_locks,
    transaction_lock,
)

__all__ = [
    "Monitor",
    "MonitorPermit",
    "PendingPermits",
    "Permits",
    "RwLock",
    "TakenTokens",
    "Tokens",
    "TransactionPermit",
    "aacquire_all",
    "acquire_all",
    "current_permit",
    "fenced",
    "locked_atomic",
    "monitor",
    "purge_transaction_locks",
    "rwlock",
    "table_lock",
    "tokens",
    "transaction_lock",
]
