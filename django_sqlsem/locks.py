"""The locks besides the semaphore and the mutex, each made of the same pieces."""

from __future__ import annotations

__all__: list[str] = []
