"""Slots as application locks of SQL Server (``sp_getapplock``)."""

from __future__ import annotations

import importlib

__all__ = ["ApplockBackend"]


def __getattr__(name: str) -> object:
    """Import the backend when it is asked for: it needs the models, which other modules of this package do not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.backend"), name)
    return value
