"""Slots as rows, on any database."""

from __future__ import annotations

from django_sqlsem.backends.rows.backend import RowsBackend

__all__ = ["RowsBackend"]
