"""The locks besides the semaphore and the mutex, each made of the same pieces."""

from __future__ import annotations

from django_sqlsem.monitor_permits import MonitorPermit
from django_sqlsem.monitors import Monitor, monitor

__all__ = ["Monitor", "MonitorPermit", "monitor"]
