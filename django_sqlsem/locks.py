"""The locks besides the semaphore and the mutex, each made of the same pieces."""

from __future__ import annotations

from django_sqlsem.monitor_permits import MonitorPermit
from django_sqlsem.monitors import Monitor, monitor
from django_sqlsem.rwlocks import RwLock, rwlock
from django_sqlsem.several import PendingPermits, Permits, aacquire_all, acquire_all
from django_sqlsem.tokens import TakenTokens, Tokens, tokens

__all__ = [
    "Monitor",
    "MonitorPermit",
    "PendingPermits",
    "Permits",
    "RwLock",
    "TakenTokens",
    "Tokens",
    "aacquire_all",
    "acquire_all",
    "monitor",
    "rwlock",
    "tokens",
]
