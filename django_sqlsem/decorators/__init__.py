"""A decorated call: a view, a task or a function under a lock."""

from __future__ import annotations
