"""The locks besides the semaphore and the mutex, each made of the same pieces."""

from __future__ import annotations

from django_sqlsem.rwlocks import RwLock, rwlock

__all__ = ["RwLock", "rwlock"]
