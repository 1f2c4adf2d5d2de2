"""``locks doctor``: the checks, and live trials."""

from __future__ import annotations
