"""The verbs of ``manage.py locks``, a module each."""

from __future__ import annotations
