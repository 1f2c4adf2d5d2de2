"""Everything that touches a driver, a vendor or a connection."""

from __future__ import annotations
