"""The locks besides the semaphore and the mutex, each made of the same pieces."""

from __future__ import annotations

from django_sqlsem.fences import fenced

__all__ = ["fenced"]
