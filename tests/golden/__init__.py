"""What the library sends to databases, written down."""

from __future__ import annotations
