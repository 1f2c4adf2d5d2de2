"""Who waits for whom: waits of those who hold something meanwhile, and the cycles among them."""

from __future__ import annotations
