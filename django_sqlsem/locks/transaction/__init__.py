"""Locks that live and die with the caller's transaction, a module a database."""

from __future__ import annotations
