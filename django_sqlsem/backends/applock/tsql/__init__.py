"""The T-SQL of application locks."""

from __future__ import annotations
